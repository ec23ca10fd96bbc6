// Measures no-op jobs per second of one worker process, and the time from enqueue to the start of the handler.
// Usage: LONGSHORE_SERVER=… node tools/bench.mjs [--jobs N] [--concurrency N] [--payload BYTES]
// Run `npm run build` first. The server should be a release build on a quiet machine.

import { parseArgs } from "node:util";
import { Longshore } from "../dist/index.js";

const { values } = parseArgs({
  options: {
    jobs: { type: "string", default: "20000" },
    concurrency: { type: "string", default: "50" },
    payload: { type: "string", default: "16" },
    pickups: { type: "string", default: "200" },
  },
});
const jobs = Number(values.jobs);
const queue = `bench-${process.pid}`;
const ls = new Longshore();

let ended = 0;
let finished;
const noop = ls.job("bench_noop", { queue }, async () => {
  ended += 1;
  if (ended === jobs) finished();
});
let started;
const pickup = ls.job("bench_pickup", { queue }, async () => started(performance.now()));

const stop = new AbortController();
let ready;
const registered = new Promise((resolve) => {
  ready = resolve;
});
const work = () =>
  ls.work({
    queues: [queue],
    concurrency: Number(values.concurrency),
    signal: stop.signal,
    onReady: () => ready(),
  });

// Register once, so that the kinds are known, and enqueue before the measured worker starts.
const first = new AbortController();
const once = ls.work({ queues: [queue], signal: first.signal, onReady: () => first.abort() });
await once;
await noop.enqueueMany(Array.from({ length: jobs }, () => "x".repeat(Number(values.payload))));

const done = new Promise((resolve) => {
  finished = resolve;
});
const cpu = process.cpuUsage();
const begin = performance.now();
const working = work();
await registered;
await done;
const seconds = (performance.now() - begin) / 1000;
const used = process.cpuUsage(cpu);
console.log(`no-op jobs: ${Math.round(jobs / seconds)} per second (${jobs} jobs in ${seconds.toFixed(2)} s)`);
console.log(`CPU time of this process: ${((used.user + used.system) / jobs).toFixed(1)} µs per job`);

const times = [];
for (let n = 0; n < Number(values.pickups); n += 1) {
  const start = new Promise((resolve) => {
    started = resolve;
  });
  const before = performance.now();
  const [, at] = await Promise.all([pickup.enqueue(), start]);
  times.push(at - before);
}
times.sort((a, b) => a - b);
const at = (share) => times[Math.floor(times.length * share)].toFixed(2);
if (times.length > 0) console.log(`pick-up: p50 ${at(0.5)} ms, p95 ${at(0.95)} ms, p99 ${at(0.99)} ms`);
stop.abort();
await working;
ls.close();
