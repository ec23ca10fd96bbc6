// Hostile texts in everything that callers can name. The policy would stop most scripts, so it is off
// here: the pages themselves must escape.

import assert from "node:assert/strict";
import { Worker, api, enqueue, failed, inBrowser, server, toast, unique, until } from "./harness.mjs";

const CORPUS = [
  `"><script>window.__xss=1</script>`,
  `<img src=x onerror=window.__xss=1>`,
  `'><svg/onload=window.__xss=1>`,
  `</title></textarea></script><script>window.__xss=1</script>`,
  `javascript:window.__xss=1//`,
  `" autofocus onfocus=window.__xss=1 x="`,
  `--><iframe srcdoc="<script>parent.__xss=1</script>">`,
  `&lt;script&gt;window.__xss=1&lt;/script&gt;`,
];

const encoded = encodeURIComponent;

// Everything on the server that can have a name or a text has a hostile one.
async function createHostileThings() {
  const ids = [];
  for (const text of CORPUS) {
    const schema = { type: "object", description: text, properties: { [text]: { type: "string", default: text } } };
    await api("PUT", `/kinds/${encoded(text)}`, { schema, defaults: { queue: text } });
    const job = { kind: text, queue: text, group: text, tags: [text], payload: { [text]: text }, metadata: { [text]: text }, context: text };
    ids.push(...await enqueue([{ ...job, unique_key: text, idempotency_key: text }, job, job, job]));
    const worker = new Worker(text, [text]);
    const [first, second] = await worker.lease(3);
    await worker.settle([first], () => failed(text));
    await worker.settle([second], () => ({ outcome: "succeeded", result: { [text]: text } }));
    await api("PUT", `/cron/${encoded(text)}`, { cron: "0 3 * * *", job: { kind: text, queue: text, payload: { [text]: text } } });
    await api("PUT", `/queues/${encoded(text)}/limit`, { limit: 7 });
    await api("PATCH", `/queues/${encoded(text)}/groups/${encoded(text)}`, { limit: 5 });
  }
  const tasks = CORPUS.map((text, i) => ({ kind: text, queue: text, task: text, payload: { [text]: text }, after: i ? [CORPUS[i - 1]] : [] }));
  const flows = [];
  for (const name of CORPUS) flows.push((await api("POST", "/flows", { name, tasks })).id);
  return { ids, flows };
}

async function hostilePages({ ids, flows }) {
  const failures = await until("the failures are counted", async () => {
    const found = await api("GET", "/failures?limit=200");
    const ours = found.filter((failure) => CORPUS.includes(failure.kind));
    return ours.length === CORPUS.length && ours;
  });
  const parameters = ["kind", "queue", "group", "tag", "error", "id", "status", "cursor", "failure", "newer_than", "unique_key",
    "operation", "range", "sort", "after", "from", CORPUS[0]];
  const query = (text) => parameters.map((name) => `${encoded(name)}=${encoded(text)}`).join("&");
  return [
    "/ui", "/ui/jobs", "/ui/queues", "/ui/flows", "/ui/failures", "/ui/kinds", "/ui/workers", "/ui/cron", "/ui/settings", "/ui/new",
    ...ids.slice(0, 4).map((id) => `/ui/jobs/${id}`),
    ...flows.slice(0, 2).map((id) => `/ui/flows/${id}`),
    ...failures.map((failure) => `/ui/failures/${failure.fingerprint}`),
    ...CORPUS.flatMap((text) => [
      `/ui/queues/${encoded(text)}`, `/ui/kinds/${encoded(text)}`, `/ui/new?kind=${encoded(text)}`,
      `/ui/jobs?${query(text)}`,
      `/ui/${encoded(text)}`,
    ]),
    `/ui/search?q=${encoded(CORPUS[0])}`,
    ...["", "/failures", "/kinds", "/queues", "/flows", "/workers", "/cron"].map((page) => `/ui${page}?${query(CORPUS[0])}`),
  ];
}

inBrowser("no text of the corpus runs on any page", async ({ context, expect }) => {
  const pages = await hostilePages(await createHostileThings());
  expect("(400|404)");
  const page = await context.newPage();
  const check = async (where) => {
    const state = await page.evaluate(() => ({
      ran: window.__xss,
      scripts: document.querySelectorAll("script").length,
      handlers: document.querySelectorAll("[onerror], [onload], [onfocus], iframe, [href^='javascript:'], img:not([src*='/ui/assets/'])").length,
    }));
    assert.deepEqual(state, { ran: undefined, scripts: 1, handlers: 0 }, where);
  };
  let shown = 0;
  for (const path of pages) {
    await page.goto(server.url + path);
    await check(path);
    shown += (await page.content()).includes("__xss") ? 1 : 0;
  }
  assert.ok(shown > pages.length / 2, `only ${shown} of ${pages.length} pages show a text of the corpus`);
}, { bypassCSP: true, fresh: true });

inBrowser("no text of the corpus runs in live updates, dialogs, messages and the palette", async ({ open, expect }) => {
  // Tests that run at the same time add jobs, too.
  const mark = unique("corpus");
  const page = await open(`/ui/jobs?tag=${mark}`);
  const ran = () => page.evaluate(() => window.__xss);
  const added = await enqueue(CORPUS.map((text) => ({ kind: text, queue: text, tags: [text, mark], payload: { [text]: text } })));
  for (const id of added) await page.locator(`#job-${id}`).waitFor();
  for (const text of CORPUS) {
    await page.keyboard.press("Control+k");
    await page.fill("#palette-input", text);
    await page.locator('#palette-list li:has-text("kind")').first().waitFor();
    await page.keyboard.press("Escape");
  }
  assert.equal(await ran(), undefined);

  expect("(400|404|422)");
  await page.goto(`${server.url}/ui/new?kind=${encoded(CORPUS[0])}`);
  await page.fill('textarea[name="payload"]', CORPUS[0]);
  await page.click("button:has-text('Enqueue')");
  assert.match(await toast(page), /payload is not JSON/);
  await page.goto(`${server.url}/ui/queues/${encoded(CORPUS[1])}`);
  await page.click(".head button:has-text('Pause')");
  await page.locator("#confirm[open]").waitFor();
  await page.click("#confirm-no");
  await page.goto(`${server.url}/ui/failures?kind=${encoded(CORPUS[0])}`);
  await page.click("#failures button:has-text('Retry')");
  await page.click("#confirm-no");
  assert.equal(await ran(), undefined);
}, { bypassCSP: true });
