// Numbers, times and names as people read them, and small parts of the page.

export const $ = (id) => document.getElementById(id);

// Names in the order in which people count: p9 before p10. Not by Intl, whose tables a new browser reads for as long as
// the map takes to draw; the same holds for numbers and times.
const partsOf = (name) => name.split(/(\d+)/);

function compareParts(a, b) {
  const common = Math.min(a.length, b.length);
  for (let index = 0; index < common; index++) {
    if (a[index] === b[index]) continue;
    const difference = index % 2 ? Number(a[index]) - Number(b[index]) : 0; // each second part is a number
    return difference || (a[index] < b[index] ? -1 : 1);
  }
  return a.length - b.length;
}

export const byName = (a, b) => compareParts(partsOf(a), partsOf(b));

export const sortedByName = (names) =>
  Array.from(names, (name) => [partsOf(name), name])
    .sort((a, b) => compareParts(a[0], b[0]))
    .map(([, name]) => name);

export const number = (value) =>
  value === null || value === undefined ? "" : String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

// The same as the command line writes: 0.4 s, 45 s, 12 min, 30 h, 9 d.
export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 120) return `${s.toFixed(0)} s`;
  if (s < 7200) return `${(s / 60).toFixed(0)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(0)} h`;
  return `${(s / 86400).toFixed(0)} d`;
}

export function short(value) {
  if (value < 10000) return number(value);
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export function milliseconds(ms) {
  if (!ms) return "";
  if (ms < 10) return `${Number(ms.toPrecision(2))} ms`;
  return ms < 10000 ? `${number(ms)} ms` : `${number(ms / 1000)} s`;
}

export function clock(ms) {
  const date = new Date(ms);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

export function moment(ms) {
  const date = new Date(ms);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(ms) : `${date.toISOString().slice(5, 10)} ${clock(ms)}`;
}

// Creates an element; texts are only ever set as text, because names and errors come from elsewhere.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const COLOURS = 7;
const TEXTURES = 4;

// The colour of a worker: seven that people with any sight tell apart, then the same with textures. By class, because
// two thousand cells with a style of their own each take twice as long to draw.
export function painted(kind, colour) {
  if (colour === undefined) return `${kind} c-nobody`;
  const texture = Math.floor(colour / COLOURS) % TEXTURES;
  return `${kind} c${colour % COLOURS}${texture ? ` t${texture}` : ""}`;
}

// The colour of the worker that a partition is on its way to.
export function paintNext(element, colour) {
  element.style.setProperty("--next", colour === undefined ? "var(--nobody)" : `var(--c${colour % COLOURS})`);
}

export function swatch(colour) {
  return make("i", { class: painted("swatch", colour), "aria-hidden": "true" });
}
