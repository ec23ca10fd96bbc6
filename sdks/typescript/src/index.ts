/**
 * Client and worker for Longshore, a background job queue.
 *
 * `client.ts` has the client, `job.ts` kinds of jobs, `context.ts` what handlers can do, `worker.ts` and
 * `io.ts` the worker. `longshore/testing` has tools for tests.
 */

export type {
  EventInfo,
  Explanation,
  FlowInfo,
  FlowTaskInfo,
  JobInfo,
  JobStatus,
  ListOptions,
  LongshoreOptions,
  QueueInfo,
  ResultOptions,
  ScheduleInfo,
  ScheduleOptions,
  StepInfo,
} from "./client.js";
export { Longshore } from "./client.js";
export type { First, StopCause, Wait } from "./context.js";
export { Children, Context, Stopped } from "./context.js";
export type { ErrorSlug } from "./errors.js";
export {
  AccessError,
  Cancel,
  ConflictError,
  Fail,
  JobCancelledError,
  JobFailedError,
  LongshoreError,
  NotFoundError,
  Retry,
  Snooze,
  TimeoutError,
  UnavailableError,
  ValidationError,
} from "./errors.js";
export type { After, FlowBuilder, TaskOptions } from "./flow.js";
export type { EnqueuedAs } from "./handle.js";
export { JobHandle } from "./handle.js";
export { newId } from "./ids.js";
export type { EnqueueOptions, Handler, KindOptions, RetryPolicy } from "./job.js";
export { Job, JobRequest } from "./job.js";
export type { Jsonified } from "./json.js";
export type { InputOf, OutputOf, StandardSchema } from "./schema.js";
export type { SqlExecutor } from "./sql.js";
export { VERSION } from "./version.js";
export type { LogEntry, WorkOptions } from "./worker.js";
