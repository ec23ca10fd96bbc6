/**
 * An order: charge the card, wait for an approval, ship ten parcels in parallel, notify the customer. Kill the
 * program at any moment and start it again: it continues. Its arguments are the number of the order and a folder
 * for its files. LONGSHORE_SERVER names the server.
 */

import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import { Cancel, Longshore } from "longshore";

const number = Number(process.argv[2] ?? 42);
const folder = process.argv[3] ?? "order-files";
mkdirSync(folder, { recursive: true });
const queue = `order-${number}`;
const ls = new Longshore();

/** Asks another company to do something. It knows the key, so a repeated request changes nothing. */
async function request(key: string): Promise<string> {
  writeFileSync(join(folder, key), "done");
  console.log(key);
  await pause(20);
  return key;
}

const parcel = ls.job("parcel", { queue }, async (input: { parcel: number; order: number }) => {
  await request(`parcel-${input.parcel}-${input.order}`);
});

const order = ls.job("order", { queue }, async (input: { number: number }, ctx) => {
  const charge = await ctx.step("charge", () => request(`charge-${input.number}`));
  const person = await ctx.event<string>(`approved:${input.number}`, { within: 24 * 60 * 60 });
  if (person === undefined) throw new Cancel("nobody approved the order");
  const parcels = Array.from({ length: 10 }, (_, n) => parcel.request({ parcel: n, order: input.number }));
  await ctx.spawn("parcels", parcels);
  const shipped = await ctx.join("shipped");
  await ctx.step("notify", () => request(`notify-${input.number}`));
  return `${charge}, approved by ${person}, ${shipped.all.length} parcels`;
});

const stop = new AbortController();
// A killed worker is replaced after 15 s instead of a minute.
const working = ls.work({ queues: [queue], staleAfter: 15, signal: stop.signal });
const handle = await untilRegistered(() => order.enqueue({ number }, { idempotencyKey: `order-${number}` }));
// In real life, a person does this days later.
while ((await ls.steps(handle.id)).length === 0) await pause(10);
await ls.emit(`approved:${number}`, "ada");
const result = await handle.result({ timeout: 120 });
stop.abort();
await working;
if (result !== `charge-${number}, approved by ada, 10 parcels`) throw new Error(`unexpected: ${result}`);

/** The server knows a kind when its first worker has registered. */
async function untilRegistered<T>(enqueue: () => Promise<T>): Promise<T> {
  for (let tries = 1; ; tries += 1) {
    try {
      return await enqueue();
    } catch (error) {
      if (tries === 100 || !String(error).includes("not registered")) throw error;
      await pause(50);
    }
  }
}
