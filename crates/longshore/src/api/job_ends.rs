//! Calls that wait for the end of a job. The ends that this server stores are known at once. One task looks for the
//! others: it reads the states of all awaited jobs in one statement, as long as there are any.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::{Server, Shared};
use crate::job::JobId;

/// The pause between two looks; longer if a look takes long or fails.
const INTERVAL: Duration = Duration::from_millis(25);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// The pause is at least this many times as long as the look took.
const MIN_PAUSE_FACTOR: u32 = 10;

/// The jobs whose ends calls of this server wait for.
#[derive(Clone, Default)]
pub(super) struct JobEnds(Arc<Mutex<Awaited>>);

#[derive(Default)]
struct Awaited {
    jobs: HashMap<JobId, AwaitedEnd>,
    /// Whether the task is running.
    is_looking: bool,
}

#[derive(Default)]
struct AwaitedEnd {
    /// How many calls wait for it.
    calls: usize,
    has_ended: Arc<watch::Sender<bool>>,
}

/// A call that waits for the end of a job.
pub(super) struct EndListener {
    ends: JobEnds,
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
        let mut awaited = self.ends.lock();
        // After the end, other calls may wait for the next one.
        let own = awaited.jobs.get_mut(&self.id).filter(|end| Arc::ptr_eq(&end.has_ended, &self.has_ended));
        let Some(end) = own else { return };
        end.calls -= 1;
        if end.calls == 0 {
            awaited.jobs.remove(&self.id);
        }
    }
}

impl JobEnds {
    fn lock(&self) -> MutexGuard<'_, Awaited> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call that waits for the end of a job.
    fn listen(&self, id: JobId) -> EndListener {
        let mut awaited = self.lock();
        let end = awaited.jobs.entry(id).or_default();
        end.calls += 1;
        EndListener { ends: self.clone(), id, has_ended: end.has_ended.clone() }
    }

    /// Wakes the calls that wait for the end of this job. Later calls wait for the next end: the job may be retried.
    pub(super) fn notify(&self, id: JobId) {
        if let Some(end) = self.lock().jobs.remove(&id) {
            end.has_ended.send_replace(true);
        }
    }
}

impl Server {
    /// Adds a call that waits for the end of a job. An end before this is not noticed at once.
    pub(super) fn listen_for_end(&self, id: JobId) -> EndListener {
        let listener = self.job_ends.listen(id);
        if !std::mem::replace(&mut self.job_ends.lock().is_looking, true) {
            tokio::spawn(look(Arc::downgrade(&self.0)));
        }
        listener
    }
}

/// Looks for ends until no call waits for one.
async fn look(server: Weak<Shared>) {
    loop {
        let pause = {
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
                    (started.elapsed() * MIN_PAUSE_FACTOR).clamp(INTERVAL, MAX_INTERVAL)
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot read the states of awaited jobs; trying again");
                    MAX_INTERVAL
                }
            }
        };
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// Otherwise the task would look for the end of the job until the job ends.
    #[test]
    fn calls_that_end_at_the_same_time_leave_nothing_behind() {
        let ends = JobEnds::default();
        let id = JobId::new();
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let listener = ends.listen(id);
                        barrier.wait();
                        drop(listener);
                        barrier.wait();
                        assert!(ends.lock().jobs.is_empty());
                        barrier.wait();
                    }
                });
            }
        });
    }

    #[tokio::test]
    async fn an_end_wakes_the_calls_before_it_and_not_those_after() {
        let ends = JobEnds::default();
        let id = JobId::new();
        let (first, second) = (ends.listen(id), ends.listen(id));
        ends.notify(id);
        let later = ends.listen(id);
        first.ended().await;
        second.ended().await;
        drop((first, second));
        assert!(!*later.has_ended.borrow());
        assert_eq!(ends.lock().jobs.len(), 1);
        drop(later);
        assert!(ends.lock().jobs.is_empty());
    }
}
