// Every page: it opens, loads nothing from elsewhere, is accessible, and fits a phone.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { inBrowser, once, server } from "./harness.mjs";
import { allPages, seed } from "./seed.mjs";

const PHONE = { width: 390, height: 844 };
const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
  "form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
const MISSING = {
  "missing-page": "/ui/nothing",
  "missing-job": "/ui/jobs/01990000-0000-7000-8000-000000000001",
  "missing-queue": "/ui/queues/no-such-queue/extra",
};
const allSeeded = once(async () => allPages(await seed({ jobs: 200, on: server }), server));
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

inBrowser("every page opens with the policy and without anything inline", async ({ context, expect }) => {
  const pages = await allSeeded();
  const page = await context.newPage();
  const check = async (path, status) => {
    const response = await page.goto(server.url + path);
    assert.equal(response.status(), status, path);
    const headers = response.headers();
    assert.equal(headers["content-security-policy"], POLICY, path);
    assert.equal(headers["x-content-type-options"], "nosniff", path);
    assert.match(await page.title(), / · Longshore$/, path);
    const inline = await page.locator("[style], style, script:not([src]), [onclick], [onload], [onerror]").count();
    assert.equal(inline, 0, `${path} has inline scripts or styles`);
    assert.equal(await page.locator("h1").count(), 1, `${path} has one heading`);
  };
  for (const path of Object.values(pages)) await check(path, 200);
  expect(404);
  for (const path of Object.values(MISSING)) await check(path, 404);
  expect(400);
  await check("/ui/jobs/not-an-id", 400);
}, { smoke: true, fresh: true });

inBrowser("the login page opens with the policy", async ({ context }) => {
  const page = await context.newPage();
  const response = await page.goto(`${server.url}/ui/login`);
  assert.equal(response.status(), 200);
  assert.equal(response.headers()["content-security-policy"], POLICY);
}, { as: null });

inBrowser("the first address leads to the overview", async ({ open }) => {
  const page = await open("/");
  assert.equal(new URL(page.url()).pathname, "/ui");
  assert.equal(await page.locator("h1").textContent(), "Overview");
});

inBrowser("axe-core has no serious findings on any page, light and dark", async ({ context, expect }) => {
  const pages = await allSeeded();
  expect(404);
  const page = await context.newPage();
  const findings = [];
  const run = async (path, rules) => {
    const options = { resultTypes: ["violations"], preload: false, ...rules };
    const { violations } = await page.evaluate((options) => axe.run(options), options);
    for (const { id, impact, nodes } of violations) {
      if (!["serious", "critical"].includes(impact)) continue;
      findings.push(`${path}: ${impact} ${id} at ${nodes.slice(0, 2).map((node) => node.target.join(" ")).join(", ")}`);
    }
  };
  const check = async (path) => {
    await page.emulateMedia({ colorScheme: "light" });
    await page.goto(server.url + path);
    await page.evaluate(axe);
    await run(path);
    // The colours are all that the dark theme changes.
    await page.emulateMedia({ colorScheme: "dark" });
    await run(`${path} (dark)`, { runOnly: ["color-contrast"] });
  };
  for (const path of [...Object.values(pages), MISSING["missing-page"]]) await check(path);
  await context.clearCookies();
  await check("/ui/login");
  assert.deepEqual(findings, []);
  // Without the policy, which prevents that axe runs.
}, { bypassCSP: true, fresh: true });

inBrowser("no page is wider than a phone", async ({ context, expect }) => {
  const pages = await allSeeded();
  expect(404);
  const page = await context.newPage();
  const check = async (path) => {
    await page.goto(server.url + path);
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= PHONE.width, `${path} is ${width} pixels wide`);
  };
  for (const path of [...Object.values(pages), ...Object.values(MISSING)]) await check(path);
  await context.clearCookies();
  await check("/ui/login");
}, { viewport: PHONE, isMobile: true, hasTouch: true, fresh: true });

inBrowser("pages can be read without JavaScript", async ({ context, expect }) => {
  const pages = await allSeeded();
  const page = await context.newPage();
  for (const path of Object.values(pages)) {
    const response = await page.goto(server.url + path);
    assert.equal(response.status(), 200, path);
    assert.ok((await page.locator("main").innerText()).length > 40, `${path} has content`);
    assert.equal(await page.locator(".action:visible, .bulk:visible").count(), 0, `${path} shows no button that does nothing`);
  }
  await page.goto(`${server.url}/ui/jobs`);
  await page.fill('#filters input[name="kind"]', "email_customer");
  await page.press('#filters input[name="kind"]', "Enter");
  await page.waitForURL(/kind=email_customer/);
  const kinds = await page.locator("#jobs td.c-kind").allTextContents();
  assert.deepEqual([...new Set(kinds)], ["email_customer"]);
  await page.fill("#find", "webhooks");
  await page.press("#find", "Enter");
  await page.waitForURL(/\/ui\/queues\/webhooks$/);
}, { javaScriptEnabled: false, fresh: true });
