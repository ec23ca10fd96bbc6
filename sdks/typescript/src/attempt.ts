/**
 * One attempt: decodes the payload, runs the handler and decides the outcome. Knows nothing about slots,
 * threads and HTTP, so that `longshore/testing` runs handlers in the same way.
 */

import { inspect } from "node:util";
import { Context, type StopCause } from "./context.js";
import { Cancel, Fail, Retry, Snooze, ValidationError } from "./errors.js";
import type { AnyJob } from "./job.js";
import { encodeJson, findBigInt } from "./json.js";
import type { Lease, LeasedJob } from "./lease.js";
import { validate } from "./schema.js";

/** How an attempt ended; the fields of an item of `/leases/settle` except for the lease. */
export interface Ending {
  outcome: "succeeded" | "failed" | "cancelled" | "snoozed" | "released";
  /** JSON text. */
  result?: string;
  error?: string;
  permanent?: boolean;
  retry_after_seconds?: number;
  delay_seconds?: number;
  /** JSON texts. */
  follow_ups?: string[];
  /** What the handler threw, for the log. */
  thrown?: unknown;
}

/** Whether the payload may contain integers that a `number` cannot represent. */
export type BigInts = "none" | "possible";

export class Attempt {
  readonly ctx: Context;
  readonly job: AnyJob;
  /** When the attempt times out, in the time of `performance.now()`. */
  deadline = Number.POSITIVE_INFINITY;
  /** Whether the deadline has passed once. */
  isOverdue = false;
  #ended = false;
  readonly #onEnd: (attempt: Attempt, ending: Ending | undefined) => void;

  /** `onEnd` is called once. It gets no ending if the lease has ended already. */
  constructor(
    job: AnyJob,
    leased: LeasedJob,
    lease: Lease,
    onEnd: (attempt: Attempt, ending: Ending | undefined) => void,
  ) {
    this.job = job;
    this.ctx = new Context(leased, lease);
    this.#onEnd = onEnd;
    this.ctx.onStop = () => this.#end(undefined);
  }

  start(bigInts: BigInts): void {
    try {
      const input = this.ctx.leased.payload;
      if (bigInts === "possible") refuseBigInts(input);
      if (this.job.schema) {
        const checked = checkInput(this.job, input);
        if (checked instanceof Promise) {
          checked.then((valid) => this.#run(valid)).catch((error: unknown) => this.#fail(error));
          return;
        }
        this.#run(checked);
      } else {
        this.#run(input);
      }
    } catch (error) {
      this.#fail(error);
    }
  }

  /** Fires the signal of the handler. */
  stop(why: StopCause): void {
    this.ctx.stop(why);
    if (why === "lease_lost" || why === "suspended") this.#end(undefined);
  }

  /** Ends the attempt although the handler has not returned: it timed out or the worker stops. */
  abandon(): void {
    this.#fail(this.ctx.stopped ?? new Error("the handler was abandoned"));
  }

  #run(input: unknown): void {
    const returned: unknown = this.job.handler?.(input, this.ctx);
    if (isThenable(returned)) {
      returned.then(
        (result) => this.#succeed(result),
        (error: unknown) => this.#fail(error),
      );
    } else {
      this.#succeed(returned);
    }
  }

  #succeed(result: unknown): void {
    if (this.#ended) return;
    const ending: Ending = { outcome: "succeeded" };
    if (result !== undefined) {
      try {
        ending.result = encodeJson(result, "result");
      } catch (error) {
        this.#fail(new Fail((error as Error).message, { cause: error }));
        return;
      }
    }
    const { followUps } = this.ctx;
    if (followUps === undefined) return this.#end(ending);
    // The handler may not have awaited them.
    void Promise.allSettled(followUps).then((encoded) => {
      ending.follow_ups = encoded.flatMap((each) => (each.status === "fulfilled" ? [each.value] : []));
      this.#end(ending);
    });
  }

  #fail(thrown: unknown): void {
    if (!this.#ended) this.#end(endingOf(thrown, this.ctx));
  }

  #end(ending: Ending | undefined): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#onEnd(this, ending);
  }
}

