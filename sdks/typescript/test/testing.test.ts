/** The queue in memory of `longshore/testing`. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Cancel, Fail, Longshore, Retry, Snooze } from "../src/index.js";
import { testQueue } from "../src/testing.js";

test("manual mode runs jobs when the test says so, and inline mode within enqueue", async () => {
  const ls = new Longshore();
  const seen: unknown[] = [];
  const job = ls.job("note", async (input: { at: Date | string }) => {
    seen.push(input);
  });
  const manual = testQueue(ls);
  await job.enqueue({ at: new Date(0) });
  assert.deepEqual(seen, []);
  manual.assertEnqueued(job, { at: new Date(0) });
  manual.assertEnqueued(job, (input) => input.at === "1970-01-01T00:00:00.000Z");
  assert.throws(
    () => manual.assertEnqueued(job, { at: "never" }),
    /no job `note` was enqueued with .*never.*\n {2}note/s,
  );
  assert.throws(() => manual.assertNotEnqueued(job), /was enqueued/);
  assert.equal((await manual.runPending()).succeeded, 1);
  assert.deepEqual(seen, [{ at: "1970-01-01T00:00:00.000Z" }]);
  manual.restore();
  using _inline = testQueue(ls, { mode: "inline" });
  await job.enqueue({ at: "now" });
  assert.equal(seen.length, 2);
});

test("delays, retries and snoozes follow the clock of the queue", async () => {
  const ls = new Longshore();
  const outcomes = [new Retry(10, "busy"), new Snooze(20), new Error("broken"), null];
  const job = ls.job("flaky", { retry: { policy: "fixed", delayMs: 5000 } }, async () => {
    const next = outcomes.shift();
    if (next) throw next;
    return "done";
  });
  using queue = testQueue(ls);
  const handle = await job.enqueue(undefined, { delay: 60 });
  assert.deepEqual(await queue.runPending(), { succeeded: 0, failed: 0, cancelled: 0, postponed: 0 });
  const start = queue.now.getTime();
  assert.deepEqual(await queue.runAll(), { succeeded: 1, failed: 2, cancelled: 0, postponed: 1 });
  assert.equal(queue.now.getTime() - start, (60 + 10 + 20 + 5) * 1000);
  assert.equal(await handle.result(), "done");
  assert.equal((await handle.get()).attempts, 3);
});

test("Fail and Cancel end a job at once", async () => {
  const ls = new Longshore();
  const fail = ls.job("fail", async () => {
    throw new Fail("no such person");
  });
  const cancel = ls.job("cancel", async () => {
    throw new Cancel("nobody approved");
  });
  using _ = testQueue(ls, { mode: "inline" });
  await assert.rejects((await fail.enqueue()).result(), {
    name: "JobFailedError",
    message: /no such person/,
  });
  await assert.rejects((await cancel.enqueue()).result(), {
    name: "JobCancelledError",
    message: /nobody approved/,
  });
});

test("steps are done once, and sleeps and events continue the job", async () => {
  const ls = new Longshore();
  const done: string[] = [];
  const job = ls.job("refund", async (order: number, ctx) => {
    const receipt = await ctx.step("reserve", () => {
      done.push("reserve");
      return { order, at: new Date(0) };
    });
    const approval = await ctx.event<{ by: string }>(`approved:${order}`, { within: 3 * 86_400 });
    if (!approval) throw new Cancel("nobody approved");
    await ctx.sleep("cooling-off", 86_400);
    await ctx.step("pay", () => void done.push("pay"));
    return `${receipt.order} ${receipt.at} ${approval.by}`;
  });
  using queue = testQueue(ls);
  const handle = await job.enqueue(42);
  await queue.runPending();
  assert.equal((await handle.get()).status, "queued");
  assert.deepEqual(
    (await ls.steps(handle.id)).map(({ name, status }) => [name, status]),
    [
      ["reserve", "done"],
      ["event:approved:42", "waiting"],
    ],
  );
  await ls.emit("approved:42", { by: "ada" });
  await queue.runPending();
  await queue.advance(86_400);
  await queue.runPending();
  assert.equal(await handle.result(), "42 1970-01-01T00:00:00.000Z ada");
  assert.deepEqual(done, ["reserve", "pay"]);

  const ignored = await job.enqueue(43);
  await queue.runAll();
  assert.equal((await ignored.get()).status, "cancelled");
});

test("a handler that swallows its suspension neither succeeds nor fails", async () => {
  const ls = new Longshore();
  let runs = 0;
  const job = ls.job("stubborn", async (_: undefined, ctx) => {
    runs += 1;
    try {
      await ctx.sleep("nap", 60);
    } catch (error) {
      if (runs > 1) throw error;
      return "swallowed";
    }
    return "slept";
  });
  using queue = testQueue(ls);
  const handle = await job.enqueue();
  await queue.runPending();
  assert.equal((await handle.get()).status, "queued");
  await queue.runAll();
  assert.equal(await handle.result(), "slept");
  assert.equal(runs, 2);
});

test("waits of concurrent branches end one by one, and any() says what came first", async () => {
  const ls = new Longshore();
  const both = ls.job("both", async (_: undefined, ctx) =>
    Promise.all([ctx.event<number>("one"), ctx.event<number>("two"), ctx.step("work", () => 3)]),
  );
  const race = ls.job("race", async (_: undefined, ctx) => {
    const first = await ctx.any("decision", [{ event: "yes" }, { event: "no" }, { sleep: 60 }]);
    return [first.index, first.payload];
  });
  using queue = testQueue(ls);
  const [a, b] = [await both.enqueue(), await race.enqueue()];
  await queue.runPending();
  await ls.emit("two", 2);
  await queue.runPending();
  assert.equal((await a.get()).status, "queued");
  await ls.emit("one", 1);
  await ls.emit("no", "because");
  await queue.runPending();
  assert.deepEqual(await a.result(), [1, 2, 3]);
  assert.deepEqual(await b.result(), [1, "because"]);
});

test("mistakes with steps fail the job and say what to change", async () => {
  const ls = new Longshore();
  const twice = ls.job("twice", async (_: undefined, ctx) => {
    await ctx.step("a", () => 1);
    await ctx.step("a", () => 2);
  });
  const nested = ls.job("nested", async (_: undefined, ctx) => {
    await ctx.step("outer", async () => ctx.sleep("inner", 1));
  });
  using queue = testQueue(ls);
  const [first, second] = [await twice.enqueue(), await nested.enqueue()];
  await queue.runPending();
  assert.match((await first.get()).lastError ?? "", /step `a`: the name is used twice/);
  assert.match((await second.get()).lastError ?? "", /sleep `inner`: cannot be used inside of step `outer`/);
  assert.equal((await second.get()).status, "failed_permanent");
});

test("children, flows and follow-ups run in memory", async () => {
  const ls = new Longshore();
  const parcel = ls.job("parcel", async (n: number) => {
    if (n === 3) throw new Fail("lost");
    return `label ${n}`;
  });
  const mailed = ls.job("mailed", async () => {});
  const order = ls.job("order", async (_: undefined, ctx) => {
    await ctx.spawn(
      "parcels",
      [1, 2].map((n) => parcel.request(n)),
    );
    const labels = await ctx.join<string>("shipped");
    await ctx.enqueue(mailed.request());
    return labels.results();
  });
  const sum = ls.job("sum", async (_: undefined, ctx) => [
    await ctx.input<string>("a"),
    Object.keys(await ctx.inputs()),
  ]);
  const alarm = ls.job("alarm", async () => {});
  using queue = testQueue(ls, { mode: "inline" });
  assert.deepEqual(await (await order.enqueue()).result(), ["label 1", "label 2"]);
  queue.assertEnqueued(mailed);

  const flow = await ls
    .flow("good")
    .task("a", parcel.request(1))
    .task("b", parcel.request(2))
    .task("sum", sum.request(), { after: ["a", "b"] })
    .onFailure(alarm.request())
    .start();
  assert.equal((await ls.getFlow(flow.id)).status, "succeeded");
  const tasks = await ls.flowTasks(flow.id);
  const result = await ls.result(tasks.find(({ task }) => task === "sum")?.id ?? "");
  assert.deepEqual(result, ["label 1", ["a", "b"]]);
  queue.assertNotEnqueued(alarm);

  const bad = await ls
    .flow("bad")
    .task("a", parcel.request(3))
    .task("next", sum.request(), { after: "a" })
    .task("clean up", mailed.request(), { after: { task: "a", condition: "ended" } })
    .onFailure(alarm.request())
    .start();
  assert.equal((await ls.getFlow(bad.id)).status, "failed");
  assert.deepEqual(
    (await ls.flowTasks(bad.id)).map(({ task, status, skipped }) => [task, status, skipped]),
    [
      ["a", "failed_permanent", false],
      ["next", "cancelled", true],
      ["clean up", "succeeded", false],
    ],
  );
  queue.assertEnqueued(alarm);
});

test("keys, cancel and retry work in memory; what does not says so", async () => {
  const ls = new Longshore();
  const job = ls.job("keyed", async (n: number) => n);
  using queue = testQueue(ls);
  const first = await job.enqueue(1, { uniqueKey: "k", idempotencyKey: "i" });
  assert.equal((await job.enqueue(2, { uniqueKey: "k" })).id, first.id);
  assert.equal((await job.enqueue(2, { idempotencyKey: "i" })).enqueuedAs, "existing");
  assert.equal((await job.enqueue(3, { uniqueKey: "k", uniqueMode: "replace" })).enqueuedAs, "replaced");
  assert.equal(await first.cancel(), "cancelled");
  await assert.rejects(first.cancel(), { slug: "conflict", jobStatus: "cancelled" });
  await assert.rejects(ls.get("01990000-0000-7000-8000-000000000000"), { slug: "not_found" });
  await first.retry();
  await assert.rejects(first.result(), /has not ended.*call runPending/);
  await queue.runPending();
  assert.equal(await first.result(), 3);
  await assert.rejects(ls.queues.list(), /does not support this; use startDev/);
});

test("a job in memory has the history, the due time and the contents that the server would show", async () => {
  const ls = new Longshore();
  const outcomes = [new Error("one"), new Snooze(20), new Retry(30, "two"), new Fail("end")];
  const job = ls.job("flaky", { retry: { policy: "fixed", delayMs: 5000 } }, async () => {
    throw outcomes.shift();
  });
  using queue = testQueue(ls);
  const handle = await job.enqueue();
  await queue.runPending();
  assert.equal(new Date((await handle.get()).runAt).getTime() - queue.now.getTime(), 5_000);
  await queue.runAll();
  const ended = await handle.get();
  assert.deepEqual(
    ended.errors.map(({ what, error, attempt, leaseNo }) => [what, error, attempt, leaseNo]),
    [
      ["failed", "one", 1, 1],
      ["snoozed", null, 2, 2],
      ["failed", "two", 2, 3],
      ["failed", "end", 3, 4],
    ],
  );
  const first = ls.declare<number>("first", { queue: "a" });
  const second = ls.declare<number>("second", { queue: "b", priority: 2 });
  const keyed = await first.enqueue(1, { uniqueKey: "k", tags: ["t"], delay: 60, maxAttempts: 9 });
  const soon = new Date((await keyed.get()).runAt);
  await second.enqueue(2, { uniqueKey: "k", uniqueMode: "preserve_run_at" });
  const replaced = await keyed.get();
  assert.deepEqual(
    [replaced.kind, replaced.queue, replaced.priority, replaced.payload, replaced.tags, replaced.maxAttempts],
    ["second", "b", 2, 2, [], 3],
  );
  assert.deepEqual(new Date(replaced.runAt), soon);
});

test("what a handler does after its end has no effect in memory either", async () => {
  const ls = new Longshore();
  let late: Promise<unknown>[] = [];
  const release = Promise.resolve();
  const job = ls.job("hasty", async (_: undefined, ctx) => {
    late = [
      ctx.step("floating", () => release.then(() => release).then(() => 1)),
      release.then(() => release).then(() => ctx.saveCheckpoint(1)),
    ];
  });
  using queue = testQueue(ls);
  const handle = await job.enqueue();
  await queue.runPending();
  for (const each of await Promise.allSettled(late)) assert.equal(each.status, "rejected");
  assert.deepEqual(await ls.steps(handle.id), []);
});

test("jobs of a transaction are stored in memory and do not run within it", async () => {
  const ls = new Longshore();
  let runs = 0;
  const job = ls.job("mail", async (_: { to: string }) => void (runs += 1));
  using queue = testQueue(ls, { mode: "inline" });
  const tx = { query: () => assert.fail("a test without a database") };
  const handle = await job.enqueueIn(tx, { to: "ada" }, { uniqueKey: "k" });
  assert.equal((await job.enqueueIn(tx, { to: "bob" }, { uniqueKey: "k" })).enqueuedAs, "existing");
  assert.equal(runs, 0);
  queue.assertEnqueued(job, { to: "ada" });
  await queue.runPending();
  assert.deepEqual([runs, (await handle.get()).status], [1, "succeeded"]);
});

test("flows in memory have keys, and open ones are refused", async () => {
  const ls = new Longshore();
  const job = ls.job("task", async (n: number) => n);
  using queue = testQueue(ls);
  const start = () => ls.flow("f").idempotencyKey("key").task("a", job.request(1)).start();
  const ids = [(await start()).id, (await start()).id];
  assert.equal(ids[0], ids[1]);
  assert.equal(queue.jobs.length, 1);
  await assert.rejects(
    ls.flow("f").open().start(),
    /a flow with open\(\): a queue in memory does not support/,
  );
});
