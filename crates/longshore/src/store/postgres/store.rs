//! The [`Store`] operations that have no trait of their own. Each passes its arguments to
//! the function of the same name in the file named by the section.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::run::Mode;
use super::{PostgresStore, advance, flows, inspect, operate_flows};
use crate::error::Result;
use crate::job::{FlowId, JobId, JobRecord};
use crate::store::*;

#[async_trait]
impl Store for PostgresStore {
    // ---- flows ------------------------------------------------------------

    async fn put_flow(&self, flow: &NewFlow) -> Result<PutFlow> {
        self.run_on_flow(Mode::SLOW, flow.id, flow.clone(), |tx, (flow, wait)| {
            Box::pin(flows::put_flow(tx, flow, wait.remaining()))
        })
        .await
    }

    async fn add_members(&self, flow: FlowId, part: Option<Uuid>, members: &[NewMember]) -> Result<Added> {
        self.run_on_flow(Mode::SLOW, flow, (flow, part, members.to_vec()), |tx, (args, wait)| {
            let (flow, part, members) = &**args;
            Box::pin(flows::add_members(tx, *flow, *part, members, wait.remaining()))
        })
        .await
    }

    async fn seal_flow(&self, flow: FlowId) -> Result<bool> {
        self.run_on_flow(Mode::QUICK, flow, flow, |tx, (flow, wait)| {
            Box::pin(flows::seal_flow(tx, **flow, wait.remaining()))
        })
        .await
    }

    async fn spawn(&self, children: &NewChildren) -> Result<Spawned> {
        let flow = FlowId(children.lease.id.0);
        self.run_on_flow(Mode::SLOW, flow, children.clone(), |tx, (children, wait)| {
            Box::pin(flows::spawn(tx, children, wait.remaining()))
        })
        .await
    }

    async fn flow(&self, id: FlowId) -> Result<Option<FlowRecord>> {
        self.run_read(id, |tx, id| Box::pin(flows::flow(tx, *id))).await
    }

    async fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowRecord>> {
        self.run_read(filter.clone(), |tx, filter| Box::pin(flows::flows(tx, filter))).await
    }

    async fn tasks(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<TaskRecord>> {
        self.run_read((flow, after, limit), |tx, (flow, after, limit)| {
            Box::pin(flows::tasks(tx, *flow, *after, *limit))
        })
        .await
    }

    async fn members_in(&self, flow: FlowId, queues: &[String]) -> Result<u64> {
        self.run_read((flow, queues.to_vec()), |tx, (flow, queues)| {
            Box::pin(flows::members_in(tx, *flow, queues))
        })
        .await
    }

    async fn parents(&self, id: JobId) -> Result<Vec<ParentRecord>> {
        self.run_read(id, |tx, id| Box::pin(flows::parents(tx, *id))).await
    }

    async fn awaited_flow(&self, id: JobId) -> Result<Option<FlowId>> {
        self.run_read(id, |tx, id| Box::pin(flows::awaited_flow(tx, *id))).await
    }

    async fn results(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<ParentRecord>> {
        self.run_read((flow, after, limit), |tx, (flow, after, limit)| {
            Box::pin(flows::results(tx, *flow, *after, *limit))
        })
        .await
    }

    // ---- advance ----------------------------------------------------------

    async fn pending(&self) -> Result<Pending> {
        self.run_read((), |tx, ()| Box::pin(advance::pending(tx))).await
    }

    async fn advance(&self, after: Option<FlowId>, limit: u32) -> Result<Advanced> {
        self.run((after, limit), |tx, (after, limit)| Box::pin(advance::advance(tx, *after, *limit))).await
    }

    // ---- operate_flows ----------------------------------------------------

    async fn flag_cancelled(&self, flow: FlowId) -> Result<bool> {
        self.run_on_flow(Mode::QUICK, flow, flow, |tx, (flow, wait)| {
            Box::pin(operate_flows::flag_cancelled(tx, **flow, wait.remaining()))
        })
        .await
    }

    async fn cancel_members(
        &self,
        flow: FlowId,
        after: Option<JobId>,
        skipped: u64,
        limit: u32,
    ) -> Result<CancelledMembers> {
        self.run_on_flow(Mode::SLOW, flow, (flow, after, skipped, limit), |tx, (args, wait)| {
            let (flow, after, skipped, limit) = **args;
            Box::pin(operate_flows::cancel_members(tx, flow, after, skipped, limit, wait.remaining()))
        })
        .await
    }

    async fn flows_to_cancel(&self, limit: u32) -> Result<Vec<FlowId>> {
        self.run_quick(limit, |tx, limit| Box::pin(operate_flows::flows_to_cancel(tx, *limit))).await
    }

    async fn retry_members(
        &self,
        flow: FlowId,
        before: DateTime<Utc>,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<RetriedMembers> {
        self.run_on_flow(Mode::SLOW, flow, (flow, before, after, limit), |tx, (args, wait)| {
            let (flow, before, after, limit) = **args;
            Box::pin(operate_flows::retry_members(tx, flow, before, after, limit, wait.remaining()))
        })
        .await
    }

    async fn remove_flows(&self, policy: &Retention, limit: u32) -> Result<u64> {
        self.run((*policy, limit), |tx, (policy, limit)| {
            Box::pin(operate_flows::remove_flows(tx, policy, *limit))
        })
        .await
    }

    // ---- inspect ----------------------------------------------------------

    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.run_read(id, |tx, id| Box::pin(inspect::get(tx, *id))).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        self.run(filter.clone(), |tx, filter| Box::pin(inspect::list(tx, filter))).await
    }

    async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        self.run((limit, also.to_vec()), |tx, (limit, also)| Box::pin(inspect::glance(tx, *limit, also)))
            .await
    }
}
