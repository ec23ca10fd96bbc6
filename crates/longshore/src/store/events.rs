//! Events: facts with a name that jobs can wait for.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

/// The maximum length of an event's payload, in bytes of JSON.
pub const MAX_EVENT: usize = 64 * 1024;

/// For how many days events are kept. The statements of both engines and the function `emit`
/// repeat this number.
#[cfg(feature = "sqlite")]
pub(crate) const RETENTION_DAYS: i64 = 7;

/// An event.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct EventRecord {
    /// Its name.
    pub name: String,
    /// Its payload.
    pub payload: Box<RawValue>,
    /// When it was emitted.
    pub emitted_at: DateTime<Utc>,
}

/// Whether an emit stored the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Emitted {
    /// It is the first with its name.
    First,
    /// An event with this name exists. It stays as it is.
    Repeated,
}

/// The result of one step of delivery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// The queues of the jobs that are due now, one item per job.
    pub queues: Vec<String>,
    /// Whether more events may wait for delivery.
    pub more: bool,
    /// Where the next step starts, if there is more; `None` at the first event.
    pub after: Option<EventPlace>,
}

/// The place of an event in the order in which events are delivered: when it was emitted, and its name.
pub type EventPlace = (DateTime<Utc>, String);
