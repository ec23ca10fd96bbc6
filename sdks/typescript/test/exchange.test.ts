/** The worker against a server that misbehaves: each test decides the responses. */

import assert from "node:assert/strict";
import { createServer, type Server as HttpServer, type ServerResponse } from "node:http";
import { afterEach, beforeEach, test } from "node:test";
import { AccessError, type LogEntry, Longshore, newId, type Stopped } from "../src/index.js";
import { LIMIT, signal, soon, until } from "./support.js";

interface Lease {
  id: string;
  lease_no: number;
}

interface Request {
  worker_id?: string;
  limit: number;
  wait_seconds?: number;
  held?: Lease[];
  settle?: (Lease & { outcome: string; error?: string })[];
  progress?: Lease[];
}

/** Answers `POST /leases` as the test says. */
class FakeServer {
  readonly requests: Request[] = [];
  signedOff = false;
  answer: (request: Request, respond: Respond) => void = (_, respond) => respond(200, reply({}));
  url = "";
  readonly #http: HttpServer;

  constructor() {
    this.#http = createServer((request, response) => {
      let body = "";
      request.on("data", (chunk) => (body += chunk));
      request.on("end", () => {
        if (request.method === "DELETE") {
          this.signedOff = true;
          return void response.writeHead(204).end();
        }
        const parsed = JSON.parse(body) as Request;
        this.requests.push(parsed);
        this.answer(parsed, responder(response));
      });
    });
  }

  async start(): Promise<void> {
    await new Promise<void>((resolve) => this.#http.listen(0, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${(this.#http.address() as { port: number }).port}`;
  }

  stop(): void {
    this.#http.close();
    this.#http.closeAllConnections();
  }

  get settles(): NonNullable<Request["settle"]> {
    return this.requests.flatMap(({ settle }) => settle ?? []);
  }
}

type Respond = (status: number, body: string, headers?: Record<string, string>) => void;

function responder(response: ServerResponse): Respond {
  return (status, body, headers = {}) => {
    response.writeHead(status, { "content-type": "application/json", ...headers });
    response.end(body);
  };
}

function reply(fields: Record<string, unknown>, renewWithin = 1): string {
  return JSON.stringify({
    protocol: "1.1",
    worker_id: "01990000-0000-7000-8000-000000000001",
    renew_within_seconds: renewWithin,
    jobs: [],
    cancel: [],
    lost: [],
    settled: [],
    saved_steps: [],
    saved_checkpoints: [],
    saved_progress: [],
    ...fields,
  });
}

/** The response to a request whose reports are all stored. */
function stored(request: Request, jobs: unknown[] = []): string {
  return reply({
    jobs,
    settled: (request.settle ?? []).map(({ id, lease_no }) => ({ id, lease_no, settled: "stored" })),
    saved_progress: (request.progress ?? []).map(({ id, lease_no }) => ({ id, lease_no, saved: "stored" })),
  });
}

function leased(kind: string, payload: unknown = null): Record<string, unknown> {
  return {
    id: newId(),
    lease_no: 1,
    kind,
    queue: "default",
    priority: 0,
    payload,
    attempt: 1,
    max_attempts: 3,
    interruptions: 0,
    timeout_seconds: null,
    steps: [],
    checkpoint: null,
  };
}

let server: FakeServer;
let ls: Longshore;
let stop: AbortController;
let log: LogEntry[];
beforeEach(async () => {
  server = new FakeServer();
  await server.start();
  ls = new Longshore({ server: server.url });
  stop = new AbortController();
  log = [];
});
afterEach(() => server.stop());

function work(options: { concurrency?: number; staleAfter?: number } = {}): Promise<void> {
  const working = ls.work({
    grace: 0.1,
    ...options,
    signal: stop.signal,
    handleSignals: false,
    log: (entry) => log.push(entry),
  });
  working.catch(() => {});
  return working;
}

/** Leaves a call that waits without a response until its time is up, as the server does. */
function wait(request: Request, respond: Respond): void {
  setTimeout(() => respond(200, reply({})), (request.wait_seconds ?? 0) * 1000);
}

test("a response that is not JSON counts as none", async () => {
  ls.job("note", async () => 1);
  server.answer = (request, respond) => {
    if (server.requests.length === 1) respond(200, "<html>be right back</html>");
    else if (request.worker_id === undefined) respond(200, reply({ jobs: [leased("note")] }));
    else if (request.settle && server.settles.length === 1) respond(200, "<html>be right back</html>");
    else if (request.settle) respond(200, stored(request));
    else wait(request, respond);
  };
  const working = work();
  await until("the settle is repeated", () => server.settles.length >= 2);
  stop.abort();
  await working;
  assert.deepEqual(new Set(server.settles.map(({ outcome }) => outcome)), new Set(["succeeded"]));
});

