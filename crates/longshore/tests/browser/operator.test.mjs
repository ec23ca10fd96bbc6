// What an operator does who has never seen the dashboard: find out why a job does not run, pause a tenant,
// retry yesterday's failures, see what a flow waits for.

import assert from "node:assert/strict";
import { Worker, api, confirm, enqueue, inBrowser, server, toast, unique } from "./harness.mjs";

inBrowser("the reasons why a job does not run are removed where they are shown", async ({ open }) => {
  const queue = unique("webhooks");
  const [id] = await enqueue([{ kind: queue, queue, group: "globex", payload: {} }]);
  await api("POST", `/queues/${queue}/pause`);
  await api("PATCH", `/queues/${queue}/groups/globex`, { paused: true });
  const page = await open(`/ui/jobs/${id}`);
  const reasons = page.locator("#why li");
  assert.equal(await reasons.count(), 3, "paused, paused, no worker");
  assert.equal(await page.locator("button:has-text('Run now')").count(), 0, "the job is due");
  assert.equal(await page.locator("#why code:visible").count(), 0, "commands are folded");

  await page.click(`#why button:has-text('Resume queue ${queue}')`);
  assert.equal(await toast(page), `Queue ${queue} runs again.`);
  await page.waitForFunction(() => document.querySelectorAll("#why li").length === 2);
  await page.click("#why button:has-text('Resume group globex')");
  await page.locator("#why p:has-text('No live worker takes jobs from queue')").waitFor();
  assert.equal(await page.locator("#why button").count(), 0, "no button starts a worker");
  await page.click("#why summary");
  await page.locator("#why code:has-text('longshore worker')").waitFor();

  await page.click(`#why a:has-text('${queue}')`);
  await page.waitForURL(new RegExp(`/ui/queues/${queue}$`));
  await page.locator("#no-worker").waitFor();
}, { smoke: true });

inBrowser("a delayed job of a paused queue does not claim to start", async ({ open }) => {
  const queue = unique("later");
  const [id] = await enqueue([{ kind: queue, queue, delay_seconds: 3600, payload: {} }]);
  await api("POST", `/queues/${queue}/pause`);
  const page = await open(`/ui/jobs/${id}`);
  await page.click("button:has-text('Run now')");
  assert.equal(await toast(page), `${queue} is due now, but it cannot start yet: queue ${queue} is paused.`);
  await page.locator("button:has-text('Run now')").waitFor({ state: "detached" });
});

inBrowser("a group is found by name, shown among many, and paused", async ({ open }) => {
  const queue = unique("tenants");
  const groups = Array.from({ length: 130 }, (_, i) => `t${String(i).padStart(3, "0")}_${queue}`);
  const ids = await enqueue(groups.map((group) => ({ kind: queue, queue, group, payload: {} })));
  const page = await open("/ui");
  await page.keyboard.press("/");
  await page.keyboard.type(groups[129]);
  await page.locator(`#palette-list li:has-text('group of ${queue}')`).click();
  await page.waitForURL(new RegExp(`/ui/queues/${queue}\\?group=${groups[129]}#group-${groups[129]}$`));
  const row = page.locator("#groups tr.is-named");
  await row.locator("button:has-text('Pause')").click();
  await row.locator("button:has-text('Resume')").waitFor();
  assert.equal(await toast(page), `${groups[129]} is paused.`);
  await page.locator("h1:has-text('1 group paused')").waitFor();

  await page.goto(`${server.url}/ui/queues?name=${queue}`);
  await page.locator("#queues .tag:has-text('1 group paused')").waitFor();
  await page.goto(`${server.url}/ui/jobs/${ids[129]}`);
  await page.click(`#facts a:has-text('${groups[129]}')`);
  await page.locator("#groups tr.is-named:has-text('paused')").waitFor();
}, { smoke: true });

async function failedJobs(count) {
  const kind = unique("mail");
  const ids = await enqueue(Array.from({ length: count }, (_, n) => ({ kind, queue: kind, payload: { n } })));
  await new Worker(`worker of ${kind}`, [kind]).failAll(() => "550 unknown user");
  return { kind, ids };
}

