// Numbers, times and states as text.

const DAY_MS = 86_400_000;
const numbers = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const minutes = new Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const whole = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const count = (number) => numbers.format(number);
export const counted = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** A rate per second: `0.5`, `12`, `1,204`. */
export const rate = (number) => (number > 0 && number < 10 ? number.toFixed(1) : count(Math.round(number)));

/** A duration: `850 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`. */
export function took(ms) {
  if (ms === Infinity) return "> 1 h";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  const s = Math.round(ms / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return joined(Math.floor(s / 60), "min", s % 60, "s");
  if (s < 86_400) return joined(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min");
  return joined(Math.floor(s / 86_400), "d", Math.floor((s % 86_400) / 3600), "h");
}

const joined = (most, its, rest, theirs) => (rest ? `${most} ${its} ${rest} ${theirs}` : `${most} ${its}`);

export const time = (ms) => clock.format(ms);
export const instant = (ms) => whole.format(ms);

/** A time of day, with the date unless it is today. */
export const moment = (ms) => (isToday(ms) ? clock.format(ms) : `${day.format(ms)} ${minutes.format(ms)}`);

const isToday = (ms) => new Date(ms).toDateString() === new Date().toDateString();

/** A relative time, to the second: `in 3 min 20 s`, `12 s ago`. */
export function away(ms, now = Date.now()) {
  const s = Math.round((ms - now) / 1000);
  if (s === 0) return "now";
  return s > 0 ? `in ${took(s * 1000)}` : `${took(-s * 1000)} ago`;
}

/** A span between two instants: times of day if shorter than a day, else dates. */
export function between(from, to) {
  const shown = to - from < DAY_MS ? minutes : day;
  const on = isToday(from) || to - from >= DAY_MS ? "" : `${day.format(from)} `;
  return `${on}${shown.format(from)} – ${shown.format(to)}`;
}

export const mark = (ms, stepMs) => (stepMs < DAY_MS ? minutes : day).format(ms);

export const STATES = {
  pending: "pending",
  delivered: "delivered",
  dead: "dead letter",
  expired: "expired",
  invalid: "invalid",
  ended: "cancelled or replaced",
  unread: "not yet read",
  cancel: "is a cancel",
  tombstone: "is a tombstone",
  over: "no longer pending",
  undetermined: "not found in time",
};
