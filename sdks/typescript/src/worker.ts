/**
 * The worker: runs handlers on the main thread and drives the I/O thread (`io.ts`), which talks to the
 * server. Owns the slots, the timeouts and the shutdown.
 */

import { AsyncResource } from "node:async_hooks";
import { hostname } from "node:os";
import { performance } from "node:perf_hooks";
import { Worker as Thread } from "node:worker_threads";
import { Attempt, describeError, type Ending, settleJson } from "./attempt.js";
import type { Longshore } from "./client.js";
import { Stopped } from "./context.js";
import { errorFromReply, Fail, LongshoreError, Retry, UnavailableError, ValidationError } from "./errors.js";
import { decodeJson } from "./json.js";
import type {
  JoinReply,
  JournaledStep,
  Lease,
  LeasedJob,
  NewWait,
  Saved,
  TaskInput,
  WaitReply,
} from "./lease.js";
import {
  type FromIo,
  type HandlerCall,
  type IoSettings,
  type Operation,
  SLOTS,
  type ToIo,
  tryStart,
} from "./messages.js";
import { VERSION } from "./version.js";
import type { components } from "./wire.js";

export interface WorkOptions {
  /** How many jobs run at once; 10 by default, at most 500. */
  concurrency?: number | undefined;
  /** The queues to take jobs from; by default those of the jobs that are defined. */
  queues?: string[] | undefined;
  /** The name of the worker, for people; host name and process id by default. */
  name?: string | undefined;
  /** How many seconds running jobs may continue after the worker was asked to stop; 30 by default. */
  grace?: number | undefined;
  /** Seconds without a call until the server declares the worker dead; 60 by default, at least 3. */
  staleAfter?: number | undefined;
  /** Stops the worker. */
  signal?: AbortSignal | undefined;
  /** Whether SIGTERM and SIGINT stop the worker; true by default. */
  handleSignals?: boolean | undefined;
  /** Receives what the worker reports. By default, warnings and errors go to the console. */
  log?: ((entry: LogEntry) => void) | undefined;
  /** Called when the worker is registered and takes jobs. */
  onReady?: ((workerId: string) => void) | undefined;
}

export interface LogEntry {
  level: "info" | "warn" | "error";
  message: string;
  jobId?: string;
  kind?: string;
  error?: unknown;
}

const MAX_CONCURRENCY = 500;
/** How long a handler may continue after its timeout has fired its signal. */
const AFTER_TIMEOUT_MS = 1_000;
/** How long handlers may continue after the grace period has fired their signals. */
const AFTER_GRACE_MS = 2_000;
const CHECK_TIMEOUTS_EVERY_MS = 50;
/** Node fires timers that are longer than this at once. */
const MAX_TIMER_MS = 2 ** 31 - 1;

/** Runs the jobs of a client until it is asked to stop. */
export async function runWorker(client: Longshore, options: WorkOptions): Promise<void> {
  const runner = new Runner(client, options);
  const stop = () => runner.stop();
  const signals = options.handleSignals === false ? [] : (["SIGTERM", "SIGINT"] as const);
  for (const name of signals) process.on(name, stop);
  options.signal?.addEventListener("abort", stop);
  if (options.signal?.aborted) stop();
  try {
    await runner.done;
  } finally {
    for (const name of signals) process.off(name, stop);
    options.signal?.removeEventListener("abort", stop);
  }
}

interface Waiting {
  leased: LeasedJob;
  seq: number;
  slot: number;
  mayHaveBigInts: boolean;
}

class Runner {
  /** Resolves when the worker has stopped, and rejects if it cannot work. */
  readonly done: Promise<void>;
  readonly #client: Longshore;
  readonly #options: WorkOptions;
  readonly #concurrency: number;
  readonly #graceMs: number;
  readonly #thread: Thread;
  readonly #slots: Int32Array;
  readonly #context = new AsyncResource("LongshoreWorker");
  #resolve!: () => void;
  #reject!: (error: Error) => void;

