//! The consistency check: each fault of jobs, keys, groups, steps, waits, events and tallies is
//! planted with SQL. The check names it, and its remedy removes it. `check_flows.rs` has the faults
//! of flows.

use longshore::rules::lifecycle::PendingWait;
use longshore::store::{Fenced, NewStep};
use longshore::{Ending, JobId, NewJob, Outcome, Problem, Status, UniqueMode};

use crate::corrupt::COPY_TO_READY;
use crate::fixture::*;
use crate::flows::{named, put};
use crate::inspect::one_of_each;

cases! {
    a_healthy_database_has_no_problems,
    a_job_without_a_state_waits_again,
    a_job_that_also_waits_keeps_its_newer_lease,
    a_job_with_a_newer_waiting_row_loses_its_lease,
    a_job_that_also_waits_keeps_its_outcome,
    a_job_that_was_enqueued_again_loses_its_old_outcome,
    a_finished_job_loses_its_lease,
    rows_without_a_request_are_deleted_with_what_belongs_to_them,
    a_lease_without_a_request_is_left_to_a_living_worker,
    a_waiting_row_takes_the_values_of_its_request,
    a_group_without_a_turn_gets_one,
    more_running_jobs_than_the_limit_of_a_group_are_a_problem,
    a_key_whose_owner_is_not_live_is_freed,
    a_live_job_gets_its_key_back,
    a_key_of_another_live_job_stays_with_it,
    tallies_that_disagree_with_the_rows_are_corrected,
    the_journal_of_a_job_that_does_not_exist_is_deleted,
    the_wait_of_a_running_job_is_deleted,
    an_event_that_jobs_still_wait_for_is_delivered_again,
    options_that_cannot_be_read_are_removed,
    a_remedy_whose_reason_has_gone_changes_nothing,
    names_in_a_remedy_are_quoted,
}

pub(crate) async fn problems(fixture: &Fixture) -> Vec<Problem> {
    fixture.check().await.expect("check").problems
}

/// The check finds exactly these problems, and changes nothing.
pub(crate) async fn assert_problems(fixture: &Fixture, expected: &[String]) -> Vec<Problem> {
    let found = problems(fixture).await;
    let mut sentences: Vec<&String> = found.iter().map(|problem| &problem.problem).collect();
    let mut expected: Vec<&String> = expected.iter().collect();
    sentences.sort();
    expected.sort();
    assert_eq!(sentences, expected);
    assert_eq!(problems(fixture).await, found, "the check changes nothing");
    found
}

pub(crate) async fn run_sql(fixture: &Fixture, problem: &Problem) {
    assert_ne!(problem.sql, [""; 0], "{problem:?}");
    for statement in &problem.sql {
        fixture.sql(statement, None).await;
    }
}

/// The check finds exactly these problems. Running each remedy twice removes them.
pub(crate) async fn assert_remedied(fixture: &Fixture, expected: &[String]) {
    for problem in assert_problems(fixture, expected).await {
        run_sql(fixture, &problem).await;
        run_sql(fixture, &problem).await;
    }
    assert_problems(fixture, &[]).await;
}

/// As [`assert_remedied`], for a remedy that reveals further problems.
pub(crate) async fn assert_remedied_in_steps(fixture: &Fixture, steps: &[&[String]]) {
    for expected in steps {
        for problem in assert_problems(fixture, expected).await {
            run_sql(fixture, &problem).await;
        }
    }
    assert_problems(fixture, &[]).await;
}

fn miscounted(outcome: &str, tallied: i64, found: i64) -> String {
    format!(
        "the tallies count {tallied} {outcome} jobs of kind `mail` in queue `default`, but there are {found}"
    )
}

async fn rows_in(fixture: &Fixture, tables: &[&str]) -> Vec<i64> {
    let mut rows = Vec::new();
    for table in tables {
        rows.push(fixture.query_number(&format!("select count(*) from {table}"), None).await);
    }
    rows
}

