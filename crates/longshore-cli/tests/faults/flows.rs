//! Processes that die in the middle of a step, a suspension, a claim from groups, or a change of a flow.
//! Other workers continue: every flow ends, and what was journaled is not repeated.

use longshore::store::{GroupChange, StepState};
use longshore::{Flow, FlowId, FlowStatus, JobId, NewJob, Status, chain, task};
use sqlx::{AssertSqlSafe, PgConnection};

use crate::fleet::{Fleet, on_every_engine, on_postgres};
use crate::worker::{EventKind, UNTIL_OPENED};

on_every_engine!(
    a_worker_that_was_paused_until_it_lost_its_job_journals_nothing,
    every_flow_ends_although_a_worker_is_killed_again_and_again,
);
on_postgres!(
    a_step_that_was_stored_before_its_worker_was_killed_is_not_repeated,
    a_job_whose_worker_is_killed_while_suspending_it_waits_again,
    children_are_spawned_once_if_the_worker_is_killed_while_spawning_them,
    a_parent_continues_if_the_worker_is_killed_while_its_last_child_ends,
    a_group_stays_in_line_if_the_worker_is_killed_in_the_middle_of_a_claim,
    a_flow_continues_if_the_worker_is_killed_while_a_task_ends,
);

/// Everything that the kind `durable` journals.
const JOURNAL: [&str; 5] = ["children", "event:go", "first", "joined", "last"];

// ---- moments -----------------------------------------------------------------

/// A trigger that stops the statement that fires it, until the gate is opened.
struct Gate {
    connection: PgConnection,
    key: u32,
}

impl Gate {
    /// `moment` is when the trigger fires, such as `after insert on steps`.
    async fn close(fleet: &Fleet, moment: &str) -> Self {
        let mut connection = fleet.connect().await;
        // Advisory locks are shared by all tests of the database, so each gate has its own key.
        let key = JobId::new().0.as_u128() as u32 >> 1;
        let statements = format!(
            "select pg_advisory_lock({key}, 2);
             create function wait_at_gate_{key}() returns trigger language plpgsql as $$
             begin
               perform pg_advisory_xact_lock_shared({key}, 1);   -- shows that the moment has come
               while not pg_try_advisory_xact_lock_shared({key}, 2) loop
                 perform pg_sleep(0.005);
               end loop;
               return null;
             end
             $$;
             create trigger gate_{key} {moment} for each statement execute function wait_at_gate_{key}()"
        );
        sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut connection).await.unwrap();
        Gate { connection, key }
    }

    /// Whether a statement waits at the gate.
    async fn is_reached(&mut self) -> bool {
        let waiting = format!(
            "select exists (
               select 1
                 from pg_locks
                where locktype = 'advisory'
                  and classid = {}
                  and objid = 1
                  and objsubid = 2)",
            self.key
        );
        sqlx::query_scalar(AssertSqlSafe(waiting)).fetch_one(&mut self.connection).await.unwrap()
    }

    async fn open(mut self) {
        let open = format!("select pg_advisory_unlock({}, 2)", self.key);
        sqlx::raw_sql(AssertSqlSafe(open)).execute(&mut self.connection).await.unwrap();
    }
}

/// Starts a worker and kills it when it reaches the moment. Its last statement ends after its death. If
/// that statement was alone, it is stored; if it was part of a transaction, all of it is undone.
async fn kill_worker_at(fleet: &mut Fleet, moment: &str) {
    let mut gate = Gate::close(fleet, moment).await;
    let victim = fleet.start();
    fleet.wait_until(moment, async |_| gate.is_reached().await).await;
    fleet.process(victim).signal("KILL");
    fleet.process(victim).wait_for_exit().await;
    // The last statement may have locked the row of its worker.
    gate.open().await;
    fleet.count_as_dead(victim).await;
}

