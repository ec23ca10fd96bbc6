//! Recovery: jobs of dead workers and hung handlers return to the queue, each once and
//! only while their lease may be taken.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use longshore::rules::lifecycle::{self, Recovery};
use longshore::store::{Beat, Claimed, EndedBy, Recovered, Settled, Settlement};
use longshore::{
    AttemptEnd, Decision, InterruptedJob, Interruption, Interruptor, JobId, NewJob, RetryPolicy, Status,
    SweepMode, SweepOptions, SweepReport, SweepScope, When, WorkerId,
};

use crate::fixture::*;

cases! {
    a_dead_workers_job_returns_to_the_queue,
    a_recovered_job_that_succeeds_later_keeps_its_errors,
    leases_of_a_live_worker_are_never_recovered,
    each_worker_is_declared_dead_by_its_own_threshold,
    a_worker_with_a_resilient_job_keeps_all_its_leases_for_three_times_the_threshold,
    only_the_worker_that_holds_a_resilient_job_gets_the_longer_threshold,
    a_worker_that_signs_off_loses_its_resilient_jobs_at_once,
    a_manual_sweep_honours_resilience,
    the_flags_and_the_factor_of_resilience_are_configurable,
    a_lease_without_a_worker_row_is_recovered_past_the_threshold,
    the_lease_of_a_hung_handler_is_recovered_from_a_live_worker,
    a_handler_counts_as_hung_by_the_threshold_of_its_holder,
    a_job_without_a_timeout_never_counts_as_hung,
    a_job_without_a_timeout_is_recovered_from_a_dead_worker,
    a_dry_run_reports_what_a_sweep_would_do_and_changes_nothing,
    a_dry_run_names_dead_workers_without_leases,
    a_dry_run_uses_the_requested_threshold,
    a_sweep_recovers_every_page_of_candidates,
    a_job_that_the_database_rejects_does_not_stop_the_recovery_of_others,
    pages_of_rejected_jobs_do_not_stop_a_sweep,
    a_worker_that_the_database_does_not_let_die_does_not_keep_others_alive,
    candidates_are_ordered_by_id_and_start_after_the_given_one,
    a_candidate_contains_the_whole_lease,
    a_reschedule_sets_the_time,
    a_reschedule_may_set_the_attempts,
    a_fail_decision_charges_the_attempt_and_uses_the_jobs_backoff,
    a_fail_decision_on_the_last_attempt_is_final,
    a_skipped_job_keeps_its_lease_and_is_not_counted,
    a_recovery_from_a_worker_that_is_not_dead_is_refused,
    a_stale_worker_that_sends_a_heartbeat_in_time_keeps_its_lease,
    a_recovery_of_a_settled_lease_is_refused,
    a_recovery_decided_without_a_raised_flag_returns_flagged,
    recovery_results_are_returned_per_item,
    a_hung_handlers_lease_is_recovered_while_its_worker_is_alive,
    a_worker_declared_dead_registers_again_and_claims,
    a_reschedule_to_an_absurd_time_is_stored,
    an_absurd_threshold_recovers_no_job,
}

fn resilient(kind: &str) -> NewJob {
    job(kind).flags(["infrastructure_resilient"])
}

fn immediately() -> SweepOptions {
    let interruption = Interruption { delay: Duration::ZERO, ..Interruption::default() };
    SweepOptions { interruption, ..SweepOptions::default() }
}

async fn candidates(fixture: &Fixture, scope: &SweepScope) -> Vec<(JobId, Interruptor)> {
    let found = fixture.store().interrupted(scope).await.expect("interrupted");
    found.iter().map(|lease| (lease.id, lease.why)).collect()
}

/// The settlement that a sweeper stores by default.
fn default_recovery(claimed: &Claimed, why: Interruptor) -> Settlement {
    let running = lifecycle::Running {
        lease_no: claimed.lease().lease_no,
        worker: claimed.lease().worker,
        attempt: claimed.attempt(),
        max_attempts: claimed.max_attempts(),
        interruptions: claimed.interruptions(),
        started: false,
        flags: Default::default(),
    };
    Settlement {
        lease: claimed.lease(),
        by: EndedBy::Recovery(why),
        seen: Some(Default::default()),
        leave: lifecycle::recover(&running, Recovery::Default(Interruption::default())),
        follow_ups: Vec::new(),
        waits: Vec::new(),
        failure: None,
    }
}

