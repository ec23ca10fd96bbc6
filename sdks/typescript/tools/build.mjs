// Compiles src to dist, or with --test everything to build.

import { spawnSync } from "node:child_process";
import { rmSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const test = process.argv.includes("--test");
rmSync(join(root, test ? "build" : "dist"), { recursive: true, force: true });
const project = test ? "tsconfig.json" : "tsconfig.build.json";
const program = join(root, "node_modules/typescript/bin/tsc");
process.exit(
  spawnSync(process.execPath, [program, "-p", project], { cwd: root, stdio: "inherit" }).status ?? 1,
);
