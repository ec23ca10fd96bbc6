//! Rows that no operation of the library can produce: they are planted with SQL, as a manual
//! change or a partial restore could. They do not stop their queue, and the check names them.

use longshore::store::{ClaimCursor, ClaimRequest, NewStep, PendingWait, Repair, StateTable};
use longshore::{Ending, JobId, Outcome, RepairMode, Status, UniqueMode, WorkerId};

use crate::fixture::*;
use crate::inspect::one_of_each;

cases! {
    a_waiting_job_that_is_also_running_does_not_stop_its_queue,
    a_waiting_job_without_a_request_does_not_stop_its_queue,
    many_unsound_rows_do_not_stop_their_queue,
    an_unsound_row_does_not_stop_a_limited_queue,
    an_unsound_suspect_does_not_stop_other_suspects,
    a_job_whose_options_cannot_be_read_is_claimed,
    a_repair_keeps_the_lease_of_a_job_that_also_waits,
    a_repair_keeps_the_outcome_of_a_job_that_also_waits,
    a_repair_removes_rows_without_a_request,
    a_repair_frees_keys_whose_owner_is_not_live,
    a_repair_removes_the_journal_of_a_job_that_does_not_exist,
    a_repair_delivers_an_event_that_jobs_still_wait_for,
    a_repair_adds_a_turn_for_a_group_that_has_none,
    more_running_jobs_than_the_limit_of_a_group_are_a_problem,
    a_repair_corrects_the_tallies,
    a_repair_whose_reason_has_gone_changes_nothing,
    ambiguous_problems_are_reported_and_not_repaired,
    check_finds_no_problems_in_a_healthy_database,
    check_finds_a_job_without_a_state,
    check_finds_a_job_with_two_states,
    check_finds_a_waiting_row_without_a_job,
    check_finds_a_lease_without_a_job,
    check_finds_a_finished_row_without_a_job,
    check_finds_a_key_without_a_live_holder,
    check_finds_a_live_job_without_its_key,
    check_finds_a_tally_that_disagrees_with_the_rows,
    check_finds_a_waiting_row_that_disagrees_with_its_job,
    check_finds_a_suspended_job_that_is_running,
}

const COPY_TO_READY: &str = "
    insert into ready (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions,
                       keyed, kind, queue, flags)
    select id, claimed_at, claimed_at, timeout_ms, lease_no - 1, priority, attempt - 1, max_attempts,
           interruptions, keyed, kind, queue, flags
      from running
     where id = {id}";

/// Enqueues a job, claims it and plants its old row in `ready` again.
async fn waiting_and_running(fixture: &Fixture, job: longshore::NewJob) -> JobId {
    let claimed = fixture.running(job).await;
    fixture.sql(COPY_TO_READY, Some(claimed.lease().id)).await;
    claimed.lease().id
}

async fn waiting_without_request(fixture: &Fixture, job: longshore::NewJob) -> JobId {
    let id = fixture.add(job).await;
    fixture.sql("delete from jobs where id = {id}", Some(id)).await;
    id
}

/// Claims twenty times with the same cursor.
async fn claim_all(fixture: &Fixture, worker: WorkerId, limit: u32) -> Vec<JobId> {
    let mut cursor = ClaimCursor::default();
    let mut claimed = Vec::new();
    for _ in 0..20 {
        let claims =
            fixture.store().claim(&ClaimRequest::new(worker, limit), &mut cursor).await.expect("claim");
        claimed.extend(ids(&claims.jobs));
    }
    claimed
}

async fn assert_reported(fixture: &Fixture, id: JobId) {
    let problems = fixture.check().await.expect("check").problems;
    assert!(problems.iter().any(|problem| problem.contains(&id.to_string())), "{problems:?}");
}