async fn a_healthy_database_has_no_problems(fixture: Fixture) {
    one_of_each(&fixture).await;
    let report = fixture.check().await.expect("check");
    assert_eq!((report.jobs, report.problems), (6, Vec::new()));
}

// ---- states ------------------------------------------------------------------------

async fn a_job_without_a_state_waits_again(fixture: Fixture) {
    let keyed = job("mail").priority(7).group("acme").unique_key("customer-23", UniqueMode::Dedupe);
    let claimed = fixture.running(keyed.max_attempts(5)).await;
    let id = claimed.lease().id;
    fixture.sql("delete from running", None).await;
    let lost = format!("job {id} is in none of the tables ready, running and finished");
    let key = format!("unique key `customer-23` belongs to job {id}, which is not live or has another key");
    let turn = "group `acme` of queue `default` has waiting jobs of priority 7, but no turn in time";
    assert_remedied_in_steps(&fixture, &[&[lost, key], &[turn.into()]]).await;
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.max_attempts), (Status::Queued, 0, 5));
    assert_eq!(fixture.finish(&claimed, done()).await, Fenced::LeaseLost);
    let again = fixture.claim_one(fixture.worker().await).await;
    assert_eq!(fixture.finish(&claimed, done()).await, Fenced::LeaseLost, "the old lease stays lost");
    fixture.must_finish(&again, done()).await;
}

fn in_two(id: JobId, old: &str, newer: &str) -> String {
    format!("job {id} is in {old} and in {newer}, not in exactly one table")
}

async fn a_job_that_also_waits_keeps_its_newer_lease(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.sql(COPY_TO_READY, Some(id)).await;
    assert_remedied(&fixture, &[in_two(id, "ready", "running")]).await;
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(fixture.status(id).await, Status::Succeeded);
}

async fn a_job_with_a_newer_waiting_row_loses_its_lease(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.sql(COPY_TO_READY, Some(id)).await;
    fixture.sql("update ready set lease_no = 5", None).await;
    assert_remedied(&fixture, &[in_two(id, "running", "ready")]).await;
    assert_eq!(fixture.finish(&claimed, done()).await, Fenced::LeaseLost);
    assert_eq!(fixture.claim_one(fixture.worker().await).await.lease().id, id);
}

async fn a_job_that_also_waits_keeps_its_outcome(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.sql(COPY_TO_READY, Some(id)).await;
    fixture.must_finish(&claimed, done()).await;
    assert_remedied(&fixture, &[in_two(id, "ready", "finished")]).await;
    assert_eq!(fixture.status(id).await, Status::Succeeded);
}

async fn a_job_that_was_enqueued_again_loses_its_old_outcome(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.sql(COPY_TO_READY, Some(id)).await;
    fixture.must_finish(&claimed, done()).await;
    fixture.sql("update ready set lease_no = 5", None).await;
    let two = [in_two(id, "finished", "ready")];
    assert_remedied_in_steps(&fixture, &[&two, &[miscounted("succeeded", 1, 0)]]).await;
    assert_eq!(fixture.status(id).await, Status::Queued);
}

async fn a_finished_job_loses_its_lease(fixture: Fixture) {
    const COPY_TO_RUNNING: &str = "
        insert into running (id, worker, claimed_at, lease_no, priority, attempt, max_attempts, interruptions, keyed,
                             kind, queue)
        select j.id, j.id, j.run_at, f.lease_no, j.priority, 1, j.max_attempts, 0, false, j.kind, j.queue
          from jobs j
          join finished f on f.id = j.id";
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.sql(COPY_TO_RUNNING, None).await;
    assert_remedied(&fixture, &[in_two(id, "running", "finished")]).await;
    assert_eq!(fixture.status(id).await, Status::FailedPermanent);
}

