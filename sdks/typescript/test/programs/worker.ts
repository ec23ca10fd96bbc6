/** A worker process for tests that kill it or block its event loop. */

import { appendFileSync, existsSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import { Longshore, type Stopped } from "../../src/index.js";

const env = process.env;
const ls = new Longshore();

/** Blocks the event loop until a file exists. */
ls.job("test_block", async (file: string) => {
  console.log("blocking");
  const pause = new Int32Array(new SharedArrayBuffer(4));
  while (!existsSync(file)) Atomics.wait(pause, 0, 0, 10);
  return "blocked";
});

/** Runs until a file exists. */
ls.job("test_wait", async (file: string) => {
  console.log("waiting");
  while (!existsSync(file)) await pause(10);
  return "rested";
});

ls.job("test_nap", async (ms: number, ctx) => {
  console.log(`napping ${ms}`);
  try {
    await pause(ms, undefined, { signal: ctx.signal });
  } catch (error) {
    console.log(`nap stopped: ${(ctx.signal.reason as Stopped).why}`);
    throw error;
  }
  return "rested";
});

ls.job("test_ignore", async (ms: number) => {
  console.log("ignoring");
  // Not referenced: the process may end before this.
  await new Promise((resolve) => setTimeout(resolve, ms).unref());
});

ls.job("test_note", async (text: string, ctx) => {
  // The effect of the job, written by each run.
  if (env["TEST_EFFECTS"]) appendFileSync(env["TEST_EFFECTS"], `${text} ${ctx.id} ${ctx.job.leaseNo}\n`);
  await pause(Number(env["TEST_NOTE_MS"] ?? 0));
});

process.once("SIGTERM", () => console.log("stopping"));
await ls.work({
  queues: [env["TEST_QUEUE"] ?? "default"],
  name: `program-${env["TEST_QUEUE"]}`,
  concurrency: Number(env["TEST_CONCURRENCY"] ?? 10),
  staleAfter: Number(env["TEST_STALE_AFTER"] ?? 60),
  grace: Number(env["TEST_GRACE"] ?? 30),
  onReady: () => console.log("ready"),
});
