//! What ends the wait of a durable step: an event or its deadline. The rule is the same for Rust
//! handlers (`worker/steps.rs`) and for workers that call the API (`api/leases/steps.rs`).

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::client::Client;
use crate::error::Result;
use crate::store::EventRecord;

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

/// How a wait stands.
#[derive(Debug)]
pub(crate) enum WaitState {
    /// This ended it.
    Over(Winner),
    /// It lasts until one of its events is emitted or the deadline, if it has one.
    Open { until: Option<DateTime<Utc>> },
}

/// Decides how a wait for any of `events`, of which these have been emitted, stands. `time`
/// limits the wait; `earlier` is the deadline that the job journaled when it waited here before.
fn decide(
    emitted: Vec<EventRecord>,
    time: Option<Duration>,
    earlier: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> WaitState {
    // The deadline counts from the first time that the job waited here. If this version of the
    // handler has no deadline, or is the first that has one, that decides.
    let until = time.map(|time| earlier.unwrap_or(now + time));
    let in_time = |event: &EventRecord| until.is_none_or(|until| event.emitted_at <= until);
    match emitted.into_iter().find(in_time) {
        Some(event) => WaitState::Over(Winner { event: Some(event.name), payload: Some(event.payload) }),
        None if until.is_some_and(|until| until <= now) => WaitState::Over(Winner::TIMED_OUT),
        None => WaitState::Open { until },
    }
}

impl Client {
    /// Returns what ended the wait for any of these events, for at most `time`, or how long it
    /// lasts. `earlier` is the deadline that the job journaled when it waited here before.
    pub(crate) async fn wait_state(
        &self,
        events: &[String],
        time: Option<Duration>,
        earlier: Option<DateTime<Utc>>,
    ) -> Result<WaitState> {
        let now = self.now().await?;
        let emitted = if events.is_empty() { Vec::new() } else { self.events(events).await? };
        Ok(decide(emitted, time, earlier, now))
    }
}