/// Lets another worker run everything, then kills it too, so that it does not meet the next gate.
async fn finish_with_another(fleet: &mut Fleet, description: &str, done: impl AsyncFn(&Fleet) -> bool) {
    let other = fleet.start();
    fleet.wait_until(description, async |fleet| done(fleet).await).await;
    fleet.kill(other).await;
}

// ---- what is expected --------------------------------------------------------

async fn enqueue_durable(fleet: &Fleet) -> JobId {
    fleet.client().emit("go", &()).await.unwrap();
    fleet.enqueue("durable", &[1], 1).await[0]
}

async fn has_succeeded(fleet: &Fleet, id: JobId) -> bool {
    fleet.get(id).await.status == Status::Succeeded
}

async fn flow_has_succeeded(fleet: &Fleet, id: FlowId) -> bool {
    fleet.client().flow(id).await.unwrap().status == FlowStatus::Succeeded
}

/// How often the work of a step of a job was done.
fn times_done(fleet: &Fleet, id: JobId, step: &str) -> usize {
    let done = fleet.events_of(&EventKind::Step(step.to_owned()));
    done.iter().filter(|event| event.job == id).count()
}

/// Each step of a job that succeeded is journaled once, and it has three children.
async fn assert_journal(fleet: &Fleet, id: JobId) {
    let steps = fleet.client().steps(id).await.unwrap();
    let names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names, JOURNAL);
    assert!(steps.iter().all(|step| matches!(step.state, StepState::Done(_))), "{steps:?}");
    let children = fleet.client().flow(FlowId(id.0)).await.unwrap();
    assert_eq!((children.members, children.open, children.status), (3, 0, FlowStatus::Succeeded));
    let result = fleet.get(id).await.result.unwrap();
    let (first, children, last): (i32, usize, i32) = serde_json::from_str(result.get()).unwrap();
    let lease_of = |name: &str| steps.iter().find(|step| step.name == name).unwrap().lease_no;
    assert_eq!((first, children, last), (lease_of("first"), 3, lease_of("last")));
}

// ---- steps -------------------------------------------------------------------

async fn a_step_that_was_stored_before_its_worker_was_killed_is_not_repeated(fleet: &mut Fleet) {
    let id = enqueue_durable(fleet).await;
    kill_worker_at(fleet, "after insert on steps").await;
    fleet
        .wait_until("the step is stored", async |fleet| !fleet.client().steps(id).await.unwrap().is_empty())
        .await;
    finish_with_another(fleet, "the job ends", async |fleet| has_succeeded(fleet, id).await).await;
    assert_eq!(times_done(fleet, id, "first"), 1);
    assert_journal(fleet, id).await;
}

async fn a_job_whose_worker_is_killed_while_suspending_it_waits_again(fleet: &mut Fleet) {
    let id = fleet.enqueue("durable", &[1], 1).await[0];
    kill_worker_at(fleet, "after insert on waits").await;
    // The event comes while nobody knows that the job waits for it.
    fleet.client().emit("go", &()).await.unwrap();
    finish_with_another(fleet, "the job ends", async |fleet| has_succeeded(fleet, id).await).await;
    assert_eq!(times_done(fleet, id, "first"), 1);
    assert_journal(fleet, id).await;
}

async fn children_are_spawned_once_if_the_worker_is_killed_while_spawning_them(fleet: &mut Fleet) {
    for moment in ["after insert on flows", "after update on flows"] {
        let id = enqueue_durable(fleet).await;
        kill_worker_at(fleet, moment).await;
        finish_with_another(fleet, "the job ends", async |fleet| has_succeeded(fleet, id).await).await;
        assert_journal(fleet, id).await;
    }
}

async fn a_parent_continues_if_the_worker_is_killed_while_its_last_child_ends(fleet: &mut Fleet) {
    // The end of a flow of children is an event: before it is committed, and before it wakes the parent.
    for moment in ["after insert on events", "after update of woken on waits"] {
        let id = enqueue_durable(fleet).await;
        kill_worker_at(fleet, moment).await;
        finish_with_another(fleet, "the job ends", async |fleet| has_succeeded(fleet, id).await).await;
        assert_journal(fleet, id).await;
    }
}

