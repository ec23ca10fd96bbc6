/** Durable steps, waits, children and flows against a real server. */

import assert from "node:assert/strict";
import { Cancel, Fail } from "../src/index.js";
import { CuttingProxy, client, onEachEngine, unique, until, withWorker } from "./support.js";

onEachEngine(({ server, smoke, test }) => {
  smoke("a step that is done is not repeated", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const done: string[] = [];
    const job = ls.job(
      unique("steps"),
      { queue, retry: { policy: "fixed", delayMs: 10 } },
      async (_: undefined, ctx) => {
        const first = await ctx.step("first", () => {
          done.push("first");
          return { at: new Date(0) };
        });
        const both = await Promise.all(
          ["a", "b"].map((name) =>
            ctx.step(name, () => {
              done.push(name);
              return name;
            }),
          ),
        );
        if (done.length < 4) {
          done.push("failure");
          throw new Error("broken");
        }
        return [first.at, ...both];
      },
    );
    await withWorker(ls, { queues: [queue] }, async () => {
      const handle = await job.enqueue();
      assert.deepEqual(await handle.result(), ["1970-01-01T00:00:00.000Z", "a", "b"]);
      assert.deepEqual(done.sort(), ["a", "b", "failure", "first"]);
      assert.deepEqual((await ls.steps(handle.id)).map(({ name }) => name).sort(), ["a", "b", "first"]);
    });
  });

  smoke("sleeps and events suspend the job, which occupies no slot", async () => {
    const ls = client(server());
    const queue = unique("queue");
    let attempts = 0;
    const job = ls.job(unique("refund"), { queue }, async (order: string, ctx) => {
      attempts += 1;
      await ctx.step("reserve", () => "reserved");
      await ctx.sleep("cooling-off", 0.2);
      const approval = await ctx.event<{ by: string }>(`approved:${order}`);
      const late = await ctx.event(`never:${order}`, { within: 0.1 });
      const first = await ctx.any("decision", [
        { event: `never:${order}` },
        { event: `approved:${order}` },
        { sleep: 60 },
      ]);
      return [approval.by, late === undefined, first.index];
    });
    const other = ls.job(unique("other"), { queue }, async () => "ran");
    await withWorker(ls, { queues: [queue], concurrency: 1 }, async () => {
      const order = unique("order");
      const handle = await job.enqueue(order);
      await until("the wait for the event", async () =>
        (await ls.steps(handle.id)).some(
          ({ name, status }) => name === `event:approved:${order}` && status === "waiting",
        ),
      );
      assert.equal(await (await other.enqueue()).result(), "ran");
      assert.equal((await handle.get()).status, "queued");
      await ls.emit(`approved:${order}`, { by: "ada" });
      assert.deepEqual(await handle.result(), ["ada", true, 1]);
      assert.ok(attempts >= 3);
      assert.equal((await handle.get()).attempts, 1, "waiting is not charged");
    });
  });

  test("a handler that swallows its suspension neither succeeds nor fails", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const errors: unknown[] = [];
    let runs = 0;
    const job = ls.job(unique("stubborn"), { queue }, async (_: undefined, ctx) => {
      runs += 1;
      try {
        await ctx.sleep("nap", 0.2);
      } catch (error) {
        errors.push((error as Error).name, ctx.signal.aborted);
        // What the handler does now has no effect.
        await ctx.step("too late", () => 1).catch(() => errors.push("refused"));
        throw new Fail("wrapped", { cause: error });
      }
      return "slept";
    });
    await withWorker(ls, { queues: [queue] }, async () => {
      const handle = await job.enqueue();
      assert.equal(await handle.result(), "slept");
      assert.deepEqual(errors, ["AbortError", true, "refused"]);
      assert.equal(runs, 2);
      assert.deepEqual((await handle.get()).errors, []);
    });
  });

  test("a wait that nobody awaits when the job is suspended does not end the process", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const job = ls.job(unique("early"), { queue }, async (name: string, ctx) => {
      const early = ctx.event<string>(`early:${name}`);
      await ctx.sleep("nap", 0.1);
      return early;
    });
    const rejections: unknown[] = [];
    const note = (error: unknown) => rejections.push(error);
    process.on("unhandledRejection", note);
    await withWorker(ls, { queues: [queue] }, async () => {
      const name = unique("name");
      const handle = await job.enqueue(name);
      await until("the second wait", async () =>
        (await ls.steps(handle.id)).some((step) => step.status === "done"),
      );
      await ls.emit(`early:${name}`, "bird");
      assert.equal(await handle.result(), "bird");
    });
    process.off("unhandledRejection", note);
    assert.deepEqual(rejections, []);
  });

  test("a job suspends only when none of its steps is active", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const done: string[] = [];
    const job = ls.job(unique("branches"), { queue }, async (name: string, ctx) =>
      Promise.all([
        ctx.event<string>(`go:${name}`),
        ctx.step("slow", async () => {
          await new Promise((resolve) => setTimeout(resolve, 300));
          done.push("slow");
          return "slow";
        }),
      ]),
    );
    await withWorker(ls, { queues: [queue] }, async () => {
      const name = unique("name");
      const handle = await job.enqueue(name);
      await until("the step", async () => (await ls.steps(handle.id)).some((step) => step.name === "slow"));
      await ls.emit(`go:${name}`, "gone");
      assert.deepEqual(await handle.result(), ["gone", "slow"]);
      assert.deepEqual(done, ["slow"]);
    });
  });

  test("mistakes with steps fail the job at once", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const twice = ls.job(unique("twice"), { queue }, async (_: undefined, ctx) => {
      await ctx.step("a", () => 1);
      await ctx.step("a", () => 2);
    });
    const large = ls.job(unique("large"), { queue }, async (_: undefined, ctx) => {
      await ctx.step("a", () => "x".repeat(1024 * 1024 + 1));
    });
    const big = ls.job(unique("big"), { queue }, async (_: undefined, ctx) => {
      await ctx.step("count", () => ({ rows: 2n }));
    });
    const childless = ls.job(unique("childless"), { queue }, async (_: undefined, ctx) => ctx.join("all"));
    await withWorker(ls, { queues: [queue] }, async () => {
      const alone = await (await childless.enqueue()).wait();
      assert.match(alone.lastError ?? "", /^join `all`: this job has no children; a job can join only/);
      const third = await (await big.enqueue()).wait();
      assert.deepEqual([third.status, third.attempts], ["failed_permanent", 1]);
      assert.match(third.lastError ?? "", /step `count`\.rows: a bigint is not JSON; convert it to a string/);
      const [first, second] = await Promise.all([
        (await twice.enqueue()).wait(),
        (await large.enqueue()).wait(),
      ]);
      assert.deepEqual([first.status, first.attempts], ["failed_permanent", 1]);
      assert.match(first.lastError ?? "", /step `a`: the name is used twice/);
      assert.equal(second.status, "failed_permanent");
      assert.match(second.lastError ?? "", /step `a`: .*value/);
    });
  });

  smoke("children are spawned once, and join returns how they ended", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const parcel = ls.job(unique("parcel"), { queue, maxAttempts: 1 }, async (n: number) => {
      if (n === 2) throw new Fail("lost at sea");
      return `label ${n}`;
    });
    let runs = 0;
    const order = ls.job(unique("order"), { queue }, async (count: number, ctx) => {
      runs += 1;
      await ctx.spawn(
        "parcels",
        Array.from({ length: count }, (_, n) => parcel.request(n)),
      );
      const shipped = await ctx.join<string>("shipped");
      assert.equal(shipped.all.length, count);
      if (count > 2) {
        assert.throws(() => shipped.results(), /lost at sea/);
        return shipped.failed.map(({ error }) => error);
      }
      return shipped.results().sort();
    });
    await withWorker(ls, { queues: [queue], concurrency: 2 }, async () => {
      assert.deepEqual(await (await order.enqueue(2)).result(), ["label 0", "label 1"]);
      const failing = await order.enqueue(3);
      assert.deepEqual(await failing.result(), ["lost at sea"]);
      assert.ok(runs >= 3);
      assert.equal((await ls.flowTasks(failing.id)).length, 3);
    });
  });

  test("lost responses repeat no step and lose no wait and no child", async () => {
    const proxy = await new CuttingProxy(server().url).start();
    const ls = client(proxy.url);
    const queue = unique("queue");
    const steps: string[] = [];
    const parcel = ls.job(unique("parcel"), { queue }, async (n: number) => n * 10);
    const order = ls.job(unique("order"), { queue }, async (name: string, ctx) => {
      const first = await ctx.step("first", () => {
        steps.push(`first ${name}`);
        return 1;
      });
      await ctx.sleep("nap", 0.05);
      const by = await ctx.event<string>(`approved:${name}`);
      await ctx.spawn(
        "parcels",
        [1, 2, 3].map((n) => parcel.request(n)),
      );
      const shipped = await ctx.join<number>("shipped");
      const last = await ctx.step("last", () => {
        steps.push(`last ${name}`);
        return 2;
      });
      return [first, by, shipped.results().sort(), last];
    });
    let responses = 0;
    proxy.losesResponse = () => ++responses % 4 === 0;
    try {
      await withWorker(ls, { queues: [queue] }, async () => {
        const direct = client(server());
        const names = Array.from({ length: 8 }, () => unique("order"));
        const handles = await Promise.all(names.map((name) => order.enqueue(name)));
        for (const name of names) await direct.emit(`approved:${name}`, "ada");
        for (const { id } of handles) assert.deepEqual(await direct.result(id), [1, "ada", [10, 20, 30], 2]);
        for (const { id } of handles) {
          const { attempts, errors } = await direct.get(id);
          assert.deepEqual([attempts, errors], [1, []], "nothing failed");
          assert.equal((await direct.flowTasks(id)).length, 3, "no child was spawned twice");
        }
        // A step whose saved value is confirmed late is not done again.
        assert.equal(steps.length, new Set(steps).size, steps.join(", "));
        assert.ok(proxy.lost > 10, `${proxy.lost} responses were lost`);
      });
    } finally {
      await proxy.stop();
    }
  });

  smoke("a task of a flow reads the results of the tasks before it", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const fetched = ls.job(unique("fetch"), { queue }, async (url: string) => ({ url, size: url.length }));
    const index = ls.job(unique("index"), { queue }, async (_: undefined, ctx) => {
      const page = await ctx.input<{ url: string }>("page");
      await assert.rejects(ctx.input("pgae"), /does not wait for a task of this name; it waits for `.*`/);
      return [page.url, Object.keys(await ctx.inputs()).sort()];
    });
    const done = ls.job(unique("done"), { queue }, async (text: string) => text);
    await withWorker(ls, { queues: [queue] }, async () => {
      const flow = await ls
        .flow("crawl")
        .task("page", fetched.request("https://example.com/"))
        .task("feed", fetched.request("https://example.com/feed"))
        .task("index", index.request(), { after: ["page", "feed"] })
        .onSuccess(done.request("crawled"))
        .deadline(60)
        .start();
      const tasks = await ls.flowTasks(flow.id);
      const id = tasks.find(({ task }) => task === "index")?.id ?? "";
      assert.deepEqual(await ls.result(id), ["https://example.com/", ["feed", "page"]]);
      await until("the callback", async () => {
        for await (const job of ls.list({ kind: done.name })) return job.result === "crawled";
        return false;
      });
      assert.equal((await ls.getFlow(flow.id)).status, "succeeded");
    });
  });

  test("an approval that does not come cancels the job", async () => {
    const ls = client(server());
    const queue = unique("queue");
    const job = ls.job(unique("approval"), { queue }, async (_: undefined, ctx) => {
      const approval = await ctx.event("nobody-approves", { within: 0.1 });
      if (approval === undefined) throw new Cancel("nobody approved it in time");
    });
    await withWorker(ls, { queues: [queue] }, async () => {
      const ended = await (await job.enqueue()).wait();
      assert.deepEqual([ended.status, ended.lastError], ["cancelled", "nobody approved it in time"]);
    });
  });
});
