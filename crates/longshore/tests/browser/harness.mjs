// What all tests share: the server under test, its API, a worker, and browser contexts that fail on
// console errors, uncaught errors, dialogs and requests to other hosts.
//
// `cargo xtask browser` starts the servers and sets the environment variables. With LONGSHORE_TEST_POSTGRES=smoke, only the
// tests with `smoke` run on Postgres.

import assert from "node:assert/strict";
import { appendFile } from "node:fs/promises";
import { after, test } from "node:test";
import { chromium } from "playwright-core";

const variable = (name) => process.env[name] ?? assert.fail(`${name} is not set; run \`cargo xtask browser\``);

export const server = { url: variable("LONGSHORE_URL"), token: variable("LONGSHORE_TOKEN") };
export const readerToken = variable("LONGSHORE_READER_TOKEN");
export const prefix = variable("LONGSHORE_PREFIX");
export const prefixedServer = { url: variable("LONGSHORE_PREFIXED_URL"), token: variable("LONGSHORE_PREFIXED_TOKEN") };

const onPostgres = process.env.LONGSHORE_TEST_POSTGRES || "full";
assert.ok(["full", "smoke"].includes(onPostgres), `LONGSHORE_TEST_POSTGRES: \`${onPostgres}\` is invalid; use full or smoke`);
const isSmoke = variable("LONGSHORE_ENGINE") === "postgres" && onPostgres === "smoke";
// `cargo xtask test` fails if no test with `smoke` has run on Postgres.
const marked = process.env.LONGSHORE_TEST_MARKED;

const DESKTOP = { width: 1280, height: 800 };
// How long a test waits for what must happen. Only a fault takes this long, however slow the machine is.
const TIMEOUT = 120_000;

// A function that is called at most once.
export function once(make) {
  let made = null;
  return () => (made ??= make());
}

// Started by the first test that needs it.
export const browser = once(() => chromium.launch({
  executablePath: variable("LONGSHORE_CHROMIUM"),
  // Chromium has no sandbox for root. It only opens the pages of our own server.
  args: process.getuid() === 0 ? ["--no-sandbox"] : [],
  timeout: TIMEOUT,
}));

// ---- the API ----------------------------------------------------------------

// Sends a request with the token of an administrator, and returns the text of the response.
export async function send(method, path, body, { url, token } = server) {
  const headers = { authorization: `Bearer ${token}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(url + path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const text = await response.text();
  assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`);
  return text;
}

export async function api(...request) {
  const text = await send(...request);
  return text ? JSON.parse(text) : null;
}

export async function enqueue(jobs, on) {
  const BATCH = 1000;
  const ids = [];
  for (let i = 0; i < jobs.length; i += BATCH) {
    const { items } = await api("POST", "/jobs/batch", jobs.slice(i, i + BATCH), on);
    ids.push(...items.map((item) => item.id ?? assert.fail(`a job was refused: ${JSON.stringify(item)}`)));
  }
  return ids;
}

// A worker in another language: it leases and settles jobs over the API.
export class Worker {
  constructor(name, queues, on) {
    Object.assign(this, { name, queues, on, id: undefined, held: [] });
  }

  async lease(limit = 1) {
    const identity = this.id ? { worker_id: this.id } : { name: this.name, host: "jobs-1.example.net", pid: 4711, version: "2.3.0" };
    const request = { ...identity, queues: this.queues, held: this.held, limit, stale_after_seconds: 600 };
    const { worker_id: id, jobs } = await api("POST", "/leases", request, this.on);
    this.id = id;
    this.held.push(...jobs.map(({ id, lease_no }) => ({ id, lease_no })));
    return jobs;
  }

  // `outcome` is a function from a job to the fields of its settlement.
  async settle(jobs, outcome) {
    const items = jobs.map((job) => ({ id: job.id, lease_no: job.lease_no, ...outcome(job) }));
    await api("POST", "/leases/settle", { worker_id: this.id, items }, this.on);
    const settled = new Set(items.map((item) => item.id));
    this.held = this.held.filter((held) => !settled.has(held.id));
  }

