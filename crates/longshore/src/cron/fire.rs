//! Firing due ticks: one job for each tick, regardless of how many processes try. `missed`
//! decides which ticks get a job; the engine stores a tick only once.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::line::CronLine;
use super::missed::Due;
use super::template::{Template, tick_key};
use crate::client::Client;
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Result;
use crate::store::Schedule;

/// What a [`TickHook`] decides about a due tick.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "created and consumed once per tick")]
pub enum Tick {
    /// Enqueue this job. Its idempotency key is replaced by the tick's.
    Fire(NewJob),
    /// Enqueue no job; the schedule moves to its next tick.
    Veto,
}

/// Decides about each due tick before it fires. Closures that take the schedule, the tick and
/// its job and return a [`Tick`] implement it.
#[async_trait]
pub trait TickHook: Send {
    /// Decides whether the tick fires, and with which job. Several processes may call their
    /// hooks for the same tick; one decision applies.
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick;
}

#[async_trait]
impl<F: FnMut(&Schedule, DateTime<Utc>, NewJob) -> Tick + Send> TickHook for F {
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick {
        self(schedule, tick, job)
    }
}

/// The result of one pass over the schedules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FiredReport {
    /// The ticks that this pass fired, by schedule, oldest first.
    pub fired: Vec<Fired>,
    /// The earliest future tick, on the engine's clock; `None` if no schedule is active. A
    /// schedule stored later may tick earlier, so make another pass after a while in any case.
    pub next_wake: Option<DateTime<Utc>>,
    /// The time of the pass, on the same clock.
    pub looked_at: DateTime<Utc>,
}

/// One tick that fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Fired {
    /// The schedule's name.
    pub schedule: String,
    /// The tick.
    pub tick: DateTime<Utc>,
    /// The tick's job, or the existing job that owns the template's unique key.
    pub job: Enqueued,
}

impl Client {
    /// Makes one pass over the schedules: fires every due tick and returns when the next one is
    /// due.
    ///
    /// Any number of processes may do this at any time; each tick fires once. A schedule that
    /// cannot be parsed is logged and does not stop the others.
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
    /// client.store().pin_clock(Some(stored.next_at)).await?; // in tests: move the clock to the tick
    /// let report = client.fire_due().await?;
    /// assert_eq!(report.fired[0].tick, stored.next_at);
    /// assert!(report.next_wake > Some(stored.next_at));
    /// # Ok(()) }
    /// # #[cfg(not(feature = "sqlite"))] fn main() {}
    /// ```
    pub async fn fire_due(&self) -> Result<FiredReport> {
        self.fire_due_with(&mut |_: &Schedule, _: DateTime<Utc>, job: NewJob| Tick::Fire(job)).await
    }

    /// Like [`fire_due`](Client::fire_due), and calls `hook` for each due tick.
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
                    tracing::warn!(schedule = %schedule.name, %error, "a due schedule cannot fire; store it again");
                }
            }
        }
        Ok(report)
    }

    /// Fires the due ticks of one schedule and returns its next tick.
    async fn fire_schedule(
        &self,
        schedule: &Schedule,
        now: DateTime<Utc>,
        hook: &mut dyn TickHook,
        fired: &mut Vec<Fired>,
    ) -> Result<DateTime<Utc>> {
        let line = CronLine::parse(&schedule.expression, &schedule.zone)?;
        let template = Template::parse(&schedule.template)?;
        let due = Due::of(&line, schedule.missed.parse()?, schedule.next_at, now)?;
        let (mut ticks, mut jobs) = (Vec::new(), Vec::new());
        for (tick, since) in &due.ticks {
            let job = template.tick_job(&schedule.name, *tick, *since)?;
            match hook.decide(schedule, *tick, job).await {
                Tick::Fire(job) => {
                    jobs.push(job.idempotency_key(tick_key(&schedule.name, *tick)).validate()?);
                    ticks.push(*tick);
                }
                Tick::Veto => tracing::debug!(schedule = %schedule.name, %tick, "a hook vetoed the tick"),
            }
        }
        let enqueued = self.store().fire(schedule, due.next, ticks.last().copied(), &jobs).await?;
        // `None`: another process has already fired these ticks. It used the same cron line,
        // so the next tick is the same.
        let Some(enqueued) = enqueued else { return Ok(due.next) };
        if due.ticks.is_empty() {
            tracing::info!(schedule = %schedule.name, since = %schedule.next_at, "dropped missed ticks");
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
