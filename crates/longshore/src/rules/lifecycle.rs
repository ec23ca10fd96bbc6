//! The state machine. Pure: from a state and an event, it computes the transition.
//!
//! Every next-state rule of the queue is here. The SQL functions `cancel` and `retry`, the view
//! `job_status` and the claim statement contain copies, which the conformance suite compares
//! with this module. The engines store transitions; they do not choose them.
//! `docs/lifecycle.md` draws the diagram, and the conformance suite checks both engines against
//! [`next`].
//!
//! A decision is based on what one statement read. A second statement applies it only if that
//! still holds (the lease number and the two flags of a running job). If it no longer holds, the
//! decision is made again.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;

use crate::error::Error;
use crate::job::{AttemptEnd, Outcome, Status, WorkerId};
use crate::rules::retry::MAX_DELAY;

/// The error recorded for a job whose worker died.
pub const INTERRUPTED: &str = "Job recovered after worker interruption";
/// The error recorded when recovery charges the attempt.
pub const WORKER_CRASHED: &str = "WorkerCrashed";
/// The error recorded when a job may not be requeued because a newer job took over its unique
/// key.
pub const SUPERSEDED: &str = "superseded by a newer job with the same unique key";

/// The end of the year 9999: the latest instant that both engines store.
pub(crate) const FAR_FUTURE: DateTime<Utc> =
    DateTime::from_timestamp(253_402_300_799, 0).expect("within range");

/// A job's state: which table holds its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// In `ready`.
    Waiting(Waiting),
    /// In `running`: a worker holds its lease.
    Running(Running),
    /// In `finished`.
    Finished(Finished),
}

impl State {
    /// How often the job was claimed.
    pub(crate) fn lease_no(&self) -> i32 {
        match self {
            State::Waiting(job) => job.lease_no,
            State::Running(job) => job.lease_no,
            State::Finished(job) => job.lease_no,
        }
    }

    /// The status of a job in this state.
    pub fn status(&self) -> Status {
        match self {
            State::Waiting(Waiting { attempts: 0, interruptions: 0, .. }) => Status::Queued,
            State::Waiting(_) => Status::Retrying,
            State::Running(_) => Status::Running,
            State::Finished(job) => job.outcome.status(),
        }
    }
}

/// A waiting job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The number of its last lease.
    pub lease_no: i32,
    /// Attempts charged so far.
    pub attempts: u16,
    /// The maximum number of attempts.
    pub max_attempts: u16,
    /// How often it was interrupted: its worker died or hung.
    pub interruptions: u16,
    /// Whether it waits for other tasks of its flow.
    pub is_held: bool,
}

/// A running job, from its row in `running`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// The number of the live lease.
    pub lease_no: i32,
    /// The worker that holds the lease.
    pub worker: WorkerId,
    /// The attempt in progress; 1 is the first.
    pub attempt: u16,
    /// The maximum number of attempts.
    pub max_attempts: u16,
    /// How often it was interrupted before.
    pub interruptions: u16,
    /// Whether the worker recorded that the handler started. Workers record this only for jobs
    /// that were interrupted before.
    pub started: bool,
    /// The requests raised since the job was claimed.
    pub flags: LeaseFlags,
}

/// Requests to a running job. Both flags only change from false to true, and only while the
/// lease is live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LeaseFlags {
    /// Its cancellation was requested.
    pub cancel_requested: bool,
    /// A newer job took over its unique key: it may finish but may not be requeued.
    pub superseded: bool,
}

impl LeaseFlags {
    /// Whether all these flags are raised.
    pub(crate) fn include(self, other: LeaseFlags) -> bool {
        self.cancel_requested >= other.cancel_requested && self.superseded >= other.superseded
    }
}

/// A finished job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The number of its last lease; an operator's retry continues from it.
    pub lease_no: i32,
    /// How it ended.
    pub outcome: Outcome,
    /// Whether it is a member of a flow that has not ended, so that others may need its result.
    pub is_needed: bool,
}

impl Finished {
    /// Whether a retry repeats the job's steps. A retry of a job that did not succeed continues
    /// after those that are done.
    pub fn starts_over(&self) -> bool {
        self.outcome == Outcome::Succeeded
    }
}

/// What can happen to a job.
#[derive(Clone, Debug)]
pub enum Event {
    /// A worker claims it.
    Claim,
    /// The lease's holder reports how the attempt ended.
    Settle(Ending),
    /// A sweeper takes the lease from a dead or hung holder.
    Recover(Recovery),
    /// A caller cancels it.
    Cancel,
    /// An operator makes it run now, again if it has finished.
    Retry,
    /// An operator makes a dead letter run again.
    Redrive,
    /// An operator changes the request.
    Edit,
    /// An operator deletes it.
    Delete,
}

