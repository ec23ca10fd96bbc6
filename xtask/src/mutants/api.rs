//! Bugs in the HTTP API, including the lease API for workers in any language.

use super::Mutant;

const BATCH: &str = "crates/longshore/src/api/batch.rs";
const BULK: &str = "crates/longshore/src/api/bulk.rs";
const ENQUEUE: &str = "crates/longshore/src/enqueue.rs";
const EVENTS: &str = "crates/longshore/src/api/events/mod.rs";
const EXPLAIN: &str = "crates/longshore/src/api/explain.rs";
const NEW_JOB: &str = "crates/longshore/src/api/enqueue.rs";
const LEASE: &str = "crates/longshore/src/api/leases/lease.rs";
const LEASES: &str = "crates/longshore/src/api/leases/mod.rs";
const LOOK: &str = "crates/longshore/src/api/events/look.rs";
const RENEW: &str = "crates/longshore/src/api/leases/renew.rs";
const RING: &str = "crates/longshore/src/api/events/ring.rs";
const SETTLE: &str = "crates/longshore/src/api/leases/settle.rs";

/// Each must be caught on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    // ---- jobs ------------------------------------------------------------------
    Mutant {
        name: "api: prefer the body's idempotency key to the header's",
        file: NEW_JOB,
        anchor: "pub(super) async fn enqueue(",
        find: "if let Some(key) = idempotency_key {",
        replace: "if let Some(key) = idempotency_key.filter(|_| body.idempotency_key.is_none()) {",
        caught_by: &[
            "postgres::http::one_key_is_one_job_and_the_header_beats_the_body",
            "sqlite::http::one_key_is_one_job_and_the_header_beats_the_body",
        ],
    },
    Mutant {
        name: "api: return the results of a batch at wrong positions",
        file: BATCH,
        anchor: "pub(super) async fn enqueue(",
        find: "places.push(place);",
        replace: "places.push(jobs.len() - 1);",
        caught_by: &[
            "postgres::http::a_batch_stores_the_good_and_names_the_bad",
            "sqlite::http::a_batch_stores_the_good_and_names_the_bad",
        ],
    },
    Mutant {
        name: "api: accept payloads nested one level too deep",
        file: ENQUEUE,
        anchor: "pub(crate) fn check_json(",
        find: "if depth > MAX_DEPTH {",
        replace: "if depth > MAX_DEPTH + 1 {",
        caught_by: &[
            "postgres::http::what_is_wrong_with_a_job_is_refused_by_name",
            "postgres::input::every_bad_field_is_refused_by_name_and_nothing_is_written",
            "sqlite::http::what_is_wrong_with_a_job_is_refused_by_name",
            "sqlite::input::every_bad_field_is_refused_by_name_and_nothing_is_written",
        ],
    },
    Mutant {
        name: "api: count no skipped jobs in a dry run",
        file: BULK,
        anchor: "if body.dry_run {",
        find: "u64::from(!body.action.would_change(job))",
        replace: "u64::from(!body.action.would_change(job)) * 0",
        caught_by: &[
            "postgres::http::a_dry_run_foresees_what_an_order_passes_over",
            "sqlite::http::a_dry_run_foresees_what_an_order_passes_over",
        ],
    },
    Mutant {
        name: "api: apply the limit of a bulk operation to each page",
        file: BULK,
        anchor: "pub(super) async fn bulk(",
        find: "let left = u64::from(limit) - answer.matched;",
        replace: "let left = u64::from(limit);",
        caught_by: &[
            "postgres::http::an_order_of_several_pages_ends_at_its_limit",
            "sqlite::http::an_order_of_several_pages_ends_at_its_limit",
        ],
    },
    Mutant {
        name: "api: do not count workers without free slots as busy",
        file: EXPLAIN,
        anchor: "fn is_busy(",
        find: "worker.running >= worker.concurrency.into()",
        replace: "worker.running > worker.concurrency.into()",
        caught_by: &[
            "postgres::http::a_job_whose_workers_are_all_busy_is_told_so",
            "sqlite::http::a_job_whose_workers_are_all_busy_is_told_so",
        ],
    },
    Mutant {
        name: "api: explain a worker as lost only after it was declared dead",
        file: EXPLAIN,
        anchor: "fn how_it_was_lost(",
        find: "worker.stale.then_some(silent)",
        replace: "worker.dead_at.map(|_| silent)",
        caught_by: &[
            "postgres::http::a_job_of_a_lost_worker_waits_for_a_sweep",
            "sqlite::http::a_job_of_a_lost_worker_waits_for_a_sweep",
        ],
    },
    // ---- token scopes ----------------------------------------------------------
    Mutant {
        name: "api: let tokens with only the work scope enqueue follow-ups",
        file: SETTLE,
        anchor: "async fn follow_ups(",
        find: "caller.must_have(Scope::Enqueue)?;",
        replace: "caller.must_have(Scope::Work)?;",
        caught_by: &[
            "postgres::http::follow_ups_take_the_scope_to_enqueue",
            "sqlite::http::follow_ups_take_the_scope_to_enqueue",
        ],
    },
    Mutant {
        name: "api: explain jobs to tokens that may not see their queue",
        file: EXPLAIN,
        anchor: "pub(super) async fn explain(",
        find: "caller.may_reach(&job.queue)?;",
        replace: "let _ = caller.may_use(&job.queue);",
        caught_by: &[
            "postgres::http::a_token_for_some_queues_looks_into_no_others_and_orders_nothing_there",
            "sqlite::http::a_token_for_some_queues_looks_into_no_others_and_orders_nothing_there",
        ],
    },
    Mutant {
        name: "api: send events of all queues to a token for some queues",
        file: EVENTS,
        anchor: "async fn catch_up(",
        find: "event.is_of(queues)",
        replace: "event.is_of(queues) || !queues.is_empty()",
        caught_by: &[
            "postgres::http::a_token_for_some_queues_hears_of_no_others",
            "sqlite::http::a_token_for_some_queues_hears_of_no_others",
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
            "postgres::http::a_token_for_some_queues_hears_of_no_others",
            "sqlite::http::a_token_for_some_queues_hears_of_no_others",
        ],
    },
    Mutant {
        name: "api: ignore the position of a client that resumes an event stream",
        file: EVENTS,
        anchor: "async fn feed(",
        find: "asked.unwrap_or_else(|| self.end())",
        replace: "self.end()",
        caught_by: &[
            "postgres::http::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
            "sqlite::http::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
        ],
    },
    Mutant {
        name: "api: accept an event position of another server's ring",
        file: RING,
        anchor: "pub(super) fn after(",
        find: "place.of != self.id ||",
        replace: "",
        caught_by: &[
            "postgres::http::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
            "sqlite::http::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
        ],
    },
    Mutant {
        name: "api: emit no gap event for jobs that were missed",
        file: LOOK,
        anchor: "pub(super) fn since(",
        find: "events.insert(0, Event::Gap {});",
        replace: "",
        caught_by: &[
            "postgres::http::more_new_jobs_than_one_look_sees_leave_a_gap",
            "sqlite::http::more_new_jobs_than_one_look_sees_leave_a_gap",
        ],
    },
    // ---- leases whose response was lost ----------------------------------------
    Mutant {
        name: "api: keep the leases of a caller that disconnects before the response",
        file: LEASE,
        anchor: "impl Drop for Untold",
        find: "if self.jobs.is_empty() {",
        replace: "if self.jobs.len() < usize::MAX {",
        caught_by: &[
            "postgres::http::a_call_cut_off_when_its_job_counts_as_begun_leaves_nothing_leased",
            "sqlite::http::a_call_cut_off_when_its_job_counts_as_begun_leaves_nothing_leased",
        ],
    },
    Mutant {
        name: "api: release leases that another call of the worker has just received",
        file: LEASE,
        anchor: "// Another call may have been answered",
        find: "arrived.elapsed() + WRITTEN_BEFORE",
        replace: "(arrived.elapsed() + WRITTEN_BEFORE) * 0",
        caught_by: &[
            "postgres::http::leases_whose_answer_was_lost_are_given_back",
            "postgres::http::two_calls_of_one_worker_share_nothing",
            "sqlite::http::leases_whose_answer_was_lost_are_given_back",
            "sqlite::http::two_calls_of_one_worker_share_nothing",
        ],
    },
    Mutant {
        name: "api: do not serialize the lease calls of one worker",
        file: LEASE,
        anchor: "pub(in crate::api) async fn lease(",
        find: "server.sessions.of(worker)",
        replace: "server.sessions.of(WorkerId::new())",
        caught_by: &[
            "postgres::http::two_calls_of_one_worker_get_one_suspect_between_them",
            "sqlite::http::two_calls_of_one_worker_get_one_suspect_between_them",
        ],
    },
    Mutant {
        name: "api: release leases that the renewal names",
        file: LEASES,
        anchor: "async fn give_back_untold(",
        find: "!held.contains(lease)",
        replace: "!held.contains(lease) || held.len() < usize::MAX",
        caught_by: &[
            "postgres::http::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
            "sqlite::http::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
        ],
    },
    Mutant {
        name: "api: release leases whose response may still be in flight",
        file: RENEW,
        anchor: "pub(in crate::api) async fn renew(",
        find: "&held, ARRIVED_WITHIN)",
        replace: "&held, ARRIVED_WITHIN / 2)",
        caught_by: &[
            "postgres::http::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
            "sqlite::http::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
        ],
    },
    Mutant {
        name: "api: release unnamed leases when the list of leases is full",
        file: LEASES,
        anchor: "async fn give_back_untold(",
        find: "held.len() >= MAX_ITEMS",
        replace: "held.len() > MAX_ITEMS",
        caught_by: &[
            "postgres::http::a_full_list_of_leases_gives_nothing_back",
            "sqlite::http::a_full_list_of_leases_gives_nothing_back",
        ],
    },
];
