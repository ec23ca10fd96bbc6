//! Every event in every state: each engine does exactly what `lifecycle::next` says. A job
//! is brought into a state, located, and receives the event.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::rules::lifecycle::{self, Event, Recovery, Running, State, Transition};
use longshore::store::{ClaimRequest, EndedBy, Fenced, Recovered, Settled, Settlement};
use longshore::{
    Cancelled, Edit, Ending, Interruption, Interruptor, JobId, JobRecord, Lease, NewJob, Outcome, Result,
    Status, SweepOptions, UniqueMode, When, WorkerId,
};

use crate::fixture::*;

cases! {
    a_new_job_follows_the_rules,
    a_retrying_job_follows_the_rules,
    a_waiting_suspect_follows_the_rules,
    a_running_job_follows_the_rules,
    a_job_on_its_last_attempt_follows_the_rules,
    a_running_job_with_a_requested_cancel_follows_the_rules,
    a_superseded_job_follows_the_rules,
    a_suspect_that_has_not_started_follows_the_rules,
    a_suspect_that_has_started_follows_the_rules,
    a_suspect_on_its_last_interruption_follows_the_rules,
    a_succeeded_job_follows_the_rules,
    a_dead_letter_follows_the_rules,
    a_cancelled_job_follows_the_rules,
    locate_returns_everything_that_the_rules_need,
    the_status_view_agrees_with_the_library,
    a_job_with_many_different_endings_follows_the_rules,
}

/// The situations of a job that the rules distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Situation {
    Fresh,
    Retrying,
    WaitingSuspect,
    Running,
    LastAttempt,
    CancelRequested,
    Superseded,
    SuspectNotStarted,
    SuspectStarted,
    SuspectOnLastInterruption,
    Finished(Outcome),
}

/// Builds jobs, each in its own queue, so that they do not affect one another.
pub(crate) struct Builder {
    pub(crate) fixture: Fixture,
    built: usize,
}

impl Builder {
    pub(crate) fn new(fixture: Fixture) -> Self {
        Builder { fixture, built: 0 }
    }

    /// Enqueues a job and brings it into `situation`.
    pub(crate) async fn build(&mut self, situation: Situation) -> JobId {
        self.built += 1;
        let queue = format!("q{}", self.built);
        let key = format!("k{}", self.built);
        let fixture = &self.fixture;
        let keyed = |kind: &str| job(kind).unique_key(key.as_str(), UniqueMode::Replace);
        let base = job("mail").queue(queue.as_str()).max_attempts(3).priority(5);
        let failed_and_due = Ending::Failed { error: "first failure".into(), retry_in: Some(Duration::ZERO) };
        let id = match situation {
            Situation::LastAttempt => fixture.add(base.max_attempts(1)).await,
            Situation::Superseded => fixture.add(keyed("mail").queue(queue.as_str())).await,
            _ => fixture.add(base).await,
        };
        match situation {
            Situation::Fresh => {}
            Situation::Retrying => self.settle_one(&queue, failed_and_due).await,
            Situation::WaitingSuspect => self.interrupt(&queue).await,
            Situation::Running | Situation::LastAttempt => drop(self.claim(&queue).await),
            Situation::CancelRequested => {
                self.claim(&queue).await;
                assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Pending);
            }
            Situation::Superseded => {
                self.claim(&queue).await;
                fixture.add(keyed("newer").queue("other")).await;
            }
            Situation::SuspectNotStarted => {
                self.interrupt(&queue).await;
                self.claim(&queue).await;
            }
            Situation::SuspectStarted => {
                self.interrupt(&queue).await;
                let lease = self.claim(&queue).await;
                assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
            }
            Situation::SuspectOnLastInterruption => {
                self.interrupt(&queue).await;
                self.interrupt(&queue).await;
                let lease = self.claim(&queue).await;
                assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
            }
            Situation::Finished(Outcome::Succeeded) => self.settle_one(&queue, done()).await,
            Situation::Finished(Outcome::FailedPermanent) => {
                self.settle_one(&queue, failed_and_due).await;
                self.settle_one(&queue, failed_permanently()).await;
            }
            Situation::Finished(Outcome::Cancelled) => self.settle_one(&queue, observed_cancel()).await,
        }
        id
    }

    async fn claim(&self, queue: &str) -> Lease {
        let worker = self.fixture.worker_with(DAY).await;
        let claimed = self.fixture.claim_from(queue, worker, 2).await;
        assert_eq!(claimed.len(), 1);
        claimed[0].lease()
    }

    async fn settle_one(&self, queue: &str, ending: Ending) {
        let worker = self.fixture.worker_with(DAY).await;
        let claimed = self.fixture.claim_from(queue, worker, 2).await;
        self.fixture.must_finish(&claimed[0], ending).await;
    }

    /// Interrupts the job once, so that the interruption counts.
    async fn interrupt(&self, queue: &str) {
        let ending = Ending::Interrupted(Interruption { delay: Duration::ZERO, max_interruptions: 9 });
        self.settle_one(queue, ending).await;
    }
}

