// What is seen first: is anything wrong, what is under way, how fast, how long yet.

import { at, list, make, say, set, style } from "./dom.js";
import { keyOf, left, share } from "./fleet.js";
import { about, many, percent, rank, rate, short, shortVersion, size, time } from "./words.js";

/** At most so many troubles are named; the others are counted. */
const SHOWN = 12;
/** Forks that the median efficiency is of. */
const LATEST = 100;

/** @param {import("./fleet.js").Sums} sums @param {import("./troubles.js").Trouble[]} troubles */
export function showHeadline(sums, troubles) {
  const { live, fleet } = sums;
  const wrong = troubles.filter((each) => each.level === "wrong").length;
  const reading = live.filter((fork) => Object.keys(fork.plan ?? {}).length);
  const speed = live.reduce((sum, fork) => sum + (fork.speed ?? 0), 0);
  const longest = Math.max(0, ...live.map((fork) => left(fork) ?? 0));
  const seeds = [...sums.states.values()].filter((state) => state === "seed").length;
  const models = new Set([...sums.groups.values()].map((group) => group.model)).size;
  const head = at("headline");
  const mood = !fleet.instances.size && !fleet.forks.size ? "empty" : wrong ? "wrong" : troubles.length ? "look" : "well";
  set(head, "data-mood", mood);
  const words = {
    empty: "No instance is here yet",
    wrong: `${many(troubles.length, "thing")} ${troubles.length === 1 ? "needs" : "need"} a look`,
    look: `${many(troubles.length, "thing")} ${troubles.length === 1 ? "needs" : "need"} a look`,
    well: "All is well",
  }[mood];
  say(head, words);
  document.title = mood === "well" || mood === "empty" ? "rfork planner" : `(${troubles.length}) rfork planner`;
  const under = live.length
    ? `${many(live.length, "fork")} under way at ${rate(speed)}${longest ? `, about ${about(longest)} left` : ""}.`
    : "Nothing is under way.";
  say(at("subline"), mood === "empty" ? "The planner listens." : `${under} ${many(seeds, "seed")} of ${many(models, "model")}, ${many(fleet.instances.size, "instance")} in all.`);
  at("figures").hidden = mood === "empty";
  showFigures(sums, { reading: reading.length, speed, longest, seeds });
}

/** @param {import("./fleet.js").Sums} sums @param {{reading: number, speed: number, longest: number, seeds: number}} found */
function showFigures(sums, { reading, speed, longest, seeds }) {
  const { live, fleet } = sums;
  const bytes = live.reduce((sum, fork) => sum + (fork.bytes ?? 0), 0);
  const got = live.reduce((sum, fork) => sum + (fork.bytes ?? 0) * share(fork), 0);
  const efficiencies = sums.ended.filter((fork) => fork.outcome === "forked" && fork.efficiency !== undefined).slice(0, LATEST).map((fork) => fork.efficiency ?? 0);
  const saved = fleet.saved;
  const figures = [
    { name: "Under way", value: String(live.length), more: live.length ? `${reading} with a source, ${percent(bytes ? got / bytes : 0)} there` : "no fork" },
    { name: "Rate", value: rate(speed), more: live.length ? "over all forks" : "nothing is read" },
    { name: "Time left", value: longest ? about(longest) : "–", more: longest ? "until the last is whole" : live.length ? "not known yet" : "nothing to wait for" },
    { name: "Seeds", value: String(seeds), more: `of ${many(fleet.instances.size, "instance")}` },
    { name: "Efficiency η", value: efficiencies.length ? median(efficiencies).toFixed(2) : "–", more: efficiencies.length ? `of the link; median of ${many(efficiencies.length, "fork")}` : "not known yet" },
    { name: "Saved against disk", value: saved === null ? "–" : time(saved), more: saved === null ? "not known yet" : "of loading time, by forks that are kept" },
  ];
  list(at("figures"), figures, (each) => each.name, (each) => make("div", {}, make("dt", {}, each.name), make("dd.value"), make("dd.more.soft")), (element, each) => {
    say(element.children[1], each.value);
    say(element.children[2], each.more);
  });
}

/** @param {import("./troubles.js").Trouble[]} troubles @param {(trouble: import("./troubles.js").Trouble) => void} open */
export function showTroubles(troubles, open) {
  at("troubles").hidden = troubles.length === 0;
  const shown = troubles.slice(0, SHOWN);
  const rest = troubles.length - shown.length;
  /** @type {import("./troubles.js").Trouble[]} */
  const items = rest ? [...shown, { key: "rest", level: "look", what: `and ${rest} more`, why: "filter by model or host to see them" }] : shown;
  list(at("trouble-list"), items, (each) => each.key, (each) => {
    const what = each.id ? make("button.plain.what", { click: () => open(each) }) : make("span.what");
    return make("li", {}, make("span.sign", { "aria-hidden": "true" }), make("span.level"), what, make("span.why.soft"));
  }, (element, each) => {
    set(element, "data-level", each.level);
    say(element.children[0], each.level === "wrong" ? "✕" : "▲");
    say(element.children[1], each.level === "wrong" ? "wrong" : "look");
    say(element.children[2], each.what);
    say(element.children[3], each.why);
  });
}

