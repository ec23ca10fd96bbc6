//! The [`Store`] operations, in the order of the trait. Each passes its arguments to
//! the function of the same name in the file named by the section.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::tx::Tx;
use super::{
    SqliteStore, advance, check, claim, enqueue, events, flows, groups, lease, migrate, operate,
    operate_flows, queues, recover, retain, settle, stats, steps, workers,
};
use crate::error::Result;
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::{MAX_PAYLOAD, ValidJob, check_json};
use crate::rules::lifecycle::State;
use crate::store::*;

#[async_trait]
impl Store for SqliteStore {
    // ---- migrate ----------------------------------------------------------

    fn migrations(&self) -> &'static [Migration] {
        migrate::MIGRATIONS
    }

    async fn migrate(&self, migrations: &'static [Migration]) -> Result<Migrated> {
        // Most calls find nothing to do and need not wait for the writing thread.
        let scripts = migrate::scripts(migrations);
        let from = scripts.version_of(&self.engine.read(migrate::applied).await?)?;
        if from == scripts.version() {
            return Ok(Migrated { from, to: from });
        }
        self.engine.write(move |tx| migrate::migrate(tx, migrations)).await
    }

    async fn schema_version(&self) -> Result<i64> {
        let applied = self.engine.read(migrate::applied).await?;
        Ok(applied.iter().map(|applied| applied.version).max().unwrap_or(0))
    }

    async fn now(&self) -> Result<DateTime<Utc>> {
        self.engine.read(migrate::now).await
    }

    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()> {
        self.engine.write(move |tx| migrate::pin_clock(tx, at)).await
    }

    fn with_own_connection(&self) -> Arc<dyn Store> {
        // The one writing thread serves all callers and never waits for a handler.
        Arc::new(self.clone())
    }

    // ---- enqueue ----------------------------------------------------------

    async fn enqueue(&self, jobs: &[ValidJob], _: KeyWait) -> Result<EnqueuedBatch> {
        // There is one writer at a time, so no open transaction can hold a key.
        let jobs = jobs.to_vec();
        self.engine.write(move |tx| enqueue::enqueue(tx, &jobs)).await
    }

    // ---- wake-ups ---------------------------------------------------------

    fn notify_local(&self, notices: &[Notice]) -> bool {
        self.engine.notify(notices)
    }

    async fn notify_others(&self, _: &[Notice]) -> Result<()> {
        // Other processes detect the commit by themselves: `data_version` changes.
        Ok(())
    }

    async fn subscribe(&self) -> Result<Wakeups> {
        Ok(self.engine.subscribe(NoticeSender::wakeups))
    }

    async fn subscribe_to_cancels(&self) -> Result<CancelNotices> {
        Ok(self.engine.subscribe(NoticeSender::cancels))
    }

    async fn subscribe_to_events(&self) -> Result<EventNotices> {
        Ok(EventNotices::NEVER)
    }

    // ---- claim ------------------------------------------------------------

    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        let (request, mut moved) = (request.clone(), std::mem::take(cursor));
        let work = move |tx: &Tx<'_>| {
            let claims = claim::claim(tx, &request, &mut moved)?;
            Ok((claims, moved))
        };
        let (claims, moved) = self.engine.write(work).await?;
        *cursor = moved;
        Ok(claims)
    }

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

    // ---- settle -----------------------------------------------------------

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>> {
        let settlements = settlements.to_vec();
        self.engine.write(move |tx| settle::settle(tx, &settlements)).await?
    }

    // ---- workers ----------------------------------------------------------

    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        let held = held.to_vec();
        self.engine.write(move |tx| workers::beat(tx, worker, &held)).await
    }

    async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>> {
        self.engine.write(move |tx| workers::beat_and_list(tx, worker)).await
    }

    // ---- recover ----------------------------------------------------------

    async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        let scope = scope.clone();
        self.engine.read(move |tx| recover::presumed_dead(tx, &scope)).await
    }

    async fn mark_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        let scope = scope.clone();
        self.engine.write(move |tx| recover::mark_dead(tx, &scope)).await
    }

    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>> {
        let scope = scope.clone();
        self.engine.read(move |tx| recover::interrupted(tx, &scope)).await
    }

    async fn recover(&self, recoveries: &[Settlement]) -> Result<Vec<Recovered>> {
        let recoveries = recoveries.to_vec();
        self.engine.write(move |tx| recover::recover(tx, &recoveries)).await
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

    // ---- queues -----------------------------------------------------------

    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.engine.read(queues::queues).await
    }

    async fn depth(&self, queue: &str, limit: u64) -> Result<u64> {
        let queue = queue.to_owned();
        self.engine.read(move |tx| queues::depth(tx, &queue, limit)).await
    }

    async fn waiting_queues(&self) -> Result<Vec<String>> {
        self.engine.read(queues::waiting_queues).await
    }

    // ---- groups -----------------------------------------------------------

    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>> {
        let (queue, after) = (queue.to_owned(), after.to_owned());
        self.engine.read(move |tx| groups::groups(tx, &queue, &after, limit)).await
    }

    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>> {
        let (queue, group) = (queue.to_owned(), group.to_owned());
        self.engine.read(move |tx| groups::group(tx, &queue, &group)).await
    }

    async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        let (text, queues) = (text.to_owned(), queues.map(<[String]>::to_vec));
        self.engine.read(move |tx| groups::find_groups(tx, &text, queues.as_deref(), limit)).await
    }

    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>> {
        let (queue, group) = (queue.to_owned(), group.to_owned());
        self.engine.read(move |tx| groups::place_in_line(tx, &queue, &group, priority)).await
    }

    // ---- stats ------------------------------------------------------------

    async fn counts(&self) -> Result<Vec<Count>> {
        self.engine.read(stats::counts).await
    }

    async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.engine.read(stats::overdue).await
    }

    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, limit: u32) -> Result<Option<Ahead>> {
        let kinds = kinds.map(<[_]>::to_vec);
        self.engine.read(move |tx| stats::ahead(tx, id, kinds.as_deref(), limit)).await
    }

    async fn tallied(&self, filter: &HistoryFilter) -> Result<Vec<Tallied>> {
        let filter = filter.clone();
        self.engine.read(move |tx| stats::tallied(tx, &filter)).await
    }

    // ---- check ------------------------------------------------------------

    async fn check(&self) -> Result<CheckReport> {
        self.engine.read(check::check).await
    }

    async fn durability(&self) -> Result<Durability> {
        self.engine.read(check::durability).await
    }

    // ---- retain -----------------------------------------------------------

    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        let policy = *policy;
        self.engine.write(move |tx| retain::retain(tx, &policy, step)).await
    }

    async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.engine.write(move |tx| retain::fold_tallies(tx, step)).await
    }
}
