//! Explains why a job is not running: the reason, what would change it, and, if
//! waiting is enough, an estimate. If several reasons apply, the one that lasts
//! longest is reported, and the message mentions the others.

use std::collections::BTreeSet;

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::extract::JobIdPath;
use super::flows::is_covered;
use super::problem::{ApiResult, ProblemBody};
use super::schemas::StatusSchema;
use crate::client::Client;
use crate::error::Result;
use crate::job::{FlowId, JobId, JobRecord, Outcome, Status};
use crate::rules::lifecycle::{self, Event, FAR_FUTURE, Interruption, Recovery, Transition};
use crate::store::{
    Ahead, GroupRecord, HistoryFilter, QueueRecord, StepState, SweepScope, Tallied, WorkerRecord,
};

/// The maximum number of jobs ahead that are counted.
const MAX_AHEAD: u32 = 10_000;
/// Estimates are based on the jobs that ended within this time.
const ESTIMATE_WINDOW: chrono::Duration = chrono::Duration::minutes(10);
/// If no job ended within this time, there is no estimate: what ran before says nothing about now.
const MAX_IDLE: chrono::Duration = chrono::Duration::minutes(5);
/// For how long back the last end of a job is looked for.
const IDLE_WINDOW: chrono::Duration = chrono::Duration::hours(1);
/// A job that is due for less than this does not wait for long.
const NOTEWORTHY_WAIT: chrono::Duration = chrono::Duration::minutes(1);

/// Why a job is or is not running.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Explanation {
    job_id: Uuid,
    #[schema(value_type = StatusSchema)]
    status: Status,
    pub(crate) reason: Reason,
    /// The reason as text, with what would change it. If several reasons apply, it names all of them.
    pub(crate) message: String,
    /// All reasons that apply, one by one; the first is `reason`.
    pub(crate) causes: Vec<Cause>,
    /// When the job is due; null if it is due now.
    #[schema(required)]
    due_at: Option<DateTime<Utc>>,
    /// How many due jobs of the same queue run before this one, counting only jobs of
    /// kinds that its workers handle, up to 10,000. Null if this job is not due.
    #[schema(required)]
    pub(crate) ahead: Option<u32>,
    /// The estimated seconds until it starts, based on the last ten minutes. Null if
    /// no job ended in the last five minutes, or if an operator has to act first.
    #[schema(required)]
    pub(crate) estimated_seconds: Option<f64>,
}

/// One reason why a job does not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ExplanationCause)]
pub(crate) struct Cause {
    pub(crate) reason: Reason,
    /// The reason as text.
    pub(crate) message: String,
    /// What an operator can do about it; null if nothing has to be done.
    #[schema(required)]
    pub(crate) remedy: Option<String>,
}

impl Cause {
    fn new(reason: Reason, message: impl Into<String>) -> Self {
        Cause { reason, message: message.into(), remedy: None }
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Cause { remedy: Some(remedy.into()), ..self }
    }

    fn text(&self) -> String {
        match &self.remedy {
            Some(remedy) => format!("{}; {remedy}", self.message),
            None => self.message.clone(),
        }
    }
}

/// The reasons, in the order in which they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ExplanationReason)]
pub(crate) enum Reason {
    /// The job has ended.
    Finished,
    /// Its worker stopped sending heartbeats or is gone; a sweep recovers the job.
    WorkerLost,
    /// The job is running and its cancellation is requested.
    Stopping,
    /// The job is running.
    Running,
    /// The job waits for other tasks of its flow or, as a callback, for the end of a flow.
    WaitsForTasks,
    /// Its queue is paused.
    QueuePaused,
    /// No live worker takes jobs from its queue.
    NoWorkerForQueue,
    /// No live worker of its queue handles its kind.
    NoWorkerForKind,
    /// The job is suspended: it sleeps, or waits for an event or for its children.
    Suspended,
    /// The job is scheduled for later.
    NotDue,
    /// The job waits for its next attempt after a failure or an interruption.
    WaitsForRetry,
    /// Its group is paused.
    GroupPaused,
    /// Its queue runs as many jobs as its limit allows.
    QueueLimit,
    /// Its group runs as many jobs as its limit allows.
    GroupLimit,
    /// The rate of its queue or group lets the next job start later.
    RateLimit,
    /// Every worker that could run the job is at its concurrency limit.
    WorkersBusy,
    /// The job was interrupted before, and a worker runs such jobs one at a time.
    SuspectWaits,
    /// The job is due and waits for its turn.
    WaitsItsTurn,
}

