//! Bugs in flows: ends that are not noted, followed or counted, and operators' commands on flows.

use super::Mutant;

const CLIENT_FLOWS: &str = "crates/longshore/src/client/flows.rs";
const LIFECYCLE: &str = "crates/longshore/src/lifecycle.rs";
const POSTGRES_ADVANCE: &str = "crates/longshore/src/store/postgres/advance.rs";
const POSTGRES_FLOWS: &str = "crates/longshore/src/store/postgres/flows.rs";
const POSTGRES_FUNCTIONS: &str = "crates/longshore/migrations/postgres/functions.sql";
const POSTGRES_OPERATE: &str = "crates/longshore/src/store/postgres/operate.rs";
const POSTGRES_OPERATE_FLOWS: &str = "crates/longshore/src/store/postgres/operate_flows.rs";
const POSTGRES_RETAIN: &str = "crates/longshore/src/store/postgres/retain.rs";
const POSTGRES_SETTLE: &str = "crates/longshore/src/store/postgres/settle.rs";
const RULES: &str = "crates/longshore/src/flow.rs";
const SQLITE_ADVANCE: &str = "crates/longshore/src/store/sqlite/advance.rs";
const SQLITE_FLOWS: &str = "crates/longshore/src/store/sqlite/flows.rs";
const SQLITE_OPERATE: &str = "crates/longshore/src/store/sqlite/operate.rs";
const SQLITE_OPERATE_FLOWS: &str = "crates/longshore/src/store/sqlite/operate_flows.rs";
const SQLITE_RETAIN: &str = "crates/longshore/src/store/sqlite/retain.rs";
const SQLITE_SETTLE: &str = "crates/longshore/src/store/sqlite/settle.rs";