fn events() -> Vec<Event> {
    let how = Interruption { delay: 40 * SECOND, max_interruptions: 3 };
    let mut events = vec![Event::Claim];
    events.extend(endings().map(Event::Settle));
    events.push(Event::Settle(Ending::NotStarted { run_at: start() - 60 * SECOND }));
    events.extend([
        Event::Recover(Recovery::Default(how)),
        Event::Recover(Recovery::Reschedule {
            when: When::After(50 * SECOND),
            attempts: Some(1),
            max_interruptions: 3,
        }),
        Event::Recover(Recovery::Reschedule {
            when: When::At(start() + DAY),
            attempts: None,
            max_interruptions: 3,
        }),
        Event::Recover(Recovery::Fail { retry_in: Some(60 * SECOND) }),
        Event::Recover(Recovery::Fail { retry_in: None }),
        Event::Cancel,
        Event::Retry,
        Event::Redrive,
        Event::Edit,
        Event::Delete,
    ]);
    events
}

/// The visible fields of a job that follow from the rules.
#[derive(Debug, PartialEq)]
struct Visible {
    status: Status,
    attempts: u16,
    interruptions: u16,
    lease_no: i32,
    priority: i16,
    run_at: DateTime<Utc>,
    cancel_requested: bool,
    last_error: Option<String>,
    history: Vec<String>,
    result: Option<String>,
}

fn visible(job: &JobRecord) -> Visible {
    Visible {
        status: job.status,
        attempts: job.attempts,
        interruptions: job.interruptions,
        lease_no: job.lease_no,
        priority: job.priority,
        run_at: job.run_at,
        cancel_requested: job.cancel_requested,
        last_error: job.last_error.clone(),
        history: job.errors.iter().map(|entry| format!("{:?} {:?}", entry.what, entry.error)).collect(),
        result: job.result.as_ref().map(|result| result.get().to_owned()),
    }
}

/// The fields that the rules require, or `None` if the job is removed.
fn expected(
    before: &JobRecord,
    next: &std::result::Result<Transition, lifecycle::Refusal>,
    now: DateTime<Utc>,
) -> Option<Visible> {
    let was = visible(before);
    let waiting = |attempts: u16, interruptions: u16| {
        if (attempts, interruptions) == (0, 0) { Status::Queued } else { Status::Retrying }
    };
    let history_with = |what: Option<longshore::AttemptEnd>, error: &Option<String>| {
        let mut history = visible(before).history;
        history.extend(what.map(|what| format!("{what:?} {error:?}")));
        history
    };
    Some(match next {
        Err(_) => was,
        Ok(Transition::Lease { attempt }) => {
            Visible { status: Status::Running, attempts: *attempt, lease_no: was.lease_no + 1, ..was }
        }
        Ok(Transition::Finish(finish)) => Visible {
            status: finish.outcome.status(),
            attempts: finish.attempts,
            interruptions: finish.interruptions,
            cancel_requested: finish.outcome == Outcome::Cancelled,
            history: history_with(finish.history, &finish.error),
            last_error: finish.error.clone().or(was.last_error.clone()),
            result: finish.result.as_ref().map(|result| result.get().to_owned()),
            // A finished job shows the requested time. The caller takes it from the job.
            run_at: now,
            ..was
        },
        Ok(Transition::Requeue(requeue)) => Visible {
            status: waiting(requeue.attempts, requeue.interruptions),
            attempts: requeue.attempts,
            interruptions: requeue.interruptions,
            run_at: match requeue.when {
                When::After(delay) => now + delay,
                When::At(at) => at,
            },
            cancel_requested: false,
            history: history_with(requeue.history, &requeue.error),
            last_error: requeue.error.clone().or(was.last_error.clone()),
            ..was
        },
        Ok(Transition::RequestCancel) => Visible { cancel_requested: true, ..was },
        Ok(Transition::Reopen) => Visible {
            status: Status::Queued,
            attempts: 0,
            interruptions: 0,
            run_at: now,
            result: None,
            // The error of the end is removed with it; the history stays.
            last_error: before.errors.iter().rev().find_map(|entry| entry.error.clone()),
            cancel_requested: false,
            ..was
        },
        Ok(Transition::RunNow) => Visible { run_at: was.run_at.min(now), ..was },
        Ok(Transition::Rewrite) => Visible { priority: 8, ..was },
        Ok(Transition::Remove) => return None,
    })
}

