/**
 * What a handler can do besides returning: learn why it has to stop, report progress, and consist of
 * durable steps. Owns the journal and the waits of one attempt; the outcome is decided in `attempt.ts`.
 */

import { AsyncLocalStorage } from "node:async_hooks";
import { type ErrorSlug, Fail, LongshoreError, ValidationError } from "./errors.js";
import { encodeAll } from "./flow.js";
import type { JobRequest } from "./job.js";
import { encodeJson, type Jsonified } from "./json.js";
import type { JoinedChild, JoinReply, JournaledStep, Lease, LeasedJob, NewWait, TaskInput } from "./lease.js";
import { type Camelized, toCamel } from "./names.js";

/** Why a handler has to stop. */
export type StopCause =
  /** Somebody cancelled the job. */
  | "cancel"
  /** The attempt took longer than its timeout. */
  | "timeout"
  /** Another worker may own the job; what this attempt reports is not stored. */
  | "lease_lost"
  /** The worker stops and the grace period is over. The job runs again. */
  | "shutdown"
  /** The job waits without a worker. It runs again when the wait is over. */
  | "suspended";

/** The reason of `ctx.signal`. */
export class Stopped extends Error {
  override readonly name = "AbortError";
  readonly why: StopCause;
  constructor(why: StopCause) {
    super(MESSAGES[why]);
    this.why = why;
  }
}

const MESSAGES: Record<StopCause, string> = {
  cancel: "the job was cancelled",
  timeout: "the attempt took longer than its timeout",
  lease_lost: "the lease is lost; another worker may own the job",
  shutdown: "the worker stops",
  suspended: "the job waits without a worker; it runs again when the wait is over",
};

/** One of the things that `ctx.any` waits for. */
export type Wait = { event: string } | { sleep: number };

/** What came first of the things that `ctx.any` waited for. */
export interface First {
  /** Its position among the things waited for. */
  index: number;
  /** The payload, if it is an event. */
  payload: unknown;
}

/** The children that a job has spawned, after they have ended. */
export class Children<Result = unknown> {
  constructor(readonly all: readonly (Omit<JoinedChild, "result"> & { result: Result | null })[]) {}

  get failed(): typeof this.all {
    return this.all.filter((child) => child.outcome !== "succeeded");
  }

  /** The results of all children. Throws if one of them did not succeed. */
  results(): Result[] {
    const failed = this.failed[0];
    if (failed) {
      throw new Error(`child ${failed.id} ended as ${failed.outcome}: ${failed.error ?? "no error message"}`);
    }
    return this.all.map((child) => child.result as Result);
  }
}

interface PendingWait {
  wait: NewWait;
  resolve: (winner: Winner) => void;
  reject: (error: unknown) => void;
}

/** What ended a wait. It is stored in this form. */
interface Winner {
  event: string | null;
  payload: unknown;
}

/** The step whose work is running, to find waits inside of it. */
const currentStep = new AsyncLocalStorage<{ ctx: Context; name: string }>();

export class Context {
  /** @internal */
  readonly leased: LeasedJob;
  /** @internal */
  stopped: Stopped | undefined;
  /** @internal The JSON texts of jobs that are enqueued with the success, in the order of the calls. */
  followUps: Promise<string>[] | undefined;
  /** @internal Called when the queue has suspended the job, or when the lease is found to be lost. */
  onStop: (why: "suspended" | "lease_lost") => void = () => {};

  readonly #lease: Lease;
  #controller: AbortController | undefined;
  #journal: Map<string, JournaledStep> | undefined;
  #names: Set<string> | undefined;
  #active = 0;
  #waits: PendingWait[] = [];
  #joins: { run: () => Promise<void>; reject: (error: unknown) => void }[] = [];
  #scheduled = false;
  #checkpoint: { value: unknown } | undefined;
  #inputs: Promise<TaskInput[]> | undefined;

  /** @internal */
  constructor(leased: LeasedJob, lease: Lease) {
    this.leased = leased;
    this.#lease = lease;
  }

  get id(): string {
    return this.leased.id;
  }

  /** The number of this attempt, from 1. */
  get attempt(): number {
    return this.leased.attempt;
  }

