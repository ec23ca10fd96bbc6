//! When a schedule ticks, and which of its due ticks get a job.

pub(crate) mod line;
pub(crate) mod missed;
