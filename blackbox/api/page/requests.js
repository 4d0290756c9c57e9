// Requests: search, list page by page, show, cancel.

import { Failure, call, pathOf } from "./api.js";
import { confirmed, showFacts, showMessage } from "./dialogs.js";
import { button, byId, cell, element, refill, row, say } from "./dom.js";
import { STATES, away, between, instant, moment } from "./words.js";

const PAGE = 10;
const LABELS = ["due", "state", "to topic", "caller", "id", ""];
const LATE_MS = 1000;

const NAMES = ["id", "target", "caller"];

const form = byId("search");
let view = { wanted: {}, cursors: [] };
let nextCursor = null;

export function start() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { from_ms, to_ms } = view.wanted;
    const given = NAMES.map((name) => [name, form.elements[name].value.trim()]);
    search({ ...Object.fromEntries(given), from_ms, to_ms });
  });
  byId("clear").addEventListener("click", () => search({}));
  byId("clear-window").addEventListener("click", () => search({ ...view.wanted, from_ms: null, to_ms: null }));
  byId("next").addEventListener("click", () => turn([...view.cursors, nextCursor]));
  byId("previous").addEventListener("click", () => turn(view.cursors.slice(0, -1)));
}

/** List the requests due between two instants. */
export function list(fromMs, toMs) {
  search({ ...view.wanted, id: "", from_ms: fromMs, to_ms: toMs });
  byId("requests-title").scrollIntoView({ block: "start" });
}

/** List the requests with `value` in this search field. */
export function searchFor(field, value) {
  search({ [field]: value });
  byId("requests-title").scrollIntoView({ block: "start" });
}

function search(given) {
  const wanted = given.id ? { id: given.id } : given;
  for (const name of NAMES) form.elements[name].value = wanted[name] ?? "";
  const isWithin = Number.isFinite(wanted.to_ms);
  byId("window").hidden = !isWithin;
  if (isWithin) {
    byId("window").firstElementChild.textContent = wanted.from_ms ? `due ${between(wanted.from_ms, wanted.to_ms + 1)}` : "overdue";
  }
  view = { wanted, cursors: [] };
  look({ isForced: true });
}

function turn(cursors) {
  view = { ...view, cursors };
  look({ isForced: true });
}

/** Refresh the list. Unless `isForced`, a search by id is not repeated, a declined token is not asked for again, and
 * errors go to the caller. */
export async function look({ isForced = false } = {}) {
  const asked = view;
  if (!isForced && asked.wanted.id) return;
  if (isForced) byId("requests").setAttribute("aria-busy", "true");
  let page = { requests: [] };
  let failure = null;
  try {
    page = await (asked.wanted.id ? found(asked.wanted.id) : listed(asked, isForced));
  } catch (error) {
    if (!(error instanceof Failure) || !isForced) throw error;
    failure = error.message;
  }
  if (asked !== view) return;
  show(page, isForced);
  byId("requests").setAttribute("aria-busy", "false");
  say(byId("requests-error"), failure);
  if (failure) say(byId("no-requests"), null);
}

async function found(id) {
  return { requests: [await call("GET", pathOf(id))] };
}

function listed({ wanted, cursors }, isForced) {
  const query = new URLSearchParams({ limit: PAGE });
  for (const [name, value] of Object.entries(wanted)) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  if (cursors.length) query.set("cursor", cursors.at(-1));
  return call("GET", `requests?${query}`, { isQuiet: !isForced });
}

function show(page, isForced) {
  const { wanted, cursors } = view;
  nextCursor = page.next ?? null;
  refill(byId("requests"), page.requests.map(requestRow), { isForced });
  byId("requests-pages").hidden = !cursors.length && nextCursor === null;
  byId("previous").disabled = !cursors.length;
  byId("next").disabled = nextCursor === null;
  byId("requests-about").textContent = wanted.id ? "by id" : `pending, the soonest first${cursors.length ? `, page ${cursors.length + 1}` : ""}`;
  const none = nextCursor === null ? "None pending." : "No matches so far; the next page continues the search.";
  say(byId("no-requests"), page.requests.length ? null : none);
}

