//! The attempts of workers that call this server. They have the same metrics as those of Rust
//! workers. The server counts an attempt when it stores how the attempt ended: as started and
//! completed at once, because nothing would ever complete the attempt of a worker that died.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::{counter, histogram};

use crate::client::Client;
use crate::client::job_metrics::{COMPLETED, DURATION, STARTED, outcome_label, register_kind};
use crate::client::settle::{Kept, held_for};
use crate::store::{Claimed, KindFilter, Schemas};

/// Counts the stored end of an attempt of a worker that calls the API.
pub(super) fn count_http_attempt(claimed: &Claimed, kept: Kept) {
    let (kind, outcome) = (claimed.kind(), outcome_label(kept));
    counter!(STARTED, "kind" => kind.to_owned()).increment(1);
    counter!(COMPLETED, "kind" => kind.to_owned(), "outcome" => outcome).increment(1);
    histogram!(DURATION, "kind" => kind.to_owned(), "outcome" => outcome).record(held_for(claimed));
}

/// The kinds whose counters a server has created.
#[derive(Debug, Default)]
pub(super) struct KnownKinds(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    names: HashSet<String>,
    read_at: Option<Instant>,
}

/// The maximum number of kinds whose counters are created in advance. HTTP workers may name any
/// kinds.
const MAX_KINDS: usize = 1000;
/// How often the kinds are read from the database, and for how long to wait for them.
const READ_INTERVAL: Duration = Duration::from_secs(5);
const READ_TIMEOUT: Duration = Duration::from_secs(1);

impl KnownKinds {
    /// Creates the counters of a kind, once.
    pub(super) fn register(&self, kind: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.names.len() < MAX_KINDS && !known.names.contains(kind) {
            known.names.insert(kind.to_owned());
            register_kind(kind);
        }
    }

    /// Creates the counters of all kinds that are registered in the database. Skips this if it
    /// happened recently or the database does not reply; a later call tries again.
    pub(super) async fn read(&self, client: &Client) {
        if !self.start_reading() {
            return;
        }
        let filter =
            KindFilter { limit: Some(MAX_KINDS as u32), schemas: Schemas::Omit, ..KindFilter::default() };
        if let Ok(Ok(kinds)) = tokio::time::timeout(READ_TIMEOUT, client.kinds_page(&filter)).await {
            kinds.iter().for_each(|kind| self.register(&kind.name));
        }
    }

    /// Whether it is time to read the kinds.
    fn start_reading(&self) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = known.read_at.is_none_or(|at| at.elapsed() >= READ_INTERVAL);
        if is_due {
            known.read_at = Some(Instant::now());
        }
        is_due
    }
}
