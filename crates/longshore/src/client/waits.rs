//! Reads what may have ended the wait of a durable step. [`rules::waits`](crate::rules::waits) decides.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Client;
use crate::error::Result;
use crate::rules::waits::{self, WaitState, Winner};

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
        let emitted = emitted.into_iter().map(|event| {
            (event.emitted_at, Winner { event: Some(event.name), payload: Some(event.payload) })
        });
        Ok(waits::decide(emitted, time, earlier, now))
    }
}
