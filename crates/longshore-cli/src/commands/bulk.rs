//! Bulk operations: the same change to several jobs, given by id or by a filter.

use std::io::{self, BufRead, IsTerminal, Write};

use chrono::{DateTime, Utc};
use longshore::{JobId, Status};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::args::{Confirm, Filter};
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, Progress, counted};

// ---- by id -------------------------------------------------------------------

/// The result for one job.
#[derive(Serialize)]
struct JobResult {
    job_id: JobId,
    #[serde(flatten)]
    change: Change,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Change {
    Done { status: String },
    Failed { error: &'static str, message: String },
}

/// Applies `act` to each job and prints the result of each. The first failure determines
/// the exit code. Stops early if the queue is unavailable or access is denied, because the
/// other jobs would fail in the same way.
pub(super) async fn for_each_id(
    ids: &[JobId],
    out: &Out,
    act: impl AsyncFn(JobId) -> Result<String, Failure>,
) -> Outcome {
    let mut code = Code::Done;
    let mut results = Vec::with_capacity(ids.len());
    for &job_id in ids {
        let change = match act(job_id).await {
            Ok(status) => {
                if !out.json {
                    out.line(format_args!("{status} {job_id}"));
                }
                Change::Done { status }
            }
            Err(failure) => {
                out.note(format_args!("error: {failure}"));
                if code == Code::Done {
                    code = failure.code;
                }
                Change::Failed { error: failure.code.slug(), message: failure.to_string() }
            }
        };
        results.push(JobResult { job_id, change });
        if matches!(code, Code::Unavailable | Code::Schema | Code::Denied) {
            break;
        }
    }
    if out.json {
        out.document(&results);
    }
    Ok(code)
}

// ---- by filter -----------------------------------------------------------------

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
    Cancel,
    Retry,
    Delete,
}

impl Action {
    fn infinitive(self) -> &'static str {
        match self {
            Action::Cancel => "cancel",
            Action::Retry => "retry",
            Action::Delete => "delete",
        }
    }

    fn participle(self) -> &'static str {
        match self {
            Action::Cancel => "cancelled",
            Action::Retry => "queued",
            Action::Delete => "deleted",
        }
    }
}

/// Which jobs an operation applies to, in the API's format.
#[derive(Serialize)]
pub(super) struct JobFilter {
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    older_than: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    newer_than: Option<DateTime<Utc>>,
}

impl JobFilter {
    pub(super) fn new(status: Option<Status>, filter: Filter) -> Self {
        JobFilter {
            status,
            kind: filter.kind,
            queue: filter.queue,
            tag: filter.tag,
            older_than: filter.older_than.map(|since| since.instant()),
            newer_than: filter.newer_than.map(|since| since.instant()),
        }
    }
}

/// One request of a bulk operation, in the API's format.
#[derive(Serialize)]
struct BulkRequest<'a> {
    action: Action,
    filter: &'a JobFilter,
    dry_run: bool,
    limit: u64,
    cursor: Option<JobId>,
}

/// What the requests so far have done.
#[derive(Default, Deserialize)]
struct Totals {
    matched: u64,
    changed: u64,
    skipped: u64,
    next: Option<JobId>,
}

impl Totals {
    /// How many jobs the operation would change, if these totals come from a dry run.
    fn to_change(&self) -> u64 {
        self.matched.saturating_sub(self.skipped)
    }
}

/// How many jobs one request changes: few enough for the progress bar to move.
const CHANGED_PER_REQUEST: u64 = 500;
/// How many jobs one request counts: the API's maximum.
const COUNTED_PER_REQUEST: u64 = 10_000;

