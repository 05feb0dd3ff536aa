// Formatting of sizes, rates, times, states, ids and versions.

/** Name, symbol and meaning of each state. Colour is never the only distinction.
 * @type {Record<string, {word: string, sign: string, means: string}>} */
export const STATES = {
  seed: { word: "seed", sign: "●", means: "has every chunk" },
  holder: { word: "holder", sign: "■", means: "has every chunk, kept without an engine" },
  relay: { word: "relay", sign: "◐", means: "reads, and serves verified chunks" },
  target: { word: "target", sign: "◔", means: "reads" },
  waiting: { word: "no source", sign: "?", means: "target without a source" },
  loading: { word: "loading", sign: "○", means: "loading without a known fork" },
  draining: { word: "draining", sign: "▼", means: "gets no new readers" },
  quarantined: { word: "quarantined", sign: "!", means: "failed a reader; gets no readers for some time" },
  failed: { word: "failed", sign: "✕", means: "its fork failed, or it is unreachable" },
  silent: { word: "silent", sign: "…", means: "sends no heartbeats" },
  storage: { word: "storage", sign: "▤", means: "tensor files, or the engine's loader" },
};

/** Phases in order; other phases reported by clients come after them.
 * @type {Record<string, string>} */
export const PHASES = {
  capture: "capture the module",
  resume: "verify chunks of an earlier run",
  offer: "inspect its storage",
  plan: "wait for a plan",
  transfer: "read and verify",
  fallback: "load by a fallback",
  digest: "compute digests, to become a seed",
};

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** @param {number} bytes @returns {string} three digits and a decimal unit: `15.2 GB` */
export function size(bytes) {
  let unit = 0;
  let value = Math.abs(bytes);
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const figures = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${bytes < 0 ? "−" : ""}${value.toFixed(figures)}\u00a0${UNITS[unit]}`;
}

/** @param {number} perSecond @returns {string} */
export function rate(perSecond) {
  return `${size(perSecond)}/s`;
}

/** @param {number} seconds @returns {string} at most two parts: `3.1 s`, `2 min 5 s`, `3 h 20 min` */
export function time(seconds) {
  const rounded = Math.round(Math.abs(seconds));
  const sign = seconds < 0 ? "−" : "";
  if (rounded < 10) return `${sign}${Math.abs(seconds).toFixed(1)}\u00a0s`;
  if (rounded < 60) return `${sign}${rounded}\u00a0s`;
  if (rounded < 3600) return `${sign}${Math.floor(rounded / 60)}\u00a0min${rounded % 60 ? ` ${rounded % 60}\u00a0s` : ""}`;
  if (rounded < 86400) return `${sign}${Math.floor(rounded / 3600)} h${Math.floor((rounded % 3600) / 60) ? ` ${Math.floor((rounded % 3600) / 60)} min` : ""}`;
  return `${sign}${Math.floor(rounded / 86400)} d ${Math.floor((rounded % 86400) / 3600)} h`;
}

/** Like `time`, without fractions, for running counters. @param {number} seconds @returns {string} */
export function about(seconds) {
  return seconds < 10 ? `${Math.max(0, Math.round(seconds))}\u00a0s` : time(seconds);
}

/** @param {number} share 0 to 1 @returns {string} never 100 % before it is complete */
export function percent(share) {
  return `${share >= 1 ? 100 : Math.min(99, Math.floor(share * 100))}\u00a0%`;
}

/** @param {number} count @param {string} one @param {string} [many] @returns {string} `1 seed`, `12 seeds` */
export function many(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** Shorten an id for a drawing: keep the beginning and the end, where ids differ.
 * @param {string} id @param {number} [maxLength] @returns {string} */
export function short(id, maxLength = 22) {
  if (id.length <= maxLength) return id;
  const head = Math.ceil((maxLength - 1) * 0.45);
  return `${id.slice(0, head)}…${id.slice(id.length - (maxLength - 1 - head))}`;
}

/** Readable name of an instance: of `REPLICA-RANK-dpN-RANDOM` the replica, with its rank if there are several; of a
 * random id its host and the beginning of the id. @param {string} id @param {string} [host]
 * @returns {string} */
export function name(id, host) {
  const found = /^(.+)-((?:main|speculative)-tp\d+of\d+-pp\d+of\d+-ep\d+of\d+)-dp(\d+)-[0-9a-f]{8}$/.exec(id);
  if (found) return [found[1], rank(found[2]), found[3] === "0" ? "" : `DP ${found[3]}`].filter(Boolean).join(" · ");
  return /^[0-9a-f]{32}$/.test(id) ? `${host ? `${host}/` : ""}${id.slice(0, 8)}…` : id;
}

/** Replace each id in a text by its readable name. @param {string} text @returns {string} */
export function withNames(text) {
  return text.replace(/[A-Za-z0-9._:-]+-(?:main|speculative)-tp\d+of\d+-pp\d+of\d+-ep\d+of\d+-dp\d+-[0-9a-f]{8}\b|\b[0-9a-f]{32}\b/g, (id) => name(id));
}

/** Readable rank: `TP 0/8 · PP 1/2 · speculative`; empty for a model with one rank.
 * @param {string} key as `main-tp0of8-pp0of1-ep0of1` @returns {string} */
export function rank(key) {
  const found = /^(main|speculative)-tp(\d+)of(\d+)-pp(\d+)of(\d+)-ep(\d+)of(\d+)$/.exec(key);
  if (!found) return key;
  const [, role, tp, tps, pp, pps, ep, eps] = found;
  const parts = [
    [`TP ${tp}/${tps}`, tps],
    [`PP ${pp}/${pps}`, pps],
    [`EP ${ep}/${eps}`, eps],
  ].filter(([, ranks]) => ranks !== "1").map(([label]) => label);
  if (role === "speculative") parts.push("speculative");
  return parts.join(" · ");
}

/** Start of a plan's reason that is caused by a rollout. The same as `rfork.weights_version.FIRST`. */
export const FIRST_OF_VERSION = "first of version";

/** Abbreviated version: those generated by rfork by their first letters. The same as `rfork.weights_version.short`.
 * @param {string | null | undefined} version @returns {string} empty if not resolved yet */
export function shortVersion(version) {
  const [, type, id] = /^(commit|files|weights|update|unnamed):([A-Za-z0-9._:-]+)$/.exec(version ?? "") ?? [];
  if (!type) return version ?? "";
  const count = type === "update" ? id.slice(id.lastIndexOf(":")) : "";
  return `${type}:${id.slice(0, 8)}${count}`;
}

/** The error class at the start of a reason, or its first words. @param {string} reason @returns {string} */
export function errorClass(reason) {
  const head = reason.split(":")[0]?.trim() ?? "";
  return head.length > 0 && head.length <= 48 ? head : `${reason.slice(0, 46)}…`;
}
