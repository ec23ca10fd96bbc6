// The life of a job, seen from its page.

import assert from "node:assert/strict";
import { Worker, api, confirm, enqueue, failed, inBrowser, send, succeeded, toast, unique } from "./harness.mjs";

const TWO_TO_63 = "9223372036854775808";

async function newKind() {
  const kind = unique("number");
  const schema = { type: "object", required: ["n"], properties: { n: { type: "integer" } } };
  await api("PUT", `/kinds/${kind}`, { schema, defaults: { queue: kind } });
  return kind;
}

inBrowser("a job is enqueued, runs, fails, is edited and retried, and succeeds", async ({ open, expect }) => {
  const kind = await newKind();
  const worker = new Worker("e2e", [kind]);
  const page = await open(`/ui/new?kind=${kind}`);

  expect(422);
  await page.fill('textarea[name="payload"]', '{"n": "seven"}');
  await page.click("button:has-text('Enqueue')");
  assert.match(await toast(page), /integer/, "the schema is checked");

  await page.fill('textarea[name="payload"]', `{"n": ${TWO_TO_63}}`);
  await page.click("button:has-text('Enqueue')");
  await page.waitForURL(/\/ui\/jobs\/[0-9a-f-]{36}$/);
  const id = page.url().split("/").pop();
  assert.match(await page.locator(".code").first().textContent(), new RegExp(TWO_TO_63));
  assert.match(await page.locator("#why").textContent(), /worker/, "the page says why the job does not run");

  const [first] = await worker.lease();
  await page.locator("h1 .is-running").waitFor();
  await worker.settle([first], () => failed("the ship sank <b>twice</b>"));
  await page.locator("h1 .is-failed").waitFor();
  assert.match(await page.locator("pre.error-text").textContent(), /the ship sank <b>twice<\/b>/);

  await page.click("a:has-text('Edit and retry')");
  const editor = page.locator("#edit textarea");
  assert.match(await editor.inputValue(), new RegExp(TWO_TO_63), "the number is exact in the editor");
  await editor.fill(`{"n": ${TWO_TO_63}, "again": true}`);
  await page.click("#edit button");
  await page.locator("h1 .is-queued").waitFor();
  assert.match(await send("GET", `/jobs/${id}`), new RegExp(`"n": ?${TWO_TO_63}`), "the number is exact in the database");

  const [second] = await worker.lease();
  assert.equal(second.payload.again, true);
  await page.locator("h1 .is-running").waitFor();
  await worker.settle([second], () => succeeded({ ok: true }));
  await page.locator("h1 .is-succeeded").waitFor();
  assert.match(await page.locator(".code").first().textContent(), /"ok": true/);
}, { smoke: true });

inBrowser("a job is cloned, and the copy is cancelled and deleted", async ({ open }) => {
  const kind = await newKind();
  const [id] = await enqueue([{ kind, payload: { n: 7 } }]);
  const page = await open(`/ui/jobs/${id}`);
  await page.click("a:has-text('Clone and edit')");
  await page.fill('textarea[name="payload"]', '{"n": 8}');
  await page.click("button:has-text('Enqueue')");
  await page.waitForURL((url) => /\/ui\/jobs\/[0-9a-f-]{36}$/.test(url.pathname) && !url.pathname.endsWith(id));
  await page.click("button:has-text('Cancel')");
  await confirm(page);
  await page.locator("h1 .is-cancelled").waitFor();
  await page.click("button:has-text('Delete')");
  await confirm(page);
  await page.waitForURL(/\/ui\/jobs$/);
  assert.deepEqual((await api("GET", `/jobs?kind=${kind}`)).map((job) => job.id), [id]);
});

inBrowser("the payload is copied as it is stored", async ({ open, context }) => {
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  const kind = await newKind();
  const [id] = await enqueue([{ kind, payload: { n: 12 } }]);
  const page = await open(`/ui/jobs/${id}`);
  await page.click("[data-copy-code]");
  assert.equal(await toast(page), "Copied.");
  assert.deepEqual(JSON.parse(await page.evaluate(() => navigator.clipboard.readText())), { n: 12 });
});
