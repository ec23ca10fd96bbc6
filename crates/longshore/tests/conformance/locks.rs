//! Postgres while somebody's transaction holds rows: whoever can do without them
//! does not wait.

use std::future::Future;
use std::time::Instant;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Fenced, Retention};
use longshore::{Ending, EnqueuedAs, NewJob, Outcome, Report, Status, SweepOptions, UniqueMode, WorkerId};
use sqlx::{AssertSqlSafe, PgConnection};

use crate::fixture::*;
use crate::sql::call;
use crate::worker::until;

cases! {
    only on postgres:
    a_claim_that_finds_due_jobs_locked_takes_no_others_in_their_place,
    nor_does_one_from_many_places,
    a_claim_does_not_wait_for_rows_that_others_hold,
    a_locked_job_holds_up_none_below_it,
    what_may_not_be_claimed_costs_no_further_step,
    a_locked_job_of_a_limited_queue_gives_its_place_to_one_other,
    a_locked_suspect_holds_up_no_other,
    a_settle_stores_the_neighbours_of_a_locked_lease,
    what_a_handler_reports_does_not_wait_long_for_a_locked_lease,
    a_sweep_recovers_the_neighbours_of_a_locked_lease,
    retention_passes_over_a_locked_job,
    a_key_that_a_transaction_holds_holds_up_no_other,
    a_batch_with_a_key_that_a_transaction_holds_is_stored_whole_or_not_at_all,
    a_claim_in_flight_counts_against_the_limit_set_meanwhile,
    a_retry_beside_a_replacement_queues_the_new_contents,
}

fn own_without_gpu(worker: WorkerId, limit: u32) -> ClaimRequest {
    ClaimRequest {
        kinds: Some(vec!["own".into()]),
        forbid_flags: vec!["gpu".into()],
        ..ClaimRequest::new(worker, limit)
    }
}

/// Others hold the due jobs for a moment: a claimer passes them over, and must
/// not make up for them with jobs it may not have.
async fn claim_while_due_jobs_are_locked(fixture: &Fixture) {
    let due = fixture.enqueue_kind("own").await;
    fixture.add(job("own").delay(MINUTE)).await;
    fixture.add(job("own").flags(["gpu"])).await;
    fixture.enqueue_kind("foreign").await;
    let other = holding(fixture, &format!("select 1 from ready where id = '{due}' for update")).await;
    let request = own_without_gpu(fixture.worker().await, 5);
    assert_eq!(fixture.claim_with(&request).await.len(), 0);
    let_go(other).await;
    assert_eq!(ids(&fixture.claim_with(&request).await), [due]);
}

async fn a_claim_that_finds_due_jobs_locked_takes_no_others_in_their_place(fixture: Fixture) {
    claim_while_due_jobs_are_locked(&fixture).await;
}

async fn nor_does_one_from_many_places(fixture: Fixture) {
    fixture.add(job("elsewhere").priority(-5)).await;
    claim_while_due_jobs_are_locked(&fixture).await;
}

/// One claimer never waits for another.
async fn a_claim_does_not_wait_for_rows_that_others_hold(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let mut other = fixture.postgres().await;
    sqlx::raw_sql("begin; delete from ready where id in (select id from ready order by id limit 2)")
        .execute(&mut other)
        .await
        .expect("hold");
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 2).await.len(), 2);
    sqlx::raw_sql("rollback").execute(&mut other).await.expect("let go");
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
}

/// A transaction that keeps the most urgent job to itself keeps only that one:
/// those below are claimed in order, nothing else is, and then there is rest.
async fn a_locked_job_holds_up_none_below_it(fixture: Fixture) {
    let top = fixture.add(job("own").priority(10)).await;
    let next = fixture.add(job("own").priority(9)).await;
    fixture.add(job("foreign").priority(5)).await;
    fixture.add(job("own").priority(5).delay(MINUTE)).await;
    fixture.add(job("own").priority(5).flags(["gpu"])).await;
    let late = fixture.add(job("own").queue("letters").run_at(start() - SECOND)).await;
    let early = fixture.add(job("own").run_at(start() - MINUTE)).await;
    let last = fixture.add(job("own").priority(-3)).await;
    let other = holding(&fixture, "select 1 from ready where priority >= 9 for update").await;
    let request = ClaimRequest {
        queues: vec!["default".into(), "letters".into()],
        ..own_without_gpu(fixture.worker().await, 1)
    };
    let mut cursor = ClaimCursor::default();
    let mut claimed = Vec::new();
    for _ in 0..3 {
        let claims = fixture.store().claim(&request, &mut cursor).await.expect("claim");
        claimed.extend(ids(&claims.jobs));
    }
    assert_eq!(claimed, [early, late, last]);
    let claims = fixture.store().claim(&request, &mut ClaimCursor::default()).await.expect("claim");
    assert_eq!((claims.jobs.len(), claims.more), (0, false), "what is locked cannot be had by asking again");
    let_go(other).await;
    let request = ClaimRequest { limit: 9, ..request };
    assert_eq!(ids(&fixture.claim_with(&request).await), [top, next]);
}

