//! Postgres while another transaction holds row locks: operations that can do without
//! the locked rows do not wait for them.

use std::future::Future;
use std::time::Duration;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Fenced};
use longshore::{
    Ending, EnqueuedAs, ListFilter, NewJob, Outcome, Report, Retention, Status, UniqueMode, WorkerId,
};
use sqlx::{AssertSqlSafe, PgConnection};
use tokio::task::JoinHandle;

use crate::fixture::*;
use crate::sql::call;

cases! {
    only on postgres:
    a_claim_that_skips_locked_jobs_takes_no_jobs_it_may_not_claim,
    a_claim_over_several_priorities_that_skips_locked_jobs_takes_no_others,
    a_claim_does_not_wait_for_locked_rows,
    a_locked_job_does_not_block_jobs_of_lower_priority,
    jobs_that_may_not_be_claimed_cost_no_extra_statement,
    a_locked_job_of_a_limited_queue_does_not_let_the_queue_exceed_its_limit,
    a_locked_suspect_does_not_block_another_suspect,
    a_settle_stores_the_other_leases_of_its_batch_when_one_is_locked,
    progress_and_mark_started_do_not_wait_long_for_a_locked_lease,
    a_sweep_recovers_the_other_jobs_when_one_lease_is_locked,
    many_locked_leases_do_not_delay_the_recovery_of_others,
    a_locked_unique_key_does_not_delay_the_recovery_of_others,
    a_locked_worker_does_not_delay_the_recovery_of_others,
    retention_skips_a_locked_job,
    a_key_held_by_an_open_transaction_does_not_block_other_keys,
    a_batch_with_a_key_held_by_an_open_transaction_is_stored_entirely_or_not_at_all,
    a_claim_in_flight_counts_against_a_limit_set_meanwhile,
    a_retry_concurrent_with_a_replacement_queues_the_new_contents,
    a_key_that_an_open_transaction_merges_creates_no_second_job,
    a_key_that_an_open_transaction_stores_is_not_merged,
    the_database_stops_a_statement_of_a_page_that_takes_too_long,
}

fn own_without_gpu(worker: WorkerId, limit: u32) -> ClaimRequest {
    ClaimRequest {
        kinds: Some(vec!["own".into()]),
        forbid_flags: vec!["gpu".into()],
        ..ClaimRequest::new(worker, limit)
    }
}

/// The due job is locked: a claim skips it, and must not take jobs that it may not
/// claim in its place.
async fn assert_claim_skips_locked_jobs(fixture: &Fixture) {
    let due = fixture.enqueue_kind("own").await;
    fixture.add(job("own").delay(MINUTE)).await;
    fixture.add(job("own").flags(["gpu"])).await;
    fixture.enqueue_kind("unhandled").await;
    let other =
        open_transaction(fixture, &format!("select 1 from ready where id = '{due}' for update")).await;
    let request = own_without_gpu(fixture.worker().await, 5);
    assert_eq!(fixture.claim_with(&request).await.len(), 0);
    roll_back(other).await;
    assert_eq!(ids(&fixture.claim_with(&request).await), [due]);
}

async fn a_claim_that_skips_locked_jobs_takes_no_jobs_it_may_not_claim(fixture: Fixture) {
    assert_claim_skips_locked_jobs(&fixture).await;
}

async fn a_claim_over_several_priorities_that_skips_locked_jobs_takes_no_others(fixture: Fixture) {
    fixture.add(job("other").priority(-5)).await;
    assert_claim_skips_locked_jobs(&fixture).await;
}

/// Claimers never wait for one another.
async fn a_claim_does_not_wait_for_locked_rows(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let mut other = fixture.postgres().await;
    sqlx::raw_sql("begin; delete from ready where id in (select id from ready order by id limit 2)")
        .execute(&mut other)
        .await
        .expect("lock");
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 2).await.len(), 2);
    sqlx::raw_sql("rollback").execute(&mut other).await.expect("rollback");
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
}

