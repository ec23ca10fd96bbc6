//! Bugs in the HTTP API, and in what it promises to workers in any language.

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

/// Each must be noticed on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    // ---- jobs ------------------------------------------------------------------
    Mutant {
        name: "api: the idempotency key of the body beats the header's",
        file: NEW_JOB,
        after: "pub(super) async fn enqueue(",
        old: "if let Some(key) = idempotency_key {",
        new: "if let Some(key) = idempotency_key.filter(|_| body.idempotency_key.is_none()) {",
        red: &[
            "http::jobs::postgres::one_key_is_one_job_and_the_header_beats_the_body",
            "http::jobs::sqlite::one_key_is_one_job_and_the_header_beats_the_body",
        ],
    },
    Mutant {
        name: "api: the answers of a batch stand in other places",
        file: BATCH,
        after: "pub(super) async fn enqueue(",
        old: "places.push(place);",
        new: "places.push(jobs.len() - 1);",
        red: &[
            "http::jobs::postgres::a_batch_stores_the_good_and_names_the_bad",
            "http::jobs::sqlite::a_batch_stores_the_good_and_names_the_bad",
        ],
    },
    Mutant {
        name: "api: a payload may be nested one deeper",
        file: ENQUEUE,
        after: "pub(crate) fn check_json(",
        old: "if depth > MAX_DEPTH {",
        new: "if depth > MAX_DEPTH + 1 {",
        red: &[
            "http::jobs::postgres::what_is_wrong_with_a_job_is_refused_by_name",
            "input::postgres::every_invalid_field_is_refused_by_name_and_nothing_is_stored",
            "http::jobs::sqlite::what_is_wrong_with_a_job_is_refused_by_name",
            "input::sqlite::every_invalid_field_is_refused_by_name_and_nothing_is_stored",
        ],
    },
    Mutant {
        name: "api: a dry run passes over nothing",
        file: BULK,
        after: "if body.dry_run {",
        old: "u64::from(!body.action.would_change(job))",
        new: "u64::from(!body.action.would_change(job)) * 0",
        red: &[
            "http::operate::postgres::a_dry_run_foresees_what_an_order_passes_over",
            "http::operate::sqlite::a_dry_run_foresees_what_an_order_passes_over",
        ],
    },
    Mutant {
        name: "api: an order begins its limit anew on every page",
        file: BULK,
        after: "pub(super) async fn bulk(",
        old: "let left = u64::from(limit) - answer.matched;",
        new: "let left = u64::from(limit);",
        red: &[
            "http::operate::postgres::an_order_of_several_pages_ends_at_its_limit",
            "http::operate::sqlite::an_order_of_several_pages_ends_at_its_limit",
        ],
    },
    Mutant {
        name: "api: workers with every place taken are not busy",
        file: EXPLAIN,
        after: "fn is_busy(",
        old: "worker.running >= worker.concurrency.into()",
        new: "worker.running > worker.concurrency.into()",
        red: &[
            "http::explain::postgres::a_job_whose_workers_are_all_busy_is_told_so",
            "http::explain::sqlite::a_job_whose_workers_are_all_busy_is_told_so",
        ],
    },
    Mutant {
        name: "api: a worker is lost only once it was declared dead",
        file: EXPLAIN,
        after: "fn how_it_was_lost(",
        old: "worker.stale.then_some(silent)",
        new: "worker.dead_at.map(|_| silent)",
        red: &[
            "http::explain::postgres::a_job_of_a_lost_worker_waits_for_a_sweep",
            "http::explain::sqlite::a_job_of_a_lost_worker_waits_for_a_sweep",
        ],
    },
    // ---- what tokens may -------------------------------------------------------
    Mutant {
        name: "api: who may only work enqueues by follow-ups",
        file: SETTLE,
        after: "async fn follow_ups(",
        old: "caller.must_have(Scope::Enqueue)?;",
        new: "caller.must_have(Scope::Work)?;",
        red: &[
            "http::auth::postgres::follow_ups_take_the_scope_to_enqueue",
            "http::auth::sqlite::follow_ups_take_the_scope_to_enqueue",
        ],
    },
    Mutant {
        name: "api: a token for some queues is told why others' jobs wait",
        file: EXPLAIN,
        after: "pub(super) async fn explain(",
        old: "caller.may_reach(&job.queue)?;",
        new: "let _ = caller.may_use(&job.queue);",
        red: &[
            "http::auth::postgres::a_token_for_some_queues_looks_into_no_others_and_orders_nothing_there",
            "http::auth::sqlite::a_token_for_some_queues_looks_into_no_others_and_orders_nothing_there",
        ],
    },
    Mutant {
        name: "api: a token for some queues hears of all",
        file: EVENTS,
        after: "async fn catch_up(",
        old: "event.is_of(queues)",
        new: "event.is_of(queues) || !queues.is_empty()",
        red: &[
            "http::events::postgres::a_token_for_some_queues_hears_of_no_others",
            "http::events::sqlite::a_token_for_some_queues_hears_of_no_others",
        ],
    },
    // ---- events ----------------------------------------------------------------
    Mutant {
        name: "api: a revoked token goes on listening",
        file: EVENTS,
        after: "async fn until_refused(",
        old: "Slug::Unauthorized | Slug::Forbidden",
        new: "Slug::Forbidden",
        red: &[
            "http::events::postgres::a_token_for_some_queues_hears_of_no_others",
            "http::events::sqlite::a_token_for_some_queues_hears_of_no_others",
        ],
    },
    Mutant {
        name: "api: a listener that comes back begins at the end",
        file: EVENTS,
        after: "async fn feed(",
        old: "asked.unwrap_or_else(|| self.end())",
        new: "self.end()",
        red: &[
            "http::events::postgres::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
            "http::events::sqlite::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
        ],
    },
    Mutant {
        name: "api: a place in another ring passes for one in this",
        file: RING,
        after: "pub(super) fn after(",
        old: "place.of != self.id ||",
        new: "",
        red: &[
            "http::events::postgres::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
            "http::events::sqlite::a_listener_goes_on_where_it_was_or_is_told_to_read_anew",
        ],
    },
    Mutant {
        name: "api: jobs that no look saw leave no gap",
        file: LOOK,
        after: "pub(super) fn since(",
        old: "events.insert(0, Event::Gap {});",
        new: "",
        red: &[
            "http::events::postgres::more_new_jobs_than_one_look_sees_leave_a_gap",
            "http::events::sqlite::more_new_jobs_than_one_look_sees_leave_a_gap",
        ],
    },
    // ---- leases whose answer was lost ------------------------------------------
    Mutant {
        name: "api: a caller that goes keeps what it was not told of",
        file: LEASE,
        after: "impl Drop for Untold",
        old: "if self.jobs.is_empty() {",
        new: "if self.jobs.len() < usize::MAX {",
        red: &[
            "http::leases::postgres::a_call_cut_off_when_its_job_counts_as_begun_leaves_nothing_leased",
            "http::leases::sqlite::a_call_cut_off_when_its_job_counts_as_begun_leaves_nothing_leased",
        ],
    },
    Mutant {
        name: "api: a call gives back what another was given just now",
        file: LEASE,
        after: "// Another call may have been answered",
        old: "arrived.elapsed() + WRITTEN_BEFORE",
        new: "(arrived.elapsed() + WRITTEN_BEFORE) * 0",
        red: &[
            "http::leases::postgres::leases_whose_answer_was_lost_are_given_back",
            "http::leases::postgres::two_calls_of_one_worker_share_nothing",
            "http::leases::sqlite::leases_whose_answer_was_lost_are_given_back",
            "http::leases::sqlite::two_calls_of_one_worker_share_nothing",
        ],
    },
    Mutant {
        name: "api: two calls of one worker do not wait for each other",
        file: LEASE,
        after: "pub(in crate::api) async fn lease(",
        old: "server.sessions.of(worker)",
        new: "server.sessions.of(WorkerId::new())",
        red: &[
            "http::leases::postgres::two_calls_of_one_worker_get_one_suspect_between_them",
            "http::leases::sqlite::two_calls_of_one_worker_get_one_suspect_between_them",
        ],
    },
    Mutant {
        name: "api: a lease that is named is given back",
        file: LEASES,
        after: "async fn give_back_untold(",
        old: "!held.contains(lease)",
        new: "!held.contains(lease) || held.len() < usize::MAX",
        red: &[
            "http::leases::postgres::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
            "http::leases::sqlite::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
        ],
    },
    Mutant {
        name: "api: a renewal gives back what may still be on its way",
        file: RENEW,
        after: "pub(in crate::api) async fn renew(",
        old: "&held, ARRIVED_WITHIN)",
        new: "&held, ARRIVED_WITHIN / 2)",
        red: &[
            "http::leases::postgres::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
            "http::leases::sqlite::a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost",
        ],
    },
    Mutant {
        name: "api: a full list gives back what it had no room to name",
        file: LEASES,
        after: "async fn give_back_untold(",
        old: "held.len() >= MAX_ITEMS",
        new: "held.len() > MAX_ITEMS",
        red: &[
            "http::leases::postgres::a_full_list_of_leases_gives_nothing_back",
            "http::leases::sqlite::a_full_list_of_leases_gives_nothing_back",
        ],
    },
];
