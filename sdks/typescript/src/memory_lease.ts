/** The lease of one attempt in the queue in memory. As on the server, none of its calls has an effect after its end. */

import type { JoinReply, JournaledStep, Lease, NewWait, Saved, TaskInput, WaitReply } from "./lease.js";
import type { MemoryQueue, Stored } from "./memory.js";

export class MemoryLease implements Lease {
  readonly #queue: MemoryQueue;
  readonly #stored: Stored;
  readonly #leaseNo: number;

  constructor(queue: MemoryQueue, stored: Stored) {
    this.#queue = queue;
    this.#stored = stored;
    this.#leaseNo = stored.job.lease_no;
  }

  get #isLost(): boolean {
    const { job } = this.#stored;
    return job.status !== "running" || job.lease_no !== this.#leaseNo;
  }

  async saveStep(name: string, json: string): Promise<Saved> {
    if (this.#isLost) return "lease_lost";
    this.#queue.saveStep(this.#stored, name, json);
    return "stored";
  }

  async saveCheckpoint(json: string): Promise<Saved> {
    if (this.#isLost) return "lease_lost";
    this.#stored.checkpoint = JSON.parse(json);
    return "stored";
  }

  progress(json: string): void {
    if (!this.#isLost) this.#stored.job.progress = JSON.parse(json);
  }

  async journal(): Promise<JournaledStep[]> {
    return journalOf(this.#stored);
  }

  async wait(waits: NewWait[]): Promise<WaitReply> {
    if (this.#isLost) return { status: "lease_lost", done: [] };
    return this.#queue.wait(this.#stored, waits);
  }

  async inputs(): Promise<TaskInput[]> {
    return this.#queue.inputs(this.#stored);
  }

  async spawn(name: string, jobs: string[]): Promise<Saved> {
    if (this.#isLost) return "lease_lost";
    this.#queue.spawn(this.#stored, name, jobs);
    return "stored";
  }

  async join(name: string): Promise<JoinReply> {
    if (this.#isLost) return { status: "lease_lost", children: [], next: null };
    return this.#queue.join(this.#stored, name);
  }
}

/** What an attempt gets to know of the steps of earlier ones. */
export function journalOf({ steps }: Stored): JournaledStep[] {
  return [...steps].map(([name, { status, value }]) => ({ name, status, value }));
}
