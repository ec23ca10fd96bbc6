//! A background job queue on Postgres and SQLite.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod enqueue;
pub mod error;
pub mod job;
pub mod lifecycle;
pub mod retry;
pub mod store;

pub use enqueue::{Edit, NewJob};
pub use error::{Error, Result};
pub use retry::RetryPolicy;
