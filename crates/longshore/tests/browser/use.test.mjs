// How people use the dashboard: filters and the keyboard.

import assert from "node:assert/strict";
import { api, confirm, enqueue, inBrowser, pressShortcut, unique, until } from "./harness.mjs";

async function queuedJobs(count) {
  const kind = unique("task");
  const ids = await enqueue(Array.from({ length: count }, (_, n) => ({ kind, queue: kind, payload: { n } })));
  return { kind, ids };
}

inBrowser("filters are in the URL and survive an action on one job", async ({ open }) => {
  const { kind } = await queuedJobs(3);
  const page = await open(`/ui/jobs?status=queued&kind=${kind}`);
  await page.click("#jobs tbody tr a[data-open]");
  await page.click("button:has-text('Cancel')");
  await confirm(page);
  await page.locator("h1 .is-cancelled").waitFor();
  await page.goBack();
  assert.match(page.url(), new RegExp(`status=queued&kind=${kind}`));
  await page.waitForFunction(() => document.querySelectorAll("#jobs tbody tr").length === 2);
  await page.fill('#filters input[name="queue"]', kind);
  await page.click("button:has-text('Filter')");
  await page.waitForURL(new RegExp(`status=queued.*kind=${kind}.*queue=${kind}`));
});

inBrowser("filters that come from another page survive the form", async ({ open }) => {
  const given = { failure: "0123456789abcdef", unique_key: "order:7", ended_after: "2031-05-06T07:08:09.000Z" };
  const page = await open(`/ui/jobs?status=queued&${new URLSearchParams(given)}`);
  await page.fill('#filters input[name="kind"]', "email");
  await page.click("button:has-text('Filter')");
  await page.waitForURL(/kind=email/);
  const { searchParams } = new URL(page.url());
  const kept = ["status", "failure", "unique_key", "ended_after"].map((name) => searchParams.get(name));
  assert.deepEqual(kept, ["queued", given.failure, given.unique_key, "2031-05-06T07:08:09"]);
});

inBrowser("filters survive an action on selected jobs and on all that match", async ({ open }) => {
  const { kind, ids } = await queuedJobs(60);
  const page = await open(`/ui/jobs?status=queued&kind=${kind}`);
  const box = page.locator("#jobs tbody tr input");
  const chosen = [await box.nth(0).inputValue(), await box.nth(2).inputValue()];
  await box.nth(0).check();
  await box.nth(2).check();
  assert.equal(await page.locator("#bulk-count").textContent(), "2 selected");
  await page.click("#bulk button:has-text('Cancel')");
  await confirm(page);
  await page.locator("[data-operation-text]:has-text('Done')").waitFor();
  assert.match(page.url(), new RegExp(`status=queued&kind=${kind}&operation=`));
  const cancelled = async () => (await api("GET", `/jobs?kind=${kind}&status=cancelled&limit=100`)).map((job) => job.id).sort();
  assert.deepEqual(await cancelled(), chosen.sort());

  await page.click("#operation a:has-text('Dismiss')");
  await page.waitForURL(new RegExp(`status=queued&kind=${kind}$`));
  await page.locator("[data-select-matching]:has-text('(58)')").waitFor({ state: "attached" });
  await page.check("[data-select-page]");
  await page.click("[data-select-matching]");
  assert.equal(await page.locator("#bulk-count").textContent(), "all 58 matching selected");
  await page.click("#bulk button:has-text('Cancel')");
  assert.match(await page.locator("#confirm-text").textContent(), /^Cancel 58 queued jobs of .* that match the filters\?$/);
  await confirm(page);
  await page.locator("[data-operation-text]:has-text('Done')").waitFor();
  assert.match(page.url(), new RegExp(`status=queued&kind=${kind}&operation=`));
  assert.deepEqual(await cancelled(), ids.sort());
}, { smoke: true });