/// The further step for what others hold would find the right jobs as well, so
/// only its cost tells whether the first one chose among those that can be had.
async fn what_may_not_be_claimed_costs_no_further_step(fixture: Fixture) {
    fixture.add(job("own").priority(100).delay(DAY)).await;
    fixture.add(job("foreign").priority(60)).await;
    fixture.add(job("own").priority(50).flags(["gpu"])).await;
    let own = fixture.add(job("own").priority(1)).await;
    // Every step deletes from `ready`, be it nothing.
    let count_steps = "
        create table steps ();
        create function step() returns trigger language plpgsql set search_path from current
            as 'begin insert into steps default values; return null; end';
        create trigger step after delete on ready for each statement execute function step()";
    fixture.sql(count_steps, None).await;
    assert_eq!(ids(&fixture.claim_with(&own_without_gpu(fixture.worker().await, 1)).await), [own]);
    assert_eq!(fixture.query_number("select count(*) from steps", None).await, 1);
}

/// Nor may what is taken in place of a locked job exceed the queue's limit.
async fn a_locked_job_of_a_limited_queue_gives_its_place_to_one_other(fixture: Fixture) {
    fixture.limit("letters", Some(2)).await.expect("limit");
    let letters = |priority| job("mail").queue("letters").priority(priority);
    fixture.add(letters(10)).await;
    let first = fixture.add(letters(9)).await;
    let second = fixture.add(letters(8)).await;
    fixture.add(letters(7)).await;
    let free = fixture.add(job("mail").priority(8)).await;
    let other = holding(&fixture, "select 1 from ready where priority = 10 for update").await;
    let worker = fixture.worker().await;
    let queues = vec!["default".into(), "letters".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(worker, 9) };
    let mut claimed = ids(&fixture.claim_with(&request).await);
    claimed.sort();
    assert_eq!(claimed, [first, second, free]);
    assert_eq!(fixture.claim_with(&request).await.len(), 0, "two of the queue run");
    let_go(other).await;
}

async fn a_locked_suspect_holds_up_no_other(fixture: Fixture) {
    let held = fixture.add(job("mail").priority(20)).await;
    let other = fixture.add(job("mail").priority(10)).await;
    fixture.claim(fixture.worker().await, 2).await;
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    let plain = fixture.add(job("mail").priority(5)).await;
    let lock = holding(&fixture, &format!("select 1 from ready where id = '{held}' for update")).await;
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 5).await), [other, plain]);
    let_go(lock).await;
}

/// A transaction of the user's own that does `sql` and stays open.
async fn holding(fixture: &Fixture, sql: &str) -> PgConnection {
    let mut other = fixture.postgres().await;
    sqlx::raw_sql(AssertSqlSafe(format!("begin; {sql}"))).execute(&mut other).await.expect("hold");
    other
}

async fn let_go(mut other: PgConnection) {
    sqlx::raw_sql("rollback").execute(&mut other).await.expect("let go");
}

/// Waits until somebody waits for what `other` holds.
async fn until_somebody_waits(fixture: &Fixture, other: &mut PgConnection) {
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(other).await.expect("pid");
    let waiting = format!("select count(*) from pg_stat_activity where {pid} = any(pg_blocking_pids(pid))");
    until("somebody waits", || async { fixture.query_number(&waiting, None).await > 0 }).await;
}

pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(10 * SECOND, work).await.expect("an answer in time")
}

async fn four_running(fixture: &Fixture, queue: &str) -> Vec<Claimed> {
    for _ in 0..4 {
        fixture.add(job("mail").queue(queue)).await;
    }
    let worker = fixture.worker().await;
    fixture.claim_from(queue, worker, 4).await
}

async fn lock_lease(fixture: &Fixture, claimed: &Claimed) -> PgConnection {
    let id = claimed.lease().id;
    holding(fixture, &format!("select 1 from running where id = '{id}' for update")).await
}