async fn assert_queue_continues(fixture: &Fixture, unsound: JobId) {
    let before = fixture.query_number("select count(*) from running", None).await;
    let mut expected = Vec::new();
    for _ in 0..4 {
        expected.push(fixture.enqueue_kind("mail").await);
    }
    let worker = fixture.worker().await;
    // With new cursors and without.
    let mut claimed = ids(&fixture.claim(worker, 1).await);
    claimed.extend(ids(&fixture.claim(worker, 1).await));
    claimed.extend(claim_all(fixture, worker, 1).await);
    assert_eq!(claimed, expected);
    expected = vec![fixture.enqueue_kind("mail").await, fixture.add(job("mail").priority(3)).await];
    expected.reverse();
    assert_eq!(ids(&fixture.claim(worker, 9).await), expected);
    let waiting = fixture.query_number("select count(*) from ready where id = {id}", Some(unsound)).await;
    let running = fixture.query_number("select count(*) from running", None).await;
    assert_eq!((waiting, running), (1, before + 6), "the row stays where it is");
    assert_reported(fixture, unsound).await;
    fixture.skip_final_check();
}

async fn a_waiting_job_that_is_also_running_does_not_stop_its_queue(fixture: Fixture) {
    let id = waiting_and_running(&fixture, job("mail")).await;
    assert_queue_continues(&fixture, id).await;
}

async fn a_waiting_job_without_a_request_does_not_stop_its_queue(fixture: Fixture) {
    let id = waiting_without_request(&fixture, job("mail")).await;
    assert_queue_continues(&fixture, id).await;
}

/// One claim skips a limited number of rows. The next ones continue after them, although all claims with
/// this cursor would normally start at the head.
async fn many_unsound_rows_do_not_stop_their_queue(fixture: Fixture) {
    fixture.skip_final_check();
    fixture.enqueue_many((0..2500).map(|_| job("mail"))).await.expect("enqueue");
    fixture.sql("delete from jobs", None).await;
    let sound = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    // A default cursor resumes in any case if claims follow each other without a pause.
    let (request, mut cursor) = (ClaimRequest::new(worker, 4), ClaimCursor::always_head());
    for _ in 0..5 {
        let claims = fixture.store().claim(&request, &mut cursor).await.expect("claim");
        if !claims.jobs.is_empty() {
            return assert_eq!(ids(&claims.jobs), [sound]);
        }
    }
    panic!("five claims did not find the job behind them");
}

async fn an_unsound_row_does_not_stop_a_limited_queue(fixture: Fixture) {
    waiting_and_running(&fixture, job("mail").priority(5)).await;
    waiting_without_request(&fixture, job("mail").priority(4)).await;
    fixture.limit("default", Some(3)).await.expect("limit");
    let expected = [fixture.enqueue_kind("mail").await, fixture.enqueue_kind("mail").await];
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(claim_all(&fixture, worker, 9).await, expected, "one of the three slots was taken");
    fixture.skip_final_check();
}

async fn an_unsound_suspect_does_not_stop_other_suspects(fixture: Fixture) {
    let first = fixture.add(job("mail").priority(9)).await;
    let second = fixture.add(job("mail").priority(8)).await;
    assert_eq!(fixture.claim(fixture.worker().await, 2).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    fixture.sql("delete from jobs where id = {id}", Some(first)).await;
    let plain = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 5).await), [second, plain]);
    fixture.skip_final_check();
}

async fn a_job_whose_options_cannot_be_read_is_claimed(fixture: Fixture) {
    let id = fixture.add(job("mail").flags(["gpu"])).await;
    fixture.sql("update jobs set options = '{\"retry\": 5, \"tags\": 7}' where id = {id}", Some(id)).await;
    let other = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 5).await), [id, other]);
    assert_reported(&fixture, id).await;
    fixture.skip_final_check();
}

// ---- repairs -----------------------------------------------------------------------

/// A dry run lists these repairs and changes nothing; then they are made, and the check
/// that follows every case finds no problem.
async fn assert_repaired(fixture: &Fixture, expected: &[Repair]) {
    let problems = fixture.check().await.expect("check").problems;
    assert!(!problems.is_empty());
    let listed = fixture.repair(RepairMode::DryRun).await.expect("dry run");
    assert_eq!(listed, expected);
    assert_eq!(fixture.check().await.expect("check").problems, problems, "a dry run changes nothing");
    assert_eq!(fixture.repair(RepairMode::Repair).await.expect("repair"), expected);
    assert_eq!(fixture.repair(RepairMode::Repair).await.expect("repair"), []);
}

async fn a_repair_keeps_the_lease_of_a_job_that_also_waits(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let job = claimed.lease().id;
    fixture.sql(COPY_TO_READY, Some(job)).await;
    assert_repaired(&fixture, &[Repair::KeepLease { job }]).await;
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(fixture.status(job).await, Status::Succeeded);
}

