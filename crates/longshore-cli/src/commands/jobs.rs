//! `longshore jobs`: look at jobs and change them.

use longshore::store::{ListFilter, Page};
use longshore::{Cancelled, Client, JobId, JobRecord, Status};
use serde::Serialize;
use serde_json::value::RawValue;

use super::enqueue::read_payload;
use crate::args::{self, Jobs, PageArgs};
use crate::duration;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, Table, clean, instant, or_dash, quote};

pub(super) async fn run(client: &Client, command: Jobs, out: Out) -> Outcome {
    match command {
        Jobs::List(args) => list(client, args, out).await,
        Jobs::Show { id } => show(client, id, out).await,
        Jobs::Cancel(args) => each(&args.ids, out, async |id| cancel(client, id).await).await,
        Jobs::Retry(args) => each(&args.ids, out, async |id| client.retry(id).await.map(|()| "queued")).await,
        Jobs::Delete(args) => {
            each(&args.ids, out, async |id| client.delete(id).await.map(|()| "deleted")).await
        }
        Jobs::Edit(args) => edit(client, args, out).await,
    }
}

async fn list(client: &Client, args: args::List, out: Out) -> Outcome {
    let filter = ListFilter {
        status: args.status,
        kind: args.kind,
        queue: args.queue,
        tag: args.tag,
        idempotency_key: args.idempotency_key,
        unique_key: args.unique_key,
        ..page_of(&args.page)?
    };
    let page = client.list(&filter).await?;
    print_page(&page, &next_page("longshore jobs list", &filter), "no jobs match", out);
    Ok(Code::Done)
}

/// The paging part of a filter.
pub(super) fn page_of(args: &PageArgs) -> Result<ListFilter, Failure> {
    if args.offset > ListFilter::MAX_OFFSET {
        return Err(Failure::usage(format_args!(
            "offset: {} is too far; at most {}, and --cursor goes on from there",
            args.offset,
            ListFilter::MAX_OFFSET
        )));
    }
    Ok(ListFilter {
        limit: args.limit.clamp(1, ListFilter::MAX_LIMIT),
        offset: args.offset,
        cursor: args.cursor,
        ..ListFilter::default()
    })
}

/// The command for the next page, up to its cursor.
pub(super) fn next_page(command: &str, filter: &ListFilter) -> String {
    let mut line = command.to_owned();
    let options = [
        ("status", filter.status.map(Status::as_str).filter(|_| command.ends_with("jobs list"))),
        ("kind", filter.kind.as_deref()),
        ("queue", filter.queue.as_deref()),
        ("tag", filter.tag.as_deref()),
        ("idempotency-key", filter.idempotency_key.as_deref()),
        ("unique-key", filter.unique_key.as_deref()),
    ];
    for (option, value) in options {
        if let Some(value) = value {
            line.push_str(&format!(" --{option} {}", quote(value)));
        }
    }
    if filter.limit != ListFilter::default().limit {
        line.push_str(&format!(" --limit {}", filter.limit));
    }
    line
}

/// A struct, not a `json!`: payloads must reach the reader as they were stored,
/// and a number that `f64` cannot hold would not survive a detour by `Value`.
#[derive(Serialize)]
struct PageDocument<'a> {
    jobs: &'a [JobRecord],
    next: Option<JobId>,
}

/// One page as a table with a hint for the next, or as a document.
pub(super) fn print_page(page: &Page, next_page: &str, when_empty: &str, out: Out) {
    if out.json {
        return out.document(&PageDocument { jobs: &page.jobs, next: page.next });
    }
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("status", Fit::Whole),
        ("kind", Fit::Cut),
        ("queue", Fit::Cut),
        ("attempts", Fit::WholeOrOut),
        ("priority", Fit::WholeOrOut),
        ("run at", Fit::WholeOrOut),
        ("last error", Fit::CutOrOut),
    ]);
    for job in &page.jobs {
        table.row([
            job.id.to_string(),
            job.status.to_string(),
            job.kind.clone(),
            job.queue.clone(),
            format!("{}/{}", job.attempts, job.max_attempts),
            job.priority.to_string(),
            instant(job.run_at),
            or_dash(job.last_error.as_deref()).to_owned(),
        ]);
    }
    match page.next {
        // A page of a rare filter can be short, even empty, and not the last.
        Some(_) => out.table(&table, "none among the jobs looked at; the next page goes on"),
        None => out.table(&table, when_empty),
    }
    if let Some(next) = page.next {
        out.note(format_args!("next page: {next_page} --cursor {next}"));
    }
}

async fn show(client: &Client, id: JobId, out: Out) -> Outcome {
    let job = client.get(id).await?;
    match out.json {
        true => out.document(&job),
        false => print_job(&job, out),
    }
    Ok(Code::Done)
}

