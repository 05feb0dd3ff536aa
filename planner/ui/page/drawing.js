// Draws a fork tree on a canvas the size of the visible part: a thousand nodes cost as much as thirty.

import { quadtree } from "../vendor/d3.js";
import { place } from "./graph.js";
import { percent, rate, short, STATES } from "./format.js";

const MARGIN = { left: 26, top: 34, right: 190, bottom: 34 };
/** Number of rows from which nodes are drawn closer, with shorter labels. */
const MIN_DENSE_ROWS = 14;
const WIDE = { row: 52, column: 216, radius: 11, font: 12, letters: 25 };
const DENSE = { row: 19, column: 168, radius: 6, font: 11, letters: 18 };
const MAX_WIDTH = 9;

export class Drawing {
  /** @param {HTMLElement} box scrolls @param {{open: (id: string) => void, hint: (text: string, x: number, y: number) => void}} callbacks */
  constructor(box, callbacks) {
    this.box = box;
    this.spread = /** @type {HTMLElement} */ (box.firstElementChild);
    this.canvas = /** @type {HTMLCanvasElement} */ (box.querySelector("canvas"));
    this.callbacks = callbacks;
    /** @type {import("./graph.js").Graph | undefined} */
    this.graph = undefined;
    this.spacing = WIDE;
    this.hovered = "";
    this.selected = "";
    this.drawScheduled = false;
    /** @type {Record<string, string> | undefined} */
    this.colours = undefined;
    box.addEventListener("scroll", () => this.scheduleDraw(), { passive: true });
    new ResizeObserver(() => this.scheduleDraw()).observe(box);
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => this.point(undefined));
    box.addEventListener("click", (event) => {
      const node = this.nodeAt(event);
      if (node) callbacks.open(node.id);
    });
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) matchMedia(query).addEventListener("change", () => this.recolour());
  }

  /** @param {import("./graph.js").Graph} graph */
  show(graph) {
    const lines = [...graph.nodes.values()].filter((node) => !node.children.length).length;
    const spacing = lines > MIN_DENSE_ROWS ? DENSE : WIDE;
    place(graph, spacing === this.spacing ? this.graph : undefined, spacing);
    this.spacing = spacing;
    if (graph.shape !== this.graph?.shape) this.shape(graph);
    this.graph = graph;
    this.scheduleDraw();
  }

  /** Select the node that corresponds to the active row of the table. @param {string} id */
  mark(id) {
    this.selected = id;
    const node = this.graph?.nodes.get(id);
    if (node) {
      const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.box;
      const [x, y] = [node.x + MARGIN.left, node.y + MARGIN.top];
      if (x < scrollLeft + 20 || x > scrollLeft + clientWidth - 120) this.box.scrollLeft = x - clientWidth / 3;
      if (y < scrollTop + 20 || y > scrollTop + clientHeight - 30) this.box.scrollTop = y - clientHeight / 2;
    }
    this.scheduleDraw();
  }

  /** Redraw with changed colours. */
  recolour() {
    this.colours = undefined;
    this.scheduleDraw();
  }

  /** @param {import("./graph.js").Graph} graph */
  shape(graph) {
    let [width, height] = [0, 0];
    for (const node of graph.nodes.values()) [width, height] = [Math.max(width, node.x), Math.max(height, node.y)];
    this.spread.style.width = `${width + MARGIN.left + MARGIN.right}px`;
    this.spread.style.height = `${height + MARGIN.top + MARGIN.bottom}px`;
    this.box.style.setProperty("--tall", `${Math.min(460, height + MARGIN.top + MARGIN.bottom + 4)}px`);
    this.found = quadtree([...graph.nodes.values()], (/** @type {any} */ node) => node.x, (/** @type {any} */ node) => node.y);
  }

  /** Draw before the next frame, once. */
  scheduleDraw() {
    if (this.drawScheduled) return;
    this.drawScheduled = true;
    requestAnimationFrame(() => {
      this.drawScheduled = false;
      this.draw();
    });
  }

  draw() {
    const { box, canvas, graph } = this;
    const pen = canvas.getContext("2d");
    if (!graph || !pen || !box.clientWidth) return;
    const [width, height, dense] = [box.clientWidth, box.clientHeight, devicePixelRatio || 1];
    if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense)) {
      [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.colours ??= coloursOf(box);
    const [left, top] = [box.scrollLeft - MARGIN.left, box.scrollTop - MARGIN.top];
    pen.setTransform(dense, 0, 0, dense, -left * dense, -top * dense);
    pen.clearRect(left, top, width, height);
    const overlaps = (/** @type {number} */ one, /** @type {number} */ other, /** @type {number} */ low, /** @type {number} */ high) => Math.max(one, other) >= low && Math.min(one, other) <= high;
    for (const link of graph.links) {
      if (overlaps(link.from.x, link.to.x, left, left + width) && overlaps(link.from.y, link.to.y, top, top + height)) this.line(pen, link, graph.fastest);
    }
    const reach = this.spacing.column;
    for (const node of graph.nodes.values()) {
      if (node.x >= left - reach && node.x <= left + width + 20 && node.y >= top - 40 && node.y <= top + height + 40) this.node(pen, node);
    }
  }

  /** @param {CanvasRenderingContext2D} pen @param {import("./graph.js").Link} link @param {number} fastest */
  line(pen, { from, to, rate: speed, main }, fastest) {
    const colours = /** @type {Record<string, string>} */ (this.colours);
    const { radius } = this.spacing;
    const [x1, x2] = [from.x + radius, to.x - radius];
    pen.beginPath();
    pen.moveTo(x1, from.y);
    const half = x2 > x1 ? (x2 - x1) / 2 : 60;
    pen.bezierCurveTo(x1 + half, from.y, x2 - half, to.y, x2, to.y);
    pen.lineWidth = speed ? Math.max(1.2, MAX_WIDTH * Math.sqrt(speed / fastest) * (radius / WIDE.radius)) : 1;
    pen.strokeStyle = from.dim && to.dim ? colours.faint : speed ? colours.flow : colours.line;
    pen.globalAlpha = main ? 1 : 0.45;
    pen.setLineDash(speed ? [] : [3, 4]);
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  /** @param {CanvasRenderingContext2D} pen @param {import("./graph.js").Node} node */
  node(pen, node) {
    const colours = /** @type {Record<string, string>} */ (this.colours);
    const { radius, font } = this.spacing;
    const colour = node.dim ? colours.faint : colours[node.state];
    pen.save();
    pen.translate(node.x, node.y);
    outline(pen, node.state, radius);
    pen.fillStyle = colours.panel;
    pen.fill();
    if (node.share > 0) {
      pen.save();
      pen.clip();
      pen.fillStyle = colour;
      pen.fillRect(-radius, radius - 2 * radius * node.share, 2 * radius, 2 * radius);
      pen.restore();
    }
    outline(pen, node.state, radius);
    pen.lineWidth = this.selected === node.id || this.hovered === node.id ? 3.5 : 2;
    pen.strokeStyle = this.selected === node.id ? colours.focus : colour;
    pen.setLineDash(node.state === "waiting" || node.state === "silent" ? [3, 2.5] : []);
    pen.stroke();
    pen.setLineDash([]);
    if (!["seed", "relay", "target", "loading"].includes(node.state)) sign(pen, STATES[node.state].sign, radius, node.share > 0.5 ? colours.panel : colour);
    pen.restore();
    this.label(pen, node, font);
  }

  /** @param {CanvasRenderingContext2D} pen @param {import("./graph.js").Node} node @param {number} font */
  label(pen, node, font) {
    const colours = /** @type {Record<string, string>} */ (this.colours);
    const { radius, letters } = this.spacing;
    const wide = this.spacing === WIDE;
    pen.lineJoin = "round";
    pen.lineWidth = 4;
    pen.strokeStyle = colours.panel;
    const x = node.x + radius + 5;
    const write = (/** @type {string} */ text, /** @type {number} */ y, /** @type {string} */ weight, /** @type {string} */ colour) => {
      pen.font = `${weight} ${font}px system-ui, sans-serif`;
      if (!wide) {
        // The line to the next node passes under the text.
        pen.fillStyle = colours.panel;
        pen.fillRect(x - 2, y - 9, pen.measureText(text).width + 4, 12);
      }
      pen.strokeText(text, x, y);
      pen.fillStyle = colour;
      pen.fillText(text, x, y);
    };
    const text = node.dim ? colours.faint : colours.text;
    if (!wide) return write(`${short(node.label, letters)}${node.fork ? ` ${percent(node.share)}` : ""}`, node.y + 4, "500", text);
    write(short(node.label, letters), node.y - 8, "600", text);
    write(underline(node), node.y + 18, "400", node.dim ? colours.faint : colours.soft);
  }

  /** @param {PointerEvent | MouseEvent} event @returns {import("./graph.js").Node | undefined} */
  nodeAt(event) {
    const edge = this.box.getBoundingClientRect();
    const x = event.clientX - edge.left + this.box.scrollLeft - MARGIN.left;
    const y = event.clientY - edge.top + this.box.scrollTop - MARGIN.top;
    const node = this.found?.find(x, y, Math.max(14, this.spacing.radius + 6));
    return node && this.graph?.nodes.get(node.id);
  }

  /** @param {PointerEvent | undefined} event */
  point(event) {
    const node = event && this.nodeAt(event);
    if ((node?.id ?? "") !== this.hovered) this.scheduleDraw();
    this.hovered = node?.id ?? "";
    this.box.style.cursor = node ? "pointer" : "";
    this.callbacks.hint(node ? `${node.label} · ${STATES[node.state].word} · ${underline(node)}${node.host ? ` · on ${node.host}` : ""}` : "", event?.clientX ?? 0, event?.clientY ?? 0);
  }
}

/** The second line of a node. @param {import("./graph.js").Node} node */
function underline(node) {
  if (node.state === "storage") return node.servedRate ? `serves ${rate(node.servedRate)}` : "is read";
  if (node.fork && node.state !== "waiting") return `${percent(node.share)}${node.rate ? ` · ${rate(node.rate)}` : ""}`;
  if (node.servedRate) return `${STATES[node.state].word}, serves ${rate(node.servedRate)}`;
  return STATES[node.state].word;
}

/** Each state has a distinct shape. @param {CanvasRenderingContext2D} pen @param {string} state @param {number} radius */
function outline(pen, state, radius) {
  pen.beginPath();
  if (state === "storage") pen.roundRect(-radius, -radius * 0.85, 2 * radius, 1.7 * radius, 3);
  else if (state === "quarantined" || state === "failed") {
    for (let side = 0; side < 8; side += 1) {
      const angle = (Math.PI / 4) * (side + 0.5);
      pen.lineTo(radius * 1.1 * Math.cos(angle), radius * 1.1 * Math.sin(angle));
    }
    pen.closePath();
  } else if (state === "draining") {
    pen.moveTo(-radius, -radius * 0.8);
    pen.lineTo(radius, -radius * 0.8);
    pen.lineTo(0, radius * 1.1);
    pen.closePath();
  } else pen.arc(0, 0, radius, 0, 2 * Math.PI);
}

/** @param {CanvasRenderingContext2D} pen @param {string} text @param {number} radius @param {string} colour */
function sign(pen, text, radius, colour) {
  pen.font = `700 ${Math.round(radius * 1.25)}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = colour;
  pen.fillText(text, 0, 0.5);
}

/** The current colours of the style sheet. @param {HTMLElement} box @returns {Record<string, string>} */
function coloursOf(box) {
  const probe = document.createElement("span");
  box.append(probe);
  const names = [...Object.keys(STATES), "text", "soft", "faint", "line", "flow", "panel", "focus"];
  const found = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(found);
}