async fn a_repair_keeps_the_outcome_of_a_job_that_also_waits(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let job = claimed.lease().id;
    fixture.sql(COPY_TO_READY, Some(job)).await;
    fixture.must_finish(&claimed, done()).await;
    assert_repaired(&fixture, &[Repair::KeepOutcome { job }]).await;
    assert_eq!(fixture.status(job).await, Status::Succeeded);
}

async fn a_repair_removes_rows_without_a_request(fixture: Fixture) {
    let finished = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let claimed = fixture.running(job("mail")).await;
    let (running, worker) = (claimed.lease().id, claimed.lease().worker);
    let ready = fixture.enqueue_kind("mail").await;
    let kept = fixture.enqueue_kind("mail").await;
    for id in [ready, running, finished] {
        let merged = "insert into merged_requests (id, job, replaced) values ({id}, {id}, false)";
        fixture.sql(merged, Some(id)).await;
        fixture.sql("delete from jobs where id = {id}", Some(id)).await;
    }
    let drop = |job, table| Repair::DropWithoutRequest { job, table };
    let tally = Repair::CorrectTally {
        queue: "default".into(),
        kind: "mail".into(),
        outcome: Outcome::FailedPermanent,
        tallied: 1,
        found: 0,
    };
    // Its worker is alive, and its handler may still run.
    assert_eq!(
        fixture.repair(RepairMode::DryRun).await.expect("dry run"),
        [drop(ready, StateTable::Ready), drop(finished, StateTable::Finished), tally.clone()]
    );
    fixture.store().retire(worker).await.expect("retire");
    let expected = [
        drop(ready, StateTable::Ready),
        drop(running, StateTable::Running),
        drop(finished, StateTable::Finished),
        tally,
    ];
    assert_repaired(&fixture, &expected).await;
    for table in ["attempts", "merged_requests"] {
        let rows = fixture.query_number(&format!("select count(*) from {table}"), None).await;
        assert_eq!(rows, 0, "{table} keeps rows of a removed job");
    }
    assert_eq!(fixture.status(kept).await, Status::Queued);
}

async fn a_repair_frees_keys_whose_owner_is_not_live(fixture: Fixture) {
    let keyed = |key: &str| job("mail").unique_key(key, UniqueMode::Dedupe);
    let live = fixture.add(keyed("live")).await;
    let ended = fixture.add(job("mail").priority(3)).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 1).await.remove(0);
    fixture.must_finish(&claimed, done()).await;
    fixture.sql("insert into keys (key, job) values ('gone', {id})", Some(ended)).await;
    assert_repaired(&fixture, &[Repair::FreeKey { key: "gone".into(), job: ended }]).await;
    assert_ne!(fixture.add(keyed("gone")).await, live);
    assert_eq!(fixture.enqueue(keyed("live")).await.expect("enqueue").id, live, "its key is still taken");
}

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

async fn a_repair_removes_the_journal_of_a_job_that_does_not_exist(fixture: Fixture) {
    let gone = suspended(&fixture).await;
    let kept = suspended(&fixture).await;
    for table in ["ready", "jobs"] {
        fixture.sql(&format!("delete from {table} where id = {{id}}"), Some(gone)).await;
    }
    assert_repaired(&fixture, &[Repair::DropJournal { job: gone }]).await;
    assert_eq!(fixture.steps(kept).await.expect("steps").len(), 2);
    // A job that has lost only its request is repaired with everything that belongs to it.
    fixture.sql("delete from jobs where id = {id}", Some(kept)).await;
    assert_repaired(&fixture, &[Repair::DropWithoutRequest { job: kept, table: StateTable::Ready }]).await;
    for table in ["steps", "waits"] {
        assert_eq!(fixture.query_number(&format!("select count(*) from {table}"), None).await, 0, "{table}");
    }
}

