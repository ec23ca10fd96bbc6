//! Bugs in the worker: what it claims ahead, what it releases, what it counts, and how it
//! stops.

use super::Mutant;

const BUILDER: &str = "crates/longshore/src/worker/builder.rs";
const CLAIM: &str = "crates/longshore/src/worker/claim.rs";
const CLAIM_SQL: &str = "crates/longshore/src/store/postgres/claim_sql.rs";
const CONTEXT: &str = "crates/longshore/src/worker/context.rs";
const JOB_LOG: &str = "crates/longshore/src/job_log.rs";
const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const RECOVERY: &str = "crates/longshore/src/recovery.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";
const SHARED: &str = "crates/longshore/src/worker/shared.rs";
const SQLITE_CLAIM: &str = "crates/longshore/src/store/sqlite/claim.rs";
const SUPERVISE: &str = "crates/longshore/src/worker/supervise.rs";

/// Each must be caught on both engines, except for those in the statements of one engine.
pub(super) const MUTANTS: &[Mutant] = &[
    // ---- claiming ahead --------------------------------------------------------
    Mutant {
        name: "worker: keep buffered jobs that cannot start",
        file: CLAIM,
        anchor: "fn release_overdue_jobs(",
        find: "take_overdue(MAX_BUFFER_WAIT)",
        replace: "take_overdue(MAX_BUFFER_WAIT * 1000)",
        caught_by: &[
            "claim_ahead::postgres::buffered_jobs_that_cannot_start_are_run_by_another_worker",
            "claim_ahead::postgres::a_buffered_job_that_was_cancelled_ends_without_a_charge",
            "claim_ahead::sqlite::buffered_jobs_that_cannot_start_are_run_by_another_worker",
            "claim_ahead::sqlite::a_buffered_job_that_was_cancelled_ends_without_a_charge",
        ],
    },
    Mutant {
        name: "worker: claim every kind ahead",
        file: "crates/longshore/src/worker/ahead.rs",
        anchor: "impl AheadKinds {",
        find: "handled.is_some_and(|handled| handled.len() == self.names.len())",
        replace: "handled.is_some()",
        caught_by: &[
            "claim_ahead::postgres::jobs_of_a_kind_without_history_are_claimed_only_for_free_slots",
            "claim_ahead::sqlite::jobs_of_a_kind_without_history_are_claimed_only_for_free_slots",
        ],
    },
    Mutant {
        name: "worker: start jobs in the order of their claims",
        file: SHARED,
        anchor: "pub(super) fn push(",
        find: "if !in_order {",
        replace: "if !in_order && waiting.jobs.is_empty() {",
        caught_by: &[
            "claim_ahead::postgres::a_due_job_of_higher_priority_starts_before_buffered_ones",
            "claim_ahead::sqlite::a_due_job_of_higher_priority_starts_before_buffered_ones",
        ],
    },
    Mutant {
        name: "worker: always claim from the queues without a limit first",
        file: CLAIM,
        anchor: "async fn claim_from_groups(",
        find: "next_first = nth;",
        replace: "next_first = first;",
        caught_by: &[
            "claim_ahead::postgres::a_capped_queue_progresses_beside_a_backlog",
            "claim_ahead::sqlite::a_capped_queue_progresses_beside_a_backlog",
        ],
    },
    Mutant {
        name: "worker: let claims ahead move the group that claims of any kind start with",
        file: CLAIM,
        anchor: "impl Purpose {",
        find: "Purpose::Ahead => 1,",
        replace: "Purpose::Ahead => 0,",
        caught_by: &[
            "claim_ahead::postgres::a_long_job_is_not_kept_waiting_by_a_backlog_of_short_ones_in_another_queue",
        ],
    },
    // ---- the minimum priority of a claim ---------------------------------------
    Mutant {
        name: "postgres: find the highest priority of a queue below the minimum",
        file: CLAIM_SQL,
        anchor: "pub(super) const DISCOVER",
        find: "and r.priority >= (select $2::int2)",
        replace: "and (select $2::int2) is not null",
        caught_by: &["claim::postgres::a_claim_takes_nothing_below_its_minimum_priority"],
    },
    Mutant {
        name: "postgres: find further priorities of a queue below the minimum",
        file: CLAIM_SQL,
        anchor: "select seg.queue, seg.limited, (",
        find: "and r.priority >= (select $2::int2)",
        replace: "and (select $2::int2) is not null",
        caught_by: &["claim::postgres::a_claim_takes_nothing_below_its_minimum_priority"],
    },
    Mutant {
        name: "sqlite: find priorities below the minimum",
        file: SQLITE_CLAIM,
        anchor: "fn find_segments(",
        find: "and priority >= ?3",
        replace: "and ?3 is not null",
        caught_by: &["claim::sqlite::a_claim_takes_nothing_below_its_minimum_priority"],
    },
    Mutant {
        name: "sqlite: take suspects below the minimum priority",
        file: SQLITE_CLAIM,
        anchor: "fn first_suspect(",
        find: "and priority >= ?3",
        replace: "and ?3 is not null",
        caught_by: &["claim::sqlite::a_suspect_below_the_minimum_priority_is_not_claimed"],
    },
    // ---- jobs that never started -----------------------------------------------
    Mutant {
        name: "rules: record a release of a job that never started",
        file: LIFECYCLE,
        anchor: "pub fn settle(job: &Running",
        find: "requeue_uncharged(job, When::At(run_at), None)",
        replace: "requeue_uncharged(job, When::At(run_at), Some(AttemptEnd::Released))",
        caught_by: &[
            "settle::postgres::a_job_that_never_started_waits_again_as_before",
            "workers::postgres::leases_that_a_worker_does_not_know_are_released_uncharged",
            "settle::sqlite::a_job_that_never_started_waits_again_as_before",
            "workers::sqlite::leases_that_a_worker_does_not_know_are_released_uncharged",
        ],
    },
    Mutant {
        name: "rules: let a job that never started lose its place in the queue",
        file: LIFECYCLE,
        anchor: "pub fn settle(job: &Running",
        find: "requeue_uncharged(job, When::At(run_at), None)",
        replace: "requeue_uncharged(job, if run_at < FAR_FUTURE { When::NOW } else { When::At(run_at) }, None)",
        caught_by: &[
            "settle::postgres::a_job_that_never_started_waits_again_as_before",
            "settle::sqlite::a_job_that_never_started_waits_again_as_before",
        ],
    },
    Mutant {
        name: "wake: do not notify of a release whose first reply was lost",
        file: SETTLE,
        anchor: "fn released_before<",
        find: "matches!(report.ending, Ending::NotStarted { .. })",
        replace: "matches!(report.ending, Ending::Released)",
        caught_by: &[
            "wake_paths::postgres::a_job_whose_release_was_stored_without_a_reply_starts",
            "wake_paths::sqlite::a_job_whose_release_was_stored_without_a_reply_starts",
        ],
    },
    // ---- counting and stopping -------------------------------------------------
    Mutant {
        name: "worker: count attempts as completed that never started",
        file: CONTEXT,
        anchor: "pub(super) fn mark_completed(",
        find: "Some(before == Stage::Started as u8)",
        replace: "Some(before <= Stage::Started as u8)",
        caught_by: &[
            "worker_metrics::postgres::jobs_that_a_stop_releases_before_they_start_are_not_counted",
            "worker_metrics::sqlite::jobs_that_a_stop_releases_before_they_start_are_not_counted",
        ],
    },
    Mutant {
        name: "worker: stop before the results are stored",
        file: SUPERVISE,
        anchor: "async fn wait_until_settled(",
        find: "() = tokio::time::sleep_until(grace_ends) => {}",
        replace: "() = tokio::time::sleep_until(grace_ends - shared.settings.shutdown_grace) => {}",
        caught_by: &[
            "worker_stop::postgres::results_are_stored_as_long_as_the_grace_period_lasts",
            "worker_stop::sqlite::results_are_stored_as_long_as_the_grace_period_lasts",
        ],
    },
    Mutant {
        name: "worker: create the counters of a kind with its first attempt",
        file: SUPERVISE,
        anchor: "fn start_in(",
        find: "kinds.iter().flatten().for_each(|kind| job_metrics::register_kind(kind));",
        replace: "",
        caught_by: &[
            "worker_metrics::postgres::the_counters_of_known_kinds_start_at_zero",
            "worker_metrics::sqlite::the_counters_of_known_kinds_start_at_zero",
        ],
    },
    // ---- lines about jobs ------------------------------------------------------
    Mutant {
        name: "log: write every line about a job",
        file: JOB_LOG,
        anchor: "fn admit(",
        find: "written.lines < MAX_LINES",
        replace: "written.lines < u32::MAX",
        caught_by: &[
            "job_log::postgres::under_load_further_lines_are_counted",
            "job_log::sqlite::under_load_further_lines_are_counted",
        ],
    },
    Mutant {
        name: "log: forget the suppressed lines when the worker ends",
        file: SUPERVISE,
        anchor: "async fn supervise(",
        find: "shared.client.job_log.flush();",
        replace: "",
        caught_by: &[
            "job_log::postgres::under_load_further_lines_are_counted",
            "job_log::sqlite::under_load_further_lines_are_counted",
        ],
    },
    Mutant {
        name: "log: write no line about a recovered job",
        file: RECOVERY,
        anchor: "async fn recover_candidates(",
        find: "self.job_log.recovered(&candidate.lease, &settlement.leave);",
        replace: "",
        caught_by: &[
            "job_log::postgres::a_recovered_job_is_one_line",
            "job_log::sqlite::a_recovered_job_is_one_line",
        ],
    },
    // ---- every queue -----------------------------------------------------------
    Mutant {
        name: "worker: ignore the queue that a wake-up names",
        file: CLAIM,
        anchor: "fn note_queue(",
        find: "Some(queue) => self.add_queue(queue),",
        replace: "Some(_) => {}",
        caught_by: &[
            "worker::postgres::a_worker_of_every_queue_claims_from_queues_that_are_new",
            "worker::sqlite::a_worker_of_every_queue_claims_from_queues_that_are_new",
        ],
    },
    Mutant {
        name: "worker: list the queues only once",
        file: CLAIM,
        anchor: "async fn list_queues(",
        find: "let is_needed = !is_recent ||",
        replace: "let is_needed = self.listed_at.is_none() ||",
        caught_by: &[
            "worker::postgres::a_worker_of_every_queue_finds_a_new_queue_by_polling",
            "worker::sqlite::a_worker_of_every_queue_finds_a_new_queue_by_polling",
        ],
    },
    Mutant {
        name: "worker: check schedules only when the worker starts",
        file: BUILDER,
        anchor: "pub fn build(",
        find: "self.schedules.iter().try_for_each(NewSchedule::check)?;",
        replace: "",
        caught_by: &[
            "worker::postgres::an_invalid_schedule_is_refused_when_the_worker_is_built",
            "worker::sqlite::an_invalid_schedule_is_refused_when_the_worker_is_built",
        ],
    },
];
