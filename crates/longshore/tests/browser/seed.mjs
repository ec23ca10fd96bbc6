// Data as of a real service, created over the API: for the tests of all pages and for screenshots.

import { Worker, api, enqueue, until } from "./harness.mjs";

const LONG_ERROR = `Error: connect ECONNREFUSED smtp.eu-central.example.net:587 (after 3 tries)
    at mailer::transport::connect (src/transport.rs:118:9)
    at mailer::send::deliver::{{closure}} (src/send.rs:72:31)
caused by: timed out after 30.0 s while waiting for the greeting
caused by: the pool of connections is exhausted: 32 of 32 are in use`;

const object = (required, properties) => ({ type: "object", required, properties });
const EMAIL = object(["to", "template"], {
  to: { type: "string", format: "email" },
  template: { type: "string", enum: ["welcome", "receipt", "reset"] },
  locale: { type: "string", default: "en" },
});
const THUMBNAIL = object(["url", "width"], { url: { type: "string" }, width: { type: "integer", minimum: 1 } });

// Per kind: its queue, its share of all jobs, its schema, and the payload of the `i`th job.
const KINDS = {
  email_customer: ["mail", 30, EMAIL, (i) => ({ to: `user${i}@example.org`, template: ["welcome", "receipt", "reset"][i % 3] })],
  make_thumbnail: ["images", 18, THUMBNAIL, (i) => ({ url: `https://cdn.example.org/p/${i}.jpg`, width: 640 })],
  charge_card: ["payments", 9, null, (i) => ({ order: 40_000 + i, amount: { value: "129.90", currency: "EUR" } })],
  sync_crm_contact: ["default", 12, null, (i) => ({ contact: i })],
  generate_report: ["reports", 2, null, () => ({ month: "2031-04", format: "pdf", sections: ["revenue", "churn"] })],
  notify_partner: ["webhooks", 14, object(["url"], {}), (i) => ({ url: "https://hooks.example.com/in", event: "order.paid", body: { id: i } })],
  transcode_video: ["media", 4, null, (i) => ({ source: `s3://media/${i}.mov`, renditions: [1080, 720, 480] })],
  index_document: ["search", 11, null, (i) => ({ id: i })],
};
const GROUPS = ["acme", "globex", "initech", "umbrella", "stark"];

