//! Fault tests: worker processes that crash, pause, shut down or lose the database,
//! and a database that goes away. They use real processes and real signals, and
//! each test has its own schema or file.
//!
//! Tests wait for a state in the database or an entry in the event log, and open a gate
//! when handlers may end. No test asserts that something happened soon enough: a busy machine
//! has no such time. Workers count as dead after a minute, and [`Fleet::count_as_dead`]
//! shortens that for a process that was killed or paused. The few tests of pauses and
//! outages use seconds, which is much longer than a busy machine stops a process.
//!
//! [`Fleet::count_as_dead`]: fleet::Fleet::count_as_dead
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod concurrency;
mod crash;
mod cron;
mod failover;
mod fleet;
mod flows;
#[path = "../../../longshore/tests/missing/mod.rs"]
mod missing;
mod outage;
mod pause;
mod postgres_server;
mod producer;
mod proxy;
mod python;
mod relocation;
mod shutdown;
mod unresponsive;
mod worker;

/// Not a test, but the entry point of the worker processes: each of them is this
/// program, started again with a configuration in its environment.
#[test]
fn worker_process() {
    worker::run_if_requested();
}
