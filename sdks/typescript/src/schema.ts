/**
 * Schemas of payloads. Every library that implements Standard Schema works (zod, valibot, arktype and
 * others). This module owns the interface and the messages; it validates nothing itself.
 */

import { ValidationError } from "./errors.js";

/** The part of Standard Schema that this package uses. */
export interface StandardSchema<Input = unknown, Output = Input> {
  readonly "~standard": {
    readonly version: 1;
    readonly vendor: string;
    readonly validate: (value: unknown) => ValidationResult<Output> | Promise<ValidationResult<Output>>;
    readonly types?: { readonly input: Input; readonly output: Output } | undefined;
  };
}

export type ValidationResult<Output> =
  | { readonly value: Output; readonly issues?: undefined }
  | { readonly issues: readonly SchemaIssue[] };

export interface SchemaIssue {
  readonly message: string;
  readonly path?: readonly (PropertyKey | { readonly key: PropertyKey })[] | undefined;
}

/** What the caller of a job passes. */
export type InputOf<S extends StandardSchema> = NonNullable<S["~standard"]["types"]>["input"];
/** What the handler of a job gets. */
export type OutputOf<S extends StandardSchema> = NonNullable<S["~standard"]["types"]>["output"];

/** Validates a value. Returns a promise only if the schema does. */
export function validate<T>(
  schema: StandardSchema<unknown, T>,
  value: unknown,
  what: string,
): T | Promise<T> {
  const result = schema["~standard"].validate(value);
  return "then" in result ? result.then((each) => unwrap(each, what)) : unwrap(result, what);
}

function unwrap<T>(result: ValidationResult<T>, what: string): T {
  if (result.issues) throw new ValidationError(`${what}: ${describe(result.issues)}`);
  return result.value;
}

function describe(issues: readonly SchemaIssue[]): string {
  const shown = issues.slice(0, 5).map(({ path, message }) => {
    const keys = (path ?? []).map((part) => String(typeof part === "object" ? part.key : part));
    return keys.length === 0 ? message : `\`${keys.join(".")}\`: ${message}`;
  });
  const more = issues.length > 5 ? `; and ${issues.length - 5} more` : "";
  return shown.join("; ") + more;
}

/** The JSON Schema of what callers pass, if the library can express the schema as one. */
export function jsonSchemaOf(schema: StandardSchema): Record<string, unknown> | undefined {
  try {
    const standard = schema["~standard"] as {
      jsonSchema?: { input?: (options: { target: string }) => Record<string, unknown> };
    };
    const announced = standard.jsonSchema?.input?.({ target: "draft-2020-12" });
    if (announced) return withoutPatterns(announced) as Record<string, unknown>;
    const own = schema as {
      toJSONSchema?: (options: { io: string }) => Record<string, unknown>;
      toJsonSchema?: () => Record<string, unknown>;
    };
    const converted = own.toJSONSchema?.({ io: "input" }) ?? own.toJsonSchema?.();
    return withoutPatterns(converted) as Record<string, unknown> | undefined;
  } catch {
    // The schema contains something that JSON Schema does not have, such as a transformation. The
    // worker still validates.
    return undefined;
  }
}

/** Keywords whose values are data. */
const DATA = new Set(["const", "enum", "default", "examples"]);
/** Keywords whose values are schemas by the names of the user. */
const NAMED = new Set(["properties", "$defs", "definitions", "dependentSchemas"]);

/**
 * A schema without regular expressions. The libraries drop their flags, and the server does not know all of
 * their syntax, so it would refuse valid payloads or the schema itself. The client and the worker check them.
 * What is left accepts at least what the schema accepts.
 */
function withoutPatterns(schema: unknown): unknown {
  if (Array.isArray(schema)) return schema.map(withoutPatterns);
  if (typeof schema !== "object" || schema === null) return schema;
  const kept: Record<string, unknown> = {};
  for (const [keyword, value] of Object.entries(schema)) {
    if (keyword === "pattern" || keyword === "patternProperties") continue;
    if (keyword === "additionalProperties" && "patternProperties" in schema) continue;
    if (DATA.has(keyword)) kept[keyword] = value;
    else if (NAMED.has(keyword)) kept[keyword] = mapValues(value as object, withoutPatterns);
    else if (keyword === "not" && hasPattern(value)) continue;
    else kept[keyword === "oneOf" && hasPattern(value) ? "anyOf" : keyword] = withoutPatterns(value);
  }
  return kept;
}

function hasPattern(schema: unknown): boolean {
  return JSON.stringify(withoutPatterns(schema)) !== JSON.stringify(schema);
}

function mapValues(object: object, convert: (value: unknown) => unknown): Record<string, unknown> {
  return Object.fromEntries(Object.entries(object).map(([name, value]) => [name, convert(value)]));
}
