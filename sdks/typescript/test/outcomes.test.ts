/** Handlers that throw, return or ignore what nobody expects, against a real server. */

import assert from "node:assert/strict";
import { AsyncLocalStorage } from "node:async_hooks";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { Fail } from "../src/index.js";
import { optionsOfThread } from "../src/worker.js";
import { client, onEachEngine, signal, unique, until, withWorker } from "./support.js";

onEachEngine(({ server, test }) => {
  test("whatever a handler throws ends its attempt with a message", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const loop = new Error("loop");
    loop.cause = new Error("inner", { cause: loop });
    const hidden = new Error("hidden");
    Object.defineProperty(hidden, "message", {
      get: () => {
        throw new Error("no message for you");
      },
    });
    const thrown: [string, unknown, RegExp][] = [
      ["no prototype", Object.create(null), /^\[Object: null prototype\] \{\}$/],
      ["object", { code: 5 }, /^\{ code: 5 \}$/],
      ["undefined", undefined, /^undefined$/],
      ["symbol", Symbol("s"), /^Symbol\(s\)$/],
      ["loop", loop, /^loop; cause: inner; cause: the same error$/],
      ["several", new AggregateError([new Error("v4"), new Error("v6")]), /^AggregateError; errors: v4, v6$/],
      ["Fail", new Fail("no file", { cause: new Error("ENOENT") }), /^no file; cause: ENOENT$/],
      ["wrapped", new Error("read: ENOENT", { cause: new Error("ENOENT") }), /^read: ENOENT$/],
      ["hidden", hidden, /cannot be shown/],
    ];
    const job = ls.job(unique("throw"), { queue, maxAttempts: 1 }, async (index: number) => {
      throw thrown[index]?.[1];
    });
    await withWorker(ls, { queues: [queue] }, async () => {
      const handles = await job.enqueueMany(thrown.keys());
      const ended = await Promise.all(handles.map((handle) => handle.wait()));
      for (const [index, { status, lastError }] of ended.entries()) {
        const [name, , message] = thrown[index]!;
        assert.equal(status, "failed_permanent", name);
        assert.match(lastError ?? "", message, name);
      }
    });
  });

  test("a handler does not get the async context of another job", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const tenant = new AsyncLocalStorage<number>();
    const seen: unknown[] = [];
    const job = ls.job(unique("tenant"), { queue }, async (n: number) => {
      seen.push(tenant.getStore());
      // As tracing libraries do. It lasts until the end of the synchronous code that is running.
      tenant.enterWith(n);
    });
    await job.enqueueMany([1, 2, 3, 4, 5]);
    await tenant.run(-1, () =>
      withWorker(ls, { queues: [queue], concurrency: 2 }, () => until("five jobs", () => seen.length === 5)),
    );
    assert.deepEqual(seen, [-1, -1, -1, -1, -1], "it is that of the call of work()");
  });

  test("a follow-up that the handler did not await is stored", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const next = ls.declare<number>(unique("next"), { queue: unique("other") });
    const job = ls.job(unique("hasty"), { queue }, async (_: undefined, ctx) => {
      void ctx.enqueue(next.request(1));
      void ctx.enqueue(next.request(2));
    });
    await withWorker(ls, { queues: [queue] }, async () => {
      await (await job.enqueue()).result();
      const payloads: unknown[] = [];
      for await (const { payload } of ls.list({ kind: next.name })) payloads.push(payload);
      assert.deepEqual(payloads.sort(), [1, 2]);
    });
  });

  test("a cancelled handler that ignores its signal is abandoned at its timeout", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const started = signal();
    const release = signal();
    const job = ls.job(unique("deaf"), { queue, timeout: 1 }, async () => {
      started.resolve();
      await release.promise;
    });
    await withWorker(ls, { queues: [queue], concurrency: 1 }, async () => {
      const handle = await job.enqueue();
      await started.promise;
      await handle.cancel();
      assert.equal((await handle.wait()).status, "cancelled");
      release.resolve();
    });
  });

  test("values that no request can carry fail their jobs, and delay no other", async () => {
    const ls = client(server());
    const queue = unique("queue");
    // The server closes the connection instead of reading such a body.
    const huge = "x".repeat(40_000_000);
    const result = ls.job(unique("result"), { queue }, async () => huge);
    const step = ls.job(unique("step"), { queue }, async (_: undefined, ctx) => ctx.step("huge", () => huge));
    const event = ls.job(unique("spawn"), { queue }, async (_: undefined, ctx) =>
      ctx.spawn("huge", [small.request(huge)]),
    );
    const small = ls.job(unique("small"), { queue }, async (text: string) => text);
    await withWorker(ls, { queues: [queue] }, async (log) => {
      for (const job of [result, step, event]) {
        const ended = await (await job.enqueue()).wait();
        assert.equal(ended.status, "failed_permanent");
        assert.match(ended.lastError ?? "", /bytes of JSON are more than the server accepts/);
      }
      assert.equal(await (await small.enqueue("a")).result(), "a");
      assert.deepEqual(
        log.filter(({ message }) => message.includes("trying again")),
        [],
      );
    });
  });

  test("too much progress is not stored, and harms no job", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const done = signal();
    const noisy = ls.job(unique("noisy"), { queue }, async (_: undefined, ctx) => {
      ctx.progress("x".repeat(20_000_000));
      await done.promise;
      return "noisy";
    });
    const other = ls.job(unique("other"), { queue }, async (n: number) => n);
    await withWorker(ls, { queues: [queue] }, async (log) => {
      const handle = await noisy.enqueue();
      await until("a warning", () => log.some(({ message }) => message.includes("progress")));
      const others = await other.enqueueMany([1, 2, 3]);
      assert.deepEqual(await Promise.all(others.map((each) => each.result())), [1, 2, 3]);
      done.resolve();
      assert.equal(await handle.result(), "noisy");
    });
  });

  test("a log function that throws stops no job", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const fail = ls.job(unique("fail"), { queue, maxAttempts: 1 }, async () => {
      throw new Error("broken");
    });
    const stop = new AbortController();
    const { error } = console;
    const printed: unknown[][] = [];
    console.error = (...values) => void printed.push(values);
    try {
      const working = ls.work({
        signal: stop.signal,
        handleSignals: false,
        concurrency: 1,
        log: () => {
          throw new Error("the disk is full");
        },
      });
      const handles = await fail.enqueueMany([undefined, undefined]);
      for (const handle of handles) {
        assert.equal((await handle.wait()).status, "failed_permanent");
      }
      stop.abort();
      await working;
    } finally {
      console.error = error;
    }
    assert.ok(printed.some((values) => /the log function of the worker threw/.test(String(values[0]))));
  });

  test("a worker can be given all the time in the world to stop", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const started = signal();
    const whys: unknown[] = [];
    const job = ls.job(unique("patient"), { queue }, async (_: undefined, ctx) => {
      ctx.signal.addEventListener("abort", () => whys.push(ctx.signal.reason));
      started.resolve();
      await pause(300);
    });
    const handle = await job.enqueue();
    const stop = new AbortController();
    const working = ls.work({ signal: stop.signal, handleSignals: false, grace: Number.POSITIVE_INFINITY });
    await started.promise;
    stop.abort();
    await working;
    assert.equal((await handle.get()).status, "succeeded");
    assert.deepEqual(whys, []);
    await assert.rejects(ls.work({ grace: Number.NaN }), /grace: NaN is out of range/);
  });
});

test("the I/O thread does not load the code that the program preloads", () => {
  for (const options of [
    ["--import", "./tracing.js"],
    ["--require=a"],
    ["-r", "b"],
    ["--input-type=module"],
  ]) {
    assert.deepEqual(optionsOfThread(options), { execArgv: [] });
  }
  // Node refuses this one if it is given to a thread.
  assert.deepEqual(optionsOfThread(["--max-old-space-size=400", "--enable-source-maps"]), {});
});
