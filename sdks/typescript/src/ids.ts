/** Ids of jobs and flows: UUID v7, which sort by the time of creation. */

import { randomUUID } from "node:crypto";

let lastTime = 0;
let counter = 0;

/** Returns a new UUID v7. Those of one process sort in the order in which they were made. */
export function newId(now: number = Date.now()): string {
  if (now > lastTime || now < lastTime - 1_000) {
    lastTime = now;
    counter = 0;
  } else if (counter < 0xfff) {
    counter += 1;
  } else {
    // More than 4,096 ids in one millisecond: continue in the next one.
    lastTime += 1;
    counter = 0;
  }
  const time = lastTime.toString(16).padStart(12, "0");
  const count = counter.toString(16).padStart(3, "0");
  // Behind the version and its 12 bits, a UUID v7 is as random as a UUID v4.
  return `${time.slice(0, 8)}-${time.slice(8)}-7${count}${randomUUID().slice(18)}`;
}