/// Applies the operation to every job that matches the filter, after confirmation.
pub(super) async fn for_all_matching(
    endpoint: &Endpoint,
    action: Action,
    filter: &JobFilter,
    confirm: &Confirm,
    out: &Out,
) -> Outcome {
    let mut progress = None;
    if confirm.dry_run || !confirm.yes || Progress::is_visible() {
        let counted = send_all(endpoint, action, filter, Mode::Count, confirm.limit, |_| {}).await?;
        // With nothing to change there is nothing to confirm. Stop here, so that jobs that match
        // only later are not changed without confirmation.
        if confirm.dry_run || counted.to_change() == 0 {
            return Ok(print(action, &counted, confirm.dry_run, out));
        }
        if !confirm.yes {
            ask_to_confirm(&description(action, &counted))?;
        }
        progress = Some(Progress::of(counted.matched));
    }
    let totals = send_all(endpoint, action, filter, Mode::Change, confirm.limit, |step| {
        if let Some(progress) = &mut progress {
            progress.advance(step);
        }
    })
    .await?;
    drop(progress);
    Ok(print(action, &totals, false, out))
}

/// How many jobs match the filter.
pub(super) async fn count(
    endpoint: &Endpoint,
    action: Action,
    filter: &JobFilter,
    limit: Option<u64>,
) -> Result<u64, Failure> {
    Ok(send_all(endpoint, action, filter, Mode::Count, limit, |_| {}).await?.matched)
}

/// Like [`for_all_matching`], but without confirmation and output. Reports progress to
/// `stepped`.
pub(super) async fn change_all_matching(
    endpoint: &Endpoint,
    action: Action,
    filter: &JobFilter,
    stepped: impl FnMut(u64),
) -> Result<(), Failure> {
    send_all(endpoint, action, filter, Mode::Change, None, stepped).await.map(drop)
}

/// Whether the requests change jobs or only count them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Change,
    Count,
}

/// Sends requests until every matching job, or `limit` of them, is done.
async fn send_all(
    endpoint: &Endpoint,
    action: Action,
    filter: &JobFilter,
    mode: Mode,
    limit: Option<u64>,
    mut stepped: impl FnMut(u64),
) -> Result<Totals, Failure> {
    let mut totals = Totals::default();
    loop {
        let left = limit.unwrap_or(u64::MAX) - totals.matched;
        if left == 0 {
            return Ok(totals);
        }
        let per_request = if mode == Mode::Count { COUNTED_PER_REQUEST } else { CHANGED_PER_REQUEST };
        let bulk = BulkRequest {
            action,
            filter,
            dry_run: mode == Mode::Count,
            limit: left.min(per_request),
            cursor: totals.next,
        };
        let done: Totals = endpoint.post(&["jobs", "bulk"]).body(&bulk).send().await?.read()?;
        stepped(done.matched);
        totals = Totals {
            matched: totals.matched + done.matched,
            changed: totals.changed + done.changed,
            skipped: totals.skipped + done.skipped,
            next: done.next,
        };
        if totals.next.is_none() {
            return Ok(totals);
        }
    }
}

/// Asks for confirmation at a terminal. Without a terminal, `--yes` is required.
fn ask_to_confirm(what: &str) -> Result<(), Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(format_args!(
            "this would {what}; add --yes to do it, or --dry-run to only count them"
        )));
    }
    let _ = write!(io::stderr(), "{what}? [y/N] ");
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    if read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes") {
        Ok(())
    } else {
        Err(Failure::new(Code::Problem, "nothing was changed"))
    }
}

/// What the operation would do, like `cancel 3 jobs`.
fn description(action: Action, counted: &Totals) -> String {
    let change = format!("{} {}", action.infinitive(), self::counted(counted.to_change(), "job"));
    match counted.skipped {
        0 => change,
        skipped => format!("{change} and skip {skipped} (their state does not allow it)"),
    }
}

fn print(action: Action, totals: &Totals, dry_run: bool, out: &Out) -> Code {
    let Totals { matched, changed, skipped, .. } = totals;
    if out.json {
        out.document(&json!({
            "action": action, "matched": matched, "changed": changed, "skipped": skipped, "dry_run": dry_run,
        }));
    } else if dry_run {
        out.line(format_args!("would {}", description(action, totals)));
    } else if *skipped == 0 {
        out.line(format_args!("{}: {changed}", action.participle()));
    } else {
        out.line(format_args!(
            "{}: {changed}, skipped: {skipped} (their state does not allow it, or has changed since)",
            action.participle()
        ));
    }
    Code::Done
}
