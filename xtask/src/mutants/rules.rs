//! Bugs in the rules that both engines share: the lifecycle, keys, kinds and payloads,
//! what the client does with leases, and bounds.

use super::Mutant;

const CLOCK_STEPS: &str = "crates/longshore/src/worker/clock_steps.rs";
const CRON: &str = "crates/longshore/src/cron/fire.rs";
const KEYS: &str = "crates/longshore/src/keys.rs";
const KINDS: &str = "crates/longshore/src/client/kinds.rs";
const LANES: &str = "crates/longshore/src/enqueue/lanes.rs";
const LEASE: &str = "crates/longshore/src/client/lease.rs";
const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const NEW_JOB: &str = "crates/longshore/src/enqueue/new_job.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";
const UPKEEP: &str = "crates/longshore/src/client/upkeep.rs";

/// Each must be caught on both engines.
pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "rules: sweep at once after a step of the database's clock",
        file: CLOCK_STEPS,
        anchor: "fn is_step(",
        find: "database > monotonic",
        replace: "false && database > monotonic",
        caught_by: &[
            "clock_steps::postgres::a_step_of_the_clock_declares_no_live_worker_dead",
            "clock_steps::sqlite::a_step_of_the_clock_declares_no_live_worker_dead",
        ],
    },
    Mutant {
        name: "rules: charge an attempt for a release",
        file: LIFECYCLE,
        anchor: "fn requeue_uncharged(",
        find: "attempts: job.attempt - 1,",
        replace: "attempts: job.attempt,",
        caught_by: &[
            "settle::postgres::a_release_is_not_charged_and_is_due_at_once",
            "settle::sqlite::a_release_is_not_charged_and_is_due_at_once",
        ],
    },
    Mutant {
        name: "rules: do not recognise a repeated settle by lease",
        file: SETTLE,
        anchor: "async fn settle_claimed(",
        find: "settled == Settled::Stored",
        replace: "settled == Settled::LeaseLost",
        caught_by: &[
            "settle_by_lease::postgres::settling_a_lease_again_returns_held_and_changes_nothing",
            "settle_by_lease::sqlite::settling_a_lease_again_returns_held_and_changes_nothing",
        ],
    },
    Mutant {
        name: "rules: do not recognise a repeated settle by lease of a superseded job",
        file: SETTLE,
        anchor: "fn possible_settlements(",
        find: "superseded: true",
        replace: "superseded: false",
        caught_by: &[
            "settle_by_lease::postgres::settling_a_lease_again_returns_held_and_changes_nothing",
            "settle_by_lease::sqlite::settling_a_lease_again_returns_held_and_changes_nothing",
        ],
    },
    Mutant {
        name: "rules: show a new job without its delay",
        file: NEW_JOB,
        anchor: "pub(crate) fn into_record(",
        find: "TimeDelta::microseconds(micros)",
        replace: "TimeDelta::microseconds(micros / 2)",
        caught_by: &[
            "enqueue::postgres::an_enqueue_can_return_the_whole_job_as_get_does",
            "enqueue::sqlite::an_enqueue_can_return_the_whole_job_as_get_does",
            "http::jobs::postgres::the_response_to_a_post_is_the_job_that_get_returns",
            "http::jobs::sqlite::the_response_to_a_post_is_the_job_that_get_returns",
        ],
    },
    // ---- keys ------------------------------------------------------------------
    Mutant {
        name: "rules: replace a waiting job when a deduplicated one is enqueued",
        file: KEYS,
        anchor: "pub fn decide(",
        find: "(UniqueMode::Dedupe, Owner::Waiting | Owner::Running) => Decision::Dedupe(id),",
        replace: "(UniqueMode::Dedupe, Owner::Waiting) => Decision::Replace(id, RunAt::New), (UniqueMode::Dedupe, Owner::Running) => Decision::Dedupe(id),",
        caught_by: &[
            "keys::postgres::dedupe_returns_a_waiting_holder_unchanged",
            "keys::postgres::dedupe_applies_across_kinds_and_queues",
            "keys::sqlite::dedupe_returns_a_waiting_holder_unchanged",
            "keys::sqlite::dedupe_applies_across_kinds_and_queues",
        ],
    },
    Mutant {
        name: "rules: return a running job instead of superseding it",
        file: KEYS,
        anchor: "pub fn decide(",
        find: "Owner::Running | Owner::Cancelling) => {\n                Decision::Supersede(id)",
        replace: "Owner::Running | Owner::Cancelling) => {\n                Decision::Existing(id)",
        caught_by: &[
            "keys::postgres::replace_and_preserve_move_the_key_of_a_running_holder_to_a_new_job",
            "keys::postgres::a_superseded_failure_is_final",
            "keys::sqlite::replace_and_preserve_move_the_key_of_a_running_holder_to_a_new_job",
            "keys::sqlite::a_superseded_failure_is_final",
        ],
    },
    Mutant {
        name: "rules: let a unique key come before an idempotency key",
        file: KEYS,
        anchor: "pub fn decide(",
        find: "Holders { idempotency: Some(id), .. }",
        replace: "Holders { idempotency: Some(id), unique: None, .. }",
        caught_by: &[
            "keys::postgres::a_repeated_idempotency_key_replaces_nothing",
            "keys::sqlite::a_repeated_idempotency_key_replaces_nothing",
        ],
    },
    Mutant {
        name: "rules: return a job that is being cancelled",
        file: KEYS,
        anchor: "pub fn decide(",
        find: "(UniqueMode::Dedupe, Owner::Cancelling) => Decision::Supersede(id)",
        replace: "(UniqueMode::Dedupe, Owner::Cancelling) => Decision::Dedupe(id)",
        caught_by: &[
            "keys::postgres::dedupe_does_not_return_a_holder_that_is_being_cancelled",
            "keys::sqlite::dedupe_does_not_return_a_holder_that_is_being_cancelled",
        ],
    },
    Mutant {
        name: "rules: let a caller take the key of a tick",
        file: NEW_JOB,
        anchor: "pub fn validate(mut self)",
        find: "key.starts_with(TICK_PREFIX)",
        replace: "key == TICK_PREFIX",
        caught_by: &[
            "input::postgres::every_invalid_field_is_refused_by_name_and_nothing_is_stored",
            "input::sqlite::every_invalid_field_is_refused_by_name_and_nothing_is_stored",
            "schedules::postgres::a_caller_cannot_take_the_key_of_a_tick",
            "schedules::sqlite::a_caller_cannot_take_the_key_of_a_tick",
        ],
    },
    Mutant {
        name: "rules: end the pass at a schedule whose job is rejected",
        file: CRON,
        anchor: "async fn concerns_all_schedules(",
        find: "error.is_read_only()",
        replace: "!error.is_unavailable()",
        caught_by: &[
            "schedules::postgres::a_schedule_whose_job_is_rejected_does_not_stop_the_others",
            "schedules::sqlite::a_schedule_whose_job_is_rejected_does_not_stop_the_others",
        ],
    },
    // ---- kinds and payloads ----------------------------------------------------
    Mutant {
        name: "rules: do not check payloads against the schema of their kind",
        file: KINDS,
        anchor: "async fn check(",
        find: "registered.check_payload(kind, payload).map(|()| Some(registered))",
        replace: "Ok(Some(registered))",
        caught_by: &[
            "payloads::postgres::a_payload_must_match_the_schema_of_its_kind_on_every_path",
            "payloads::postgres::a_payload_is_checked_before_its_key_is_looked_up",
            "payloads::postgres::an_edited_payload_must_match_the_schema_of_its_kind",
            "payloads::sqlite::a_payload_must_match_the_schema_of_its_kind_on_every_path",
            "payloads::sqlite::a_payload_is_checked_before_its_key_is_looked_up",
            "payloads::sqlite::an_edited_payload_must_match_the_schema_of_its_kind",
        ],
    },
    Mutant {
        name: "rules: accept jobs of unknown kinds if the client refuses them",
        file: KINDS,
        anchor: "async fn check(",
        find: "self.unknown == UnknownKinds::Allow",
        replace: "self.unknown == UnknownKinds::Allow || !kind.is_empty()",
        caught_by: &[
            "payloads::postgres::an_unknown_kind_is_allowed_unless_the_client_refuses_it",
            "payloads::postgres::a_built_in_check_applies_to_its_kind_only",
            "payloads::sqlite::an_unknown_kind_is_allowed_unless_the_client_refuses_it",
            "payloads::sqlite::a_built_in_check_applies_to_its_kind_only",
            "http::jobs::postgres::a_job_of_an_unknown_kind_is_refused",
            "http::jobs::sqlite::a_job_of_an_unknown_kind_is_refused",
        ],
    },
    // ---- leases that their worker does not have --------------------------------
    Mutant {
        name: "release: let a job that an operator ran early wait for its time",
        file: "crates/longshore/src/store/claim.rs",
        anchor: "fn not_started(",
        find: ".min(self.claimed_at)",
        replace: "",
        caught_by: &[
            "settle::postgres::a_job_that_an_operator_ran_early_is_still_due_after_a_release",
            "settle::sqlite::a_job_that_an_operator_ran_early_is_still_due_after_a_release",
        ],
    },
    Mutant {
        name: "rules: do not release the leases of an abandoned claim",
        file: LEASE,
        anchor: "impl Drop for Claiming",
        find: "client.release(&leases)",
        replace: "client.release(&leases[..0])",
        caught_by: &[
            "wake_paths::postgres::a_job_of_an_abandoned_claim_starts",
            "wake_paths::sqlite::a_job_of_an_abandoned_claim_starts",
            "claim::postgres::a_claim_dropped_by_its_caller_leaves_nothing_running",
            "claim::sqlite::a_claim_dropped_by_its_caller_leaves_nothing_running",
        ],
    },
    Mutant {
        name: "rules: do not release leases that their worker does not list",
        file: LEASE,
        anchor: "pub async fn release_unknown(",
        find: "self.release(&unknown)",
        replace: "self.release(&unknown[..0])",
        caught_by: &[
            "wake_paths::postgres::a_job_that_its_worker_does_not_know_of_is_released_and_starts",
            "wake_paths::sqlite::a_job_that_its_worker_does_not_know_of_is_released_and_starts",
            "workers::postgres::leases_that_a_worker_does_not_know_are_released_uncharged",
            "workers::sqlite::leases_that_a_worker_does_not_know_are_released_uncharged",
        ],
    },
    Mutant {
        name: "rules: release leases that their worker lists",
        file: LEASE,
        anchor: "pub async fn release_unknown(",
        find: "!held.contains(lease)",
        replace: "!held.contains(lease) || held.len() < usize::MAX",
        caught_by: &[
            "workers::postgres::leases_that_a_worker_does_not_know_are_released_uncharged",
            "workers::sqlite::leases_that_a_worker_does_not_know_are_released_uncharged",
        ],
    },
    // ---- bounds ----------------------------------------------------------------
    Mutant {
        name: "rules: let any number of enqueues wait",
        file: LANES,
        anchor: "fn enter(",
        find: "> MAX_WAITING ",
        replace: "> u64::MAX ",
        caught_by: &[
            "isolation::postgres::enqueues_beyond_the_limit_are_refused_at_once",
            "isolation::sqlite::enqueues_beyond_the_limit_are_refused_at_once",
        ],
    },
    Mutant {
        name: "rules: end a turn of retention after one step",
        file: UPKEEP,
        anchor: "pub async fn retain<",
        find: "if turn.done ||",
        replace: "if turn.done || turn.removed > 0 ||",
        caught_by: &[
            "retention::postgres::one_turn_removes_a_hundred_thousand_expired_jobs",
            "retention::sqlite::one_turn_removes_a_hundred_thousand_expired_jobs",
        ],
    },
    Mutant {
        name: "rules: end a turn of folding after one step",
        file: UPKEEP,
        anchor: "pub async fn fold_tallies<",
        find: "if !is_full ||",
        replace: "if !is_full || total > 0 ||",
        caught_by: &[
            "counts::postgres::one_turn_folds_fifty_thousand_tallies",
            "counts::sqlite::one_turn_folds_fifty_thousand_tallies",
        ],
    },
    Mutant {
        name: "rules: show an interrupted waiting job as queued in a refusal",
        file: LIFECYCLE,
        anchor: "pub fn status(&self) -> Status",
        find: "State::Waiting(_) => Status::Retrying,",
        replace: "State::Waiting(_) => Status::Queued,",
        caught_by: &[
            "operate::postgres::a_refusal_contains_the_status_of_the_job",
            "operate::sqlite::a_refusal_contains_the_status_of_the_job",
        ],
    },
    Mutant {
        name: "cron: remove the schedules of other programs too",
        file: "crates/longshore/src/cron/schedule.rs",
        anchor: "pub(crate) async fn declare_schedules(",
        find: "template.declared_by().as_deref() == Some(program)",
        replace: "template.declared_by().is_some()",
        caught_by: &[
            "schedules::postgres::a_schedule_that_the_code_no_longer_declares_is_reported_or_removed",
            "schedules::sqlite::a_schedule_that_the_code_no_longer_declares_is_reported_or_removed",
        ],
    },
];
