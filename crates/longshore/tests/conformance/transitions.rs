//! State × command: each engine does what `lifecycle::next` says, no more, no
//! less. A job is brought into a state, located, and met with every event.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::lifecycle::{self, Event, Recovery, Running, State, Transition};
use longshore::store::{ClaimRequest, Fenced, Interruptor, Lease, Settled, Settlement};
use longshore::{
    Cancelled, Edit, Ending, Interruption, JobId, JobRecord, NewJob, Outcome, Result, Status, SweepOptions,
    UniqueMode, When, WorkerId,
};

use crate::fixture::*;

cases! {
    a_fresh_job_follows_the_table,
    a_retrying_job_follows_the_table,
    a_waiting_suspect_follows_the_table,
    a_running_job_follows_the_table,
    a_job_on_its_last_attempt_follows_the_table,
    a_job_told_to_stop_follows_the_table,
    a_superseded_job_follows_the_table,
    a_suspect_that_has_not_started_follows_the_table,
    a_suspect_that_has_started_follows_the_table,
    a_suspect_on_its_last_life_follows_the_table,
    a_succeeded_job_follows_the_table,
    a_dead_letter_follows_the_table,
    a_cancelled_job_follows_the_table,
    a_located_state_tells_what_the_rules_ask_for,
    the_status_view_says_the_same_as_the_library,
    a_long_life_ends_where_the_rules_say,
}

/// Where a job can stand, as far as any rule distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stand {
    Fresh,
    Retrying,
    WaitingSuspect,
    Running,
    LastAttempt,
    CancelRequested,
    Superseded,
    SuspectNotStarted,
    SuspectStarted,
    SuspectOnItsLastLife,
    Finished(Outcome),
}

/// Builds jobs in queues of their own, so that none meets another.
pub(crate) struct Stage {
    pub(crate) fixture: Fixture,
    made: usize,
}

impl Stage {
    pub(crate) fn new(fixture: Fixture) -> Self {
        Stage { fixture, made: 0 }
    }

