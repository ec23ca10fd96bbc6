//! Random sequences of operations on one store, compared with a model in memory that
//! uses only `lifecycle` and the order of claims.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::rules::lifecycle::{
    self, Event, Finished, LeaseFlags, Recovery, Running, State, Transition, Waiting,
};
use longshore::store::{ClaimRequest, Claimed, Fenced};
use longshore::{Edit, Ending, Interruption, JobId, NewJob, SweepOptions, SweepScope, When, WorkerId};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::fixture::*;

cases! {
    any_sequence_of_operations_follows_the_model,
    one_job_that_always_fails_uses_up_its_attempts,
}

#[derive(Clone, Debug)]
enum Step {
    Enqueue { priority: i16, max_attempts: u16, delay: u32 },
    Claim { limit: u32, crashing: bool },
    Settle { which: usize, ending: usize },
    LateSettle { which: usize, ending: usize },
    MarkStarted { which: usize },
    Cancel { which: usize },
    Retry { which: usize },
    Redrive { which: usize },
    Edit { which: usize, priority: i16 },
    Delete { which: usize },
    Advance { seconds: u32 },
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0..1000_usize;
    prop_oneof![
        4 => (-1..2_i16, 1..4_u16, prop_oneof![Just(0), 0..40_u32])
            .prop_map(|(priority, max_attempts, delay)| Step::Enqueue { priority, max_attempts, delay }),
        5 => (1..5_u32, any::<bool>()).prop_map(|(limit, crashing)| Step::Claim { limit, crashing }),
        6 => (which(), 0..7_usize).prop_map(|(which, ending)| Step::Settle { which, ending }),
        2 => (which(), 0..7_usize).prop_map(|(which, ending)| Step::LateSettle { which, ending }),
        2 => which().prop_map(|which| Step::MarkStarted { which }),
        2 => which().prop_map(|which| Step::Cancel { which }),
        2 => which().prop_map(|which| Step::Retry { which }),
        1 => which().prop_map(|which| Step::Redrive { which }),
        1 => (which(), -1..2_i16).prop_map(|(which, priority)| Step::Edit { which, priority }),
        1 => which().prop_map(|which| Step::Delete { which }),
        3 => (1..50_u32).prop_map(|seconds| Step::Advance { seconds }),
        1 => Just(Step::Crash),
    ]
}

/// The expected state of a job.
struct ModelJob {
    state: State,
    max_attempts: u16,
    priority: i16,
    due: DateTime<Utc>,
}

struct Model {
    fixture: Fixture,
    queue: String,
    jobs: BTreeMap<JobId, ModelJob>,
    /// Live claims, in the order they were made.
    held: Vec<Claimed>,
    /// Claims whose lease has ended.
    ended: Vec<Claimed>,
    /// A worker that is never declared dead.
    stable: WorkerId,
    /// The worker that the next [`Step::Crash`] declares dead.
    crashing: WorkerId,
}

impl Model {
    async fn new(fixture: &Fixture) -> Self {
        Model {
            fixture: fixture.clone(),
            queue: WorkerId::new().to_string(),
            jobs: BTreeMap::new(),
            held: Vec::new(),
            ended: Vec::new(),
            stable: fixture.worker_with(4000 * DAY).await,
            crashing: fixture.worker().await,
        }
    }

    fn pick(&self, which: usize) -> Option<JobId> {
        (!self.jobs.is_empty()).then(|| *self.jobs.keys().nth(which % self.jobs.len()).expect("in range"))
    }