// ---- which jobs ------------------------------------------------------------

async fn a_dead_workers_job_returns_to_the_queue(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let (id, worker) = (claimed.lease().id, claimed.lease().worker);
    fixture.advance(61 * SECOND).await;
    let report = fixture.sweep_now().await;
    assert_eq!((&report.workers, report.recovered, report.skipped), (&[worker].into(), 1, 0));
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 0, 1));
    assert_eq!(job.run_at, start() + 66 * SECOND);
    assert_eq!(job.last_error.as_deref(), Some("Job recovered after worker interruption"));
    assert_eq!((job.locked_by, job.lease_no), (None, 1));
    let entry = &job.errors[0];
    assert_eq!((entry.what, entry.attempt, entry.lease_no), (AttemptEnd::Interrupted, 1, 1));
    assert_eq!((entry.worker, entry.started_at), (Some(worker), start()));
    assert_eq!(entry.ended_at, start() + 61 * SECOND);
}

async fn a_recovered_job_that_succeeds_later_keeps_its_errors(fixture: Fixture) {
    let first = fixture.running(job("mail")).await;
    let id = first.lease().id;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    fixture.advance(HOUR).await;
    let worker = fixture.worker().await;
    fixture.must_finish(&fixture.claim_one(worker).await, failed()).await;
    fixture.advance(HOUR).await;
    let worker = fixture.worker().await;
    fixture.must_finish(&fixture.claim_one(worker).await, done()).await;
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 2, 1));
    let errors: Vec<_> = job.errors.iter().map(|entry| (entry.what, entry.error.as_deref())).collect();
    assert_eq!(
        errors,
        [
            (AttemptEnd::Interrupted, Some("Job recovered after worker interruption")),
            (AttemptEnd::Failed, Some("smtp said 451")),
        ]
    );
    assert_eq!(job.last_error.as_deref(), Some("smtp said 451"));
}

async fn leases_of_a_live_worker_are_never_recovered(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    for _ in 0..10 {
        fixture.advance(55 * SECOND).await;
        let beat = fixture.store().beat(claimed.lease().worker, &[claimed.lease()]).await.expect("beat");
        assert!(matches!(beat, Beat::Alive { .. }));
        assert_eq!(fixture.sweep_now().await, SweepReport::default());
    }
    fixture.must_finish(&claimed, done()).await;
}

async fn each_worker_is_declared_dead_by_its_own_threshold(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(20 * SECOND).await, fixture.worker_with(5 * MINUTE).await);
    let (first, second) = (fixture.enqueue_kind("mail").await, fixture.enqueue_kind("sms").await);
    fixture.claim(quick, 1).await;
    fixture.claim(slow, 1).await;
    fixture.advance(21 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.workers, [quick].into());
    assert_eq!(
        (fixture.status(first).await, fixture.status(second).await),
        (Status::Retrying, Status::Running)
    );
    fixture.advance(5 * MINUTE).await;
    assert_eq!(fixture.sweep_now().await.workers, [slow].into());
    assert_eq!(fixture.status(second).await, Status::Retrying);
}

/// Both a sweep and its dry run, which must agree.
async fn sweep_and_dry_run(fixture: &Fixture, options: &SweepOptions) -> SweepReport {
    let dry = SweepOptions { mode: SweepMode::DryRun, ..options.clone() };
    let expected = fixture.sweep(&dry).await.expect("dry run");
    let report = fixture.sweep(options).await.expect("sweep");
    assert_eq!(report, expected, "the dry run reported something else");
    report
}

