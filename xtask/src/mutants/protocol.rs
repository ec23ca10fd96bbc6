//! Bugs in protocol 1.1 of workers in any language: lease calls with reports, chosen ids and waits for the ends of jobs.

use super::Mutant;

const LEASE: &str = "crates/longshore/src/api/leases/lease.rs";
const LEASES: &str = "crates/longshore/src/api/leases/mod.rs";
const NEW_JOB: &str = "crates/longshore/src/api/enqueue.rs";
const SESSIONS: &str = "crates/longshore/src/api/leases/sessions.rs";
const SETTLE: &str = "crates/longshore/src/api/leases/settle.rs";
const TIMED_STREAM: &str = "crates/longshore/src/api/timed_stream.rs";
const WAITING: &str = "crates/longshore/src/api/leases/waiting.rs";
const EXCHANGE: &str = "crates/longshore/src/api/leases/exchange.rs";
const GRANTED: &str = "crates/longshore/src/api/leases/granted.rs";
const PROBLEM: &str = "crates/longshore/src/api/problem.rs";

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "api: let a call that claims wait on although a later one claims",
        file: WAITING,
        anchor: "pub(super) async fn claim(",
        find: "() = call.superseded(minimum) => return Ok(found),",
        replace: "",
        caught_by: &[
            "http::exchange::postgres::a_call_that_claims_ends_the_wait_of_an_earlier_one",
            "http::exchange::sqlite::a_call_that_claims_ends_the_wait_of_an_earlier_one",
        ],
    },
    Mutant {
        name: "api: let a call that claims nothing end the wait of another one",
        file: LEASE,
        anchor: "pub(in crate::api) async fn lease(",
        find: "let call = (request.limit > 0).then(|| session.begin_claiming_call(wait));",
        replace: "let call = Some(session.begin_claiming_call(wait)).filter(|_| request.limit > 0);",
        caught_by: &[
            "http::exchange::postgres::a_call_that_claims_nothing_ends_no_wait",
            "http::exchange::sqlite::a_call_that_claims_nothing_ends_no_wait",
        ],
    },
    Mutant {
        name: "api: let a call with reports wait",
        file: LEASE,
        anchor: "pub(in crate::api) async fn lease(",
        find: "let waits = reports.is_empty() && !request.wait.is_zero();",
        replace: "let waits = !request.wait.is_zero();",
        caught_by: &[
            "http::exchange::postgres::a_call_with_reports_needs_a_worker_and_does_not_wait",
            "http::exchange::sqlite::a_call_with_reports_needs_a_worker_and_does_not_wait",
        ],
    },
    Mutant {
        name: "api: release the leases of rejected reports",
        file: LEASE,
        anchor: "pub(in crate::api) async fn lease(",
        find: "reports.leases(worker).into_iter().collect();",
        replace: "reports.leases(worker).into_iter().take(0).collect();",
        caught_by: &[
            "http::exchange::postgres::a_lease_that_a_report_names_is_not_released",
            "http::exchange::sqlite::a_lease_that_a_report_names_is_not_released",
        ],
    },
    Mutant {
        name: "api: report leases as lost that the call has settled",
        file: LEASE,
        anchor: "// What this call has settled is not lost.",
        find: "!ends.contains(lease)",
        replace: "!ends.contains(lease) || lease.lease_no > 0",
        caught_by: &[
            "http::exchange::postgres::one_call_stores_reports_and_leases_the_next_job",
            "http::exchange::sqlite::one_call_stores_reports_and_leases_the_next_job",
        ],
    },
    Mutant {
        name: "api: keep the claims of later attempts, whose counters a step can reset",
        file: SESSIONS,
        anchor: "fn grant(",
        find: "job.attempt() == 1 && job.interruptions() == 0",
        replace: "job.attempt() > 0",
        caught_by: &[
            "http::exchange::postgres::a_step_that_another_server_stored_counts_in_a_settle",
            "http::exchange::sqlite::a_step_that_another_server_stored_counts_in_a_settle",
        ],
    },
    Mutant {
        name: "api: keep no claims",
        file: SESSIONS,
        anchor: "fn grant(",
        find: "job.attempt() == 1 && job.interruptions() == 0",
        replace: "job.attempt() == 0",
        caught_by: &["http::exchange::postgres_only::a_busy_worker_needs_three_statements_per_call"],
    },
    Mutant {
        name: "api: let a token that is limited to queues change kinds that exist",
        file: "crates/longshore/src/api/leases/register.rs",
        anchor: "fn existing_kinds(",
        find: "caller.queues().is_none()",
        replace: "caller.queues().is_none() || true",
        caught_by: &[
            "http::exchange::postgres::a_token_limited_to_queues_announces_only_new_kinds",
            "http::exchange::sqlite::a_token_limited_to_queues_announces_only_new_kinds",
        ],
    },
    Mutant {
        name: "api: let tokens with only the work scope spawn children",
        file: "crates/longshore/src/api/leases/flows.rs",
        anchor: "pub(in crate::api) async fn spawn(",
        find: "caller.must_have(Scope::Enqueue)?;",
        replace: "caller.must_have(Scope::Work)?;",
        caught_by: &[
            "http::lease_flows::postgres::a_spawn_needs_the_scope_and_the_queues_of_its_jobs",
            "http::lease_flows::sqlite::a_spawn_needs_the_scope_and_the_queues_of_its_jobs",
        ],
    },
    Mutant {
        name: "api: accept ids of any time",
        file: NEW_JOB,
        anchor: "fn parse_id(",
        find: "(Utc::now() - created_at).abs() > MAX_ID_SKEW",
        replace: "(Utc::now() - created_at).abs() > MAX_ID_SKEW * 1000",
        caught_by: &[
            "http::chosen_ids::postgres::an_id_that_would_break_the_order_of_jobs_is_refused",
            "http::chosen_ids::sqlite::an_id_that_would_break_the_order_of_jobs_is_refused",
        ],
    },
    Mutant {
        name: "api: return a job as created although its id existed",
        file: "crates/longshore/src/enqueue/new_job.rs",
        anchor: "fn stored_as(",
        find: "if self.id_is_key {",
        replace: "if self.id_is_key && self.is_keyed() {",
        caught_by: &[
            "http::chosen_ids::postgres::a_second_request_with_an_id_returns_the_first_job",
            "http::chosen_ids::sqlite::a_second_request_with_an_id_returns_the_first_job",
        ],
    },
    Mutant {
        name: "api: do not look for ends that other processes store",
        file: "crates/longshore/src/api/job_ends.rs",
        anchor: "async fn look(",
        find: "ended.for_each(|id| server.job_ends.notify(*id));",
        replace: "drop(ended);",
        caught_by: &[
            "http::awaited_ends::postgres::a_call_waits_for_an_end_that_another_process_stores",
            "http::awaited_ends::sqlite::a_call_waits_for_an_end_that_another_process_stores",
        ],
    },
    Mutant {
        name: "api: apply the timeout of headers to idle connections",
        file: TIMED_STREAM,
        anchor: "fn poll_read_timeout(",
        find: "Awaits::Request { since } => (since + idle,",
        replace: "Awaits::Request { since } => (since + idle.min(headers),",
        caught_by: &[
            "http::connections::postgres::an_idle_connection_outlasts_the_timeout_of_headers",
            "http::connections::sqlite::an_idle_connection_outlasts_the_timeout_of_headers",
        ],
    },
    Mutant {
        name: "api: apply the timeout of idle connections to headers",
        file: TIMED_STREAM,
        anchor: "fn poll_read_timeout(",
        find: "Awaits::Headers { since } => (since + headers,",
        replace: "Awaits::Headers { since } => (since + idle.max(headers),",
        caught_by: &[
            "http::connections::postgres::the_timeout_of_headers_counts_for_every_request_of_a_connection",
            "http::connections::sqlite::the_timeout_of_headers_counts_for_every_request_of_a_connection",
        ],
    },
    Mutant {
        name: "api: lease jobs in a call of a dead worker",
        file: WAITING,
        anchor: "pub(super) async fn beat(",
        find: "beat_and_list(worker).await?.ok_or_else(|| dead_worker(server, worker))?",
        replace: "beat_and_list(worker).await?.unwrap_or_default()",
        caught_by: &[
            "http::exchange::postgres::a_result_of_a_dead_worker_is_not_stored_twice",
            "http::exchange::sqlite::a_result_of_a_dead_worker_is_not_stored_twice",
            "http::leases::postgres::a_silent_worker_is_declared_dead_and_can_change_nothing",
            "http::leases::sqlite::a_silent_worker_is_declared_dead_and_can_change_nothing",
        ],
    },
    Mutant {
        name: "api: report steps of a lost lease as stored",
        file: "crates/longshore/src/api/leases/steps.rs",
        anchor: "pub(super) async fn store_checked(",
        find: "if own.contains(&Fenced::LeaseLost) {",
        replace: "if own.len() > steps.len() {",
        caught_by: &[
            "http::exchange::postgres::a_stale_lease_reports_nothing",
            "http::exchange::sqlite::a_stale_lease_reports_nothing",
        ],
    },
    Mutant {
        name: "api: store two steps of one name together",
        file: EXCHANGE,
        anchor: "async fn save_steps(",
        find: "checked.lease.id.0 == lease.id",
        replace: "checked.lease.id.0 == lease.id && lease.lease_no < 0",
        caught_by: &[
            "http::exchange_faults::postgres::two_reports_about_one_step_store_the_first",
            "http::exchange_faults::sqlite::two_reports_about_one_step_store_the_first",
        ],
    },
    Mutant {
        name: "api: let a second call that waits end the first one at once",
        file: WAITING,
        anchor: "/// How long a call waits at least",
        find: "Duration::from_secs(1)",
        replace: "Duration::from_millis(1)",
        caught_by: &[
            "http::exchange_faults::postgres::two_calls_that_wait_do_not_end_each_others_waits_at_once",
            "http::exchange_faults::sqlite::two_calls_that_wait_do_not_end_each_others_waits_at_once",
        ],
    },
    Mutant {
        name: "api: let a call wait for its turn for longer than it may",
        file: LEASE,
        anchor: "// A worker has one claim at a time.",
        find: "tokio::time::timeout_at(until, session.claims.lock()).await.ok()",
        replace: "Some(session.claims.lock().await)",
        caught_by: &[
            "http::exchange_faults::postgres::a_call_that_waits_for_its_turn_waits_no_longer_than_it_may",
            "http::exchange_faults::sqlite::a_call_that_waits_for_its_turn_waits_no_longer_than_it_may",
        ],
    },
    Mutant {
        name: "api: let a worker lease jobs while it signs off",
        file: LEASES,
        anchor: "pub(super) async fn sign_off(",
        find: "let session = server.sessions.of(worker);",
        replace: "let session = server.sessions.of(WorkerId::new());",
        caught_by: &[
            "http::exchange_faults::postgres_only::a_call_that_arrives_while_its_worker_signs_off_leases_nothing",
        ],
    },
    Mutant {
        name: "api: count the age of a lease until the end of a slow body",
        file: LEASE,
        anchor: "pub(in crate::api) async fn lease(",
        find: "let (mut request, reports)",
        replace: "let arrived = arrived.max(tokio::time::Instant::now());
    let (mut request, reports)",
        caught_by: &[
            "http::exchange_faults::postgres::a_lease_of_another_call_is_kept_although_a_body_arrives_slowly",
            "http::exchange_faults::sqlite::a_lease_of_another_call_is_kept_although_a_body_arrives_slowly",
        ],
    },
    Mutant {
        name: "api: return all claimed jobs, however large they are",
        file: GRANTED,
        anchor: "fn jobs_that_fit(",
        find: "*i == 0 || total <= MAX_JOB_BYTES",
        replace: "*i == 0 || total <= usize::MAX",
        caught_by: &[
            "http::exchange_faults::postgres::a_response_with_large_jobs_is_bounded_and_releases_the_rest",
            "http::exchange_faults::sqlite::a_response_with_large_jobs_is_bounded_and_releases_the_rest",
        ],
    },
    Mutant {
        name: "api: do not count the checkpoints in a response",
        file: GRANTED,
        anchor: "pub(super) async fn deliver(",
        find: "job_bytes(job) + checkpoint_bytes(saved)",
        replace: "job_bytes(job) + checkpoint_bytes(saved) * 0",
        caught_by: &[
            "http::exchange_faults::postgres::checkpoints_count_in_the_size_of_a_response",
            "http::exchange_faults::sqlite::checkpoints_count_in_the_size_of_a_response",
        ],
    },
    Mutant {
        name: "api: keep the leases of jobs that do not fit into a response",
        file: WAITING,
        anchor: "pub(super) fn release_after(",
        find: "drop(Undelivered { client: self.client.clone(), jobs: rest });",
        replace: "drop(rest);",
        caught_by: &[
            "http::exchange_faults::postgres::a_response_with_large_jobs_is_bounded_and_releases_the_rest",
            "http::exchange_faults::sqlite::a_response_with_large_jobs_is_bounded_and_releases_the_rest",
        ],
    },
    Mutant {
        name: "api: reject a report because a queue is full",
        file: PROBLEM,
        anchor: "pub(super) fn is_partial(",
        find: "Slug::RateLimited | Slug::Internal => true",
        replace: "Slug::Internal => true",
        caught_by: &[
            "http::exchange_faults::postgres::a_full_queue_does_not_reject_a_report",
            "http::exchange_faults::sqlite::a_full_queue_does_not_reject_a_report",
        ],
    },
    Mutant {
        name: "api: refuse a repeated report because a queue is full",
        file: SETTLE,
        anchor: "// If the report is repeated",
        find: "if claimed.is_some() {",
        replace: "if claimed.is_some() || outcome == AttemptOutcome::Succeeded {",
        caught_by: &[
            "http::exchange_faults::postgres::a_repeated_report_is_stored_although_its_queue_is_full_now",
            "http::exchange_faults::sqlite::a_repeated_report_is_stored_although_its_queue_is_full_now",
        ],
    },
    Mutant {
        name: "api: fail a call because one of its jobs is locked",
        file: PROBLEM,
        anchor: "pub(super) fn is_partial(",
        find: "cause.is_locked()",
        replace: "cause.is_locked() && self.message.is_empty()",
        caught_by: &["http::exchange_faults::postgres_only::a_locked_job_delays_only_its_own_reports"],
    },
    Mutant {
        name: "api: end a job whose steps are not stored",
        file: EXCHANGE,
        anchor: "unsaved: &HashSet<(Uuid, i32)>,",
        find: "unsaved.contains(&(id, lease_no))",
        replace: "unsaved.contains(&(id, -lease_no))",
        caught_by: &["http::exchange_faults::postgres_only::a_job_with_unsaved_steps_does_not_end"],
    },
    Mutant {
        name: "api: fail a call because a lease that it does not list is locked",
        file: LEASES,
        anchor: "async fn release_unknown(",
        find: "if problem.is_partial() => problem.log_part(),",
        replace: "if problem.message().is_empty() => problem.log_part(),",
        caught_by: &[
            "http::exchange_faults::postgres_only::a_locked_lease_that_is_not_listed_does_not_fail_the_call",
        ],
    },
    Mutant {
        name: "api: accept schemas of any size",
        file: "crates/longshore/src/api/kinds.rs",
        anchor: "pub(super) fn check_kind(",
        find: "schema.get().len() > MAX_SCHEMA",
        replace: "schema.get().len() > MAX_SCHEMA * 99",
        caught_by: &[
            "http::exchange::postgres::a_worker_announces_its_kinds",
            "http::exchange::sqlite::a_worker_announces_its_kinds",
        ],
    },
];
