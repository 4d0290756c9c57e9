// BullMQ: `work` runs a worker, `at` and `paced` schedule jobs (the arguments are those of schedule.py).
import fs from "node:fs";
import { Queue, Worker } from "bullmq";
import IORedis from "ioredis";

const BYTES = 200, AT_ONCE = 1000, HEAD = 21;
const SHORTEST_MS = 2000, LONGEST_MS = 6000;
const QUEUE = "bench";
const CONCURRENCY = 100;

function connect() {
  return new IORedis(process.env.BENCH_REDIS_URL, { maxRetriesPerRequest: null });
}

function work() {
  const file = fs.openSync(process.env.BENCH_EXECUTIONS, "a");
  const worker = new Worker(
    QUEUE,
    async (job) => {
      // One system call for each execution: with a buffer, a killed worker would lose what it executed.
      fs.writeSync(file, `${job.data.slice(0, HEAD)} ${Date.now()}\n`);
    },
    { connection: connect(), concurrency: CONCURRENCY, removeOnComplete: { count: 0 } },
  );
  worker.on("error", (error) => console.error(error));
  worker.on("failed", (job, error) => console.error(job?.id, error));
  process.on("SIGTERM", async () => {
    await worker.close();
    process.exit(0);
  });
}

function delayMs(number) {
  // A prime: jobs that are scheduled together are due far apart.
  return SHORTEST_MS + Math.floor((((number * 7919) % 1000) * (LONGEST_MS - SHORTEST_MS)) / 1000);
}

function job(number, dueMs) {
  const now = Date.now();
  const head = `${String(number).padStart(7, "0")} ${String(dueMs).padStart(13, "0")} `;
  return {
    name: "execute",
    data: head.padEnd(BYTES, "."),
    opts: { timestamp: now, delay: Math.max(0, dueMs - now) },
  };
}

async function schedule(kind, first, count, third) {
  const queue = new Queue(QUEUE, { connection: connect() });
  await queue.waitUntilReady();
  const began = performance.now(), cpu = process.cpuUsage();
  let sent = 0;
  while (sent < count) {
    const passed = kind === "at" ? count : Math.floor(((performance.now() - began) * third) / 1000);
    const ready = Math.min(count, passed, sent + AT_ONCE);
    if (ready === sent) {
      await new Promise((done) => setTimeout(done, 5));
      continue;
    }
    const now = Date.now(), jobs = [];
    for (; sent < ready; sent++) {
      jobs.push(job(first + sent, kind === "at" ? third : now + delayMs(sent)));
    }
    await queue.addBulk(jobs);
  }
  const used = process.cpuUsage(cpu);
  const seconds = (performance.now() - began) / 1000;
  console.log(JSON.stringify({ seconds, cpu_s: (used.user + used.system) / 1e6 }));
  process.exit(0);
}

const [kind, ...numbers] = process.argv.slice(2);
if (kind === "work") work();
else await schedule(kind, ...numbers.map(Number));
