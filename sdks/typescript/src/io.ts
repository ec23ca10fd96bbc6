/**
 * The I/O thread of a worker: leases, settles and renews with its own connections, so that a handler that
 * blocks the main thread does not lose its lease. `Exchange` decides what to send and when; `parentPort`
 * connects it to the main thread (`worker.ts`).
 */

import { hostname } from "node:os";
import { parentPort, workerData } from "node:worker_threads";
import { isCutOff, isFinal, NOT_JSON, parseReply, sendUntilAnswered, tooLarge } from "./calls.js";
import { errorFromReply, type LongshoreError } from "./errors.js";
import { type FromIo, type HandlerCall, type IoSettings, SLOTS, type ToIo, tryRelease } from "./messages.js";
import { Connections, NoReplyError, type Reply, sleep } from "./transport.js";
import type { components } from "./wire.js";

type Schemas = components["schemas"];
type ExchangeReply = Schemas["LeaseResponse"];

/** The maximum number of leases that have not ended, and of settles in one call: together not above the 1,000 of `held`. */
const MAX_LEASES = 600;
const MAX_SETTLES = 400;
/** The maximum number of leases, including those whose end is not stored yet. `held` must list all of them. */
const MAX_HELD = 1_000;
/** Calls that are sent at once: one can wait for work while another one reports. */
const MAX_CALLS = 2;
/** A job that has not started after this time is released. */
const START_WITHIN_MS = 250;
/** How much work to lease ahead. */
const AHEAD_SECONDS = 0.1;
/** A small report waits this long for others while another report is in flight. */
const GATHER_MS = 2;
const GATHERED = 64;
/** How often the leases are listed in a call, while calls are frequent. */
const HELD_EVERY_MS = 1_000;
/** The server releases leases that are missing in `held` if they are older than two seconds. */
const RECONCILE_AFTER_MS = 2_200;
const PROGRESS_EVERY_MS = 100;
/** How long a busy worker makes no call before it opens one that waits for cancels. */
const QUIET_MS = 100;
/** The server waits up to 20 s. */
const MAX_WAIT_SECONDS = 20;
/** Several reports are sent in one call up to this length. */
const MAX_BODY = 4 * 1024 * 1024;
const MAX_PROGRESS_BYTES = 64 * 1024;
const FIRST_PAUSE_MS = 50;
/** When a report is sent again that the server could not store. */
const UNAVAILABLE_PAUSE_MS = 1_000;
const MAX_PAUSE_MS = 2_000;
/** How long the last settles may take at the end. */
const FINISH_WITHIN_MS = 10_000;

const TOO_OLD = "the server speaks protocol 1.0, and this worker needs 1.1; upgrade the server";

/** The reply to any call of a handler whose lease is lost. */
const LEASE_LOST = `{"saved":"lease_lost","status":"lease_lost","done":[],"children":[],"next":null}`;

interface Held {
  seq: number;
  slot: number;
  id: string;
  leaseNo: number;
  /** JSON text of `id` and `lease_no`. */
  ref: string;
  deliveredAt: number;
  /** The attempt has ended, or the job was released; the settle is not stored yet. */
  ended: boolean;
  cancelled: boolean;
  /** Whether a worker died while it held this job. A worker gets one such job at a time. */
  suspect: boolean;
  /** A call that can end the lease is in flight, and its reply says what happened. */
  waiting: boolean;
}

interface Settle {
  held: Held;
  json: string;
  /** Whether it replaces a settle that the server refused. */
  fallback: boolean;
}

interface Saving {
  held: Held;
  json: string;
  call: number;
}

interface Call {
  limit: number;
  waits: boolean;
  sentAt: number;
  abort: AbortController;
  settles: Settle[];
  steps: Saving[];
  checkpoints: Saving[];
  progress: [Held, string][];
}

class Exchange {
  readonly #settings: IoSettings;
  readonly #post: (message: FromIo) => void;
  readonly #slots: Int32Array;
  readonly #freeSlots = Array.from({ length: SLOTS }, (_, slot) => slot);
  /** Separate from the handlers' calls, which must not delay a renewal. */
  readonly #connections: Connections;
  readonly #handlerConnections: Connections;
  readonly #filter: string;

