//! What the parts of one worker share: the leases it holds, the jobs that wait
//! for a free slot, its name in the database, and whether it is to go on.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc, watch};

use super::Settings;
use super::context::Attempt;
use super::hooks::Hooks;
use super::metrics::Metrics;
use super::progress::ProgressLane;
use super::registry::Registry;
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
    pub(super) reports: mpsc::UnboundedSender<AttemptReport>,
    pub(super) held: HeldLeases,
    pub(super) buffer: Buffer,
    pub(super) contact: Contact,
    pub(super) telling: Telling,
    pub(super) phase: watch::Sender<Phase>,
    identity: Mutex<WorkerId>,
}

/// How far a worker is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Working,
    /// Takes what is due until nothing is, then ends.
    Draining,
    /// Takes nothing more; what runs may finish.
    Finishing,
    /// Everything that can be settled is; the last tasks may go.
    Ended,
}

impl Shared {
    pub(super) fn new(
        client: Client,
        settings: Settings,
        registry: Registry,
        hooks: Option<Arc<dyn Hooks>>,
        reports: mpsc::UnboundedSender<AttemptReport>,
        worker: WorkerId,
        phase: Phase,
    ) -> Arc<Self> {
        Arc::new(Shared {
            client,
            settings,
            registry,
            hooks,
            metrics: Metrics::default(),
            progress: ProgressLane::default(),
            reports,
            held: HeldLeases::default(),
            buffer: Buffer::default(),
            contact: Contact::new(),
            telling: Telling::default(),
            phase: watch::Sender::new(phase),
            identity: Mutex::new(worker),
        })
    }

    /// This boot's id; a new one after the old was declared dead.
    pub(super) fn worker(&self) -> WorkerId {
        *lock(&self.identity)
    }

    pub(super) fn become_worker(&self, worker: WorkerId) {
        *lock(&self.identity) = worker;
    }

    pub(super) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits until the worker has come at least this far.
    pub(super) async fn reached(&self, phase: Phase) {
        let mut changes = self.phase.subscribe();
        // Fails only when the sender is gone, which we hold.
        let _ = changes.wait_for(|now| *now >= phase).await;
    }

    /// Sleeps, unless the worker reaches `phase` first; says whether it slept.
    pub(super) async fn sleep_unless(&self, phase: Phase, time: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = self.reached(phase) => false,
        }
    }
}

/// Ends the worker's threads with its last task, however that comes about: a
/// heartbeat alone would keep leases that nobody works on.
pub(super) struct EndsAll(pub(super) Arc<Shared>);

impl Drop for EndsAll {
    fn drop(&mut self) {
        self.0.phase.send_replace(Phase::Ended);
    }
}

/// Hooks that are being told what was stored.
#[derive(Default)]
pub(super) struct Telling {
    open: AtomicUsize,
    told: Notify,
}