async fn a_worker_with_a_resilient_job_keeps_all_its_leases_for_three_times_the_threshold(fixture: Fixture) {
    let worker = fixture.worker().await;
    for job in [job("plain"), job("plain"), resilient("resilient"), resilient("resilient")] {
        fixture.add(job).await;
    }
    let claimed = fixture.claim(worker, 4).await;
    let leases: Vec<_> = claimed.iter().map(Claimed::lease).collect();
    fixture.advance(179 * SECOND).await;
    assert_eq!(sweep_and_dry_run(&fixture, &SweepOptions::default()).await, SweepReport::default());
    assert_eq!(fixture.worker_record(worker).await.expect("worker").dead_at, None);
    // The worker returns: it was not declared dead, and its handlers settle.
    let beat = fixture.store().beat(worker, &leases).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: Vec::new() });
    fixture.must_finish(&claimed[0], done()).await;
    fixture.must_finish(&claimed[2], done()).await;

    fixture.advance(180 * SECOND).await;
    assert_eq!(sweep_and_dry_run(&fixture, &SweepOptions::default()).await, SweepReport::default());
    fixture.advance(SECOND).await;
    let report = sweep_and_dry_run(&fixture, &SweepOptions::default()).await;
    assert_eq!((&report.workers, report.recovered), (&[worker].into(), 2));
    for lease in [leases[1], leases[3]] {
        assert_eq!(fixture.status(lease.id).await, Status::Retrying);
    }
}

async fn only_the_worker_that_holds_a_resilient_job_gets_the_longer_threshold(fixture: Fixture) {
    let (plain, resilient_holder) = (fixture.worker().await, fixture.worker().await);
    let ended = fixture.worker().await;
    fixture.enqueue_kind("plain").await;
    fixture.claim(plain, 1).await;
    fixture.add(resilient("resilient")).await;
    fixture.claim(resilient_holder, 1).await;
    fixture.add(resilient("resilient")).await;
    let done_soon = fixture.claim_one(ended).await;
    fixture.must_finish(&done_soon, done()).await;
    fixture.advance(61 * SECOND).await;
    let report = sweep_and_dry_run(&fixture, &SweepOptions::default()).await;
    assert_eq!((&report.workers, report.recovered), (&[plain, ended].into(), 1));
    assert_eq!(fixture.worker_record(resilient_holder).await.expect("worker").dead_at, None);
}

/// Its process has ended, so that there is no handler to wait for.
async fn a_worker_that_signs_off_loses_its_resilient_jobs_at_once(fixture: Fixture) {
    let claimed = fixture.running(resilient("resilient")).await;
    fixture.store().retire(claimed.lease().worker).await.expect("retire");
    assert_eq!(sweep_and_dry_run(&fixture, &SweepOptions::default()).await.recovered, 1);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Retrying);
}

async fn a_manual_sweep_honours_resilience(fixture: Fixture) {
    let worker = fixture.worker().await;
    fixture.add(resilient("resilient")).await;
    fixture.claim(worker, 1).await;
    fixture.advance(25 * SECOND).await;
    let options = SweepOptions::default().threshold(10 * SECOND);
    assert_eq!(sweep_and_dry_run(&fixture, &options).await, SweepReport::default());
    fixture.advance(6 * SECOND).await;
    let report = sweep_and_dry_run(&fixture, &options).await;
    assert_eq!((&report.workers, report.recovered), (&[worker].into(), 1));
}

async fn the_flags_and_the_factor_of_resilience_are_configurable(fixture: Fixture) {
    let worker = fixture.worker().await;
    fixture.add(job("mail").flags(["slow", "x"])).await;
    fixture.claim(worker, 1).await;
    let mut options = SweepOptions::default();
    options.scope.resilient_flags = vec!["slow".into(), "slower".into()];
    options.scope.resilient_factor = 10;
    fixture.advance(599 * SECOND).await;
    assert_eq!(fixture.sweep(&options).await.expect("sweep").recovered, 0);
    fixture.advance(2 * SECOND).await;
    assert_eq!(fixture.sweep(&options).await.expect("sweep").recovered, 1);
}

/// The row may be missing after a manual delete or a restored backup.
async fn a_lease_without_a_worker_row_is_recovered_past_the_threshold(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.sql("delete from workers", None).await;
    fixture.advance(60 * SECOND).await;
    assert_eq!(candidates(&fixture, &SweepScope::default()).await, []);
    fixture.advance(SECOND).await;
    let id = claimed.lease().id;
    assert_eq!(candidates(&fixture, &SweepScope::default()).await, [(id, Interruptor::UnknownWorker)]);
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(fixture.status(id).await, Status::Retrying);
}

