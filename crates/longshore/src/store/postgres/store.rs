//! The [`Store`] operations, in the order of the trait. Each passes its arguments to
//! the function of the same name in the file named by the section.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::listen::CANCEL_POLL_INTERVAL;
use super::pool::Class;
use super::run::{LockWait, Mode, Work, Working};
use super::tx::Tx;
use super::{
    Inner, PostgresStore, advance, check, claim, enqueue, events, flows, groups, lease, migrate, operate,
    operate_flows, queues, recover, retain, settle, stats, steps, workers,
};
use crate::error::Result;
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::{MAX_PAYLOAD, ValidJob, check_json};
use crate::rules::lifecycle::State;
use crate::store::*;

#[async_trait]
impl Store for PostgresStore {
    // ---- migrate ----------------------------------------------------------

    fn migrations(&self) -> &'static [Migration] {
        migrate::MIGRATIONS
    }

    async fn migrate(&self, migrations: &'static [Migration]) -> Result<Migrated> {
        self.run(migrations, |tx, migrations| Box::pin(migrate::migrate(tx, migrations))).await
    }

    async fn schema_version(&self) -> Result<i64> {
        let applied = self.run((), |tx, ()| Box::pin(migrate::applied(tx))).await?;
        Ok(applied.iter().map(|applied| applied.version).max().unwrap_or(0))
    }

    async fn now(&self) -> Result<DateTime<Utc>> {
        self.run_read((), |tx, ()| Box::pin(migrate::now(tx))).await
    }

    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()> {
        self.run(at, |tx, at| Box::pin(migrate::pin_clock(tx, *at))).await
    }

    fn with_own_connection(&self) -> Arc<dyn Store> {
        Arc::new(PostgresStore(Arc::new(Inner {
            pool: self.0.pool.single_connection(),
            schema: self.0.schema.clone(),
            listener: self.0.listener.unconnected(),
            notify: self.0.notify,
            durability: self.0.durability,
        })))
    }

    // ---- enqueue ----------------------------------------------------------

    async fn enqueue(&self, jobs: &[ValidJob], wait: KeyWait) -> Result<EnqueuedBatch> {
        let mode = match wait {
            _ if jobs.iter().all(|job| !job.is_keyed()) => Mode::enqueue(Class::Quick, jobs),
            KeyWait::Skip | KeyWait::Short => Mode::enqueue(Class::Slow, jobs),
            KeyWait::Long | KeyWait::UpTo(_) => Mode::enqueue(Class::Waiting, jobs),
        };
        let work: Work<_, _> = |tx, (jobs, wait): &(Vec<ValidJob>, LockWait)| {
            Box::pin(enqueue::enqueue(tx, jobs, wait.remaining()))
        };
        self.run_here(mode, (jobs.to_vec(), LockWait::new(wait)), work).await
    }

    // ---- wake-ups ---------------------------------------------------------

    fn notify_local(&self, notices: &[Notice]) -> bool {
        self.0.listener.notify_local(notices)
    }

    async fn notify_others(&self, notices: &[Notice]) -> Result<()> {
        self.notify_server(notices).await
    }

    async fn subscribe(&self) -> Result<Wakeups> {
        Ok(self.0.listener.subscribe(NoticeSender::wakeups).await)
    }

    async fn subscribe_to_cancels(&self) -> Result<CancelNotices> {
        let notices = self.0.listener.subscribe(NoticeSender::cancels).await;
        Ok(if self.0.notify { notices } else { notices.with_poll_interval(CANCEL_POLL_INTERVAL) })
    }

    async fn subscribe_to_events(&self) -> Result<EventNotices> {
        Ok(self.0.listener.subscribe(NoticeSender::emitted).await)
    }

    // ---- claim ------------------------------------------------------------

    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        let args = (request.clone(), tokio::sync::Mutex::new(std::mem::take(cursor)));
        let (claims, moved) = self.run_here(Mode::QUICK, args, claim_and_move_cursor).await?;
        *cursor = moved;
        Ok(claims)
    }

    // ---- lease ------------------------------------------------------------

    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>> {
        self.run_read(leases.to_vec(), |tx, leases| Box::pin(lease::claims(tx, leases))).await
    }

    async fn mark_started(&self, lease: &Lease) -> Result<Fenced> {
        self.run_quick(*lease, |tx, lease| Box::pin(lease::mark_started(tx, lease))).await
    }

    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        reports.iter().try_for_each(|(_, progress)| check_json("progress", progress.get(), MAX_PAYLOAD))?;
        self.run_quick(reports.to_vec(), |tx, reports| Box::pin(lease::progress(tx, reports))).await
    }

    async fn save_checkpoints(&self, checkpoints: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        for (_, data) in checkpoints {
            check_json("checkpoint", data.get(), MAX_PAYLOAD)?;
        }
        self.run_quick(checkpoints.to_vec(), |tx, checkpoints| {
            Box::pin(lease::save_checkpoints(tx, checkpoints))
        })
        .await
    }

    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>> {
        self.run_read(id, |tx, id| Box::pin(lease::checkpoint(tx, *id))).await
    }

    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced> {
        self.run_quick(*lease, |tx, lease| Box::pin(lease::assert_lease(tx, lease))).await
    }

    // ---- steps ------------------------------------------------------------

    async fn steps(&self, id: JobId) -> Result<Vec<StepRecord>> {
        self.run_read(id, |tx, id| Box::pin(steps::steps(tx, *id))).await
    }

    async fn saved_work(&self, ids: &[JobId], max_bytes: usize) -> Result<Vec<SavedWork>> {
        self.run_read((ids.to_vec(), max_bytes), |tx, (ids, max_bytes)| {
            Box::pin(steps::saved_work(tx, ids, *max_bytes))
        })
        .await
    }

    async fn journaled(&self, id: JobId, names: &[String]) -> Result<Journaled> {
        self.run_read((id, names.to_vec()), |tx, (id, names)| Box::pin(steps::journaled(tx, *id, names)))
            .await
    }

    async fn save_steps(&self, steps: &[NewStep]) -> Result<Vec<Fenced>> {
        self.run_quick(steps.to_vec(), |tx, steps| Box::pin(steps::save_steps(tx, steps))).await
    }

    // ---- settle -----------------------------------------------------------

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>> {
        let work: Work<_, _> = |tx, settlements: &Vec<Settlement>| Box::pin(settle::settle(tx, settlements));
        // Each statement has its own short deadline. If many leases are locked,
        // they are ended one by one.
        self.run_here(Mode::QUICK_IN_PARTS, settlements.to_vec(), work).await
    }

    // ---- workers ----------------------------------------------------------

    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        self.run_while_awaited((worker, held.to_vec()), |tx, (worker, held)| {
            Box::pin(workers::beat(tx, *worker, held))
        })
        .await
    }

    async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>> {
        self.run_while_awaited(worker, |tx, worker| Box::pin(workers::beat_and_list(tx, *worker))).await
    }

    // ---- recover ----------------------------------------------------------

    async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        self.run_quick(scope.clone(), |tx, scope| Box::pin(recover::presumed_dead(tx, scope))).await
    }

    async fn mark_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        self.run_quick(scope.clone(), |tx, scope| Box::pin(recover::mark_dead(tx, scope))).await
    }

    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>> {
        self.run(scope.clone(), |tx, scope| Box::pin(recover::interrupted(tx, scope))).await
    }

    async fn recover(&self, recoveries: &[Settlement]) -> Result<Vec<Recovered>> {
        self.run(recoveries.to_vec(), |tx, recoveries| Box::pin(recover::recover(tx, recoveries))).await
    }

    // ---- operate ----------------------------------------------------------

    async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.run_read(id, |tx, id| Box::pin(operate::locate(tx, *id))).await
    }

    async fn operate(&self, id: JobId, from: &State, to: &Operation, wait: KeyWait) -> Result<Operated> {
        let work: Work<_, _> = |tx, (id, from, to, wait): &(JobId, State, Operation, LockWait)| {
            Box::pin(operate::operate(tx, *id, from, to, wait.remaining()))
        };
        let args = |wait| (id, from.clone(), to.clone(), LockWait::new(wait));
        let first = if wait == KeyWait::Skip { wait } else { KeyWait::Short };
        // Most jobs are not locked, so try first without one of the few connections for long
        // waits.
        match self.run(args(first), work).await {
            Err(error) if error.is_locked() && wait != KeyWait::Skip => {
                self.run_as(Mode::WAITING, args(KeyWait::Long), work).await
            }
            done => done,
        }
    }

    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>> {
        self.run(filter.clone(), |tx, filter| Box::pin(operate::dead_letters(tx, filter))).await
    }

    // ---- events -----------------------------------------------------------

    async fn emit(&self, name: &str, payload: &RawValue) -> Result<Emitted> {
        let work: Work<_, _> = |tx, (name, payload, wait): &(String, Box<RawValue>, LockWait)| {
            Box::pin(events::emit(tx, name, payload, wait.remaining()))
        };
        let args = |wait| (name.to_owned(), payload.to_owned(), LockWait::new(wait));
        // As for `operate`.
        match self.run(args(KeyWait::Short), work).await {
            Err(error) if error.is_locked() => self.run_as(Mode::WAITING, args(KeyWait::Long), work).await,
            done => done,
        }
    }

    async fn events(&self, names: &[String]) -> Result<Vec<EventRecord>> {
        self.run_read(names.to_vec(), |tx, names| Box::pin(events::events(tx, names))).await
    }

    async fn deliver(&self, after: Option<&EventPlace>, limit: u32) -> Result<Delivered> {
        self.run_quick((after.cloned(), limit), |tx, (after, limit)| {
            Box::pin(events::deliver(tx, after.as_ref(), *limit))
        })
        .await
    }

    async fn remove_events(&self, limit: u32) -> Result<u64> {
        self.run(limit, |tx, limit| Box::pin(events::remove_events(tx, *limit))).await
    }

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

    // ---- queues -----------------------------------------------------------

    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.run_read((), |tx, ()| Box::pin(queues::queues(tx))).await
    }

    async fn depth(&self, queue: &str, limit: u64) -> Result<u64> {
        self.run((queue.to_owned(), limit), |tx, (queue, limit)| Box::pin(queues::depth(tx, queue, *limit)))
            .await
    }

    async fn waiting_queues(&self) -> Result<Vec<String>> {
        self.run((), |tx, ()| Box::pin(queues::waiting_queues(tx))).await
    }

    // ---- groups -----------------------------------------------------------

    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>> {
        self.run_read((queue.to_owned(), after.to_owned(), limit), |tx, (queue, after, limit)| {
            Box::pin(groups::groups(tx, queue, after, *limit))
        })
        .await
    }

    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>> {
        self.run_read((queue.to_owned(), group.to_owned()), |tx, (queue, group)| {
            Box::pin(groups::group(tx, queue, group))
        })
        .await
    }

    async fn find_groups(
        &self,
        text: &str,
        queues: Option<&[String]>,
        limit: u32,
    ) -> Result<Vec<FoundGroup>> {
        self.run_read(
            (text.to_owned(), queues.map(<[String]>::to_vec), limit),
            |tx, (text, queues, limit)| Box::pin(groups::find_groups(tx, text, queues.as_deref(), *limit)),
        )
        .await
    }

    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>> {
        self.run_read((queue.to_owned(), group.to_owned(), priority), |tx, (queue, group, priority)| {
            Box::pin(groups::place_in_line(tx, queue, group, *priority))
        })
        .await
    }

    // ---- stats ------------------------------------------------------------

    async fn counts(&self) -> Result<Vec<Count>> {
        self.run((), |tx, ()| Box::pin(stats::counts(tx))).await
    }

    async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.run((), |tx, ()| Box::pin(stats::overdue(tx))).await
    }

    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, limit: u32) -> Result<Option<Ahead>> {
        self.run((id, kinds.map(<[_]>::to_vec), limit), |tx, (id, kinds, limit)| {
            Box::pin(stats::ahead(tx, *id, kinds.as_deref(), *limit))
        })
        .await
    }

    async fn tallied(&self, filter: &HistoryFilter) -> Result<Vec<Tallied>> {
        self.run_view(filter.clone(), |tx, filter| Box::pin(stats::tallied(tx, filter))).await
    }

    // ---- check ------------------------------------------------------------

    async fn check(&self) -> Result<CheckReport> {
        self.run_as(Mode::ALL_TABLES, (), |tx, ()| Box::pin(check::check(tx))).await
    }

    async fn durability(&self) -> Result<Durability> {
        self.run_read((), |tx, ()| Box::pin(check::durability(tx))).await
    }

    // ---- retain -----------------------------------------------------------

    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        self.run((*policy, step), |tx, (policy, step)| Box::pin(retain::retain(tx, policy, *step))).await
    }

    async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.run(step, |tx, step| Box::pin(retain::fold_tallies(tx, *step))).await
    }
}

fn claim_and_move_cursor<'c>(
    tx: &'c mut Tx<'_>,
    (request, cursor): &'c (ClaimRequest, tokio::sync::Mutex<ClaimCursor>),
) -> Working<'c, (Claims, ClaimCursor)> {
    Box::pin(async move {
        let mut cursor = cursor.lock().await;
        let claims = claim::claim(tx, request, &mut cursor).await?;
        Ok((claims, std::mem::take(&mut *cursor)))
    })
}
