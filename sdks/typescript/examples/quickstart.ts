/**
 * One program that enqueues a job, runs it and prints its result. Start a server first (`npx longshore dev`), or set
 * LONGSHORE_SERVER.
 */

import { Longshore } from "longshore";

const ls = new Longshore();

const greet = ls.job(
  "greet",
  { queue: "greetings", maxAttempts: 5 },
  async (input: { name: string }, ctx) => {
    ctx.progress({ greeted: 0 });
    return `Hello ${input.name}`;
  },
);

const stop = new AbortController();
await ls.work({
  signal: stop.signal,
  onReady: async () => {
    const handle = await greet.enqueue({ name: "Ada" });
    console.log(await handle.result());
    stop.abort();
  },
});
