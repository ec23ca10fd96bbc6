//! `longshore jobs`: lists, shows and changes jobs.

mod record;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use chrono::{DateTime, Datelike, SecondsFormat, Utc};
use longshore::worker::Signals;
use longshore::{JobId, ListFilter, Status};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::bulk::{Action, JobFilter, for_all_matching, for_each_id};
use super::enqueue::{StartTime, read_json};
use super::find;
use super::repeat::repeat;
use super::stats::seconds;
use crate::args::{self, Jobs, PageArgs, Since};
use crate::endpoint::{Endpoint, Reply, Request};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, RawObject, Table, counted, or_dash, quote};

use record::Job;

pub(super) async fn run(endpoint: &Endpoint, command: Jobs, out: &Out) -> Outcome {
    match command {
        Jobs::List(args) => repeat(&args.every, out, async |out| list(endpoint, &args, out).await).await,
        Jobs::Show { id } => show(&endpoint.get(&["jobs", &id.to_string()]).send().await?, out),
        Jobs::Explain { id } => explain(endpoint, id, out).await,
        Jobs::Steps { id } => steps(endpoint, id, out).await,
        Jobs::Cancel(args) => bulk(endpoint, Action::Cancel, args, out).await,
        Jobs::Retry(args) => bulk(endpoint, Action::Retry, args, out).await,
        Jobs::Delete(args) => bulk(endpoint, Action::Delete, args, out).await,
        Jobs::Edit(args) => edit(endpoint, args, out).await,
    }
}

async fn list(endpoint: &Endpoint, args: &args::List, out: &Out) -> Outcome {
    let page = &args.page;
    let statuses = args.status.iter().map(|status| status.as_str()).collect::<Vec<_>>().join(",");
    let time = |since: Option<Since>| {
        since.map(|since| since.instant().to_rfc3339_opts(SecondsFormat::Millis, true))
    };
    let [older_than, newer_than, ended_before, ended_after] =
        [args.older_than, args.newer_than, args.ended_before, args.ended_after].map(time);
    let failure = args.failure.map(|failure| failure.to_string());
    let filter = [
        ("status", (!statuses.is_empty()).then_some(statuses.as_str())),
        ("kind", args.kind.as_deref()),
        ("queue", args.queue.as_deref()),
        ("group", args.group.as_deref()),
        ("tag", args.tag.as_deref()),
        ("error", args.error.as_deref()),
        ("failure", failure.as_deref()),
        ("older_than", older_than.as_deref()),
        ("newer_than", newer_than.as_deref()),
        ("ended_before", ended_before.as_deref()),
        ("ended_after", ended_after.as_deref()),
        ("idempotency_key", args.idempotency_key.as_deref()),
        ("unique_key", args.unique_key.as_deref()),
    ];
    let get = async |page: &PageArgs| page_request(endpoint.get(&["jobs"]), &filter, page, out)?.send().await;
    let reply = full_page(page, out, get).await?;
    let next = next_page("longshore jobs list", &filter, page);
    let status = if let [status] = args.status[..] { Some(status) } else { None };
    if print_page(&reply, &next, "no jobs match", status, out)? == Shown::Nothing {
        find::suggest_filter(endpoint, args.kind.as_deref(), args.queue.as_deref(), out).await;
    }
    Ok(Code::Done)
}

/// How long a list looks for further jobs.
const MAX_SEARCH_TIME: Duration = Duration::from_secs(30);
/// A list does not look for further jobs if it is larger than this, in bytes.
const MAX_SEARCH_BYTES: usize = 16 * 1024 * 1024;
/// A search that takes longer says how to stop it.
const ANNOUNCE_AFTER: Duration = Duration::from_secs(1);

/// Gets a page. The server ends the search for matching jobs after a short time, so this
/// follows the links to the next pages until the page is full. Ctrl-C ends that, and the jobs
/// found so far are shown.
pub(super) async fn full_page(
    page: &PageArgs,
    out: &Out,
    get: impl AsyncFn(&PageArgs) -> Result<Reply, Failure>,
) -> Result<Reply, Failure> {
    let started = Instant::now();
    let limit = page.limit.clamp(1, ListFilter::MAX_LIMIT);
    let mut reply = get(page).await?;
    let (mut signals, mut is_announced) = (None, false);
    while let Some(next) = reply.next {
        let found = reply.items()? as u32;
        if found >= limit || started.elapsed() > MAX_SEARCH_TIME || reply.bytes() > MAX_SEARCH_BYTES {
            break;
        }
        if !is_announced && started.elapsed() > ANNOUNCE_AFTER && io::stderr().is_terminal() {
            out.note("looking for older jobs; press Ctrl-C to stop");
            is_announced = true;
        }
        let rest = PageArgs { limit: limit - found, cursor: Some(next), offset: reply.next_offset };
        let signals = match &mut signals {
            Some(signals) => signals,
            None => signals.insert(Signals::new()?),
        };
        tokio::select! {
            more = get(&rest) => reply.append(more?)?,
            () = signals.next() => break,
        }
    }
    Ok(reply)
}

