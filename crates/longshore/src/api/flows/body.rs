//! The bodies of requests that store flows: tasks, callbacks and jobs to add. Each job is parsed by
//! itself, so that an error names its task. The checks of the graph are in [`crate::client::graph`].

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::api::Server;
use crate::api::enqueue::{NewJobBody, TimeoutSchema, TimeoutSeconds};
use crate::api::extract::{Subject, duration, optional_object, parse, parse_object};
use crate::api::kinds::defaults_of;
use crate::api::problem::{ApiResult, Problem, Slug};
use crate::api::schemas::{ConditionSchema, RetrySchema};
use crate::client::graph::{Flow, Task, task};
use crate::job::FlowId;
use crate::rules::enqueue::NewJob;
use crate::rules::flow::Condition;
use crate::rules::retry::RetryPolicy;

/// The maximum number of jobs in one request, as in `POST /jobs/batch`.
const MAX_JOBS: usize = 10_000;

/// A flow to enqueue. Only `name` and `tasks` are required, and in a flow that is not sealed only
/// `name`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewFlow)]
pub(in crate::api) struct NewFlowBody {
    /// For people; it need not be unique.
    #[schema(min_length = 1, max_length = 128, example = "import")]
    name: String,
    /// The tasks. Those that wait for no other one start at once.
    #[serde(default)]
    #[schema(value_type = Vec<NewTaskBody>, max_items = 10000)]
    tasks: Vec<Box<RawValue>>,
    /// One job or several, enqueued when all tasks have succeeded.
    #[schema(value_type = Option<CallbacksSchema>)]
    on_success: Option<Box<RawValue>>,
    /// One job or several, enqueued when the flow has ended and a task has failed or was cancelled.
    #[schema(value_type = Option<CallbacksSchema>)]
    on_failure: Option<Box<RawValue>>,
    /// One job or several, enqueued when the flow has ended, whatever its outcome.
    #[schema(value_type = Option<CallbacksSchema>)]
    on_end: Option<Box<RawValue>>,
    /// The flow is cancelled if it has not ended after this many seconds.
    #[schema(minimum = 0.001, maximum = 315360000)]
    deadline_seconds: Option<f64>,
    /// A second request with the same key returns the first flow, as long as that flow is kept. The
    /// `Idempotency-Key` header overrides this field.
    #[schema(min_length = 1, max_length = 512)]
    idempotency_key: Option<String>,
    /// The id of the flow, a UUID v7; a new one by default. A second request with the same id returns the
    /// first flow.
    pub(super) id: Option<Uuid>,
    /// Whether the flow ends when all of its jobs have ended; true by default. If false, `POST
    /// /flows/{id}/jobs` adds jobs, and `POST /flows/{id}/seal` lets the flow end.
    #[serde(default = "sealed")]
    #[schema(default = true)]
    sealed: bool,
}

fn sealed() -> bool {
    true
}

/// Jobs to add to a flow.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AddJobsRequest)]
pub(in crate::api) struct AddJobsBody {
    /// The jobs. They start at once.
    #[schema(value_type = Vec<FlowJobBody>, min_items = 1, max_items = 10000)]
    jobs: Vec<Box<RawValue>>,
}

/// One job or several.
#[derive(ToSchema, Deserialize)]
#[schema(as = Callbacks)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what `callbacks` parses")]
pub(in crate::api) enum CallbacksSchema {
    One(Box<FlowJobBody>),
    Several(Vec<FlowJobBody>),
}