/// A transaction that locks the most urgent jobs delays only those. The jobs below are
/// claimed in order, and then the claim reports that no more are due.
async fn a_locked_job_does_not_block_jobs_of_lower_priority(fixture: Fixture) {
    let top = fixture.add(job("own").priority(10)).await;
    let next = fixture.add(job("own").priority(9)).await;
    fixture.add(job("unhandled").priority(5)).await;
    fixture.add(job("own").priority(5).delay(MINUTE)).await;
    fixture.add(job("own").priority(5).flags(["gpu"])).await;
    let late = fixture.add(job("own").queue("letters").run_at(start() - SECOND)).await;
    let early = fixture.add(job("own").run_at(start() - MINUTE)).await;
    let last = fixture.add(job("own").priority(-3)).await;
    let other = open_transaction(&fixture, "select 1 from ready where priority >= 9 for update").await;
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
    assert_eq!(
        (claims.jobs.len(), claims.more),
        (0, false),
        "another claim would not get the locked jobs either"
    );
    roll_back(other).await;
    let request = ClaimRequest { limit: 9, ..request };
    assert_eq!(ids(&fixture.claim_with(&request).await), [top, next]);
}

/// The second statement, which replaces locked jobs, would find the right jobs as well.
/// So only the number of statements shows whether the first one filtered correctly.
async fn jobs_that_may_not_be_claimed_cost_no_extra_statement(fixture: Fixture) {
    fixture.add(job("own").priority(100).delay(DAY)).await;
    fixture.add(job("unhandled").priority(60)).await;
    fixture.add(job("own").priority(50).flags(["gpu"])).await;
    let own = fixture.add(job("own").priority(1)).await;
    // Every claim statement deletes from `ready`, even if it finds no rows.
    let count_statements = "
        create table statements ();
        create function count_statement() returns trigger language plpgsql set search_path from current
            as 'begin insert into statements default values; return null; end';
        create trigger count_statement after delete on ready for each statement execute function count_statement()";
    fixture.sql(count_statements, None).await;
    assert_eq!(ids(&fixture.claim_with(&own_without_gpu(fixture.worker().await, 1)).await), [own]);
    assert_eq!(fixture.query_number("select count(*) from statements", None).await, 1);
}

/// The jobs that replace a locked job must not exceed the limit of the queue.
async fn a_locked_job_of_a_limited_queue_does_not_let_the_queue_exceed_its_limit(fixture: Fixture) {
    fixture.limit("letters", Some(2)).await.expect("limit");
    let letters = |priority| job("mail").queue("letters").priority(priority);
    fixture.add(letters(10)).await;
    let first = fixture.add(letters(9)).await;
    let second = fixture.add(letters(8)).await;
    fixture.add(letters(7)).await;
    let free = fixture.add(job("mail").priority(8)).await;
    let other = open_transaction(&fixture, "select 1 from ready where priority = 10 for update").await;
    let worker = fixture.worker().await;
    let queues = vec!["default".into(), "letters".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(worker, 9) };
    let mut claimed = ids(&fixture.claim_with(&request).await);
    claimed.sort();
    assert_eq!(claimed, [first, second, free]);
    assert_eq!(fixture.claim_with(&request).await.len(), 0, "two jobs of the queue already run");
    roll_back(other).await;
}

/// The first claim ends with the jobs that are not locked. The next one continues.
async fn a_locked_suspect_does_not_block_another_suspect(fixture: Fixture) {
    let held = fixture.add(job("mail").priority(20)).await;
    let other = fixture.add(job("mail").priority(10)).await;
    fixture.claim(fixture.worker().await, 2).await;
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    let plain = fixture.add(job("mail").priority(5)).await;
    let lock =
        open_transaction(&fixture, &format!("select 1 from ready where id = '{held}' for update")).await;
    let (request, mut cursor) = (ClaimRequest::new(fixture.worker().await, 5), ClaimCursor::default());
    let mut claim = async || fixture.store().claim(&request, &mut cursor).await.expect("claim");
    let (first, second) = (claim().await, claim().await);
    assert_eq!((ids(&first.jobs), first.more), (vec![plain], true));
    assert_eq!(ids(&second.jobs), [other]);
    roll_back(lock).await;
}

