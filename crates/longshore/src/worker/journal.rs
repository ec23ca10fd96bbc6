//! The journal of one attempt: which steps of the job are done, and what the handler waits
//! for. Also the lane in which the steps of concurrent handlers share commits.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::{Notify, OnceCell, mpsc, oneshot};

use super::handler::Failure;

use crate::client::Client;
use crate::client::children::{Spawn, SpawnedChildren};
use crate::error::{Error, Result};
use crate::rules::lifecycle::PendingWait;
use crate::store::{Fenced, Lease, NewStep, StepState, check_journal};

/// The maximum number of steps per commit.
const MAX_BATCH: usize = 500;
/// The maximum number of bytes per commit, unless one step alone is larger.
const MAX_BATCH_BYTES: usize = 8 << 20;
/// How often a step is stored again while the database cannot be reached. If it stays out of
/// reach, the attempt fails, and the next one repeats the step.
const MAX_TRIES: u32 = 8;
/// The delay between tries doubles from this one.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);

/// What one attempt knows about the job's steps.
pub(super) struct Journal {
    lane: StepLane,
    /// The steps that earlier attempts stored.
    earlier: OnceCell<HashMap<String, StepState>>,
    /// The names used by this attempt.
    used: Mutex<HashSet<String>>,
    /// The children that this attempt has spawned, or found to be spawned, by the name of the step.
    spawns: Mutex<HashMap<String, Spawn>>,
    /// The children that a replayed join has read. They do not change, so the next one need not read them.
    children: Mutex<Option<Arc<SpawnedChildren>>>,
    /// The number of steps that are stored, and their bytes.
    size: Mutex<(usize, usize)>,
    /// Whether this attempt stored a step.
    has_progressed: Arc<AtomicBool>,
    pub(super) suspension: Suspension,
}

impl Journal {
    pub(super) fn new(lane: StepLane) -> Self {
        Journal {
            lane,
            earlier: OnceCell::new(),
            used: Mutex::default(),
            spawns: Mutex::default(),
            children: Mutex::default(),
            size: Mutex::default(),
            has_progressed: Arc::default(),
            suspension: Suspension::default(),
        }
    }

    pub(super) fn children(&self) -> Option<Arc<SpawnedChildren>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn keep_children(&self, children: Arc<SpawnedChildren>) {
        *self.children.lock().unwrap_or_else(PoisonError::into_inner) = Some(children);
    }

