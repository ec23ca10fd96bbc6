// A worker for `bench sdks`: `bench` does nothing, and `pick_up` prints the milliseconds since the time in its payload,
// which is in microseconds. Run `npm run build` first. LONGSHORE_SERVER and LONGSHORE_TOKEN name the server; SIGTERM
// stops the worker.

import { Longshore } from "../dist/index.js";

const ls = new Longshore();
ls.job("bench", async () => {});
ls.job("pick_up", async ({ at }) => {
  const now = performance.timeOrigin + performance.now();
  console.log((now - at / 1000).toFixed(3));
});
await ls.work({ concurrency: 100 });
