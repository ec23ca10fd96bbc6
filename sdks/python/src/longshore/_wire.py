"""The types of requests and responses. Generated from docs/openapi.json by tools/generate_wire.py."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union


class AddJobsRequest(TypedDict):
    """Jobs to add to a flow."""

    jobs: list[FlowJob]


class _AfterTaskRequired(TypedDict):
    task: str


class AfterTask(_AfterTaskRequired, total=False):
    """A task that another one waits for."""

    condition: Union[Condition, None]


class _AnnouncedKindRequired(TypedDict):
    name: str


class AnnouncedKind(_AnnouncedKindRequired, total=False):
    """A kind that a worker describes."""

    defaults: Union[KindDefaults, None]
    schema: Any


class Attempt(TypedDict):
    """An attempt that did not succeed."""

    attempt: int
    ended_at: str
    error: Union[str, None]
    lease_no: int
    started_at: str
    what: str
    worker: Union[str, None]


class _BatchItemRequired(TypedDict):
    outcome: BatchOutcome


class BatchItem(_BatchItemRequired, total=False):
    """The result of one job in a batch."""

    error: ErrorSlug
    id: str
    message: str


class BatchResponse(TypedDict):
    """The result of a batch."""

    created: int
    existing: int
    items: list[BatchItem]
    refused: int


class BulkFilter(TypedDict, total=False):
    """Selects jobs."""

    kind: Union[str, None]
    newer_than: Union[str, None]
    older_than: Union[str, None]
    queue: Union[str, None]
    status: Union[Status, None]
    tag: Union[str, None]


class _BulkRequestRequired(TypedDict):
    action: BulkAction
    filter: BulkFilter


class BulkRequest(_BulkRequestRequired, total=False):
    """A bulk operation."""

    cursor: Union[str, None]
    dry_run: bool
    limit: Union[int, None]


class BulkResponse(TypedDict):
    """The result of a bulk operation."""

    changed: int
    dry_run: bool
    matched: int
    next: Union[str, None]
    skipped: int


class CancelResponse(TypedDict):
    """The result of a cancel request."""

    job_id: str
    status: str


class CancelledFlow(TypedDict):
    """The result of cancelling a flow."""

    cancelled: int
    requested: int


class CheckpointItem(TypedDict):
    """The checkpoint of one leased job."""

    checkpoint: Any
    id: str
    lease_no: int


class DoneSteps(TypedDict):
    """Steps of one leased job that are done."""

    id: str
    lease_no: int
    steps: list[NewStep]


class DoneWait(TypedDict):
    """A wait that is over."""

    event: Union[str, None]
    name: str
    payload: Any


class EditRequest(TypedDict, total=False):
    """Changes to a job."""

    delay_seconds: Union[float, None]
    payload: Any
    priority: Union[int, None]
    run_at: Union[str, None]


class EndedChild(TypedDict):
    """A child that has ended."""

    error: Union[str, None]
    id: str
    outcome: Union[Outcome, None]
    result: Any
    task: Union[str, None]


class _EventRequired(TypedDict):
    emitted_at: str
    name: str


class Event(_EventRequired, total=False):
    """An event."""

    payload: Any


class Explanation(TypedDict):
    """Why a job is or is not running."""

    ahead: Union[int, None]
    causes: list[ExplanationCause]
    due_at: Union[str, None]
    estimated_seconds: Union[float, None]
    job_id: str
    message: str
    reason: ExplanationReason
    status: Status


class ExplanationCause(TypedDict):
    """One reason why a job does not run."""

    message: str
    reason: ExplanationReason
    remedy: Union[str, None]


class Failure(TypedDict):
    """A group of failures: attempts of one kind that failed in the same way."""

    attempts: int
    dead: int
    dead_or_more: bool
    error: str
    fingerprint: str
    first_seen: str
    job: str
    kind: str
    last_seen: str


class Flow(TypedDict):
    """A flow: a graph of jobs."""

    cancelled: bool
    created_at: str
    deadline: Union[str, None]
    ended_at: Union[str, None]
    failed: int
    id: str
    idempotency_key: Union[str, None]
    members: int
    name: str
    open: int
    sealed: bool
    status: FlowStatus


class _FlowJobRequired(TypedDict):
    kind: str
    payload: Any


class FlowJob(_FlowJobRequired, total=False):
    """A job of a flow without a name."""

    context: Union[str, None]
    delay_seconds: Union[float, None]
    flags: list[str]
    group: Union[str, None]
    max_attempts: Union[int, None]
    metadata: Any
    priority: Union[int, None]
    queue: Union[str, None]
    retry: Union[Retry, None]
    run_at: Union[str, None]
    tags: list[str]
    timeout_seconds: Union[Timeout, None]


class FlowLink(TypedDict):
    """What a job of a flow waits or waited for."""

    condition: Condition
    id: str
    met: Union[bool, None]
    task: Union[str, None]


class _FlowReferenceRequired(TypedDict):
    id: str
    status: FlowStatus


class FlowReference(_FlowReferenceRequired, total=False):
    """What a token without the scope `read` gets instead of a flow that existed before."""

    enqueued_as: EnqueuedAs


class FlowTask(TypedDict):
    """A job of a flow."""

    after: list[FlowLink]
    held: bool
    id: str
    kind: str
    queue: str
    skipped: bool
    status: Status
    task: Union[str, None]


class FoundGroup(TypedDict):
    """A group that a search by name found."""

    name: str
    paused: bool
    queue: str


class Group(TypedDict):
    """A group of a queue."""

    limit: Union[int, None]
    name: str
    next_start_at: Union[str, None]
    paused: bool
    queue: str
    rate: Union[Rate, None]
    running: int
    waiting: int
    waiting_or_more: bool


class GroupDefaultsRequest(TypedDict, total=False):
    """The settings of the groups of a queue that have none of their own."""

    limit: Union[int, None]
    rate: Union[Rate, None]


class GroupRequest(TypedDict, total=False):
    """A change to a group."""

    limit: Union[int, None]
    paused: Union[bool, None]
    rate: Union[Rate, None]


class Health(TypedDict):
    """The server is healthy."""

    status: str


class InputsRequest(TypedDict):
    """The leased job whose inputs are read."""

    id: str
    lease_no: int
    worker_id: str


class InputsResponse(TypedDict):
    """The tasks that a leased job waited for."""

    inputs: list[TaskInput]


class Job(TypedDict):
    """A job: the request, its status and its history."""

    attempts: int
    cancel_requested: bool
    context: Union[str, None]
    created_at: str
    errors: list[Attempt]
    errors_omitted: int
    finished_at: Union[str, None]
    flags: list[str]
    flow: Union[str, None]
    group: Union[str, None]
    id: str
    idempotency_key: Union[str, None]
    interruptions: int
    kind: str
    last_error: Union[str, None]
    last_failed_at: Union[str, None]
    lease_no: int
    locked_at: Union[str, None]
    locked_by: Union[str, None]
    locked_by_name: Union[str, None]
    max_attempts: int
    metadata: Any
    payload: Any
    priority: int
    progress: Any
    queue: str
    result: Any
    retry: Union[Retry, None]
    run_at: str
    started_at: Union[str, None]
    status: Status
    tags: list[str]
    task: Union[str, None]
    timeout_seconds: Union[float, None]
    unique_key: Union[str, None]
    updated_at: str


class JobCount(TypedDict):
    """The number of jobs of one queue and kind with one status."""

    estimated: bool
    jobs: int
    kind: str
    queue: str
    status: Status


class JobFilter(TypedDict, total=False):
    """Selects the jobs that match every field."""

    ended_after: Union[str, None]
    ended_before: Union[str, None]
    error: Union[str, None]
    failure: Union[str, None]
    group: Union[str, None]
    idempotency_key: Union[str, None]
    kind: Union[str, None]
    newer_than: Union[str, None]
    older_than: Union[str, None]
    queue: Union[str, None]
    status: list[Status]
    tag: Union[str, None]
    unique_key: Union[str, None]


class _JobReferenceRequired(TypedDict):
    id: str
    status: Status


class JobReference(_JobReferenceRequired, total=False):
    """What a token without the scope `read` gets instead of a job that existed before."""

    enqueued_as: EnqueuedAs


class _JoinRequestRequired(TypedDict):
    id: str
    lease_no: int
    name: str
    worker_id: str


class JoinRequest(_JoinRequestRequired, total=False):
    """The leased job that waits for its children."""

    after: Union[str, None]
    limit: Union[int, None]


class JoinResponse(TypedDict):
    """Whether the job continues, and its children."""

    children: list[EndedChild]
    next: Union[str, None]
    status: WaitStatus


class JournalRequest(TypedDict):
    """The job whose journal is read."""

    id: str
    lease_no: int
    worker_id: str


class JournalResponse(TypedDict):
    """The journaled steps of a leased job."""

    steps: list[Step]


class _KindRequired(TypedDict):
    defaults: Union[KindDefaults, None]
    has_schema: bool
    name: str
    queue: Union[str, None]
    updated_at: str


class Kind(_KindRequired, total=False):
    """A registered kind."""

    schema: Any


class KindDefaults(TypedDict, total=False):
    """Values for the fields that a request leaves out."""

    max_attempts: Union[int, None]
    priority: Union[int, None]
    queue: Union[str, None]
    retry: Union[Retry, None]
    timeout_seconds: Union[Timeout, None]


class LeaseRef(TypedDict):
    """Identifies a lease."""

    id: str
    lease_no: int


class LeaseRequest(TypedDict, total=False):
    """A worker's request for jobs."""

    announce: list[AnnouncedKind]
    checkpoints: list[CheckpointItem]
    held: Union[list[LeaseRef], None]
    host: Union[str, None]
    kinds: Union[list[str], None]
    limit: Union[int, None]
    name: Union[str, None]
    pid: Union[int, None]
    progress: list[ProgressItem]
    queues: Union[list[str], None]
    settle: list[SettleItem]
    stale_after_seconds: Union[float, None]
    steps: list[DoneSteps]
    version: Union[str, None]
    wait_seconds: Union[float, None]
    worker_id: Union[str, None]


