// The fork tree of one group: storage and seeds at the roots, and below each source its readers.

import { stratify, tree } from "../vendor/d3.js";
import { secondsLeft, sourceRate, verifiedShare } from "./fleet.js";
import { name, short } from "./format.js";

/** States that are drawn even without readers. */
const ALWAYS = new Set(["quarantined", "failed", "silent", "draining", "waiting"]);
const ROOT = "\u0000";

/**
 * @typedef {{id: string, label: string, state: string, share: number, rate: number, servedRate: number, left?: number, host: string,
 *   instance?: import("./fleet.js").Instance, fork?: import("./fleet.js").Fork, parent: string, dim: boolean,
 *   x: number, y: number, depth: number, children: string[]}} Node
 * @typedef {{from: Node, to: Node, rate: number, main: boolean}} Link
 * @typedef {{nodes: Map<string, Node>, roots: string[], links: Link[], idle: Node[], fastest: number, shape: string}} Graph
 */

/** @param {import("./fleet.js").Summary} summary @param {import("./fleet.js").Group} group
 * @param {(instance: import("./fleet.js").Instance) => boolean} isMatch others are dimmed @returns {Graph} */
export function graphOf(summary, group, isMatch) {
  /** @type {Map<string, Node>} */
  const nodes = new Map();
  /** @type {Node[]} */
  const idle = [];
  for (const instance of group.instances) {
    const state = summary.states.get(instance.id) ?? "loading";
    const fork = summary.forkOf.get(instance.id);
    const node = nodeOf(instance.id, state, { host: instance.host, instance, fork, dim: !isMatch(instance) });
    node.share = Math.max(verifiedShare(instance), fork ? verifiedShare(fork) : 0);
    node.rate = fork?.speed ?? 0;
    node.left = fork && secondsLeft(fork);
    if (fork || summary.readers.has(instance.id) || ALWAYS.has(state)) nodes.set(node.id, node);
    else idle.push(node);
  }
  /** @type {[string, string, number][]} */
  const reads = [];
  for (const fork of group.live) {
    if (!nodes.has(fork.instance)) nodes.set(fork.instance, nodeOf(fork.instance, "silent", { fork }));
    for (const source of sourcesOf(fork)) {
      if (!nodes.has(source)) nodes.set(source, nodeOf(source, source.includes(":/") || fork.storage?.[source] ? "storage" : "failed", {}));
      reads.push([source, fork.instance, sourceRate(fork, source)]);
    }
    const [first] = sourcesOf(fork);
    const node = /** @type {Node} */ (nodes.get(fork.instance));
    if (first !== undefined && !leadsTo(nodes, first, node.id)) node.parent = first;
  }
  /** @type {Link[]} */
  const links = [];
  for (const [source, target, rate] of reads) {
    const [from, to] = [nodes.get(source), nodes.get(target)];
    if (!from || !to) continue;
    from.servedRate += rate;
    links.push({ from, to, rate, main: to.parent === source });
  }
  for (const node of nodes.values()) nodes.get(node.parent)?.children.push(node.id);
  const roots = [...nodes.values()].filter((node) => !node.parent).sort(first).map((node) => node.id);
  const shape = [...nodes.values()].map((node) => `${node.id}<${node.parent}`).join();
  return { nodes, roots, links, idle, fastest: Math.max(1, ...links.map((link) => link.rate)), shape };
}

/** Sources of a fork, the largest share first; its own storage by name.
 * @param {import("./fleet.js").Fork} fork @returns {string[]} */
export function sourcesOf(fork) {
  const own = Object.entries(fork.storage ?? {});
  const peers = Object.entries(fork.plan ?? {}).filter(([source]) => source !== fork.instance);
  // A storage reader is placed below the storage; otherwise a striping group would form a cycle.
  return [...own.sort((one, other) => other[1] - one[1]), ...peers.sort((one, other) => other[1] - one[1])].map(([source]) => source);
}

/** Compute node positions: roots at the left, one column per level. Reuses the positions of a graph of the same shape.
 * @param {Graph} graph @param {Graph | undefined} before @param {{row: number, column: number}} spacing */