/// Applies the event. Returns whether the engine or the client accepted it.
async fn apply(fixture: &Fixture, id: JobId, state: &State, event: Event) -> bool {
    let accepted = |result: Result<()>| match result {
        Ok(()) => true,
        Err(error) if error.is_conflict() => false,
        Err(error) => panic!("{error:?}"),
    };
    match event {
        Event::Claim => {
            let queue = fixture.job(id).await.queue;
            let worker = fixture.worker_with(DAY).await;
            let request = ClaimRequest { queues: vec![queue.into()], ..ClaimRequest::new(worker, 5) };
            fixture.claim_with(&request).await.iter().any(|claimed| claimed.lease().id == id)
        }
        Event::Settle(ending) => {
            let (running, lease) = lease_of(id, state);
            let seen = match ending {
                Ending::Succeeded { .. } => None,
                _ => Some(running.flags),
            };
            let leave = lifecycle::settle(&running, ending);
            let by = EndedBy::Holder;
            let settlement = Settlement {
                lease,
                by,
                seen,
                leave,
                follow_ups: Vec::new(),
                waits: Vec::new(),
                failure: None,
            };
            fixture.store().settle(&[settlement]).await.expect("settle") == [Settled::Stored]
        }
        Event::Recover(recovery) => {
            let (running, lease) = lease_of(id, state);
            // A worker that signs off with leases is declared dead at once.
            fixture.store().retire(lease.worker).await.expect("retire");
            let leave = lifecycle::recover(&running, recovery);
            let settlement = Settlement {
                lease,
                by: EndedBy::Recovery(Interruptor::DeadWorker),
                seen: Some(running.flags),
                leave,
                follow_ups: Vec::new(),
                waits: Vec::new(),
                failure: None,
            };
            fixture.store().recover(&[settlement]).await.expect("recover")
                == [Recovered::Settled(Settled::Stored)]
        }
        Event::Cancel => accepted(fixture.cancel(id).await.map(drop)),
        Event::Retry => accepted(fixture.retry(id).await),
        Event::Redrive => accepted(fixture.redrive(id).await),
        Event::Edit => accepted(fixture.edit(id, Edit::default().priority(8)).await),
        Event::Delete => accepted(fixture.delete(id).await),
    }
}

/// The live lease, or a plausible lease if the job has none.
fn lease_of(id: JobId, state: &State) -> (Running, Lease) {
    let running = match state {
        State::Running(running) => running.clone(),
        State::Waiting(lifecycle::Waiting { lease_no, .. })
        | State::Finished(lifecycle::Finished { lease_no, .. }) => Running {
            lease_no: *lease_no,
            worker: WorkerId::new(),
            attempt: 1,
            max_attempts: 3,
            interruptions: 0,
            started: true,
            flags: Default::default(),
        },
    };
    let lease = Lease { id, lease_no: running.lease_no, worker: running.worker };
    (running, lease)
}

async fn assert_follows_the_rules(fixture: Fixture, situation: Situation) {
    let mut builder = Builder::new(fixture.clone());
    for event in events() {
        let id = builder.build(situation).await;
        let (state, before) = (fixture.state(id).await, fixture.job(id).await);
        let next = lifecycle::next(&state, event.clone());
        let now = fixture.now().await;
        let context = format!("{event:?} of {state:?}");
        assert_eq!(apply(&fixture, id, &state, event).await, next.is_ok(), "{context}: {next:?}");
        let after = fixture.store().get(id).await.expect("get");
        let mut expected = expected(&before, &next, now);
        if let (Ok(Transition::Finish(_)), Some(expected), Some(after)) = (&next, &mut expected, &after) {
            expected.run_at = after.run_at;
        }
        assert_eq!(after.as_ref().map(visible), expected, "{context}");
    }
}

async fn a_new_job_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Fresh).await;
}

async fn a_retrying_job_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Retrying).await;
}

async fn a_waiting_suspect_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::WaitingSuspect).await;
}

async fn a_running_job_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Running).await;
}

async fn a_job_on_its_last_attempt_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::LastAttempt).await;
}

async fn a_running_job_with_a_requested_cancel_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::CancelRequested).await;
}

async fn a_superseded_job_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Superseded).await;
}

async fn a_suspect_that_has_not_started_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::SuspectNotStarted).await;
}

async fn a_suspect_that_has_started_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::SuspectStarted).await;
}

async fn a_suspect_on_its_last_interruption_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::SuspectOnLastInterruption).await;
}

