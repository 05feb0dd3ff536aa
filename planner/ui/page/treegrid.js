// The fork tree as a table (the ARIA treegrid pattern): the same as the drawing, for keyboards and screen readers.
// Only the rows that are seen are in the document.

import { list, make, say, set, style } from "./dom.js";
import { STATES, about, many, percent, rate, short } from "./words.js";

const ROW = 32;
const SPARE = 6;
const IDLE = "\u0001idle";

/** @typedef {{id: string, level: number, place: number, among: number, open?: boolean, node?: import("./graph.js").Node, text?: string, parent: number}} Row */

export class TreeGrid {
  /** @param {HTMLElement} box @param {{open: (id: string) => void, mark: (id: string) => void}} does */
  constructor(box, does) {
    this.box = box;
    this.body = /** @type {HTMLElement} */ (box.querySelector(".grid-body"));
    this.does = does;
    /** @type {Row[]} */
    this.rows = [];
    /** Which rows are shut; the idle ones are at first. @type {Set<string>} */
    this.shut = new Set([IDLE]);
    this.at = "";
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("focus", () => this.go(Math.max(0, this.index())));
    box.addEventListener("blur", () => (set(box, "data-active", undefined), does.mark("")));
    this.body.addEventListener("click", (event) => this.click(event));
  }

  /** @param {import("./graph.js").Graph} graph @param {boolean} filtered only what fits the filter, and what leads there */
  show(graph, filtered) {
    this.graph = graph;
    this.filtered = filtered;
    this.rows = [];
    const kept = filtered ? fitting(graph) : undefined;
    this.add(graph.roots.filter((id) => !kept || kept.has(id)), 1, -1, kept);
    const idle = filtered ? graph.idle.filter((node) => !node.dim) : graph.idle;
    if (idle.length) {
      const at = this.rows.length;
      const open = !this.shut.has(IDLE);
      this.rows.push({ id: IDLE, level: 1, place: 1, among: 1, open, parent: -1, text: `${many(idle.length, "instance")} that nobody reads from` });
      if (open) idle.forEach((node, index) => this.rows.push({ id: node.id, level: 2, place: index + 1, among: idle.length, node, parent: at }));
    }
    set(this.box, "aria-rowcount", String(this.rows.length + 1));
    style(this.body, "height", `${this.rows.length * ROW}px`);
    this.draw();
  }

  /** @param {string[]} ids @param {number} level @param {number} parent @param {Set<string> | undefined} kept */
  add(ids, level, parent, kept) {
    // In the order of the drawing, which has placed them by now.
    const placed = [...ids].sort((one, other) => (this.graph?.nodes.get(one)?.y ?? 0) - (this.graph?.nodes.get(other)?.y ?? 0));
    placed.forEach((id, index) => {
      const node = this.graph?.nodes.get(id);
      if (!node) return;
      const below = node.children.filter((child) => !kept || kept.has(child));
      const open = below.length ? !this.shut.has(id) : undefined;
      const at = this.rows.length;
      this.rows.push({ id, level, place: index + 1, among: ids.length, open, node, parent });
      if (open) this.add(below, level + 1, at, kept);
    });
  }

  draw() {
    const head = /** @type {HTMLElement} */ (this.box.firstElementChild).offsetHeight;
    const from = Math.max(0, Math.floor((this.box.scrollTop - head) / ROW) - SPARE);
    const to = Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + SPARE;
    const seen = this.rows.slice(from, to).map((row, index) => ({ row, index: from + index }));
    list(this.body, seen, ({ row }) => row.id, ({ row }) => this.create(row), (element, { row, index }) => this.update(element, row, index));
    this.point();
  }

  /** @param {Row} row */
  create(row) {
    const name = make("span.c-name", { role: "gridcell" }, make("span.twist", { "aria-hidden": "true" }), make("span.text"));
    const state = make("span.c-state", { role: "gridcell" }, make("span.sign", { "aria-hidden": "true" }), make("span.text"));
    const cells = ["c-share", "c-rate", "c-left", "c-host"].map((each) => make(`span.${each}`, { role: "gridcell" }));
    cells[0].append(make("span.meter", { "aria-hidden": "true" }, make("i")), make("span.text"));
    return make("div", { role: "row", "data-id": row.id }, name, state, ...cells);
  }

