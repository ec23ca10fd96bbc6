/**
 * HTTP. `Connections` sends one request over kept-alive connections. `HttpTransport` repeats requests that
 * are safe to repeat, and converts errors. Neither knows what the requests mean.
 */

import * as http from "node:http";
import * as https from "node:https";
import type { Socket } from "node:net";
import { errorFromReply, LongshoreError, TimeoutError, UnavailableError } from "./errors.js";
import { decodeJson } from "./json.js";
import type { Stored } from "./sql.js";

export interface Reply {
  status: number;
  headers: http.IncomingHttpHeaders;
  text: string;
}

export interface SendOptions {
  timeoutMs: number;
  headers?: Record<string, string> | undefined;
  signal?: AbortSignal | undefined;
}

/** A request that got no response. `sent` says whether the server may have processed it. */
export class NoReplyError extends Error {
  readonly sent: boolean;
  constructor(message: string, sent: boolean, cause?: unknown) {
    super(message, { cause });
    this.sent = sent;
  }
}

/** Kept-alive connections to one server. */
export class Connections {
  readonly #agent: http.Agent;
  readonly #base: URL;
  readonly #prefix: string;
  readonly #headers: Record<string, string>;
  readonly #request: typeof http.request;

  constructor(server: string, token: string | undefined, maxSockets: number) {
    this.#base = parseServer(server);
    this.#prefix = this.#base.pathname.replace(/\/$/, "");
    const secure = this.#base.protocol === "https:";
    this.#request = secure ? https.request : http.request;
    // The server closes idle connections after 75 s.
    const options = { keepAlive: true, maxSockets, keepAliveMsecs: 15_000, timeout: 60_000 };
    this.#agent = secure ? new https.Agent(options) : new http.Agent(options);
    this.#headers = token === undefined ? {} : { authorization: `Bearer ${token}` };
  }

  /** Sends one request. Rejects with `NoReplyError` if there is no response. */
  send(method: string, path: string, body: string | undefined, options: SendOptions): Promise<Reply> {
    return new Promise((resolve, reject) => {
      const headers: Record<string, string | number> = { ...this.#headers, ...options.headers };
      const bytes = body === undefined ? undefined : Buffer.from(body);
      if (bytes !== undefined) {
        headers["content-type"] = "application/json";
        headers["content-length"] = bytes.length;
      } else if (method !== "GET") {
        headers["content-length"] = 0;
      }
      let connected = false;
      const request = this.#request({
        protocol: this.#base.protocol,
        hostname: this.#base.hostname.replace(/^\[|\]$/g, ""),
        port: this.#base.port,
        method,
        path: this.#prefix + path,
        headers,
        agent: this.#agent,
      });
      let timer: NodeJS.Timeout | undefined;
      const abort = () => request.destroy(new NoReplyError("the request was aborted", connected));
      const finish = () => {
        clearTimeout(timer);
        options.signal?.removeEventListener("abort", abort);
      };
      const fail = (error: Error) => {
        finish();
        // The server has closed an idle connection at the moment at which it was used again.
        if (request.reusedSocket && (error as NodeJS.ErrnoException).code === "ECONNRESET") connected = false;
        reject(error instanceof NoReplyError ? error : new NoReplyError(describe(error), connected, error));
      };
      if (options.signal?.aborted) abort();
      options.signal?.addEventListener("abort", abort);
      request.on("socket", (socket) => {
        catchErrors(socket);
        // Not earlier: until then, the request waits for one of the connections.
        timer = setTimeout(() => {
          request.destroy(new NoReplyError(`no response within ${options.timeoutMs / 1000} s`, connected));
        }, options.timeoutMs);
        if (socket.connecting) socket.once("connect", () => (connected = true));
        else connected = true;
      });
      request.on("error", fail);
      request.on("response", (response) => {
        const chunks: Buffer[] = [];
        response.on("data", (chunk: Buffer) => chunks.push(chunk));
        response.on("error", fail);
        response.on("close", () => {
          if (!response.complete) fail(new NoReplyError("the connection closed within the response", true));
        });
        response.on("end", () => {
          finish();
          // The server has refused a body that is still being sent. The connection cannot be used again.
          if (!request.writableFinished) request.destroy();
          const text = chunks.length === 1 ? chunks[0]!.toString() : Buffer.concat(chunks).toString();
          resolve({ status: response.statusCode ?? 0, headers: response.headers, text });
        });
      });
      request.end(bytes);
    });
  }

  close(): void {
    this.#agent.destroy();
  }
}

const watched = new WeakSet<Socket>();

/**
 * Node reports errors of a connection to its request, but not after the response has ended. An error then, for
 * example because the server closes the connection while a large body is sent, would end the process.
 */
function catchErrors(socket: Socket): void {
  if (watched.has(socket)) return;
  watched.add(socket);
  socket.on("error", () => {});
}

function parseServer(server: string): URL {
  let url: URL;
  try {
    url = new URL(server);
  } catch (cause) {
    throw new LongshoreError(
      "validation",
      `server: \`${server}\` is not a URL; use one like http://127.0.0.1:8080`,
      {
        cause,
      },
    );
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw new LongshoreError("validation", `server: \`${url.protocol}\` is not supported; use http or https`);
  }
  return url;
}

function describe(error: Error): string {
  // Node reports all addresses of a host that failed in one error without a message.
  if (error instanceof AggregateError) return error.errors.map((each: Error) => each.message).join(", ");
  return error.message;
}

