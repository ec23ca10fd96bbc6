//! Moves of jobs between tables, for which each engine has its own statements: sets on Postgres, rows on SQLite. The
//! procedures that use them are written once. Also the few other parts of procedures that are one statement on Postgres
//! and several on SQLite.

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

    // ---- flows ------------------------------------------------------------

    /// Stores members of a flow, or callbacks (`None`).
    async fn insert_members(&mut self, flow: Option<FlowId>, members: &[NewMember]) -> Sql<()>;

    async fn insert_links(&mut self, links: &[NewLink]) -> Sql<()>;

    /// Returns changes of these flows in the order in which they were stored. If no member of them was reopened: the
    /// first `limit`. Otherwise all that are needed to choose from: of flows with members that were reopened, those up
    /// to the `limit`-th return, which may be behind many ends, and of the others the first `limit`.
    async fn changes(&mut self, flows: &[Uuid], limit: u32) -> Sql<Vec<StoredChange>>;

    /// Closes up to `limit` open links of parents that have ended. Returns the links: parent and child.
    async fn close_links(&mut self, parents: &[EndedParent], limit: usize) -> Sql<Vec<(Uuid, Uuid)>>;

    /// Opens up to `limit` closed links of parents that were reopened. Returns the links: parent and child.
    async fn open_links(&mut self, parents: &[Uuid], limit: usize) -> Sql<Vec<(Uuid, Uuid)>>;

    /// Lets held jobs start, except those that others have locked.
    async fn make_due(&mut self, jobs: &[Uuid]) -> Sql<MadeDue>;

    /// Ends waiting jobs as cancelled, whatever they wait for, except those that others have locked. They do not count
    /// as failures. Returns those that were ended.
    async fn end_waiting(&mut self, jobs: &[Uuid], reasons: &[String]) -> Sql<Vec<Uuid>>;

    /// Moves finished jobs back to `ready`, opens the links between them, and notes the members of flows. The caller
    /// counts them. `advance` opens the links from them to others later, and lets what was skipped because of them wait
    /// again.
    async fn reopen(&mut self, jobs: &[Reopened]) -> Sql<ReopenedMembers>;

    /// Stores the numbers of flows, and deletes the changes that they contain now.
    async fn store_counts(&mut self, flows: &LockedFlows, followed: &[i64]) -> Sql<()>;
}