async fn the_lease_of_a_hung_handler_is_recovered_from_a_live_worker(fixture: Fixture) {
    let claimed = fixture.running(job("mail").timeout(Some(10 * MINUTE))).await;
    let lease = claimed.lease();
    for minute in 1..=11 {
        fixture.advance(MINUTE).await;
        fixture.store().beat(lease.worker, &[lease]).await.expect("beat");
        assert_eq!(fixture.sweep_now().await.recovered, 0, "minute {minute}");
    }
    fixture.advance(SECOND).await;
    let scope = SweepScope::default();
    assert_eq!(candidates(&fixture, &scope).await, [(lease.id, Interruptor::HungHandler)]);
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(fixture.status(lease.id).await, Status::Retrying);
    // The worker is alive and learns of the loss at its next heartbeat.
    let beat = fixture.store().beat(lease.worker, &[lease]).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: vec![lease], cancel: Vec::new() });
}

/// The holder's threshold decides, not that of the process that sweeps.
async fn a_handler_counts_as_hung_by_the_threshold_of_its_holder(fixture: Fixture) {
    let (quick, slow) = (fixture.worker_with(20 * SECOND).await, fixture.worker_with(10 * MINUTE).await);
    let hangs = |flags: &[&str]| job("mail").timeout(Some(MINUTE)).flags(flags.iter().copied());
    let of_quick = fixture.add(hangs(&[])).await;
    fixture.claim(quick, 1).await;
    let resilient_of_quick = fixture.add(hangs(&["infrastructure_resilient"])).await;
    fixture.claim(quick, 1).await;
    let of_slow = fixture.add(hangs(&[])).await;
    fixture.claim(slow, 1).await;
    let hung_after = async |seconds: u32, scope: &SweepScope| {
        fixture.store().pin_clock(Some(start() + SECOND * seconds)).await.expect("pin_clock");
        for worker in [quick, slow] {
            fixture.store().beat(worker, &[]).await.expect("beat");
        }
        let found = candidates(&fixture, scope).await;
        assert!(found.iter().all(|(_, why)| *why == Interruptor::HungHandler), "{found:?}");
        found.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    let scope = SweepScope { orphan_after: SECOND, ..SweepScope::default() };
    assert_eq!(hung_after(80, &scope).await, []);
    assert_eq!(hung_after(81, &scope).await, [of_quick]);
    assert_eq!(hung_after(120, &scope).await, [of_quick]);
    assert_eq!(hung_after(121, &scope).await, [of_quick, resilient_of_quick]);
    assert_eq!(hung_after(660, &scope).await, [of_quick, resilient_of_quick]);
    assert_eq!(hung_after(661, &scope).await, [of_quick, resilient_of_quick, of_slow]);
    let manual = SweepScope { threshold: Some(5 * MINUTE), ..scope };
    assert_eq!(hung_after(361, &manual).await, [of_quick, of_slow]);
}

async fn a_job_without_a_timeout_never_counts_as_hung(fixture: Fixture) {
    let claimed = fixture.running(job("mail").timeout(None)).await;
    fixture.advance(400 * DAY).await;
    fixture.store().beat(claimed.lease().worker, &[claimed.lease()]).await.expect("beat");
    assert_eq!(fixture.sweep_now().await.recovered, 0);
}

async fn a_job_without_a_timeout_is_recovered_from_a_dead_worker(fixture: Fixture) {
    fixture.running(job("mail").timeout(None)).await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
}

// ---- sweeps --------------------------------------------------------------------

async fn a_dry_run_reports_what_a_sweep_would_do_and_changes_nothing(fixture: Fixture) {
    let (stale, live) = (fixture.worker().await, fixture.worker_with(DAY).await);
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    let claimed = fixture.claim(stale, 2).await;
    fixture.claim(live, 1).await;
    fixture.advance(61 * SECOND).await;
    let before = snapshot(&fixture.job(claimed[0].lease().id).await);
    let dry = SweepOptions { mode: SweepMode::DryRun, ..SweepOptions::default() };
    let report = fixture.sweep(&dry).await.expect("sweep");
    assert_eq!((&report.workers, report.recovered, report.skipped), (&[stale].into(), 2, 0));
    assert_eq!(snapshot(&fixture.job(claimed[0].lease().id).await), before);
    assert_eq!(fixture.worker_record(stale).await.expect("worker").dead_at, None);
    assert_eq!(fixture.sweep_now().await, report);
}

async fn a_dry_run_names_dead_workers_without_leases(fixture: Fixture) {
    let (stale, _live) = (fixture.worker().await, fixture.worker_with(DAY).await);
    fixture.advance(61 * SECOND).await;
    let dry = SweepOptions { mode: SweepMode::DryRun, ..SweepOptions::default() };
    let report = fixture.sweep(&dry).await.expect("sweep");
    assert_eq!((&report.workers, report.recovered, report.skipped), (&[stale].into(), 0, 0));
    assert_eq!(fixture.worker_record(stale).await.expect("worker").dead_at, None);
    assert_eq!(fixture.sweep_now().await, report);
}

async fn a_dry_run_uses_the_requested_threshold(fixture: Fixture) {
    let (stale, live) = (fixture.worker().await, fixture.worker_with(DAY).await);
    fixture.advance(61 * SECOND).await;
    for (threshold, dead) in [(HOUR, vec![]), (30 * SECOND, vec![stale, live])] {
        let options = SweepOptions::default().threshold(threshold);
        let dry = SweepOptions { mode: SweepMode::DryRun, ..options.clone() };
        let report = fixture.sweep(&dry).await.expect("sweep");
        assert_eq!(report.workers, dead.into_iter().collect(), "{threshold:?}");
        assert_eq!(fixture.sweep(&options).await.expect("sweep"), report);
    }
}

async fn a_sweep_recovers_every_page_of_candidates(fixture: Fixture) {
    let worker = fixture.worker().await;
    for _ in 0..7 {
        fixture.enqueue_kind("mail").await;
    }
    fixture.claim(worker, 7).await;
    fixture.advance(61 * SECOND).await;
    let mut options = immediately();
    options.scope.limit = 2;
    assert_eq!(fixture.sweep(&options).await.expect("sweep").recovered, 7);
    assert_eq!(fixture.count(Status::Retrying).await, 7);
}

/// Makes the database reject every change of the row with this id.
async fn reject_changes(fixture: &Fixture, table: &str, id: uuid::Uuid) {
    let (name, id) = (id.simple(), fixture.literal(id));
    let trigger = match fixture.engine() {
        Engine::Postgres => format!(
            "create or replace function reject() returns trigger language plpgsql
                 as 'begin raise exception ''rejected by a test''; end';
             create trigger reject_{name} before update or delete on {table}
                 for each row when (old.id = {id}) execute function reject()"
        ),
        Engine::Sqlite => ["update", "delete"]
            .map(|event| {
                format!(
                    "create trigger reject_{event}_{name} before {event} on {table} when old.id = {id}
                     begin select raise(abort, 'rejected by a test'); end;"
                )
            })
            .concat(),
    };
    fixture.sql(&trigger, None).await;
}

async fn accept_changes(fixture: &Fixture, table: &str, id: uuid::Uuid) {
    let name = id.simple();
    let drop = match fixture.engine() {
        Engine::Postgres => format!("drop trigger reject_{name} on {table}"),
        Engine::Sqlite => {
            format!("drop trigger reject_update_{name}; drop trigger reject_delete_{name}")
        }
    };
    fixture.sql(&drop, None).await;
}

/// Of nine jobs, one returns to the queue, one is quarantined and one is cancelled on each
/// side of the rejected ones.
async fn a_job_that_the_database_rejects_does_not_stop_the_recovery_of_others(fixture: Fixture) {
    let worker = fixture.worker().await;
    for _ in 0..9 {
        fixture.enqueue_kind("mail").await;
    }
    let mut claimed = ids(&fixture.claim(worker, 9).await);
    claimed.sort();
    fixture
        .sql(
            "update running set interruptions = 2, started_at = claimed_at where id = {id}",
            Some(claimed[1]),
        )
        .await;
    fixture
        .sql(
            "update running set interruptions = 2, started_at = claimed_at where id = {id}",
            Some(claimed[7]),
        )
        .await;
    fixture.cancel(claimed[2]).await.expect("cancel");
    fixture.cancel(claimed[6]).await.expect("cancel");
    let rejected = [claimed[3], claimed[4], claimed[7]];
    for id in rejected {
        reject_changes(&fixture, "running", id.0).await;
    }
    fixture.advance(61 * SECOND).await;
    for round in 0..2 {
        let report = fixture.sweep_now().await;
        let recovered = if round == 0 { 6 } else { 0 };
        assert_eq!((report.recovered, report.skipped, report.deferred), (recovered, 0, 3), "round {round}");
        for id in rejected {
            assert_eq!(fixture.status(id).await, Status::Running);
        }
    }
    assert_eq!(fixture.status(claimed[0]).await, Status::Retrying);
    assert_eq!(fixture.status(claimed[1]).await, Status::FailedPermanent);
    assert_eq!(
        (fixture.status(claimed[2]).await, fixture.status(claimed[6]).await),
        (Status::Cancelled, Status::Cancelled)
    );
    for id in rejected {
        accept_changes(&fixture, "running", id.0).await;
    }
    let report = fixture.sweep_now().await;
    assert_eq!((report.recovered, report.deferred), (3, 0));
    assert_eq!(fixture.status(claimed[7]).await, Status::FailedPermanent);
}

async fn pages_of_rejected_jobs_do_not_stop_a_sweep(fixture: Fixture) {
    let worker = fixture.worker().await;
    for _ in 0..8 {
        fixture.enqueue_kind("mail").await;
    }
    let mut claimed = ids(&fixture.claim(worker, 8).await);
    claimed.sort();
    for id in &claimed[..5] {
        reject_changes(&fixture, "running", id.0).await;
    }
    fixture.advance(61 * SECOND).await;
    let mut options = immediately();
    options.scope.limit = 2;
    let report = fixture.sweep(&options).await.expect("sweep");
    assert_eq!((report.recovered, report.deferred), (3, 5));
}

async fn a_worker_that_the_database_does_not_let_die_does_not_keep_others_alive(fixture: Fixture) {
    let (stuck, other) = (fixture.worker().await, fixture.worker().await);
    fixture.enqueue_kind("mail").await;
    fixture.claim(stuck, 1).await;
    fixture.enqueue_kind("mail").await;
    let claimed = fixture.claim_one(other).await;
    reject_changes(&fixture, "workers", stuck.0).await;
    fixture.advance(61 * SECOND).await;
    let report = fixture.sweep_now().await;
    assert_eq!((&report.workers, report.recovered), (&[other].into(), 1));
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Retrying);
    // Neither does one that was dead for long and cannot be removed.
    accept_changes(&fixture, "workers", stuck.0).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    let late = fixture.worker().await;
    reject_changes(&fixture, "workers", stuck.0).await;
    fixture.advance(2 * HOUR).await;
    assert_eq!(fixture.sweep_now().await.workers, [late].into());
}

