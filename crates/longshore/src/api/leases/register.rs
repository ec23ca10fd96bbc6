//! Registers HTTP workers and the kinds that they handle.

use std::time::Duration;

use super::announced::Announced;
use super::*;
use crate::api::extract::duration;
use crate::api::refusals;
use crate::rules::enqueue::{check_name, check_text};
use crate::store::{KindQueues, NewKind, NewWorker, TOO_MANY_KINDS};

/// The default and the range of `stale_after_seconds`.
const STALE_AFTER: Duration = Duration::from_secs(60);
const MIN_STALE_AFTER: Duration = Duration::from_secs(3);
const MAX_STALE_AFTER: Duration = Duration::from_secs(3600);
/// The maximum length of the name of a host, and of a version.
const MAX_HOST: usize = 255;

/// What a worker registers with.
pub(super) struct NewRegistration<'a> {
    pub(super) name: Option<&'a str>,
    pub(super) queues: &'a [String],
    pub(super) kinds: Option<&'a [String]>,
    pub(super) announced: Announced,
    pub(super) concurrency: u32,
    pub(super) stale_after: Duration,
    pub(super) host: Option<&'a str>,
    pub(super) pid: Option<u32>,
    pub(super) version: Option<&'a str>,
}

impl NewRegistration<'_> {
    /// Adds a worker, or updates the queues and kinds of one that is alive. Its kinds apply to jobs of `queues`.
    pub(super) async fn store(
        self,
        server: &Server,
        id: WorkerId,
        queues: &KindQueues,
    ) -> ApiResult<WorkerId> {
        let name = self.name.unwrap_or("http");
        check_name("name", name)?;
        for (field, text) in [("host", self.host), ("version", self.version)] {
            text.map_or(Ok(()), |text| check_text(field, text, MAX_HOST))?;
        }
        let worker = NewWorker {
            id,
            queues: self.queues.to_vec(),
            kinds: self.kinds.map(<[String]>::to_vec),
            concurrency: self.concurrency,
            stale_after: self.stale_after,
            host: self.host.map(str::to_owned),
            pid: self.pid,
            version: self.version.map(str::to_owned),
            ..NewWorker::new(name)
        };
        let mut kinds: Vec<NewKind> = self.kinds.unwrap_or_default().iter().map(NewKind::new).collect();
        kinds.extend(self.announced.kinds);
        store_kinds(server, &kinds, queues).await?;
        server.client.register(&worker).await?;
        Ok(id)
    }
}

/// Stores the kinds of a worker. If there would be too many, the worker works without them: others must not be able to stop it.
pub(super) async fn store_kinds(server: &Server, kinds: &[NewKind], queues: &KindQueues) -> ApiResult<()> {
    if !kinds.is_empty() {
        match server.client.store_kinds(kinds, queues).await {
            Err(error) if error.field() == Some(TOO_MANY_KINDS) => {
                refusals::report_kinds(&error);
                return Ok(());
            }
            stored => stored?,
        }
        kinds.iter().for_each(|kind| server.kinds.register(&kind.name));
    }
    Ok(())
}

/// The jobs that the kinds of a caller apply to: those of the queues that its token is limited to. So a new token for
/// the same queues changes nothing.
pub(super) fn kind_queues(caller: &Caller) -> KindQueues {
    caller.queues().map_or(KindQueues::All, |queues| {
        let mut queues = queues.to_vec();
        queues.sort_unstable();
        queues.dedup();
        KindQueues::Only(queues)
    })
}

/// The `stale_after` of a new worker.
pub(super) fn stale_after(seconds: Option<f64>) -> ApiResult<Duration> {
    let Some(seconds) = seconds else { return Ok(STALE_AFTER) };
    let requested = duration("stale_after_seconds", seconds)?;
    if (MIN_STALE_AFTER..=MAX_STALE_AFTER).contains(&requested) {
        Ok(requested)
    } else {
        Err(Problem::validation(format!(
            "stale_after_seconds: {seconds} is out of range; use {} to {}",
            MIN_STALE_AFTER.as_secs(),
            MAX_STALE_AFTER.as_secs()
        )))
    }
}

/// The `stale_after` that a worker registered with, for a worker that this server has
/// no session of.
pub(super) async fn registered_stale_after(server: &Server, worker: WorkerId) -> ApiResult<Duration> {
    let found = server.client.registration(worker).await?;
    found.map(|found| found.stale_after).ok_or_else(|| dead_worker(server, worker))
}
