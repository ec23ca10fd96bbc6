/** The client against a real server. */

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import { inspect } from "node:util";
import {
  ConflictError,
  Longshore,
  LongshoreError,
  NotFoundError,
  newId,
  UnavailableError,
  ValidationError,
} from "../src/index.js";
import { client, LIMIT, onEachEngine, signal, unique, until } from "./support.js";

onEachEngine(({ server, smoke }) => {
  smoke("options of an enqueue override those of the kind", async () => {
    const ls = client(server());
    const kind = unique("kind");
    const job = ls.declare<{ n: number }>(kind, {
      queue: "mail",
      priority: 3,
      maxAttempts: 5,
      timeout: 60,
      retry: { policy: "fixed", delayMs: 1500 },
    });
    const plain = await (await job.enqueue({ n: 1 })).get();
    assert.deepEqual(
      [plain.queue, plain.priority, plain.maxAttempts, plain.timeoutSeconds, plain.retry],
      ["mail", 3, 5, 60, { policy: "fixed", delayMs: 1500 }],
    );
    const runAt = new Date(Date.now() + 3_600_000);
    const set = await (
      await job.enqueue(
        { n: 2 },
        {
          queue: "other",
          priority: -1,
          maxAttempts: 1,
          timeout: "none",
          retry: { policy: "none" },
          runAt,
          group: "acme",
          tags: ["a"],
          flags: ["b"],
          context: "why",
          metadata: { user_id: 1 },
          uniqueKey: unique("key"),
        },
      )
    ).get();
    assert.deepEqual(
      [
        set.queue,
        set.priority,
        set.maxAttempts,
        set.timeoutSeconds,
        set.retry,
        set.group,
        set.tags,
        set.flags,
        set.context,
        set.metadata,
      ],
      ["other", -1, 1, null, { policy: "none" }, "acme", ["a"], ["b"], "why", { user_id: 1 }],
    );
    assert.equal(new Date(set.runAt).getTime(), runAt.getTime());
    await assert.rejects(job.enqueue({ n: 3 }, { delay: 1, runAt }), /delay: runAt is also set/);
  });

  smoke("keys and ids return the first job", async () => {
    const ls = client(server());
    const job = ls.declare<number>(unique("kind"));
    const id = newId();
    const first = await job.enqueue(1, { id });
    assert.equal(first.id, id);
    assert.equal((await job.enqueue(2, { id })).enqueuedAs, "existing");
    assert.deepEqual((await first.get()).payload, 1);
    const uniqueKey = unique("key");
    const keyed = await job.enqueue(1, { uniqueKey, delay: 60 });
    const replaced = await job.enqueue(2, { uniqueKey, uniqueMode: "replace", delay: 60 });
    assert.deepEqual([replaced.id, replaced.enqueuedAs], [keyed.id, "replaced"]);
    const idempotencyKey = unique("key");
    const one = await job.enqueue(1, { idempotencyKey });
    assert.deepEqual((await job.enqueue(2, { idempotencyKey })).id, one.id);
  });

  smoke("many jobs are enqueued in batches, and refused ones are named", async () => {
    const ls = client(server());
    const job = ls.declare<number>(unique("kind"));
    const handles = await job.enqueueMany(Array.from({ length: 2_500 }, (_, n) => n));
    assert.equal(new Set(handles.map(({ id }) => id)).size, 2_500);
    assert.equal((await handles[2_345]?.get())?.payload, 2_345);
    let listed = 0;
    for await (const each of ls.list({ kind: job.name, limit: 450 })) {
      assert.equal(each.payload, 2_499 - listed);
      listed += 1;
    }
    assert.equal(listed, 450);
    const bad = ls.enqueueMany([job.request(1), job.request(2, { priority: 100_000 })]);
    await assert.rejects(
      bad,
      (error) => error instanceof ValidationError && /job 1 of 2: .*priority/.test(error.message),
    );
  });

  smoke("jobs are cancelled, retried, explained and deleted", async () => {
    const ls = client(server());
    const job = ls.declare<number>(unique("kind"), { queue: unique("queue") });
    const handle = await job.enqueue(1, { delay: 3600 });
    assert.match((await handle.explain()).message, /no live worker/);
    await assert.rejects(handle.delete(), ConflictError);
    assert.equal(await handle.cancel(), "cancelled");
    await assert.rejects(
      handle.cancel(),
      (error) => error instanceof ConflictError && error.jobStatus === "cancelled",
    );
    await assert.rejects(handle.result(), { name: "JobCancelledError" });
    assert.equal((await handle.retry()).status, "queued");
    await handle.cancel();
    await handle.delete();
    await assert.rejects(handle.get(), (error) => error instanceof NotFoundError && error.status === 404);
    const waiting = await job.enqueue(2);
    await assert.rejects(waiting.result({ timeout: 0.2 }), { name: "TimeoutError", slug: "timeout" });
  });

  smoke("queues, schedules and events can be changed", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const job = ls.declare<{ n: number }>(unique("kind"), { queue });
    await job.enqueue({ n: 1 }, { delay: 3600 });
    assert.equal((await ls.queues.pause(queue)).paused, true);
    assert.equal((await ls.queues.resume(queue)).paused, false);
    assert.equal((await ls.queues.limit(queue, 3)).limit, 3);
    assert.ok((await ls.queues.list()).some(({ name, limit }) => name === queue && limit === 3));
    const name = unique("nightly");
    const put = await ls.cron.put(
      name,
      { cron: "30 2 * * *", zone: "Europe/Berlin", missed: "skip" },
      job.request({ n: 2 }),
    );
    assert.deepEqual(
      [put.cron, put.zone, put.job?.payload, put.job?.queue],
      ["30 2 * * *", "Europe/Berlin", { n: 2 }, queue],
    );
    assert.equal((await ls.cron.pause(name)).paused, true);
    assert.ok((await ls.cron.list()).some((each) => each.name === name));
    await ls.cron.delete(name);
    await assert.rejects(ls.cron.get(name), NotFoundError);
    const event = unique("event");
    assert.deepEqual((await ls.emit(event, { by: "ada" })).payload, { by: "ada" });
    assert.deepEqual((await ls.emit(event, { by: "bob" })).payload, { by: "ada" }, "the first event wins");
  });

  smoke("flows grow, are sealed, cancelled and retried", async () => {
    const ls = client(server());
    const job = ls.declare<number>(unique("kind"));
    const flow = await ls.flow("newsletter").open().idempotencyKey(unique("key")).start();
    await ls.addToFlow(
      flow.id,
      [1, 2, 3].map((n) => job.request(n)),
    );
    assert.deepEqual([(await ls.sealFlow(flow.id)).members, (await ls.flowTasks(flow.id)).length], [3, 3]);
    await ls.cancelFlow(flow.id);
    await until("the end", async () => (await ls.getFlow(flow.id)).status === "cancelled");
    await ls.retryFlow(flow.id);
    await until("the retry", async () => (await ls.getFlow(flow.id)).status === "running");
    const looped = ls
      .flow("loop")
      .task("a", job.request(1), { after: "b" })
      .task("b", job.request(2), { after: { task: "a", condition: "ended" } })
      .start();
    await assert.rejects(looped, /wait for each other/);
  });
});

