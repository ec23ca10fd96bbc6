//! Events: emits them, and wakes the jobs that wait for them. Also journals and reads the steps of a job.

use serde::Serialize;

use super::Client;
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::rules::enqueue::{check_event, check_json};
use crate::rules::lifecycle::When;
use crate::store::{Emitted, EventRecord, Fenced, Journaled, MAX_EVENT, NewStep, StepRecord};

/// The maximum number of jobs per step of delivery, and of events per step of removal.
const STEP: u32 = 1000;

impl Client {
    /// Emits an event: jobs that wait for it continue. The first event with a name wins; a
    /// repetition changes nothing. Events are kept for 7 days, so a job may also wait for an event
    /// that was emitted earlier.
    ///
    /// ```
    /// # use longshore::Client;
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// client.emit("approved:42", &serde_json::json!({ "by": "ada" })).await?;
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn emit(&self, name: &str, payload: &(impl Serialize + ?Sized)) -> Result<Emitted> {
        let payload = serde_json::value::to_raw_value(payload)
            .map_err(|error| Error::invalid("payload", format!("payload: not JSON: {error}")))?;
        check_event("name", name)?;
        check_json("payload", payload.get(), MAX_EVENT)?;
        let emitted = self.store.emit(name, &payload).await?;
        #[cfg(any(feature = "api", feature = "worker"))]
        if emitted == Emitted::First {
            crate::client::job_metrics::count_emitted_event();
        }
        // The event is stored. If this fails, the workers deliver it within a second.
        if let Err(error) = self.deliver_events().await {
            tracing::debug!(%error, event = name, "could not deliver the event now");
        }
        Ok(emitted)
    }

    /// Returns the event with this name, if it was emitted and is still kept.
    pub async fn event(&self, name: &str) -> Result<Option<EventRecord>> {
        Ok(self.store.events(&[name.to_owned()]).await?.pop())
    }

    /// Returns the journaled steps of a job, ordered by name.
    pub async fn steps(&self, id: JobId) -> Result<Vec<StepRecord>> {
        self.store.steps(id).await
    }
}

#[doc(hidden)]
impl Client {
    /// Returns those of the named events that exist, the earliest first.
    pub async fn events(&self, names: &[String]) -> Result<Vec<EventRecord>> {
        self.store.events(names).await
    }

    /// Returns how large the journal of a job is, and its steps with these names.
    pub async fn journaled(&self, id: JobId, names: &[String]) -> Result<Journaled> {
        self.store.journaled(id, names).await
    }

    /// Journals steps that are done, each under its lease.
    pub async fn save_steps(&self, steps: &[NewStep]) -> Result<Vec<Fenced>> {
        self.store.save_steps(steps).await
    }

    /// Wakes the jobs that wait for new events. Returns how many.
    pub async fn deliver_events(&self) -> Result<usize> {
        let (mut woken, mut after) = (0, None);
        loop {
            let delivered = self.store.deliver(after.as_ref(), STEP).await?;
            woken += delivered.queues.len();
            #[cfg(any(feature = "api", feature = "worker"))]
            crate::client::job_metrics::count_delivered_events(delivered.queues.len());
            self.notifier.notify(delivered.queues.iter().map(|queue| (queue.as_str(), When::NOW)));
            if !delivered.more {
                return Ok(woken);
            }
            after = delivered.after;
        }
    }

    /// Removes the events whose time has passed. Returns how many.
    pub async fn remove_old_events(&self) -> Result<u64> {
        let mut removed = 0;
        loop {
            let step = self.store.remove_events(STEP).await?;
            removed += step;
            if step < STEP.into() {
                return Ok(removed);
            }
        }
    }
}
