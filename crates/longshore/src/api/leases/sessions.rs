//! What this server keeps in memory about HTTP workers. It only makes calls faster:
//! any other server can handle the next call without it. The exception is the end of a wait by a later
//! call of the same worker, which needs both calls to reach the same server.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::MAX_ITEMS;
use crate::job::WorkerId;
use crate::store::{ClaimCursor, Claimed, Lease, LiveLease};

/// The session of a worker that has not called for this long is dropped.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// The maximum number of sessions. Beyond it, the one whose worker has not called for the
/// longest time is dropped.
const MAX_SESSIONS: usize = if cfg!(test) { 100 } else { 10_000 };
/// How often idle sessions are looked for.
const PRUNE_INTERVAL: Duration = Duration::from_secs(10);

/// The sessions of the workers that call this server.
#[derive(Default)]
pub(in crate::api) struct Sessions(Mutex<AllSessions>);

#[derive(Default)]
struct AllSessions {
    by_worker: HashMap<WorkerId, Entry>,
    pruned_at: Option<Instant>,
}

/// When a worker last called, and its session.
type Entry = (Instant, Arc<Session>);

/// What is remembered of one worker.
#[derive(Default)]
pub(super) struct Session {
    /// A worker has one claim at a time.
    pub(super) claims: tokio::sync::Mutex<ClaimState>,
    claiming_calls: watch::Sender<ClaimingCalls>,
    /// Whether the worker has signed off or was declared dead.
    ended: watch::Sender<bool>,
    facts: Mutex<Facts>,
}

/// The calls that claim.
#[derive(Clone, Copy, Default)]
struct ClaimingCalls {
    /// The number of the newest.
    newest: u64,
    /// The number of the newest that does not wait for work.
    newest_without_wait: u64,
    /// How many wait for their turn.
    queued: usize,
    /// How many of those do not wait for work.
    queued_without_wait: usize,
}

/// Whether a call that claims waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    No,
    ForWork,
}

/// Where the claims of a worker stand.
#[derive(Default)]
pub(super) struct ClaimState {
    /// Where the last claim stopped. Without it, every call would read past all due jobs
    /// that the worker does not handle.
    pub(super) cursor: ClaimCursor,
    /// The queues and kinds of the last claim.
    pub(super) filter: (Vec<String>, Option<Vec<String>>),
    pub(super) batch: BatchSize,
}

/// How many jobs one statement claims for a worker. Fewer after jobs that were too large for one response, because the
/// rest was claimed in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchSize(u32);

impl BatchSize {
    /// Limits the payloads that a claim reads into memory.
    const MAX: u32 = 250;

    /// The number of jobs to claim of those that are still wanted.
    pub(super) fn of(self, wanted: u32) -> u32 {
        self.0.min(wanted)
    }

    /// The last batch fitted into a response.
    pub(super) fn grow(&mut self) {
        self.0 = (self.0 * 2).min(BatchSize::MAX);
    }

    /// Only this many jobs fitted into a response.
    pub(super) fn shrink_to(&mut self, jobs: usize) {
        self.0 = u32::try_from(jobs).unwrap_or(u32::MAX).clamp(1, BatchSize::MAX);
    }
}

impl Default for BatchSize {
    fn default() -> Self {
        BatchSize(BatchSize::MAX)
    }
}

#[derive(Default)]
struct Facts {
    /// The value the worker registered with.
    stale_after: Option<Duration>,
    /// The claims behind leases that this server granted, for settles. See [`Session::grant`].
    granted: HashMap<Lease, Arc<Claimed>>,
    /// The cancels and losses in the last response. They do not end the wait of the next call.
    reported: HashSet<Lease>,
}

/// A call that claims. It waits only until the worker makes another one. If that one waits too, this one has a minimum
/// time: a worker with several waiting calls, as version 1.0 allowed, would otherwise make calls without a pause.
///
/// Calls need not get their turns in the order of their numbers. So a call that waits for its turn ends the wait of the
/// one that has it, whichever is newer.
pub(super) struct ClaimingCall {
    number: u64,
    wait: Wait,
    is_queued: bool,
    all: watch::Sender<ClaimingCalls>,
}

impl ClaimingCall {
    /// Records that it no longer waits for its turn.
    pub(super) fn leave_queue(&mut self) {
        if std::mem::take(&mut self.is_queued) {
            self.all.send_modify(|all| {
                all.queued -= 1;
                all.queued_without_wait -= usize::from(self.wait == Wait::No);
            });
        }
    }

