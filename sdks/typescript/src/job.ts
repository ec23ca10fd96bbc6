/** Kinds of jobs: their options, their handler, and typed ways to enqueue them. */

import type { Longshore } from "./client.js";
import type { Context } from "./context.js";
import { ValidationError } from "./errors.js";
import type { JobHandle } from "./handle.js";
import { newId } from "./ids.js";
import { encodeJson, type Jsonified } from "./json.js";
import { type Camelized, toSnake } from "./names.js";
import { jsonSchemaOf, type StandardSchema, validate } from "./schema.js";
import type { SqlExecutor } from "./sql.js";
import type { components } from "./wire.js";

type Schemas = components["schemas"];

/** How long a job waits after a failed attempt, such as `{ policy: "fixed", delayMs: 1500 }`. */
export type RetryPolicy = Camelized<Schemas["Retry"]>;

/** Defaults for all jobs of a kind. */
export interface KindOptions {
  /** `default` if absent. */
  queue?: string | undefined;
  /** Higher runs first; 0 by default. */
  priority?: number | undefined;
  /** 3 by default. */
  maxAttempts?: number | undefined;
  /** Seconds that one attempt may take, or `none`. Two hours by default. */
  timeout?: number | "none" | undefined;
  retry?: RetryPolicy | undefined;
  /** A JSON Schema of the payload. By default it is derived from `input`, if the library of the schema can do that. */
  jsonSchema?: Record<string, unknown> | undefined;
}

/** Options of one job. They override those of its kind. */
export interface EnqueueOptions {
  /** A UUID v7. By default a new one; a second enqueue with the same id returns the first job. */
  id?: string | undefined;
  queue?: string | undefined;
  priority?: number | undefined;
  maxAttempts?: number | undefined;
  timeout?: number | "none" | undefined;
  retry?: RetryPolicy | undefined;
  /** The job does not start before this many seconds have passed. */
  delay?: number | undefined;
  /** The job does not start before this time. */
  runAt?: Date | string | undefined;
  /** A second enqueue with the same key returns the first job, as long as that job is kept. */
  idempotencyKey?: string | undefined;
  /** Only one job that has not finished may have this key. */
  uniqueKey?: string | undefined;
  /** What to do if an unfinished job has the unique key; `dedupe` by default. */
  uniqueMode?: "dedupe" | "replace" | "preserve_run_at" | undefined;
  /** A group of the queue, for example a customer. Groups take fair turns. */
  group?: string | undefined;
  /** Labels for people. */
  tags?: string[] | undefined;
  /** Labels that workers and recovery act on. */
  flags?: string[] | undefined;
  /** Why the job is enqueued. */
  context?: string | undefined;
  /** Your own data: any JSON value up to 64 KiB. */
  metadata?: unknown;
  /** The W3C trace context. Only for single jobs. */
  traceparent?: string | undefined;
}

export type Handler<Output, Result> = (input: Output, ctx: Context) => Result | PromiseLike<Result>;

/** The arguments of `enqueue`: the input may be left out if it may be undefined. */
export type EnqueueArguments<Input> = undefined extends Input
  ? [input?: Input, options?: EnqueueOptions]
  : [input: Input, options?: EnqueueOptions];

/** A job that is not enqueued yet: for batches, flows, follow-ups and children. */
export class JobRequest<Result = unknown> {
  /** Only for the compiler: what the handler returns. */
  declare readonly result?: Result;

  /** @internal */
  constructor(
    readonly job: AnyJob,
    readonly input: unknown,
    readonly options: EnqueueOptions,
  ) {}

  /** Validates the input and returns the fields of the request. `payloadJson` is the payload as text. */
  async encode(): Promise<{ fields: Record<string, unknown>; payloadJson: string }> {
    const { job, options } = this;
    const payloadJson = encodeJson(this.input, `input of \`${job.name}\``);
    if (job.schema) {
      // The worker sees the input after it was stored, so that is what must be valid.
      await validate(job.schema, JSON.parse(payloadJson), `input of \`${job.name}\``);
    }
    return { fields: fieldsOf(job, options), payloadJson };
  }
}

function fieldsOf(job: AnyJob, options: EnqueueOptions): Record<string, unknown> {
  const kind = job.options;
  if (options.delay !== undefined && options.runAt !== undefined) {
    throw new ValidationError(`delay: runAt is also set for \`${job.name}\`; set only one of the two`);
  }
  const { delay } = options;
  const priority = options.priority ?? kind.priority;
  const maxAttempts = options.maxAttempts ?? kind.maxAttempts;
  const timeout = options.timeout ?? kind.timeout;
  checkNumbers(job.name, { delay, priority, maxAttempts, timeout });
  const fields: Record<string, unknown> = {
    kind: job.name,
    queue: options.queue ?? kind.queue,
    priority,
    max_attempts: maxAttempts,
    timeout_seconds: timeout,
    retry: toSnake(options.retry ?? kind.retry),
    delay_seconds: delay,
    run_at: options.runAt instanceof Date ? isoDate(job.name, options.runAt) : options.runAt,
    idempotency_key: options.idempotencyKey,
    unique_key: options.uniqueKey,
    unique_mode: options.uniqueMode,
    group: options.group,
    tags: options.tags,
    flags: options.flags,
    context: options.context,
    metadata: options.metadata,
  };
  for (const name of Object.keys(fields)) if (fields[name] === undefined) delete fields[name];
  if (options.metadata !== undefined) encodeJson(options.metadata, `metadata of \`${job.name}\``);
  return fields;
}

