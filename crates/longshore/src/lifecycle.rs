//! The state machine. Pure: what is, what happened, and so what follows.
//!
//! Every next-state rule of the queue lives here and nowhere else. The engines
//! store transitions; they do not choose them. `docs/lifecycle.md` draws the
//! diagram, and the conformance suite holds both engines to [`next`].
//!
//! A decision is made from what a statement read, and applied by a second
//! statement only if that is still so (the lease number and the two flags of a
//! running job). Where it is no longer so, the decision is made again.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;

use crate::error::Error;
use crate::job::{AttemptEnd, Outcome, WorkerId};
use crate::retry::MAX_DELAY;

/// The error recorded for a job whose worker died.
pub const INTERRUPTED: &str = "Job recovered after worker interruption";
/// The error recorded when recovery charges the attempt.
pub const WORKER_CRASHED: &str = "WorkerCrashed";
/// The error recorded when a job may not wait again because a newer one took
/// over its unique key.
pub const SUPERSEDED: &str = "superseded by a newer job with the same unique key";

/// The end of the year 9999.
pub(crate) const FAR_FUTURE: DateTime<Utc> =
    DateTime::from_timestamp(253_402_300_799, 0).expect("within range");

/// Where a job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// In `ready`.
    Waiting(Waiting),
    /// In `running`: a lease is out.
    Running(Running),
    /// In `finished`.
    Finished(Finished),
}

/// A waiting job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The last lease's number.
    pub lease_no: i32,
    /// Attempts charged so far.
    pub attempts: u16,
    /// The budget.
    pub max_attempts: u16,
    /// How often a worker died holding it.
    pub interruptions: u16,
}

/// A running job, as its row in `running` tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// The live lease's number.
    pub lease_no: i32,
    /// Who holds it.
    pub worker: WorkerId,
    /// The attempt in progress; 1 is the first.
    pub attempt: u16,
    /// The budget.
    pub max_attempts: u16,
    /// How often a worker died holding it before.
    pub interruptions: u16,
    /// Whether the worker recorded that the handler began (it does so for jobs
    /// that were interrupted before).
    pub started: bool,
    /// What has been asked of it since it was claimed.
    pub flags: Flags,
}

/// What can be asked of a job while it runs. Both only ever go from false to
/// true, and only while the lease lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags {
    /// Somebody cancelled it.
    pub cancel_requested: bool,
    /// A newer job took over its unique key: it may finish, not wait again.
    pub superseded: bool,
}

/// A finished job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The last lease's number: an operator's retry carries it on.
    pub lease_no: i32,
    /// How it ended.
    pub outcome: Outcome,
}

/// What can happen to a job.
#[derive(Clone, Debug)]
pub enum Event {
    /// A worker takes it.
    Claim,
    /// The lease's holder reports how the attempt ended.
    Settle(Ending),
    /// A sweeper takes the lease from a dead or hung holder.
    Recover(Recovery),
    /// Somebody wants it not to run.
    Cancel,
    /// An operator wants it to run (again), now.
    Retry,
    /// An operator wants a dead letter to run again.
    Redrive,
    /// An operator changes what was asked.
    Edit,
    /// An operator wants it gone.
    Delete,
}

/// How an attempt ended, in its holder's words.
#[derive(Clone, Debug)]
pub enum Ending {
    /// Done, perhaps with a result.
    Succeeded {
        /// What the handler returned, as JSON.
        result: Option<Box<RawValue>>,
    },
    /// Failed; charged.
    Failed {
        /// What went wrong.
        error: String,
        /// How long to wait before the next attempt; `None` means that there
        /// shall be none.
        retry_in: Option<Duration>,
    },
    /// The handler saw the cancellation, or decided on its own to stop.
    Cancelled {
        /// Why.
        reason: Option<String>,
    },
    /// Run it later; not charged.
    Snoozed {
        /// How much later.
        delay: Duration,
    },
    /// Given back unfinished (shutdown); not charged, due at once.
    Released,
    /// Cut off by the worker itself, because it lost touch with the database
    /// or is about to die; counted like a recovery.
    Interrupted(Interruption),
}

