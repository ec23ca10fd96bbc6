//! Moves of jobs between tables, for which each engine has its own statements: sets on Postgres, rows on SQLite. The
//! procedures that use them are written once. Also the few other parts of procedures that are one statement on Postgres
//! and several on SQLite.

use async_trait::async_trait;

use super::check::Dialect;
use super::db::Sql;
use super::events::Woken;
use super::{Beat, Claimed, Durability, Fenced, Lease, LiveLease, NewStep};
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::{EnqueuedBatch, ValidEdit, ValidJob};
use crate::rules::lifecycle::{Finished, Waiting};

#[async_trait]
pub(crate) trait Moves: Send {
    /// Stores jobs, as [`enqueue`](super::Enqueue::enqueue) does.
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch>;

    /// Makes the jobs due that wait for these events, and marks up to `limit` waits as woken. A wait whose job has moved on
    /// wakes nothing. Waits that another transaction has locked, or whose jobs are locked, stay as they are.
    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken>;

    /// Cancels a job that waits as `seen`. Returns false if it does not.
    async fn cancel_waiting(&mut self, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool>;

    /// Makes a job due that waits as `seen`. Returns false if it does not.
    async fn run_now(&mut self, id: JobId, seen: &Waiting) -> Sql<bool>;

    /// Edits a job that waits as `seen`. Returns false if it does not.
    async fn rewrite(&mut self, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool>;

    /// Returns a job to the queue that finished as `seen`, with a fresh budget. It owns its unique key. Returns false if
    /// it is not finished like that.
    async fn reopen_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool>;

    /// Removes a job that finished as `seen`. Returns false if it is not finished like that.
    async fn remove_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool>;

    /// Journals steps, as [`save_steps`](super::Steps::save_steps) does.
    async fn save_steps(&mut self, steps: &[NewStep]) -> Sql<Vec<Fenced>>;

    /// Reads the claims behind leases, as [`claims`](super::Leases::claims) does.
    async fn claims(&mut self, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>>;

    /// Refreshes a worker's heartbeat, as [`beat`](super::Workers::beat) does.
    async fn beat(&mut self, worker: WorkerId, held: &[Lease]) -> Sql<Beat>;

    /// Refreshes a worker's heartbeat, as [`beat_and_list`](super::Workers::beat_and_list) does.
    async fn beat_and_list(&mut self, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>>;

    /// The engine's words for the statements of a check.
    fn dialect(&mut self) -> Sql<Dialect>;

    /// Runs a statement of a check, and returns the values of its rows as text.
    async fn texts(&mut self, statement: String) -> Sql<Vec<Vec<String>>>;

    /// Reads the settings of the database, as [`durability`](super::Checks::durability) does.
    async fn durability(&mut self) -> Sql<Durability>;
}