async fn settle_beside_a_locked_lease(fixture: Fixture, queue: &str, ending: Ending) {
    let claimed = four_running(&fixture, queue).await;
    let reports = || {
        let report = |claimed| Report { claimed, ending: ending.clone(), follow_ups: Vec::new() };
        claimed.iter().map(report).collect::<Vec<_>>()
    };
    let other = lock_lease(&fixture, &claimed[1]).await;
    let error = in_time(fixture.settle(reports())).await.expect_err("one is locked");
    assert!(error.is_unavailable(), "{error:?}");
    for (i, job) in claimed.iter().enumerate() {
        let runs = fixture.status(job.lease().id).await == Status::Running;
        assert_eq!(runs, i == 1, "{i} after {ending:?}");
    }
    let_go(other).await;
    assert_eq!(in_time(fixture.settle(reports())).await.expect("settle"), [Fenced::Held; 4], "{ending:?}");
}

async fn a_settle_stores_the_neighbours_of_a_locked_lease(fixture: Fixture) {
    let tasks: Vec<_> =
        [("a", done()), ("b", failed()), ("c", failed_permanently()), ("d", Ending::Released)]
            .into_iter()
            .map(|(queue, ending)| tokio::spawn(settle_beside_a_locked_lease(fixture.clone(), queue, ending)))
            .collect();
    for task in tasks {
        task.await.expect("task");
    }
}

async fn what_a_handler_reports_does_not_wait_long_for_a_locked_lease(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let other = lock_lease(&fixture, &claimed).await;
    let lease = claimed.lease();
    let progress = [(lease, raw("1"))];
    let (reported, started) = in_time(async {
        tokio::join!(fixture.store().progress(&progress), fixture.store().mark_started(&lease))
    })
    .await;
    assert!(reported.expect_err("locked").is_unavailable());
    assert!(started.expect_err("locked").is_unavailable());
    let_go(other).await;
}

async fn a_sweep_recovers_the_neighbours_of_a_locked_lease(fixture: Fixture) {
    let claimed = four_running(&fixture, "default").await;
    fixture.advance(61 * SECOND).await;
    let other = lock_lease(&fixture, &claimed[1]).await;
    // Whether it tells of the one it could not have is its own business.
    let _ = in_time(fixture.sweep(&SweepOptions::default())).await;
    for (i, job) in claimed.iter().enumerate() {
        let expected = if i == 1 { Status::Running } else { Status::Retrying };
        assert_eq!(fixture.status(job.lease().id).await, expected, "{i}");
    }
    let_go(other).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
}

async fn retention_passes_over_a_locked_job(fixture: Fixture) {
    let claimed = four_running(&fixture, "default").await;
    for job in &claimed {
        fixture.must_finish(job, done()).await;
    }
    fixture.advance(8 * DAY).await;
    let id = claimed[1].lease().id;
    let other = holding(&fixture, &format!("select 1 from finished where id = '{id}' for update")).await;
    let retain = async || in_time(fixture.store().retain(&Retention::default(), 100)).await.expect("retain");
    assert_eq!(retain().await.removed, 3);
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    let_go(other).await;
    // The walk may have to come to its end before it begins anew.
    let mut removed = 0;
    for _ in 0..3 {
        removed += retain().await.removed;
    }
    assert_eq!(removed, 1);
}

async fn a_key_that_a_transaction_holds_holds_up_no_other(fixture: Fixture) {
    let other =
        holding(&fixture, "select enqueue('x', idempotency_key => 'held', unique_key => 'held')").await;
    let mut waiting = Vec::new();
    for held in [job("a").idempotency_key("held"), job("b").unique_key("held", UniqueMode::Replace)] {
        let client = fixture.client();
        waiting.push(tokio::spawn(async move { client.enqueue(held).await }));
    }
    let mut free = Vec::new();
    for n in 0..6 {
        let client = fixture.client();
        let free_job = match n % 2 {
            0 => job("free").idempotency_key(format!("free-{n}")),
            _ => job("free").unique_key(format!("free-{n}"), UniqueMode::Replace),
        };
        free.push(tokio::spawn(async move { client.enqueue(free_job).await }));
    }
    let began = Instant::now();
    for task in free {
        let enqueued = in_time(task).await.expect("task").expect("nobody holds its key");
        assert_eq!(enqueued.how, EnqueuedAs::Created);
    }
    assert!(began.elapsed() < 6 * SECOND, "{:?}", began.elapsed());
    let_go(other).await;
    for task in waiting {
        in_time(task).await.expect("task").expect("the key is free now");
    }
    assert_eq!(fixture.count(Status::Queued).await, 8);
}

