//! Every rule, pure: what may happen to a job, a key, a group, a flow or a schedule, and what a caller may
//! request. The functions here read no clock, except for the id of a new job, and no database. The client and
//! the store call them, and the store stores what they decide.
//!
//! | Module | Decides |
//! |---|---|
//! | `lifecycle` | the next state of a job |
//! | `enqueue` | which requests are accepted, and the job that is made from one |
//! | `keys` | what an enqueue does when a key belongs to another job |
//! | `retry` | when a failed job runs again |
//! | `flow` | what happens to the members of a flow when others end |
//! | `turns` | how many jobs of a group may start, and when it is the group's turn again |
//! | `waits` | what ended a wait of a durable step |
//! | `fingerprint` | which failures belong to one error group |
//! | `schedules` | when a cron line ticks, and which missed ticks get a job |

pub(crate) mod enqueue;
pub(crate) mod fingerprint;
pub mod flow;
pub mod keys;
pub mod lifecycle;
pub(crate) mod retry;
#[cfg(feature = "cron")]
pub(crate) mod schedules;
pub(crate) mod turns;
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) mod waits;
