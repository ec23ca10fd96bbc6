//! State that the tasks of one worker share: the leases it holds, the jobs that wait for a
//! free slot, its current id, its contact with the database, and its phase.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc, watch};

use super::Settings;
use super::context::{Attempt, StopReason};
use super::hooks::Hooks;
use super::journal::StepLane;
use super::metrics::Metrics;
use super::progress::ProgressLane;
use super::registry::Registry;
use super::run_times::Slots;
use super::settle::AttemptReport;
use crate::client::Client;
use crate::job::WorkerId;
use crate::store::Lease;

pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) settings: Settings,
    pub(super) registry: Registry,
    pub(super) hooks: Option<Arc<dyn Hooks>>,
    pub(super) metrics: Metrics,
    pub(super) progress: ProgressLane,
    pub(super) steps: StepLane,
    pub(super) reports: mpsc::UnboundedSender<AttemptReport>,
    pub(super) held: HeldLeases,
    pub(super) buffer: Buffer,
    pub(super) slots: Slots,
    pub(super) contact: Contact,
    pub(super) hook_calls: HookCalls,
    /// Notified when an operation waits for a process that executes it.
    pub(super) operations_wait: Notify,
    pub(super) phase: watch::Sender<Phase>,
    worker_id: Mutex<WorkerId>,
}

/// How far a worker's shutdown has progressed. Phases only advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Working,
    /// Claims until no job is due, then finishes.
    Draining,
    /// Claims nothing more; running jobs may finish.
    Finishing,
    /// Everything that can be settled is settled; the remaining tasks end.
    Ended,
}

impl Shared {
    pub(super) fn new(
        client: Client,
        settings: Settings,
        registry: Registry,
        hooks: Option<Arc<dyn Hooks>>,
        reports: mpsc::UnboundedSender<AttemptReport>,
        worker_id: WorkerId,
        phase: Phase,
    ) -> Arc<Self> {
        Arc::new(Shared {
            steps: StepLane::start(client.clone()),
            client,
            settings,
            registry,
            hooks,
            metrics: Metrics::default(),
            progress: ProgressLane::default(),
            reports,
            held: HeldLeases::default(),
            buffer: Buffer::default(),
            slots: Slots::new(),
            contact: Contact::new(),
            hook_calls: HookCalls::default(),
            operations_wait: Notify::new(),
            phase: watch::Sender::new(phase),
            worker_id: Mutex::new(worker_id),
        })
    }

    /// The worker's current id; a new one after the old one was declared dead.
    pub(super) fn worker_id(&self) -> WorkerId {
        *lock(&self.worker_id)
    }

    pub(super) fn set_worker_id(&self, worker_id: WorkerId) {
        *lock(&self.worker_id) = worker_id;
    }

    pub(super) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits until the worker is in this phase or a later one.
    pub(super) async fn reached(&self, phase: Phase) {
        let mut changes = self.phase.subscribe();
        // Fails only when the sender is gone, and `self` holds it.
        let _ = changes.wait_for(|now| *now >= phase).await;
    }

    /// Sleeps unless the worker reaches `phase` first; returns true if it slept to the end.
    pub(super) async fn sleep_unless(&self, phase: Phase, time: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = self.reached(phase) => false,
        }
    }
}

/// Moves the worker to [`Phase::Ended`] when its supervisor ends for any reason, so that the
/// heartbeat thread ends too. A heartbeat without a supervisor would keep leases whose jobs no
/// longer run.
pub(super) struct EndGuard(pub(super) Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.phase.send_replace(Phase::Ended);
    }
}

/// Counts the hook calls in flight that report stored results.
#[derive(Default)]
pub(super) struct HookCalls {
    in_flight: AtomicUsize,
    ended: Notify,
}