async fn rows_without_a_request_are_deleted_with_what_belongs_to_them(fixture: Fixture) {
    let finished = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let ready = suspended(&fixture).await;
    let kept = fixture.enqueue_kind("mail").await;
    for id in [ready, finished] {
        let merged = "insert into merged_requests (id, job, replaced) values ({id}, {id}, false)";
        fixture.sql(merged, Some(id)).await;
        fixture.sql("delete from jobs where id = {id}", Some(id)).await;
    }
    let expected = [
        format!("job {ready} is in ready but not in jobs"),
        format!("job {finished} is in finished but not in jobs"),
        miscounted("failed_permanent", 1, 0),
    ];
    assert_remedied(&fixture, &expected).await;
    assert_eq!(
        rows_in(&fixture, &["attempts", "merged_requests", "steps", "waits", "jobs"]).await,
        [0, 0, 0, 0, 1]
    );
    assert_eq!(fixture.status(kept).await, Status::Queued);
}

async fn a_lease_without_a_request_is_left_to_a_living_worker(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let step = NewStep { lease: claimed.lease(), name: "charge".into(), value: raw("1") };
    fixture.save_steps(&[step]).await.expect("save");
    fixture.sql("delete from jobs", None).await;
    let orphan = [format!("job {} is in running but not in jobs", claimed.lease().id)];
    for problem in assert_problems(&fixture, &orphan).await {
        run_sql(&fixture, &problem).await;
    }
    assert_eq!(rows_in(&fixture, &["running", "steps"]).await, [1, 1], "the handler may still run");
    fixture.store().retire(claimed.lease().worker).await.expect("retire");
    assert_remedied(&fixture, &orphan).await;
    assert_eq!(rows_in(&fixture, &["running", "steps"]).await, [0, 0]);
}

async fn a_waiting_row_takes_the_values_of_its_request(fixture: Fixture) {
    let id = fixture.add(job("mail").priority(3).max_attempts(4)).await;
    fixture
        .sql(
            "update ready set queue = 'other', kind = 'sms', priority = 77, max_attempts = 9, keyed = true",
            None,
        )
        .await;
    let different = format!(
        "waiting job {id} differs from its row in jobs in queue, kind, priority, max_attempts, group or unique key"
    );
    assert_remedied(&fixture, &[different]).await;
    let claimed = fixture.claim_one(fixture.worker().await).await;
    assert_eq!((claimed.lease().id, claimed.kind(), claimed.priority()), (id, "mail", 3));
}

// ---- groups, keys and tallies --------------------------------------------------------

async fn a_group_without_a_turn_gets_one(fixture: Fixture) {
    let id = fixture.add(job("mail").group("acme").priority(3)).await;
    fixture.sql("delete from turns", None).await;
    let missing = "group `acme` of queue `default` has waiting jobs of priority 3, but no turn in time";
    assert_remedied(&fixture, &[missing.into()]).await;
    assert_eq!(ids(&fixture.claim(fixture.worker().await, 9).await), [id]);
}

async fn more_running_jobs_than_the_limit_of_a_group_are_a_problem(fixture: Fixture) {
    fixture.group_defaults("default", Some(1), None).await.expect("defaults");
    fixture.running(job("mail").group("acme")).await;
    fixture.group_defaults("default", Some(2), None).await.expect("defaults");
    fixture.add(job("mail").group("acme")).await;
    let claimed = fixture.claim_one(fixture.worker().await).await;
    assert_problems(&fixture, &[]).await; // The limit was raised.
    fixture.sql("update running set gate = 1", None).await;
    let above = "group `acme` of queue `default` runs 2 jobs, but its limit was never above 1";
    let found = assert_problems(&fixture, &[above.into()]).await;
    assert!(
        found[0].remedy.contains("`longshore jobs list --status running --queue 'default' --group 'acme'`")
    );
    fixture.must_finish(&claimed, done()).await;
    assert_problems(&fixture, &[]).await;
}

