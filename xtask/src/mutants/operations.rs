//! Bugs in operations: jobs that are visited twice or not at all, and processes that disturb each other.

use super::Mutant;

const API: &str = "crates/longshore/src/api/operations.rs";
const CLIENT: &str = "crates/longshore/src/client/operations.rs";
const POSTGRES: &str = "crates/longshore/src/store/postgres/operations.rs";
const RULES: &str = "crates/longshore/src/store/operations.rs";
const SQLITE: &str = "crates/longshore/src/store/sqlite/operations.rs";
const UPKEEP: &str = "crates/longshore/src/worker/upkeep.rs";

pub(super) const MUTANTS: &[Mutant] = &[
    // ---- which jobs are visited ------------------------------------------------
    Mutant {
        name: "operations: change jobs that were created after the start",
        file: CLIENT,
        anchor: "fn existed(",
        find: "created_at <= self.operation.record.created_at",
        replace: "created_at <= self.operation.record.created_at || true",
        caught_by: &[
            "operations::postgres::jobs_created_later_are_not_touched",
            "operations::sqlite::jobs_created_later_are_not_touched",
        ],
    },
    Mutant {
        name: "operations: retry a job again that failed after its retry",
        file: CLIENT,
        anchor: "fn may_change(",
        find: "ended_at.is_none_or(|at| at <= record.created_at)",
        replace: "ended_at.is_none_or(|at| at <= record.created_at || true)",
        caught_by: &[
            "operations::postgres::a_job_that_failed_again_before_the_process_died_is_not_retried_again",
            "operations::sqlite::a_job_that_failed_again_before_the_process_died_is_not_retried_again",
        ],
    },
    Mutant {
        name: "operations: change listed jobs of queues that the operation must not change",
        file: CLIENT,
        anchor: "async fn find_listed(",
        find: "if queues.is_none_or(|queues| queues.contains(&job.queue))",
        replace: "if queues.is_none_or(|queues| queues.contains(&job.queue) || true)",
        caught_by: &[
            "http::operations::postgres::a_limited_token_starts_operations_on_its_queues_only",
            "operations::sqlite::a_list_may_be_limited_to_queues",
        ],
    },
    Mutant {
        name: "operations: end after the first part of a list",
        file: CLIENT,
        anchor: "async fn find_listed(",
        find: "visited + part.len() < ids.len()",
        replace: "visited + part.len() < part.len()",
        caught_by: &[
            "operations::postgres::an_operation_changes_the_jobs_of_a_list",
            "operations::sqlite::an_operation_changes_the_jobs_of_a_list",
        ],
    },
    Mutant {
        name: "operations: accept a filter with an unknown field",
        file: RULES,
        anchor: "/// Which jobs an operation changes:",
        find: "#[serde(deny_unknown_fields, default)]",
        replace: "#[serde(default)]",
        caught_by: &[
            "operations::postgres::a_filter_that_this_version_does_not_know_fails_the_operation",
            "operations::sqlite::a_filter_that_this_version_does_not_know_fails_the_operation",
        ],
    },
    // ---- who executes it ---------------------------------------------------------
    Mutant {
        name: "operations: store the step of a process that lost the operation (Postgres)",
        file: POSTGRES,
        anchor: "const SAVE_STEP",
        find: "and holder = $2 ",
        replace: "and $2::uuid is not null ",
        caught_by: &["operations::postgres::a_process_that_lost_an_operation_cannot_store_progress"],
    },
    Mutant {
        name: "operations: store the step of a process that lost the operation (SQLite)",
        file: SQLITE,
        anchor: "pub(super) fn save_operation_step(",
        find: "and holder = ?2 ",
        replace: "and ?2 is not null ",
        caught_by: &["operations::sqlite::a_process_that_lost_an_operation_cannot_store_progress"],
    },
    Mutant {
        name: "operations: do not store the cursor (Postgres)",
        file: POSTGRES,
        anchor: "const SAVE_STEP",
        find: "set cursor = coalesce($3, cursor)",
        replace: "set cursor = coalesce(cursor, $3, cursor)",
        caught_by: &[
            "operations::postgres::an_operation_whose_process_died_continues_at_its_cursor",
            "operations::postgres::an_operation_that_was_stopped_half_way_changes_each_job_once",
        ],
    },
    Mutant {
        name: "operations: do not store the cursor (SQLite)",
        file: SQLITE,
        anchor: "pub(super) fn save_operation_step(",
        find: "set cursor = coalesce(?3, cursor)",
        replace: "set cursor = coalesce(cursor, ?3, cursor)",
        caught_by: &[
            "operations::sqlite::an_operation_whose_process_died_continues_at_its_cursor",
            "operations::sqlite::an_operation_that_was_stopped_half_way_changes_each_job_once",
        ],
    },
    Mutant {
        name: "operations: take an operation that another process holds (Postgres)",
        file: POSTGRES,
        anchor: "const TAKE_OPERATION",
        find: "and (o.held_until is null or o.held_until <= longshore.clock())",
        replace: "and (o.held_until is null or o.held_until <= 'infinity')",
        caught_by: &["operations::postgres::an_operation_whose_process_died_continues_at_its_cursor"],
    },
    Mutant {
        name: "operations: take an operation that another process holds (SQLite)",
        file: SQLITE,
        anchor: "pub(super) fn take_operation(",
        find: "and (held_until is null or held_until <= ?2)",
        replace: "and (held_until is null or held_until <= ?2 + 1000000000)",
        caught_by: &["operations::sqlite::the_oldest_operation_that_nobody_holds_is_taken"],
    },
    Mutant {
        name: "operations: continue the oldest one first (Postgres)",
        file: POSTGRES,
        anchor: "const TAKE_OPERATION",
        find: "order by o.held_until nulls first, o.created_at, o.id",
        replace: "order by o.created_at, o.id",
        caught_by: &["operations::postgres::a_large_operation_does_not_delay_a_small_one"],
    },
    Mutant {
        name: "operations: continue the oldest one first (SQLite)",
        file: SQLITE,
        anchor: "pub(super) fn take_operation(",
        find: "order by held_until nulls first, created_at, id",
        replace: "order by created_at, id",
        caught_by: &["operations::sqlite::a_large_operation_does_not_delay_a_small_one"],
    },
    Mutant {
        name: "operations: continue after a stop",
        file: CLIENT,
        anchor: "async fn step(",
        find: "Some(OperationState::Running) => Next::Continue,",
        replace: "Some(_) if !is_last => Next::Continue,",
        caught_by: &[
            "operations::postgres::an_operation_that_was_stopped_half_way_changes_each_job_once",
            "operations::sqlite::an_operation_that_was_stopped_half_way_changes_each_job_once",
        ],
    },
    Mutant {
        name: "operations: keep the operation of a process that stops",
        file: CLIENT,
        anchor: "async fn release(",
        find: "self.save(&OperationStep::default())",
        replace: "self.save(&OperationStep { hold: HOLD, ..OperationStep::default() })",
        caught_by: &[
            "operations::postgres::a_process_that_stops_lets_another_continue_at_once",
            "operations::sqlite::a_process_that_stops_lets_another_continue_at_once",
        ],
    },
    Mutant {
        name: "operations: let no worker execute them",
        file: UPKEEP,
        anchor: "pub(super) async fn deliver(",
        find: "Ok(pending) if pending.operations =>",
        replace: "Ok(pending) if pending.operations && false =>",
        caught_by: &[
            "operations::postgres::a_worker_executes_operations",
            "operations::sqlite::a_worker_executes_operations",
        ],
    },
    Mutant {
        name: "operations: wake no worker for retried jobs",
        file: CLIENT,
        anchor: "pub(crate) async fn change_jobs(",
        find: "if action == Action::Retry {",
        replace: "if action == Action::Retry && false {",
        caught_by: &[
            "wake_paths::postgres::a_job_retried_by_an_operation_starts",
            "wake_paths::sqlite::a_job_retried_by_an_operation_starts",
        ],
    },
    // ---- storing -----------------------------------------------------------------
    Mutant {
        name: "operations: accept the id of another operation (Postgres)",
        file: POSTGRES,
        anchor: "const IS_STORED",
        find: "and action = $2",
        replace: "and $2::text is not null",
        caught_by: &[
            "operations::postgres::starting_an_operation_again_changes_nothing",
            "http::operations::postgres::a_repeated_request_starts_one_operation",
        ],
    },
    Mutant {
        name: "operations: accept the id of another operation (SQLite)",
        file: SQLITE,
        anchor: "pub(super) fn put_operation(",
        find: "and action = ?2",
        replace: "and ?2 is not null",
        caught_by: &[
            "operations::sqlite::starting_an_operation_again_changes_nothing",
            "http::operations::sqlite::a_repeated_request_starts_one_operation",
        ],
    },
    Mutant {
        name: "operations: keep stopped operations forever (Postgres)",
        file: POSTGRES,
        anchor: "const REMOVE_OPERATIONS",
        find: "where state <> 'running'",
        replace: "where state in ('done', 'failed')",
        caught_by: &["operations::postgres::operations_are_removed_after_seven_days"],
    },
    Mutant {
        name: "operations: keep stopped operations forever (SQLite)",
        file: SQLITE,
        anchor: "pub(super) fn remove_operations(",
        find: "where state <> 'running'",
        replace: "where state in ('done', 'failed')",
        caught_by: &["operations::sqlite::operations_are_removed_after_seven_days"],
    },
    // ---- the API -----------------------------------------------------------------
    Mutant {
        name: "operations: show a limited token the operations of other queues",
        file: API,
        anchor: "async fn find(server: &Server",
        find: "operation.queues.as_ref().is_some_and(is_covered)",
        replace: "operation.queues.as_ref().is_none_or(is_covered)",
        caught_by: &[
            "http::operations::postgres::a_limited_token_sees_operations_on_its_queues_only",
            "http::operations::sqlite::a_limited_token_sees_operations_on_its_queues_only",
        ],
    },
    Mutant {
        name: "operations: let a limited token change every queue",
        file: API,
        anchor: "pub(super) async fn start(",
        find: "if filter != JobFilter::default() {",
        replace: "if filter == JobFilter::default() {",
        caught_by: &[
            "http::operations::postgres::a_limited_token_starts_operations_on_its_queues_only",
            "http::operations::sqlite::a_limited_token_starts_operations_on_its_queues_only",
        ],
    },
];