/// Adds the filter and the page to a list request. The table shows no payloads, so they are
/// requested only for JSON.
pub(super) fn page_request<'a>(
    mut request: Request<'a>,
    filter: &[(&'static str, Option<&str>)],
    page: &PageArgs,
    out: &Out,
) -> Result<Request<'a>, Failure> {
    if page.offset > ListFilter::MAX_OFFSET {
        return Err(Failure::usage(format_args!(
            "offset: {} is too large; use at most {}, and --cursor to go further",
            page.offset,
            ListFilter::MAX_OFFSET
        )));
    }
    for (name, value) in filter {
        request = request.query(name, *value);
    }
    Ok(request
        .query("limit", Some(page.limit))
        .query("offset", (page.offset > 0).then_some(page.offset))
        .query("cursor", page.cursor)
        .query("payload", (!out.json).then_some(false)))
}

/// The command for the next page, without its cursor.
pub(super) fn next_page(command: &str, filter: &[(&'static str, Option<&str>)], page: &PageArgs) -> String {
    let mut line = command.to_owned();
    for (name, value) in filter {
        if let Some(value) = value {
            line.push_str(&format!(" --{} {}", name.replace('_', "-"), quote(value)));
        }
    }
    if page.limit != ListFilter::default().limit {
        line.push_str(&format!(" --limit {}", page.limit));
    }
    line
}

#[derive(Serialize)]
struct PageDocument {
    jobs: Vec<RawObject>,
    next: Option<JobId>,
}

/// Whether a page had jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Jobs,
    /// No job matches, on this page or later.
    Nothing,
}

/// Prints one page of jobs, and the command for the next page if there is one. `status` is the
/// status that all of them have, if the list was filtered by it.
pub(super) fn print_page(
    reply: &Reply,
    next_page: &str,
    when_empty: &str,
    status: Option<Status>,
    out: &Out,
) -> Result<Shown, Failure> {
    if out.json {
        out.document(&PageDocument { jobs: reply.read()?, next: reply.next });
        return Ok(Shown::Jobs);
    }
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("status", Fit::Whole),
        ("kind", Fit::Cut),
        ("age", Fit::WholeOrOmitted),
        ("last error", Fit::CutLast),
        ("attempts", Fit::WholeOrOmitted),
        ("queue", Fit::CutOrOmitted),
        ("due", Fit::WholeOrOmitted),
        ("priority", Fit::WholeOrOmitted),
    ]);
    let jobs: Vec<Job> = reply.read()?;
    for job in &jobs {
        // A job that waits for something else than a time is due at the end of the year 9999.
        let has_time = job.run_at.year() < 9999;
        let is_waiting = has_time && matches!(job.status, Status::Queued | Status::Retrying);
        table.row([
            job.id.to_string(),
            job.status.to_string(),
            job.kind.clone(),
            out.age(job.created_at),
            or_dash(job.last_error.as_deref()).to_owned(),
            format!("{}/{}", job.attempts, job.max_attempts),
            job.queue.clone(),
            out.time(is_waiting.then_some(job.run_at)),
            job.priority.to_string(),
        ]);
    }
    if status.is_some() && out.is_terminal() {
        table = table.without(&["status"]);
    }
    match reply.next {
        // The search was stopped, or took too long.
        Some(_) => out.table(&table, "no jobs match so far; the next page continues the search"),
        None => out.table(&table, when_empty),
    }
    if let Some(next) = reply.next {
        let offset = match reply.next_offset {
            0 => String::new(),
            offset => format!(" --offset {offset}"),
        };
        out.note(format_args!("next page: {next_page} --cursor {next}{offset}"));
    }
    Ok(if jobs.is_empty() && reply.next.is_none() { Shown::Nothing } else { Shown::Jobs })
}

fn show(reply: &Reply, out: &Out) -> Outcome {
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        record::print(&reply.read()?, out);
    }
    Ok(Code::Done)
}

/// Why a job is not running.
#[derive(Deserialize)]
struct Explanation {
    status: Status,
    reason: String,
    message: String,
    due_at: Option<DateTime<Utc>>,
    ahead: Option<u32>,
    estimated_seconds: Option<f64>,
}

