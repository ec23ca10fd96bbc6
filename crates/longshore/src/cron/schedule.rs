//! Schedules to store, and the client's methods to manage stored ones.

use chrono::{DateTime, Utc};

use super::line::{CronLine, past_the_calendar};
use super::missed::Missed;
use super::template::Template;
use crate::client::Client;
use crate::enqueue::{Enqueued, NewJob};
use crate::error::{Error, Result};
use crate::store::{Schedule, Ticking};

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
    pub(super) fn stored(self, now: DateTime<Utc>) -> Result<Schedule> {
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
}

fn found(name: &str, found: bool) -> Result<()> {
    if found { Ok(()) } else { Err(unknown(name)) }
}

fn unknown(name: &str) -> Error {
    Error::not_found(format!(
        "schedule `{name}` does not exist; put it first, or look for it among the others"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::cron::{MAX_BACKFILL, ON_TIME};

    fn at(text: &str) -> DateTime<Utc> {
        format!("2026-05-06T{text}Z").parse().unwrap()
    }

    fn job() -> NewJob {
        NewJob::new("report", &7)
    }

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
}
