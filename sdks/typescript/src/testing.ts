/**
 * Tools for tests. `testQueue` replaces the server of a client with a queue in memory, which runs handlers in
 * the test's own process: at once (`inline`), or when the test says so (`manual`). `startDev` starts a real
 * server.
 */

import type { Longshore } from "./client.js";
import type { Job } from "./job.js";
import { throughJson } from "./json.js";
import { MemoryQueue, type Ran } from "./memory.js";
import { type Camelized, toCamel } from "./names.js";
import type { components } from "./wire.js";

export { type DevOptions, type DevServer, startDev } from "./dev.js";
export type { Ran } from "./memory.js";

type JobInfo = Camelized<components["schemas"]["Job"]>;

export interface TestQueueOptions {
  /** `manual` (the default): jobs run when the test calls `runPending`. `inline`: due jobs run within `enqueue`. */
  mode?: "inline" | "manual" | undefined;
  /** The time at which the clock of the queue starts; the current time by default. */
  now?: Date | undefined;
}

/** What an enqueued input must contain: some of its fields, or a function that decides. */
export type Expected<Input> = DeepPartial<Input> | ((input: Input) => boolean);

type DeepPartial<T> = T extends object ? { [K in keyof T]?: DeepPartial<T[K]> } : T;

/** Replaces the server of a client with a queue in memory, until `restore` is called. */
export function testQueue(client: Longshore, options: TestQueueOptions = {}): TestQueue {
  return new TestQueue(client, options);
}

export class TestQueue {
  readonly #client: Longshore;
  readonly #original: Longshore["transport"];
  readonly #memory: MemoryQueue;

  /** @internal */
  constructor(client: Longshore, options: TestQueueOptions) {
    this.#client = client;
    this.#original = client.transport;
    this.#memory = new MemoryQueue(client, options.mode ?? "manual", (options.now ?? new Date()).getTime());
    client.transport = this.#memory;
  }

  /** The time of the queue. It stands still until `advance` moves it. */
  get now(): Date {
    return new Date(this.#memory.now);
  }

  /** Every job, oldest first. */
  get jobs(): JobInfo[] {
    return this.#memory.all().map((job) => toCamel(job));
  }

  /** Runs jobs that are due, one after the other, until no job is due. */
  runPending(): Promise<Ran> {
    return this.#memory.runPending();
  }

  /** Moves the clock by this many seconds. In `inline` mode, also runs what is due then. */
  async advance(seconds: number): Promise<void> {
    await this.#memory.advance(seconds * 1000);
  }

  /** Runs jobs, and moves the clock to the next one that will be due, until all have ended or wait for events. */
  runAll(): Promise<Ran> {
    return this.#memory.runAll();
  }

  /** Fails unless a job of this kind was enqueued with an input like this. Returns it. */
  assertEnqueued<Input, Output, Result>(
    job: Job<Input, Output, Result>,
    expected?: Expected<Input>,
  ): JobInfo {
    const found = this.#find(job, expected);
    if (found) return found;
    const others = this.jobs.map((each) => `  ${each.kind} ${JSON.stringify(each.payload)}`);
    const wanted =
      typeof expected === "function" ? "that the function accepts" : JSON.stringify(expected ?? "any input");
    throw new Error(
      `no job \`${job.name}\` was enqueued with ${wanted}; enqueued are:\n${others.join("\n") || "  none"}`,
    );
  }

  /** Fails if a job of this kind was enqueued with an input like this. */
  assertNotEnqueued<Input, Output, Result>(
    job: Job<Input, Output, Result>,
    expected?: Expected<Input>,
  ): void {
    const found = this.#find(job, expected);
    if (found) throw new Error(`job \`${job.name}\` was enqueued with ${JSON.stringify(found.payload)}`);
  }

  #find<Input, Output, Result>(
    job: Job<Input, Output, Result>,
    expected: Expected<Input> | undefined,
  ): JobInfo | undefined {
    return this.jobs.find((each) => {
      if (each.kind !== job.name) return false;
      if (expected === undefined) return true;
      if (typeof expected === "function") return (expected as (input: unknown) => boolean)(each.payload);
      return contains(each.payload, throughJson(expected, "expected"));
    });
  }

  /** Lets the client use its server again. */
  restore(): void {
    this.#client.transport = this.#original;
  }

  [Symbol.dispose](): void {
    this.restore();
  }
}

function contains(actual: unknown, expected: unknown): boolean {
  if (typeof expected !== "object" || expected === null) return actual === expected;
  if (typeof actual !== "object" || actual === null || Array.isArray(actual) !== Array.isArray(expected))
    return false;
  if (Array.isArray(expected) && expected.length !== (actual as unknown[]).length) return false;
  return Object.entries(expected).every(([name, value]) =>
    contains((actual as Record<string, unknown>)[name], value),
  );
}