/// Explains why a job is not running, and estimates when it will.
#[utoipa::path(
    get,
    path = "/jobs/{id}/explain",
    operation_id = "explain_job",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    responses(
        (status = 200, description = "The reason.", body = Explanation),
        (status = 404, description = "There is no such job.", body = ProblemBody),
    ),
)]
pub(super) async fn explain(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<Json<Explanation>> {
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    Ok(Json(explain_job(&server.client, caller.queues(), &job).await?))
}

/// `queues` are those that the caller may see; `None` means all. The tasks of a flow with jobs of other queues
/// are not named.
pub(crate) async fn explain_job(
    client: &Client,
    queues: Option<&[String]>,
    job: &JobRecord,
) -> Result<Explanation> {
    match job.status {
        Status::Succeeded | Status::FailedPermanent | Status::Cancelled => {
            let cause = Cause::new(Reason::Finished, format!("it ended as {}", job.status));
            Ok(explanation(job, vec![cause.remedy("retry it to run it again")]))
        }
        Status::Running => explain_running(client, job).await,
        Status::Queued | Status::Retrying => explain_waiting(client, queues, job).await,
    }
}

#[cfg(all(test, feature = "dashboard"))]
impl Explanation {
    pub(crate) fn of_causes(job: &JobRecord, causes: Vec<Cause>) -> Self {
        explanation(job, causes)
    }
}

/// `causes` has at least one.
fn explanation(job: &JobRecord, causes: Vec<Cause>) -> Explanation {
    let texts: Vec<String> = causes.iter().map(Cause::text).collect();
    Explanation {
        job_id: job.id.0,
        status: job.status,
        reason: causes.first().map_or(Reason::WaitsItsTurn, |cause| cause.reason),
        message: texts.join("; and "),
        causes,
        due_at: None,
        ahead: None,
        estimated_seconds: None,
    }
}

// ---- running jobs ----------------------------------------------------------

async fn explain_running(client: &Client, job: &JobRecord) -> Result<Explanation> {
    let workers = client.workers(None).await?;
    let holder = job.locked_by.map(|worker| worker.to_string()).unwrap_or_default();
    let record = workers.iter().find(|worker| Some(worker.id) == job.locked_by);
    if let Some(lost) = lost_reason(record) {
        let effect = sweep_effect(client, job, record).await?;
        let cause = Cause::new(Reason::WorkerLost, format!("its worker {holder} {lost}; {effect}"))
            .remedy("`longshore sweep` or `POST /sweep` runs one now");
        return Ok(explanation(job, vec![cause]));
    }
    let cause = if job.cancel_requested {
        Cause::new(Reason::Stopping, "its cancellation is requested, but its handler has not stopped yet")
    } else {
        Cause::new(Reason::Running, format!("it is running on worker {holder}"))
    };
    Ok(explanation(job, vec![cause]))
}

/// How the worker was lost; `None` if it is alive.
fn lost_reason(worker: Option<&WorkerRecord>) -> Option<String> {
    let Some(worker) = worker else { return Some("is no longer registered".into()) };
    let no_heartbeat = format!("has sent no heartbeat since {}", worker.heartbeat_at);
    match worker.dead_at {
        Some(at) => Some(format!("{no_heartbeat} and signed off or was declared dead at {at}")),
        None => worker.stale.then_some(no_heartbeat),
    }
}

/// What the next sweep does with the job. Assumes the default settings, because the
/// settings of the process that sweeps next are not known here.
async fn sweep_effect(client: &Client, job: &JobRecord, worker: Option<&WorkerRecord>) -> Result<String> {
    let state = client.locate(job.id).await?;
    let recovered = state
        .map(|state| lifecycle::next(&state, Event::Recover(Recovery::Default(Interruption::default()))));
    let effect = match recovered {
        Some(Ok(Transition::Finish(finish))) => format!("ends it as {}", finish.outcome.as_str()),
        _ => "returns it to its queue".into(),
    };
    let scope = SweepScope::default();
    let presumed_dead = client.presumed_dead(&scope).await?;
    let waits = |worker: &&WorkerRecord| worker.dead_at.is_none() && !presumed_dead.contains(&worker.id);
    Ok(match worker.filter(waits) {
        Some(worker) => {
            let allowed = worker.stale_after.saturating_mul(scope.resilient_factor);
            format!(
                "a resilient job allows the worker {} s without a heartbeat, and the next sweep after that {effect}",
                allowed.as_secs()
            )
        }
        None => format!("the next sweep {effect}"),
    })
}

// ---- waiting jobs ----------------------------------------------------------

async fn explain_waiting(
    client: &Client,
    visible: Option<&[String]>,
    job: &JobRecord,
) -> Result<Explanation> {
    let now = client.now().await?;
    let is_due = job.run_at <= now;
    let due_at = (!is_due).then_some(job.run_at);
    let queues = client.queues().await?;
    let queue = queues.iter().find(|queue| queue.name == job.queue);
    let workers = client.workers(None).await?;
    let eligible = EligibleWorkers::of(job, &workers);
    let kinds = eligible.kinds();
    let ahead = if is_due { client.ahead_among(job.id, kinds.as_deref(), MAX_AHEAD).await? } else { None };

    let group = match &job.group {
        Some(group) => client.group(&job.queue, group).await?,
        None => None,
    };
    let mut causes = needs_operator(job, queue, group.as_ref(), &workers, &eligible);
    if let Some(message) = held(client, visible, job).await? {
        causes.insert(0, Cause::new(Reason::WaitsForTasks, message));
        return Ok(explanation(job, causes));
    }
    // Reasons that an operator must fix come first, whether the job is due or not.
    if !causes.is_empty() {
        causes.extend(due_at.map(|at| Cause::new(not_due(job).reason, format!("it is not due before {at}"))));
        let ahead = ahead.map(|ahead| ahead.jobs);
        return Ok(Explanation { due_at, ahead, ..explanation(job, causes) });
    }
    if !is_due && let Some(cause) = suspended(client, job).await? {
        return Ok(Explanation { due_at, ..explanation(job, vec![cause]) });
    }
    if !is_due {
        let wait = (job.run_at - now).to_std().unwrap_or_default().as_secs_f64();
        let explained = explanation(job, vec![not_due(job)]);
        let error = job.last_error.as_ref().filter(|_| job.status == Status::Retrying);
        let error = error.map(|error| format!("; the last attempt ended with: {error}")).unwrap_or_default();
        let message = format!("{}{error}", explained.message);
        return Ok(Explanation { due_at, message, estimated_seconds: Some(wait), ..explained });
    }

    let first = ahead.unwrap_or(Ahead { jobs: 0, or_more: false });
    let throughput = Throughput::load(client, job, kinds.as_deref(), now).await?;
    let (reason, message, estimated_seconds) = if let Some((limit, message)) = at_limit(queue) {
        (
            Reason::QueueLimit,
            message,
            throughput.wait_for_slot(first.jobs, eligible.slots().min(limit.into())),
        )
    } else if let Some((limit, message)) = group_at_limit(group.as_ref()) {
        (
            Reason::GroupLimit,
            message,
            throughput.wait_for_slot(first.jobs, eligible.slots().min(limit.into())),
        )
    } else if let Some((seconds, message)) = rate_limited(job, queue, group.as_ref(), first, now) {
        (Reason::RateLimit, message, Some(seconds))
    } else if eligible.is_busy() {
        (
            Reason::WorkersBusy,
            all_busy_message(job, &eligible, first),
            throughput.wait_for_slot(first.jobs, eligible.slots()),
        )
    } else {
        let (reason, mut message) = waits_its_turn(job, first);
        if let Some(group) = &group
            && let Some(in_line) = client.place_in_line(&job.queue, &group.name, job.priority).await?
        {
            message += &format!(
                "; group `{}` is {} of {} groups in line",
                group.name,
                ordinal(in_line.place),
                in_line.groups
            );
        }
        (reason, message, throughput.wait_for_turn(first.jobs))
    };
    let idle = throughput.idle_note(now).filter(|_| now - job.run_at >= NOTEWORTHY_WAIT);
    let message = idle.map(|idle| format!("{message}; {idle}")).unwrap_or(message);
    let explained = explanation(job, vec![Cause::new(reason, message)]);
    Ok(Explanation { ahead: Some(first.jobs), estimated_seconds, ..explained })
}

/// The live workers that could run a job.
struct EligibleWorkers<'w>(Vec<&'w WorkerRecord>);

