// Modal dialogs (a question, a token, facts), and a notice that is not modal.

import { byId, element, say, visible } from "./dom.js";

/** Ask for confirmation; returns whether it was given. */
export async function confirmed(title, text, action) {
  byId("confirm-title").textContent = visible(title);
  byId("confirm-text").textContent = visible(text);
  const yes = byId("confirm-yes");
  yes.textContent = action;
  return opened(byId("confirm"), (close) => { yes.onclick = () => close(true); }).then(Boolean);
}

/** Ask for a token; returns null when dismissed. */
export async function askForToken(why) {
  say(byId("token-why"), `${why}.`);
  const dialog = byId("token");
  const form = dialog.querySelector("form");
  form.reset();
  return opened(dialog, (close) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      const given = form.elements.token.value.trim();
      form.reset();
      close(given || null);
    };
  });
}

/** Show `facts`, pairs of a name and a text or an element, with the buttons `actions`. */
export function showFacts(title, facts, actions = []) {
  const dialog = byId("details");
  byId("details-title").textContent = visible(title);
  dialog.querySelector("dl").replaceChildren(
    ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
  );
  const place = dialog.querySelector(".actions");
  place.replaceChildren(place.querySelector(".dismiss"), ...actions);
  return opened(dialog, () => {});
}

/** Open a dialog; returns the value it was closed with, null when it was dismissed. */
export function opened(dialog, wire) {
  return new Promise((resolve) => {
    let answer = null;
    const close = (given) => {
      answer = given;
      dialog.close();
    };
    dialog.querySelector(".dismiss").onclick = () => close(null);
    dialog.onclose = () => resolve(answer);
    wire(close);
    dialog.showModal();
  });
}

/** Show the result of an action; `show` opens its details. */
export function showMessage(text, { isBad = false, show = null } = {}) {
  const message = byId("message");
  message.classList.toggle("bad", isBad);
  message.querySelector("p").textContent = visible(text);
  byId("message-show").hidden = show === null;
  byId("message-show").onclick = show;
  byId("message-close").onclick = () => { message.hidden = true; };
  message.hidden = false;
}
