// Generates src/wire.ts from docs/openapi.json. With --check, fails if the file would change.

import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const document = join(root, "../../docs/openapi.json");
const target = join(root, "src/wire.ts");

const folder = mkdtempSync(join(tmpdir(), "longshore-wire-"));
const output = join(folder, "wire.ts");
const program = join(root, "node_modules/openapi-typescript/bin/cli.js");
const result = spawnSync(process.execPath, [program, document, "--output", output], {
  stdio: ["ignore", "ignore", "inherit"],
});
if (result.status !== 0) process.exit(result.status ?? 1);
const generated = readFileSync(output, "utf8");
rmSync(folder, { recursive: true });

if (process.argv.includes("--check")) {
  if (readFileSync(target, "utf8") !== generated) {
    console.error("src/wire.ts differs from docs/openapi.json; run `npm run wire`");
    process.exit(1);
  }
} else {
  writeFileSync(target, generated);
}
