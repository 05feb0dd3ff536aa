// The top of the page: problems, running forks, rate and remaining time.

import { byId, createElement, setAttribute, setStyle, setText, updateList } from "./dom.js";
import { keyOf, secondsLeft, verifiedShare } from "./fleet.js";
import { about, many, percent, rank, rate, short, shortVersion, size, time } from "./format.js";

/** Maximum number of problems listed; the others are counted. */
const SHOWN = 12;
/** Number of recent forks for the median efficiency. */
const LATEST = 100;

/** @param {import("./fleet.js").Summary} summary @param {import("./problems.js").Problem[]} problems */
export function showHeadline(summary, problems) {
  const { live, fleet } = summary;
  const errors = problems.filter((each) => each.level === "error").length;
  const reading = live.filter((fork) => Object.keys(fork.plan ?? {}).length);
  const speed = live.reduce((sum, fork) => sum + (fork.speed ?? 0), 0);
  const longest = Math.max(0, ...live.map((fork) => secondsLeft(fork) ?? 0));
  const seeds = [...summary.states.values()].filter((state) => state === "seed" || state === "holder").length;
  const models = new Set([...summary.groups.values()].map((group) => group.model)).size;
  const head = byId("headline");
  const status = !fleet.instances.size && !fleet.forks.size ? "empty" : errors ? "error" : problems.length ? "warning" : "ok";
  setAttribute(head, "data-status", status);
  const title = {
    empty: "No instances yet",
    error: many(problems.length, "problem"),
    warning: many(problems.length, "problem"),
    ok: "No problems",
  }[status];
  setText(head, title);
  document.title = status === "ok" || status === "empty" ? "rfork planner" : `(${problems.length}) rfork planner`;
  const running = live.length
    ? `${many(live.length, "fork")} running at ${rate(speed)}${longest ? `, about ${about(longest)} left` : ""}.`
    : "No forks running.";
  setText(byId("subline"), status === "empty" ? "The planner is ready." : `${running} ${many(seeds, "seed")} of ${many(models, "model")}, ${many(fleet.instances.size, "instance")} in total.`);
  byId("figures").hidden = status === "empty";
  showFigures(summary, { reading: reading.length, speed, longest, seeds });
}

/** @param {import("./fleet.js").Summary} summary @param {{reading: number, speed: number, longest: number, seeds: number}} found */
function showFigures(summary, { reading, speed, longest, seeds }) {
  const { live, fleet } = summary;
  const bytes = live.reduce((sum, fork) => sum + (fork.bytes ?? 0), 0);
  const received = live.reduce((sum, fork) => sum + (fork.bytes ?? 0) * verifiedShare(fork), 0);
  const efficiencies = summary.ended.filter((fork) => fork.outcome === "forked" && fork.efficiency !== undefined).slice(0, LATEST).map((fork) => fork.efficiency ?? 0);
  const saved = fleet.secondsSaved;
  const figures = [
    { name: "Running forks", value: String(live.length), more: live.length ? `${reading} with a source, ${percent(bytes ? received / bytes : 0)} received` : "none" },
    { name: "Rate", value: rate(speed), more: live.length ? "total of all forks" : "no transfers" },
    { name: "Time left", value: longest ? about(longest) : "–", more: longest ? "until the last fork completes" : live.length ? "unknown" : "no forks running" },
    { name: "Seeds", value: String(seeds), more: `of ${many(fleet.instances.size, "instance")}` },
    { name: "Efficiency η", value: efficiencies.length ? median(efficiencies).toFixed(2) : "–", more: efficiencies.length ? `of the link; median of ${many(efficiencies.length, "fork")}` : "unknown" },
    { name: "Time saved", value: saved === null ? "–" : time(saved), more: saved === null ? "unknown" : "compared with loading from disk" },
  ];
  updateList(byId("figures"), figures, (each) => each.name, (each) => createElement("div", {}, createElement("dt", {}, each.name), createElement("dd.value"), createElement("dd.more.soft")), (element, each) => {
    setText(element.children[1], each.value);
    setText(element.children[2], each.more);
  });
}

/** @param {import("./problems.js").Problem[]} problems @param {(problem: import("./problems.js").Problem) => void} open */
export function showProblems(problems, open) {
  byId("problems").hidden = problems.length === 0;
  const shown = problems.slice(0, SHOWN);
  const rest = problems.length - shown.length;
  /** @type {import("./problems.js").Problem[]} */
  const items = rest ? [...shown, { key: "rest", level: "warning", title: `and ${rest} more`, reason: "filter by model or host to see them" }] : shown;
  updateList(byId("problem-list"), items, (each) => each.key, (each) => {
    const title = each.id ? createElement("button.plain.title-text", { click: () => open(each) }) : createElement("span.title-text");
    return createElement("li", {}, createElement("span.sign", { "aria-hidden": "true" }), createElement("span.level"), title, createElement("span.reason.soft"));
  }, (element, each) => {
    setAttribute(element, "data-level", each.level);
    setText(element.children[0], each.level === "error" ? "✕" : "▲");
    setText(element.children[1], each.level);
    setText(element.children[2], each.title);
    setText(element.children[3], each.reason);
  });
}

