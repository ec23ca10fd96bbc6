//! Bugs in the code paths that notify workers of due jobs and of cancels. Without the
//! notification, an idle worker finds the job only when it polls, and a handler is stopped
//! only after a heartbeat.

use super::Mutant;

const CONTEXT: &str = "crates/longshore/src/worker/context.rs";
const CRON: &str = "crates/longshore/src/cron/fire.rs";
const ENQUEUE: &str = "crates/longshore/src/client/enqueue.rs";
const FUNCTIONS: &str = "crates/longshore/migrations/postgres/functions.sql";
const LANES: &str = "crates/longshore/src/enqueue/lanes.rs";
const LISTEN: &str = "crates/longshore/src/store/postgres/listen.rs";
const NOTICES: &str = "crates/longshore/src/store/notices.rs";
const OPERATE: &str = "crates/longshore/src/client/operate.rs";
const RECOVERY: &str = "crates/longshore/src/recovery.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";
const WAKE: &str = "crates/longshore/src/wake.rs";

/// Each must be caught on both engines, except for enqueues in the caller's transaction
/// and cancels by other processes: SQLite detects those by itself.
pub(super) const MUTANTS: &[Mutant] = &[
    // ---- enqueue ---------------------------------------------------------------
    Mutant {
        name: "wake: do not notify of an enqueue",
        file: LANES,
        anchor: "fn reply(",
        find: "self.notifier.notify_enqueued(&batch.jobs);",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::an_enqueue_starts_the_job",
            "wake_paths::postgres::an_enqueue_whose_run_at_has_passed_starts_the_job",
            "wake_paths::postgres::an_enqueue_with_a_key_starts_the_job",
            "wake_paths::postgres::a_replaced_job_starts",
            "wake_paths::sqlite::an_enqueue_starts_the_job",
            "wake_paths::sqlite::an_enqueue_whose_run_at_has_passed_starts_the_job",
            "wake_paths::sqlite::an_enqueue_with_a_key_starts_the_job",
            "wake_paths::sqlite::a_replaced_job_starts",
        ],
    },
    Mutant {
        name: "wake: do not notify of an enqueue that waited for its key",
        file: LANES,
        anchor: "async fn wait_for_keys(",
        find: "self.notifier.notify_enqueued(&job);",
        replace: "",
        caught_by: &["wake_paths::postgres_only::an_enqueue_that_waited_for_its_key_starts_the_job"],
    },
    Mutant {
        name: "wake: do not notify of an enqueue of many jobs",
        file: ENQUEUE,
        anchor: "async fn store_all(",
        find: "self.notifier.notify_enqueued(jobs);",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::an_enqueue_of_many_starts_the_jobs",
            "wake_paths::sqlite::an_enqueue_of_many_starts_the_jobs",
        ],
    },
    Mutant {
        name: "wake: do not notify of an enqueue in the caller's transaction",
        file: LISTEN,
        anchor: "const NOTIFY_DUE",
        find: "where i.delay_us = 0",
        replace: "where false",
        caught_by: &["wake_paths::postgres::an_enqueue_in_the_callers_transaction_starts_the_job"],
    },
    Mutant {
        name: "wake: do not notify of an enqueue in the caller's transaction whose run_at has passed",
        file: LISTEN,
        anchor: "const NOTIFY_DUE",
        find: "or i.run_at <= longshore.clock()",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::an_enqueue_in_the_callers_transaction_whose_run_at_has_passed_starts_the_job",
        ],
    },
    Mutant {
        name: "wake: do not notify of jobs that have a run_at",
        file: WAKE,
        anchor: "fn possibly_due(",
        find: "When::At(at) => Some(Some(at)),",
        replace: "When::At(_) => None,",
        caught_by: &[
            "wake_paths::postgres::an_enqueue_whose_run_at_has_passed_starts_the_job",
            "wake_paths::postgres::a_job_that_recovery_reschedules_to_a_past_instant_starts",
            "wake_paths::sqlite::an_enqueue_whose_run_at_has_passed_starts_the_job",
            "wake_paths::sqlite::a_job_that_recovery_reschedules_to_a_past_instant_starts",
        ],
    },
    Mutant {
        name: "wake: do not notify of jobs whose run_at is now",
        file: WAKE,
        anchor: "async fn collect(",
        find: "*at <= now",
        replace: "*at < now",
        caught_by: &[
            "wake_paths::postgres::an_enqueue_whose_run_at_has_passed_starts_the_job",
            "wake_paths::sqlite::an_enqueue_whose_run_at_has_passed_starts_the_job",
        ],
    },
    // ---- settle and recovery ---------------------------------------------------
    Mutant {
        name: "wake: do not notify of follow-ups",
        file: SETTLE,
        anchor: "async fn settle_reports(",
        find: "self.notifier.notify_enqueued(&report.follow_ups);",
        replace: "let _ = report;",
        caught_by: &[
            "wake_paths::postgres::a_follow_up_job_starts",
            "wake_paths::sqlite::a_follow_up_job_starts",
        ],
    },
    Mutant {
        name: "wake: do not notify of jobs that a settle requeues",
        file: SETTLE,
        anchor: "async fn settle_reports(",
        find: "self.notifier.notify(due);",
        replace: "drop(due);",
        caught_by: &[
            "wake_paths::postgres::a_released_job_starts",
            "wake_paths::postgres::a_job_released_by_its_lease_starts",
            "wake_paths::postgres::a_job_that_its_worker_does_not_know_of_is_released_and_starts",
            "wake_paths::postgres::a_failed_job_without_a_backoff_starts_again",
            "wake_paths::postgres::a_snoozed_job_without_a_delay_starts_again",
            "wake_paths::sqlite::a_released_job_starts",
            "wake_paths::sqlite::a_job_released_by_its_lease_starts",
            "wake_paths::sqlite::a_job_that_its_worker_does_not_know_of_is_released_and_starts",
            "wake_paths::sqlite::a_failed_job_without_a_backoff_starts_again",
            "wake_paths::sqlite::a_snoozed_job_without_a_delay_starts_again",
        ],
    },
    Mutant {
        name: "wake: do not notify of recovered jobs",
        file: RECOVERY,
        anchor: "async fn recover_candidates(",
        find: "self.notifier().notify(due);",
        replace: "drop(due);",
        caught_by: &[
            "wake_paths::postgres::a_recovered_job_starts",
            "wake_paths::postgres::a_job_that_recovery_reschedules_to_a_past_instant_starts",
            "wake_paths::sqlite::a_recovered_job_starts",
            "wake_paths::sqlite::a_job_that_recovery_reschedules_to_a_past_instant_starts",
        ],
    },
    // ---- operators and cron ----------------------------------------------------
    Mutant {
        name: "wake: do not notify of a retry",
        file: OPERATE,
        anchor: "pub async fn retry(",
        find: "self.notify_queues_of(&[id]).await;",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::an_operators_retry_of_a_waiting_job_starts_it",
            "wake_paths::postgres::an_operators_retry_of_a_finished_job_starts_it",
            "wake_paths::sqlite::an_operators_retry_of_a_waiting_job_starts_it",
            "wake_paths::sqlite::an_operators_retry_of_a_finished_job_starts_it",
        ],
    },
    Mutant {
        name: "wake: do not notify of an edit",
        file: OPERATE,
        anchor: "pub async fn edit(",
        find: "self.notify_queues_of(&[id]).await;",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::an_edited_job_starts",
            "wake_paths::sqlite::an_edited_job_starts",
        ],
    },
    Mutant {
        name: "wake: do not notify of a redrive",
        file: OPERATE,
        anchor: "pub async fn redrive(",
        find: "self.notify_queues_of(&[id]).await;",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::a_redriven_job_starts",
            "wake_paths::sqlite::a_redriven_job_starts",
        ],
    },
    Mutant {
        name: "wake: do not notify of a redrive of many jobs",
        file: OPERATE,
        anchor: "pub async fn redrive_some(",
        find: "self.notify_queues_of(&redriven).await;",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::a_job_redriven_among_many_starts",
            "wake_paths::sqlite::a_job_redriven_among_many_starts",
        ],
    },
    Mutant {
        name: "wake: do not notify of a resumed queue",
        file: OPERATE,
        anchor: "pub async fn resume(",
        find: "self.notifier.notify([(queue, When::NOW)]);",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::a_resumed_queue_starts_its_jobs",
            "wake_paths::sqlite::a_resumed_queue_starts_its_jobs",
        ],
    },
    Mutant {
        name: "wake: do not notify of a changed limit",
        file: OPERATE,
        anchor: "pub async fn limit(",
        find: "self.notifier.notify([(queue, When::NOW)]);",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::a_raised_limit_starts_waiting_jobs",
            "wake_paths::postgres::a_lifted_limit_starts_waiting_jobs",
            "wake_paths::sqlite::a_raised_limit_starts_waiting_jobs",
            "wake_paths::sqlite::a_lifted_limit_starts_waiting_jobs",
        ],
    },
    Mutant {
        name: "wake: do not notify of a cron tick",
        file: CRON,
        anchor: "async fn fire_schedule(",
        find: "self.notifier().notify_enqueued(&jobs);",
        replace: "",
        caught_by: &[
            "wake_paths::postgres::a_cron_tick_starts_its_job",
            "wake_paths::sqlite::a_cron_tick_starts_its_job",
        ],
    },
    // ---- cancels ---------------------------------------------------------------
    Mutant {
        name: "wake: do not notify of a cancel",
        file: OPERATE,
        anchor: "async fn command(",
        find: "self.notifier.notify_cancel(running.worker);",
        replace: "let _ = running;",
        caught_by: &[
            "cancel_notices::postgres::a_cancel_stops_a_handler_between_heartbeats",
            "http::leases::postgres::a_cancel_ends_the_long_poll_of_its_worker",
            "cancel_notices::sqlite::a_cancel_stops_a_handler_between_heartbeats",
            "http::leases::sqlite::a_cancel_ends_the_long_poll_of_its_worker",
            "cancel_notices::postgres::a_cancel_by_another_client_stops_a_handler_between_heartbeats",
            "cancel_notices::postgres::a_bulk_cancel_stops_all_handlers_between_heartbeats",
        ],
    },
    Mutant {
        name: "wake: do not notify other processes of a cancel",
        file: WAKE,
        anchor: "async fn run(",
        find: "others.extend(due.into_iter().chain(cancels));",
        replace: "others.extend(due);",
        caught_by: &[
            "cancel_notices::postgres::a_cancel_by_another_client_stops_a_handler_between_heartbeats",
            "cancel_notices::postgres::a_bulk_cancel_stops_all_handlers_between_heartbeats",
        ],
    },
    Mutant {
        name: "wake: do not notify of a cancel from SQL",
        file: FUNCTIONS,
        anchor: "create or replace function longshore.cancel(",
        find: "perform pg_notify('longshore.stop', holder::text);",
        replace: "perform holder;",
        caught_by: &["cancel_notices::postgres_only::a_cancel_from_sql_stops_a_handler_between_heartbeats"],
    },
    Mutant {
        name: "wake: do not look for cancels when another process has written",
        file: NOTICES,
        anchor: "pub(crate) fn send_missed(",
        find: "self.send_cancels_missed();",
        replace: "",
        caught_by: &[
            "cancel_notices::sqlite::a_cancel_by_another_client_stops_a_handler_between_heartbeats",
            "cancel_notices::sqlite_only::a_cancel_by_another_program_stops_a_handler_between_heartbeats",
        ],
    },
    Mutant {
        name: "wake: do not ask the database whether a job was cancelled",
        file: CONTEXT,
        anchor: "pub async fn is_cancelled(",
        find: "if control.reason().is_none()",
        replace: "if control.reason().is_some()",
        caught_by: &["cancel_notices::postgres::is_cancelled_asks_the_database"],
    },
];
