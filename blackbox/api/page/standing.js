// Statistics: pending and overdue requests, by shard, caller, target and due time.

import { call } from "./api.js";
import { byId, cell, element, refill, row } from "./dom.js";
import { shardsHere } from "./metrics.js";
import { Plot, bars } from "./plot.js";
import * as targets from "./targets.js";
import { away, between, count, counted, mark, took } from "./words.js";

const HOUR_MS = 3_600_000;
const TICKS_MS = { 60_000: HOUR_MS / 6, 360_000: HOUR_MS, 1_440_000: 4 * HOUR_MS, 10_080_000: 24 * HOUR_MS, 86_400_000: 240 * HOUR_MS };

let plot = null;
let edges = [];

/** `list(fromMs, toMs)` lists the requests due in that window. */
export function start({ list }) {
  plot = new Plot(byId("due-plot"), (bar) => list(...edges[bar]));
}

/** Refresh; `search(field, value)` lists the requests with that value. */
export async function look({ search }) {
  const stats = await call("GET", `stats?step_ms=${byId("span").value}`, { isQuiet: true });
  figures(stats);
  profile(stats);
  shards(stats);
  callers(stats, (name) => search("caller", name));
  const rest = stats.counted < stats.pending ? `of the soonest ${count(stats.counted)}` : "";
  for (const place of document.querySelectorAll(".counted")) place.textContent = rest;
  await targets.look({ counts: stats.targets, search: (name) => search("target", name) });
}

function figures(stats) {
  const nexts = stats.shards.map((shard) => shard.next_due_in_ms).filter((ms) => ms !== undefined);
  byId("pending").textContent = count(stats.pending + stats.cold);
  byId("due-now").textContent = count(stats.due_now);
  byId("overdue").textContent = stats.due_now ? took(stats.oldest_overdue_ms) : "–";
  byId("next-due").textContent = nexts.length ? took(Math.min(...nexts)) : "–";
  for (const id of ["due-now", "overdue"]) byId(id).parentElement.classList.toggle("late", stats.oldest_overdue_ms > 1000);
}

function profile(stats) {
  const { profile_from_ms: from, profile_step_ms: step, profile: counts, due_now: past } = stats;
  const starts = counts.map((_, place) => from + place * step);
  edges = [[0, from], ...starts.map((ms) => [ms, ms + step - 1])];
  const within = counts.reduce((sum, one) => sum + one, 0);
  const later = Math.max(0, stats.pending - past - within);
  const span = byId("span").selectedOptions[0].textContent;
  plot.show(bars({
    past,
    counts,
    format: count,
    marksX: ticks(from, from + counts.length * step, TICKS_MS[step]),
    words: [`${count(past)} overdue`, ...starts.map((ms, place) => `${between(ms, ms + step)}: ${count(counts[place])} due`)],
    rest: `${count(past)} overdue, ${count(within)} within ${span.replace(/^hour/, "an hour")}, ${count(later + stats.cold)} later`,
  }));
}

/** Round local times between two instants, as `[share of the width, text]`. */
function ticks(from, to, stepMs) {
  const found = [];
  const start = new Date(from);
  start.setHours(0, 0, 0, 0);
  for (let ms = start.getTime(); ms < to; ms += stepMs) {
    if (ms >= from) found.push([(ms - from) / (to - from), mark(ms, stepMs)]);
  }
  return found;
}

function shards(stats) {
  refill(byId("shards"), stats.shards.map((shard) => row([],
    element("td", {}, shard.shard, shard.is_known ? null : element("small", {}, "no index in Redis")),
    cell("n", count(shard.pending)),
    cell("n", shard.due_now ? element("b", { class: "late" }, count(shard.due_now)) : "0"),
    cell("n", shard.due_now ? took(shard.oldest_overdue_ms) : "–"),
    cell("n", shard.next_due_in_ms === undefined ? "–" : away(shard.next_due_in_ms, 0)),
    cell("n", ownership(shard.shard)),
  )));
  byId("cold").textContent = stats.cold ? `${counted(stats.cold, "request")} in the cold tier` : "";
}

function ownership(name) {
  if (!shardsHere.has(name)) return element("span", { class: "soft" }, "elsewhere");
  return shardsHere.get(name) ? "open" : element("b", { class: "dead" }, "closed");
}

function callers(stats, search) {
  const most = Object.entries(stats.callers).sort((one, other) => other[1] - one[1]);
  const rows = most.map(([name, number]) => row([],
    name ? element("button", { type: "button", class: "name", click: () => search(name) }, name) : element("span", { class: "soft" }, "without a name"),
    cell("n", count(number)),
  ));
  if (stats.callers_left_out) rows.push(row([], element("span", { class: "soft" }, `and ${counted(stats.callers_left_out, "caller")} with fewer`), ""));
  refill(byId("callers"), rows, { isForced: false });
}