    /// A job that stands there.
    pub(crate) async fn put(&mut self, stand: Stand) -> JobId {
        self.made += 1;
        let queue = format!("q{}", self.made);
        let key = format!("k{}", self.made);
        let fixture = &self.fixture;
        let keyed = |kind: &str| job(kind).unique_key(key.as_str(), UniqueMode::Replace);
        let base = job("mail").queue(queue.as_str()).max_attempts(3).priority(5);
        let now_due = Ending::Failed { error: "first failure".into(), retry_in: Some(Duration::ZERO) };
        let id = match stand {
            Stand::LastAttempt => fixture.add(base.max_attempts(1)).await,
            Stand::Superseded => fixture.add(keyed("mail").queue(queue.as_str())).await,
            _ => fixture.add(base).await,
        };
        match stand {
            Stand::Fresh => {}
            Stand::Retrying => self.settle_one(&queue, now_due).await,
            Stand::WaitingSuspect => self.interrupt(&queue).await,
            Stand::Running | Stand::LastAttempt => drop(self.claim(&queue).await),
            Stand::CancelRequested => {
                self.claim(&queue).await;
                assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Pending);
            }
            Stand::Superseded => {
                self.claim(&queue).await;
                fixture.add(keyed("newer").queue("elsewhere")).await;
            }
            Stand::SuspectNotStarted => {
                self.interrupt(&queue).await;
                self.claim(&queue).await;
            }
            Stand::SuspectStarted => {
                self.interrupt(&queue).await;
                let lease = self.claim(&queue).await;
                assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
            }
            Stand::SuspectOnItsLastLife => {
                self.interrupt(&queue).await;
                self.interrupt(&queue).await;
                let lease = self.claim(&queue).await;
                assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
            }
            Stand::Finished(Outcome::Succeeded) => self.settle_one(&queue, done()).await,
            Stand::Finished(Outcome::FailedPermanent) => {
                self.settle_one(&queue, now_due).await;
                self.settle_one(&queue, failed_permanently()).await;
            }
            Stand::Finished(Outcome::Cancelled) => self.settle_one(&queue, observed_cancel()).await,
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

    /// One interruption that counts.
    async fn interrupt(&self, queue: &str) {
        let ending = Ending::Interrupted(Interruption { delay: Duration::ZERO, max_interruptions: 9 });
        self.settle_one(queue, ending).await;
    }
}

fn events() -> Vec<Event> {
    let how = Interruption { delay: 40 * SECOND, max_interruptions: 3 };
    let mut events = vec![Event::Claim];
    events.extend(endings().map(Event::Settle));
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

/// What can be seen of a job and follows from the rules.
#[derive(Debug, PartialEq)]
struct Seen {
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

fn seen(job: &JobRecord) -> Seen {
    Seen {
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

/// What the rules say should be seen; `None` if the job is gone.
fn expected(
    before: &JobRecord,
    next: &std::result::Result<Transition, lifecycle::Refusal>,
    now: DateTime<Utc>,
) -> Option<Seen> {
    let was = seen(before);
    let waiting = |attempts: u16, interruptions: u16| match (attempts, interruptions) {
        (0, 0) => Status::Queued,
        _ => Status::Retrying,
    };
    let told = |what: Option<longshore::AttemptEnd>, error: &Option<String>| {
        let mut history = seen(before).history;
        history.extend(what.map(|what| format!("{what:?} {error:?}")));
        history
    };
    Some(match next {
        Err(_) => was,
        Ok(Transition::Lease { attempt }) => {
            Seen { status: Status::Running, attempts: *attempt, lease_no: was.lease_no + 1, ..was }
        }
        Ok(Transition::Finish(finish)) => Seen {
            status: finish.outcome.status(),
            attempts: finish.attempts,
            interruptions: finish.interruptions,
            cancel_requested: false,
            history: told(finish.history, &finish.error),
            last_error: finish.error.clone().or(was.last_error.clone()),
            result: finish.result.as_ref().map(|result| result.get().to_owned()),
            // Once it has ended, a job shows when it was asked to run.
            run_at: now,
            ..was
        },
        Ok(Transition::Requeue(requeue)) => Seen {
            status: waiting(requeue.attempts, requeue.interruptions),
            attempts: requeue.attempts,
            interruptions: requeue.interruptions,
            run_at: match requeue.when {
                When::After(delay) => now + delay,
                When::At(at) => at,
            },
            cancel_requested: false,
            history: told(Some(requeue.history), &requeue.error),
            last_error: requeue.error.clone().or(was.last_error.clone()),
            ..was
        },
        Ok(Transition::RequestCancel) => Seen { cancel_requested: true, ..was },
        Ok(Transition::Reopen) => Seen {
            status: Status::Queued,
            attempts: 0,
            interruptions: 0,
            run_at: now,
            result: None,
            // What was said of the end goes with it; the history stays.
            last_error: before.errors.iter().rev().find_map(|entry| entry.error.clone()),
            ..was
        },
        Ok(Transition::RunNow) => Seen { run_at: was.run_at.min(now), ..was },
        Ok(Transition::Rewrite) => Seen { priority: 8, ..was },
        Ok(Transition::Remove) => return None,
    })
}

/// Lets the event happen; says whether the engine or the client accepted it.
async fn happen(fixture: &Fixture, id: JobId, state: &State, event: Event) -> bool {
    let accepted = |result: Result<()>| match result {
        Ok(()) => true,
        Err(error) if error.is_conflict() => false,
        Err(error) => panic!("{error:?}"),
    };
    match event {
        Event::Claim => {
            let queue = fixture.job(id).await.queue;
            let worker = fixture.worker_with(DAY).await;
            let request = ClaimRequest { queues: vec![queue], ..ClaimRequest::new(worker, 5) };
            fixture.claim_with(&request).await.iter().any(|claimed| claimed.lease().id == id)
        }
        Event::Settle(ending) => {
            let (running, lease) = lease_of(id, state);
            let seen = match ending {
                Ending::Succeeded { .. } => None,
                _ => Some(running.flags),
            };
            let leave = lifecycle::settle(&running, ending);
            let settlement = Settlement { lease, seen, leave, follow_ups: Vec::new() };
            fixture.store().settle(&[settlement]).await.expect("settle") == [Settled::Stored]
        }
        Event::Recover(recovery) => {
            let (running, lease) = lease_of(id, state);
            // Declared dead at once, because a lease still names it.
            fixture.store().retire(lease.worker).await.expect("retire");
            let leave = lifecycle::recover(&running, recovery);
            let settlement = Settlement { lease, seen: Some(running.flags), leave, follow_ups: Vec::new() };
            let recoveries = [(Interruptor::DeadWorker, settlement)];
            fixture.store().recover(&recoveries).await.expect("recover") == [Settled::Stored]
        }
        Event::Cancel => accepted(fixture.cancel(id).await.map(drop)),
        Event::Retry => accepted(fixture.retry(id).await),
        Event::Redrive => accepted(fixture.redrive(id).await),
        Event::Edit => accepted(fixture.edit(id, Edit::default().priority(8)).await),
        Event::Delete => accepted(fixture.delete(id).await),
    }
}

/// The live lease, or a plausible one of a job that has none.
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

async fn follow_the_table(fixture: Fixture, stand: Stand) {
    let mut stage = Stage::new(fixture.clone());
    for event in events() {
        let id = stage.put(stand).await;
        let (state, before) = (fixture.state(id).await, fixture.job(id).await);
        let next = lifecycle::next(&state, event.clone());
        let now = fixture.now().await;
        let told = format!("{event:?} of {state:?}");
        assert_eq!(happen(&fixture, id, &state, event).await, next.is_ok(), "{told}: {next:?}");
        let after = fixture.store().get(id).await.expect("get");
        let mut expected = expected(&before, &next, now);
        if let (Ok(Transition::Finish(_)), Some(expected), Some(after)) = (&next, &mut expected, &after) {
            expected.run_at = after.run_at;
        }
        assert_eq!(after.as_ref().map(seen), expected, "{told}");
    }
}

async fn a_fresh_job_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Fresh).await;
}

async fn a_retrying_job_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Retrying).await;
}

async fn a_waiting_suspect_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::WaitingSuspect).await;
}

