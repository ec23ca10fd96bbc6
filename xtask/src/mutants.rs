//! `cargo xtask mutants`: does the conformance suite notice when a rule is
//! broken on purpose?
//!
//! Each mutant is one small bug in one engine, and names the cases that must
//! turn red. They are tried in a copy of the tree under `target/mutants`, never
//! in the checkout. A mutant that survives, or whose text is no longer found,
//! fails the task: the list has to follow the code.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use crate::{
    run::{Result, cargo, target_dir, took, workspace},
    test::Database,
};

/// One bug: `old`, first found after `after`, becomes `new`.
struct Mutant {
    name: &'static str,
    file: &'static str,
    after: &'static str,
    old: &'static str,
    new: &'static str,
    /// The cases that must fail, as `engine::module::case`.
    red: &'static [&'static str],
}

const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const SETTLE: &str = "crates/longshore/src/client/settle.rs";
const PG_ACCESS: &str = "crates/longshore/src/store/postgres/access.rs";
const PG_FLOW: &str = "crates/longshore/src/store/postgres/flow.rs";
const PG_INSPECT: &str = "crates/longshore/src/store/postgres/inspect.rs";
const PG_SETTLE: &str = "crates/longshore/src/store/postgres/settle.rs";
const PG_CLAIM: &str = "crates/longshore/src/store/postgres/claim.rs";
const PG_OPERATE: &str = "crates/longshore/src/store/postgres/operate.rs";
const PG_UPKEEP: &str = "crates/longshore/src/store/postgres/upkeep.rs";
const LITE_ACCESS: &str = "crates/longshore/src/store/sqlite/access.rs";
const LITE_FLOW: &str = "crates/longshore/src/store/sqlite/flow.rs";
const LITE_INSPECT: &str = "crates/longshore/src/store/sqlite/inspect.rs";
const LITE_SETTLE: &str = "crates/longshore/src/store/sqlite/settle.rs";
const LITE_CLAIM: &str = "crates/longshore/src/store/sqlite/claim.rs";
const LITE_OPERATE: &str = "crates/longshore/src/store/sqlite/operate.rs";
const LITE_UPKEEP: &str = "crates/longshore/src/store/sqlite/upkeep.rs";