/// Runs `sql` in a transaction that stays open.
pub(crate) async fn open_transaction(fixture: &Fixture, sql: &str) -> PgConnection {
    let mut other = fixture.postgres().await;
    sqlx::raw_sql(AssertSqlSafe(format!("begin; {sql}"))).execute(&mut other).await.expect("lock");
    other
}

pub(crate) async fn roll_back(mut other: PgConnection) {
    sqlx::raw_sql("rollback").execute(&mut other).await.expect("rollback");
}

/// Waits until another session is blocked by `other`. It looks often and on the same connection: a session gives up
/// after two seconds, and many cases have to react before that.
pub(crate) async fn until_blocked_by(other: &mut PgConnection) {
    let blocked = async {
        while !is_blocking(other, None).await {
            tokio::time::sleep(SECOND / 1000).await;
        }
    };
    tokio::time::timeout(MAX_WAIT, blocked).await.expect("no session is blocked");
}

/// Whether the session with this process id, by default the observer itself, blocks another one.
async fn is_blocking(observer: &mut PgConnection, pid: Option<i32>) -> bool {
    // Other cases may wait for the end of all transactions of the database.
    const IS_BLOCKING: &str = "
        select exists (
          select
            from pg_locks
           where not granted
             and locktype <> 'virtualxid'
             and coalesce($1, pg_backend_pid()) = any(pg_blocking_pids(pid)))";
    sqlx::query_scalar(IS_BLOCKING).bind(pid).fetch_one(observer).await.expect("pg_locks")
}

/// Ends the transaction of `other` as soon as another session is blocked by it. The server does both, so that a slow
/// test does not make the session give up.
pub(crate) async fn end_when_blocking(other: PgConnection, end: &str) {
    end_after_blocking(other, Duration::ZERO, end).await;
}

/// The same, as soon as the statement of the blocked session has run for this long.
pub(crate) async fn end_after_blocking(mut other: PgConnection, time: Duration, end: &str) {
    let sql = format!(
        "do $$
         begin
           while not exists (select
                               from pg_locks l
                               join pg_stat_activity a on a.pid = l.pid
                              where not l.granted
                                and l.locktype <> 'virtualxid'
                                and pg_backend_pid() = any(pg_blocking_pids(l.pid))
                                and clock_timestamp() - a.query_start >= interval '{} ms') loop
             perform pg_sleep(0.001);
             perform pg_stat_clear_snapshot();
           end loop;
         end $$;
         {end}",
        time.as_millis()
    );
    let ended = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut other);
    tokio::time::timeout(MAX_WAIT, ended).await.expect("no session is blocked").expect("end");
}

/// Starts `work`, which `other` blocks until the server rolls `other` back, after this long. Returns `work` and the end
/// of the transaction in progress as soon as `work` is blocked. On a slow machine, it may no longer be.
pub(crate) async fn blocked_for<T: Send + 'static>(
    fixture: &Fixture,
    mut other: PgConnection,
    time: Duration,
    work: impl Future<Output = T> + Send + 'static,
) -> (JoinHandle<T>, JoinHandle<()>) {
    let mut observer = fixture.postgres().await;
    let pid =
        sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut other).await.expect("a process id");
    let ended = tokio::spawn(async move { end_after_blocking(other, time, "rollback").await });
    let work = tokio::spawn(work);
    while !ended.is_finished() && !is_blocking(&mut observer, Some(pid)).await {
        tokio::time::sleep(SECOND / 1000).await;
    }
    (work, ended)
}

