//! `longshore dead`: lists, redrives and purges jobs that failed permanently.

use chrono::{DateTime, SecondsFormat, Utc};
use longshore::{Fingerprint, JobId, Status};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::bulk::{Action, JobFilter, count, for_all_matching, for_each_id};
use super::find;
use super::jobs::{Shown, delete, full_page, next_page, page_request, print_page};
use super::repeat::repeat;
use crate::args::{Dead, DeadGroups, DeadList, Filter, PageArgs, Purge, Redrive};
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, Progress, RawObject, Table};

pub(super) async fn run(endpoint: &Endpoint, command: Dead, out: &Out) -> Outcome {
    match command {
        Dead::List(args) => repeat(&args.every, out, async |out| list(endpoint, &args, out).await).await,
        Dead::Groups(args) => repeat(&args.every, out, async |out| groups(endpoint, &args, out).await).await,
        Dead::Redrive(args) if args.ids.is_empty() => redrive_all(endpoint, args, out).await,
        Dead::Redrive(args) => for_each_id(&args.ids, out, async |id| redrive(endpoint, id).await).await,
        Dead::Purge(args) => purge(endpoint, args, out).await,
    }
}

async fn list(endpoint: &Endpoint, args: &DeadList, out: &Out) -> Outcome {
    let filter = [("kind", args.kind.as_deref()), ("queue", args.queue.as_deref())];
    let get = async |page: &PageArgs| {
        page_request(endpoint.get(&["dead-letters"]), &filter, page, out)?.send().await
    };
    let reply = full_page(&args.page, out, get).await?;
    let next = next_page("longshore dead list", &filter, &args.page);
    let status = Some(Status::FailedPermanent);
    if print_page(&reply, &next, "no dead letters match", status, out)? == Shown::Nothing {
        find::suggest_filter(endpoint, args.kind.as_deref(), args.queue.as_deref(), out).await;
    }
    Ok(Code::Done)
}

/// A group of failures as the API returns it.
#[derive(Deserialize)]
struct Group {
    fingerprint: Fingerprint,
    kind: String,
    attempts: u64,
    dead: u64,
    dead_or_more: bool,
    first_seen: DateTime<Utc>,
    last_seen: DateTime<Utc>,
    error: String,
}

async fn groups(endpoint: &Endpoint, args: &DeadGroups, out: &Out) -> Outcome {
    let since = args.since.map(|since| since.instant().to_rfc3339_opts(SecondsFormat::Millis, true));
    let request = endpoint.get(&["failures"]).query("kind", args.kind.as_deref());
    let reply = request.query("seen_after", since).query("limit", Some(args.limit)).send().await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
        return Ok(Code::Done);
    }
    let groups: Vec<Group> = reply.read()?;
    let mut table = Table::new([
        ("failure", Fit::Whole),
        ("kind", Fit::Cut),
        ("attempts", Fit::Whole),
        ("dead", Fit::Whole),
        ("first", Fit::Whole),
        ("last", Fit::Whole),
        ("newest error", Fit::CutLast),
    ]);
    for group in &groups {
        let more = if group.dead_or_more { "+" } else { "" };
        table.row([
            group.fingerprint.to_string(),
            group.kind.clone(),
            group.attempts.to_string(),
            format!("{}{more}", group.dead),
            out.age(group.first_seen),
            out.age(group.last_seen),
            group.error.lines().next().unwrap_or_default().to_owned(),
        ]);
    }
    out.table(&table, "no failures match");
    if groups.len() == args.limit as usize {
        out.note(format_args!("there may be more: --limit {}", args.limit.saturating_mul(2).min(200)));
    }
    Ok(Code::Done)
}

async fn redrive(endpoint: &Endpoint, id: JobId) -> Result<String, Failure> {
    endpoint.post(&["dead-letters", &id.to_string(), "redrive"]).send().await?;
    Ok("queued".into())
}

/// The body of a redrive request.
#[derive(Serialize)]
struct RedriveRequest<'a> {
    kind: Option<&'a str>,
    queue: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<Fingerprint>,
    limit: u32,
    after: Option<JobId>,
}

/// The result of one redrive request.
#[derive(Deserialize)]
struct RedriveResult {
    redriven: u64,
    skipped: u64,
    next: Option<JobId>,
}

async fn redrive_all(endpoint: &Endpoint, args: Redrive, out: &Out) -> Outcome {
    const JOBS_PER_REQUEST: u32 = 500;
    let (mut redriven, mut skipped, mut after) = (0, 0, None);
    let mut left = args.limit.unwrap_or(u32::MAX);
    let mut progress = None;
    if Progress::is_visible() {
        let limit = args.limit.map(u64::from);
        let jobs = if let Some(failure) = args.failure {
            let group: Group = endpoint.get(&["failures", &failure.to_string()]).send().await?.read()?;
            limit.map_or(group.dead, |limit| group.dead.min(limit))
        } else {
            let filter = Filter { kind: args.kind.clone(), queue: args.queue.clone(), ..Filter::default() };
            let filter = JobFilter::new(Some(Status::FailedPermanent), filter);
            count(endpoint, Action::Retry, &filter, limit).await?
        };
        progress = Some(Progress::of(jobs));
    }
    while left > 0 {
        let limit = left.min(JOBS_PER_REQUEST);
        left -= limit;
        let (kind, queue) = (args.kind.as_deref(), args.queue.as_deref());
        let request = RedriveRequest { kind, queue, failure: args.failure, limit, after };
        let step: RedriveResult =
            endpoint.post(&["dead-letters", "redrive"]).body(&request).send().await?.read()?;
        redriven += step.redriven;
        skipped += step.skipped;
        if let Some(progress) = &mut progress {
            progress.advance(step.redriven + step.skipped);
        }
        after = step.next;
        if after.is_none() {
            break;
        }
    }
    drop(progress);
    if out.json {
        out.document(&json!({ "redriven": redriven, "skipped": skipped }));
    } else {
        out.line(format_args!("redriven: {redriven}"));
    }
    Ok(Code::Done)
}

async fn purge(endpoint: &Endpoint, args: Purge, out: &Out) -> Outcome {
    if args.ids.is_empty() {
        let filter = JobFilter::new(Some(Status::FailedPermanent), args.filter);
        return for_all_matching(endpoint, Action::Delete, &filter, &args.confirm, out).await;
    }
    for_each_id(&args.ids, out, async |id| {
        require_dead_letter(endpoint, id).await?;
        delete(endpoint, id).await
    })
    .await
}

/// Rejects jobs that are not dead letters, which the API would also delete.
async fn require_dead_letter(endpoint: &Endpoint, id: JobId) -> Result<(), Failure> {
    #[derive(Deserialize)]
    struct Job {
        status: Status,
    }

    let job: Job = endpoint.get(&["jobs", &id.to_string()]).send().await?.read()?;
    match job.status {
        Status::FailedPermanent => Ok(()),
        other => Err(Failure::new(
            Code::Conflict,
            format_args!(
                "job {id} is not a dead letter: it is {other}; to delete finished jobs, use `longshore jobs delete`"
            ),
        )),
    }
}
