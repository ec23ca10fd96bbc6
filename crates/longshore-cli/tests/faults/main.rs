//! EventKind happens when processes die, stand still, are told to go, lose the
//! database, or the database itself goes: real processes, real signals, and for
//! every case a schema or a file of its own.
//!
//! Cases wait for what the database or the event log says, never for a time to
//! have passed. Where a case asserts that something happened soon enough, the
//! bound leaves room for a busy machine.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod concurrency;
mod crash;
mod cron;
mod fleet;
mod outage;
mod pause;
mod postgres_server;
mod proxy;
mod python;
mod shutdown;
mod unresponsive;
mod worker;

/// Not a case: what the cases' worker processes run. They are this program,
/// started anew.
#[test]
fn worker_process() {
    worker::run_if_requested();
}
