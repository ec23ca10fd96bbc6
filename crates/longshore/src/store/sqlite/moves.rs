//! Moves of jobs between tables, on SQLite.

use async_trait::async_trait;

use super::db::Rows;
use super::enqueue::enqueue;
use super::{check, events, lease, operate, steps, workers};
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::{EnqueuedBatch, ValidEdit, ValidJob};
use crate::rules::lifecycle::{Finished, Waiting};
use crate::store::check::Dialect;
use crate::store::db::Sql;
use crate::store::events::Woken;
use crate::store::moves::Moves;
use crate::store::{Beat, Claimed, Durability, Fenced, Lease, LiveLease, NewStep};

#[async_trait]
impl Moves for Rows<'_> {
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
        Ok(enqueue(&self.tx()?, jobs)?)
    }

    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken> {
        Ok(events::wake(&self.tx()?, events, limit)?)
    }

    async fn cancel_waiting(&mut self, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool> {
        Ok(operate::cancel(&self.tx()?, id, seen, attempts)?)
    }

    async fn run_now(&mut self, id: JobId, seen: &Waiting) -> Sql<bool> {
        Ok(operate::run_now(&self.tx()?, id, seen)?)
    }

    async fn rewrite(&mut self, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool> {
        Ok(operate::rewrite(&self.tx()?, id, seen, edit)?)
    }

    async fn reopen_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::reopen(&self.tx()?, id, seen)?)
    }

    async fn remove_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::remove(&self.tx()?, id, seen)?)
    }

    async fn save_steps(&mut self, steps: &[NewStep]) -> Sql<Vec<Fenced>> {
        Ok(steps::save_steps(&self.tx()?, steps)?)
    }

    async fn claims(&mut self, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
        Ok(lease::claims(&self.tx()?, leases)?)
    }

    async fn beat(&mut self, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
        Ok(workers::beat(&self.tx()?, worker, held)?)
    }

    async fn beat_and_list(&mut self, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>> {
        Ok(workers::beat_and_list(&self.tx()?, worker)?)
    }

    fn dialect(&mut self) -> Sql<Dialect> {
        Ok(check::dialect(&self.tx()?)?)
    }

    async fn texts(&mut self, statement: String) -> Sql<Vec<Vec<String>>> {
        Ok(check::texts(&self.tx()?, &statement)?)
    }

    async fn durability(&mut self) -> Sql<Durability> {
        // The engine itself sets `synchronous = full` on every connection, so nothing can be relaxed.
        Ok(Durability::default())
    }
}
