//! Schedules to store, and the client's methods to manage stored ones. Firing due ticks belongs
//! to `fire`.

#[cfg(feature = "worker")]
use std::collections::BTreeSet;

use chrono::{DateTime, Utc};

use super::template::Template;
use crate::client::Client;
use crate::error::{Error, Result};
use crate::rules::enqueue::{Enqueued, NewJob};
use crate::rules::schedules::line::{CronLine, past_the_calendar};
use crate::rules::schedules::missed::Missed;
use crate::store::{Schedule, Ticking};

/// What happens to a stored schedule that a worker's code no longer declares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Undeclared {
    /// The worker logs a warning when it starts. The schedule still ticks.
    #[default]
    Report,
    /// The worker removes it when it starts. Jobs that it already enqueued stay.
    Remove,
}

/// A schedule to store. Only its name, cron line and job are required; the defaults are the zone
/// UTC and the policy [`Missed::One`].
///
/// Every tick enqueues the job, due at the tick. The job may not set a time or an idempotency
/// key: each tick's key is derived from the schedule's name and the tick, so that no tick can
/// have two jobs. The job's metadata names its schedule and tick:
/// `{"cron": {"schedule": …, "tick": …}}`, with `since` (the oldest missed tick) if it also
/// covers missed ticks.
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
#[derive(Clone, Debug)]
pub struct NewSchedule {
    name: String,
    expression: String,
    zone: String,
    missed: Missed,
    job: NewJob,
    declared_by: Option<String>,
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
            declared_by: None,
        }
    }

    /// Sets the IANA time zone whose wall clock the line refers to.
    pub fn zone(mut self, zone: impl Into<String>) -> Self {
        self.zone = zone.into();
        self
    }

    /// Sets what happens to missed ticks.
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// Validates the schedule without storing it. The error names the schedule.
    #[cfg(feature = "worker")]
    pub(crate) fn check(&self) -> Result<()> {
        // The time is of no importance: a line is refused only if it has no ticks at all.
        self.clone().into_stored(Utc::now()).map(drop).map_err(|error| {
            let message = format!("schedule `{}`: {error}", self.name);
            Error::invalid(error.field().unwrap_or("schedule"), message)
        })
    }

    /// Validates the schedule and sets its next tick to the first one after `now`.
    pub(super) fn into_stored(self, now: DateTime<Utc>) -> Result<Schedule> {
        let line = CronLine::parse(&self.expression, &self.zone)?;
        let next_at = line.next_after(now).ok_or_else(past_the_calendar)?;
        let mut template = Template::from_job(self.job.validate()?)?;
        if let Some(program) = &self.declared_by {
            template.set_declared_by(program)?;
        }
        let schedule = Schedule {
            name: self.name,
            expression: line.expression().into(),
            zone: line.zone().into(),
            missed: self.missed.validate()?.to_string(),
            template: serde_json::to_string(&template).map_err(|error| {
                Error::internal("could not serialize the job template").with_source(error)
            })?,
            paused: false,
            next_at,
            last_at: None,
        };
        schedule.validate()?;
        // Check that the template still fits with the metadata a tick adds: fail now, not
        // at the first tick.
        template.tick_job(&schedule.name, next_at, Some(next_at))?.validate()?;
        Ok(schedule)
    }
}

impl Client {
    /// Creates a schedule or updates the one with that name; returns the stored schedule.
    ///
    /// Meant to be called whenever a process starts. Storing an identical schedule changes
    /// nothing, a paused schedule stays paused, and the next tick is kept unless the line or the
    /// zone differs. In that case the new line applies from now on, and ticks of the old line
    /// that have not fired are dropped.
    pub async fn put_schedule(&self, schedule: NewSchedule) -> Result<Schedule> {
        let job = schedule.job.clone().validate()?;
        self.check_job(&job.kind, Some(&job.queue), &job.payload).await?;
        let schedule = schedule.into_stored(self.store().now().await?)?;
        self.store().put_schedule(&schedule).await
    }

    /// Stores the schedules that a program declares in its code. Returns the names of those that
    /// it declared earlier and no longer does. They still tick, unless `undeclared` removes them.
    #[cfg(feature = "worker")]
    pub(crate) async fn declare_schedules(
        &self,
        program: &str,
        declared: Vec<NewSchedule>,
        undeclared: Undeclared,
    ) -> Result<Vec<String>> {
        // A program that declares none may be another part of the application.
        if declared.is_empty() && undeclared == Undeclared::Report {
            return Ok(Vec::new());
        }
        let mut names = BTreeSet::new();
        for mut schedule in declared {
            schedule.declared_by = Some(program.into());
            names.insert(self.put_schedule(schedule).await?.name);
        }
        let mut found = Vec::new();
        for schedule in self.schedules().await? {
            let is_declared_by = |template: Template| template.declared_by().as_deref() == Some(program);
            if !names.contains(&schedule.name)
                && Template::parse(&schedule.template).is_ok_and(is_declared_by)
            {
                if undeclared == Undeclared::Remove {
                    // Another process may have removed it meanwhile.
                    self.store().remove_schedule(&schedule.name).await?;
                }
                found.push(schedule.name);
            }
        }
        Ok(found)
    }