class LeaseResponse(TypedDict):
    """The leased jobs."""

    cancel: list[LeaseRef]
    jobs: list[LeasedJob]
    lost: list[LeaseRef]
    protocol: str
    renew_within_seconds: float
    saved_checkpoints: list[SavedReport]
    saved_progress: list[SavedReport]
    saved_steps: list[SavedReport]
    settled: list[SettledReport]
    worker_id: str


class LeasedJob(TypedDict):
    """A leased job with everything needed to run it."""

    attempt: int
    checkpoint: Any
    claimed_at: str
    context: Union[str, None]
    flags: list[str]
    flow: Union[str, None]
    id: str
    interruptions: int
    kind: str
    lease_no: int
    max_attempts: int
    metadata: Any
    payload: Any
    priority: int
    queue: str
    run_at: str
    steps: Union[list[Step], None]
    tags: list[str]
    timeout_seconds: Union[float, None]
    traceparent: Union[str, None]


class LimitRequest(TypedDict):
    """The concurrency limit of a queue."""

    limit: Union[int, None]


class Link(TypedDict):
    """An address of this server."""

    href: str
    title: str


class LoginRequest(TypedDict):
    """A login."""

    token: str


class MinuteStats(TypedDict):
    """One minute: the jobs that ended in it, and what was measured."""

    cancelled: int
    failed_attempts: int
    failed_permanent: int
    minute: str
    oldest_due_seconds: Union[float, None]
    run_seconds: Percentiles
    succeeded: int
    wait_seconds: Percentiles
    waiting: Union[int, None]


