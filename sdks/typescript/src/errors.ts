/** The errors that calls throw, and the errors that handlers throw to end an attempt in a certain way. */

/** Says what kind of problem an error is. The last three do not come from the server. */
export type ErrorSlug =
  | "not_found"
  | "bad_request"
  | "conflict"
  | "validation"
  | "unauthorized"
  | "forbidden"
  | "too_large"
  | "rate_limited"
  | "method_not_allowed"
  | "unsupported_media_type"
  | "misdirected"
  | "timeout"
  | "unavailable"
  | "internal"
  | "connection"
  | "job_failed"
  | "job_cancelled";

export interface ErrorDetails {
  /** The HTTP status, if a server replied. */
  status?: number | undefined;
  /** Find the request in the log of the server by this id. */
  requestId?: string | undefined;
  /** The status of the job, if it does not allow the request. */
  jobStatus?: string | undefined;
  cause?: unknown;
}

/** The base of all errors that this package throws. `slug` is for programs, `message` for people. */
export class LongshoreError extends Error {
  readonly slug: ErrorSlug;
  readonly status: number | undefined;
  readonly requestId: string | undefined;
  readonly jobStatus: string | undefined;

  constructor(slug: ErrorSlug, message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = new.target.name;
    this.slug = slug;
    this.status = details.status;
    this.requestId = details.requestId;
    this.jobStatus = details.jobStatus;
  }
}

/** A field is invalid; the message names it. */
export class ValidationError extends LongshoreError {
  constructor(message: string, details?: ErrorDetails) {
    super("validation", message, details);
  }
}

/** The object does not exist, or is no longer kept. */
export class NotFoundError extends LongshoreError {
  constructor(message: string, details?: ErrorDetails) {
    super("not_found", message, details);
  }
}

/** The state of the object does not allow the operation. */
export class ConflictError extends LongshoreError {
  constructor(message: string, details?: ErrorDetails) {
    super("conflict", message, details);
  }
}

/** The token is missing or invalid (`unauthorized`), or lacks a scope or a queue (`forbidden`). */
export class AccessError extends LongshoreError {}

/** The server cannot be reached or cannot serve the request now, and the deadline for repetitions has passed. */
export class UnavailableError extends LongshoreError {}

/** The time that the caller allowed has passed. */
export class TimeoutError extends LongshoreError {
  constructor(message: string, details?: ErrorDetails) {
    super("timeout", message, details);
  }
}

/** The job whose result was requested has failed. */
export class JobFailedError extends LongshoreError {
  readonly jobId: string;
  constructor(jobId: string, message: string) {
    super("job_failed", message);
    this.jobId = jobId;
  }
}

/** The job whose result was requested was cancelled. */
export class JobCancelledError extends LongshoreError {
  readonly jobId: string;
  constructor(jobId: string, message: string) {
    super("job_cancelled", message);
    this.jobId = jobId;
  }
}

/** Converts an error response. */
export function errorFromReply(
  status: number,
  body: { error?: string; message?: string; job_status?: string } | undefined,
  requestId: string | undefined,
): LongshoreError {
  const message = body?.message ?? `the server replied with status ${status}`;
  const details: ErrorDetails = { status, requestId, jobStatus: body?.job_status };
  const slug = (body?.error ?? slugOfStatus(status)) as ErrorSlug;
  switch (slug) {
    case "validation":
      return new ValidationError(message, details);
    case "not_found":
      return new NotFoundError(message, details);
    case "conflict":
      return new ConflictError(message, details);
    case "unauthorized":
    case "forbidden":
      return new AccessError(slug, message, details);
    case "unavailable":
    case "rate_limited":
      return new UnavailableError(slug, message, details);
    default:
      return new LongshoreError(slug, message, details);
  }
}

function slugOfStatus(status: number): ErrorSlug {
  if (status === 401) return "unauthorized";
  if (status === 403) return "forbidden";
  if (status === 404) return "not_found";
  if (status === 409) return "conflict";
  if (status === 413) return "too_large";
  if (status === 422) return "validation";
  if (status === 429) return "rate_limited";
  if (status === 502 || status === 503) return "unavailable";
  if (status === 504) return "timeout";
  return status >= 500 ? "internal" : "bad_request";
}

/** Thrown by a handler: the attempt failed, and the next one starts after exactly this many seconds. */
export class Retry extends Error {
  override readonly name = "Retry";
  readonly after: number;
  constructor(
    after: number,
    message = `the handler requested a retry after ${after} s`,
    options?: ErrorOptions,
  ) {
    super(message, options);
    this.after = checkSeconds("Retry", after);
  }
}

/** Thrown by a handler: the job failed and is not retried. */
export class Fail extends Error {
  override readonly name = "Fail";
}

/** Thrown by a handler: the job runs again after this many seconds. The attempt is not charged. */
export class Snooze extends Error {
  override readonly name = "Snooze";
  readonly seconds: number;
  constructor(seconds: number) {
    super(`the handler snoozed for ${seconds} s`);
    this.seconds = checkSeconds("Snooze", seconds);
  }
}

/** Thrown by a handler: the job ends as cancelled, with this reason. */
export class Cancel extends Error {
  override readonly name = "Cancel";
}

function checkSeconds(what: string, seconds: number): number {
  if (seconds >= 0 && seconds <= 315_360_000) return seconds;
  throw new ValidationError(`${what}: ${seconds} is out of range; use 0 s to ten years`);
}
