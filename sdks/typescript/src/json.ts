/**
 * JSON without silent changes. `JSON.stringify` turns NaN into null, and a number above 2^53 may have lost
 * digits before it gets there. `JSON.parse` rounds such integers. This module refuses the former and
 * returns the latter as `bigint`.
 */

import { randomUUID } from "node:crypto";
import { ValidationError } from "./errors.js";

/** What a value becomes when it is stored as JSON and read again. */
export type Jsonified<T> = unknown extends T
  ? T
  : T extends string | number | boolean | null
    ? T
    : T extends { toJSON(): infer J }
      ? Jsonified<J>
      : T extends undefined | void
        ? null
        : T extends bigint | symbol | ((...args: never[]) => unknown)
          ? never
          : T extends readonly unknown[]
            ? { -readonly [K in keyof T]: Jsonified<T[K]> }
            : T extends object
              ? JsonifiedObject<T>
              : never;

type JsonifiedObject<T extends object> = {
  [K in keyof T as K extends symbol ? never : K]: undefined extends T[K]
    ? Jsonified<Exclude<T[K], undefined>> | undefined
    : Jsonified<T[K]>;
};

/** Encodes a value. `what` names it in errors. `undefined` becomes null. */
export function encodeJson(value: unknown, what: string): string {
  if (value === undefined) return "null";
  let text: string | undefined;
  try {
    text = JSON.stringify(value);
  } catch (error) {
    throw findProblem(value, what, new Set()) ?? new ValidationError(`${what}: not JSON: ${String(error)}`);
  }
  if (text === undefined) throw new ValidationError(`${what}: a ${typeof value} is not JSON; use plain data`);
  // Only values that can contain a problem are searched.
  if (/null|\d{16}|\{\}/.test(text)) {
    const problem = findProblem(value, what, new Set());
    if (problem) throw problem;
  }
  return text;
}

/** Returns what the value is after it was stored and read: without `undefined`, with dates as strings. */
export function throughJson<T>(value: T, what: string): Jsonified<T> {
  return JSON.parse(encodeJson(value, what)) as Jsonified<T>;
}

/** `JSON.stringify` makes `{}` of these, whatever they contain. */
const EMPTY_AS_JSON = [
  [Promise, "await it"],
  [Map, "use Object.fromEntries or an array"],
  [Set, "convert it to an array"],
  [Error, "use its message"],
  [RegExp, "use its source"],
] as const;

function findProblem(value: unknown, path: string, parents: Set<object>): ValidationError | undefined {
  // Also of values that are no objects: programs define how a bigint becomes JSON.
  const toJson = (value as { toJSON?: unknown } | null | undefined)?.toJSON;
  if (typeof value === "bigint" && typeof toJson !== "function") {
    return new ValidationError(`${path}: a bigint is not JSON; convert it to a string`);
  }
  if (typeof value === "number") return findNumberProblem(value, path);
  if (typeof value !== "object" || value === null) return undefined;
  if (parents.has(value)) return new ValidationError(`${path}: refers to itself; use plain data`);
  // Only while its members are searched: an object that is there twice does not refer to itself.
  parents.add(value);
  const problem =
    typeof toJson === "function"
      ? findProblemAfter(value, toJson.call(value, ""), path, parents)
      : findMemberProblem(value, path, parents);
  parents.delete(value);
  return problem;
}

function findNumberProblem(value: number, path: string): ValidationError | undefined {
  if (!Number.isFinite(value)) {
    return new ValidationError(`${path}: ${value} is not JSON; use null or a string`);
  }
  // From 1e21 on, JSON has an exponent, and every reader treats the number as approximate.
  if (Number.isInteger(value) && !Number.isSafeInteger(value) && Math.abs(value) < 1e21) {
    return new ValidationError(
      `${path}: the integer ${value} is above 2^53, where numbers lose digits; send it as a string`,
    );
  }
  return undefined;
}

function findProblemAfter(
  value: object,
  json: unknown,
  path: string,
  parents: Set<object>,
): ValidationError | undefined {
  if (value instanceof Date && json === null) return new ValidationError(`${path}: is an invalid date`);
  return json === value ? findMemberProblem(value, path, parents) : findProblem(json, path, parents);
}

function findMemberProblem(value: object, path: string, parents: Set<object>): ValidationError | undefined {
  const members = Object.entries(value);
  const empty = members.length === 0 && EMPTY_AS_JSON.find(([type]) => value instanceof type);
  if (empty)
    return new ValidationError(
      `${path}: ${empty[0] === Error ? "an" : "a"} ${empty[0].name} is not JSON; ${empty[1]}`,
    );
  for (const [key, member] of members) {
    const place = Array.isArray(value) ? `${path}[${key}]` : `${path}.${key}`;
    const problem = findProblem(member, place, parents);
    if (problem) return problem;
  }
  return undefined;
}

export interface Decoded {
  value: unknown;
  /** Whether the value contains integers that a `number` cannot represent. They are `bigint`. */
  hasBigInts: boolean;
}

const BIG_INTEGER = /[[:,\s]-?\d{16,}\s*[,\]}]/;
const TOKENS = /"[^"\\]*(?:\\.[^"\\]*)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
/** Marks an integer in a text. It is random, so that no string that somebody stored looks like a mark. */
const MARK = `\u0000${randomUUID()}:`;

/** Decodes JSON. Integers that a `number` cannot represent become `bigint`. */
export function decodeJson(text: string): Decoded {
  if (!BIG_INTEGER.test(text))
    return { value: text === "" ? undefined : JSON.parse(text), hasBigInts: false };
  let hasBigInts = false;
  const marked = text.replace(TOKENS, (token) => {
    if (!/^-?\d{16,}$/.test(token) || Number.isSafeInteger(Number(token))) return token;
    hasBigInts = true;
    return JSON.stringify(MARK + token);
  });
  if (!hasBigInts) return { value: JSON.parse(text), hasBigInts };
  const value: unknown = JSON.parse(marked, (_, member: unknown) =>
    typeof member === "string" && member.startsWith(MARK) ? BigInt(member.slice(MARK.length)) : member,
  );
  return { value, hasBigInts };
}

/** The path of the first `bigint` in a decoded value. */
export function findBigInt(value: unknown, path: string): { path: string; value: bigint } | undefined {
  if (typeof value === "bigint") return { path, value };
  if (typeof value !== "object" || value === null) return undefined;
  for (const [key, member] of Object.entries(value)) {
    const found = findBigInt(member, Array.isArray(value) ? `${path}[${key}]` : `${path}.${key}`);
    if (found) return found;
  }
  return undefined;
}
