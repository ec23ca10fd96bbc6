/** Finds the `longshore` program: named by `LONGSHORE_BIN`, in the npm package of this platform, or on PATH. */

import { accessSync, constants } from "node:fs";
import { createRequire } from "node:module";
import { delimiter, join } from "node:path";
import { LongshoreError } from "./errors.js";

/** The npm package that contains the program for this platform. */
export function platformPackage(): string {
  return `@longshore/${process.platform}-${process.arch}`;
}

/** Returns the path of the program. Throws an error that says how to get it. */
export function findBinary(): string {
  const named = process.env["LONGSHORE_BIN"];
  if (named !== undefined && named !== "") {
    if (isExecutable(named)) return named;
    throw new LongshoreError(
      "not_found",
      `LONGSHORE_BIN: \`${named}\` is not an executable file; correct the path`,
    );
  }
  const program = process.platform === "win32" ? "longshore.exe" : "longshore";
  try {
    const manifest = createRequire(import.meta.url).resolve(`${platformPackage()}/package.json`);
    const found = join(manifest, "..", "bin", program);
    if (isExecutable(found)) return found;
  } catch {
    // The package is optional: it exists for some platforms only.
  }
  for (const folder of (process.env["PATH"] ?? "").split(delimiter)) {
    const found = join(folder, program);
    // The launcher of this package has the same name in node_modules/.bin.
    if (folder !== "" && !folder.includes("node_modules") && isExecutable(found)) return found;
  }
  throw new LongshoreError(
    "not_found",
    `the program \`longshore\` was not found: the package ${platformPackage()} is not installed, and it is not on PATH; ` +
      "install it with `npm install longshore` without --omit=optional, or set LONGSHORE_BIN to its path",
  );
}

function isExecutable(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}
