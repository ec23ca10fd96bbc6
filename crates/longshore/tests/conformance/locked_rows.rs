//! A client's open transaction that has locked flows, waits or members delays only the work on those, however many they
//! are. In each case the transaction is open until the others have got through. SQLite has no row locks: an open transaction
//! that has written delays all writers, for up to 5 s.

use longshore::rules::lifecycle::PendingWait;
use longshore::store::{NewChildren, Spawned};
use longshore::{
    Action, Client, Ending, Flow, FlowFilter, FlowId, FlowStatus, JobId, ListFilter, NewJob, NewOperation,
    OperationState, Result, Status, chain, task,
};
use sqlx::PgConnection;
use tokio::task::JoinHandle;

use crate::fixture::*;
use crate::flows::{member, named, put, record};
use crate::isolation::everything_else_works;
use crate::locks::{in_time, open_transaction, roll_back, until_blocked_by};
use crate::worker::until;

cases! {
    only on postgres:
    adds_to_a_locked_flow_delay_nothing_else,
    seals_and_cancels_of_a_locked_flow_delay_nothing_else,
    a_call_about_a_locked_flow_is_refused_with_its_name,
    many_locked_flows_do_not_delay_a_newer_one,
    many_locked_members_do_not_delay_other_flows,
    many_locked_waits_do_not_delay_other_events,
    more_locked_waits_of_one_event_than_a_step_wakes_do_not_delay_its_others,
    many_locked_waits_do_not_delay_a_join,
    locked_flows_past_their_deadline_do_not_delay_upkeep,
    a_locked_member_does_not_delay_the_cancel_of_the_others,
    locked_jobs_do_not_delay_the_others_of_their_operation,
    many_locked_jobs_do_not_delay_the_others_of_their_operation,
    a_pass_of_upkeep_is_left_to_the_process_that_does_it,
}

/// More than the pool has connections.
const CALLERS: usize = 96;

/// An open flow with one task.
async fn open_flow(fixture: &Fixture) -> FlowId {
    put(fixture, Flow::new("f").open().task(task("a", job("held").queue("flows")))).await.id
}

/// A transaction that adds a task to the flow in SQL.
async fn lock_flow(fixture: &Fixture, flow: FlowId) -> PgConnection {
    open_transaction(
        fixture,
        &format!("select enqueue('x', flow => '{flow}', task => 'x', queue => 'flows')"),
    )
    .await
}

/// Callers that repeat a call until the flow is no longer locked.
fn callers(
    fixture: &Fixture,
    call: fn(Client, FlowId, usize) -> Calling,
    flow: FlowId,
) -> Vec<JoinHandle<()>> {
    let repeat = |nth| {
        let client = fixture.client();
        tokio::spawn(async move {
            while let Err(error) = call(client.clone(), flow, nth).await {
                if error.is_conflict() {
                    return;
                }
                assert!(error.is_unavailable(), "{error:?}");
            }
        })
    };
    (0..CALLERS).map(repeat).collect()
}

type Calling = std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send>>;

fn add(client: Client, flow: FlowId, _: usize) -> Calling {
    Box::pin(async move { client.add_to_flow(flow, [job("part").queue("flows")]).await })
}

fn seal_or_cancel(client: Client, flow: FlowId, nth: usize) -> Calling {
    Box::pin(async move {
        match nth % 2 {
            0 => client.seal_flow(flow).await,
            _ => client.cancel_flow(flow).await.map(drop),
        }
    })
}

async fn works<T>(what: &str, work: impl Future<Output = Result<T>>) -> T {
    in_time(work).await.unwrap_or_else(|error| panic!("{what}: {error:?}"))
}

/// What others ask of a server.
async fn others_work(fixture: &Fixture) {
    for round in 0..3 {
        everything_else_works(fixture, round).await;
        works("a list", fixture.list(&ListFilter::default())).await;
        works("statistics", fixture.counts()).await;
        works("a list of flows", fixture.flows(&FlowFilter::default())).await;
        let flow = Flow::new("new").task(task("a", job("new").queue("flows")));
        works("a new flow", async { fixture.enqueue_flow(flow).await }).await;
        works("a pause", fixture.pause("letters")).await;
    }
}