impl<'w> EligibleWorkers<'w> {
    fn of(job: &JobRecord, workers: &'w [WorkerRecord]) -> Self {
        let handles =
            |worker: &&WorkerRecord| worker.kinds.as_ref().is_none_or(|kinds| kinds.contains(&job.kind));
        EligibleWorkers(live_workers_of_queue(job, workers).filter(handles).collect())
    }

    /// The kinds they handle; `None` if one handles any kind, or if there are none.
    fn kinds(&self) -> Option<Vec<String>> {
        let mut kinds = BTreeSet::new();
        for worker in &self.0 {
            kinds.extend(worker.kinds.as_ref()?.iter().cloned());
        }
        (!self.0.is_empty()).then(|| kinds.into_iter().collect())
    }

    /// How many jobs they can run at once.
    fn slots(&self) -> u64 {
        self.0.iter().map(|worker| u64::from(worker.concurrency)).sum()
    }

    fn is_busy(&self) -> bool {
        self.0.iter().all(|worker| worker.running >= worker.concurrency.into())
    }
}

fn live_workers_of_queue<'w>(
    job: &JobRecord,
    workers: &'w [WorkerRecord],
) -> impl Iterator<Item = &'w WorkerRecord> {
    let is_live = |worker: &&WorkerRecord| worker.dead_at.is_none() && !worker.stale;
    workers.iter().filter(is_live).filter(|worker| worker.claims_from(&job.queue))
}

