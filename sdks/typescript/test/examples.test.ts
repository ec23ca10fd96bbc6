/** The examples run. `order` has a test of its own. */

import assert from "node:assert/strict";
import pg from "pg";
import { client, endProcess, onEachEngine, startProgram, unique } from "./support.js";

onEachEngine(({ server, engine, smoke, test }) => {
  test("quickstart greets", async () => {
    const program = startProgram("examples/quickstart", { LONGSHORE_SERVER: server().url });
    assert.equal(await program.ended, 0, program.errors);
    assert.deepEqual(program.lines, ["Hello Ada"]);
  });

  if (engine === "sqlite") return; // it needs Postgres
  smoke("the Express application enqueues in a request and in a transaction", async () => {
    const db = new pg.Client({ connectionString: server().databaseUrl });
    await db.connect();
    await db.query("create table users (email text primary key)");
    const env = { LONGSHORE_SERVER: server().url, DATABASE_URL: server().databaseUrl, PORT: "0" };
    const program = startProgram("examples/express", env);
    try {
      const port = (await program.line(/^listening on port/)).split(" ").at(-1);
      const post = (path: string, body: unknown) =>
        fetch(`http://127.0.0.1:${port}${path}`, {
          method: "POST",
          headers: { "content-type": "application/json" },
          body: JSON.stringify(body),
        });
      const to = `${unique("ada")}@example.com`;
      const reply = await post("/reports", { to, month: "2030-01" });
      assert.equal(reply.status, 202);
      const { job } = (await reply.json()) as { job: string };
      const shown = await fetch(`http://127.0.0.1:${port}/reports/${job}`).then(
        (each) => each.json() as Promise<unknown>,
      );
      assert.deepEqual(shown, { status: "queued", progress: null, result: null });

      const email = `${unique("bob")}@example.com`;
      assert.equal((await post("/users", { email })).status, 201);
      assert.equal((await post("/users", { email })).status, 500, "the user exists");
      const ls = client(server());
      const sent: unknown[] = [];
      for await (const each of ls.list({ kind: "send_report" }))
        sent.push((each.payload as { to: string }).to);
      assert.deepEqual(sent, [email, to], "the transaction that failed has enqueued nothing");
    } finally {
      await endProcess(program.child, "SIGKILL");
      await db.end();
    }
  });
});