class _NewEventRequired(TypedDict):
    name: str


class NewEvent(_NewEventRequired, total=False):
    """An event to emit."""

    payload: Any


class _NewFlowRequired(TypedDict):
    name: str


class NewFlow(_NewFlowRequired, total=False):
    """A flow to enqueue."""

    deadline_seconds: Union[float, None]
    id: Union[str, None]
    idempotency_key: Union[str, None]
    on_end: Union[Callbacks, None]
    on_failure: Union[Callbacks, None]
    on_success: Union[Callbacks, None]
    sealed: bool
    tasks: list[NewTask]


class _NewJobRequired(TypedDict):
    kind: str
    payload: Any


class NewJob(_NewJobRequired, total=False):
    """A job to enqueue."""

    context: Union[str, None]
    delay_seconds: Union[float, None]
    flags: list[str]
    group: Union[str, None]
    id: Union[str, None]
    idempotency_key: Union[str, None]
    max_attempts: Union[int, None]
    metadata: Any
    priority: Union[int, None]
    queue: Union[str, None]
    retry: Union[Retry, None]
    run_at: Union[str, None]
    tags: list[str]
    timeout_seconds: Union[Timeout, None]
    unique_key: Union[str, None]
    unique_mode: Union[UniqueMode, None]


class NewKind(TypedDict, total=False):
    """The schema and defaults of a kind."""

    defaults: Union[KindDefaults, None]
    schema: Any