async fn a_batch_with_a_key_that_a_transaction_holds_is_stored_whole_or_not_at_all(fixture: Fixture) {
    let other =
        holding(&fixture, "select enqueue('x', idempotency_key => 'held', unique_key => 'held')").await;
    let by_request = |key: &str| job("mail").idempotency_key(key);
    let by_owner = |key: &str| job("mail").unique_key(key, UniqueMode::Dedupe);
    for keyed in [by_request as fn(&str) -> NewJob, by_owner] {
        let batch = || ["b-1", "b-2", "held", "b-3"].map(keyed);
        let error = in_time(fixture.enqueue_many(batch())).await.expect_err("one key is held");
        assert!(error.is_unavailable(), "{error:?}");
        assert_eq!(fixture.check().await.expect("check").jobs, 0);
    }
    let_go(other).await;
    for keyed in [by_request as fn(&str) -> NewJob, by_owner] {
        fixture.enqueue_many(["b-1", "b-2", "held", "b-3"].map(keyed)).await.expect("enqueue");
    }
    assert_eq!(fixture.count(Status::Queued).await, 8);
}

/// The claim has begun while there was no limit, and commits when there is one.
async fn a_claim_in_flight_counts_against_the_limit_set_meanwhile(fixture: Fixture) {
    let first = fixture.enqueue_kind("mail").await;
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let worker = fixture.worker_with(DAY).await;
    // A lease of the same job, never committed: the claim has to wait for it.
    let mut other = holding(
        &fixture,
        &format!(
            "insert into running (id, worker, claimed_at, lease_no, priority, attempt, max_attempts,
                                  interruptions, keyed, kind, queue)
             values ('{first}', '{first}', now(), 1, 0, 1, 3, 0, false, 'x', 'elsewhere')"
        ),
    )
    .await;
    let (claimer, limiter) = (fixture.client(), fixture.client());
    let claim = tokio::spawn(async move {
        claimer.store().claim(&ClaimRequest::new(worker, 2), &mut Default::default()).await
    });
    until_somebody_waits(&fixture, &mut other).await;
    let mut limit = tokio::spawn(async move { limiter.limit("default", Some(1)).await });
    // It may go ahead or wait for the claim; both are right.
    let early = tokio::time::timeout(SECOND / 2, &mut limit).await;
    let_go(other).await;
    let mut held = in_time(claim).await.expect("task").expect("claim").jobs;
    match early {
        Ok(done) => done.expect("task").expect("limit"),
        Err(_) => in_time(limit).await.expect("task").expect("limit"),
    }
    let more = fixture.claim(worker, 5).await;
    assert!(held.is_empty() || more.is_empty(), "{} more beside {}", more.len(), held.len());
    held.extend(more);
    while let Some(job) = held.pop() {
        assert_eq!(fixture.claim(worker, 5).await.len(), 0);
        fixture.must_finish(&job, done()).await;
    }
    assert_eq!(fixture.claim(worker, 5).await.len(), 1);
}

/// The retry has to wait for a transaction that changes what it is about.
async fn a_retry_beside_a_replacement_queues_the_new_contents(fixture: Fixture) {
    // By a lock on the table it waits after it has begun to look.
    let lock = "lock table finished in access exclusive mode";
    let variants = [("", ""), ("", "select cancel('{id}')"), (lock, "select cancel('{id}')")];
    for (n, (begin, end)) in variants.into_iter().enumerate() {
        let key = format!("customer-{n}");
        let id =
            fixture.ended(job("old").unique_key(key.as_str(), UniqueMode::Dedupe), Outcome::Cancelled).await;
        let sql = format!(
            "{begin};
             select retry('{id}');
             select enqueue('new', '[2]', priority => 5, queue => 'other', timeout => '7 s', flags => '{{gpu}}',
                            unique_key => '{key}', unique_mode => 'replace');
             {}",
            end.replace("{id}", &id.to_string())
        );
        let mut other = holding(&fixture, &sql).await;
        let caller = fixture.clone();
        let retry = tokio::spawn(async move { call(&caller, "retry", id).await });
        until_somebody_waits(&fixture, &mut other).await;
        sqlx::raw_sql("commit").execute(&mut other).await.expect("commit");
        assert_eq!(in_time(retry).await.expect("task"), "queued");
        assert_eq!(fixture.check().await.expect("check").problems, Vec::<String>::new());
        let worker = fixture.worker().await;
        let claimed = fixture.claim_from("other", worker, 9).await;
        assert_eq!((ids(&claimed), kinds(&claimed)), (vec![id], vec!["new"]));
        assert_eq!((claimed[0].payload(), claimed[0].priority()), ("[2]", 5));
        assert_eq!((claimed[0].timeout(), claimed[0].flags()), (Some(7 * SECOND), &["gpu".to_owned()][..]));
    }
}
