// The picture of the fleet: everything once, in the page itself, then what changes. The page asks for nothing again.

const SECTIONS = ["fleet", "workers", "partitions", "failing", "moves", "letters", "jobs", "points"];

export class Feed {
  constructor(onChange, onLink) {
    this.picture = Object.fromEntries(SECTIONS.map((name) => [name, new Map()]));
    this.version = "";
    this.at = ""; // which change was the last
    this.offset = 0; // of the console's clock against this one, in ms
    this.open = false;
    this.downSince = null;
    this.onChange = onChange;
    this.onLink = onLink;
  }

  start() {
    const first = document.getElementById("picture");
    this.begin(JSON.parse(first.textContent));
    first.remove();
    this.follow();
  }

  now() {
    return Date.now() + this.offset;
  }

  follow() {
    const source = new EventSource(`events?from=${encodeURIComponent(this.at)}`);
    source.addEventListener("open", () => {
      this.open = true;
      this.downSince = null;
      this.onLink();
    });
    source.addEventListener("snapshot", (event) => this.begin(JSON.parse(event.data)));
    source.addEventListener("delta", (event) => {
      this.at = event.lastEventId;
      this.goOn(JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      this.open = false;
      this.downSince ??= Date.now();
      this.onLink();
      if (source.readyState === EventSource.CLOSED) this.comeBack();
    });
  }

  // The browser itself comes back after an interruption, but not after a refusal.
  async comeBack() {
    await new Promise((resolve) => setTimeout(resolve, 2000));
    try {
      const answer = await fetch("./", { method: "HEAD", cache: "no-store" });
      if (answer.status === 401) {
        location.reload();
        return;
      }
    } catch {
      // Not there yet: the next source tells.
    }
    this.follow();
  }

  begin(message) {
    this.at = message.at;
    this.offset = message.now - Date.now();
    this.version = message.version;
    const changed = {};
    for (const name of SECTIONS) {
      const before = this.picture[name];
      const after = new Map(Object.entries(message.picture[name] ?? {}));
      changed[name] = { set: [...after.keys()], gone: [...before.keys()].filter((key) => !after.has(key)), before };
      this.picture[name] = after;
    }
    this.onChange(changed, true);
  }

  goOn(message) {
    const changed = {};
    for (const [name, { set, gone }] of Object.entries(message.changes)) {
      const section = this.picture[name];
      const before = new Map();
      for (const key of [...Object.keys(set), ...gone]) if (section.has(key)) before.set(key, section.get(key));
      for (const key of gone) section.delete(key);
      for (const [key, value] of Object.entries(set)) section.set(key, value);
      changed[name] = { set: Object.keys(set), gone, before };
    }
    this.onChange(changed, false);
  }
}
