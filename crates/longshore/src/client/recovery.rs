//! Recovery of jobs whose worker died or whose handler hung.
//!
//! A sweep lists candidates without locks and runs hooks outside any transaction. Each decision
//! is stored only if the lease is still the same and its holder is still dead. Two sweepers may
//! find the same job; the database lets only one of them recover it. A lease that another
//! transaction has locked, or that the database refuses to change, is deferred to the next sweep
//! and does not delay the others.
//!
//! This module owns what a sweep does. `worker::upkeep` decides when to sweep; [`lifecycle`]
//! decides what happens to a recovered job.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::client::Client;
use crate::error::Result;
use crate::job::{JobRecord, Status, WorkerId};
use crate::rules::lifecycle::{self, Interruption, Recovery, When};
use crate::store::{
    EndedBy, Interrupted, Interruptor, Recovered, Settled, Settlement, SweepScope, failure_of,
};

/// The options of a sweep; the defaults are those of a worker.
#[derive(Clone, Debug)]
pub struct SweepOptions {
    /// Which leases the sweep may take.
    pub scope: SweepScope,
    /// The delay and the limit of interruptions for recovered jobs.
    pub interruption: Interruption,
    /// Whether the sweep changes anything.
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

impl SweepOptions {
    /// Overrides every worker's own threshold; for manual sweeps.
    pub fn threshold(mut self, threshold: Duration) -> Self {
        self.scope.threshold = Some(threshold);
        self
    }
}

/// Whether a sweep recovers jobs or only reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepMode {
    /// Declare workers dead and recover their jobs.
    Recover,
    /// Report what would be recovered and change nothing.
    DryRun,
}

/// The decision about one recovered job.
#[derive(Clone, Debug)]
pub enum Decision {
    /// Requeue it after the recovery delay and count the interruption.
    Default,
    /// Requeue it at a chosen time, optionally with a chosen number of charged attempts.
    Reschedule {
        /// When the job is due.
        when: When,
        /// The number of attempts charged so far.
        attempts: Option<u16>,
    },
    /// Charge a failed attempt and apply the job's normal backoff.
    FailWithBackoff,
    /// Leave it with its holder and do not count the interruption.
    Skip,
}

/// A job that a sweep recovers, as hooks receive it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InterruptedJob {
    /// The whole job as the sweep found it: payload, tags, context, attempts and so on.
    pub record: JobRecord,
    /// The worker that held the lease.
    pub previous_worker: WorkerId,
    /// Why the lease may be taken from it.
    pub why: Interruptor,
}

impl InterruptedJob {
    /// The reason for the interruption: always `WorkerCrashed`. [`why`](Self::why) has the details.
    pub fn reason(&self) -> &'static str {
        lifecycle::WORKER_CRASHED
    }

    /// Roughly how much memory it uses.
    fn size(&self) -> usize {
        let length = |json: &Option<Box<RawValue>>| json.as_ref().map_or(0, |json| json.get().len());
        let JobRecord { payload, metadata, progress, .. } = &self.record;
        payload.get().len() + length(metadata) + length(progress)
    }
}

/// Decides about each job that a sweep recovers. Closures that take an [`InterruptedJob`] and
/// return a [`Decision`] implement it.
#[async_trait]
pub trait RecoveryHook: Send {
    /// Decides what happens to the job. May be called twice for the same job; one decision
    /// applies.
    async fn decide(&mut self, job: &InterruptedJob) -> Decision;

    /// Called after the decision is stored, with the job as it was before.
    async fn recovered(&mut self, _job: &InterruptedJob) {}
}

#[async_trait]
impl<F: FnMut(&InterruptedJob) -> Decision + Send> RecoveryHook for F {
    async fn decide(&mut self, job: &InterruptedJob) -> Decision {
        self(job)
    }
}