    /// Whether the worker has made another call that claims. `minimum` is when the minimum time is over.
    pub(super) fn is_superseded(&self, minimum: tokio::time::Instant) -> bool {
        let all = *self.all.borrow();
        let is_over = tokio::time::Instant::now() >= minimum;
        self.is_superseded_at_once(&all) || (is_over && (all.newest > self.number || all.queued > 0))
    }

    fn is_superseded_at_once(&self, all: &ClaimingCalls) -> bool {
        all.newest_without_wait > self.number || all.queued_without_wait > 0
    }

    /// Waits for another call that claims. `minimum` is when the minimum time is over.
    pub(super) async fn superseded(&mut self, minimum: tokio::time::Instant) {
        let (mut all, mut all_later) = (self.all.subscribe(), self.all.subscribe());
        // `self` has a sender, so the channel is open.
        tokio::select! {
            _ = all.wait_for(|all| self.is_superseded_at_once(all)) => {}
            _ = async {
                tokio::time::sleep_until(minimum).await;
                all_later.wait_for(|all| all.newest > self.number || all.queued > 0).await.map(drop)
            } => {}
        }
    }
}

impl Drop for ClaimingCall {
    fn drop(&mut self) {
        self.leave_queue();
    }
}

impl Session {
    /// Numbers a call that claims, and ends the wait of earlier ones. It waits for its turn from now on.
    pub(super) fn begin_claiming_call(&self, wait: Wait) -> ClaimingCall {
        let mut number = 0;
        self.claiming_calls.send_modify(|all| {
            all.newest += 1;
            all.queued += 1;
            number = all.newest;
            if wait == Wait::No {
                all.newest_without_wait = number;
                all.queued_without_wait += 1;
            }
        });
        ClaimingCall { number, wait, is_queued: true, all: self.claiming_calls.clone() }
    }

    /// Ends the waits of the worker's calls.
    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Waits until the worker has signed off or was declared dead.
    pub(super) async fn ended(&self) {
        if self.ended.subscribe().wait_for(|ended| *ended).await.is_err() {
            // Cannot happen: the session owns the sender.
            std::future::pending::<()>().await;
        }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stale_after(&self) -> Option<Duration> {
        self.facts().stale_after
    }

    pub(super) fn set_stale_after(&self, stale_after: Duration) {
        self.facts().stale_after = Some(stale_after);
    }

    /// Keeps what a settle needs of jobs that a response contains. Only of first attempts that were never
    /// interrupted: a step that another server stores resets the counters of the others, and this server would
    /// not learn about it.
    pub(super) fn grant(&self, jobs: impl Iterator<Item = Arc<Claimed>>) {
        let mut facts = self.facts();
        let room = MAX_ITEMS.saturating_sub(facts.granted.len());
        let has_fixed_counters = |job: &Arc<Claimed>| job.attempt() == 1 && job.interruptions() == 0;
        facts.granted.extend(jobs.filter(has_fixed_counters).take(room).map(|job| (job.lease(), job)));
    }

    /// The claim behind a lease, if this server keeps it.
    pub(super) fn granted(&self, lease: &Lease) -> Option<Arc<Claimed>> {
        self.facts().granted.get(lease).cloned()
    }

    /// Drops what is kept of leases that have ended.
    pub(super) fn forget<'a>(&self, leases: impl Iterator<Item = &'a Lease>) {
        let mut facts = self.facts();
        for lease in leases {
            facts.granted.remove(lease);
        }
    }

    /// Drops what is kept of leases that are not live.
    pub(super) fn keep_live(&self, live: &[LiveLease]) {
        let mut facts = self.facts();
        if facts.granted.len() > live.len() {
            let live: HashSet<Lease> = live.iter().map(|live| live.lease).collect();
            facts.granted.retain(|lease, _| live.contains(lease));
        }
    }

    /// Whether one of these leases was not in the last response. Each cancel and each loss ends one
    /// call only: a worker that stops its job slowly can wait for other jobs meanwhile.
    pub(super) fn has_unreported<'a>(&self, mut leases: impl Iterator<Item = &'a Lease>) -> bool {
        let facts = self.facts();
        leases.any(|lease| !facts.reported.contains(lease))
    }

    pub(super) fn set_reported<'a>(&self, leases: impl Iterator<Item = &'a Lease>) {
        self.facts().reported = leases.copied().collect();
    }
}

