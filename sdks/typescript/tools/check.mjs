// Everything that a change has to pass: lint, types of the package, the tests and the examples, the generated wire
// types, and the tests. LONGSHORE_BIN names the server; with LONGSHORE_TEST_DATABASE_URL the tests also run on Postgres.

import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const steps = [
  ["lint", "node_modules/@biomejs/biome/bin/biome", "ci", "."],
  ["types", "node_modules/typescript/bin/tsc", "-p", "tsconfig.json", "--noEmit"],
  ["wire", "tools/wire.mjs", "--check"],
  ["tests", "tools/test.mjs", ...process.argv.slice(2)],
];
for (const [name, ...args] of steps) {
  console.log(`== ${name}`);
  const { status } = spawnSync(process.execPath, args, { cwd: root, stdio: "inherit" });
  if (status !== 0) {
    console.error(`${name} failed`);
    process.exit(status ?? 1);
  }
}