/// The result of a sweep; for a dry run, what it would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SweepReport {
    /// The workers whose leases were taken, and those newly declared dead.
    pub workers: BTreeSet<WorkerId>,
    /// How many jobs were recovered.
    pub recovered: u64,
    /// How many jobs were skipped by a decision.
    pub skipped: u64,
    /// How many jobs could not be recovered now, because another transaction has locked them or
    /// the database rejects the change. The log has the reasons, and later sweeps try again. A dry
    /// run tries nothing, so it defers nothing.
    pub deferred: u64,
}

/// How many deferred jobs a sweep logs one by one.
const MAX_DEFERRED_LOGGED: u64 = 10;
/// How many bytes of jobs a sweep with a hook keeps in memory before it stores their decisions.
const MAX_HELD_BYTES: usize = 16 * 1024 * 1024;

impl SweepReport {
    fn defer(&mut self, job: &Interrupted, reason: &str) {
        self.deferred += 1;
        if self.deferred <= MAX_DEFERRED_LOGGED {
            tracing::warn!(job_id = %job.id, reason, "could not recover the job now; a later sweep tries again");
        }
    }
}

impl Client {
    /// Recovers the jobs of dead workers and of hung handlers.
    pub async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        self.sweep_all(options, None).await
    }

    /// Like [`sweep`](Client::sweep), and calls `hook` for each job. The hook receives the whole
    /// job, so this reads every recovered job once more than `sweep` does.
    pub async fn sweep_with(
        &self,
        options: &SweepOptions,
        hook: &mut dyn RecoveryHook,
    ) -> Result<SweepReport> {
        self.sweep_all(options, Some(hook)).await
    }

    async fn sweep_all(
        &self,
        options: &SweepOptions,
        mut hook: Option<&mut dyn RecoveryHook>,
    ) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        // Mark workers dead before taking their leases: a worker that comes back in between
        // learns of it at its next heartbeat and cannot claim.
        report.workers.extend(match options.mode {
            SweepMode::Recover => self.store().mark_dead(&options.scope).await?,
            SweepMode::DryRun => self.store().presumed_dead(&options.scope).await?,
        });
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
                    self.recover_page(found, options, &mut hook, &mut report).await?;
                }
            }
        }
    }

    async fn recover_page(
        &self,
        found: Vec<Interrupted>,
        options: &SweepOptions,
        hook: &mut Option<&mut dyn RecoveryHook>,
        report: &mut SweepReport,
    ) -> Result<()> {
        let (mut candidates, mut bytes) = (Vec::with_capacity(found.len()), 0);
        for lease in found {
            let job = match hook {
                None => None,
                Some(_) => match self.job_of(&lease).await? {
                    JobOfLease::Read(job) => Some(job),
                    JobOfLease::Unreadable => None,
                    JobOfLease::LeaseLost => continue,
                },
            };
            bytes += job.as_deref().map_or(0, InterruptedJob::size);
            candidates.push(Candidate { lease, job });
            if bytes >= MAX_HELD_BYTES {
                bytes = 0;
                self.recover_candidates(std::mem::take(&mut candidates), options, hook, report).await?;
            }
        }
        self.recover_candidates(candidates, options, hook, report).await
    }

    /// Reads the job of a lease for a hook.
    async fn job_of(&self, lease: &Interrupted) -> Result<JobOfLease> {
        let record = match self.store().get(lease.id).await {
            Ok(Some(record)) => record,
            Ok(None) => return Ok(JobOfLease::LeaseLost),
            Err(error) if error.is_unavailable() || error.is_read_only() || error.is_schema() => {
                return Err(error);
            }
            // One unreadable row must not stop the recovery of others.
            Err(error) => {
                tracing::warn!(job_id = %lease.id, %error, "could not read the job for the recovery hook; recovering it without the hook");
                return Ok(JobOfLease::Unreadable);
            }
        };
        if record.status != Status::Running || record.lease_no != lease.running.lease_no {
            return Ok(JobOfLease::LeaseLost);
        }
        let (previous_worker, why) = (lease.running.worker, lease.why);
        Ok(JobOfLease::Read(Box::new(InterruptedJob { record, previous_worker, why })))
    }

    async fn recover_candidates(
        &self,
        mut found: Vec<Candidate>,
        options: &SweepOptions,
        hook: &mut Option<&mut dyn RecoveryHook>,
        report: &mut SweepReport,
    ) -> Result<()> {
        // If a flag was set since the listing, the job is decided again. Flags are never cleared,
        // so there are at most three rounds.
        while !found.is_empty() {
            let mut decided = Vec::with_capacity(found.len());
            let mut batch: Vec<Settlement> = Vec::with_capacity(found.len());
            for candidate in found {
                let decision = match (hook.as_mut(), &candidate.job) {
                    (Some(hook), Some(job)) => hook.decide(job).await,
                    _ => Decision::Default,
                };
                let lease = &candidate.lease;
                match recovery(lease, &decision, options.interruption) {
                    Some(recovery) => {
                        batch.push(settlement(lease, recovery));
                        decided.push(candidate);
                    }
                    None => report.skipped += 1,
                }
            }
            let recovered = self.store().recover(&batch).await?;
            debug_assert_eq!(recovered.len(), batch.len(), "one result per item, in order");
            let is_stored = |recovered: &Recovered| *recovered == Recovered::Settled(Settled::Stored);
            let due = batch.iter().zip(&decided).zip(&recovered).filter_map(
                |((settlement, candidate), recovered)| {
                    // Where a limit applies, another job may start.
                    let when = settlement.leave.requeued_for().unwrap_or(When::NOW);
                    is_stored(recovered).then_some((candidate.lease.queue.as_str(), when))
                },
            );
            self.notifier().notify(due);
            // Recovery may have ended members of flows.
            self.advance_soon();
            found = Vec::new();
            for ((mut candidate, recovered), settlement) in decided.into_iter().zip(recovered).zip(&batch) {
                match recovered {
                    Recovered::Settled(Settled::Stored) => {
                        report.recovered += 1;
                        report.workers.insert(candidate.lease.running.worker);
                        #[cfg(any(feature = "api", feature = "worker"))]
                        crate::client::job_metrics::count_recovered(&candidate.lease.kind, &settlement.leave);
                        self.job_log.recovered(&candidate.lease, &settlement.leave);
                        if settlement.failure.is_some() {
                            self.measure_failures([(&*candidate.lease.queue, &*candidate.lease.kind)]);
                        }
                        if let (Some(hook), Some(job)) = (hook.as_mut(), &candidate.job) {
                            hook.recovered(job).await;
                        }
                    }
                    Recovered::Settled(Settled::LeaseLost) => {}
                    Recovered::Settled(Settled::Flagged(flags)) => {
                        candidate.lease.running.flags = flags;
                        if let Some(job) = &mut candidate.job {
                            job.record.cancel_requested = flags.cancel_requested;
                        }
                        found.push(candidate);
                    }
                    Recovered::Deferred(reason) => report.defer(&candidate.lease, &reason),
                }
            }
        }
        Ok(())
    }
}

/// A lease to recover, and its job for the hook.
struct Candidate {
    lease: Interrupted,
    /// `None` without a hook, or if the job cannot be read: then the default applies.
    job: Option<Box<InterruptedJob>>,
}

enum JobOfLease {
    Read(Box<InterruptedJob>),
    Unreadable,
    /// The job has ended or has a newer lease, so there is nothing to recover.
    LeaseLost,
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
    let leave = lifecycle::recover(&job.running, recovery);
    Settlement {
        lease: job.lease(),
        by: EndedBy::Recovery(job.why),
        seen: Some(job.running.flags),
        failure: failure_of(&job.kind, &leave),
        leave,
        follow_ups: Vec::new(),
        waits: Vec::new(),
    }
}