    /// Marks a name as used by this attempt. Returns false if it was used before.
    pub(super) fn use_name(&self, name: &str) -> bool {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned())
    }

    pub(super) fn add_spawn(&self, name: &str, spawn: Spawn) {
        self.spawns.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), spawn);
    }

    pub(super) fn spawn(&self, name: &str) -> Option<Spawn> {
        self.spawns.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All children that this attempt has spawned, or found to be spawned.
    pub(super) fn spawns(&self) -> HashMap<String, Spawn> {
        self.spawns.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What earlier attempts stored under this name. A job's first lease has no earlier steps,
    /// so it reads nothing.
    pub(super) async fn earlier(
        &self,
        client: &Client,
        lease: Lease,
        name: &str,
    ) -> Result<Option<StepState>> {
        if lease.lease_no == 1 {
            return Ok(None);
        }
        let read = async || {
            let steps = client.steps(lease.id).await?;
            for step in &steps {
                self.add_size(&step.state);
            }
            Ok::<_, Error>(steps.into_iter().map(|step| (step.name, step.state)).collect())
        };
        Ok(self.earlier.get_or_try_init(read).await?.get(name).cloned())
    }

    fn add_size(&self, state: &StepState) -> (usize, usize) {
        let bytes = match state {
            StepState::Done(value) => value.get().len(),
            StepState::Waiting { .. } => 0,
        };
        let mut size = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        *size = (size.0 + 1, size.1 + bytes);
        *size
    }

    /// Counts a step that will be stored. Fails if the job has too many, or too large ones.
    pub(super) fn check_size(&self, name: &str, value: &RawValue) -> Result<(), Failure> {
        let (steps, bytes) = self.add_size(&StepState::Done(value.to_owned()));
        check_journal(steps, bytes).map_err(|why| Failure::permanent(format!("step `{name}`: {why}")))
    }

    /// Stores a step that is done: first together with those of other handlers, then, if that
    /// fails, alone, so that a locked lease does not delay the others again.
    pub(super) async fn save(&self, client: &Client, step: NewStep) -> Result<Fenced> {
        let mut done = self.lane.save(step.clone(), self.has_progressed.clone()).await;
        let mut delay = FIRST_RETRY_DELAY;
        for _ in 1..MAX_TRIES {
            match &done {
                Err(error) if error.is_unavailable() => {
                    tracing::debug!(%error, job_id = %step.lease.id, step = step.name, "could not store the step; retrying");
                    tokio::time::sleep(delay).await;
                    delay *= 2;
                    done = store(client, std::slice::from_ref(&step)).await.map(|results| results[0]);
                    note_progress(&done, &self.has_progressed);
                }
                _ => break,
            }
        }
        done
    }

    /// Records that a step was stored outside of the lane.
    pub(super) fn mark_progress(&self) {
        self.has_progressed.store(true, Ordering::Release);
    }

    /// Whether this attempt stored a step, so that the attempts of the job count from it.
    pub(super) fn has_progressed(&self) -> bool {
        self.has_progressed.load(Ordering::Acquire)
    }
}

/// What the handler waits for. When it waits and no step is active, the runner drops it.
#[derive(Default)]
pub(super) struct Suspension {
    waits: Mutex<Vec<(usize, PendingWait)>>,
    last_number: AtomicUsize,
    /// How many steps are active: they run, or look whether their wait is over.
    active_steps: AtomicUsize,
    /// Whether the runner can suspend this attempt.
    is_possible: AtomicBool,
    /// Whether the attempt has ended.
    is_over: AtomicBool,
    changed: Notify,
}

impl Suspension {
    /// Allows suspensions. Jobs of a batch share one call and cannot be suspended.
    pub(super) fn allow(&self) {
        self.is_possible.store(true, Ordering::Release);
    }

    pub(super) fn is_possible(&self) -> bool {
        self.is_possible.load(Ordering::Acquire)
    }

    /// Ends the waits of tasks that the handler left behind. They wait in vain.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// Counts a step as active until the guard is dropped.
    pub(super) fn activate(&self) -> Active<'_> {
        self.active_steps.fetch_add(1, Ordering::AcqRel);
        Active(self)
    }

    /// Waits until the handler waits for something and no step is active. Returns what it waits
    /// for.
    pub(super) async fn suspended(&self) -> Vec<PendingWait> {
        loop {
            let changed = self.changed.notified();
            if self.active_steps.load(Ordering::Acquire) == 0 {
                let waits: Vec<PendingWait> = self.lock().iter().map(|(_, wait)| wait.clone()).collect();
                if !waits.is_empty() {
                    return waits;
                }
            }
            changed.await;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(usize, PendingWait)>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An active step.
pub(super) struct Active<'a>(&'a Suspension);

impl Active<'_> {
    /// The step waits, until the runner drops the handler. If the caller drops the future
    /// instead, the handler no longer waits for this. Returns only in a task that outlives the
    /// attempt.
    pub(super) async fn suspend(self, wait: PendingWait) {
        let suspension = self.0;
        let number = suspension.last_number.fetch_add(1, Ordering::AcqRel);
        suspension.lock().push((number, wait));
        let _registered = Registered { suspension, number };
        drop(self);
        loop {
            let changed = suspension.changed.notified();
            if suspension.is_over.load(Ordering::Acquire) {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.active_steps.fetch_sub(1, Ordering::AcqRel);
        self.0.changed.notify_waiters();
    }
}

struct Registered<'a> {
    suspension: &'a Suspension,
    number: usize,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.suspension.lock().retain(|(number, _)| *number != self.number);
    }
}

/// Stores the steps of a worker's handlers. While one batch is stored, the next one gathers.
#[derive(Clone)]
pub(super) struct StepLane(mpsc::UnboundedSender<Request>);

struct Request {
    step: NewStep,
    /// Set when the step is stored, even if nobody waits for it any longer.
    has_progressed: Arc<AtomicBool>,
    reply: oneshot::Sender<Result<Fenced>>,
}

impl Request {
    fn answer(self, done: Result<Fenced>) {
        note_progress(&done, &self.has_progressed);
        let _ = self.reply.send(done);
    }
}

fn note_progress(done: &Result<Fenced>, has_progressed: &AtomicBool) {
    if let Ok(Fenced::Held) = done {
        has_progressed.store(true, Ordering::Release);
    }
}

impl StepLane {
    pub(super) fn start(client: Client) -> Self {
        let (sender, requests) = mpsc::unbounded_channel();
        tokio::spawn(run(client, requests));
        StepLane(sender)
    }

    async fn save(&self, step: NewStep, has_progressed: Arc<AtomicBool>) -> Result<Fenced> {
        let (reply, stored) = oneshot::channel();
        let ended = || Error::internal("the task that stores steps has ended");
        self.0.send(Request { step, has_progressed, reply }).map_err(|_| ended())?;
        stored.await.map_err(|_| ended())?
    }
}

/// Stores steps until the worker and its attempts are dropped.
async fn run(client: Client, mut requests: mpsc::UnboundedReceiver<Request>) {
    let mut inbox = Vec::new();
    while requests.recv_many(&mut inbox, MAX_BATCH).await > 0 {
        let mut waiting = inbox.drain(..).peekable();
        while let Some(first) = waiting.next() {
            let mut bytes = first.step.value.get().len();
            let mut batch = vec![first];
            while let Some(next) =
                waiting.next_if(|next| bytes + next.step.value.get().len() <= MAX_BATCH_BYTES)
            {
                bytes += next.step.value.get().len();
                batch.push(next);
            }
            save_batch(&client, batch).await;
        }
    }
}

async fn save_batch(client: &Client, batch: Vec<Request>) {
    let steps: Vec<NewStep> = batch.iter().map(|request| request.step.clone()).collect();
    match store(client, &steps).await {
        Ok(results) => {
            batch.into_iter().zip(results).for_each(|(request, result)| request.answer(Ok(result)))
        }
        // One step that the database refuses, or whose lease is locked, must not affect the others.
        Err(error) if batch.len() > 1 && (error.is_locked() || !error.is_unavailable()) => {
            for request in batch {
                let client = client.clone();
                tokio::spawn(async move {
                    let stored = store(&client, std::slice::from_ref(&request.step)).await;
                    request.answer(stored.map(|results| results[0]));
                });
            }
        }
        Err(error) => batch.into_iter().for_each(|request| request.answer(Err(error.shared()))),
    }
}

/// Stores steps. Returns one result per step.
async fn store(client: &Client, steps: &[NewStep]) -> Result<Vec<Fenced>> {
    let results = client.save_steps(steps).await?;
    if results.len() == steps.len() {
        Ok(results)
    } else {
        Err(Error::internal("the database returned another number of results than steps"))
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn wait(step: &str) -> PendingWait {
        PendingWait { step: step.into(), until: None, events: Vec::new() }
    }

    #[test]
    fn a_handler_is_suspended_once_it_waits_and_no_step_is_active() {
        let suspension = Suspension::default();
        let mut suspended = pin!(suspension.suspended());
        let other = suspension.activate();
        let mut waiting = pin!(suspension.activate().suspend(wait("a")));
        assert!(poll(waiting.as_mut()).is_pending());
        assert!(poll(suspended.as_mut()).is_pending(), "another step is active");
        drop(other);
        assert_eq!(poll(suspended.as_mut()), Poll::Ready(vec![wait("a")]));
    }

    #[test]
    fn a_wait_that_the_handler_drops_no_longer_counts() {
        let suspension = Suspension::default();
        let mut kept = pin!(suspension.activate().suspend(wait("kept")));
        assert!(poll(kept.as_mut()).is_pending());
        {
            let mut dropped = pin!(suspension.activate().suspend(wait("dropped")));
            assert!(poll(dropped.as_mut()).is_pending());
        }
        assert_eq!(poll(pin!(suspension.suspended())), Poll::Ready(vec![wait("kept")]));
    }

    #[test]
    fn a_wait_ends_with_its_attempt() {
        let suspension = Suspension::default();
        let mut left = pin!(suspension.activate().suspend(wait("a")));
        assert!(poll(left.as_mut()).is_pending());
        suspension.end();
        assert!(poll(left.as_mut()).is_ready());
    }
}