/// The reasons that will not clear by themselves.
fn needs_operator(
    job: &JobRecord,
    queue: Option<&QueueRecord>,
    group: Option<&GroupRecord>,
    workers: &[WorkerRecord],
    eligible: &EligibleWorkers<'_>,
) -> Vec<Cause> {
    let paused = queue.filter(|queue| queue.paused).map(|QueueRecord { name, .. }| {
        Cause::new(Reason::QueuePaused, format!("queue `{name}` is paused")).remedy(format!(
            "resume it with `longshore queues resume {name}` or `POST /queues/{name}/resume`"
        ))
    });
    let paused_group = group.filter(|group| group.paused).map(|GroupRecord { queue, name, .. }| {
        Cause::new(Reason::GroupPaused, format!("group `{name}` of queue `{queue}` is paused")).remedy(
            format!(
                "resume it with `longshore groups resume {queue} {name}` or `PATCH /queues/{queue}/groups/{name}`"
            ),
        )
    });
    let no_worker = no_worker(job, workers, eligible);
    paused.into_iter().chain(paused_group).chain(no_worker).collect()
}

fn no_worker(job: &JobRecord, workers: &[WorkerRecord], eligible: &EligibleWorkers<'_>) -> Option<Cause> {
    if !eligible.0.is_empty() {
        return None;
    }
    let (queue, kind) = (&job.queue, &job.kind);
    // A server that only does upkeep registers as a worker without kinds.
    let takes_some = |worker: &WorkerRecord| worker.kinds.as_ref().is_none_or(|kinds| !kinds.is_empty());
    Some(if live_workers_of_queue(job, workers).any(takes_some) {
        let message = format!("no live worker of queue `{queue}` handles kind `{kind}`");
        Cause::new(Reason::NoWorkerForKind, message).remedy(format!(
            "start one that does: `longshore worker --queues {queue}` for a built-in kind, or your own program \
             for another kind"
        ))
    } else {
        let message = format!("no live worker takes jobs from queue `{queue}`");
        Cause::new(Reason::NoWorkerForQueue, message).remedy(format!(
            "start one with `longshore worker --queues {queue}`, or start your own program if `{kind}` is not a \
             built-in kind"
        ))
    })
}