inBrowser("the keyboard is enough", async ({ open }) => {
  const { kind, ids } = await queuedJobs(3);
  const page = await open("/ui");
  const press = async (...keys) => { for (const key of keys) await page.keyboard.press(key); };
  const isOpen = (dialog) => page.locator(dialog).evaluate((element) => element.open);

  await press("?");
  assert.equal(await isOpen("#keys"), true, "? lists the shortcuts");
  await press("Escape");
  assert.equal(await isOpen("#keys"), false);

  await pressShortcut(page, "g", "j");
  await page.waitForURL(/\/ui\/jobs$/);
  await page.goto(`${page.url()}?kind=${kind}`);
  await press("j", "j", "j", "k", "x");
  assert.equal(await page.locator("#bulk-count").textContent(), "1 selected");
  const [, second] = await page.locator("#jobs tbody tr input").evaluateAll((boxes) => boxes.map((box) => box.value));
  assert.equal(await page.locator("#jobs input[name=id]:checked").inputValue(), second);
  await press("Enter");
  await page.waitForURL(new RegExp(`/ui/jobs/${second}$`));

  // The actions of the page are in the palette. The question is answered with the keyboard too.
  await press("Control+k");
  assert.equal(await isOpen("#palette"), true, "Ctrl-K opens the palette");
  await page.keyboard.type("cancel");
  await page.locator('#palette-list li[aria-selected="true"]:has-text("Cancel")').waitFor();
  await press("Enter");
  await page.locator("#confirm[open]").waitFor();
  await press("Tab", "Enter");
  await page.locator("h1 .is-cancelled").waitFor();

  await press("/");
  assert.equal(await isOpen("#palette"), true, "/ opens the palette");
  await page.keyboard.type(ids[0]);
  await press("Enter");
  await page.waitForURL(new RegExp(`/ui/jobs/${ids[0]}$`));

  await press("/");
  await page.keyboard.type(ids[2]);
  await page.locator(`#palette-list li[aria-selected="true"]:has-text("${ids[2]}")`).waitFor();
  await press("Enter");
  await page.waitForURL(new RegExp(`/ui/jobs/${ids[2]}$`));

  await press("/");
  await page.keyboard.type(kind);
  await page.locator('#palette-list li:has-text("queue")').waitFor();
  await press("ArrowDown", "ArrowUp", "Enter");
  await page.waitForURL(new RegExp(`/ui/(queues|kinds)/${kind}$`));

  // Without shortcuts: the first stop is a link to the content.
  await page.reload();
  await press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to content");
  await press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "main");
});

inBrowser("shortcuts do nothing while a text is typed", async ({ open }) => {
  const page = await open("/ui/jobs");
  await page.focus('#filters input[name="kind"]');
  await page.keyboard.type("gj?/x");
  assert.equal(await page.inputValue('#filters input[name="kind"]'), "gj?/x");
  assert.equal(await page.locator("dialog[open]").count(), 0);
});

inBrowser("a queue is paused, resumed and limited", async ({ open }) => {
  const { kind } = await queuedJobs(1);
  const page = await open(`/ui/queues/${kind}`);
  await page.click(".head button:has-text('Pause')");
  await confirm(page);
  await page.locator("h1 .status:has-text('paused')").waitFor();
  await page.click(".head button:has-text('Resume')");
  await page.locator("h1 .status:has-text('paused')").waitFor({ state: "detached" });
  await page.fill('form[action$="/limit"] input', "3");
  await page.click('form[action$="/limit"] button');
  await until("the limit is stored", async () => {
    const queues = await api("GET", "/queues");
    return queues.find((queue) => queue.name === kind).limit === 3;
  });
}, { smoke: true });

inBrowser("the chosen theme is kept", async ({ open }) => {
  const page = await open("/ui");
  const theme = () => page.evaluate(() => getComputedStyle(document.documentElement).colorScheme);
  await page.click("[data-theme-toggle]");
  assert.equal(await theme(), "dark");
  await page.reload();
  assert.equal(await theme(), "dark");
});