async fn a_repair_delivers_an_event_that_jobs_still_wait_for(fixture: Fixture) {
    let id = suspended(&fixture).await;
    fixture.store().emit("approved", &raw("1")).await.expect("emit");
    assert_eq!(fixture.check().await.expect("check").problems, [""; 0], "it is not delivered yet");
    let off = match fixture.engine() {
        Engine::Postgres => "false",
        Engine::Sqlite => "0",
    };
    fixture.sql(&format!("update events set fresh = {off}"), None).await;
    assert_problem(&fixture, &format!("job {id} waits for event `approved`")).await;
    assert_repaired(&fixture, &[Repair::Redeliver { event: "approved".into() }]).await;
    assert_eq!(fixture.deliver_events().await.expect("deliver"), 1);
    assert_eq!(fixture.job(id).await.run_at, start());
    assert_eq!(fixture.check().await.expect("check").problems, [""; 0]);
}

async fn a_repair_adds_a_turn_for_a_group_that_has_none(fixture: Fixture) {
    let id = fixture.add(job("mail").group("acme").priority(3)).await;
    fixture.sql("delete from turns", None).await;
    assert_problem(
        &fixture,
        "group `acme` of queue `default` has waiting jobs of priority 3, but no turn in time",
    )
    .await;
    let turn = Repair::AddTurn { queue: "default".into(), group: "acme".into(), priority: 3 };
    assert_repaired(&fixture, std::slice::from_ref(&turn)).await;
    assert!(!fixture.store().repair(&turn).await.expect("repair"), "it has a turn now");
    assert_eq!(ids(&fixture.claim(fixture.worker().await, 9).await), [id]);
}

async fn more_running_jobs_than_the_limit_of_a_group_are_a_problem(fixture: Fixture) {
    fixture.group_defaults("default", Some(1), None).await.expect("defaults");
    fixture.running(job("mail").group("acme")).await;
    fixture.group_defaults("default", Some(2), None).await.expect("defaults");
    fixture.add(job("mail").group("acme")).await;
    assert_eq!(fixture.claim(fixture.worker().await, 9).await.len(), 1);
    assert_eq!(fixture.check().await.expect("check").problems, [""; 0], "the limit was raised");
    fixture.sql("update running set gate = 1", None).await;
    assert_problem(&fixture, "group `acme` of queue `default` runs 2 jobs, but its limit was never above 1")
        .await;
    fixture.skip_final_check();
}

async fn a_repair_corrects_the_tallies(fixture: Fixture) {
    fixture.ended(job("mail").queue("default"), Outcome::Succeeded).await;
    fixture.ended(job("sms"), Outcome::Succeeded).await;
    fixture.sql("update tallies set kept = kept + 4 where kind = 'mail'", None).await;
    let wrong = Repair::CorrectTally {
        queue: "default".into(),
        kind: "mail".into(),
        outcome: Outcome::Succeeded,
        tallied: 5,
        found: 1,
    };
    assert_repaired(&fixture, &[wrong]).await;
    assert_eq!(fixture.count(Status::Succeeded).await, 2);
}

/// Each of these was right when it was listed.
async fn a_repair_whose_reason_has_gone_changes_nothing(fixture: Fixture) {
    let keyed = job("mail").unique_key("live", UniqueMode::Dedupe);
    let waiting = fixture.add(keyed).await;
    let claimed = fixture.claim_one(fixture.worker().await).await;
    fixture.must_finish(&claimed, failed()).await;
    let finished = fixture.ended(job("sms"), Outcome::Succeeded).await;
    let running = fixture.running(job("call")).await.lease().id;
    let tally = Repair::CorrectTally {
        queue: "default".into(),
        kind: "sms".into(),
        outcome: Outcome::Succeeded,
        tallied: 7,
        found: 1,
    };
    fixture.emit("approved", &1).await.expect("emit");
    let repairs = [
        Repair::DropJournal { job: waiting },
        Repair::Redeliver { event: "approved".into() },
        Repair::Redeliver { event: "unknown".into() },
        Repair::KeepLease { job: waiting },
        Repair::KeepLease { job: running },
        Repair::KeepOutcome { job: waiting },
        Repair::KeepOutcome { job: finished },
        Repair::DropWithoutRequest { job: waiting, table: StateTable::Ready },
        Repair::DropWithoutRequest { job: running, table: StateTable::Running },
        Repair::DropWithoutRequest { job: finished, table: StateTable::Finished },
        Repair::FreeKey { key: "live".into(), job: waiting },
        tally,
    ];
    for repair in repairs {
        assert!(!fixture.store().repair(&repair).await.expect("repair"), "{repair}");
    }
    for (id, status) in
        [(waiting, Status::Retrying), (running, Status::Running), (finished, Status::Succeeded)]
    {
        assert_eq!(fixture.status(id).await, status);
    }
}