/// What a suspended job waits for in one of its steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingWait {
    /// The step.
    pub step: String,
    /// The deadline.
    pub until: Option<DateTime<Utc>>,
    /// The events, any of which ends the wait.
    pub events: Vec<String>,
}

/// How an attempt ended, as its lease's holder reports it.
#[derive(Clone, Debug)]
pub enum Ending {
    /// The handler succeeded, optionally with a result.
    Succeeded {
        /// The handler's result, as JSON.
        result: Option<Box<RawValue>>,
    },
    /// The handler failed; the attempt is charged.
    Failed {
        /// The error.
        error: String,
        /// The delay before the next attempt; `None` means no further attempt.
        retry_in: Option<Duration>,
    },
    /// The handler observed the cancellation, or cancelled the job itself.
    Cancelled {
        /// The reason, if there is one.
        reason: Option<String>,
    },
    /// The handler postponed the job; the attempt is not charged.
    Snoozed {
        /// The delay before the job is due again.
        delay: Duration,
    },
    /// The worker released the job unfinished (for example at shutdown); the attempt is not
    /// charged, and the job is due at once.
    Released,
    /// The handler never started: the claim was not delivered, or no slot became free in time.
    /// The job waits again as before the claim. Nothing happened to it, so its history gets no
    /// entry.
    NotStarted {
        /// When the job was due before the claim, so that it keeps its place in the queue.
        run_at: DateTime<Utc>,
    },
    /// The handler waits in a durable step. The job waits without a lease; the attempt is not
    /// charged. Its history gets no entry, because the journal has one.
    Suspended {
        /// What it waits for. The job is due at the earliest deadline, or when one of the events
        /// is emitted.
        waits: Vec<PendingWait>,
    },
    /// The worker stopped the attempt itself, because it lost contact with the database or is
    /// about to die; counted like a recovery.
    Interrupted(Interruption),
}

/// What happens to a recovered job.
#[derive(Clone, Debug)]
pub enum Recovery {
    /// Requeue it and count the interruption.
    Default(Interruption),
    /// Requeue it at a chosen time. The interruption is counted, but the job is never
    /// quarantined, because a hook decided explicitly.
    Reschedule {
        /// When the job is due.
        when: When,
        /// The number of attempts charged so far; if absent, as before this attempt.
        attempts: Option<u16>,
        /// The limit at which the count of interruptions stops.
        max_interruptions: u16,
    },
    /// Charge a failed attempt.
    Fail {
        /// The delay before the next attempt; `None` means no further attempt.
        retry_in: Option<Duration>,
    },
}

/// The settings that apply to an interruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interruption {
    /// How long the job waits before it is due again.
    pub delay: Duration,
    /// The job is quarantined when its count of interruptions reaches this number.
    pub max_interruptions: u16,
}

impl Default for Interruption {
    fn default() -> Self {
        Interruption { delay: Duration::from_secs(5), max_interruptions: 3 }
    }
}

/// A point in time on the engine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// This long after the statement that stores it.
    After(Duration),
    /// This instant.
    At(DateTime<Utc>),
}

impl When {
    /// Due as soon as it is stored.
    pub const NOW: When = When::After(Duration::ZERO);

    /// Clamps to the range that both engines can store, so that an extreme value from a handler
    /// or a hook cannot make a settle fail.
    fn clamped(self) -> When {
        match self {
            When::After(delay) => When::After(delay.min(MAX_DELAY)),
            When::At(at) => When::At(at.clamp(DateTime::UNIX_EPOCH, FAR_FUTURE)),
        }
    }
}

/// The change that an event causes.
#[derive(Clone, Debug)]
pub enum Transition {
    /// `ready → running` with the next lease number.
    Lease {
        /// The number of the attempt that starts.
        attempt: u16,
    },
    /// `→ finished`.
    Finish(Finish),
    /// `running → ready`.
    Requeue(Requeue),
    /// Stays in `running`, with the cancel flag set.
    RequestCancel,
    /// `finished → ready`: attempts and interruptions start at zero, the lease number continues.
    Reopen,
    /// Stays in `ready`, due now.
    RunNow,
    /// Stays in `ready`, with a changed request.
    Rewrite,
    /// Removed from `finished` and `jobs`.
    Remove,
}

