// Everything on the page but the map and the plots: summary, tables, and what a screen reader is told.

import { Table } from "./tables.js";
import { $, byName, clock, count, make, milliseconds, moment, number, say, short, sortedByName, span, swatch } from "./words.js";

const BAD = new Set(["gone", "degraded", "unhealthy"]);
const TOGETHER_MS = 3000;
const STATES = ["running", "waiting", "failed", "cancelled", "done"];

const kindOf = (state) => (BAD.has(state) ? "bad" : state === "stable" ? "good" : "notable");
const pill = (state, kind = kindOf(state)) => make("span", { class: "pill", "data-kind": kind }, state);
const ago = (ms) => make("time", { "data-at": ms, datetime: new Date(ms).toISOString(), title: new Date(ms).toISOString() });

export class Page {
  constructor(feed, { onWorker }) {
    this.feed = feed;
    this.onWorker = onWorker;
    this.partition = null; // whose moves are shown; null: all
    this.news = [];
    this.workers = new Table($("workers-table"), {
      caption: "Workers of the fleet",
      empty: "No worker is here. 'parti worker' starts one.",
      columns: this.workerColumns(),
    });
    this.moves = new Table($("moves-table"), {
      caption: "Changes of owner, the last first",
      empty: "No partition has changed hands yet.",
      scroll: true,
      columns: this.moveColumns(),
    });
    this.letters = new Table($("letters-table"), {
      caption: "Dead letters, newest first",
      empty: "There are no dead letters.",
      scroll: true,
      columns: letterColumns(),
    });
    this.jobs = new Table($("jobs-table"), {
      caption: "Jobs that run, wait or have failed, and the last that ended",
      empty: "There are no jobs.",
      scroll: true,
      columns: jobColumns(feed),
    });
    $("moves-all").addEventListener("click", () => this.showMovesOf(null));
  }

  update(changed) {
    const { fleet, workers, moves, letters, jobs } = changed;
    if (fleet || workers) this.showSummary();
    if (workers || fleet) this.showWorkers();
    if (moves || fleet) this.showMoves();
    if (letters || fleet) this.showLetters();
    if (jobs || fleet) this.showJobs();
    this.tick();
  }

  // Ages go on by themselves.
  tick() {
    for (const time of document.querySelectorAll("time[data-at]")) {
      say(time, span((this.feed.now() - Number(time.dataset.at)) / 1000));
    }
  }

  // ── summary ───────────────────────────────────────────────────────────────────────────────────────────────────

  showSummary() {
    const fleet = this.feed.picture.fleet;
    const rebalancer = fleet.get("rebalancer");
    const problems = fleet.get("problems") ?? [];
    const workers = this.feed.picture.workers.size;
    const stream = fleet.get("stream");
    say($("where"), [`bucket ${fleet.get("bucket")}`, stream && `stream ${stream}`, fleet.get("servers")].filter(Boolean).join(" · "));
    say($("version"), `parti ${this.feed.version}`);
    const verdict = $("verdict");
    const passing = rebalancer && rebalancer.state !== "stable";
    const old = this.staleText();
    const kind = problems.length ? "bad" : passing ? "notable" : "good";
    verdict.dataset.kind = old ? "quiet" : kind;
    const before = old ? "Before that: " : "";
    const there = `${count(fleet.get("partitions"), "partition")} on ${count(workers, "worker")}`;
    if (problems.length) say(verdict, `${before || "Look at this: "}${problems.join("; ")}.`);
    else if (passing) say(verdict, `${before}The rebalancer ${rebalancer.worker} is ${rebalancer.state}: ${rebalancer.reason}.`);
    else say(verdict, `${before}All is well: ${there}, each with one owner.`);
    const shape = old ? "■ " : { good: "", notable: "▲ ", bad: "■ " }[kind];
    document.title = `${shape}${fleet.get("bucket")} – parti console`;
    $("orders").replaceChildren(...ordersSaid(fleet.get("orders")).map((text) => make("li", {}, text)));
    this.showTiles(fleet, workers);
  }