class _NewOperationRequired(TypedDict):
    action: BulkAction


class NewOperation(_NewOperationRequired, total=False):
    """An operation to start."""

    filter: Union[JobFilter, None]
    id: Union[str, None]
    ids: Union[list[str], None]


class _NewScheduleRequired(TypedDict):
    cron: str
    job: NewJob


class NewSchedule(_NewScheduleRequired, total=False):
    """The contents of a schedule."""

    last_at: Union[str, None]
    missed: Union[str, None]
    name: Union[str, None]
    next_at: Union[str, None]
    paused: Union[bool, None]
    zone: Union[str, None]


class _NewStepRequired(TypedDict):
    name: str


class NewStep(_NewStepRequired, total=False):
    """A step that is done."""

    value: Any


class _NewTaskRequired(TypedDict):
    kind: str
    payload: Any


class NewTask(_NewTaskRequired, total=False):
    """A task of a flow: a job with a name, and what it waits for."""

    after: list[After]
    context: Union[str, None]
    delay_seconds: Union[float, None]
    flags: list[str]
    group: Union[str, None]
    max_attempts: Union[int, None]
    metadata: Any
    priority: Union[int, None]
    queue: Union[str, None]
    retry: Union[Retry, None]
    run_at: Union[str, None]
    tags: list[str]
    task: Union[str, None]
    timeout_seconds: Union[Timeout, None]


class Operation(TypedDict):
    """A change of many jobs, and how far it is."""

    action: BulkAction
    changed: int
    created_at: str
    created_by: Union[str, None]
    cursor: Union[str, None]
    ended_at: Union[str, None]
    error: Union[str, None]
    examined: int
    expected: Union[int, None]
    filter: Union[JobFilter, None]
    id: str
    queues: Union[list[str], None]
    skipped: int
    state: OperationState
    updated_at: str


class Percentiles(TypedDict):
    """Percentiles, within 20 % of the true value; null if there was no attempt."""

    p50: Union[float, None]
    p95: Union[float, None]
    p99: Union[float, None]


class _ProblemRequired(TypedDict):
    error: ErrorSlug
    message: str


class Problem(_ProblemRequired, total=False):
    """An error response."""

    job_status: Status


class ProgressItem(TypedDict):
    """The progress of one running job."""

    id: str
    lease_no: int
    progress: Any


class Queue(TypedDict):
    """A queue."""

    group_limit: Union[int, None]
    group_rate: Union[Rate, None]
    limit: Union[int, None]
    name: str
    next_start_at: Union[str, None]
    paused: bool
    paused_groups: int
    rate: Union[Rate, None]
    running: int
    waiting: int
    waiting_estimated: bool


class _RateRequired(TypedDict):
    starts: int


class Rate(_RateRequired, total=False):
    """How often jobs may start, over all processes."""

    burst: Union[int, None]
    period_ms: Union[int, None]


class RateRequest(TypedDict):
    """The rate of a queue."""

    rate: Union[Rate, None]