/// The maximum number of tasks that a message names.
const NAMED_TASKS: usize = 5;

/// What a held job waits for: other tasks of its flow, or the end of the flow that it is a callback of.
/// `None` if the job is not held. A flow is named only if these queues have all of its jobs.
async fn held(client: &Client, visible: Option<&[String]>, job: &JobRecord) -> Result<Option<String>> {
    if job.run_at < FAR_FUTURE {
        return Ok(None);
    }
    let Some(flow) = job.flow else {
        let awaited = client.awaited_flow(job.id).await?.filter(|flow| flow.0 != job.id.0);
        let Some(flow) = awaited else { return Ok(None) };
        let flow = named_flow(client, visible, flow).await?;
        return Ok(Some(format!("it waits for the end of {}", flow.as_deref().unwrap_or("a flow"))));
    };
    // The members after the id before this job's: the first of them is this job.
    let before = JobId(Uuid::from_u128(job.id.0.as_u128().saturating_sub(1)));
    let member = client.tasks(flow, Some(before), 1).await?.pop();
    let Some(member) = member.filter(|member| member.id == job.id && member.held) else { return Ok(None) };
    let open: Vec<String> = member
        .after
        .into_iter()
        .filter(|link| link.met.is_none())
        .map(|link| format!("`{}`", link.task.unwrap_or_else(|| link.id.to_string())))
        .collect();
    let Some(flow) = named_flow(client, visible, flow).await? else {
        return Ok(Some("it waits for other tasks of its flow".into()));
    };
    let tasks = match open.as_slice() {
        [] => {
            return Ok(Some(format!(
                "the tasks that it waits for have ended; {flow} releases it in a moment"
            )));
        }
        [task] => format!("task {task}"),
        tasks if tasks.len() <= NAMED_TASKS => format!("tasks {}", tasks.join(", ")),
        tasks => format!("tasks {} and {} more", tasks[..NAMED_TASKS].join(", "), tasks.len() - NAMED_TASKS),
    };
    Ok(Some(format!("it waits for {tasks} of {flow}")))
}

/// A flow with its name and id; `None` if it has jobs of other queues than these.
async fn named_flow(client: &Client, visible: Option<&[String]>, flow: FlowId) -> Result<Option<String>> {
    let flow = client.flow(flow).await?;
    let is_visible = is_covered(client, visible, &flow).await?;
    Ok(is_visible.then(|| format!("flow `{}` ({})", flow.name, flow.id)))
}

/// What a suspended job waits for.
async fn suspended(client: &Client, job: &JobRecord) -> Result<Option<Cause>> {
    // Only a job that was leased before can be suspended.
    if job.lease_no == 0 {
        return Ok(None);
    }
    let steps = client.steps(job.id).await?;
    // The job may have run since it waited in other steps.
    let waits = steps.iter().filter(|step| step.lease_no == job.lease_no);
    let waits = waits.filter_map(|step| match step.state {
        StepState::Waiting { until } => Some((&step.name, until)),
        StepState::Done(_) => None,
    });
    let joins = client.awaited_flow(job.id).await? == Some(FlowId(job.id.0));
    let mut reasons = Vec::new();
    let mut is_only_join = true;
    for (name, until) in waits {
        // A join has no deadline.
        if joins && until.is_none() && !name.starts_with("event:") {
            reasons.push(children(client, job).await?);
            continue;
        }
        is_only_join = false;
        let until = until.map(|until| format!(" until {until}")).unwrap_or_default();
        reasons.push(match name.strip_prefix("event:") {
            Some(event) => format!("for the event `{event}`{until}"),
            None => format!("in its step `{name}`{until}"),
        });
    }
    if reasons.is_empty() {
        return Ok(None);
    }
    let remedy = if is_only_join {
        format!("`longshore flows show {0}` or `GET /flows/{0}/tasks` lists them", job.id)
    } else {
        "an event is emitted with `longshore events emit NAME`, `POST /events` or `Client::emit`".to_owned()
    };
    let message = format!("it waits {}", reasons.join(" and "));
    Ok(Some(Cause::new(Reason::Suspended, message).remedy(remedy)))
}

