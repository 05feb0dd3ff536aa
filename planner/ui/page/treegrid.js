// The fork tree as a table (ARIA treegrid pattern): the contents of the drawing, for keyboards and screen readers.
// Only visible rows are in the document.

import { createElement, setAttribute, setStyle, setText, updateList } from "./dom.js";
import { about, many, percent, rate, short, STATES } from "./format.js";

const ROW = 32;
const OVERSCAN = 6;
const IDLE = "\u0001idle";

/** @typedef {{id: string, level: number, place: number, among: number, open?: boolean, node?: import("./graph.js").Node, text?: string, parent: number}} Row */

export class TreeGrid {
  /** @param {HTMLElement} box @param {{open: (id: string) => void, mark: (id: string) => void}} callbacks */
  constructor(box, callbacks) {
    this.box = box;
    this.body = /** @type {HTMLElement} */ (box.querySelector(".grid-body"));
    this.callbacks = callbacks;
    /** @type {Row[]} */
    this.rows = [];
    /** Collapsed rows; initially the idle ones. @type {Set<string>} */
    this.collapsed = new Set([IDLE]);
    this.at = "";
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("focus", () => this.go(Math.max(0, this.index())));
    box.addEventListener("blur", () => (setAttribute(box, "data-active", undefined), callbacks.mark("")));
    this.body.addEventListener("click", (event) => this.click(event));
  }

  /** @param {import("./graph.js").Graph} graph @param {boolean} filtered show only rows that match the filter, and their ancestors */
  show(graph, filtered) {
    this.graph = graph;
    this.filtered = filtered;
    this.rows = [];
    const kept = filtered ? matchingRows(graph) : undefined;
    this.add(graph.roots.filter((id) => !kept || kept.has(id)), 1, -1, kept);
    const idle = filtered ? graph.idle.filter((node) => !node.dim) : graph.idle;
    if (idle.length) {
      const at = this.rows.length;
      const open = !this.collapsed.has(IDLE);
      this.rows.push({ id: IDLE, level: 1, place: 1, among: 1, open, parent: -1, text: `${many(idle.length, "instance")} without readers` });
      if (open) idle.forEach((node, index) => this.rows.push({ id: node.id, level: 2, place: index + 1, among: idle.length, node, parent: at }));
    }
    setAttribute(this.box, "aria-rowcount", String(this.rows.length + 1));
    setStyle(this.body, "height", `${this.rows.length * ROW}px`);
    this.draw();
  }

  /** @param {string[]} ids @param {number} level @param {number} parent @param {Set<string> | undefined} kept */
  add(ids, level, parent, kept) {
    // In the order of the drawing, which has already placed them.
    const placed = [...ids].sort((one, other) => (this.graph?.nodes.get(one)?.y ?? 0) - (this.graph?.nodes.get(other)?.y ?? 0));
    placed.forEach((id, index) => {
      const node = this.graph?.nodes.get(id);
      if (!node) return;
      const below = node.children.filter((child) => !kept || kept.has(child));
      const open = below.length ? !this.collapsed.has(id) : undefined;
      const at = this.rows.length;
      this.rows.push({ id, level, place: index + 1, among: ids.length, open, node, parent });
      if (open) this.add(below, level + 1, at, kept);
    });
  }

  draw() {
    const head = /** @type {HTMLElement} */ (this.box.firstElementChild).offsetHeight;
    const from = Math.max(0, Math.floor((this.box.scrollTop - head) / ROW) - OVERSCAN);
    const to = Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + OVERSCAN;
    const visible = this.rows.slice(from, to).map((row, index) => ({ row, index: from + index }));
    updateList(this.body, visible, ({ row }) => row.id, ({ row }) => this.create(row), (element, { row, index }) => this.update(element, row, index));
    this.markActive();
  }

  /** @param {Row} row */
  create(row) {
    const name = createElement("span.c-name", { role: "gridcell" }, createElement("span.twist", { "aria-hidden": "true" }), createElement("span.text"));
    const state = createElement("span.c-state", { role: "gridcell" }, createElement("span.sign", { "aria-hidden": "true" }), createElement("span.text"));
    const cells = ["c-share", "c-rate", "c-left", "c-host"].map((each) => createElement(`span.${each}`, { role: "gridcell" }));
    cells[0].append(createElement("span.meter", { "aria-hidden": "true" }, createElement("i")), createElement("span.text"));
    return createElement("div", { role: "row", "data-id": row.id }, name, state, ...cells);
  }

