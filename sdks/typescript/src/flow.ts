/** Flows: graphs of jobs. The builder collects tasks; the server checks the graph. */

import type { FlowInfo, Longshore } from "./client.js";
import { ValidationError } from "./errors.js";
import { newId } from "./ids.js";
import { type JobRequest, requestJson } from "./job.js";

/** What a task waits for: a task that has to succeed, or another end of it. */
export type After = string | { task: string; condition: "succeeded" | "ended" | "failed" };

export interface TaskOptions {
  after?: After | After[] | undefined;
}

/** Builds a flow. */
export class FlowBuilder {
  readonly #client: Longshore;
  readonly #name: string;
  readonly #tasks: { name: string; request: JobRequest; after: After[] }[] = [];
  readonly #callbacks: Record<string, JobRequest[]> = {};
  #deadline: number | undefined;
  #idempotencyKey: string | undefined;
  #sealed = true;

  /** @internal */
  constructor(client: Longshore, name: string) {
    this.#client = client;
    this.#name = name;
  }

  /** Adds a task. It starts when the tasks in `after` have ended as it needs, or at once without any. */
  task(name: string, request: JobRequest, options: TaskOptions = {}): this {
    const after = options.after === undefined ? [] : [options.after].flat();
    this.#tasks.push({ name, request, after });
    return this;
  }

  /** Enqueues the job when all tasks have succeeded. */
  onSuccess(request: JobRequest): this {
    return this.#callback("on_success", request);
  }

  /** Enqueues the job when the flow has ended and a task has failed or was cancelled. */
  onFailure(request: JobRequest): this {
    return this.#callback("on_failure", request);
  }

  /** Enqueues the job when the flow has ended, whatever its outcome. */
  onEnd(request: JobRequest): this {
    return this.#callback("on_end", request);
  }

  #callback(when: string, request: JobRequest): this {
    (this.#callbacks[when] ??= []).push(request);
    return this;
  }

  /** Cancels the flow if it has not ended after this many seconds. */
  deadline(seconds: number): this {
    this.#deadline = seconds;
    return this;
  }

  /** A second flow with the same key is the first one. */
  idempotencyKey(key: string): this {
    this.#idempotencyKey = key;
    return this;
  }

  /** Lets the flow grow with `addToFlow` until `sealFlow`. */
  open(): this {
    this.#sealed = false;
    return this;
  }

  /**
   * Enqueues all tasks in one commit. A flow with the same key or id is returned unchanged; with a token without the scope
   * `read`, only its `id` and `status`.
   */
  async start(): Promise<FlowInfo> {
    const tasks = await Promise.all(
      this.#tasks.map(async ({ name, request, after }) => {
        const { fields, payloadJson } = await request.encode();
        return requestJson({ ...fields, task: name, after }, payloadJson);
      }),
    );
    const fields: Record<string, unknown> = { id: newId(), name: this.#name, sealed: this.#sealed };
    if (this.#deadline !== undefined) fields["deadline_seconds"] = this.#deadline;
    if (this.#idempotencyKey !== undefined) fields["idempotency_key"] = this.#idempotencyKey;
    let json = `${JSON.stringify(fields).slice(0, -1)},"tasks":[${tasks.join(",")}]`;
    for (const [when, requests] of Object.entries(this.#callbacks)) {
      json += `,"${when}":[${(await encodeAll(requests)).join(",")}]`;
    }
    return this.#client.startFlow(`${json}}`);
  }
}

/** The JSON text of each request. These requests are stored with something else, so they have no ids of their own. */
export async function encodeAll(requests: Iterable<JobRequest>): Promise<string[]> {
  return Promise.all(
    Array.from(requests, async (request) => {
      if (request.options.id !== undefined) {
        throw new ValidationError(
          `id: only enqueue() accepts an id; leave it out for \`${request.job.name}\``,
        );
      }
      const { fields, payloadJson } = await request.encode();
      return requestJson(fields, payloadJson);
    }),
  );
}
