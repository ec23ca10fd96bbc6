// Compiles the tests and runs them. Arguments are parts of file names, such as `worker`.
// LONGSHORE_BIN names the server, LONGSHORE_TEST_DATABASE_URL a Postgres server for the second engine.

import { spawnSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
// The examples import the package by its name, which is what is in dist.
for (const args of [[], ["--test"]]) {
  const compiled = spawnSync(process.execPath, ["tools/build.mjs", ...args], { cwd: root, stdio: "inherit" });
  if (compiled.status !== 0) process.exit(compiled.status ?? 1);
}
const words = process.argv.slice(2).filter((word) => !word.startsWith("-"));
const flags = process.argv.slice(2).filter((word) => word.startsWith("-"));
const files = readdirSync(join(root, "build/test"))
  .filter((name) => name.endsWith(".test.js"))
  .filter((name) => words.length === 0 || words.some((word) => name.includes(word)))
  .map((name) => join("build/test", name));
if (process.env["LONGSHORE_TEST_DATABASE_URL"] === undefined) {
  console.log("LONGSHORE_TEST_DATABASE_URL is not set: the tests run on SQLite only");
}
// One file at a time: each starts servers, and the machine runs other suites beside this one.
const args = ["--enable-source-maps", "--test", "--test-concurrency=1", ...flags, ...files];
process.exit(spawnSync(process.execPath, args, { cwd: root, stdio: "inherit" }).status ?? 1);