  /** @param {HTMLElement} element @param {Row} row @param {number} index */
  update(element, row, index) {
    const { node } = row;
    element.id = `row-${index}`;
    setStyle(element, "transform", `translateY(${index * ROW}px)`);
    setStyle(element, "--level", String(Math.min(row.level, 12)));
    setAttribute(element, "aria-level", String(row.level));
    setAttribute(element, "aria-posinset", String(row.place));
    setAttribute(element, "aria-setsize", String(row.among));
    setAttribute(element, "aria-rowindex", String(index + 2));
    setAttribute(element, "aria-expanded", row.open === undefined ? undefined : String(row.open));
    setAttribute(element, "data-state", node?.state);
    setAttribute(element, "data-dim", node?.dim ? "yes" : undefined);
    const [name, state, verified, speed, left, host] = /** @type {HTMLElement[]} */ ([...element.children]);
    setText(name.children[0], row.open === undefined ? "" : row.open ? "▾" : "▸");
    setText(name.children[1], node ? (node.label) : (row.text ?? ""));
    setAttribute(name, "title", node?.id);
    setText(state.children[0], node ? STATES[node.state].sign : "");
    setText(state.children[1], node ? STATES[node.state].word : "");
    const shown = node && node.state !== "storage";
    setStyle(/** @type {HTMLElement} */ (verified.children[0]), "visibility", shown ? "visible" : "hidden");
    setStyle(/** @type {HTMLElement} */ (verified.children[0].firstChild), "width", `${(node?.share ?? 0) * 100}%`);
    setText(verified.children[1], shown ? percent(node.share) : "");
    setText(speed, node?.rate ? rate(node.rate) : node?.servedRate ? `serves ${rate(node.servedRate)}` : "");
    setText(left, node?.left ? about(node.left) : "");
    setText(host, short(node?.host ?? "", 26));
  }

  /** @param {MouseEvent} event */
  click(event) {
    const element = /** @type {HTMLElement} */ (event.target).closest("[data-id]");
    const id = element?.getAttribute("data-id");
    const index = this.rows.findIndex((row) => row.id === id);
    if (index < 0) return;
    this.go(index);
    const row = this.rows[index];
    if (!row.node || /** @type {HTMLElement} */ (event.target).classList.contains("twist")) this.toggle(row);
    else this.callbacks.open(row.id);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const index = this.index();
    const row = this.rows[index];
    if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 2);
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowDown: () => this.go(index + 1),
      ArrowUp: () => this.go(index - 1),
      PageDown: () => this.go(index + page),
      PageUp: () => this.go(index - page),
      Home: () => this.go(0),
      End: () => this.go(this.rows.length - 1),
      ArrowRight: () => (row.open === false ? this.toggle(row) : row.open && this.go(index + 1)),
      ArrowLeft: () => (row.open ? this.toggle(row) : row.parent >= 0 && this.go(row.parent)),
      Enter: () => (row.node ? this.callbacks.open(row.id) : this.toggle(row)),
      " ": () => (row.open === undefined ? this.callbacks.open(row.id) : this.toggle(row)),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  /** Expand or collapse a row. @param {Row} row */
  toggle(row) {
    if (row.open === undefined) return;
    if (row.open) this.collapsed.add(row.id);
    else this.collapsed.delete(row.id);
    if (this.graph) this.show(this.graph, this.filtered ?? false);
  }

  index() {
    return this.rows.findIndex((row) => row.id === this.at);
  }

  /** @param {number} index */
  go(index) {
    const row = this.rows[Math.max(0, Math.min(this.rows.length - 1, index))];
    if (!row) return;
    this.at = row.id;
    const place = this.rows.indexOf(row) * ROW;
    const head = /** @type {HTMLElement} */ (this.box.firstElementChild).offsetHeight;
    const available = this.box.clientHeight - head - ROW;
    if (place < this.box.scrollTop) this.box.scrollTop = place;
    else if (place > this.box.scrollTop + available) this.box.scrollTop = place - available;
    this.draw();
    this.callbacks.mark(row.id);
  }

  /** Mark the active row. */
  markActive() {
    const index = this.index();
    for (const element of this.body.children) setAttribute(element, "data-here", element.id === `row-${index}` ? "yes" : undefined);
    setAttribute(this.box, "aria-activedescendant", this.body.querySelector(`#row-${Math.max(0, index)}`) ? `row-${Math.max(0, index)}` : undefined);
  }
}

/** Rows that match the filter, and their ancestors. @param {import("./graph.js").Graph} graph */
function matchingRows(graph) {
  /** @type {Set<string>} */
  const kept = new Set();
  for (const node of graph.nodes.values()) {
    if (node.dim || node.state === "storage") continue;
    for (let each = node; each && !kept.has(each.id); each = /** @type {any} */ (graph.nodes.get(each.parent))) kept.add(each.id);
  }
  return kept;
}
