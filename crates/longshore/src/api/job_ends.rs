//! Calls that wait for the end of a job. The ends that this server stores are known at once. One task looks for the
//! others: it reads the states of all awaited jobs in one statement, as long as there are any.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::{Server, Shared};
use crate::job::JobId;

/// The pause between two looks; longer if a look takes long.
const INTERVAL: Duration = Duration::from_millis(25);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// The pause is at least this many times as long as the look took.
const MIN_PAUSE_FACTOR: u32 = 10;

/// The jobs whose ends calls of this server wait for.
#[derive(Default)]
pub(super) struct JobEnds(Mutex<Awaited>);

#[derive(Default)]
struct Awaited {
    jobs: HashMap<JobId, Arc<watch::Sender<bool>>>,
    /// Whether the task is running.
    is_looking: bool,
}

/// A call that waits for the end of a job.
pub(super) struct EndListener {
    server: Server,
    id: JobId,
    /// Shared by all calls that wait for the same end.
    has_ended: Arc<watch::Sender<bool>>,
}

impl EndListener {
    /// Waits until the job has ended or no longer exists.
    pub(super) async fn ended(&self) {
        // Cannot fail: this holds the sender.
        let _ = self.has_ended.subscribe().wait_for(|has_ended| *has_ended).await;
    }
}

impl Drop for EndListener {
    fn drop(&mut self) {
        let mut awaited = self.server.job_ends.lock();
        // The list and this call hold it, and no other call does.
        let is_last = |entry: &&Arc<watch::Sender<bool>>| {
            Arc::ptr_eq(entry, &self.has_ended) && Arc::strong_count(entry) == 2
        };
        if awaited.jobs.get(&self.id).filter(is_last).is_some() {
            awaited.jobs.remove(&self.id);
        }
    }
}

impl JobEnds {
    fn lock(&self) -> MutexGuard<'_, Awaited> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the calls that wait for the end of this job. Later calls wait for the next end: the job may be retried.
    pub(super) fn notify(&self, id: JobId) {
        if let Some(has_ended) = self.lock().jobs.remove(&id) {
            has_ended.send_replace(true);
        }
    }
}

impl Server {
    /// Adds a call that waits for the end of a job. An end before this is not noticed at once.
    pub(super) fn listen_for_end(&self, id: JobId) -> EndListener {
        let mut awaited = self.job_ends.lock();
        let has_ended = awaited.jobs.entry(id).or_default().clone();
        if !std::mem::replace(&mut awaited.is_looking, true) {
            tokio::spawn(look(Arc::downgrade(&self.0)));
        }
        EndListener { server: self.clone(), id, has_ended }
    }
}

/// Looks for ends until no call waits for one.
async fn look(server: Weak<Shared>) {
    loop {
        let took = {
            let Some(server) = server.upgrade().map(Server) else { return };
            let ids: Vec<JobId> = {
                let mut awaited = server.job_ends.lock();
                if awaited.jobs.is_empty() {
                    awaited.is_looking = false;
                    return;
                }
                awaited.jobs.keys().copied().collect()
            };
            let started = Instant::now();
            match server.client.glance(0, &ids).await {
                Ok(found) => {
                    let open: HashMap<JobId, bool> =
                        found.iter().map(|job| (job.id, !job.status.has_ended())).collect();
                    // A job that no longer exists has ended too.
                    let ended = ids.iter().filter(|id| !open.get(id).copied().unwrap_or(false));
                    ended.for_each(|id| server.job_ends.notify(*id));
                }
                Err(error) => tracing::warn!(%error, "cannot read the states of awaited jobs; trying again"),
            }
            started.elapsed()
        };
        tokio::time::sleep((took * MIN_PAUSE_FACTOR).clamp(INTERVAL, MAX_INTERVAL)).await;
    }
}
