// How sizes, rates, times and states are said.

/** What each state is called, its sign, and what it means. Colour is never the only sign.
 * @type {Record<string, {word: string, sign: string, means: string}>} */
export const STATES = {
  seed: { word: "seed", sign: "●", means: "holds every chunk" },
  relay: { word: "relay", sign: "◐", means: "reads, and gives what it has verified" },
  target: { word: "target", sign: "◔", means: "reads" },
  waiting: { word: "no source", sign: "?", means: "target that nobody gives to" },
  loading: { word: "loading", sign: "○", means: "loads; no fork of it is known" },
  draining: { word: "draining", sign: "▼", means: "gets no new readers" },
  quarantined: { word: "quarantined", sign: "!", means: "failed a reader: gets none for a while" },
  failed: { word: "failed", sign: "✕", means: "its fork failed, or it is gone" },
  silent: { word: "silent", sign: "…", means: "its heartbeats stay away" },
  storage: { word: "storage", sign: "▤", means: "tensor files, or the engine's own loader" },
};

/** Phases in the order in which a fork goes through them; others that a client names come after.
 * @type {Record<string, string>} */
export const PHASES = {
  capture: "walk the module",
  resume: "check what a run before kept",
  offer: "look at its storage",
  plan: "wait for a plan",
  transfer: "read and verify",
  fallback: "load otherwise",
  digest: "digest, to become a seed",
};

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** @param {number} bytes @returns {string} three figures and a unit of thousands: `15.2 GB` */
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

/** @param {number} seconds @returns {string} two parts at most: `3.1 s`, `2 min 5 s`, `3 h 20 min` */
export function time(seconds) {
  const whole = Math.round(Math.abs(seconds));
  const sign = seconds < 0 ? "−" : "";
  if (whole < 10) return `${sign}${Math.abs(seconds).toFixed(1)}\u00a0s`;
  if (whole < 60) return `${sign}${whole}\u00a0s`;
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)}\u00a0min${whole % 60 ? ` ${whole % 60}\u00a0s` : ""}`;
  if (whole < 86400) return `${sign}${Math.floor(whole / 3600)} h${Math.floor((whole % 3600) / 60) ? ` ${Math.floor((whole % 3600) / 60)} min` : ""}`;
  return `${sign}${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Like `time`, in whole seconds: for what is counted up or down before one's eyes. @param {number} seconds @returns {string} */
export function about(seconds) {
  return seconds < 10 ? `${Math.max(0, Math.round(seconds))}\u00a0s` : time(seconds);
}

/** @param {number} share 0 to 1 @returns {string} never 100 % before it is whole */
export function percent(share) {
  return `${share >= 1 ? 100 : Math.min(99, Math.floor(share * 100))}\u00a0%`;
}

/** @param {number} count @param {string} one @param {string} [many] @returns {string} `1 seed`, `12 seeds` */
export function many(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** An id short enough to stand in a drawing: its beginning and its end, which is where ids differ.
 * @param {string} id @param {number} [most] @returns {string} */
export function short(id, most = 22) {
  if (id.length <= most) return id;
  const head = Math.ceil((most - 1) * 0.45);
  return `${id.slice(0, head)}…${id.slice(id.length - (most - 1 - head))}`;
}

/** An instance by the name that people know: of `REPLICA-RANK-dpN-RANDOM` the replica, and its rank where there
 * are several; of an id that is all random its host and its beginning. @param {string} id @param {string} [host]
 * @returns {string} */
export function name(id, host) {
  const found = /^(.+)-((?:target|draft)-tp\d+of\d+-pp\d+of\d+-ep\d+of\d+)-dp(\d+)-[0-9a-f]{8}$/.exec(id);
  if (found) return [found[1], rank(found[2]), found[3] === "0" ? "" : `DP ${found[3]}`].filter(Boolean).join(" · ");
  return /^[0-9a-f]{32}$/.test(id) ? `${host ? `${host}/` : ""}${id.slice(0, 8)}…` : id;
}

/** A text of the planner or of an engine with each id in it as `name` says it. @param {string} text @returns {string} */
export function plain(text) {
  return text.replace(/[A-Za-z0-9._:-]+-(?:target|draft)-tp\d+of\d+-pp\d+of\d+-ep\d+of\d+-dp\d+-[0-9a-f]{8}\b|\b[0-9a-f]{32}\b/g, (id) => name(id));
}

/** A rank as people say it: `TP 0/8 · PP 1/2 · draft`; empty for a model of one rank.
 * @param {string} key as `main-tp0of8-pp0of1-ep0of1` @returns {string} */
export function rank(key) {
  const found = /^(target|draft)-tp(\d+)of(\d+)-pp(\d+)of(\d+)-ep(\d+)of(\d+)$/.exec(key);
  if (!found) return key;
  const [, role, tp, tps, pp, pps, ep, eps] = found;
  const parts = [
    [`TP ${tp}/${tps}`, tps],
    [`PP ${pp}/${pps}`, pps],
    [`EP ${ep}/${eps}`, eps],
  ].filter(([, ranks]) => ranks !== "1").map(([said]) => said);
  if (role === "speculative") parts.push("speculative");
  return parts.join(" · ");
}

/** How a plan's reason begins that a change of version explains. The same as `rfork.weights_version.FIRST`. */
export const FIRST_OF_VERSION = "first of version";

/** A version as people are shown it: one that rfork made by its first letters. The same as `rfork.weights_version.short`.
 * @param {string | null | undefined} version @returns {string} empty where it is not settled yet */
export function shortVersion(version) {
  const [, kind, id] = /^(commit|files|weights|update|unnamed):([A-Za-z0-9._:-]+)$/.exec(version ?? "") ?? [];
  if (!kind) return version ?? "";
  const count = kind === "update" ? id.slice(id.lastIndexOf(":")) : "";
  return `${kind}:${id.slice(0, 8)}${count}`;
}

/** The class of an error at the head of a reason, or its first words. @param {string} reason @returns {string} */
export function kindOf(reason) {
  const head = reason.split(":")[0]?.trim() ?? "";
  return head.length > 0 && head.length <= 48 ? head : `${reason.slice(0, 46)}…`;
}
