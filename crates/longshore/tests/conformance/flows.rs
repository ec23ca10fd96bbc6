//! Flows: jobs that wait for others, callbacks and parts. `flow_operations` has cancel, retry, deadlines and
//! retention, and `flow_children` what handlers do.

use std::collections::BTreeMap;
use std::time::Duration;

use longshore::store::{Claimed, Fenced};
use longshore::{
    Client, Edit, Ending, Flow, FlowFilter, FlowId, FlowRecord, FlowStatus, JobId, NewJob, Report, Status,
    WorkerId, chain, task,
};
use sqlx::Connection;

use crate::dead_connections::Proxy;
use crate::fixture::*;
use crate::worker::until;

cases! {
    a_task_starts_after_its_last_parent_has_succeeded,
    a_task_is_skipped_when_a_parent_does_not_succeed,
    conditions_select_what_runs_after_a_failure,
    a_skipped_task_does_not_make_the_flow_fail,
    callbacks_run_once_when_the_flow_has_ended,
    a_deep_cascade_ends_every_task,
    a_wide_fan_out_is_released_in_steps,
    a_held_task_keeps_its_time_group_and_priority,
    a_held_task_can_be_cancelled_and_edited_but_not_run,
    an_end_that_nobody_followed_is_followed_by_upkeep,
    a_stale_settle_changes_nothing_in_the_flow,
    a_task_that_retries_keeps_its_children_waiting,
    recovery_of_a_task_releases_or_skips_its_children,
    an_open_flow_grows_in_parts_and_ends_when_it_is_sealed,
    the_same_part_is_added_once,
    an_idempotency_key_returns_the_first_flow,
    a_flow_that_is_invalid_stores_nothing,
    flows_are_listed_newest_first,
    the_members_of_a_flow_are_counted_by_queue,
    the_last_two_parents_release_a_child_once,
    a_flow_that_cannot_be_stored_delays_no_other,
}

cases! {
    only on postgres:
    sql_enqueues_a_flow,
    sql_adds_no_task_after_one_that_was_retried_a_moment_ago,
    a_flow_in_the_callers_transaction_exists_if_it_commits,
    a_flow_that_another_transaction_has_locked_delays_no_other,
    a_wide_flow_is_followed_with_few_reads_after_empty_tables_were_analyzed,
    a_task_that_others_wait_for_is_followed_in_nine_round_trips,
}

pub(crate) fn named(name: &str) -> longshore::Task {
    task(name, job(name))
}

pub(crate) async fn put(fixture: &Fixture, flow: Flow) -> FlowRecord {
    fixture.enqueue_flow(flow).await.expect("enqueue_flow")
}

pub(crate) async fn follow(fixture: &Fixture) {
    fixture.advance_flows().await.expect("advance_flows");
}

pub(crate) async fn record(fixture: &Fixture, id: FlowId) -> FlowRecord {
    fixture.flow(id).await.expect("flow")
}

/// The status of each task, by name, with a word for those that are held or skipped.
pub(crate) async fn statuses(fixture: &Fixture, flow: FlowId) -> BTreeMap<String, &'static str> {
    follow(fixture).await;
    let tasks = fixture.tasks(flow, None, 1000).await.expect("tasks");
    let word = |task: &longshore::TaskRecord| match task {
        task if task.held => "held",
        task if task.skipped => "skipped",
        task => task.status.as_str(),
    };
    tasks.iter().map(|task| (task.task.clone().unwrap_or_else(|| task.id.to_string()), word(task))).collect()
}

