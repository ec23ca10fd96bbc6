//! Upkeep, in every worker process: recovery of dead workers' jobs, schedules, events, operations, retention,
//! tallies and gauges. Each step is bounded, and a failed step is retried in its next round.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::clock_steps::{Clock, ClockSteps, Reading};
use super::hooks::{Hooks, call};
use super::shared::{Phase, Shared};
use crate::client::recovery::{Decision, InterruptedJob, RecoveryHook, SweepMode, SweepOptions, SweepReport};
use crate::client::schedules::{Tick, TickHook};
use crate::job::WorkerId;
use crate::rules::enqueue::NewJob;
use crate::rules::lifecycle::Interruption;
use crate::store::{Schedule, SweepScope};

/// The longest time between two passes over the schedules: a schedule stored by another process
/// is noticed this soon.
const SCHEDULES_INTERVAL: Duration = Duration::from_secs(5);
/// How often upkeep looks for events that were not delivered.
const DELIVERY_INTERVAL: Duration = Duration::from_secs(1);
/// If one round folds at least this many tallies, the next round is earlier. Counting then never reads more
/// than a few thousand rows that are not folded.
const MANY_TALLIES: u64 = 1000;
/// The factor by which the next round is earlier: 5 s instead of a minute by default.
const EARLIER_FACTOR: u32 = 12;