test("an end that the server cannot store now is sent again, also while the worker stops", async () => {
  ls.job("note", async () => 1);
  server.answer = (request, respond) => {
    if (request.worker_id === undefined) return respond(200, reply({ jobs: [leased("note")] }));
    if (!request.settle?.length) return wait(request, respond);
    if (server.settles.length > 1) return respond(200, stored(request));
    const settled = request.settle.map((end) => ({
      ...end,
      settled: "unavailable",
      message: "the job is locked",
    }));
    respond(200, reply({ settled }));
  };
  const working = work();
  await until("the first report", () => server.settles.length === 1);
  stop.abort();
  await working;
  const ends = server.settles.map(({ id, outcome }) => [id, outcome]);
  assert.deepEqual(ends, [ends[0], ends[0]]);
  assert.equal(ends[0]?.[1], "succeeded");
  assert.ok(server.signedOff);
});

test("a pause that the server asks for does not cost the leases", async () => {
  const finish = signal();
  ls.job("slow", () => finish.promise);
  let calls = 0;
  server.answer = (request, respond) => {
    if (request.worker_id === undefined) return respond(200, reply({ jobs: [leased("slow")] }));
    calls += 1;
    if (calls === 1)
      respond(429, '{"error":"rate_limited","message":"slow down"}', { "retry-after": "3600" });
    else if (request.settle) respond(200, stored(request));
    else wait(request, respond);
  };
  const working = work({ concurrency: 1, staleAfter: 3600 });
  await until("a second call", () => calls >= 2);
  finish.resolve();
  stop.abort();
  await working;
  assert.deepEqual(
    server.settles.map(({ outcome }) => outcome),
    ["succeeded"],
  );
});

test("a worker whose calls may not wait pauses and still reports", async () => {
  const again = signal();
  ls.job("slow", () => Promise.race([again.promise, new Promise((resolve) => setTimeout(resolve, 500))]));
  let waits = 0;
  server.answer = (request, respond) => {
    if (request.worker_id === undefined) return respond(200, reply({ jobs: [leased("slow")] }, 900));
    if (request.settle) return respond(200, stored(request));
    waits += 1;
    if (waits > 1) again.resolve();
    respond(200, reply({}, 900), { "retry-after": "3600" });
  };
  const working = work({ concurrency: 2, staleAfter: 3600 });
  await until("the end is reported", () => server.settles.length === 1);
  const calls = waits;
  stop.abort();
  await working;
  assert.equal(calls, 1);
});

test("a worker whose token was revoked stops its jobs, and then ends with the reason", async () => {
  const stopped = signal<string>();
  ls.job("slow", async (_: undefined, ctx) => {
    await new Promise((resolve) => ctx.signal.addEventListener("abort", resolve));
    stopped.resolve((ctx.signal.reason as Stopped).why);
  });
  server.answer = (request, respond) => {
    if (request.worker_id === undefined) respond(200, reply({ jobs: [leased("slow")] }));
    else respond(401, '{"error":"unauthorized","message":"the token was revoked"}');
  };
  const working = work({ staleAfter: 3 });
  assert.equal(await soon("the handler stops", stopped.promise), "lease_lost");
  await assert.rejects(working, (error) => error instanceof AccessError && /was revoked/.test(error.message));
});

test("progress that the server refuses is not mistaken for a bad outcome", async () => {
  const finish = signal();
  ls.job("noisy", async (_: undefined, ctx) => {
    ctx.progress({ done: 1 });
    await finish.promise;
  });
  ls.job("quick", async () => 7);
  server.answer = (request, respond) => {
    if (request.worker_id === undefined) respond(200, reply({ jobs: [leased("noisy"), leased("quick")] }));
    else if (request.progress) respond(413, '{"error":"too_large","message":"the body is too large"}');
    else if (request.settle) respond(200, stored(request));
    else wait(request, respond);
  };
  const working = work({ concurrency: 2 });
  await until("a settle", () => server.requests.some(({ settle, progress }) => settle && !progress));
  finish.resolve();
  stop.abort();
  await working;
  assert.deepEqual(new Set(server.settles.map(({ outcome }) => outcome)), new Set(["succeeded"]));
  assert.ok(log.some(({ message }) => /progress of 1 jobs was not stored/.test(message)));
});