/// Fails if `work` waits for a lock of `other`.
async fn without_waiting_for<T>(other: &mut PgConnection, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        () = until_blocked_by(other) => panic!("it waits for a lock"),
    }
}

/// Fails if `work` waits for as long as a slow operation may take, or for ever. The operations of the cases wait
/// for locks for two seconds at most.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(MAX_WAIT / 2, work).await.expect("not within half a minute")
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
    open_transaction(fixture, &format!("select 1 from running where id = '{id}' for update")).await
}

async fn settle_with_a_locked_lease(fixture: Fixture, queue: &str, ending: Ending) {
    let claimed = four_running(&fixture, queue).await;
    let reports = || {
        let report = |claimed| Report {
            claimed,
            ending: ending.clone(),
            follow_ups: Vec::new(),
            has_progressed: false,
        };
        claimed.iter().map(report).collect::<Vec<_>>()
    };
    let other = lock_lease(&fixture, &claimed[1]).await;
    let error = in_time(fixture.settle(reports())).await.expect_err("one is locked");
    assert!(error.is_unavailable(), "{error:?}");
    for (i, job) in claimed.iter().enumerate() {
        let running = fixture.status(job.lease().id).await == Status::Running;
        assert_eq!(running, i == 1, "{i} after {ending:?}");
    }
    roll_back(other).await;
    assert_eq!(in_time(fixture.settle(reports())).await.expect("settle"), [Fenced::Held; 4], "{ending:?}");
}

async fn a_settle_stores_the_other_leases_of_its_batch_when_one_is_locked(fixture: Fixture) {
    let tasks: Vec<_> =
        [("a", done()), ("b", failed()), ("c", failed_permanently()), ("d", Ending::Released)]
            .into_iter()
            .map(|(queue, ending)| tokio::spawn(settle_with_a_locked_lease(fixture.clone(), queue, ending)))
            .collect();
    for task in tasks {
        task.await.expect("task");
    }
}

async fn progress_and_mark_started_do_not_wait_long_for_a_locked_lease(fixture: Fixture) {
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
    roll_back(other).await;
}

async fn a_sweep_recovers_the_other_jobs_when_one_lease_is_locked(fixture: Fixture) {
    let claimed = four_running(&fixture, "default").await;
    fixture.advance(61 * SECOND).await;
    let other = lock_lease(&fixture, &claimed[1]).await;
    let report = in_time(fixture.sweep_now()).await;
    assert_eq!((report.recovered, report.deferred), (3, 1));
    for (i, job) in claimed.iter().enumerate() {
        let expected = if i == 1 { Status::Running } else { Status::Retrying };
        assert_eq!(fixture.status(job.lease().id).await, expected, "{i}");
    }
    roll_back(other).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
}

async fn many_locked_leases_do_not_delay_the_recovery_of_others(fixture: Fixture) {
    let (locked, free) = (fixture.worker().await, fixture.worker().await);
    for _ in 0..60 {
        fixture.enqueue_kind("mail").await;
    }
    fixture.claim(locked, 20).await;
    fixture.claim(free, 20).await;
    fixture.claim(locked, 20).await;
    fixture.advance(61 * SECOND).await;
    let lock = format!("select 1 from running where worker = '{}' for update", locked.0);
    let mut other = open_transaction(&fixture, &lock).await;
    let report = without_waiting_for(&mut other, fixture.sweep_now()).await;
    assert_eq!((report.recovered, report.deferred), (20, 40));
    assert_eq!(report.workers, [locked, free].into());
    assert!(fixture.store().leases(free).await.expect("leases").is_empty());
    roll_back(other).await;
    let report = in_time(fixture.sweep_now()).await;
    assert_eq!((report.recovered, report.deferred), (40, 0));
}