async fn a_running_job_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Running).await;
}

async fn a_job_on_its_last_attempt_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::LastAttempt).await;
}

async fn a_job_told_to_stop_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::CancelRequested).await;
}

async fn a_superseded_job_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Superseded).await;
}

async fn a_suspect_that_has_not_started_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::SuspectNotStarted).await;
}

async fn a_suspect_that_has_started_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::SuspectStarted).await;
}

async fn a_suspect_on_its_last_life_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::SuspectOnItsLastLife).await;
}

async fn a_succeeded_job_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Finished(Outcome::Succeeded)).await;
}

async fn a_dead_letter_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Finished(Outcome::FailedPermanent)).await;
}

async fn a_cancelled_job_follows_the_table(fixture: Fixture) {
    follow_the_table(fixture, Stand::Finished(Outcome::Cancelled)).await;
}

/// Where a job stands when it is located, in every stand.
async fn a_located_state_tells_what_the_rules_ask_for(fixture: Fixture) {
    let mut stage = Stage::new(fixture.clone());
    let rows = [
        (Stand::Fresh, "waiting 0/3 lease 0 interruptions 0"),
        (Stand::Retrying, "waiting 1/3 lease 1 interruptions 0"),
        (Stand::WaitingSuspect, "waiting 0/3 lease 1 interruptions 1"),
        (Stand::Running, "running 1/3 lease 1 interruptions 0"),
        (Stand::LastAttempt, "running 1/1 lease 1 interruptions 0"),
        (Stand::CancelRequested, "running 1/3 lease 1 interruptions 0 cancel"),
        (Stand::Superseded, "running 1/3 lease 1 interruptions 0 superseded"),
        (Stand::SuspectNotStarted, "running 1/3 lease 2 interruptions 1"),
        (Stand::SuspectStarted, "running 1/3 lease 2 interruptions 1 started"),
        (Stand::SuspectOnItsLastLife, "running 1/3 lease 3 interruptions 2 started"),
        (Stand::Finished(Outcome::Succeeded), "succeeded lease 1"),
        (Stand::Finished(Outcome::FailedPermanent), "failed_permanent lease 2"),
        (Stand::Finished(Outcome::Cancelled), "cancelled lease 1"),
    ];
    for (stand, line) in rows {
        let id = stage.put(stand).await;
        assert_eq!(told(&fixture.state(id).await), line, "{stand:?}");
    }
}

fn told(state: &State) -> String {
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

/// The view that people query speaks the words of the library.
async fn the_status_view_says_the_same_as_the_library(fixture: Fixture) {
    let mut stage = Stage::new(fixture.clone());
    let stands = [
        Stand::Fresh,
        Stand::Retrying,
        Stand::WaitingSuspect,
        Stand::CancelRequested,
        Stand::SuspectStarted,
        Stand::Finished(Outcome::Succeeded),
        Stand::Finished(Outcome::FailedPermanent),
        Stand::Finished(Outcome::Cancelled),
    ];
    for stand in stands {
        let id = stage.put(stand).await;
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
        assert_eq!(fixture.query_number(&agrees, Some(id)).await, 1, "{stand:?}");
    }
}

/// A whole life through the sweep, the way a worker process would see it.
async fn a_long_life_ends_where_the_rules_say(fixture: Fixture) {
    let id = fixture.add(NewJob::new("mail", &1).max_attempts(3)).await;
    let worker = fixture.worker_with(DAY).await;
    for ending in [Ending::Released, failed(), snoozed()] {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, ending).await;
        fixture.advance(MINUTE).await;
    }
    let mortal = fixture.worker().await;
    fixture.claim_one(mortal).await;
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
