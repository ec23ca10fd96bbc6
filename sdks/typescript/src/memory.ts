/**
 * A queue in memory, for tests: takes the place of the server behind a client. It knows the rules that tests
 * of handlers need: due times, retries, keys, steps, waits, events, children and flows. It has no workers, no
 * limits and no groups; a test that needs those starts a real server.
 */

import { Attempt, type Ending } from "./attempt.js";
import type { Longshore } from "./client.js";
import { ConflictError, LongshoreError, NotFoundError, ValidationError } from "./errors.js";
import { newId } from "./ids.js";
import type { JoinReply, LeasedJob, NewWait, TaskInput, WaitReply } from "./lease.js";
import { journalOf, MemoryLease } from "./memory_lease.js";
import type { Stored as StoredInTransaction } from "./sql.js";
import type { CallOptions, Response, Transport } from "./transport.js";
import type { components } from "./wire.js";

type Schemas = components["schemas"];
type WireJob = Schemas["Job"];
type Outcome = "succeeded" | "failed_permanent" | "cancelled";

/** How many attempts ended in which way. */
export interface Ran {
  succeeded: number;
  failed: number;
  cancelled: number;
  /** Snoozed, released or suspended. */
  postponed: number;
}

interface NewJobFields {
  kind: string;
  payload: unknown;
  id?: string;
  queue?: string;
  priority?: number;
  max_attempts?: number;
  timeout_seconds?: number | "none";
  retry?: Schemas["Retry"];
  delay_seconds?: number;
  run_at?: string;
  idempotency_key?: string;
  unique_key?: string;
  unique_mode?: "dedupe" | "replace" | "preserve_run_at";
  group?: string;
  tags?: string[];
  flags?: string[];
  context?: string;
  metadata?: unknown;
  task?: string;
  after?: (string | { task: string; condition: "succeeded" | "ended" | "failed" })[];
}

export interface StoredStep {
  status: "done" | "waiting";
  value: unknown;
  until: number | null;
  savedAt: number;
}

export interface Stored {
  job: WireJob;
  /** When a waiting job is due; never while it waits for an event, for children or for tasks. */
  dueAt: number;
  steps: Map<string, StoredStep>;
  checkpoint: unknown;
  traceparent: string | null;
  /** Events that make a suspended job due. */
  events: string[];
  /** Whether it waits for its children. */
  joins: boolean;
  after: { task: string; condition: "succeeded" | "ended" | "failed" }[];
  skipped: boolean;
  /** The attempt that runs now. */
  attempt?: Attempt | undefined;
}

interface StoredFlow {
  flow: Schemas["Flow"];
  callbacks: { when: "on_success" | "on_failure" | "on_end"; job: NewJobFields }[];
}

const NEVER = Number.POSITIVE_INFINITY;
const ENDED = new Set(["succeeded", "failed_permanent", "cancelled"]);
/** A handler that enqueues itself would run forever. */
const MAX_RUNS = 100_000;

export class MemoryQueue implements Transport {
  now: number;
  readonly #client: Longshore;
  readonly #mode: "inline" | "manual";
  readonly #jobs = new Map<string, Stored>();
  readonly #events = new Map<string, { payload: unknown; emittedAt: number }>();
  readonly #flows = new Map<string, StoredFlow>();
  #running = false;

  constructor(client: Longshore, mode: "inline" | "manual", now: number) {
    this.#client = client;
    this.#mode = mode;
    this.now = now;
  }