/// A job that recovery ends frees its unique key.
async fn a_locked_unique_key_does_not_delay_the_recovery_of_others(fixture: Fixture) {
    let worker = fixture.worker().await;
    for key in ["a", "b", "c"] {
        fixture.add(job("mail").unique_key(key, UniqueMode::Dedupe)).await;
    }
    fixture.enqueue_kind("mail").await;
    for claimed in fixture.claim(worker, 4).await {
        fixture.cancel(claimed.lease().id).await.expect("cancel");
    }
    fixture.advance(61 * SECOND).await;
    let mut other = open_transaction(&fixture, "select 1 from keys where key = 'b' for update").await;
    let report = without_waiting_for(&mut other, fixture.sweep_now()).await;
    assert_eq!((report.recovered, report.deferred), (3, 1));
    roll_back(other).await;
    assert_eq!(in_time(fixture.sweep_now()).await.recovered, 1);
    assert_eq!(fixture.count(Status::Cancelled).await, 4);
}

async fn a_locked_worker_does_not_delay_the_recovery_of_others(fixture: Fixture) {
    let old = fixture.worker().await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.workers, [old].into());
    // Both a worker to declare dead and one to remove are locked.
    let (locked, free) = (fixture.worker().await, fixture.worker().await);
    for worker in [locked, free] {
        fixture.enqueue_kind("mail").await;
        fixture.claim(worker, 1).await;
    }
    fixture.advance(2 * HOUR).await;
    let lock = format!("select 1 from workers where id in ('{}', '{}') for update", locked.0, old.0);
    let mut other = open_transaction(&fixture, &lock).await;
    let report = without_waiting_for(&mut other, fixture.sweep_now()).await;
    assert_eq!((&report.workers, report.recovered), (&[free].into(), 1));
    roll_back(other).await;
    assert_eq!(in_time(fixture.sweep_now()).await.recovered, 1);
    assert!(fixture.worker_record(old).await.is_none());
}

async fn retention_skips_a_locked_job(fixture: Fixture) {
    let claimed = four_running(&fixture, "default").await;
    for job in &claimed {
        fixture.must_finish(job, done()).await;
    }
    fixture.advance(8 * DAY).await;
    let id = claimed[1].lease().id;
    let other =
        open_transaction(&fixture, &format!("select 1 from finished where id = '{id}' for update")).await;
    let retain = async || in_time(fixture.store().retain(&Retention::default(), 100)).await.expect("retain");
    assert_eq!(retain().await.removed, 3);
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    roll_back(other).await;
    // A walk may have to reach its end before the next one starts at the first job.
    let mut removed = 0;
    for _ in 0..3 {
        removed += retain().await.removed;
    }
    assert_eq!(removed, 1);
}

async fn a_key_held_by_an_open_transaction_does_not_block_other_keys(fixture: Fixture) {
    let other =
        open_transaction(&fixture, "select enqueue('x', idempotency_key => 'held', unique_key => 'held')")
            .await;
    let mut waiting = Vec::new();
    for held in [job("a").idempotency_key("held"), job("b").unique_key("held", UniqueMode::Replace)] {
        let client = fixture.client();
        waiting.push(tokio::spawn(async move { client.enqueue(held).await }));
    }
    let mut free = Vec::new();
    for n in 0..6 {
        let client = fixture.client();
        let free_job = if n % 2 == 0 {
            job("free").idempotency_key(format!("free-{n}"))
        } else {
            job("free").unique_key(format!("free-{n}"), UniqueMode::Replace)
        };
        free.push(tokio::spawn(async move { client.enqueue(free_job).await }));
    }
    // A request that waits for the transaction fails after two seconds.
    for task in free {
        let enqueued = in_time(task).await.expect("task").expect("no transaction holds its key");
        assert_eq!(enqueued.how, EnqueuedAs::Created);
    }
    roll_back(other).await;
    for task in waiting {
        // On a slow machine, the wait for the key may have timed out.
        let enqueued = in_time(task).await.expect("task");
        assert!(
            enqueued.as_ref().is_ok_and(|enqueued| enqueued.how == EnqueuedAs::Created)
                || enqueued.as_ref().is_err_and(|error| error.is_unavailable()),
            "{enqueued:?}"
        );
    }
    for held in [job("a").idempotency_key("held"), job("b").unique_key("held", UniqueMode::Replace)] {
        fixture.enqueue(held).await.expect("the key is free now");
    }
    assert_eq!(fixture.count(Status::Queued).await, 8);
}