async fn ambiguous_problems_are_reported_and_not_repaired(fixture: Fixture) {
    // Without a state, in two states with a waiting row that is newer, and with other
    // contents than its request.
    let lost = fixture.enqueue_kind("mail").await;
    fixture.sql("delete from ready where id = {id}", Some(lost)).await;
    let claimed = fixture.running(job("mail")).await.lease().id;
    fixture.sql(COPY_TO_READY, Some(claimed)).await;
    fixture.sql("update ready set lease_no = 5 where id = {id}", Some(claimed)).await;
    let other = fixture.enqueue_kind("mail").await;
    fixture.sql("update ready set queue = 'other' where id = {id}", Some(other)).await;
    let problems = fixture.check().await.expect("check").problems;
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert_eq!(fixture.repair(RepairMode::Repair).await.expect("repair"), []);
    assert_eq!(fixture.check().await.expect("check").problems, problems);
    fixture.skip_final_check();
}

// ---- the check ----------------------------------------------------------------------

async fn check_finds_no_problems_in_a_healthy_database(fixture: Fixture) {
    one_of_each(&fixture).await;
    let report = fixture.check().await.expect("check");
    assert_eq!((report.jobs, report.problems), (6, Vec::new()));
}

async fn assert_problem(fixture: &Fixture, text: &str) {
    fixture.skip_final_check();
    let problems = fixture.check().await.expect("check").problems;
    assert!(problems.iter().any(|problem| problem.contains(text)), "{text:?} not in {problems:?}");
}

async fn check_finds_a_job_without_a_state(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    fixture.sql("delete from ready", None).await;
    assert_problem(&fixture, &id.to_string()).await;
}

async fn check_finds_a_job_with_two_states(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let at = match fixture.engine() {
        Engine::Postgres => "now()",
        Engine::Sqlite => "0",
    };
    let twice = format!(
        "insert into finished (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions)
         values ({{id}}, {at}, 0, 'succeeded', 1, 3, 0)"
    );
    fixture.sql(&twice, Some(id)).await;
    assert_problem(&fixture, &id.to_string()).await;
}

async fn check_finds_a_waiting_row_without_a_job(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    fixture.sql("delete from jobs", None).await;
    assert_problem(&fixture, &id.to_string()).await;
}

async fn check_finds_a_lease_without_a_job(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.sql("delete from jobs", None).await;
    assert_problem(&fixture, &claimed.lease().id.to_string()).await;
}

async fn check_finds_a_finished_row_without_a_job(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Cancelled).await;
    fixture.sql("delete from jobs", None).await;
    assert_problem(&fixture, &id.to_string()).await;
}

async fn check_finds_a_key_without_a_live_holder(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.sql("insert into keys (key, job) values ('orphaned', {id})", Some(id)).await;
    assert_problem(&fixture, "orphaned").await;
}

async fn check_finds_a_live_job_without_its_key(fixture: Fixture) {
    let id = fixture.add(job("mail").unique_key("customer-23", Default::default())).await;
    fixture.sql("delete from keys", None).await;
    assert_problem(&fixture, &id.to_string()).await;
}

async fn check_finds_a_tally_that_disagrees_with_the_rows(fixture: Fixture) {
    fixture.ended(job("mail").queue("default"), Outcome::Succeeded).await;
    fixture.sql("update tallies set kept = kept + 1", None).await;
    assert_problem(&fixture, "default").await;
}

async fn check_finds_a_waiting_row_that_disagrees_with_its_job(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    fixture.sql("update ready set priority = 77", None).await;
    assert_problem(&fixture, &id.to_string()).await;
}

async fn check_finds_a_suspended_job_that_is_running(fixture: Fixture) {
    let id = fixture.running(job("mail")).await.lease().id;
    fixture.sql("insert into waits (event, job, lease_no) values ('approved', {id}, 1)", Some(id)).await;
    assert_problem(&fixture, &format!("job {id} waits for event `approved` since lease 1")).await;
    assert_eq!(fixture.repair(RepairMode::Repair).await.expect("repair"), []);
}