/** Query builders are not promises, but can be awaited. */
function isThenable(value: unknown): value is PromiseLike<unknown> {
  return typeof value === "object" && value !== null && "then" in value && typeof value.then === "function";
}

/** Decides how an attempt ended whose handler threw. */
function endingOf(thrown: unknown, ctx: Context): Ending {
  const error = describeError(thrown);
  switch (ctx.stopped?.why) {
    case "cancel":
      return { outcome: "cancelled", error };
    case "shutdown":
      return { outcome: "released" };
    case "timeout":
      return { outcome: "failed", error: `timed out after ${ctx.leased.timeout_seconds ?? 0} s`, thrown };
    default:
  }
  if (thrown instanceof Retry) return { outcome: "failed", error, retry_after_seconds: thrown.after, thrown };
  if (thrown instanceof Snooze) return { outcome: "snoozed", delay_seconds: thrown.seconds };
  if (thrown instanceof Cancel) return { outcome: "cancelled", error };
  if (thrown instanceof Fail) return { outcome: "failed", error, permanent: true, thrown };
  return { outcome: "failed", error, thrown };
}

/** The message of an error with those of its causes. Handlers throw anything, so this must not throw itself. */
export function describeError(thrown: unknown): string {
  try {
    return describe(thrown, new Set());
  } catch {
    return "the handler threw a value that cannot be shown";
  }
}

function describe(thrown: unknown, seen: Set<unknown>): string {
  if (!(thrown instanceof Error)) return typeof thrown === "object" ? inspect(thrown) : String(thrown);
  if (seen.has(thrown)) return "the same error";
  seen.add(thrown);
  const plain = ["Error", "Retry", "Fail", "Cancel"].includes(thrown.name);
  const parts = [[plain ? "" : thrown.name, thrown.message].filter((part) => part !== "").join(": ")];
  // Node reports a host whose addresses all failed in this way, without a message.
  if (thrown instanceof AggregateError) {
    parts.push(`errors: ${thrown.errors.map((each: unknown) => describe(each, seen)).join(", ")}`);
  }
  const { cause } = thrown;
  // Errors often contain the message of their cause already.
  const isKnown = cause instanceof Error && cause.message !== "" && thrown.message.includes(cause.message);
  if (cause !== undefined && !isKnown) parts.push(`cause: ${describe(cause, seen)}`);
  return parts.join("; ");
}

/** An error message without characters that the server refuses: NUL and halves of surrogate pairs. */
function storable(message: string): string {
  return message
    .slice(0, 16_000)
    .replaceAll("\0", "\ufffd")
    .replace(/\p{Surrogate}/gu, "\ufffd");
}

/** A payload that does not decode fails at once: it would not in another attempt either. */
function checkInput(job: AnyJob, input: unknown): unknown {
  const permanent = (error: unknown) => {
    if (error instanceof ValidationError) throw new Fail(error.message, { cause: error });
    throw error;
  };
  try {
    const checked: unknown = validate(job.schema!, input, "payload");
    return checked instanceof Promise ? checked.catch(permanent) : checked;
  } catch (error) {
    return permanent(error);
  }
}

function refuseBigInts(input: unknown): void {
  const big = findBigInt(input, "payload");
  if (big)
    throw new Fail(
      `${big.path}: the integer ${big.value} is above 2^53, where numbers lose digits; send it as a string`,
    );
}

/** The JSON text of a settle item. */
export function settleJson(id: string, leaseNo: number, ending: Ending): string {
  let json = `{"id":"${id}","lease_no":${leaseNo},"outcome":"${ending.outcome}"`;
  if (ending.result !== undefined) json += `,"result":${ending.result}`;
  if (ending.error !== undefined) json += `,"error":${JSON.stringify(storable(ending.error))}`;
  if (ending.permanent) json += `,"permanent":true`;
  if (ending.retry_after_seconds !== undefined)
    json += `,"retry_after_seconds":${ending.retry_after_seconds}`;
  if (ending.delay_seconds !== undefined) json += `,"delay_seconds":${ending.delay_seconds}`;
  if (ending.follow_ups !== undefined) json += `,"follow_ups":[${ending.follow_ups.join(",")}]`;
  return `${json}}`;
}
