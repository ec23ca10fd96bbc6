/** The example `order`, killed with SIGKILL after each of its requests. */

import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { endProcess, onEachEngine, signOff, startProgram, until } from "./support.js";

/** One charge, ten parcels, one notification. */
const REQUESTS = 12;
/** How many orders run at once. */
const AT_ONCE = 4;

onEachEngine(({ server, test }) => {
  test("the order continues wherever it is killed", async () => {
    const folder = await mkdtemp(join(tmpdir(), "longshore-order-"));
    const env = { LONGSHORE_SERVER: server().url };

    async function killAfter(kill: number): Promise<void> {
      const args = [String(100 + kill), join(folder, String(kill))];
      const requests: string[] = [];
      if (kill < REQUESTS) {
        const killed = startProgram("examples/order", env, args);
        // Not killed before its first request: the job would not be stored yet.
        const enough = Math.max(kill, 1);
        await until(
          `${enough} requests`,
          () => killed.lines.length >= enough || killed.child.exitCode !== null,
        );
        await endProcess(killed.child, "SIGKILL");
        await killed.ended;
        await signOff(server(), killed);
        requests.push(...killed.lines);
      }
      const before = requests.length;
      const program = startProgram("examples/order", env, args);
      assert.equal(await program.ended, 0, `killed after ${kill} requests: ${program.errors}`);
      requests.push(...program.lines);
      const made = new Set(requests);
      assert.equal(made.size, REQUESTS, `killed after ${kill} requests: ${requests.join(" ")}`);
      // What ran when the program was killed may be repeated: the last request before it, or some of the
      // ten parcels, which are shipped in parallel.
      const inFlight = before <= 1 || before === REQUESTS ? 1 : REQUESTS - 2;
      const repeated = requests.length - made.size;
      assert.ok(
        repeated <= inFlight,
        `killed after ${kill} requests, ${repeated} repeated: ${requests.join(" ")}`,
      );
      const charges = requests.filter((request) => request.startsWith("charge")).length;
      assert.ok(before <= 1 || charges === 1, "a step that was stored is not repeated");
    }

    try {
      const kills = Array.from({ length: REQUESTS + 1 }, (_, kill) => kill);
      const work = async () => {
        for (let kill = kills.shift(); kill !== undefined; kill = kills.shift()) await killAfter(kill);
      };
      await Promise.all(Array.from({ length: AT_ONCE }, work));
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
  });
});