async fn a_worker_that_was_paused_until_it_lost_its_job_journals_nothing(fleet: &mut Fleet) {
    fleet.client().emit("go", &()).await.unwrap();
    // When the process resumes, the work of its step is done, and it tries to store the step.
    let id = fleet.enqueue("durable", &[UNTIL_OPENED, 1], 1).await[0];
    let paused = fleet.start();
    fleet.wait_until("the step has begun", async |fleet| times_done(fleet, id, "first") == 1).await;
    fleet.pause(paused).await;
    fleet.count_as_dead(paused).await;
    fleet.start();
    fleet.wait_until("the job ends", async |fleet| has_succeeded(fleet, id).await).await;
    fleet.open_gate();
    fleet.process(paused).signal("CONT");
    fleet
        .wait_until("the late worker notices", async |fleet| {
            fleet.process(paused).stderr().contains("lost the lease; another worker owns the job")
        })
        .await;
    assert_journal(fleet, id).await;
    let steps = fleet.client().steps(id).await.unwrap();
    assert!(steps.iter().all(|step| step.lease_no > 1), "nothing is from the first lease: {steps:?}");
}

// ---- groups ------------------------------------------------------------------

async fn a_group_stays_in_line_if_the_worker_is_killed_in_the_middle_of_a_claim(fleet: &mut Fleet) {
    let limit = GroupChange { limit: Some(Some(2)), ..GroupChange::default() };
    fleet.client().set_group("default", "acme", limit).await.unwrap();
    // After the group's turn was deleted, and after its jobs were leased.
    for (nth, moment) in ["after delete on turns", "after insert on running"].into_iter().enumerate() {
        let jobs = (0..5).map(|_| NewJob::new("noop", &[0]).group("acme"));
        fleet.client().enqueue_many(jobs).await.unwrap();
        kill_worker_at(fleet, moment).await;
        let all = 5 * (nth as u64 + 1);
        finish_with_another(fleet, "all jobs succeed", async |fleet| {
            fleet.count(Status::Succeeded).await == all
        })
        .await;
    }
    for job in fleet.jobs().await {
        assert_eq!((job.attempts, job.interruptions), (1, 0), "no claim was stored");
    }
}

// ---- flows -------------------------------------------------------------------

async fn a_flow_continues_if_the_worker_is_killed_while_a_task_ends(fleet: &mut Fleet) {
    let moments = [
        "after insert on flow_changes", // the end is stored, and nobody has followed it
        "after update of met on links", // before the child is released
        "after delete on flow_changes", // before the commit
    ];
    for moment in moments {
        let noop = |name: &str| task(name, NewJob::new("noop", &[0]));
        let flow = chain![noop("a"), noop("b"), noop("c")].on_success(NewJob::new("noop", &[0]));
        let id = fleet.client().enqueue_flow(flow).await.unwrap().id;
        kill_worker_at(fleet, moment).await;
        let before = fleet.client().flow(id).await.unwrap();
        assert_eq!(before.open, 3, "{moment}: no end has been followed");
        finish_with_another(fleet, "the flow ends", async |fleet| {
            flow_has_succeeded(fleet, id).await
                && fleet.count(Status::Running).await == 0
                && fleet.count(Status::Queued).await == 0
        })
        .await;
    }
    let starts = fleet.event_counts(&EventKind::Start);
    assert_eq!(starts.len(), 4 * moments.len(), "every task and callback ran");
}