async fn a_succeeded_job_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Finished(Outcome::Succeeded)).await;
}

async fn a_dead_letter_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Finished(Outcome::FailedPermanent)).await;
}

async fn a_cancelled_job_follows_the_rules(fixture: Fixture) {
    assert_follows_the_rules(fixture, Situation::Finished(Outcome::Cancelled)).await;
}

async fn locate_returns_everything_that_the_rules_need(fixture: Fixture) {
    let mut builder = Builder::new(fixture.clone());
    let rows = [
        (Situation::Fresh, "waiting 0/3 lease 0 interruptions 0"),
        (Situation::Retrying, "waiting 1/3 lease 1 interruptions 0"),
        (Situation::WaitingSuspect, "waiting 0/3 lease 1 interruptions 1"),
        (Situation::Running, "running 1/3 lease 1 interruptions 0"),
        (Situation::LastAttempt, "running 1/1 lease 1 interruptions 0"),
        (Situation::CancelRequested, "running 1/3 lease 1 interruptions 0 cancel"),
        (Situation::Superseded, "running 1/3 lease 1 interruptions 0 superseded"),
        (Situation::SuspectNotStarted, "running 1/3 lease 2 interruptions 1"),
        (Situation::SuspectStarted, "running 1/3 lease 2 interruptions 1 started"),
        (Situation::SuspectOnLastInterruption, "running 1/3 lease 3 interruptions 2 started"),
        (Situation::Finished(Outcome::Succeeded), "succeeded lease 1"),
        (Situation::Finished(Outcome::FailedPermanent), "failed_permanent lease 2"),
        (Situation::Finished(Outcome::Cancelled), "cancelled lease 1"),
    ];
    for (situation, line) in rows {
        let id = builder.build(situation).await;
        assert_eq!(description(&fixture.state(id).await), line, "{situation:?}");
    }
}

fn description(state: &State) -> String {
    match state {
        State::Waiting(job) => format!(
            "waiting {}/{} lease {} interruptions {}",
            job.attempts, job.max_attempts, job.lease_no, job.interruptions
        ),
        State::Running(job) => format!(
            "running {}/{} lease {} interruptions {}{}{}{}",
            job.attempt,
            job.max_attempts,
            job.lease_no,
            job.interruptions,
            if job.started { " started" } else { "" },
            if job.flags.cancel_requested { " cancel" } else { "" },
            if job.flags.superseded { " superseded" } else { "" },
        ),
        State::Finished(job) => format!("{} lease {}", job.outcome.as_str(), job.lease_no),
    }
}

/// The view for SQL users shows the same status as the library.
async fn the_status_view_agrees_with_the_library(fixture: Fixture) {
    let mut builder = Builder::new(fixture.clone());
    let situations = [
        Situation::Fresh,
        Situation::Retrying,
        Situation::WaitingSuspect,
        Situation::CancelRequested,
        Situation::SuspectStarted,
        Situation::Finished(Outcome::Succeeded),
        Situation::Finished(Outcome::FailedPermanent),
        Situation::Finished(Outcome::Cancelled),
    ];
    for situation in situations {
        let id = builder.build(situation).await;
        let job = fixture.job(id).await;
        let cancel = match fixture.engine() {
            Engine::Postgres => "cancel_requested",
            Engine::Sqlite => "cancel_requested = 1",
        };
        let agrees = format!(
            "select count(*) from job_status
              where id = {{id}} and status = '{}' and attempts = {} and max_attempts = {}
                and ({cancel}) = {} and coalesce(last_error, '') = '{}'",
            job.status,
            job.attempts,
            job.max_attempts,
            job.cancel_requested,
            job.last_error.unwrap_or_default(),
        );
        assert_eq!(fixture.query_number(&agrees, Some(id)).await, 1, "{situation:?}");
    }
}

/// Releases, failures, a snooze and a recovery by a sweep, in one job.
async fn a_job_with_many_different_endings_follows_the_rules(fixture: Fixture) {
    let id = fixture.add(NewJob::new("mail", &1).max_attempts(3)).await;
    let worker = fixture.worker_with(DAY).await;
    for ending in [Ending::Released, failed(), snoozed()] {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, ending).await;
        fixture.advance(MINUTE).await;
    }
    let crashing = fixture.worker().await;
    fixture.claim_one(crashing).await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.sweep(&SweepOptions::default()).await.expect("sweep").recovered, 1);
    fixture.advance(MINUTE).await;
    for ending in [failed(), failed()] {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, ending).await;
        fixture.advance(MINUTE).await;
    }
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::FailedPermanent, 3, 1));
    assert_eq!((job.lease_no, job.errors.len()), (6, 6));
}
