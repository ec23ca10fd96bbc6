/** A reference to a job that exists. */

import type { Explanation, JobInfo, Longshore, ResultOptions } from "./client.js";

/** How a request was stored: as a new job, as part of an existing one, or by replacing its contents. */
export type EnqueuedAs = "created" | "existing" | "replaced";

/** A job that is enqueued. `Result` is the type of what its handler returns, after JSON. */
export class JobHandle<Result = unknown> {
  /** @internal */
  constructor(
    readonly client: Longshore,
    readonly id: string,
    readonly enqueuedAs: EnqueuedAs,
  ) {}

  /** The job as it is now. */
  get(): Promise<JobInfo> {
    return this.client.get(this.id);
  }

  /** Waits until the job has ended, whatever its outcome. */
  wait(options?: ResultOptions): Promise<JobInfo> {
    return this.client.wait(this.id, options);
  }

  /**
   * Waits until the job has ended, and returns what its handler returned. Throws `JobFailedError` or
   * `JobCancelledError` if it did not succeed, and `TimeoutError` after `timeout` seconds (60 by default).
   */
  result(options?: ResultOptions): Promise<Result> {
    return this.client.result<Result>(this.id, options);
  }

  cancel(): Promise<"cancelled" | "pending"> {
    return this.client.cancel(this.id);
  }

  retry(): Promise<JobInfo> {
    return this.client.retry(this.id);
  }

  delete(): Promise<void> {
    return this.client.delete(this.id);
  }

  /** Says why the job is not running, and estimates when it will. */
  explain(): Promise<Explanation> {
    return this.client.explain(this.id);
  }
}