async fn adds_to_a_locked_flow_delay_nothing_else(fixture: Fixture) {
    let flow = open_flow(&fixture).await;
    let mut lock = lock_flow(&fixture, flow).await;
    let adds = callers(&fixture, add, flow);
    until_blocked_by(&mut lock).await;
    others_work(&fixture).await;
    roll_back(lock).await;
    for add in adds {
        in_time(add).await.expect("the flow is free");
    }
    assert_eq!(record(&fixture, flow).await.members, 1 + CALLERS as u64);
}

/// How many sessions the transaction blocks.
async fn blocked_by(lock: &mut PgConnection) -> i64 {
    const BLOCKED: &str = "
        select count(*)
          from pg_stat_activity
         where pg_backend_pid() = any(pg_blocking_pids(pid))";
    sqlx::query_scalar(BLOCKED).fetch_one(lock).await.expect("pg_stat_activity")
}

async fn seals_and_cancels_of_a_locked_flow_delay_nothing_else(fixture: Fixture) {
    let flow = open_flow(&fixture).await;
    let mut lock = lock_flow(&fixture, flow).await;
    let calls = callers(&fixture, seal_or_cancel, flow);
    until_blocked_by(&mut lock).await;
    others_work(&fixture).await;
    roll_back(lock).await;
    for call in calls {
        in_time(call).await.expect("the flow is free");
    }
    until("the flow ends", || async {
        fixture.advance_flows().await.expect("advance_flows");
        record(&fixture, flow).await.status == FlowStatus::Cancelled
    })
    .await;
}

async fn a_call_about_a_locked_flow_is_refused_with_its_name(fixture: Fixture) {
    let flow = open_flow(&fixture).await;
    let lock = lock_flow(&fixture, flow).await;
    let client = fixture.client();
    let refused = in_time(async {
        tokio::join!(
            client.add_to_flow(flow, [job("part")]),
            client.seal_flow(flow),
            async { client.cancel_flow(flow).await.map(drop) },
            async { client.retry_flow(flow).await.map(drop) },
        )
    })
    .await;
    for refused in [refused.0, refused.1, refused.2, refused.3] {
        let error = refused.expect_err("the flow is locked");
        assert!(error.is_unavailable(), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&flow.to_string()) && text.contains("try again later"), "{text}");
    }
    roll_back(lock).await;
}

/// The second task of a flow that was enqueued after these is due when the first one has ended.
async fn a_newer_flow_is_followed(fixture: &Fixture) {
    put(fixture, chain![task("c", job("c").queue("newer")), task("d", job("d").queue("newer"))]).await;
    let worker = fixture.worker_with(DAY).await;
    let first = fixture.claim_from("newer", worker, 2).await;
    assert_eq!(kinds(&first), ["c"]);
    fixture.must_finish(&first[0], done()).await;
    in_time(fixture.advance_flows()).await.expect("advance_flows");
    assert_eq!(kinds(&fixture.claim_from("newer", worker, 2).await), ["d"]);
}

async fn many_locked_flows_do_not_delay_a_newer_one(fixture: Fixture) {
    // Nobody follows the ends of the first tasks before the flows are locked.
    let held = fixture.hold_advances().await;
    for _ in 0..260 {
        put(&fixture, chain![named("a"), named("b")]).await;
    }
    let worker = fixture.worker_with(DAY).await;
    for claimed in fixture.claim(worker, 260).await {
        fixture.must_finish(&claimed, done_without_result()).await;
    }
    let lock = open_transaction(&fixture, "select 1 from flows for no key update").await;
    drop(held);
    a_newer_flow_is_followed(&fixture).await;
    roll_back(lock).await;
    fixture.advance_flows().await.expect("advance_flows");
    assert_eq!(fixture.query_number("select count(*) from flow_changes", None).await, 0);
}

