/**
 * An Express application that enqueues in a request, and in a transaction of its own. `node worker.js` runs the jobs.
 * DATABASE_URL names the Postgres database of the application, which is also the one of the queue.
 */

import express from "express";
import pg from "pg";
import { sendReport } from "./jobs.js";

const pool = new pg.Pool({ connectionString: process.env["DATABASE_URL"] });
const app = express();
app.use(express.json());

// The job is stored when the response is sent.
app.post("/reports", async (request, response) => {
  const { to, month } = request.body as { to: string; month: string };
  const handle = await sendReport.enqueue({ to, month }, { uniqueKey: `report:${to}:${month}` });
  response.status(202).json({ job: handle.id });
});

// The job exists if and only if the user does.
app.post("/users", async (request, response) => {
  const { email } = request.body as { email: string };
  const db = await pool.connect();
  try {
    await db.query("begin");
    await db.query("insert into users (email) values ($1)", [email]);
    await sendReport.enqueueIn(db, { to: email, month: "2030-01" });
    await db.query("commit");
    response.status(201).end();
  } catch (error) {
    await db.query("rollback");
    throw error;
  } finally {
    db.release();
  }
});

app.get("/reports/:job", async (request, response) => {
  const job = await sendReport.client.get(request.params.job);
  response.json({ status: job.status, progress: job.progress, result: job.result });
});

const server = app.listen(Number(process.env["PORT"] ?? 3000), () => {
  const address = server.address();
  console.log(`listening on port ${typeof address === "object" ? address?.port : address}`);
});