/** @param {import("./fleet.js").ScaleUp[]} scaleups */
export function showScaleups(scaleups) {
  at("scaleups").hidden = scaleups.length === 0;
  list(at("scaleup-list"), scaleups, (each) => each.scaleup.scaleup_id, () => make("li", {}, make("strong"), make("span"), make("progress", { "aria-label": "replicas that came" }), make("span.soft")), (element, each) => {
    const { replicas, model, by } = each.scaleup;
    say(element.children[0], [`${many(replicas, "replica")} of ${short(model, 48)}`, shortVersion(each.scaleup.version)].filter(Boolean).join(", "));
    say(element.children[1], `${each.arrived_count} came, ${Math.max(0, replicas - each.arrived_count)} expected`);
    set(element.children[2], "max", String(Math.max(1, replicas)));
    set(element.children[2], "value", String(Math.min(each.arrived_count, replicas)));
    say(element.children[3], `${each.reason}${each.image_bytes ? `; ${size(each.image_bytes)} each` : ""}${by ? `; announced by ${by}` : ""}`);
  });
}

/** @param {import("./fleet.js").Rollout[]} rollouts */
export function showRollouts(rollouts) {
  at("rollouts").hidden = rollouts.length === 0;
  list(at("rollout-list"), rollouts, (each) => each.model, (each) => make("li", {}, make("strong", {}, short(each.model, 48)), make("ul")), (element, each) => {
    const all = each.versions.reduce((sum, one) => sum + one.serving + one.loading, 0);
    list(/** @type {HTMLElement} */ (element.children[1]), each.versions, (one) => one.version, (one) => make("li", {}, make("span.meter", { "aria-hidden": "true" }, make("i"), make("i.loading")), make("span.version", { title: one.version }, shortVersion(one.version)), make("span.soft")), (row, one) => {
      const [meter, , words] = /** @type {HTMLElement[]} */ ([...row.children]);
      style(/** @type {HTMLElement} */ (meter.children[0]), "width", `${(100 * one.serving) / all}%`);
      style(/** @type {HTMLElement} */ (meter.children[1]), "width", `${(100 * one.loading) / all}%`);
      say(words, [`${one.serving.toLocaleString("en")} serving`, one.loading ? `${one.loading} loading` : ""].filter(Boolean).join(", "));
    });
  });
}

/** The key of a row's fork tree. @param {import("./fleet.js").Model} row */
function groupOf(row) {
  return keyOf({ ...row, rank: row.rank_key });
}

/** @param {import("./fleet.js").Sums} sums @param {(instance: {model: string, version: string | null, rank: string}) => boolean} wanted
 * @param {string} chosen key of the group that is drawn @param {(key: string) => void} choose */
export function showModels(sums, wanted, chosen, choose) {
  const { fleet } = sums;
  const rows = fleet.models.filter((row) => wanted({ ...row, rank: row.rank_key }));
  at("models").hidden = rows.length === 0;
  const held = new Set(fleet.models.filter((row) => row.seeds || row.forks_running).map((row) => groupOf(row)));
  list(at("model-rows"), rows, (row) => `${groupOf(row)} ${row.layout_id} ${row.weights_id}`, (row) => {
    const button = make("button.plain", { click: () => choose(groupOf(row)) }, row.model);
    const version = make("span.soft.tag", { title: row.version ?? undefined }, shortVersion(row.version));
    const weights = make("span.soft.tag", { title: row.weights_id ? `digest of the weights: ${row.weights_id}` : undefined }, row.weights_id ? row.weights_id.slice(0, 6) : "not sealed");
    const name = make("th", { scope: "row" }, button, version, make("span.soft.tag", {}, rank(row.rank_key)), weights);
    return make("tr", {}, name, ...Array.from({ length: 7 }, () => make("td.n")));
  }, (element, row) => {
    const key = groupOf(row);
    set(element, "data-chosen", key === chosen ? "yes" : undefined);
    set(element.children[0].children[0], "aria-pressed", String(key === chosen));
    const cells = [
      `${row.seeds}`, row.forks_running ? `${row.forks_running}` : "–", size(row.image_bytes),
      row.storage_s === null ? "not known yet" : time(row.storage_s), row.fork_s === null ? "not known yet" : time(row.fork_s),
      row.storage_s === null || row.fork_s === null ? "not known yet" : time(row.seconds_saved),
      row.forked_bytes + row.storage_bytes ? `${size(row.forked_bytes)} of ${size(row.forked_bytes + row.storage_bytes)}` : "–",
    ];
    cells.forEach((text, index) => {
      say(element.children[index + 1], text);
      set(element.children[index + 1], "class", text === "not known yet" ? "n soft" : "n");
    });
    set(element.children[1], "class", held.has(key) ? "n" : "n bad");
  });
}

/** @param {number[]} values */
function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}
