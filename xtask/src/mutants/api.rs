//! Bugs in the HTTP API, including the lease API for workers in any language.

use super::Mutant;

const ADMISSION: &str = "crates/longshore/src/api/admission.rs";
const BATCH: &str = "crates/longshore/src/api/batch.rs";
const BODIES: &str = "crates/longshore/src/api/bodies.rs";
const BULK: &str = "crates/longshore/src/api/bulk.rs";
const CONNECTIONS: &str = "crates/longshore/src/api/connections.rs";
const CHECK: &str = "crates/longshore/src/enqueue/check.rs";
const EVENTS: &str = "crates/longshore/src/api/events/mod.rs";
const EXPLAIN: &str = "crates/longshore/src/api/explain.rs";
const EXTRACT: &str = "crates/longshore/src/api/extract.rs";
const INSPECT: &str = "crates/longshore/src/store/inspect.rs";
const LEASE: &str = "crates/longshore/src/api/leases/lease.rs";
const LEASES: &str = "crates/longshore/src/api/leases/mod.rs";
const NEW_JOB: &str = "crates/longshore/src/api/enqueue.rs";
const RENEW: &str = "crates/longshore/src/api/leases/renew.rs";
const RING: &str = "crates/longshore/src/api/events/ring.rs";
const SETTLE: &str = "crates/longshore/src/api/leases/settle.rs";
const SESSIONS: &str = "crates/longshore/src/api/leases/sessions.rs";
const SNAPSHOT: &str = "crates/longshore/src/api/events/snapshot.rs";
const TOKENS: &str = "crates/longshore/src/api/token_lookup.rs";
const WAITING: &str = "crates/longshore/src/api/leases/waiting.rs";

