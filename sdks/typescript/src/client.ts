/**
 * The client: enqueue, read and change jobs, flows, queues and schedules. `work` starts a worker for the
 * jobs that were defined with `job`.
 */

import { JobCancelledError, JobFailedError, ValidationError } from "./errors.js";
import { encodeAll, FlowBuilder } from "./flow.js";
import { type EnqueuedAs, JobHandle } from "./handle.js";
import { newId } from "./ids.js";
import {
  type AnyJob,
  type Handler,
  idOf,
  Job,
  type JobRequest,
  type KindOptions,
  requestJson,
} from "./job.js";
import { encodeJson, findBigInt, type Jsonified } from "./json.js";
import { type Camelized, toCamel, toSnake } from "./names.js";
import type { InputOf, OutputOf, StandardSchema } from "./schema.js";
import { enqueueInSql, type SqlExecutor } from "./sql.js";
import { HttpTransport, MAX_WAITING, sleep, type Transport, untilDeadline } from "./transport.js";
import type { components } from "./wire.js";
import { runWorker, type WorkOptions } from "./worker.js";

type Schemas = components["schemas"];

/** A job: the request, its status and its history. */
export type JobInfo = Camelized<Schemas["Job"]>;
/** Why a job is or is not running. */
export type Explanation = Camelized<Schemas["Explanation"]>;
export type FlowInfo = Camelized<Schemas["Flow"]>;
export type FlowTaskInfo = Camelized<Schemas["FlowTask"]>;
export type QueueInfo = Camelized<Schemas["Queue"]>;
export type ScheduleInfo = Camelized<Schemas["Schedule"]>;
export type EventInfo = Camelized<Schemas["Event"]>;
export type StepInfo = Camelized<Schemas["Step"]>;
export type JobStatus = Schemas["Status"];

export interface LongshoreOptions {
  /** The URL of the server; `LONGSHORE_SERVER` or `http://127.0.0.1:8080` by default. */
  server?: string | undefined;
  /** The API token; `LONGSHORE_TOKEN` by default. */
  token?: string | undefined;
  /** The Postgres schema of the queue, for `enqueueIn`; `longshore` by default. */
  schema?: string | undefined;
  /** How many seconds a call is repeated while the server is unavailable; 30 by default. */
  retryFor?: number | undefined;
}

export interface ResultOptions {
  /** How many seconds to wait; 60 by default. */
  timeout?: number | undefined;
}

export interface ListOptions {
  status?: JobStatus | JobStatus[] | undefined;
  kind?: string | undefined;
  queue?: string | undefined;
  group?: string | undefined;
  tag?: string | undefined;
  error?: string | undefined;
  idempotencyKey?: string | undefined;
  uniqueKey?: string | undefined;
  newerThan?: Date | string | undefined;
  olderThan?: Date | string | undefined;
  /** Stops after this many jobs; all by default. */
  limit?: number | undefined;
}

export interface ScheduleOptions {
  /** Five fields, or six with seconds first. */
  cron: string;
  /** An IANA time zone; UTC by default. */
  zone?: string | undefined;
  /** What happens to missed ticks: `skip`, `one` (the default) or `all:N`. */
  missed?: string | undefined;
  paused?: boolean | undefined;
}

/** The handles of a list of requests, each with the type of its own result. */
type HandlesOf<R extends readonly JobRequest[]> = {
  -readonly [K in keyof R]: R[K] extends JobRequest<infer Result> ? JobHandle<Jsonified<Result>> : never;
};

/** The longest wait of one request. Longer waits are several requests. */
const MAX_WAIT_SECONDS = 20;
const SHORT_WAIT_SECONDS = 1;
const BATCH = 1000;
const ENDED = new Set<JobStatus>(["succeeded", "failed_permanent", "cancelled"]);

export class Longshore {
  readonly server: string;
  /** @internal */
  readonly jobs = new Map<string, AnyJob>();
  /** @internal The schedules that workers store, by name. */
  readonly schedules = new Map<string, { schedule: ScheduleOptions; request: JobRequest }>();
  /** @internal Replaced by `longshore/testing`. */
  transport: Transport;
  readonly #schema: string;
  /** Private, so that a client that is logged does not show it. */
  readonly #token: string | undefined;
  #waits = 0;

