//! A claim: what a worker requests, and the leased jobs it gets, with everything
//! needed to run them.

use std::cmp::Reverse;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::rooms::Rooms;
use super::{ClaimCursor, Lease};
use crate::error::Result;
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::{DEFAULT_QUEUE, Options};
use crate::rules::lifecycle::{Ending, LeaseFlags, Running};
use crate::rules::retry::RetryPolicy;

/// How long claims skip waiting rows that cannot be claimed, after one was found. Then a
/// claim tries without the test again.
const SKIP_UNSOUND_FOR: Duration = Duration::from_secs(60);

/// A worker's request for jobs.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The worker.
    pub worker: WorkerId,
    /// The queues to claim from. Those with a cap take turns at being first where their jobs have the same priority: with
    /// each other, and with all the others together. So a backlog in one of them does not delay the others.
    pub queues: Vec<ClaimQueue>,
    /// The kinds that the worker has handlers for; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// If not empty, claim only jobs with at least one of these flags.
    pub accept_flags: Vec<String>,
    /// Do not claim jobs with any of these flags.
    pub forbid_flags: Vec<String>,
    /// The maximum number of jobs.
    pub limit: u32,
    /// How many of them can start at once. A rate counts a claim as a start, so jobs of queues
    /// and groups with a rate are not claimed beyond this number.
    pub startable: u32,
    /// Whether one of the jobs may be a suspect.
    pub suspects: Suspects,
    /// Claim only jobs with at least this priority; `None` means any.
    pub min_priority: Option<i16>,
    /// Whether a wake-up arrived since the last claim with this cursor: a new job is due, most likely where the
    /// last one was found.
    pub woken: bool,
}

/// A queue to claim from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimQueue {
    /// Its name.
    pub name: String,
    /// The maximum number of its jobs in this claim; `None` means any. The limit of the queue holds in any case.
    pub cap: Option<u32>,
}

impl From<&str> for ClaimQueue {
    fn from(name: &str) -> Self {
        ClaimQueue { name: name.into(), cap: None }
    }
}

impl From<String> for ClaimQueue {
    fn from(name: String) -> Self {
        ClaimQueue { name, cap: None }
    }
}

impl ClaimRequest {
    /// A request for jobs of any kind from the default queue, one suspect allowed.
    pub fn new(worker: WorkerId, limit: u32) -> Self {
        ClaimRequest {
            worker,
            queues: vec![DEFAULT_QUEUE.into()],
            kinds: None,
            accept_flags: Vec::new(),
            forbid_flags: Vec::new(),
            limit,
            startable: limit,
            suspects: Suspects::One,
            min_priority: None,
            woken: false,
        }
    }

    /// The lowest priority that it takes.
    pub(crate) fn lowest_priority(&self) -> i16 {
        self.min_priority.unwrap_or(i16::MIN)
    }

    /// Whether a queue has a cap, so that queues take turns.
    #[cfg_attr(
        not(feature = "sqlite"),
        expect(dead_code, reason = "Postgres asks for the room of each queue")
    )]
    pub(crate) fn has_caps(&self) -> bool {
        self.queues.iter().any(|queue| queue.cap.is_some())
    }

    /// The place of each queue among those that take turns, in the `nth` claim. All queues without a cap have the same place.
    pub(crate) fn places(&self, nth: usize) -> Vec<usize> {
        let capped = self.queues.iter().filter(|queue| queue.cap.is_some()).count();
        let mut places = 1..=capped;
        let mut place = |queue: &ClaimQueue| queue.cap.and_then(|_| places.next()).unwrap_or(0);
        self.queues.iter().map(|queue| (place(queue) + nth) % (capped + 1)).collect()
    }
}

/// Whether a claim may include a suspect: a job that was interrupted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspects {
    /// At most one.
    One,
    /// None, because this process already runs one.
    Leave,
}

/// The result of a claim. It alone says when to claim again, apart from wake-ups and polls.
#[derive(Debug)]
pub struct Claims {
    /// The leased jobs, in the order in which they should start.
    pub jobs: Vec<Claimed>,
    /// Whether more jobs may be due: claim again without waiting.
    pub more: bool,
    /// When to claim again, if a due job may wait for that: a rate lets it start, another claim has served its
    /// group, or a claim looks for jobs behind its cursor.
    pub again_in: Option<Duration>,
    /// Whether a due job may wait for the end of another one: its queue or group is at its limit, or it is a suspect.
    /// Claim again when an attempt of this worker has been settled.
    pub after_settle: bool,
    /// The engine's time; `None` if the request could not match a job.
    #[cfg_attr(not(feature = "worker"), allow(dead_code, reason = "only a drain needs it"))]
    pub(crate) at: Option<DateTime<Utc>>,
}