fn print_job(job: &JobRecord, out: Out) {
    let json = |value: &Option<Box<RawValue>>| value.as_ref().map(|value| value.get().to_owned());
    let labels = |labels: &[String]| (!labels.is_empty()).then(|| labels.join(", "));
    let time = |at| Some(instant(at)).filter(|at| at != "-");
    let retry = job.retry.as_ref().and_then(|policy| serde_json::to_string(policy).ok());
    let fields = [
        ("id", Some(job.id.to_string())),
        ("kind", Some(job.kind.clone())),
        ("queue", Some(job.queue.clone())),
        ("status", Some(job.status.to_string())),
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
        ("locked by", job.locked_by.map(|worker| worker.to_string())),
        ("timeout", Some(job.timeout.map_or_else(|| "none".into(), duration::show))),
        ("retry", retry),
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
        ("ended at", Fit::Whole),
        ("error", Fit::Cut),
        ("worker", Fit::WholeOrOut),
    ]);
    for attempt in &job.errors {
        table.row([
            attempt.attempt.to_string(),
            attempt.what.as_str().to_owned(),
            instant(attempt.ended_at),
            clean(or_dash(attempt.error.as_deref())),
            attempt.worker.map_or_else(|| "-".into(), |worker| worker.to_string()),
        ]);
    }
    out.line("");
    out.table(&table, "");
}

async fn cancel(client: &Client, id: JobId) -> longshore::Result<&'static str> {
    Ok(match client.cancel(id).await? {
        Cancelled::Now => "cancelled",
        Cancelled::Pending => "pending",
    })
}

async fn edit(client: &Client, args: args::Edit, out: Out) -> Outcome {
    let mut edit = longshore::Edit::default();
    if let Some(priority) = args.priority {
        edit = edit.priority(priority);
    }
    if let Some(when) = args.when.when() {
        edit = edit.when(when);
    }
    if let Some(payload) = &args.payload {
        edit = edit.payload(read_payload(payload)?);
    }
    client.edit(args.id, edit).await?;
    show(client, args.id, out).await
}

/// What became of one job of several.
#[derive(Serialize)]
struct Answer {
    job_id: JobId,
    #[serde(flatten)]
    result: AnswerResult,
}

#[derive(Serialize)]
#[serde(untagged)]
enum AnswerResult {
    Done { status: &'static str },
    Failed { error: &'static str, message: String },
}

/// Does the same to each job and answers for each; the first failure decides
/// the exit code. A database that is gone ends the round: the rest would only
/// wait for it in turn.
pub(super) async fn each(
    ids: &[JobId],
    out: Out,
    act: impl AsyncFn(JobId) -> longshore::Result<&'static str>,
) -> Outcome {
    let mut code = Code::Done;
    let mut answers = Vec::with_capacity(ids.len());
    for &job_id in ids {
        let result = match act(job_id).await {
            Ok(status) => {
                if !out.json {
                    out.line(format_args!("{status} {job_id}"));
                }
                AnswerResult::Done { status }
            }
            Err(error) => {
                let failure = Failure::from(error);
                out.note(format_args!("error: {failure}"));
                if code == Code::Done {
                    code = failure.code;
                }
                AnswerResult::Failed { error: failure.code.slug(), message: failure.to_string() }
            }
        };
        answers.push(Answer { job_id, result });
        if matches!(code, Code::Unavailable | Code::Schema) {
            break;
        }
    }
    if out.json {
        out.document(&answers);
    }
    Ok(code)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_repeats_the_filter() {
        let filter = ListFilter {
            status: Some(Status::FailedPermanent),
            kind: Some("send email".into()),
            tag: Some("nightly".into()),
            limit: 7,
            offset: 20,
            ..ListFilter::default()
        };
        assert_eq!(
            next_page("longshore jobs list", &filter),
            "longshore jobs list --status failed_permanent --kind 'send email' --tag nightly --limit 7"
        );
        assert_eq!(
            next_page("longshore dead list", &filter),
            "longshore dead list --kind 'send email' --tag nightly --limit 7"
        );
    }

    #[test]
    fn pages_are_clamped_and_far_offsets_point_to_the_cursor() {
        let page = |limit, offset| page_of(&PageArgs { limit, offset, cursor: None });
        assert_eq!(page(0, 0).unwrap().limit, 1);
        assert_eq!(page(1000, 10_000).unwrap().limit, 200);
        let refused = page(1, 10_001).unwrap_err();
        assert!(refused.to_string().contains("--cursor"), "{refused}");
        assert_eq!(refused.code, Code::Usage);
    }
}
