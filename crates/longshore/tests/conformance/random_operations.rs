//! A random walk: any order of operations on one store, against a model in
//! memory that knows only `lifecycle` and the order of claims.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::lifecycle::{self, Event, Finished, Flags, Recovery, Running, State, Transition, Waiting};
use longshore::store::{ClaimRequest, Claimed, Fenced, SweepScope};
use longshore::{Edit, Ending, Interruption, JobId, NewJob, SweepOptions, When, WorkerId};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::fixture::*;

cases! {
    any_order_of_operations_follows_the_model,
    a_walk_of_one_job_to_the_end_of_its_budget,
}

#[derive(Clone, Debug)]
enum Step {
    Enqueue { priority: i16, max_attempts: u16, delay: u32 },
    Claim { limit: u32, mortal: bool },
    Settle { which: usize, ending: usize },
    Late { which: usize, ending: usize },
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
        5 => (1..5_u32, any::<bool>()).prop_map(|(limit, mortal)| Step::Claim { limit, mortal }),
        6 => (which(), 0..7_usize).prop_map(|(which, ending)| Step::Settle { which, ending }),
        2 => (which(), 0..7_usize).prop_map(|(which, ending)| Step::Late { which, ending }),
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

/// A job as the model believes it to be.
struct Modelled {
    state: State,
    max_attempts: u16,
    priority: i16,
    due: DateTime<Utc>,
}

struct Walk {
    fixture: Fixture,
    queue: String,
    jobs: BTreeMap<JobId, Modelled>,
    /// Leases out now, by the order they were taken.
    held: Vec<Claimed>,
    /// Leases that have ended, whoever ended them.
    ended: Vec<Claimed>,
    fit: WorkerId,
    mortal: WorkerId,
}

impl Walk {
    async fn new(fixture: &Fixture) -> Self {
        Walk {
            fixture: fixture.clone(),
            queue: WorkerId::new().to_string(),
            jobs: BTreeMap::new(),
            held: Vec::new(),
            ended: Vec::new(),
            fit: fixture.worker_with(4000 * DAY).await,
            mortal: fixture.worker().await,
        }
    }

    fn pick(&self, which: usize) -> Option<JobId> {
        (!self.jobs.is_empty()).then(|| *self.jobs.keys().nth(which % self.jobs.len()).expect("in range"))
    }

    async fn take(&mut self, step: Step) {
        let fixture = self.fixture.clone();
        let now = fixture.now().await;
        match step {
            Step::Enqueue { priority, max_attempts, delay } => {
                let due = now + delay * SECOND;
                let job = NewJob::new("walk", &priority)
                    .queue(self.queue.as_str())
                    .priority(priority.into())
                    .max_attempts(max_attempts.into())
                    .timeout(None)
                    .run_at(due);
                let id = fixture.add(job).await;
                let state =
                    State::Waiting(Waiting { lease_no: 0, attempts: 0, max_attempts, interruptions: 0 });
                self.jobs.insert(id, Modelled { state, max_attempts, priority, due });
            }
            Step::Claim { limit, mortal } => self.claim(limit, mortal, now).await,
            Step::Settle { which, ending } if !self.held.is_empty() => {
                let claimed = self.held.remove(which % self.held.len());
                let ending = endings()[ending].clone();
                fixture.must_finish(&claimed, ending.clone()).await;
                // The holder knows that its handler has begun.
                if let State::Running(running) = &mut self.model(claimed.lease().id).state {
                    running.started = true;
                }
                self.follow(claimed.lease().id, Event::Settle(ending), now);
                self.ended.push(claimed);
            }
            // A word about a lease that has ended changes nothing, whatever
            // it is answered.
            Step::Late { which, ending } if !self.ended.is_empty() => {
                let stale = &self.ended[which % self.ended.len()];
                let _ = fixture.finish(stale, endings()[ending].clone()).await;
            }
            Step::MarkStarted { which } if !self.held.is_empty() => {
                let lease = self.held[which % self.held.len()].lease();
                assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
                if let State::Running(running) = &mut self.model(lease.id).state {
                    running.started = true;
                }
            }
            Step::Cancel { which } => {
                let Some(id) = self.pick(which) else { return };
                let answer = fixture.cancel(id).await.is_ok();
                assert_eq!(self.follow(id, Event::Cancel, now), answer);
            }
            Step::Retry { which } => {
                let Some(id) = self.pick(which) else { return };
                let answer = fixture.retry(id).await.is_ok();
                assert_eq!(self.follow(id, Event::Retry, now), answer);
            }
            Step::Redrive { which } => {
                let Some(id) = self.pick(which) else { return };
                let answer = fixture.redrive(id).await.is_ok();
                assert_eq!(self.follow(id, Event::Redrive, now), answer);
            }
            Step::Edit { which, priority } => {
                let Some(id) = self.pick(which) else { return };
                let answer = fixture.edit(id, Edit::default().priority(priority.into())).await.is_ok();
                assert_eq!(self.follow(id, Event::Edit, now), answer);
                if answer {
                    self.model(id).priority = priority;
                }
            }
            Step::Delete { which } => {
                let Some(id) = self.pick(which) else { return };
                let answer = fixture.delete(id).await.is_ok();
                assert_eq!(self.follow(id, Event::Delete, now), answer);
            }
            Step::Advance { seconds } => {
                fixture.advance(seconds * SECOND).await;
                fixture.store().beat(self.mortal, &[]).await.expect("beat");
            }
            Step::Crash => self.crash().await,
            Step::Settle { .. } | Step::Late { .. } | Step::MarkStarted { .. } => {}
        }
    }

