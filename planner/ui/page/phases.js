// Duration of each phase of a fork: running forks first, by remaining work, then the latest finished ones.

import { byId, createElement, setAttribute, setStyle, setText, updateList } from "./dom.js";
import { endedAt, secondsLeft, verifiedShare } from "./fleet.js";
import { about, many, name as nameOf, percent, PHASES, rate, time } from "./format.js";

const SHOWN = 24;

/** @param {import("./fleet.js").Summary} summary @param {(fork: import("./fleet.js").Fork) => boolean} isMatch @param {(id: string) => void} open */
export function showPhases(summary, isMatch, open) {
  const live = summary.live.filter(isMatch).sort((one, other) => remainingWork(other) - remainingWork(one) || (one.id < other.id ? -1 : 1));
  const ended = summary.ended.filter(isMatch);
  const shown = [...live.slice(0, SHOWN), ...ended.slice(0, Math.max(0, SHOWN - live.length))];
  byId("phases").hidden = shown.length === 0;
  if (!shown.length) return;
  const rest = live.length + ended.length - shown.length;
  setText(byId("phases-words"), `${live.length ? `${many(live.length, "running fork")}, then the` : "the"} latest finished ones${rest ? `; ${rest.toLocaleString("en")} more not shown` : ""}`);
  const longest = Math.max(0.1, ...shown.map((fork) => duration(fork, summary.now)));
  const phases = new Set();
  updateList(byId("phase-rows"), shown, (fork) => fork.id, (fork) => create(fork, summary.fleet.instances.get(fork.instance)?.host, open), (row, fork) => {
    for (const name of update(row, fork, summary.now, longest)) phases.add(name);
  });
  setText(byId("phases-axis"), `0 to ${time(longest)} since each fork request`);
  const known = [...Object.keys(PHASES).filter((name) => phases.has(name)), ...[...phases].filter((name) => !(name in PHASES)).sort()];
  updateList(byId("phase-legend"), known, (name) => name, (name) => createElement("li", {}, createElement("i.phase", { "data-phase": name, "aria-hidden": "true" }), ` ${phaseLabel(name)}`));
}

/** @param {import("./fleet.js").Fork} fork */
function remainingWork(fork) {
  return secondsLeft(fork) ?? 1e12 * (1 - verifiedShare(fork));
}

/** Seconds from the request until now or until the end. @param {import("./fleet.js").Fork} fork @param {number} now */
function duration(fork, now) {
  return fork.outcome ? (fork.seconds ?? Math.max(0, endedAt(fork) - fork.requested_at)) : Math.max(0, now - fork.requested_at);
}

/** @param {import("./fleet.js").Fork} fork @param {string | undefined} host @param {(id: string) => void} open */
function create(fork, host, open) {
  const name = createElement("button.plain.instance", { click: () => open(fork.instance), title: fork.instance }, nameOf(fork.instance, host));
  return createElement("li", {}, name, createElement("span.bar", { role: "img" }), createElement("span.result"));
}

/** @param {HTMLElement} row @param {import("./fleet.js").Fork} fork @param {number} now @param {number} longest @returns {string[]} its phases */
function update(row, fork, now, longest) {
  const [, bar, result] = /** @type {HTMLElement[]} */ ([...row.children]);
  const total = duration(fork, now);
  /** @type {[string, number][]} */
  const parts = Object.entries(fork.phases ?? {}).map(([name, seconds]) => [name, seconds]);
  const reported = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  // The last phase has continued since the report.
  if (parts.length && !fork.outcome) parts[parts.length - 1][1] += Math.max(0, total - reported);
  if (!parts.length) parts.push(["unreported", total]);
  updateList(bar, parts, ([name]) => name, ([name]) => createElement("i.phase", { "data-phase": name }, createElement("span")), (part, [name, seconds]) => {
    setStyle(part, "width", `${(100 * seconds) / longest}%`);
    setAttribute(part, "title", `${phaseLabel(name)}: ${time(seconds)}`);
    setText(part.children[0], seconds / longest > 0.16 ? name.replaceAll("_", " ") : "");
  });
  setAttribute(bar, "aria-label", parts.map(([name, seconds]) => `${name.replaceAll("_", " ")} ${time(seconds)}`).join(", "));
  setAttribute(row, "data-outcome", fork.outcome ?? "live");
  const remaining = secondsLeft(fork);
  const text = fork.outcome
    ? `${{ forked: "✓ forked", fallback: "▲ fell back", failed: "✕ failed", interrupted: "✕ interrupted" }[fork.outcome] ?? fork.outcome} in ${time(total)}`
    : `${percent(verifiedShare(fork))}${fork.speed ? ` · ${rate(fork.speed)}` : " · receiving nothing"}${remaining === undefined ? "" : ` · ${about(remaining)} left`}`;
  setText(result, text);
  return parts.map(([name]) => name);
}

/** @param {string} name */
function phaseLabel(name) {
  if (name === "unreported") return "no phases reported";
  const label = name.replaceAll("_", " ");
  return PHASES[name] ? `${label}: ${PHASES[name]}` : label;
}
