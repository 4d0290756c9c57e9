// The form that sends a request.

import { call } from "./api.js";
import { opened, showMessage } from "./dialogs.js";
import { byId, once, say } from "./dom.js";
import { details, look } from "./requests.js";

const dialog = byId("send");
const form = dialog.querySelector("form");
const error = dialog.querySelector(".error");

export function start() {
  byId("open-send").addEventListener("click", open);
  form.elements.message.addEventListener("input", tellKind);
}

function open() {
  say(error, null);
  tellKind();
  opened(dialog, (close) => {
    const send = once(async () => {
      if (await sent()) close(null);
    });
    form.onsubmit = (event) => {
      event.preventDefault();
      send();
    };
  });
}

function tellKind() {
  const text = form.elements.message.value;
  const kind = !isJson(text) ? "text, unchanged" : text.trim() === "null" ? "null: a tombstone" : "JSON, unchanged";
  byId("message-kind").textContent = `Sent as ${kind}.`;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The request's body. JSON is inserted as typed: parsing would change long numbers. */
function written() {
  const { topic, message, countdown, id } = form.elements;
  const fields = [
    ["topic", JSON.stringify(topic.value.trim())],
    ["message", isJson(message.value) ? message.value : JSON.stringify(message.value)],
    ["countdown", String(countdown.valueAsNumber)],
  ];
  if (id.value) fields.push(["id", JSON.stringify(id.value)]);
  return `{${fields.map(([name, json]) => `"${name}":${json}`).join(",")}}`;
}

async function sent() {
  const caller = form.elements.caller.value.trim();
  const headers = { "Content-Type": "application/json", ...(caller && { CALLER_SERVICE: caller }) };
  try {
    const { ids: [id] } = await call("POST", "requests", { body: written(), headers });
    say(error, null);
    showMessage(`Sent: ${id}`, { show: () => details(id) });
  } catch (failure) {
    say(error, failure.message);
    return false;
  }
  form.reset();
  look({ isForced: true });
  return true;
}