  #workerId: string | undefined;
  #registering = false;
  #renewWithinMs: number;
  #lastAck = performance.now();
  #lastHeld = 0;
  #lastSent = 0;
  /** When to list the leases after a response with jobs may have been lost, so that the server releases them. */
  #reconcileAt = Number.POSITIVE_INFINITY;
  #failures = 0;
  #pausedUntil = 0;
  /** No call waits for work before this time: too many calls wait for the server already. */
  #noWaitUntil = 0;
  #isolating = false;
  /** Why the server no longer accepts this worker's token. */
  #denied: LongshoreError | undefined;

  #nextSeq = 1;
  readonly #held = new Map<number, Held>();
  readonly #byRef = new Map<string, Held>();
  #unended = 0;

  readonly #settles: Settle[] = [];
  #steps: Saving[] = [];
  #checkpoints: Saving[] = [];
  readonly #progress = new Map<Held, string>();
  #lastProgress = 0;
  readonly #open = new Set<Call>();
  /** The last cancels of jobs that are not here: they have ended, or another call brings them. */
  readonly #earlyCancels: Schemas["LeaseRef"][] = [];

  /** Attempts that ended in about the last 100 ms of busy time, and that time, to decide how much to lease ahead. */
  #recentEnds = 0;
  #recentMs = 0;
  /** When the first of the jobs that have not started has to be released. */
  #checkStartsAt = Number.POSITIVE_INFINITY;
  #mainStalled = false;
  #stopping = false;
  /** Reports that the server could not store and that are sent again after a pause. */
  readonly #delayed = new Set<Settle | Saving>();
  #finishing = false;
  #finished = false;
  #timer: NodeJS.Timeout | undefined;
  #timerAt = Number.POSITIVE_INFINITY;

  constructor(settings: IoSettings, post: (message: FromIo) => void) {
    this.#settings = settings;
    this.#post = post;
    this.#slots = new Int32Array(settings.slots);
    this.#connections = new Connections(settings.server, settings.token, MAX_CALLS + 1);
    this.#handlerConnections = new Connections(settings.server, settings.token, 16);
    this.#renewWithinMs = (settings.staleAfterSeconds / 4) * 1000;
    this.#filter = `"queues":${JSON.stringify(settings.queues)},"kinds":${JSON.stringify(settings.kinds)}`;
    setInterval(() => this.#watch(), Math.min(1_000, this.#renewWithinMs / 4));
  }

  receive(message: ToIo): void {
    this.#mainStalled = false;
    if (message.ended) this.#measure(message.ended, message.busyMs ?? 0);
    for (const { seq, json } of message.settle ?? []) this.#addSettle(seq, json);
    for (const seq of message.dropped ?? []) this.#drop(this.#held.get(seq));
    for (const { seq, json } of message.progress ?? []) this.#addProgress(this.#held.get(seq), json);
    for (const call of message.calls ?? []) this.#handlerCall(call);
    if (message.command === "stop") this.#stop();
    if (message.command === "finish") void this.#finish();
    this.pump();
  }

  #addProgress(held: Held | undefined, json: string): void {
    if (!held) return;
    const bytes = Buffer.byteLength(json);
    if (bytes <= MAX_PROGRESS_BYTES) this.#progress.set(held, json);
    else this.#log("warn", `job ${held.id}: progress: ${bytes} bytes of JSON exceed ${MAX_PROGRESS_BYTES}`);
  }

