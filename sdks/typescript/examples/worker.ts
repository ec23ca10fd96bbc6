/** Runs the jobs of `jobs.ts` until SIGTERM or SIGINT. */

import { ls } from "./jobs.js";

await ls.work({ concurrency: 50 });