function requestRow(request) {
  return row(LABELS,
    cell("when", due(request)),
    cell("", state(request)),
    request.target,
    request.caller,
    cell("id", button(request.caller_id ?? request.id, "name id", () => details(request.id))),
    cell("actions", ...(request.state === "pending" ? [button("Cancel", "danger", () => cancel(request))] : [])),
  );
}

function due(request) {
  if (request.due_ms === undefined) return "–";
  const isLate = request.state === "pending" && request.due_ms < Date.now() - LATE_MS;
  const words = element(isLate ? "b" : "span", { class: isLate ? "late" : null }, away(request.due_ms));
  return element("span", {}, words, " ", element("small", {}, moment(request.due_ms)));
}

function state(request) {
  const kinds = { dead: "dead", expired: "dead", invalid: "dead", delivered: "good" };
  const words = element(kinds[request.state] ? "b" : "span", { class: kinds[request.state] }, STATES[request.state] ?? request.state);
  const why = request.state === "pending" ? waitsFor(request) : request.reason;
  return element("span", {}, words, why ? element("small", {}, why) : null);
}

/** Why a pending request waits; undefined before its first try. */
function waitsFor({ reason, detail, attempts, next_try_ms }) {
  if (reason) return `to become a dead letter: ${reason}`;
  const next = next_try_ms === undefined ? undefined : `next try ${away(next_try_ms)}`;
  return attempts ? [detail, next].filter(Boolean).join(", ") : undefined;
}

function nextTry(ms) {
  return ms === undefined ? "once its target accepts messages" : instant(ms);
}

/** Show all details of a request. */
export async function details(id) {
  let request;
  try {
    request = await call("GET", pathOf(id));
  } catch (error) {
    showMessage(error.message, { isBad: true });
    return;
  }
  const known = {
    state: STATES[request.state] ?? request.state,
    id: request.id,
    "caller’s id": request.caller_id,
    caller: request.caller,
    "to topic": request.target,
    due: request.due_ms === undefined ? undefined : `${instant(request.due_ms)}, ${away(request.due_ms)}`,
    "next try": request.attempts ? nextTry(request.next_try_ms) : undefined,
    when: request.at_ms === undefined ? undefined : instant(request.at_ms),
    where: request.place && `${request.place.topic}/${request.place.partition}@${request.place.offset}`,
    reason: request.reason,
    [request.attempts && !request.reason ? "waits" : "detail"]: request.detail,
    "written at": request.source,
    "carried on as": request.carried,
    "cold tier": request.is_cold ? "yes: waits in Kafka until promoted" : undefined,
  };
  const facts = Object.entries(known).filter(([, value]) => value !== undefined && value !== null);
  const actions = request.state === "pending" ? [button("Cancel this request", "danger", async () => {
    byId("details").close();
    await cancel(request);
  })] : [];
  showFacts("Request", facts.map(([name, value]) => [name, String(value)]), actions);
}

async function cancel(request) {
  const name = request.caller_id ?? request.id;
  const text = `${name}, to ${request.target ?? "an unknown topic"}${request.due_ms ? `, due ${away(request.due_ms)}` : ""}. This cannot be undone.`;
  if (!(await confirmed("Cancel this request?", text, "Cancel it"))) return;
  try {
    const done = await call("DELETE", pathOf(request.id));
    showMessage(outcome(name, done), { isBad: done.outcome !== "cancelled" });
  } catch (error) {
    showMessage(`Not cancelled: ${error.message}`, { isBad: true });
  }
  await look({ isForced: true });
}

function outcome(name, { outcome: became, request }) {
  if (became === "cancelled") return `Cancelled: ${name} will not be delivered.`;
  if (became === "asked") return `Requested: the cancel of ${name} is in Kafka, but not yet read. Check again in a moment.`;
  const when = request.at_ms === undefined ? "" : ` at ${moment(request.at_ms)}`;
  return `Too late: ${name} was ${request.state === "ended" ? "cancelled or replaced before" : `${STATES[request.state] ?? request.state}${when}`}.`;
}