  constructor(options: LongshoreOptions = {}) {
    // A variable that is set to nothing counts as absent.
    this.server = options.server ?? (process.env["LONGSHORE_SERVER"] || "http://127.0.0.1:8080");
    this.#token = options.token ?? (process.env["LONGSHORE_TOKEN"] || undefined);
    this.#schema = options.schema ?? "longshore";
    const retryFor = options.retryFor ?? 30;
    if (!(retryFor >= 0))
      throw new ValidationError(`retryFor: ${retryFor} is out of range; use 0 or more seconds`);
    this.transport = new HttpTransport(this.server, this.#token, retryFor * 1000);
  }

  /** @internal */
  get token(): string | undefined {
    return this.#token;
  }

  /**
   * Defines a kind of job with its handler. With `input`, callers pass the input type of the schema and the
   * handler gets its output type. Without it, annotate the parameter of the handler.
   */
  job<S extends StandardSchema, Result>(
    name: string,
    options: KindOptions & { input: S },
    handler: Handler<OutputOf<S>, Result>,
  ): Job<InputOf<S>, OutputOf<S>, Result>;
  job<Input = undefined, Result = unknown>(
    name: string,
    options: KindOptions,
    handler: Handler<Input, Result>,
  ): Job<Input, Input, Result>;
  job<Input = undefined, Result = unknown>(
    name: string,
    handler: Handler<Input, Result>,
  ): Job<Input, Input, Result>;
  job(
    name: string,
    second: (KindOptions & { input?: StandardSchema }) | Handler<unknown, unknown>,
    third?: Handler<unknown, unknown>,
  ): AnyJob {
    const [options, handler] = typeof second === "function" ? [{}, second] : [second, third];
    if (typeof handler !== "function") {
      throw new ValidationError(
        `job \`${name}\`: the handler is missing; use declare() for a job without one`,
      );
    }
    if (this.jobs.has(name)) {
      throw new ValidationError(`job \`${name}\`: defined twice; give each kind its own name`);
    }
    const job: AnyJob = new Job(this, name, options, handler);
    this.jobs.set(name, job);
    return job;
  }

  /** Describes a kind of job whose handler is in another program. */
  declare<S extends StandardSchema, Result = unknown>(
    name: string,
    options: KindOptions & { input: S },
  ): Job<InputOf<S>, OutputOf<S>, Result>;
  declare<Input, Result = unknown>(name: string, options?: KindOptions): Job<Input, Input, Result>;
  declare(name: string, options: KindOptions & { input?: StandardSchema } = {}): AnyJob {
    return new Job(this, name, options, undefined);
  }

  /** Enqueues one job. */
  async enqueue<R>(request: JobRequest<R>): Promise<JobHandle<Jsonified<R>>> {
    const { fields, payloadJson } = await request.encode();
    const { traceparent } = request.options;
    const id = idOf(request);
    const response = await this.transport.call<Schemas["Job"]>("POST", "/jobs", {
      json: requestJson({ ...fields, id }, payloadJson),
      headers: traceparent === undefined ? undefined : { traceparent },
      repeatable: true,
    });
    const how = (response.headers["enqueued-as"] ?? "created") as EnqueuedAs;
    return new JobHandle(this, response.body.id, howOf(request, id, response.body.id, how));
  }

  /**
   * Enqueues jobs, also of several kinds, 1,000 in each commit. Throws if one is refused; the message names it. The
   * others of its commit are stored.
   */
  enqueueMany<R extends readonly JobRequest[] | []>(requests: R): Promise<HandlesOf<R>>;
  enqueueMany<R>(requests: Iterable<JobRequest<R>>): Promise<JobHandle<Jsonified<R>>[]>;
  async enqueueMany(requests: Iterable<JobRequest>): Promise<JobHandle[]> {
    const all = Array.from(requests, (request) => ({ request, id: idOf(request) }));
    const encoded = await Promise.all(
      all.map(async ({ request, id }) => {
        const { fields, payloadJson } = await request.encode();
        return requestJson({ ...fields, id }, payloadJson);
      }),
    );
    const handles: JobHandle[] = [];
    for (const part of parts(encoded)) {
      const { body } = await this.transport.call<Schemas["BatchResponse"]>("POST", "/jobs/batch", {
        json: `[${part.join(",")}]`,
        repeatable: true,
      });
      for (const item of body.items) {
        if (item.id === undefined) {
          throw new ValidationError(
            `job ${handles.length} of ${encoded.length}: ${item.message ?? "refused"}`,
          );
        }
        const { request, id } = all[handles.length]!;
        const how = howOf(request, id, item.id, item.outcome as EnqueuedAs);
        handles.push(new JobHandle(this, item.id, how));
      }
    }
    return handles;
  }

  /** Enqueues one job in your own transaction on the Postgres database of the queue. */
  async enqueueIn<R>(tx: SqlExecutor, request: JobRequest<R>): Promise<JobHandle<Jsonified<R>>> {
    const { fields, payloadJson } = await request.encode();
    const { traceparent } = request.options;
    const id = idOf(request);
    const all = traceparent === undefined ? fields : { ...fields, traceparent };
    const inMemory = this.transport.enqueueInTransaction?.(
      requestJson({ ...fields, id }, payloadJson),
      traceparent,
    );
    const stored = await (inMemory ?? enqueueInSql(tx, this.#schema, id, all, payloadJson));
    return new JobHandle(this, stored.id, stored.enqueuedAs);
  }

  /** A reference to a job of which you know the id. */
  handle<Result = unknown>(id: string): JobHandle<Result> {
    return new JobHandle(this, id, "existing");
  }

  async get(id: string): Promise<JobInfo> {
    return this.#read<Schemas["Job"]>(`/jobs/${encodeURIComponent(id)}`);
  }

  /** Waits until the job has ended, whatever its outcome. */
  async wait(id: string, { timeout = 60 }: ResultOptions = {}): Promise<JobInfo> {
    const late = `job ${id} has not ended within ${timeout} s; it continues`;
    this.#waits += 1;
    const ended = untilDeadline(timeout * 1000, late, async (leftMs) => {
      // If more calls wait than there are connections for them, they take turns.
      const most = this.#waits > MAX_WAITING / 2 ? SHORT_WAIT_SECONDS : MAX_WAIT_SECONDS;
      const seconds = Math.min(most, leftMs / 1000);
      const path = `/jobs/${encodeURIComponent(id)}`;
      const options = { query: { wait_seconds: seconds }, waitMs: seconds * 1000 };
      const { body, headers } = await this.transport.call<Schemas["Job"]>("GET", path, options);
      if (ENDED.has(body.status)) return toCamel(body);
      // Too many calls wait for the server already.
      const pauseMs = Number(headers["retry-after"] ?? 0) * 1000 || 0;
      if (pauseMs > 0) await sleep(Math.min(pauseMs, leftMs));
      return undefined;
    });
    return ended.finally(() => {
      this.#waits -= 1;
    });
  }

  /** Waits until the job has ended, and returns what its handler returned. */
  async result<Result = unknown>(id: string, options?: ResultOptions): Promise<Result> {
    const job = await this.wait(id, options);
    if (job.status === "failed_permanent") {
      throw new JobFailedError(id, `job ${id} (${job.kind}) failed: ${job.lastError ?? "no error message"}`);
    }
    if (job.status === "cancelled") {
      throw new JobCancelledError(
        id,
        `job ${id} (${job.kind}) was cancelled${job.lastError ? `: ${job.lastError}` : ""}`,
      );
    }
    const big = findBigInt(job.result, "result");
    if (big) {
      throw new ValidationError(
        `${big.path}: the integer ${big.value} of job ${id} is above 2^53; let the handler return a string`,
      );
    }
    return job.result as Result;
  }

  /** Lists jobs, newest first. Reads further pages as you iterate. Payloads and results are included. */
  async *list(options: ListOptions = {}): AsyncGenerator<JobInfo, void, undefined> {
    let left = options.limit ?? Number.POSITIVE_INFINITY;
    const filter = { ...options, limit: undefined };
    const query = toSnake(filter) as Record<string, string | undefined>;
    query["status"] = options.status === undefined ? undefined : [options.status].flat().join(",");
    for (const name of ["newer_than", "older_than"]) {
      const time: unknown = query[name];
      if (time instanceof Date) query[name] = time.toISOString();
    }
    let cursor: string | undefined;
    while (left > 0) {
      const page = await this.transport.call<Schemas["Job"][]>("GET", "/jobs", {
        query: { ...query, limit: Math.min(200, left), cursor },
      });
      for (const job of page.body) yield toCamel(job);
      left -= page.body.length;
      const next = /<([^>]*)>;\s*rel="next"/.exec(String(page.headers["link"] ?? ""))?.[1];
      if (next === undefined) return;
      cursor = new URL(next, this.server).searchParams.get("cursor") ?? undefined;
    }
  }

  /** Cancels a job: at once if it waits (`cancelled`); `pending` if it runs and its handler has to stop. */
  async cancel(id: string): Promise<"cancelled" | "pending"> {
    const { body } = await this.transport.call<Schemas["CancelResponse"]>(
      "POST",
      `/jobs/${encodeURIComponent(id)}/cancel`,
    );
    return body.status as "cancelled" | "pending";
  }

  /**
   * Runs a finished job again, with a fresh set of attempts. With a token without the scope `read`, the result has only
   * `id` and `status`.
   */
  async retry(id: string): Promise<JobInfo> {
    const { body } = await this.transport.call<Schemas["Job"]>(
      "POST",
      `/jobs/${encodeURIComponent(id)}/retry`,
    );
    return toCamel(body);
  }

  /** Deletes a finished job. */
  async delete(id: string): Promise<void> {
    await this.transport.call("DELETE", `/jobs/${encodeURIComponent(id)}`);
  }

  /** Says why a job is not running, and estimates when it will. */
  async explain(id: string): Promise<Explanation> {
    return this.#read<Schemas["Explanation"]>(`/jobs/${encodeURIComponent(id)}/explain`);
  }

  /** What the handler of a job has stored with `ctx.step`, and where the job waits. */
  async steps(id: string): Promise<StepInfo[]> {
    return this.#read<Schemas["Step"][]>(`/jobs/${encodeURIComponent(id)}/steps`);
  }

  /** Emits an event. Jobs that wait for it continue. The first event with a name wins. */
  async emit(name: string, payload?: unknown): Promise<EventInfo> {
    const { body } = await this.transport.call<Schemas["Event"]>("POST", "/events", {
      json: `{"name":${JSON.stringify(name)},"payload":${encodeJson(payload, `payload of event \`${name}\``)}}`,
      repeatable: true,
    });
    return toCamel(body);
  }

  /** Starts to build a flow, a graph of jobs. */
  flow(name: string): FlowBuilder {
    return new FlowBuilder(this, name);
  }

  /** @internal */
  async startFlow(json: string): Promise<FlowInfo> {
    const { body } = await this.transport.call<Schemas["Flow"]>("POST", "/flows", { json, repeatable: true });
    return toCamel(body);
  }

  async getFlow(id: string): Promise<FlowInfo> {
    return this.#read<Schemas["Flow"]>(`/flows/${encodeURIComponent(id)}`);
  }

  /** The first 200 tasks of a flow. */
  async flowTasks(id: string): Promise<FlowTaskInfo[]> {
    return this.#read<Schemas["FlowTask"][]>(`/flows/${encodeURIComponent(id)}/tasks`);
  }

  /** Adds jobs to a flow that was started with `open()`. */
  async addToFlow(id: string, requests: Iterable<JobRequest>): Promise<void> {
    for (const part of parts(await encodeAll(requests))) {
      await this.transport.call("POST", `/flows/${encodeURIComponent(id)}/jobs`, {
        json: `{"jobs":[${part.join(",")}]}`,
        headers: { "idempotency-key": newId() },
        repeatable: true,
      });
    }
  }

  /**
   * Lets a flow end that was started with `open()`. With a token without the scope `read`, the result has only `id` and
   * `status`.
   */
  async sealFlow(id: string): Promise<FlowInfo> {
    return this.#change<Schemas["Flow"]>(`/flows/${encodeURIComponent(id)}/seal`);
  }

  async cancelFlow(id: string): Promise<void> {
    await this.#change(`/flows/${encodeURIComponent(id)}/cancel`);
  }

  /** Runs the failed part of a flow again. */
  async retryFlow(id: string): Promise<void> {
    await this.#change(`/flows/${encodeURIComponent(id)}/retry`);
  }

  readonly queues = {
    list: (): Promise<QueueInfo[]> => this.#read<Schemas["Queue"][]>("/queues"),
    pause: (name: string): Promise<QueueInfo> => this.#change(`/queues/${encodeURIComponent(name)}/pause`),
    resume: (name: string): Promise<QueueInfo> => this.#change(`/queues/${encodeURIComponent(name)}/resume`),
    /** Sets how many jobs of the queue may run at once, in all processes together; null removes the limit. */
    limit: async (name: string, limit: number | null): Promise<QueueInfo> => {
      // JSON would make null of it, which removes the limit.
      if (Number.isNaN(limit))
        throw new ValidationError(`limit: ${limit} is not a number; use null for none`);
      const path = `/queues/${encodeURIComponent(name)}/limit`;
      return toCamel((await this.transport.call<Schemas["Queue"]>("PUT", path, { body: { limit } })).body);
    },
  };

  readonly cron = {
    list: (): Promise<ScheduleInfo[]> => this.#read<Schemas["Schedule"][]>("/cron"),
    get: (name: string): Promise<ScheduleInfo> =>
      this.#read<Schemas["Schedule"]>(`/cron/${encodeURIComponent(name)}`),
    /** Creates or changes a schedule that enqueues the job at every tick. */
    put: async (name: string, schedule: ScheduleOptions, request: JobRequest): Promise<ScheduleInfo> => {
      const [job] = await encodeAll([request]);
      const json = `${JSON.stringify(schedule).slice(0, -1)},"job":${job}}`;
      const response = await this.transport.call<Schemas["Schedule"]>(
        "PUT",
        `/cron/${encodeURIComponent(name)}`,
        { json },
      );
      return toCamel(response.body);
    },
    /**
     * Declares a schedule. A worker that runs the job's kind stores it when it starts, as `put` does: the server refuses
     * schedules of kinds that no worker has registered. With tokens, this needs the scope `operate` for all queues; a
     * worker that may not store a schedule logs an error and works.
     */
    declare: (name: string, schedule: ScheduleOptions, request: JobRequest): void => {
      if (this.schedules.has(name))
        throw new ValidationError(`schedule \`${name}\`: declared twice; give each schedule its own name`);
      this.schedules.set(name, { schedule, request });
    },
    delete: async (name: string): Promise<void> => {
      await this.transport.call("DELETE", `/cron/${encodeURIComponent(name)}`);
    },
    pause: (name: string): Promise<ScheduleInfo> => this.#change(`/cron/${encodeURIComponent(name)}/pause`),
    resume: (name: string): Promise<ScheduleInfo> => this.#change(`/cron/${encodeURIComponent(name)}/resume`),
  };

  /**
   * Runs the jobs that were defined with `job`, until SIGTERM, SIGINT or `options.signal`. Then running jobs
   * may finish within the grace period, and the promise resolves.
   */
  work(options: WorkOptions = {}): Promise<void> {
    return runWorker(this, options);
  }

  /** Closes idle connections. A program also ends without this call. */
  close(): void {
    this.transport.close();
  }

  async #read<T>(path: string): Promise<Camelized<T>> {
    return toCamel((await this.transport.call<T>("GET", path)).body);
  }

  async #change<T>(path: string): Promise<Camelized<T>> {
    return toCamel((await this.transport.call<T>("POST", path)).body);
  }
}

/**
 * How a request was stored. A repeated request finds the job that the first one created, if only its response was
 * lost. No other request has an id that was made for this one.
 */
function howOf(request: JobRequest, id: string, storedId: string, how: EnqueuedAs): EnqueuedAs {
  return request.options.id === undefined && storedId === id ? "created" : how;
}

/** Splits a batch by number and by size: the server accepts 16 MiB. */
function* parts(items: string[]): Generator<string[]> {
  const MAX_LENGTH = 4 * 1024 * 1024;
  let part: string[] = [];
  let length = 0;
  for (const item of items) {
    if (part.length > 0 && (part.length >= BATCH || length + item.length > MAX_LENGTH)) {
      yield part;
      part = [];
      length = 0;
    }
    part.push(item);
    length += item.length;
  }
  if (part.length > 0) yield part;
}
