/** Worker processes that die: nothing is lost, and nothing is settled twice. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  client,
  endProcess,
  LIMIT,
  onEachEngine,
  type Program,
  type Server,
  startProgram,
  unique,
  until,
} from "./support.js";

const JOBS = 5_000;
const KILLS = 5;
const PROCESSES = 2;

onEachEngine(({ server, smoke }) => {
  smoke(`${JOBS} jobs under ${KILLS} kills: nothing is lost, nothing is settled twice`, async () => {
    const folder = await mkdtemp(join(tmpdir(), "longshore-kills-"));
    const effects = join(folder, "effects");
    const queue = unique("queue");
    const ls = client(server());
    const note = ls.declare<string>("test_note", { queue });
    const env = {
      LONGSHORE_SERVER: server().url,
      TEST_QUEUE: queue,
      TEST_EFFECTS: effects,
      TEST_STALE_AFTER: "3",
      TEST_CONCURRENCY: "20",
      TEST_NOTE_MS: "20",
    };
    const programs: Program[] = [];
    const start = async () => {
      const program = startProgram("test/programs/worker", env);
      await program.line("ready");
      programs.push(program);
    };
    const ran = () => {
      try {
        return readFileSync(effects, "utf8").trimEnd().split("\n");
      } catch {
        return [];
      }
    };
    try {
      for (let n = 0; n < PROCESSES; n += 1) await start();
      await note.enqueueMany(Array.from({ length: JOBS }, (_, n) => `note-${n}`));
      for (let kill = 1; kill <= KILLS; kill += 1) {
        const enough = (JOBS / (KILLS + 2)) * kill;
        await until(`${enough} runs`, () => ran().length >= enough, 10 * LIMIT);
        const victim = programs.shift();
        assert.ok(victim);
        await endProcess(victim.child, "SIGKILL");
        await start();
      }
      const live = async () => {
        for await (const _ of ls.list({ queue, status: ["queued", "running", "retrying"], limit: 1 }))
          return true;
        return false;
      };
      await until("all jobs to end", async () => !(await live()), 10 * LIMIT);
      for (const program of programs) program.child.kill("SIGTERM");
      for (const program of programs) assert.equal(await program.ended, 0, program.errors);

      const lines = ran().map((line) => line.split(" "));
      assert.equal(new Set(lines.map(([text]) => text)).size, JOBS, "every job has run");
      let ended = 0;
      let interrupted = 0;
      for await (const job of ls.list({ queue })) {
        ended += 1;
        interrupted += job.interruptions > 0 ? 1 : 0;
        assert.deepEqual([job.status, job.attempts], ["succeeded", 1], job.id);
      }
      assert.equal(ended, JOBS);
      assert.ok(interrupted > 0, "some jobs ran when their worker was killed");
      const repeated = lines.length - JOBS;
      // A job runs again if its worker was killed before its outcome was stored.
      assert.ok(repeated <= KILLS * 100, `${repeated} runs were repeated`);
      const problems = await check(server());
      assert.equal(problems, "");
    } finally {
      for (const program of programs) program.child.kill("SIGKILL");
      await rm(folder, { recursive: true, force: true });
    }
  });
});

/** `longshore check` verifies that every job is in exactly one place. */
async function check(server: Server): Promise<string> {
  const { execFile } = await import("node:child_process");
  const { findBinary } = await import("../src/binary.js");
  return new Promise((resolve) => {
    execFile(findBinary(), ["check", "--database-url", server.serverUrl], (error, stdout, stderr) =>
      resolve(error ? `${stdout}${stderr}` : ""),
    );
  });
}
