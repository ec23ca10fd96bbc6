//! Durable steps: what handlers have journaled, and what suspended jobs wait for.

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;

use super::Lease;

/// The maximum length of a step's value, in bytes of JSON.
pub const MAX_STEP_VALUE: usize = 1024 * 1024;

/// A journaled step of a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepRecord {
    /// Its name, unique within the job.
    pub name: String,
    /// The lease that stored it.
    pub lease_no: i32,
    /// When it was stored.
    pub saved_at: DateTime<Utc>,
    /// Whether it is done.
    pub state: StepState,
}

/// The state of a journaled step.
#[derive(Clone, Debug)]
pub enum StepState {
    /// It is done, with this value.
    Done(Box<RawValue>),
    /// The job waits here.
    Waiting {
        /// The deadline; `None` means that it waits for events without one.
        until: Option<DateTime<Utc>>,
    },
}

/// A step to journal: it is done.
#[derive(Clone, Debug)]
pub struct NewStep {
    /// The lease under which it was done.
    pub lease: Lease,
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: Box<RawValue>,
}

/// What a suspended job waits for in one of its steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingWait {
    /// The step.
    pub step: String,
    /// The deadline.
    pub until: Option<DateTime<Utc>>,
    /// The events, any of which ends the wait.
    pub events: Vec<String>,
}
