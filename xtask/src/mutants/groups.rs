//! Bugs in groups: turns, limits, rates and weights.

use super::Mutant;

const CLIENT_SETTLE: &str = "crates/longshore/src/client/settle.rs";
const CURSOR: &str = "crates/longshore/src/store/cursor.rs";
const POSITIONS: &str = "crates/longshore/src/store/cursor/positions.rs";
const POSTGRES_CLAIM: &str = "crates/longshore/src/store/postgres/claim.rs";
const POSTGRES_GROUPS: &str = "crates/longshore/src/store/postgres/claim_groups.rs";
const POSTGRES_TURNS: &str = "crates/longshore/src/store/postgres/turns.rs";
const SQLITE_GROUPS: &str = "crates/longshore/src/store/sqlite/claim_groups.rs";
const SQLITE_SETTLE: &str = "crates/longshore/src/store/sqlite/settle.rs";
const TURNS: &str = "crates/longshore/src/turns.rs";

pub(super) const MUTANTS: &[Mutant] = &[
    // ---- rules -------------------------------------------------------------------
    Mutant {
        name: "groups: delete the turn of a group whose jobs are due later",
        file: TURNS,
        anchor: "pub(crate) fn next(",
        find: "Some(at) if at > now => return Turn::At { at, paced_until },",
        replace: "Some(at) if at > now => return Turn::None,",
        caught_by: &["groups::sqlite::jobs_of_a_group_that_are_due_later_start_then"],
    },
    Mutant {
        name: "groups: forget the rate of a group that is empty",
        file: TURNS,
        anchor: "pub(crate) fn next(",
        find: "paced_until.map_or(Turn::None, |at| Turn::At { at, paced_until })",
        replace: "Turn::None",
        caught_by: &["group_limits::sqlite::the_state_of_a_rate_survives_an_empty_group"],
    },
    Mutant {
        name: "groups: send a group to the end of the line before its turn is over",
        file: TURNS,
        anchor: "pub(crate) fn next(",
        find: "_ if served.started < self.allowance(quantum) => {",
        replace: "_ if served.started == 0 => {",
        caught_by: &["groups::sqlite::a_group_gets_jobs_in_proportion_to_its_weight"],
    },
    Mutant {
        name: "groups: set the share of a group by a claim that takes nothing from it",
        file: TURNS,
        anchor: "pub(crate) fn next(",
        find: "allowance: self.allowance },",
        replace: "allowance: Some(self.allowance(quantum)) },",
        caught_by: &[
            "group_limits::sqlite::a_claim_that_takes_nothing_from_a_group_does_not_change_its_share",
        ],
    },
    Mutant {
        name: "groups: drain until every rate is forgotten",
        file: "crates/longshore/src/worker/claim.rs",
        anchor: "async fn has_paused_jobs(",
        find: "overdue.iter().any(|(queue",
        replace: "overdue.is_empty() || overdue.iter().any(|(queue",
        caught_by: &["group_limits::sqlite::a_drain_ends_while_rates_are_remembered_and_no_job_is_due"],
    },
    Mutant {
        name: "groups: leave a job behind a position until the next poll",
        file: POSTGRES_GROUPS,
        anchor: "// Up to a group whose turn goes on, the line has been served.",
        find: "cursor.note_job_behind_position();",
        replace: "",
        caught_by: &["wake_paths::postgres::jobs_that_are_due_before_others_of_their_group_start"],
    },
    Mutant {
        name: "groups: let a group collect credit while it is idle",
        file: TURNS,
        anchor: "fn current(",
        find: "until.max(now).min(latest)",
        replace: "until.min(latest)",
        caught_by: &["group_limits::sqlite::a_rate_admits_its_burst_and_then_one_job_per_step"],
    },
    Mutant {
        name: "groups: claim jobs with a rate ahead of time",
        file: TURNS,
        anchor: "pub(crate) fn room(&self",
        find: "rate.room(self.paced_until, now).min(startable)",
        replace: "rate.room(self.paced_until, now)",
        caught_by: &["group_limits::sqlite::jobs_with_a_rate_are_not_claimed_ahead_of_time"],
    },
    Mutant {
        name: "groups: ignore the weight",
        file: TURNS,
        anchor: "fn allowance(",
        find: "self.gate.weight.max(1)",
        replace: "1u32",
        caught_by: &["groups::sqlite::a_group_gets_jobs_in_proportion_to_its_weight"],
    },
    Mutant {
        name: "groups: always serve groups before plain jobs",
        file: CURSOR,
        anchor: "pub(crate) fn groups_come_first(",
        find: "self.groups_first = !self.groups_first;",
        replace: "self.groups_first = true;",
        caught_by: &["groups::sqlite::jobs_with_and_without_a_group_take_turns"],
    },
    Mutant {
        name: "groups: wake nobody when a job of a limited group ends",
        file: CLIENT_SETTLE,
        anchor: "pub(crate) async fn settle_reports(",
        find: "if reports[i].claimed.gated {",
        replace: "if false {",
        caught_by: &["wake_paths::postgres::the_end_of_a_job_starts_the_next_one_of_its_group"],
    },
    // ---- Postgres ----------------------------------------------------------------
    Mutant {
        name: "groups, postgres: serve a group that another claim serves",
        file: POSTGRES_GROUPS,
        anchor: "const LOCK_GROUPS",
        find: "pg_try_advisory_xact_lock(hashtextextended('longshore.groups:' || g.queue || chr(31) || g.grp, 0))",
        replace: "g.queue is not null",
        caught_by: &["groups::postgres_only::a_group_that_another_claim_serves_is_passed_by"],
    },
    Mutant {
        name: "groups, postgres: serve a group twice while another claim serves the rest",
        file: POSTGRES_GROUPS,
        anchor: "pub(super) async fn take_from_groups(",
        find: "passed_by || !started",
        replace: "!started",
        caught_by: &[
            "groups::postgres_only::a_group_gets_only_its_share_while_another_claim_serves_the_rest",
        ],
    },
    Mutant {
        name: "groups, postgres: delete the last turn without looking behind the position",
        file: POSTGRES_GROUPS,
        anchor: "const FIRST_LEFT",
        find: "limit 1))",
        replace: "limit 0))",
        caught_by: &["groups::postgres::a_job_behind_the_position_keeps_the_turn_of_its_group"],
    },
    Mutant {
        name: "groups, postgres: do not look behind the position in a group after a head scan",
        file: POSTGRES_GROUPS,
        anchor: "m.id, m.allowance, coalesce(m.turns, 0),",
        find: "(r.run_at, r.id) <= (v.unchecked_run_at, v.unchecked_id)",
        replace: "(r.run_at, r.id) < ('-infinity', v.unchecked_id)",
        caught_by: &[
            "groups::postgres::jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog",
        ],
    },
    Mutant {
        name: "groups: keep the position in a group although jobs are behind it",
        file: POSITIONS,
        anchor: "pub(crate) fn looked_behind(",
        find: "before_first.map_or(known.after, |before| before.min(known.after))",
        replace: "before_first.map_or(known.after, |before| before.max(known.after))",
        caught_by: &[
            "groups::postgres::jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog",
        ],
    },
    Mutant {
        name: "groups: do not look behind the positions in groups again",
        file: POSITIONS,
        anchor: "fn uncheck(",
        find: "position.checked = false",
        replace: "position.checked = true",
        caught_by: &[
            "groups::postgres::jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog",
            "groups::sqlite::jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog",
        ],
    },
    Mutant {
        name: "groups, postgres: add no turn for a new job",
        file: POSTGRES_TURNS,
        anchor: "macro_rules! add_turns {",
        find: "where n.grp is not null",
        replace: "where n.grp is null",
        caught_by: &["groups::postgres::a_large_group_does_not_delay_a_small_one"],
    },
    Mutant {
        // The prototype's bug: the turn that the enqueue relies on is deleted by a claim that cannot see the
        // new job yet.
        name: "groups, postgres: add no turn for a new job if its group has one",
        file: POSTGRES_TURNS,
        anchor: "macro_rules! add_turns {",
        find: "where n.grp is not null",
        replace: "where n.grp is not null
         and not exists (select 1 from longshore.turns w where w.queue = n.queue and w.grp = n.grp)",
        caught_by: &[
            "groups::postgres_only::an_enqueue_in_an_open_transaction_is_found_after_its_group_was_drained",
        ],
    },
    Mutant {
        name: "groups, postgres: add no turn when a job of a limited group ends",
        file: POSTGRES_TURNS,
        anchor: "macro_rules! add_turns_of_freed {",
        find: "where t.gate is not null",
        replace: "where t.gate is null and false",
        caught_by: &["group_limits::postgres::every_ending_lets_the_next_job_of_the_group_start"],
    },
    Mutant {
        name: "groups, postgres: exceed the limit of a group by a suspect",
        file: POSTGRES_GROUPS,
        anchor: "const TAKE_FROM_GROUPS",
        find: "case when s.nth = (select nth from picked_suspect) then 1 else 0 end",
        replace: "0",
        caught_by: &["group_limits::postgres::a_suspect_uses_the_room_of_its_group"],
    },
    Mutant {
        name: "groups, postgres: do not count what a claim started in a queue with a rate",
        file: POSTGRES_CLAIM,
        anchor: "pub(super) fn count(",
        find: "room.started += 1;",
        replace: "room.started += 0;",
        caught_by: &["group_limits::postgres::the_rate_of_a_queue_covers_jobs_with_and_without_a_group"],
    },
    // ---- SQLite ------------------------------------------------------------------
    Mutant {
        name: "groups, sqlite: keep the turns of a group that was served",
        file: SQLITE_GROUPS,
        anchor: "let lower = self.tx.row(LOWER",
        find: "self.tx.execute(DELETE, params![queue, group, priority])?;",
        replace: "let _ = DELETE;",
        caught_by: &["groups::sqlite::groups_take_turns_when_jobs_are_claimed_one_by_one"],
    },
    Mutant {
        name: "groups, sqlite: count no running jobs",
        file: SQLITE_GROUPS,
        anchor: "let running = match gate.max_running {",
        find: "row.get::<_, u32>(0))?.unwrap_or(0)",
        replace: "row.get::<_, u32>(0))?.map_or(0, |_| 0)",
        caught_by: &["group_limits::sqlite::the_limit_of_a_group_holds_across_clients"],
    },
    Mutant {
        name: "groups, sqlite: add no turn when a job of a limited group ends",
        file: SQLITE_SETTLE,
        anchor: "fn take_lease(",
        find: "filter(|_| held.gated)",
        replace: "filter(|_| false)",
        caught_by: &["group_limits::sqlite::every_ending_lets_the_next_job_of_the_group_start"],
    },
];
