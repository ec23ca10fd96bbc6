//! Recovery of jobs whose worker died or whose handler hung.
//!
//! Candidates are listed without locks, whoever decides does so outside any
//! transaction, and each decision is stored only if the lease is still the
//! same and its holder still dead. Two sweepers may look at the same job; the
//! database lets one have it.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;

use crate::client::Client;
use crate::error::Result;
use crate::job::WorkerId;
use crate::lifecycle::{self, Interruption, Recovery, When};
use crate::store::{Interrupted, Interruptor, Settled, Settlement, SweepScope};

/// The flag of resilient jobs: their workers are declared dead only after a multiple of the
/// usual threshold. Workers and sweeps use it by default.
pub const INFRASTRUCTURE_RESILIENT_FLAG: &str = "infrastructure_resilient";

/// What a sweep goes by; the defaults are those of a worker.
#[derive(Clone, Debug)]
pub struct SweepOptions {
    /// Which leases may be taken.
    pub scope: SweepScope,
    /// How recovered jobs are treated.
    pub interruption: Interruption,
    /// Whether anything is changed.
    pub mode: SweepMode,
}

impl Default for SweepOptions {
    fn default() -> Self {
        SweepOptions {
            scope: SweepScope::default(),
            interruption: Interruption::default(),
            mode: SweepMode::Recover,
        }
    }
}

/// Whether a sweep acts or only looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepMode {
    /// Declare workers dead and take their leases.
    Recover,
    /// Say what would be done and change nothing.
    DryRun,
}

/// What is decided about one recovered job.
#[derive(Clone, Debug)]
pub enum Decision {
    /// Back to the queue after the recovery delay, counted.
    Default,
    /// Back to the queue at a chosen time, perhaps with chosen attempts.
    Reschedule {
        /// When.
        when: When,
        /// The attempts charged from now on.
        attempts: Option<u16>,
    },
    /// Charged as a failed attempt with the job's normal backoff.
    FailWithBackoff,
    /// Left with its holder, not counted.
    Skip,
}

/// Has a say about each job that a sweep would recover. A closure that takes an
/// [`Interrupted`] and gives a [`Decision`] is one.
#[async_trait]
pub trait RecoveryHook: Send {
    /// What should become of the job. May be asked twice about the same one; one
    /// decision applies.
    async fn decide(&mut self, job: &Interrupted) -> Decision;

    /// The decision is stored.
    async fn recovered(&mut self, _job: &Interrupted) {}
}

#[async_trait]
impl<F: FnMut(&Interrupted) -> Decision + Send> RecoveryHook for F {
    async fn decide(&mut self, job: &Interrupted) -> Decision {
        self(job)
    }
}

/// What a sweep did, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SweepReport {
    /// The workers whose leases were taken, and those newly declared dead.
    pub workers: BTreeSet<WorkerId>,
    /// How many jobs were recovered.
    pub recovered: u64,
    /// How many a decision left alone.
    pub skipped: u64,
}

impl Client {
    /// Recovers the jobs of dead workers, and of hung handlers.
    pub async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        self.sweep_with(options, &mut |_: &Interrupted| Decision::Default).await
    }

    /// As [`sweep`](Client::sweep), with a say about each job.
    pub async fn sweep_with(
        &self,
        options: &SweepOptions,
        hook: &mut dyn RecoveryHook,
    ) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        // Dead first, then the leases: a worker that comes back in between is
        // told so at its next beat and cannot claim.
        if options.mode == SweepMode::Recover {
            report.workers.extend(self.store().mark_dead(options.scope.threshold).await?);
        } else {
            let workers = self.store().workers(options.scope.threshold).await?;
            let silent = workers.iter().filter(|worker| worker.stale && worker.dead_at.is_none());
            report.workers.extend(silent.map(|worker| worker.id));
        }
        let mut scope = options.scope.clone();
        loop {
            let found = self.store().interrupted(&scope).await?;
            let Some(last) = found.last() else { return Ok(report) };
            scope.after = Some(last.id);
            match options.mode {
                SweepMode::DryRun => {
                    report.recovered += found.len() as u64;
                    report.workers.extend(found.iter().map(|job| job.running.worker));
                }
                SweepMode::Recover => {
                    self.recover_page(found, options, hook, &mut report).await?;
                }
            }
        }
    }

    async fn recover_page(
        &self,
        mut found: Vec<Interrupted>,
        options: &SweepOptions,
        hook: &mut dyn RecoveryHook,
        report: &mut SweepReport,
    ) -> Result<()> {
        // A flag raised since the listing makes another round; flags only
        // ever rise, so there are at most three.
        while !found.is_empty() {
            let mut asked = Vec::with_capacity(found.len());
            let mut batch: Vec<(Interruptor, Settlement)> = Vec::with_capacity(found.len());
            for job in found {
                match recovery(&job, &hook.decide(&job).await, options.interruption) {
                    Some(recovery) => {
                        batch.push((job.why, settlement(&job, recovery)));
                        asked.push(job);
                    }
                    None => report.skipped += 1,
                }
            }
            let settled = self.store().recover(&batch).await?;
            let due =
                batch.iter().zip(&asked).zip(&settled).filter_map(|(((_, settlement), job), settled)| {
                    let when = settlement.leave.requeued_for().filter(|_| *settled == Settled::Stored)?;
                    Some((job.queue.as_str(), when))
                });
            self.notifier().notify(due);
            found = Vec::new();
            for (mut job, settled) in asked.into_iter().zip(settled) {
                match settled {
                    Settled::Stored => {
                        report.recovered += 1;
                        report.workers.insert(job.running.worker);
                        hook.recovered(&job).await;
                    }
                    Settled::LeaseLost => {}
                    Settled::Flagged(flags) => {
                        job.running.flags = flags;
                        found.push(job);
                    }
                }
            }
        }
        Ok(())
    }
}

fn recovery(job: &Interrupted, decision: &Decision, interruption: Interruption) -> Option<Recovery> {
    match decision {
        Decision::Default => Some(Recovery::Default(interruption)),
        Decision::Reschedule { when, attempts } => Some(Recovery::Reschedule {
            when: *when,
            attempts: *attempts,
            max_interruptions: interruption.max_interruptions,
        }),
        Decision::FailWithBackoff => Some(Recovery::Fail { retry_in: job.backoff() }),
        Decision::Skip => None,
    }
}

fn settlement(job: &Interrupted, recovery: Recovery) -> Settlement {
    Settlement {
        lease: job.lease(),
        seen: Some(job.running.flags),
        leave: lifecycle::recover(&job.running, recovery),
        follow_ups: Vec::new(),
    }
}

impl SweepOptions {
    /// Overrides every worker's own threshold, for a manual sweep.
    pub fn threshold(mut self, threshold: Duration) -> Self {
        self.scope.threshold = Some(threshold);
        self
    }
}
