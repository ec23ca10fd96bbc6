/** Real servers, workers and a proxy for the tests. */

import { type ChildProcess, spawn } from "node:child_process";
import { appendFile, mkdtemp, rm } from "node:fs/promises";
import { connect, createServer, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test as nodeTest } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import pg from "pg";
import { findBinary } from "../src/binary.js";
import { type LogEntry, Longshore, type WorkOptions } from "../src/index.js";

export type Engine = "sqlite" | "postgres";
const superuser = process.env["LONGSHORE_TEST_DATABASE_URL"];
if (process.env["CI"] === "true" && superuser === undefined) {
  throw new Error("CI=true, and LONGSHORE_TEST_DATABASE_URL is not set, so no test would run on Postgres");
}
/** How long a test waits for what must happen, in seconds. Only a fault takes this long, however slow the machine is. */
export const LIMIT = 120;
export const engines: Engine[] = superuser === undefined ? ["sqlite"] : ["sqlite", "postgres"];

export interface Server {
  url: string;
  databaseUrl: string;
  /** The database URL for the server, with the settings that tests need. */
  serverUrl: string;
  /** Stops the server and starts it again, on the same database and another port. */
  restart(): Promise<void>;
  stop(): Promise<void>;
}

/** Starts `longshore serve` on a new database. It finds dead workers quickly. */
export async function startServer(engine: Engine, args: string[] = []): Promise<Server> {
  const folder = await mkdtemp(join(tmpdir(), "longshore-test-"));
  const database =
    engine === "postgres"
      ? await createDatabase()
      : { url: `sqlite:${folder}/queue.db`, drop: async () => {} };
  // Test databases may run without fsync.
  const serverUrl = engine === "postgres" ? withSetting(database.url, "durability", "relaxed") : database.url;
  let serving = await serve(serverUrl, args);
  const server: Server = {
    url: serving.url,
    databaseUrl: database.url,
    serverUrl,
    restart: async () => {
      await serving.stop();
      serving = await serve(serverUrl, args);
      server.url = serving.url;
    },
    stop: async () => {
      await serving.stop();
      await database.drop();
      await rm(folder, { recursive: true, force: true });
    },
  };
  return server;
}

async function serve(
  databaseUrl: string,
  args: string[],
): Promise<{ url: string; stop: () => Promise<void> }> {
  const child = spawn(
    findBinary(),
    [
      ...["serve", "--migrate", "--bind", "127.0.0.1:0", "--database-url", databaseUrl],
      ...["--sweep-interval", "300ms", "--recovery-delay", "10ms", "--max-interruptions", "100"],
      ...["--heartbeat-interval", "500ms", "--log", "warn", "--allow-unknown-kinds", ...args],
    ],
    { stdio: ["ignore", "pipe", "pipe"] },
  );
  const kill = () => child.kill("SIGKILL");
  process.once("exit", kill);
  let output = "";
  const url = await new Promise<string>((resolve, reject) => {
    const read = (chunk: Buffer) => {
      output = (output + chunk.toString()).slice(-20_000);
      const found = /(?:listening on |")(http:\/\/127\.0\.0\.1:\d+)/.exec(output)?.[1];
      if (found) resolve(found);
    };
    child.stdout.on("data", read);
    child.stderr.on("data", read);
    child.on("exit", (code) => reject(new Error(`the server ended with status ${code}: ${output}`)));
  });
  const stop = async () => {
    process.off("exit", kill);
    await endProcess(child, "SIGTERM");
    if (process.env["LONGSHORE_TEST_LOG"]) console.error(output);
  };
  return { url, stop };
}

function withSetting(databaseUrl: string, name: string, value: string): string {
  const url = new URL(databaseUrl);
  url.searchParams.set(name, value);
  return url.toString();
}

async function createDatabase(): Promise<{ url: string; drop: () => Promise<void> }> {
  const name = `longshore_ts_${process.pid}_${Math.random().toString(36).slice(2, 8)}`;
  const run = async (sql: string) => {
    const url = new URL(superuser ?? "");
    url.searchParams.delete("durability");
    const client = new pg.Client({ connectionString: url.toString() });
    await client.connect();
    await client.query(sql);
    await client.end();
  };
  await run(`create database ${name}`);
  const url = new URL(superuser ?? "");
  url.pathname = `/${name}`;
  // A setting of the server, which drivers do not know.
  url.searchParams.delete("durability");
  return { url: url.toString(), drop: () => run(`drop database ${name} with (force)`) };
}

/** Ends a process with a signal and waits for its end. */
export async function endProcess(child: ChildProcess, signal: NodeJS.Signals): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = new Promise<void>((resolve) => child.once("exit", () => resolve()));
  child.kill(signal);
  const timer = setTimeout(() => child.kill("SIGKILL"), LIMIT * 1000);
  await ended;
  clearTimeout(timer);
}