/// A job of a flow: as in `POST /jobs`, but without keys. A macro, because a flattened struct would
/// accept unknown fields, and many generators of clients do not support its schema.
macro_rules! job_body {
    ($(#[$doc:meta])* $name:ident as $public:ident { $($own:tt)* }) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize, ToSchema)]
        #[serde(deny_unknown_fields)]
        #[schema(as = $public)]
        pub(in crate::api) struct $name {
            $($own)*
            /// Which handler runs the job.
            #[schema(min_length = 1, max_length = 128, example = "summarize_text")]
            kind: String,
            /// Any JSON value up to 1 MiB. If the kind has a schema, the payload must match it.
            #[schema(value_type = serde_json::Value)]
            payload: Box<RawValue>,
            /// 3 by default, unless the kind sets a default.
            #[schema(minimum = 1, maximum = 32767)]
            max_attempts: Option<i64>,
            /// `default` if absent.
            #[schema(min_length = 1, max_length = 128)]
            queue: Option<String>,
            /// A group of the queue, for example a customer.
            #[schema(min_length = 1, max_length = 128)]
            group: Option<String>,
            /// Higher runs first; 0 by default.
            #[schema(minimum = -32768, maximum = 32767)]
            priority: Option<i64>,
            /// The job does not start before this time.
            run_at: Option<DateTime<Utc>>,
            /// The job does not start before this many seconds have passed since the request.
            #[schema(minimum = 0, maximum = 315360000)]
            delay_seconds: Option<f64>,
            /// How long one attempt may take: seconds, or `none` for no limit. Two hours by default.
            #[schema(value_type = Option<TimeoutSchema>)]
            timeout_seconds: Option<TimeoutSeconds>,
            /// How long the job waits after a failed attempt.
            #[serde(default, deserialize_with = "optional_object")]
            #[schema(value_type = Option<RetrySchema>)]
            retry: Option<RetryPolicy>,
            /// Labels for people.
            #[serde(default)]
            #[schema(max_items = 64)]
            tags: Vec<String>,
            /// Labels that workers and recovery act on.
            #[serde(default)]
            #[schema(max_items = 64)]
            flags: Vec<String>,
            /// Why the job was enqueued.
            context: Option<String>,
            /// Your own data: any JSON value up to 64 KiB.
            #[schema(value_type = Option<serde_json::Value>)]
            metadata: Option<Box<RawValue>>,
            // Known only to be refused with a reason.
            #[schema(ignore)]
            idempotency_key: Option<IgnoredAny>,
            #[schema(ignore)]
            unique_key: Option<IgnoredAny>,
            #[schema(ignore)]
            unique_mode: Option<IgnoredAny>,
        }

        impl $name {
            fn into_job(self, trace: Option<&str>) -> ApiResult<NewJobBody> {
                let keys = [
                    ("idempotency_key", self.idempotency_key),
                    ("unique_key", self.unique_key),
                    ("unique_mode", self.unique_mode),
                ];
                if let Some((key, _)) = keys.iter().find(|(_, value)| value.is_some()) {
                    return Err(Problem::validation(format!(
                        "{key}: jobs of a flow cannot have keys; give the flow an idempotency key"
                    )));
                }
                Ok(NewJobBody {
                    payload: self.payload,
                    max_attempts: self.max_attempts,
                    queue: self.queue,
                    group: self.group,
                    priority: self.priority,
                    run_at: self.run_at,
                    delay_seconds: self.delay_seconds,
                    timeout_seconds: self.timeout_seconds,
                    retry: self.retry,
                    tags: self.tags,
                    flags: self.flags,
                    context: self.context,
                    metadata: self.metadata,
                    trace: trace.map(str::to_owned),
                    ..NewJobBody::of_kind(&self.kind)
                })
            }
        }
    };
}

job_body! {
    /// A task of a flow: a job with a name, and what it waits for. Only `kind` and `payload` are
    /// required.
    NewTaskBody as NewTask {
        /// Its name, unique in the flow. If absent, its kind, with a number if several tasks have it.
        #[schema(min_length = 1, max_length = 128, example = "fetch")]
        task: Option<String>,
        /// The tasks that it waits for. If one of them ends in another way than it needs, it is skipped.
        #[serde(default, deserialize_with = "links")]
        #[schema(value_type = Vec<AfterSchema>)]
        after: Vec<AfterTask>,
    }
}

job_body! {
    /// A job of a flow without a name. Only `kind` and `payload` are required.
    FlowJobBody as FlowJob {}
}

/// The name of a task that has to succeed, or a task with a condition.
#[derive(ToSchema, Serialize)]
#[schema(as = After)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what `links` parses")]
pub(in crate::api) enum AfterSchema {
    Succeeded(String),
    Condition(AfterTask),
}

/// A task that another one waits for.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct AfterTask {
    /// The name of the task.
    task: String,
    /// What has to become of it; `succeeded` by default.
    #[serde(default = "succeeded")]
    #[schema(value_type = Option<ConditionSchema>)]
    condition: Condition,
}

