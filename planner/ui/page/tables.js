// Tables of sources (leases, rates, limits) and of fork results (outcomes, reasons).

import { byId, createElement, setAttribute, setStyle, setText, updateList } from "./dom.js";
import { sourceRate } from "./fleet.js";
import { fallbackOf, reasonOf } from "./problems.js";
import { about, errorClass, many, name, rate, shortVersion } from "./format.js";

const SHOWN = 12;
/** Outcome, symbol and label. @type {[string, string, string][]} */
const OUTCOMES = [["forked", "✓", "forked"], ["fallback", "▲", "fell back"], ["failed", "✕", "failed"], ["interrupted", "■", "interrupted"]];

/** @typedef {{id: string, readers: number, slots: number, servedRate: number, rateLimit?: number, egress?: number, host: string, state: string, version?: string}} Source  `version`: if its model has several */

/** @param {import("./fleet.js").Summary} summary @param {(instance: import("./fleet.js").Instance) => boolean} isMatch @param {(id: string) => void} open */
export function showSources(summary, isMatch, open) {
  const sources = sourcesOf(summary, isMatch);
  byId("sources").hidden = !summary.fleet.instances.size;
  const leases = sources.reduce((sum, each) => sum + each.readers, 0);
  const full = sources.filter((each) => each.readers >= each.slots).length;
  const rest = sources.length - SHOWN;
  setText(byId("sources-words"), sources.length ? `${many(leases, "lease")} of ${many(sources.length, "source")}${full ? `, ${full} without free slots` : ""}${rest > 0 ? `; the ${SHOWN} fastest` : ""}` : "no source has readers");
  setAttribute(byId("sources").querySelector(".scroll") ?? byId("sources"), "hidden", sources.length ? undefined : "");
  updateList(byId("source-rows"), sources.slice(0, SHOWN), (each) => each.id, (each) => {
    const source = createElement("th", { scope: "row" }, createElement("button.plain", { click: () => open(each.id), title: each.id }, name(each.id)), createElement("span.soft.tag", {}, each.host), createElement("span.soft.tag"));
    return createElement("tr", {}, source, createElement("td", {}, createElement("span.meter", { "aria-hidden": "true" }, createElement("i")), createElement("span")), createElement("td.n"), createElement("td.n"));
  }, (row, each) => {
    const [source, slots, servedRate, rateLimit] = /** @type {HTMLElement[]} */ ([...row.children]);
    setText(source.children[2], shortVersion(each.version));
    setAttribute(source.children[2], "title", each.version);
    setStyle(/** @type {HTMLElement} */ (slots.children[0].firstChild), "width", `${Math.min(100, (100 * each.readers) / Math.max(1, each.slots))}%`);
    setAttribute(slots, "data-full", each.readers >= each.slots ? "yes" : undefined);
    setText(slots.children[1], `${each.readers} of ${each.slots}${each.readers >= each.slots ? ", full" : ""}`);
    setText(servedRate, each.servedRate ? rate(each.servedRate) : "–");
    setText(rateLimit, each.rateLimit ? rate(each.rateLimit) : each.egress ? rate(each.egress) : "none");
  });
}

/** @param {import("./fleet.js").Summary} summary @param {(instance: import("./fleet.js").Instance) => boolean} isMatch @returns {Source[]} fastest first */
function sourcesOf(summary, isMatch) {
  /** @type {Source[]} */
  const found = [];
  const mixed = new Set(summary.rollouts.map((each) => each.model));
  for (const instance of summary.fleet.instances.values()) {
    const forks = summary.readers.get(instance.id) ?? [];
    const readers = Math.max(forks.length, instance.readers ?? 0);
    if (!readers || !isMatch(instance)) continue;
    const servedRate = forks.reduce((sum, fork) => sum + sourceRate(fork, instance.id), 0);
    const limits = forks.map((fork) => fork.source_rate_limits?.[instance.id] ?? 0).filter((each) => each > 0);
    found.push({ id: instance.id, readers, slots: instance.slots ?? 0, servedRate, rateLimit: limits.length ? Math.min(...limits) : undefined, egress: instance.egress, host: instance.host, state: instance.state, version: mixed.has(instance.model) ? instance.version : undefined });
  }
  return found.sort((one, other) => other.servedRate - one.servedRate || other.readers - one.readers || (one.id < other.id ? -1 : 1));
}

/** @param {import("./fleet.js").Summary} summary @param {(fork: import("./fleet.js").Fork) => boolean} isMatch */
export function showResults(summary, isMatch) {
  const ended = summary.ended.filter(isMatch);
  byId("results").hidden = !summary.fleet.instances.size && !summary.fleet.forks.size;
  const from = ended.length ? Math.max(0, summary.now - Math.min(...ended.map((fork) => fork.seen_at))) : 0;
  setText(byId("results-words"), ended.length ? `last ${many(ended.length, "fork")}, within ${about(from)}` : "none finished yet");
  const counts = OUTCOMES.map(([outcome, sign, word]) => ({ outcome, sign, word, count: ended.filter((fork) => fork.outcome === outcome).length }));
  updateList(byId("outcomes"), ended.length ? counts : [], (each) => each.outcome, (each) => createElement("li", { "data-outcome": each.outcome }, createElement("span.sign", { "aria-hidden": "true" }, each.sign), createElement("strong"), ` ${each.word}`), (item, each) => {
    setText(item.children[1], String(each.count));
    setAttribute(item, "data-none", each.count ? undefined : "yes");
  });
  const reasons = reasonsOf(ended);
  byId("reasons-title").hidden = reasons.length === 0;
  const maxCount = Math.max(1, ...reasons.map((each) => each.count));
  updateList(byId("reasons"), reasons, (each) => each.key, () => createElement("li", {}, createElement("span.count"), createElement("strong"), createElement("span.into.soft"), createElement("span.track", { "aria-hidden": "true" }, createElement("i")), createElement("span.last.soft")), (item, each) => {
    const [count, error, into, track, last] = /** @type {HTMLElement[]} */ ([...item.children]);
    setText(count, `${each.count} ×`);
    setText(error, each.error);
    setText(into, each.into);
    setStyle(/** @type {HTMLElement} */ (track.firstChild), "width", `${(100 * each.count) / maxCount}%`);
    setText(last, `${about(summary.now - each.at)} ago: ${each.last}`);
  });
}

/** @param {import("./fleet.js").Fork[]} ended latest first */
function reasonsOf(ended) {
  /** @type {Map<string, {key: string, error: string, into: string, count: number, last: string, at: number}>} */
  const found = new Map();
  for (const fork of ended) {
    if (fork.outcome === "forked") continue;
    const error = errorClass(reasonOf(fork));
    const into = fork.outcome === "fallback" ? `→ ${fallbackOf(fork)}` : `→ ${fork.outcome}`;
    const key = `${error}${into}`;
    const known = found.get(key);
    if (known) known.count += 1;
    else found.set(key, { key, error, into, count: 1, last: reasonOf(fork), at: fork.seen_at });
  }
  return [...found.values()].sort((one, other) => other.count - one.count).slice(0, 8);
}