async fn children(client: &Client, job: &JobRecord) -> Result<String> {
    let flow = client.flow(FlowId(job.id.0)).await?;
    Ok(match flow.members {
        1 => "for its child".to_owned(),
        members => format!("for its {members} children, of which {} have not ended", flow.open),
    })
}

fn not_due(job: &JobRecord) -> Cause {
    let at = job.run_at.format("%Y-%m-%d %H:%M:%S UTC");
    let cause = match job.status {
        Status::Retrying => Cause::new(Reason::WaitsForRetry, format!("its next attempt is due at {at}")),
        _ => Cause::new(Reason::NotDue, format!("it is due at {at}")),
    };
    cause.remedy("retry it to run it now")
}

/// The limit of the queue and a message, if the queue is at its limit.
fn at_limit(queue: Option<&QueueRecord>) -> Option<(u32, String)> {
    let queue = queue?;
    let limit = queue.limit.filter(|limit| queue.running >= u64::from(*limit))?;
    let message = format!(
        "queue `{}` runs {} jobs and its limit is {limit}; this job starts when one of them ends",
        queue.name, queue.running
    );
    Some((limit, message))
}

/// The limit of the group and a message, if the group is at its limit.
fn group_at_limit(group: Option<&GroupRecord>) -> Option<(u32, String)> {
    let group = group?;
    let limit = group.limit.filter(|limit| group.running >= u64::from(*limit))?;
    let message = format!(
        "group `{}`: {} of {limit} running; this job starts when one of them ends",
        group.name, group.running
    );
    Some((limit, message))
}

/// How long a job waits for the rate of its queue or group, and a message.
fn rate_limited(
    job: &JobRecord,
    queue: Option<&QueueRecord>,
    group: Option<&GroupRecord>,
    ahead: Ahead,
    now: DateTime<Utc>,
) -> Option<(f64, String)> {
    let of_group = group.and_then(|group| {
        let (rate, at) = group.rate.zip(group.next_start_at)?;
        Some((at, rate, format!("group `{}`", group.name)))
    });
    let of_queue = queue.and_then(|queue| {
        let (rate, at) = queue.rate.zip(queue.next_start_at)?;
        Some((at, rate, format!("queue `{}`", queue.name)))
    });
    let (at, rate, name) = of_group.into_iter().chain(of_queue).max_by_key(|(at, ..)| *at)?;
    let wait = (at - now).to_std().ok()?.as_secs_f64();
    let period = rate.period_ms as f64 / 1000.0;
    let message = format!(
        "{name}: next start in {wait:.1} s (rate limit: {} per {period} s); {}",
        rate.starts,
        ahead_note(job, ahead)
    );
    Some((wait + period / f64::from(rate.starts.max(1)) * f64::from(ahead.jobs), message))
}