fn succeeded() -> Condition {
    Condition::Succeeded
}

/// Deserializes what a task waits for. Serde's own errors for such a list do not say what it accepts.
fn links<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<AfterTask>, D::Error> {
    const REMEDY: &str = "use the name of a task, or {\"task\": …, \"condition\": …}";
    let list = <&RawValue>::deserialize(input)?.get();
    let items: Vec<&RawValue> = serde_json::from_str(list)
        .map_err(|_| D::Error::custom("after: not a list; write one, like [\"fetch\"]"))?;
    let read = |(i, item): (usize, &RawValue)| {
        let read = match item.get().as_bytes().first() {
            Some(b'"') => serde_json::from_str(item.get())
                .map(|task| AfterTask { task, condition: Condition::Succeeded }),
            Some(b'{') => serde_json::from_str(item.get()),
            _ => return Err(D::Error::custom(format!("after[{i}]: neither a name nor an object; {REMEDY}"))),
        };
        read.map_err(|error: serde_json::Error| {
            let reason = error.to_string();
            let reason = reason.split(" at line ").next().unwrap_or_default();
            match reason.starts_with("unknown variant") {
                true => D::Error::custom(format!("after[{i}].condition: {reason}")),
                false => D::Error::custom(format!("after[{i}]: {reason}; {REMEDY}")),
            }
        })
    };
    items.into_iter().enumerate().map(read).collect()
}

impl NewFlowBody {
    /// The flow to store. Checks the kind and the payload of every job. `key` is that of the header.
    pub(super) async fn into_flow(
        self,
        server: &Server,
        key: Option<String>,
        trace: Option<&str>,
    ) -> ApiResult<Flow> {
        let callbacks = [
            ("on_success", Condition::Succeeded, self.on_success),
            ("on_failure", Condition::Failed, self.on_failure),
            ("on_end", Condition::Ended, self.on_end),
        ];
        check_count("tasks", self.tasks.len())?;
        let mut flow = Flow::new(self.name);
        for (i, text) in self.tasks.iter().enumerate() {
            let at_task = |problem: Problem| problem.at(place(i, text));
            flow = flow.task(new_task(server, text, trace).await.map_err(at_task)?);
            // Other requests of this thread go on in between.
            tokio::task::yield_now().await;
        }
        for (name, condition, text) in callbacks {
            for (place, text) in
                text.as_deref().map(|text| callback_texts(name, text)).transpose()?.unwrap_or_default()
            {
                let job = new_job(server, text, trace).await.map_err(|problem| problem.at(&place))?;
                flow = flow.on(condition, job);
            }
        }
        if let Some(id) = self.id {
            flow = flow.id(checked_id(id)?);
        }
        if let Some(key) = key.or(self.idempotency_key) {
            flow = flow.idempotency_key(key);
        }
        if let Some(seconds) = self.deadline_seconds {
            flow = flow.deadline(deadline(seconds)?);
        }
        Ok(if self.sealed { flow } else { flow.open() })
    }
}

impl AddJobsBody {
    /// The jobs to add. Checks the kind and the payload of each.
    pub(super) async fn into_jobs(self, server: &Server, trace: Option<&str>) -> ApiResult<Vec<NewJob>> {
        if self.jobs.is_empty() {
            return Err(Problem::validation("jobs: the list is empty; send at least one job"));
        }
        new_jobs(server, &self.jobs, trace).await
    }
}