pub(crate) async fn expect<const N: usize>(
    fixture: &Fixture,
    flow: FlowId,
    expected: [(&str, &'static str); N],
) {
    let expected: BTreeMap<String, &str> =
        expected.into_iter().map(|(name, status)| (name.to_owned(), status)).collect();
    assert_eq!(statuses(fixture, flow).await, expected);
}

/// Claims the due jobs and ends those of this kind in the given way; releases the others.
pub(crate) async fn end(fixture: &Fixture, worker: WorkerId, kind: &str, ending: Ending) {
    follow(fixture).await;
    let claimed = fixture.claim(worker, 1000).await;
    let mut found = false;
    for claimed in &claimed {
        if claimed.kind() == kind {
            found = true;
            fixture.must_finish(claimed, ending.clone()).await;
        } else {
            fixture.must_finish(claimed, not_started(claimed)).await;
        }
    }
    assert!(found, "`{kind}` is not due, but {:?}", kinds(&claimed));
    follow(fixture).await;
}

pub(crate) async fn member(fixture: &Fixture, flow: FlowId, name: &str) -> JobId {
    let tasks = fixture.tasks(flow, None, 1000).await.expect("tasks");
    tasks.iter().find(|task| task.task.as_deref() == Some(name)).expect("a task").id
}

async fn a_task_starts_after_its_last_parent_has_succeeded(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b")).task(named("c").after("a").after("b"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    expect(&fixture, flow, [("a", "queued"), ("b", "queued"), ("c", "held")]).await;
    end(&fixture, worker, "a", done()).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "queued"), ("c", "held")]).await;
    end(&fixture, worker, "b", done_without_result()).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "succeeded"), ("c", "queued")]).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Running);
    end(&fixture, worker, "c", done()).await;
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.open, ended.failed, ended.members), (FlowStatus::Succeeded, 0, 0, 3));
    assert!(ended.ended_at.is_some());
}

async fn a_task_is_skipped_when_a_parent_does_not_succeed(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("a"))
        .task(named("b").after("a"))
        .task(named("c").after("b"))
        .task(named("other"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "a", failed_permanently()).await;
    let expected = [("a", "failed_permanent"), ("b", "skipped"), ("c", "skipped"), ("other", "queued")];
    expect(&fixture, flow, expected).await;
    let skipped = fixture.job(member(&fixture, flow, "c").await).await;
    assert_eq!(skipped.status, Status::Cancelled);
    assert_eq!(skipped.last_error.as_deref(), Some("skipped: task `b` did not succeed"));
    end(&fixture, worker, "other", done()).await;
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.failed), (FlowStatus::Failed, 1));
}