/// Each must be caught on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "api: hide that another transaction holds a key",
        file: "crates/longshore/src/api/problem.rs",
        anchor: "impl From<Error> for Problem",
        find: "error.is_locked() || error.is_overloaded()",
        replace: "error.is_overloaded()",
        caught_by: &[
            "isolation::postgres_only::a_held_key_is_reported_as_unavailable_with_the_time_to_retry",
        ],
    },
    // ---- jobs ------------------------------------------------------------------
    Mutant {
        name: "api: prefer the body's idempotency key to the header's",
        file: NEW_JOB,
        anchor: "pub(super) async fn enqueue(",
        find: "if let Some(key) = idempotency_key {",
        replace: "if let Some(key) = idempotency_key.filter(|_| body.idempotency_key.is_none()) {",
        caught_by: &[
            "http::jobs::postgres::an_idempotency_key_returns_one_job_and_the_header_wins_over_the_body",
            "http::jobs::sqlite::an_idempotency_key_returns_one_job_and_the_header_wins_over_the_body",
        ],
    },
    Mutant {
        name: "api: return the results of a batch at wrong positions",
        file: BATCH,
        anchor: "pub(super) async fn enqueue(",
        find: "positions.push(position);",
        replace: "positions.push(jobs.len() - 1);",
        caught_by: &[
            "http::jobs::postgres::a_batch_stores_the_valid_jobs_and_names_the_errors_of_the_others",
            "http::jobs::sqlite::a_batch_stores_the_valid_jobs_and_names_the_errors_of_the_others",
        ],
    },
    Mutant {
        name: "api: accept payloads nested one level too deep",
        file: CHECK,
        anchor: "pub(crate) fn check_json(",
        find: "if depth > MAX_DEPTH {",
        replace: "if depth > MAX_DEPTH + 1 {",
        caught_by: &[
            "http::jobs::postgres::an_invalid_job_is_refused_by_field",
            "input::postgres::every_invalid_field_is_refused_by_name_and_nothing_is_stored",
            "http::jobs::sqlite::an_invalid_job_is_refused_by_field",
            "input::sqlite::every_invalid_field_is_refused_by_name_and_nothing_is_stored",
        ],
    },
    Mutant {
        name: "api: count no skipped jobs in a dry run",
        file: BULK,
        anchor: "if body.dry_run {",
        find: "!would_change(body.action, job)",
        replace: "!would_change(body.action, job) && false",
        caught_by: &[
            "http::operate::postgres::a_dry_run_predicts_what_a_bulk_operation_skips",
            "http::operate::sqlite::a_dry_run_predicts_what_a_bulk_operation_skips",
        ],
    },
    Mutant {
        name: "api: apply the limit of a bulk operation to each page",
        file: BULK,
        anchor: "pub(super) async fn bulk(",
        find: "let left = u64::from(limit) - response.matched;",
        replace: "let left = u64::from(limit);",
        caught_by: &[
            "http::operate::postgres::a_bulk_operation_over_several_pages_stops_at_its_limit",
            "http::operate::sqlite::a_bulk_operation_over_several_pages_stops_at_its_limit",
        ],
    },
    Mutant {
        name: "api: do not count workers without free slots as busy",
        file: EXPLAIN,
        anchor: "fn is_busy(",
        find: "worker.running >= worker.concurrency.into()",
        replace: "worker.running > worker.concurrency.into()",
        caught_by: &[
            "http::explain::postgres::explain_says_when_all_workers_of_a_job_are_busy",
            "http::explain::sqlite::explain_says_when_all_workers_of_a_job_are_busy",
        ],
    },
    Mutant {
        name: "api: explain a worker as lost only after it was declared dead",
        file: EXPLAIN,
        anchor: "fn lost_reason(",
        find: "worker.stale.then_some(no_heartbeat)",
        replace: "worker.dead_at.map(|_| no_heartbeat)",
        caught_by: &[
            "http::explain::postgres::explain_says_that_a_job_of_a_silent_worker_waits_for_a_sweep",
            "http::explain::sqlite::explain_says_that_a_job_of_a_silent_worker_waits_for_a_sweep",
        ],
    },
    Mutant {
        name: "api: ignore unknown URL parameters",
        file: "crates/longshore/src/api/auth.rs",
        anchor: "fn let_through(",
        find: "self.parameters.check(&request)?;",
        replace: "let _ = self.parameters.check(&request);",
        caught_by: &[
            "http::requests::postgres::unknown_url_parameters_are_refused_with_the_nearest_known_one",
            "http::requests::sqlite::unknown_url_parameters_are_refused_with_the_nearest_known_one",
        ],
    },
    Mutant {
        name: "api: ignore the pause of a schedule that is stored",
        file: "crates/longshore/src/api/cron.rs",
        anchor: "let stored = server.client.put_schedule(schedule)",
        find: "Some(true) if !stored.paused",
        replace: "Some(true) if stored.paused",
        caught_by: &[
            "http::operate::postgres::a_schedule_can_be_stored_as_it_was_read",
            "http::operate::sqlite::a_schedule_can_be_stored_as_it_was_read",
        ],
    },
    // ---- slow clients and large responses --------------------------------------
    Mutant {
        name: "api: do not read the rest of a refused body",
        file: BODIES,
        anchor: "pub(super) fn refuse(",
        find: "self.discard(request.into_body(), client, limit + MAX_DISCARDED);",
        replace: "let _ = client;",
        caught_by: &[
            "http::bodies::postgres::a_client_that_reads_after_sending_a_too_large_body_gets_the_refusal",
            "http::bodies::sqlite::a_client_that_reads_after_sending_a_too_large_body_gets_the_refusal",
        ],
    },
    Mutant {
        name: "api: report a slow body as a failure of the server",
        file: BODIES,
        anchor: "fn refused(",
        find: ".with_status(StatusCode::REQUEST_TIMEOUT)",
        replace: "",
        caught_by: &[
            "http::connections::postgres::a_client_that_sends_its_body_byte_by_byte_gets_a_timeout",
            "http::connections::postgres::a_body_that_arrives_too_slowly_gets_a_timeout_before_the_request_does",
            "http::connections::sqlite::a_client_that_sends_its_body_byte_by_byte_gets_a_timeout",
            "http::connections::sqlite::a_body_that_arrives_too_slowly_gets_a_timeout_before_the_request_does",
        ],
    },
    Mutant {
        name: "api: let the bytes of a slow body not extend its time",
        file: BODIES,
        anchor: "fn deadline(",
        find: "started + timeout + extra",
        replace: "started + timeout + extra * 0",
        caught_by: &[
            "http::connections::postgres::a_slow_body_of_sufficient_rate_is_accepted",
            "http::connections::sqlite::a_slow_body_of_sufficient_rate_is_accepted",
        ],
    },
    Mutant {
        name: "api: refuse the newest of too many bodies",
        file: BODIES,
        anchor: "if let Some(excess) = excess {",
        find: "arriving.remove(excess).stop.notify_one();",
        replace: "if let Some(newest) = arriving.pop() { let _ = excess; newest.stop.notify_one(); }",
        caught_by: &[
            "http::connections::postgres::with_too_many_bodies_the_one_that_takes_the_longest_is_refused",
            "http::connections::sqlite::with_too_many_bodies_the_one_that_takes_the_longest_is_refused",
        ],
    },
    Mutant {
        name: "api: let slow clients keep all connections",
        file: CONNECTIONS,
        anchor: "fn take_longest_waiting(",
        find: "since.elapsed() >= MIN_WAIT",
        replace: "since.elapsed() >= MIN_WAIT * 10_000",
        caught_by: &[
            "http::connections::postgres::an_idle_connection_is_closed_in_favour_of_a_new_one",
            "http::connections::postgres::clients_with_slow_bodies_do_not_keep_others_out",
            "http::connections::postgres::clients_with_slow_headers_do_not_keep_others_out",
            "http::connections::postgres::clients_that_do_not_read_do_not_keep_others_out",
            "http::connections::sqlite::an_idle_connection_is_closed_in_favour_of_a_new_one",
            "http::connections::sqlite::clients_with_slow_bodies_do_not_keep_others_out",
            "http::connections::sqlite::clients_with_slow_headers_do_not_keep_others_out",
            "http::connections::sqlite::clients_that_do_not_read_do_not_keep_others_out",
        ],
    },
    Mutant {
        name: "api: close connections while their requests are handled",
        file: CONNECTIONS,
        anchor: "fn waiting_since(&self)",
        find: "BUSY => None,",
        replace: "BUSY => Some(self.opened),",
        caught_by: &[
            "http::connections::postgres::a_connection_over_the_limit_waits_while_all_others_handle_requests",
            "http::connections::sqlite::a_connection_over_the_limit_waits_while_all_others_handle_requests",
        ],
    },
    Mutant {
        name: "api: read compressed bodies as JSON",
        file: EXTRACT,
        anchor: "pub(super) async fn read_body(",
        find: "refuse_encoding(headers)?;",
        replace: "let _ = refuse_encoding(headers);",
        caught_by: &[
            "http::bodies::postgres::a_compressed_body_is_refused_before_it_is_read",
            "http::bodies::sqlite::a_compressed_body_is_refused_before_it_is_read",
        ],
    },
    Mutant {
        name: "api: limit the bytes of a page by nothing",
        file: INSPECT,
        anchor: "pub(crate) fn add(&mut self",
        find: "self.bytes + bytes > ListFilter::MAX_BYTES",
        replace: "self.bytes + bytes > usize::MAX",
        caught_by: &[
            "inspect::postgres::a_page_of_large_jobs_ends_early_and_the_next_one_continues",
            "inspect::sqlite::a_page_of_large_jobs_ends_early_and_the_next_one_continues",
        ],
    },
    Mutant {
        name: "lists: end the search for a page after its first step",
        file: INSPECT,
        anchor: "pub(crate) fn next_step(&self)",
        find: "self.position != Position::Start && self.started.elapsed() >= self.search_time",
        replace: "self.position != Position::Start",
        caught_by: &[
            "inspect::postgres::a_page_is_searched_until_it_is_full",
            "inspect::sqlite::a_page_is_searched_until_it_is_full",
        ],
    },
    Mutant {
        name: "lists: show live jobs before newer finished ones",
        file: INSPECT,
        anchor: "fn found(&self) -> &[JobId]",
        find: "&self.live[..self.live.partition_point(|id| *id >= reached)]",
        replace: "{\n                let _ = reached;\n                &self.live\n            }",
        caught_by: &[
            "inspect::postgres::live_jobs_are_listed_in_order_among_finished_ones",
            "inspect::sqlite::live_jobs_are_listed_in_order_among_finished_ones",
        ],
    },
    Mutant {
        name: "lists: show jobs that are older than where another search stopped",
        file: INSPECT,
        anchor: "pub(crate) fn merge(",
        find: "*id >= reached",
        replace: "*id >= reached || true",
        caught_by: &["inspect::sqlite::a_list_ends_where_the_first_of_its_searches_stopped"],
    },
    Mutant {
        name: "lists: forget the offset when a search ends early",
        file: INSPECT,
        anchor: "pub(crate) fn merge(",
        find: "offset.saturating_sub(ids.len()) as u32",
        replace: "0",
        caught_by: &[
            "inspect::postgres::a_page_that_ends_early_keeps_the_rest_of_its_offset",
            "inspect::sqlite::a_page_that_ends_early_keeps_the_rest_of_its_offset",
        ],
    },
    Mutant {
        name: "api: look up each unknown token by itself",
        file: TOKENS,
        anchor: "pub(super) async fn find(",
        find: "std::mem::replace(&mut state.is_running, true)",
        replace: "std::mem::replace(&mut state.is_running, false)",
        caught_by: &["http::auth::postgres_only::unknown_tokens_share_one_connection"],
    },
    // ---- token scopes ----------------------------------------------------------
    Mutant {
        name: "api: let tokens with only the work scope enqueue follow-ups",
        file: SETTLE,
        anchor: "async fn follow_ups_of(",
        find: "caller.must_have(Scope::Enqueue)?;",
        replace: "caller.must_have(Scope::Work)?;",
        caught_by: &[
            "http::auth::postgres::follow_ups_require_the_enqueue_scope",
            "http::auth::sqlite::follow_ups_require_the_enqueue_scope",
        ],
    },
    Mutant {
        name: "api: explain jobs to tokens that may not see their queue",
        file: EXPLAIN,
        anchor: "pub(super) async fn explain(",
        find: "caller.may_access(&job.queue)?;",
        replace: "let _ = caller.may_access(&job.queue);",
        caught_by: &[
            "http::auth::postgres::a_token_limited_to_queues_cannot_list_or_change_jobs_of_other_queues",
            "http::auth::sqlite::a_token_limited_to_queues_cannot_list_or_change_jobs_of_other_queues",
        ],
    },
    Mutant {
        name: "api: send events of all queues to a token for some queues",
        file: EVENTS,
        anchor: "async fn catch_up(",
        find: "event.is_visible_to(queues)",
        replace: "event.is_visible_to(queues) || !queues.is_empty()",
        caught_by: &[
            "http::events::postgres::a_token_limited_to_queues_gets_no_events_of_other_queues",
            "http::events::sqlite::a_token_limited_to_queues_gets_no_events_of_other_queues",
        ],
    },
    // ---- events ----------------------------------------------------------------
    Mutant {
        name: "api: keep an event stream open after its token is revoked",
        file: EVENTS,
        anchor: "async fn until_refused(",
        find: "Slug::Unauthorized | Slug::Forbidden",
        replace: "Slug::Forbidden",
        caught_by: &[
            "http::events::postgres::a_token_limited_to_queues_gets_no_events_of_other_queues",
            "http::events::sqlite::a_token_limited_to_queues_gets_no_events_of_other_queues",
        ],
    },
    Mutant {
        name: "api: ignore the position of a client that resumes an event stream",
        file: EVENTS,
        anchor: "async fn write_events(",
        find: "start.unwrap_or_else(|| self.end())",
        replace: "self.end()",
        caught_by: &[
            "http::events::postgres::a_reconnecting_client_resumes_after_its_last_event_or_gets_a_reset",
            "http::events::sqlite::a_reconnecting_client_resumes_after_its_last_event_or_gets_a_reset",
        ],
    },
    Mutant {
        name: "api: accept an event position of another server's ring",
        file: RING,
        anchor: "pub(super) fn after(",
        find: "position.ring != self.id ||",
        replace: "",
        caught_by: &[
            "http::events::postgres::a_reconnecting_client_resumes_after_its_last_event_or_gets_a_reset",
            "http::events::sqlite::a_reconnecting_client_resumes_after_its_last_event_or_gets_a_reset",
        ],
    },
    Mutant {
        name: "api: emit no gap event for jobs that were missed",
        file: SNAPSHOT,
        anchor: "pub(super) fn changes_since(",
        find: "events.insert(0, Event::Gap {});",
        replace: "",
        caught_by: &[
            "http::events::postgres::more_new_jobs_than_one_poll_reads_cause_a_gap_event",
            "http::events::sqlite::more_new_jobs_than_one_poll_reads_cause_a_gap_event",
        ],
    },
    // ---- leases whose response was lost ----------------------------------------
    Mutant {
        name: "api: keep the leases of a caller that disconnects before the response",
        file: WAITING,
        anchor: "impl Drop for Undelivered",
        find: "if self.jobs.is_empty() {",
        replace: "if self.jobs.len() < usize::MAX {",
        caught_by: &[
            "http::leases::postgres::a_call_dropped_after_its_job_is_marked_started_leaves_nothing_leased",
            "http::leases::sqlite::a_call_dropped_after_its_job_is_marked_started_leaves_nothing_leased",
        ],
    },
    Mutant {
        name: "api: release leases that another call of the worker has just received",
        file: LEASE,
        anchor: "// Another call may have returned leases",
        find: "arrived.elapsed() + MAX_DELIVERY_TIME",
        replace: "(arrived.elapsed() + MAX_DELIVERY_TIME) * 0",
        caught_by: &[
            "http::leases::postgres::leases_whose_response_was_lost_are_released",
            "http::leases::postgres::concurrent_calls_of_one_worker_do_not_release_each_others_leases",
            "http::leases::sqlite::leases_whose_response_was_lost_are_released",
            "http::leases::sqlite::concurrent_calls_of_one_worker_do_not_release_each_others_leases",
        ],
    },
    Mutant {
        name: "api: do not serialize the lease calls of one worker",
        file: LEASE,
        anchor: "pub(in crate::api) async fn lease(",
        find: "server.sessions.of(worker)",
        replace: "server.sessions.of(WorkerId::new())",
        caught_by: &[
            "http::leases::postgres::concurrent_calls_of_one_worker_get_one_suspect_in_total",
            "http::leases::sqlite::concurrent_calls_of_one_worker_get_one_suspect_in_total",
        ],
    },
    Mutant {
        name: "api: release leases whose response may still be in flight",
        file: RENEW,
        anchor: "pub(in crate::api) async fn renew(",
        find: "&known, RESPONSE_LOST_AFTER)",
        replace: "&known, RESPONSE_LOST_AFTER / 2)",
        caught_by: &[
            "http::leases::postgres::a_renewal_releases_an_unnamed_lease_after_half_a_minute",
            "http::leases::sqlite::a_renewal_releases_an_unnamed_lease_after_half_a_minute",
        ],
    },
    Mutant {
        name: "api: release unnamed leases when the list of leases is full",
        file: LEASES,
        anchor: "fn is_complete(",
        find: "held.len() < MAX_ITEMS",
        replace: "held.len() <= MAX_ITEMS",
        caught_by: &[
            "http::leases::postgres::a_full_list_of_leases_releases_nothing",
            "http::leases::sqlite::a_full_list_of_leases_releases_nothing",
        ],
    },
    Mutant {
        name: "api: do not end a long poll for a cancel",
        file: WAITING,
        anchor: "pub(super) async fn claim(",
        find: "() = notified(&mut self.cancels, self.worker) => {",
        replace: "() = std::future::pending() => {",
        caught_by: &[
            "http::leases::postgres::a_cancel_ends_the_long_poll_of_its_worker",
            "http::leases::postgres::a_cancel_by_another_client_ends_a_long_poll",
            "http::leases::sqlite::a_cancel_ends_the_long_poll_of_its_worker",
            "http::leases::sqlite::a_cancel_by_another_client_ends_a_long_poll",
        ],
    },
    Mutant {
        name: "api: let a cancel end every long poll",
        file: SESSIONS,
        anchor: "fn has_unreported",
        find: "!facts.reported.contains(lease)",
        replace: "!facts.reported.contains(lease) || lease.lease_no > 0",
        caught_by: &[
            "http::leases::postgres::a_reported_cancel_does_not_end_the_next_long_poll",
            "http::leases::sqlite::a_reported_cancel_does_not_end_the_next_long_poll",
            "http::exchange::postgres::the_loss_of_a_lease_ends_the_wait_of_one_call",
            "http::exchange::sqlite::the_loss_of_a_lease_ends_the_wait_of_one_call",
        ],
    },
    Mutant {
        name: "api: scan the head of the queue in every call",
        file: WAITING,
        anchor: "pub(super) async fn claim(",
        find: "&& state.cursor.is_head_cheap() {",
        replace: "{",
        caught_by: &[
            "http::leases::postgres::an_expensive_head_is_not_scanned_by_every_call",
            "http::leases::sqlite::an_expensive_head_is_not_scanned_by_every_call",
        ],
    },
    Mutant {
        name: "api: do not count the jobs accepted since a queue was counted",
        file: ADMISSION,
        anchor: "fn accept(&mut self",
        find: "self.waiting += 1;",
        replace: "self.waiting += 0;",
        caught_by: &[
            "http::requests::postgres::a_limit_of_twenty_thousand_waiting_jobs_refuses_the_next_one",
            "http::requests::sqlite::a_limit_of_twenty_thousand_waiting_jobs_refuses_the_next_one",
        ],
    },
    Mutant {
        name: "api: do not count the attempts of HTTP workers",
        file: SETTLE,
        anchor: "async fn store(",
        find: "note_end(server, claimed, kept)",
        replace: "drop((claimed, kept))",
        caught_by: &[
            "worker_metrics::postgres::an_attempt_of_an_http_worker_is_counted_once",
            "worker_metrics::sqlite::an_attempt_of_an_http_worker_is_counted_once",
        ],
    },
    Mutant {
        name: "api: leave the status of the job out of a refusal",
        file: "crates/longshore/src/api/problem.rs",
        anchor: "impl From<Error> for Problem",
        find: "job_status: error.status()",
        replace: "job_status: None",
        caught_by: &[
            "http::jobs::postgres::the_response_to_a_cancel_depends_on_the_status_of_the_job",
            "http::jobs::sqlite::the_response_to_a_cancel_depends_on_the_status_of_the_job",
        ],
    },
    Mutant {
        name: "api: sweep without the server's resilient flags and factor",
        file: "crates/longshore/src/api/operate.rs",
        anchor: "pub(super) async fn sweep(",
        find: "server.sweep.clone()",
        replace: "crate::recovery::SweepOptions::default()",
        caught_by: &[
            "http::operate::postgres::a_sweep_uses_the_resilient_flags_and_the_factor_of_the_server_or_the_request",
            "http::operate::sqlite::a_sweep_uses_the_resilient_flags_and_the_factor_of_the_server_or_the_request",
        ],
    },
    Mutant {
        name: "api: find jobs of queues that the token does not cover",
        file: "crates/longshore/src/api/jobs.rs",
        anchor: "pub(super) async fn find(",
        find: ".filter(|job| caller.may_use(&job.queue).is_ok())",
        replace: ".filter(|job| caller.may_use(&job.queue).is_ok() || !job.queue.is_empty())",
        caught_by: &[
            "http::auth::postgres::a_token_limited_to_queues_cannot_list_or_change_jobs_of_other_queues",
            "http::auth::sqlite::a_token_limited_to_queues_cannot_list_or_change_jobs_of_other_queues",
        ],
    },
    Mutant {
        name: "api: explain that a worker of every queue takes no job",
        file: "crates/longshore/src/store/workers.rs",
        anchor: "pub fn claims_from(",
        find: "name == queue || name == ALL_QUEUES",
        replace: "name == queue",
        caught_by: &[
            "http::explain::postgres::a_worker_of_every_queue_can_run_a_job_of_any_queue",
            "http::explain::sqlite::a_worker_of_every_queue_can_run_a_job_of_any_queue",
        ],
    },
];
