//! Schedules: jobs that come by the clock, one for each tick, however many
//! processes look.
//!
//! A schedule is a row: a [`CronLine`], what to do about [`Missed`] ticks, a job
//! as template, and the next tick. [`Client::fire_due`] is one pass over all of
//! them. There is no leader and nothing to remember: whoever finds a tick due
//! enqueues its job in the transaction that moves the row to the next tick, if
//! it still stands at this one. Time is the engine's.
//!
//! Owns what a tick means and which ticks get a job. When to make a pass is the
//! caller's business (a worker's upkeep); how a tick is given to one caller is
//! the engine's ([`Store::fire`](crate::store::Store::fire)).
//!
//! # Time zones and the change of the clocks
//!
//! A line means the wall clocks of its zone. On the days when they are put
//! forward or back, not every reading comes exactly once:
//!
//! - **A line that names hours** (`30 2 * * *`, `0 9-17 * * *`, also `0 */2 * * *`)
//!   **means times of day, and each comes once a day.** One that is skipped in
//!   spring ticks at the first instant after the gap (02:30 at 03:00); if several
//!   are skipped, they tick together, once. One that is doubled in autumn ticks
//!   the first time.
//! - **A line of every hour** (`*/5 * * * *`, `30 * * * *`, `@hourly`) **follows
//!   real time:** it ticks whenever the clock reads so. What is skipped has not
//!   been; the doubled hour has its ticks twice. So `*/5 * * * *` ticks every
//!   five minutes throughout.
//!
//! The zones' rules are those of the IANA database that this build contains.
//!
//! # Missed ticks
//!
//! A tick is on time until the next one is due, but for no longer than a minute
//! ([`ON_TIME`]); one that is found on time has its job, whatever the policy. A
//! tick found later, because no process ran or the schedule was paused, is
//! missed, and [`Missed`] decides.
//! The ticks of one schedule that a pass finds due are dealt with in one
//! transaction.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::client::Client;
use crate::enqueue::{Enqueued, NewJob, Options, UniqueMode, ValidJob};
use crate::error::{Error, Result};
use crate::lifecycle::When;
use crate::retry::RetryPolicy;
use crate::store::{Schedule, Ticking};

mod line;

pub use line::CronLine;

/// A tick is on time until the next one is due, but for no longer than this.
pub const ON_TIME: Duration = Duration::from_secs(60);
/// The most ticks that [`Missed::All`] makes up for.
pub const MAX_BACKFILL: u32 = 1000;

/// What becomes of ticks that nobody fired in time.
///
/// ```
/// use longshore::Missed;
///
/// assert_eq!("all:24".parse::<Missed>()?, Missed::All { limit: 24 });
/// assert_eq!(Missed::One.to_string(), "one");
/// # Ok::<(), longshore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missed {
    /// They are dropped.
    Skip,
    /// One job makes up for all of them: that of the newest tick that is due.
    #[default]
    One,
    /// Each has its job, oldest first: a backfill. Of more than `limit`, the
    /// newest are made up for and the others dropped.
    All {
        /// At most this many, 1 to [`MAX_BACKFILL`].
        limit: u32,
    },
}

impl Missed {
    fn validate(self) -> Result<Self> {
        match self {
            Missed::All { limit } if !(1..=MAX_BACKFILL).contains(&limit) => Err(Error::invalid(
                "missed",
                format!(
                    "missed: a limit of {limit} is out of range; use all:1 to all:{MAX_BACKFILL}, or skip"
                ),
            )),
            policy => Ok(policy),
        }
    }
}

impl fmt::Display for Missed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missed::Skip => f.write_str("skip"),
            Missed::One => f.write_str("one"),
            Missed::All { limit } => write!(f, "all:{limit}"),
        }
    }
}

impl FromStr for Missed {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        let limit = |number: &str| number.parse().ok().map(|limit| Missed::All { limit });
        let policy = match word {
            "skip" => Some(Missed::Skip),
            "one" => Some(Missed::One),
            _ => word.strip_prefix("all:").and_then(limit),
        };
        let unknown =
            || Error::invalid("missed", format!("missed: `{word}` does not exist; use skip, one or all:100"));
        policy.ok_or_else(unknown)?.validate()
    }
}

