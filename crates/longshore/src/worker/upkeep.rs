//! Upkeep, in every worker process: recovery of dead workers' jobs, retention,
//! tallies and what the gauges show. Each step is bounded, and one that fails is
//! tried again at its next turn.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::hooks::{Hooks, call};
use super::shared::{Phase, Shared};
use crate::job::WorkerId;
use crate::lifecycle::Interruption;
use crate::recovery::{Decision, Referee, SweepMode, SweepOptions, SweepReport};
use crate::store::{Interrupted, SweepScope};

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
    while shared.sleep_unless(Phase::Finishing, settings.sweep_interval).await {
        // After an outage that all shared, the others need time to say that
        // they live.
        if shared.contact.unbroken().is_none_or(|time| time < settings.heartbeat_interval * 2) {
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
            shared.client.sweep_with(&options, &mut Asking { hooks, worker: shared.worker() }).await
        }
    }
}

/// Lets the hooks decide about each job.
struct Asking {
    hooks: Arc<dyn Hooks>,
    worker: WorkerId,
}

#[async_trait]
impl Referee for Asking {
    async fn decide(&mut self, job: &Interrupted) -> Decision {
        let said = call("on_interrupted_job", self.hooks.on_interrupted_job(self.worker, job)).await;
        said.unwrap_or(Decision::Default)
    }

    async fn recovered(&mut self, job: &Interrupted) {
        call("on_interruption", self.hooks.on_interruption(job)).await;
    }
}

/// Removes what is past its time and keeps counting cheap.
pub(super) async fn retain(shared: Arc<Shared>) {
    while shared.sleep_unless(Phase::Finishing, shared.settings.retention_interval).await {
        for _ in 0..STEPS {
            match shared.client.store().retain(&shared.settings.retention, STEP).await {
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
        if let Err(error) = shared.client.store().fold_tallies(STEP).await {
            tracing::warn!(%error, "could not add up tallies; the next turn goes on");
        }
    }
}

/// Shows how many jobs wait.
pub(super) async fn sample(shared: Arc<Shared>) {
    while shared.sleep_unless(Phase::Finishing, shared.settings.sample_interval).await {
        match shared.client.counts().await {
            Ok(counts) => shared.metrics.depth(&counts),
            Err(error) => tracing::debug!(%error, "could not count jobs"),
        }
    }
}