test("many waiting calls delay no other call", async () => {
  const waiting: (() => void)[] = [];
  let cancels = 0;
  // No call that waits ends before all jobs are cancelled.
  const http = createServer((request, response) => {
    const respond = () => response.end('{"status":"cancelled"}');
    response.setHeader("content-type", "application/json");
    if (request.method === "GET" && cancels < 300) return void waiting.push(respond);
    respond();
    if (request.method === "POST" && ++cancels === 300) for (const end of waiting) end();
  });
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  const ls = client(`http://127.0.0.1:${(http.address() as { port: number }).port}`);
  const handles = Array.from({ length: 300 }, () => ls.handle(newId()));
  const ended = Promise.allSettled(handles.map((handle) => handle.wait()));
  try {
    await until("calls wait", () => waiting.length > 0);
    const cancelled = Promise.allSettled(handles.map((handle) => handle.cancel()));
    await until("all are cancelled", () => cancels === 300);
    for (const each of await cancelled) assert.equal(each.status, "fulfilled");
    for (const each of await ended)
      assert.equal(each.status === "fulfilled" && each.value.status, "cancelled");
  } finally {
    ls.close();
    http.closeAllConnections();
    http.close();
  }
});

test("a wait for a job pauses as the server asks", async () => {
  const at: number[] = [];
  const http = createServer((_, response) => {
    at.push(Date.now());
    const first = at.length === 1;
    response.writeHead(200, { "content-type": "application/json", ...(first && { "retry-after": "1" }) });
    response.end(JSON.stringify({ status: first ? "running" : "succeeded" }));
  });
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  const { port } = http.address() as { port: number };
  const ls = new Longshore({ server: `http://127.0.0.1:${port}` });
  assert.equal(
    (await ls.wait("01990000-0000-7000-8000-000000000001", { timeout: LIMIT })).status,
    "succeeded",
  );
  assert.equal(at.length, 2);
  assert.ok((at[1] ?? 0) - (at[0] ?? 0) >= 990);
  ls.close();
  http.close();
});

test("the short responses to a token that may only enqueue are enough", async () => {
  const id = newId();
  const http = createServer((_, response) => {
    response.setHeader("enqueued-as", "existing");
    response.writeHead(200, { "content-type": "application/json" });
    response.end(JSON.stringify({ id, status: "running", enqueued_as: "existing" }));
  });
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  const ls = client(`http://127.0.0.1:${(http.address() as { port: number }).port}`);
  try {
    const greet = ls.declare<number>("greet");
    const handle = await greet.enqueue(1);
    assert.deepEqual([handle.id, handle.enqueuedAs], [id, "existing"]);
    assert.equal((await ls.flow("greetings").open().start()).id, id);
  } finally {
    ls.close();
    http.close();
  }
});