impl Telling {
    pub(super) fn begin(&self) {
        self.open.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn end(&self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
        self.told.notify_waiters();
    }

    /// Waits until all have been told.
    pub(super) async fn all(&self) {
        loop {
            let told = self.told.notified();
            if self.open.load(Ordering::Acquire) == 0 {
                return;
            }
            told.await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- leases ---------------------------------------------------------------

/// The leases of this process, from the claim's answer to the settlement's.
#[derive(Default)]
pub(super) struct HeldLeases {
    attempts: Mutex<HashMap<Lease, Arc<Attempt>>>,
    suspects: AtomicUsize,
    /// Told whenever leases have been settled.
    pub(super) settled: Notify,
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

    pub(super) fn leases(&self, worker: WorkerId) -> Vec<Lease> {
        lock(&self.attempts).keys().filter(|lease| lease.worker == worker).copied().collect()
    }

    /// How many come from this queue.
    pub(super) fn of_queue(&self, queue: &str) -> usize {
        lock(&self.attempts).values().filter(|attempt| attempt.claimed.queue() == queue).count()
    }
}

// ---- jobs that wait for a slot ---------------------------------------------

/// Claimed jobs in the order in which they should start.
#[derive(Default)]
pub(super) struct Buffer {
    waiting: Mutex<Waiting>,
    arrived: Notify,
    /// Told when fewer than `low` are left.
    pub(super) demand: Notify,
    low: AtomicUsize,
    busy: AtomicUsize,
    done: AtomicU64,
    closed: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Arc<Attempt>>,
    /// Runners that looked, found nothing, and wait. Under the same lock: who
    /// takes a job must know of everybody who will not look again by himself.
    idle: usize,
}

impl Buffer {
    pub(super) fn push(&self, attempts: Vec<Arc<Attempt>>) {
        lock(&self.waiting).jobs.extend(attempts);
        self.arrived.notify_one();
    }

    /// The next job to run, which makes its runner busy; `None` when there will
    /// be no more.
    pub(super) async fn next(&self) -> Option<Arc<Attempt>> {
        let mut waits = false;
        loop {
            let arrived = self.arrived.notified();
            if let Some(attempt) = self.pop(&mut waits) {
                return Some(attempt);
            }
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            arrived.await;
        }
    }

    /// `waits` says whether this runner is counted among the idle.
    fn pop(&self, waits: &mut bool) -> Option<Arc<Attempt>> {
        let mut waiting = lock(&self.waiting);
        let Some(attempt) = waiting.jobs.pop_front() else {
            waiting.idle += usize::from(!std::mem::replace(waits, true));
            return None;
        };
        waiting.idle -= usize::from(*waits);
        let (left, idle) = (waiting.jobs.len(), waiting.idle);
        self.busy.fetch_add(1, Ordering::AcqRel);
        drop(waiting);
        // Whoever gets up wakes the next, so that a push wakes as many as it
        // has work for.
        if left > 0 && idle > 0 {
            self.arrived.notify_one();
        }
        if left <= self.low.load(Ordering::Relaxed) {
            self.demand.notify_one();
        }
        Some(attempt)
    }

    /// More jobs of the same kind, for a batch that has begun.
    pub(super) fn more_of(&self, kind: &str, most: usize) -> Vec<Arc<Attempt>> {
        let mut waiting = lock(&self.waiting);
        let mut taken = Vec::new();
        let mut left = VecDeque::with_capacity(waiting.jobs.len());
        for attempt in waiting.jobs.drain(..) {
            if taken.len() < most && attempt.claimed.kind() == kind {
                taken.push(attempt);
            } else {
                left.push_back(attempt);
            }
        }
        waiting.jobs = left;
        let left = waiting.jobs.len();
        drop(waiting);
        if left <= self.low.load(Ordering::Relaxed) {
            self.demand.notify_one();
        }
        taken
    }

    /// A runner has ended `jobs` jobs and is free.
    pub(super) fn done(&self, jobs: usize) {
        self.done.fetch_add(jobs as u64, Ordering::Relaxed);
        self.busy.fetch_sub(1, Ordering::AcqRel);
        if self.len() <= self.low.load(Ordering::Relaxed) {
            self.demand.notify_one();
        }
    }

    /// Takes out all that have not begun.
    pub(super) fn take_all(&self) -> Vec<Arc<Attempt>> {
        lock(&self.waiting).jobs.drain(..).collect()
    }

    /// Takes out those that have waited for longer than this.
    pub(super) fn take_older(&self, than: Duration) -> Vec<Arc<Attempt>> {
        let mut waiting = lock(&self.waiting);
        let (old, young) = waiting.jobs.drain(..).partition(|attempt| attempt.since.elapsed() > than);
        waiting.jobs = young;
        Vec::from(old)
    }

    /// Lets runners go once nothing waits.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.arrived.notify_waiters();
    }

    pub(super) fn set_low(&self, low: usize) {
        self.low.store(low, Ordering::Relaxed);
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

// ---- contact with the database ----------------------------------------------

/// When the database last heard from us, on the monotonic clock.
pub(super) struct Contact(Mutex<Heard>);

#[derive(Clone, Copy)]
struct Heard {
    /// When the last beat that was acknowledged was sent.
    last: Instant,
    /// Since when no beat has failed.
    unbroken_since: Option<Instant>,
}

impl Contact {
    fn new() -> Self {
        let now = Instant::now();
        Contact(Mutex::new(Heard { last: now, unbroken_since: Some(now) }))
    }

    /// A beat was acknowledged. After a longer silence than beats leave, such as
    /// that of a process which stood still, contact begins anew: others may have
    /// stood still as well.
    pub(super) fn heard(&self, sent: Instant, interval: Duration) {
        let mut heard = lock(&self.0);
        if sent.duration_since(heard.last) > interval.saturating_mul(2) {
            heard.unbroken_since = None;
        }
        heard.last = sent;
        heard.unbroken_since.get_or_insert(sent);
    }

    pub(super) fn broke(&self) {
        lock(&self.0).unbroken_since = None;
    }

    /// How long ago the last acknowledged beat was sent.
    pub(super) fn silence(&self) -> Duration {
        lock(&self.0).last.elapsed()
    }

    /// For how long contact has not been broken.
    pub(super) fn unbroken(&self) -> Option<Duration> {
        lock(&self.0).unbroken_since.map(|since| since.elapsed())
    }

    /// Whether leases may soon be given away.
    pub(super) fn is_out_of_reach(&self, settings: &Settings) -> bool {
        self.silence() + settings.heartbeat_interval * 2 >= settings.stale_after
    }
}