/// 1st, 2nd, 3rd, 4th.
fn ordinal(n: u32) -> String {
    let suffix = match (n % 10, n % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{n}{suffix}")
}

fn all_busy_message(job: &JobRecord, eligible: &EligibleWorkers<'_>, ahead: Ahead) -> String {
    let suspect = suspect_note(job).map(|note| format!("; {note}")).unwrap_or_default();
    let workers = match eligible.0.as_slice() {
        [worker] => format!("the only worker that could run it, {}, is busy", worker.id),
        workers => format!("all {} workers that could run it are busy", workers.len()),
    };
    let first = ahead_note(job, ahead);
    format!(
        "it is due, but {workers}; {first}{suspect}; another worker or a higher --concurrency lets it start sooner"
    )
}

fn waits_its_turn(job: &JobRecord, ahead: Ahead) -> (Reason, String) {
    let first = ahead_note(job, ahead);
    match suspect_note(job) {
        None => (Reason::WaitsItsTurn, format!("it is due; {first}")),
        Some(note) => (Reason::SuspectWaits, format!("{note}; {first}")),
    }
}

fn suspect_note(job: &JobRecord) -> Option<String> {
    let died = match job.interruptions {
        0 => return None,
        1 => "a worker died while it held".into(),
        n => format!("workers died {n} times while they held"),
    };
    Some(format!("{died} this job, so it is a suspect, and a worker runs one suspect at a time"))
}

fn ahead_note(job: &JobRecord, ahead: Ahead) -> String {
    let of = if job.group.is_some() { "group" } else { "queue" };
    match (ahead.jobs, ahead.or_more) {
        (n, true) => format!("at least {n} jobs of its {of} come first"),
        (0, false) => format!("no job of its {of} comes first"),
        (1, false) => format!("1 job of its {of} comes first"),
        (n, false) => format!("{n} jobs of its {of} come first"),
    }
}

// ---- estimates -------------------------------------------------------------

/// The jobs that ended recently, of those that share workers with this job.
struct Throughput {
    ended: u64,
    /// Seconds since the first of them ended, rounded to a minute.
    seconds: f64,
    /// Their total run time.
    ran_seconds: f64,
    /// Whether none of them ended in the last minutes.
    is_idle: bool,
    /// When the last job of the queue ended, also one that does not share workers with this job,
    /// rounded up to a minute.
    last_end: Option<DateTime<Utc>>,
}

impl Throughput {
    async fn load(
        client: &Client,
        job: &JobRecord,
        kinds: Option<&[String]>,
        now: DateTime<Utc>,
    ) -> Result<Self> {
        let history = HistoryFilter {
            queues: Some(vec![job.queue.clone()]),
            ..HistoryFilter::since(now - IDLE_WINDOW)
        };
        let tallied = client.history_of_ends(&history).await?;
        // A job that was cancelled while it waited took no slot.
        let shares = |tally: &&Tallied| {
            tally.outcome != Outcome::Cancelled && kinds.is_none_or(|kinds| kinds.contains(&tally.kind))
        };
        let end = |tally: &Tallied| (tally.minute + chrono::Duration::minutes(1)).min(now);
        let is_recent = |tally: &&Tallied| end(tally) > now - ESTIMATE_WINDOW;
        let last_end = tallied.iter().filter(|tally| tally.outcome != Outcome::Cancelled).map(end).max();
        let shared: Vec<&Tallied> = tallied.iter().filter(shares).filter(is_recent).collect();
        let oldest = shared.iter().map(|tally| tally.minute).min().unwrap_or(now);
        let runs = shared.iter().flat_map(|tally| &tally.run_ms);
        Ok(Throughput {
            ended: shared.iter().map(|tally| tally.jobs).sum(),
            seconds: (now - oldest).to_std().unwrap_or_default().as_secs_f64().max(1.0),
            ran_seconds: runs.map(|(ms, jobs)| ms * *jobs as f64).sum::<f64>() / 1000.0,
            is_idle: shared.iter().all(|tally| end(tally) <= now - MAX_IDLE),
            last_end,
        })
    }

    /// For how long nothing has ended, if that is long.
    fn idle_note(&self, now: DateTime<Utc>) -> Option<String> {
        match self.last_end {
            Some(at) if now - at < MAX_IDLE => None,
            Some(at) => Some(format!("nothing of this queue has ended for {} min", (now - at).num_minutes())),
            None => Some("nothing of this queue has ended in the last hour".into()),
        }
    }

    /// The wait while slots are free: jobs start as fast as they ended recently.
    fn wait_for_turn(&self, ahead: u32) -> Option<f64> {
        (!self.is_idle).then(|| f64::from(ahead) * self.seconds / self.ended as f64)
    }

    /// The wait while all slots are taken: a slot becomes free whenever a job ends, so
    /// this follows from the average run time.
    fn wait_for_slot(&self, ahead: u32, slots: u64) -> Option<f64> {
        let each = self.ran_seconds / self.ended as f64 / slots.max(1) as f64;
        (!self.is_idle).then(|| (f64::from(ahead) + 1.0) * each)
    }
}