/// How a recovered job is treated.
#[derive(Clone, Debug)]
pub enum Recovery {
    /// Back to the queue, counted.
    Default(Interruption),
    /// Back to the queue at a chosen time; counted, but never quarantined:
    /// somebody decided.
    Reschedule {
        /// When.
        when: When,
        /// The attempts charged from now on; as before the attempt if absent.
        attempts: Option<u16>,
        /// Where the count of interruptions stops rising.
        max_interruptions: u16,
    },
    /// Charged as a failed attempt.
    Fail {
        /// The backoff; `None` means no other attempt.
        retry_in: Option<Duration>,
    },
}

/// The settings an interruption is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interruption {
    /// How long the job waits before it is due again.
    pub delay: Duration,
    /// The interruption with this number quarantines the job.
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
    /// As soon as it is stored.
    pub const NOW: When = When::After(Duration::ZERO);

    /// The nearest point that both engines can store: a handler's or a hook's
    /// absurd wish must not stop a settle.
    fn storable(self) -> When {
        match self {
            When::After(delay) => When::After(delay.min(MAX_DELAY)),
            When::At(at) => When::At(at.clamp(DateTime::UNIX_EPOCH, FAR_FUTURE)),
        }
    }
}

/// What follows.
#[derive(Clone, Debug)]
pub enum Transition {
    /// `ready → running` under the next lease number.
    Lease {
        /// The attempt that begins.
        attempt: u16,
    },
    /// `→ finished`.
    Finish(Finish),
    /// `running → ready`.
    Requeue(Requeue),
    /// Stays in `running`, told to stop.
    RequestCancel,
    /// `finished → ready`: no attempts charged, no interruptions counted, the
    /// lease number carried on.
    Reopen,
    /// Stays in `ready`, due now.
    RunNow,
    /// Stays in `ready`, with other contents.
    Rewrite,
    /// Out of `finished` and `jobs`.
    Remove,
}

/// The end of a job.
#[derive(Clone, Debug)]
pub struct Finish {
    /// How it ended.
    pub outcome: Outcome,
    /// Attempts charged in the end.
    pub attempts: u16,
    /// Interruptions counted in the end.
    pub interruptions: u16,
    /// Its last error; if absent, the newest of its history stays.
    pub error: Option<String>,
    /// What the handler returned.
    pub result: Option<Box<RawValue>>,
    /// What its history says of this last attempt; successes leave no entry.
    pub history: Option<AttemptEnd>,
}

/// The way back to the queue.
#[derive(Clone, Debug)]
pub struct Requeue {
    /// Attempts charged so far.
    pub attempts: u16,
    /// Interruptions counted so far.
    pub interruptions: u16,
    /// When it is due.
    pub when: When,
    /// What its history says of this attempt.
    pub history: AttemptEnd,
    /// And with which error.
    pub error: Option<String>,
}

/// How a lease ends: the two ways out of `running`.
#[derive(Clone, Debug)]
pub enum Leave {
    /// For good.
    Finish(Finish),
    /// For now.
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
    /// It has ended; nothing is left to cancel.
    AlreadyFinished(Outcome),
    /// It runs; its contents are fixed until the attempt ends.
    IsRunning,
    /// It has not ended.
    NotFinished,
    /// It has ended, but not as a dead letter.
    NotDead(Outcome),
}

impl Refusal {
    /// For the person who asked.
    pub(crate) fn into_error(self, id: impl std::fmt::Display) -> Error {
        Error::conflict(match self {
            Refusal::LeaseLost => format!("job {id}: the lease is no longer held"),
            Refusal::NotWaiting => format!("job {id} is not waiting"),
            Refusal::AlreadyFinished(outcome) => {
                format!("job {id} has already ended as {}; retry it if it should run again", outcome.as_str())
            }
            Refusal::IsRunning => {
                format!("job {id} is running; wait for the attempt to end, or cancel it first")
            }
            Refusal::NotFinished => format!("job {id} has not ended; cancel it first"),
            Refusal::NotDead(outcome) => format!(
                "job {id} ended as {}, not failed_permanent; retry it instead of redriving it",
                outcome.as_str()
            ),
        })
    }
}