/// Flows that cannot be followed, because jobs are locked that would start, end, or wait again.
async fn many_locked_members_do_not_delay_other_flows(fixture: Fixture) {
    const OF_EACH_SORT: u32 = 40;
    for _ in 0..OF_EACH_SORT {
        put(&fixture, chain![task("a", job("ok")), named("released")]).await;
        put(&fixture, chain![task("a", job("bad")), named("skipped")]).await;
        put(&fixture, Flow::new("f").task(task("a", job("ok"))).on_success(job("callback"))).await;
        put(&fixture, chain![task("a", job("bad").queue("retried")), named("back")]).await;
    }
    let worker = fixture.worker_with(DAY).await;
    let retried = fixture.claim_from("retried", worker, OF_EACH_SORT).await;
    for claimed in &retried {
        fixture.must_finish(claimed, failed_permanently()).await;
    }
    fixture.advance_flows().await.expect("advance_flows");
    assert_eq!(
        fixture.count(Status::Cancelled).await,
        u64::from(OF_EACH_SORT),
        "those after them are skipped"
    );
    let held = fixture.hold_advances().await;
    for id in ids(&retried) {
        fixture.retry(id).await.expect("retry");
    }
    for claimed in fixture.claim(worker, 3 * OF_EACH_SORT).await {
        let ending = if claimed.kind() == "bad" { failed_permanently() } else { done_without_result() };
        fixture.must_finish(&claimed, ending).await;
    }
    let lock = "select 1 from ready where held for update; select 1 from finished where skipped for update";
    let mut lock = open_transaction(&fixture, lock).await;
    drop(held);
    // A wait of 10 ms for each of the others would be seen.
    let nobody_waits = async {
        while blocked_by(&mut lock).await == 0 {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::select! {
        () = a_newer_flow_is_followed(&fixture) => {}
        () = nobody_waits => panic!("a locked job is waited for"),
    }
    let kept = fixture.query_number("select count(distinct flow) from flow_changes", None).await;
    assert_eq!(kept, i64::from(4 * OF_EACH_SORT), "they are followed later");
    roll_back(lock).await;
    fixture.advance_flows().await.expect("advance_flows");
    assert_eq!(fixture.query_number("select count(*) from flow_changes", None).await, 0);
    for (task, left) in [("released", 0), ("skipped", 0), ("callback", 0), ("back", OF_EACH_SORT)] {
        let held = format!("select count(*) from ready where held and kind = '{task}'");
        assert_eq!(fixture.query_number(&held, None).await, i64::from(left), "{task}");
    }
}

/// Suspends a job that waits for this event.
async fn suspended(fixture: &Fixture, event: &str) -> JobId {
    let claimed = fixture.running(job("pay")).await;
    let waits = vec![PendingWait { step: format!("event:{event}"), until: None, events: vec![event.into()] }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    claimed.lease().id
}

/// Suspends 101 jobs, locks them, and emits the events that they wait for.
async fn lock_waits(fixture: &Fixture) -> PgConnection {
    for n in 0..101 {
        suspended(fixture, &format!("e{n}")).await;
    }
    let lock = open_transaction(fixture, "select 1 from ready for update").await;
    for n in 0..101 {
        fixture.emit(&format!("e{n}"), &n).await.expect("emit");
    }
    fixture.advance(SECOND).await;
    lock
}

async fn many_locked_waits_do_not_delay_other_events(fixture: Fixture) {
    let lock = lock_waits(&fixture).await;
    let free = suspended(&fixture, "free").await;
    assert!(fixture.get(free).await.expect("get").run_at > fixture.now().await);
    fixture.emit("free", &1).await.expect("emit");
    assert_eq!(fixture.get(free).await.expect("get").run_at, fixture.now().await);
    roll_back(lock).await;
    assert_eq!(fixture.deliver_events().await.expect("deliver"), 101);
}

async fn more_locked_waits_of_one_event_than_a_step_wakes_do_not_delay_its_others(fixture: Fixture) {
    const LOCKED: usize = 1001;
    let jobs: Vec<NewJob> = (0..=LOCKED).map(|_| job("pay")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    // One claim takes up to 1,000.
    let mut claimed = fixture.claim(worker, LOCKED as u32 + 1).await;
    claimed.extend(fixture.claim(worker, LOCKED as u32 + 1).await);
    assert_eq!(claimed.len(), LOCKED + 1);
    let report = |claimed| {
        let waits = vec![PendingWait { step: "event:b".into(), until: None, events: vec!["b".into()] }];
        longshore::Report {
            claimed,
            ending: Ending::Suspended { waits },
            follow_ups: Vec::new(),
            has_progressed: false,
        }
    };
    for part in claimed.chunks(500) {
        fixture.settle(part.iter().map(report).collect()).await.expect("settle");
    }
    // The waits are read in the order of the ids.
    let free = ids(&claimed).into_iter().max().expect("a job");
    let lock =
        open_transaction(&fixture, &format!("select 1 from ready where id <> '{free}' for update")).await;
    fixture.emit("b", &1).await.expect("emit");
    assert_eq!(fixture.get(free).await.expect("get").run_at, start());
    roll_back(lock).await;
    assert_eq!(fixture.deliver_events().await.expect("deliver"), LOCKED);
}

async fn many_locked_waits_do_not_delay_a_join(fixture: Fixture) {
    let lock = lock_waits(&fixture).await;
    let parent = fixture.running(job("parent")).await;
    let id = parent.lease().id;
    let children = NewChildren {
        lease: parent.lease(),
        kind: "parent".into(),
        step: "children".into(),
        value: raw("1"),
        members: Vec::new(),
    };
    let held = fixture.hold_advances().await;
    assert_eq!(fixture.store().spawn(&children).await.expect("spawn"), Spawned::Stored);
    let waits =
        vec![PendingWait { step: "join".into(), until: None, events: vec![format!("flow-ended:{id}")] }];
    fixture.must_finish(&parent, Ending::Suspended { waits }).await;
    drop(held);
    in_time(fixture.advance_flows()).await.expect("advance_flows");
    let worker = fixture.worker_with(DAY).await;
    assert_eq!(ids(&fixture.claim(worker, 9).await), [id]);
    roll_back(lock).await;
}

async fn locked_flows_past_their_deadline_do_not_delay_upkeep(fixture: Fixture) {
    let flow = |deadline| Flow::new("f").task(task("a", job("a").queue("flows"))).deadline(deadline);
    for _ in 0..101 {
        put(&fixture, flow(SECOND)).await;
    }
    let mut lock = open_transaction(&fixture, "select 1 from flows for no key update").await;
    let free = put(&fixture, flow(2 * SECOND)).await.id;
    let waiting = suspended(&fixture, "approved").await;
    fixture.advance(3 * SECOND).await;
    fixture.sql("select emit('approved')", None).await;
    in_time(fixture.do_pending()).await.expect("do_pending");
    assert_eq!(fixture.get(waiting).await.expect("get").run_at, fixture.now().await);
    assert!(record(&fixture, free).await.cancelled);
    sqlx::raw_sql("rollback").execute(&mut lock).await.expect("rollback");
    for _ in 0..2 {
        fixture.do_pending().await.expect("do_pending");
    }
    let open = "select count(*) from flows where not cancelled";
    assert_eq!(fixture.query_number(open, None).await, 0, "the others were cancelled afterwards");
}

async fn a_locked_member_does_not_delay_the_cancel_of_the_others(fixture: Fixture) {
    let flow = (0..3).fold(Flow::new("f"), |flow, n| flow.task(named(&format!("t{n}"))));
    let flow = put(&fixture, flow).await.id;
    let locked = member(&fixture, flow, "t1").await;
    let lock =
        open_transaction(&fixture, &format!("select 1 from ready where id = '{locked}' for update")).await;
    assert_eq!(in_time(fixture.cancel_flow(flow)).await.expect("cancel_flow").cancelled, 2);
    assert_eq!(fixture.status(locked).await, Status::Queued);
    // Upkeep tries again, and has as little success.
    fixture.advance(11 * SECOND).await;
    in_time(fixture.do_pending()).await.expect("do_pending");
    assert_eq!(fixture.status(locked).await, Status::Queued);
    roll_back(lock).await;
    fixture.advance(11 * SECOND).await;
    fixture.do_pending().await.expect("do_pending");
    fixture.advance_flows().await.expect("advance_flows");
    assert_eq!(fixture.status(locked).await, Status::Cancelled);
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Cancelled);
}

async fn locked_jobs_do_not_delay_the_others_of_their_operation(fixture: Fixture) {
    for by_id in [false, true] {
        let kind = format!("mail-{by_id}");
        let mut all = Vec::new();
        for _ in 0..5 {
            all.push(fixture.enqueue_kind(&kind).await);
        }
        let operation = match by_id {
            true => NewOperation::of_jobs(Action::Cancel, all.clone()),
            false => {
                let filter = longshore::JobFilter { kind: Some(kind), ..Default::default() };
                NewOperation::matching(Action::Cancel, filter)
            }
        };
        let id = fixture.start_operation(operation).await.expect("start").id;
        // The first that the operation visits, and another one.
        let (newest, other) = (all[4], all[1]);
        let lock = format!("select 1 from ready where id in ('{newest}', '{other}') for update");
        let lock = open_transaction(&fixture, &lock).await;
        in_time(fixture.run_operations(|_| std::future::ready(true))).await.expect("run");
        let waiting = fixture.operation(id).await.expect("operation");
        assert_eq!((waiting.state, waiting.examined, waiting.changed), (OperationState::Running, 3, 3));
        let error = waiting.error.expect("an error");
        assert!(error.contains("trying again") && error.contains(&newest.to_string()), "{error}");
        roll_back(lock).await;
        fixture.advance(5 * SECOND).await;
        fixture.run_operations(|_| std::future::ready(true)).await.expect("run");
        let done = fixture.operation(id).await.expect("operation");
        assert_eq!((done.state, done.examined, done.changed), (OperationState::Done, 5, 5));
        assert_eq!(done.error, None);
    }
}

/// More than one turn of an operation visits.
async fn many_locked_jobs_do_not_delay_the_others_of_their_operation(fixture: Fixture) {
    const LOCKED: usize = 1003;
    // The last job that the operation visits, and the first one.
    let oldest = fixture.enqueue_kind("mail").await;
    let locked =
        fixture.enqueue_many((0..LOCKED).map(|_| job("mail")).collect::<Vec<_>>()).await.expect("enqueue");
    let newest = fixture.enqueue_kind("mail").await;
    let filter = longshore::JobFilter { kind: Some("mail".into()), ..Default::default() };
    let id = fixture.start_operation(NewOperation::matching(Action::Cancel, filter)).await.expect("start").id;
    let lock = format!("select 1 from ready where id not in ('{oldest}', '{newest}') for update");
    let lock = open_transaction(&fixture, &lock).await;
    // Six steps for all jobs, and six for those that are locked; more on a slow machine, where a step ends after some seconds.
    let mut steps = 0;
    let run = fixture.run_operations(|_| {
        steps += 1;
        std::future::ready(steps < 100)
    });
    run.await.expect("run");
    assert!(steps < 100, "it visits the locked jobs once more, and then waits");
    let waiting = fixture.operation(id).await.expect("operation");
    assert_eq!((waiting.state, waiting.examined, waiting.changed), (OperationState::Running, 2, 2));
    roll_back(lock).await;
    // It does not return to a job that it has changed. One of the others ends in another way meanwhile.
    fixture.retry(oldest).await.expect("retry");
    fixture.cancel(locked[7].id).await.expect("cancel");
    let mut done = waiting;
    // On a slow machine a change may wait too long for another one of the operation, and is tried again later.
    for _ in 0..20 {
        fixture.advance(5 * SECOND).await;
        fixture.run_operations(|_| std::future::ready(true)).await.expect("run");
        done = fixture.operation(id).await.expect("operation");
        if done.state == OperationState::Done {
            break;
        }
    }
    let counts = [done.examined, done.changed, done.skipped];
    assert_eq!((done.state, counts), (OperationState::Done, [1005, 1004, 1]));
    assert_eq!(fixture.status(oldest).await, Status::Queued);
    assert_eq!(fixture.count(Status::Cancelled).await, 1004);
    assert_eq!(fixture.query_number("select count(*) from operation_locked", None).await, 0);
}

async fn a_pass_of_upkeep_is_left_to_the_process_that_does_it(fixture: Fixture) {
    let claimed = fixture.running(job("mail").max_attempts(1)).await;
    fixture.must_finish(&claimed, failed()).await;
    fixture.store_measures().await;
    fixture.advance(4 * HOUR).await;
    let passes = async || {
        let store = fixture.store();
        let groups = store.fold_error_groups(9).await.expect("fold_error_groups");
        let measures = store.fold_measures(9).await.expect("fold_measures");
        [groups, measures, store.fold_tallies(9).await.expect("fold_tallies")]
    };
    let lock = open_transaction(&fixture, "select 1 from upkeep for update").await;
    assert_eq!(in_time(passes()).await, [0, 0, 0]);
    roll_back(lock).await;
    let folded = passes().await;
    assert!(folded.iter().all(|rows| *rows > 0), "{folded:?}");
}
