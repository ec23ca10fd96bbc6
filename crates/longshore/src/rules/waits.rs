//! What ends the wait of a durable step: an event or its deadline. The rule is the same for Rust
//! handlers (`worker/steps.rs`) and for workers that call the API (`api/leases/steps.rs`).

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// What came first, as it is stored: the event by its name, so that the order in which the handler
/// lists its waits may change; no event means that the time is up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Winner {
    pub(crate) event: Option<String>,
    pub(crate) payload: Option<Box<RawValue>>,
}

impl Winner {
    const TIMED_OUT: Winner = Winner { event: None, payload: None };

    /// The payload, if it is an event. A payload of `null` is read as none.
    pub(crate) fn into_payload(self) -> Option<Box<RawValue>> {
        self.event.map(|_| self.payload.unwrap_or_default())
    }
}

/// The state of a wait.
#[derive(Debug)]
pub(crate) enum WaitState {
    /// This ended it.
    Over(Winner),
    /// It lasts until one of its events is emitted or, if it has a deadline, until then.
    Open { until: Option<DateTime<Utc>> },
}

/// Decides the state of a wait for any of several events. `emitted` has those that have been emitted, the
/// earliest first; `time` limits the wait; `earlier` is the deadline that the job journaled when it waited
/// here before.
pub(crate) fn decide(
    emitted: impl IntoIterator<Item = (DateTime<Utc>, Winner)>,
    time: Option<Duration>,
    earlier: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> WaitState {
    // The deadline counts from the first time that the job waited here. If the handler has dropped or added
    // its deadline since then, its present version decides.
    let until = time.map(|time| earlier.unwrap_or(now + time));
    let in_time = |(at, _): &(DateTime<Utc>, Winner)| until.is_none_or(|until| *at <= until);
    match emitted.into_iter().find(in_time) {
        Some((_, winner)) => WaitState::Over(winner),
        None if until.is_some_and(|until| until <= now) => WaitState::Over(Winner::TIMED_OUT),
        None => WaitState::Open { until },
    }
}
