/** Field names: `snake_case` on the wire, `camelCase` in TypeScript. The data of users is left as it is. */

type CamelCase<S extends string> = S extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelCase<Tail>>}`
  : S;

/** A wire type with names in camel case. */
export type Camelized<T> = unknown extends T
  ? T
  : T extends readonly (infer U)[]
    ? Camelized<U>[]
    : T extends object
      ? { [K in keyof T as K extends string ? CamelCase<K> : K]: Camelized<T[K]> }
      : T;

/** Fields that contain what users store. */
const OPAQUE = new Set(["payload", "result", "metadata", "progress", "value", "schema", "checkpoint"]);

/** Converts the names in a response. */
export function toCamel<T>(value: T): Camelized<T> {
  return convert(value, (name) =>
    name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase()),
  ) as Camelized<T>;
}

/** Converts the names in a request. */
export function toSnake(value: unknown): unknown {
  return convert(value, (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`));
}

function convert(value: unknown, rename: (name: string) => string): unknown {
  if (Array.isArray(value)) return value.map((item) => convert(item, rename));
  if (typeof value !== "object" || value === null || value instanceof Date) return value;
  const converted: Record<string, unknown> = {};
  for (const [name, member] of Object.entries(value)) {
    converted[rename(name)] = OPAQUE.has(name) ? member : convert(member, rename);
  }
  return converted;
}
