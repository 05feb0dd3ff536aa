// Who gives, by how many leases and how fast; how forks ended, and why those that did not fork did not.

import { at, list, make, say, set, style } from "./dom.js";
import { flow } from "./fleet.js";
import { fallbackOf, reasonOf } from "./troubles.js";
import { about, kindOf, many, name, rate, shortVersion } from "./words.js";

const SHOWN = 12;
/** What an end is called, its sign, and its class. @type {[string, string, string][]} */
const OUTCOMES = [["forked", "✓", "forked"], ["fallback", "▲", "fell back"], ["failed", "✕", "failed"], ["interrupted", "■", "interrupted"]];

/** @typedef {{id: string, readers: number, slots: number, gives: number, held?: number, egress?: number, host: string, state: string, version?: string}} Source  `version`: where its model has several */

/** @param {import("./fleet.js").Sums} sums @param {(instance: import("./fleet.js").Instance) => boolean} wanted @param {(id: string) => void} open */
export function showSources(sums, wanted, open) {
  const sources = sourcesOf(sums, wanted);
  at("sources").hidden = !sums.fleet.instances.size;
  const leases = sources.reduce((sum, each) => sum + each.readers, 0);
  const full = sources.filter((each) => each.readers >= each.slots).length;
  const rest = sources.length - SHOWN;
  say(at("sources-words"), sources.length ? `${many(leases, "lease")} of ${many(sources.length, "source")}${full ? `, ${full} with no slot left` : ""}${rest > 0 ? `; the ${SHOWN} that give most` : ""}` : "nobody is read from now");
  set(at("sources").querySelector(".scroll") ?? at("sources"), "hidden", sources.length ? undefined : "");
  list(at("source-rows"), sources.slice(0, SHOWN), (each) => each.id, (each) => {
    const source = make("th", { scope: "row" }, make("button.plain", { click: () => open(each.id), title: each.id }, name(each.id)), make("span.soft.tag", {}, each.host), make("span.soft.tag"));
    return make("tr", {}, source, make("td", {}, make("span.meter", { "aria-hidden": "true" }, make("i")), make("span")), make("td.n"), make("td.n"));
  }, (row, each) => {
    const [source, slots, gives, held] = /** @type {HTMLElement[]} */ ([...row.children]);
    say(source.children[2], shortVersion(each.version));
    set(source.children[2], "title", each.version);
    style(/** @type {HTMLElement} */ (slots.children[0].firstChild), "width", `${Math.min(100, (100 * each.readers) / Math.max(1, each.slots))}%`);
    set(slots, "data-full", each.readers >= each.slots ? "yes" : undefined);
    say(slots.children[1], `${each.readers} of ${each.slots}${each.readers >= each.slots ? ", full" : ""}`);
    say(gives, each.gives ? rate(each.gives) : "–");
    say(held, each.held ? rate(each.held) : each.egress ? `at most ${rate(each.egress)}` : "not held");
  });
}

/** @param {import("./fleet.js").Sums} sums @param {(instance: import("./fleet.js").Instance) => boolean} wanted @returns {Source[]} those that give most first */
function sourcesOf(sums, wanted) {
  /** @type {Source[]} */
  const found = [];
  const mixed = new Set(sums.rollouts.map((each) => each.model));
  for (const instance of sums.fleet.instances.values()) {
    const forks = sums.readers.get(instance.id) ?? [];
    const readers = Math.max(forks.length, instance.readers ?? 0);
    if (!readers || !wanted(instance)) continue;
    const gives = forks.reduce((sum, fork) => sum + flow(fork, instance.id), 0);
    const held = forks.map((fork) => fork.source_rate_limits?.[instance.id] ?? 0).filter((each) => each > 0);
    found.push({ id: instance.id, readers, slots: instance.slots ?? 0, gives, held: held.length ? Math.min(...held) : undefined, egress: instance.egress, host: instance.host, state: instance.state, version: mixed.has(instance.model) ? instance.version : undefined });
  }
  return found.sort((one, other) => other.gives - one.gives || other.readers - one.readers || (one.id < other.id ? -1 : 1));
}

/** @param {import("./fleet.js").Sums} sums @param {(fork: import("./fleet.js").Fork) => boolean} wanted */
export function showEndings(sums, wanted) {
  const ended = sums.ended.filter(wanted);
  at("endings").hidden = !sums.fleet.instances.size && !sums.fleet.forks.size;
  const from = ended.length ? Math.max(0, sums.now - Math.min(...ended.map((fork) => fork.heard))) : 0;
  say(at("endings-words"), ended.length ? `the last ${many(ended.length, "fork")}, in ${about(from)}` : "none has ended yet");
  const counts = OUTCOMES.map(([outcome, sign, word]) => ({ outcome, sign, word, count: ended.filter((fork) => fork.outcome === outcome).length }));
  list(at("outcomes"), ended.length ? counts : [], (each) => each.outcome, (each) => make("li", { "data-outcome": each.outcome }, make("span.sign", { "aria-hidden": "true" }, each.sign), make("strong"), ` ${each.word}`), (item, each) => {
    say(item.children[1], String(each.count));
    set(item, "data-none", each.count ? undefined : "yes");
  });
  const reasons = reasonsOf(ended);
  at("reasons-title").hidden = reasons.length === 0;
  const most = Math.max(1, ...reasons.map((each) => each.count));
  list(at("reasons"), reasons, (each) => each.key, () => make("li", {}, make("span.count"), make("strong"), make("span.into.soft"), make("span.track", { "aria-hidden": "true" }, make("i")), make("span.last.soft")), (item, each) => {
    const [count, kind, into, track, last] = /** @type {HTMLElement[]} */ ([...item.children]);
    say(count, `${each.count} ×`);
    say(kind, each.kind);
    say(into, each.into);
    style(/** @type {HTMLElement} */ (track.firstChild), "width", `${(100 * each.count) / most}%`);
    say(last, `${about(sums.now - each.at)} ago: ${each.last}`);
  });
}

/** @param {import("./fleet.js").Fork[]} ended the latest first */
function reasonsOf(ended) {
  /** @type {Map<string, {key: string, kind: string, into: string, count: number, last: string, at: number}>} */
  const found = new Map();
  for (const fork of ended) {
    if (fork.outcome === "forked") continue;
    const kind = kindOf(reasonOf(fork));
    const into = fork.outcome === "fallback" ? `→ ${fallbackOf(fork)}` : `→ ${fork.outcome}`;
    const key = `${kind}${into}`;
    const there = found.get(key);
    if (there) there.count += 1;
    else found.set(key, { key, kind, into, count: 1, last: reasonOf(fork), at: fork.heard });
  }
  return [...found.values()].sort((one, other) => other.count - one.count).slice(0, 8);
}