/// What follows when `event` happens to a job in `state`.
pub fn next(state: &State, event: Event) -> Result<Transition, Refusal> {
    match (state, event) {
        (State::Waiting(job), Event::Claim) => Ok(Transition::Lease { attempt: job.attempts + 1 }),
        (State::Waiting(job), Event::Cancel) => Ok(Transition::Finish(Finish {
            outcome: Outcome::Cancelled,
            attempts: job.attempts,
            interruptions: job.interruptions,
            error: None,
            result: None,
            history: None,
        })),
        (State::Waiting(_), Event::Retry) => Ok(Transition::RunNow),
        (State::Waiting(_), Event::Edit) => Ok(Transition::Rewrite),
        (State::Waiting(_), Event::Settle(_) | Event::Recover(_)) => Err(Refusal::LeaseLost),
        (State::Waiting(_), Event::Redrive | Event::Delete) => Err(Refusal::NotFinished),

        (State::Running(job), Event::Settle(ending)) => Ok(settle(job, ending).into()),
        (State::Running(job), Event::Recover(recovery)) => Ok(recover(job, recovery).into()),
        (State::Running(_), Event::Cancel) => Ok(Transition::RequestCancel),
        (State::Running(_), Event::Claim) => Err(Refusal::NotWaiting),
        (State::Running(_), Event::Retry | Event::Edit) => Err(Refusal::IsRunning),
        (State::Running(_), Event::Redrive | Event::Delete) => Err(Refusal::NotFinished),

        (State::Finished(_), Event::Retry) => Ok(Transition::Reopen),
        (State::Finished(_), Event::Delete) => Ok(Transition::Remove),
        (State::Finished(job), Event::Redrive) => match job.outcome {
            Outcome::FailedPermanent => Ok(Transition::Reopen),
            outcome => Err(Refusal::NotDead(outcome)),
        },
        (State::Finished(job), Event::Cancel | Event::Edit) => Err(Refusal::AlreadyFinished(job.outcome)),
        (State::Finished(_), Event::Claim) => Err(Refusal::NotWaiting),
        (State::Finished(_), Event::Settle(_) | Event::Recover(_)) => Err(Refusal::LeaseLost),
    }
}

/// What follows when the holder of a live lease reports `ending`.
pub fn settle(job: &Running, ending: Ending) -> Leave {
    if let Ending::Succeeded { result } = ending {
        return Leave::Finish(Finish {
            outcome: Outcome::Succeeded,
            attempts: job.attempt,
            interruptions: job.interruptions,
            error: None,
            result,
            history: None,
        });
    }
    if job.flags.cancel_requested {
        return cancelled(job, ending);
    }
    if job.flags.superseded {
        return superseded(job, ending);
    }
    match ending {
        Ending::Succeeded { .. } => unreachable!("handled above"),
        Ending::Cancelled { .. } => cancelled(job, ending),
        Ending::Failed { error, retry_in: Some(delay) } if job.attempt < job.max_attempts => {
            Leave::Requeue(Requeue {
                attempts: job.attempt,
                interruptions: job.interruptions,
                when: When::After(delay).storable(),
                history: AttemptEnd::Failed,
                error: Some(error),
            })
        }
        Ending::Failed { error, .. } => failed_for_good(job, error),
        Ending::Snoozed { delay } => uncharged(job, delay, AttemptEnd::Snoozed),
        Ending::Released => uncharged(job, Duration::ZERO, AttemptEnd::Released),
        Ending::Interrupted(how) => interrupted(job, how),
    }
}

