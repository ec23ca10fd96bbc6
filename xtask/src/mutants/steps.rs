//! Bugs in durable steps and events.

use super::Mutant;

const API_STEPS: &str = "crates/longshore/src/api/leases/steps.rs";
const POSTGRES_CHECK: &str = "crates/longshore/src/store/postgres/check.rs";
const POSTGRES_EVENTS: &str = "crates/longshore/src/store/postgres/events.rs";
const POSTGRES_FUNCTIONS: &str = "crates/longshore/migrations/postgres/functions.sql";
const POSTGRES_STEP_IN: &str = "crates/longshore/src/store/postgres/step_in.rs";
const POSTGRES_STEPS: &str = "crates/longshore/src/store/postgres/steps.rs";
const SQLITE_CHECK: &str = "crates/longshore/src/store/sqlite/check.rs";
const SQLITE_EVENTS: &str = "crates/longshore/src/store/sqlite/events.rs";
const SQLITE_OPERATE: &str = "crates/longshore/src/store/sqlite/operate.rs";
const SQLITE_SETTLE: &str = "crates/longshore/src/store/sqlite/settle.rs";
const SQLITE_STEPS: &str = "crates/longshore/src/store/sqlite/steps.rs";
const WAITS: &str = "crates/longshore/src/waits.rs";
const WORKER_CONTEXT: &str = "crates/longshore/src/worker/context.rs";
const WORKER_JOURNAL: &str = "crates/longshore/src/worker/journal.rs";
const WORKER_STEPS: &str = "crates/longshore/src/worker/steps.rs";