const onPostgres = process.env["LONGSHORE_TEST_POSTGRES"] || "full";
if (!["full", "smoke"].includes(onPostgres)) {
  throw new Error(`LONGSHORE_TEST_POSTGRES: \`${onPostgres}\` is invalid; use full or smoke`);
}
// `cargo xtask test` fails if no marked test has run on Postgres.
const marked = process.env["LONGSHORE_TEST_MARKED"];

/** Defines a test. */
export type DefineTest = (name: string, run: () => Promise<void>) => void;

export interface OneEngine {
  server: () => Server;
  engine: Engine;
  /** Defines a test. It does not run on Postgres with LONGSHORE_TEST_POSTGRES=smoke. */
  test: DefineTest;
  /** Defines a test that always runs on each engine. */
  smoke: DefineTest;
}

/** Defines tests for each engine, with one server per engine. */
export function onEachEngine(define: (one: OneEngine) => void, args?: string[]): void {
  for (const engine of engines) {
    describe(engine, () => {
      let server: Server;
      let isNeeded = false;
      const isSmoke = engine === "postgres" && onPostgres === "smoke";
      const smoke: DefineTest = (name, run) => {
        isNeeded = true;
        nodeTest(name, async () => {
          await run();
          if (isSmoke && marked) await appendFile(marked, `${name}\n`);
        });
      };
      define({ server: () => server, engine, test: isSmoke ? () => {} : smoke, smoke });
      if (!isNeeded) return;
      before(async () => {
        server = await startServer(engine, args);
      });
      after(() => server.stop());
    });
  }
}

interface WorkerInfo {
  id: string;
  name: string;
  pid: number | null;
  queues: string[];
  heartbeat_at: string;
}

/** The workers that are registered with a server. */
export async function workersOf(server: Server): Promise<WorkerInfo[]> {
  const reply = await fetch(`${server.url}/workers`);
  return (await reply.json()) as WorkerInfo[];
}

/** Waits until the server has received two more heartbeats of a worker. */
export async function twoHeartbeats(server: Server, name: string): Promise<void> {
  const heartbeat = async () =>
    (await workersOf(server)).find((each) => each.name === name)?.heartbeat_at ?? "";
  for (let n = 1; n <= 2; n += 1) {
    const before = await heartbeat();
    await until(`heartbeat ${n} of ${name}`, async () => (await heartbeat()) > before);
  }
}

/** Releases the leases of a program that was killed, which the server would do some seconds later. */
export async function signOff(server: Server, program: Program): Promise<void> {
  for (const { id, pid } of await workersOf(server)) {
    if (pid === program.child.pid) await fetch(`${server.url}/leases/${id}`, { method: "DELETE" });
  }
}

let counter = 0;
/** A name that no other test uses. */
export function unique(prefix: string): string {
  counter += 1;
  return `${prefix}-${process.pid}-${counter}`;
}

/** Runs a worker in this process while `body` runs. */
export async function withWorker<T>(
  ls: Longshore,
  options: WorkOptions,
  body: (log: LogEntry[]) => Promise<T>,
): Promise<T> {
  const stop = new AbortController();
  const log: LogEntry[] = [];
  const ready = signal();
  const working = ls.work({
    handleSignals: false,
    grace: 5,
    ...options,
    signal: stop.signal,
    log: (entry) => log.push(entry),
    onReady: () => ready.resolve(),
  });
  working.catch((error: unknown) => ready.reject(error));
  try {
    await ready.promise;
    return await body(log);
  } finally {
    stop.abort();
    await working.catch(() => {});
  }
}

/** A client for a server with a queue of its own. */
export function client(server: Server | string): Longshore {
  const ls = new Longshore({ server: typeof server === "string" ? server : server.url, retryFor: LIMIT });
  const wait = ls.wait.bind(ls);
  ls.wait = (id, options) => wait(id, { timeout: LIMIT, ...options });
  return ls;
}