impl Sessions {
    /// The session of a worker, created on its first call.
    pub(super) fn of(&self, worker: WorkerId) -> Arc<Session> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = &mut *all;
        if all.pruned_at.is_none_or(|at| at.elapsed() >= PRUNE_INTERVAL) {
            all.pruned_at = Some(Instant::now());
            all.by_worker.retain(|_, (called, _)| called.elapsed() < IDLE_TIMEOUT);
        }
        let sessions = &mut all.by_worker;
        if sessions.len() >= MAX_SESSIONS && !sessions.contains_key(&worker) {
            let oldest = sessions.iter().min_by_key(|(_, (called, _))| *called).map(|(worker, _)| *worker);
            oldest.map(|oldest| sessions.remove(&oldest));
        }
        let (called, session) = sessions.entry(worker).or_insert_with(|| (Instant::now(), Arc::default()));
        *called = Instant::now();
        session.clone()
    }

    /// The session of a worker that has called before.
    pub(super) fn find(&self, worker: WorkerId) -> Option<Arc<Session>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.by_worker.get(&worker).map(|(_, session)| session.clone())
    }

    /// Drops the session of a worker that has signed off or was declared dead, and ends the waits of its calls.
    pub(super) fn remove(&self, worker: WorkerId) {
        let removed = self.0.lock().unwrap_or_else(PoisonError::into_inner).by_worker.remove(&worker);
        if let Some((_, session)) = removed {
            session.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sessions_is_limited() {
        let sessions = Sessions::default();
        let first = WorkerId::new();
        let kept = sessions.of(first);
        for _ in 0..MAX_SESSIONS {
            sessions.of(WorkerId::new());
        }
        assert_eq!(sessions.0.lock().map(|all| all.by_worker.len()).ok(), Some(MAX_SESSIONS));
        assert!(!Arc::ptr_eq(&kept, &sessions.of(first)), "the session of the first worker was dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_claiming_call_is_superseded_by_the_next_one() {
        let session = Session::default();
        let begin = |wait| {
            let mut call = session.begin_claiming_call(wait);
            call.leave_queue();
            call
        };
        let minimum = tokio::time::Instant::now() + Duration::from_secs(1);
        let mut first = begin(Wait::ForWork);
        assert!(!first.is_superseded(minimum));
        // A call that waits too ends it after the minimum time.
        let mut second = begin(Wait::ForWork);
        first.superseded(minimum).await;
        assert_eq!(tokio::time::Instant::now(), minimum);
        assert_eq!((first.is_superseded(minimum), second.is_superseded(minimum)), (true, false));
        // A call that does not wait ends it at once.
        begin(Wait::No);
        let never = minimum + Duration::from_secs(3600);
        assert!(second.is_superseded(never));
        second.superseded(never).await;
        assert_eq!(tokio::time::Instant::now(), minimum);
    }

    /// Otherwise the earlier one would get its turn when the wait of the later one is over.
    #[tokio::test(start_paused = true)]
    async fn a_claiming_call_is_superseded_by_an_earlier_one_that_waits_for_its_turn() {
        let session = Session::default();
        let now = tokio::time::Instant::now();
        for (wait, minimum, ends) in [
            (Wait::ForWork, now + Duration::from_secs(1), now + Duration::from_secs(1)),
            (Wait::No, now + Duration::from_secs(3600), now + Duration::from_secs(1)),
        ] {
            let earlier = session.begin_claiming_call(wait);
            let mut later = session.begin_claiming_call(Wait::ForWork);
            later.leave_queue();
            later.superseded(minimum).await;
            assert_eq!(tokio::time::Instant::now(), ends);
            assert!(later.is_superseded(minimum));
            // Its caller has gone.
            drop(earlier);
            assert!(!later.is_superseded(minimum));
        }
        assert_eq!(session.claiming_calls.borrow().queued, 0);
    }

    #[test]
    fn a_batch_shrinks_to_what_fitted_and_grows_again() {
        let mut batch = BatchSize::default();
        assert_eq!((batch.of(10), batch.of(1000)), (10, 250));
        batch.shrink_to(0);
        assert_eq!(batch.of(1000), 1);
        batch.shrink_to(100);
        batch.grow();
        assert_eq!(batch.of(1000), 200);
        batch.grow();
        assert_eq!(batch.of(1000), 250);
    }
}