pub(super) const MUTANTS: &[Mutant] = &[
    // ---- rules -------------------------------------------------------------------
    Mutant {
        name: "flows: release a child before its last parent has ended",
        file: RULES,
        anchor: "pub fn follow(",
        find: "} else if child.open > 0 {",
        replace: "} else if child.open > 1 {",
        caught_by: &["flows::sqlite::a_task_starts_after_its_last_parent_has_succeeded"],
    },
    Mutant {
        name: "flows: release what a cancelled flow has held",
        file: RULES,
        anchor: "pub fn follow(",
        find: "} else if flow_is_cancelled {",
        replace: "} else if flow_is_cancelled && false {",
        caught_by: &["flow_races::sqlite::a_parent_that_ends_after_the_flag_of_a_cancel_starts_nothing"],
    },
    Mutant {
        name: "flows: follow two changes of one job together",
        file: RULES,
        anchor: "pub fn followed_together(",
        find: "position(|change| !jobs.insert(change.job))",
        replace: "position(|change| !jobs.insert(change.job) && false)",
        caught_by: &["flows::sqlite::a_task_that_was_retried_and_ended_again_is_followed_in_order"],
    },
    Mutant {
        name: "flows: end a flow that is not sealed",
        file: RULES,
        anchor: "pub fn turn(&self)",
        find: "self.is_sealed && self.open == 0",
        replace: "self.open == 0",
        caught_by: &["flows::sqlite::an_open_flow_grows_in_parts_and_ends_when_it_is_sealed"],
    },
    Mutant {
        name: "flows: let a cancelled flow succeed",
        file: RULES,
        anchor: "pub fn end(&self)",
        find: "self.failed == 0 && !self.is_cancelled",
        replace: "self.failed == 0",
        caught_by: &["flows::sqlite::a_cancelled_flow_without_failures_has_not_succeeded"],
    },
    Mutant {
        name: "flows: reopen what would be skipped again",
        file: RULES,
        anchor: "pub fn reopen(",
        find: "link.met != Some(false) || reopened.contains(&link.parent)",
        replace: "link.met != Some(false) || reopened.contains(&link.parent) || true",
        caught_by: &["flows::sqlite::a_retry_runs_only_the_failed_part"],
    },
    Mutant {
        name: "flows: do not hold what waits for a reopened task",
        file: RULES,
        anchor: "let is_held = |candidate",
        find: "link.met.is_none() || reopened.contains(&link.parent)",
        replace: "link.met.is_none()",
        caught_by: &["flows::sqlite::a_retry_runs_only_the_failed_part"],
    },
    Mutant {
        name: "flows: run a job that waits for others",
        file: LIFECYCLE,
        anchor: "(State::Waiting(job), Event::Retry)",
        find: "if job.is_held",
        replace: "if job.is_held && false",
        caught_by: &[
            "flows::postgres::a_held_task_can_be_cancelled_and_edited_but_not_run",
            "flows::sqlite::a_held_task_can_be_cancelled_and_edited_but_not_run",
        ],
    },
    Mutant {
        name: "flows: delete a member that others may need",
        file: LIFECYCLE,
        anchor: "(State::Finished(job), Event::Delete)",
        find: "if job.is_needed",
        replace: "if job.is_needed && false",
        caught_by: &[
            "flows::postgres::a_member_of_an_open_flow_cannot_be_deleted",
            "flows::sqlite::a_member_of_an_open_flow_cannot_be_deleted",
        ],
    },
    Mutant {
        name: "flows: do not resume a cancel, and ignore deadlines",
        file: CLIENT_FLOWS,
        anchor: "pub async fn do_pending(",
        find: "if pending.cancels {",
        replace: "if pending.cancels && false {",
        caught_by: &[
            "flows::sqlite::a_cancel_that_was_cut_off_is_resumed",
            "flows::sqlite::a_deadline_cancels_the_flow",
        ],
    },
    Mutant {
        name: "flows: leave ends that nobody followed",
        file: CLIENT_FLOWS,
        anchor: "pub async fn do_pending(",
        find: "if pending.changes {",
        replace: "if pending.changes && false {",
        caught_by: &["flows::sqlite::an_end_that_nobody_followed_is_followed_by_upkeep"],
    },
    // ---- Postgres ----------------------------------------------------------------
    Mutant {
        name: "flows, postgres: note no end of jobs that end alike",
        file: POSTGRES_SETTLE,
        anchor: "note_ends!(\"taken\", \"($6::text = 'succeeded')\")",
        find: "note_ends!(\"taken\", \"($6::text = 'succeeded')\"),\n    \",\",",
        replace: "",
        caught_by: &["flows::postgres::the_last_two_parents_release_a_child_once"],
    },
    Mutant {
        name: "flows, postgres: note no end of jobs with results or errors",
        file: POSTGRES_SETTLE,
        anchor: "note_ends!(\"taken\", \"($12::text = 'succeeded')\")",
        find: "note_ends!(\"taken\", \"($12::text = 'succeeded')\"),\n    \",\",",
        replace: "",
        caught_by: &[
            "flows::postgres::a_task_is_skipped_when_a_parent_does_not_succeed",
            "flows::postgres::recovery_of_a_task_releases_or_skips_its_children",
        ],
    },
    Mutant {
        name: "flows, postgres: note no end of a cancelled job",
        file: POSTGRES_OPERATE,
        anchor: "note_ends!(\"deleted\", \"false\")",
        find: "note_ends!(\"deleted\", \"false\"),\n    \",",
        replace: "\"",
        caught_by: &["flows::postgres::a_held_task_can_be_cancelled_and_edited_but_not_run"],
    },
    Mutant {
        name: "flows, postgres: note no end of a job that was cancelled in SQL",
        file: POSTGRES_FUNCTIONS,
        anchor: "select g.flow, g.id, false, true",
        find: "where g.flow is not null",
        replace: "where g.flow is null and false",
        caught_by: &["flows::postgres_only::sql_cancel_and_retry_change_the_flow"],
    },
    Mutant {
        name: "flows, postgres: do not note that a job was retried",
        file: POSTGRES_OPERATE,
        anchor: "noted as (   -- it counts as open again",
        find: "where flow is not null",
        replace: "where flow is null and false",
        caught_by: &["flows::postgres::a_retried_task_opens_its_flow_again"],
    },
    Mutant {
        name: "flows, postgres: follow changes without the lock of the flow",
        file: POSTGRES_ADVANCE,
        anchor: "const LOCK_CHANGED",
        find: "limit 32\n       for no key update skip locked",
        replace: "limit 32",
        caught_by: &["flow_races::postgres::many_ends_at_once_are_counted_once"],
    },
    Mutant {
        name: "flows, postgres: count a skipped job as a failure",
        file: POSTGRES_ADVANCE,
        anchor: "const END_WAITING",
        find: "select flow, id, false, false",
        replace: "select flow, id, false, true",
        caught_by: &["flows::postgres::a_skipped_task_does_not_make_the_flow_fail"],
    },
    Mutant {
        name: "flows, postgres: stop a cascade at the first skipped job",
        file: POSTGRES_ADVANCE,
        anchor: "const END_WAITING",
        find: "from deleted\n       where flow is not null",
        replace: "from deleted\n       where flow is null and false",
        caught_by: &["flows::postgres::a_deep_cascade_ends_every_task"],
    },
    Mutant {
        name: "flows, postgres: cancel the callbacks of a cancelled flow",
        file: POSTGRES_ADVANCE,
        anchor: "// A callback is not a member",
        find: "flow.and_then(|flow| flows.get(&flow)).is_some_and(|flow| flow.counts.is_cancelled)",
        replace: "flows.values().any(|flow| flow.counts.is_cancelled)",
        caught_by: &["flows::postgres::cancelling_a_flow_ends_all_of_its_members"],
    },
    Mutant {
        name: "flows, postgres: let the end of a job's children end the job for those that wait for it",
        file: POSTGRES_ADVANCE,
        anchor: "FlowTurn::Ends(end) => {",
        find: "parents.extend((!flow.is_owned).then_some((*id, Some(end))));",
        replace: "parents.push((*id, Some(end)));",
        caught_by: &["flows::postgres::children_of_a_task_do_not_release_the_tasks_that_wait_for_it"],
    },
    Mutant {
        name: "flows, postgres: emit no event when the children of a job have ended",
        file: POSTGRES_ADVANCE,
        anchor: "FlowTurn::Ends(end) => {",
        find: "emitted.extend(event);",
        replace: "emitted.extend(event.filter(|_| false));",
        caught_by: &["flows::postgres::a_job_spawns_children_once_and_joins_them"],
    },
    Mutant {
        name: "flows, postgres: retry a member whose end was not followed",
        file: POSTGRES_OPERATE_FLOWS,
        anchor: "const CANDIDATES",
        find: "where c.flow = f.flow",
        replace: "where false",
        caught_by: &[
            "flow_races::postgres_only::a_failure_that_is_stored_after_a_retry_has_begun_is_followed_first",
        ],
    },
    Mutant {
        name: "flows, postgres: retry a member that is being removed",
        file: POSTGRES_OPERATE_FLOWS,
        anchor: "const CANDIDATES",
        find: "limit 1\n                for update) as f",
        replace: "limit 1) as f",
        caught_by: &[
            "flow_races::postgres::a_task_that_retention_removes_while_its_flow_is_retried_holds_no_child",
        ],
    },
    Mutant {
        name: "flows, postgres: remove members of a flow that has not ended",
        file: POSTGRES_RETAIN,
        anchor: "(f.flow is null or not exists (   -- others may need its result",
        find: "and o.ended_at is null",
        replace: "and false",
        caught_by: &["flows::postgres::retention_keeps_the_members_of_an_open_flow"],
    },
    Mutant {
        name: "flows, postgres: add members to a flow that is being sealed",
        file: POSTGRES_FLOWS,
        anchor: "if is_sealed {",
        find: "return Ok(Added::Sealed);",
        replace: "",
        caught_by: &["flows::postgres::an_open_flow_grows_in_parts_and_ends_when_it_is_sealed"],
    },
    Mutant {
        name: "flows, postgres: let a join of no children wait forever",
        file: POSTGRES_FLOWS,
        anchor: "pub(super) async fn spawn(",
        find: "if members.is_empty() {",
        replace: "if members.is_empty() && false {",
        caught_by: &["flows::postgres::a_join_of_no_children_continues"],
    },
    // ---- SQLite ------------------------------------------------------------------
    Mutant {
        name: "flows, sqlite: note no end",
        file: SQLITE_SETTLE,
        anchor: "match ended.flow {",
        find: "Some(flow) => note_end(tx, flow, ended),",
        replace: "Some(flow) if false => note_end(tx, flow, ended),\n        Some(_) => Ok(()),",
        caught_by: &["flows::sqlite::a_task_starts_after_its_last_parent_has_succeeded"],
    },
    Mutant {
        name: "flows, sqlite: do not note that a job was retried",
        file: SQLITE_OPERATE,
        anchor: "// It counts as open again",
        find: "note_reopened(tx, flow, id, seen.outcome != Outcome::Succeeded && !is_skipped)?;",
        replace: "let _ = (note_reopened, flow, is_skipped);",
        caught_by: &["flows::sqlite::a_retried_task_opens_its_flow_again"],
    },
    Mutant {
        name: "flows, sqlite: count a skipped job as a failure",
        file: SQLITE_ADVANCE,
        anchor: "pub(super) fn note_end(",
        find: "!succeeded && !ended.is_skipped",
        replace: "!succeeded",
        caught_by: &["flows::sqlite::a_skipped_task_does_not_make_the_flow_fail"],
    },
    Mutant {
        name: "flows, sqlite: let the end of a job's children end the job for those that wait for it",
        file: SQLITE_ADVANCE,
        anchor: "FlowTurn::Ends(end) => {",
        find: "parents.extend((!flow.is_owned).then_some((*id, Some(end))));",
        replace: "parents.push((*id, Some(end)));",
        caught_by: &["flows::sqlite::children_of_a_task_do_not_release_the_tasks_that_wait_for_it"],
    },
    Mutant {
        name: "flows, sqlite: remove members of a flow that has not ended",
        file: SQLITE_RETAIN,
        anchor: "// Others may need the result of a member",
        find: "if is_needed || ",
        replace: "if is_needed && false || ",
        caught_by: &["flows::sqlite::retention_keeps_the_members_of_an_open_flow"],
    },
    Mutant {
        name: "flows, sqlite: spawn children under a lost lease",
        file: SQLITE_FLOWS,
        anchor: "pub(super) fn spawn(",
        find: "and lease_no = ?2   -- fence: a newer lease owns the row",
        replace: "and ?2 is not null",
        caught_by: &["flow_races::sqlite::a_stale_lease_spawns_nothing"],
    },
    Mutant {
        name: "flows, sqlite: let a join of no children wait forever",
        file: SQLITE_FLOWS,
        anchor: "pub(super) fn spawn(",
        find: "if members.is_empty() {",
        replace: "if members.is_empty() && false {",
        caught_by: &["flows::sqlite::a_join_of_no_children_continues"],
    },
];