/// Jobs without keys. Checks the kind and the payload of each.
pub(in crate::api) async fn new_jobs(
    server: &Server,
    texts: &[Box<RawValue>],
    trace: Option<&str>,
) -> ApiResult<Vec<NewJob>> {
    check_count("jobs", texts.len())?;
    let mut jobs = Vec::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        let job = new_job(server, text, trace).await;
        // Other requests of this thread go on in between.
        tokio::task::yield_now().await;
        jobs.push(job.map_err(|problem| problem.at(format_args!("jobs[{i}]")))?);
    }
    Ok(jobs)
}

async fn new_task(server: &Server, text: &RawValue, trace: Option<&str>) -> ApiResult<Task> {
    let mut body: NewTaskBody = parse_object(Subject::Job, text.get().as_bytes())?;
    let (name, after) = (body.task.take(), std::mem::take(&mut body.after));
    let job = with_defaults(server, body.into_job(trace)?).await?;
    let new = match name {
        Some(name) => task(name, job),
        None => Task::from(job),
    };
    Ok(after.into_iter().fold(new, |task, link| task.after_condition(link.task, link.condition)))
}

async fn new_job(server: &Server, text: &RawValue, trace: Option<&str>) -> ApiResult<NewJob> {
    let body: FlowJobBody = parse_object(Subject::Job, text.get().as_bytes())?;
    with_defaults(server, body.into_job(trace)?).await
}

async fn with_defaults(server: &Server, body: NewJobBody) -> ApiResult<NewJob> {
    let kind = server.client.check_job(body.kind(), body.queue(), body.payload()).await?;
    body.into_job(&defaults_of(kind.as_deref()))
}

/// The jobs of a callback, each with its place in the request.
fn callback_texts<'t>(name: &str, text: &'t RawValue) -> ApiResult<Vec<(String, &'t RawValue)>> {
    if !text.get().starts_with('[') {
        return Ok(vec![(name.to_owned(), text)]);
    }
    let jobs: Vec<&RawValue> = parse(Subject::Body, text.get().as_bytes())?;
    check_count(name, jobs.len())?;
    Ok(jobs.into_iter().enumerate().map(|(i, job)| (format!("{name}[{i}]"), job)).collect())
}

/// The place of a task in the request: its name, or its number if it has none.
fn place(i: usize, text: &RawValue) -> String {
    #[derive(Deserialize)]
    struct Named {
        task: String,
    }
    match serde_json::from_str::<Named>(text.get()) {
        Ok(named) => format!("task `{}`", &named.task[..named.task.floor_char_boundary(128)]),
        Err(_) => format!("tasks[{i}]"),
    }
}

fn check_count(field: &str, count: usize) -> ApiResult<()> {
    if count <= MAX_JOBS {
        return Ok(());
    }
    Err(Problem::new(
        Slug::TooLarge,
        format!(
            "{field}: {count} jobs are too many; send at most {MAX_JOBS} in one request, leave the flow open \
             (`\"sealed\": false`) and add the others with `POST /flows/ID/jobs`"
        ),
    ))
}

fn checked_id(id: Uuid) -> ApiResult<FlowId> {
    match id.get_version_num() {
        7 => Ok(FlowId(id)),
        _ => Err(Problem::validation(format!(
            "id: {id} is not a UUID v7; use one, because flows are listed in the order of their ids, or leave it out"
        ))),
    }
}

fn deadline(seconds: f64) -> ApiResult<Duration> {
    let deadline = duration("deadline_seconds", seconds)?;
    if deadline < Duration::from_millis(1) {
        return Err(Problem::validation(format!(
            "deadline_seconds: {seconds} is out of range; use at least 0.001, or leave it out"
        )));
    }
    Ok(deadline)
}