/// A schedule to be put. Only its name, line and job are needed; the zone is
/// UTC and [`Missed::One`] the policy unless it says otherwise.
///
/// The job is what every tick enqueues, due at the tick. It has no time and no
/// idempotency key of its own: each tick's key is made from the schedule's name
/// and the tick, so that no tick can have two jobs. The job's metadata says
/// which tick of which schedule it is: `{"cron": {"schedule": …, "tick": …}}`,
/// with `since` (the oldest tick) if it makes up for others.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
/// # use longshore::Client;
/// use longshore::{Missed, NewJob, NewSchedule};
///
/// # let client = Client::connect("sqlite::memory:").await?;
/// # client.migrate().await?;
/// let job = NewJob::new("report", &serde_json::json!({ "pages": "all" })).queue("slow");
/// let nightly = NewSchedule::new("nightly", "30 2 * * *", job)
///     .zone("Europe/Berlin")
///     .missed(Missed::All { limit: 7 });
/// let stored = client.put_schedule(nightly).await?;
/// assert_eq!(stored.missed, "all:7");
/// # Ok(()) }
/// # #[cfg(not(feature = "sqlite"))] fn main() {}
/// ```
#[derive(Debug)]
pub struct NewSchedule {
    name: String,
    expression: String,
    zone: String,
    missed: Missed,
    job: NewJob,
}

impl NewSchedule {
    /// A schedule that enqueues `job` at every tick of the line.
    pub fn new(name: impl Into<String>, expression: impl Into<String>, job: impl Into<NewJob>) -> Self {
        NewSchedule {
            name: name.into(),
            expression: expression.into(),
            zone: "UTC".into(),
            missed: Missed::default(),
            job: job.into(),
        }
    }

    /// The IANA time zone whose wall clocks the line means.
    pub fn zone(mut self, zone: impl Into<String>) -> Self {
        self.zone = zone.into();
        self
    }

    /// What becomes of missed ticks.
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// Checks everything, and gives it the first tick after `now`.
    fn stored(self, now: DateTime<Utc>) -> Result<Schedule> {
        let line = CronLine::parse(&self.expression, &self.zone)?;
        let next_at = line.next_after(now).ok_or_else(past_the_calendar)?;
        let template = Template::of(self.job.validate()?)?;
        let schedule = Schedule {
            name: self.name,
            expression: line.expression().into(),
            zone: line.zone().into(),
            missed: self.missed.validate()?.to_string(),
            template: serde_json::to_string(&template)
                .map_err(|error| Error::internal("a job could not be written down").with_source(error))?,
            paused: false,
            next_at,
            last_at: None,
        };
        schedule.validate()?;
        // What a tick adds must fit as well, today rather than at night.
        template.tick(&schedule.name, next_at, Some(next_at))?.validate()?;
        Ok(schedule)
    }
}

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
pub trait TickReferee: Send {
    /// What should become of the tick. Several processes may ask about the same
    /// one; one decision applies.
    async fn decide(&mut self, schedule: &Schedule, tick: DateTime<Utc>, job: NewJob) -> Tick;
}

#[async_trait]
impl<F: FnMut(&Schedule, DateTime<Utc>, NewJob) -> Tick + Send> TickReferee for F {
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
    /// Creates a schedule or changes the one of that name; returns what is
    /// stored. Meant to be called at every start of every process: putting what
    /// is there already changes nothing, a paused schedule stays paused, and the
    /// next tick stays where it is unless the line or the zone differs. Then the
    /// new line counts from now, and ticks of the old one that had not fired are
    /// dropped.
    pub async fn put_schedule(&self, schedule: NewSchedule) -> Result<Schedule> {
        let schedule = schedule.stored(self.store().now().await?)?;
        self.store().put_schedule(&schedule).await
    }

    /// All schedules by name.
    pub async fn schedules(&self) -> Result<Vec<Schedule>> {
        self.store().schedules().await
    }

    /// Holds a schedule's ticks back. Jobs that were enqueued go on.
    pub async fn pause_schedule(&self, name: &str) -> Result<()> {
        found(name, self.store().set_ticking(name, Ticking::Held).await?)
    }

    /// Lets a schedule tick again. Ticks that passed meanwhile are missed ones,
    /// and the schedule's policy decides: [`Missed::Skip`] drops them,
    /// [`Missed::One`] makes up for them by one job, [`Missed::All`] backfills.
    pub async fn resume_schedule(&self, name: &str) -> Result<()> {
        found(name, self.store().set_ticking(name, Ticking::Running).await?)
    }

