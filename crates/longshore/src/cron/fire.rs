//! Firing due ticks: one job for each tick, regardless of how many processes try.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::line::CronLine;
use super::missed::Due;
use super::template::{Template, key};
use crate::client::Client;
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Result;
use crate::store::Schedule;

/// What is done with a tick that is about to fire.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "made and taken apart once a tick")]
pub enum Tick {
    /// This job is enqueued. Its idempotency key is the tick's, whatever it says.
    Fire(NewJob),
    /// No job; the schedule moves on.
    Veto,
}

/// Has a say about each tick that is about to fire. A closure that takes the
/// schedule, the tick and its job and gives a [`Tick`] is one.
#[async_trait]
pub trait TickHook: Send {
    /// What should become of the tick. Several processes may ask about the same
    /// one; one decision applies.
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick;
}

#[async_trait]
impl<F: FnMut(&Schedule, DateTime<Utc>, NewJob) -> Tick + Send> TickHook for F {
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick {
        self(schedule, tick, job)
    }
}

/// What a pass over the schedules did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FiredReport {
    /// The ticks that this pass fired, by schedule, oldest first.
    pub fired: Vec<Fired>,
    /// The earliest tick to come, by the engine's clock; none if there is no
    /// schedule that ticks. A schedule put meanwhile may come earlier, so look
    /// again after some while in any case.
    pub next_wake: Option<DateTime<Utc>>,
    /// When the pass looked, by the same clock.
    pub looked_at: DateTime<Utc>,
}

/// One tick that fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fired {
    /// The schedule's name.
    pub schedule: String,
    /// The tick.
    pub tick: DateTime<Utc>,
    /// Its job; an existing one, if that has the template's unique key.
    pub job: Enqueued,
}

impl Client {
    /// One pass: fires every tick that is due, and says when the next one is.
    ///
    /// Any number of processes may do this at any time; each tick has one
    /// winner. A schedule that cannot be understood is named in the log and does
    /// not stop the others.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
    /// use longshore::{Client, NewJob, NewSchedule};
    ///
    /// let client = Client::connect("sqlite::memory:").await?;
    /// client.migrate().await?;
    /// let stored = client.put_schedule(NewSchedule::new("beat", "* * * * *", NewJob::new("beat", &()))).await?;
    ///
    /// client.store().pin_clock(Some(stored.next_at)).await?; // for tests: let it be time
    /// let report = client.fire_due().await?;
    /// assert_eq!(report.fired[0].tick, stored.next_at);
    /// assert!(report.next_wake > Some(stored.next_at));
    /// # Ok(()) }
    /// # #[cfg(not(feature = "sqlite"))] fn main() {}
    /// ```
    pub async fn fire_due(&self) -> Result<FiredReport> {
        self.fire_due_with(&mut |_: &Schedule, _: DateTime<Utc>, job: NewJob| Tick::Fire(job)).await
    }

    /// As [`fire_due`](Client::fire_due), with a say about each tick's job.
    pub async fn fire_due_with(&self, hook: &mut dyn TickHook) -> Result<FiredReport> {
        let schedules = self.store().schedules().await?;
        let now = self.store().now().await?;
        let mut report = FiredReport { looked_at: now, ..FiredReport::default() };
        for schedule in schedules.iter().filter(|schedule| !schedule.paused) {
            let next = if schedule.next_at > now {
                Ok(schedule.next_at)
            } else {
                self.fire_schedule(schedule, now, hook, &mut report.fired).await
            };
            match next {
                Ok(next) => report.next_wake = report.next_wake.into_iter().chain([next]).min(),
                Err(error) if error.is_unavailable() || error.is_read_only() || error.is_schema() => {
                    return Err(error);
                }
                Err(error) => {
                    tracing::warn!(schedule = %schedule.name, %error, "a due schedule cannot fire; put it anew");
                }
            }
        }
        Ok(report)
    }

    /// Deals with the due ticks of one schedule; the next one to come.
    async fn fire_schedule(
        &self,
        schedule: &Schedule,
        now: DateTime<Utc>,
        hook: &mut dyn TickHook,
        fired: &mut Vec<Fired>,
    ) -> Result<DateTime<Utc>> {
        let line = CronLine::parse(&schedule.expression, &schedule.zone)?;
        let template = Template::read(&schedule.template)?;
        let due = Due::of(&line, schedule.missed.parse()?, schedule.next_at, now)?;
        let (mut ticks, mut jobs) = (Vec::new(), Vec::new());
        for (tick, since) in &due.ticks {
            let job = template.tick(&schedule.name, *tick, *since)?;
            match hook.decide(schedule, *tick, job).await {
                Tick::Fire(job) => {
                    jobs.push(job.idempotency_key(key(&schedule.name, *tick)).validate()?);
                    ticks.push(*tick);
                }
                Tick::Veto => tracing::debug!(schedule = %schedule.name, %tick, "a tick was vetoed"),
            }
        }
        let enqueued = self.store().fire(schedule, due.next, ticks.last().copied(), &jobs).await?;
        // None: another process has seen to it, and with the same line.
        let Some(enqueued) = enqueued else { return Ok(due.next) };
        if due.ticks.is_empty() {
            tracing::info!(schedule = %schedule.name, since = %schedule.next_at, "missed ticks were dropped");
        }
        self.notifier().notify_enqueued(&jobs);
        fired.extend(ticks.into_iter().zip(enqueued).map(|(tick, job)| Fired {
            schedule: schedule.name.clone(),
            tick,
            job,
        }));
        Ok(due.next)
    }
}
