// The dashboard behind a proxy that removes a prefix from the path.

import assert from "node:assert/strict";
import http from "node:http";
import { after } from "node:test";
import { Worker, enqueue, inBrowser, once, prefix, prefixedServer, pressShortcut, succeeded, until } from "./harness.mjs";
import { allPages, seed } from "./seed.mjs";

// Outside of the prefix there is nothing, so a URL without it is a 404.
const proxy = http.createServer((request, response) => {
  const rest = request.url.startsWith(prefix) ? request.url.slice(prefix.length) : null;
  if (rest === null || !/^[/?]/.test(rest)) return response.writeHead(404).end();
  const { method, headers } = request;
  const forwarded = http.request(prefixedServer.url + rest, { method, headers }, (answer) => {
    response.writeHead(answer.statusCode, answer.headers);
    answer.pipe(response);
  });
  response.on("close", () => forwarded.destroy());
  forwarded.on("error", () => response.destroy());
  request.pipe(forwarded);
});
await new Promise((resolve) => proxy.listen(0, "127.0.0.1", resolve));
// Without a test, nothing closes it.
proxy.unref();
after(() => {
  proxy.closeAllConnections();
  proxy.close();
});

const on = { url: `http://127.0.0.1:${proxy.address().port}${prefix}`, token: prefixedServer.token };
const allSeeded = once(async () => allPages(await seed({ jobs: 100, on }), on));

inBrowser("under a prefix, every page and every link has the prefix", async ({ context }) => {
  const pages = await allSeeded();
  const page = await context.newPage();
  for (const path of Object.values(pages)) {
    const response = await page.goto(on.url + path);
    assert.equal(response.status(), 200, path);
    const urls = await page.evaluate(() => ["href", "src", "action", "data-then"].flatMap((name) =>
      [...document.querySelectorAll(`[${name}]`)].map((element) => element.getAttribute(name))));
    const wrong = urls.filter((url) => !url.startsWith("#") && !url.startsWith(`${prefix}/`));
    assert.deepEqual(wrong, [], path);
  }
}, { on, fresh: true });

inBrowser("under a prefix, login, actions, live updates and the palette work", async ({ open }) => {
  await allSeeded();
  const page = await open("/ui/new?kind=sync_crm_contact");
  await page.waitForURL(/\/ui\/login/);
  await page.fill('input[name="token"]', on.token);
  await page.click("button:has-text('Log in')");
  await page.waitForURL(`${on.url}/ui/new?kind=sync_crm_contact`);
  await page.fill('textarea[name="payload"]', '{"contact": 7}');
  await page.fill('input[name="queue"]', "prefixed");
  await page.click("button:has-text('Enqueue')");
  await page.waitForURL(/\/ui\/jobs\/[0-9a-f-]{36}$/);
  const worker = new Worker("e2e", ["prefixed"], on);
  const [job] = await worker.lease();
  await page.locator("h1 .is-running").waitFor();
  await worker.settle([job], () => succeeded(null));
  await page.locator("h1 .is-succeeded").waitFor();
  await page.keyboard.press("Control+k");
  await page.keyboard.type("webhooks");
  await page.locator('#palette-list li:has-text("queue")').first().waitFor();
  await page.keyboard.press("Enter");
  await page.waitForURL(`${on.url}/ui/queues/webhooks`);
  await pressShortcut(page, "g", "f");
  await page.waitForURL(`${on.url}/ui/flows`);
  await page.click("[data-logout]");
  await page.waitForURL(/\/queue\/ui\/login/);
}, { on, as: null });

// Here, because nothing else uses this server: a new entry in the list of what needs attention is not a fault.
inBrowser("an update moves nothing on the page", async ({ open }) => {
  await allSeeded();
  const page = await open("/ui");
  await page.evaluate(() => {
    window.shifts = [];
    new PerformanceObserver((list) => {
      for (const { value, sources } of list.getEntries()) {
        const moved = sources.map(({ node }) => (node?.closest ? node : node?.parentElement)?.outerHTML.slice(0, 80));
        // A digit more in a chart's label is no movement that anybody sees.
        if (value > 0.001) window.shifts.push({ value, moved });
      }
    }).observe({ type: "layout-shift" });
  });
  const now = () => page.locator("main").getAttribute("data-now");
  for (let n = 0; n < 2; n++) {
    const before = await now();
    await enqueue([{ kind: "sync_crm_contact", payload: { contact: n } }], on);
    await until("the page updates itself", async () => (await now()) !== before);
  }
  assert.deepEqual(await page.evaluate(() => window.shifts), []);
}, { on });
