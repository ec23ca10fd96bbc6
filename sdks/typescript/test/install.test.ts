/** The npm packages, installed into an empty folder: the launcher, the server, a worker and an enqueue. */

import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { mkdir, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { findBinary, platformPackage } from "../src/binary.js";
import { endProcess, LIMIT, until } from "./support.js";

const run = promisify(execFile);
const root = fileURLToPath(new URL("../..", import.meta.url));

const APP = `
import { Longshore } from "longshore";
import { startDev } from "longshore/testing";
const server = process.env.LONGSHORE_SERVER ? undefined : await startDev();
const ls = new Longshore(server ? { server: server.url } : {});
const greet = ls.job("greet", async ({ name }) => "Hello " + name);
const stop = new AbortController();
let ready;
const registered = new Promise((resolve) => { ready = resolve; });
const working = ls.work({ signal: stop.signal, onReady: () => ready() });
await registered;
console.log(await (await greet.enqueue({ name: "Ada" })).result());
stop.abort();
await working;
ls.close();
await server?.stop();
`;

test("the packages install into an empty folder and run", async () => {
  const folder = await mkdtemp(join(tmpdir(), "longshore-install-"));
  const environment = { ...process.env };
  // The installed program must be found, not the one of the tests.
  delete environment["LONGSHORE_BIN"];
  delete environment["LONGSHORE_SERVER"];
  try {
    const out = join(folder, "out");
    await run(process.execPath, ["tools/pack.mjs", "--binary", findBinary(), "--out", out], { cwd: root });
    const tarballs = (await readdir(out))
      .filter((name) => name.endsWith(".tgz"))
      .map((name) => join(out, name));
    assert.equal(tarballs.length, 2);
    const app = join(folder, "app");
    await mkdir(app);
    await writeFile(join(app, "package.json"), '{"name":"app","private":true,"type":"module"}');
    await run("npm", ["install", "--offline", "--no-audit", "--no-fund", ...tarballs], {
      cwd: app,
      env: environment,
    });
    const installed = JSON.parse(
      await readFile(join(app, "node_modules/longshore/package.json"), "utf8"),
    ) as {
      optionalDependencies: Record<string, string>;
      dependencies?: unknown;
    };
    assert.deepEqual(Object.keys(installed.optionalDependencies), [platformPackage()]);
    assert.equal(installed.dependencies, undefined);

    const { stdout: version } = await run("npx", ["longshore", "--version"], { cwd: app, env: environment });
    assert.match(version, /^longshore \d/);
    await writeFile(join(app, "app.js"), APP);
    const { stdout } = await run(process.execPath, ["app.js"], {
      cwd: app,
      env: environment,
      timeout: 5 * LIMIT * 1000,
    });
    assert.equal(stdout, "Hello Ada\n", "with a server that startDev has started");

    const launcher = join(app, "node_modules/.bin/longshore");
    const dev = spawn(launcher, ["dev", "--bind", "127.0.0.1:0"], {
      cwd: app,
      env: environment,
      stdio: ["ignore", "pipe", "pipe"],
    });
    let output = "";
    dev.stdout.on("data", (chunk) => (output += chunk));
    dev.stderr.on("data", (chunk) => (output += chunk));
    const url = await until(
      "the address of longshore dev",
      () => /listening on (http:\S+)/.exec(output)?.[1],
    );
    const served = await run(process.execPath, ["app.js"], {
      cwd: app,
      env: { ...environment, LONGSHORE_SERVER: url },
      timeout: 5 * LIMIT * 1000,
    });
    assert.equal(served.stdout, "Hello Ada\n", "with a server that the launcher has started");
    // The launcher passes the signal on, and ends with the program. The output closes when both have ended.
    let closed = false;
    dev.once("close", () => (closed = true));
    await endProcess(dev, "SIGTERM");
    await until("the server has stopped", () => closed);
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
});

test("without the program, the error says how to get it", async () => {
  const environment = { ...process.env, PATH: "/nonexistent" };
  delete (environment as Record<string, string | undefined>)["LONGSHORE_BIN"];
  const launched = run(process.execPath, ["bin/longshore.js", "--version"], { cwd: root, env: environment });
  await assert.rejects(launched, (error: { stderr: string }) =>
    /longshore: the program `longshore` was not found: .* set LONGSHORE_BIN/.test(error.stderr),
  );
});