class RedriveRequest(TypedDict, total=False):
    """Selects the dead letters to redrive."""

    after: Union[str, None]
    failure: Union[str, None]
    kind: Union[str, None]
    limit: Union[int, None]
    queue: Union[str, None]


class RedriveResponse(TypedDict):
    """The result of a redrive."""

    next: Union[str, None]
    redriven: int
    skipped: int


class _RenewRequestRequired(TypedDict):
    worker_id: str


class RenewRequest(_RenewRequestRequired, total=False):
    """The heartbeat of a worker."""

    leases: Union[list[LeaseRef], None]
    progress: list[ProgressItem]


class RenewResponse(TypedDict):
    """The leases that need the worker's attention."""

    cancel: list[LeaseRef]
    lost: list[LeaseRef]


class RetriedFlow(TypedDict):
    """The result of retrying a flow."""

    reopened: int


class RetryExponential(TypedDict):
    """`2^(attempt+1)` seconds, up to `cap_ms`."""

    cap_ms: int
    policy: Literal["exponential"]


class RetryFixed(TypedDict):
    """Always `delay_ms`."""

    delay_ms: int
    policy: Literal["fixed"]


class RetryJitter(TypedDict):
    """A random time between `base_ms` and the smaller of `cap_ms` and `base_ms · 3^attempt`, uniformly distributed."""

    base_ms: int
    cap_ms: int
    policy: Literal["jitter"]


class RetryList(TypedDict):
    """One delay after the other; the last one repeats."""

    delays_ms: list[int]
    policy: Literal["list"]


class RetryNone(TypedDict):
    """No retry: the first failure is permanent."""

    policy: Literal["none"]


class SaveStepsRequest(TypedDict):
    """Steps of a leased job that are done."""

    id: str
    lease_no: int
    steps: list[NewStep]
    worker_id: str


class SaveStepsResponse(TypedDict):
    """Whether steps were stored."""

    saved: SettleResult


class SavedReport(TypedDict):
    """Whether steps, a checkpoint or the progress of one job were stored."""

    id: str
    lease_no: int
    message: Union[str, None]
    saved: ReportResult


class Schedule(TypedDict):
    """A schedule, which enqueues one job at each tick."""

    cron: str
    job: Union[NewJob, None]
    last_at: Union[str, None]
    missed: str
    name: str
    next_at: str
    paused: bool
    zone: str


class ScheduleRun(TypedDict):
    """The job of a manual run."""

    how: EnqueuedAs
    job_id: str


class Session(TypedDict):
    """Who uses the API, and what for."""

    expires_at: Union[str, None]
    name: Union[str, None]
    queues: Union[list[str], None]
    scopes: list[str]


class _SettleItemRequired(TypedDict):
    id: str
    lease_no: int
    outcome: AttemptOutcome


class SettleItem(_SettleItemRequired, total=False):
    """The result of one attempt."""

    delay_seconds: Union[float, None]
    error: Union[str, None]
    follow_ups: list[NewJob]
    permanent: bool
    result: Any
    retry_after_seconds: Union[float, None]


class SettleRequest(TypedDict):
    """The results of attempts."""

    items: list[SettleItem]
    worker_id: str


class SettleResponse(TypedDict):
    """The result of a settle call."""

    items: list[SettledItem]


class SettledItem(TypedDict):
    """Whether one attempt was settled."""

    id: str
    lease_no: int
    settled: SettleResult


class SettledReport(TypedDict):
    """Whether the end of one attempt was stored."""

    id: str
    lease_no: int
    message: Union[str, None]
    settled: ReportResult


class SpawnRequest(TypedDict):
    """Children of a leased job."""

    id: str
    jobs: list[FlowJob]
    lease_no: int
    name: str
    worker_id: str


class SpawnResponse(TypedDict):
    """Whether children were stored."""

    status: SettleResult


class StartPage(TypedDict):
    """What this server is, and some of its addresses."""

    links: list[Link]
    name: str
    requires_token: bool
    version: Union[str, None]


