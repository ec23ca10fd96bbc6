/** The worker against a real server: outcomes, the context, stopping and lost connections. */

import assert from "node:assert/strict";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { z } from "zod";
import { isCutOff } from "../src/calls.js";
import { Cancel, Fail, NotFoundError, Retry, Snooze, Stopped } from "../src/index.js";
import {
  CuttingProxy,
  client,
  onEachEngine,
  signal,
  soon,
  startProgram,
  twoHeartbeats,
  unique,
  until,
  withWorker,
  workersOf,
} from "./support.js";

onEachEngine(({ server, smoke, test }) => {
  smoke("a job runs and its result comes back typed", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const input = z.object({ name: z.string(), times: z.number().default(2) });
    const job = ls.job(unique("greet"), { input, queue, maxAttempts: 7, timeout: 30 }, async (value, ctx) => {
      assert.equal(ctx.attempt, 1);
      assert.deepEqual(ctx.job.tags, ["spring"]);
      assert.deepEqual(ctx.job.metadata, { from_shop: 7 });
      assert.equal(ctx.job.context, "because");
      assert.equal(ctx.job.maxAttempts, 7);
      assert.equal(ctx.job.timeoutSeconds, 30);
      assert.match(ctx.job.traceparent ?? "", /0af7651916cd43dd8448eb211c80319c/);
      return { greeting: `Hello ${value.name}`.repeat(value.times), at: new Date(0) };
    });
    await withWorker(ls, { queues: [queue] }, async () => {
      const handle = await job.enqueue(
        { name: "Ada" },
        {
          tags: ["spring"],
          metadata: { from_shop: 7 },
          context: "because",
          traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        },
      );
      assert.equal(handle.enqueuedAs, "created");
      const result: { greeting: string; at: string } = await handle.result();
      assert.deepEqual(result, { greeting: "Hello AdaHello Ada", at: "1970-01-01T00:00:00.000Z" });
      const kinds = await fetch(`${server().url}/kinds?schemas=true`).then(
        (reply) => reply.json() as Promise<Record<string, unknown>[]>,
      );
      const kind = kinds.find((each) => each["name"] === job.name || each["kind"] === job.name);
      assert.match(JSON.stringify(kind), /"name":\{"type":"string"\}/, "the schema is announced");
      assert.match(JSON.stringify(kind), /"max_attempts":7/, "the defaults are announced");
    });
  });

  test("by default, a worker takes jobs from the queues of its kinds", async () => {
    const ls = client(server());
    const queues = [unique("queue"), "default"];
    const first = ls.job(unique("first"), { queue: queues[0] }, async () => 1);
    const second = ls.job(unique("second"), async () => 2);
    await withWorker(ls, { name: "two-queues" }, async () => {
      assert.deepEqual(
        [await (await first.enqueue()).result(), await (await second.enqueue()).result()],
        [1, 2],
      );
      const workers = await workersOf(server());
      assert.deepEqual(workers.find(({ name }) => name === "two-queues")?.queues.sort(), queues.sort());
    });
  });

  smoke("a worker stores the schedules of its kinds, and logs the one that is refused", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const report = ls.job(unique("report"), { queue }, async (_: { shop: string }) => undefined);
    const elsewhere = ls.declare<{ n: number }>(unique("elsewhere"), { queue });
    const [other, never, good] = [unique("other"), unique("never"), unique("good")];
    ls.cron.declare(other, { cron: "0 0 1 1 *" }, elsewhere.request({ n: 1 }));
    ls.cron.declare(never, { cron: "0 0 30 2 *" }, report.request({ shop: "berlin" }));
    ls.cron.declare(good, { cron: "0 0 1 1 *", zone: "Europe/Berlin" }, report.request({ shop: "berlin" }));
    assert.throws(() => ls.cron.declare(good, { cron: "@daily" }, report.request({ shop: "rome" })), /twice/);
    await withWorker(ls, { queues: [queue] }, async (log) => {
      // It comes last, so the others have been handled.
      const stored = await until("the schedule", () => ls.cron.get(good).catch(() => undefined));
      assert.deepEqual([stored.zone, stored.job?.payload], ["Europe/Berlin", { shop: "berlin" }]);
      const errors = log.filter(({ level }) => level === "error").map(({ message }) => message);
      assert.equal(errors.length, 1);
      assert.match(errors[0] ?? "", new RegExp(`the schedule \`${never}\` is not stored: `));
    });
    for (const name of [other, never]) await assert.rejects(ls.cron.get(name), NotFoundError);
  });

  smoke("handlers retry, fail, snooze and cancel", async () => {
    const ls = client(server());
    const queue = unique("queue");
    let snoozed = 0;
    let retried = 0;
    const end = ls.job(unique("end"), { queue }, async (how: string) => {
      if (how === "retry" && retried++ === 0) throw new Retry(0.05, "busy");
      if (how === "snooze" && snoozed++ === 0) throw new Snooze(0.05);
      if (how === "fail") throw new Fail("no such person");
      if (how === "cancel") throw new Cancel("nobody approved");
      if (how === "throw") throw new TypeError("not a function", { cause: new Error("root") });
      if (how === "odd") throw new Error("a\0b\ud800c");
      if (how === "big") return { n: 2 ** 60 };
      return how;
    });
    // Query builders can be awaited, but are not promises.
    const later = (n: number) => ({
      then: (resolve: (n: number) => void) => setTimeout(() => resolve(n), 10),
    });
    const thenable = ls.job(
      unique("thenable"),
      { queue },
      (n: number) => later(n + 1) as unknown as PromiseLike<number>,
    );
    const sync = ls.job(unique("sync"), { queue }, (n: number) => n + 1);
    await withWorker(ls, { queues: [queue] }, async () => {
      const run = async (how: string, maxAttempts = 3) => (await end.enqueue(how, { maxAttempts })).wait();
      const [retry, snooze, fail, cancel, thrown, big] = await Promise.all([
        run("retry"),
        run("snooze"),
        run("fail"),
        run("cancel"),
        run("throw", 1),
        run("big"),
      ]);
      assert.deepEqual([retry.status, retry.attempts, retry.lastError], ["succeeded", 2, "busy"]);
      assert.deepEqual([snooze.status, snooze.attempts], ["succeeded", 1]);
      assert.deepEqual(
        [fail.status, fail.attempts, fail.lastError],
        ["failed_permanent", 1, "no such person"],
      );
      assert.deepEqual([cancel.status, cancel.lastError], ["cancelled", "nobody approved"]);
      assert.deepEqual(
        [thrown.status, thrown.lastError],
        ["failed_permanent", "TypeError: not a function; cause: root"],
      );
      const odd = await run("odd", 1);
      assert.deepEqual([odd.status, odd.lastError], ["failed_permanent", "a\ufffdb\ufffdc"]);
      assert.equal(await ls.result((await thenable.enqueue(1)).id), 2);
      assert.equal(await (await sync.enqueue(2)).result(), 3);
      assert.equal(big.status, "failed_permanent");
      assert.match(big.lastError ?? "", /result\.n: the integer .* above 2\^53/);
    });
  });

  test("payloads that do not decode fail at once and name the field", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const kind = unique("strict");
    let runs = 0;
    ls.job(kind, { input: z.object({ n: z.number() }), jsonSchema: {}, queue }, async () => void (runs += 1));
    const loose = client(server()).declare<unknown>(kind, { queue });
    await withWorker(ls, { queues: [queue] }, async () => {
      const wrong = await (await loose.enqueue({ n: "one" })).wait();
      assert.equal(wrong.status, "failed_permanent");
      assert.match(wrong.lastError ?? "", /payload: `n`: /);
      const reply = await fetch(`${server().url}/jobs`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: `{"kind":"${kind}","queue":"${queue}","payload":{"n":9007199254740993}}`,
      });
      const { id } = (await reply.json()) as { id: string };
      const big = await ls.wait(id);
      assert.equal(big.status, "failed_permanent");
      assert.match(big.lastError ?? "", /payload\.n: the integer 9007199254740993 is above 2\^53/);
      assert.deepEqual(big.payload, { n: 9007199254740993n }, "the client does not change it either");
      assert.equal(runs, 0);
    });
  });

  test("a result that the server rejects fails the job and no other", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const job = ls.job(unique("large"), { queue }, async (size: number) => "x".repeat(size));
    await withWorker(ls, { queues: [queue] }, async () => {
      const handles = await job.enqueueMany([3 * 1024 * 1024, 10, 20]);
      const ended = await Promise.all(handles.map((handle) => handle.wait()));
      assert.deepEqual(
        ended.map(({ status }) => status),
        ["failed_permanent", "succeeded", "succeeded"],
      );
      assert.match(ended[0]?.lastError ?? "", /result/);
    });
  });

  smoke("progress, checkpoints and follow-ups are stored", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const next = ls.job(unique("next"), { queue }, async (n: number) => n + 1);
    const reported = signal();
    const seen: unknown[] = [];
    const job = ls.job(
      unique("import"),
      { queue, retry: { policy: "fixed", delayMs: 10 } },
      async (_: undefined, ctx) => {
        seen.push(ctx.checkpoint);
        if (ctx.attempt === 1) {
          await ctx.saveCheckpoint({ row: 500 });
          assert.deepEqual(ctx.checkpoint, { row: 500 });
          ctx.progress({ done: 5 });
          await reported.promise;
          await ctx.enqueue(next.request(-1));
          throw new Error("broken");
        }
        await ctx.enqueue(next.request(1));
        return ctx.checkpoint;
      },
    );
    await withWorker(ls, { queues: [queue] }, async () => {
      const handle = await job.enqueue();
      await until("the progress", async () => JSON.stringify((await handle.get()).progress) === '{"done":5}');
      reported.resolve();
      assert.deepEqual(await handle.result(), { row: 500 });
      assert.deepEqual(seen, [null, { row: 500 }]);
      const results: unknown[] = [];
      for await (const { id } of ls.list({ kind: next.name })) results.push(await ls.result(id));
      assert.deepEqual(results, [2], "only the success stores its follow-ups");
    });
  });

  smoke("a cancel reaches the handler, and the job ends as cancelled", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const started = signal();
    const job = ls.job(unique("slow"), { queue }, async (_: undefined, ctx) => {
      started.resolve();
      await pause(3_600_000, undefined, { signal: ctx.signal }).catch(() => {});
      assert.ok(ctx.signal.reason instanceof Stopped);
      throw new Error(`stopped because of ${ctx.signal.reason.why}`);
    });
    // With one slot, the worker has no reason to ask for work. It need not renew the lease for minutes either, and
    // must still learn of the cancel.
    await withWorker(ls, { queues: [queue], concurrency: 1, staleAfter: 3600 }, async () => {
      const handle = await job.enqueue();
      await started.promise;
      assert.equal(await handle.cancel(), "pending");
      const ended = await handle.wait();
      assert.deepEqual([ended.status, ended.lastError], ["cancelled", "stopped because of cancel"]);
    });
  });

  test("a job that is cancelled between its lease and its start does not run", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const ran: number[] = [];
    let cancel = async () => {};
    // Short jobs, so that the worker leases ahead; then one that blocks while others are cancelled.
    const job = ls.job(unique("ahead"), { queue }, async (n: number) => {
      ran.push(n);
      if (n === 200) await cancel();
    });
    const handles = await job.enqueueMany(Array.from({ length: 400 }, (_, n) => n));
    const last = handles.slice(-20);
    cancel = async () => {
      await Promise.all(last.map((handle) => handle.cancel().catch(() => {})));
    };
    await withWorker(ls, { queues: [queue], concurrency: 1 }, async () => {
      const ended = await Promise.all(handles.map((handle) => handle.wait()));
      const cancelled = ended.filter(({ status }) => status === "cancelled");
      assert.ok(cancelled.length > 0);
      for (const { payload } of cancelled) assert.ok(!ran.includes(payload as number), `job ${payload} ran`);
      assert.equal(ran.length + cancelled.length, 400);
    });
  });

  test("a handler that exceeds its timeout is stopped, or abandoned if it ignores that", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const whys: unknown[] = [];
    const release = signal();
    const job = ls.job(unique("late"), { queue, maxAttempts: 1 }, async (obeys: boolean, ctx) => {
      ctx.signal.addEventListener("abort", () => whys.push((ctx.signal.reason as Stopped).why));
      if (obeys) await pause(3_600_000, undefined, { signal: ctx.signal });
      else await release.promise;
    });
    await withWorker(ls, { queues: [queue] }, async () => {
      const handles = await job.enqueueMany([true, false], { timeout: 0.2 });
      const ended = await Promise.all(handles.map((handle) => handle.wait()));
      for (const each of ended) {
        assert.deepEqual([each.status, each.lastError], ["failed_permanent", "timed out after 0.2 s"]);
      }
      assert.deepEqual(whys, ["timeout", "timeout"]);
      release.resolve();
    });
  });

  test("no more jobs run at once than the concurrency allows, and all slots are used", async () => {
    const ls = client(server());
    const queue = unique("queue");
    let running = 0;
    let most = 0;
    const allRun = signal();
    const job = ls.job(unique("busy"), { queue }, async () => {
      running += 1;
      most = Math.max(most, running);
      if (running === 5) allRun.resolve();
      await allRun.promise; // the first five wait for each other
      await pause(20);
      running -= 1;
    });
    const handles = await job.enqueueMany(Array.from({ length: 100 }, () => undefined));
    // A call waits for 20 s. If a slot stayed free until a call ends, the test would take minutes.
    await withWorker(ls, { queues: [queue], concurrency: 5, staleAfter: 3600 }, async () => {
      const ended = await Promise.all(handles.map((handle) => handle.wait()));
      assert.ok(
        ended.every(
          ({ status, attempts, leaseNo }) => status === "succeeded" && attempts === 1 && leaseNo >= 1,
        ),
      );
    });
    assert.equal(most, 5);
  });

  test("urgent jobs start before jobs that were leased earlier", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const order: number[] = [];
    const job = ls.job(unique("ranked"), { queue }, async (n: number) => void order.push(n));
    await ls.enqueueMany([1, 2, 3].map((n) => job.request(n, { priority: n })));
    await withWorker(ls, { queues: [queue], concurrency: 1 }, () =>
      until("three jobs", () => order.length === 3),
    );
    assert.deepEqual(order, [3, 2, 1]);
  });

  test("a worker that loses its connection stops its handlers, and registers again", async () => {
    const proxy = await new CuttingProxy(server().url).start();
    const ls = client(proxy.url);
    const queue = unique("queue");
    const stopped = signal<string>();
    const started = signal();
    let runs = 0;
    const job = ls.job(unique("cut-off"), { queue }, async (_: undefined, ctx) => {
      runs += 1;
      if (runs > 1) return "second run";
      started.resolve();
      await new Promise((resolve) => ctx.signal.addEventListener("abort", resolve));
      stopped.resolve((ctx.signal.reason as Stopped).why);
      return "first run";
    });
    try {
      await withWorker(ls, { queues: [queue], staleAfter: 3 }, async (log) => {
        const direct = client(server());
        const { id } = await job.enqueue();
        await started.promise;
        proxy.blocked = true;
        assert.equal(await soon("the handler stops", stopped.promise), "lease_lost");
        await until("recovery", async () => (await direct.get(id)).status !== "running");
        proxy.blocked = false;
        assert.equal(await direct.result(id), "second run");
        assert.ok(
          log.some(({ message }) => message.includes("declared this worker dead")),
          JSON.stringify(log),
        );
      });
    } finally {
      await proxy.stop();
    }
  });

  smoke("a restart of the server interrupts no job", async () => {
    const proxy = await new CuttingProxy(server().url).start();
    const ls = client(proxy.url);
    const queue = unique("queue");
    const started = signal();
    const finish = signal();
    let runs = 0;
    const job = ls.job(unique("patient"), { queue }, async (n: number, ctx) => {
      if (n === 0) {
        runs += 1;
        started.resolve();
        await finish.promise;
      }
      return ctx.step("after", () => n + 1);
    });
    try {
      await withWorker(ls, { queues: [queue] }, async () => {
        const running = await job.enqueue(0);
        await started.promise;
        await server().restart();
        proxy.target = server().url;
        const next = await job.enqueue(1);
        finish.resolve();
        assert.deepEqual([await running.result(), await next.result()], [1, 2]);
        const ended = await running.get();
        assert.deepEqual([ended.attempts, ended.interruptions], [1, 0]);
        assert.equal(runs, 1);
      });
    } finally {
      await proxy.stop();
    }
  });

  test("lost responses lose no job and settle none twice", async () => {
    const proxy = await new CuttingProxy(server().url).start();
    const ls = client(proxy.url);
    const queue = unique("queue");
    const runs = new Map<number, number>();
    const job = ls.job(unique("unlucky"), { queue }, async (n: number, ctx) => {
      const value = await ctx.step("once", () => n * 2);
      runs.set(n, (runs.get(n) ?? 0) + 1);
      return value;
    });
    let responses = 0;
    // Every fifth response is lost, of each kind of request.
    proxy.losesResponse = () => ++responses % 5 === 0;
    try {
      await withWorker(ls, { queues: [queue], concurrency: 10 }, async () => {
        const direct = client(server());
        const numbers = Array.from({ length: 100 }, (_, n) => n);
        const handles = await Promise.all(numbers.map((n) => job.enqueue(n)));
        const results = await Promise.all(handles.map(({ id }) => direct.result(id)));
        assert.deepEqual(
          results,
          numbers.map((n) => n * 2),
        );
        let jobs = 0;
        for await (const { attempts, status } of direct.list({ queue })) {
          jobs += 1;
          assert.deepEqual([status, attempts], ["succeeded", 1]);
        }
        assert.equal(jobs, 100, "a repeated enqueue creates no second job");
        assert.equal(runs.size, 100);
        assert.ok(proxy.lost > 10, `${proxy.lost} responses were lost`);
      });
    } finally {
      await proxy.stop();
    }
  });

  test("a handler that blocks the event loop keeps its lease", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const program = startProgram("test/programs/worker", {
      LONGSHORE_SERVER: server().url,
      TEST_QUEUE: queue,
      // It renews its leases every ten seconds, so that a slow machine does not cost them.
      TEST_STALE_AFTER: "40",
      TEST_CONCURRENCY: "2",
    });
    const block = ls.declare<string, string>("test_block", { queue });
    const note = ls.declare<string, null>("test_note", { queue });
    const mayEnd = join(await mkdtemp(join(tmpdir(), "longshore-block-")), "may-end");
    await program.line("ready");
    const handle = await block.enqueue(mayEnd);
    await program.line("blocking");
    // A job that is leased by the blocked process is released at once, for others.
    const waiting = await note.enqueue("n");
    await until("it is released", async () => {
      const { status, leaseNo } = await waiting.get();
      return status === "queued" && leaseNo > 0;
    });
    await twoHeartbeats(server(), `program-${queue}`);
    await writeFile(mayEnd, "");
    const ended = await handle.wait();
    assert.deepEqual([ended.status, ended.attempts, ended.interruptions], ["succeeded", 1, 0]);
    const other = await waiting.wait();
    assert.deepEqual([other.status, other.attempts, other.interruptions], ["succeeded", 1, 0]);
    program.child.kill("SIGTERM");
    assert.equal(await program.ended, 0);
  });

  test("a worker that is stopped at once signs off", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const job = ls.job(unique("kind"), { queue }, async () => {});
    const handle = await job.enqueue();
    for (const delay of [0, 5, 20, 50]) {
      const stop = new AbortController();
      if (delay === 0) stop.abort();
      else setTimeout(() => stop.abort(), delay);
      await ls.work({ name: queue, signal: stop.signal, handleSignals: false });
    }
    // The server may still handle the request of a worker that no longer waits for the response.
    await until(
      "all workers have signed off",
      async () => !(await workersOf(server())).some(({ name }) => name === queue),
    );
    const { status, attempts } = await handle.get();
    assert.ok((status === "queued" && attempts === 0) || (status === "succeeded" && attempts === 1), status);
  });

  test("SIGTERM lets running jobs finish and leases no others", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const program = startProgram("test/programs/worker", {
      LONGSHORE_SERVER: server().url,
      TEST_QUEUE: queue,
      TEST_STALE_AFTER: "40",
      TEST_GRACE: "3600",
    });
    const job = ls.declare<string, string>("test_wait", { queue });
    const mayEnd = join(await mkdtemp(join(tmpdir(), "longshore-wait-")), "may-end");
    await program.line("ready");
    const running = await job.enqueue(mayEnd);
    await program.line("waiting");
    program.child.kill("SIGTERM");
    await program.line("stopping");
    const late = await job.enqueue(mayEnd);
    // The renewals continue until the drain ends.
    await twoHeartbeats(server(), `program-${queue}`);
    await writeFile(mayEnd, "");
    assert.equal(await program.ended, 0, program.errors);
    const ended = await running.get();
    assert.deepEqual([ended.status, ended.attempts, ended.interruptions], ["succeeded", 1, 0]);
    assert.equal((await late.get()).status, "queued");
    await until(
      "the worker has signed off",
      async () => !(await workersOf(server())).some(({ name }) => name === `program-${queue}`),
    );
  });

  test("jobs that outlast the grace period are stopped and released uncharged", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const env = { LONGSHORE_SERVER: server().url, TEST_QUEUE: queue, TEST_GRACE: "0.3" };
    const program = startProgram("test/programs/worker", env);
    const nap = ls.declare<number, string>("test_nap", { queue });
    const block = ls.declare<number, string>("test_ignore", { queue });
    await program.line("ready");
    const [obeys, ignores] = [await nap.enqueue(3_600_000), await block.enqueue(3_600_000)];
    await program.line("napping 3600000");
    await program.line("ignoring");
    program.child.kill("SIGTERM");
    assert.equal(await program.ended, 0, program.errors);
    assert.ok(program.lines.includes("nap stopped: shutdown"));
    for (const handle of [obeys, ignores]) {
      const job = await handle.get();
      assert.ok(["queued", "retrying"].includes(job.status), job.status);
      assert.deepEqual([job.attempts, job.interruptions], [0, 0]);
    }
  });
});

test("jobs of a worker without contact stop before the server gives them to others", () => {
  assert.deepEqual([isCutOff(740, 1), isCutOff(760, 1)], [false, true]);
});

test("a worker says why it cannot start", async () => {
  const none = client("http://127.0.0.1:9");
  await assert.rejects(none.work(), /no job is defined/);
  none.job("a", async () => {});
  assert.throws(() => none.job("a", async () => {}), /job `a`: defined twice/);
  await assert.rejects(none.work({ concurrency: 0 }), /concurrency: 0 is out of range/);
  await assert.rejects(none.work({ staleAfter: 1 }), /staleAfter: 1 is out of range/);
});
