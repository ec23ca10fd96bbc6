//! The worker runtime: claims due jobs, runs their handlers, settles the attempts, and
//! does the queue's upkeep (recovery, schedules, retention).
//!
//! ```
//! use longshore::worker::{Context, Failure, Worker};
//! use longshore::{Client, NewJob};
//!
//! async fn greet(name: String, _ctx: Context) -> Result<(), Failure> {
//!     println!("hello, {name}");
//!     Ok(())
//! }
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let client = Client::connect("sqlite::memory:").await?;
//! client.migrate().await?;
//! client.enqueue(NewJob::new("greet", "Ada")).await?;
//! let done = Worker::builder(client).function("greet", greet).build()?.drain().await?;
//! assert_eq!(done.succeeded, 1);
//! # Ok::<(), longshore::Error>(())
//! # }).unwrap();
//! ```
//!
//! # Module map
//!
//! | Module | Owns |
//! |---|---|
//! | `builder` | [`Builder`]: collects handlers, state, hooks, schedules and settings, and checks them |
//! | `settings` | [`Settings`]: defaults and validation |
//! | `handler` | what users write: typed jobs, functions, executors, batches, failures |
//! | `registry` | which handler runs which kind |
//! | `supervise` | starting the tasks below and stopping them in order |
//! | `claim`, `claim_loop` | how many jobs to claim and of which kinds; waiting for the next claim |
//! | `queues`, `ahead`, `next_claim`, `lost_reply` | parts of that: the queues, the size of the buffer, the time of the next claim, claims whose reply was lost |
//! | `run_times` | how long the attempts of each kind take |
//! | `execute` | one attempt: timeout, panic, stop |
//! | `context` | what a handler receives: its job, state, stop token, checkpoints |
//! | `steps`, `journal` | durable steps, sleeps and waits; what is stored of them, and suspending a handler |
//! | `flows` | results of other tasks of a flow; children of a job |
//! | `settle` | storing how attempts ended, in batches |
//! | `progress` | storing progress reports, in batches |
//! | `heartbeat` | heartbeats and the self-stop, on their own thread |
//! | `cancel` | stopping cancelled jobs as soon as the worker is notified |
//! | `upkeep` | recovery, schedules, events, retention, tallies, gauges |
//! | `clock_steps` | whether the database's clock was moved since the last sweep |
//! | `hooks` | the application's hooks, and how they are called |
//! | `signals` | SIGINT and SIGTERM |
//! | `metrics` | counters, histograms and gauges |
//! | `shared` | state that the tasks share: leases, buffer, contact, phase |

mod ahead;
mod builder;
mod cancel;
mod claim;
mod claim_loop;
mod clock_steps;
mod context;
mod execute;
mod flows;
mod handler;
mod heartbeat;
mod hooks;
mod journal;
mod lost_reply;
mod metrics;
mod next_claim;
mod progress;
mod queues;
mod registry;
mod run_times;
mod settings;
mod settle;
mod shared;
mod signals;
mod steps;
mod supervise;
mod upkeep;

pub use builder::Builder;
pub use context::{Context, StopReason};
pub use flows::Children;
pub use handler::{Batched, Executor, Failure, Job};
pub use hooks::Hooks;
pub use settings::{RecoverySettings, Settings};
pub use signals::Signals;
pub use steps::{EventWait, First, Wait};
pub use supervise::{RunningWorker, Stopper, Summary, Worker};