class Stats(TypedDict):
    """Counts, rates and run times."""

    at: str
    counts: list[JobCount]
    per_second: float
    run_seconds: Percentiles
    series: list[MinuteStats]
    wait_seconds: Percentiles


class Step(TypedDict):
    """A journaled step of a job."""

    name: str
    saved_at: str
    status: StepStatus
    until: Union[str, None]
    value: Any


class SweepRequest(TypedDict, total=False):
    """Options of a sweep."""

    delay_seconds: Union[float, None]
    dry_run: bool
    resilient_factor: Union[int, None]
    resilient_flags: Union[list[str], None]
    threshold_seconds: Union[float, None]


class SweepResponse(TypedDict):
    """What a sweep did, or would do in a dry run."""

    deferred: int
    dry_run: bool
    recovered: int
    skipped: int
    workers: list[str]


class TaskInput(TypedDict):
    """A task that a leased job waited for."""

    id: str
    outcome: Union[Outcome, None]
    result: Any
    task: Union[str, None]


class Token(TypedDict):
    """A token."""

    created_at: str
    expires_at: Union[str, None]
    id: str
    name: str
    queues: Union[list[str], None]
    revoked_at: Union[str, None]
    scopes: list[str]


class _WaitRequired(TypedDict):
    name: str


class Wait(_WaitRequired, total=False):
    """A wait for a time, for the first of some events, or for both."""

    events: list[str]
    within_seconds: Union[float, None]


class WaitRequest(TypedDict):
    """What a leased job waits for."""

    id: str
    lease_no: int
    waits: list[Wait]
    worker_id: str


class WaitResponse(TypedDict):
    """Whether the job continues."""

    done: list[DoneWait]
    status: WaitStatus


class Worker(TypedDict):
    """A worker process."""

    concurrency: int
    dead_at: Union[str, None]
    heartbeat_at: str
    host: Union[str, None]
    id: str
    kinds: Union[list[str], None]
    name: str
    pid: Union[int, None]
    queues: list[str]
    running: int
    stale: bool
    stale_after_seconds: float
    started_at: str
    version: Union[str, None]

After = Union[str, AfterTask]

AttemptOutcome = Literal["succeeded", "failed", "cancelled", "snoozed", "released", "not_started"]

BatchOutcome = Literal["created", "existing", "replaced", "refused"]

BulkAction = Literal["cancel", "retry", "delete"]

Callbacks = Union[FlowJob, list[FlowJob]]

Condition = Literal["succeeded", "ended", "failed"]

EnqueuedAs = Literal["created", "existing", "replaced"]

ErrorSlug = Literal["not_found", "bad_request", "conflict", "validation", "unauthorized", "forbidden", "too_large", "rate_limited", "method_not_allowed", "unsupported_media_type", "misdirected", "timeout", "unavailable", "internal"]

ExplanationReason = Literal["finished", "worker_lost", "stopping", "running", "waits_for_tasks", "queue_paused", "no_worker_for_queue", "no_worker_for_kind", "suspended", "not_due", "waits_for_retry", "group_paused", "queue_limit", "group_limit", "rate_limit", "workers_busy", "suspect_waits", "waits_its_turn"]

FlowStatus = Literal["running", "succeeded", "failed", "cancelled"]

NoTimeout = Literal["none"]

OperationState = Literal["running", "stopped", "done", "failed"]

Outcome = Literal["succeeded", "failed_permanent", "cancelled"]

ReportResult = Literal["stored", "lease_lost", "rejected", "unavailable"]

Retry = Union[RetryJitter, RetryExponential, RetryFixed, RetryList, RetryNone]

ReturnedFlow = Union[Flow, FlowReference]

ReturnedJob = Union[Job, JobReference]

SettleResult = Literal["stored", "lease_lost"]

Status = Literal["queued", "running", "succeeded", "retrying", "failed_permanent", "cancelled"]

StepStatus = Literal["done", "waiting"]

UniqueMode = Literal["dedupe", "replace", "preserve_run_at"]

WaitStatus = Literal["continue", "suspended", "lease_lost"]

Timeout = Union[float, NoTimeout]
