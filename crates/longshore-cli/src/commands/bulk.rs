//! One order for many jobs: to each of some ids, or to whatever a filter finds.

use std::io::{self, BufRead, IsTerminal, Write};

use chrono::{DateTime, Utc};
use longshore::{JobId, Status};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::args::{Confirm, Filter};
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, Progress, counted, is_wanted};

// ---- by ids ------------------------------------------------------------------

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
    Done { status: String },
    Failed { error: &'static str, message: String },
}

/// Does the same to each job and answers for each; the first failure decides
/// the exit code. A queue that is gone, or shut to us, ends the round: the rest
/// would only hear the same in turn.
pub(super) async fn for_each_id(
    ids: &[JobId],
    out: &Out,
    act: impl AsyncFn(JobId) -> Result<String, Failure>,
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
            Err(failure) => {
                out.note(format_args!("error: {failure}"));
                if code == Code::Done {
                    code = failure.code;
                }
                AnswerResult::Failed { error: failure.code.slug(), message: failure.to_string() }
            }
        };
        answers.push(Answer { job_id, result });
        if matches!(code, Code::Unavailable | Code::Schema | Code::Denied) {
            break;
        }
    }
    if out.json {
        out.document(&answers);
    }
    Ok(code)
}

// ---- by filter -----------------------------------------------------------------

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
    Cancel,
    Retry,
    Delete,
}

impl Action {
    fn verb(self) -> &'static str {
        match self {
            Action::Cancel => "cancel",
            Action::Retry => "retry",
            Action::Delete => "delete",
        }
    }

    fn done(self) -> &'static str {
        match self {
            Action::Cancel => "cancelled",
            Action::Retry => "queued",
            Action::Delete => "deleted",
        }
    }
}

/// JobFilter jobs, as the API takes it.
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

/// One request of a walk, as the API takes it.
#[derive(Serialize)]
struct BulkRequest<'a> {
    action: Action,
    filter: &'a JobFilter,
    dry_run: bool,
    limit: u64,
    cursor: Option<JobId>,
}

/// What requests did so far.
#[derive(Default, Deserialize)]
struct Totals {
    matched: u64,
    changed: u64,
    skipped: u64,
    next: Option<JobId>,
}

impl Totals {
    /// How many an order would change, once it was counted.
    fn to_change(&self) -> u64 {
        self.matched.saturating_sub(self.skipped)
    }
}

/// How many jobs a request changes: few enough for a bar to move.
const STEP: u64 = 500;
/// How many a request counts: the most that the API takes.
const COUNTED: u64 = 10_000;

/// Does the same to whatever the filter finds, once that is confirmed.
pub(super) async fn for_all_matching(
    endpoint: &Endpoint,
    action: Action,
    which: &JobFilter,
    confirm: &Confirm,
    out: &Out,
) -> Outcome {
    let mut progress = None;
    if confirm.dry_run || !confirm.yes || is_wanted() {
        let counted = walk(endpoint, action, which, Walk::Count, confirm.limit, |_| {}).await?;
        // Nobody is asked about nothing, so nothing may be done either.
        if confirm.dry_run || counted.to_change() == 0 {
            return Ok(tell(action, &counted, confirm.dry_run, out));
        }
        if !confirm.yes {
            ask(&would(action, &counted))?;
        }
        progress = Some(Progress::of(counted.matched));
    }
    let totals = walk(endpoint, action, which, Walk::Change, confirm.limit, |step| {
        if let Some(progress) = &mut progress {
            progress.advance(step);
        }
    })
    .await?;
    drop(progress);
    Ok(tell(action, &totals, false, out))
}

/// How many jobs an order would concern.
pub(super) async fn count(
    endpoint: &Endpoint,
    action: Action,
    which: &JobFilter,
    limit: Option<u64>,
) -> Result<u64, Failure> {
    Ok(walk(endpoint, action, which, Walk::Count, limit, |_| {}).await?.matched)
}

/// As [`for_all_matching`], without a word but how far it is.
pub(super) async fn change_all_matching(
    endpoint: &Endpoint,
    action: Action,
    which: &JobFilter,
    stepped: impl FnMut(u64),
) -> Result<(), Failure> {
    walk(endpoint, action, which, Walk::Change, None, stepped).await.map(drop)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Walk {
    Change,
    Count,
}

async fn walk(
    endpoint: &Endpoint,
    action: Action,
    which: &JobFilter,
    walk: Walk,
    limit: Option<u64>,
    mut stepped: impl FnMut(u64),
) -> Result<Totals, Failure> {
    let mut totals = Totals::default();
    loop {
        let left = limit.unwrap_or(u64::MAX) - totals.matched;
        if left == 0 {
            return Ok(totals);
        }
        let step = if walk == Walk::Count { COUNTED } else { STEP };
        let bulk = BulkRequest {
            action,
            filter: which,
            dry_run: walk == Walk::Count,
            limit: left.min(step),
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

/// Whoever sits at a terminal is asked; a script must have said so before.
fn ask(what: &str) -> Result<(), Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(format_args!(
            "this would {what}; add --yes to do it, or --dry-run to only count"
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

/// What an order would do, in words.
fn would(action: Action, counted: &Totals) -> String {
    let would = format!("{} {}", action.verb(), self::counted(counted.to_change(), "job"));
    match counted.skipped {
        0 => would,
        skipped => format!("{would} and skip {skipped} (their state forbids it)"),
    }
}

fn tell(action: Action, totals: &Totals, dry_run: bool, out: &Out) -> Code {
    let Totals { matched, changed, skipped, .. } = totals;
    if out.json {
        out.document(&json!({
            "action": action, "matched": matched, "changed": changed, "skipped": skipped, "dry_run": dry_run,
        }));
    } else if dry_run {
        out.line(format_args!("would {}", would(action, totals)));
    } else if *skipped == 0 {
        out.line(format_args!("{}: {changed}", action.done()));
    } else {
        out.line(format_args!(
            "{}: {changed}, skipped: {skipped} (their state forbids it, or they had moved on)",
            action.done()
        ));
    }
    Code::Done
}
