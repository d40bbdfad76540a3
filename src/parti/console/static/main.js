// Puts the page together.

import { Feed } from "./feed.js";
import { PartitionMap } from "./map.js";
import { Page } from "./page.js";
import { Plot } from "./plots.js";
import { Table } from "./tables.js";
import { $, make, moment, number, say, sortedByName, swatch } from "./words.js";

const STEADY = "Point at a partition, or go to it with the arrow keys.";

let chosen = null; // partition
let pointed = null;
let partitionTable = null;
let filter = "";
let most = 400; // rows of that table, until all are wanted

const feed = new Feed(onChange, () => page.showLink());
const map = new PartitionMap($("map"), feed, { onPoint: point, onChoose: choose, onWorker: chooseWorker });
const page = new Page(feed, { onWorker: chooseWorker });
const rate = new Plot($("plot-rate"), { title: "Throughput", unit: "messages a second", index: 0, kind: "rate" });
const lag = new Plot($("plot-lag"), { title: "Lag", unit: "messages wait", index: 1, kind: "lag" });

function onChange(changed, whole) {
  if (whole) map.build();
  else {
    map.update(changed);
    page.tell(changed);
  }
  page.update(changed);
  page.showLink();
  if (changed.points) {
    rate.show(feed.picture.points, feed.now());
    lag.show(feed.picture.points, feed.now());
  }
  if (partitionTable) showTable();
  showDetail();
  if (whole && document.documentElement.dataset.drawn === undefined) {
    // After the frame that shows it: how long the page took.
    requestAnimationFrame(() =>
      setTimeout(() => (document.documentElement.dataset.drawn = String(Math.round(performance.now())))),
    );
  }
}

// ── one partition, one worker ───────────────────────────────────────────────────────────────────────────────────

function point(name) {
  pointed = name;
  showDetail();
}

function choose(name) {
  chosen = chosen === name ? null : name;
  page.showMovesOf(chosen);
  showDetail();
}

function chooseWorker(name) {
  map.choose(map.chosenWorker === name ? null : name);
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (map.chosenWorker !== null) map.choose(null);
  if (chosen !== null) choose(chosen);
});

function showDetail() {
  const name = pointed ?? chosen;
  const steady = feed.picture.partitions.size ? STEADY : "";
  say($("detail"), name === null ? steady : map.describe(name));
}

// ── the table instead of the map ────────────────────────────────────────────────────────────────────────────────

$("view").addEventListener("change", (event) => show(event.target.value));

function show(view) {
  const table = view === "table";
  $("map").hidden = table;
  $("partition-table").hidden = !table;
  $("detail").hidden = table;
  if (!table) {
    partitionTable = null;
    $("partition-table").replaceChildren();
    map.show(view);
    return;
  }
  const input = make("input", { type: "search", placeholder: "Filter by partition, worker or state", "aria-label": "Filter the table of partitions" });
  input.value = filter;
  input.addEventListener("input", () => {
    filter = input.value;
    showTable();
  });
  const place = make("div");
  const more = make("button", { type: "button", class: "more", id: "partition-more" });
  more.addEventListener("click", () => {
    most = Infinity;
    showTable();
  });
  $("partition-table").replaceChildren(input, place, more);
  partitionTable = new Table(place, {
    caption: "Partitions",
    empty: "No partition matches.",
    scroll: true,
    columns: [
      { title: "partition", text: (key) => key },
      { title: "state", text: (key, p) => `${p[1]}${feed.picture.failing.has(key) ? ", failing" : ""}` },
      { title: "owner", text: (key, p) => `${p[0]} ${feed.picture.workers.get(p[0])?.colour}`, node: (key, p) => make("span", { class: "line" }, swatch(feed.picture.workers.get(p[0])?.colour), p[0] || "nobody") },
      { title: "next", optional: true, text: (key, p) => p[2] },
      { title: "since", text: (key, p) => moment(p[4]) },
      { title: "fence token", right: true, text: (key, p) => String(p[3]) },
      { title: "began at", right: true, text: (key, p) => number(p[6]) },
      { title: "why", wrap: true, text: (key, p) => p[7] },
    ],
  });
  showTable();
}

function showTable() {
  const wanted = filter.trim().toLowerCase();
  const matches = ([name, [owner, state, next]]) =>
    !wanted || [name, owner, state, next].some((text) => text.toLowerCase().includes(wanted));
  const names = sortedByName([...feed.picture.partitions].filter(matches).map(([name]) => name));
  partitionTable.show(names.slice(0, most), (name) => feed.picture.partitions.get(name));
  const more = $("partition-more");
  more.hidden = names.length <= most;
  say(more, `Show all ${number(names.length)}`);
}

feed.start();

setInterval(() => {
  if (document.hidden) return;
  page.tick();
  rate.show(feed.picture.points, feed.now());
  lag.show(feed.picture.points, feed.now());
}, 1000);
