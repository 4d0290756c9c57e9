// SVG plots with a cursor, moved by pointer and arrow keys, and a line of text for its position.

import { drawn } from "./dom.js";

const LEFT = 58;
const BELOW = 22;
const ABOVE = 8;
const PAST = 64;

/** `layout(width)` returns `{ marks, places, words, rest, height }`: `places` are the left and right edges of each
 * cursor position, `words` their texts, `rest` the text without a cursor. */
export class Plot {
  #host;
  #readout;
  #pick;
  #layout = null;
  #shown = null;
  #cursor = null;

  constructor(figure, pick = null) {
    this.#host = figure.querySelector(".plot");
    this.#readout = figure.querySelector("output");
    this.#pick = pick;
    const attributes = { tabindex: 0, role: "slider", "aria-label": figure.getAttribute("aria-label"), "aria-valuemin": 0 };
    for (const [name, value] of Object.entries(attributes)) this.#host.setAttribute(name, value);
    this.#host.addEventListener("pointermove", (event) => this.#move(this.#at(event)));
    this.#host.addEventListener("pointerleave", () => this.#move(null));
    this.#host.addEventListener("blur", () => this.#move(null));
    this.#host.addEventListener("keydown", (event) => this.#press(event));
    this.#host.addEventListener("click", (event) => this.#choose(this.#at(event)));
    new ResizeObserver(() => this.#draw()).observe(this.#host);
  }

  show(layout) {
    this.#layout = layout;
    this.#draw();
  }

  #draw() {
    const width = this.#host.clientWidth;
    if (!this.#layout || !width) return;
    const shown = this.#layout(width);
    this.#shown = shown;
    const { places, words, marks, height } = shown;
    if (this.#cursor !== null) this.#cursor = Math.min(this.#cursor, places.length - 1);
    const at = places[this.#cursor];
    const cursor = at && drawn("rect", { class: "cursor", x: at[0], y: ABOVE, width: at[1] - at[0], height: height - ABOVE - BELOW });
    this.#host.replaceChildren(
      drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" }, cursor, ...marks),
    );
    const text = at ? words[this.#cursor] : shown.rest;
    this.#readout.textContent = text;
    this.#host.setAttribute("aria-valuemax", Math.max(0, places.length - 1));
    this.#host.setAttribute("aria-valuenow", this.#cursor ?? 0);
    this.#host.setAttribute("aria-valuetext", text);
  }

  #at(event) {
    const x = event.clientX - this.#host.getBoundingClientRect().left;
    const found = this.#shown?.places.findIndex(([from, to]) => x >= from && x < to) ?? -1;
    return found < 0 ? null : found;
  }

  #move(cursor) {
    if (cursor === this.#cursor) return;
    this.#cursor = cursor;
    this.#draw();
  }

  #press(event) {
    const last = (this.#shown?.places.length ?? 0) - 1;
    const here = this.#cursor;
    const steps = { ArrowRight: here === null ? 0 : here + 1, ArrowLeft: here === null ? last : here - 1, Home: 0, End: last };
    if (event.key in steps) {
      event.preventDefault();
      this.#move(Math.max(0, Math.min(last, steps[event.key])));
    } else if (event.key === "Enter") {
      this.#choose(here);
    } else if (event.key === "Escape") {
      this.#move(null);
    }
  }

  #choose(cursor) {
    if (cursor !== null && this.#pick) this.#pick(cursor);
  }
}

/** Bars, with a separate first bar for overdue. `marksX` are `[share of the width, text]`. */
export function bars({ past, counts, marksX, words, rest, format }) {
  return (width) => {
    const height = 200;
    const scale = heights(Math.max(past, ...counts, 1), height, format, 1);
    const from = LEFT + PAST;
    const step = (width - from) / counts.length;
    const bar = (x, room, number, kind) => number > 0 && drawn("rect", {
      class: kind, x: x + room * 0.1, width: room * 0.8, y: Math.min(scale.y(number), scale.y(0) - 2), height: Math.max(scale.y(0) - scale.y(number), 2), rx: 1,
    });
    const marks = [
      ...scale.grid(width),
      bar(LEFT + 8, PAST - 24, past, "late"),
      ...counts.map((number, place) => bar(from + place * step, step, number, "due")),
      drawn("text", { x: LEFT + PAST / 2 - 4, y: height - 6, "text-anchor": "middle" }, "overdue"),
      ...labelsX(marksX, from, width, height),
    ].filter(Boolean);
    const places = [[LEFT, from], ...counts.map((_, place) => [from + place * step, from + (place + 1) * step])];
    return { marks, places, words, rest, height };
  };
}

/** Lines over time: `series` are `[kind, values]`, null for a missing value; `marksX` as for bars. */
export function lines({ series, marksX, words, rest, format, least }) {
  return (width) => {
    const height = 150;
    const values = series.flatMap(([, all]) => all).filter((one) => Number.isFinite(one));
    const scale = heights(Math.max(least, ...values), height, format, 0);
    const length = series[0][1].length;
    const step = (width - LEFT - 2) / Math.max(1, length);
    const x = (place) => LEFT + (place + 0.5) * step;
    const marks = [...scale.grid(width), ...labelsX(marksX, LEFT, width, height)];
    for (const [kind, all] of series) {
      const paths = all.map((value, place) => {
        if (!Number.isFinite(value)) return "";
        const isFirst = place === 0 || !Number.isFinite(all[place - 1]);
        return `${isFirst ? "M" : "L"}${x(place).toFixed(1)} ${scale.y(value).toFixed(1)}`;
      });
      marks.push(drawn("path", { class: kind, d: paths.join("") || "M0 0" }));
    }
    const places = words.map((_, place) => [LEFT + place * step, LEFT + (place + 1) * step]);
    return { marks, places, words, rest, height };
  };
}

function heights(most, height, format, least) {
  const step = roundStep(most / 4, least);
  const top = Math.ceil(most / step) * step;
  const y = (value) => ABOVE + (height - ABOVE - BELOW) * (1 - Math.min(value, top) / top);
  const grid = (width) => {
    const marks = [];
    for (let value = 0; value <= top + step / 2; value += step) {
      marks.push(drawn("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
      marks.push(drawn("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    return marks;
  };
  return { y, grid };
}

/** 1, 2 or 5 times a power of ten, not below `step` or `least`. */
function roundStep(step, least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(step, least, 1e-9)));
  return [1, 2, 5, 10].map((times) => times * power).find((round) => round >= Math.max(step, least));
}

/** Labels below the plot, left out where they would overlap. */
function labelsX(marks, from, to, height) {
  let free = from;
  return marks.flatMap(([share, text]) => {
    const half = text.length * 4;
    const x = Math.min(from + share * (to - from), to - half);
    if (x - half < free) return [];
    free = x + half + 6;
    return [drawn("text", { x, y: height - 6, "text-anchor": "middle" }, text)];
  });
}
