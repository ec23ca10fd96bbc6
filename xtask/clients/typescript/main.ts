// Enqueues, lists, leases and settles a job with the types that openapi-typescript
// generates from docs/openapi.json. LONGSHORE_URL and LONGSHORE_TOKEN name the server.

import type { operations } from "./schema.js";

declare const process: { env: Record<string, string | undefined> };

type Json<T> = T extends { content: { "application/json": infer B } } ? B : never;
type RequestOf<O extends keyof operations> = operations[O] extends { requestBody: infer R } ? Json<R> : undefined;
type StatusOf<O extends keyof operations> = keyof operations[O]["responses"] & number;
type ResponseOf<O extends keyof operations, S extends StatusOf<O>> = Json<operations[O]["responses"][S]>;

/** Sends a request. Fails unless the response has the expected status. */
async function call<O extends keyof operations, S extends StatusOf<O>>(
  operation: O,
  status: S,
  route: string,
  body: RequestOf<O>,
): Promise<ResponseOf<O, S>> {
  const [method = "GET", path = "/"] = route.split(" ");
  const response = await fetch(`${process.env["LONGSHORE_URL"]}${path}`, {
    method,
    headers: { "content-type": "application/json", authorization: `Bearer ${process.env["LONGSHORE_TOKEN"]}` },
    ...(body === undefined ? {} : { body: JSON.stringify(body) }),
  });
  const text = await response.text();
  check(response.status === status, `${operation}: ${response.status} ${text}`);
  return JSON.parse(text) as ResponseOf<O, S>;
}

function check(condition: boolean, message: string): asserts condition {
  if (!condition) throw new Error(message);
}

const queue = "typescript";
const job = await call("enqueue_job", 201, "POST /jobs", {
  kind: "greet",
  payload: { name: "Ada" },
  queue,
  retry: { policy: "fixed", delay_ms: 1500 },
  timeout_seconds: "none",
});
check(job.status === "queued" && job.attempts === 0 && job.timeout_seconds === null, JSON.stringify(job));
check(job.retry?.policy === "fixed" && job.retry.delay_ms === 1500, JSON.stringify(job));

const batch = await call("enqueue_jobs", 200, "POST /jobs/batch", [{ kind: "greet", payload: null, queue }]);
check(batch.created === 1 && batch.items[0]?.outcome === "created", JSON.stringify(batch));

const listed = await call("list_jobs", 200, `GET /jobs?queue=${queue}&limit=10`, undefined);
check(listed.length === 2 && listed.some((each) => each.id === job.id), JSON.stringify(listed));

const leased = await call("lease_jobs", 200, "POST /leases", { queues: [queue], kinds: ["greet"], limit: 10 });
check(leased.jobs.length === 2, JSON.stringify(leased));

const settled = await call("settle_leases", 200, "POST /leases/settle", {
  worker_id: leased.worker_id,
  items: leased.jobs.map(({ id, lease_no }) => ({ id, lease_no, outcome: "succeeded" as const, result: { by: queue } })),
});
check(settled.items.every((item) => item.settled === "stored"), JSON.stringify(settled));

const done = await call("get_job", 200, `GET /jobs/${job.id}`, undefined);
check(done.status === "succeeded" && done.attempts === 1, JSON.stringify(done));

const schedule = await call("put_schedule", 200, "PUT /cron/typescript", {
  cron: "0 3 * * *",
  job: { kind: "greet", payload: null },
});
check(schedule.job?.kind === "greet" && schedule.job.queue === "default", JSON.stringify(schedule));

// The body is optional.
const swept = await call("sweep_workers", 200, "POST /sweep", undefined);
check(swept.recovered === 0, JSON.stringify(swept));
console.log(`typescript: enqueued, listed, leased and settled ${leased.jobs.length} jobs`);