/** JSON makes null of NaN and Infinity, which means the default. */
function checkNumbers(kind: string, options: Record<string, unknown>): void {
  for (const [name, value] of Object.entries(options)) {
    if (typeof value !== "number" || Number.isFinite(value)) continue;
    const remedy = name === "timeout" ? 'use a number of seconds or "none"' : "use a finite number";
    throw new ValidationError(`${name}: ${value} was given for \`${kind}\`; ${remedy}`);
  }
}

function isoDate(kind: string, date: Date): string {
  if (Number.isNaN(date.getTime())) throw new ValidationError(`runAt: the date for \`${kind}\` is invalid`);
  return date.toISOString();
}

/** The JSON text of a request. The payload is already text, so it is not encoded twice. */
export function requestJson(fields: Record<string, unknown>, payloadJson: string): string {
  return `${JSON.stringify(fields).slice(0, -1)},"payload":${payloadJson}}`;
}

/**
 * A kind of job. `Input` is what callers pass, `Output` what the handler gets, `Result` what it returns.
 * `Longshore.job` creates it with a handler, `Longshore.declare` without one.
 */
export class Job<Input, Output, Result> {
  /** @internal */
  readonly schema: StandardSchema<unknown, Output> | undefined;

  /** @internal */
  constructor(
    readonly client: Longshore,
    readonly name: string,
    readonly options: KindOptions & { input?: StandardSchema<unknown, Output> | undefined },
    /** @internal */
    readonly handler: Handler<Output, Result> | undefined,
  ) {
    const { priority, maxAttempts, timeout } = options;
    checkNumbers(name, { priority, maxAttempts, timeout });
    this.schema = options.input;
  }

  /** Enqueues one job. The call can be repeated safely, and is repeated if the server is unavailable. */
  async enqueue(...args: EnqueueArguments<Input>): Promise<JobHandle<Jsonified<Result>>> {
    return this.client.enqueue(this.request(...args));
  }

  /** Enqueues one job per input, in one commit per 1,000. `options` apply to each of them. */
  async enqueueMany(
    inputs: Iterable<Input>,
    options: Omit<EnqueueOptions, "id" | "idempotencyKey" | "uniqueKey" | "uniqueMode" | "traceparent"> = {},
  ): Promise<JobHandle<Jsonified<Result>>[]> {
    const requests = Array.from(inputs, (input) => this.#request(input, options));
    return this.client.enqueueMany(requests);
  }

  /**
   * Enqueues one job in your own transaction on the Postgres database of the queue: the job exists if the
   * transaction commits. `tx` is a client of pg, postgres.js, Knex, Drizzle or Prisma.
   */
  async enqueueIn(tx: SqlExecutor, ...args: EnqueueArguments<Input>): Promise<JobHandle<Jsonified<Result>>> {
    return this.client.enqueueIn(tx, this.request(...args));
  }

  /** A job that is not enqueued yet: for `Longshore.enqueueMany`, flows, follow-ups and children. */
  request(...args: EnqueueArguments<Input>): JobRequest<Result> {
    const [input, options] = args as [unknown, EnqueueOptions | undefined];
    return this.#request(input, options ?? {});
  }

  #request(input: unknown, options: EnqueueOptions): JobRequest<Result> {
    return new JobRequest(this, input, options);
  }

  /** @internal What a worker says about this kind when it registers. */
  announcement(): { name: string; schema: unknown; defaults: unknown } {
    const { options } = this;
    const schema = options.jsonSchema ?? (this.schema ? jsonSchemaOf(this.schema) : undefined);
    const defaults: Record<string, unknown> = {};
    if (options.queue !== undefined) defaults["queue"] = options.queue;
    if (options.priority !== undefined) defaults["priority"] = options.priority;
    if (options.maxAttempts !== undefined) defaults["max_attempts"] = options.maxAttempts;
    if (options.timeout !== undefined) defaults["timeout_seconds"] = options.timeout;
    if (options.retry !== undefined) defaults["retry"] = toSnake(options.retry);
    return {
      name: this.name,
      schema: schema ?? null,
      defaults: Object.keys(defaults).length === 0 ? null : defaults,
    };
  }
}

/** A kind of job whose types are not known here. */
// biome-ignore lint/suspicious/noExplicitAny: a registry of kinds holds every kind of input and result.
export type AnyJob = Job<any, any, any>;

/** The id of a request: the one that the caller chose, or a new one. */
export function idOf(request: JobRequest): string {
  return request.options.id ?? newId();
}