async fn a_key_whose_owner_is_not_live_is_freed(fixture: Fixture) {
    let keyed = |key: &str| job("mail").unique_key(key, UniqueMode::Dedupe);
    let ended = fixture.ended(job("sms"), Outcome::Succeeded).await;
    let live = fixture.add(keyed("live")).await;
    fixture.sql("insert into keys (key, job) values ('gone', {id})", Some(ended)).await;
    let gone = format!("unique key `gone` belongs to job {ended}, which is not live or has another key");
    assert_remedied(&fixture, &[gone]).await;
    assert_ne!(fixture.add(keyed("gone")).await, live);
    assert_eq!(fixture.enqueue(keyed("live")).await.expect("enqueue").id, live, "its key is still taken");
}

fn without_key(id: JobId) -> String {
    format!("job {id} is live but does not own its unique key `customer-23`")
}

fn keyed() -> NewJob {
    job("mail").unique_key("customer-23", UniqueMode::Dedupe)
}

async fn a_live_job_gets_its_key_back(fixture: Fixture) {
    let id = fixture.add(keyed()).await;
    fixture.sql("delete from keys", None).await;
    assert_remedied(&fixture, &[without_key(id)]).await;
    assert_eq!(fixture.enqueue(keyed()).await.expect("enqueue").id, id);
}

async fn a_key_of_another_live_job_stays_with_it(fixture: Fixture) {
    let first = fixture.add(keyed()).await;
    fixture.sql("delete from keys", None).await;
    let second = fixture.add(keyed()).await;
    for problem in assert_problems(&fixture, &[without_key(first)]).await {
        run_sql(&fixture, &problem).await;
    }
    assert_eq!(fixture.enqueue(keyed()).await.expect("enqueue").id, second);
    assert_problems(&fixture, &[without_key(first)]).await;
    // The rest of the remedy.
    fixture.cancel(first).await.expect("cancel");
    assert_problems(&fixture, &[]).await;
}

async fn tallies_that_disagree_with_the_rows_are_corrected(fixture: Fixture) {
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.ended(job("sms"), Outcome::Succeeded).await;
    fixture.sql("update tallies set kept = kept + 4 where kind = 'mail'", None).await;
    assert_remedied(&fixture, &[miscounted("succeeded", 5, 1)]).await;
    assert_eq!(fixture.count(Status::Succeeded).await, 2);
}

// ---- steps, waits and events ---------------------------------------------------------