async fn candidates_are_ordered_by_id_and_start_after_the_given_one(fixture: Fixture) {
    let worker = fixture.worker().await;
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let mut expected = ids(&fixture.claim(worker, 4).await);
    expected.sort();
    fixture.advance(61 * SECOND).await;
    let scope = SweepScope { after: Some(expected[0]), limit: 2, ..SweepScope::default() };
    let found: Vec<_> = candidates(&fixture, &scope).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(found, expected[1..3]);
}

async fn a_candidate_contains_the_whole_lease(fixture: Fixture) {
    let policy = RetryPolicy::fixed(33 * SECOND);
    let claimed =
        fixture.running(job("mail").priority(4).max_attempts(6).flags(["gpu"]).retry(policy.clone())).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    fixture.advance(61 * SECOND).await;
    let found = fixture.store().interrupted(&SweepScope::default()).await.expect("interrupted").remove(0);
    assert_eq!(
        (found.lease(), found.kind.as_str(), found.queue.as_str()),
        (claimed.lease(), "mail", "default")
    );
    assert_eq!((found.flags.clone(), found.retry.clone()), (vec!["gpu".to_owned()], Some(policy)));
    assert_eq!((found.running.attempt, found.running.max_attempts, found.running.interruptions), (1, 6, 0));
    assert!(found.running.flags.cancel_requested && !found.running.started);
    assert_eq!((found.claimed_at, found.backoff()), (start(), Some(33 * SECOND)));
}