    /// Lists all schedules, ordered by name.
    pub async fn schedules(&self) -> Result<Vec<Schedule>> {
        self.store().schedules().await
    }

    /// Pauses a schedule: it does not tick. Jobs that it already enqueued still run.
    pub async fn pause_schedule(&self, name: &str) -> Result<()> {
        require_found(name, self.store().set_ticking(name, Ticking::Paused).await?)
    }

    /// Resumes a paused schedule. Ticks that passed meanwhile are missed, and the schedule's
    /// policy decides: [`Missed::Skip`] drops them, [`Missed::One`] enqueues one job for all of
    /// them, [`Missed::All`] backfills.
    pub async fn resume_schedule(&self, name: &str) -> Result<()> {
        require_found(name, self.store().set_ticking(name, Ticking::Running).await?)
    }

    /// Enqueues a schedule's job now, in addition to its ticks: the next tick does not change. A
    /// paused schedule can be run too.
    pub async fn run_schedule_now(&self, name: &str) -> Result<Enqueued> {
        let schedules = self.store().schedules().await?;
        let Some(schedule) = schedules.iter().find(|schedule| schedule.name == name) else {
            return Err(unknown_schedule(name));
        };
        self.enqueue(Template::parse(&schedule.template)?.manual_job(name)?).await
    }

    /// Removes a schedule. Jobs that it already enqueued stay.
    pub async fn remove_schedule(&self, name: &str) -> Result<()> {
        require_found(name, self.store().remove_schedule(name).await?)
    }
}

fn require_found(name: &str, found: bool) -> Result<()> {
    if found { Ok(()) } else { Err(unknown_schedule(name)) }
}

fn unknown_schedule(name: &str) -> Error {
    Error::not_found(format!(
        "schedule `{name}` does not exist; create it first, or list the schedules to find its name"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::client::schedules::{MAX_BACKFILL, ON_TIME};

    fn at(text: &str) -> DateTime<Utc> {
        format!("2026-05-06T{text}Z").parse().unwrap()
    }

    fn job() -> NewJob {
        NewJob::new("report", &7)
    }

    /// The field by which a schedule is refused.
    fn refused(schedule: NewSchedule) -> String {
        schedule.into_stored(at("08:00:00")).unwrap_err().field().unwrap().to_owned()
    }

    #[test]
    fn every_bad_field_is_refused_by_name() {
        let nightly = |job| NewSchedule::new("nightly", "0 3 * * *", job);
        assert_eq!(refused(NewSchedule::new("", "0 3 * * *", job())), "name");
        assert_eq!(refused(NewSchedule::new("x".repeat(129), "0 3 * * *", job())), "name");
        assert_eq!(refused(NewSchedule::new("nightly", "0 25 * * *", job())), "expression");
        assert_eq!(refused(NewSchedule::new("nightly", "0 0 30 2 *", job())), "expression");
        assert_eq!(refused(nightly(job()).zone("Mars/Olympus")), "zone");
        assert_eq!(refused(nightly(job()).missed(Missed::All { limit: 0 })), "missed");
        assert_eq!(refused(nightly(job()).missed(Missed::All { limit: MAX_BACKFILL + 1 })), "missed");
        assert_eq!(refused(nightly(NewJob::new("", &7))), "kind");
        assert_eq!(refused(nightly(job().queue(""))), "queue");
        assert_eq!(refused(nightly(job().delay(ON_TIME))), "run_at");
        assert_eq!(refused(nightly(job().run_at(at("09:00:00")))), "run_at");
        assert_eq!(refused(nightly(job().idempotency_key("mine"))), "idempotency_key");
        let metadata = |json: String| job().metadata(RawValue::from_string(json).unwrap());
        assert_eq!(refused(nightly(metadata("[1]".into()))), "metadata");
        // It fits by itself, but not with the metadata a tick adds.
        let full = format!(r#"{{"fill":"{}"}}"#, "x".repeat(64 * 1024 - 11));
        metadata(full.clone()).validate().unwrap();
        assert_eq!(refused(nightly(metadata(full))), "metadata");
    }
}