async fn a_batch_with_a_key_held_by_an_open_transaction_is_stored_entirely_or_not_at_all(fixture: Fixture) {
    let other =
        open_transaction(&fixture, "select enqueue('x', idempotency_key => 'held', unique_key => 'held')")
            .await;
    let idempotent = |key: &str| job("mail").idempotency_key(key);
    let unique = |key: &str| job("mail").unique_key(key, UniqueMode::Dedupe);
    for keyed in [idempotent as fn(&str) -> NewJob, unique] {
        let batch = || ["b-1", "b-2", "held", "b-3"].map(keyed);
        let error = in_time(fixture.enqueue_many(batch())).await.expect_err("one key is held");
        assert!(error.is_unavailable(), "{error:?}");
        assert_eq!(fixture.check().await.expect("check").jobs, 0);
    }
    roll_back(other).await;
    for keyed in [idempotent as fn(&str) -> NewJob, unique] {
        fixture.enqueue_many(["b-1", "b-2", "held", "b-3"].map(keyed)).await.expect("enqueue");
    }
    assert_eq!(fixture.count(Status::Queued).await, 8);
}

/// The claim starts before the limit is set and commits afterwards.
async fn a_claim_in_flight_counts_against_a_limit_set_meanwhile(fixture: Fixture) {
    let first = fixture.enqueue_kind("mail").await;
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let worker = fixture.worker_with(DAY).await;
    // An uncommitted lease of the same job, for which the claim has to wait.
    let other = open_transaction(
        &fixture,
        &format!(
            "insert into running (id, worker, claimed_at, lease_no, priority, attempt, max_attempts,
                                  interruptions, keyed, kind, queue)
             values ('{first}', '{first}', now(), 1, 0, 1, 3, 0, false, 'x', 'other')"
        ),
    )
    .await;
    let (claimer, limiter) = (fixture.client(), fixture.client());
    let claim =
        async move { claimer.store().claim(&ClaimRequest::new(worker, 2), &mut Default::default()).await };
    let (claim, ended) = blocked_for(&fixture, other, SECOND / 2, claim).await;
    // Setting the limit may succeed at once or wait for the claim. Both are correct.
    in_time(limiter.limit("default", Some(1))).await.expect("limit");
    let mut held = in_time(claim).await.expect("task").expect("claim").jobs;
    ended.await.expect("task");
    let more = fixture.claim(worker, 5).await;
    assert!(held.is_empty() || more.is_empty(), "{} more jobs next to {}", more.len(), held.len());
    held.extend(more);
    while let Some(job) = held.pop() {
        assert_eq!(fixture.claim(worker, 5).await.len(), 0);
        fixture.must_finish(&job, done()).await;
    }
    assert_eq!(fixture.claim(worker, 5).await.len(), 1);
}

/// The retry has to wait for a transaction that changes the same job.
async fn a_retry_concurrent_with_a_replacement_queues_the_new_contents(fixture: Fixture) {
    // With the table locked, the retry waits after its statement has taken its snapshot.
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
        let other = open_transaction(&fixture, &sql).await;
        let caller = fixture.clone();
        let retry = tokio::spawn(async move { call(&caller, "retry", id).await });
        end_when_blocking(other, "commit").await;
        assert_eq!(in_time(retry).await.expect("task"), "queued");
        assert_eq!(fixture.check().await.expect("check").problems, []);
        let worker = fixture.worker().await;
        let claimed = fixture.claim_from("other", worker, 9).await;
        assert_eq!((ids(&claimed), kinds(&claimed)), (vec![id], vec!["new"]));
        assert_eq!((claimed[0].payload(), claimed[0].priority()), ("[2]", 5));
        assert_eq!((claimed[0].timeout(), claimed[0].flags()), (Some(7 * SECOND), &["gpu".to_owned()][..]));
    }
}