/// Recovers the jobs of dead workers.
pub(super) async fn sweep(shared: Arc<Shared>) {
    let settings = &shared.settings;
    if !settings.recovery.enabled {
        return;
    }
    let mut clock = ClockSteps::default();
    // The first reading, before the first pause: later ones need something to compare with.
    is_clock_steady(&shared, &mut clock).await;
    while shared.sleep_unless(Phase::Finishing, settings.sweep_interval).await {
        if !is_clock_steady(&shared, &mut clock).await {
            continue;
        }
        // After an outage that affected all processes, give the other workers time to send
        // a heartbeat before declaring any of them dead.
        let two_heartbeats = settings.heartbeat_interval * 2;
        if shared.contact.unbroken().is_none_or(|time| time < two_heartbeats)
            || shared.contact.silence() > two_heartbeats
        {
            continue;
        }
        match sweep_once(&shared, &clock).await {
            Ok(report) => {
                if report.recovered > 0 || report.deferred > 0 || !report.workers.is_empty() {
                    tracing::warn!(
                        workers = report.workers.len(),
                        jobs = report.recovered,
                        deferred = report.deferred,
                        "recovered jobs of dead workers"
                    );
                    if let Some(hooks) = &shared.hooks {
                        call("on_sweep", hooks.on_sweep(&report)).await;
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "the sweep failed; retrying at the next interval"),
        }
    }
}

/// Whether heartbeats can be compared with the database's clock. After a step of the clock,
/// live workers need time to send a heartbeat under the new one.
async fn is_clock_steady(shared: &Shared, clock: &mut ClockSteps) -> bool {
    let heartbeat = shared.settings.heartbeat_interval;
    match Reading::take(&shared.client).await {
        Ok(reading) => match clock.observe(reading, heartbeat) {
            Clock::Steady => true,
            Clock::Settling => false,
            Clock::Stepped => {
                tracing::warn!(
                    "the database's clock was moved or the host was suspended; \
                     declaring no worker dead for two heartbeats"
                );
                false
            }
        },
        Err(error) => {
            tracing::warn!(%error, "could not read the database's clock; sweeping at the next interval");
            false
        }
    }
}

async fn sweep_once(shared: &Shared, clock: &ClockSteps) -> crate::Result<SweepReport> {
    let recovery = &shared.settings.recovery;
    let options = SweepOptions {
        scope: SweepScope {
            orphan_after: shared.settings.stale_after,
            resilient_flags: recovery.resilient_flags.clone(),
            resilient_factor: recovery.resilient_factor,
            stepped_at: clock.stepped_at(),
            ..SweepScope::default()
        },
        interruption: Interruption { delay: recovery.delay, max_interruptions: recovery.max_interruptions },
        mode: SweepMode::Recover,
    };
    match shared.hooks.clone() {
        None => shared.client.sweep(&options).await,
        Some(hooks) => {
            shared
                .client
                .sweep_with(&options, &mut WorkerRecoveryHook { hooks, worker_id: shared.worker_id() })
                .await
        }
    }
}

/// Calls the application's hooks for each job a sweep recovers.
struct WorkerRecoveryHook {
    hooks: Arc<dyn Hooks>,
    worker_id: WorkerId,
}

#[async_trait]
impl RecoveryHook for WorkerRecoveryHook {
    async fn decide(&mut self, job: &InterruptedJob) -> Decision {
        let decision = call("on_interrupted_job", self.hooks.on_interrupted_job(self.worker_id, job)).await;
        decision.unwrap_or(Decision::Default)
    }

    async fn recovered(&mut self, job: &InterruptedJob) {
        call("on_interruption", self.hooks.on_interruption(job)).await;
    }
}

/// Fires due schedules. Every process does this; the database assigns each tick to one of them.
pub(super) async fn cron(shared: Arc<Shared>) {
    loop {
        let fired = match shared.hooks.clone() {
            None => shared.client.fire_due().await,
            Some(hooks) => shared.client.fire_due_with(&mut WorkerTickHook(hooks)).await,
        };
        let wait = match fired {
            Ok(report) => {
                for tick in &report.fired {
                    tracing::debug!(schedule = tick.schedule, tick = %tick.tick, job_id = %tick.job.id, "fired a tick");
                }
                let next = report.next_wake.and_then(|next| (next - report.looked_at).to_std().ok());
                next.unwrap_or(SCHEDULES_INTERVAL).clamp(Duration::from_millis(1), SCHEDULES_INTERVAL)
            }
            Err(error) => {
                tracing::warn!(%error, "could not fire due schedules; retrying");
                Duration::from_secs(1)
            }
        };
        if !shared.sleep_unless(Phase::Finishing, wait).await {
            return;
        }
    }
}

/// Wakes the jobs that wait for new events, follows changes of flows and cancels flows whose deadline
/// has passed. Clients do the first two at once; this finds what SQL has changed, at once if the
/// notification arrives, and what a process that died has left.
pub(super) async fn deliver(shared: Arc<Shared>) {
    let mut emitted = match shared.client.subscribe_to_events().await {
        Ok(notices) => Some(notices),
        Err(error) => {
            tracing::warn!(%error, "could not subscribe to events; looking for them every second");
            None
        }
    };
    loop {
        let notified = async {
            match &mut emitted {
                Some(emitted) => emitted.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            continues = shared.sleep_unless(Phase::Finishing, DELIVERY_INTERVAL) => {
                if !continues {
                    return;
                }
            }
            () = notified => {}
        }
        match shared.client.do_pending().await {
            Ok(pending) if pending.operations => shared.operations_wait.notify_one(),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "could not deliver events or follow changes of flows; retrying");
            }
        }
    }
}

/// Executes operations that wait for a process. [`deliver`] finds them within a second.
pub(super) async fn operations(shared: Arc<Shared>) {
    loop {
        tokio::select! {
            () = shared.operations_wait.notified() => {}
            () = shared.reached(Phase::Finishing) => return,
        }
        let pause = |time| shared.sleep_unless(Phase::Finishing, time);
        if let Err(error) = shared.client.run_operations(pause).await {
            tracing::warn!(%error, "could not continue an operation; retrying");
        }
    }
}

/// Calls the application's hook for each tick.
struct WorkerTickHook(Arc<dyn Hooks>);

#[async_trait]
impl TickHook for WorkerTickHook {
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick {
        match call("on_cron_tick", self.0.on_cron_tick(schedule, tick, job.clone())).await {
            Some(Ok(changed)) => Tick::Fire(changed),
            Some(Err(reason)) => {
                tracing::info!(schedule = schedule.name, %tick, ?reason, "a hook vetoed the tick");
                Tick::Veto
            }
            None => Tick::Fire(job),
        }
    }
}

/// Removes finished jobs past their retention.
pub(super) async fn retain(shared: Arc<Shared>) {
    let pause = |time| shared.sleep_unless(Phase::Finishing, time);
    while pause(shared.settings.retention_interval).await {
        if let Err(error) = shared.client.retain(&shared.settings.retention, pause).await {
            tracing::warn!(%error, "retention failed; retrying at the next interval");
        }
        if let Err(error) = shared.client.remove_old_events().await {
            tracing::warn!(%error, "could not remove old events; retrying at the next interval");
        }
        if let Err(error) = shared.client.remove_old_flows(&shared.settings.retention).await {
            tracing::warn!(%error, "could not remove old flows; retrying at the next interval");
        }
        if let Err(error) = shared.client.remove_old_operations().await {
            tracing::warn!(%error, "could not remove old operations; retrying at the next interval");
        }
    }
}

/// Folds the tallies, the notes about failures and the measures, to keep reading them cheap.
pub(super) async fn fold(shared: Arc<Shared>) {
    let pause = |time| shared.sleep_unless(Phase::Finishing, time);
    let interval = shared.settings.retention_interval;
    let mut wait = interval;
    while pause(wait).await {
        wait = match shared.client.fold_tallies(pause).await {
            Ok(MANY_TALLIES..) => interval / EARLIER_FACTOR,
            Ok(_) => interval,
            Err(error) => {
                tracing::warn!(%error, "could not fold the tallies; retrying at the next interval");
                interval
            }
        };
        if let Err(error) = shared.client.fold_history(pause).await {
            tracing::warn!(%error, "could not fold failures or measures; retrying at the next interval");
        }
    }
}

/// Refreshes the gauges, and the history of the same numbers: queue depth and the age of the oldest due job. The first refresh is
/// immediate, so that a new process shows values at once.
pub(super) async fn sample(shared: Arc<Shared>) {
    loop {
        let counts = shared.client.counts().await;
        match &counts {
            Ok(counts) => shared.metrics.set_depth(counts),
            Err(error) => tracing::debug!(%error, "could not count jobs"),
        }
        let overdue = shared.client.overdue().await;
        match &overdue {
            Ok(overdue) => shared.metrics.set_overdue(overdue),
            Err(error) => tracing::debug!(%error, "could not find the oldest due jobs"),
        }
        if let (Ok(counts), Ok(overdue)) = (&counts, &overdue)
            && let Err(error) = shared.client.store_samples(counts, overdue).await
        {
            tracing::debug!(%error, "could not store the depth of the queues");
        }
        if !shared.sleep_unless(Phase::Finishing, shared.settings.sample_interval).await {
            return;
        }
    }
}