  all(): WireJob[] {
    return [...this.#jobs.values()].map(({ job }) => job);
  }

  async call<T>(method: string, path: string, options: CallOptions = {}): Promise<Response<T>> {
    // As over HTTP: what is stored is a copy that went through JSON.
    const text = options.json ?? (options.body === undefined ? "null" : JSON.stringify(options.body));
    const { status, body, headers } = await this.#route(`${method} ${path}`, JSON.parse(text), options);
    const copy: unknown = body === undefined ? undefined : JSON.parse(JSON.stringify(body));
    return { status, headers: headers ?? {}, body: copy as T };
  }

  close(): void {}

  /** The job is stored at once, because this queue has no part in the transaction, and runs later. */
  async enqueueInTransaction(json: string, traceparent: string | undefined): Promise<StoredInTransaction> {
    const [{ job }, enqueuedAs] = this.#enqueue(JSON.parse(json) as NewJobFields, traceparent);
    return { id: job.id, enqueuedAs };
  }

  async #route(
    route: string,
    body: unknown,
    options: CallOptions,
  ): Promise<{ status: number; body?: unknown; headers?: Record<string, string> }> {
    const parts = /^(\w+) \/([\w-]+)(?:\/([^/]+))?(?:\/(\w+))?$/.exec(route);
    const [, method, place, key, action] = parts ?? [];
    const id = decodeURIComponent(key ?? "");
    switch (
      `${method} ${place} ${key === undefined ? "" : place === "jobs" && key === "batch" ? "batch" : ":"} ${action ?? ""}`
    ) {
      case "POST jobs  ": {
        const [stored, as] = this.#enqueue(body as NewJobFields, options.headers?.["traceparent"]);
        await this.#runInline();
        return { status: as === "created" ? 201 : 200, body: stored.job, headers: { "enqueued-as": as } };
      }
      case "POST jobs batch ": {
        const items = (body as NewJobFields[]).map((fields) => {
          const [stored, outcome] = this.#enqueue(fields);
          return { outcome, id: stored.job.id };
        });
        await this.#runInline();
        return { status: 200, body: { created: items.length, existing: 0, refused: 0, items } };
      }
      case "GET jobs : ": {
        const { job } = this.#job(id);
        if (options.query?.["wait_seconds"] !== undefined && !ENDED.has(job.status)) {
          const error = job.last_error === null ? "" : `; its last error: ${job.last_error}`;
          throw new LongshoreError(
            "timeout",
            `job ${id} (${job.kind}) has not ended, and a queue in memory does not run it by itself; call runPending() or runAll() first${error}`,
          );
        }
        return { status: 200, body: job };
      }
      case "GET jobs  ":
        return { status: 200, body: this.#list(options.query ?? {}) };
      case "POST jobs : cancel":
        return { status: 200, body: { status: this.#cancel(id), job_id: id } };
      case "POST jobs : retry":
        return { status: 200, body: this.#retry(id) };
      case "DELETE jobs : ":
        if (!ENDED.has(this.#job(id).job.status)) throw new ConflictError(`job ${id} has not ended`);
        this.#jobs.delete(id);
        return { status: 204 };
      case "GET jobs : steps":
        return { status: 200, body: this.#steps(id) };
      case "POST events  ": {
        const { name, payload } = body as { name: string; payload: unknown };
        const status = this.#emit(name, payload);
        await this.#runInline();
        const event = this.#events.get(name)!;
        return { status, body: { name, payload: event.payload, emitted_at: this.#time(event.emittedAt) } };
      }
      case "POST flows  ": {
        const flow = this.#startFlow(body as Schemas["NewFlow"]);
        await this.#runInline();
        return { status: 201, body: flow };
      }
      case "GET flows : ":
        return { status: 200, body: this.#flow(id).flow };
      case "GET flows : tasks":
        return { status: 200, body: this.#members(id).map((each) => taskBody(each)) };
      default:
        throw unsupported(route);
    }
  }

  #enqueue(fields: NewJobFields, traceparent?: string): [Stored, "created" | "existing" | "replaced"] {
    const id = fields.id ?? newId(this.now);
    const known = this.#jobs.get(id);
    if (known) return [known, "existing"];
    for (const stored of this.#jobs.values()) {
      const { job } = stored;
      if (fields.idempotency_key !== undefined && job.idempotency_key === fields.idempotency_key)
        return [stored, "existing"];
      if (fields.unique_key === undefined || job.unique_key !== fields.unique_key || ENDED.has(job.status))
        continue;
      if (fields.unique_mode === undefined || fields.unique_mode === "dedupe") return [stored, "existing"];
      if (job.status !== "running") {
        this.#replace(stored, fields);
        return [stored, "replaced"];
      }
      job.unique_key = null;
    }
    const stored = this.#store(id, fields, null);
    stored.traceparent = traceparent ?? null;
    return [stored, "created"];
  }

  /** Gives a waiting job other contents. What its attempts have stored belongs to the old ones. */
  #replace(stored: Stored, fields: NewJobFields): void {
    const { job } = stored;
    const isSuspended = [...stored.steps.values()].some(({ status }) => status === "waiting");
    const kept = fields.unique_mode === "replace" ? undefined : job.run_at;
    const { id, created_at, lease_no } = job;
    const fresh = this.#newJob(id, kept === undefined ? fields : { ...fields, run_at: kept }, job.flow);
    fresh.idempotency_key = job.idempotency_key ?? fresh.idempotency_key;
    if (kept === undefined) stored.dueAt = Date.parse(fresh.run_at);
    else if (isSuspended) stored.dueAt = Math.min(stored.dueAt, this.now);
    stored.job = { ...fresh, created_at, lease_no };
    stored.steps.clear();
    stored.checkpoint = null;
    stored.events = [];
    stored.joins = false;
  }

  #dueAt(fields: NewJobFields): number {
    if (fields.run_at !== undefined) return Date.parse(fields.run_at);
    return this.now + (fields.delay_seconds ?? 0) * 1000;
  }

  #newJob(id: string, fields: NewJobFields, flow: string | null): WireJob {
    const at = this.#time(this.now);
    return {
      id,
      kind: fields.kind,
      queue: fields.queue ?? "default",
      status: "queued",
      priority: fields.priority ?? 0,
      attempts: 0,
      max_attempts: fields.max_attempts ?? 3,
      last_error: null,
      last_failed_at: null,
      payload: fields.payload,
      result: null,
      run_at: this.#time(this.#dueAt(fields)),
      locked_at: null,
      locked_by: null,
      locked_by_name: null,
      cancel_requested: false,
      idempotency_key: fields.idempotency_key ?? null,
      unique_key: fields.unique_key ?? null,
      group: fields.group ?? null,
      flow,
      task: fields.task ?? null,
      tags: fields.tags ?? [],
      flags: fields.flags ?? [],
      context: fields.context ?? null,
      metadata: fields.metadata ?? null,
      progress: null,
      timeout_seconds: fields.timeout_seconds === "none" ? null : (fields.timeout_seconds ?? 7200),
      retry: fields.retry ?? null,
      interruptions: 0,
      lease_no: 0,
      created_at: at,
      updated_at: at,
      started_at: null,
      finished_at: null,
      errors: [],
      errors_omitted: 0,
    };
  }

  #store(id: string, fields: NewJobFields, flow: string | null): Stored {
    const job = this.#newJob(id, fields, flow);
    const after = (fields.after ?? []).map((each) =>
      typeof each === "string" ? { task: each, condition: "succeeded" as const } : each,
    );
    const stored: Stored = {
      job,
      dueAt: after.length > 0 ? NEVER : this.#dueAt(fields),
      steps: new Map(),
      checkpoint: null,
      traceparent: null,
      events: [],
      joins: false,
      after,
      skipped: false,
    };
    this.#jobs.set(id, stored);
    return stored;
  }

  #job(id: string): Stored {
    const stored = this.#jobs.get(id);
    if (!stored) throw new NotFoundError(`job ${id} does not exist, or is no longer kept`);
    return stored;
  }

  #list(query: NonNullable<CallOptions["query"]>): WireJob[] {
    const statuses = query["status"] === undefined ? undefined : String(query["status"]).split(",");
    const matching = this.all().filter(
      (job) =>
        (statuses === undefined || statuses.includes(job.status)) &&
        (query["kind"] === undefined || job.kind === query["kind"]) &&
        (query["queue"] === undefined || job.queue === query["queue"]) &&
        (query["tag"] === undefined || job.tags.includes(String(query["tag"]))),
    );
    return matching.reverse().slice(0, Number(query["limit"] ?? 50));
  }

  #steps(id: string): unknown[] {
    return [...this.#job(id).steps].map(([name, { status, value, until, savedAt }]) => ({
      name,
      status,
      value,
      until: until === null ? null : this.#time(until),
      saved_at: this.#time(savedAt),
    }));
  }

  #cancel(id: string): "cancelled" | "pending" {
    const stored = this.#job(id);
    if (ENDED.has(stored.job.status)) {
      throw new ConflictError(`job ${id} has ended as ${stored.job.status}`, {
        jobStatus: stored.job.status,
      });
    }
    stored.job.cancel_requested = true;
    if (stored.job.status === "running") {
      stored.attempt?.stop("cancel");
      return "pending";
    }
    this.#finish(stored, "cancelled");
    return "cancelled";
  }

