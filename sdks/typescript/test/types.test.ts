/** Types at both ends. Most of this file is checked by the compiler. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { type } from "arktype";
import * as v from "valibot";
import { z } from "zod";
import { type JobHandle, type Jsonified, Longshore } from "../src/index.js";
import { jsonSchemaOf } from "../src/schema.js";
import { testQueue } from "../src/testing.js";

type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false;
function typesAreEqual<A, B>(equal: Equal<A, B>): void {
  assert.equal(equal, true);
}

test("callers pass the input type of a schema, and the handler gets its output type", async () => {
  const ls = new Longshore();
  const schema = z.object({ to: z.string(), copies: z.number().default(1), at: z.coerce.date() });
  const job = ls.job("print", { input: schema }, async (input) => {
    typesAreEqual<typeof input, { to: string; copies: number; at: Date }>(true);
    return { printed: input.copies, at: input.at, note: undefined };
  });
  using queue = testQueue(ls, { mode: "inline" });
  const handle = await job.enqueue({ to: "ada", at: new Date(0) });
  const result = await handle.result();
  typesAreEqual<typeof result, { printed: number; at: string; note: undefined }>(true);
  assert.deepEqual(result, { printed: 1, at: "1970-01-01T00:00:00.000Z" });
  // @ts-expect-error a field is missing
  await assert.rejects(job.enqueue({ at: "2030-01-01" }), /input of `print`: `to`/);
  // @ts-expect-error the input is missing
  await assert.rejects(job.enqueue(), /input of `print`/);
  assert.equal(queue.jobs.length, 1);
});

test("schemas of valibot and arktype work too", async () => {
  const ls = new Longshore();
  const a = ls.job("a", { input: v.object({ n: v.number() }) }, async ({ n }) => n + 1);
  const b = ls.job("b", { input: type({ s: "string" }) }, async ({ s }) => s.length);
  using _ = testQueue(ls, { mode: "inline" });
  const first: number = await (await a.enqueue({ n: 1 })).result();
  const second: number = await (await b.enqueue({ s: "four" })).result();
  assert.deepEqual([first, second], [2, 4]);
  // @ts-expect-error a number is not a string
  await assert.rejects(b.enqueue({ s: 1 }), /input of `b`: `s`/);
});

test("jobs without a schema take the type of the handler's parameter", async () => {
  const ls = new Longshore();
  const greet = ls.job("greet", async (input: { name: string }) => `Hello ${input.name}`);
  const tick = ls.job("tick", async () => 1);
  const elsewhere = ls.declare<{ id: number }, { ok: boolean }>("elsewhere", { queue: "other" });
  using queue = testQueue(ls);
  const handle: JobHandle<string> = await greet.enqueue({ name: "Ada" });
  await tick.enqueue();
  const other: JobHandle<{ ok: boolean }> = await elsewhere.enqueue({ id: 7 });
  // @ts-expect-error the name is missing
  greet.request({});
  await queue.runPending();
  assert.equal(await handle.result(), "Hello Ada");
  assert.equal((await other.get()).queue, "other");
});

test("jobs of several kinds can be enqueued together, and each handle has its own type", async () => {
  const ls = new Longshore();
  const greet = ls.job("greet", async (input: { name: string }) => `Hello ${input.name}`);
  const now = ls.job("now", async () => new Date(0));
  using queue = testQueue(ls);
  const [first, second] = await ls.enqueueMany([greet.request({ name: "Ada" }), now.request()]);
  typesAreEqual<typeof first, JobHandle<string>>(true);
  const lists = await ls.enqueueMany(["a", "b"].map((name) => greet.request({ name })));
  typesAreEqual<typeof lists, JobHandle<string>[]>(true);
  function* requests() {
    yield now.request();
  }
  const generated = await ls.enqueueMany(requests());
  typesAreEqual<typeof generated, JobHandle<string>[]>(true);
  assert.equal(generated.length, 1);
  await queue.runPending();
  assert.deepEqual(
    [await first.result(), await second.result(), await lists[1]?.result()],
    ["Hello Ada", "1970-01-01T00:00:00.000Z", "Hello b"],
  );
});

test("the JSON form of a type is known to the compiler", () => {
  typesAreEqual<Jsonified<{ a: Date; b?: number }>, { a: string; b?: number | undefined }>(true);
  typesAreEqual<Jsonified<[1, Date]>, [1, string]>(true);
  typesAreEqual<Jsonified<void>, null>(true);
});

test("schemas are announced as JSON Schema if their library offers it", () => {
  const expected = { type: "object", required: ["to"] };
  for (const schema of [z.object({ to: z.string() }), type({ to: "string" })]) {
    const found = jsonSchemaOf(schema);
    assert.deepEqual({ type: found?.["type"], required: found?.["required"] }, expected);
  }
  assert.equal(jsonSchemaOf(v.object({ to: v.string() })), undefined);
});

test("regular expressions are not announced, because the server reads them in another way", () => {
  const schema = z.object({
    code: z.string().regex(/^ab+$/i),
    pattern: z.string().default("^x$"),
    look: z.xor([z.string().regex(/^(?=a)/), z.string().regex(/^(?!a)/)]),
  });
  const announced = jsonSchemaOf(schema);
  assert.doesNotMatch(JSON.stringify(announced), /ab\+|\(\?/);
  assert.deepEqual(announced?.["properties"], {
    code: { type: "string" },
    pattern: { type: "string", default: "^x$" },
    look: { anyOf: [{ type: "string" }, { type: "string" }] },
  });
});
