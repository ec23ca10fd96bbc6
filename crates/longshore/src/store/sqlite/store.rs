//! The [`Store`] operations that have no trait of their own. Each passes its arguments to
//! the function of the same name in the file named by the section.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::{SqliteStore, advance, events, flows, inspect, lease, operate, operate_flows, steps, workers};
use crate::error::Result;
use crate::job::{FlowId, JobId, JobRecord, WorkerId};
use crate::rules::enqueue::{MAX_PAYLOAD, check_json};
use crate::rules::lifecycle::State;
use crate::store::*;

#[async_trait]
impl Store for SqliteStore {
    // ---- lease ------------------------------------------------------------

    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>> {
        let leases = leases.to_vec();
        self.engine.read(move |tx| lease::claims(tx, &leases)).await
    }

    async fn mark_started(&self, lease: &Lease) -> Result<Fenced> {
        let lease = *lease;
        self.engine.write(move |tx| lease::mark_started(tx, &lease)).await
    }

    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        reports.iter().try_for_each(|(_, progress)| check_json("progress", progress.get(), MAX_PAYLOAD))?;
        let reports = reports.to_vec();
        self.engine.write(move |tx| lease::progress(tx, &reports)).await
    }

    async fn save_checkpoints(&self, checkpoints: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        for (_, data) in checkpoints {
            check_json("checkpoint", data.get(), MAX_PAYLOAD)?;
        }
        let checkpoints = checkpoints.to_vec();
        self.engine.write(move |tx| lease::save_checkpoints(tx, &checkpoints)).await
    }

    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>> {
        self.engine.read(move |tx| lease::checkpoint(tx, id)).await
    }

    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced> {
        let lease = *lease;
        self.engine.read(move |tx| lease::assert_lease(tx, &lease)).await
    }

    // ---- steps ------------------------------------------------------------

    async fn steps(&self, id: JobId) -> Result<Vec<StepRecord>> {
        self.engine.read(move |tx| steps::steps(tx, id)).await
    }

    async fn saved_work(&self, ids: &[JobId], max_bytes: usize) -> Result<Vec<SavedWork>> {
        let ids = ids.to_vec();
        self.engine.read(move |tx| steps::saved_work(tx, &ids, max_bytes)).await
    }

    async fn journaled(&self, id: JobId, names: &[String]) -> Result<Journaled> {
        let names = names.to_vec();
        self.engine.read(move |tx| steps::journaled(tx, id, &names)).await
    }

    async fn save_steps(&self, steps: &[NewStep]) -> Result<Vec<Fenced>> {
        let steps = steps.to_vec();
        self.engine.write(move |tx| steps::save_steps(tx, &steps)).await
    }

    // ---- workers ----------------------------------------------------------

    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        let held = held.to_vec();
        self.engine.write(move |tx| workers::beat(tx, worker, &held)).await
    }

    async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>> {
        self.engine.write(move |tx| workers::beat_and_list(tx, worker)).await
    }

    // ---- operate ----------------------------------------------------------

    async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.engine.read(move |tx| operate::locate(tx, id)).await
    }

    async fn operate(&self, id: JobId, from: &State, to: &Operation, _: KeyWait) -> Result<Operated> {
        let (from, to) = (from.clone(), to.clone());
        self.engine.write(move |tx| operate::operate(tx, id, &from, &to)).await
    }

    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>> {
        let filter = filter.clone();
        self.engine.read(move |tx| operate::dead_letters(tx, &filter)).await
    }

    // ---- events -----------------------------------------------------------

    async fn emit(&self, name: &str, payload: &RawValue) -> Result<Emitted> {
        let (name, payload) = (name.to_owned(), payload.to_owned());
        self.engine.write(move |tx| events::emit(tx, &name, &payload)).await
    }

    async fn events(&self, names: &[String]) -> Result<Vec<EventRecord>> {
        let names = names.to_vec();
        self.engine.read(move |tx| events::events(tx, &names)).await
    }

    async fn deliver(&self, _: Option<&EventPlace>, limit: u32) -> Result<Delivered> {
        // There is one writer at a time, so no wait is locked, and what was delivered is not fresh any more.
        // Almost always there is nothing to deliver, and nothing is written.
        if !self.engine.read(events::has_fresh).await? {
            return Ok(Delivered::default());
        }
        self.engine.write(move |tx| events::deliver(tx, limit)).await
    }

    async fn remove_events(&self, limit: u32) -> Result<u64> {
        self.engine.write(move |tx| events::remove_events(tx, limit)).await
    }

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
