//! Moves of jobs between tables, on SQLite.

use async_trait::async_trait;

use super::db::Rows;
use super::enqueue::enqueue;
use crate::rules::enqueue::{EnqueuedBatch, ValidJob};
use crate::store::db::Sql;
use crate::store::moves::Moves;

#[async_trait]
impl Moves for Rows<'_> {
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
        Ok(enqueue(&self.tx()?, jobs)?)
    }
}