  // `error` is a function from a job to its error.
  async failAll(error) {
    for (let jobs = await this.lease(100); jobs.length; jobs = await this.lease(100)) {
      await this.settle(jobs, (job) => failed(error(job)));
    }
  }
}

export const succeeded = (result) => ({ outcome: "succeeded", result });
export const failed = (error) => ({ outcome: "failed", permanent: true, error });

let names = 0;
// A name that no other test uses.
export const unique = (word) => `${word}_${process.pid}_${++names}`;

// ---- the browser ------------------------------------------------------------

const FRESH = { "cache-control": "no-cache" };

// A test with its own browser context. `options` are those of the context, and:
//   as     the token of the session; null opens no session
//   on     the server
//   smoke  whether the test always runs on each engine
//   fresh  whether the server reads everything anew for each page. It keeps data for a second, and other tests
//          open pages at the same time. The first page that `open` opens is always fresh.
export function inBrowser(name, run, { as, on = server, smoke = false, fresh = false, ...options } = {}) {
  if (isSmoke && !smoke) return;
  closeAtEnd();
  test(name, async () => {
    const context = await (await browser()).newContext({ viewport: DESKTOP, ...(fresh && { extraHTTPHeaders: FRESH }), ...options });
    context.setDefaultTimeout(TIMEOUT);
    await context.addInitScript(recordToasts);
    const problems = watch(context, on.url);
    try {
      if (as !== null) await startSession(context, as ?? on.token, on);
      const open = async (path) => {
        const page = await context.newPage();
        await page.setExtraHTTPHeaders(FRESH);
        await page.goto(on.url + path);
        await page.setExtraHTTPHeaders({});
        return page;
      };
      await run({ context, open, expect: problems.expect });
      assert.deepEqual(problems.list(), [], "problems that the browser reported");
      if (isSmoke && marked) await appendFile(marked, `${name}\n`);
    } finally {
      await context.close();
    }
  });
}

let isClosedAtEnd = false;
function closeAtEnd() {
  if (!isClosedAtEnd) after(async () => (await browser()).close());
  isClosedAtEnd = true;
}

// What the login page does.
export async function startSession(context, token, on = server) {
  const response = await context.request.post(`${on.url}/session`, { data: { token }, timeout: TIMEOUT });
  assert.equal(response.status(), 200, "the token opens a session");
}

function watch(context, url) {
  const reported = [];
  const expected = [];
  context.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) reported.push(`console: ${message.text()}`);
  });
  context.on("weberror", (error) => reported.push(`uncaught: ${error.error()}`));
  context.on("request", (request) => {
    const isOurs = request.url().startsWith(`${url}/`) || request.url().startsWith("data:");
    if (!isOurs) reported.push(`request to another host: ${request.url()}`);
  });
  context.on("dialog", (dialog) => {
    reported.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  return {
    list: () => reported.filter((problem) => !expected.some((pattern) => pattern.test(problem))),
    // The browser logs each failed request. A test that provokes one names its status.
    expect: (status) => expected.push(new RegExp(`the server responded with a status of ${status}`)),
  };
}

// Waits until `condition` returns something true, and returns it.
export async function until(what, condition) {
  const deadline = Date.now() + TIMEOUT;
  while (Date.now() < deadline) {
    const value = await condition();
    if (value) return value;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail(`waited for ${TIMEOUT} ms: ${what}`);
}

// Messages disappear after some seconds, so each page records them.
function recordToasts() {
  window.toasts = [];
  const record = (node) => node.nodeType === Node.ELEMENT_NODE && node.matches(".toast") && window.toasts.push(node.textContent);
  new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach(record)))
    .observe(document, { childList: true, subtree: true });
}

// The text of the next message that the page shows or has shown.
export const toast = async (page) => (await page.waitForFunction(() => window.toasts.shift())).jsonValue();

// Presses the keys of a shortcut. The second one counts for a second; here, no time passes between them.
export async function pressShortcut(page, ...keys) {
  await page.evaluate(() => {
    const now = Date.now();
    Date.now = () => now;
  });
  for (const key of keys) await page.keyboard.press(key);
}

// Confirms the question that the page shows.
export const confirm = (page) => page.locator("#confirm-yes").click();
