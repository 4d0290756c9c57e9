// Creates elements. Data from the API enters the page only through these functions, as text.

export const byId = (id) => document.getElementById(id);

// These are invisible, or reorder the text around them, so that one name looks like another.
const UNSEEN = /[\p{Cc}\p{Cf}\u2028\u2029]/gu;

/** The text with invisible characters written as their code points. */
export const visible = (text) => text.replace(UNSEEN, (one) => (one === "\n" || one === "\t" ? one : `\\u{${one.codePointAt(0).toString(16)}}`));

const shown = (child) => (typeof child === "string" ? visible(child) : child);

/** An element; functions among `attributes` are listeners, null ones are left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** As `element`, for SVG. */
export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map(shown));
  return made;
}

/** A table row; `labels` are shown before the cells when the table is too narrow for a head. */
export function row(labels, ...cells) {
  return element("tr", {}, ...cells.map((cell, place) => {
    const made = cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell ?? "–");
    if (labels[place]) made.setAttribute("data-label", labels[place]);
    return made;
  }));
}

export const cell = (kind, ...children) => element("td", { class: kind }, ...children);

/** A button that ignores presses while its action is running. */
export function button(text, kind, press) {
  return element("button", { type: "button", class: kind || null, click: once(press) }, text);
}

export function once(press) {
  let isUnderWay = false;
  return async () => {
    if (isUnderWay) return;
    isUnderWay = true;
    try {
      await press();
    } finally {
      isUnderWay = false;
    }
  };
}

/** Replace the rows of `body`; unless `isForced`, not while the user has focus or the pointer in it. */
export function refill(body, rows, { isForced = true } = {}) {
  const isInUse = body.contains(document.activeElement) || body.matches(":hover");
  if (isForced || !isInUse) body.replaceChildren(...rows);
}

/** Show a text in an element, or hide the element if there is none. */
export function say(place, text) {
  place.textContent = visible(text ?? "");
  place.hidden = !text;
}

/** Call `run` now, and again `ms` after each end, while the page is visible; returns a function to call it at once. */
export function repeat(ms, run) {
  let timer = 0;
  let isRunning = false;
  let isWanted = false;
  const next = async () => {
    isWanted = isRunning;
    if (isRunning) return;
    clearTimeout(timer);
    isRunning = true;
    try {
      if (!document.hidden) await run();
    } finally {
      isRunning = false;
      timer = setTimeout(next, isWanted ? 0 : ms);
    }
  };
  document.addEventListener("visibilitychange", next);
  next();
  return next;
}