    /// Enqueues a schedule's job now, as an extra: no tick is moved or stood in
    /// for. A paused schedule may be run too.
    pub async fn run_schedule_now(&self, name: &str) -> Result<Enqueued> {
        let schedules = self.store().schedules().await?;
        let Some(schedule) = schedules.iter().find(|schedule| schedule.name == name) else {
            return Err(unknown(name));
        };
        self.enqueue(Template::read(&schedule.template)?.by_hand(name)?).await
    }

    /// Removes a schedule. Jobs that it enqueued stay.
    pub async fn remove_schedule(&self, name: &str) -> Result<()> {
        found(name, self.store().remove_schedule(name).await?)
    }

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
    pub async fn fire_due_with(&self, referee: &mut dyn TickReferee) -> Result<FiredReport> {
        let schedules = self.store().schedules().await?;
        let now = self.store().now().await?;
        let mut report = FiredReport { looked_at: now, ..FiredReport::default() };
        for schedule in schedules.iter().filter(|schedule| !schedule.paused) {
            let next = if schedule.next_at > now {
                Ok(schedule.next_at)
            } else {
                self.fire_schedule(schedule, now, referee, &mut report.fired).await
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
        referee: &mut dyn TickReferee,
        fired: &mut Vec<Fired>,
    ) -> Result<DateTime<Utc>> {
        let line = CronLine::parse(&schedule.expression, &schedule.zone)?;
        let template = Template::read(&schedule.template)?;
        let due = Due::of(&line, schedule.missed.parse()?, schedule.next_at, now)?;
        let (mut ticks, mut jobs) = (Vec::new(), Vec::new());
        for (tick, since) in &due.ticks {
            let job = template.tick(&schedule.name, *tick, *since)?;
            match referee.decide(schedule, *tick, job).await {
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

fn found(name: &str, found: bool) -> Result<()> {
    if found { Ok(()) } else { Err(unknown(name)) }
}

fn unknown(name: &str) -> Error {
    Error::not_found(format!(
        "schedule `{name}` does not exist; put it first, or look for it among the others"
    ))
}

fn past_the_calendar() -> Error {
    Error::internal("the engine's clock is past the end of the calendar")
}

/// The same for every process that fires this tick.
fn key(schedule: &str, tick: DateTime<Utc>) -> String {
    format!("cron:{schedule}:{}", written(tick))
}

fn written(tick: DateTime<Utc>) -> String {
    tick.to_rfc3339_opts(SecondsFormat::AutoSi, true)
}

// ---- which ticks get a job -----------------------------------------------

/// What is due of one schedule.
#[derive(Debug, PartialEq, Eq)]
struct Due {
    /// The ticks that get a job, oldest first, each with the oldest missed tick
    /// that it makes up for.
    ticks: Vec<(DateTime<Utc>, Option<DateTime<Utc>>)>,
    /// The first tick after now.
    next: DateTime<Utc>,
}

impl Due {
    /// Decides about the ticks from `first`, the one the schedule stands at, up
    /// to now.
    fn of(line: &CronLine, policy: Missed, first: DateTime<Utc>, now: DateTime<Utc>) -> Result<Due> {
        let next = line.next_after(now).ok_or_else(past_the_calendar)?;
        let last = newest(line, first, now, 1).next().unwrap_or(first);
        let on_time = now - last < TimeDelta::seconds(ON_TIME.as_secs() as i64);
        let ticks = match policy {
            Missed::Skip => on_time.then_some((last, None)).into_iter().collect(),
            Missed::One => vec![(last, Some(first).filter(|first| *first < last))],
            Missed::All { limit } => {
                let most = limit as usize + usize::from(on_time);
                newest(line, first, now, most).map(|tick| (tick, None)).collect()
            }
        };
        Ok(Due { ticks, next })
    }
}

/// The newest ticks from `first` to `last`, oldest first. Looks back from the
/// end in growing steps: what a line of seconds has missed in a year is not
/// walked through for the sake of the last hundred.
fn newest(
    line: &CronLine,
    first: DateTime<Utc>,
    last: DateTime<Utc>,
    limit: usize,
) -> impl Iterator<Item = DateTime<Utc>> {
    let mut back = TimeDelta::minutes(1);
    loop {
        let from = first.max(last - back);
        let head = (from == first).then_some(first);
        let ticks: Vec<_> =
            head.into_iter().chain(line.ticks_after(from).take_while(|tick| *tick <= last)).collect();
        if from == first || ticks.len() >= limit {
            let dropped = ticks.len().saturating_sub(limit);
            return ticks.into_iter().skip(dropped);
        }
        back = back * 2;
    }
}

// ---- the job of a tick ---------------------------------------------------

/// A job as a schedule keeps it: JSON text in the column `template`.
#[derive(Debug, Serialize, Deserialize)]
struct Template {
    kind: String,
    payload: Box<RawValue>,
    queue: String,
    priority: i16,
    max_attempts: u16,
    /// `null` means for ever.
    timeout_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    flags: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unique: Option<Unique>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry: Option<RetryPolicy>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tags: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    context: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Unique {
    key: String,
    mode: UniqueMode,
}

/// What a job's metadata says about where it comes from.
#[derive(Serialize)]
struct Origin<'a> {
    schedule: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tick: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
}

impl Template {
    fn of(job: ValidJob) -> Result<Template> {
        if job.when != When::NOW {
            return Err(Error::invalid(
                "run_at",
                "run_at: a schedule's job is due at its tick; leave out run_at and delay",
            ));
        }
        if job.idempotency_key.is_some() {
            return Err(Error::invalid(
                "idempotency_key",
                "idempotency_key: a schedule makes one for each tick; leave it out",
            ));
        }
        let not_json = |error| Error::internal("a valid job holds no JSON").with_source(error);
        let options = Options::from_stored(job.options.as_deref())?;
        let metadata = match &options.metadata {
            None => BTreeMap::new(),
            Some(metadata) => serde_json::from_str(metadata.get()).map_err(|_| {
                Error::invalid(
                    "metadata",
                    "metadata: a schedule adds its name and the tick to it; use a JSON object",
                )
            })?,
        };
        Ok(Template {
            kind: job.kind,
            payload: RawValue::from_string(job.payload).map_err(not_json)?,
            queue: job.queue,
            priority: job.priority,
            max_attempts: job.max_attempts,
            timeout_ms: job.timeout.map(|timeout| timeout.as_millis() as u64),
            flags: job.flags,
            unique: job.unique.map(|(key, mode)| Unique { key, mode }),
            retry: options.retry,
            tags: options.tags,
            context: options.context,
            metadata,
            trace: options.trace,
        })
    }

    fn read(text: &str) -> Result<Template> {
        serde_json::from_str(text).map_err(|error| {
            Error::invalid("template", format!("template: does not decode: {error}; put the schedule anew"))
        })
    }

    /// The job of one tick, which may make up for missed ones since another.
    fn tick(&self, schedule: &str, tick: DateTime<Utc>, since: Option<DateTime<Utc>>) -> Result<NewJob> {
        let why = format!("tick {} of schedule `{schedule}`", written(tick));
        let origin = Origin { schedule, tick: Some(written(tick)), since: since.map(written) };
        Ok(self.job(why, &origin)?.run_at(tick))
    }

    /// The job of somebody who did not wait for a tick.
    fn by_hand(&self, schedule: &str) -> Result<NewJob> {
        self.job(
            format!("schedule `{schedule}` was run by hand"),
            &Origin { schedule, tick: None, since: None },
        )
    }

    fn job(&self, why: String, origin: &Origin<'_>) -> Result<NewJob> {
        let not_json = |error| Error::internal("a job's origin is not JSON").with_source(error);
        let mut metadata = self.metadata.clone();
        metadata.insert("cron".into(), serde_json::value::to_raw_value(origin).map_err(not_json)?);
        let mut job = NewJob::from_json(self.kind.as_str(), self.payload.get())
            .queue(self.queue.as_str())
            .priority(self.priority.into())
            .max_attempts(self.max_attempts.into())
            .timeout(self.timeout_ms.map(Duration::from_millis))
            .flags(&self.flags)
            .tags(&self.tags)
            .context(self.context.clone().unwrap_or(why))
            .metadata(serde_json::value::to_raw_value(&metadata).map_err(not_json)?);
        if let Some(Unique { key, mode }) = &self.unique {
            job = job.unique_key(key.as_str(), *mode);
        }
        if let Some(retry) = &self.retry {
            job = job.retry(retry.clone());
        }
        if let Some(trace) = &self.trace {
            job = job.trace(trace.as_str());
        }
        Ok(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> DateTime<Utc> {
        format!("2026-05-06T{text}Z").parse().unwrap()
    }

    fn job() -> NewJob {
        NewJob::new("report", &7)
    }

    fn due(expression: &str, policy: Missed, first: &str, now: &str) -> Vec<(String, Option<String>)> {
        let line = CronLine::parse(expression, "UTC").unwrap();
        let due = Due::of(&line, policy, at(first), at(now)).unwrap();
        assert_eq!(due.next, line.next_after(at(now)).unwrap());
        let time = |tick: DateTime<Utc>| tick.format("%T").to_string();
        due.ticks.into_iter().map(|(tick, since)| (time(tick), since.map(time))).collect()
    }

    fn times(due: &[(String, Option<String>)]) -> Vec<&str> {
        assert!(due.iter().all(|(_, since)| since.is_none()), "{due:?}");
        due.iter().map(|(tick, _)| tick.as_str()).collect()
    }

    // ---- which ticks -----------------------------------------------------

    const EVERY: [Missed; 3] = [Missed::Skip, Missed::One, Missed::All { limit: 2 }];

    #[test]
    fn a_tick_less_than_a_minute_late_is_on_time_under_every_policy() {
        for policy in EVERY {
            assert_eq!(times(&due("*/10 * * * *", policy, "08:00:00", "08:00:00")), ["08:00:00"]);
            assert_eq!(times(&due("*/10 * * * *", policy, "08:00:00", "08:00:59.999")), ["08:00:00"]);
        }
    }

    #[test]
    fn a_tick_is_missed_once_the_next_one_is_due() {
        let seconds = |policy| due("*/20 * * * * *", policy, "08:00:00", "08:00:45");
        assert_eq!(times(&seconds(Missed::Skip)), ["08:00:40"]);
        assert_eq!(seconds(Missed::One), [("08:00:40".into(), Some("08:00:00".into()))]);
        assert_eq!(times(&seconds(Missed::All { limit: 1 })), ["08:00:20", "08:00:40"]);
        assert_eq!(times(&seconds(Missed::All { limit: 9 })), ["08:00:00", "08:00:20", "08:00:40"]);
    }

    #[test]
    fn a_tick_a_minute_late_is_missed() {
        let missed = |policy| due("*/10 * * * *", policy, "08:00:00", "08:01:00");
        assert_eq!(times(&missed(Missed::Skip)), [""; 0]);
        assert_eq!(times(&missed(Missed::One)), ["08:00:00"]);
        assert_eq!(times(&missed(Missed::All { limit: 2 })), ["08:00:00"]);
    }

    #[test]
    fn after_an_outage_the_policy_decides() {
        let missed = |policy| due("*/10 * * * *", policy, "08:00:00", "11:05:00");
        assert_eq!(times(&missed(Missed::Skip)), [""; 0]);
        assert_eq!(missed(Missed::One), [("11:00:00".into(), Some("08:00:00".into()))]);
        assert_eq!(times(&missed(Missed::All { limit: 3 })), ["10:40:00", "10:50:00", "11:00:00"]);
        assert_eq!(missed(Missed::All { limit: 100 }).len(), 19);
    }

    #[test]
    fn a_tick_on_time_comes_besides_what_was_missed() {
        let missed = |policy| due("*/10 * * * *", policy, "08:00:00", "11:00:30");
        assert_eq!(times(&missed(Missed::Skip)), ["11:00:00"]);
        assert_eq!(missed(Missed::One), [("11:00:00".into(), Some("08:00:00".into()))]);
        assert_eq!(times(&missed(Missed::All { limit: 2 })), ["10:40:00", "10:50:00", "11:00:00"]);
    }

    #[test]
    fn the_newest_of_a_year_of_seconds_are_found_without_walking_it() {
        let line = CronLine::parse("* * * * * *", "UTC").unwrap();
        let now = at("08:00:00");
        let due = Due::of(&line, Missed::All { limit: 1000 }, now - TimeDelta::days(365), now).unwrap();
        let ticks: Vec<_> = due.ticks.iter().map(|(tick, _)| *tick).collect();
        assert_eq!((ticks.len(), ticks[0], ticks[1000]), (1001, at("07:43:20"), now));
    }

    #[test]
    fn a_tick_that_is_none_of_the_line_still_counts() {
        // Somebody moved it by hand.
        assert_eq!(times(&due("0 * * * *", Missed::Skip, "08:12:34", "08:12:40")), ["08:12:34"]);
        assert_eq!(times(&due("0 * * * *", Missed::One, "08:12:34", "08:30:00")), ["08:12:34"]);
    }

    #[test]
    fn policies_read_as_they_are_written() {
        for policy in EVERY {
            assert_eq!(policy.to_string().parse::<Missed>().unwrap(), policy);
        }
        for word in ["", "none", "all", "all:", "all:x", "all:0", "all:1001", "all:-1"] {
            let error = word.parse::<Missed>().unwrap_err();
            assert_eq!(error.field(), Some("missed"), "{word}");
        }
    }

    // ---- what may be put -------------------------------------------------

    fn refused(schedule: NewSchedule) -> String {
        schedule.stored(at("08:00:00")).unwrap_err().field().unwrap().to_owned()
    }

    #[test]
    fn every_bad_field_is_refused_by_name() {
        let put = |job| NewSchedule::new("nightly", "0 3 * * *", job);
        assert_eq!(refused(NewSchedule::new("", "0 3 * * *", job())), "name");
        assert_eq!(refused(NewSchedule::new("x".repeat(129), "0 3 * * *", job())), "name");
        assert_eq!(refused(NewSchedule::new("nightly", "0 25 * * *", job())), "expression");
        assert_eq!(refused(NewSchedule::new("nightly", "0 0 30 2 *", job())), "expression");
        assert_eq!(refused(put(job()).zone("Mars/Olympus")), "zone");
        assert_eq!(refused(put(job()).missed(Missed::All { limit: 0 })), "missed");
        assert_eq!(refused(put(job()).missed(Missed::All { limit: MAX_BACKFILL + 1 })), "missed");
        assert_eq!(refused(put(NewJob::new("", &7))), "kind");
        assert_eq!(refused(put(job().queue(""))), "queue");
        assert_eq!(refused(put(job().delay(ON_TIME))), "run_at");
        assert_eq!(refused(put(job().run_at(at("09:00:00")))), "run_at");
        assert_eq!(refused(put(job().idempotency_key("mine"))), "idempotency_key");
        let metadata = |json: String| job().metadata(RawValue::from_string(json).unwrap());
        assert_eq!(refused(put(metadata("[1]".into()))), "metadata");
        // It fits by itself, but not with what a tick adds.
        let full = format!(r#"{{"fill":"{}"}}"#, "x".repeat(64 * 1024 - 11));
        metadata(full.clone()).validate().unwrap();
        assert_eq!(refused(put(metadata(full))), "metadata");
    }

    #[test]
    fn a_tick_has_everything_that_the_template_says() {
        let template = job()
            .queue("slow")
            .priority(-3)
            .max_attempts(9)
            .timeout(None)
            .unique_key("only", UniqueMode::Replace)
            .retry(RetryPolicy::exponential())
            .flags(["big"])
            .tags(["paper"])
            .metadata(RawValue::from_string(r#"{"team":"a"}"#.into()).unwrap())
            .trace("00-aa-bb-01");
        let stored =
            NewSchedule::new("nightly", "0 3 * * *", template).stored(at("08:00:00")).unwrap().template;
        let template = Template::read(&stored).unwrap();
        let tick =
            template.tick("nightly", at("03:00:00"), Some(at("01:00:00"))).unwrap().validate().unwrap();
        assert_eq!((tick.kind(), tick.queue(), tick.payload.as_str()), ("report", "slow", "7"));
        assert_eq!((tick.priority, tick.max_attempts, tick.timeout), (-3, 9, None));
        assert_eq!(tick.unique, Some(("only".into(), UniqueMode::Replace)));
        assert_eq!((tick.flags, tick.when), (vec!["big".into()], When::At(at("03:00:00"))));
        let options = Options::from_stored(tick.options.as_deref()).unwrap();
        assert_eq!((options.retry, options.tags), (Some(RetryPolicy::exponential()), vec!["paper".into()]));
        assert_eq!(options.trace.as_deref(), Some("00-aa-bb-01"));
        assert_eq!(options.context.as_deref(), Some("tick 2026-05-06T03:00:00Z of schedule `nightly`"));
        assert_eq!(
            options.metadata.unwrap().get(),
            r#"{"cron":{"schedule":"nightly","tick":"2026-05-06T03:00:00Z","since":"2026-05-06T01:00:00Z"},"team":"a"}"#
        );
    }

    #[test]
    fn a_context_of_the_template_stands() {
        let template = Template::of(job().context("audit").validate().unwrap()).unwrap();
        for job in
            [template.by_hand("nightly").unwrap(), template.tick("nightly", at("03:00:00"), None).unwrap()]
        {
            let options = Options::from_stored(job.validate().unwrap().options.as_deref()).unwrap();
            assert_eq!(options.context.as_deref(), Some("audit"));
        }
    }
}
