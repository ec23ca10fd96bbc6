// Live updates: what they must not disturb, and what they cost with many tabs.

import assert from "node:assert/strict";
import { Worker, api, confirm, enqueue, failed, inBrowser, unique, until } from "./harness.mjs";

const TABS = 8;

inBrowser("focus, selection, typed text and open details survive a live update", async ({ open }) => {
  const kind = unique("task");
  const add = (count) => enqueue(Array.from({ length: count }, (_, n) => ({ kind, queue: kind, payload: { n } })));
  await add(5);
  const page = await open(`/ui/jobs?kind=${kind}`);
  await page.click("#more-filters summary");
  const box = page.locator("#jobs tbody tr input").nth(2);
  await box.check();
  const chosen = await box.inputValue();
  await page.focus('#filters input[name="error"]');
  await page.keyboard.type("half a wor");
  await page.evaluate(() => document.activeElement.setSelectionRange(2, 5));
  const [added] = await add(1);
  await page.locator(`#job-${added}`).waitFor();

  const state = await page.evaluate(() => {
    const { name, value, selectionStart, selectionEnd } = document.activeElement;
    return { name, value, selectionStart, selectionEnd, isOpen: document.querySelector("#more-filters").open };
  });
  assert.deepEqual(state, { name: "error", value: "half a wor", selectionStart: 2, selectionEnd: 5, isOpen: true });
  assert.equal(await page.locator(`#jobs input[value="${chosen}"]`).isChecked(), true);
  assert.equal(await page.locator("#bulk-count").textContent(), "1 selected");
}, { smoke: true });

inBrowser("an edit in progress and the scroll position survive a live update", async ({ open }) => {
  const kind = unique("task");
  const [id] = await enqueue([{ kind, queue: kind, payload: { lines: Array.from({ length: 60 }, (_, i) => i) } }]);
  const page = await open(`/ui/jobs/${id}`);
  await page.click(".head a:has-text('Edit')");
  const editor = page.locator("#edit textarea");
  await editor.fill('{"half": ');
  await editor.focus();
  const scrolled = await page.evaluate(() => scrollY);
  assert.ok(scrolled > 0, "the editor is below the fold");
  await api("PATCH", `/jobs/${id}`, { priority: 7 });
  await page.locator(".facts dd:text-is('7')").first().waitFor();
  assert.equal(await editor.inputValue(), '{"half": ');
  assert.equal(await page.evaluate(() => document.activeElement.name), "payload");
  assert.equal(await page.evaluate(() => scrollY), scrolled);
});

inBrowser("a selection survives when its jobs leave the page", async ({ open }) => {
  const kind = unique("task");
  const add = (count) => enqueue(Array.from({ length: count }, (_, n) => ({ kind, queue: kind, payload: { n } })));
  const [first] = await add(2);
  const page = await open(`/ui/jobs?kind=${kind}`);
  await page.locator("#jobs tbody tr input").first().check();
  await page.locator("#jobs tbody tr input").nth(1).check();
  await add(60);
  await page.locator(`#job-${first}`).waitFor({ state: "detached" });
  await page.locator("#bulk-count:text-is('2 selected, 2 no longer on this page')").waitFor();
  await page.click('#bulk button[value="cancel"]');
  assert.equal(await page.locator("#confirm-text").textContent(), `Cancel 2 queued jobs of ${kind}?`);
  await confirm(page);
  await page.locator("#operation:has-text('2 jobs cancelled')").waitFor();
});

inBrowser("a live update does not turn the focused button into another one", async ({ open }) => {
  const kind = unique("task");
  const [id] = await enqueue([{ kind, queue: kind, payload: {} }]);
  const worker = new Worker(unique("worker"), [kind]);
  const jobs = await worker.lease(1);
  const page = await open(`/ui/jobs/${id}`);
  await page.focus(".head button:text-is('Cancel')");
  await worker.settle(jobs, () => failed("no route to host"));
  await page.locator(".head button:text-is('Delete')").waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.textContent === "Delete"), false);
});

inBrowser("an editor that was not touched shows what was changed elsewhere", async ({ open }) => {
  const kind = unique("task");
  const [id] = await enqueue([{ kind, queue: kind, payload: { v: 1 } }]);
  const page = await open(`/ui/jobs/${id}`);
  await page.click(".head a:has-text('Edit')");
  await api("PATCH", `/jobs/${id}`, { payload: { v: 12345 }, priority: 7 });
  await page.locator(".facts dd:text-is('7')").first().waitFor();
  assert.match(await page.locator("#edit textarea").inputValue(), /12345/);
  assert.equal(await page.locator('#edit input[name="priority"]').inputValue(), "7");
});

inBrowser("deleting a job leads back to the list with its filters", async ({ open }) => {
  const kind = unique("task");
  await enqueue([{ kind, queue: kind, payload: {} }, { kind, queue: kind, payload: {} }]);
  await new Worker(unique("worker"), [kind]).failAll(() => "no route to host");
  const page = await open(`/ui/jobs?status=failed_permanent&kind=${kind}`);
  await page.locator("#jobs a[data-open]").first().click();
  await page.click(".head button:text-is('Delete')");
  await confirm(page);
  await page.waitForURL(`**/ui/jobs?status=failed_permanent&kind=${kind}`);
});

inBrowser("eight live tabs share one event stream and all update", async ({ context, open }) => {
  const kind = unique("task");
  // Tabs also update themselves every 15 s. Here, only the stream can be the reason.
  await context.addInitScript(() => { window.setInterval = () => 0; });
  const requests = new Set();
  // Not when it is requested: the server reports what happens after it has responded.
  context.on("response", (response) => response.url().endsWith("/events") && requests.add(response.request()));
  for (const end of ["requestfinished", "requestfailed"]) context.on(end, (request) => requests.delete(request));
  // The tabs with an open stream. The browser reports no end of the requests of a closed tab.
  const leaders = () => [...requests].map((request) => request.frame().page()).filter((tab) => !tab.isClosed());

  const tabs = [];
  for (let i = 0; i < TABS; i++) tabs.push(await open(`/ui/jobs?kind=${kind}`));
  const add = async () => (await enqueue([{ kind, queue: kind, payload: {} }]))[0];
  const allShow = async (id) => {
    for (const tab of tabs) await tab.locator(`#job-${id}`).waitFor();
    assert.equal(leaders().length, 1, "one tab has a stream");
  };
  await until("a tab opens the stream", () => leaders().length === 1);
  await allShow(await add());

  const [first] = leaders();
  tabs.splice(tabs.indexOf(first), 1);
  await first.close();
  await until("another tab opens the stream", () => leaders().length === 1);
  await allShow(await add());

  const [second] = leaders();
  tabs.splice(tabs.indexOf(second), 1);
  await second.evaluate(() => {
    Object.defineProperty(document, "hidden", { value: true });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await until("the hidden tab closes the stream, and a visible one opens it", () => leaders().length === 1 && leaders()[0] !== second);
  await allShow(await add());
});