/** @param {import("./fleet.js").ScaleUp[]} scaleups */
export function showScaleups(scaleups) {
  byId("scaleups").hidden = scaleups.length === 0;
  updateList(byId("scaleup-list"), scaleups, (each) => each.scaleup.scaleup_id, () => createElement("li", {}, createElement("strong"), createElement("span"), createElement("progress", { "aria-label": "replicas that have arrived" }), createElement("span.soft")), (element, each) => {
    const { replicas, model, announced_by: announcedBy } = each.scaleup;
    setText(element.children[0], [`${many(replicas, "replica")} of ${short(model, 48)}`, shortVersion(each.scaleup.version)].filter(Boolean).join(", "));
    setText(element.children[1], `${each.arrived_count} arrived, ${Math.max(0, replicas - each.arrived_count)} expected`);
    setAttribute(element.children[2], "max", String(Math.max(1, replicas)));
    setAttribute(element.children[2], "value", String(Math.min(each.arrived_count, replicas)));
    setText(element.children[3], `${each.reason}${each.image_bytes ? `; ${size(each.image_bytes)} each` : ""}${announcedBy ? `; announced by ${announcedBy}` : ""}`);
  });
}

/** @param {import("./fleet.js").Rollout[]} rollouts */
export function showRollouts(rollouts) {
  byId("rollouts").hidden = rollouts.length === 0;
  updateList(byId("rollout-list"), rollouts, (each) => each.model, (each) => createElement("li", {}, createElement("strong", {}, short(each.model, 48)), createElement("ul")), (element, each) => {
    const all = each.versions.reduce((sum, one) => sum + one.serving + one.loading, 0);
    updateList(/** @type {HTMLElement} */ (element.children[1]), each.versions, (one) => one.version, (one) => createElement("li", {}, createElement("span.meter", { "aria-hidden": "true" }, createElement("i"), createElement("i.loading")), createElement("span.version", { title: one.version }, shortVersion(one.version)), createElement("span.soft")), (row, one) => {
      const [meter, , words] = /** @type {HTMLElement[]} */ ([...row.children]);
      setStyle(/** @type {HTMLElement} */ (meter.children[0]), "width", `${(100 * one.serving) / all}%`);
      setStyle(/** @type {HTMLElement} */ (meter.children[1]), "width", `${(100 * one.loading) / all}%`);
      setText(words, [`${one.serving.toLocaleString("en")} serving`, one.loading ? `${one.loading} loading` : ""].filter(Boolean).join(", "));
    });
  });
}

/** The key of a row's fork tree. @param {import("./fleet.js").Model} row */
function groupOf(row) {
  return keyOf({ ...row, rank: row.rank_key });
}

/** @param {import("./fleet.js").Summary} summary @param {(instance: {model: string, version: string | null, rank: string}) => boolean} isMatch
 * @param {string} selected key of the selected group @param {(key: string) => void} select */
export function showModels(summary, isMatch, selected, select) {
  const { fleet } = summary;
  const rows = fleet.models.filter((row) => isMatch({ ...row, rank: row.rank_key }));
  byId("models").hidden = rows.length === 0;
  const available = new Set(fleet.models.filter((row) => row.seeds || row.forks_running).map((row) => groupOf(row)));
  updateList(byId("model-rows"), rows, (row) => `${groupOf(row)} ${row.layout_id} ${row.weights_id}`, (row) => {
    const button = createElement("button.plain", { click: () => select(groupOf(row)) }, row.model);
    const version = createElement("span.soft.tag", { title: row.version ?? undefined }, shortVersion(row.version));
    const weights = createElement("span.soft.tag", { title: row.weights_id ? `digest of the weights: ${row.weights_id}` : undefined }, row.weights_id ? row.weights_id.slice(0, 6) : "not final");
    const name = createElement("th", { scope: "row" }, button, version, createElement("span.soft.tag", {}, rank(row.rank_key)), weights);
    return createElement("tr", {}, name, ...Array.from({ length: 7 }, () => createElement("td.n")));
  }, (element, row) => {
    const key = groupOf(row);
    setAttribute(element, "data-selected", key === selected ? "yes" : undefined);
    setAttribute(element.children[0].children[0], "aria-pressed", String(key === selected));
    const cells = [
      `${row.seeds}`, row.forks_running ? `${row.forks_running}` : "–", size(row.image_bytes),
      row.storage_s === null ? "unknown" : time(row.storage_s), row.fork_s === null ? "unknown" : time(row.fork_s),
      row.storage_s === null || row.fork_s === null ? "unknown" : time(row.seconds_saved),
      row.forked_bytes + row.storage_bytes ? `${size(row.forked_bytes)} of ${size(row.forked_bytes + row.storage_bytes)}` : "–",
    ];
    cells.forEach((text, index) => {
      setText(element.children[index + 1], text);
      setAttribute(element.children[index + 1], "class", text === "unknown" ? "n soft" : "n");
    });
    setAttribute(element.children[1], "class", available.has(key) ? "n" : "n bad");
  });
}

/** @param {number[]} values */
function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}