async fn conditions_select_what_runs_after_a_failure(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("work"))
        .task(named("next").after("work"))
        .task(named("always").after_end("work"))
        .task(named("undo").after_failure("work"))
        .task(named("undone").after("undo").after_end("next"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "work", failed_permanently()).await;
    expect(
        &fixture,
        flow,
        [
            ("work", "failed_permanent"),
            ("next", "skipped"),
            ("always", "queued"),
            ("undo", "queued"),
            ("undone", "held"),
        ],
    )
    .await;
    end(&fixture, worker, "undo", done()).await;
    end(&fixture, worker, "undone", done()).await;
    end(&fixture, worker, "always", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
}

async fn a_skipped_task_does_not_make_the_flow_fail(fixture: Fixture) {
    let flow = Flow::new("f").task(named("work")).task(named("undo").after_failure("work"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "work", done()).await;
    expect(&fixture, flow, [("work", "succeeded"), ("undo", "skipped")]).await;
    let skipped = fixture.job(member(&fixture, flow, "undo").await).await;
    assert_eq!(skipped.last_error.as_deref(), Some("skipped: task `work` succeeded"));
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn callbacks_run_once_when_the_flow_has_ended(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("a"))
        .task(named("b"))
        .on_end(job("ended"))
        .on_success(job("succeeded"))
        .on_failure(job("failed"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "a", done()).await;
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["b"]);
    fixture.crash_all_workers().await;
    fixture.advance(MINUTE).await;
    let worker = fixture.worker().await;
    end(&fixture, worker, "b", failed_permanently()).await;
    let claimed = fixture.claim(worker, 9).await;
    let mut found = kinds(&claimed);
    found.sort_unstable();
    assert_eq!(found, ["ended", "failed"]);
    for claimed in &claimed {
        fixture.must_finish(claimed, done()).await;
    }
    follow(&fixture).await;
    assert!(fixture.claim(worker, 9).await.is_empty());
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
}

async fn a_deep_cascade_ends_every_task(fixture: Fixture) {
    let tasks = (0..300).map(|n| named(&format!("t{n}")));
    let flow = put(&fixture, tasks.fold(Flow::new("deep"), Flow::then)).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "t0", failed_permanently()).await;
    let statuses = statuses(&fixture, flow).await;
    assert_eq!(statuses.values().filter(|status| **status == "skipped").count(), 299);
    assert_eq!(record(&fixture, flow).await.open, 0);
}

async fn a_wide_fan_out_is_released_in_steps(fixture: Fixture) {
    let children: Vec<_> = (0..4_500).map(|n| task(format!("c{n}"), job("child")).after("first")).collect();
    let flow = children.into_iter().fold(Flow::new("wide").task(named("first")), Flow::task);
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", done()).await;
    let mut claimed = Vec::new();
    for _ in 0..5 {
        claimed.extend(fixture.claim(worker, 1000).await);
    }
    assert_eq!(claimed.len(), 4_500);
    let reports = claimed.iter().map(|claimed| Report {
        claimed,
        ending: done_without_result(),
        follow_ups: Vec::new(),
        has_progressed: false,
    });
    fixture.settle(reports.collect()).await.expect("settle");
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn a_held_task_keeps_its_time_group_and_priority(fixture: Fixture) {
    let later = job("later").delay(HOUR).group("acme").priority(7).queue("slow");
    let flow = Flow::new("f").task(named("a")).task(task("later", later).after("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    let due = fixture.now().await + HOUR;
    assert!(fixture.claim_from("slow", worker, 9).await.is_empty());
    end(&fixture, worker, "a", done()).await;
    let released = fixture.job(member(&fixture, flow, "later").await).await;
    assert_eq!((released.run_at, released.priority, released.group.as_deref()), (due, 7, Some("acme")));
    assert!(fixture.claim_from("slow", worker, 9).await.is_empty());
    fixture.advance(HOUR).await;
    let claimed = fixture.claim_from("slow", worker, 9).await;
    assert_eq!((kinds(&claimed), claimed[0].flow()), (vec!["later"], Some(flow)));
}

async fn a_held_task_can_be_cancelled_and_edited_but_not_run(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b").after("a")).task(named("c").after_end("b"));
    let flow = put(&fixture, flow).await.id;
    let held = member(&fixture, flow, "b").await;
    let refused = fixture.retry(held).await.expect_err("it is held");
    assert!(refused.is_conflict() && refused.to_string().contains("waits for other tasks"), "{refused}");
    fixture.edit(held, Edit::default().priority(3).when(longshore::When::NOW)).await.expect("edit");
    expect(&fixture, flow, [("a", "queued"), ("b", "held"), ("c", "held")]).await;
    assert_eq!(fixture.job(held).await.priority, 3);
    fixture.cancel(held).await.expect("cancel");
    expect(&fixture, flow, [("a", "queued"), ("b", "cancelled"), ("c", "queued")]).await;
}

async fn an_end_that_nobody_followed_is_followed_by_upkeep(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    // The process dies after the settle: another one has to follow it.
    let report = Report { claimed: &claimed, ending: done(), follow_ups: Vec::new(), has_progressed: false };
    let lonely = fixture.second_client().await;
    let _dead = lonely.hold_advances().await;
    lonely.settle(vec![report]).await.expect("settle");
    fixture.do_pending().await.expect("do_pending");
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["b"]);
    assert_eq!(record(&fixture, flow).await.open, 1);
}

async fn a_stale_settle_changes_nothing_in_the_flow(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker().await;
    let stale = fixture.claim_one(worker).await;
    fixture.crash_all_workers().await;
    assert_eq!(fixture.finish(&stale, done()).await, Fenced::LeaseLost);
    expect(&fixture, flow, [("a", "retrying"), ("b", "held")]).await;
    // A repeated settle is stored once.
    fixture.advance(MINUTE).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    for _ in 0..2 {
        fixture.must_finish(&claimed, done()).await;
        follow(&fixture).await;
    }
    assert_eq!(record(&fixture, flow).await.open, 1);
}

async fn a_task_that_retries_keeps_its_children_waiting(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    for ending in [failed(), snoozed(), Ending::Released] {
        end(&fixture, worker, "a", ending).await;
        assert_eq!(statuses(&fixture, flow).await["b"], "held");
        fixture.advance(MINUTE).await;
    }
    end(&fixture, worker, "a", done()).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "queued")]).await;
}