/// Suspends a new job until the event `approved`, with one step done.
async fn suspended(fixture: &Fixture) -> JobId {
    let claimed = fixture.running(job("pay")).await;
    let step = NewStep { lease: claimed.lease(), name: "charge".into(), value: raw("1") };
    fixture.save_steps(&[step]).await.expect("save");
    let waits =
        vec![PendingWait { step: "event:approved".into(), until: None, events: vec!["approved".into()] }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    claimed.lease().id
}

async fn the_journal_of_a_job_that_does_not_exist_is_deleted(fixture: Fixture) {
    let gone = suspended(&fixture).await;
    let kept = suspended(&fixture).await;
    for table in ["ready", "jobs"] {
        fixture.sql(&format!("delete from {table} where id = {{id}}"), Some(gone)).await;
    }
    let left = format!("steps or waits of job {gone} are left, but there is no such job");
    assert_remedied(&fixture, &[left]).await;
    assert_eq!(fixture.steps(kept).await.expect("steps").len(), 2);
    assert_eq!(rows_in(&fixture, &["steps", "waits"]).await, [2, 1]);
}

async fn the_wait_of_a_running_job_is_deleted(fixture: Fixture) {
    let waits = suspended(&fixture).await;
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.sql("insert into waits (event, job, lease_no) values ('approved', {id}, 1)", Some(id)).await;
    let running = format!("job {id} waits for event `approved` since lease 1, but that lease is running");
    assert_remedied(&fixture, &[running]).await;
    assert_eq!(fixture.query_number("select count(*) from waits where job = {id}", Some(waits)).await, 1);
}

async fn an_event_that_jobs_still_wait_for_is_delivered_again(fixture: Fixture) {
    let id = suspended(&fixture).await;
    fixture.store().emit("approved", &raw("1")).await.expect("emit");
    assert_problems(&fixture, &[]).await; // It is not delivered yet.
    fixture.sql("update events set fresh = false", None).await;
    let missed = format!("job {id} waits for event `approved`, which counts as delivered");
    assert_remedied(&fixture, std::slice::from_ref(&missed)).await;
    assert_eq!(fixture.deliver_events().await.expect("deliver"), 1);
    assert_eq!(fixture.job(id).await.run_at, start());
    assert_problems(&fixture, &[]).await; // All jobs were woken.
    // A job does not wait for an event whose time has passed.
    fixture.sql("update waits set woken = false", None).await;
    assert_problems(&fixture, &[missed]).await;
    fixture.advance(8 * DAY).await;
    assert_problems(&fixture, &[]).await;
}

async fn options_that_cannot_be_read_are_removed(fixture: Fixture) {
    let kept = fixture.add(job("mail").tags(["red"])).await;
    let id = fixture.add(job("mail").tags(["blue"])).await;
    fixture.sql("update jobs set options = '{\"retry\": 5, \"tags\": 7}' where id = {id}", Some(id)).await;
    let found = problems(&fixture).await;
    let starts = format!("job {id} has options that cannot be read, and runs without them: ");
    assert!(found.len() == 1 && found[0].problem.starts_with(&starts), "{found:?}");
    run_sql(&fixture, &found[0]).await;
    assert_problems(&fixture, &[]).await;
    assert_eq!(fixture.job(kept).await.tags, ["red"]);
}

// ---- remedies --------------------------------------------------------------------------

/// The rows of one table are missing while the check runs, and are back when the remedies run.
async fn a_remedy_whose_reason_has_gone_changes_nothing(fixture: Fixture) {
    const TABLES: [&str; 12] = [
        "jobs", "ready", "running", "finished", "keys", "steps", "waits", "attempts", "flows", "links",
        "tallies", "events",
    ];
    let keyed = job("mail").unique_key("live", UniqueMode::Dedupe);
    fixture.add(keyed).await;
    fixture.must_finish(&fixture.claim_one(fixture.worker().await).await, failed()).await;
    fixture.ended(job("call"), Outcome::Cancelled).await;
    fixture.running(job("call")).await;
    suspended(&fixture).await;
    put(&fixture, longshore::chain![named("first"), named("second")]).await;
    let before = rows_in(&fixture, &TABLES).await;
    let mut kinds = 0;
    for table in ["jobs", "ready", "running", "finished", "keys", "flows", "tallies"] {
        fixture.sql(&format!("create table spare as select * from {table}; delete from {table}"), None).await;
        let found = problems(&fixture).await;
        kinds += found.len();
        fixture.sql(&format!("insert into {table} select * from spare; drop table spare"), None).await;
        assert_problems(&fixture, &[]).await;
        for statement in found.iter().flat_map(|problem| &problem.sql) {
            // Only a turn too many does no harm, and a change that has nothing to do.
            if !statement.contains("into longshore.turns") && !statement.contains("flow_changes") {
                fixture.sql(statement, None).await;
            }
        }
        assert_eq!(rows_in(&fixture, &TABLES).await, before, "after the remedies for {table}");
        assert_problems(&fixture, &[]).await;
    }
    assert!(kinds >= 20, "{kinds} problems");
}

async fn names_in_a_remedy_are_quoted(fixture: Fixture) {
    let id = fixture.add(job("mail").queue("it's").group("longshore.x {0}").priority(3)).await;
    fixture.sql("delete from turns", None).await;
    let missing =
        "group `longshore.x {0}` of queue `it's` has waiting jobs of priority 3, but no turn in time";
    assert_remedied(&fixture, &[missing.into()]).await;
    assert_eq!(ids(&fixture.claim_from("it's", fixture.worker().await, 9).await), [id]);
}
