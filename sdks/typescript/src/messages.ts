/**
 * The messages between the main thread, which runs handlers, and the I/O thread, which talks to the server.
 *
 * Each lease has a sequence number, and a slot in memory that both threads share. The slot decides who gets a
 * job that was delivered: the main thread starts it, or the I/O thread releases it because the main
 * thread did not start it in time. Both use compare-and-exchange, so exactly one of them succeeds.
 */

/** The slot of a lease holds its sequence number until it is decided. */
export function tryStart(slots: Int32Array, slot: number, seq: number): boolean {
  return Atomics.compareExchange(slots, slot, seq, -seq) === seq;
}

export function tryRelease(slots: Int32Array, slot: number, seq: number): boolean {
  return Atomics.compareExchange(slots, slot, seq, 0) === seq;
}

/** More slots than leases, because a slot is reused only after its lease is settled. */
export const SLOTS = 4096;

/** What the I/O thread is started with. */
export interface IoSettings {
  server: string;
  token: string | undefined;
  slots: SharedArrayBuffer;
  concurrency: number;
  queues: string[];
  kinds: string[];
  /** JSON text. */
  announce: string;
  name: string;
  version: string;
  staleAfterSeconds: number;
}

export type Operation = "journal" | "wait" | "inputs" | "spawn" | "join";

/** A request of a handler. The reply has the same number. */
export type HandlerCall =
  | { call: number; seq: number; what: "step"; name: string; json: string }
  | { call: number; seq: number; what: "checkpoint"; json: string }
  /** `json` has the fields of the request behind the lease. */
  | { call: number; seq: number; what: Operation; json: string };

/** From the main thread. */
export interface ToIo {
  /** Attempts that have ended: the lease and the item of the settle request. */
  settle?: { seq: number; json: string }[];
  /** Attempts whose lease has ended without a settle. */
  dropped?: number[];
  progress?: { seq: number; json: string }[];
  calls?: HandlerCall[];
  /** How many attempts ended since the last message, and for how long at least one was running. */
  ended?: number;
  busyMs?: number;
  /** Replies to a `ping`. */
  pong?: true;
  /** `stop`: lease no more jobs. `finish`: settle what is left, sign off and end. */
  command?: "stop" | "finish";
}

/** From the I/O thread. */
export type FromIo =
  /** The text of the response, and the sequence number and slot of each job in it. */
  | { what: "jobs"; text: string; seqs: number[]; slots: number[] }
  | { what: "stop"; leases: { seq: number; why: "cancel" | "lease_lost" }[] }
  | { what: "reply"; call: number; text: string }
  | { what: "refusal"; call: number; slug: string; message: string; status: number }
  | { what: "registered"; workerId: string }
  | { what: "ping" }
  | { what: "log"; level: "info" | "warn" | "error"; message: string }
  | { what: "failed"; slug: string; message: string; status: number }
  | { what: "finished" };
