#!/usr/bin/env node
// Runs the `longshore` program of this platform with the same arguments, so that `npx longshore dev` works.

import { spawn } from "node:child_process";
import { constants } from "node:os";
import { findBinary } from "../dist/binary.js";

let program;
try {
  program = findBinary();
} catch (error) {
  console.error(`longshore: ${error.message}`);
  process.exit(1);
}
const child = spawn(program, process.argv.slice(2), { stdio: "inherit" });
// The program handles signals itself; this process ends when the program does.
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
child.on("error", (error) => {
  console.error(`longshore: cannot start ${program}: ${error.message}`);
  process.exit(1);
});
child.on("exit", (code, signal) => {
  process.exit(signal === null ? (code ?? 1) : 128 + (constants.signals[signal] ?? 1));
});
