/** Tokens: what a client and a worker may do, and what they say if they may not. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { promisify } from "node:util";
import { findBinary } from "../src/binary.js";
import { AccessError, Longshore } from "../src/index.js";
import { onEachEngine, type Server, unique, withWorker } from "./support.js";

async function token(server: Server, scopes: string[], queue?: string): Promise<string> {
  const limits = queue === undefined ? [] : ["--queue", queue];
  const args = ["tokens", "create", unique("token"), "--json", "--database-url", server.serverUrl, ...limits];
  const { stdout } = await promisify(execFile)(findBinary(), [
    ...args,
    ...scopes.flatMap((scope) => ["--scope", scope]),
  ]);
  return (JSON.parse(stdout) as { token: string }).token;
}

onEachEngine(
  ({ server, smoke, test }) => {
    smoke("a worker and a client with tokens work together", async () => {
      const queue = unique("queue");
      const worker = new Longshore({
        server: server().url,
        token: await token(server(), ["work", "enqueue"]),
      });
      const job = worker.job(unique("kind"), { queue, maxAttempts: 2 }, async (n: number) => n + 1);
      const caller = new Longshore({
        server: server().url,
        token: await token(server(), ["enqueue", "read"]),
      });
      await withWorker(worker, {}, async () => {
        const handle = await caller.declare<number, number>(job.name, { queue }).enqueue(1);
        assert.equal(await handle.result(), 2);
        await assert.rejects(
          handle.cancel(),
          (error) => error instanceof AccessError && error.slug === "forbidden",
        );
      });
    });

    test("a token for one queue suffices for a worker of this queue", async () => {
      const queue = unique("queue");
      const limited = await token(server(), ["work", "enqueue", "read"], queue);
      const ls = new Longshore({ server: server().url, token: limited });
      const job = ls.job(
        unique("kind"),
        { queue, maxAttempts: 2, jsonSchema: {} },
        async (n: number, ctx) => {
          await ctx.sleep("nap", 0.01);
          return n + 1;
        },
      );
      await withWorker(ls, {}, async () => {
        assert.equal(await (await job.enqueue(1)).result(), 2);
        await assert.rejects(job.enqueue(1, { queue: "other" }), (error) => error instanceof AccessError);
      });
      // A second worker announces the same kind.
      await withWorker(ls, {}, async () => {
        assert.equal(await (await job.enqueue(2)).result(), 3);
      });
      await assert.rejects(ls.work({ queues: ["other"] }), (error) => error instanceof AccessError);
    });

    test("without a valid token, calls and workers fail at once", async () => {
      const ls = new Longshore({ server: server().url, token: "wrong" });
      const job = ls.job(unique("kind"), async (n: number) => n);
      const unauthorized = (error: unknown) =>
        error instanceof AccessError && error.slug === "unauthorized" && error.status === 401;
      await assert.rejects(job.enqueue(1), unauthorized);
      await assert.rejects(ls.work(), unauthorized);
    });
  },
  ["--auth", "tokens"],
);
