//! Moves of jobs between tables, for which each engine has its own statements: sets on Postgres, rows on SQLite. The
//! procedures that use them are written once.

use async_trait::async_trait;

use super::db::Sql;
use crate::rules::enqueue::{EnqueuedBatch, ValidJob};

#[async_trait]
pub(crate) trait Moves: Send {
    /// Stores jobs, as [`enqueue`](super::Store::enqueue) does.
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch>;
}
