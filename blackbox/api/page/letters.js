// Dead letters: list, replay, discard.

import { Failure, call } from "./api.js";
import { confirmed, showFacts, showMessage } from "./dialogs.js";
import { button, byId, cell, element, once, refill, row, say } from "./dom.js";
import { away, count, counted, instant, moment } from "./words.js";

const MOST = 200;
const LABELS = ["since", "reason", "to topic", "caller", "request", ""];

let shown = [];

export function start() {
  byId("reason").addEventListener("change", () => look({ isForced: true }));
  byId("all-letters").addEventListener("change", () => look({ isForced: true }));
  byId("replay-all").addEventListener("click", once(() => closeLetters("replay", open())));
  byId("discard-all").addEventListener("click", once(() => closeLetters("discard", open())));
}

const open = () => shown.filter((letter) => !letter.became);

/** Refresh the list. Unless `isForced`, a declined token is not asked for again, and errors go to the caller. */
export async function look({ isForced = false } = {}) {
  const isAll = byId("all-letters").checked;
  try {
    const { letters } = await call("GET", `dead-letters?limit=${MOST}&is_open=${!isAll}`, { isQuiet: !isForced });
    say(byId("letters-error"), null);
    reasons(letters);
    const reason = byId("reason").value;
    shown = letters.filter((letter) => !reason || letter.reason === reason);
    figure(letters);
    refill(byId("letters"), shown.map(letterRow), { isForced });
    byId("no-letters").hidden = shown.length > 0;
    for (const id of ["replay-all", "discard-all"]) byId(id).hidden = open().length < 2;
  } catch (error) {
    if (!(error instanceof Failure) || !isForced) throw error;
    say(byId("letters-error"), error.message);
  }
}

function figure(letters) {
  const number = letters.filter((letter) => !letter.became).length;
  byId("dead").textContent = letters.length === MOST ? `${count(number)}+` : count(number);
  byId("dead").parentElement.classList.toggle("dead", number > 0);
}

function reasons(letters) {
  const select = byId("reason");
  const found = new Set(letters.map((letter) => letter.reason));
  if (select.value) found.add(select.value);
  const names = ["", ...[...found].sort()];
  if (names.join() === [...select.options].map((one) => one.value).join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name || "any")));
  select.value = chosen;
}

function letterRow(letter) {
  const actions = letter.became ? [letter.became] : [
    button("Replay", "", () => closeLetters("replay", [letter])),
    button("Discard", "danger", () => closeLetters("discard", [letter])),
  ];
  return row(LABELS,
    cell("when", element("span", {}, away(letter.at_ms), " ", element("small", {}, moment(letter.at_ms)))),
    element("td", {}, element("span", {}, element("b", { class: "dead" }, letter.reason), element("small", {}, letter.detail))),
    letter.target,
    letter.caller,
    cell("id", button(letter.source, "name id", () => details(letter))),
    cell("actions", ...actions),
  );
}

function details(letter) {
  const facts = [
    ["reason", letter.reason], ["detail", letter.detail], ["since", instant(letter.at_ms)],
    ["caller", letter.caller], ["to topic", letter.target], ["outcome", letter.became],
    ["written at", letter.source], ["dead letter at", letter.place],
    [letter.key_encoding ? "key, base64" : "key", letter.key],
    [`record, ${counted(letter.value_bytes, "byte")}${letter.value_encoding ? ", base64" : ""}`, letter.value === undefined && letter.value_bytes ? "shown only to users who may make changes" : letter.value && element("pre", {}, letter.value)],
  ];
  showFacts("Dead letter", facts.filter(([, value]) => value));
}

async function closeLetters(how, letters) {
  const many = letters.length === 1 ? "this dead letter" : counted(letters.length, "dead letter");
  const about = letters.length === 1 ? `${letters[0].reason}, caller ${letters[0].caller ?? "unknown"}, to ${letters[0].target ?? "an unknown topic"}` : "All open letters shown";
  const [title, text, action] = how === "replay"
    ? [`Replay ${many}?`, `${about}. The request is written again, a replacement by id without its condition; a countdown starts again.`, "Replay"]
    : [`Discard ${many}?`, `${about}. Nothing is delivered; the letter stays in Kafka, marked as discarded.`, "Discard"];
  if (!(await confirmed(title, text, action))) return;
  try {
    const { count, left } = await closeAll(how, letters.map((letter) => letter.place));
    const became = `${counted(count, "dead letter")} ${how === "replay" ? "replayed" : "discarded"}`;
    const why = Object.entries(left).map(([place, reason]) => `${place}: ${reason}`);
    showMessage([`${became}.`, ...why].join(" "), { isBad: why.length > 0 });
  } catch (error) {
    showMessage(`${how === "replay" ? "Not replayed" : "Not discarded"}: ${error.message}`, { isBad: true });
  }
  await look({ isForced: true });
}

// A call replays for a limited time. Those that it has not reached are named again, alone: else the same ones would be
// refused first each time.
async function closeAll(how, places) {
  const headers = { "Content-Type": "application/json" };
  let count = 0;
  let refused = {};
  while (true) {
    const { done, left } = await call("POST", `dead-letters/${how}`, { body: JSON.stringify({ places }), headers });
    count += done.length;
    refused = { ...refused, ...left };
    done.forEach((place) => delete refused[place]);
    const more = Object.keys(left).filter((place) => left[place].startsWith("not done"));
    if (!more.length || more.length === places.length) return { count, left: refused };
    places = more;
  }
}
