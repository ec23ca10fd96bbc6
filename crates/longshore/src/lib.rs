//! A background job queue on Postgres and SQLite.
//!
//! A program enqueues jobs through a [`Client`], and workers run them. An enqueue that
//! returned is never lost: a job runs at least once, and its result is stored exactly
//! once. Everything that most programs need is at the root of the crate.
//!
//! ```
//! # #[cfg(all(feature = "sqlite", feature = "worker"))]
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
//! use longshore::{Client, Context, Failure, NewJob, Worker};
//!
//! async fn greet(name: String, _: Context) -> Result<(), Failure> {
//!     println!("hello, {name}");
//!     Ok(())
//! }
//!
//! let client = Client::connect("sqlite::memory:").await?;
//! client.migrate().await?;
//! client.enqueue(NewJob::new("greet", "Ada")).await?;
//! let done = Worker::builder(client).function("greet", greet).build()?.drain().await?;
//! assert_eq!(done.succeeded, 1);
//! # Ok(()) }
//! # #[cfg(not(all(feature = "sqlite", feature = "worker")))] fn main() {}
//! ```
//!
//! # Modules
//!
//! | Module | Owns |
//! |---|---|
//! | `worker` | the runtime: claim, execute, settle, heartbeat, upkeep |
//! | `cron` | schedules, and one job per tick |
//! | `api` | the HTTP API as a router, and a server for it; with the feature `dashboard` also pages for people |
//! | `builtin` | the built-in kinds: email, images, summaries, webhooks; their simulator |
//! | `testing` | a queue in memory for the tests of your own program |
//!
//! Inside the crate, the layers from below: `rules` (every rule, pure) with `job` (ids, statuses, records) and `error`,
//! `store` (the storage contract, its procedures and its two engines), `client` (the entry point), and on top the
//! modules above. Each layer uses only those below it. `ARCHITECTURE.md` explains how they work together.
//!
//! # Features
//!
//! | Feature | Adds |
//! |---|---|
//! | `postgres` (default) | the Postgres engine |
//! | `sqlite` | the embedded SQLite engine |
//! | `worker` (default) | the worker runtime |
//! | `api` (default) | the HTTP API |
//! | `swagger` | Swagger UI at `/docs` |
//! | `dashboard` | the dashboard at `/ui` |
//! | `cron` | schedules; part of `worker` and `api` |
//! | `schema` | checks payloads against JSON Schemas; part of `api` |
//! | `metrics` | metrics through the `metrics` crate; part of `worker` and `api` |
//! | `builtin` | the built-in kinds and their simulator |
//! | `otel` | propagates the trace context from enqueue to run |
//! | `tls` | encrypts connections to Postgres |
#![cfg_attr(test, allow(clippy::unwrap_used))]
// Without an engine feature, code that only the engines use is dead.
#![cfg_attr(not(any(feature = "postgres", feature = "sqlite")), allow(dead_code, unused_imports))]

#[cfg(feature = "api")]
pub mod api;
#[cfg(feature = "builtin")]
pub mod builtin;
#[cfg(any(feature = "api", feature = "worker"))]
mod catch_panic;
mod client;
#[cfg(feature = "dashboard")]
mod dashboard;
mod error;
#[doc(hidden)]
mod job;
#[cfg(feature = "schema")]
#[path = "json_schema/enabled.rs"]
mod json_schema;
#[cfg(not(feature = "schema"))]
#[path = "json_schema/disabled.rs"]
mod json_schema;
#[doc(hidden)]
pub mod nearest;
#[cfg(any(feature = "api", feature = "builtin"))]
mod network;
#[cfg(any(feature = "builtin", feature = "sqlite"))]
mod private_file;
#[doc(hidden)]
pub mod rules;
#[doc(hidden)]
pub mod store;
#[cfg(all(feature = "worker", any(feature = "postgres", feature = "sqlite")))]
pub mod testing;
#[cfg(feature = "otel")]
#[path = "trace/otel.rs"]
mod trace;
#[cfg(not(feature = "otel"))]
#[path = "trace/none.rs"]
mod trace;
#[cfg(feature = "worker")]
pub mod worker;