  showTiles(fleet, workers) {
    const letters = fleet.get("letters")?.total ?? 0;
    const tiles = [
      ["Workers", number(workers)],
      ["Partitions", number(fleet.get("partitions"))],
      ["Moving", number(fleet.get("moving")), fleet.get("moving") ? "notable" : ""],
      ["Unowned", number(fleet.get("unowned")), fleet.get("unowned") ? "bad" : ""],
      ["Messages a second", short(fleet.get("rate") ?? 0)],
      ["Lag", fleet.get("lag") === null ? "not known" : short(fleet.get("lag") ?? 0)],
      ["Dead letters", short(letters), letters ? "notable" : ""],
    ];
    const place = $("tiles");
    if (place.childElementCount !== tiles.length) {
      place.replaceChildren(...tiles.map(() => make("div", {}, make("dt"), make("dd"))));
    }
    tiles.forEach(([title, value, kind], index) => {
      const tile = place.children[index];
      tile.dataset.kind = kind ?? "";
      say(tile.firstElementChild, title);
      say(tile.lastElementChild, value);
    });
  }

  // ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────

  workerColumns() {
    const said = (field, show = number) => (key, w) => (w[field] === undefined || w[field] === null ? "" : show(w[field]));
    return [
      { title: "worker", text: (key, w) => `${key} ${w.colour} ${w.roles} ${w.standby}`, node: (key, w) => this.workerName(key, w) },
      { title: "state", text: (key, w) => `${w.state} ${w.drained} ${w.problems}`, node: stateOf },
      { title: "partitions", right: true, text: (key, w) => `${number(w.owned)}${w.leaving ? ` −${w.leaving}` : ""}${w.coming ? ` +${w.coming}` : ""}` },
      { title: "load", right: true, optional: true, text: (key, w) => (w.load === null ? "" : `${w.load.toFixed(2)}${w.load_share === null ? "" : ` (${Math.round(w.load_share * 100)} %)`}`) },
      { title: "msg/s", right: true, text: said("rate") },
      { title: "in hand", right: true, text: said("in_hand") },
      { title: "lag", right: true, text: said("lag") },
      { title: "p50", right: true, optional: true, text: said("p50_ms", milliseconds) },
      { title: "p99", right: true, optional: true, text: said("p99_ms", milliseconds) },
      { title: "failures", right: true, text: said("failures") },
      { title: "dead letters", right: true, text: said("dead_letters") },
      { title: "heartbeat", right: true, text: (key, w) => String(w.heartbeat ?? ""), node: (key, w) => (w.heartbeat ? ago(w.heartbeat) : "") },
      { title: "host:pid", text: (key, w) => (w.pid ? `${w.host}:${w.pid}` : "") },
      { title: "identity", optional: true, text: said("identity", String) },
      { title: "version", text: said("version", String) },
    ];
  }

  workerName(key, worker) {
    const button = make("button", { type: "button", class: "name" }, swatch(worker.colour), key);
    button.title = "Show its partitions on the map";
    button.addEventListener("click", () => this.onWorker(key));
    const marks = worker.roles.includes("rebalancer") ? [make("span", { class: "mark" }, "rebalancer")] : [];
    if (worker.guest) marks.push(make("span", { class: "mark" }, "guest"));
    if (worker.standby) marks.push(make("span", { class: "mark" }, `${worker.standby} standing by`));
    return make("span", { class: "line" }, button, ...marks);
  }

  showWorkers() {
    const workers = this.feed.picture.workers;
    this.workers.show(sortedByName(workers.keys()), (key) => workers.get(key));
  }

  // ── moves ─────────────────────────────────────────────────────────────────────────────────────────────────────

  // Partitions that went the same way for the same reason at about the same time are one line.
  moveColumns() {
    const whom = (name) => make("span", { class: "line" }, swatch(this.feed.picture.workers.get(name)?.colour), name || "nobody");
    return [
      { title: "when", text: (key, m) => moment(m[0]) },
      { title: "partition", text: (key, m) => `${m[1]} ${m.names.length}`, node: (key, m) => partitionsOf(m) },
      { title: "from", text: (key, m) => `${m[2]} `, node: (key, m) => whom(m[2]) },
      { title: "to", text: (key, m) => `${m[3]} `, node: (key, m) => whom(m[3]) },
      { title: "took", right: true, text: (key, m) => (m[6] ? span(m[6]) : "") },
      { title: "why", wrap: true, text: (key, m) => m[5] },
    ];
  }

  showMovesOf(partition) {
    this.partition = partition;
    this.showMoves();
  }

