//! Upkeep, in every worker process: recovery of dead workers' jobs, schedules,
//! retention, tallies and what the gauges show. Each step is bounded, and one that fails is
//! tried again at its next turn.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::hooks::{Hooks, call};
use super::shared::{Phase, Shared};
use crate::cron::{Tick, TickHook};
use crate::enqueue::NewJob;
use crate::job::WorkerId;
use crate::lifecycle::Interruption;
use crate::recovery::{Decision, RecoveryHook, SweepMode, SweepOptions, SweepReport};
use crate::store::{Interrupted, Schedule, SweepScope};

/// A schedule put by another process is noticed this soon.
const SCHEDULES_EVERY: Duration = Duration::from_secs(5);
/// How many rows one step of retention looks at.
const STEP: u32 = 1000;
/// How many steps one turn of retention takes at most.
const STEPS: u32 = 50;
/// Between steps, so that a long walk leaves the database to others.
const BREATH: Duration = Duration::from_millis(50);

/// Recovers the jobs of dead workers.
pub(super) async fn sweep(shared: Arc<Shared>) {
    let settings = &shared.settings;
    if !settings.recovery.enabled {
        return;
    }
    // A counter that begins with its first event hides that one from rates.
    shared.metrics.recovered(0);
    while shared.sleep_unless(Phase::Finishing, settings.sweep_interval).await {
        // After an outage that all shared, the others need time to say that
        // they live.
        let two_beats = settings.heartbeat_interval * 2;
        if shared.contact.unbroken().is_none_or(|time| time < two_beats)
            || shared.contact.silence() > two_beats
        {
            continue;
        }
        match sweep_once(&shared).await {
            Ok(report) => {
                shared.metrics.recovered(report.recovered);
                if report.recovered > 0 || !report.workers.is_empty() {
                    tracing::warn!(
                        workers = report.workers.len(),
                        jobs = report.recovered,
                        "recovered jobs of dead workers"
                    );
                    if let Some(hooks) = &shared.hooks {
                        call("on_sweep", hooks.on_sweep(&report)).await;
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "the sweep failed; the next one tries again"),
        }
    }
}

async fn sweep_once(shared: &Shared) -> crate::Result<SweepReport> {
    let recovery = &shared.settings.recovery;
    let options = SweepOptions {
        scope: SweepScope {
            orphan_after: shared.settings.stale_after,
            resilient_flags: recovery.resilient_flags.clone(),
            resilient_factor: recovery.resilient_factor,
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
                .sweep_with(&options, &mut WorkerRecoveryHook { hooks, worker: shared.worker() })
                .await
        }
    }
}

/// Lets the hooks decide about each job.
struct WorkerRecoveryHook {
    hooks: Arc<dyn Hooks>,
    worker: WorkerId,
}

#[async_trait]
impl RecoveryHook for WorkerRecoveryHook {
    async fn decide(&mut self, job: &Interrupted) -> Decision {
        let said = call("on_interrupted_job", self.hooks.on_interrupted_job(self.worker, job)).await;
        said.unwrap_or(Decision::Default)
    }

    async fn recovered(&mut self, job: &Interrupted) {
        call("on_interruption", self.hooks.on_interruption(job)).await;
    }
}

/// Fires the schedules that are due. Every process does; the database gives each
/// tick to one.
pub(super) async fn cron(shared: Arc<Shared>) {
    loop {
        let fired = match shared.hooks.clone() {
            None => shared.client.fire_due().await,
            Some(hooks) => shared.client.fire_due_with(&mut WorkerTickHook(hooks)).await,
        };
        let wait = match fired {
            Ok(report) => {
                for tick in &report.fired {
                    tracing::debug!(schedule = tick.schedule, tick = %tick.tick, job_id = %tick.job.id, "a tick fired");
                }
                let next = report.next_wake.and_then(|next| (next - report.looked_at).to_std().ok());
                next.unwrap_or(SCHEDULES_EVERY).clamp(Duration::from_millis(1), SCHEDULES_EVERY)
            }
            Err(error) => {
                tracing::warn!(%error, "could not look at the schedules; trying again");
                Duration::from_secs(1)
            }
        };
        if !shared.sleep_unless(Phase::Finishing, wait).await {
            return;
        }
    }
}

/// Lets the hooks decide about each tick.
struct WorkerTickHook(Arc<dyn Hooks>);

#[async_trait]
impl TickHook for WorkerTickHook {
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick {
        match call("on_cron_tick", self.0.on_cron_tick(schedule, tick, job.clone())).await {
            Some(Ok(changed)) => Tick::Fire(changed),
            Some(Err(why)) => {
                tracing::info!(schedule = schedule.name, %tick, ?why, "a hook held a tick back");
                Tick::Veto
            }
            None => Tick::Fire(job),
        }
    }
}

/// Removes what is past its time and keeps counting cheap.
pub(super) async fn retain(shared: Arc<Shared>) {
    while shared.sleep_unless(Phase::Finishing, shared.settings.retention_interval).await {
        for _ in 0..STEPS {
            match shared.client.retain(&shared.settings.retention, STEP).await {
                Ok(retained) if retained.done => break,
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "retention failed; the next turn goes on");
                    break;
                }
            }
            if !shared.sleep_unless(Phase::Finishing, BREATH).await {
                return;
            }
        }
        if let Err(error) = shared.client.fold_tallies(STEP).await {
            tracing::warn!(%error, "could not add up tallies; the next turn goes on");
        }
    }
}

/// Shows how many jobs wait, and for how long; from the start, so that whoever
/// looks at a fresh process sees numbers.
pub(super) async fn sample(shared: Arc<Shared>) {
    loop {
        match shared.client.counts().await {
            Ok(counts) => shared.metrics.depth(&counts),
            Err(error) => tracing::debug!(%error, "could not count jobs"),
        }
        match shared.client.overdue().await {
            Ok(overdue) => shared.metrics.overdue(&overdue),
            Err(error) => tracing::debug!(%error, "could not look for the oldest jobs"),
        }
        if !shared.sleep_unless(Phase::Finishing, shared.settings.sample_interval).await {
            return;
        }
    }
}