export function place(graph, before, spacing) {
  if (before && before.shape === graph.shape) {
    for (const node of graph.nodes.values()) Object.assign(node, pick(before.nodes.get(node.id)));
    return;
  }
  const parents = [{ id: ROOT, parent: "" }, ...[...graph.nodes.values()].map((node) => ({ id: node.id, parent: node.parent || ROOT }))];
  const root = untyped(stratify)().id((/** @type {any} */ each) => each.id).parentId((/** @type {any} */ each) => each.parent)(parents);
  // Deepest trees first; an extra source of another tree is placed next to that tree.
  const neighbours = extraSources(graph);
  const heights = new Map(root.children?.map((/** @type {any} */ each) => [each.id, each.height]));
  root.sort((/** @type {any} */ one, /** @type {any} */ other) => {
    const [left, right] = [neighbours.get(one.id) ?? one.id, neighbours.get(other.id) ?? other.id];
    if (left === right) return Number(one.id !== left) - Number(other.id !== right) || (one.id < other.id ? -1 : 1);
    const depth = (heights.get(right) ?? other.height) - (heights.get(left) ?? one.height);
    return depth || order(graph.nodes.get(left)) - order(graph.nodes.get(right)) || (left < right ? -1 : 1);
  });
  const separation = (/** @type {any} */ one, /** @type {any} */ other) => (one.parent === other.parent ? 1 : 1.3);
  const laid = untyped(tree)().nodeSize([spacing.row, spacing.column]).separation(separation)(root);
  let top = Infinity;
  laid.each((/** @type {any} */ each) => (top = each.id === ROOT ? top : Math.min(top, each.x)));
  laid.each((/** @type {any} */ each) => {
    const node = graph.nodes.get(each.id);
    if (node) Object.assign(node, { x: each.y - spacing.column, y: each.x - top, depth: each.depth - 1 });
  });
}

/** For each root without children, the root of the tree that it serves. @param {Graph} graph */
function extraSources(graph) {
  /** @type {Map<string, string>} */
  const found = new Map();
  for (const { from, to, main } of graph.links) {
    if (main || from.parent || from.children.length || found.has(from.id)) continue;
    let top = to;
    for (let up = graph.nodes.get(top.parent); up; up = graph.nodes.get(top.parent)) top = up;
    found.set(from.id, top.id);
  }
  return found;
}

/** d3 has no types here. @param {any} factory @returns {any} */
function untyped(factory) {
  return factory;
}

/** @param {Node | undefined} node */
function pick(node) {
  return node ? { x: node.x, y: node.y, depth: node.depth } : {};
}

/** @param {string} id @param {string} state @param {Partial<Node>} more @returns {Node} */
function nodeOf(id, state, more) {
  const label = state === "storage" ? storageName(id) : name(id, more.host);
  return { id, label, state, share: state === "storage" ? 1 : 0, rate: 0, servedRate: 0, host: "", parent: "", dim: false, x: 0, y: 0, depth: 0, children: [], ...more };
}

/** @param {string} source as `snapshot:s3://bucket/model/` */
export function storageName(source) {
  const type = source.slice(0, source.indexOf(":"));
  const uri = source.slice(type.length + 1);
  if (!uri) return type === "loader" ? "engine's loader" : type;
  return `${type} ${short(uri.replace(/^file:\/\//, "").replace(/\/$/, ""), 30)}`;
}

/** Whether `id` is `target`, or a descendant of it. @param {Map<string, Node>} nodes @param {string} id @param {string} target */
function leadsTo(nodes, id, target) {
  for (let at = id, steps = 0; at && steps <= nodes.size; at = nodes.get(at)?.parent ?? "", steps += 1) if (at === target) return true;
  return false;
}

/** Storage first, then sources, then instances with problems. @param {Node} one @param {Node} other */
function first(one, other) {
  return order(one) - order(other) || (one.id < other.id ? -1 : 1);
}

/** @param {Node | undefined} node */
function order(node) {
  if (!node || node.state === "storage") return 0;
  return node.children.length ? 1 : ALWAYS.has(node.state) ? 3 : 2;
}
