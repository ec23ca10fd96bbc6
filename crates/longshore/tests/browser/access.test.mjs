// Sessions and what a token without rights can do.

import assert from "node:assert/strict";
import { enqueue, inBrowser, readerToken, server, unique } from "./harness.mjs";
import { allPages, seed } from "./seed.mjs";

async function logIn(page, token) {
  await page.fill('input[name="token"]', token);
  await page.click("button:has-text('Log in')");
}

inBrowser("a login leads to the page that was asked for, and a logout ends the session", async ({ open, context, expect }) => {
  const page = await open("/ui/jobs?status=queued");
  await page.waitForURL(/\/ui\/login\?next=/);
  expect(401);
  await logIn(page, "not a token");
  await page.locator("#login-error:not(:empty)").waitFor();
  await logIn(page, server.token);
  await page.waitForURL(/\/ui\/jobs\?status=queued$/);
  const [cookie] = await context.cookies();
  assert.deepEqual([cookie.httpOnly, cookie.sameSite], [true, "Strict"]);
  assert.equal(await page.evaluate(() => document.cookie), "", "scripts cannot read the session");

  await page.click("[data-logout]");
  await page.waitForURL(/\/ui\/login/);
  assert.deepEqual(await context.cookies(), []);
  await context.addCookies([cookie]);
  await page.goto(`${server.url}/ui/jobs`);
  await page.waitForURL(/\/ui\/login/);
}, { smoke: true, as: null });

inBrowser("a login leads to no other site", async ({ open, context, expect }) => {
  // The page that is open when the cookie is removed may look for news.
  expect(401);
  const page = await open(`/ui/login?next=${encodeURIComponent("https://example.org/ui")}`);
  await logIn(page, server.token);
  await page.waitForURL(`${server.url}/ui`);
  for (const next of ["javascript:alert(1)", "//example.org/ui", "/docs", "http://", "/uiother"]) {
    await context.clearCookies();
    await page.goto(`${server.url}/ui/login?next=${encodeURIComponent(next)}`);
    await logIn(page, server.token);
    await page.waitForURL(`${server.url}/ui`);
  }
}, { as: null });

inBrowser("a link from another site opens its page if the session lasts", async ({ open }) => {
  // A browser sends no cookie with such a link, so it leads to the login page.
  const page = await open(`/ui/login?next=${encodeURIComponent("/ui/jobs?status=queued")}`);
  await page.waitForURL(`${server.url}/ui/jobs?status=queued`);
  await page.goto(`${server.url}/ui/login?again=1`);
  await page.locator('input[name="token"]').waitFor();
});

inBrowser("a token that may only read sees no actions and cannot act", async ({ open, context, expect }) => {
  const kind = unique("task");
  const [waiting] = await enqueue([{ kind, queue: kind, payload: {} }]);
  const pages = await allPages(await seed({ jobs: 100, on: server }), server);
  const page = await open("/ui/login");
  await logIn(page, readerToken);
  await page.waitForURL(`${server.url}/ui`);
  assert.match(await page.locator(".who").textContent(), /reader.*read-only/);

  const { new: form, ...readable } = pages;
  for (const path of [...Object.values(readable), `/ui/jobs/${waiting}`]) {
    const response = await page.goto(server.url + path);
    assert.equal(response.status(), 200, path);
    assert.equal(await page.locator('main form:not(#filters), main input[type="checkbox"], main a[href*="/ui/new"], #bulk').count(), 0, path);
  }
  expect(403);
  assert.equal((await page.goto(server.url + form)).status(), 403);

  await page.goto(`${server.url}/ui/jobs/${waiting}`);
  const attempt = (method, path, body) => page.evaluate(async ([method, path, body]) => {
    const headers = { "Longshore-Session": "1", "Content-Type": "application/json" };
    return (await fetch(path, { method, headers, body })).status;
  }, [method, path, body]);
  for (const [method, path, body] of [
    ["POST", `/jobs/${waiting}/cancel`], ["DELETE", `/jobs/${waiting}`], ["PATCH", `/jobs/${waiting}`, '{"priority": 1}'],
    ["POST", "/jobs", `{"kind": "${kind}", "payload": {}}`], ["POST", `/queues/${kind}/pause`], ["POST", "/sweep", "{}"],
    ["POST", "/operations", `{"action": "cancel", "filter": {"kind": "${kind}"}}`], ["GET", "/tokens"],
  ]) {
    assert.equal(await attempt(method, path, body), 403, `${method} ${path}`);
  }
  await page.reload();
  await page.locator("h1 .is-queued").waitFor();
}, { as: null, fresh: true });

inBrowser("a session changes nothing without the header of the page", async ({ open, expect }) => {
  const kind = unique("task");
  const [id] = await enqueue([{ kind, queue: kind, payload: {} }]);
  const page = await open(`/ui/jobs/${id}`);
  expect(403);
  const status = await page.evaluate(async (path) => (await fetch(path, { method: "POST" })).status, `/jobs/${id}/cancel`);
  assert.equal(status, 403);
});
