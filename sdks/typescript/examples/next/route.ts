/** A route handler of Next.js: `app/api/reports/route.ts`. The worker is a process of its own (`worker.ts`). */

import { ValidationError } from "longshore";
// In Next.js itself, write "../jobs": its bundlers do not find jobs.ts under the name jobs.js.
import { sendReport } from "../jobs.js";

/** Enqueueing uses Node's HTTP client, which the edge runtime does not have. */
export const runtime = "nodejs";

export async function POST(request: Request): Promise<Response> {
  try {
    // The schema of the job checks the body.
    const body = (await request.json()) as { to: string; month: string };
    const handle = await sendReport.enqueue(body);
    return Response.json({ job: handle.id }, { status: 202 });
  } catch (error) {
    if (error instanceof ValidationError) return Response.json({ error: error.message }, { status: 422 });
    throw error;
  }
}

export async function GET(request: Request): Promise<Response> {
  const id = new URL(request.url).searchParams.get("job") ?? "";
  const job = await sendReport.client.get(id);
  return Response.json({ status: job.status, result: job.result });
}
