//! Moves of jobs between tables, on Postgres.

use async_trait::async_trait;

use super::enqueue::insert_any;
use super::tx::Tx;
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
impl Moves for Tx<'_> {
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
        Ok(insert_any(self, jobs).await?)
    }

    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken> {
        Ok(events::wake(self, events, limit).await?)
    }

    async fn cancel_waiting(&mut self, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool> {
        Ok(operate::cancel(self, id, seen, attempts).await?)
    }

    async fn run_now(&mut self, id: JobId, seen: &Waiting) -> Sql<bool> {
        Ok(operate::run_now(self, id, seen).await?)
    }

    async fn rewrite(&mut self, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool> {
        Ok(operate::rewrite(self, id, seen, edit).await?)
    }

    async fn reopen_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::reopen(self, id, seen).await?)
    }

    async fn remove_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::remove(self, id, seen).await?)
    }

    async fn save_steps(&mut self, steps: &[NewStep]) -> Sql<Vec<Fenced>> {
        Ok(steps::save_steps(self, steps).await?)
    }

    async fn claims(&mut self, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
        Ok(lease::claims(self, leases).await?)
    }

    async fn beat(&mut self, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
        Ok(workers::beat(self, worker, held).await?)
    }

    async fn beat_and_list(&mut self, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>> {
        Ok(workers::beat_and_list(self, worker).await?)
    }

    fn dialect(&mut self) -> Sql<Dialect> {
        Ok(check::dialect(self))
    }

    async fn texts(&mut self, statement: String) -> Sql<Vec<Vec<String>>> {
        Ok(check::texts(self, statement).await?)
    }

    async fn durability(&mut self) -> Sql<Durability> {
        Ok(check::durability(self).await?)
    }
}
