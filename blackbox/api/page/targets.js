// Targets: pending requests by topic, and the paused topics.

import { Failure, call } from "./api.js";
import { confirmed, showMessage } from "./dialogs.js";
import { button, byId, cell, element, refill, row } from "./dom.js";
import { away, count } from "./words.js";

/** Refresh; `counts` is by topic, `search(name)` lists the requests to a topic. */
export async function look({ counts, search, isForced = false }) {
  const { paused } = await call("GET", "targets/paused", { isQuiet: true });
  const since = new Map(paused.map((one) => [one.topic, one.since_ms]));
  const names = [...new Set([...since.keys(), ...Object.keys(counts)])];
  names.sort((one, other) => since.has(other) - since.has(one) || (counts[other] ?? 0) - (counts[one] ?? 0));
  const change = async (how, name) => {
    if (await changed(how, name)) await look({ counts, search, isForced: true });
  };
  refill(byId("targets"), names.map((name) => row([],
    element("td", {},
      name ? element("button", { type: "button", class: "name", click: () => search(name) }, name) : element("span", { class: "soft" }, "without a name"),
      since.has(name) ? element("small", { class: "late" }, `paused ${away(since.get(name))}`) : null),
    cell("n", count(counts[name] ?? 0)),
    cell("actions", !name ? "" : since.has(name)
      ? button("Resume", "", () => change("resume", name))
      : button("Pause", "danger", () => change("pause", name))),
  )), { isForced });
}

async function changed(how, name) {
  const [text, action] = how === "pause"
    ? ["Delivery stops within a second; requests that come due wait.", "Pause"]
    : ["Waiting requests are delivered within a minute.", "Resume"];
  if (!(await confirmed(`${action} ${name}?`, text, action))) return false;
  try {
    await call("POST", `targets/${encodeURIComponent(name)}/${how}`);
    showMessage(`${name} ${how === "pause" ? "is paused" : "is resumed"}.`);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showMessage(`${name}: ${error.message}`, { isBad: true });
  }
  return true;
}
