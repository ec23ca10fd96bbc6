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
  return result instanceof Promise ? result.then((each) => unwrap(each, what)) : unwrap(result, what);
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
    if (announced) return announced;
    const own = schema as {
      toJSONSchema?: (options: { io: string }) => Record<string, unknown>;
      toJsonSchema?: () => Record<string, unknown>;
    };
    return own.toJSONSchema?.({ io: "input" }) ?? own.toJsonSchema?.();
  } catch {
    // The schema contains something that JSON Schema does not have, such as a transformation. The
    // worker still validates.
    return undefined;
  }
}