// ---- decisions -----------------------------------------------------------------

async fn sweep_with_decision(fixture: &Fixture, claimed: &Claimed, decision: Decision) -> SweepReport {
    fixture.advance(61 * SECOND).await;
    let id = claimed.lease().id;
    let options = SweepOptions::default();
    let report = fixture
        .sweep_with(&options, &mut |job: &InterruptedJob| {
            assert_eq!(job.record.id, id);
            decision.clone()
        })
        .await;
    report.expect("sweep")
}

async fn a_reschedule_sets_the_time(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let at = start() + DAY;
    sweep_with_decision(&fixture, &claimed, Decision::Reschedule { when: When::At(at), attempts: None })
        .await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.interruptions, job.run_at), (Status::Retrying, 0, 1, at));
}

async fn a_reschedule_may_set_the_attempts(fixture: Fixture) {
    for (requested, stored) in [(Some(2), 2), (Some(0), 0), (Some(77), 4)] {
        let claimed = fixture.running(job("mail").max_attempts(5)).await;
        let decision = Decision::Reschedule { when: When::After(2 * MINUTE), attempts: requested };
        sweep_with_decision(&fixture, &claimed, decision).await;
        let job = fixture.job(claimed.lease().id).await;
        let delay = job.run_at - fixture.now().await;
        assert_eq!((job.attempts, delay), (stored, TimeDelta::minutes(2)), "{requested:?}");
        fixture.cancel(claimed.lease().id).await.expect("cancel");
    }
}