  showMoves() {
    const wanted = ([, move]) => this.partition === null || move[1] === this.partition;
    const moves = [...this.feed.picture.moves].filter(wanted).sort((a, b) => Number(b[0]) - Number(a[0]));
    const lines = this.partition === null ? together(moves) : new Map(moves.map(([key, move]) => [key, withNames(move)]));
    this.moves.show([...lines.keys()], (key) => lines.get(key));
    const note = this.feed.picture.fleet.get("notes")?.moves;
    say(this.moves.empty, note ? "Not known." : "No partition has changed hands yet.");
    const which = this.partition === null ? `the last ${number(moves.length)}` : `${number(moves.length)} of ${this.partition}`;
    say($("moves-said"), note ?? (moves.length || this.partition !== null ? which : ""));
    $("moves-all").hidden = this.partition === null;
  }

  // ── dead letters and jobs ─────────────────────────────────────────────────────────────────────────────────────

  showLetters() {
    const letters = this.feed.picture.letters;
    const keys = [...letters.keys()].sort((a, b) => Number(b) - Number(a));
    this.letters.show(keys, (key) => letters.get(key));
    const fleet = this.feed.picture.fleet;
    const known = fleet.get("letters");
    const more = known && known.total > keys.length ? `the newest ${number(keys.length)} of ${number(known.total)}; ` : "";
    const how = keys.length ? `${more}'parti dlq show ${keys[0]}' shows one with its payload` : "";
    say($("letters-said"), fleet.get("notes")?.letters ?? how);
  }

  showJobs() {
    const about = this.feed.picture.fleet.get("jobs");
    $("jobs").hidden = $("jobs-link").hidden = !about;
    if (!about) return;
    const jobs = this.feed.picture.jobs;
    const order = (key) => STATES.indexOf(jobs.get(key).state);
    const keys = [...jobs.keys()].sort((a, b) => order(a) - order(b) || jobs.get(b).finished - jobs.get(a).finished || byName(a, b));
    this.jobs.show(keys, (key) => jobs.get(key));
    const counts = STATES.filter((state) => about.counts[state]).map((state) => `${number(about.counts[state])} ${state}`);
    const queues = about.queues.map((queue) => `${number(queue.pending)} not yet received from ${queue.stream}`);
    say($("jobs-said"), this.feed.picture.fleet.get("notes")?.jobs ?? [...counts, ...queues].join(", "));
  }

  // ── the way to the server ─────────────────────────────────────────────────────────────────────────────────────

  // Why what is shown may not be what is; empty when it is.
  staleText() {
    const link = this.feed.picture.fleet.get("link");
    if (this.feed.downSince !== null)
      return `The console is unreachable since ${clock(this.feed.downSince)}. What you see is from then. Trying again …`;
    if (!link || link.up) return "";
    if (!link.connected) return `The NATS server is unreachable since ${clock(link.since)} (${link.reason}). What you see is from then.`;
    return `No news of the fleet since ${clock(link.since)} (${link.reason}). What you see may be old.`;
  }

  showLink() {
    const alarm = $("alarm");
    const text = this.staleText();
    if (alarm.hidden === Boolean(text)) this.showSummary();
    say(alarm, text);
    alarm.hidden = !text;
    document.body.toggleAttribute("data-stale", Boolean(text));
    $("link").dataset.state = text ? "down" : this.feed.open ? "live" : "waiting";
    say($("link-text"), text ? "no news" : this.feed.open ? "live" : "connecting");
  }

  // Tells a screen reader of joins, losses and moves, in one sentence each.
  tell(changed) {
    const said = [];
    for (const name of changed.workers?.set ?? []) if (!changed.workers.before.has(name)) said.push(`${name} is here.`);
    for (const name of changed.workers?.gone ?? []) said.push(`${name} is gone.`);
    for (const name of changed.workers?.set ?? []) {
      const before = changed.workers.before.get(name);
      const now = this.feed.picture.workers.get(name);
      if (before && before.state !== now.state && (now.state === "gone" || now.drained !== before.drained)) said.push(`${name} is ${now.state}.`);
    }
    const ways = new Map();
    for (const name of changed.partitions?.set ?? []) {
      const before = changed.partitions.before.get(name);
      const now = this.feed.picture.partitions.get(name);
      if (!before || before[0] === now[0]) continue;
      const way = `from ${before[0] || "nobody"} to ${now[0] || "nobody"}`;
      ways.set(way, [...(ways.get(way) ?? []), name]);
    }
    for (const [way, names] of ways) said.push(`${names.length === 1 ? names[0] : count(names.length, "partition")} moved ${way}.`);
    if (!said.length) return;
    this.news.push(...said);
    this.telling ??= setTimeout(() => {
      say($("news"), this.news.slice(-6).join(" "));
      this.news = [];
      this.telling = undefined;
    }, 1000);
  }
}

