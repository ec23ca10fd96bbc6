//! Durable steps: what handlers have journaled, and what suspended jobs wait for.

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;

use super::Lease;

/// The maximum length of a step's value, in bytes of JSON.
pub const MAX_STEP_VALUE: usize = 1024 * 1024;

/// The maximum number of steps of a job. Every attempt after the first reads all of them.
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) const MAX_STEPS: usize = 10_000;
/// The maximum number of bytes of all steps of a job.
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) const MAX_JOURNAL: usize = 16 << 20;

/// Why a job cannot have this many steps with this many bytes.
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) fn check_journal(steps: usize, bytes: usize) -> std::result::Result<(), String> {
    if steps > MAX_STEPS {
        Err(format!("the job has more than {MAX_STEPS} steps; split it into several jobs"))
    } else if bytes > MAX_JOURNAL {
        Err(format!(
            "the values of the job's steps exceed {MAX_JOURNAL} bytes; store them elsewhere and return where they are"
        ))
    } else {
        Ok(())
    }
}

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

impl StepRecord {
    /// The bytes of its name and of its value.
    #[cfg(feature = "api")]
    pub(crate) fn bytes(&self) -> usize {
        let value = match &self.state {
            StepState::Done(value) => value.get().len(),
            StepState::Waiting { .. } => 0,
        };
        self.name.len() + value
    }
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

/// What earlier attempts of a job saved.
#[derive(Clone, Debug)]
pub struct SavedWork {
    /// The newest checkpoint.
    pub checkpoint: Option<Box<RawValue>>,
    /// The journaled steps, ordered by name; `None` if they were left out because of their size.
    pub steps: Option<Vec<StepRecord>>,
}

/// A job that was never leased before has saved nothing.
impl Default for SavedWork {
    fn default() -> Self {
        SavedWork { checkpoint: None, steps: Some(Vec::new()) }
    }
}

/// Which journals of these sizes, in this order, fit together into `max_bytes`. After the first one that
/// does not, only empty ones do.
pub(crate) fn journals_that_fit(sizes: impl Iterator<Item = usize>, max_bytes: usize) -> Vec<bool> {
    let mut left = Some(max_bytes);
    let mut fits = |size: usize| {
        if size == 0 {
            return true;
        }
        left = left.and_then(|left| left.checked_sub(size));
        left.is_some()
    };
    sizes.map(&mut fits).collect()
}

/// A part of a job's journal.
#[derive(Clone, Debug, Default)]
pub struct Journaled {
    /// How many steps the job has journaled.
    pub steps: usize,
    /// The bytes of their values.
    pub bytes: usize,
    /// Those whose names were given, in the order of the names.
    pub named: Vec<StepRecord>,
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

#[cfg(test)]
mod tests {
    use super::journals_that_fit;

    #[test]
    fn journals_fit_until_the_first_that_does_not() {
        let fit = |sizes: &[usize]| journals_that_fit(sizes.iter().copied(), 10);
        assert_eq!(fit(&[4, 6, 0]), [true, true, true]);
        assert_eq!(fit(&[4, 7, 1, 0]), [true, false, false, true]);
        assert_eq!(fit(&[11]), [false]);
    }
}
