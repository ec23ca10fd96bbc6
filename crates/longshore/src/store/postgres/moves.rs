//! Moves of jobs between tables, on Postgres.

use async_trait::async_trait;

use super::enqueue::insert_any;
use super::tx::Tx;
use crate::rules::enqueue::{EnqueuedBatch, ValidJob};
use crate::store::db::Sql;
use crate::store::moves::Moves;

#[async_trait]
impl Moves for Tx<'_> {
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
        Ok(insert_any(self, jobs).await?)
    }
}
