/** Enqueue in the application's own transaction, with the drivers that people use. */

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { drizzle } from "drizzle-orm/node-postgres";
import { drizzle as drizzlePostgresJs } from "drizzle-orm/postgres-js";
import knex from "knex";
import pg from "pg";
import postgres from "postgres";
import { z } from "zod";
import { type Longshore, NotFoundError, type SqlExecutor, ValidationError } from "../src/index.js";
import { client, engines, type Server, startServer, unique } from "./support.js";

class Rollback extends Error {}

describe("postgres", {
  skip: engines.includes("postgres") ? false : "needs LONGSHORE_TEST_DATABASE_URL",
}, () => {
  let server: Server;
  let ls: Longshore;
  before(async () => {
    server = await startServer("postgres");
    ls = client(server);
  });
  after(() => server.stop());

  const input = z.object({ to: z.string(), note: z.string().optional() });
  const payload = { to: 'o\'hara\\ "ä" 🚢', note: "$1 ? :name" };

  /** Enqueues in a transaction that commits and in one that does not. */
  async function commitAndRollback(
    transaction: (work: (tx: SqlExecutor) => Promise<unknown>) => Promise<unknown>,
  ) {
    const job = ls.declare(unique("kind"), {
      input,
      queue: "mail",
      maxAttempts: 7,
      retry: { policy: "fixed", delayMs: 1500 },
    });
    const ids: string[] = [];
    const start = Date.now();
    const options = {
      priority: 4,
      delay: 3600,
      timeout: 90,
      uniqueKey: unique("key"),
      group: "acme",
      tags: ["a", "b"],
      flags: ["c d", "e,f"],
      context: "why",
      metadata: { user_id: 7 },
    };
    await transaction(async (tx) => {
      const handle = await job.enqueueIn(tx, payload, options);
      assert.equal(handle.enqueuedAs, "created");
      ids.push(handle.id);
      const again = await job.enqueueIn(tx, payload, options);
      assert.deepEqual([again.id, again.enqueuedAs], [handle.id, "existing"]);
      await assert.rejects(ls.get(handle.id), NotFoundError, "others do not see it before the commit");
    });
    const rolledBack = transaction(async (tx) => {
      ids.push((await job.enqueueIn(tx, { to: "nobody" }, { timeout: "none" })).id);
      throw new Rollback();
    });
    await assert.rejects(rolledBack, Rollback);
    const stored = await ls.get(ids[0] ?? "");
    assert.deepEqual(stored.payload, payload);
    assert.deepEqual(
      [stored.queue, stored.maxAttempts, stored.retry, stored.priority, stored.timeoutSeconds, stored.group],
      ["mail", 7, { policy: "fixed", delayMs: 1500 }, 4, 90, "acme"],
    );
    assert.deepEqual(
      [stored.tags, stored.flags, stored.context, stored.metadata],
      [["a", "b"], ["c d", "e,f"], "why", { user_id: 7 }],
    );
    assert.ok(new Date(stored.runAt).getTime() > start + 3_500_000);
    await assert.rejects(ls.get(ids[1] ?? ""), NotFoundError);
  }

  test("pg", async () => {
    const db = new pg.Client({ connectionString: server.databaseUrl });
    await db.connect();
    try {
      await commitAndRollback(async (work) => {
        await db.query("begin");
        try {
          await work(db);
          await db.query("commit");
        } catch (error) {
          await db.query("rollback");
          throw error;
        }
      });
    } finally {
      await db.end();
    }
  });

  test("postgres.js", async () => {
    const sql = postgres(server.databaseUrl, { max: 1 });
    try {
      await commitAndRollback((work) => sql.begin((tx) => work(tx)));
    } finally {
      await sql.end();
    }
  });

  test("Knex", async () => {
    const db = knex({ client: "pg", connection: server.databaseUrl });
    try {
      await commitAndRollback((work) => db.transaction((tx) => work(tx)));
    } finally {
      await db.destroy();
    }
  });

  test("Drizzle with pg", async () => {
    const pool = new pg.Pool({ connectionString: server.databaseUrl });
    try {
      await commitAndRollback((work) => drizzle(pool).transaction((tx) => work(tx)));
    } finally {
      await pool.end();
    }
  });

  test("Drizzle with postgres.js", async () => {
    const sql = postgres(server.databaseUrl, { max: 1 });
    try {
      await commitAndRollback((work) => drizzlePostgresJs(sql).transaction((tx) => work(tx)));
    } finally {
      await sql.end();
    }
  });

  // Prisma needs a program to generate its client. This has the method that is called on its transactions.
  test("Prisma", async () => {
    const pool = new pg.Pool({ connectionString: server.databaseUrl });
    try {
      await commitAndRollback((work) =>
        drizzle(pool).transaction((tx) =>
          work({
            $queryRawUnsafe: async (query: string, ...values: unknown[]) => {
              const { session } = tx as unknown as { session: { client: pg.PoolClient } };
              return (await session.client.query(query, values)).rows as unknown;
            },
          }),
        ),
      );
    } finally {
      await pool.end();
    }
  });

  test("tiny delays and no timeout", async () => {
    const db = new pg.Client({ connectionString: server.databaseUrl });
    await db.connect();
    try {
      const job = ls.declare<number>(unique("kind"));
      const { id } = await job.enqueueIn(db, 1, { delay: 1e-7, timeout: "none" });
      assert.equal((await ls.get(id)).timeoutSeconds, null);
    } finally {
      await db.end();
    }
  });

  test("mistakes are found before the statement runs", async () => {
    const job = ls.declare(unique("kind"), { input });
    const nothing = {} as SqlExecutor;
    await assert.rejects(
      job.enqueueIn(nothing, { to: "a" }),
      /tx: not a known driver; pass a transaction of pg/,
    );
    await assert.rejects(job.enqueueIn(nothing, { to: 1 } as never), ValidationError);
  });
});