// The same numbers in every run.
function random(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

export async function seed({ jobs, on }) {
  const next = random(7);
  const call = (method, path, body) => api(method, path, body, on);
  const job = (kind, i, more = {}) => ({ kind, payload: KINDS[kind][3](i), ...more });

  for (const [kind, [queue, , schema]] of Object.entries(KINDS)) {
    await call("PUT", `/kinds/${kind}`, { ...(schema && { schema }), defaults: { queue, max_attempts: 5 } });
  }
  for (const [name, cron, kind] of [
    ["nightly-report", "0 3 * * *", "generate_report"],
    ["sync-crm", "*/5 * * * *", "sync_crm_contact"],
    ["invoice-run", "0 9 1 * *", "generate_report"],
    ["weekly-digest", "30 8 * * 1", "email_customer"],
  ]) {
    await call("PUT", `/cron/${name}`, { cron, zone: "Europe/Berlin", job: job(kind, 1) });
  }
  await call("POST", "/cron/invoice-run/pause");
  await call("PUT", "/queues/payments/limit", { limit: 8 });
  await call("PUT", "/queues/webhooks/rate", { rate: { starts: 50 } });
  await call("PATCH", "/queues/webhooks/groups/umbrella", { paused: true });
  await call("PATCH", "/queues/webhooks/groups/acme", { limit: 3 });

  const deck = Object.entries(KINDS).flatMap(([kind, [, share]]) => Array(share).fill(kind));
  const some = (count) => Array.from({ length: count }, () => {
    const kind = deck[Math.floor(next() * deck.length)];
    const group = kind === "notify_partner" ? { group: GROUPS[Math.floor(next() * GROUPS.length)] } : {};
    const tags = next() < 0.2 ? { tags: ["import", next() < 0.5 ? "vip" : "batch-42"] } : {};
    return job(kind, Math.floor(next() * 1e6), { ...group, ...tags });
  });
  // Every page needs a job, so the first two jobs of a kind are not left to luck.
  const certain = [0, 1];
  const outcome = ({ kind }) => {
    const luck = (kind === "email_customer" ? certain.shift() : undefined) ?? next();
    const isFragile = kind === "email_customer" || kind === "charge_card";
    if (luck < (isFragile ? 0.08 : 0.015)) {
      const error = kind === "email_customer" ? `550 5.1.1 <user${Math.floor(next() * 1000)}@example.org>: Recipient address rejected: User unknown`
        : kind === "charge_card" ? "card_declined: insufficient_funds"
        : "index out of bounds at src/lib.rs:41: the len is 3 but the index is 7";
      return { outcome: "failed", permanent: true, error };
    }
    if (luck < (kind === "email_customer" ? 0.25 : 0.08)) {
      const error = kind === "email_customer" ? LONG_ERROR : "503 Service Unavailable: upstream connect error";
      return { outcome: "failed", error, retry_after_seconds: [0, 0, 30, 300, 1800][Math.floor(next() * 5)] };
    }
    return { outcome: "succeeded", result: { ok: true, took_ms: Math.floor(next() * 4000) } };
  };
  const workers = [
    new Worker("mailer-1", ["mail"], on),
    new Worker("images-eu-2", ["images", "media"], on),
    new Worker("core-7f9c", ["default", "payments", "search", "webhooks"], on),
    new Worker("webhooks-3", ["webhooks"], on),
  ];
  await enqueue(some(jobs), on);
  for (let round = 0; round < 4; round++) {
    for (const worker of workers) {
      const leased = await worker.lease(100);
      if (leased.length) await worker.settle(leased, outcome);
    }
  }

  const flows = await addFlows(call, job);
  const core = workers[2];
  await core.settle(await core.lease(100), outcome);
  await enqueue(some(Math.ceil(jobs / 4)), on);
  for (const worker of workers) await worker.lease(4);
  await call("POST", "/queues/reports/pause");
  await enqueue(Array.from({ length: 6 }, (_, i) => job("generate_report", i)), on);
  await call("POST", "/jobs", job("email_customer", 5, { delay_seconds: 7200, tags: ["vip"] }));
  return { flows };
}

async function addFlows(call, job) {
  const task = (name, after = [], kind = "index_document") => ({ ...job(kind, 1), task: name, after });
  const parts = [1, 2, 3, 4, 5].map((i) => `load part ${i}`);
  const create = async (name, tasks) => (await call("POST", "/flows", { name, tasks })).id;
  const shards = Array.from({ length: 240 }, (_, i) => task(`shard-${i}`, ["plan"]));
  return {
    small: await create("import catalogue", [
      task("fetch", [], "sync_crm_contact"), task("validate", ["fetch"]), task("split", ["validate"]),
      ...parts.map((part) => task(part, ["split"])), task("merge", parts),
      task("report", ["merge"], "generate_report"), task("notify", ["merge", "report"], "email_customer"),
      task("clean up", [{ task: "merge", condition: "ended" }]),
    ]),
    large: await create("reindex everything", [task("plan"), ...shards]),
  };
}

// Every page with something on it: a name for files and reports, and its path.
export async function allPages({ flows }, on) {
  const get = (path) => api("GET", path, undefined, on);
  const newest = async (status) => (await get(`/jobs?kind=email_customer&status=${status}&limit=1`))[0].id;
  // Upkeep counts failures.
  const [failure] = await until("a failure is counted", async () => {
    const found = await get("/failures?kind=email_customer&limit=1");
    return found.length && found;
  });
  return {
    overview: "/ui",
    "overview-day": "/ui?range=day",
    jobs: "/ui/jobs",
    "jobs-failed": "/ui/jobs?status=failed_permanent&kind=email_customer",
    "jobs-none": "/ui/jobs?kind=nothing",
    "job-failed": `/ui/jobs/${await newest("failed_permanent")}`,
    "job-running": `/ui/jobs/${await newest("running")}`,
    "job-queued": `/ui/jobs/${await newest("queued")}`,
    "job-succeeded": `/ui/jobs/${await newest("succeeded")}`,
    queues: "/ui/queues",
    queue: "/ui/queues/webhooks",
    flows: "/ui/flows",
    flow: `/ui/flows/${flows.small}`,
    "flow-large": `/ui/flows/${flows.large}`,
    failures: "/ui/failures",
    failure: `/ui/failures/${failure.fingerprint}`,
    kinds: "/ui/kinds",
    kind: "/ui/kinds/email_customer",
    new: "/ui/new?kind=email_customer",
    workers: "/ui/workers",
    cron: "/ui/cron",
    settings: "/ui/settings",
    keys: "/ui/keys",
  };
}
