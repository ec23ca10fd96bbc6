// Drains BENCH_JOBS jobs that do nothing with one BullMQ worker, and prints jobs per second.

const { Queue, Worker } = require("bullmq");

const jobs = Number(process.env.BENCH_JOBS);
const { hostname: host, port } = new URL(process.env.BENCH_REDIS);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };

async function main() {
  const queue = new Queue("bench", { connection });
  await queue.obliterate({ force: true });
  for (let first = 0; first < jobs; first += 1000) {
    const batch = Array.from({ length: Math.min(1000, jobs - first) }, (_, i) => ({
      name: "bench",
      data: { to: "somebody@example.com", template: "welcome", n: first + i },
    }));
    await queue.addBulk(batch);
  }
  let done = 0;
  let started = 0;
  await new Promise((resolve, reject) => {
    const worker = new Worker(
      "bench",
      async () => {
        if (started === 0) started = performance.now();
      },
      { connection, concurrency: 100 },
    );
    worker.on("completed", () => {
      done += 1;
      if (done === jobs) resolve();
    });
    worker.on("error", reject);
  });
  console.log((jobs / (performance.now() - started)) * 1000);
  process.exit(0);
}

main();
