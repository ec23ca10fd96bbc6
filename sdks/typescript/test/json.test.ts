import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { newId, VERSION } from "../src/index.js";
import { decodeJson, encodeJson, findBigInt } from "../src/json.js";
import { toCamel, toSnake } from "../src/names.js";

test("values that JSON would change are refused, with their path", () => {
  const refuse = (value: unknown, message: RegExp) =>
    assert.throws(() => encodeJson(value, "input"), message);
  refuse(
    { a: [1, 2 ** 53] },
    /input\.a\[1\]: the integer 9007199254740992 is above 2\^53.*send it as a string/,
  );
  refuse({ a: -(2 ** 60) }, /input\.a: the integer/);
  refuse({ a: 1n }, /input\.a: a bigint is not JSON; convert it to a string/);
  refuse({ a: Number.NaN }, /input\.a: NaN is not JSON/);
  refuse([Number.POSITIVE_INFINITY], /input\[0\]: Infinity/);
  refuse({ at: new Date(Number.NaN) }, /input\.at: is an invalid date/);
  refuse(() => 1, /input: a function is not JSON/);
  const loop: Record<string, unknown> = { big: 1n };
  loop["self"] = loop;
  refuse({ self: loop, a: null }, /input\.self/);
  refuse({ user: Promise.resolve(1) }, /input\.user: a Promise is not JSON; await it/);
  refuse({ a: new Map([[1, 2]]) }, /input\.a: a Map is not JSON; use Object\.fromEntries/);
  refuse([new Set([1])], /input\[0\]: a Set is not JSON; convert it to an array/);
  refuse({ error: new Error("broken") }, /input\.error: an Error is not JSON; use its message/);
  refuse({ a: { toJSON: () => ({ b: Number.NaN }) } }, /input\.a\.b: NaN is not JSON/);
});

test("values that JSON keeps are encoded", () => {
  assert.equal(
    encodeJson({ a: 2 ** 53 - 1, b: null, c: "9007199254740993", d: 0.1 }, "input"),
    '{"a":9007199254740991,"b":null,"c":"9007199254740993","d":0.1}',
  );
  assert.equal(encodeJson(undefined, "input"), "null");
  assert.equal(encodeJson(1e300, "input"), "1e+300");
  const shared = { x: null };
  assert.equal(encodeJson([shared, shared], "input"), '[{"x":null},{"x":null}]');
  const now = new Date(0);
  const row = { createdAt: now, updatedAt: now, deletedAt: null, tags: {} };
  assert.equal(JSON.parse(encodeJson(row, "input")).updatedAt, "1970-01-01T00:00:00.000Z");
  const money = { toJSON: () => "7.00 €" };
  assert.equal(encodeJson([money, money, null], "input"), '["7.00 €","7.00 €",null]');
});

test("programs that define the JSON of bigint can use it everywhere", () => {
  const prototype = BigInt.prototype as { toJSON?: (this: bigint) => string };
  prototype.toJSON = function () {
    return this.toString();
  };
  try {
    assert.equal(encodeJson({ a: 1n, b: null }, "input"), '{"a":"1","b":null}');
  } finally {
    delete prototype.toJSON;
  }
});

test("integers above 2^53 are decoded as bigint, and only those", () => {
  const text =
    '{"a":9007199254740993,"b":"9007199254740993","c":[1,-12345678901234567890],"d":0.1234567890123456,"e":1000000000000000}';
  const { value, hasBigInts } = decodeJson(text);
  assert.deepEqual(value, {
    a: 9007199254740993n,
    b: "9007199254740993",
    c: [1, -12345678901234567890n],
    d: 0.1234567890123456,
    e: 1000000000000000,
  });
  assert.equal(hasBigInts, true);
  assert.deepEqual(findBigInt(value, "payload"), { path: "payload.a", value: 9007199254740993n });
  assert.deepEqual(decodeJson('{"a":"x, 9007199254740993 ]"}'), {
    value: { a: "x, 9007199254740993 ]" },
    hasBigInts: false,
  });
  // A stored text that looks like an internal mark stays a text.
  const odd = '{"a":"\\u0000integer:abc","b":9007199254740993}';
  assert.deepEqual(decodeJson(odd).value, { a: "\0integer:abc", b: 9007199254740993n });
});

test("ids are UUIDs of version 7 that sort in the order in which they were made", () => {
  const ids = Array.from({ length: 10_000 }, (_, n) => newId(1_700_000_000_000 + Math.floor(n / 5_000)));
  for (const id of ids)
    assert.match(id, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  assert.deepEqual(ids, [...ids].sort());
  assert.equal(new Set(ids).size, ids.length);
  assert.equal(ids[0]?.slice(0, 13), "018bcfe5-6800");
});

test("names change their case, and the data of users does not", () => {
  assert.deepEqual(toCamel({ last_error: null, payload: { user_id: 1 }, errors: [{ lease_no: 2 }] }), {
    lastError: null,
    payload: { user_id: 1 },
    errors: [{ leaseNo: 2 }],
  });
  assert.deepEqual(toSnake({ delayMs: 1, metadata: { userId: 1 } }), {
    delay_ms: 1,
    metadata: { userId: 1 },
  });
});

test("the version is that of package.json", () => {
  const manifest = JSON.parse(readFileSync(new URL("../../package.json", import.meta.url), "utf8")) as {
    version: string;
  };
  assert.equal(VERSION, manifest.version);
});