async fn recovery_of_a_task_releases_or_skips_its_children(fixture: Fixture) {
    let flow =
        Flow::new("f").task(named("a")).task(named("b").after("a")).task(named("c").after_failure("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    // The worker dies with a job whose cancel was requested, so recovery ends the job.
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    assert_eq!(fixture.crash_all_workers().await.recovered, 1);
    expect(&fixture, flow, [("a", "cancelled"), ("b", "skipped"), ("c", "queued")]).await;
}

async fn an_open_flow_grows_in_parts_and_ends_when_it_is_sealed(fixture: Fixture) {
    let batch = put(&fixture, Flow::new("batch").open().on_end(job("report"))).await.id;
    let worker = fixture.worker().await;
    for _ in 0..3 {
        fixture.add_to_flow(batch, (0..10).map(|_| job("part"))).await.expect("add_to_flow");
    }
    for claimed in fixture.claim(worker, 100).await {
        fixture.must_finish(&claimed, done_without_result()).await;
    }
    follow(&fixture).await;
    let open = record(&fixture, batch).await;
    assert_eq!((open.members, open.open, open.status), (30, 0, FlowStatus::Running));
    fixture.seal_flow(batch).await.expect("seal_flow");
    follow(&fixture).await;
    assert_eq!(record(&fixture, batch).await.status, FlowStatus::Succeeded);
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["report"]);
    let refused = fixture.add_to_flow(batch, [job("part")]).await.expect_err("it is sealed");
    assert!(refused.is_conflict(), "{refused}");
    assert!(fixture.seal_flow(FlowId::new()).await.expect_err("unknown").is_not_found());
}

async fn the_same_part_is_added_once(fixture: Fixture) {
    let batch = put(&fixture, Flow::new("batch").open()).await.id;
    let part: Vec<NewJob> = (0..3).map(|_| job("part")).collect();
    for _ in 0..2 {
        fixture.add_to_flow(batch, part.clone()).await.expect("add_to_flow");
    }
    assert_eq!(record(&fixture, batch).await.members, 3);
    let too_many = (0..10_001).map(|_| job("part"));
    let refused = fixture.add_to_flow(batch, too_many).await.expect_err("too many");
    assert_eq!(refused.field(), Some("jobs"), "{refused}");
    assert_eq!(record(&fixture, batch).await.members, 3);
}

async fn an_idempotency_key_returns_the_first_flow(fixture: Fixture) {
    let flow = || chain![named("a"), named("b")].idempotency_key("import-7");
    let first = put(&fixture, flow()).await;
    let second = put(&fixture, flow().name("another")).await;
    assert_eq!((second.id, second.name.as_str()), (first.id, "chain"));
    assert_eq!(fixture.count(Status::Queued).await, 2);
    // A repeated call with the same id, whose first reply was lost, stores nothing again.
    let repeated = Flow::new("again").task(named("x"));
    for _ in 0..2 {
        put(&fixture, repeated.clone()).await;
    }
    assert_eq!(fixture.count(Status::Queued).await, 3);
}

async fn a_flow_that_is_invalid_stores_nothing(fixture: Fixture) {
    let invalid = [
        ("after", Flow::new("f").task(named("a").after("b")).task(named("b").after("a"))),
        ("after", Flow::new("f").task(named("a").after("nobody"))),
        ("task", Flow::new("f").task(named("a")).task(named("a"))),
        ("task", Flow::new("f").task(named(&"x".repeat(129)))),
        ("name", Flow::new("").task(named("a"))),
        ("tasks", Flow::new("f")),
        ("group", Flow::new("f").task(task("a", job("a").group("x".repeat(129))))),
        ("unique_key", Flow::new("f").task(task("a", job("a").unique_key("k", Default::default())))),
        ("deadline", Flow::new("f").task(named("a")).deadline(Duration::ZERO)),
    ];
    for (field, flow) in invalid {
        let refused = fixture.enqueue_flow(flow).await.expect_err(field);
        assert_eq!(refused.field(), Some(field), "{refused}");
    }
    assert_eq!(fixture.flows(&FlowFilter::default()).await.expect("flows"), []);
    assert_eq!(fixture.count(Status::Queued).await, 0);
}

async fn flows_are_listed_newest_first(fixture: Fixture) {
    let mut ids = Vec::new();
    for name in ["a", "b", "a"] {
        ids.push(put(&fixture, Flow::new(name).task(named("t"))).await.id);
    }
    ids.reverse();
    let list = async |filter: FlowFilter| {
        let flows = fixture.flows(&filter).await.expect("flows");
        flows.into_iter().map(|flow| flow.id).collect::<Vec<_>>()
    };
    assert_eq!(list(FlowFilter::default()).await, ids);
    let named = FlowFilter { name: Some("a".into()), limit: 1, ..FlowFilter::default() };
    assert_eq!(list(named.clone()).await, [ids[0]]);
    assert_eq!(list(FlowFilter { before: Some(ids[0]), ..named }).await, [ids[2]]);
    fixture.cancel_flow(ids[1]).await.expect("cancel_flow");
    follow(&fixture).await;
    assert_eq!(list(FlowFilter { open: Some(true), ..FlowFilter::default() }).await, [ids[0], ids[2]]);
    assert_eq!(list(FlowFilter { open: Some(false), ..FlowFilter::default() }).await, [ids[1]]);
}

async fn the_members_of_a_flow_are_counted_by_queue(fixture: Fixture) {
    let in_queue = |name: &str, queue: &str| task(name, job(name).queue(queue));
    let flow = Flow::new("import")
        .task(in_queue("a", "mail"))
        .task(in_queue("b", "mail"))
        .task(in_queue("c", "it's"))
        .task(in_queue("d", "other"))
        .on_end(job("alert").queue("mail"));
    let flow = put(&fixture, flow).await;
    put(&fixture, Flow::new("another").task(in_queue("a", "mail"))).await;
    for (queues, members) in
        [(vec!["mail"], 2), (vec!["mail", "it's"], 3), (vec!["none"], 0), (vec!["other", "it's", "mail"], 4)]
    {
        let queues: Vec<String> = queues.into_iter().map(str::to_owned).collect();
        let counted = fixture.store().members_in(flow.id, &queues).await.expect("count");
        assert_eq!(counted, members, "{queues:?}");
    }
}

async fn the_last_two_parents_release_a_child_once(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..20 {
        let flow =
            Flow::new("f").task(named("a")).task(named("b")).task(named("c").after("a").after_end("b"));
        let flow = put(&fixture, flow).await.id;
        let worker = fixture.worker().await;
        let claimed = fixture.claim(worker, 9).await;
        let settle = async |client: Client, claimed: &Claimed| {
            let report = Report {
                claimed,
                ending: done_without_result(),
                follow_ups: Vec::new(),
                has_progressed: false,
            };
            client.settle(vec![report]).await.expect("settle");
            client.advance_flows().await.expect("advance_flows");
        };
        tokio::join!(settle(fixture.client(), &claimed[0]), settle(other.clone(), &claimed[1]));
        // The client that lost the race for the flow's lock leaves it to the other, which may still be at it.
        let released = || async { statuses(&fixture, flow).await["c"] == "queued" };
        until("the child is released", released).await;
        let last = fixture.claim_one(worker).await;
        fixture.must_finish(&last, done_without_result()).await;
        let has_ended = || async {
            follow(&fixture).await;
            record(&fixture, flow).await.status == FlowStatus::Succeeded
        };
        until("the flow ends", has_ended).await;
        assert!(fixture.claim(worker, 9).await.is_empty());
    }
}

async fn a_flow_that_cannot_be_stored_delays_no_other(fixture: Fixture) {
    let bad = put(&fixture, chain![named("a"), named("b")].name("bad")).await.id;
    let good = put(&fixture, chain![named("c"), named("d")]).await.id;
    let (refuse, accept) = match fixture.engine() {
        Engine::Postgres => (
            "create function refuse() returns trigger language plpgsql as
             $$ begin raise exception 'no'; end $$;
             create trigger refuse before update on flows for each row when (new.name = 'bad') execute function refuse()",
            "drop trigger refuse on flows",
        ),
        Engine::Sqlite => (
            "create trigger refuse before update on flows when new.name = 'bad'
             begin select raise(abort, 'no'); end",
            "drop trigger refuse",
        ),
    };
    fixture.sql(refuse, None).await;
    let worker = fixture.worker().await;
    for claimed in fixture.claim(worker, 9).await {
        fixture.must_finish(&claimed, done()).await;
    }
    expect(&fixture, good, [("c", "succeeded"), ("d", "queued")]).await;
    expect(&fixture, bad, [("a", "succeeded"), ("b", "held")]).await;
    fixture.sql(accept, None).await;
    expect(&fixture, bad, [("a", "succeeded"), ("b", "queued")]).await;
}

async fn sql_enqueues_a_flow(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    let flow = FlowId::new();
    let enqueue = |task: &str, after: &str| {
        format!("select enqueue('{task}', 'null', flow => '{flow}', task => '{task}', after => {after})")
    };
    let mut tx = connection.begin().await.expect("begin");
    for (task, after) in [("a", "null"), ("b", "array['a']"), ("c", "array['a', 'b']")] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(enqueue(task, after))).execute(&mut *tx).await.expect("enqueue");
    }
    tx.commit().await.expect("commit");
    expect(&fixture, flow, [("a", "queued"), ("b", "held"), ("c", "held")]).await;
    for (text, word) in [
        (enqueue("a", "null"), "task"),
        (enqueue("d", "array['x']"), "after"),
        ("select enqueue('d', 'null', task => 'd')".to_owned(), "flow"),
        (format!("select enqueue('d', 'null', flow => '{flow}', unique_key => 'k')"), "unique_key"),
    ] {
        let refused = fixture.try_sql(&text, None).await.expect_err(&text);
        assert!(refused.contains(&format!("{word}: ")), "{refused}");
    }
    let worker = fixture.worker().await;
    for kind in ["a", "b", "c"] {
        end(&fixture, worker, kind, done()).await;
    }
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.members), (FlowStatus::Succeeded, 3));
    let late = fixture.try_sql(&enqueue("late", "null"), None).await.expect_err("it has ended");
    assert!(late.contains("flow: "), "{late}");
}