    fn model(&mut self, id: JobId) -> &mut Modelled {
        self.jobs.get_mut(&id).expect("a job of the model")
    }

    /// The best due jobs, with the first suspect among them if there is room.
    async fn claim(&mut self, limit: u32, mortal: bool, now: DateTime<Utc>) {
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
        let worker = if mortal { self.mortal } else { self.fit };
        let request = ClaimRequest { queues: vec![self.queue.clone()], ..ClaimRequest::new(worker, limit) };
        let claimed = self.fixture.claim_with(&request).await;
        assert_eq!(ids(&claimed), expected);
        for claimed in claimed {
            let id = claimed.lease().id;
            let State::Waiting(waiting) = self.model(id).state.clone() else {
                unreachable!("filtered above")
            };
            let Ok(Transition::Lease { attempt }) = lifecycle::next(&self.model(id).state, Event::Claim)
            else {
                panic!("a waiting job can be claimed")
            };
            self.model(id).state = State::Running(Running {
                lease_no: waiting.lease_no + 1,
                worker,
                attempt,
                max_attempts: waiting.max_attempts,
                interruptions: waiting.interruptions,
                started: false,
                flags: Flags::default(),
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
            std::mem::take(&mut self.held).into_iter().partition(|held| held.lease().worker == self.mortal);
        for stale in lost {
            self.follow(stale.lease().id, Event::Recover(Recovery::Default(how)), now);
            self.ended.push(stale);
        }
        self.held = held;
        self.mortal = self.fixture.worker().await;
    }

    /// Moves the model; whether the rules allow the event.
    fn follow(&mut self, id: JobId, event: Event, now: DateTime<Utc>) -> bool {
        let job = self.jobs.get_mut(&id).expect("a job of the model");
        let lease_no = match &job.state {
            State::Waiting(Waiting { lease_no, .. })
            | State::Running(Running { lease_no, .. })
            | State::Finished(Finished { lease_no, .. }) => *lease_no,
        };
        let waiting = |attempts, interruptions| {
            State::Waiting(Waiting { lease_no, attempts, max_attempts: job.max_attempts, interruptions })
        };
        match lifecycle::next(&job.state, event) {
            Err(_) => return false,
            Ok(Transition::Finish(finish)) => {
                job.state = State::Finished(Finished { lease_no, outcome: finish.outcome });
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
            Ok(Transition::Lease { .. }) => unreachable!("claims are followed apart"),
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

async fn any_order_of_operations_follows_the_model(fixture: Fixture) {
    let config = Config { cases: 12, failure_persistence: None, max_shrink_iters: 100, ..Config::default() };
    let steps = prop::collection::vec(step(), 20..70);
    let runtime = tokio::runtime::Handle::current();
    let result = tokio::task::block_in_place(|| {
        TestRunner::new(config).run(&steps, |steps| {
            let fixture = fixture.clone();
            let walked = runtime.block_on(runtime.spawn(async move {
                let mut walk = Walk::new(&fixture).await;
                for step in steps {
                    walk.take(step).await;
                    walk.compare().await;
                }
            }));
            walked.map_err(|died| TestCaseError::fail(told(died.into_panic())))
        })
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

fn told(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(_) => "a panic without a message".into(),
    }
}

/// The ending that the walk uses most must really be retried in time.
async fn a_walk_of_one_job_to_the_end_of_its_budget(fixture: Fixture) {
    let mut walk = Walk::new(&fixture).await;
    walk.take(Step::Enqueue { priority: 0, max_attempts: 3, delay: 0 }).await;
    for _ in 0..3 {
        walk.take(Step::Claim { limit: 1, mortal: false }).await;
        let failing =
            endings().iter().position(|ending| matches!(ending, Ending::Failed { retry_in: Some(_), .. }));
        walk.take(Step::Settle { which: 0, ending: failing.expect("there is one") }).await;
        walk.compare().await;
        fixture.advance(Duration::from_secs(11)).await;
    }
    assert_eq!(fixture.count(longshore::Status::FailedPermanent).await, 1);
}
