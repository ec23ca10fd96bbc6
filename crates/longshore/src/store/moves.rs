//! Moves of jobs between tables, for which each engine has its own statements: sets on Postgres, rows on SQLite. The
//! procedures that use them are written once.

use async_trait::async_trait;
use uuid::Uuid;

use super::advance::{EndedParent, LockedFlows, MadeDue, StoredChange};
use super::db::Sql;
use super::operate_flows::ReopenedMembers;
use super::{Fenced, NewLink, NewMember, NewStep};
use crate::job::FlowId;
use crate::rules::enqueue::{EnqueuedBatch, ValidJob};
use crate::rules::flow::Reopened;

#[async_trait]
pub(crate) trait Moves: Send {
    /// Stores jobs, as [`enqueue`](super::Store::enqueue) does.
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch>;

    /// Journals steps, as [`save_steps`](super::Store::save_steps) does.
    async fn save_steps(&mut self, steps: &[NewStep]) -> Sql<Vec<Fenced>>;

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
