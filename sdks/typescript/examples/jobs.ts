/** The jobs of the examples for Express and Next.js. The web process and the worker import this file. */

import { Longshore, Retry } from "longshore";
import { z } from "zod";

export const ls = new Longshore();

const report = z.object({ to: z.email(), month: z.string().regex(/^\d{4}-\d{2}$/) });

export const sendReport = ls.job(
  "send_report",
  { input: report, queue: "mail", timeout: 60 },
  async (input, ctx) => {
    const reply = await fetch(process.env["MAIL_URL"] ?? "http://127.0.0.1:2525/send", {
      method: "POST",
      body: JSON.stringify(input),
      // Ends the request if the job is cancelled, times out, or the worker stops.
      signal: ctx.signal,
      // The job id as key: the mail is not sent twice if the job runs again.
      headers: { "idempotency-key": ctx.id },
    });
    if (reply.status === 429)
      throw new Retry(Number(reply.headers.get("retry-after") ?? 30), "the mail server is busy");
    if (!reply.ok) throw new Error(`the mail server replied with ${reply.status}`);
    return { sentAt: new Date() };
  },
);
