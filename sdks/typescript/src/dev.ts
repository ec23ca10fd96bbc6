/** Starts `longshore dev` for tests: a server with a database of its own in a temporary folder. */

import { type ChildProcess, spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { findBinary } from "./binary.js";
import { LongshoreError } from "./errors.js";

export interface DevOptions {
  /** The folder for the data; a temporary one by default, which `stop` removes. */
  dataDir?: string | undefined;
  /** More arguments for `longshore dev`. */
  args?: string[] | undefined;
  /** How many seconds the start may take; 60 by default. */
  timeout?: number | undefined;
}

export interface DevServer {
  /** The URL, for `new Longshore({ server })`. */
  readonly url: string;
  /** Stops the server and removes its temporary folder. */
  stop(): Promise<void>;
}

/** Starts `longshore dev` on a free port. The program is found as `npx longshore` finds it. */
export async function startDev(options: DevOptions = {}): Promise<DevServer> {
  const program = findBinary();
  const folder = options.dataDir ?? (await mkdtemp(join(tmpdir(), "longshore-dev-")));
  const args = ["dev", "--bind", "127.0.0.1:0", "--data-dir", folder, ...(options.args ?? [])];
  const child = spawn(program, args, { stdio: ["ignore", "pipe", "pipe"] });
  // A test run that is interrupted must not leave the server behind.
  const kill = () => child.kill("SIGKILL");
  process.once("exit", kill);
  const stop = async () => {
    process.off("exit", kill);
    await end(child);
    if (options.dataDir === undefined) await rm(folder, { recursive: true, force: true });
  };
  try {
    return { url: await listening(child, options.timeout ?? 60), stop };
  } catch (error) {
    await stop();
    throw error;
  }
}

/** Waits until the program prints its address. */
function listening(child: ChildProcess, seconds: number): Promise<string> {
  return new Promise((resolve, reject) => {
    let output = "";
    const fail = (why: string) => {
      clearTimeout(timer);
      reject(new LongshoreError("unavailable", `longshore dev: ${why}; its output: ${output.slice(-2000)}`));
    };
    const timer = setTimeout(() => fail(`not ready within ${seconds} s`), seconds * 1000);
    const read = (chunk: Buffer) => {
      output += chunk.toString();
      const url = /listening on (http:\/\/\S+)/.exec(output)?.[1];
      if (url === undefined) return;
      clearTimeout(timer);
      output = "";
      resolve(url);
    };
    child.stdout?.on("data", read);
    child.stderr?.on("data", read);
    child.on("error", (error) => fail(error.message));
    child.on("exit", (code) => fail(`ended with status ${code}`));
  });
}

async function end(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = new Promise<void>((resolve) => child.once("exit", () => resolve()));
  child.kill("SIGTERM");
  const timer = setTimeout(() => child.kill("SIGKILL"), 60_000);
  await ended;
  clearTimeout(timer);
}
