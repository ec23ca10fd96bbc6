//! `longshore dead`: lists, redrives and purges jobs that failed permanently.

use longshore::{JobId, Status};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::bulk::{Action, JobFilter, count, for_all_matching, for_each_id};
use super::find;
use super::jobs::{Shown, delete, full_page, next_page, page_request, print_page};
use super::repeat::repeat;
use crate::args::{Dead, DeadList, Filter, PageArgs, Purge, Redrive};
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, Progress};

pub(super) async fn run(endpoint: &Endpoint, command: Dead, out: &Out) -> Outcome {
    match command {
        Dead::List(args) => repeat(&args.every, out, async |out| list(endpoint, &args, out).await).await,
        Dead::Redrive(args) if args.ids.is_empty() => redrive_all(endpoint, args, out).await,
        Dead::Redrive(args) => {
            for_each_id(endpoint, &args.ids, out, async |id| redrive(endpoint, id).await).await
        }
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

async fn redrive(endpoint: &Endpoint, id: JobId) -> Result<String, Failure> {
    endpoint.post(&["dead-letters", &id.to_string(), "redrive"]).send().await?;
    Ok("queued".into())
}

/// The body of a redrive request.
#[derive(Serialize)]
struct RedriveRequest<'a> {
    kind: Option<&'a str>,
    queue: Option<&'a str>,
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
        let filter = Filter { kind: args.kind.clone(), queue: args.queue.clone(), ..Filter::default() };
        let filter = JobFilter::new(Some(Status::FailedPermanent), filter);
        progress =
            Some(Progress::of(count(endpoint, Action::Retry, &filter, args.limit.map(u64::from)).await?));
    }
    while left > 0 {
        let limit = left.min(JOBS_PER_REQUEST);
        left -= limit;
        let request =
            RedriveRequest { kind: args.kind.as_deref(), queue: args.queue.as_deref(), limit, after };
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
    for_each_id(endpoint, &args.ids, out, async |id| {
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
