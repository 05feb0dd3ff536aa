// Problems for the operator, worst first, one line each. Several of the same type share a line.

import { keyOf, verifiedShare } from "./fleet.js";
import { storageName } from "./graph.js";
import { about, FIRST_OF_VERSION, errorClass, many, name, withNames, rank, short } from "./format.js";

/** Seconds for which a failed fork counts as a problem. */
const RECENT_S = 900;
/** Seconds without progress after which a fork is reported. */
const STALLED_S = 6;
/** Number of problems of one type from which they share a line. */
const MIN_GROUPED = 4;

/**
 * @typedef {{key: string, level: "error" | "warning", title: string, reason: string, id?: string, group?: string, count?: number}} Problem
 * @typedef {{id: string, host?: string, group: string, reason: string, seconds?: number}} Case
 * @typedef {{level: "error" | "warning", one: (each: Case) => string, all: (count: number) => string}} ProblemType
 */

/** @type {Record<string, ProblemType>} */
const PROBLEM_TYPES = {
  quarantined: { level: "error", one: (each) => `${instanceName(each)} is quarantined for ${about(each.seconds ?? 0)}`, all: (count) => `${count} sources are quarantined` },
  missing: { level: "error", one: (each) => `${instanceName(each)} is unreachable`, all: (count) => `${count} instances are unreachable` },
  silent: { level: "warning", one: (each) => `${instanceName(each)} is silent`, all: (count) => `${count} instances are silent` },
  slow: { level: "warning", one: (each) => `${instanceName(each)} is falling behind`, all: (count) => `${count} relays are falling behind` },
  draining: { level: "warning", one: (each) => `${instanceName(each)} is draining and still has readers`, all: (count) => `${count} draining instances still have readers` },
  stalled: { level: "warning", one: (each) => `${instanceName(each)} has received nothing for ${about(each.seconds ?? 0)}`, all: (count) => `${count} forks receive nothing` },
  waiting: { level: "warning", one: (each) => `${instanceName(each)} has no source`, all: (count) => `${count} targets have no source` },
};

/** @param {import("./fleet.js").Summary} summary @returns {Problem[]} the worst first */
export function problemsOf(summary) {
  /** @type {Problem[]} */
  const found = [];
  if (!summary.fleet.ready) found.push({ key: "store", level: "error", title: "The planner's store is unavailable", reason: "no new plans until it is back; running forks continue" });
  const cases = { ...instancesOf(summary), ...forksOf(summary) };
  for (const [type, { level, one, all }] of Object.entries(PROBLEM_TYPES)) {
    const matching = cases[type] ?? [];
    if (matching.length < MIN_GROUPED) {
      found.push(...matching.map((each) => ({ key: `${type} ${each.id}`, level, title: one(each), reason: each.reason, id: each.id, group: each.group })));
      continue;
    }
    const hosts = [...new Set(matching.map((each) => each.host).filter(Boolean))];
    const where = hosts.length ? ` On ${hosts.slice(0, 4).join(", ")}${hosts.length > 4 ? ` and ${many(hosts.length - 4, "more host")}` : ""}.` : "";
    found.push({ key: type, level, title: all(matching.length), reason: `${matching[0].reason}.${where}`, group: matching[0].group, count: matching.length });
  }
  resultsOf(summary, found);
  return found.sort((one, other) => Number(other.level === "error") - Number(one.level === "error"));
}

