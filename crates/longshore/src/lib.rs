//! A background job queue on Postgres and SQLite: what was asked is written
//! once, where a job stands is which table holds its id, and nothing is lost.
//!
//! # Map, in reading order
//!
//! | Module | Owns |
//! |---|---|
//! | [`job`] | ids, the words for where a job stands, the record people see |
//! | [`lifecycle`] | the state machine: every next-state rule, pure |
//! | [`retry`] | how long a failed attempt waits, pure |
//! | [`enqueue`] | what a caller asks for, its checks, group commit |
//! | [`client`] | the one door: enqueue, settle, cancel, retry, inspect |
//! | [`recovery`] | jobs of dead workers |
//! | `cron` | schedules: when they tick, and one job for each tick |
//! | `worker` | the runtime: claim, execute, settle, heartbeat, upkeep |
//! | `api` | the HTTP API as a router, and a server for it |
//! | `testing` | a queue in memory for the tests of your own program |
//! | [`store`] | the storage contract and its engines |
//! | [`error`] | the one error type |
//!
//! # Features
//!
//! `postgres` (default) and `sqlite` choose engines; `worker` (default) brings
//! the runtime and schedules; `api` (default) the HTTP API, `swagger` pages to read
//! it by; `otel` carries trace context from enqueue to run;
//! `tls` encrypts connections to Postgres.
#![cfg_attr(test, allow(clippy::unwrap_used))]
// Without an engine nothing reads what the engines would store.
#![cfg_attr(not(any(feature = "postgres", feature = "sqlite")), allow(dead_code, unused_imports))]

#[cfg(feature = "api")]
pub mod api;
pub mod client;
#[cfg(feature = "cron")]
pub mod cron;
pub mod enqueue;
pub mod error;
pub mod job;
#[cfg(feature = "schema")]
#[path = "json_schema/enabled.rs"]
mod json_schema;
#[cfg(not(feature = "schema"))]
#[path = "json_schema/disabled.rs"]
mod json_schema;
#[doc(hidden)]
pub mod keys;
pub mod lifecycle;
pub mod recovery;
pub mod retry;
pub mod store;
#[cfg(all(feature = "worker", feature = "sqlite"))]
pub mod testing;
#[cfg(feature = "otel")]
#[path = "trace/otel.rs"]
mod trace;
#[cfg(not(feature = "otel"))]
#[path = "trace/none.rs"]
mod trace;
mod wake;
#[cfg(feature = "worker")]
pub mod worker;

pub use client::{CallerTransaction, Cancelled, Client, Enqueueing, Redriven, Report, UnknownKinds};
#[cfg(feature = "cron")]
pub use cron::{CronLine, FiredReport, Missed, NewSchedule};
pub use enqueue::{Edit, Enqueued, EnqueuedAs, NewJob, UniqueMode, ValidJob};
pub use error::{Error, Result};
pub use job::{AttemptEnd, AttemptRecord, JobId, JobRecord, Outcome, Status, WorkerId};
pub use lifecycle::{Ending, Interruption, When};
pub use recovery::{
    Decision, INFRASTRUCTURE_RESILIENT_FLAG, RecoveryHook, SweepMode, SweepOptions, SweepReport,
};
pub use retry::RetryPolicy;
#[cfg(feature = "worker")]
pub use worker::{Context, Failure, Job, Worker};

/// The documents' examples are compiled and run.
#[cfg(all(doctest, feature = "sqlite", feature = "postgres", feature = "worker"))]
mod documents {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guides/first-job.md")]
    struct FirstJobGuide;
    #[doc = include_str!("../../../docs/guides/retries.md")]
    struct RetriesGuide;
    #[doc = include_str!("../../../docs/guides/recovery.md")]
    struct RecoveryGuide;
    #[doc = include_str!("../../../docs/guides/testing.md")]
    struct TestingGuide;
    #[doc = include_str!("../../../docs/guides/enqueue.md")]
    struct EnqueueGuide;
    #[doc = include_str!("../../../docs/guides/axum.md")]
    struct AxumGuide;
    #[doc = include_str!("../../../docs/guides/cron.md")]
    struct CronGuide;
    #[cfg(feature = "api")]
    #[doc = include_str!("../../../docs/guides/api.md")]
    struct ApiGuide;
}