/** Waits until a condition holds. */
export async function until<T>(
  what: string,
  condition: () => Promise<T> | T,
  seconds = LIMIT,
): Promise<NonNullable<T>> {
  const deadline = Date.now() + seconds * 1000;
  for (;;) {
    const found = await condition();
    if (found) return found;
    if (Date.now() > deadline) throw new Error(`not within ${seconds} s: ${what}`);
    await pause(10);
  }
}

/** The value of a promise, which must be there soon. */
export async function soon<T>(what: string, promise: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not within ${LIMIT} s: ${what}`)), LIMIT * 1000);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Starts one of the programs in `test/programs` or `examples`. It is killed after the tests of the file, at the latest. */
export function startProgram(path: string, env: Record<string, string>, args: string[] = []): Program {
  const program = new Program(fileURLToPath(new URL(`../${path}.js`, import.meta.url)), env, args);
  programs.push(program);
  return program;
}

const programs: Program[] = [];
// A program that a failed test leaves behind would keep this process alive.
after(() => {
  for (const { child } of programs) child.kill("SIGKILL");
});

export class Program {
  readonly child: ChildProcess;
  readonly lines: string[] = [];
  errors = "";
  readonly ended: Promise<number | null>;

  constructor(file: string, env: Record<string, string>, args: string[]) {
    this.child = spawn(process.execPath, ["--enable-source-maps", file, ...args], {
      env: { ...process.env, ...env },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let rest = "";
    this.child.stdout?.on("data", (chunk: Buffer) => {
      const parts = (rest + chunk.toString()).split("\n");
      rest = parts.pop() ?? "";
      this.lines.push(...parts);
    });
    this.child.stderr?.on("data", (chunk: Buffer) => {
      this.errors += chunk.toString();
    });
    // The streams end after the exit, so that all lines are there.
    this.ended = new Promise((resolve) => this.child.once("close", (code) => resolve(code)));
    const kill = () => this.child.kill("SIGKILL");
    process.once("exit", kill);
    void this.ended.then(() => process.off("exit", kill));
  }

  async line(pattern: RegExp | string): Promise<string> {
    const matches = (line: string) => (typeof pattern === "string" ? line === pattern : pattern.test(line));
    return until(
      `a line ${pattern} of the program, which wrote ${this.lines.join("|")} ${this.errors}`,
      () => {
        const found = this.lines.find(matches);
        if (!found && this.child.exitCode !== null) throw new Error(`the program ended: ${this.errors}`);
        return found;
      },
    );
  }
}

/** A TCP proxy. It forwards everything, loses some responses, or forwards nothing. */
export class CuttingProxy {
  url = "";
  /** Decides for each response whether it is lost. The server has processed its request. */
  losesResponse: (request: string) => boolean = () => false;
  /** While true, nothing is forwarded in either direction. */
  blocked = false;
  lost = 0;
  readonly #sockets = new Set<Socket>();
  readonly #server = createServer((socket) => this.#serve(socket));
  target: string;

  constructor(target: string) {
    this.target = target;
  }

  async start(): Promise<this> {
    await new Promise<void>((resolve) => this.#server.listen(0, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${(this.#server.address() as { port: number }).port}`;
    return this;
  }

  #serve(socket: Socket): void {
    const { port, hostname } = new URL(this.target);
    const upstream = connect(Number(port), hostname);
    let request = "";
    for (const [from, to] of [
      [socket, upstream],
      [upstream, socket],
    ] as const) {
      this.#sockets.add(from);
      from.on("error", () => to.destroy());
      from.on("close", () => {
        this.#sockets.delete(from);
        to.destroy();
      });
    }
    socket.on("data", (chunk) => {
      if (this.blocked) return;
      const text = chunk.toString("latin1");
      if (/^(GET|POST|PUT|DELETE|PATCH) /.test(text)) request = text.slice(0, text.indexOf("\r\n"));
      upstream.write(chunk);
    });
    upstream.on("data", (chunk) => {
      if (this.blocked) return;
      if (this.losesResponse(request)) {
        this.lost += 1;
        socket.destroy();
        upstream.destroy();
        return;
      }
      socket.write(chunk);
    });
  }

  async stop(): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    await new Promise<void>((resolve) => this.#server.close(() => resolve()));
  }
}

/** `Promise.withResolvers`, which Node 20 does not have. */
export function signal<T = void>(): {
  promise: Promise<T>;
  resolve: (value: T) => void;
  reject: (error: unknown) => void;
} {
  let resolve!: (value: T) => void;
  let reject!: (error: unknown) => void;
  const promise = new Promise<T>((yes, no) => {
    resolve = yes;
    reject = no;
  });
  return { promise, resolve, reject };
}