/** @param {import("./fleet.js").Summary} summary @returns {Record<string, Case[]>} */
function instancesOf(summary) {
  /** @type {Record<string, Case[]>} */
  const found = { quarantined: [], missing: [], silent: [], slow: [], draining: [] };
  for (const one of summary.fleet.instances.values()) {
    const about = { id: one.id, host: one.host, group: keyOf(one) };
    const readers = summary.readers.get(one.id)?.length ?? 0;
    // An unreachable instance may also be quarantined and silent: report it once.
    if (one.missing) found.missing.push({ ...about, reason: `${one.quarantine ?? "a reader could not connect"}; no heartbeat since` });
    else if (one.quarantine) found.quarantined.push({ ...about, reason: one.quarantine, seconds: Math.max(0, (one.quarantined_until ?? 0) - summary.now) });
    else if (one.silent) found.silent.push({ ...about, reason: "no heartbeats; it will be forgotten unless it returns" });
    if (one.slow) found.slow.push({ ...about, reason: "reads much slower than its source serves; other targets avoid it" });
    if (one.state === "draining" && readers) found.draining.push({ ...about, reason: `${many(readers, "fork")} must finish before it may exit` });
  }
  return found;
}

/** @param {import("./fleet.js").Summary} summary @returns {Record<string, Case[]>} */
function forksOf(summary) {
  /** @type {Record<string, Case[]>} */
  const found = { stalled: [], waiting: [] };
  for (const fork of summary.live) {
    const target = summary.fleet.instances.get(fork.instance);
    if (target?.missing || target?.quarantine || target?.silent) continue;
    const about = { id: fork.instance, host: target?.host, group: keyOf(fork) };
    const stalled = summary.now - (fork.rate ? fork.seen_at : (fork.stalled_since ?? fork.seen_at));
    if (!Object.keys(fork.plan ?? {}).length) {
      // The first instance of a new version loads from storage: a rollout is not a problem.
      if (!fork.reason?.includes(FIRST_OF_VERSION)) found.waiting.push({ ...about, reason: withNames(fork.reason ?? "none found yet") });
    } else if (stalled > STALLED_S && verifiedShare(fork) < 1) found.stalled.push({ ...about, reason: withNames(fork.reason ?? ""), seconds: stalled });
  }
  return found;
}

/** Forks that recently failed or fell back. @param {import("./fleet.js").Summary} summary @param {Problem[]} found */
function resultsOf(summary, found) {
  /** @type {Map<string, import("./fleet.js").Fork[]>} */
  const similar = new Map();
  for (const fork of summary.ended) {
    if (fork.outcome !== "failed" && fork.outcome !== "fallback") continue;
    if (summary.now - Math.max(fork.seen_at, fork.requested_at) > RECENT_S) continue;
    if (fork.outcome === "fallback" && reasonOf(fork).includes(FIRST_OF_VERSION)) continue;
    const key = `${fork.outcome} ${fork.model} ${errorClass(reasonOf(fork))} ${fork.fallback ?? ""}`;
    similar.set(key, [...(similar.get(key) ?? []), fork]);
  }
  for (const [key, forks] of similar) {
    const [last] = forks;
    const subject = forks.length === 1 ? name(last.instance, summary.fleet.instances.get(last.instance)?.host) : many(forks.length, "fork");
    const of = `${short(last.model, 40)}${rank(last.rank) ? ` ${rank(last.rank)}` : ""}`;
    const failed = last.outcome === "failed";
    const title = failed ? `${subject} of ${of} failed` : `${subject} of ${of} fell back to ${fallbackOf(last)}`;
    found.push({ key, level: failed ? "error" : "warning", title, reason: `${reasonOf(last)} (${about(summary.now - last.seen_at)} ago)`, id: last.instance, group: keyOf(last) });
  }
}

/** @param {Case} each an instance and its host */
function instanceName({ id, host }) {
  const label = name(id, host);
  return !host || label.includes(host) ? label : `${label} on ${host}`;
}

/** The last failure of a fork. @param {import("./fleet.js").Fork} fork */
export function reasonOf(fork) {
  return withNames(fork.reasons?.at(-1) ?? fork.reason ?? "no reason reported");
}

/** The fallback of a fork. @param {import("./fleet.js").Fork} fork */
export function fallbackOf(fork) {
  const loaded = fork.fallback ?? "loader:";
  return loaded.startsWith("loader") ? "the engine's loader" : loaded.includes(":") ? storageName(loaded) : loaded;
}