const withNames = (move, names = [move[1]]) => Object.assign([...move], { names });

function together(moves) {
  const lines = new Map();
  const open = new Map();
  for (const [key, move] of moves) {
    const way = `${move[2]}\n${move[3]}\n${move[5]}`;
    const line = open.get(way);
    if (line && line.oldest - move[0] <= TOGETHER_MS) {
      line.names.push(move[1]);
      line.oldest = move[0];
      line[6] = Math.max(line[6], move[6]);
    } else {
      const begun = Object.assign(withNames(move), { oldest: move[0] });
      lines.set(key, begun);
      open.set(way, begun);
    }
  }
  return lines;
}

function partitionsOf(move) {
  if (move.names.length === 1) return move[1];
  const names = sortedByName(move.names);
  const shown = names.length > 40 ? `${names.slice(0, 40).join(", ")} …` : names.join(", ");
  return make("span", { title: shown }, count(names.length, "partition"));
}

function ordersSaid(orders) {
  if (!orders) return [];
  const said = [];
  if (orders.hold_moves) said.push("No planned moves, until 'parti resume'");
  if (orders.drained.length) said.push(`${orders.drained.join(", ")} to own nothing, until 'parti drain --undo'`);
  if (orders.paused) said.push(`${count(orders.paused, "partition")} paused: ${orders.paused_named.slice(0, 3).join(", ")}${orders.paused > 3 ? " …" : ""}`);
  if (orders.placed) said.push(`${count(orders.placed, "partition")} placed by hand`);
  if (orders.withheld) said.push(`${count(orders.withheld, "partition")} left to old consumers: 'parti migrate status'`);
  return said;
}

function stateOf(key, worker) {
  const line = make("span", { class: "line" }, pill(worker.state));
  if (worker.drained && worker.state !== "drained") line.append(pill("drained", "notable"));
  if (worker.problems.length) line.append(make("span", { class: "problem" }, worker.problems.join("; ")));
  return line;
}

function letterColumns() {
  return [
    { title: "letter", right: true, text: (key) => key },
    { title: "age", right: true, text: (key, l) => String(l[0]), node: (key, l) => ago(l[0]) },
    { title: "subject", text: (key, l) => l[4] },
    { title: "from", text: (key, l) => `${l[2]} ${l[3]}` },
    { title: "tries", right: true, text: (key, l) => number(l[6]) },
    { title: "worker", text: (key, l) => l[7] },
    { title: "reason", wrap: true, text: (key, l) => l[5] },
  ];
}

function jobColumns(feed) {
  const kinds = { running: "good", failed: "bad", waiting: "notable" };
  const bar = (key, job) => {
    const progress = make("progress", { max: 100, value: job.percent, "aria-label": `${key}: ${job.percent} %` });
    return make("span", { class: "line" }, progress, make("span", {}, `${Math.round(job.percent)} %`));
  };
  return [
    { title: "job", text: (key) => key },
    { title: "state", text: (key, j) => `${j.state} ${j.silent}`, node: (key, j) => pill(j.silent ? "silent" : j.state, j.silent ? "bad" : (kinds[j.state] ?? "quiet")) },
    { title: "subject", text: (key, j) => j.subject },
    { title: "worker", text: (key, j) => j.worker },
    { title: "progress", text: (key, j) => String(j.percent), node: bar },
    { title: "slots", right: true, text: (key, j) => (j.slots ? number(j.slots) : "") },
    { title: "attempt", right: true, text: (key, j) => number(j.attempt) },
    { title: "took", right: true, text: (key, j) => (j.started ? span(((j.finished || feed.now()) - j.started) / 1000) : "") },
    { title: "says", wrap: true, text: (key, j) => j.error || j.phrase },
  ];
}