/// The first end of the parent has not been followed, and must not release a task that is added afterwards.
async fn sql_adds_no_task_after_one_that_was_retried_a_moment_ago(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("z")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    let nobody_follows = fixture.hold_advances().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, done()).await;
    fixture.retry(claimed.lease().id).await.expect("retry");
    let add = format!("select enqueue('b', 'null', flow => '{flow}', task => 'b', after => array['a'])");
    let refused = fixture.try_sql(&add, None).await.expect_err("an end of `a` has not been followed");
    assert!(refused.contains("after: ") && refused.contains("try again"), "{refused}");
    drop(nobody_follows);
    follow(&fixture).await;
    fixture.sql(&add, None).await;
    expect(&fixture, flow, [("a", "queued"), ("z", "held"), ("b", "held")]).await;
}

async fn a_flow_in_the_callers_transaction_exists_if_it_commits(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    for commits in [false, true] {
        let mut tx = connection.begin().await.expect("begin");
        let flow = chain![named("a"), named("b")].on_end(job("end"));
        let id = fixture.enqueue_flow_in(&mut tx, flow).await.expect("enqueue_flow_in");
        if commits {
            tx.commit().await.expect("commit");
            expect(&fixture, id, [("a", "queued"), ("b", "held")]).await;
        } else {
            tx.rollback().await.expect("rollback");
            assert!(fixture.flow(id).await.expect_err("rolled back").is_not_found());
        }
    }
}

