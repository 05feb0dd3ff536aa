// Assembles the page: the feed updates the fleet, and all parts are rendered before the next frame.

import { Announcer } from "./announcer.js";
import { Details } from "./details.js";
import { byId, createElement, setAttribute, setText, updateList } from "./dom.js";
import { Drawing } from "./drawing.js";
import { Feed } from "./feed.js";
import { Fleet, keyOf } from "./fleet.js";
import { graphOf } from "./graph.js";
import { showHeadline, showModels, showRollouts, showScaleups, showProblems } from "./headline.js";
import { showLocations } from "./locations.js";
import { showResults, showSources } from "./tables.js";
import { showPhases } from "./phases.js";
import { onToken } from "./token.js";
import { TreeGrid } from "./treegrid.js";
import { problemsOf } from "./problems.js";
import { about, many, rank, short, shortVersion, STATES } from "./format.js";

/** Ages increase while no event arrives. */
const TICK_MS = 1000;

let fleet = new Fleet();
/** @type {import("./fleet.js").Summary} */
let summary = fleet.summarize();
/** @type {import("./feed.js").Link} */
let link = { state: "opening", reason: "" };
let selectedGroup = groupInUrl();
let renderScheduled = false;

const filter = /** @type {HTMLInputElement} */ (byId("filter"));
const details = new Details();
const announcer = new Announcer(byId("announcer"));
const open = (/** @type {string} */ id) => details.open(id, summary);
const drawing = new Drawing(byId("drawing"), { open, hint });
const grid = new TreeGrid(byId("treegrid"), { open, mark: (id) => drawing.mark(id) });
const feed = new Feed(
  (event, data) => {
    fleet = fleet.handle(event, data);
    if (fleet.complete) scheduleRender();
  },
  (newLink) => {
    link = newLink;
    showLink();
    if (link.state === "token") requestToken(link.reason);
  },
);

/** Render everything before the next frame, once; a hidden tab renders nothing. */
function scheduleRender() {
  if (renderScheduled) return;
  renderScheduled = true;
  requestAnimationFrame(() => {
    renderScheduled = false;
    performance.mark("rfork-show");
    render();
    performance.measure("rfork-show", "rfork-show");
  });
}

function render() {
  summary = fleet.summarize();
  const problems = problemsOf(summary);
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (/** @type {(string | undefined)[]} */ ...parts) => parts.join(" ").toLowerCase();
  const matches = (/** @type {string} */ searched) => words.every((word) => searched.includes(word));
  const isMatch = words.length ? (/** @type {import("./fleet.js").Instance} */ one) => matches(text(one.id, one.model, one.version, rank(one.rank), one.host, one.rack, one.zone, one.pod, STATES[summary.states.get(one.id) ?? "loading"].word)) : () => true;
  const matchesFork = words.length
    ? (/** @type {import("./fleet.js").Fork} */ fork) => {
        const one = fleet.instances.get(fork.instance);
        return one ? isMatch(one) || matches(text(fork.id, one.id, fork.outcome)) : matches(text(fork.id, fork.instance, fork.model, fork.version, fork.outcome));
      }
    : () => true;
  const matchCount = words.length ? [...fleet.instances.values()].filter(isMatch).length : 0;
  showHeadline(summary, problems);
  if (words.length) setText(byId("subline"), `${many(matchCount, "instance")} of ${fleet.instances.size.toLocaleString("en")} ${matchCount === 1 ? "matches" : "match"} the filter.`);
  showProblems(words.length ? problems.filter((each) => matches(text(each.title, each.reason, each.group))) : problems, (each) => {
    if (each.group) selectGroup(each.group);
    if (each.id) open(each.id);
  });
  showScaleups(fleet.scaleups.filter((each) => each.arrived_count < each.scaleup.replicas && matches(text(each.scaleup.model, each.scaleup.announced_by))));
  const groups = new Set([...fleet.instances.values()].filter(isMatch).map((one) => keyOf(one)));
  const key = groupToShow(groups, problems);
  const models = new Set([...groups].map((each) => summary.groups.get(each)?.model));
  showRollouts(summary.rollouts.filter((each) => models.has(each.model)));
  showModels(summary, (row) => groups.has(keyOf(row)), key, selectGroup);
  showTree(key, isMatch, words.length > 0);
  showPhases(summary, matchesFork, open);
  showSources(summary, isMatch, open);
  showResults(summary, matchesFork);
  showLocations(summary, isMatch, open);
  details.show(summary);
  announcer.announce(summary, problems);
  byId("empty").hidden = fleet.instances.size + fleet.forks.size + fleet.scaleups.length > 0;
  setText(byId("about"), `rfork ${fleet.version}`);
}

/** The selected group, else the one with the most running forks, else one with a problem, else the first.
 * @param {Set<string>} groups that match the filter @param {import("./problems.js").Problem[]} problems */
function groupToShow(groups, problems) {
  if (groups.has(selectedGroup)) return selectedGroup;
  const busy = [...summary.groups.values()].filter((group) => groups.has(group.key)).sort((one, other) => other.live.length - one.live.length || (one.key < other.key ? -1 : 1));
  if (busy[0]?.live.length) return busy[0].key;
  return problems.find((each) => each.group && groups.has(each.group))?.group ?? busy[0]?.key ?? "";
}

