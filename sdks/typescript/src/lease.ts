/**
 * What one attempt needs from the queue. The worker implements it over HTTP (`worker.ts`), and
 * `longshore/testing` in memory. All methods name the lease; none has an effect if the lease is lost.
 */

import type { components } from "./wire.js";

type Schemas = components["schemas"];

/** A leased job, as `POST /leases` returns it. */
export type LeasedJob = Omit<Schemas["LeasedJob"], "steps"> & {
  /** Null if the response would be too large; read the journal then. */
  steps: JournaledStep[] | null;
};
export type JournaledStep = Pick<Schemas["Step"], "name" | "status" | "value">;
export type NewWait = Required<Omit<Schemas["Wait"], "within_seconds">> & { within_seconds: number | null };
export type WaitReply = Schemas["WaitResponse"];
export type TaskInput = Schemas["TaskInput"];
export type JoinedChild = Schemas["EndedChild"];
export type JoinReply = Schemas["JoinResponse"];
export type Saved = "stored" | "lease_lost";

export interface Lease {
  saveStep(name: string, valueJson: string): Promise<Saved>;
  saveCheckpoint(json: string): Promise<Saved>;
  progress(json: string): void;
  journal(): Promise<JournaledStep[]>;
  wait(waits: NewWait[]): Promise<WaitReply>;
  inputs(): Promise<TaskInput[]>;
  spawn(name: string, jobs: string[]): Promise<Saved>;
  join(name: string, after: string | null): Promise<JoinReply>;
}