const MUTANTS: &[Mutant] = &[
    // ---- the rules -----------------------------------------------------------
    Mutant {
        name: "a release is charged",
        file: LIFECYCLE,
        after: "fn uncharged(",
        old: "attempts: job.attempt - 1,",
        new: "attempts: job.attempt,",
        red: &[
            "postgres::settle::a_release_is_not_charged_and_is_due_at_once",
            "sqlite::settle::a_release_is_not_charged_and_is_due_at_once",
        ],
    },
    Mutant {
        name: "an end by lease alone is not known again",
        file: SETTLE,
        after: "async fn settle_leases",
        old: "settled == Settled::Stored",
        new: "settled == Settled::LeaseLost",
        red: &[
            "postgres::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
            "sqlite::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
        ],
    },
    Mutant {
        name: "a superseded end by lease alone is not known again",
        file: SETTLE,
        after: "fn may_have_been",
        old: "superseded: true",
        new: "superseded: false",
        red: &[
            "postgres::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
            "sqlite::leases::a_lease_settled_again_is_held_again_and_nothing_changes",
        ],
    },
    // ---- the fence, on Postgres ------------------------------------------------
    Mutant {
        name: "postgres: a finishing settle ignores the lease number",
        file: PG_SETTLE,
        after: "const FINISH:",
        old: "and h.lease_no = i.lease_no ",
        new: "",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: a finishing settle ignores the worker",
        file: PG_SETTLE,
        after: "const FINISH:",
        old: "and h.worker = i.worker",
        new: "",
        red: &["postgres::fence::the_right_number_in_the_wrong_hands_is_powerless"],
    },
    Mutant {
        name: "postgres: attempts that ended alike ignore the lease number",
        file: PG_SETTLE,
        after: "const FINISH_ALIKE:",
        old: "and r.lease_no = $2 ",
        new: "and r.lease_no <> -$2 ",
        red: &[
            "postgres::fence::a_plain_success_of_an_old_lease_does_not_end_a_later_one_of_its_worker",
            "postgres::fence::a_holder_is_powerless_over_its_own_later_lease",
        ],
    },
    Mutant {
        name: "postgres: attempts that ended alike ignore the worker",
        file: PG_SETTLE,
        after: "const FINISH_ALIKE:",
        old: "and r.worker = $3",
        new: "and (r.worker = $3 or true)",
        red: &[
            "postgres::fence::plain_successes_of_one_batch_end_what_their_worker_holds",
            "postgres::fence::the_right_number_in_the_wrong_hands_is_powerless",
        ],
    },
    Mutant {
        name: "postgres: attempts that ended alike keep the unique key",
        file: PG_SETTLE,
        after: "const FINISH_ALIKE:",
        old: "where t.keyed))",
        new: "where not t.keyed))",
        red: &["postgres::keys::a_unique_key_is_released_by_an_end_that_leaves_nothing_behind"],
    },
    Mutant {
        name: "postgres: attempts that ended alike ignore the cancel flag",
        file: PG_SETTLE,
        after: "const FINISH_ALIKE:",
        old: "or r.cancel_requested = $4",
        new: "or true",
        red: &["postgres::settle::a_move_decided_without_a_raised_flag_is_sent_back"],
    },
    Mutant {
        name: "postgres: attempts that ended alike ignore that the key has gone",
        file: PG_SETTLE,
        after: "const FINISH_ALIKE:",
        old: "or r.superseded = $5",
        new: "or true",
        red: &["postgres::keys::a_superseded_job_that_gives_up_says_why"],
    },
    Mutant {
        name: "postgres: attempts that ended alike mix up what was counted",
        file: PG_SETTLE,
        after: "const FINISH_ALIKE:",
        old: "$7::int2, t.max_attempts, $8::int2",
        new: "$8::int2, t.max_attempts, $7::int2",
        red: &["postgres::settle::a_success_that_leaves_nothing_behind_keeps_what_was_counted"],
    },
    Mutant {
        name: "postgres: a requeueing settle ignores the lease number",
        file: PG_SETTLE,
        after: "const REQUEUE",
        old: "and h.lease_no = i.lease_no ",
        new: "",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: a finishing settle ignores the cancel flag",
        file: PG_SETTLE,
        after: "const FINISH:",
        old: "or r.cancel_requested = $9",
        new: "or true",
        red: &["postgres::settle::a_move_decided_without_a_raised_flag_is_sent_back"],
    },
    Mutant {
        name: "postgres: a requeueing settle ignores the cancel flag",
        file: PG_SETTLE,
        after: "const REQUEUE",
        old: "or r.cancel_requested = $10",
        new: "or true",
        red: &["postgres::cancel::a_requested_cancel_outranks_every_other_ending"],
    },
    Mutant {
        name: "postgres: a requeueing settle ignores that the key has gone",
        file: PG_SETTLE,
        after: "const REQUEUE",
        old: "or r.superseded = $11",
        new: "or true",
        red: &["postgres::keys::a_superseded_failure_is_final"],
    },
    Mutant {
        name: "postgres: recovery does not ask whether the worker is dead",
        file: PG_SETTLE,
        after: "const REQUEUE",
        old: "is not true or not exists",
        new: "is not true or true or not exists",
        red: &["postgres::recovery::a_recovery_from_a_worker_that_is_not_dead_is_refused"],
    },
    Mutant {
        name: "postgres: mark_started ignores the lease number",
        file: PG_FLOW,
        after: "const MARK_STARTED",
        old: "and lease_no = $2",
        new: "and lease_no <> -$2",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: progress ignores the lease number",
        file: PG_FLOW,
        after: "const PROGRESS",
        old: "and i.lease_no = r.lease_no ",
        new: "",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: a checkpoint ignores the lease number",
        file: PG_FLOW,
        after: "const SAVE_CHECKPOINT",
        old: "and lease_no = $2",
        new: "and lease_no <> -$2",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: assert_lease ignores the lease number",
        file: PG_FLOW,
        after: "const ASSERT_LEASE",
        old: "and lease_no = $2",
        new: "and lease_no <> -$2",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: the beat ignores the lease number",
        file: PG_FLOW,
        after: "const BEAT",
        old: "and r.lease_no = h.lease_no",
        new: "",
        red: &["postgres::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "postgres: the dead may beat",
        file: PG_FLOW,
        after: "const BEAT",
        old: "and dead_at is null",
        new: "",
        red: &["postgres::workers::the_dead_stay_dead"],
    },
    Mutant {
        name: "postgres: a sweeper's word passes for the holder's",
        file: PG_SETTLE,
        after: "const DIAGNOSE",
        old: "and a.error is not distinct from i.error",
        new: "",
        red: &["postgres::fence::a_late_failure_is_not_mistaken_for_the_one_a_hook_decided"],
    },
    Mutant {
        name: "postgres: the claims behind leases ignore the lease number",
        file: PG_CLAIM,
        after: "const CLAIMS:",
        old: "and h.lease_no = i.lease_no ",
        new: "",
        red: &[
            "postgres::fence::claims_are_answered_lease_by_lease",
            "postgres::fence::a_holder_is_powerless_over_its_own_later_lease",
        ],
    },
    Mutant {
        name: "postgres: the claims behind leases ignore the worker",
        file: PG_CLAIM,
        after: "const CLAIMS:",
        old: "and h.worker = i.worker",
        new: "",
        red: &["postgres::fence::the_right_number_in_the_wrong_hands_is_powerless"],
    },
    // ---- claim, on Postgres: from one place, and from many ---------------------------
    Mutant {
        name: "postgres: a claim takes what is not due",
        file: PG_CLAIM,
        after: "const TAKE_FROM_ONE:",
        old: "and r.run_at <= longshore.clock()",
        new: "",
        red: &["postgres::claim::a_job_is_due_at_its_very_instant"],
    },
    Mutant {
        name: "postgres: a claim ignores the kinds",
        file: PG_CLAIM,
        after: "const TAKE_FROM_ONE:",
        old: "r.kind = any((select $5::text[])::text[])",
        new: "true",
        red: &["postgres::claim::kinds_without_a_handler_are_left_alone"],
    },
    Mutant {
        name: "postgres: a claim ignores forbidden flags",
        file: PG_CLAIM,
        after: "const TAKE_FROM_ONE:",
        old: "not r.flags && (select $7::text[])",
        new: "true",
        red: &["postgres::claim::forbidden_flags_keep_jobs_with_any_of_them_away"],
    },
    Mutant {
        name: "postgres: the dead may claim",
        file: PG_CLAIM,
        after: "const TAKE_FROM_ONE:",
        old: "and w.dead_at is null",
        new: "",
        red: &["postgres::claim::a_worker_declared_dead_gets_nothing"],
    },
    Mutant {
        name: "postgres: a resumed claim ignores a pause",
        file: PG_CLAIM,
        after: "const TAKE_FROM_ONE:",
        old: "s.paused or s.max_running is not null",
        new: "s.max_running is not null",
        red: &["postgres::claim::a_pause_binds_a_claimer_that_has_begun"],
    },
    Mutant {
        name: "postgres: a claim from many places chooses what is not due",
        file: PG_CLAIM,
        after: "look as materialized",
        old: "and r.run_at <= longshore.clock()",
        new: "",
        red: &["postgres::claim::a_future_job_of_a_higher_priority_is_passed_over"],
    },
    Mutant {
        name: "postgres: a claim from many places chooses without the kinds",
        file: PG_CLAIM,
        after: "look as materialized",
        old: "r.kind = any((select $8::text[])::text[])",
        new: "true",
        red: &["postgres::claim::a_foreign_kind_of_a_higher_priority_is_passed_over"],
    },
    Mutant {
        name: "postgres: a claim from many places chooses without the flags",
        file: PG_CLAIM,
        after: "look as materialized",
        old: "not r.flags && (select $10::text[])",
        new: "true",
        red: &["postgres::claim::a_foreign_kind_of_a_higher_priority_is_passed_over"],
    },
    Mutant {
        name: "postgres: a claim from many places takes what is not due",
        file: PG_CLAIM,
        after: "as quota",
        old: "and r.run_at <= longshore.clock()",
        new: "",
        red: &["postgres_only::locks::nor_does_one_from_many_places"],
    },
    Mutant {
        name: "postgres: a claim from many places takes without the kinds",
        file: PG_CLAIM,
        after: "as quota",
        old: "r.kind = any((select $8::text[])::text[])",
        new: "true",
        red: &["postgres_only::locks::nor_does_one_from_many_places"],
    },
    Mutant {
        name: "postgres: a claim is held up by locked jobs",
        file: PG_CLAIM,
        after: "async fn take(",
        old: "if wanted - missing < chosen && cut",
        new: "if wanted - missing < chosen && cut && jobs.len() == usize::MAX",
        red: &[
            "postgres_only::locks::a_locked_job_holds_up_none_below_it",
            "postgres_only::locks::a_locked_job_of_a_limited_queue_gives_its_place_to_one_other",
            "postgres_only::locks::a_locked_suspect_holds_up_no_other",
        ],
    },
    Mutant {
        name: "postgres: a claim beside locked jobs takes what is not due",
        file: PG_CLAIM,
        after: "free as materialized",
        old: "and r.run_at <= longshore.clock()",
        new: "",
        red: &["postgres_only::locks::a_locked_job_holds_up_none_below_it"],
    },
    Mutant {
        name: "postgres: a claim beside locked jobs takes without the kinds",
        file: PG_CLAIM,
        after: "free as materialized",
        old: "r.kind = any((select $8::text[])::text[])",
        new: "true",
        red: &["postgres_only::locks::a_locked_job_holds_up_none_below_it"],
    },
    Mutant {
        name: "postgres: a claim beside locked jobs overdraws a limit",
        file: PG_CLAIM,
        after: "async fn take(",
        old: "count() as i32;",
        new: "count() as i32 * 0;",
        red: &["postgres_only::locks::a_locked_job_of_a_limited_queue_gives_its_place_to_one_other"],
    },
    Mutant {
        name: "postgres: the dead may claim from many places",
        file: PG_CLAIM,
        after: "const TAKE:",
        old: "and w.dead_at is null",
        new: "",
        red: &["postgres::claim::a_worker_declared_dead_gets_nothing"],
    },
    Mutant {
        name: "postgres: a resumed claim from many places ignores a pause",
        file: PG_CLAIM,
        after: "const TAKE:",
        old: "where s.paused is not true",
        new: "where true",
        red: &["postgres::claim::a_pause_binds_a_claimer_of_many_priorities_that_has_begun"],
    },
    Mutant {
        name: "postgres: a limit counts nobody",
        file: PG_CLAIM,
        after: "const COUNT_LIMITED",
        old: "select queue, count(*)",
        new: "select queue, count(*) - count(*)",
        red: &["postgres::limits::a_serial_queue_runs_one_job_at_a_time_across_handles"],
    },
    // ---- ends and operators, on Postgres -------------------------------------------
    Mutant {
        name: "postgres: an end keeps the unique key",
        file: PG_SETTLE,
        after: "const FINISH:",
        old: "where t.keyed))",
        new: "where not t.keyed))",
        red: &["postgres::keys::a_unique_key_is_released_by_every_end"],
    },
    Mutant {
        name: "postgres: a cancel does not look where the job stands",
        file: PG_OPERATE,
        after: "const CANCEL",
        old: "and lease_no = $2",
        new: "and lease_no <> -$2 - 1",
        red: &["postgres::operate::an_operation_decided_before_a_run_changes_nothing"],
    },
    Mutant {
        name: "postgres: a cancelled job is not tallied",
        file: PG_OPERATE,
        after: "const CANCEL",
        old: "1, 1, 'cancelled'",
        new: "1, 0, 'cancelled'",
        red: &["postgres::cancel::a_waiting_job_is_cancelled_at_once"],
    },
    Mutant {
        name: "postgres: a retry begins the lease numbers anew",
        file: PG_OPERATE,
        after: "const REOPEN",
        old: "j.timeout_ms, g.lease_no, j.priority",
        new: "j.timeout_ms, 0, j.priority",
        red: &["postgres::operate::a_finished_job_runs_again_with_a_fresh_budget"],
    },
    Mutant {
        name: "postgres: retention counts from the enqueue",
        file: PG_UPKEEP,
        after: "const RETAIN",
        old: "select id, outcome, finished_at\n        from longshore.finished",
        new: "select id, outcome, (select j.created_at from longshore.jobs j where j.id = f.id) as finished_at\n        from longshore.finished f",
        red: &["postgres::retention::age_counts_from_the_end_not_from_the_enqueue"],
    },
    Mutant {
        name: "postgres: a tick fires whatever tick it is",
        file: PG_UPKEEP,
        after: "const FIRE",
        old: "and next_at = $2",
        new: "",
        red: &["postgres::schedules::of_many_callers_one_gets_each_tick"],
    },
    Mutant {
        name: "postgres: a tick of an old line fires",
        file: PG_UPKEEP,
        after: "const FIRE",
        old: "and expression = $5",
        new: "and (expression = $5 or true)",
        red: &["postgres::schedules::a_tick_decided_from_what_is_no_longer_so_does_not_fire"],
    },
    Mutant {
        name: "postgres: a put moves the next tick",
        file: PG_UPKEEP,
        after: "const PUT_SCHEDULE",
        old: "then s.next_at",
        new: "then excluded.next_at",
        red: &[
            "postgres::schedules::a_schedule_put_again_keeps_its_ticks_and_its_pause",
            "postgres::schedules::putting_what_is_there_disturbs_nothing",
        ],
    },
    Mutant {
        name: "postgres: those ahead come in the order of their ids",
        file: PG_INSPECT,
        after: "const AHEAD:",
        old: "and (r.run_at, r.id) < (m.run_at, m.id)",
        new: "and r.id < m.id",
        red: &["postgres::inspect::the_jobs_ahead_are_those_a_claim_would_take_first"],
    },
    Mutant {
        name: "postgres: an hour that began before is not told",
        file: PG_INSPECT,
        after: "const TALLIED:",
        old: "level = 2 and minute >= $2",
        new: "level = 2 and minute >= greatest($1, $2)",
        red: &["postgres::counts::minutes_that_were_added_up_are_told_by_the_hour"],
    },
    Mutant {
        name: "postgres: a revoked token lives",
        file: PG_ACCESS,
        after: "const LIVE_TOKEN",
        old: "and revoked_at is null",
        new: "",
        red: &[
            "postgres::access::a_revoked_token_is_dead_and_stays_listed",
            "postgres::access::the_same_token_again_changes_nothing",
        ],
    },
    Mutant {
        name: "postgres: an expired token lives",
        file: PG_ACCESS,
        after: "const LIVE_TOKEN",
        old: "expires_at > longshore.clock()",
        new: "true",
        red: &["postgres::access::a_token_is_good_until_the_instant_it_expires"],
    },
    Mutant {
        name: "postgres: a worker's word wipes a schema",
        file: PG_ACCESS,
        after: "const PUT_KINDS",
        old: "coalesce(excluded.schema, k.schema)",
        new: "excluded.schema",
        red: &["postgres::access::a_kind_put_without_a_schema_keeps_the_one_it_has"],
    },
    // ---- SQLite ----------------------------------------------------------------
    Mutant {
        name: "sqlite: a settle ignores the lease number",
        file: LITE_SETTLE,
        after: "fn take_lease(",
        old: "and lease_no = ?2   -- fence: a newer lease owns the row",
        new: "and lease_no <> -?2",
        red: &["sqlite::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "sqlite: a settle ignores the worker",
        file: LITE_SETTLE,
        after: "fn take_lease(",
        old: "and worker = ?3",
        new: "",
        red: &["sqlite::fence::the_right_number_in_the_wrong_hands_is_powerless"],
    },
    Mutant {
        name: "sqlite: a settle ignores the flags",
        file: LITE_SETTLE,
        after: "fn take_lease(",
        old: "(cancel_requested = ?4 and superseded = ?5)",
        new: "?5 is not null",
        red: &[
            "sqlite::cancel::a_requested_cancel_outranks_every_other_ending",
            "sqlite::keys::a_superseded_failure_is_final",
        ],
    },
    Mutant {
        name: "sqlite: recovery does not ask whether the worker is dead",
        file: LITE_SETTLE,
        after: "fn take_lease(",
        old: "?6 or not exists",
        new: "?6 or true or not exists",
        red: &["sqlite::recovery::a_recovery_from_a_worker_that_is_not_dead_is_refused"],
    },
    Mutant {
        name: "sqlite: mark_started ignores the lease number",
        file: LITE_FLOW,
        after: "fn mark_started(",
        old: "and lease_no = ?2",
        new: "and lease_no <> -?2",
        red: &["sqlite::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "sqlite: progress ignores the lease number",
        file: LITE_FLOW,
        after: "fn progress(",
        old: "and lease_no = ?2",
        new: "and lease_no <> -?2",
        red: &["sqlite::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "sqlite: a checkpoint ignores the lease number",
        file: LITE_FLOW,
        after: "fn save_checkpoint(",
        old: "and lease_no = ?2",
        new: "and lease_no <> -?2",
        red: &["sqlite::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "sqlite: assert_lease and the beat ignore the lease number",
        file: LITE_FLOW,
        after: "fn raised_flags(",
        old: "and lease_no = ?2",
        new: "and lease_no <> -?2",
        red: &["sqlite::fence::a_holder_is_powerless_over_its_own_later_lease"],
    },
    Mutant {
        name: "sqlite: the dead may beat",
        file: LITE_FLOW,
        after: "fn beat(",
        old: "and dead_at is null",
        new: "",
        red: &["sqlite::workers::the_dead_stay_dead"],
    },
    Mutant {
        name: "sqlite: a claim takes what is not due",
        file: LITE_CLAIM,
        after: "const NEXT_DUE",
        old: "and run_at <= ?5",
        new: "and ?5 is not null",
        red: &["sqlite::claim::a_job_is_due_at_its_very_instant"],
    },
    Mutant {
        name: "sqlite: a claim ignores the kinds",
        file: LITE_CLAIM,
        after: "fn handles(",
        old: "!kinds.contains(kind)",
        new: "kinds.is_empty()",
        red: &["sqlite::claim::kinds_without_a_handler_are_left_alone"],
    },
    Mutant {
        name: "sqlite: a claim ignores forbidden flags",
        file: LITE_CLAIM,
        after: "fn handles(",
        old: "forbid_flags.contains(flag)",
        new: "accept_flags.contains(flag) && forbid_flags.contains(flag)",
        red: &["sqlite::claim::forbidden_flags_keep_jobs_with_any_of_them_away"],
    },
    Mutant {
        name: "sqlite: the dead may claim",
        file: LITE_CLAIM,
        after: "fn worker_is_alive(",
        old: "and dead_at is null",
        new: "",
        red: &["sqlite::claim::a_worker_declared_dead_gets_nothing"],
    },
    Mutant {
        name: "sqlite: a claim does not use up slots",
        file: LITE_CLAIM,
        after: "fn admit(",
        old: "slots.map(|slots| slots - 1)",
        new: "slots.map(|slots| slots)",
        red: &["sqlite::limits::a_limit_holds_across_priorities_and_kinds"],
    },
    Mutant {
        name: "sqlite: a claim takes every suspect",
        file: LITE_CLAIM,
        after: "fn admit(",
        old: "self.suspects.clear();",
        new: "",
        red: &["sqlite::claim::at_most_one_suspect_comes_from_all_queues_together"],
    },
    Mutant {
        name: "sqlite: an end keeps the unique key",
        file: LITE_SETTLE,
        after: "fn finish_job(",
        old: "if held.keyed {",
        new: "if !held.keyed {",
        red: &["sqlite::keys::a_unique_key_is_released_by_every_end"],
    },
    Mutant {
        name: "sqlite: a cancel does not look where the job stands",
        file: LITE_OPERATE,
        after: "fn leave_ready(",
        old: "and lease_no = ?2",
        new: "and lease_no <> -?2 - 1",
        red: &["sqlite::operate::an_operation_decided_before_a_run_changes_nothing"],
    },
    Mutant {
        name: "sqlite: a cancelled job is not tallied",
        file: LITE_OPERATE,
        after: "fn cancel(",
        old: "Outcome::Cancelled, 0, 1, 1)",
        new: "Outcome::Cancelled, 0, 1, 0)",
        red: &["sqlite::cancel::a_waiting_job_is_cancelled_at_once"],
    },
    Mutant {
        name: "sqlite: a retry begins the lease numbers anew",
        file: LITE_OPERATE,
        after: "fn reopen(",
        old: "lease_no: seen.lease_no,",
        new: "lease_no: 0,",
        red: &["sqlite::operate::a_finished_job_runs_again_with_a_fresh_budget"],
    },
    Mutant {
        name: "sqlite: retention counts from the enqueue",
        file: LITE_UPKEEP,
        after: "fn retain(",
        old: "               finished_at\n          from finished",
        new: "               (select j.created_at from jobs j where j.id = finished.id)\n          from finished",
        red: &["sqlite::retention::age_counts_from_the_end_not_from_the_enqueue"],
    },
    Mutant {
        name: "sqlite: a tick fires whatever tick it is",
        file: LITE_UPKEEP,
        after: "const MOVE_ON",
        old: "and next_at = ?2",
        new: "",
        red: &["sqlite::schedules::of_many_callers_one_gets_each_tick"],
    },
    Mutant {
        name: "sqlite: a tick of an old line fires",
        file: LITE_UPKEEP,
        after: "const MOVE_ON",
        old: "and expression = ?5",
        new: "and (expression = ?5 or 1)",
        red: &["sqlite::schedules::a_tick_decided_from_what_is_no_longer_so_does_not_fire"],
    },
    Mutant {
        name: "sqlite: a put moves the next tick",
        file: LITE_UPKEEP,
        after: "const PUT",
        old: "then next_at",
        new: "then excluded.next_at",
        red: &[
            "sqlite::schedules::a_schedule_put_again_keeps_its_ticks_and_its_pause",
            "sqlite::schedules::putting_what_is_there_disturbs_nothing",
        ],
    },
    Mutant {
        name: "sqlite: the claims behind leases ignore the lease number",
        file: LITE_CLAIM,
        after: "fn claims(",
        old: "and r.lease_no = ?2   -- fence: a newer lease owns the row",
        new: "and r.lease_no <> -?2",
        red: &[
            "sqlite::fence::claims_are_answered_lease_by_lease",
            "sqlite::fence::a_holder_is_powerless_over_its_own_later_lease",
        ],
    },
    Mutant {
        name: "sqlite: those ahead come in the order of their ids",
        file: LITE_INSPECT,
        after: "const AHEAD:",
        old: "and (run_at, id) < (?3, ?4)",
        new: "and id < ?4 and ?3 is not null",
        red: &["sqlite::inspect::the_jobs_ahead_are_those_a_claim_would_take_first"],
    },
    Mutant {
        name: "sqlite: what is removed no longer ended",
        file: LITE_INSPECT,
        after: "const ENDED:",
        old: "               ended\n          from tallies",
        new: "               kept\n          from tallies",
        red: &["sqlite::counts::an_end_stays_tallied_whatever_becomes_of_the_job"],
    },
    Mutant {
        name: "sqlite: a revoked token lives",
        file: LITE_ACCESS,
        after: "const LIVE:",
        old: "and revoked_at is null",
        new: "",
        red: &[
            "sqlite::access::a_revoked_token_is_dead_and_stays_listed",
            "sqlite::access::the_same_token_again_changes_nothing",
        ],
    },
    Mutant {
        name: "sqlite: an expired token lives",
        file: LITE_ACCESS,
        after: "const LIVE:",
        old: "expires_at > ?2",
        new: "?2 is not null",
        red: &["sqlite::access::a_token_is_good_until_the_instant_it_expires"],
    },
    Mutant {
        name: "sqlite: a worker's word wipes a schema",
        file: LITE_ACCESS,
        after: "fn put_kinds(",
        old: "coalesce(excluded.schema, schema)",
        new: "excluded.schema",
        red: &["sqlite::access::a_kind_put_without_a_schema_keeps_the_one_it_has"],
    },
];

/// `cargo xtask mutants [words]`: all of them, or those whose name contains
/// every word.
pub(crate) fn mutants(args: &[OsString]) -> Result {
    let words: Vec<_> = args.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let chosen: Vec<_> = MUTANTS
        .iter()
        .filter(|mutant| words.iter().all(|word| mutant.name.contains(word.as_str())))
        .collect();
    if chosen.is_empty() {
        return Err(format!("no mutant's name contains `{}`", words.join(" ")).into());
    }
    let database = Database::find()?.open()?;
    let home = target_dir().join("mutants");
    let tree = Tree::copy(home.join("tree"))?;
    let mut survivors = Vec::new();
    for (nth, mutant) in chosen.iter().enumerate() {
        let began = Instant::now();
        let fate = tree.with(mutant, || {
            let mut suite =
                cargo(["test", "--package", "longshore", "--all-features", "--test", "conformance"]);
            suite
                .current_dir(&tree.root)
                .args(["--", "--exact"])
                .args(mutant.red)
                .env("CARGO_TARGET_DIR", home.join("target"))
                .env("LONGSHORE_TEST_DATABASE_URL", database.url());
            fate(&mut suite, mutant.red.len())
        })?;
        let seconds = took(began.elapsed());
        eprintln!("    {}/{} {}: {fate:?}, {seconds}", nth + 1, chosen.len(), mutant.name);
        if fate != Fate::Red {
            survivors.push(format!("{} ({fate:?})", mutant.name));
        }
    }
    if survivors.is_empty() {
        eprintln!("==> mutants: all {} were noticed", chosen.len());
        return Ok(());
    }
    Err(format!("not noticed by the suite:\n  {}", survivors.join("\n  ")).into())
}

/// What became of a mutant.
#[derive(Debug, PartialEq)]
enum Fate {
    /// Every case it names failed.
    Red,
    /// At least one of them passed.
    Survived,
    /// The bug is no program, so nothing is known about the suite.
    DoesNotBuild,
    /// The code has moved on; so must the mutant.
    NotFound,
}

fn fate(suite: &mut Command, cases: usize) -> Result<Fate> {
    let output = suite.output().map_err(|error| format!("cannot run the suite: {error}"))?;
    let told = String::from_utf8_lossy(&output.stdout);
    let Some(summary) = told.lines().find(|line| line.starts_with("test result:")) else {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        return Ok(Fate::DoesNotBuild);
    };
    Ok(if summary.contains(&format!(" 0 passed; {cases} failed")) { Fate::Red } else { Fate::Survived })
}

/// A copy of the files that git knows or would know.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn copy(root: PathBuf) -> Result<Self> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(workspace())
            .output()?;
        if !listed.status.success() {
            return Err("cannot list the tree: `git ls-files` failed".into());
        }
        for name in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|name| !name.is_empty()) {
            copy_if_changed(&workspace().join(name), &root.join(name))?;
        }
        Ok(Tree { root })
    }

    /// Runs `trial` with the bug in place, and takes it out again.
    fn with(&self, mutant: &Mutant, trial: impl FnOnce() -> Result<Fate>) -> Result<Fate> {
        let path = self.root.join(mutant.file);
        let healthy = fs::read_to_string(&path)?;
        let mutated = match mutant.apply(&healthy) {
            Ok(mutated) => mutated,
            Err(lost) => {
                eprintln!("    {lost}");
                return Ok(Fate::NotFound);
            }
        };
        fs::write(&path, mutated)?;
        let result = trial();
        fs::write(&path, healthy)?;
        result
    }
}

/// Leaves files alone that are as they should be, so that cargo rebuilds
/// nothing for their sake.
fn copy_if_changed(from: &Path, to: &Path) -> Result {
    let Ok(wanted) = fs::read(from) else { return Ok(()) };
    if fs::read(to).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    Ok(fs::write(to, wanted)?)
}

impl Mutant {
    fn apply(&self, text: &str) -> Result<String> {
        let lost = |what: &str| {
            format!(
                "mutant `{}`: `{what}` is no longer in {}; let the list follow the code",
                self.name, self.file
            )
        };
        let after = text.find(self.after).ok_or_else(|| lost(self.after))?;
        let at = after + text[after..].find(self.old).ok_or_else(|| lost(self.old))?;
        Ok(format!("{}{}{}", &text[..at], self.new, &text[at + self.old.len()..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_still_finds_its_place() {
        for mutant in MUTANTS {
            let text = fs::read_to_string(workspace().join(mutant.file)).expect("the file");
            let mutated = mutant.apply(&text).expect("the place");
            assert_ne!(mutated, text, "{}", mutant.name);
        }
    }

    #[test]
    fn every_mutant_names_cases_that_exist() {
        let list = workspace().join("crates/longshore/tests/conformance/main.rs");
        let list = fs::read_to_string(list).expect("the list of cases");
        for case in MUTANTS.iter().flat_map(|mutant| mutant.red) {
            let name = case.rsplit("::").next().unwrap_or_default();
            assert!(list.contains(&format!(" {name},")), "{case}");
        }
    }

    #[test]
    fn only_the_first_place_after_the_anchor_changes() {
        let mutant = Mutant { name: "", file: "", after: "b", old: "x", new: "y", red: &[] };
        assert_eq!(mutant.apply("x b x x").expect("found"), "x b y x");
        assert!(mutant.apply("x x").is_err());
    }
}
