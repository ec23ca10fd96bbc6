/**
 * Enqueue in the caller's own Postgres transaction, with the SQL function `enqueue` of the queue's schema.
 * Owns the statement and what differs between drivers. Knows the drivers by their methods and imports none.
 */

import { ValidationError } from "./errors.js";
import type { EnqueuedAs } from "./handle.js";

/** A transaction or a connection of pg, postgres.js, Knex, Drizzle, Prisma or TypeORM. */
export type SqlExecutor = PgLike | PostgresJsLike | KnexLike | DrizzleLike | PrismaLike;

/** pg (`Client`, `PoolClient`) and TypeORM (`EntityManager`, `QueryRunner`). */
export interface PgLike {
  // biome-ignore lint/suspicious/noExplicitAny: drivers overload this method.
  query: (...args: any[]) => any;
}
/** postgres.js: `sql` or the argument of `sql.begin`. */
export interface PostgresJsLike {
  // biome-ignore lint/suspicious/noExplicitAny: drivers overload this method.
  unsafe: (query: string, parameters?: any[]) => any;
}
export interface KnexLike {
  // biome-ignore lint/suspicious/noExplicitAny: drivers overload this method.
  raw: (...args: any[]) => any;
}
export interface DrizzleLike {
  // biome-ignore lint/suspicious/noExplicitAny: drivers overload this method.
  execute: (query: any) => any;
}
export interface PrismaLike {
  // biome-ignore lint/suspicious/noExplicitAny: drivers overload this method.
  $queryRawUnsafe: (query: string, ...values: any[]) => any;
}

export interface Stored {
  id: string;
  enqueuedAs: EnqueuedAs;
}

/** Runs `enqueue` in the caller's transaction. `fields` are those of `POST /jobs`. */
export async function enqueueInSql(
  tx: SqlExecutor,
  schema: string,
  id: string,
  fields: Record<string, unknown>,
  payloadJson: string,
): Promise<Stored> {
  const { text, values } = statement(schema, id, fields, payloadJson);
  const result: unknown = await run(tx, text, values);
  const rows = Array.isArray(result) ? result : (result as { rows?: unknown[] } | undefined)?.rows;
  const row = rows?.[0] as { job: string; how: EnqueuedAs } | undefined;
  if (row === undefined)
    throw new ValidationError("tx: the driver returned no row of the SQL function `enqueue`");
  return { id: row.job, enqueuedAs: row.how };
}

interface Statement {
  /** With `$1`, `$2` and so on. */
  text: string;
  values: string[];
}

function statement(
  schema: string,
  id: string,
  fields: Record<string, unknown>,
  payloadJson: string,
): Statement {
  const values: string[] = [];
  const args: string[] = [];
  // Every parameter is text, and the statement casts it. Otherwise some drivers encode JSON a second time.
  const add = (name: string, value: string, type: string) => {
    values.push(value);
    args.push(`${name} => $${values.length}::text${type === "text" ? "" : `::${type}`}`);
  };
  const options: Record<string, unknown> = {};
  add("kind", String(fields["kind"]), "text");
  add("payload", payloadJson, "json");
  add("id", id, "uuid");
  for (const [name, value] of Object.entries(fields)) {
    switch (name) {
      case "kind":
        break;
      case "queue":
      case "idempotency_key":
      case "unique_key":
      case "unique_mode":
        add(name, String(value), "text");
        break;
      case "group":
        add("grp", String(value), "text");
        break;
      case "priority":
      case "max_attempts":
        add(name, String(value), "integer");
        break;
      case "run_at":
        add(name, String(value), "timestamptz");
        break;
      case "delay_seconds":
        add("delay", interval(value), "interval");
        break;
      case "timeout_seconds":
        if (value === "none") args.push("timeout => null");
        else add("timeout", interval(value), "interval");
        break;
      case "flags":
        values.push(JSON.stringify(value));
        args.push(`flags => array(select json_array_elements_text($${values.length}::text::json))`);
        break;
      case "tags":
      case "context":
      case "metadata":
      case "retry":
        options[name] = value;
        break;
      case "traceparent":
        options["trace"] = value;
        break;
      default:
        throw new ValidationError(`${name}: cannot be set in a transaction; leave it out`);
    }
  }
  if (Object.keys(options).length > 0) add("options", JSON.stringify(options), "json");
  const name = `"${schema.replaceAll('"', '""')}"`;
  return { text: `select job::text as job, how from ${name}.enqueue(${args.join(", ")})`, values };
}

/** Without an exponent, which Postgres does not accept here. */
function interval(seconds: unknown): string {
  return `${Number(seconds).toFixed(6)} seconds`;
}

function run(tx: SqlExecutor, text: string, values: string[]): unknown {
  const has = (method: string) => typeof (tx as unknown as Record<string, unknown>)?.[method] === "function";
  if (has("$queryRawUnsafe")) return (tx as PrismaLike).$queryRawUnsafe(text, ...values);
  if (has("unsafe")) return (tx as PostgresJsLike).unsafe(text, values);
  // Knex also has `query`, which builds queries.
  if (has("raw")) return (tx as KnexLike).raw(text.replace(/\$\d+/g, "?"), values);
  if (has("execute")) return (tx as DrizzleLike).execute(drizzleQuery(text, values));
  if (has("query")) return (tx as PgLike).query(text, values);
  throw new ValidationError(
    "tx: not a known driver; pass a transaction of pg, postgres.js, Knex, Drizzle or Prisma",
  );
}

/** What Drizzle needs of a query: an object that says what its SQL is. */
function drizzleQuery(text: string, params: string[]): unknown {
  const sql = {
    toQuery: () => ({ sql: text, params }),
    getSQL: () => sql,
    shouldOmitSQLParens: () => true,
  };
  return sql;
}
