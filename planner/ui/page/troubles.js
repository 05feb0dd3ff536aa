// What an operator should look at, worst first, each in one line that says what it means. What many have in
// common is one line.

import { keyOf, share } from "./fleet.js";
import { storageName } from "./graph.js";
import { FIRST_OF_VERSION, about, kindOf, many, name, plain, rank, short } from "./words.js";

/** Forks that ended badly count as trouble for so long. */
const RECENT_S = 900;
/** A fork that gets nothing for so long is told of. */
const STALLED_S = 6;
/** From so many of one kind on they are told in one line. */
const TOGETHER = 4;

/**
 * @typedef {{key: string, level: "wrong" | "look", what: string, why: string, id?: string, group?: string, count?: number}} Trouble
 * @typedef {{id: string, host?: string, group: string, why: string, since?: number}} Case
 * @typedef {{level: "wrong" | "look", one: (each: Case) => string, all: (count: number) => string}} Kind
 */

/** @type {Record<string, Kind>} */
const KINDS = {
  quarantined: { level: "wrong", one: (each) => `${who(each)} is quarantined for ${about(each.since ?? 0)}`, all: (count) => `${count} sources are quarantined` },
  gone: { level: "wrong", one: (each) => `${who(each)} is gone`, all: (count) => `${count} instances are gone` },
  silent: { level: "look", one: (each) => `${who(each)} is silent`, all: (count) => `${count} instances are silent` },
  slow: { level: "look", one: (each) => `${who(each)} falls behind`, all: (count) => `${count} relays fall behind` },
  draining: { level: "look", one: (each) => `${who(each)} drains, and is still read from`, all: (count) => `${count} that drain are still read from` },
  stalled: { level: "look", one: (each) => `${who(each)} has got nothing for ${about(each.since ?? 0)}`, all: (count) => `${count} forks get nothing` },
  waiting: { level: "look", one: (each) => `${who(each)} has no source`, all: (count) => `${count} targets have no source` },
};

/** @param {import("./fleet.js").Sums} sums @returns {Trouble[]} the worst first */
export function troublesOf(sums) {
  /** @type {Trouble[]} */
  const found = [];
  if (!sums.fleet.ready) found.push({ key: "store", level: "wrong", what: "The planner's store is away", why: "no new plan is made until it is back; forks under way go on" });
  const cases = { ...instancesOf(sums), ...forksOf(sums) };
  for (const [kind, { level, one, all }] of Object.entries(KINDS)) {
    const those = cases[kind] ?? [];
    if (those.length < TOGETHER) {
      found.push(...those.map((each) => ({ key: `${kind} ${each.id}`, level, what: one(each), why: each.why, id: each.id, group: each.group })));
      continue;
    }
    const hosts = [...new Set(those.map((each) => each.host).filter(Boolean))];
    const where = hosts.length ? ` On ${hosts.slice(0, 4).join(", ")}${hosts.length > 4 ? ` and ${many(hosts.length - 4, "more host")}` : ""}.` : "";
    found.push({ key: kind, level, what: all(those.length), why: `${those[0].why}.${where}`, group: those[0].group, count: those.length });
  }
  endsOf(sums, found);
  return found.sort((one, other) => Number(other.level === "wrong") - Number(one.level === "wrong"));
}

/** @param {import("./fleet.js").Sums} sums @returns {Record<string, Case[]>} */
function instancesOf(sums) {
  /** @type {Record<string, Case[]>} */
  const found = { quarantined: [], gone: [], silent: [], slow: [], draining: [] };
  for (const one of sums.fleet.instances.values()) {
    const about = { id: one.id, host: one.host, group: keyOf(one) };
    const readers = sums.readers.get(one.id)?.length ?? 0;
    // One that is gone may be quarantined as well, and silent: it is one thing to look at.
    if (one.missing) found.gone.push({ ...about, why: `${one.quarantine ?? "a reader found nobody there"}; no heartbeat came since` });
    else if (one.quarantine) found.quarantined.push({ ...about, why: one.quarantine, since: Math.max(0, (one.quarantined_until ?? 0) - sums.now) });
    else if (one.silent) found.silent.push({ ...about, why: "heartbeats stay away; who does not come back is forgotten" });
    if (one.slow) found.slow.push({ ...about, why: "reads far slower than the source gives; others are led around" });
    if (one.state === "draining" && readers) found.draining.push({ ...about, why: `${many(readers, "fork")} to wait for before it ends` });
  }
  return found;
}

/** @param {import("./fleet.js").Sums} sums @returns {Record<string, Case[]>} */
function forksOf(sums) {
  /** @type {Record<string, Case[]>} */
  const found = { stalled: [], waiting: [] };
  for (const fork of sums.live) {
    const target = sums.fleet.instances.get(fork.instance);
    if (target?.missing || target?.quarantine || target?.silent) continue;
    const about = { id: fork.instance, host: target?.host, group: keyOf(fork) };
    const still = sums.now - (fork.rate ? fork.heard : (fork.still ?? fork.heard));
    if (!Object.keys(fork.plan ?? {}).length) {
      // The first instance of a new version loads by itself: a rollout is no trouble.
      if (!fork.reason?.includes(FIRST_OF_VERSION)) found.waiting.push({ ...about, why: plain(fork.reason ?? "none was found yet") });
    } else if (still > STALLED_S && share(fork) < 1) found.stalled.push({ ...about, why: plain(fork.reason ?? ""), since: still });
  }
  return found;
}

/** Forks that failed or fell back lately. @param {import("./fleet.js").Sums} sums @param {Trouble[]} found */
function endsOf(sums, found) {
  /** @type {Map<string, import("./fleet.js").Fork[]>} */
  const alike = new Map();
  for (const fork of sums.ended) {
    if (fork.outcome !== "failed" && fork.outcome !== "fallback") continue;
    if (sums.now - Math.max(fork.heard, fork.asked) > RECENT_S) continue;
    if (fork.outcome === "fallback" && reasonOf(fork).includes(FIRST_OF_VERSION)) continue;
    const key = `${fork.outcome} ${fork.model} ${kindOf(reasonOf(fork))} ${fork.fallback ?? ""}`;
    alike.set(key, [...(alike.get(key) ?? []), fork]);
  }
  for (const [key, forks] of alike) {
    const [last] = forks;
    const those = forks.length === 1 ? name(last.instance, sums.fleet.instances.get(last.instance)?.host) : many(forks.length, "fork");
    const of = `${short(last.model, 40)}${rank(last.rank) ? ` ${rank(last.rank)}` : ""}`;
    const failed = last.outcome === "failed";
    const what = failed ? `${those} of ${of} failed` : `${those} of ${of} fell back to ${fallbackOf(last)}`;
    found.push({ key, level: failed ? "wrong" : "look", what, why: `${reasonOf(last)} (${about(sums.now - last.heard)} ago)`, id: last.instance, group: keyOf(last) });
  }
}

/** @param {Case} each an instance, and where it is */
function who({ id, host }) {
  const said = name(id, host);
  return !host || said.includes(host) ? said : `${said} on ${host}`;
}

/** The last failure on a fork's way. @param {import("./fleet.js").Fork} fork */
export function reasonOf(fork) {
  return plain(fork.reasons?.at(-1) ?? fork.reason ?? "no reason told");
}

/** What a fork loaded instead. @param {import("./fleet.js").Fork} fork */
export function fallbackOf(fork) {
  const loaded = fork.fallback ?? "loader:";
  return loaded.startsWith("loader") ? "the engine's own loader" : loaded.includes(":") ? storageName(loaded) : loaded;
}