async fn a_fail_decision_charges_the_attempt_and_uses_the_jobs_backoff(fixture: Fixture) {
    let claimed = fixture.running(job("mail").retry(RetryPolicy::fixed(33 * SECOND))).await;
    sweep_with_decision(&fixture, &claimed, Decision::FailWithBackoff).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 1, 0));
    assert_eq!(job.run_at, start() + 94 * SECOND);
    assert_eq!(job.last_error.as_deref(), Some("WorkerCrashed"));
    assert_eq!(fixture.history(claimed.lease().id).await, [AttemptEnd::Failed]);
}

async fn a_fail_decision_on_the_last_attempt_is_final(fixture: Fixture) {
    let claimed = fixture.running(job("mail").max_attempts(1)).await;
    sweep_with_decision(&fixture, &claimed, Decision::FailWithBackoff).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.last_error.as_deref()), (Status::FailedPermanent, Some("WorkerCrashed")));
}

async fn a_skipped_job_keeps_its_lease_and_is_not_counted(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let report = sweep_with_decision(&fixture, &claimed, Decision::Skip).await;
    assert_eq!((report.recovered, report.skipped), (0, 1));
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.interruptions, job.lease_no), (Status::Running, 0, 1));
    assert_eq!(fixture.sweep_now().await.recovered, 1);
}

// ---- checks when a recovery is stored --------------------------------------------

async fn a_recovery_from_a_worker_that_is_not_dead_is_refused(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let before = snapshot(&fixture.job(claimed.lease().id).await);
    for why in [Interruptor::DeadWorker, Interruptor::UnknownWorker] {
        let settled = fixture.store().recover(&[default_recovery(&claimed, why)]).await.expect("recover");
        assert_eq!(settled, [Recovered::Settled(Settled::LeaseLost)], "{why:?}");
    }
    assert_eq!(snapshot(&fixture.job(claimed.lease().id).await), before);
    fixture.must_finish(&claimed, done()).await;
}