  /** Everything that is known about the job, such as `queue`, `tags`, `metadata` and `traceparent`. */
  get job(): Camelized<Omit<LeasedJob, "steps" | "checkpoint">> {
    const { steps: _, checkpoint: __, ...rest } = this.leased;
    return toCamel(rest);
  }

  /** Fires when the handler has to stop. Its reason is a `Stopped`, whose `why` says why. */
  get signal(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.stopped) this.#controller.abort(this.stopped);
    }
    return this.#controller.signal;
  }

  /** @internal */
  stop(why: StopCause): void {
    if (this.stopped) return;
    this.stopped = new Stopped(why);
    this.#controller?.abort(this.stopped);
  }

  /** Reports progress: any JSON value up to 64 KiB. It is sent with the next call of the worker. */
  progress(value: unknown): void {
    this.#lease.progress(encodeJson(value, "progress"));
  }

  /** What an earlier attempt stored with `saveCheckpoint`; null if nothing. */
  get checkpoint(): unknown {
    return this.#checkpoint === undefined ? this.leased.checkpoint : this.#checkpoint.value;
  }

  /** Stores where a later attempt can continue. */
  saveCheckpoint(value: unknown): Promise<void> {
    return handled(async () => {
      this.#checkOpen();
      const json = encodeOrFail(value, "checkpoint");
      this.#fence(await this.#orFail("checkpoint", this.#lease.saveCheckpoint(json)));
      this.#checkpoint = { value: JSON.parse(json) };
    });
  }

  /** Enqueues a job together with the success of this one: it exists only if the success is stored. */
  async enqueue(request: JobRequest): Promise<void> {
    const encoded = encodeAll([request]).then(([json]) => json!);
    this.followUps ??= [];
    this.followUps.push(encoded);
    await encoded;
  }

  /**
   * Does a piece of work once. Its value is stored with the job under `name`. If the job runs again, the
   * stored value is returned and the work is not repeated. If the worker dies after the work and before its
   * value is stored, the work is repeated; so make it idempotent.
   */
  step<T>(name: string, work: () => T | Promise<T>): Promise<Jsonified<T>> {
    return this.#durable("step", name, async () => {
      const earlier = await this.#earlier(name);
      if (earlier?.status === "done") return earlier.value as Jsonified<T>;
      if (earlier) {
        throw new Fail(
          `step \`${name}\`: an earlier version of this job waited under this name; use another name`,
        );
      }
      const value = await currentStep.run({ ctx: this, name }, work);
      const json = encodeOrFail(value, `step \`${name}\``);
      this.#fence(await this.#orFail(`step \`${name}\``, this.#lease.saveStep(name, json)));
      return JSON.parse(json) as Jsonified<T>;
    });
  }

  /** Waits for this many seconds without a worker. The time counts from the first time that the job gets here. */
  sleep(name: string, seconds: number): Promise<void> {
    return handled(async () => void (await this.#wait("sleep", name, name, [{ sleep: seconds }])));
  }

  /**
   * Waits for an event without a worker. It does not matter whether the event was emitted before the job
   * waits or later. With `within`, returns undefined if no event came within this many seconds.
   */
  event<T = unknown>(name: string): Promise<T>;
  event<T = unknown>(name: string, options: { within: number }): Promise<T | undefined>;
  event(name: string, options?: { within: number }): Promise<unknown> {
    return handled(async () => {
      const waits: Wait[] = options ? [{ event: name }, { sleep: options.within }] : [{ event: name }];
      const first = await this.#wait("event", name, `event:${name}`, waits);
      return first.index === 0 ? first.payload : undefined;
    });
  }

  /** Waits for the first of several things without a worker. What came first is stored. */
  any(name: string, waits: Wait[]): Promise<First> {
    return handled(() => this.#wait("any", name, name, waits));
  }

  /** Enqueues children of this job, once. They start at once; `join` waits for them. */
  spawn(name: string, requests: Iterable<JobRequest>): Promise<void> {
    return this.#durable("spawn", name, async () => {
      const earlier = await this.#earlier(name);
      if (earlier?.status === "done") return;
      const jobs = await encodeAll(requests);
      this.#fence(await this.#orFail(`spawn \`${name}\``, this.#lease.spawn(name, jobs)));
    });
  }

  /** Waits without a worker until all children of this job have ended, and returns how they ended. */
  join<Result = unknown>(name: string): Promise<Children<Result>> {
    return handled(async () => {
      this.#checkOpen();
      this.#useName("join", name);
      return new Promise<Children<Result>>((resolve, reject) => {
        const run = () => this.#joinNow<Result>(name).then(resolve, reject);
        this.#joins.push({ run, reject });
        this.#suspendSoon();
      });
    });
  }

  async #joinNow<Result>(name: string): Promise<Children<Result>> {
    const all: JoinedChild[] = [];
    let after: string | null = null;
    do {
      const reply: JoinReply = await this.#orFail(`join \`${name}\``, this.#lease.join(name, after));
      if (reply.status !== "continue") throw this.#ended(reply.status);
      all.push(...reply.children);
      after = reply.next;
    } while (after !== null);
    return new Children(all as (JoinedChild & { result: Result | null })[]);
  }

  /** The result of a task of the flow that this one waited for. */
  async input<T = unknown>(task: string): Promise<T> {
    const inputs = await this.#readInputs();
    const found = inputs.find((input) => input.task === task);
    if (!found) {
      const names = inputs.flatMap((input) => (input.task === null ? [] : [`\`${input.task}\``]));
      const known = names.length === 0 ? "it waits for no other task" : `it waits for ${names.join(", ")}`;
      throw new Fail(`input \`${task}\`: this job does not wait for a task of this name; ${known}`);
    }
    if (found.outcome !== "succeeded") {
      throw new Fail(
        `input \`${task}\`: the task has no result, because it ended as ${found.outcome ?? "unknown"}`,
      );
    }
    return found.result as T;
  }

  /** The results of all tasks that this one waited for, of those that succeeded, by their names. */
  async inputs<T = unknown>(): Promise<Record<string, T>> {
    const results: Record<string, T> = {};
    for (const { task, id, outcome, result } of await this.#readInputs()) {
      if (outcome === "succeeded") results[task ?? id] = result as T;
    }
    return results;
  }

  async #readInputs(): Promise<TaskInput[]> {
    this.#checkOpen();
    this.#inputs ??= this.#lease.inputs();
    return this.#inputs;
  }

  /** Runs a durable operation. While one is active, the job is not suspended. */
  #durable<T>(what: string, name: string, work: () => Promise<T>): Promise<T> {
    return handled(async () => {
      this.#checkOpen();
      this.#useName(what, name);
      this.#active += 1;
      try {
        return await work();
      } finally {
        this.#active -= 1;
        this.#suspendSoon();
      }
    });
  }

  async #wait(what: string, name: string, step: string, waits: Wait[]): Promise<First> {
    this.#checkOpen();
    if (waits.length === 0) throw new Fail(`${what} \`${name}\`: name at least one thing to wait for`);
    const sleeps = waits.flatMap((wait) => ("sleep" in wait ? [wait.sleep] : []));
    if (sleeps.some((seconds) => !(seconds >= 0 && seconds <= 315_360_000))) {
      throw new Fail(`${what} \`${name}\`: wait for 0 s to ten years`);
    }
    this.#useName(what, step);
    const earlier = await this.#earlier(step);
    if (earlier?.status === "done") return first(earlier.value as Winner, name, waits);
    const events = waits.flatMap((wait) => ("event" in wait ? [wait.event] : []));
    const within = sleeps.length === 0 ? null : Math.min(...sleeps);
    const winner = await new Promise<Winner>((resolve, reject) => {
      this.#waits.push({ wait: { name: step, events, within_seconds: within }, resolve, reject });
      this.#suspendSoon();
    });
    return first(winner, name, waits);
  }

  /** Suspends the job when nothing else of it is active, after other code of the handler had a turn. */
  #suspendSoon(): void {
    if (this.#scheduled || (this.#waits.length === 0 && this.#joins.length === 0)) return;
    this.#scheduled = true;
    setImmediate(() => {
      this.#scheduled = false;
      if (this.#active > 0 || this.stopped) {
        // The operation that is active calls this method again at its end.
        if (this.stopped) this.#dropWaits(this.stopped);
        return;
      }
      void this.#suspend();
    });
  }

  async #suspend(): Promise<void> {
    this.#active += 1;
    try {
      if (this.#waits.length > 0) await this.#waitNow();
      else await this.#joins.shift()?.run();
    } finally {
      this.#active -= 1;
      this.#suspendSoon();
    }
  }

  async #waitNow(): Promise<void> {
    const pending = this.#waits;
    this.#waits = [];
    try {
      const reply = await this.#orFail(
        `wait \`${pending.map(({ wait }) => wait.name).join("`, `")}\``,
        this.#lease.wait(pending.map(({ wait }) => wait)),
      );
      if (reply.status !== "continue") throw this.#ended(reply.status);
      for (const each of pending) {
        const done = reply.done.find((one) => one.name === each.wait.name);
        if (done) each.resolve({ event: done.event, payload: done.payload });
        else this.#waits.push(each);
      }
    } catch (error) {
      for (const { reject } of pending) reject(error);
    }
  }

  #dropWaits(error: unknown): void {
    for (const { reject } of [...this.#waits.splice(0), ...this.#joins.splice(0)]) reject(error);
  }

  /** The lease has ended: remembers why, so that nothing that the handler does afterwards counts. */
  #ended(why: "suspended" | "lease_lost"): Stopped {
    this.stop(why);
    this.onStop(why);
    return this.stopped ?? new Stopped(why);
  }

  #fence(saved: "stored" | "lease_lost"): void {
    if (saved === "lease_lost") throw this.#ended("lease_lost");
  }

  /** A refusal by the server does not go away by itself, so the job fails at once. */
  async #orFail<T>(what: string, call: Promise<T>): Promise<T> {
    try {
      return await call;
    } catch (error) {
      if (error instanceof LongshoreError && LASTING.has(error.slug)) {
        // The server names what it refuses, but not always.
        const message = error.message.startsWith(what) ? error.message : `${what}: ${error.message}`;
        throw new Fail(message, { cause: error });
      }
      throw error;
    }
  }

  #checkOpen(): void {
    if (this.stopped && this.stopped.why !== "cancel") throw this.stopped;
  }

  #useName(what: string, name: string): void {
    const step = currentStep.getStore();
    if (step?.ctx === this) {
      throw new Fail(
        `${what} \`${name}\`: cannot be used inside of step \`${step.name}\`; call it after the step`,
      );
    }
    this.#names ??= new Set();
    if (this.#names.has(name)) {
      throw new Fail(
        `${what} \`${name}\`: the name is used twice in this attempt; give each step its own name, for example with a number`,
      );
    }
    this.#names.add(name);
  }

  /** What an earlier attempt stored under this name. */
  async #earlier(name: string): Promise<JournaledStep | undefined> {
    if (this.#journal === undefined) {
      const steps = this.leased.steps ?? (await this.#lease.journal());
      this.#journal = new Map(steps.map((step) => [step.name, step]));
    }
    return this.#journal.get(name);
  }
}