pub(super) const MUTANTS: &[Mutant] = &[
    // ---- the worker --------------------------------------------------------------
    Mutant {
        name: "worker: suspend a handler while a step runs",
        file: WORKER_JOURNAL,
        anchor: "async fn suspended(",
        find: "self.active_steps.load(Ordering::Acquire) == 0",
        replace: "self.active_steps.load(Ordering::Acquire) < 99",
        caught_by: &["steps::sqlite::a_running_step_delays_the_suspension"],
    },
    Mutant {
        name: "worker: allow a step name twice",
        file: WORKER_JOURNAL,
        anchor: "fn use_name(",
        find: ".insert(name.to_owned())",
        replace: ".insert(name.to_owned()) || true",
        caught_by: &["steps::sqlite::bad_steps_are_refused_and_store_nothing"],
    },
    Mutant {
        name: "worker: do not store that a wait timed out",
        file: WORKER_STEPS,
        anchor: "async fn wait(",
        find: "self.save_step(step, encode(name, &winner)?).await?;",
        replace: "if winner.event.is_some() { self.save_step(step, encode(name, &winner)?).await?; }",
        caught_by: &["step_events::sqlite::a_wait_that_times_out_stays_timed_out"],
    },
    Mutant {
        name: "worker: count the attempts of a job since its enqueue although a step was stored",
        file: WORKER_CONTEXT,
        anchor: "pub(super) fn number(",
        find: "self.journal.has_progressed()",
        replace: "false",
        caught_by: &["steps::sqlite::attempts_and_interruptions_count_since_the_last_step"],
    },
    Mutant {
        name: "worker: keep the deadline of a wait that has none any longer",
        file: WAITS,
        anchor: "fn decide(",
        find: "time.map(|time| earlier.unwrap_or(now + time))",
        replace: "earlier.or(time.map(|time| now + time))",
        caught_by: &["step_events::sqlite::a_deadline_can_be_added_and_removed_while_jobs_wait"],
    },
    Mutant {
        name: "worker: accept an event that came after the deadline",
        file: WAITS,
        anchor: "fn decide(",
        find: "event.emitted_at <= until",
        replace: "event.emitted_at <= until || true",
        caught_by: &["step_events::sqlite::an_event_after_the_deadline_is_too_late"],
    },
    Mutant {
        name: "worker: read an event without a payload as a timeout",
        file: WAITS,
        anchor: "fn into_payload(",
        find: "self.event.map(|_| self.payload.unwrap_or_default())",
        replace: "self.event.and(self.payload)",
        caught_by: &["step_events::sqlite::an_event_without_a_payload_stays_an_event"],
    },
    Mutant {
        name: "worker: repeat a step whose commit got no reply",
        file: WORKER_STEPS,
        anchor: "async fn work_in",
        find: "if self.is_stored(name).await",
        replace: "if self.is_stored(name).await && false",
        caught_by: &["dead_connections::postgres_only::a_step_whose_commit_gets_no_reply_is_not_repeated"],
    },
    // ---- the API -----------------------------------------------------------------
    Mutant {
        name: "api: accept a step whose name is stored with another value",
        file: API_STEPS,
        anchor: "fn check_repetition(",
        find: "if parse(value) == parse(&step.value) =>",
        replace: "if parse(value) == parse(&step.value) || true =>",
        caught_by: &["http::lease_steps::sqlite::a_step_of_an_http_worker_is_stored_once"],
    },
    Mutant {
        name: "api: let a token that is limited to queues wait for any event",
        file: API_STEPS,
        anchor: "let waits = checked_waits(body.waits)?;",
        find: "caller.may_use_all()?;",
        replace: "",
        caught_by: &["http::lease_steps::sqlite::a_token_limited_to_queues_waits_for_no_events"],
    },
    Mutant {
        name: "api: do not store what ended a wait",
        file: API_STEPS,
        anchor: "let waits = checked_waits(body.waits)?;",
        find: "over.push(NewStep { lease, name: name.clone(), value: encode(&winner)? });",
        replace: "",
        caught_by: &["http::lease_steps::sqlite::a_job_of_an_http_worker_waits_for_the_first_event"],
    },
    // ---- Postgres ----------------------------------------------------------------
    Mutant {
        name: "postgres: journal a step under a lost lease",
        file: POSTGRES_STEPS,
        anchor: "const SAVE_STEPS",
        find: "and i.lease_no = r.lease_no   -- fence: a newer lease owns the row",
        replace: "",
        caught_by: &["steps::postgres::a_stale_lease_journals_nothing"],
    },
    Mutant {
        name: "postgres: overwrite a step that is done",
        file: POSTGRES_STEPS,
        anchor: "const SAVE_STEPS",
        find: "where steps.value is null)   -- a step that is done keeps its value",
        replace: "where true)",
        caught_by: &["steps::postgres::a_repeated_save_keeps_the_first_value"],
    },
    Mutant {
        name: "postgres: count attempts since the enqueue although a step was stored",
        file: POSTGRES_STEPS,
        anchor: "const SAVE_STEPS",
        find: "set attempt = 1,",
        replace: "set attempt = r.attempt,",
        caught_by: &["steps::postgres::attempts_and_interruptions_count_since_the_last_step"],
    },
    Mutant {
        name: "postgres: do not look for an event that was emitted before the suspension",
        file: POSTGRES_EVENTS,
        anchor: "async fn is_any_emitted(",
        find: "fetch_one(&mut *tx.connection).await?)",
        replace: "fetch_one(&mut *tx.connection).await? && false)",
        caught_by: &["step_events::postgres::an_event_emitted_while_the_job_is_being_suspended_is_found"],
    },
    Mutant {
        name: "postgres: suspend a job without the lock on its events",
        file: POSTGRES_EVENTS,
        anchor: "async fn is_any_emitted(",
        find: "sqlx::query(tx.sql(LOCK_AWAITED)).bind(names).execute(&mut *tx.connection).await?;",
        replace: "let _ = LOCK_AWAITED;",
        caught_by: &["races::postgres::an_event_and_the_suspensions_that_wait_for_it_never_miss_each_other"],
    },
    Mutant {
        name: "postgres: deliver an event without the lock on its name",
        file: POSTGRES_EVENTS,
        anchor: "const LOCK_DELIVERED",
        find: "pg_advisory_xact_lock(hashtextextended('longshore.events:' || name, 0))",
        replace: "hashtextextended('longshore.events:' || name, 0)",
        caught_by: &["races::postgres::an_event_and_the_suspensions_that_wait_for_it_never_miss_each_other"],
    },
    Mutant {
        name: "postgres: wake a job for a wait that an earlier lease left behind",
        file: POSTGRES_EVENTS,
        anchor: "const WAKE",
        find: "and w.lease_no = a.lease_no\n                  and w.held",
        replace: "and w.held",
        caught_by: &["step_events::postgres::a_wait_that_was_left_behind_wakes_nothing"],
    },
    Mutant {
        name: "postgres: forget an event whose job is locked",
        file: POSTGRES_EVENTS,
        anchor: "const WAKE",
        find: "and e.name not in (select event from locked)",
        replace: "",
        caught_by: &["step_events::postgres_only::an_event_whose_job_is_locked_is_delivered_later"],
    },
    Mutant {
        name: "postgres: replace an expired event that a woken job has to read",
        file: POSTGRES_EVENTS,
        anchor: "macro_rules! is_expired",
        find: "where w.event = e.name\n                      and w.woken",
        replace: "where false",
        caught_by: &["step_events::postgres::an_expired_event_that_a_woken_job_has_to_read_is_not_replaced"],
    },
    Mutant {
        name: "postgres: find an expired event",
        file: POSTGRES_EVENTS,
        anchor: "const EVENTS",
        find: "and not ",
        replace: "and true or not ",
        caught_by: &["step_events::postgres::an_expired_event_counts_as_absent"],
    },
    Mutant {
        name: "wake: do not notify of an event that was emitted in SQL",
        file: POSTGRES_FUNCTIONS,
        anchor: "-- Without a payload, so that many events",
        find: "perform pg_notify('longshore.emit', '');",
        replace: "",
        caught_by: &["wake_paths::postgres_only::an_event_emitted_in_sql_starts_the_job_at_once"],
    },
    Mutant {
        name: "postgres: remove events that were not delivered",
        file: POSTGRES_EVENTS,
        anchor: "macro_rules! is_expired",
        find: "and not e.fresh",
        replace: "",
        caught_by: &["step_events::postgres::old_events_are_removed_and_undelivered_ones_are_kept"],
    },
    Mutant {
        name: "postgres: run a step in a transaction under a lost lease",
        file: POSTGRES_STEP_IN,
        anchor: "impl StepConnection",
        find: "(held == Fenced::Held).then_some",
        replace: "(held == held).then_some",
        caught_by: &[
            "step_transactions::postgres_only::a_step_in_a_transaction_under_a_lost_lease_rolls_everything_back",
        ],
    },
    Mutant {
        name: "postgres: repair an event that was delivered to all jobs",
        file: POSTGRES_CHECK,
        anchor: "macro_rules! missed_delivery",
        find: "and not s.woken",
        replace: "",
        caught_by: &["corrupt::postgres::a_repair_delivers_an_event_that_jobs_still_wait_for"],
    },
    // ---- SQLite ------------------------------------------------------------------
    Mutant {
        name: "sqlite: journal a step under a lost lease",
        file: SQLITE_STEPS,
        anchor: "fn save_steps(",
        find: "and lease_no = ?2   -- fence: a newer lease owns the row",
        replace: "",
        caught_by: &["steps::sqlite::a_stale_lease_journals_nothing"],
    },
    Mutant {
        name: "sqlite: overwrite a step that is done",
        file: SQLITE_STEPS,
        anchor: "fn save_steps(",
        find: "where value is null",
        replace: "where true",
        caught_by: &["steps::sqlite::a_repeated_save_keeps_the_first_value"],
    },
    Mutant {
        name: "sqlite: do not look for an event that was emitted before the suspension",
        file: SQLITE_SETTLE,
        anchor: "fn end_with_more(",
        find: "if is_emitted {",
        replace: "if is_emitted && false {",
        caught_by: &["step_events::sqlite::an_event_emitted_while_the_job_is_being_suspended_is_found"],
    },
    Mutant {
        name: "sqlite: wake a job for a wait that an earlier lease left behind",
        file: SQLITE_OPERATE,
        anchor: "fn wake(",
        find: "if seen.lease_no == lease_no",
        replace: "if seen.lease_no >= lease_no",
        caught_by: &["step_events::sqlite::a_wait_that_was_left_behind_wakes_nothing"],
    },
    Mutant {
        name: "sqlite: repair an event that was delivered to all jobs",
        file: SQLITE_CHECK,
        anchor: "macro_rules! missed_delivery",
        find: "and s.woken = 0",
        replace: "",
        caught_by: &["corrupt::sqlite::a_repair_delivers_an_event_that_jobs_still_wait_for"],
    },
    Mutant {
        name: "sqlite: replace an expired event that a woken job has to read",
        file: SQLITE_EVENTS,
        anchor: "macro_rules! is_expired",
        find: "and waits.woken = 1",
        replace: "and waits.woken = 2",
        caught_by: &["step_events::sqlite::an_expired_event_that_a_woken_job_has_to_read_is_not_replaced"],
    },
];
