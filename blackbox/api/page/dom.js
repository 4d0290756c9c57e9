// Elements. What comes from the API gets into the page through these alone, as text.

export const byId = (id) => document.getElementById(id);

// They reorder what stands around them, so that one name passes for another, or show nothing at all.
const UNSEEN = /[\p{Cc}\p{Cf}\u2028\u2029]/gu;

/** A text in which everything can be seen: what cannot is written as its number. */
export const visible = (text) => text.replace(UNSEEN, (one) => (one === "\n" || one === "\t" ? one : `\\u{${one.codePointAt(0).toString(16)}}`));

const shown = (child) => (typeof child === "string" ? visible(child) : child);

/** An element; functions among `attributes` are listeners, null ones are left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
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

/** A row; `labels` stand before the cells where the table is too narrow for a head. */
export function row(labels, ...cells) {
  return element("tr", {}, ...cells.map((cell, place) => {
    const made = cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell ?? "–");
    if (labels[place]) made.setAttribute("data-label", labels[place]);
    return made;
  }));
}

export const cell = (kind, ...children) => element("td", { class: kind }, ...children);

/** A button that does nothing while what it started is under way. */
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

/** Put `rows` there, unless somebody is about to press something in them. */
export function refill(body, rows, { isForced = true } = {}) {
  const isInUse = body.contains(document.activeElement) || body.matches(":hover");
  if (isForced || !isInUse) body.replaceChildren(...rows);
}

/** Show a text in an element that is hidden without one. */
export function say(place, text) {
  place.textContent = visible(text ?? "");
  place.hidden = !text;
}

/** Run now, then again `ms` after each end, while the page is looked at. What it returns runs it at once. */
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