  /** Jobs that are delivered and not started, from `#first` on. */
  #buffer: Waiting[] = [];
  #first = 0;
  readonly #running = new Map<number, Attempt>();
  /** Jobs that were cancelled before they started here. */
  readonly #cancelled = new Set<number>();
  readonly #calls = new Map<number, { resolve: (text: string) => void; reject: (error: Error) => void }>();
  #nextCall = 1;

  #outbox: ToIo = {};
  #flushScheduled = false;
  #busySince = 0;
  #stopping = false;
  #ended = false;
  #checks: NodeJS.Timeout;
  #drained: (() => void) | undefined;
  #hurry: (() => void) | undefined;

  constructor(client: Longshore, options: WorkOptions) {
    this.#client = client;
    this.#options = options;
    this.#concurrency = options.concurrency ?? 10;
    this.#graceMs = graceOf(options);
    const settings = settingsOf(client, options, this.#concurrency);
    this.#slots = new Int32Array(settings.slots);
    this.done = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    this.#thread = new Thread(new URL("./io.js", import.meta.url), {
      workerData: settings,
      name: "longshore-io",
      ...optionsOfThread(process.execArgv),
    });
    this.#thread.on("message", (message: FromIo) => this.#receive(message));
    this.#thread.on("error", (error) => this.#fail(error));
    this.#thread.on("exit", () => {
      if (!this.#ended) this.#fail(new LongshoreError("internal", "the I/O thread of the worker ended"));
    });
    this.#checks = setInterval(() => this.#checkTimeouts(), CHECK_TIMEOUTS_EVERY_MS);
  }

  #receive(message: FromIo): void {
    switch (message.what) {
      case "jobs":
        return this.#deliver(message.text, message.seqs, message.slots);
      case "stop":
        for (const { seq, why } of message.leases) {
          const attempt = this.#running.get(seq);
          if (attempt) attempt.stop(why);
          else if (why === "cancel" && this.#isBuffered(seq)) this.#cancelled.add(seq);
        }
        return;
      case "reply":
        return this.#takeCall(message.call)?.resolve(message.text);
      case "refusal": {
        const error = errorFromReply(
          message.status,
          { error: message.slug, message: message.message },
          undefined,
        );
        return this.#takeCall(message.call)?.reject(error);
      }
      case "registered":
        this.#log({ level: "info", message: `registered as worker ${message.workerId}` });
        return this.#ready(message.workerId);
      case "ping":
        this.#outbox.pong = true;
        return this.#flushSoon();
      case "log":
        return this.#log({ level: message.level, message: message.message });
      case "failed":
        return this.#fail(
          errorFromReply(message.status, { error: message.slug, message: message.message }, undefined),
        );
      case "finished":
        return this.#end();
    }
  }

  #ready(workerId: string): void {
    void this.#putSchedules();
    try {
      this.#options.onReady?.(workerId);
    } catch (error) {
      this.#log({ level: "error", message: `onReady threw: ${describeError(error)}`, error });
    }
  }

  /** Stores the declared schedules. Those of kinds that other workers run are left to them. */
  async #putSchedules(): Promise<void> {
    for (const [name, { schedule, request }] of this.#client.schedules) {
      if (!this.#client.jobs.has(request.job.name)) continue;
      try {
        await this.#client.cron.put(name, schedule, request);
      } catch (error) {
        const message = `the schedule \`${name}\` is not stored: ${describeError(error)}`;
        this.#log({ level: "error", message, kind: request.job.name, error });
      }
    }
  }

  #isBuffered(seq: number): boolean {
    return this.#buffer.some((waiting, index) => index >= this.#first && waiting.seq === seq);
  }

  #deliver(text: string, seqs: number[], slots: number[]): void {
    // The I/O thread releases what this thread does not start.
    if (this.#stopping) return;
    const decoded = decodeJson(text);
    const { jobs } = decoded.value as components["schemas"]["LeaseResponse"];
    let last = this.#buffer.at(-1)?.leased.priority ?? Number.POSITIVE_INFINITY;
    let sorted = true;
    jobs.forEach((leased, index) => {
      this.#buffer.push({
        leased,
        seq: seqs[index]!,
        slot: slots[index]!,
        mayHaveBigInts: decoded.hasBigInts,
      });
      sorted &&= leased.priority <= last;
      last = leased.priority;
    });
    if (!sorted) {
      // A due job of higher priority starts before the jobs that wait here.
      this.#buffer = this.#buffer.slice(this.#first).sort((a, b) => b.leased.priority - a.leased.priority);
      this.#first = 0;
    }
    this.#startNext();
  }

  #starting = false;

  #startNext(): void {
    // A handler that returns at once ends its attempt inside of this loop.
    if (this.#starting) return;
    this.#starting = true;
    while (!this.#stopping && this.#running.size < this.#concurrency && this.#first < this.#buffer.length) {
      const next = this.#buffer[this.#first]!;
      this.#first += 1;
      this.#start(next);
    }
    if (this.#first === this.#buffer.length && this.#first > 0) {
      this.#buffer = [];
      this.#first = 0;
    }
    this.#starting = false;
  }

  #start({ leased, seq, slot, mayHaveBigInts }: Waiting): void {
    const cancelled = this.#cancelled.delete(seq);
    // The I/O thread has released the job if this fails.
    if (!tryStart(this.#slots, slot, seq)) return;
    if (cancelled) {
      return this.#report(seq, settleJson(leased.id, leased.lease_no, { outcome: "cancelled" }));
    }
    const job = this.#client.jobs.get(leased.kind);
    if (!job) {
      // The worker names its kinds, so the server does not send others.
      const error = `job kind \`${leased.kind}\` has no handler in this worker; define it before work() is called`;
      this.#report(seq, settleJson(leased.id, leased.lease_no, { outcome: "failed", error }));
      return;
    }
    if (this.#running.size === 0) this.#busySince = performance.now();
    const attempt = new Attempt(job, leased, this.#leaseOf(seq), (ended, ending) =>
      this.#finishAttempt(seq, ended, ending),
    );
    if (leased.timeout_seconds !== null) attempt.deadline = performance.now() + leased.timeout_seconds * 1000;
    this.#running.set(seq, attempt);
    // Each handler starts with the async context of the call of work(), not with that of another job.
    this.#context.runInAsyncScope(() =>
      new AsyncResource("LongshoreJob").runInAsyncScope(() =>
        attempt.start(mayHaveBigInts ? "possible" : "none"),
      ),
    );
  }

  #finishAttempt(seq: number, attempt: Attempt, ending: Ending | undefined): void {
    this.#running.delete(seq);
    if (this.#running.size === 0) this.#countBusyTime();
    this.#outbox.ended = (this.#outbox.ended ?? 0) + 1;
    const { leased } = attempt.ctx;
    if (ending) {
      this.#report(seq, settleJson(leased.id, leased.lease_no, ending));
      if (ending.outcome === "failed") {
        const message = `attempt ${leased.attempt} of ${leased.max_attempts} failed: ${ending.error ?? ""}`;
        this.#log({ level: "warn", message, jobId: leased.id, kind: leased.kind, error: ending.thrown });
      }
    } else {
      (this.#outbox.dropped ??= []).push(seq);
      this.#flushSoon();
    }
    this.#startNext();
    if (this.#running.size === 0) this.#drained?.();
  }

  #countBusyTime(): void {
    const now = performance.now();
    this.#outbox.busyMs = (this.#outbox.busyMs ?? 0) + (now - this.#busySince);
    this.#busySince = now;
  }

  #report(seq: number, json: string): void {
    (this.#outbox.settle ??= []).push({ seq, json });
    this.#flushSoon();
  }

  /** Sends messages to the I/O thread once per turn of the event loop. */
  #flushSoon(): void {
    if (this.#flushScheduled) return;
    this.#flushScheduled = true;
    setImmediate(() => this.#flush());
  }

  #flush(): void {
    this.#flushScheduled = false;
    if (this.#running.size > 0) this.#countBusyTime();
    const message = this.#outbox;
    this.#outbox = {};
    this.#thread.postMessage(message);
  }

  #leaseOf(seq: number): Lease {
    return new RemoteLease(seq, this.#send);
  }

  readonly #send: IoCalls = {
    progress: (seq: number, json: string): void => {
      (this.#outbox.progress ??= []).push({ seq, json });
      this.#flushSoon();
    },
    call: (make: (call: number) => HandlerCall): Promise<string> => {
      if (this.#ended) return Promise.reject(workerStopped());
      const call = this.#nextCall++;
      (this.#outbox.calls ??= []).push(make(call));
      this.#flushSoon();
      return new Promise((resolve, reject) => this.#calls.set(call, { resolve, reject }));
    },
  };

  #takeCall(call: number) {
    const found = this.#calls.get(call);
    this.#calls.delete(call);
    return found;
  }

  #checkTimeouts(): void {
    const now = performance.now();
    for (const attempt of this.#running.values()) {
      if (now < attempt.deadline) continue;
      if (attempt.isOverdue) {
        attempt.abandon();
      } else {
        // No effect if the attempt was stopped for another reason. It is abandoned all the same.
        attempt.stop("timeout");
        attempt.isOverdue = true;
        attempt.deadline = now + AFTER_TIMEOUT_MS;
      }
    }
  }

  /** Stops the worker. A second call ends the grace period. */
  stop(): void {
    if (this.#stopping) return this.#hurry?.();
    this.#startNoMore();
    this.#thread.postMessage({ command: "stop" } satisfies ToIo);
    void this.#drain();
  }

  #startNoMore(): void {
    this.#stopping = true;
    this.#buffer = [];
    this.#first = 0;
  }

  async #drain(): Promise<void> {
    if (!(await this.#drainWithin(this.#graceMs))) {
      for (const attempt of this.#running.values()) attempt.stop("shutdown");
      if (!(await this.#drainWithin(AFTER_GRACE_MS))) {
        for (const attempt of [...this.#running.values()]) attempt.abandon();
      }
    }
    if (this.#ended) return;
    this.#flush();
    this.#thread.postMessage({ command: "finish" } satisfies ToIo);
  }

  /** Whether all attempts have ended within this time. */
  #drainWithin(ms: number): Promise<boolean> {
    if (this.#running.size === 0) return Promise.resolve(true);
    return new Promise((resolve) => {
      const timer = setTimeout(() => resolve(false), ms);
      const finish = (drained: boolean) => {
        clearTimeout(timer);
        resolve(drained);
      };
      this.#drained = () => finish(true);
      this.#hurry = () => finish(false);
    });
  }

  #fail(error: Error): void {
    if (this.#ended) return;
    // Nobody renews or settles the jobs that wait here.
    this.#startNoMore();
    for (const attempt of [...this.#running.values()]) attempt.stop("lease_lost");
    this.#close();
    this.#reject(error);
  }

  #end(): void {
    if (this.#ended) return;
    this.#close();
    this.#resolve();
  }

  #close(): void {
    this.#ended = true;
    clearInterval(this.#checks);
    for (const { reject } of this.#calls.values()) reject(workerStopped());
    this.#calls.clear();
    void this.#thread.terminate();
  }

  #log(entry: LogEntry): void {
    try {
      (this.#options.log ?? logToConsole)(entry);
    } catch (error) {
      // A log that fails must not stop the jobs.
      console.error("longshore: the log function of the worker threw", error);
    }
  }
}

function logToConsole({ level, message, jobId, kind, error }: LogEntry): void {
  if (level === "info") return;
  const write = level === "error" ? console.error : console.warn;
  const text = `longshore: ${message}${jobId === undefined ? "" : ` (${kind} ${jobId})`}`;
  // The stack of an error that the handler did not throw on purpose.
  const isOutcome = error === undefined || error instanceof Retry || error instanceof Fail;
  if (isOutcome || error instanceof Stopped) write(text);
  else write(text, error);
}

/** Options of Node that load code of the program, or say that it has no file. */
const PRELOADS = ["--import", "-r", "--require", "--loader", "--experimental-loader", "--input-type"];

/**
 * The options of Node for the I/O thread. By default a thread has those of the program. If they load code, such as
 * `--import ./tracing.js`, it would run twice, so the thread gets none. Node refuses a selection of them.
 */
export function optionsOfThread(options: readonly string[]): { execArgv?: string[] } {
  return options.some((option) => PRELOADS.includes(option.split("=", 1)[0]!)) ? { execArgv: [] } : {};
}

function workerStopped(): UnavailableError {
  return new UnavailableError("connection", "the worker has stopped");
}

interface IoCalls {
  progress(seq: number, json: string): void;
  call(make: (call: number) => HandlerCall): Promise<string>;
}

/** The lease of one attempt, through the I/O thread. */
class RemoteLease implements Lease {
  readonly #seq: number;
  readonly #io: IoCalls;

  constructor(seq: number, io: IoCalls) {
    this.#seq = seq;
    this.#io = io;
  }

  progress(json: string): void {
    this.#io.progress(this.#seq, json);
  }

  async saveStep(name: string, json: string): Promise<Saved> {
    const text = await this.#io.call((call) => ({ call, seq: this.#seq, what: "step", name, json }));
    return (JSON.parse(text) as { saved: Saved }).saved;
  }

  async saveCheckpoint(json: string): Promise<Saved> {
    const text = await this.#io.call((call) => ({ call, seq: this.#seq, what: "checkpoint", json }));
    return (JSON.parse(text) as { saved: Saved }).saved;
  }

  async journal(): Promise<JournaledStep[]> {
    return (await this.#operate<{ steps: JournaledStep[] }>("journal", {})).steps;
  }

  async wait(waits: NewWait[]): Promise<WaitReply> {
    return this.#operate<WaitReply>("wait", { waits });
  }

  async inputs(): Promise<TaskInput[]> {
    return (await this.#operate<{ inputs: TaskInput[] }>("inputs", {})).inputs;
  }

  async spawn(name: string, jobs: string[]): Promise<Saved> {
    const json = `,"name":${JSON.stringify(name)},"jobs":[${jobs.join(",")}]`;
    const text = await this.#io.call((call) => ({ call, seq: this.#seq, what: "spawn", json }));
    return (JSON.parse(text) as { status: Saved }).status;
  }

  async join(name: string, after: string | null): Promise<JoinReply> {
    return this.#operate<JoinReply>("join", { name, after, limit: 1000 });
  }

  async #operate<T>(what: Operation, fields: Record<string, unknown>): Promise<T> {
    const body = JSON.stringify(fields).slice(1, -1);
    const json = body === "" ? "" : `,${body}`;
    return decodeJson(await this.#io.call((call) => ({ call, seq: this.#seq, what, json }))).value as T;
  }
}

function graceOf({ grace = 30 }: WorkOptions): number {
  if (!(grace >= 0)) throw new ValidationError(`grace: ${grace} is out of range; use 0 or more seconds`);
  return Math.min(grace * 1000, MAX_TIMER_MS);
}

function settingsOf(client: Longshore, options: WorkOptions, concurrency: number): IoSettings {
  if (!Number.isInteger(concurrency) || concurrency < 1 || concurrency > MAX_CONCURRENCY) {
    throw new ValidationError(`concurrency: ${concurrency} is out of range; use 1 to ${MAX_CONCURRENCY}`);
  }
  if (client.jobs.size === 0) {
    throw new ValidationError("work: no job is defined; import the modules that call job() before work()");
  }
  const staleAfter = options.staleAfter ?? 60;
  if (!(staleAfter >= 3 && staleAfter <= 3600)) {
    throw new ValidationError(`staleAfter: ${staleAfter} is out of range; use 3 to 3600 seconds`);
  }
  const jobs = [...client.jobs.values()];
  return {
    server: client.server,
    token: client.token,
    slots: new SharedArrayBuffer(SLOTS * 4),
    concurrency,
    queues: options.queues ?? [...new Set(jobs.map((job) => job.options.queue ?? "default"))],
    kinds: jobs.map((job) => job.name),
    announce: JSON.stringify(jobs.map((job) => job.announcement())),
    name: options.name ?? `${hostname()}-${process.pid}`.slice(0, 128),
    version: `longshore-typescript ${VERSION}`,
    staleAfterSeconds: staleAfter,
  };
}
