//! OpenAPI schemas of the library's own records. The records are serialized elsewhere;
//! these types only describe the result, and a test compares the fields of the two.

use chrono::{DateTime, Utc};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

/// A job: the request, its status and its history.
#[derive(ToSchema)]
#[schema(as = Job)]
#[expect(dead_code, reason = "describes what `JobRecord` serialises to")]
pub(super) struct JobSchema {
    /// A UUID v7.
    id: Uuid,
    /// Which handler runs the job.
    #[schema(max_length = 128)]
    kind: String,
    /// The queue of the job.
    #[schema(max_length = 128)]
    queue: String,
    status: StatusSchema,
    /// Higher runs first.
    #[schema(minimum = -32768, maximum = 32767)]
    priority: i32,
    /// Attempts charged so far, including the running one.
    #[schema(minimum = 0)]
    attempts: i32,
    /// The maximum number of attempts that the job may have.
    #[schema(minimum = 1)]
    max_attempts: i32,
    /// The newest error, kept after a later success.
    #[schema(required)]
    last_error: Option<String>,
    #[schema(required)]
    last_failed_at: Option<DateTime<Utc>>,
    /// The payload, exactly as it was sent.
    payload: serde_json::Value,
    /// What the handler returned.
    #[schema(required, nullable)]
    result: Option<serde_json::Value>,
    /// When a waiting job is due. For other jobs, the requested time.
    run_at: DateTime<Utc>,
    /// When the live lease was taken.
    #[schema(required)]
    locked_at: Option<DateTime<Utc>>,
    /// The worker that holds the live lease.
    #[schema(required)]
    locked_by: Option<Uuid>,
    /// The name of that worker; null if the worker is no longer registered.
    #[schema(required)]
    locked_by_name: Option<String>,
    /// Whether cancellation was requested; true for every cancelled job.
    cancel_requested: bool,
    #[schema(required)]
    idempotency_key: Option<String>,
    #[schema(required)]
    unique_key: Option<String>,
    #[schema(required)]
    group: Option<String>,
    /// The flow that the job is a member of.
    #[schema(required)]
    flow: Option<Uuid>,
    /// Its name in the flow.
    #[schema(required)]
    task: Option<String>,
    tags: Vec<String>,
    flags: Vec<String>,
    /// Why the job was enqueued.
    #[schema(required)]
    context: Option<String>,
    /// The caller's own data.
    #[schema(required, nullable)]
    metadata: Option<serde_json::Value>,
    /// What the running handler last reported.
    #[schema(required, nullable)]
    progress: Option<serde_json::Value>,
    /// How long one attempt may take; null means no limit.
    #[schema(required)]
    timeout_seconds: Option<f64>,
    /// The retry policy; null means the default.
    #[schema(required, nullable)]
    retry: Option<RetrySchema>,
    /// How often a worker died while it held this job.
    #[schema(minimum = 0)]
    interruptions: i32,
    /// How often the job has been claimed. Each claim has its own number, which fences
    /// off older ones.
    #[schema(minimum = 0)]
    lease_no: i32,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    #[schema(required)]
    started_at: Option<DateTime<Utc>>,
    #[schema(required)]
    finished_at: Option<DateTime<Utc>>,
    /// Attempts that did not succeed, oldest first; empty in lists. A job keeps the newest
    /// hundred and its newest error.
    errors: Vec<AttemptSchema>,
    /// How many older attempts are no longer in `errors`; zero in lists.
    #[schema(minimum = 0)]
    errors_omitted: i32,
}

/// The status of a job.
#[derive(ToSchema)]
#[schema(as = Status, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what `Status` serialises to")]
pub(super) enum StatusSchema {
    Queued,
    Running,
    Succeeded,
    Retrying,
    FailedPermanent,
    Cancelled,
}

/// Whether a request created its job.
#[derive(ToSchema)]
#[schema(as = EnqueuedAs, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes `EnqueuedAs`")]
pub(super) enum EnqueuedAsSchema {
    /// The job was created.
    Created,
    /// A job with this key already existed and is unchanged.
    Existing,
    /// A waiting job with this key already existed and has the new contents.
    Replaced,
}

