//! What each engine does in its own way for the procedures that are written once: moves of jobs between
//! tables (sets of rows on Postgres, one row at a time on SQLite), and the few other parts that are one
//! statement on Postgres and several on SQLite.

use async_trait::async_trait;
use uuid::Uuid;

use super::advance::{EndedParent, LockedFlows, MadeDue, StoredChange};
use super::check::Dialect;
use super::db::Sql;
use super::events::Woken;
use super::operate_flows::ReopenedMembers;
use super::{Beat, Claimed, Durability, Fenced, Lease, LiveLease, NewLink, NewMember, NewStep};
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::{EnqueuedBatch, ValidEdit, ValidJob};
use crate::rules::flow::Reopened;
use crate::rules::lifecycle::{Finished, Waiting};

#[async_trait]
pub(crate) trait Moves: Send {
    /// Stores jobs, as [`enqueue`](super::Enqueue::enqueue) does.
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch>;

    /// Makes the jobs due that wait for these events, and marks up to `limit` waits as woken. If the job of a
    /// wait no longer waits, only the wait is marked. Skips waits and jobs that another transaction has
    /// locked.
    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken>;

    /// Cancels a waiting job. Changes nothing and returns false if its state is no longer `seen`.
    async fn cancel_waiting(&mut self, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool>;

    /// Makes a waiting job due. Changes nothing and returns false if its state is no longer `seen`.
    async fn run_now(&mut self, id: JobId, seen: &Waiting) -> Sql<bool>;

    /// Edits a waiting job. Changes nothing and returns false if its state is no longer `seen`.
    async fn rewrite(&mut self, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool>;

    /// Returns a finished job to the queue, with a fresh budget. The caller has given it its unique key.
    /// Changes nothing and returns false if its state is no longer `seen`.
    async fn reopen_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool>;

    /// Removes a finished job. Changes nothing and returns false if its state is no longer `seen`.
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

    // ---- flows ------------------------------------------------------------

    /// Stores members of a flow, or callbacks (`None`).
    async fn insert_members(&mut self, flow: Option<FlowId>, members: &[NewMember]) -> Sql<()>;

    async fn insert_links(&mut self, links: &[NewLink]) -> Sql<()>;

    /// Returns changes of these flows, oldest first. Of flows without a reopened member: the first `limit`.
    /// Of flows with one: all changes up to the `limit`-th reopening, because
    /// [`pick`](crate::rules::flow::pick) follows reopenings before ends.
    async fn changes(&mut self, flows: &[Uuid], limit: u32) -> Sql<Vec<StoredChange>>;

    /// Closes up to `limit` open links of parents that have ended. Returns the links: parent and child.
    async fn close_links(&mut self, parents: &[EndedParent], limit: usize) -> Sql<Vec<(Uuid, Uuid)>>;

    /// Opens up to `limit` closed links of parents that were reopened. Returns the links: parent and child.
    async fn open_links(&mut self, parents: &[Uuid], limit: usize) -> Sql<Vec<(Uuid, Uuid)>>;

    /// Lets held jobs start. Skips locked jobs.
    async fn make_due(&mut self, jobs: &[Uuid]) -> Sql<MadeDue>;

    /// Ends waiting jobs as cancelled, whatever they wait for. They do not count as failures. Skips locked
    /// jobs. Returns the jobs that it ended.
    async fn end_waiting(&mut self, jobs: &[Uuid], reasons: &[String]) -> Sql<Vec<Uuid>>;

    /// Moves finished jobs back to `ready`, opens the links between them, and adds a row to `flow_changes`
    /// for each member of a flow. The caller updates the counts of the flow. Later, `advance` opens the links
    /// from these jobs to others, and makes jobs wait again that were skipped because of them.
    async fn reopen(&mut self, jobs: &[Reopened]) -> Sql<ReopenedMembers>;

    /// Stores the counts of flows, and deletes the changes that are now included in them.
    async fn store_counts(&mut self, flows: &LockedFlows, followed: &[i64]) -> Sql<()>;
}