    async fn run(&mut self, step: Step) {
        let fixture = self.fixture.clone();
        let now = fixture.now().await;
        match step {
            Step::Enqueue { priority, max_attempts, delay } => {
                let due = now + delay * SECOND;
                let job = NewJob::new("mail", &priority)
                    .queue(self.queue.as_str())
                    .priority(priority.into())
                    .max_attempts(max_attempts.into())
                    .timeout(None)
                    .run_at(due);
                let id = fixture.add(job).await;
                let state = State::Waiting(Waiting {
                    lease_no: 0,
                    attempts: 0,
                    max_attempts,
                    interruptions: 0,
                    is_held: false,
                });
                self.jobs.insert(id, ModelJob { state, max_attempts, priority, due });
            }
            Step::Claim { limit, crashing } => self.claim(limit, crashing, now).await,
            Step::Settle { which, ending } if !self.held.is_empty() => {
                let claimed = self.held.remove(which % self.held.len());
                let ending = endings()[ending].clone();
                fixture.must_finish(&claimed, ending.clone()).await;
                // A settle implies that the handler started.
                if let State::Running(running) = &mut self.job_mut(claimed.lease().id).state {
                    running.started = true;
                }
                self.apply(claimed.lease().id, Event::Settle(ending), now);
                self.ended.push(claimed);
            }
            // A settle of an ended lease changes nothing, whatever it returns.
            Step::LateSettle { which, ending } if !self.ended.is_empty() => {
                let stale = &self.ended[which % self.ended.len()];
                let _ = fixture.finish(stale, endings()[ending].clone()).await;
            }
            Step::MarkStarted { which } if !self.held.is_empty() => {
                let lease = self.held[which % self.held.len()].lease();
                assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
                if let State::Running(running) = &mut self.job_mut(lease.id).state {
                    running.started = true;
                }
            }
            Step::Cancel { which } => {
                let Some(id) = self.pick(which) else { return };
                let accepted = fixture.cancel(id).await.is_ok();
                assert_eq!(self.apply(id, Event::Cancel, now), accepted);
            }
            Step::Retry { which } => {
                let Some(id) = self.pick(which) else { return };
                let accepted = fixture.retry(id).await.is_ok();
                assert_eq!(self.apply(id, Event::Retry, now), accepted);
            }
            Step::Redrive { which } => {
                let Some(id) = self.pick(which) else { return };
                let accepted = fixture.redrive(id).await.is_ok();
                assert_eq!(self.apply(id, Event::Redrive, now), accepted);
            }
            Step::Edit { which, priority } => {
                let Some(id) = self.pick(which) else { return };
                let accepted = fixture.edit(id, Edit::default().priority(priority.into())).await.is_ok();
                assert_eq!(self.apply(id, Event::Edit, now), accepted);
                if accepted {
                    self.job_mut(id).priority = priority;
                }
            }
            Step::Delete { which } => {
                let Some(id) = self.pick(which) else { return };
                let accepted = fixture.delete(id).await.is_ok();
                assert_eq!(self.apply(id, Event::Delete, now), accepted);
            }
            Step::Advance { seconds } => {
                fixture.advance(seconds * SECOND).await;
                fixture.store().beat(self.crashing, &[]).await.expect("beat");
            }
            Step::Crash => self.crash().await,
            Step::Settle { .. } | Step::LateSettle { .. } | Step::MarkStarted { .. } => {}
        }
    }

    fn job_mut(&mut self, id: JobId) -> &mut ModelJob {
        self.jobs.get_mut(&id).expect("a known job")
    }

    /// Claims, and expects the first due jobs with at most one suspect among them.
    async fn claim(&mut self, limit: u32, crashing: bool, now: DateTime<Utc>) {
        let mut due: Vec<_> = self
            .jobs
            .iter()
            .filter_map(|(id, job)| match &job.state {
                State::Waiting(waiting) if job.due <= now => {
                    Some((-job.priority, job.due, *id, waiting.interruptions > 0))
                }
                _ => None,
            })
            .collect();
        due.sort();
        let mut suspects = 0;
        due.retain(|(.., suspect)| {
            suspects += u32::from(*suspect);
            !suspect || suspects == 1
        });
        let expected: Vec<_> = due.iter().take(limit as usize).map(|(_, _, id, _)| *id).collect();
        let worker = if crashing { self.crashing } else { self.stable };
        let request =
            ClaimRequest { queues: vec![self.queue.clone().into()], ..ClaimRequest::new(worker, limit) };
        let claimed = self.fixture.claim_with(&request).await;
        assert_eq!(ids(&claimed), expected);
        for claimed in claimed {
            let id = claimed.lease().id;
            let State::Waiting(waiting) = self.job_mut(id).state.clone() else {
                unreachable!("only waiting jobs are expected")
            };
            let Ok(Transition::Lease { attempt }) = lifecycle::next(&self.job_mut(id).state, Event::Claim)
            else {
                panic!("a waiting job must be claimable")
            };
            self.job_mut(id).state = State::Running(Running {
                lease_no: waiting.lease_no + 1,
                worker,
                attempt,
                max_attempts: waiting.max_attempts,
                interruptions: waiting.interruptions,
                started: false,
                flags: LeaseFlags::default(),
            });
            self.held.push(claimed);
        }
    }

