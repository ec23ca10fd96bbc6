// Operations on ten thousand jobs. They take the longest, so the name of this file is one of the first.

import assert from "node:assert/strict";
import { Worker, api, confirm, enqueue, inBrowser, unique, until } from "./harness.mjs";

const MANY = 10_000;
const OTHERS = 30;
// How long so many jobs may take on a slow machine, in milliseconds.
const LONG = 20 * 60_000;

// A kind with `MANY` dead letters that failed in the same way.
async function deadLetters() {
  const kind = unique("mail");
  await enqueue(Array.from({ length: MANY }, (_, i) => ({ kind, queue: kind, payload: { connection: 10_000 + i } })));
  // The errors differ in their numbers, so they are one group.
  const error = ({ payload }) => `connection ${payload.connection} was refused`;
  await Promise.all([1, 2, 3, 4].map((i) => new Worker(`mailer-${i}`, [kind]).failAll(error)));
  return kind;
}

const countOf = async (kind, status) => {
  const { counts } = await api("GET", "/stats");
  return counts.find((count) => count.kind === kind && count.status === status)?.jobs ?? 0;
};

async function openGroup(open, kind) {
  const page = await open(`/ui/failures?kind=${kind}`);
  // Counts are folded by upkeep; the page is live.
  await page.waitForFunction(() => document.querySelectorAll("#failures tbody tr").length === 1);
  return page;
}

const operationOf = (page) => api("GET", `/operations/${new URL(page.url()).searchParams.get("operation")}`);

inBrowser("one click redrives a group of ten thousand, and the page shows it finish", async ({ open }) => {
  const kind = await deadLetters();
  const page = await openGroup(open, kind);
  await page.click("#failures button:has-text('Retry all')");
  assert.match(await page.locator("#confirm-text").textContent(), /failed jobs of .* with the error “.+”/);
  await confirm(page);
  await page.waitForURL(/operation=/);
  assert.match(page.url(), new RegExp(`kind=${kind}`), "the filter is kept");
  await page.locator("[data-operation-text]:has-text('Done')").waitFor({ timeout: LONG });
  assert.match(await page.locator("[data-operation-numbers]").textContent(), /10,000 jobs retried, 0 skipped/);
  assert.equal(await countOf(kind, "queued"), MANY);
  await page.waitForFunction(() => !document.querySelector("#failures button"));
});

// Starts an operation and stops it. Returns nothing if it ended before.
async function stopHalfWay(open) {
  const kind = await deadLetters();
  const page = await openGroup(open, kind);
  // Operations take turns of a thousand jobs. Others that change nothing delay this one until it is stopped.
  const cancel = { action: "cancel", filter: { kind, status: ["failed_permanent"] } };
  const others = await Promise.all(Array.from({ length: OTHERS }, () => api("POST", "/operations", cancel)));
  await page.click("#failures button:has-text('Retry all')");
  await confirm(page);
  const text = (word) => page.locator(`[data-operation-text]:has-text('${word}')`);
  const ended = text("Done").waitFor({ timeout: LONG }).then(() => "ended", () => "stopped");
  const stopping = page.click("[data-operation-stop]").then(() => text("Stopped").waitFor()).then(() => "stopped", () => "ended");
  const how = await Promise.race([stopping, ended]);
  // One that has ended cannot be stopped.
  await Promise.allSettled(others.map(({ id }) => api("POST", `/operations/${id}/stop`)));
  if (how === "ended") return undefined;
  const { changed } = await until("no step is in progress any more", async () => {
    const [before, queued] = [await operationOf(page), await countOf(kind, "queued")];
    return before.changed === queued && before;
  });
  return changed < MANY ? { kind, page } : undefined;
}

inBrowser("an operation is stopped half way and continued", async ({ open }) => {
  let stopped;
  // On a slow machine, an operation may end before it is stopped.
  for (let round = 1; !stopped && round <= 3; round += 1) stopped = await stopHalfWay(open);
  const { kind, page } = stopped ?? assert.fail("no operation could be stopped");
  assert.equal((await operationOf(page)).state, "stopped");

  await page.click("[data-operation-resume]");
  await page.locator("[data-operation-text]:has-text('Done')").waitFor({ timeout: LONG });
  assert.match(await page.locator("[data-operation-numbers]").textContent(), /10,000 jobs retried/);
  assert.equal(await countOf(kind, "queued"), MANY);
});