async fn a_flow_that_another_transaction_has_locked_delays_no_other(fixture: Fixture) {
    let locked = put(&fixture, chain![named("a"), named("b")]).await.id;
    let free = put(&fixture, chain![named("c"), named("d")]).await.id;
    let worker = fixture.worker().await;
    let mut connection = fixture.postgres().await;
    let mut tx = connection.begin().await.expect("begin");
    let lock = format!("select enqueue('x', 'null', flow => '{locked}', task => 'x')");
    sqlx::raw_sql(sqlx::AssertSqlSafe(lock)).execute(&mut *tx).await.expect("lock");
    for claimed in fixture.claim(worker, 9).await {
        fixture.must_finish(&claimed, done()).await;
    }
    expect(&fixture, free, [("c", "succeeded"), ("d", "queued")]).await;
    assert_eq!(statuses(&fixture, locked).await["b"], "held");
    tx.commit().await.expect("commit");
    expect(&fixture, locked, [("a", "succeeded"), ("b", "queued"), ("x", "queued")]).await;
}

/// Autovacuum analyzes the tables of a new database while they are empty. The planner then takes a table with many rows for
/// an empty one.
async fn a_wide_flow_is_followed_with_few_reads_after_empty_tables_were_analyzed(fixture: Fixture) {
    const TASKS: i64 = 300;
    const READ: &str = "
        select coalesce(sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)), 0)::bigint
          from pg_stat_user_tables
         where schemaname = current_schema()
           and relname in ('jobs', 'ready', 'finished', 'links', 'flow_changes')";
    const CLOSED: &str = "
        select coalesce(sum(n_tup_upd), 0)::bigint
          from pg_stat_user_tables
         where schemaname = current_schema()
           and relname = 'links'";
    fixture.sql("analyze", None).await;
    let then = |flow: Flow, n| flow.task(task(format!("t{n}"), job("then")).after("first"));
    let flow = (0..TASKS).fold(Flow::new("f"), then).task(named("first"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    let held = fixture.hold_advances().await;
    fixture.must_finish(&fixture.claim_one(worker).await, failed_permanently()).await;
    let client = fixture.second_client().await;
    client.advance_flows().await.expect("advance_flows");
    // A session reports what it has read when it ends, at the latest.
    drop(client);
    until("the reads are counted", || async { fixture.query_number(CLOSED, None).await >= TASKS }).await;
    let read = fixture.query_number(READ, None).await;
    assert!(read < 100 * TASKS, "{read} rows were read to skip {TASKS} tasks");
    drop(held);
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
}

/// With the settle, the next task is due ten round trips after the end of an attempt.
async fn a_task_that_others_wait_for_is_followed_in_nine_round_trips(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let client = proxy.client().await;
    let worker = fixture.worker().await;
    // The first round prepares the statements.
    for is_prepared in [false, true] {
        let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
        let held = fixture.hold_advances().await;
        fixture.must_finish(&fixture.claim_one(worker).await, done()).await;
        let before = proxy.requests();
        let step = client.store().advance(None, 1000).await.expect("advance");
        let requests = proxy.requests() - before;
        assert_eq!(step.queues.len(), 1);
        assert!(!is_prepared || requests <= 9, "{requests} requests");
        drop(held);
        end(&fixture, worker, "b", done()).await;
        assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    }
}
