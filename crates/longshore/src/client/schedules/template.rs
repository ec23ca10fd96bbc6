//! The job that a schedule stores as its template, and the job of one tick.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::rules::enqueue::{NewJob, Options, UniqueMode, ValidJob};
use crate::rules::keys::TICK_PREFIX;
use crate::rules::lifecycle::When;
use crate::rules::retry::RetryPolicy;

/// A schedule's job as stored: JSON text in the column `template`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Template {
    pub(crate) kind: String,
    pub(crate) payload: Box<RawValue>,
    pub(crate) queue: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
    pub(crate) priority: i16,
    pub(crate) max_attempts: u16,
    /// `null` means no timeout.
    pub(crate) timeout_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) flags: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unique: Option<Unique>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retry: Option<RetryPolicy>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tags: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) context: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) metadata: BTreeMap<String, Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Unique {
    pub(crate) key: String,
    pub(crate) mode: UniqueMode,
}

/// The schedule and tick of a job, stored in its metadata under `cron`.
#[derive(Serialize)]
struct Origin<'a> {
    schedule: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tick: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
}

/// In the metadata of a template, under `cron`.
#[derive(Serialize, Deserialize)]
struct Declared {
    declared_by: String,
}

impl Template {
    pub(super) fn from_job(job: ValidJob) -> Result<Template> {
        if job.when != When::NOW {
            return Err(Error::invalid(
                "run_at",
                "run_at: a schedule's job is due at its tick; remove run_at and delay",
            ));
        }
        if job.idempotency_key.is_some() {
            return Err(Error::invalid(
                "idempotency_key",
                "idempotency_key: a schedule sets its own for each tick; remove it",
            ));
        }
        let not_json = |error| Error::internal("a valid job's payload is not JSON").with_source(error);
        let options = Options::from_stored(job.options.as_deref())?;
        let metadata = match &options.metadata {
            None => BTreeMap::new(),
            Some(metadata) => serde_json::from_str(metadata.get()).map_err(|_| {
                Error::invalid(
                    "metadata",
                    "metadata: a schedule adds its name and the tick, so this must be a JSON object",
                )
            })?,
        };
        Ok(Template {
            kind: job.kind,
            payload: RawValue::from_string(job.payload).map_err(not_json)?,
            queue: job.queue,
            group: job.group,
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

    /// Records which program declares the schedule. It is stored where a tick puts its origin, so
    /// it never reaches a job.
    pub(super) fn set_declared_by(&mut self, program: &str) -> Result<()> {
        let declared = serde_json::value::to_raw_value(&Declared { declared_by: program.into() });
        let not_json =
            |error| Error::internal("could not serialize the name of a program").with_source(error);
        self.metadata.insert("cron".into(), declared.map_err(not_json)?);
        Ok(())
    }

    /// The program that declares the schedule; `None` if an operator or a call stored it.
    pub(super) fn declared_by(&self) -> Option<String> {
        let declared: Declared = serde_json::from_str(self.metadata.get("cron")?.get()).ok()?;
        Some(declared.declared_by)
    }

    pub(crate) fn parse(text: &str) -> Result<Template> {
        serde_json::from_str(text).map_err(|error| {
            Error::invalid(
                "template",
                format!("template: cannot be decoded: {error}; store the schedule again"),
            )
        })
    }

    /// The job of one tick. `since` is the oldest missed tick that the job also covers.
    pub(super) fn tick_job(
        &self,
        schedule: &str,
        tick: DateTime<Utc>,
        since: Option<DateTime<Utc>>,
    ) -> Result<NewJob> {
        let context = format!("tick {} of schedule `{schedule}`", rfc3339(tick));
        let origin = Origin { schedule, tick: Some(rfc3339(tick)), since: since.map(rfc3339) };
        Ok(self.job(context, &origin)?.run_at(tick))
    }

    /// The job of a manual run, which belongs to no tick.
    pub(super) fn manual_job(&self, schedule: &str) -> Result<NewJob> {
        self.job(
            format!("manual run of schedule `{schedule}`"),
            &Origin { schedule, tick: None, since: None },
        )
    }

    fn job(&self, default_context: String, origin: &Origin<'_>) -> Result<NewJob> {
        let not_json =
            |error| Error::internal("could not serialize the job's schedule and tick").with_source(error);
        let mut metadata = self.metadata.clone();
        metadata.insert("cron".into(), serde_json::value::to_raw_value(origin).map_err(not_json)?);
        let mut job = NewJob::from_json(self.kind.as_str(), self.payload.get())
            .queue(self.queue.as_str())
            .priority(self.priority.into())
            .max_attempts(self.max_attempts.into())
            .timeout(self.timeout_ms.map(Duration::from_millis))
            .flags(&self.flags)
            .tags(&self.tags)
            .context(self.context.clone().unwrap_or(default_context))
            .metadata(serde_json::value::to_raw_value(&metadata).map_err(not_json)?);
        if let Some(group) = &self.group {
            job = job.group(group.as_str());
        }
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

/// The idempotency key of a tick's job: the same for every process that fires the tick.
pub(super) fn tick_key(schedule: &str, tick: DateTime<Utc>) -> String {
    format!("{TICK_PREFIX}{schedule}:{}", rfc3339(tick))
}

fn rfc3339(tick: DateTime<Utc>) -> String {
    tick.to_rfc3339_opts(SecondsFormat::AutoSi, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::schedules::NewSchedule;

    fn at(text: &str) -> DateTime<Utc> {
        format!("2026-05-06T{text}Z").parse().unwrap()
    }

    fn job() -> NewJob {
        NewJob::new("report", &7)
    }

    #[test]
    fn a_tick_has_every_option_of_the_template() {
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
            NewSchedule::new("nightly", "0 3 * * *", template).into_stored(at("08:00:00")).unwrap().template;
        let template = Template::parse(&stored).unwrap();
        let tick =
            template.tick_job("nightly", at("03:00:00"), Some(at("01:00:00"))).unwrap().validate().unwrap();
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
    fn a_context_in_the_template_is_kept() {
        let template = Template::from_job(job().context("audit").validate().unwrap()).unwrap();
        for job in [
            template.manual_job("nightly").unwrap(),
            template.tick_job("nightly", at("03:00:00"), None).unwrap(),
        ] {
            let options = Options::from_stored(job.validate().unwrap().options.as_deref()).unwrap();
            assert_eq!(options.context.as_deref(), Some("audit"));
        }
    }
}
