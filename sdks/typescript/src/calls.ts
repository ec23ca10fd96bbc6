/** What one call of the I/O thread needs: its size, its repetition and its response. Knows nothing about leases. */

import { errorFromReply } from "./errors.js";
import { type Connections, NoReplyError, type Reply, sleep } from "./transport.js";

const FIRST_PAUSE_MS = 50;
const MAX_PAUSE_MS = 2_000;
const TIMEOUT_MS = 30_000;
/** The server accepts 16 MiB, and closes the connection if a body is much larger. */
const MAX_REPORT_BYTES = 15 * 1024 * 1024;

/**
 * Sends a call until the server accepts or refuses it. Returns undefined if `body` returns undefined, because
 * the call is no longer needed.
 */
export async function sendUntilAnswered(
  connections: Connections,
  path: string,
  { body, onFailure }: { body: () => string | undefined; onFailure: (problem: string) => void },
): Promise<Reply | undefined> {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    const json = body();
    if (json === undefined) return undefined;
    try {
      const reply = await connections.send("POST", path, json, { timeoutMs: TIMEOUT_MS });
      if (reply.status === 200 ? parseReply(reply) : isFinal(reply.status)) return reply;
      onFailure(
        reply.status === 200 ? NOT_JSON : errorFromReply(reply.status, parseReply(reply), undefined).message,
      );
    } catch (error) {
      if (!(error instanceof NoReplyError)) throw error;
      onFailure(error.message);
    }
    pause = Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS + Math.random() * (pause * 3 - FIRST_PAUSE_MS));
    await sleep(pause);
  }
}

/**
 * Whether a worker that got no response for this long has to stop its jobs. The server gives them to others when
 * `staleAfter` is over, and the handlers need time to stop.
 */
export function isCutOff(silentMs: number, staleAfterSeconds: number): boolean {
  return silentMs > staleAfterSeconds * 750;
}

/** Whether a repetition of the call would be refused as well. */
export function isFinal(status: number): boolean {
  return status >= 300 && status < 500 && status !== 429 && status !== 408;
}

export const NOT_JSON = "the response is not JSON; check that the server URL is one of Longshore";

/** The JSON object in a response. Undefined if it is none, for example because a proxy made it. */
export function parseReply(reply: Reply): object | undefined {
  try {
    const value: unknown = JSON.parse(reply.text);
    return typeof value === "object" && value !== null ? value : undefined;
  } catch {
    return undefined;
  }
}

/** Why a report cannot be sent. */
export function tooLarge(json: string): string | undefined {
  // A character has at most 3 bytes.
  if (json.length * 3 <= MAX_REPORT_BYTES) return undefined;
  const bytes = Buffer.byteLength(json);
  if (bytes <= MAX_REPORT_BYTES) return undefined;
  return `${bytes} bytes of JSON are more than the server accepts; store the data elsewhere and keep a reference`;
}
