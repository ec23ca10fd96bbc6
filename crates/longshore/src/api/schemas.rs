//! What jobs look like on the wire, for the OpenAPI document. The bytes come from
//! the library's own records; a test keeps the two alike.

use chrono::{DateTime, Utc};
use utoipa::ToSchema;
use uuid::Uuid;

/// A job: what was asked, where it stands and what has happened so far.
#[derive(ToSchema)]
#[schema(as = Job)]
#[expect(dead_code, reason = "describes what `JobRecord` serialises to")]
pub(super) struct JobSchema {
    /// Its id, a UUID v7.
    id: Uuid,
    /// Which handler runs it.
    #[schema(max_length = 128)]
    kind: String,
    /// The queue it waits in.
    #[schema(max_length = 128)]
    queue: String,
    status: StatusSchema,
    /// Higher runs first.
    #[schema(minimum = -32768, maximum = 32767)]
    priority: i32,
    /// Attempts charged so far, the running one included.
    #[schema(minimum = 0)]
    attempts: i32,
    /// How many attempts it may have.
    #[schema(minimum = 1)]
    max_attempts: i32,
    /// The newest error, kept after a later success.
    #[schema(required)]
    last_error: Option<String>,
    #[schema(required)]
    last_failed_at: Option<DateTime<Utc>>,
    /// Exactly as it was given.
    payload: serde_json::Value,
    /// What the handler returned.
    #[schema(required, nullable)]
    result: Option<serde_json::Value>,
    /// When it may next start, or was asked to.
    run_at: DateTime<Utc>,
    /// When the live lease was taken.
    #[schema(required)]
    locked_at: Option<DateTime<Utc>>,
    /// Who holds the live lease.
    #[schema(required)]
    locked_by: Option<Uuid>,
    /// Whether a cancel waits for the handler's next safe point.
    cancel_requested: bool,
    #[schema(required)]
    idempotency_key: Option<String>,
    #[schema(required)]
    unique_key: Option<String>,
    tags: Vec<String>,
    flags: Vec<String>,
    /// Why it was enqueued.
    #[schema(required)]
    context: Option<String>,
    /// The enqueuer's own data.
    #[schema(required, nullable)]
    metadata: Option<serde_json::Value>,
    /// What the running handler last reported.
    #[schema(required, nullable)]
    progress: Option<serde_json::Value>,
    /// How long one attempt may take; null means for ever.
    #[schema(required)]
    timeout_seconds: Option<f64>,
    /// The retry policy, when it is not the default.
    #[schema(required, nullable)]
    retry: Option<RetrySchema>,
    /// How often a worker died holding it.
    #[schema(minimum = 0)]
    interruptions: i32,
    /// How often it has been claimed: the fence.
    #[schema(minimum = 0)]
    lease_no: i32,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    #[schema(required)]
    started_at: Option<DateTime<Utc>>,
    #[schema(required)]
    finished_at: Option<DateTime<Utc>>,
    /// Attempts that did not succeed, oldest first; empty in lists.
    errors: Vec<AttemptSchema>,
}

/// Where a job stands.
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

/// How a request came by its job.
#[derive(ToSchema)]
#[schema(as = EnqueuedAs, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes `EnqueuedAs`")]
pub(super) enum EnqueuedAsSchema {
    /// It is new.
    Created,
    /// It was there already, by its key, and is as it was.
    Existing,
    /// It was there already, by its key, and has the new contents.
    Replaced,
}

/// One attempt that ended without success.
#[derive(ToSchema)]
#[schema(as = Attempt)]
#[expect(dead_code, reason = "describes what `AttemptRecord` serialises to")]
pub(super) struct AttemptSchema {
    /// Which attempt it was; 1 is the first.
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

/// How long a failed attempt waits.
#[derive(ToSchema)]
#[schema(as = Retry)]
#[serde(tag = "policy", rename_all = "snake_case")]
#[derive(serde::Serialize)]
#[expect(dead_code, reason = "describes what `RetryPolicy` serialises to")]
pub(super) enum RetrySchema {
    /// Uniform between `base_ms` and the smaller of `cap_ms` and `base_ms · 3^attempt`.
    Jitter {
        #[schema(maximum = 315360000000_i64)]
        base_ms: u64,
        #[schema(maximum = 315360000000_i64)]
        cap_ms: u64,
    },
    /// `2^(attempt+1)` seconds, up to `cap_ms`.
    Exponential {
        #[schema(maximum = 315360000000_i64)]
        cap_ms: u64,
    },
    /// Always the same.
    Fixed {
        #[schema(maximum = 315360000000_i64)]
        delay_ms: u64,
    },
    /// One after the other; the last one repeats.
    List { delays_ms: Vec<u64> },
    /// The first failure is final.
    None,
}

/// A queue.
#[derive(ToSchema)]
#[schema(as = Queue)]
#[expect(dead_code, reason = "describes what `QueueRecord` serialises to")]
pub(super) struct QueueSchema {
    name: String,
    /// Whether claims leave it alone.
    paused: bool,
    /// How many of its jobs may run at once.
    #[schema(required)]
    limit: Option<u32>,
    /// How many wait.
    waiting: u64,
    /// Whether `waiting` is an estimate, because there are very many.
    waiting_estimated: bool,
    /// How many run.
    running: u64,
}

/// A worker process.
#[derive(ToSchema)]
#[schema(as = Worker)]
#[expect(dead_code, reason = "describes what `WorkerRecord` serialises to")]
pub(super) struct WorkerSchema {
    /// This boot's id.
    id: Uuid,
    name: String,
    queues: Vec<String>,
    /// The kinds it handles; null means any.
    #[schema(required)]
    kinds: Option<Vec<String>>,
    /// How many jobs it runs at once.
    concurrency: u32,
    /// Without a sign of life for this long it is dead.
    stale_after_seconds: f64,
    started_at: DateTime<Utc>,
    /// Its last sign of life.
    heartbeat_at: DateTime<Utc>,
    /// When it was declared dead.
    #[schema(required)]
    dead_at: Option<DateTime<Utc>>,
    /// Whether its heartbeat is older than the threshold.
    stale: bool,
    /// How many leases name it.
    running: u64,
}

/// How many jobs of a queue and kind are in a status.
#[derive(ToSchema)]
#[schema(as = JobCount)]
#[expect(dead_code, reason = "describes what `Count` serialises to")]
pub(super) struct CountSchema {
    status: StatusSchema,
    queue: String,
    kind: String,
    jobs: u64,
    /// Whether that is an estimate, because very many wait.
    estimated: bool,
}