  #retry(id: string): WireJob {
    const stored = this.#job(id);
    if (!ENDED.has(stored.job.status)) throw new ConflictError(`job ${id} has not ended`);
    if (stored.job.status === "succeeded") stored.steps.clear();
    stored.job = { ...stored.job, status: "queued", attempts: 0, finished_at: null, cancel_requested: false };
    stored.dueAt = this.now;
    return stored.job;
  }

  #emit(name: string, payload: unknown): 200 | 201 {
    if (this.#events.has(name)) return 200;
    this.#events.set(name, { payload, emittedAt: this.now });
    for (const stored of this.#jobs.values()) if (stored.events.includes(name)) stored.dueAt = this.now;
    return 201;
  }

  #startFlow(fields: Schemas["NewFlow"]): Schemas["Flow"] {
    if (fields.sealed === false) throw unsupported("a flow with open()");
    const key = fields.idempotency_key ?? null;
    const known = [...this.#flows.values()].find(({ flow }) => key !== null && flow.idempotency_key === key);
    if (known) return known.flow;
    const tasks = (fields.tasks ?? []) as NewJobFields[];
    const names = new Set(tasks.map(({ task }) => task));
    for (const { task, after } of tasks) {
      for (const each of after ?? []) {
        const name = typeof each === "string" ? each : each.task;
        if (!names.has(name))
          throw new ValidationError(
            `after: task \`${task}\` waits for \`${name}\`, which is not in the flow`,
          );
      }
    }
    const id = fields.id ?? newId(this.now);
    const flow = this.#addFlow(id, fields.name, tasks.length);
    flow.flow.idempotency_key = key;
    for (const when of ["on_success", "on_failure", "on_end"] as const) {
      const jobs = fields[when];
      for (const job of jobs === undefined || jobs === null ? [] : [jobs].flat()) {
        flow.callbacks.push({ when, job: job as NewJobFields });
      }
    }
    for (const task of tasks) this.#store(newId(this.now), task, id);
    return flow.flow;
  }

  #addFlow(id: string, name: string, members: number): StoredFlow {
    const flow: Schemas["Flow"] = {
      id,
      name,
      status: "running",
      members,
      open: members,
      failed: 0,
      sealed: true,
      cancelled: false,
      idempotency_key: null,
      created_at: this.#time(this.now),
      deadline: null,
      ended_at: null,
    };
    const stored: StoredFlow = { flow, callbacks: [] };
    this.#flows.set(id, stored);
    return stored;
  }

  #flow(id: string): StoredFlow {
    const flow = this.#flows.get(id);
    if (!flow) throw new NotFoundError(`flow ${id} does not exist, or is no longer kept`);
    return flow;
  }

  #members(flow: string): Stored[] {
    return [...this.#jobs.values()].filter(({ job }) => job.flow === flow);
  }

  /** Ends a job, and decides about the tasks that wait for it. */
  #finish(stored: Stored, outcome: Outcome): void {
    stored.job.status = outcome;
    stored.job.finished_at = this.#time(this.now);
    stored.dueAt = NEVER;
    stored.events = [];
    if (stored.job.flow !== null) this.#advanceFlow(stored.job.flow);
  }

  #advanceFlow(id: string): void {
    const members = this.#members(id);
    const named = new Map(members.map((each) => [each.job.task, each]));
    for (let changed = true; changed; ) {
      changed = false;
      for (const member of members) {
        if (
          ENDED.has(member.job.status) ||
          member.after.length === 0 ||
          member.dueAt !== NEVER ||
          member.job.lease_no > 0
        ) {
          continue;
        }
        const met = member.after.map(({ task, condition }) => isMet(named.get(task)?.job.status, condition));
        if (met.includes(false)) {
          member.skipped = true;
          member.job.status = "cancelled";
          member.job.last_error = "skipped: a task that it waits for ended in another way";
          member.job.finished_at = this.#time(this.now);
          changed = true;
        } else if (met.every((each) => each)) {
          member.dueAt = Math.max(this.now, Date.parse(member.job.run_at));
          changed = true;
        }
      }
    }
    const stored = this.#flows.get(id);
    if (!stored || stored.flow.ended_at !== null) return;
    const open = members.filter(({ job }) => !ENDED.has(job.status)).length;
    const failed = members.filter(
      ({ job, skipped }) => ENDED.has(job.status) && job.status !== "succeeded" && !skipped,
    ).length;
    Object.assign(stored.flow, { open, failed, members: members.length });
    if (open > 0) return;
    stored.flow.status = failed > 0 ? "failed" : "succeeded";
    stored.flow.ended_at = this.#time(this.now);
    const parent = this.#jobs.get(id);
    if (parent?.joins) parent.dueAt = this.now;
    for (const { when, job } of stored.callbacks) {
      if (when === "on_end" || (when === "on_success") === (failed === 0)) this.#enqueue(job);
    }
  }

  async advance(ms: number): Promise<void> {
    this.now += ms;
    await this.#runInline();
  }

  async #runInline(): Promise<void> {
    if (this.#mode === "inline" && !this.#running) await this.runPending();
  }

  async runPending(): Promise<Ran> {
    const ran: Ran = { succeeded: 0, failed: 0, cancelled: 0, postponed: 0 };
    if (this.#running)
      throw new ConflictError("runPending: a handler of this queue is running; await it first");
    this.#running = true;
    try {
      for (let runs = 0; ; runs += 1) {
        const next = this.#next();
        if (!next) return ran;
        if (runs === MAX_RUNS)
          throw new ConflictError(
            `runPending: ${MAX_RUNS} jobs ran, and more are due; do they enqueue each other?`,
          );
        ran[await this.#run(next)] += 1;
      }
    } finally {
      this.#running = false;
    }
  }

  async runAll(): Promise<Ran> {
    const total: Ran = { succeeded: 0, failed: 0, cancelled: 0, postponed: 0 };
    for (let rounds = 0; rounds < MAX_RUNS; rounds += 1) {
      const ran = await this.runPending();
      for (const outcome of Object.keys(total) as (keyof Ran)[]) total[outcome] += ran[outcome];
      const due = this.#runnable()
        .map(({ dueAt }) => dueAt)
        .filter((dueAt) => dueAt !== NEVER);
      if (due.length === 0) return total;
      this.now = Math.max(this.now, Math.min(...due));
    }
    throw new ConflictError("runAll: the jobs do not end");
  }

  /** Jobs that have not ended and have a handler in this client. */
  #runnable(): Stored[] {
    return [...this.#jobs.values()].filter(
      ({ job }) => !ENDED.has(job.status) && this.#client.jobs.has(job.kind),
    );
  }

  #next(): Stored | undefined {
    const due = this.#runnable().filter(({ dueAt }) => dueAt <= this.now);
    due.sort((a, b) => b.job.priority - a.job.priority || a.dueAt - b.dueAt);
    return due[0];
  }

  async #run(stored: Stored): Promise<keyof Ran> {
    const { job } = stored;
    Object.assign(job, { status: "running", attempts: job.attempts + 1, lease_no: job.lease_no + 1 });
    job.started_at = this.#time(this.now);
    const kind = this.#client.jobs.get(job.kind)!;
    const ending = await new Promise<Ending | undefined>((resolve) => {
      const lease = new MemoryLease(this, stored);
      stored.attempt = new Attempt(kind, this.#leased(stored), lease, (_, ended) => resolve(ended));
      stored.attempt.start("none");
    });
    stored.attempt = undefined;
    return this.#settle(stored, ending);
  }

  #leased(stored: Stored): LeasedJob {
    const { job } = stored;
    const leased: LeasedJob = {
      id: job.id,
      lease_no: job.lease_no,
      kind: job.kind,
      queue: job.queue,
      priority: job.priority,
      payload: job.payload,
      attempt: job.attempts,
      max_attempts: job.max_attempts,
      interruptions: 0,
      timeout_seconds: job.timeout_seconds,
      flow: job.flow,
      flags: job.flags,
      tags: job.tags,
      traceparent: stored.traceparent,
      run_at: job.run_at,
      claimed_at: this.#time(this.now),
      metadata: job.metadata,
      context: job.context,
      checkpoint: stored.checkpoint,
      steps: stored.job.lease_no === 1 ? [] : journalOf(stored),
    };
    // The handler may change what it gets.
    return JSON.parse(JSON.stringify(leased)) as LeasedJob;
  }

  #settle(stored: Stored, ending: Ending | undefined): keyof Ran {
    const { job } = stored;
    if (ending === undefined) {
      // Suspended: `wait` has set when it is due.
      Object.assign(job, { status: job.attempts > 1 ? "retrying" : "queued", attempts: job.attempts - 1 });
      return "postponed";
    }
    if (ending.outcome !== "succeeded" && ending.outcome !== "cancelled") this.#addError(job, ending);
    switch (ending.outcome) {
      case "succeeded":
        job.result = ending.result === undefined ? null : JSON.parse(ending.result);
        for (const json of ending.follow_ups ?? []) this.#enqueue(JSON.parse(json) as NewJobFields);
        this.#finish(stored, "succeeded");
        return "succeeded";
      case "cancelled":
        job.last_error = ending.error ?? null;
        job.cancel_requested = true;
        this.#finish(stored, "cancelled");
        return "cancelled";
      case "snoozed":
      case "released":
        Object.assign(job, { status: job.attempts > 1 ? "retrying" : "queued", attempts: job.attempts - 1 });
        this.#postpone(stored, ending.delay_seconds ?? 0);
        return "postponed";
      case "failed":
        job.last_error = ending.error ?? null;
        job.last_failed_at = this.#time(this.now);
        if (job.cancel_requested) this.#finish(stored, "cancelled");
        else if (ending.permanent || job.attempts >= job.max_attempts || job.retry?.policy === "none") {
          this.#finish(stored, "failed_permanent");
        } else {
          job.status = "retrying";
          this.#postpone(stored, ending.retry_after_seconds ?? backoffSeconds(job));
        }
        return "failed";
    }
  }

  #postpone(stored: Stored, seconds: number): void {
    stored.dueAt = this.now + seconds * 1000;
    stored.job.run_at = this.#time(stored.dueAt);
  }

  #addError(job: WireJob, { outcome, error }: Ending): void {
    job.errors.push({
      attempt: job.attempts,
      lease_no: job.lease_no,
      worker: null,
      started_at: job.started_at ?? job.created_at,
      ended_at: this.#time(this.now),
      what: outcome,
      error: error ?? null,
    });
  }

  /** @internal */
  saveStep(stored: Stored, name: string, json: string): void {
    stored.steps.set(name, { status: "done", value: JSON.parse(json), until: null, savedAt: this.now });
    // Attempts count since the last stored step.
    stored.job.attempts = 1;
  }

  /** @internal */
  wait(stored: Stored, waits: NewWait[]): WaitReply {
    const done: WaitReply["done"] = [];
    let dueAt = NEVER;
    for (const { name, events, within_seconds } of waits) {
      const earlier = stored.steps.get(name);
      const until = within_seconds === null ? null : (earlier?.until ?? this.now + within_seconds * 1000);
      const event = events.find((each) => {
        const emitted = this.#events.get(each);
        return emitted !== undefined && (until === null || emitted.emittedAt <= until);
      });
      if (event !== undefined || (until !== null && until <= this.now)) {
        const winner = {
          event: event ?? null,
          payload: event === undefined ? null : this.#events.get(event)!.payload,
        };
        this.saveStep(stored, name, JSON.stringify(winner));
        done.push({ name, ...winner });
      } else {
        stored.steps.set(name, { status: "waiting", value: null, until, savedAt: this.now });
        dueAt = Math.min(dueAt, until ?? NEVER);
      }
    }
    if (done.length > 0) return { status: "continue", done };
    stored.dueAt = dueAt;
    stored.events = waits.flatMap(({ events }) => events);
    return { status: "suspended", done };
  }

  /** @internal */
  spawn(stored: Stored, name: string, jobs: string[]): void {
    const { id, kind } = stored.job;
    if (!this.#flows.has(id)) this.#addFlow(id, kind, 0);
    const { flow } = this.#flow(id);
    Object.assign(flow, { status: "running", ended_at: null });
    for (const json of jobs) {
      const fields = JSON.parse(json) as NewJobFields;
      this.#store(fields.id ?? newId(this.now), { ...fields, task: name }, id);
    }
    this.saveStep(stored, name, "{}");
    if (jobs.length === 0) this.#advanceFlow(id);
  }

  /** @internal */
  join(stored: Stored, name: string): JoinReply {
    const children = this.#members(stored.job.id);
    if (!this.#flows.has(stored.job.id)) {
      throw new ConflictError(
        `join \`${name}\`: this job has no children; a job can join only those that it has spawned itself`,
      );
    }
    if (children.some(({ job }) => !ENDED.has(job.status))) {
      stored.dueAt = NEVER;
      stored.joins = true;
      return { status: "suspended", children: [], next: null };
    }
    this.saveStep(stored, name, "{}");
    const ended = children.map(({ job }) => ({
      id: job.id,
      task: job.task,
      outcome: job.status as Outcome,
      result: job.result,
      error: job.last_error,
    }));
    return {
      status: "continue",
      children: JSON.parse(JSON.stringify(ended)) as JoinReply["children"],
      next: null,
    };
  }

  /** @internal */
  inputs(stored: Stored): TaskInput[] {
    if (stored.job.flow === null) return [];
    const members = this.#members(stored.job.flow);
    return stored.after.flatMap(({ task }) => {
      const parent = members.find(({ job }) => job.task === task);
      if (!parent) return [];
      const { id, status, result } = parent.job;
      return [
        {
          task,
          id,
          outcome: ENDED.has(status) ? (status as Outcome) : null,
          result: JSON.parse(JSON.stringify(result)) as unknown,
        },
      ];
    });
  }

  #time(ms: number): string {
    // A job that waits for something has no time; the server shows the end of the year 9999.
    return new Date(Math.min(ms, 253_402_300_799_000)).toISOString();
  }
}

