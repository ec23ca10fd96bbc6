//! `longshore jobs show` as text: every field of a job, and its failed attempts.

use chrono::{DateTime, Utc};
use longshore::{JobId, Status};
use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::duration;
use crate::output::{Fit, Out, Table, clean, instant, or_dash};

/// A job as the API returns it. In lists, `errors` is empty.
#[derive(Deserialize)]
pub(super) struct Job {
    pub(super) id: JobId,
    pub(super) kind: String,
    pub(super) queue: String,
    pub(super) status: Status,
    pub(super) priority: i64,
    pub(super) attempts: u32,
    pub(super) max_attempts: u32,
    pub(super) last_error: Option<String>,
    last_failed_at: Option<DateTime<Utc>>,
    payload: Box<RawValue>,
    result: Option<Box<RawValue>>,
    pub(super) run_at: DateTime<Utc>,
    locked_at: Option<DateTime<Utc>>,
    locked_by: Option<Uuid>,
    /// Absent in the replies of older servers.
    #[serde(default)]
    locked_by_name: Option<String>,
    cancel_requested: bool,
    idempotency_key: Option<String>,
    unique_key: Option<String>,
    /// Absent in the replies of older servers, as is the next field.
    #[serde(default)]
    flow: Option<Uuid>,
    #[serde(default)]
    task: Option<String>,
    tags: Vec<String>,
    flags: Vec<String>,
    context: Option<String>,
    metadata: Option<Box<RawValue>>,
    progress: Option<Box<RawValue>>,
    timeout_seconds: Option<f64>,
    retry: Option<Box<RawValue>>,
    interruptions: u32,
    lease_no: i64,
    pub(super) created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    started_at: Option<DateTime<Utc>>,
    finished_at: Option<DateTime<Utc>>,
    errors: Vec<Attempt>,
    /// Servers before this field existed kept every attempt.
    #[serde(default)]
    errors_omitted: u32,
}

/// An attempt that did not succeed.
#[derive(Deserialize)]
struct Attempt {
    attempt: u32,
    worker: Option<Uuid>,
    ended_at: DateTime<Utc>,
    what: String,
    error: Option<String>,
}

pub(super) fn print(job: &Job, out: &Out) {
    let json = |value: &Option<Box<RawValue>>| value.as_ref().map(|value| value.get().to_owned());
    let labels = |labels: &[String]| (!labels.is_empty()).then(|| labels.join(", "));
    let time = |at| Some(instant(at)).filter(|at| at != "-");
    let fields = [
        ("id", Some(job.id.to_string())),
        ("kind", Some(job.kind.clone())),
        ("queue", Some(job.queue.clone())),
        ("status", Some(job.status.to_string())),
        ("flow", job.flow.map(|flow| flow.to_string())),
        ("task", job.task.clone()),
        ("cancel requested", job.cancel_requested.then(|| "yes".into())),
        ("priority", Some(job.priority.to_string())),
        ("attempts", Some(format!("{} of {}", job.attempts, job.max_attempts))),
        ("interruptions", (job.interruptions > 0).then(|| job.interruptions.to_string())),
        ("lease no", Some(job.lease_no.to_string())),
        ("run at", time(Some(job.run_at))),
        ("created at", time(Some(job.created_at))),
        ("updated at", time(Some(job.updated_at))),
        ("started at", time(job.started_at)),
        ("finished at", time(job.finished_at)),
        ("locked at", time(job.locked_at)),
        (
            "locked by",
            job.locked_by.map(|worker| match &job.locked_by_name {
                Some(name) => format!("{name} ({worker})"),
                None => worker.to_string(),
            }),
        ),
        ("timeout", Some(job.timeout_seconds.map_or_else(|| "none".into(), duration::show_seconds))),
        ("retry", json(&job.retry)),
        ("idempotency key", job.idempotency_key.clone()),
        ("unique key", job.unique_key.clone()),
        ("tags", labels(&job.tags)),
        ("flags", labels(&job.flags)),
        ("context", job.context.clone()),
        ("last failed at", time(job.last_failed_at)),
        ("last error", job.last_error.clone()),
        ("progress", json(&job.progress)),
        ("result", json(&job.result)),
        ("metadata", json(&job.metadata)),
        ("payload", Some(job.payload.get().to_owned())),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            out.line(format_args!("{name:<17}{value}"));
        }
    }
    if job.errors.is_empty() {
        return;
    }
    let mut table = Table::new([
        ("attempt", Fit::Whole),
        ("ended", Fit::Whole),
        ("when", Fit::Whole),
        ("error", Fit::Cut),
        ("worker", Fit::WholeOrOmitted),
    ]);
    for attempt in &job.errors {
        table.row([
            attempt.attempt.to_string(),
            attempt.what.clone(),
            out.time(attempt.ended_at),
            clean(or_dash(attempt.error.as_deref())),
            attempt.worker.map_or_else(|| "-".into(), |worker| worker.to_string()),
        ]);
    }
    out.line("");
    if job.errors_omitted > 0 {
        out.line(format_args!("{} older attempts are no longer kept", job.errors_omitted));
    }
    out.table(&table, "");
}
