//! Moves of jobs between tables, for which each engine has its own statements: sets on Postgres, rows on SQLite. The
//! procedures that use them are written once.

use async_trait::async_trait;

use super::db::Sql;
use super::events::Woken;
use crate::enqueue::{EnqueuedBatch, ValidJob};

#[async_trait]
pub(crate) trait Moves: Send {
    /// Stores jobs, as [`enqueue`](super::Store::enqueue) does.
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch>;

    /// Makes the jobs due that wait for these events, and marks up to `limit` waits as woken. A wait whose job has moved on
    /// wakes nothing. Waits that another transaction has locked, or whose jobs are locked, stay as they are.
    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken>;
}