function unsupported(what: string): LongshoreError {
  return new LongshoreError(
    "unavailable",
    `${what}: a queue in memory does not support this; use startDev() of longshore/testing`,
  );
}

function taskBody({ job, after, skipped, dueAt }: Stored): unknown {
  return {
    id: job.id,
    task: job.task,
    kind: job.kind,
    queue: job.queue,
    status: job.status,
    held: after.length > 0 && dueAt === NEVER && !ENDED.has(job.status),
    skipped,
    after: after.map(({ task, condition }) => ({ id: null, task, condition, met: null })),
  };
}

/** Whether the end of a task meets a condition; undefined while it has not ended. */
function isMet(status: string | undefined, condition: "succeeded" | "ended" | "failed"): boolean | undefined {
  if (status === undefined || !ENDED.has(status)) return undefined;
  if (condition === "ended") return true;
  return (status === "succeeded") === (condition === "succeeded");
}

/** How long a job waits after a failure. Where the server chooses at random, the longest time. */
function backoffSeconds({ retry, attempts }: WireJob): number {
  switch (retry?.policy) {
    case "fixed":
      return retry.delay_ms / 1000;
    case "list":
      return (retry.delays_ms[Math.min(attempts, retry.delays_ms.length) - 1] ?? 0) / 1000;
    case "exponential":
      return Math.min(2 ** (attempts + 1), retry.cap_ms / 1000);
    case "jitter":
      return Math.min(retry.cap_ms, retry.base_ms * 3 ** attempts) / 1000;
    default:
      return Math.min(60, 3 ** attempts);
  }
}