/** Refusals that another attempt would get as well. */
const LASTING = new Set<ErrorSlug>(["validation", "bad_request", "too_large", "conflict"]);

/** A value that is not JSON would not be in another attempt either, so the job fails at once. */
function encodeOrFail(value: unknown, what: string): string {
  try {
    return encodeJson(value, what);
  } catch (error) {
    throw error instanceof ValidationError ? new Fail(error.message, { cause: error }) : error;
  }
}

/**
 * Runs work whose promise may be rejected while the handler does not await it yet, because the job was
 * suspended or stopped. Without this, Node would end the process.
 */
function handled<T>(work: () => Promise<T>): Promise<T> {
  const promise = work();
  promise.catch(() => {});
  return promise;
}

/** What came first, among the things that the handler waits for now. */
function first(winner: Winner, name: string, waits: Wait[]): First {
  let index: number;
  if (winner.event !== null) {
    index = waits.findIndex((wait) => "event" in wait && wait.event === winner.event);
  } else {
    const shortest = Math.min(
      ...waits.map((wait) => ("sleep" in wait ? wait.sleep : Number.POSITIVE_INFINITY)),
    );
    index = waits.findIndex((wait) => "sleep" in wait && wait.sleep === shortest);
  }
  if (index < 0) {
    const what = winner.event === null ? "the end of a sleep" : `the event \`${winner.event}\``;
    throw new Fail(
      `\`${name}\`: ${what} came first, but the job no longer waits for it; give the changed wait a new name`,
    );
  }
  return { index, payload: winner.event === null ? undefined : winner.payload };
}