#[doc(hidden)]
pub use client::Report;
pub use client::graph::{Flow, Task, fan_out, task};
pub use client::recovery::{Decision, InterruptedJob, RecoveryHook, SweepMode, SweepOptions, SweepReport};
#[cfg(feature = "cron")]
pub use client::schedules::{self as cron, CronLine, FiredReport, Missed, NewSchedule, Undeclared};
pub use client::{
    Cancelled, CancelledFlow, CheckPayload, Client, Enqueueing, Redriven, RetriedFlow, UnknownKinds,
};
pub use error::{Error, Result};
pub use job::{AttemptEnd, AttemptRecord, FlowId, JobId, JobRecord, OperationId, Outcome, Status, WorkerId};
#[cfg(any(feature = "api", feature = "builtin"))]
pub use network::Network;
pub use rules::enqueue::{
    ALL_QUEUES, DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, DEFAULT_TIMEOUT, Edit, Enqueued, EnqueuedAs, MAX_DEPTH,
    MAX_KEY, MAX_NAME, MAX_PAYLOAD, NewJob, UniqueMode, ValidJob,
};
pub use rules::fingerprint::Fingerprint;
pub use rules::flow::Condition;
#[doc(hidden)]
pub use rules::lifecycle::Ending;
pub use rules::lifecycle::{Interruption, When};
pub use rules::retry::{MAX_DELAY, RetryPolicy};
pub use rules::turns::Rate;
pub use store::{
    Action, CallerTransaction, CheckReport, Count, CronOrigin, DeadFilter, Durability, Emitted, EventRecord,
    FailureFilter, FailureRecord, FlowFilter, FlowRecord, FlowStatus, FoundGroup, GroupChange, GroupRecord,
    INFRASTRUCTURE_RESILIENT_FLAG, Interrupted, Interruptor, JobFilter, KindRecord, Lease, ListFilter,
    Measured, Migrated, NewKind, NewOperation, NewToken, OperationFilter, OperationRecord, OperationState,
    Page, Payloads, Problem, QueueRecord, Retention, SCHEMA_VERSION, Schedule, Scope, StepRecord, StepState,
    SweepScope, Tallied, TaskRecord, TokenRecord, What, WorkerRecord,
};
#[cfg(feature = "worker")]
pub use worker::{Context, Failure, Job, Worker};

/// Compiles and runs the examples in README.md and the guides.
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
    #[doc = include_str!("../../../docs/guides/limits.md")]
    struct LimitsGuide;
    #[doc = include_str!("../../../docs/guides/workflows.md")]
    struct WorkflowsGuide;
    #[doc = include_str!("../../../docs/guides/durable-steps.md")]
    struct DurableStepsGuide;
    #[doc = include_str!("../../../docs/guides/waiting.md")]
    struct WaitingGuide;
    #[doc = include_str!("../../../docs/guides/recipes.md")]
    struct RecipesGuide;
    #[cfg(feature = "builtin")]
    #[doc = include_str!("../../../docs/guides/builtin-kinds.md")]
    struct BuiltinKindsGuide;
    #[cfg(feature = "dashboard")]
    #[doc = include_str!("../../../docs/guides/dashboard.md")]
    struct DashboardGuide;
    #[cfg(feature = "api")]
    #[doc = include_str!("../../../docs/guides/api.md")]
    struct ApiGuide;
    #[cfg(feature = "api")]
    #[doc = include_str!("../../../docs/guides/protocol.md")]
    struct ProtocolGuide;
}

/// A future of any type. An async function is compiled in the crate that awaits it, together with
/// everything that only it calls. A function that returns this type is compiled in this crate.
pub(crate) type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;