/// The end of a job.
#[derive(Clone, Debug)]
pub struct Finish {
    /// How it ended.
    pub outcome: Outcome,
    /// The final number of charged attempts.
    pub attempts: u16,
    /// The final number of interruptions.
    pub interruptions: u16,
    /// Its last error; if absent, the newest error in its history is kept.
    pub error: Option<String>,
    /// The handler's result.
    pub result: Option<Box<RawValue>>,
    /// The history entry for this last attempt; a success has none.
    pub history: Option<AttemptEnd>,
}

/// The return of a job to the queue.
#[derive(Clone, Debug)]
pub struct Requeue {
    /// Attempts charged so far.
    pub attempts: u16,
    /// Interruptions counted so far.
    pub interruptions: u16,
    /// When it is due.
    pub when: When,
    /// The history entry for this attempt; none if the handler never started.
    pub history: Option<AttemptEnd>,
    /// The error of that entry.
    pub error: Option<String>,
}

/// How a lease ends: the two transitions out of `running`.
#[derive(Clone, Debug)]
pub enum Leave {
    /// The job ends.
    Finish(Finish),
    /// The job returns to the queue.
    Requeue(Requeue),
}

impl Leave {
    /// When the job is due again, if it returns to the queue.
    pub(crate) fn requeued_for(&self) -> Option<When> {
        match self {
            Leave::Finish(_) => None,
            Leave::Requeue(requeue) => Some(requeue.when),
        }
    }
}

impl From<Leave> for Transition {
    fn from(leave: Leave) -> Self {
        match leave {
            Leave::Finish(finish) => Transition::Finish(finish),
            Leave::Requeue(requeue) => Transition::Requeue(requeue),
        }
    }
}

/// Why an event changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Only the live lease can be settled or recovered.
    LeaseLost,
    /// Only a waiting job can be claimed.
    NotWaiting,
    /// The job has ended and can no longer be cancelled or edited.
    AlreadyFinished(Outcome),
    /// The job is running and cannot be changed until the attempt ends.
    IsRunning,
    /// The job has not ended.
    NotFinished,
    /// The job has ended, but not as a dead letter.
    NotDead(Outcome),
    /// The job waits for other tasks of its flow.
    IsHeld,
    /// The job has ended, but its flow has not.
    IsNeeded,
}

impl Refusal {
    /// The conflict error for the caller. `state` is the job's state that led to the refusal.
    pub(crate) fn into_error(self, id: impl std::fmt::Display, state: &State) -> Error {
        let message = match self {
            Refusal::LeaseLost => format!("job {id}: the lease is no longer held"),
            Refusal::NotWaiting => format!("job {id} is not waiting"),
            Refusal::AlreadyFinished(outcome) => {
                format!("job {id} has already ended as {}; retry it if it should run again", outcome.as_str())
            }
            Refusal::IsRunning => {
                format!("job {id} is running; wait for the attempt to end, or cancel it first")
            }
            Refusal::NotFinished => format!("job {id} has not ended; cancel it first"),
            Refusal::IsHeld => {
                format!("job {id} waits for other tasks of its flow; retry or wait for them, or cancel it")
            }
            Refusal::IsNeeded => {
                format!(
                    "job {id} is a task of a flow that has not ended; wait for the flow, or cancel it first"
                )
            }
            Refusal::NotDead(outcome) => format!(
                "job {id} ended as {}, not failed_permanent; retry it instead of redriving it",
                outcome.as_str()
            ),
        };
        Error::conflict(message).with_status(state.status())
    }
}

/// The transition when `event` happens to a job in `state`.
pub fn next(state: &State, event: Event) -> Result<Transition, Refusal> {
    match event {
        Event::Claim => claim(state),
        Event::Settle(ending) => Ok(settle(running(state)?, ending).into()),
        Event::Recover(recovery) => Ok(recover(running(state)?, recovery).into()),
        Event::Cancel => cancel(state).map(|cancel| match cancel {
            Cancel::Finish(finish) => Transition::Finish(finish),
            Cancel::Request => Transition::RequestCancel,
        }),
        Event::Retry => retry(state).map(|retry| match retry {
            Retry::Reopen => Transition::Reopen,
            Retry::RunNow => Transition::RunNow,
        }),
        Event::Redrive => redrive(state).map(|()| Transition::Reopen),
        Event::Edit => edit(state).map(|()| Transition::Rewrite),
        Event::Delete => delete(state).map(|()| Transition::Remove),
    }
}

fn claim(state: &State) -> Result<Transition, Refusal> {
    match state {
        State::Waiting(job) => Ok(Transition::Lease { attempt: job.attempts + 1 }),
        State::Running(_) | State::Finished(_) => Err(Refusal::NotWaiting),
    }
}