/// What follows when a sweeper takes the lease of a dead or hung holder.
pub fn recover(job: &Running, recovery: Recovery) -> Leave {
    match recovery {
        Recovery::Default(how) => settle(job, Ending::Interrupted(how)),
        Recovery::Fail { retry_in } => settle(job, Ending::Failed { error: WORKER_CRASHED.into(), retry_in }),
        Recovery::Reschedule { when, attempts, max_interruptions } => {
            let how = Interruption { delay: Duration::ZERO, max_interruptions };
            if job.flags != Flags::default() {
                return settle(job, Ending::Interrupted(how));
            }
            Leave::Requeue(Requeue {
                // A job in `ready` always has an attempt left.
                attempts: attempts.unwrap_or(job.attempt - 1).min(job.max_attempts - 1),
                interruptions: counted(job).min(max_interruptions.max(job.interruptions)),
                when: when.storable(),
                history: AttemptEnd::Interrupted,
                error: Some(INTERRUPTED.into()),
            })
        }
    }
}

/// A cancel flag turns every ending but success into `cancelled`.
fn cancelled(job: &Running, ending: Ending) -> Leave {
    let (attempts, history, error) = match ending {
        Ending::Failed { error, .. } => (job.attempt, Some(AttemptEnd::Failed), Some(error)),
        Ending::Cancelled { reason } => (job.attempt, None, reason),
        Ending::Snoozed { .. } => (job.attempt - 1, Some(AttemptEnd::Snoozed), None),
        Ending::Released => (job.attempt - 1, Some(AttemptEnd::Released), None),
        Ending::Interrupted(_) => {
            (job.attempt - 1, Some(AttemptEnd::Interrupted), Some(INTERRUPTED.to_owned()))
        }
        Ending::Succeeded { .. } => unreachable!("a success is never cancelled"),
    };
    Leave::Finish(Finish {
        outcome: Outcome::Cancelled,
        attempts,
        interruptions: if history == Some(AttemptEnd::Interrupted) {
            counted(job)
        } else {
            job.interruptions
        },
        error,
        result: None,
        history,
    })
}

/// A job that lost its unique key to a newer one may not wait again: two
/// waiting jobs would share the key.
fn superseded(job: &Running, ending: Ending) -> Leave {
    match ending {
        Ending::Failed { error, .. } => failed_for_good(job, error),
        other => match cancelled(job, other) {
            Leave::Finish(finish) => {
                Leave::Finish(Finish { error: finish.error.or(Some(SUPERSEDED.into())), ..finish })
            }
            requeue => requeue,
        },
    }
}

fn failed_for_good(job: &Running, error: String) -> Leave {
    Leave::Finish(Finish {
        outcome: Outcome::FailedPermanent,
        attempts: job.attempt,
        interruptions: job.interruptions,
        error: Some(error),
        result: None,
        history: Some(AttemptEnd::Failed),
    })
}

fn uncharged(job: &Running, delay: Duration, history: AttemptEnd) -> Leave {
    Leave::Requeue(Requeue {
        attempts: job.attempt - 1,
        interruptions: job.interruptions,
        when: When::After(delay).storable(),
        history,
        error: None,
    })
}

/// Not charged, but counted: a job that kills its worker each time must end.
fn interrupted(job: &Running, how: Interruption) -> Leave {
    let interruptions = counted(job);
    if interruptions > job.interruptions && interruptions >= how.max_interruptions {
        return Leave::Finish(Finish {
            outcome: Outcome::FailedPermanent,
            attempts: job.attempt - 1,
            interruptions,
            error: Some(format!(
                "Quarantined after {interruptions} worker interruptions; \
                 find out why its workers die, then retry it"
            )),
            result: None,
            history: Some(AttemptEnd::Interrupted),
        });
    }
    Leave::Requeue(Requeue {
        attempts: job.attempt - 1,
        interruptions,
        when: When::After(how.delay).storable(),
        history: AttemptEnd::Interrupted,
        error: Some(INTERRUPTED.into()),
    })
}

/// The first interruption always counts: nobody recorded whether the handler
/// had begun. From then on the job is a suspect, its start is recorded, and an
/// interruption before the start is a neighbour's doing.
fn counted(job: &Running) -> u16 {
    if job.interruptions == 0 || job.started {
        job.interruptions.saturating_add(1)
    } else {
        job.interruptions
    }
}

#[cfg(test)]
mod tests;