impl HookCalls {
    pub(super) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.ended.notify_waiters();
    }

    /// Waits until no call is in flight.
    pub(super) async fn all_done(&self) {
        loop {
            let ended = self.ended.notified();
            if self.in_flight.load(Ordering::Acquire) == 0 {
                return;
            }
            ended.await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- leases ---------------------------------------------------------------

/// The leases this process holds, from the claim's reply to the settlement's reply.
#[derive(Default)]
pub(super) struct HeldLeases {
    attempts: Mutex<HashMap<Lease, Arc<Attempt>>>,
    suspects: AtomicUsize,
    /// Notified whenever leases have been settled.
    pub(super) settled: Notify,
    /// Notified when the worker should check for cancelled jobs.
    pub(super) cancel_check: Notify,
    /// Whether a cancel may concern a lease that is not here yet, because its claim is in
    /// flight: check again after the next insert. Changed only under the lock of `attempts`.
    check_after_insert: AtomicBool,
}

impl HeldLeases {
    pub(super) fn insert(&self, attempts: &[Arc<Attempt>]) {
        let mut held = lock(&self.attempts);
        for attempt in attempts {
            if attempt.claimed.interruptions() > 0 {
                self.suspects.fetch_add(1, Ordering::Relaxed);
            }
            held.insert(attempt.claimed.lease(), attempt.clone());
        }
        if self.check_after_insert.swap(false, Ordering::Relaxed) {
            self.cancel_check.notify_one();
        }
    }

    /// Requests a check for cancelled jobs. Without a lease, the check waits for the next
    /// claim: an idle worker makes no query.
    pub(super) fn request_cancel_check(&self) {
        let held = lock(&self.attempts);
        if held.is_empty() {
            self.check_after_insert.store(true, Ordering::Relaxed);
        } else {
            self.cancel_check.notify_one();
        }
    }

    /// Stops the attempts of these leases.
    pub(super) fn cancel(&self, leases: &[Lease]) {
        let held = lock(&self.attempts);
        for lease in leases {
            match held.get(lease) {
                Some(attempt) => attempt.control.stop(StopReason::Cancelled),
                None => self.check_after_insert.store(true, Ordering::Relaxed),
            }
        }
    }

    pub(super) fn remove<'a>(&self, attempts: impl Iterator<Item = &'a Arc<Attempt>>) {
        let mut held = lock(&self.attempts);
        for attempt in attempts {
            if held.remove(&attempt.claimed.lease()).is_some() && attempt.claimed.interruptions() > 0 {
                self.suspects.fetch_sub(1, Ordering::Relaxed);
            }
        }
        drop(held);
        self.settled.notify_waiters();
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.attempts).len()
    }

    pub(super) fn has_suspect(&self) -> bool {
        self.suspects.load(Ordering::Relaxed) > 0
    }

    pub(super) fn get(&self, lease: &Lease) -> Option<Arc<Attempt>> {
        lock(&self.attempts).get(lease).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Attempt>> {
        lock(&self.attempts).values().cloned().collect()
    }

    pub(super) fn leases(&self, worker_id: WorkerId) -> Vec<Lease> {
        lock(&self.attempts).keys().filter(|lease| lease.worker == worker_id).copied().collect()
    }

    /// How many of the leases are for jobs of this queue.
    pub(super) fn count_in_queue(&self, queue: &str) -> usize {
        lock(&self.attempts).values().filter(|attempt| attempt.claimed.queue() == queue).count()
    }
}

// ---- jobs that wait for a slot ---------------------------------------------

/// Claimed jobs that wait for a runner, in the order in which they should start: by priority, then
/// in the order of their claims. Each claim is ordered by due time. The order across claims is not:
/// jobs of a backlog that are claimed later would otherwise always start before a newer job of
/// another queue.
#[derive(Default)]
pub(super) struct Buffer {
    waiting: Mutex<WaitingJobs>,
    arrived: Notify,
    /// Notified when at most `low_water` jobs are left.
    pub(super) demand: Notify,
    low_water: AtomicUsize,
    busy: AtomicUsize,
    done: AtomicU64,
    closed: AtomicBool,
}

#[derive(Default)]
struct WaitingJobs {
    jobs: VecDeque<Arc<Attempt>>,
    /// No waiting job was received before this time. Meaningless while no job waits.
    oldest: Option<Instant>,
    /// Runners that found the buffer empty and wait. Counted under the same lock as the jobs:
    /// a runner that takes a job must see every runner that will not check again by itself.
    idle: usize,
}

impl Buffer {
    /// Adds the jobs of a claim, which are in order.
    pub(super) fn push(&self, attempts: Vec<Arc<Attempt>>) {
        let mut waiting = lock(&self.waiting);
        let Some(first) = attempts.first() else { return };
        if waiting.jobs.is_empty() {
            waiting.oldest = Some(first.received_at);
        }
        let in_order = waiting.jobs.back().is_none_or(|last| start_order(last) <= start_order(first));
        waiting.jobs.extend(attempts);
        if !in_order {
            // Stable. Merges two sorted runs, so this takes linear time.
            waiting.jobs.make_contiguous().sort_by_key(start_order);
        }
        drop(waiting);
        self.arrived.notify_one();
    }

    /// Waits for the next job and counts its runner as busy; `None` once the buffer is closed
    /// and empty.
    pub(super) async fn next(&self) -> Option<Arc<Attempt>> {
        let mut counted_idle = false;
        loop {
            let arrived = self.arrived.notified();
            if let Some(attempt) = self.pop(&mut counted_idle) {
                return Some(attempt);
            }
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            arrived.await;
        }
    }

    /// `counted_idle` is true while this runner is counted in [`WaitingJobs::idle`].
    fn pop(&self, counted_idle: &mut bool) -> Option<Arc<Attempt>> {
        let mut waiting = lock(&self.waiting);
        let Some(attempt) = waiting.jobs.pop_front() else {
            waiting.idle += usize::from(!std::mem::replace(counted_idle, true));
            return None;
        };
        waiting.idle -= usize::from(*counted_idle);
        let (left, idle) = (waiting.jobs.len(), waiting.idle);
        self.busy.fetch_add(1, Ordering::AcqRel);
        drop(waiting);
        // Each runner that wakes up wakes the next one, so that a push wakes one runner
        // per job.
        if left > 0 && idle > 0 {
            self.arrived.notify_one();
        }
        self.request_refill(left);
        Some(attempt)
    }

    /// Takes up to `limit` more jobs of the same kind, to fill a batch.
    pub(super) fn take_same_kind(&self, kind: &str, limit: usize) -> Vec<Arc<Attempt>> {
        let mut waiting = lock(&self.waiting);
        let mut taken = Vec::new();
        let mut left = VecDeque::with_capacity(waiting.jobs.len());
        for attempt in waiting.jobs.drain(..) {
            if taken.len() < limit && attempt.claimed.kind() == kind {
                taken.push(attempt);
            } else {
                left.push_back(attempt);
            }
        }
        let still_waiting = left.len();
        waiting.jobs = left;
        drop(waiting);
        self.request_refill(still_waiting);
        taken
    }

    /// Records that a runner has ended `jobs` jobs and is free.
    pub(super) fn done(&self, jobs: usize) {
        self.done.fetch_add(jobs as u64, Ordering::Relaxed);
        self.busy.fetch_sub(1, Ordering::AcqRel);
        self.request_refill(self.len());
    }

    /// Notifies the claimer if few jobs are left.
    fn request_refill(&self, left: usize) {
        if left <= self.low_water.load(Ordering::Relaxed) {
            self.demand.notify_one();
        }
    }

    /// Takes all jobs that have not started.
    pub(super) fn take_all(&self) -> Vec<Arc<Attempt>> {
        lock(&self.waiting).jobs.drain(..).collect()
    }

    /// When the first of the waiting jobs may have waited for `max_wait`; `None` if no job waits.
    pub(super) fn overdue_at(&self, max_wait: Duration) -> Option<Instant> {
        let waiting = lock(&self.waiting);
        waiting.oldest.filter(|_| !waiting.jobs.is_empty()).map(|oldest| oldest + max_wait)
    }

    /// Takes the jobs that have waited for `max_wait`.
    pub(super) fn take_overdue(&self, max_wait: Duration) -> Vec<Arc<Attempt>> {
        let now = Instant::now();
        let mut waiting = lock(&self.waiting);
        if waiting.oldest.is_none_or(|oldest| now < oldest + max_wait) {
            return Vec::new();
        }
        let (old, young): (VecDeque<_>, VecDeque<_>) =
            waiting.jobs.drain(..).partition(|attempt| now >= attempt.received_at + max_wait);
        waiting.oldest = young.iter().map(|attempt| attempt.received_at).min();
        waiting.jobs = young;
        Vec::from(old)
    }

    /// The lowest priority of the waiting jobs, and how many have a higher one; `None` if no job
    /// waits.
    pub(super) fn lowest_priority(&self) -> Option<(i16, usize)> {
        let waiting = lock(&self.waiting);
        let lowest = waiting.jobs.back()?.claimed.priority();
        Some((lowest, waiting.jobs.partition_point(|attempt| attempt.claimed.priority() > lowest)))
    }

    /// How many of the waiting jobs are of kinds that may occupy a slot for long.
    pub(super) fn waiting_long(&self) -> usize {
        lock(&self.waiting).jobs.iter().filter(|attempt| !attempt.kind.run_time.is_short()).count()
    }

    /// Ends the runners once no job waits.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.arrived.notify_waiters();
    }

    pub(super) fn set_low_water(&self, jobs: usize) {
        self.low_water.store(jobs, Ordering::Relaxed);
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.waiting).jobs.len()
    }

    pub(super) fn busy(&self) -> usize {
        self.busy.load(Ordering::Acquire)
    }

    /// How many jobs have ended so far.
    pub(super) fn ended(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

fn start_order(attempt: &Arc<Attempt>) -> Reverse<i16> {
    Reverse(attempt.claimed.priority())
}

// ---- contact with the database ----------------------------------------------

/// When the database last acknowledged a heartbeat, on the monotonic clock.
pub(super) struct Contact(Mutex<LastContact>);

#[derive(Clone, Copy)]
struct LastContact {
    /// When the last acknowledged heartbeat was sent.
    sent: Instant,
    /// Since when no heartbeat has failed.
    unbroken_since: Option<Instant>,
}

impl Contact {
    fn new() -> Self {
        let now = Instant::now();
        Contact(Mutex::new(LastContact { sent: now, unbroken_since: Some(now) }))
    }

    /// Records that the heartbeat sent at `sent` was acknowledged. If the gap since the last one
    /// is longer than two intervals (this process was suspended, for example), unbroken contact
    /// starts again from here: other processes may have been suspended too.
    pub(super) fn acknowledged(&self, sent: Instant, interval: Duration) {
        let mut last = lock(&self.0);
        if sent.duration_since(last.sent) > interval.saturating_mul(2) {
            last.unbroken_since = None;
        }
        last.sent = sent;
        last.unbroken_since.get_or_insert(sent);
    }

    /// Records that a heartbeat failed.
    pub(super) fn failed(&self) {
        lock(&self.0).unbroken_since = None;
    }

    /// How long ago the last acknowledged heartbeat was sent.
    pub(super) fn silence(&self) -> Duration {
        lock(&self.0).sent.elapsed()
    }

    /// For how long no heartbeat has failed.
    pub(super) fn unbroken(&self) -> Option<Duration> {
        lock(&self.0).unbroken_since.map(|since| since.elapsed())
    }

    /// Whether the self-stop time has passed: other workers may soon recover this worker's jobs.
    pub(super) fn is_past_self_stop(&self, settings: &Settings) -> bool {
        self.silence() + settings.heartbeat_interval * 2 >= settings.stale_after
    }
}