/// The job of a live lease.
fn running(state: &State) -> Result<&Running, Refusal> {
    match state {
        State::Running(job) => Ok(job),
        State::Waiting(_) | State::Finished(_) => Err(Refusal::LeaseLost),
    }
}

/// What a cancel does.
pub(crate) enum Cancel {
    /// A waiting job ends.
    Finish(Finish),
    /// The holder of the lease has to stop.
    Request,
}

pub(crate) fn cancel(state: &State) -> Result<Cancel, Refusal> {
    match state {
        State::Waiting(job) => Ok(Cancel::Finish(Finish {
            outcome: Outcome::Cancelled,
            attempts: job.attempts,
            interruptions: job.interruptions,
            error: None,
            result: None,
            history: None,
        })),
        State::Running(_) => Ok(Cancel::Request),
        State::Finished(job) => Err(Refusal::AlreadyFinished(job.outcome)),
    }
}

/// What an operator's retry does.
pub(crate) enum Retry {
    /// A finished job returns to the queue.
    Reopen,
    /// A waiting job is due now.
    RunNow,
}

pub(crate) fn retry(state: &State) -> Result<Retry, Refusal> {
    match state {
        State::Waiting(job) if job.is_held => Err(Refusal::IsHeld),
        State::Waiting(_) => Ok(Retry::RunNow),
        State::Running(_) => Err(Refusal::IsRunning),
        State::Finished(_) => Ok(Retry::Reopen),
    }
}

/// Whether a dead letter may return to the queue.
pub(crate) fn redrive(state: &State) -> Result<(), Refusal> {
    match state {
        State::Waiting(_) | State::Running(_) => Err(Refusal::NotFinished),
        State::Finished(job) => match job.outcome {
            Outcome::FailedPermanent => Ok(()),
            outcome => Err(Refusal::NotDead(outcome)),
        },
    }
}

/// Whether the request may be changed.
pub(crate) fn edit(state: &State) -> Result<(), Refusal> {
    match state {
        State::Waiting(_) => Ok(()),
        State::Running(_) => Err(Refusal::IsRunning),
        State::Finished(job) => Err(Refusal::AlreadyFinished(job.outcome)),
    }
}

/// Whether the job may be removed.
pub(crate) fn delete(state: &State) -> Result<(), Refusal> {
    match state {
        State::Waiting(_) | State::Running(_) => Err(Refusal::NotFinished),
        State::Finished(job) if job.is_needed => Err(Refusal::IsNeeded),
        State::Finished(_) => Ok(()),
    }
}

/// The transition when the holder of a live lease reports `ending`.
pub fn settle(job: &Running, ending: Ending) -> Leave {
    debug_assert!((1..=job.max_attempts).contains(&job.attempt), "{job:?}");
    let (end, next) = match ending {
        Ending::Succeeded { result } => {
            return Leave::Finish(Finish {
                outcome: Outcome::Succeeded,
                attempts: job.attempt,
                interruptions: job.interruptions,
                error: None,
                result,
                history: None,
            });
        }
        Ending::Failed { error, retry_in } => {
            let next = match retry_in {
                Some(delay) if job.attempt < job.max_attempts => Next::Requeue(When::After(delay)),
                _ => Next::Fail,
            };
            (Unsuccessful::charged(job, Some(AttemptEnd::Failed), Some(error)), next)
        }
        Ending::Cancelled { reason } => (Unsuccessful::charged(job, None, reason), Next::Cancel),
        Ending::Snoozed { delay } => {
            (Unsuccessful::uncharged(job, Some(AttemptEnd::Snoozed)), Next::Requeue(When::After(delay)))
        }
        Ending::Released => {
            (Unsuccessful::uncharged(job, Some(AttemptEnd::Released)), Next::Requeue(When::NOW))
        }
        Ending::NotStarted { run_at } => {
            (Unsuccessful::uncharged(job, None), Next::Requeue(When::At(run_at)))
        }
        Ending::Suspended { waits } => {
            let until = waits.iter().filter_map(|wait| wait.until).min().unwrap_or(FAR_FUTURE);
            (Unsuccessful::uncharged(job, None), Next::RequeueAfterStep(When::At(until)))
        }
        Ending::Interrupted(settings) => {
            let end = Unsuccessful::interrupted(job);
            // A job that kills its worker every time must end.
            let is_last =
                end.interruptions > job.interruptions && end.interruptions >= settings.max_interruptions;
            (end, if is_last { Next::Quarantine } else { Next::Requeue(When::After(settings.delay)) })
        }
    };
    if job.flags.cancel_requested {
        return end.finish(Outcome::Cancelled);
    }
    if job.flags.superseded {
        return end.finish_superseded();
    }
    match next {
        Next::Requeue(when) => end.requeue(job, when),
        Next::RequeueAfterStep(when) => {
            Unsuccessful { attempts: 0, interruptions: 0, ..end }.requeue(job, when)
        }
        Next::Fail => end.finish(Outcome::FailedPermanent),
        Next::Quarantine => end.quarantine(),
        Next::Cancel => end.finish(Outcome::Cancelled),
    }
}