/// An attempt that did not succeed.
#[derive(ToSchema)]
#[schema(as = Attempt)]
#[expect(dead_code, reason = "describes what `AttemptRecord` serialises to")]
pub(super) struct AttemptSchema {
    /// The number of the attempt, from 1.
    attempt: i32,
    lease_no: i32,
    #[schema(required)]
    worker: Option<Uuid>,
    started_at: DateTime<Utc>,
    ended_at: DateTime<Utc>,
    /// `failed`, `interrupted`, `snoozed` or `released`.
    what: String,
    #[schema(required)]
    error: Option<String>,
}

/// How long a job waits after a failed attempt.
#[derive(ToSchema)]
#[schema(as = Retry)]
#[serde(untagged)]
#[derive(serde::Serialize)]
#[expect(dead_code, reason = "describes what `RetryPolicy` serialises to")]
pub(super) enum RetrySchema {
    Jitter(RetryJitterSchema),
    Exponential(RetryExponentialSchema),
    Fixed(RetryFixedSchema),
    List(RetryListSchema),
    None(RetryNoneSchema),
}

/// Describes one policy. Each has a name of its own, so that generated clients have one
/// type per policy. The tag is an enum with one value.
macro_rules! retry_policy {
    ($(#[$doc:meta])* $name:ident as $public:ident, $tag:ident::$value:ident { $($fields:tt)* }) => {
        $(#[$doc])*
        #[derive(ToSchema, serde::Serialize)]
        #[schema(as = $public)]
        pub(super) struct $name {
            #[schema(inline)]
            policy: $tag,
            $($fields)*
        }

        #[derive(ToSchema, serde::Serialize)]
        #[serde(rename_all = "snake_case")]
        #[expect(dead_code, reason = "describes a tag of `RetryPolicy`")]
        enum $tag {
            $value,
        }
    };
}

retry_policy! {
    /// A random time between `base_ms` and the smaller of `cap_ms` and
    /// `base_ms · 3^attempt`, uniformly distributed.
    RetryJitterSchema as RetryJitter, JitterTag::Jitter {
        #[schema(maximum = 315360000000_i64)]
        base_ms: u64,
        #[schema(maximum = 315360000000_i64)]
        cap_ms: u64,
    }
}

retry_policy! {
    /// `2^(attempt+1)` seconds, up to `cap_ms`.
    RetryExponentialSchema as RetryExponential, ExponentialTag::Exponential {
        #[schema(maximum = 315360000000_i64)]
        cap_ms: u64,
    }
}

retry_policy! {
    /// Always `delay_ms`.
    RetryFixedSchema as RetryFixed, FixedTag::Fixed {
        #[schema(maximum = 315360000000_i64)]
        delay_ms: u64,
    }
}

retry_policy! {
    /// One delay after the other; the last one repeats.
    RetryListSchema as RetryList, ListTag::List {
        delays_ms: Vec<u64>,
    }
}

retry_policy! {
    /// No retry: the first failure is permanent.
    RetryNoneSchema as RetryNone, NoneTag::None {}
}

/// A queue.
#[derive(ToSchema)]
#[schema(as = Queue)]
#[expect(dead_code, reason = "describes what `QueueRecord` serialises to")]
pub(super) struct QueueSchema {
    name: String,
    /// Whether the queue is paused: no jobs are claimed from it.
    paused: bool,
    /// How many jobs may run at once; null means no limit.
    #[schema(required)]
    limit: Option<u32>,
    /// How often jobs may start; null means no limit.
    #[schema(required, value_type = Option<RateSchema>)]
    rate: Option<RateSchema>,
    /// How many jobs of each group may run at once, unless the group has its own limit.
    #[schema(required)]
    group_limit: Option<u32>,
    /// How often jobs of each group may start, unless the group has its own rate.
    #[schema(required, value_type = Option<RateSchema>)]
    group_rate: Option<RateSchema>,
    /// When the rate lets the next job start; null means now.
    #[schema(required)]
    next_start_at: Option<DateTime<Utc>>,
    /// How many jobs wait.
    waiting: u64,
    /// Whether `waiting` is an estimate, because very many jobs wait.
    waiting_estimated: bool,
    /// How many jobs run.
    running: u64,
    /// How many of its groups are paused, up to 1,000.
    paused_groups: u64,
}

/// How often jobs may start, over all processes.
#[derive(ToSchema)]
#[schema(as = Rate)]
#[expect(dead_code, reason = "describes `Rate`")]
pub(super) struct RateSchema {
    /// How many jobs may start in each period.
    #[schema(minimum = 1, maximum = 1000000)]
    starts: u32,
    /// The period in milliseconds; 1000 by default.
    #[schema(minimum = 1, maximum = 31622400000i64)]
    period_ms: Option<u64>,
    /// How many jobs may start at once after a pause; by default what may start in 50 ms, at least 1.
    #[schema(minimum = 1, maximum = 1000000)]
    burst: Option<u32>,
}

/// A group of a queue. The settings are those in effect: its own or, where it has none, the
/// defaults of its queue.
#[derive(ToSchema)]
#[schema(as = Group)]
#[expect(dead_code, reason = "describes what `GroupRecord` serialises to")]
pub(super) struct GroupSchema {
    queue: String,
    name: String,
    /// Whether the group is paused: none of its jobs are claimed.
    paused: bool,
    /// How many jobs may run at once; null means no limit.
    #[schema(required)]
    limit: Option<u32>,
    /// How often jobs may start; null means no limit.
    #[schema(required, value_type = Option<RateSchema>)]
    rate: Option<RateSchema>,
    /// How many jobs wait, up to 1,000.
    waiting: u64,
    /// Whether more jobs wait than were counted.
    waiting_or_more: bool,
    /// How many jobs run.
    running: u64,
    /// When the rate lets the next job start; null means now.
    #[schema(required)]
    next_start_at: Option<DateTime<Utc>>,
}

/// How a job ended.
#[derive(ToSchema)]
#[schema(as = Outcome, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what `Outcome` serialises to")]
pub(super) enum OutcomeSchema {
    Succeeded,
    FailedPermanent,
    Cancelled,
}

/// A group that a search by name found.
#[derive(ToSchema)]
#[schema(as = FoundGroup)]
#[expect(dead_code, reason = "describes what `FoundGroup` serialises to")]
pub(super) struct FoundGroupSchema {
    queue: String,
    name: String,
    /// Whether the group is paused: none of its jobs are claimed.
    paused: bool,
}

/// A flow: a graph of jobs.
#[derive(ToSchema)]
#[schema(as = Flow)]
#[expect(dead_code, reason = "describes what `FlowRecord` serialises to")]
pub(super) struct FlowSchema {
    /// A UUID v7. The children of a job are the flow with the id of the job.
    id: Uuid,
    /// For people; not unique. The children of a job have the name of its kind.
    name: String,
    status: FlowStatusSchema,
    /// How many jobs the flow has.
    members: u64,
    /// How many of them have not ended.
    open: u64,
    /// How many of them failed or were cancelled. Tasks that were skipped do not count.
    failed: u64,
    /// Whether no more jobs can be added.
    sealed: bool,
    /// Whether the flow is being cancelled, or was.
    cancelled: bool,
    #[schema(required)]
    idempotency_key: Option<String>,
    created_at: DateTime<Utc>,
    /// When the flow is cancelled if it has not ended.
    #[schema(required)]
    deadline: Option<DateTime<Utc>>,
    #[schema(required)]
    ended_at: Option<DateTime<Utc>>,
}

/// The status of a flow.
#[derive(ToSchema)]
#[schema(as = FlowStatus, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what `FlowStatus` serialises to")]
pub(super) enum FlowStatusSchema {
    /// It has not ended.
    Running,
    /// All jobs succeeded, or were skipped because they were not needed.
    Succeeded,
    /// A job failed or was cancelled.
    Failed,
    /// The flow was cancelled, or its deadline passed.
    Cancelled,
}

/// A job of a flow.
#[derive(ToSchema)]
#[schema(as = FlowTask)]
#[expect(dead_code, reason = "describes what `TaskRecord` serialises to")]
pub(super) struct TaskSchema {
    /// The id of the job.
    id: Uuid,
    /// Its name in the flow. Jobs that were added later have none, and children that of their step.
    #[schema(required)]
    task: Option<String>,
    kind: String,
    queue: String,
    status: StatusSchema,
    /// Whether it waits for other jobs of the flow.
    held: bool,
    /// Whether it was cancelled because it could never start.
    skipped: bool,
    /// What it waits or waited for.
    after: Vec<TaskLinkSchema>,
}

/// What a job of a flow waits or waited for.
#[derive(ToSchema)]
#[schema(as = FlowLink)]
#[expect(dead_code, reason = "describes what `LinkRecord` serialises to")]
pub(super) struct TaskLinkSchema {
    /// The id of the other job.
    id: Uuid,
    /// Its name in the flow.
    #[schema(required)]
    task: Option<String>,
    condition: ConditionSchema,
    /// Whether the condition is met; null if the other job has not ended.
    #[schema(required)]
    met: Option<bool>,
}

/// What has to become of another task.
#[derive(ToSchema)]
#[schema(as = Condition, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what `Condition` serialises to")]
pub(super) enum ConditionSchema {
    /// It has succeeded.
    Succeeded,
    /// It has ended, whatever its outcome.
    Ended,
    /// It has failed, or was cancelled or skipped.
    Failed,
}

/// What to do with each job.
#[derive(ToSchema)]
#[schema(as = BulkAction, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what `Action` serialises to")]
pub(super) enum ActionSchema {
    /// Cancel waiting jobs and request that running ones stop.
    Cancel,
    /// Run finished jobs again, and waiting ones now.
    Retry,
    /// Delete finished jobs.
    Delete,
}

/// Selects the jobs that match every field. Set at least one.
#[derive(ToSchema)]
#[schema(as = JobFilter, min_properties = 1)]
#[expect(dead_code, reason = "describes what `JobFilter` serialises to")]
pub(super) struct JobFilterSchema {
    /// Jobs with one of these statuses.
    #[schema(required = false)]
    status: Vec<StatusSchema>,
    #[schema(min_length = 1, max_length = 1024)]
    kind: Option<String>,
    #[schema(min_length = 1, max_length = 1024)]
    queue: Option<String>,
    #[schema(min_length = 1, max_length = 1024)]
    group: Option<String>,
    #[schema(min_length = 1, max_length = 1024)]
    tag: Option<String>,
    /// Jobs whose last error contains this text, in upper or lower case.
    #[schema(min_length = 1, max_length = 1024)]
    error: Option<String>,
    /// Jobs whose last failure belongs to this group.
    #[schema(pattern = "^[0-9a-fA-F]{16}$")]
    failure: Option<String>,
    #[schema(min_length = 1, max_length = 1024)]
    idempotency_key: Option<String>,
    /// Of an unfinished job.
    #[schema(min_length = 1, max_length = 1024)]
    unique_key: Option<String>,
    /// Created before this time.
    older_than: Option<DateTime<Utc>>,
    /// Created at this time or later.
    newer_than: Option<DateTime<Utc>>,
    /// Ended before this time.
    ended_before: Option<DateTime<Utc>>,
    /// Ended at this time or later.
    ended_after: Option<DateTime<Utc>>,
}

/// The state of an operation.
#[derive(ToSchema)]
#[schema(as = OperationState, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what `OperationState` serialises to")]
pub(super) enum OperationStateSchema {
    /// It is being executed, or waits for a process that executes it.
    Running,
    /// It was stopped, and can be resumed.
    Stopped,
    /// It has visited all of its jobs.
    Done,
    /// An error ended it. It can be resumed.
    Failed,
}

/// A change of many jobs, and how far it is.
#[derive(ToSchema)]
#[schema(as = Operation)]
#[expect(dead_code, reason = "describes what `OperationRecord` serialises to")]
pub(super) struct OperationSchema {
    id: Uuid,
    action: ActionSchema,
    state: OperationStateSchema,
    /// Which jobs it changes; null if it has a list of ids.
    #[schema(required, value_type = Option<JobFilterSchema>)]
    filter: Option<JobFilterSchema>,
    /// The only queues whose jobs it changes; null means all.
    #[schema(required)]
    queues: Option<Vec<String>>,
    /// How many jobs it will visit; null if that was not known when it was started.
    #[schema(required)]
    expected: Option<u64>,
    /// How many jobs it has visited.
    examined: u64,
    /// How many of them it has changed.
    changed: u64,
    /// How many of them it could not change: their state does not allow it, or they no longer exist.
    skipped: u64,
    /// It has visited all of its jobs down to this id.
    #[schema(required)]
    cursor: Option<Uuid>,
    /// Why it failed, or why its last step has to be tried again.
    #[schema(required)]
    error: Option<String>,
    /// When it was started. It changes no jobs that were created later.
    created_at: DateTime<Utc>,
    /// The name of the token that started it.
    #[schema(required)]
    created_by: Option<String>,
    /// When it last made progress or changed its state.
    updated_at: DateTime<Utc>,
    /// When it was done or failed.
    #[schema(required)]
    ended_at: Option<DateTime<Utc>>,
}

/// A worker process.
#[derive(ToSchema)]
#[schema(as = Worker)]
#[expect(dead_code, reason = "describes what `WorkerRecord` serialises to")]
pub(super) struct WorkerSchema {
    /// A new id for each start of the process.
    id: Uuid,
    name: String,
    /// The queues it claims from; `*` means every queue.
    queues: Vec<String>,
    /// The kinds that the worker handles; null means any. A server that runs no jobs
    /// handles none.
    #[schema(required)]
    kinds: Option<Vec<String>>,
    /// How many jobs the worker runs at once.
    concurrency: u32,
    /// The worker is stale if its last heartbeat is older than this.
    stale_after_seconds: f64,
    started_at: DateTime<Utc>,
    /// When the last heartbeat arrived.
    heartbeat_at: DateTime<Utc>,
    /// When the worker signed off or was declared dead.
    #[schema(required)]
    dead_at: Option<DateTime<Utc>>,
    /// Whether the last heartbeat is older than the threshold.
    stale: bool,
    /// How many leases the worker holds.
    running: u64,
    /// The host it runs on; null if unknown, for example for a worker over HTTP.
    #[schema(required)]
    host: Option<String>,
    /// Its process id; null if unknown.
    #[schema(required)]
    pid: Option<u32>,
    /// The version of Longshore it was built with; null if unknown.
    #[schema(required)]
    version: Option<String>,
}

/// The number of jobs of one queue and kind with one status.
#[derive(ToSchema)]
#[schema(as = JobCount)]
#[expect(dead_code, reason = "describes what `Count` serialises to")]
pub(super) struct CountSchema {
    status: StatusSchema,
    queue: String,
    kind: String,
    jobs: u64,
    /// Whether `jobs` is an estimate, because very many jobs wait.
    estimated: bool,
}

/// A group of failures: attempts of one kind that failed in the same way.
#[derive(ToSchema)]
#[schema(as = Failure)]
#[expect(dead_code, reason = "describes what `FailureRecord` serialises to")]
pub(super) struct FailureSchema {
    /// What the failures have in common, as 16 hexadecimal digits.
    #[schema(example = "9c33ef0a6b1d7f02", pattern = "^[0-9a-f]{16}$")]
    fingerprint: String,
    kind: String,
    /// How many attempts have failed.
    attempts: u64,
    /// How many dead letters belong to the group now; at most 1,000 are counted.
    dead: u64,
    /// Whether there are more than that.
    dead_or_more: bool,
    first_seen: DateTime<Utc>,
    last_seen: DateTime<Utc>,
    /// The job of the newest failure. It may no longer be kept.
    job: Uuid,
    /// The error of the newest failure, or its beginning.
    error: String,
}

/// Any integer: one beyond 64 bits is clamped like others, so it has no format.
pub(super) struct AnyInteger;

impl PartialSchema for AnyInteger {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Integer).into()
    }
}

impl ToSchema for AnyInteger {}

/// The same, up to the largest offset.
pub(super) struct Offset;

impl PartialSchema for Offset {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Integer).maximum(Some(10_000)).into()
    }
}

impl ToSchema for Offset {}
