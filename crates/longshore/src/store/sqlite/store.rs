//! The [`Store`] operations that have no trait of their own. Each passes its arguments to
//! the function of the same name in the file named by the section.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{SqliteStore, advance, flows, inspect, operate_flows};
use crate::error::Result;
use crate::job::{FlowId, JobId, JobRecord};
use crate::store::*;

#[async_trait]
impl Store for SqliteStore {
    // ---- flows ------------------------------------------------------------

    async fn put_flow(&self, flow: &NewFlow) -> Result<PutFlow> {
        let flow = flow.clone();
        self.engine.write(move |tx| flows::put_flow(tx, &flow)).await
    }

    async fn add_members(&self, flow: FlowId, part: Option<Uuid>, members: &[NewMember]) -> Result<Added> {
        let members = members.to_vec();
        self.engine.write(move |tx| flows::add_members(tx, flow, part, &members)).await
    }

    async fn seal_flow(&self, flow: FlowId) -> Result<bool> {
        self.engine.write(move |tx| flows::seal_flow(tx, flow)).await
    }

    async fn spawn(&self, children: &NewChildren) -> Result<Spawned> {
        let children = children.clone();
        self.engine.write(move |tx| flows::spawn(tx, &children)).await
    }

    async fn flow(&self, id: FlowId) -> Result<Option<FlowRecord>> {
        self.engine.read(move |tx| flows::flow(tx, id)).await
    }

    async fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowRecord>> {
        let filter = filter.clone();
        self.engine.read(move |tx| flows::flows(tx, &filter)).await
    }

    async fn tasks(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<TaskRecord>> {
        self.engine.read(move |tx| flows::tasks(tx, flow, after, limit)).await
    }

    async fn members_in(&self, flow: FlowId, queues: &[String]) -> Result<u64> {
        let queues = queues.to_vec();
        self.engine.read(move |tx| flows::members_in(tx, flow, &queues)).await
    }

    async fn parents(&self, id: JobId) -> Result<Vec<ParentRecord>> {
        self.engine.read(move |tx| flows::parents(tx, id)).await
    }

    async fn awaited_flow(&self, id: JobId) -> Result<Option<FlowId>> {
        self.engine.read(move |tx| flows::awaited_flow(tx, id)).await
    }

    async fn results(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<ParentRecord>> {
        self.engine.read(move |tx| flows::results(tx, flow, after, limit)).await
    }

    // ---- advance ----------------------------------------------------------

    async fn pending(&self) -> Result<Pending> {
        self.engine.read(advance::pending).await
    }

    async fn advance(&self, _: Option<FlowId>, limit: u32) -> Result<Advanced> {
        // Almost always there is nothing to do, and nothing is written.
        if !self.engine.read(advance::has_changes).await? {
            return Ok(Advanced::default());
        }
        self.engine.write(move |tx| advance::advance(tx, limit)).await
    }

    // ---- operate_flows ----------------------------------------------------

    async fn flag_cancelled(&self, flow: FlowId) -> Result<bool> {
        self.engine.write(move |tx| operate_flows::flag_cancelled(tx, flow)).await
    }

    async fn cancel_members(
        &self,
        flow: FlowId,
        after: Option<JobId>,
        _: u64,
        limit: u32,
    ) -> Result<CancelledMembers> {
        // There is one writer at a time, so no member is locked.
        self.engine.write(move |tx| operate_flows::cancel_members(tx, flow, after, limit)).await
    }

    async fn flows_to_cancel(&self, limit: u32) -> Result<Vec<FlowId>> {
        self.engine.read(move |tx| operate_flows::flows_to_cancel(tx, limit)).await
    }

    async fn retry_members(
        &self,
        flow: FlowId,
        before: DateTime<Utc>,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<RetriedMembers> {
        self.engine.write(move |tx| operate_flows::retry_members(tx, flow, before, after, limit)).await
    }

    async fn remove_flows(&self, policy: &Retention, limit: u32) -> Result<u64> {
        let policy = *policy;
        self.engine.write(move |tx| operate_flows::remove_flows(tx, &policy, limit)).await
    }

    // ---- inspect ----------------------------------------------------------

    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.engine.read(move |tx| inspect::get(tx, id)).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        let filter = filter.clone();
        self.engine.read(move |tx| inspect::list(tx, &filter)).await
    }

    async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        let also = also.to_vec();
        self.engine.read(move |tx| inspect::glance(tx, limit, &also)).await
    }
}