inBrowser("failed jobs are retried, and the list shows it before it says so", async ({ open }) => {
  const { kind } = await failedJobs(3);
  const page = await open(`/ui/jobs?status=failed_permanent&kind=${kind}`);
  await page.locator("#jobs tbody tr input").first().check();
  assert.equal(await page.locator("[data-select-matching]").isVisible(), true);
  await page.check("[data-select-page]");
  assert.equal(await page.locator("[data-select-matching]").isVisible(), false, "all are selected");
  assert.deepEqual(await page.locator("#bulk button[name=action]:visible").allTextContents(), ["Retry", "Delete"]);
  await page.click("#bulk button:has-text('Retry')");
  assert.equal(await page.locator("#confirm-text").textContent(), `Retry 3 failed jobs of ${kind}?`);
  assert.deepEqual(await page.locator("#confirm button").allTextContents(), ["Do not retry", "Retry 3 jobs"]);
  await confirm(page);
  await page.locator("[data-operation-text]:has-text('Done')").waitFor();
  assert.equal(await page.locator("#jobs tbody tr").count(), 0, "the list is up to date");
  assert.equal(await page.locator("[data-operation-numbers]").textContent(), "3 jobs retried, 0 skipped");
  assert.equal(await page.locator("#tabs a:has-text('Failed') .count.is-alarming").count(), 0);

  const [job] = await api("GET", `/jobs?kind=${kind}&limit=1`);
  await page.goto(`${server.url}/ui/jobs/${job.id}`);
  await page.locator("#timeline:has-text('Retried by an operator')").waitFor();
}, { smoke: true });

inBrowser("the jobs of one failure are retried from its page", async ({ open }) => {
  const { kind } = await failedJobs(2);
  const [failure] = await api("GET", `/failures?kind=${kind}`);
  const page = await open(`/ui/failures/${failure.fingerprint}`);
  await page.click("button:has-text('Retry all 2…')");
  assert.match(await page.locator("#confirm-text").textContent(), new RegExp(`^Retry 2 failed jobs of ${kind} with the error “.+”\\?`));
  assert.equal(await page.locator("#confirm-yes").textContent(), "Retry 2 jobs");
  await confirm(page);
  await page.locator("[data-operation-numbers]:has-text('2 jobs retried, 0 skipped')").waitFor();
});

inBrowser("jobs are chosen by the time of their end, without JavaScript", async ({ open }) => {
  const { kind } = await failedJobs(2);
  const page = await open(`/ui/jobs?kind=${kind}`);
  // Another URL each time, so that the rows are those of the next page.
  const submit = async () => {
    const before = page.url();
    await page.click("#filters button:has-text('Filter')");
    await page.waitForURL((url) => url.href !== before);
    return page.locator("#jobs tbody tr").count();
  };
  const filter = async (choice) => {
    await page.selectOption("#ended", { label: choice });
    return submit();
  };
  const custom = page.locator("#filters .custom input");
  assert.equal(await custom.first().isVisible(), false);
  assert.equal(await filter("last hour"), 2);
  assert.match(await page.locator("#chips").textContent(), /Ended: last hour \(UTC\)/);
  assert.equal(await page.locator("#tabs .count").count(), 0, "counts do not obey this filter");
  assert.equal(await filter("more than 12 hours ago"), 0);
  assert.equal(await filter("any time"), 2);
  await page.selectOption("#ended", { label: "custom…" });
  await custom.first().fill("2031-05-06T07:08:09");
  await custom.last().fill("2031-05-07T07:08:09");
  const widths = await custom.evaluateAll((inputs) => inputs.map((input) => input.scrollWidth <= input.clientWidth));
  assert.deepEqual(widths, [true, true], "the whole value is visible");
  assert.equal(await submit(), 0);
  assert.match(await page.locator("#chips").textContent(), /Ended after: 6 May 2031 07:08 UTC/);
}, { smoke: true, javaScriptEnabled: false });

inBrowser("a flow says what it waits for and why that does not run", async ({ open }) => {
  const queue = unique("search");
  const task = (name, after) => ({ task: name, kind: queue, queue, payload: {}, after });
  const { id } = await api("POST", "/flows", { name: `import ${queue}`, tasks: [task("fetch", []), task("validate", ["fetch"])] });
  const worker = new Worker(`worker of ${queue}`, [queue]);
  await worker.settle(await worker.lease(1), () => ({ outcome: "succeeded" }));
  await api("POST", `/queues/${queue}/pause`);
  const page = await open(`/ui/flows/${id}`);
  await page.locator(`#why:has-text('validate is queued: queue ${queue} is paused.')`).waitFor();
  await page.locator(`#why button:has-text('Resume queue ${queue}')`).waitFor();
  await page.click("#why a:has-text('validate')");
  await page.locator("h1:has-text('validate')").waitFor();
  await page.click(`.crumbs a:has-text('import ${queue}')`);
  await page.waitForURL(new RegExp(`/ui/flows/${id}$`));
}, { smoke: true });

inBrowser("the search can be closed on a phone, and the selected tab is visible", async ({ open }) => {
  const page = await open("/ui/jobs?status=cancelled");
  const tab = await page.locator("#tabs a[aria-current]").boundingBox();
  assert.ok(tab.x >= 0 && tab.x + tab.width <= 390, `the tab is at ${tab.x}`);
  await page.locator("#find").tap();
  await page.locator("#palette button[aria-label=Close]").tap();
  assert.equal(await page.locator("#palette").evaluate((dialog) => dialog.open), false);
}, { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true });
