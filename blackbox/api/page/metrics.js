// The counters of this service process: deliveries per second, and lateness.

import { text } from "./api.js";
import { byId } from "./dom.js";
import { Plot, lines } from "./plot.js";
import { rate, time, took } from "./words.js";

const SHOWN_MS = 300_000;
const WINDOW_MS = 60_000;
const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;

const samples = [];
let plots = null;

/** The shards of this process at the last refresh: name → is open. */
export let shardsHere = new Map();

export function start() {
  plots = [new Plot(byId("rate-plot")), new Plot(byId("late-plot"))];
}

/** Refresh the counters; calls `died` when there are more dead letters than at the last refresh. */
export async function look({ died }) {
  const sample = { atMs: Date.now(), ...read(await text("metrics")) };
  shardsHere = sample.shards;
  const before = samples.at(-1);
  if (before && sample.delivered < before.delivered) samples.length = 0; // another process answered
  if (before && sample.dead > before.dead) died();
  samples.push(sample);
  while (samples[0].atMs < sample.atMs - SHOWN_MS - WINDOW_MS) samples.shift();
  draw();
}

/** The counters shown here, parsed from Prometheus text; buckets are cumulative counts by upper bound. */
export function read(found) {
  const sample = { delivered: 0, dead: 0, buckets: new Map(), shards: new Map() };
  for (const line of found.split("\n")) {
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (name === "blackbox_delivered_total") sample.delivered += Number(value);
    if (name === "blackbox_dead_total") sample.dead += Number(value);
    if (name === "blackbox_lateness_seconds_bucket") sample.buckets.set(bound(labels), Number(value));
    if (name === "blackbox_shard_open") sample.shards.set(/shard="(.*)"/.exec(labels)[1], value === "1.0");
  }
  return sample;
}

const bound = (labels) => (labels.includes("+Inf") ? Infinity : Number(/le="(.*?)"/.exec(labels)[1]));

/** The quantile `share` of the lateness between two samples, in ms; null if there were no messages. */
export function quantile(share, from, to) {
  const total = to.buckets.get(Infinity) - (from.buckets.get(Infinity) ?? 0);
  if (!(total > 0)) return null;
  let [below, start] = [0, 0];
  for (const [end, upto] of to.buckets) {
    const reached = upto - (from.buckets.get(end) ?? 0);
    if (reached >= share * total && reached > below) {
      return end === Infinity ? Infinity : 1000 * (start + (end - start) * ((share * total - below) / (reached - below)));
    }
    [below, start] = [reached, end];
  }
  return null;
}

function draw() {
  const now = samples.at(-1).atMs;
  const points = samples.slice(1).map((sample, place) => {
    const before = samples[place];
    const first = samples.find((one) => one.atMs >= sample.atMs - WINDOW_MS);
    return {
      atMs: sample.atMs,
      rate: (1000 * (sample.delivered - before.delivered)) / Math.max(1, sample.atMs - before.atMs),
      p50: quantile(0.5, first, sample),
      p99: quantile(0.99, first, sample),
    };
  }).filter((point) => point.atMs > now - SHOWN_MS);
  const last = points.at(-1);
  if (!last) return;
  byId("rate").textContent = rate(last.rate);
  byId("late").textContent = last.p99 === null ? "–" : took(last.p99);
  const length = Math.max(points.length, SHOWN_MS / 2000);
  const padded = (name) => [...Array(length - points.length).fill(null), ...points.map((point) => point[name])];
  const words = (of) => [...Array(length - points.length).fill("no data"), ...points.map((point) => `${time(point.atMs)}: ${of(point)}`)];
  const marksX = [[0.2, "4 min ago"], [0.4, "3 min"], [0.6, "2 min"], [0.8, "1 min"], [1, "now"]];
  const rates = (point) => `${rate(point.rate)} per second`;
  const lateness = (point) => (point.p99 === null ? "nothing delivered within a minute" : `p50 ${took(point.p50)}, p99 ${took(point.p99)}`);
  plots[0].show(lines({ series: [["one", padded("rate")]], marksX, words: words(rates), rest: `now ${rates(last)}`, format: rate, least: 1 }));
  plots[1].show(lines({
    series: [["p99", padded("p99")], ["p50", padded("p50")]],
    marksX, words: words(lateness), rest: `now ${lateness(last)}`, format: (ms) => (ms ? took(ms) : "0"), least: 20,
  }));
}