/// The open transaction has merged a request with this key into a live job. A second
/// request with the key waits, and returns that job.
async fn a_key_that_an_open_transaction_merges_creates_no_second_job(fixture: Fixture) {
    for mode in ["dedupe", "replace"] {
        // Both statements that store a job with an idempotency key.
        for other_key in [None, Some(format!("other-{mode}"))] {
            let (unique, key) = (format!("{mode}-{other_key:?}"), format!("order-{mode}-{other_key:?}"));
            let first = job("mail").idempotency_key(&unique).unique_key(&unique, UniqueMode::Dedupe);
            let holder = fixture.add(first).await;
            let merge = format!(
                "select enqueue('x', idempotency_key => '{key}', unique_key => '{unique}',
                                unique_mode => '{mode}')"
            );
            let other = open_transaction(&fixture, &merge).await;
            let mut request = job("sms").idempotency_key(key.as_str());
            if let Some(key) = &other_key {
                request = request.unique_key(key, UniqueMode::Dedupe);
            }
            let client = fixture.client();
            let second = tokio::spawn(async move { client.enqueue(request).await });
            end_when_blocking(other, "commit").await;
            let enqueued = in_time(second).await.expect("task").expect("enqueue");
            assert_eq!((enqueued.id, enqueued.how), (holder, EnqueuedAs::Existing), "{key}");
        }
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 4);
}

/// The open transaction has stored a job with this key. A request that would be merged
/// into another job waits, and returns the stored job.
async fn a_key_that_an_open_transaction_stores_is_not_merged(fixture: Fixture) {
    for mode in [UniqueMode::Dedupe, UniqueMode::Replace] {
        let key = format!("order-{mode:?}");
        let unique = format!("customer-{mode:?}");
        let holder = fixture
            .add(
                job("mail")
                    .idempotency_key(format!("first-{mode:?}"))
                    .unique_key(&unique, UniqueMode::Dedupe),
            )
            .await;
        let before = snapshot(&fixture.job(holder).await);
        let other =
            open_transaction(&fixture, &format!("select enqueue('x', idempotency_key => '{key}')")).await;
        let client = fixture.client();
        let request = job("sms").idempotency_key(key.as_str()).unique_key(&unique, mode);
        let second = tokio::spawn(async move { client.enqueue(request).await });
        end_when_blocking(other, "commit").await;
        let enqueued = in_time(second).await.expect("task").expect("enqueue");
        assert_eq!(enqueued.how, EnqueuedAs::Existing, "{mode:?}");
        assert_eq!(fixture.job(enqueued.id).await.kind, "x", "{mode:?}");
        assert_eq!(snapshot(&fixture.job(holder).await), before, "{mode:?}");
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 4);
}

async fn the_database_stops_a_statement_of_a_page_that_takes_too_long(fixture: Fixture) {
    // A statement that waits for a lock takes as long as one that reads too much.
    let lock = open_transaction(&fixture, "lock table measures, ready in access exclusive mode").await;
    let history = fixture.measured(start());
    let list =
        async { fixture.list(&ListFilter { statuses: vec![Status::Queued], ..Default::default() }).await };
    let (history, list) = tokio::join!(history, list);
    for error in [history.expect_err("locked"), list.expect_err("locked")] {
        assert!(error.is_unavailable(), "{error}");
        assert!(error.to_string().contains("stopped a statement that took too long"), "{error}");
    }
    roll_back(lock).await;
    assert!(fixture.measured(start()).await.expect("measured").is_empty());
}