test("a worker never holds more leases than a call can list", async () => {
  ls.job("noop", async () => 1);
  let granted = 0;
  let settled = 0;
  let most = 0;
  server.answer = (request, respond) => {
    // Every second call is refused, and the worker then sends one outcome at a time.
    if ((request.settle?.length ?? 0) > 1) return respond(413, '{"error":"too_large","message":"too large"}');
    settled += request.settle?.length ?? 0;
    granted += request.limit;
    most = Math.max(most, granted - settled);
    respond(
      200,
      stored(
        request,
        Array.from({ length: request.limit }, () => leased("noop")),
      ),
    );
  };
  const working = work({ concurrency: 500 });
  await until("many leases", () => settled > 40);
  server.answer = (request, respond) => respond(200, stored(request));
  stop.abort();
  await working;
  assert.ok(most >= 500 && most <= 1_000, `${most} leases at once`);
  for (const { held } of server.requests) assert.ok((held?.length ?? 0) <= 1_000);
});

test("jobs that arrive while the worker stops are released and do not start", async () => {
  let started = 0;
  ls.job("late", async () => void (started += 1));
  let deliver: Respond | undefined;
  server.answer = (request, respond) => {
    if (request.worker_id === undefined) respond(200, reply({}));
    else if (request.settle) respond(200, stored(request));
    else deliver = respond;
  };
  // Both threads want the jobs. So several rounds, in which either can be the first.
  let pauseMs = 50;
  for (let delivered = 0; delivered < 10; ) {
    const before = server.settles.length;
    stop = new AbortController();
    deliver = undefined;
    const working = work();
    const respond: Respond = await until("the waiting call", () => deliver);
    respond(200, reply({ jobs: [leased("late"), leased("late")] }));
    // Meanwhile the I/O thread gets the response. Its message is there before the worker stops.
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, pauseMs);
    stop.abort();
    await working;
    assert.equal(started, 0);
    const settled = server.settles.length - before;
    if (settled === 2) delivered += 1;
    else {
      // The thread was late and has given the response up.
      assert.equal(settled, 0);
      pauseMs *= 2;
      assert.ok(pauseMs < LIMIT * 1000, "the I/O thread gets no response");
    }
  }
  assert.ok(server.signedOff);
  assert.deepEqual(new Set(server.settles.map(({ outcome }) => outcome)), new Set(["not_started"]));
});

test("if the I/O thread ends, the running jobs stop and no other job starts", async () => {
  const started = signal();
  const whys: string[] = [];
  let starts = 0;
  ls.job("slow", async (_: undefined, ctx) => {
    starts += 1;
    started.resolve();
    await new Promise((resolve) => ctx.signal.addEventListener("abort", resolve));
    whys.push((ctx.signal.reason as Stopped).why);
    // The worker is gone, so nothing answers this call.
    await ctx.saveCheckpoint(1);
  });
  server.answer = (request, respond) => {
    // Two more jobs than slots, which wait in the main thread.
    const jobs = [leased("slow"), leased("slow"), leased("slow")];
    if (request.worker_id === undefined) respond(200, reply({ jobs }));
    // A response that lacks what every server sends.
    else void started.promise.then(() => respond(200, "{}"));
  };
  await assert.rejects(work({ concurrency: 1 }), /TypeError/);
  assert.deepEqual([starts, whys], [1, ["lease_lost"]]);
});

for (const order of ["after", "before"] as const) {
  test(`a cancel that an older call reports ${order} the job arrives reaches the handler`, async () => {
    const finish = signal();
    const why = signal<string>();
    ls.job("first", () => finish.promise);
    ls.job("second", async (_: undefined, ctx) => {
      await new Promise((resolve) => ctx.signal.addEventListener("abort", resolve));
      why.resolve((ctx.signal.reason as Stopped).why);
    });
    const second = leased("second");
    const cancel = reply({ cancel: [{ id: second["id"], lease_no: 1 }] }, 15);
    let older: Respond | undefined;
    let delivered = false;
    server.answer = (request, respond) => {
      if (request.worker_id === undefined) return respond(200, reply({ jobs: [leased("first")] }, 15));
      if (!request.settle) {
        // The call that waits for cancels. The server reports each in one call only.
        if (!older) older = respond;
        else wait(request, respond);
        return;
      }
      if (delivered) return respond(200, stored(request));
      delivered = true;
      // As many as requested, so that the worker has no reason to end the older call.
      const jobs = [second, leased("second")].slice(0, request.limit);
      const answers = [() => respond(200, stored(request, jobs)), () => older?.(200, cancel)];
      if (order === "before") answers.reverse();
      // The I/O thread handles the responses in this order.
      answers[0]?.();
      setTimeout(() => answers[1]?.(), 50);
    };
    const working = work({ concurrency: 1 });
    await until("the call that waits for cancels", () => older);
    finish.resolve();
    assert.equal(await soon("the cancel", why.promise), "cancel");
    stop.abort();
    await working;
  });
}