async fn explain(endpoint: &Endpoint, id: JobId, out: &Out) -> Outcome {
    let reply = endpoint.get(&["jobs", &id.to_string(), "explain"]).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
        return Ok(Code::Done);
    }
    let explanation: Explanation = reply.read()?;
    let fields = [
        ("status", Some(explanation.status.to_string())),
        ("reason", Some(explanation.reason)),
        ("", Some(explanation.message)),
        ("due", explanation.due_at.map(|at| out.time(at))),
        ("ahead", explanation.ahead.map(|ahead| counted(ahead.into(), "job"))),
        ("starts in", explanation.estimated_seconds.map(|s| format!("about {}", seconds(Some(s))))),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            out.line(format_args!("{name:<11}{value}"));
        }
    }
    Ok(Code::Done)
}

/// A journaled step, in the API's format.
#[derive(Deserialize)]
struct Step {
    name: String,
    status: String,
    value: Option<Box<RawValue>>,
    until: Option<DateTime<Utc>>,
    saved_at: DateTime<Utc>,
}

async fn steps(endpoint: &Endpoint, id: JobId, out: &Out) -> Outcome {
    let reply = endpoint.get(&["jobs", &id.to_string(), "steps"]).send().await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
        return Ok(Code::Done);
    }
    let mut table = Table::new([
        ("step", Fit::Cut),
        ("status", Fit::Whole),
        ("saved", Fit::WholeOrOmitted),
        ("value", Fit::CutOrOmitted),
    ]);
    for step in reply.read::<Vec<Step>>()? {
        let value = match (step.value, step.until) {
            (Some(value), _) => value.get().to_owned(),
            (None, Some(until)) => format!("until {}", out.time(until)),
            (None, None) => "-".into(),
        };
        table.row([step.name, step.status, out.time(step.saved_at), value]);
    }
    out.table(&table, "no steps; a handler stores them with `ctx.step`, `ctx.sleep` and `ctx.event`");
    Ok(Code::Done)
}

/// Applies an action to each of the ids, or to all jobs that match the filter.
async fn bulk(endpoint: &Endpoint, action: Action, args: args::BulkArgs, out: &Out) -> Outcome {
    if args.ids.is_empty() {
        let filter = JobFilter::new(args.status, args.filter);
        return for_all_matching(endpoint, action, &filter, &args.confirm, out).await;
    }
    for_each_id(&args.ids, out, async |id| match action {
        Action::Cancel => cancel(endpoint, id).await,
        Action::Retry => retry(endpoint, id).await,
        Action::Delete => delete(endpoint, id).await,
    })
    .await
}

/// The response to a cancel request.
#[derive(Deserialize)]
struct Cancelled {
    status: String,
}

async fn cancel(endpoint: &Endpoint, id: JobId) -> Result<String, Failure> {
    let reply = endpoint.post(&["jobs", &id.to_string(), "cancel"]).send().await?;
    Ok(reply.read::<Cancelled>()?.status)
}

async fn retry(endpoint: &Endpoint, id: JobId) -> Result<String, Failure> {
    endpoint.post(&["jobs", &id.to_string(), "retry"]).send().await?;
    Ok("queued".into())
}

pub(super) async fn delete(endpoint: &Endpoint, id: JobId) -> Result<String, Failure> {
    endpoint.delete(&["jobs", &id.to_string()]).send().await?;
    Ok("deleted".into())
}

/// The changes to a waiting job, in the API's format.
#[derive(Serialize)]
struct Edit {
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
    #[serde(flatten)]
    when: StartTime,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
}

async fn edit(endpoint: &Endpoint, args: args::Edit, out: &Out) -> Outcome {
    let edit = Edit {
        priority: args.priority,
        when: args.when.when().into(),
        payload: args.payload.map(|payload| read_json("payload", &payload)).transpose()?,
    };
    let reply = endpoint.patch(&["jobs", &args.id.to_string()]).body(&edit).send().await?;
    if !out.json && reply.read::<Job>().is_err() {
        // A token without the scope `read` gets only the id and the status.
        let Changed { id, status } = reply.read()?;
        out.line(format_args!("{status} {id}"));
        return Ok(Code::Done);
    }
    show(&reply, out)
}

/// A job that was changed with a token which may not read it.
#[derive(Deserialize)]
struct Changed {
    id: JobId,
    status: Status,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_for_the_next_page_repeats_the_filter() {
        let filter = [
            ("status", Some("failed_permanent")),
            ("kind", Some("send email")),
            ("queue", None),
            ("unique_key", Some("k")),
        ];
        let page = PageArgs { limit: 7, offset: 20, cursor: None };
        assert_eq!(
            next_page("longshore jobs list", &filter, &page),
            "longshore jobs list --status failed_permanent --kind 'send email' --unique-key k --limit 7"
        );
        let page = PageArgs { limit: 50, ..page };
        assert_eq!(next_page("longshore dead list", &[("tag", None)], &page), "longshore dead list");
    }
}