/// Flows of all shapes on two workers, one of which is killed whenever it holds a job.
async fn every_flow_ends_although_a_worker_is_killed_again_and_again(fleet: &mut Fleet) {
    let (flows_per_death, deaths) = (5, 4);
    // Ten tasks and a callback per flow, and three children of its durable task.
    let jobs_per_flow = 10 + 1 + 3;
    fleet.config.max_interruptions = 20;
    let limit = GroupChange { limit: Some(Some(3)), ..GroupChange::default() };
    fleet.client().set_group("default", "acme", limit).await.unwrap();
    fleet.client().emit("go", &()).await.unwrap();
    let mut ids = Vec::new();

    fleet.start();
    let mut victim = fleet.start();
    for _ in 0..deaths {
        fleet
            .wait_until("the worker holds a job", async |fleet| {
                // On a slow machine, the other worker may have done everything meanwhile.
                if fleet.count(Status::Succeeded).await == (ids.len() * jobs_per_flow) as u64 {
                    for _ in 0..flows_per_death {
                        ids.push(enqueue_flow(fleet, ids.len()).await);
                    }
                }
                // Pause it while we query the database, so that it holds the job when it dies.
                fleet.process(victim).signal("STOP");
                let holds_jobs = holds_a_job(fleet, victim).await;
                fleet.process(victim).signal(if holds_jobs { "KILL" } else { "CONT" });
                holds_jobs
            })
            .await;
        fleet.process(victim).wait_for_exit().await;
        fleet.count_as_dead(victim).await;
        victim = fleet.start();
        for _ in 0..flows_per_death {
            ids.push(enqueue_flow(fleet, ids.len()).await);
        }
    }
    let jobs = ids.len() * jobs_per_flow;
    fleet.wait_until_succeeded(jobs).await;

    let mut interrupted = 0;
    for job in fleet.jobs().await {
        assert_eq!(job.status, Status::Succeeded, "{job:?}");
        interrupted += usize::from(job.kind == "sleep" && job.lease_no > 1);
        if job.kind == "durable" {
            assert_journal(fleet, job.id).await;
        }
    }
    for id in ids {
        let flow = fleet.client().flow(id).await.unwrap();
        let observed = (flow.status, flow.members, flow.open, flow.failed);
        assert_eq!(observed, (FlowStatus::Succeeded, 10, 0, 0));
    }
    assert!(fleet.event_counts(&EventKind::Success).values().all(|times| *times == 1), "no success twice");
    assert!(interrupted > 0, "some jobs were interrupted");
    eprintln!("{jobs} jobs, {deaths} deaths, {interrupted} jobs interrupted");
}

async fn enqueue_flow(fleet: &Fleet, nth: usize) -> FlowId {
    let flow = if nth.is_multiple_of(2) { chain(nth) } else { diamond(nth) };
    let flow = flow.on_success(NewJob::new("noop", &[0]));
    fleet.client().enqueue_flow(flow).await.unwrap().id
}

/// Whether the process runs a `sleep` job now, according to the event log and the database.
async fn holds_a_job(fleet: &mut Fleet, process: usize) -> bool {
    let pid = fleet.process(process).pid();
    let starts = fleet.events_of(&EventKind::Start);
    for start in starts.iter().rev().filter(|start| start.pid == pid).take(8) {
        let job = fleet.get(start.job).await;
        if job.kind == "sleep" && (job.status, job.lease_no) == (Status::Running, start.lease_no) {
            return true;
        }
    }
    false
}

/// The tasks of a flow: the fourth is durable, and every third is in a group.
fn load_task(flow: usize, nth: usize) -> longshore::Task {
    let job = if nth == 3 { NewJob::new("durable", &[5]) } else { NewJob::new("sleep", &[20]) };
    let job = if (flow + nth).is_multiple_of(3) { job.group("acme") } else { job };
    task(format!("t{nth}"), job)
}

fn chain(flow: usize) -> Flow {
    (0..10).map(|nth| load_task(flow, nth)).fold(Flow::new("chain"), Flow::then)
}

/// One task, eight after it, and one after those.
fn diamond(flow: usize) -> Flow {
    let middle = |nth: usize| load_task(flow, nth).after("t0");
    let started = (1..9).map(middle).fold(Flow::new("diamond").task(load_task(flow, 0)), Flow::task);
    started.task(load_task(flow, 9).after_all((1..9).map(|nth| format!("t{nth}"))))
}
