// The map: one cell for each partition. By owner a cell flies to its next owner; by name it stays and changes colour.

import { byName, count, make, number, painted, paintNext, say, sortedByName, span, swatch } from "./words.js";

const [OWNER, STATE, NEXT, FENCE, SINCE, , POSITION, REASON] = [0, 1, 2, 3, 4, 5, 6, 7];
const NOBODY = "";
const FLYING = 400; // most cells that fly at once
const FLIGHT_MS = 650;
const FRESH_MS = 2500;
const SIZES = [
  [64, 26, 4],
  [240, 19, 3],
  [700, 15, 3],
  [1500, 12, 2],
  [Infinity, 10.5, 2],
];
// No <button>: two thousand of them take twice as long to lay out.
const BLANK = make("div", { class: "cell", role: "button", tabindex: "-1" });
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class PartitionMap {
  constructor(place, feed, { onPoint, onChoose, onWorker }) {
    this.place = place;
    this.feed = feed;
    this.onPoint = onPoint;
    this.onChoose = onChoose;
    this.onWorker = onWorker;
    this.cells = new Map();
    this.blocks = new Map();
    this.view = "owner";
    this.current = null;
    this.chosenWorker = null;
    place.addEventListener("keydown", (event) => this.onKey(event));
    place.addEventListener("focusin", (event) => event.target.partition && this.enter(event.target));
    place.addEventListener("pointerover", (event) => event.target.partition && this.onPoint(event.target.partition));
    place.addEventListener("pointerleave", () => this.onPoint(null));
    place.addEventListener("click", (event) => event.target.partition && this.onChoose(event.target.partition));
  }

  show(view) {
    this.view = view;
    this.build();
  }

  // Everything anew: at first, and when the arrangement changes.
  build() {
    const focused = document.activeElement?.partition;
    const names = sortedByName(this.feed.picture.partitions.keys());
    this.blocks.clear();
    for (const name of this.cells.keys()) if (!this.feed.picture.partitions.has(name)) this.cells.delete(name);
    for (const name of names) this.look(this.cell(name), name);
    this.size();
    if (this.view === "owner") {
      this.place.className = "blocks";
      this.place.replaceChildren();
      this.arrangeBlocks();
      const together = new Map([...this.blocks.values()].map((block) => [block, []]));
      for (const name of names) {
        const block = this.blockOf(name);
        if (!together.has(block)) together.set(block, []);
        together.get(block).push(this.cells.get(name));
      }
      for (const [block, cells] of together) block.cells.append(...cells);
      this.count();
    } else {
      const all = make("div", { class: "cells" });
      all.append(...names.map((name) => this.cells.get(name)));
      this.place.className = "flat";
      this.place.replaceChildren(all);
    }
    if (!names.length) {
      this.place.append(make("p", { class: "empty" }, "No partition has an owner yet. Workers claim them when they start ('parti worker')."));
    }
    if (!this.cells.has(this.current)) this.current = names[0] ?? null;
    if (this.current) this.cells.get(this.current).tabIndex = 0;
    if (focused) this.cells.get(focused)?.focus();
    this.highlight();
  }

  update({ partitions, workers, failing }) {
    const set = partitions?.set ?? [];
    const gone = partitions?.gone ?? [];
    if (set.some((name) => !this.cells.has(name)) || gone.length) {
      this.build();
      return;
    }
    if (workers && this.view === "owner") this.arrangeBlocks();
    const repaint = new Set(set);
    for (const name of [...(failing?.set ?? []), ...(failing?.gone ?? [])]) repaint.add(name);
    if (workers && this.coloursChanged()) for (const name of this.cells.keys()) repaint.add(name);
    const movers = [];
    for (const name of repaint) {
      const cell = this.cells.get(name);
      if (!cell) continue;
      const before = partitions?.before.get(name);
      const value = this.feed.picture.partitions.get(name);
      if (this.view === "owner" && cell.parentElement !== this.blockOf(name).cells) movers.push(cell);
      this.look(cell, name);
      if (before && before[OWNER] !== value[OWNER]) this.freshen(cell);
    }
    this.move(movers);
    if (this.view === "owner") this.count();
    this.highlight();
  }

  // ── cells ─────────────────────────────────────────────────────────────────────────────────────────────────────

  cell(name) {
    let cell = this.cells.get(name);
    if (!cell) {
      cell = BLANK.cloneNode(false);
      cell.partition = name;
      this.cells.set(name, cell);
    }
    return cell;
  }

  look(cell, name) {
    const value = this.feed.picture.partitions.get(name);
    const workers = this.feed.picture.workers;
    const look = painted("cell", workers.get(value[OWNER])?.colour);
    if (cell.className !== look) cell.className = look;
    cell.setAttribute("data-state", value[STATE]);
    cell.toggleAttribute("data-failing", this.feed.picture.failing.has(name));
    if (value[NEXT]) paintNext(cell, workers.get(value[NEXT])?.colour);
    cell.setAttribute("aria-label", this.said(name));
  }

  said(name) {
    const [owner, state, next] = this.feed.picture.partitions.get(name);
    const failing = this.feed.picture.failing.has(name) ? ", its next message fails" : "";
    if (state === "owned") return `${name}: ${owner}${failing}`;
    if (state === "moving" || state === "preparing") return `${name}: moves from ${owner || "nobody"} to ${next || "nobody"}${failing}`;
    if (state === "waiting") return `${name}: waits for ${owner}${failing}`;
    return `${name}: ${state}${failing}`;
  }

  describe(name) {
    const value = this.feed.picture.partitions.get(name);
    if (!value) return `${name} is gone`;
    const facts = [this.said(name)];
    if (value[OWNER]) facts.push(`since ${span((this.feed.now() - value[SINCE]) / 1000)}`);
    if (value[REASON]) facts.push(value[REASON]);
    facts.push(`fence token ${value[FENCE]}`, `began at ${number(value[POSITION])}`);
    const failing = this.feed.picture.failing.get(name);
    if (failing) facts.push(`fails: ${failing}`);
    return facts.join(" · ");
  }

  freshen(cell) {
    cell.dataset.fresh = "";
    clearTimeout(cell.calming);
    cell.calming = setTimeout(() => delete cell.dataset.fresh, FRESH_MS);
  }

  size() {
    const total = this.cells.size;
    const [, cell, gap] = SIZES.find(([most]) => total <= most);
    const owned = new Map();
    for (const value of this.feed.picture.partitions.values()) owned.set(value[OWNER], (owned.get(value[OWNER]) ?? 0) + 1);
    const largest = Math.max(1, ...owned.values());
    const columns = Math.max(6, Math.ceil(Math.sqrt(largest * 2.4)));
    this.place.style.setProperty("--cell", `${cell}px`);
    this.place.style.setProperty("--gap", `${gap}px`);
    this.place.style.setProperty("--block", `${Math.max(150, columns * (cell + gap))}px`);
  }

  // ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────

  ownerOf(name) {
    const [owner, state] = this.feed.picture.partitions.get(name);
    return state === "unowned" || state === "paused" || !this.feed.picture.workers.has(owner) ? NOBODY : owner;
  }

  blockOf(name) {
    const owner = this.ownerOf(name);
    return this.blocks.get(owner) ?? this.block(owner);
  }

  block(worker) {
    const colour = this.feed.picture.workers.get(worker)?.colour;
    const label = make("span", {}, worker || "nobody");
    const title = make("button", { type: "button", class: "title", "aria-pressed": "false" }, swatch(colour), label);
    if (worker) title.addEventListener("click", () => this.onWorker(worker));
    else title.disabled = true;
    const total = make("span", { class: "quiet" });
    const cells = make("div", { class: "cells" });
    const root = make("div", { class: "block", role: "group" }, make("div", { class: "head" }, title, total), cells);
    const block = { worker, root, title, total, cells, colour };
    this.blocks.set(worker, block);
    const later = [...this.blocks.values()].filter((each) => each !== block && comes(worker, each.worker));
    later.sort((a, b) => (comes(a.worker, b.worker) ? -1 : 1));
    this.place.insertBefore(root, later[0]?.root ?? null);
    return block;
  }

  arrangeBlocks() {
    for (const worker of this.feed.picture.workers.keys()) if (!this.blocks.has(worker)) this.block(worker);
  }

  count() {
    for (const block of [...this.blocks.values()]) {
      const size = block.cells.childElementCount;
      const known = this.feed.picture.workers.get(block.worker);
      if (!size && !known) {
        block.root.remove();
        this.blocks.delete(block.worker);
        continue;
      }
      const state = known && known.state !== "stable" ? ` · ${known.state}` : "";
      say(block.total, `${number(size)}${state}`);
      block.root.setAttribute("aria-label", `${block.worker || "nobody"}: ${count(size, "partition")}${state}`);
    }
  }

  coloursChanged() {
    let changed = false;
    for (const block of this.blocks.values()) {
      const colour = this.feed.picture.workers.get(block.worker)?.colour;
      if (block.colour === colour) continue;
      changed = true;
      block.colour = colour;
      block.title.firstElementChild.className = painted("swatch", colour);
    }
    return changed;
  }

  move(movers) {
    const fly = !still.matches && movers.length <= FLYING && !document.hidden;
    const focused = document.activeElement;
    const from = fly ? movers.map((cell) => cell.getBoundingClientRect()) : [];
    for (const cell of movers) insertSorted(this.blockOf(cell.partition).cells, cell);
    if (movers.includes(focused)) focused.focus();
    if (!fly) return;
    const to = movers.map((cell) => cell.getBoundingClientRect());
    movers.forEach((cell, index) => {
      const dx = from[index].left - to[index].left;
      const dy = from[index].top - to[index].top;
      cell.animate(
        [
          { transform: `translate(${dx}px, ${dy}px)`, zIndex: 2 },
          { transform: `translate(${dx / 2}px, ${dy / 2 - 12}px) scale(1.5)`, zIndex: 2, offset: 0.5 },
          { transform: "none", zIndex: 2 },
        ],
        { duration: FLIGHT_MS, easing: "cubic-bezier(.3,.1,.2,1)", delay: Math.min(index * 4, 250), fill: "backwards" },
      );
    });
  }

  // ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────

  choose(worker) {
    this.chosenWorker = worker;
    this.highlight();
  }

  highlight() {
    const chosen = this.feed.picture.workers.has(this.chosenWorker) ? this.chosenWorker : null;
    for (const block of this.blocks.values()) {
      block.root.toggleAttribute("data-dim", chosen !== null && block.worker !== chosen);
      block.title.setAttribute("aria-pressed", String(chosen !== null && block.worker === chosen));
    }
    if (this.view !== "name") return;
    for (const [name, cell] of this.cells) {
      cell.toggleAttribute("data-dim", chosen !== null && this.feed.picture.partitions.get(name)?.[OWNER] !== chosen);
    }
  }

  enter(cell) {
    if (this.current && this.current !== cell.partition) {
      const before = this.cells.get(this.current);
      if (before) before.tabIndex = -1;
    }
    this.current = cell.partition;
    cell.tabIndex = 0;
    this.onPoint(cell.partition);
  }

  onKey(event) {
    if (!event.target.partition || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...this.place.querySelectorAll(".cell")];
    const at = all.indexOf(event.target);
    const next = {
      ArrowRight: () => all[at + 1],
      ArrowLeft: () => all[at - 1],
      ArrowDown: () => nearest(all, event.target, 1),
      ArrowUp: () => nearest(all, event.target, -1),
      Home: () => all[0],
      End: () => all.at(-1),
    }[event.key]?.();
    const press = event.key === "Enter" || event.key === " ";
    if (press) this.onChoose(event.target.partition);
    if (next) next.focus();
    if (next || press || event.key.startsWith("Arrow")) event.preventDefault();
  }
}

// The cell in the next row, above or below, that is closest to straight ahead.
function nearest(all, from, direction) {
  const start = from.getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const cell of all) {
    const rect = cell.getBoundingClientRect();
    const dy = (rect.top - start.top) * direction;
    if (dy <= start.height / 2) continue;
    const distance = dy + 3 * Math.abs(rect.left - start.left);
    if (distance < least) [best, least] = [cell, distance];
  }
  return best;
}

// Whether one block stands before another; what nobody has stands last.
function comes(one, other) {
  if (!one || !other) return Boolean(one);
  return byName(one, other) < 0;
}

function insertSorted(place, cell) {
  const others = place.children;
  let low = 0;
  let high = others.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (byName(others[middle].partition, cell.partition) < 0) low = middle + 1;
    else high = middle;
  }
  place.insertBefore(cell, others[low] ?? null);
}