impl Claims {
    /// No jobs.
    pub(crate) const NONE: Claims =
        Claims { jobs: Vec::new(), more: false, again_in: None, after_settle: false, at: None };
}

/// What a claim has found and done at its end. [`ClaimCursor::end`] decides when to claim again.
pub(crate) struct ServedClaim<'a> {
    pub(crate) request: &'a ClaimRequest,
    pub(crate) rooms: &'a Rooms,
    pub(crate) jobs: Vec<Claimed>,
    /// Whether it got as many jobs as it wanted.
    pub(crate) is_full: bool,
    /// Whether it stopped although more jobs may be due.
    pub(crate) stopped_early: bool,
    pub(crate) began: Instant,
    /// The engine's time.
    pub(crate) at: Option<DateTime<Utc>>,
}

/// Remembers, for all claims of this process, that waiting rows cannot be claimed: jobs that are also running or finished,
/// that have no request, or that cannot be read.
#[derive(Debug, Default)]
pub(crate) struct UnsoundRows {
    skipped_until: Mutex<Option<Instant>>,
}

impl UnsoundRows {
    /// Whether claims test each row and skip the unsound ones.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite finds them while it claims"))]
    pub(crate) fn are_skipped(&self) -> bool {
        self.until().is_some_and(|until| Instant::now() < until)
    }

    /// Records that a claim found one. Logs the first one for a while.
    pub(crate) fn note(&self, error: &dyn Display) {
        let mut until = self.until();
        if until.is_none_or(|until| Instant::now() >= until) {
            *until = Some(Instant::now() + SKIP_UNSOUND_FOR);
            tracing::error!(%error, "skipping waiting jobs that cannot be claimed; run `longshore check`");
        }
    }

    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.skipped_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leasing due jobs.
#[async_trait]
pub trait Claiming {
    /// Leases up to `request.limit` due jobs to a live worker and returns them,
    /// ordered by priority across the worker's queues (highest first), then by
    /// `run_at`. Takes nothing below the requested priority or from paused queues,
    /// never exceeds the limit of a queue, and takes at most one job that was
    /// interrupted before. Returns no jobs to a worker that is unknown or was declared
    /// dead.
    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims>;
}

/// Returns `text`, sharing the memory of `last` if they are equal: the jobs of a claim
/// have few distinct kinds and queues.
pub(crate) fn shared(last: &mut Arc<str>, text: &str) -> Arc<str> {
    if **last != *text {
        *last = text.into();
    }
    last.clone()
}

/// The schedule that enqueued a job, and the tick.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct CronOrigin {
    /// The schedule's name.
    pub schedule: String,
    /// The tick: when the job was scheduled to run. `None` for a manual run.
    pub tick: Option<DateTime<Utc>>,
    /// If the job also covers missed ticks: the oldest of them.
    pub since: Option<DateTime<Utc>>,
}

/// A leased job, with everything needed to run it. Only the store creates one.
#[derive(Debug)]
pub struct Claimed {
    pub(crate) lease: Lease,
    pub(crate) kind: Arc<str>,
    pub(crate) queue: Arc<str>,
    pub(crate) priority: i16,
    pub(crate) payload: String,
    pub(crate) attempt: u16,
    pub(crate) max_attempts: u16,
    pub(crate) interruptions: u16,
    pub(crate) timeout: Option<Duration>,
    pub(crate) flags: Vec<String>,
    pub(crate) options: Options,
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) group: Option<Arc<str>>,
    /// Whether its group had a limit when it was claimed, so that its end may let another job start.
    pub(crate) gated: bool,
    pub(crate) flow: Option<FlowId>,
}

impl Claimed {
    /// The lease to settle under.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// The order in which a claim returns jobs: by priority, highest first, then by the time they were due.
    pub(crate) fn order(&self) -> (Reverse<i16>, DateTime<Utc>, JobId) {
        (Reverse(self.priority), self.run_at, self.lease.id)
    }

    /// Its kind, which selects the handler.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Its queue.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// Its group, if it has one.
    pub fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    /// The flow that it is a member of, if it is one.
    pub fn flow(&self) -> Option<FlowId> {
        self.flow
    }