/// The worker was stale when the sweep listed its job, but it sent a heartbeat before
/// the decision was stored.
async fn a_stale_worker_that_sends_a_heartbeat_in_time_keeps_its_lease(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(candidates(&fixture, &SweepScope::default()).await.len(), 1);
    let beat = fixture.store().beat(claimed.lease().worker, &[claimed.lease()]).await.expect("beat");
    assert!(matches!(beat, Beat::Alive { .. }));
    let settled = fixture
        .store()
        .recover(&[default_recovery(&claimed, Interruptor::DeadWorker)])
        .await
        .expect("recover");
    assert_eq!(settled, [Recovered::Settled(Settled::LeaseLost)]);
    fixture.must_finish(&claimed, done()).await;
}

async fn a_recovery_of_a_settled_lease_is_refused(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, done()).await;
    fixture.advance(61 * SECOND).await;
    fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
    let settled = fixture
        .store()
        .recover(&[default_recovery(&claimed, Interruptor::DeadWorker)])
        .await
        .expect("recover");
    assert_eq!(settled, [Recovered::Settled(Settled::LeaseLost)]);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Succeeded);
}

async fn a_recovery_decided_without_a_raised_flag_returns_flagged(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    fixture.advance(61 * SECOND).await;
    fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
    let settled = fixture
        .store()
        .recover(&[default_recovery(&claimed, Interruptor::DeadWorker)])
        .await
        .expect("recover");
    assert!(
        matches!(settled[..], [Recovered::Settled(Settled::Flagged(flags))] if flags.cancel_requested),
        "{settled:?}"
    );
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Running);
}

async fn recovery_results_are_returned_per_item(fixture: Fixture) {
    let (stale, live) = (fixture.worker().await, fixture.worker_with(DAY).await);
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    let dead = fixture.claim(stale, 2).await;
    let live = fixture.claim(live, 1).await;
    fixture.must_finish(&dead[1], done()).await;
    fixture.advance(61 * SECOND).await;
    fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
    let recoveries =
        [&live[0], &dead[0], &dead[1]].map(|claimed| default_recovery(claimed, Interruptor::DeadWorker));
    let settled = fixture.store().recover(&recoveries).await.expect("recover");
    assert_eq!(settled, [Settled::LeaseLost, Settled::Stored, Settled::LeaseLost].map(Recovered::Settled));
}

async fn a_hung_handlers_lease_is_recovered_while_its_worker_is_alive(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let settled = fixture
        .store()
        .recover(&[default_recovery(&claimed, Interruptor::HungHandler)])
        .await
        .expect("recover");
    assert_eq!(settled, [Recovered::Settled(Settled::Stored)]);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Retrying);
}

async fn a_worker_declared_dead_registers_again_and_claims(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    let beat = fixture.store().beat(claimed.lease().worker, &[claimed.lease()]).await.expect("beat");
    assert_eq!(beat, Beat::Dead);
    assert_eq!(fixture.claim(claimed.lease().worker, 1).await.len(), 0);
    let again: WorkerId = fixture.worker().await;
    assert_eq!(fixture.claim(again, 1).await.len(), 1);
}

/// A hook may return any time.
async fn a_reschedule_to_an_absurd_time_is_stored(fixture: Fixture) {
    for when in
        [When::At(DateTime::<Utc>::MIN_UTC), When::At(DateTime::<Utc>::MAX_UTC), When::After(Duration::MAX)]
    {
        let claimed = fixture.running(job("mail")).await;
        let report =
            sweep_with_decision(&fixture, &claimed, Decision::Reschedule { when, attempts: None }).await;
        assert_eq!(report.recovered, 1, "{when:?}");
        assert_eq!(fixture.status(claimed.lease().id).await, Status::Retrying);
        fixture.cancel(claimed.lease().id).await.expect("cancel");
    }
}

async fn an_absurd_threshold_recovers_no_job(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    let mut options = SweepOptions::default().threshold(Duration::MAX);
    options.scope.orphan_after = Duration::MAX;
    options.scope.resilient_factor = u32::MAX;
    assert_eq!(fixture.sweep(&options).await.expect("sweep").recovered, 0);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Running);
}