/// The transition when a sweeper takes the lease of a dead or hung holder.
pub fn recover(job: &Running, recovery: Recovery) -> Leave {
    match recovery {
        Recovery::Default(settings) => settle(job, Ending::Interrupted(settings)),
        Recovery::Fail { retry_in } => settle(job, Ending::Failed { error: WORKER_CRASHED.into(), retry_in }),
        Recovery::Reschedule { when, attempts, max_interruptions } => {
            let settings = Interruption { delay: Duration::ZERO, max_interruptions };
            if job.flags != LeaseFlags::default() {
                return settle(job, Ending::Interrupted(settings));
            }
            let end = Unsuccessful::interrupted(job);
            Unsuccessful {
                // A job in `ready` always has an attempt left.
                attempts: attempts.unwrap_or(end.attempts).min(job.max_attempts - 1),
                interruptions: end.interruptions.min(max_interruptions.max(job.interruptions)),
                ..end
            }
            .requeue(job, when)
        }
    }
}

/// What becomes of a job after an attempt without success, unless a flag decides.
enum Next {
    Requeue(When),
    /// The attempt ended in a journaled step, and attempts and interruptions count since the last one.
    RequeueAfterStep(When),
    Fail,
    Quarantine,
    Cancel,
}

/// An attempt without success, and how it counts.
struct Unsuccessful {
    attempts: u16,
    interruptions: u16,
    history: Option<AttemptEnd>,
    error: Option<String>,
}

impl Unsuccessful {
    fn charged(job: &Running, history: Option<AttemptEnd>, error: Option<String>) -> Self {
        Unsuccessful { attempts: job.attempt, interruptions: job.interruptions, history, error }
    }

    fn uncharged(job: &Running, history: Option<AttemptEnd>) -> Self {
        Unsuccessful { attempts: job.attempt - 1, interruptions: job.interruptions, history, error: None }
    }

    /// An interruption is not charged, but it is counted.
    fn interrupted(job: &Running) -> Self {
        Unsuccessful {
            attempts: job.attempt - 1,
            interruptions: count_interruption(job),
            history: Some(AttemptEnd::Interrupted),
            error: Some(INTERRUPTED.into()),
        }
    }

    fn finish(self, outcome: Outcome) -> Leave {
        let Unsuccessful { attempts, interruptions, history, error } = self;
        Leave::Finish(Finish { outcome, attempts, interruptions, error, result: None, history })
    }

    /// A job that lost its unique key to a newer one may not be requeued: two waiting jobs would
    /// share the key.
    fn finish_superseded(self) -> Leave {
        let outcome = match self.history {
            Some(AttemptEnd::Failed) => Outcome::FailedPermanent,
            _ => Outcome::Cancelled,
        };
        let error = self.error.or_else(|| Some(SUPERSEDED.into()));
        Unsuccessful { error, ..self }.finish(outcome)
    }

    fn quarantine(self) -> Leave {
        let error = format!(
            "Quarantined after {} worker interruptions; find out why its workers die, then retry it",
            self.interruptions
        );
        Unsuccessful { error: Some(error), ..self }.finish(Outcome::FailedPermanent)
    }

    fn requeue(self, job: &Running, when: When) -> Leave {
        debug_assert!(self.attempts < job.max_attempts, "a waiting job has an attempt left: {job:?}");
        let Unsuccessful { attempts, interruptions, history, error } = self;
        Leave::Requeue(Requeue { attempts, interruptions, when: when.clamped(), history, error })
    }
}

/// The number of interruptions including this one. The first always counts, because it was not
/// recorded whether the handler had started. After that the job is a suspect and its start is
/// recorded; an interruption before its start was caused by another job and does not count.
fn count_interruption(job: &Running) -> u16 {
    if job.interruptions == 0 || job.started {
        job.interruptions.saturating_add(1)
    } else {
        job.interruptions
    }
}

#[cfg(test)]
mod tests;