/** @param {string} key @param {(instance: import("./fleet.js").Instance) => boolean} isMatch @param {boolean} filtered */
function showTree(key, isMatch, filtered) {
  const group = summary.groups.get(key);
  byId("tree").hidden = !group;
  if (!group) return;
  const graph = graphOf(summary, group, isMatch);
  setText(byId("tree-title"), [`Fork tree of ${short(group.model, 60)}`, shortVersion(group.version), rank(group.rank)].filter(Boolean).join(", "));
  setAttribute(byId("tree-title"), "title", group.version || undefined);
  const words = group.live.length
    ? `${many(group.live.length, "fork")} running. Lines: readers and rates. Circles: verified fraction.`
    : `no forks running; ${many(graph.idle.length, "instance")} in the table`;
  setText(byId("tree-words"), words);
  byId("drawing").hidden = graph.nodes.size === 0;
  drawing.show(graph);
  grid.show(graph, filtered);
  const present = new Set([...graph.nodes.values(), ...graph.idle].map((node) => node.state));
  updateList(byId("legend"), Object.keys(STATES).filter((state) => present.has(state)), (state) => state, (state) => createElement("li", { "data-state": state }, createElement("span.dot", { "data-state": state, "aria-hidden": "true" }, ["seed", "target", "loading"].includes(state) ? "" : STATES[state].sign), ` ${STATES[state].word}`, createElement("span.soft", {}, ` ${STATES[state].means}`)));
}

/** The group in the URL, if it is valid. */
function groupInUrl() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

/** @param {string} key */
function selectGroup(key) {
  selectedGroup = key;
  history.replaceState(null, "", `#${encodeURIComponent(key)}`);
  scheduleRender();
}

function showLink() {
  const { state, reason, retryAt = 0, since = 0 } = link;
  setAttribute(byId("link"), "data-state", state);
  setAttribute(document.body, "data-link", state);
  setText(byId("link-words"), { live: "live", disconnected: "disconnected", token: "token required", opening: "connecting …" }[state]);
  const banner = byId("disconnected");
  const message = `No connection to the planner: ${reason}. ${fleet.complete ? `The data is ${about((Date.now() - since) / 1000)} old. ` : ""}`;
  setText(banner, state === "disconnected" ? `${message}${retryAt > Date.now() + 500 ? `Retrying in ${about((retryAt - Date.now()) / 1000)}.` : "Retrying …"}` : "");
  banner.hidden = state !== "disconnected";
  if (state !== "live") return;
  /** @type {HTMLDialogElement} */ (byId("token-dialog")).close();
  // A link sends no token; the API page does.
  setAttribute(byId("metrics"), "href", feed.token ? "../docs#/health/exposition_metrics_get" : "../metrics");
}

/** @param {string} reason */
function requestToken(reason) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("token-dialog"));
  setText(byId("token-error"), reason);
  if (!dialog.open) dialog.showModal();
  byId("token").focus();
}

/** @param {string} text @param {number} x @param {number} y */
function hint(text, x, y) {
  const box = byId("hint");
  box.hidden = !text;
  setText(box, text);
  box.style.left = `${Math.min(x + 14, innerWidth - 280)}px`;
  box.style.top = `${y + 16}px`;
}

byId("token-dialog").addEventListener("cancel", (event) => event.preventDefault());
onToken((token) => feed.setToken(token));
filter.addEventListener("input", scheduleRender);
addEventListener("keydown", (event) => {
  const typing = /** @type {HTMLElement} */ (event.target).matches("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "Escape" && event.target === filter) {
    filter.value = "";
    scheduleRender();
  }
});
addEventListener("hashchange", () => {
  selectedGroup = groupInUrl();
  scheduleRender();
});
const theme = /** @type {HTMLSelectElement} */ (byId("theme"));
theme.value = document.documentElement.dataset.theme ?? "auto";
theme.addEventListener("change", () => {
  document.documentElement.dataset.theme = theme.value;
  try {
    localStorage.setItem("rfork-theme", theme.value);
  } catch {
    // The theme applies until the page is closed.
  }
  drawing.recolour();
});
const planner = new URL("..", location.href).href.replace(/\/$/, "");
const commands = [`RFORK_PLANNER=${planner} rfork seed ./MODEL`, `RFORK_PLANNER=${planner} vllm serve MODEL --load-format rfork`, `python -m sglang.launch_server --model-path MODEL --rfork-planner ${planner}`];
byId("commands").append(...commands.map((command) => createElement("li", {}, createElement("code", {}, command))));
addEventListener("error", (event) => {
  // An error of the page itself: show it instead of stale data.
  byId("disconnected").hidden = false;
  setText(byId("disconnected"), `This page has failed and its data may be old: ${event.message}. Reload it, or use \`rfork status\`.`);
});
setInterval(() => {
  if (link.state === "disconnected") showLink();
  else if (fleet.complete && fleet.forks.size) scheduleRender();
}, TICK_MS);
feed.run();
