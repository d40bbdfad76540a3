// Two small line plots, drawn as SVG: how a number went over the last minutes, ten at most.

import { clock, make, short } from "./words.js";

const WINDOWS_MIN = [2, 5, 10];
const GAP_MS = 10000; // a longer silence is shown as one
const HEIGHT = 128;
const LEFT = 46;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 20;

const svg = (tag, attributes = {}) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

// A round number that is not smaller: 1, 2, 2.5 or 5 times a power of ten.
export function roundUp(value) {
  if (value <= 10) return 10;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999);
}

export class Plot {
  constructor(figure, { title, unit, index, kind }) {
    this.index = index;
    this.title = title;
    this.unit = unit;
    this.points = [];
    this.value = make("strong", { class: "now" }, "–");
    this.at = make("span", { class: "quiet" }, "");
    this.drawing = svg("svg", { class: `plot ${kind}`, role: "img", height: HEIGHT });
    figure.append(
      make("figcaption", {}, make("span", { class: "name" }, title), this.value, make("span", { class: "quiet" }, unit), this.at),
    );
    figure.append(this.drawing);
    this.pointer = null;
    this.width = 0;
    this.drawing.addEventListener("pointermove", (event) => {
      this.pointer = event.clientX - this.drawing.getBoundingClientRect().left;
      this.draw();
    });
    this.drawing.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.draw();
    });
    // Told, not asked: asking lays the whole page out at once, and a second time after what is drawn then.
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.draw();
    }).observe(this.drawing);
  }

  show(points, now) {
    this.points = [...points].map(([at, values]) => [Number(at), values[this.index]]);
    this.points = this.points.filter(([, value]) => value !== null).sort((a, b) => a[0] - b[0]);
    this.now = now;
    this.draw();
  }

  draw() {
    const width = this.width;
    if (!width || !this.now) return;
    const age = (this.now - (this.points[0]?.[0] ?? this.now)) / 60000;
    const minutes = WINDOWS_MIN.find((each) => each >= age) ?? WINDOWS_MIN.at(-1);
    const from = this.now - minutes * 60000;
    const shown = this.points.filter(([at]) => at >= from);
    const most = roundUp(Math.max(0, ...shown.map(([, value]) => value)));
    const x = (at) => LEFT + ((at - from) / (this.now - from)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(most * share);
      parts.push(svg("line", { class: share ? "rule" : "axis", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      const label = svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" });
      label.textContent = short(most * share);
      parts.push(label);
    }
    for (const [back, anchor] of [[minutes, "start"], [minutes / 2, "middle"], [0, "end"]]) {
      const label = svg("text", { x: x(this.now - back * 60000), y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = back ? `${back} min ago` : "now";
      parts.push(label);
    }
    parts.push(...this.lines(shown, x, y));
    const last = shown.at(-1);
    let told = last;
    if (this.pointer !== null && shown.length) {
      told = shown.reduce((best, each) =>
        Math.abs(x(each[0]) - this.pointer) < Math.abs(x(best[0]) - this.pointer) ? each : best,
      );
      parts.push(svg("line", { class: "pointer", x1: x(told[0]), x2: x(told[0]), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    if (told) parts.push(svg("circle", { class: "end", cx: x(told[0]), cy: y(told[1]), r: 3.5 }));
    this.drawing.replaceChildren(...parts);
    this.value.textContent = told ? short(told[1]) : "–";
    this.at.textContent = told && told !== last ? `at ${clock(told[0])}` : "";
    const values = shown.map(([, value]) => value);
    this.drawing.setAttribute(
      "aria-label",
      values.length
        ? `${this.title}, last ${minutes} minutes: now ${short(values.at(-1))} ${this.unit}, lowest ${short(Math.min(...values))}, highest ${short(Math.max(...values))}`
        : `${this.title}: nothing measured yet`,
    );
  }

  lines(shown, x, y) {
    const runs = [];
    shown.forEach((point, index) => {
      if (!index || point[0] - shown[index - 1][0] > GAP_MS) runs.push([]);
      runs.at(-1).push(point);
    });
    return runs.flatMap((run) => {
      const line = run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
      const ground = y(0);
      const area = `${x(run[0][0])},${ground} ${line} ${x(run.at(-1)[0])},${ground}`;
      return [svg("polygon", { class: "area", points: area }), svg("polyline", { class: "line", points: line })];
    });
  }
}