test("an enqueue is repeated while the server is unavailable, and honours Retry-After", async () => {
  const bodies: string[] = [];
  const replies = [503, 429, 408, 500, 201];
  const at: number[] = [];
  const http = createServer((request, response) => {
    let body = "";
    request.on("data", (chunk) => (body += chunk));
    request.on("end", () => {
      bodies.push(body);
      at.push(Date.now());
      const status = replies[bodies.length - 1] ?? 201;
      if (status === 429) response.setHeader("retry-after", "1");
      // The request with status 500 has created the job.
      if (status === 201) response.setHeader("enqueued-as", "existing");
      response.writeHead(status, { "content-type": "application/json" });
      response.end(
        JSON.stringify(status === 201 ? JSON.parse(body) : { error: "unavailable", message: "not now" }),
      );
    });
  });
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  const { port } = http.address() as { port: number };
  const ls = new Longshore({ server: `http://127.0.0.1:${port}/prefix`, retryFor: LIMIT });
  const handle = await ls.declare<number>("kind").enqueue(1);
  assert.equal(bodies.length, 5);
  assert.equal(new Set(bodies).size, 1, "every repetition has the same id");
  assert.equal(handle.enqueuedAs, "created", "the caller made this job, though an earlier try stored it");
  assert.match(bodies[0] ?? "", new RegExp(handle.id));
  assert.ok((at[2] ?? 0) - (at[1] ?? 0) >= 990, "waits for Retry-After");
  ls.close();
  http.close();
});

test("a server that closes the connection within a large request does not end the process", async () => {
  const closed = signal();
  const http = createServer((request, response) => {
    response.writeHead(413, { "content-type": "application/json", "content-length": 43 });
    response.end('{"error":"too_large","message":"too large"}');
    request.socket.once("close", () => closed.resolve());
    // The client is still sending its body.
    setImmediate(() => request.socket.destroy());
  });
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  const { port } = http.address() as { port: number };
  const ls = new Longshore({ server: `http://127.0.0.1:${port}`, retryFor: 0 });
  // Whether the client gets the response or the broken connection is up to the operating system.
  await assert.rejects(ls.declare<string>("kind").enqueue("x".repeat(40_000_000)), LongshoreError);
  await closed.promise;
  // An error without a listener would come in one of the next turns.
  for (let turn = 0; turn < 20; turn += 1) await new Promise((resolve) => setImmediate(resolve));
  ls.close();
  http.close();
});

test("numbers that JSON turns into null are refused, because null means the default", async () => {
  const ls = new Longshore({ server: "http://127.0.0.1:9", retryFor: 0 });
  const job = ls.declare<number>("kind");
  await assert.rejects(job.enqueue(1, { delay: Number.NaN }), /delay: NaN was given for `kind`/);
  await assert.rejects(job.enqueue(1, { priority: Number.NaN }), /priority: NaN/);
  const forever = job.enqueue(1, { timeout: Number.POSITIVE_INFINITY });
  await assert.rejects(forever, /timeout: Infinity was given for `kind`; use a number of seconds or "none"/);
  assert.throws(() => ls.declare("other", { maxAttempts: Number.NaN }), /maxAttempts: NaN .*`other`/);
  await assert.rejects(ls.queues.limit("mail", Number.NaN), /limit: NaN is not a number; use null for none/);
  assert.throws(() => new Longshore({ retryFor: Number.NaN }), /retryFor: NaN is out of range/);
});

test("a client that is logged does not show its token", async () => {
  const ls = new Longshore({ token: "secret-token" });
  assert.doesNotMatch(inspect([ls, ls.handle("id"), ls.declare("kind")], { depth: 9 }), /secret-token/);
});

test("errors say what is wrong with the connection", async () => {
  const none = new Longshore({ server: "http://127.0.0.1:9", retryFor: 0.1 });
  const refused = none.declare<number>("kind").enqueue(1);
  await assert.rejects(
    refused,
    (error) =>
      error instanceof UnavailableError && error.slug === "connection" && /127.0.0.1:9/.test(error.message),
  );
  assert.throws(
    () => new Longshore({ server: "localhost" }),
    /server: `localhost` is not a URL; use one like/,
  );
  assert.throws(() => new Longshore({ server: "ftp://x" }), /server: `ftp:` is not supported/);
  const http = createServer((_, response) => response.writeHead(308, { location: "https://b/jobs" }).end());
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  const moved = new Longshore({ server: `http://127.0.0.1:${(http.address() as { port: number }).port}` });
  await assert.rejects(moved.declare<number>("kind").enqueue(1), /server: it redirects to https:\/\/b\/jobs/);
  moved.close();
  http.close();
});