    async fn crash(&mut self) {
        self.fixture.advance(61 * SECOND).await;
        let how = Interruption { delay: 3 * SECOND, max_interruptions: 3 };
        let scope = SweepScope { limit: 3, ..SweepScope::default() };
        let options = SweepOptions { scope, interruption: how, ..SweepOptions::default() };
        self.fixture.sweep(&options).await.expect("sweep");
        let now = self.fixture.now().await;
        let (lost, held): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.held).into_iter().partition(|held| held.lease().worker == self.crashing);
        for stale in lost {
            self.apply(stale.lease().id, Event::Recover(Recovery::Default(how)), now);
            self.ended.push(stale);
        }
        self.held = held;
        self.crashing = self.fixture.worker().await;
    }

    /// Applies the event to the model. Returns whether the rules allow it.
    fn apply(&mut self, id: JobId, event: Event, now: DateTime<Utc>) -> bool {
        let job = self.jobs.get_mut(&id).expect("a known job");
        let lease_no = match &job.state {
            State::Waiting(Waiting { lease_no, .. })
            | State::Running(Running { lease_no, .. })
            | State::Finished(Finished { lease_no, .. }) => *lease_no,
        };
        let waiting = |attempts, interruptions| {
            State::Waiting(Waiting {
                lease_no,
                attempts,
                max_attempts: job.max_attempts,
                interruptions,
                is_held: false,
            })
        };
        match lifecycle::next(&job.state, event) {
            Err(_) => return false,
            Ok(Transition::Finish(finish)) => {
                job.state = State::Finished(Finished { lease_no, outcome: finish.outcome, is_needed: false });
            }
            Ok(Transition::Requeue(requeue)) => {
                job.state = waiting(requeue.attempts, requeue.interruptions);
                job.due = match requeue.when {
                    When::After(delay) => now + delay,
                    When::At(at) => at,
                };
            }
            Ok(Transition::Reopen) => {
                job.state = waiting(0, 0);
                job.due = now;
            }
            Ok(Transition::RequestCancel) => {
                if let State::Running(running) = &mut job.state {
                    running.flags.cancel_requested = true;
                }
            }
            Ok(Transition::RunNow) => job.due = job.due.min(now),
            Ok(Transition::Rewrite) => {}
            Ok(Transition::Remove) => drop(self.jobs.remove(&id)),
            Ok(Transition::Lease { .. }) => unreachable!("`claim` applies claims"),
        }
        true
    }

    async fn compare(&self) {
        for (id, job) in &self.jobs {
            let located = self.fixture.store().locate(*id).await.expect("locate");
            assert_eq!(located.as_ref(), Some(&job.state), "{id}");
            if let State::Waiting(_) = job.state {
                assert_eq!(self.fixture.job(*id).await.run_at, job.due, "{id}");
            }
        }
    }
}

async fn any_sequence_of_operations_follows_the_model(fixture: Fixture) {
    let config = Config { cases: 12, failure_persistence: None, max_shrink_iters: 100, ..Config::default() };
    let steps = prop::collection::vec(step(), 20..70);
    let runtime = tokio::runtime::Handle::current();
    let result = tokio::task::block_in_place(|| {
        TestRunner::new(config).run(&steps, |steps| {
            let fixture = fixture.clone();
            let ended = runtime.block_on(runtime.spawn(async move {
                let mut model = Model::new(&fixture).await;
                for step in steps {
                    model.run(step).await;
                    model.compare().await;
                }
            }));
            ended.map_err(|panicked| TestCaseError::fail(message(panicked.into_panic())))
        })
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

fn message(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(_) => "a panic without a message".into(),
    }
}

/// Checks that failures in these sequences really become due again.
async fn one_job_that_always_fails_uses_up_its_attempts(fixture: Fixture) {
    let mut model = Model::new(&fixture).await;
    model.run(Step::Enqueue { priority: 0, max_attempts: 3, delay: 0 }).await;
    for _ in 0..3 {
        model.run(Step::Claim { limit: 1, crashing: false }).await;
        let failing =
            endings().iter().position(|ending| matches!(ending, Ending::Failed { retry_in: Some(_), .. }));
        model.run(Step::Settle { which: 0, ending: failing.expect("an ending with a retry") }).await;
        model.compare().await;
        fixture.advance(Duration::from_secs(11)).await;
    }
    assert_eq!(fixture.count(longshore::Status::FailedPermanent).await, 1);
}