  #measure(ended: number, busyMs: number): void {
    const decay = Math.exp(-busyMs / (AHEAD_SECONDS * 1000));
    this.#recentEnds = this.#recentEnds * decay + ended;
    this.#recentMs = this.#recentMs * decay + busyMs;
  }

  /** How many jobs can start within 100 ms besides those that have a slot. At most as many as have just ended. */
  #ahead(): number {
    if (this.#recentEnds === 0) return 0;
    const perSecond = this.#recentEnds / (Math.max(this.#recentMs, 0.1) / 1000);
    return Math.floor(Math.min(perSecond * AHEAD_SECONDS, this.#recentEnds));
  }

  #addSettle(seq: number, json: string, fallback = false): void {
    const held = this.#held.get(seq);
    if (!held) return;
    this.#end(held);
    this.#progress.delete(held);
    const settle = { held, json, fallback };
    const problem = tooLarge(json);
    if (problem !== undefined) this.#reject(settle, `result and follow-ups: ${problem}`);
    else this.#settles.push(settle);
  }

  #end(held: Held): void {
    if (held.ended) return;
    held.ended = true;
    this.#unended -= 1;
  }

  #drop(held: Held | undefined): void {
    if (!held || !this.#held.delete(held.seq)) return;
    this.#end(held);
    this.#byRef.delete(held.ref);
    this.#progress.delete(held);
    Atomics.store(this.#slots, held.slot, 0);
    this.#freeSlots.push(held.slot);
  }

  /** How many more jobs the worker can start soon. The limits of open calls count as used. */
  #tokens(): number {
    if (this.#stopping || this.#mainStalled) return 0;
    let open = 0;
    for (const call of this.#open) open += call.limit;
    const capacity = Math.min(this.#settings.concurrency + this.#ahead(), MAX_LEASES) - this.#unended;
    // If ends are stored slower than jobs end, for example because the results are large, lease fewer jobs.
    return Math.max(0, Math.min(capacity, MAX_HELD - this.#held.size) - open);
  }

  /** Sends what can be sent now. */
  pump(): void {
    if (this.#finished) return;
    const now = performance.now();
    if (!this.#stopping) {
      if (now >= this.#checkStartsAt) this.#releaseUnstarted(START_WITHIN_MS);
      // Again and again: a timer may fire a little too early.
      else this.#wakeAt(this.#checkStartsAt);
    }
    if (now < this.#pausedUntil) return this.#wakeAt(this.#pausedUntil);
    if (this.#workerId === undefined) {
      if (!this.#registering && !this.#finishing) void this.#register();
      return;
    }
    while (this.#open.size < MAX_CALLS) {
      let waiting: Call | undefined;
      let reporting: Call | undefined;
      for (const call of this.#open) {
        if (call.waits) waiting = call;
        else reporting = call;
      }
      if (this.#hasReports(now)) {
        const amount = this.#settles.length + this.#steps.length + this.#checkpoints.length;
        if (reporting && (this.#isolating || (amount < GATHERED && !this.#gathered(now)))) return;
        // While a call waits for work, no job is due, and the report need not disturb it. But if the
        // worker held a suspect, the next one may start only now.
        const undisturbed = waiting && waiting.limit > 0 && !this.#settles.some(({ held }) => held.suspect);
        const limit = undisturbed ? 0 : this.#tokens();
        this.#send(this.#reportCall(limit));
        continue;
      }
      // The reply to a report may contain jobs.
      if (reporting || this.#finishing) return;
      const limit = this.#tokens();
      if (waiting && (waiting.limit > 0 || limit === 0)) return;
      // Without a free slot, the call only waits for cancels. Short jobs end sooner than that is useful.
      if (limit === 0 && now < this.#lastSent + QUIET_MS) return this.#wakeAt(this.#lastSent + QUIET_MS);
      if (now < this.#noWaitUntil) return this.#wakeAt(this.#noWaitUntil);
      waiting?.abort.abort();
      this.#send(this.#newCall(limit, true));
    }
  }

  #hasReports(now: number): boolean {
    if (now >= this.#reconcileAt) return true;
    this.#wakeAt(this.#reconcileAt);
    if (this.#settles.length > 0 || this.#steps.length > 0 || this.#checkpoints.length > 0) return true;
    if (this.#progress.size === 0) return false;
    if (this.#finishing || now >= this.#lastProgress + PROGRESS_EVERY_MS) return true;
    this.#wakeAt(this.#lastProgress + PROGRESS_EVERY_MS);
    return false;
  }

  #gatherUntil: number | undefined;

  #gathered(now: number): boolean {
    this.#gatherUntil ??= now + GATHER_MS;
    if (now >= this.#gatherUntil) return true;
    this.#wakeAt(this.#gatherUntil);
    return false;
  }

  #newCall(limit: number, waits: boolean): Call {
    return {
      limit,
      waits,
      sentAt: performance.now(),
      abort: new AbortController(),
      settles: [],
      steps: [],
      checkpoints: [],
      progress: [],
    };
  }

  #reportCall(limit: number): Call {
    const call = this.#newCall(limit, false);
    this.#gatherUntil = undefined;
    this.#lastProgress = call.sentAt;
    const most = this.#isolating ? 1 : MAX_SETTLES;
    let size = 0;
    let count = 0;
    // At least one report is sent, however large it is.
    const take = <T extends { json: string }>(from: T[]): T[] => {
      let taken = 0;
      while (
        taken < from.length &&
        count < most &&
        (count === 0 || size + from[taken]!.json.length < MAX_BODY)
      ) {
        size += from[taken]!.json.length;
        taken += 1;
        count += 1;
      }
      return from.splice(0, taken);
    };
    call.steps = take(this.#steps);
    call.checkpoints = take(this.#checkpoints);
    call.settles = take(this.#settles);
    for (const [held, json] of this.#progress) {
      if (size + json.length >= MAX_BODY) break;
      size += json.length;
      call.progress.push([held, json]);
      this.#progress.delete(held);
    }
    return call;
  }

  #body(call: Call): string {
    let json = `{"worker_id":"${this.#workerId}",${this.#filter},"limit":${call.limit}`;
    if (call.waits) json += `,"wait_seconds":${this.#waitSeconds()}`;
    if (call.waits || call.sentAt > this.#lastHeld + HELD_EVERY_MS || call.sentAt >= this.#reconcileAt) {
      this.#lastHeld = call.sentAt;
      if (call.sentAt >= this.#reconcileAt) this.#reconcileAt = Number.POSITIVE_INFINITY;
      const own = new Set(call.settles.map((settle) => settle.held));
      const refs: string[] = [];
      for (const held of this.#held.values()) if (!own.has(held)) refs.push(held.ref);
      json += `,"held":[${refs.join(",")}]`;
    }
    const list = (items: { json: string }[]) => items.map((item) => item.json).join(",");
    if (call.settles.length > 0) json += `,"settle":[${list(call.settles)}]`;
    if (call.steps.length > 0) json += `,"steps":[${list(call.steps)}]`;
    if (call.checkpoints.length > 0) json += `,"checkpoints":[${list(call.checkpoints)}]`;
    if (call.progress.length > 0) {
      json += `,"progress":[${call.progress.map(([held, value]) => `${held.ref.slice(0, -1)},"progress":${value}}`).join(",")}]`;
    }
    return `${json}}`;
  }

  /** A call that waits is also a renewal, so its response must come in time. */
  #waitSeconds(): number {
    return Math.min(MAX_WAIT_SECONDS, (this.#renewWithinMs * 0.8) / 1000);
  }

  #send(call: Call): void {
    this.#open.add(call);
    this.#lastSent = call.sentAt;
    const timeoutMs = Math.max(2_000, this.#renewWithinMs) + (call.waits ? this.#waitSeconds() * 1000 : 0);
    const sent = this.#connections.send("POST", "/leases", this.#body(call), {
      timeoutMs,
      signal: call.abort.signal,
    });
    sent
      .then(
        (reply) => this.#replied(call, reply),
        (error: unknown) => {
          if (call.abort.signal.aborted) this.#retract(call);
          else this.#failed(call, error instanceof Error ? error.message : String(error));
        },
      )
      .catch((error: unknown) => this.#crash(error));
  }

  #replied(call: Call, reply: Reply): void {
    if (reply.status === 200) {
      const body = parseReply(reply);
      if (!body) return this.#failed(call, NOT_JSON);
      this.#open.delete(call);
      this.#failures = 0;
      this.#denied = undefined;
      this.#isolating = false;
      this.#lastAck = Math.max(this.#lastAck, call.sentAt);
      if (call.waits) this.#noWaitUntil = performance.now() + this.#pauseOf(reply);
      this.#apply(call, body as ExchangeReply, reply.text);
      this.pump();
      return;
    }
    const error = errorFromReply(reply.status, parseReply(reply), undefined);
    if (reply.status === 409) return this.#declaredDead(call);
    if (reply.status === 400 || reply.status === 413 || reply.status === 422)
      return this.#refused(call, error.message);
    if (reply.status === 401 || reply.status === 403) this.#denied = error;
    this.#failed(call, error.message, this.#pauseOf(reply));
  }

  /** The pause that the server asks for. One that is longer than the leases would lose them. */
  #pauseOf(reply: Reply): number {
    return Math.min(Number(reply.headers["retry-after"] ?? 0) * 1000 || 0, this.#renewWithinMs / 2);
  }

  #apply(call: Call, reply: ExchangeReply, text: string): void {
    this.#renewWithinMs = reply.renew_within_seconds * 1000;
    call.settles.forEach((settle, index) => this.#settled(settle, reply.settled[index]));
    call.steps.forEach((saving, index) => this.#saved(saving, reply.saved_steps[index], this.#steps));
    call.checkpoints.forEach((saving, index) =>
      this.#saved(saving, reply.saved_checkpoints[index], this.#checkpoints),
    );
    call.progress.forEach(([held], index) => {
      const result = reply.saved_progress[index];
      if (result?.saved === "rejected")
        this.#log("warn", `job ${held.id}: progress: ${result.message ?? "rejected"}`);
    });
    if (reply.jobs.length > 0) {
      this.#deliver(reply, text);
      this.#stopAll(this.#earlyCancels.splice(0), "cancel");
    }
    this.#stopAll(reply.lost, "lease_lost");
    this.#stopAll(reply.cancel, "cancel");
  }

  #settled(settle: Settle, result: Schemas["SettledReport"] | undefined): void {
    if (result?.settled === "unavailable") return this.#reportAgain(this.#settles, settle);
    if (result?.settled !== "rejected") return this.#drop(settle.held);
    this.#reject(settle, result.message ?? "the server rejected the outcome");
  }

  /** The outcome is invalid, for example because the result is too large. The job fails and says why. */
  #reject(settle: Settle, message: string): void {
    const { held } = settle;
    if (settle.fallback) {
      this.#log("error", `job ${held.id}: the server refuses to settle it: ${message}`);
      return this.#drop(held);
    }
    const json = `${held.ref.slice(0, -1)},"outcome":"failed","permanent":true,"error":${JSON.stringify(message)}}`;
    this.#settles.push({ held, json, fallback: true });
  }

  /** Sends a report again after a pause. Another client has locked its job, or a queue is full. */
  #reportAgain<T extends Settle | Saving>(reports: T[], report: T): void {
    this.#delayed.add(report);
    setTimeout(() => {
      if (!this.#delayed.delete(report)) return; // declared dead meanwhile
      reports.push(report);
      this.pump();
    }, UNAVAILABLE_PAUSE_MS);
  }

  #saved(saving: Saving, result: Schemas["SavedReport"] | undefined, reports: Saving[]): void {
    if (result?.saved === "unavailable") return this.#reportAgain(reports, saving);
    if (result?.saved === "rejected") {
      const message = result.message ?? "the server rejected the value";
      this.#post({ what: "refusal", call: saving.call, slug: "validation", message, status: 422 });
    } else {
      this.#post({ what: "reply", call: saving.call, text: `{"saved":"${result?.saved ?? "stored"}"}` });
    }
  }

  /** The server reports each cancel and each loss in one call only, which may be older than the lease. */
  #stopAll(leases: Schemas["LeaseRef"][], why: "cancel" | "lease_lost"): void {
    const stopped: { seq: number; why: "cancel" | "lease_lost" }[] = [];
    for (const lease of leases) {
      const held = this.#byRef.get(refOf(lease.id, lease.lease_no));
      if (!held && why === "cancel" && this.#earlyCancels.push(lease) > 100) this.#earlyCancels.shift();
      if (!held || held.ended) continue;
      if (why === "lease_lost") {
        if (held.waiting) continue;
        this.#drop(held);
      } else if (held.cancelled) continue;
      held.cancelled = true;
      stopped.push({ seq: held.seq, why });
    }
    if (stopped.length > 0) this.#post({ what: "stop", leases: stopped });
  }

  #deliver(reply: ExchangeReply, text: string): void {
    const seqs: number[] = [];
    const slots: number[] = [];
    const now = performance.now();
    for (const job of reply.jobs) {
      const seq = this.#nextSeq;
      this.#nextSeq = seq === 0x7fffffff ? 1 : seq + 1;
      const slot = this.#freeSlots.pop()!;
      const ref = refOf(job.id, job.lease_no);
      const held: Held = {
        seq,
        slot,
        id: job.id,
        leaseNo: job.lease_no,
        ref,
        deliveredAt: now,
        ended: false,
        cancelled: false,
        suspect: job.interruptions > 0,
        waiting: false,
      };
      Atomics.store(this.#slots, slot, seq);
      this.#held.set(seq, held);
      this.#byRef.set(ref, held);
      this.#unended += 1;
      seqs.push(seq);
      slots.push(slot);
    }
    if (this.#stopping) return this.#releaseUnstarted(0);
    this.#post({ what: "jobs", text, seqs, slots });
    this.#checkStartsAt = Math.min(this.#checkStartsAt, now + START_WITHIN_MS);
    this.#wakeAt(this.#checkStartsAt);
  }

  /** Releases jobs that the main thread has not started in time. */
  #releaseUnstarted(withinMs: number): void {
    const now = performance.now();
    let released = false;
    let next = Number.POSITIVE_INFINITY;
    for (const held of this.#held.values()) {
      if (held.ended || Atomics.load(this.#slots, held.slot) !== held.seq) continue;
      if (now - held.deliveredAt < withinMs) {
        next = Math.min(next, held.deliveredAt + withinMs);
      } else if (tryRelease(this.#slots, held.slot, held.seq)) {
        released = true;
        this.#addSettle(held.seq, `${held.ref.slice(0, -1)},"outcome":"not_started"}`);
      }
    }
    if (released && !this.#stopping) {
      // Lease nothing until the main thread responds: it may be blocked.
      this.#mainStalled = true;
      this.#recentEnds = 0;
      this.#recentMs = 0;
      this.#post({ what: "ping" });
    }
    this.#checkStartsAt = next;
    this.#wakeAt(next);
  }

  /** The call was aborted by this thread. Its reports are sent again; they are safe to repeat. */
  #retract(call: Call): void {
    this.#open.delete(call);
    const isHeld = ({ held }: { held: Held }) => this.#held.has(held.seq);
    this.#settles.unshift(...call.settles.filter(isHeld));
    this.#steps.unshift(...call.steps.filter(isHeld));
    this.#checkpoints.unshift(...call.checkpoints.filter(isHeld));
    for (const saving of [...call.steps, ...call.checkpoints]) {
      if (!isHeld(saving)) this.#post({ what: "reply", call: saving.call, text: LEASE_LOST });
    }
    for (const [held, json] of call.progress) {
      if (!held.ended && !this.#progress.has(held)) this.#progress.set(held, json);
    }
    this.pump();
  }

  #failed(call: Call, message: string, requestedMs = 0): void {
    this.#failures += 1;
    const most = Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS * 2 ** this.#failures, this.#renewWithinMs);
    const pause = Math.max(requestedMs, FIRST_PAUSE_MS + Math.random() * (most - FIRST_PAUSE_MS));
    // A kept-alive connection may have been closed; one such failure is normal.
    if (this.#failures > 1) this.#log("warn", `POST /leases failed: ${message}; trying again`);
    if (call.limit > 0) this.#reconcileAt = performance.now() + RECONCILE_AFTER_MS;
    this.#pausedUntil = performance.now() + (this.#failures > 1 || requestedMs > 0 ? pause : 0);
    this.#retract(call);
  }

  /** The server refused the whole call. Finds the report that it refuses by sending one at a time. */
  #refused(call: Call, message: string): void {
    if (call.progress.length > 0) {
      // Progress may be lost, and must not be mistaken for a bad report of another job.
      this.#log("warn", `the progress of ${call.progress.length} jobs was not stored: ${message}`);
      call.progress = [];
      return this.#retract(call);
    }
    const reports = call.settles.length + call.steps.length + call.checkpoints.length;
    if (reports === 1) {
      this.#open.delete(call);
      for (const settle of call.settles) this.#reject(settle, message);
      for (const { call: number } of [...call.steps, ...call.checkpoints]) {
        this.#post({ what: "refusal", call: number, slug: "validation", message, status: 422 });
      }
      this.pump();
      return;
    }
    this.#isolating = reports > 1;
    this.#failed(call, message);
  }

  async #register(): Promise<void> {
    this.#registering = true;
    const settings = this.#settings;
    const sentAt = performance.now();
    const limit = this.#tokens();
    const description = JSON.stringify({
      name: settings.name,
      host: hostname(),
      pid: process.pid,
      version: settings.version,
      queues: settings.queues,
      kinds: settings.kinds,
      stale_after_seconds: settings.staleAfterSeconds,
      limit,
    });
    const body = `${description.slice(0, -1)},"announce":${settings.announce}}`;
    try {
      const reply = await this.#connections.send("POST", "/leases", body, { timeoutMs: 10_000 });
      if (reply.status !== 200) {
        const error = errorFromReply(reply.status, parseReply(reply), undefined);
        if (isFinal(reply.status)) {
          // A server of protocol 1.0 does not know the fields that describe the worker.
          const isOld = reply.status === 422 && error.message.includes("unknown field");
          const message = isOld ? `${TOO_OLD} (${error.message})` : this.#nameKind(error.message);
          this.#post({ what: "failed", slug: error.slug, message, status: reply.status });
          return;
        }
        throw new NoReplyError(error.message, true);
      }
      const registered = parseReply(reply) as ExchangeReply | undefined;
      if (!registered) throw new NoReplyError(NOT_JSON, true);
      if (registered.protocol === undefined) {
        this.#post({ what: "failed", slug: "unavailable", message: TOO_OLD, status: 200 });
        return;
      }
      this.#workerId = registered.worker_id;
      this.#lastAck = sentAt;
      this.#failures = 0;
      this.#post({ what: "registered", workerId: registered.worker_id });
      this.#apply(this.#newCall(limit, false), registered, reply.text);
    } catch (error) {
      if (!(error instanceof NoReplyError)) throw error;
      this.#failures += 1;
      const most = Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS * 2 ** this.#failures);
      this.#pausedUntil = performance.now() + FIRST_PAUSE_MS + Math.random() * (most - FIRST_PAUSE_MS);
      this.#log("warn", `cannot register with ${settings.server}: ${error.message}; trying again`);
    } finally {
      this.#registering = false;
    }
    this.pump();
  }

  /** Names the job in a message about the kinds that this worker has announced. */
  #nameKind(message: string): string {
    return message.replace(/^announce\[(\d+)\]/, (_, index) => `job \`${this.#settings.kinds[index]}\``);
  }

  /** The server has taken all leases of this worker. Stops the jobs and registers again. */
  #declaredDead(call: Call): void {
    this.#open.delete(call);
    if (this.#workerId === undefined) return;
    this.#log("warn", "the server declared this worker dead; its jobs stop, and it registers again");
    this.#workerId = undefined;
    for (const open of this.#open) open.abort.abort();
    this.#loseAll();
    // No settle of an old lease can be stored any more.
    this.#settles.length = 0;
    const delayed = [...this.#delayed].filter((report) => "call" in report);
    this.#delayed.clear();
    for (const { call: number } of [
      ...delayed,
      ...this.#steps.splice(0),
      ...this.#checkpoints.splice(0),
      ...call.steps,
      ...call.checkpoints,
    ]) {
      this.#post({ what: "reply", call: number, text: LEASE_LOST });
    }
    for (const held of [...this.#held.values()]) this.#drop(held);
    this.pump();
  }

  /** Stops all jobs. Outcomes that are not stored yet are still sent; the fence decides about them. */
  #loseAll(): void {
    const leases: { seq: number; why: "lease_lost" }[] = [];
    for (const held of [...this.#held.values()]) {
      if (held.ended) continue;
      leases.push({ seq: held.seq, why: "lease_lost" });
      this.#drop(held);
    }
    if (leases.length > 0) this.#post({ what: "stop", leases });
  }

  /** Stops the jobs if the worker could not renew for so long that others may take them soon. */
  #watch(): void {
    const silentMs = performance.now() - this.#lastAck;
    const cutOff = isCutOff(silentMs, this.#settings.staleAfterSeconds);
    if (this.#workerId !== undefined && this.#unended > 0 && cutOff) {
      this.#log("error", `no renewal for ${Math.round(silentMs / 1000)} s; the jobs of this worker stop`);
      this.#loseAll();
    }
    // A token that was revoked does not become valid again. Ends that are not stored yet got their chance.
    if (this.#denied && cutOff) {
      const { slug, message, status } = this.#denied;
      this.#post({ what: "failed", slug, message, status: status ?? 0 });
    }
    this.pump();
  }

  #handlerCall(request: HandlerCall): void {
    const held = this.#held.get(request.seq);
    if (!held || held.ended) {
      this.#post({ what: "reply", call: request.call, text: LEASE_LOST });
      return;
    }
    if (request.what === "step") {
      const step = `{"name":${JSON.stringify(request.name)},"value":${request.json}}`;
      const json = `${held.ref.slice(0, -1)},"steps":[${step}]}`;
      if (!this.#refuseTooLarge(request.call, json)) this.#steps.push({ held, call: request.call, json });
    } else if (request.what === "checkpoint") {
      const json = `${held.ref.slice(0, -1)},"checkpoint":${request.json}}`;
      if (!this.#refuseTooLarge(request.call, json))
        this.#checkpoints.push({ held, call: request.call, json });
    } else if (!this.#refuseTooLarge(request.call, request.json)) {
      void this.#direct(held, request.call, `/leases/${request.what}`, request.json);
    }
  }

  #refuseTooLarge(call: number, json: string): boolean {
    const message = tooLarge(json);
    if (message === undefined) return false;
    this.#post({ what: "refusal", call, slug: "too_large", message, status: 413 });
    return true;
  }

  /** Sends a call of a handler until there is a response. All of them are safe to repeat. */
  async #direct(held: Held, number: number, path: string, fields: string): Promise<void> {
    held.waiting = true;
    try {
      const reply = await sendUntilAnswered(this.#handlerConnections, path, {
        body: () =>
          this.#held.has(held.seq) && this.#workerId !== undefined
            ? `{"worker_id":"${this.#workerId}",${held.ref.slice(1, -1)}${fields}}`
            : undefined,
        onFailure: (problem) => this.#log("warn", `${path}: ${problem}; trying again`),
      });
      if (!reply) return this.#post({ what: "reply", call: number, text: LEASE_LOST });
      if (reply.status === 200) {
        const { status } = parseReply(reply) as { status?: string };
        if (status === "suspended" || status === "lease_lost") this.#drop(held);
        return this.#post({ what: "reply", call: number, text: reply.text });
      }
      const { slug, message } = errorFromReply(reply.status, parseReply(reply), undefined);
      this.#post({ what: "refusal", call: number, slug, message, status: reply.status });
    } catch (error) {
      this.#crash(error);
    } finally {
      held.waiting = false;
      this.pump();
    }
  }

  #stop(): void {
    this.#stopping = true;
    // The server releases the jobs of a call that ends before its response.
    for (const call of this.#open) if (call.waits && call.limit > 0) call.abort.abort();
    this.#releaseUnstarted(0);
  }

  async #finish(): Promise<void> {
    this.#stopping = true;
    this.#finishing = true;
    const deadline = performance.now() + FINISH_WITHIN_MS;
    for (const call of this.#open) if (call.waits) call.abort.abort();
    while (performance.now() < deadline) {
      const isReported = this.#settles.length === 0 && this.#delayed.size === 0 && this.#progress.size === 0;
      const idle = isReported && this.#open.size === 0;
      if (!this.#registering && (idle || this.#workerId === undefined)) break;
      this.pump();
      await sleep(5);
    }
    const unstored =
      this.#settles.length +
      [...this.#delayed].filter((report) => "fallback" in report).length +
      [...this.#open].reduce((sum, call) => sum + call.settles.length, 0);
    if (unstored > 0) {
      this.#log("error", `the ends of ${unstored} attempts could not be stored; their jobs run again`);
    }
    if (this.#workerId !== undefined) {
      const path = `/leases/${this.#workerId}`;
      try {
        await this.#connections.send("DELETE", path, undefined, { timeoutMs: 2_000 });
      } catch (error) {
        this.#log(
          "warn",
          `could not sign off: ${(error as Error).message}; the server releases the worker's jobs later`,
        );
      }
    }
    this.#finished = true;
    this.#connections.close();
    this.#handlerConnections.close();
    this.#post({ what: "finished" });
  }

  /** Calls `pump` at this time, or sooner. */
  #wakeAt(time: number): void {
    if (time >= this.#timerAt) return;
    clearTimeout(this.#timer);
    this.#timerAt = time;
    this.#timer = setTimeout(
      () => {
        this.#timerAt = Number.POSITIVE_INFINITY;
        this.pump();
      },
      Math.max(0, time - performance.now()),
    );
  }

  #log(level: "info" | "warn" | "error", message: string): void {
    this.#post({ what: "log", level, message });
  }

  #crash(error: unknown): void {
    const message = error instanceof Error ? (error.stack ?? error.message) : String(error);
    this.#post({ what: "failed", slug: "internal", message, status: 0 });
  }
}

function refOf(id: string, leaseNo: number): string {
  return `{"id":"${id}","lease_no":${leaseNo}}`;
}

if (parentPort) {
  const port = parentPort;
  const exchange = new Exchange(workerData as IoSettings, (message) => port.postMessage(message));
  port.on("message", (message: ToIo) => exchange.receive(message));
  exchange.pump();
}
