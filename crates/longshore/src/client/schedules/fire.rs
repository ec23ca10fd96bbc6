//! Firing due ticks: one job for each tick, regardless of how many processes try. `missed`
//! decides which ticks get a job; the engine stores a tick only once.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::template::{Template, tick_key};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::rules::enqueue::{Enqueued, NewJob};
use crate::rules::schedules::line::CronLine;
use crate::rules::schedules::missed::Due;
use crate::store::{Schedule, Ticked};

/// When a schedule that was locked is tried again.
const RETRY_LOCKED: Duration = Duration::from_millis(500);
/// If an attempt to fire takes longer than this and fails, the reason is the database, not the
/// schedule.
const SLOW: Duration = Duration::from_secs(2);

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
    /// The due schedules that this pass could not fire. The others are not affected.
    pub skipped: Vec<Skipped>,
    /// The earliest future tick, on the engine's clock, or a moment from now if a schedule was
    /// skipped; `None` if no schedule is active. A schedule stored later may tick earlier, so
    /// make another pass after a while in any case.
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

/// A due schedule that did not fire. Its ticks stay due, and every pass tries again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Skipped {
    /// The schedule's name.
    pub schedule: String,
    /// Why it did not fire.
    pub reason: String,
}

impl Client {
    /// Makes one pass over the schedules: fires every due tick and returns when the next one is
    /// due.
    ///
    /// Any number of processes may do this at any time; each tick fires once. A schedule that
    /// cannot fire is logged and reported, and does not stop or delay the others.
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
            let began = Instant::now();
            let next = if schedule.next_at > now {
                Ok(Some(schedule.next_at))
            } else {
                self.fire_schedule(schedule, now, hook, &mut report.fired).await
            };
            let (next, reason) = match next {
                Ok(Some(next)) => (Some(next), None),
                Ok(None) => {
                    let reason = "another transaction has locked the schedule or holds its unique key";
                    tracing::info!(schedule = %schedule.name, "a due schedule cannot fire now: {reason}");
                    (Some(now + RETRY_LOCKED), Some(reason.to_owned()))
                }
                Err(error) if self.concerns_all_schedules(&error, began).await => return Err(error),
                Err(error) if error.is_unavailable() => {
                    tracing::warn!(schedule = %schedule.name, %error, "a due schedule cannot fire now; trying again soon");
                    (Some(now + RETRY_LOCKED), Some(error.to_string()))
                }
                Err(error) => {
                    tracing::warn!(schedule = %schedule.name, %error, "a due schedule cannot fire; store it again");
                    (None, Some(error.to_string()))
                }
            };
            report.next_wake = report.next_wake.into_iter().chain(next).min();
            let skipped = reason.map(|reason| Skipped { schedule: schedule.name.clone(), reason });
            report.skipped.extend(skipped);
        }
        Ok(report)
    }

    /// Whether the other schedules cannot fire either, so that the pass ends here.
    async fn concerns_all_schedules(&self, error: &Error, began: Instant) -> bool {
        error.is_read_only()
            || error.is_schema()
            || (error.is_unavailable() && (began.elapsed() > SLOW || self.store().now().await.is_err()))
    }

    /// Fires the due ticks of one schedule and returns its next tick; `None` if another
    /// client's transaction is in the way.
    async fn fire_schedule(
        &self,
        schedule: &Schedule,
        now: DateTime<Utc>,
        hook: &mut dyn TickHook,
        fired: &mut Vec<Fired>,
    ) -> Result<Option<DateTime<Utc>>> {
        let line = CronLine::parse(&schedule.expression, &schedule.zone)?;
        let template = Template::parse(&schedule.template)?;
        let due = Due::of(&line, schedule.missed.parse()?, schedule.next_at, now)?;
        let (mut ticks, mut jobs) = (Vec::new(), Vec::new());
        for (tick, since) in &due.ticks {
            let job = template.tick_job(&schedule.name, *tick, *since)?;
            match hook.decide(schedule, *tick, job).await {
                Tick::Fire(job) => {
                    jobs.push(job.validate_tick(tick_key(&schedule.name, *tick))?);
                    ticks.push(*tick);
                }
                Tick::Veto => tracing::debug!(schedule = %schedule.name, %tick, "a hook vetoed the tick"),
            }
        }
        let enqueued = match self.store().fire(schedule, due.next, ticks.last().copied(), &jobs).await? {
            Ticked::Fired(enqueued) => enqueued,
            // Another process has already fired these ticks. It used the same cron line, so
            // the next tick is the same.
            Ticked::Moved => return Ok(Some(due.next)),
            Ticked::Locked => return Ok(None),
        };
        if due.ticks.is_empty() {
            tracing::info!(schedule = %schedule.name, since = %schedule.next_at, "dropped missed ticks");
        }
        self.notifier().notify_enqueued(&jobs);
        fired.extend(ticks.into_iter().zip(enqueued).map(|(tick, job)| Fired {
            schedule: schedule.name.clone(),
            tick,
            job,
        }));
        Ok(Some(due.next))
    }
}
