//! What a worker requests and what it gets: leases, with everything needed to run
//! the jobs.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Lease;
use crate::enqueue::{DEFAULT_QUEUE, Options};
use crate::job::{JobId, WorkerId};
use crate::lifecycle::{Flags, Running};
use crate::retry::RetryPolicy;

/// What a worker asks for.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Who asks.
    pub worker: WorkerId,
    /// From which queues.
    pub queues: Vec<String>,
    /// Which kinds it has handlers for; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// Only jobs with at least one of these flags; empty means any job.
    pub accept_flags: Vec<String>,
    /// No job with any of these flags.
    pub forbid_flags: Vec<String>,
    /// How many at most.
    pub limit: u32,
    /// Whether one suspect may be among them.
    pub suspects: Suspects,
}

impl ClaimRequest {
    /// Any kind from the default queue, one suspect allowed.
    pub fn new(worker: WorkerId, limit: u32) -> Self {
        ClaimRequest {
            worker,
            queues: vec![DEFAULT_QUEUE.into()],
            kinds: None,
            accept_flags: Vec::new(),
            forbid_flags: Vec::new(),
            limit,
            suspects: Suspects::One,
        }
    }
}

/// Whether a claim may include a job that was interrupted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspects {
    /// One of them.
    One,
    /// None: this process is running one already.
    Leave,
}

/// What a claim brought.
#[derive(Debug)]
pub struct Claims {
    /// The leased jobs, in the order in which they should start.
    pub jobs: Vec<Claimed>,
    /// Whether there may be more right now: ask again without waiting.
    pub more: bool,
}

/// The text, sharing memory with the last one if that was the same: the jobs of
/// a claim are mostly of few kinds.
pub(crate) fn shared(last: &mut Arc<str>, text: &str) -> Arc<str> {
    if **last != *text {
        *last = text.into();
    }
    last.clone()
}

/// A leased job: all that is needed to run it. Only a claim makes one.
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
}

impl Claimed {
    /// The lease to settle under.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// Which handler runs it.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The queue it came from.
    pub fn queue(&self) -> &str {
        &self.queue
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

    /// How many it may have.
    pub fn max_attempts(&self) -> u16 {
        self.max_attempts
    }

    /// How often a worker died holding it; above 0 it is a suspect.
    pub fn interruptions(&self) -> u16 {
        self.interruptions
    }

    /// How long this attempt may take.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Labels that workers and recovery act on.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    /// Labels for people.
    pub fn tags(&self) -> &[String] {
        &self.options.tags
    }

    /// W3C trace context of the enqueuer.
    pub fn trace(&self) -> Option<&str> {
        self.options.trace.as_deref()
    }

    /// When it was due.
    pub fn run_at(&self) -> DateTime<Utc> {
        self.run_at
    }

    /// When the lease was taken.
    pub fn claimed_at(&self) -> DateTime<Utc> {
        self.claimed_at
    }

    /// How long the next attempt waits if this one fails; `None` if the job's
    /// policy allows no other.
    pub fn backoff(&self) -> Option<Duration> {
        backoff(self.options.retry.as_ref(), self.lease.id, self.attempt)
    }

    /// The row in `running`, seen by a holder whose handler has begun.
    pub(crate) fn running(&self) -> Running {
        Running {
            lease_no: self.lease.lease_no,
            worker: self.lease.worker,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
            interruptions: self.interruptions,
            started: true,
            flags: Flags::default(),
        }
    }
}

/// The delay after a failed attempt, seeded by the job so that it is the same
/// whoever works it out.
pub(crate) fn backoff(policy: Option<&RetryPolicy>, id: JobId, attempt: u16) -> Option<Duration> {
    let (_, seed) = id.0.as_u64_pair();
    match policy {
        Some(policy) => policy.delay(attempt.into(), seed),
        None => RetryPolicy::default().delay(attempt.into(), seed),
    }
}
