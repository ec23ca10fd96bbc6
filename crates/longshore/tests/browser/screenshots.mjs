// Takes pictures of every page, for the documents. Usage: node screenshots.mjs FOLDER

import assert from "node:assert/strict";
import { mkdirSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { browser as startBrowser, server, startSession } from "./harness.mjs";
import { indexedPng } from "./png.mjs";
import { allPages, seed } from "./seed.mjs";

const SIZES = { desktop: { width: 1280, height: 800 }, phone: { width: 390, height: 844 } };
const MAX_FILE = 120_000;
const MAX_ALL = 4_000_000;

const folder = process.argv[2];
rmSync(folder, { recursive: true, force: true });
mkdirSync(folder, { recursive: true });

const browser = await startBrowser();
const pages = await allPages(await seed({ jobs: 700, on: server }), server);
// A page that decodes pictures.
const decoder = await (await browser.newContext()).newPage();

async function decoded(png) {
  const { width, height, text } = await decoder.evaluate(async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const picture = await createImageBitmap(new Blob([bytes]));
    const { width, height } = picture;
    const canvas = new OffscreenCanvas(width, height).getContext("2d");
    canvas.drawImage(picture, 0, 0);
    const { data } = canvas.getImageData(0, 0, width, height);
    let text = "";
    for (let i = 0; i < data.length; i += 30_000) text += String.fromCharCode(...data.subarray(i, i + 30_000));
    return { width, height, text: btoa(text) };
  }, png.toString("base64"));
  return { width, height, pixels: Buffer.from(text, "base64") };
}

for (const [size, viewport] of Object.entries(SIZES)) {
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport, colorScheme, deviceScaleFactor: 1, isMobile: size === "phone" });
    const page = await context.newPage();
    const save = async (name) => {
      const { width, height, pixels } = await decoded(await page.screenshot());
      writeFileSync(join(folder, `${name}-${size}-${colorScheme}.png`), indexedPng(width, height, pixels));
    };
    const shoot = async (name, path) => {
      await page.goto(server.url + path, { waitUntil: "load" });
      await save(name);
    };
    await shoot("login", "/ui/login");
    await startSession(context, server.token);
    for (const [name, path] of Object.entries(pages)) await shoot(name, path);
    await shoot("missing", "/ui/jobs/01990000-0000-7000-8000-000000000001");
    await page.goto(`${server.url}/ui/jobs`);
    await page.keyboard.press("Control+k");
    await page.keyboard.type("mail");
    await page.locator('#palette-list li:has-text("kind")').first().waitFor();
    await save("palette");
    await context.close();
  }
}
await browser.close();

const sizes = readdirSync(folder).map((name) => [name, statSync(join(folder, name)).size]);
for (const [name, size] of sizes) assert.ok(size < MAX_FILE, `${name} has ${size} bytes`);
const total = sizes.reduce((sum, [, size]) => sum + size, 0);
assert.ok(total < MAX_ALL, `the pictures have ${total} bytes`);
console.log(`${sizes.length} pictures, ${Math.round(total / 1000)} kB, in ${folder}`);