  /** @param {HTMLElement} element @param {Row} row @param {number} index */
  update(element, row, index) {
    const { node } = row;
    element.id = `row-${index}`;
    style(element, "transform", `translateY(${index * ROW}px)`);
    style(element, "--level", String(Math.min(row.level, 12)));
    set(element, "aria-level", String(row.level));
    set(element, "aria-posinset", String(row.place));
    set(element, "aria-setsize", String(row.among));
    set(element, "aria-rowindex", String(index + 2));
    set(element, "aria-expanded", row.open === undefined ? undefined : String(row.open));
    set(element, "data-state", node?.state);
    set(element, "data-dim", node?.dim ? "yes" : undefined);
    const [name, state, verified, speed, left, host] = /** @type {HTMLElement[]} */ ([...element.children]);
    say(name.children[0], row.open === undefined ? "" : row.open ? "▾" : "▸");
    say(name.children[1], node ? (node.label) : (row.text ?? ""));
    set(name, "title", node?.id);
    say(state.children[0], node ? STATES[node.state].sign : "");
    say(state.children[1], node ? STATES[node.state].word : "");
    const shown = node && node.state !== "storage";
    style(/** @type {HTMLElement} */ (verified.children[0]), "visibility", shown ? "visible" : "hidden");
    style(/** @type {HTMLElement} */ (verified.children[0].firstChild), "width", `${(node?.share ?? 0) * 100}%`);
    say(verified.children[1], shown ? percent(node.share) : "");
    say(speed, node?.rate ? rate(node.rate) : node?.gives ? `gives ${rate(node.gives)}` : "");
    say(left, node?.left ? about(node.left) : "");
    say(host, short(node?.host ?? "", 26));
  }

  /** @param {MouseEvent} event */
  click(event) {
    const element = /** @type {HTMLElement} */ (event.target).closest("[data-id]");
    const id = element?.getAttribute("data-id");
    const index = this.rows.findIndex((row) => row.id === id);
    if (index < 0) return;
    this.go(index);
    const row = this.rows[index];
    if (!row.node || /** @type {HTMLElement} */ (event.target).classList.contains("twist")) this.turn(row);
    else this.does.open(row.id);
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
      ArrowRight: () => (row.open === false ? this.turn(row) : row.open && this.go(index + 1)),
      ArrowLeft: () => (row.open ? this.turn(row) : row.parent >= 0 && this.go(row.parent)),
      Enter: () => (row.node ? this.does.open(row.id) : this.turn(row)),
      " ": () => (row.open === undefined ? this.does.open(row.id) : this.turn(row)),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  /** Open what is shut, and the other way round. @param {Row} row */
  turn(row) {
    if (row.open === undefined) return;
    if (row.open) this.shut.add(row.id);
    else this.shut.delete(row.id);
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
    const room = this.box.clientHeight - head - ROW;
    if (place < this.box.scrollTop) this.box.scrollTop = place;
    else if (place > this.box.scrollTop + room) this.box.scrollTop = place - room;
    this.draw();
    this.does.mark(row.id);
  }

  /** Say which row the keyboard is at. */
  point() {
    const index = this.index();
    for (const element of this.body.children) set(element, "data-here", element.id === `row-${index}` ? "yes" : undefined);
    set(this.box, "aria-activedescendant", this.body.querySelector(`#row-${Math.max(0, index)}`) ? `row-${Math.max(0, index)}` : undefined);
  }
}

/** What fits the filter, and all that it stands below. @param {import("./graph.js").Graph} graph */
function fitting(graph) {
  /** @type {Set<string>} */
  const kept = new Set();
  for (const node of graph.nodes.values()) {
    if (node.dim || node.state === "storage") continue;
    for (let each = node; each && !kept.has(each.id); each = /** @type {any} */ (graph.nodes.get(each.parent))) kept.add(each.id);
  }
  return kept;
}