    /// Its priority.
    pub fn priority(&self) -> i16 {
        self.priority
    }

    /// The payload as JSON text.
    pub fn payload(&self) -> &str {
        &self.payload
    }

    /// Which attempt this is; 1 is the first.
    pub fn attempt(&self) -> u16 {
        self.attempt
    }

    /// The maximum number of attempts.
    pub fn max_attempts(&self) -> u16 {
        self.max_attempts
    }

    /// How often it was interrupted: its worker died or hung. Above 0 it is a suspect.
    pub fn interruptions(&self) -> u16 {
        self.interruptions
    }

    /// How long this attempt may take; `None` means no limit.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Its flags: labels that workers and recovery act on.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    /// Its tags: labels for filtering and display.
    pub fn tags(&self) -> &[String] {
        &self.options.tags
    }

    /// Why it was enqueued.
    pub fn context(&self) -> Option<&str> {
        self.options.context.as_deref()
    }

    /// The data that the caller attached, as JSON.
    pub fn metadata(&self) -> Option<&RawValue> {
        self.options.metadata.as_deref()
    }

    /// The schedule that enqueued it, and the tick; `None` if no schedule did. Read from the
    /// metadata.
    ///
    /// ```
    /// # use longshore::{Context, Failure};
    /// async fn report(_: (), ctx: Context) -> Result<(), Failure> {
    ///     // The time that the report is for, even if the job runs late.
    ///     let scheduled = ctx.job().cron().and_then(|cron| cron.tick);
    ///     println!("report for {scheduled:?}");
    ///     Ok(())
    /// }
    /// ```
    pub fn cron(&self) -> Option<CronOrigin> {
        #[derive(Deserialize)]
        struct Metadata {
            cron: CronOrigin,
        }
        let metadata: Metadata = serde_json::from_str(self.metadata()?.get()).ok()?;
        Some(metadata.cron)
    }

    /// The W3C trace context of the caller that enqueued it.
    pub fn trace(&self) -> Option<&str> {
        self.options.trace.as_deref()
    }

    /// When it became due.
    pub fn run_at(&self) -> DateTime<Utc> {
        self.run_at
    }

    /// When the lease was taken.
    pub fn claimed_at(&self) -> DateTime<Utc> {
        self.claimed_at
    }

    /// The delay before the next attempt if this one fails; `None` if the job's retry
    /// policy allows no further attempt.
    pub fn backoff(&self) -> Option<Duration> {
        self.backoff_after(self.attempt)
    }

    /// The same, for another number of attempts.
    pub(crate) fn backoff_after(&self, attempt: u16) -> Option<Duration> {
        backoff(self.options.retry.as_ref(), self.lease.id, attempt)
    }

    /// The end of an attempt that never started. The job was due when it was claimed, but its request may name a later
    /// time, if an operator ran it early.
    pub(crate) fn not_started(&self) -> Ending {
        Ending::NotStarted { run_at: self.run_at.min(self.claimed_at) }
    }

    /// The state as the holder knows it: its handler has started and no flag is raised.
    pub(crate) fn running(&self) -> Running {
        Running {
            lease_no: self.lease.lease_no,
            worker: self.lease.worker,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
            interruptions: self.interruptions,
            started: true,
            flags: LeaseFlags::default(),
        }
    }
}

/// The delay after a failed attempt. It is seeded by the job's id, so that every
/// process computes the same one.
pub(crate) fn backoff(policy: Option<&RetryPolicy>, id: JobId, attempt: u16) -> Option<Duration> {
    let (_, seed) = id.0.as_u64_pair();
    match policy {
        Some(policy) => policy.delay(attempt.into(), seed),
        None => RetryPolicy::default().delay(attempt.into(), seed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_with_a_cap_take_turns_with_all_the_others_together() {
        let capped = |name: &str| ClaimQueue { name: name.into(), cap: Some(2) };
        let queues = vec!["a".into(), capped("b"), "c".into(), capped("d")];
        let request = ClaimRequest { queues, ..ClaimRequest::new(WorkerId::new(), 9) };
        assert_eq!(request.places(0), [0, 1, 0, 2]);
        assert_eq!(request.places(1), [1, 2, 1, 0]);
        assert_eq!(request.places(5), [2, 0, 2, 1]);
        assert_eq!(ClaimRequest::new(WorkerId::new(), 9).places(7), [0]);
    }
}
