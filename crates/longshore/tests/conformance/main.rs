//! The conformance suite: the behaviour that both engines must have.
//!
//! A case is an `async fn` that takes a [`Fixture`](fixture::Fixture) and does not
//! depend on the engine. Each module registers its cases with `cases!`, which
//! makes two tests of each: `module::postgres::case` and `module::sqlite::case`.
//! A case that is not registered is dead code, so the compiler warns about it.
//! Run the suite with `cargo xtask test`.

/// Registers the cases of a module: one test per case and engine.
///
/// Cases for one engine only go into a second invocation that starts with
/// `only on postgres:` or `only on sqlite:`.
macro_rules! cases {
    (only on postgres: $($case:ident,)+) => {
        cases!(@tests postgres_only Postgres $($case)+);
    };
    (only on sqlite: $($case:ident,)+) => {
        cases!(@tests sqlite_only Sqlite $($case)+);
    };
    (@tests $tests:ident $engine:ident $($case:ident)+) => {
        mod $tests {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    crate::fixture::run(crate::fixture::Engine::$engine, super::$case).await;
                }
            )+
        }
    };
    ($($case:ident,)+) => {
        cases!(@tests postgres Postgres $($case)+);
        cases!(@tests sqlite Sqlite $($case)+);
    };
}

mod cancel;
mod cancel_notices;
mod check;
mod check_flows;
mod claim;
mod claim_ahead;
mod clock_steps;
mod compare;
mod corrupt;
mod counts;
mod cursor;
mod dead_connections;
mod enqueue;
mod failures;
mod fence;
mod fixture;
mod flow_children;
mod flow_operations;
mod flow_races;
mod flow_returns;
mod flows;
mod group_limits;
mod groups;
mod history;
mod hooks;
mod http;
mod input;
mod inspect;
mod isolation;
mod job_log;
mod jobs_ahead;
mod key_rules;
mod keys;
mod kinds;
mod limits;
mod locked_rows;
mod locks;
mod migrate;
#[path = "../missing/mod.rs"]
mod missing;
mod operate;
mod operations;
mod payloads;
mod pgbouncer;
mod quarantine;
mod races;
mod random;
mod random_flows;
mod random_operations;
mod recovery;
mod retention;
mod schedules;
mod settle;
mod settle_by_lease;
mod sql;
mod step_events;
mod step_transactions;
mod steps;
mod testing;
mod tokens;
mod transactions;
mod transitions;
mod wake;
mod wake_paths;
mod worker;
mod worker_faults;
mod worker_metrics;
mod worker_stop;
mod workers;