export interface CallOptions {
  body?: unknown;
  /** Instead of `body`: JSON text. */
  json?: string | undefined;
  query?: Record<string, string | number | boolean | undefined> | undefined;
  headers?: Record<string, string> | undefined;
  /** Whether the server may process the request twice without harm. */
  repeatable?: boolean | undefined;
  /** How long the server may wait before it responds. */
  waitMs?: number | undefined;
  signal?: AbortSignal | undefined;
}

export interface Response<T> {
  status: number;
  headers: http.IncomingHttpHeaders;
  body: T;
}

/** Sends calls to a server, or to a replacement for tests. */
export interface Transport {
  call<T>(method: string, path: string, options?: CallOptions): Promise<Response<T>>;
  /** Instead of a statement in the caller's transaction, for tests. `json` is the body of `POST /jobs`. */
  enqueueInTransaction?(json: string, traceparent: string | undefined): Promise<Stored>;
  close(): void;
}

const FIRST_PAUSE_MS = 50;
const MAX_PAUSE_MS = 5_000;
const REPLY_TIMEOUT_MS = 30_000;
/** How many calls of one client can wait at once. The server has 1,024 connections by default. */
export const MAX_WAITING = 128;

/** Calls a server. Repeats what is safe to repeat until a deadline, with decorrelated jitter. */
export class HttpTransport implements Transport {
  readonly #connections: Connections;
  /** For calls that wait, so that they do not delay others. */
  readonly #waiting: Connections;
  readonly #server: string;
  readonly #retryForMs: number;

  constructor(server: string, token: string | undefined, retryForMs: number) {
    this.#server = server;
    this.#connections = new Connections(server, token, 64);
    this.#waiting = new Connections(server, token, MAX_WAITING);
    this.#retryForMs = retryForMs;
  }

  async call<T>(method: string, path: string, options: CallOptions = {}): Promise<Response<T>> {
    const repeatable = options.repeatable ?? (method === "GET" || method === "PUT");
    const json = options.json ?? (options.body === undefined ? undefined : JSON.stringify(options.body));
    const deadline = Date.now() + this.#retryForMs;
    const send = {
      timeoutMs: REPLY_TIMEOUT_MS + (options.waitMs ?? 0),
      headers: options.headers,
      signal: options.signal,
    };
    const connections = options.waitMs === undefined ? this.#connections : this.#waiting;
    let pause = FIRST_PAUSE_MS;
    for (;;) {
      let retryAfterMs = 0;
      let problem: LongshoreError;
      try {
        const reply = await connections.send(method, path + queryString(options.query), json, send);
        const body = parseBody(reply);
        if (reply.status < 300) return { status: reply.status, headers: reply.headers, body: body as T };
        if (reply.status < 400) throw redirected(reply);
        problem = errorFromReply(reply.status, body as object, header(reply, "x-request-id"));
        // 408, 429 and 503 say that nothing was done; after other errors something may have been.
        const again = [408, 429, 503].includes(reply.status) || (repeatable && reply.status >= 500);
        if (!again) throw problem;
        retryAfterMs = Number(header(reply, "retry-after") ?? 0) * 1000 || 0;
      } catch (error) {
        if (!(error instanceof NoReplyError)) throw error;
        if (options.signal?.aborted) throw options.signal.reason;
        problem = new UnavailableError("connection", `${method} ${this.#server}${path}: ${error.message}`, {
          cause: error,
        });
        if (!repeatable && error.sent) throw problem;
      }
      pause = Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS + Math.random() * (pause * 3 - FIRST_PAUSE_MS));
      const wait = Math.max(pause, retryAfterMs);
      if (Date.now() + wait > deadline) throw problem;
      await sleep(wait, options.signal);
    }
  }

  close(): void {
    this.#connections.close();
    this.#waiting.close();
  }
}

function redirected(reply: Reply): LongshoreError {
  const location = header(reply, "location") ?? "another address";
  return new LongshoreError(
    "misdirected",
    `server: it redirects to ${location}; use the URL of Longshore itself`,
    {
      status: reply.status,
    },
  );
}

function parseBody(reply: Reply): unknown {
  try {
    return decodeJson(reply.text).value;
  } catch (cause) {
    if (reply.status >= 300) return undefined;
    throw new LongshoreError(
      "internal",
      "the response is not JSON; check that the server URL is one of Longshore",
      {
        status: reply.status,
        cause,
      },
    );
  }
}

function header(reply: Reply, name: string): string | undefined {
  const value = reply.headers[name];
  return Array.isArray(value) ? value[0] : value;
}

function queryString(query: CallOptions["query"]): string {
  if (query === undefined) return "";
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value !== undefined) parts.set(name, String(value));
  const text = parts.toString();
  return text === "" ? "" : `?${text}`;
}

/** Waits. Rejects with the reason if the signal fires. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", abort, { once: true });
  });
}

/** Calls `attempt` with the milliseconds left until it returns something or the time is up. */
export async function untilDeadline<T>(
  timeoutMs: number,
  what: string,
  attempt: (leftMs: number) => Promise<T | undefined>,
): Promise<T> {
  const deadline = Date.now() + timeoutMs;
  for (;;) {
    const left = deadline - Date.now();
    const found = await attempt(Math.max(0, left));
    if (found !== undefined) return found;
    if (Date.now() >= deadline) throw new TimeoutError(what);
  }
}
