// A table whose rows have keys: only cells that say something else are touched, so that focus and reading stay.

import { make, say } from "./words.js";

export class Table {
  // columns: { title, text(key, value), node?(key, value), right?, wrap?, optional? }
  constructor(place, { caption, columns, empty, scroll = false }) {
    this.columns = columns;
    this.rows = new Map();
    this.body = make("tbody");
    this.heads = columns.map((column) =>
      make("th", { scope: "col", class: column.right ? "right" : null }, column.title),
    );
    this.table = make(
      "table",
      {},
      make("caption", { class: "unseen" }, caption),
      make("thead", {}, make("tr", {}, ...this.heads)),
      this.body,
    );
    this.empty = make("p", { class: "empty" }, empty);
    const attributes = scroll ? { class: "scroll tall", tabindex: "0", role: "region", "aria-label": caption } : { class: "scroll" };
    this.box = make("div", attributes, this.table);
    place.replaceChildren(this.box, this.empty);
    this.show([], () => undefined);
  }

  // Shows exactly these keys in this order; `value` gives what is known of one.
  show(keys, value) {
    const wanted = new Set(keys);
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    let before = this.body.firstElementChild;
    for (const key of keys) {
      let row = this.rows.get(key);
      if (!row) {
        row = this.create(key);
        this.rows.set(key, row);
      }
      this.fill(row, key, value(key));
      if (row.element === before) before = before.nextElementSibling;
      else this.body.insertBefore(row.element, before);
    }
    this.empty.hidden = keys.length > 0;
    this.box.hidden = keys.length === 0;
    this.hideEmptyColumns();
  }

  create(key) {
    const cells = this.columns.map((column, index) =>
      make(index ? "td" : "th", {
        scope: index ? null : "row",
        class: [column.right && "right", column.wrap && "wrap"].filter(Boolean).join(" ") || null,
      }),
    );
    return { element: make("tr", { "data-key": key }, ...cells), cells, said: [] };
  }

  fill(row, key, value) {
    this.columns.forEach((column, index) => {
      const text = column.text(key, value);
      if (row.said[index] === text) return;
      row.said[index] = text;
      if (column.node) row.cells[index].replaceChildren(column.node(key, value));
      else say(row.cells[index], text);
    });
  }

  hideEmptyColumns() {
    this.columns.forEach((column, index) => {
      if (!column.optional) return;
      const hidden = ![...this.rows.values()].some((row) => row.said[index]);
      if (this.heads[index].hidden === hidden && !this.rows.size) return;
      this.heads[index].hidden = hidden;
      for (const row of this.rows.values()) row.cells[index].hidden = hidden;
    });
  }
}
