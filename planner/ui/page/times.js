// How long each phase of a fork took: those under way first, the one with most to come at the top, then the latest.

import { at, list, make, say, set, style } from "./dom.js";
import { endedAt, left, share } from "./fleet.js";
import { PHASES, about, many, name as nameOf, percent, rate, time } from "./words.js";

const SHOWN = 24;

/** @param {import("./fleet.js").Sums} sums @param {(fork: import("./fleet.js").Fork) => boolean} wanted @param {(id: string) => void} open */
export function showTimes(sums, wanted, open) {
  const live = sums.live.filter(wanted).sort((one, other) => lefts(other) - lefts(one) || (one.id < other.id ? -1 : 1));
  const ended = sums.ended.filter(wanted);
  const shown = [...live.slice(0, SHOWN), ...ended.slice(0, Math.max(0, SHOWN - live.length))];
  at("times").hidden = shown.length === 0;
  if (!shown.length) return;
  const rest = live.length + ended.length - shown.length;
  say(at("times-words"), `${live.length ? `${many(live.length, "fork")} under way, then the` : "the"} latest that ended${rest ? `; ${rest.toLocaleString("en")} more are not shown` : ""}`);
  const longest = Math.max(0.1, ...shown.map((fork) => spent(fork, sums.now)));
  const phases = new Set();
  list(at("time-rows"), shown, (fork) => fork.id, (fork) => create(fork, sums.fleet.instances.get(fork.instance)?.host, open), (row, fork) => {
    for (const name of update(row, fork, sums.now, longest)) phases.add(name);
  });
  say(at("times-axis"), `0 to ${time(longest)} since each asked for its fork`);
  const known = [...Object.keys(PHASES).filter((name) => phases.has(name)), ...[...phases].filter((name) => !(name in PHASES)).sort()];
  list(at("phase-legend"), known, (name) => name, (name) => make("li", {}, make("i.phase", { "data-phase": name, "aria-hidden": "true" }), ` ${words(name)}`));
}

/** @param {import("./fleet.js").Fork} fork */
function lefts(fork) {
  return left(fork) ?? 1e12 * (1 - share(fork));
}

/** Seconds since it asked, to now or to its end. @param {import("./fleet.js").Fork} fork @param {number} now */
function spent(fork, now) {
  return fork.outcome ? (fork.seconds ?? Math.max(0, endedAt(fork) - fork.asked)) : Math.max(0, now - fork.asked);
}

/** @param {import("./fleet.js").Fork} fork @param {string | undefined} host @param {(id: string) => void} open */
function create(fork, host, open) {
  const name = make("button.plain.who", { click: () => open(fork.instance), title: fork.instance }, nameOf(fork.instance, host));
  return make("li", {}, name, make("span.bar", { role: "img" }), make("span.result"));
}

/** @param {HTMLElement} row @param {import("./fleet.js").Fork} fork @param {number} now @param {number} longest @returns {string[]} its phases */
function update(row, fork, now, longest) {
  const [, bar, result] = /** @type {HTMLElement[]} */ ([...row.children]);
  const whole = spent(fork, now);
  /** @type {[string, number][]} */
  const parts = Object.entries(fork.phases ?? {}).map(([name, seconds]) => [name, seconds]);
  const told = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  // The last phase goes on since the fork told of it.
  if (parts.length && !fork.outcome) parts[parts.length - 1][1] += Math.max(0, whole - told);
  if (!parts.length) parts.push(["untold", whole]);
  list(bar, parts, ([name]) => name, ([name]) => make("i.phase", { "data-phase": name }, make("span")), (part, [name, seconds]) => {
    style(part, "width", `${(100 * seconds) / longest}%`);
    set(part, "title", `${words(name)}: ${time(seconds)}`);
    say(part.children[0], seconds / longest > 0.16 ? name.replaceAll("_", " ") : "");
  });
  set(bar, "aria-label", parts.map(([name, seconds]) => `${name.replaceAll("_", " ")} ${time(seconds)}`).join(", "));
  set(row, "data-outcome", fork.outcome ?? "live");
  const more = left(fork);
  const said = fork.outcome
    ? `${{ forked: "✓ forked", fallback: "▲ fell back", failed: "✕ failed", interrupted: "✕ interrupted" }[fork.outcome] ?? fork.outcome} in ${time(whole)}`
    : `${percent(share(fork))}${fork.speed ? ` · ${rate(fork.speed)}` : " · gets nothing"}${more === undefined ? "" : ` · ${about(more)} left`}`;
  say(result, said);
  return parts.map(([name]) => name);
}

/** @param {string} name */
function words(name) {
  if (name === "untold") return "phases not told";
  const plain = name.replaceAll("_", " ");
  return PHASES[name] ? `${plain}: ${PHASES[name]}` : plain;
}
