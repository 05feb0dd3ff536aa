// Puts the page together: the feed tells the fleet, and before the next picture all parts are shown anew.

import { Announcer } from "./announcer.js";
import { Details } from "./details.js";
import { at, list, make, say, set } from "./dom.js";
import { Drawing } from "./drawing.js";
import { Feed } from "./feed.js";
import { Fleet, keyOf } from "./fleet.js";
import { graphOf } from "./graph.js";
import { showHeadline, showModels, showRollouts, showScaleups, showTroubles } from "./headline.js";
import { showPlaces } from "./places.js";
import { showEndings, showSources } from "./tables.js";
import { showTimes } from "./times.js";
import { onToken } from "./token.js";
import { TreeGrid } from "./treegrid.js";
import { troublesOf } from "./troubles.js";
import { STATES, about, many, rank, short, shortVersion } from "./words.js";

/** Ages are counted on while nothing is told. */
const TICK_MS = 1000;

let fleet = new Fleet();
/** @type {import("./fleet.js").Sums} */
let sums = fleet.sums();
/** @type {import("./feed.js").Link} */
let link = { state: "opening", why: "" };
let chosen = named();
let asked = false;

const filter = /** @type {HTMLInputElement} */ (at("filter"));
const details = new Details();
const announcer = new Announcer(at("announcer"));
const open = (/** @type {string} */ id) => details.open(id, sums);
const drawing = new Drawing(at("drawing"), { open, hint });
const grid = new TreeGrid(at("treegrid"), { open, mark: (id) => drawing.mark(id) });
const feed = new Feed(
  (event, data) => {
    fleet = fleet.take(event, data);
    if (fleet.known) ask();
  },
  (now) => {
    link = now;
    showLink();
    if (now.state === "token") askToken(now.why);
  },
);

/** Show everything before the next picture, once; a tab that nobody sees draws nothing. */
function ask() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    performance.mark("rfork-show");
    show();
    performance.measure("rfork-show", "rfork-show");
  });
}

function show() {
  sums = fleet.sums();
  const troubles = troublesOf(sums);
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (/** @type {(string | undefined)[]} */ ...parts) => parts.join(" ").toLowerCase();
  const fits = (/** @type {string} */ searched) => words.every((word) => searched.includes(word));
  const wanted = words.length ? (/** @type {import("./fleet.js").Instance} */ one) => fits(text(one.id, one.model, one.version, rank(one.rank), one.host, one.rack, one.zone, one.pod, STATES[sums.states.get(one.id) ?? "loading"].word)) : () => true;
  const wantedFork = words.length
    ? (/** @type {import("./fleet.js").Fork} */ fork) => {
        const one = fleet.instances.get(fork.instance);
        return one ? wanted(one) || fits(text(fork.id, one.id, fork.outcome)) : fits(text(fork.id, fork.instance, fork.model, fork.version, fork.outcome));
      }
    : () => true;
  const fitting = words.length ? [...fleet.instances.values()].filter(wanted).length : 0;
  showHeadline(sums, troubles);
  if (words.length) say(at("subline"), `${many(fitting, "instance")} of ${fleet.instances.size.toLocaleString("en")} ${fitting === 1 ? "fits" : "fit"} the filter.`);
  showTroubles(words.length ? troubles.filter((each) => fits(text(each.what, each.why, each.group))) : troubles, (each) => {
    if (each.group) choose(each.group);
    if (each.id) open(each.id);
  });
  showScaleups(fleet.scaleups.filter((each) => each.arrived_count < each.scaleup.replicas && fits(text(each.scaleup.model, each.scaleup.by))));
  const groups = new Set([...fleet.instances.values()].filter(wanted).map((one) => keyOf(one)));
  const key = groupShown(groups, troubles);
  const models = new Set([...groups].map((each) => sums.groups.get(each)?.model));
  showRollouts(sums.rollouts.filter((each) => models.has(each.model)));
  showModels(sums, (row) => groups.has(keyOf(row)), key, choose);
  showTree(key, wanted, words.length > 0);
  showTimes(sums, wantedFork, open);
  showSources(sums, wanted, open);
  showEndings(sums, wantedFork);
  showPlaces(sums, wanted, open);
  details.show(sums);
  announcer.tell(sums, troubles);
  at("empty").hidden = fleet.instances.size + fleet.forks.size + fleet.scaleups.length > 0;
  say(at("about"), `rfork ${fleet.version}`);
}

/** The group that was chosen, else the one with most under way, else one in trouble, else the first.
 * @param {Set<string>} groups that fit the filter @param {import("./troubles.js").Trouble[]} troubles */
function groupShown(groups, troubles) {
  if (groups.has(chosen)) return chosen;
  const busy = [...sums.groups.values()].filter((group) => groups.has(group.key)).sort((one, other) => other.live.length - one.live.length || (one.key < other.key ? -1 : 1));
  if (busy[0]?.live.length) return busy[0].key;
  return troubles.find((each) => each.group && groups.has(each.group))?.group ?? busy[0]?.key ?? "";
}

/** @param {string} key @param {(instance: import("./fleet.js").Instance) => boolean} wanted @param {boolean} filtered */
function showTree(key, wanted, filtered) {
  const group = sums.groups.get(key);
  at("tree").hidden = !group;
  if (!group) return;
  const graph = graphOf(sums, group, wanted);
  say(at("tree-title"), [`Fork tree of ${short(group.model, 60)}`, shortVersion(group.version), rank(group.rank)].filter(Boolean).join(", "));
  set(at("tree-title"), "title", group.version || undefined);
  const words = group.live.length
    ? `${many(group.live.length, "fork")} under way: who reads from whom; the thicker, the faster; filled as far as verified`
    : `nothing is under way; ${many(graph.idle.length, "instance")} in the table`;
  say(at("tree-words"), words);
  at("drawing").hidden = graph.nodes.size === 0;
  drawing.show(graph);
  grid.show(graph, filtered);
  const there = new Set([...graph.nodes.values(), ...graph.idle].map((node) => node.state));
  list(at("legend"), Object.keys(STATES).filter((state) => there.has(state)), (state) => state, (state) => make("li", { "data-state": state }, make("span.dot", { "data-state": state, "aria-hidden": "true" }, ["seed", "target", "loading"].includes(state) ? "" : STATES[state].sign), ` ${STATES[state].word}`, make("span.soft", {}, ` ${STATES[state].means}`)));
}

/** The group that the address names; none where that is damaged. */
function named() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

/** @param {string} key */
function choose(key) {
  chosen = key;
  history.replaceState(null, "", `#${encodeURIComponent(key)}`);
  ask();
}

function showLink() {
  const { state, why, again = 0, since = 0 } = link;
  set(at("link"), "data-state", state);
  set(document.body, "data-link", state);
  say(at("link-words"), { live: "live", gone: "planner gone", token: "token needed", opening: "connecting …" }[state]);
  const gone = at("gone");
  const words = `The planner is gone: ${why}. ${fleet.known ? `What you see is ${about((Date.now() - since) / 1000)} old. ` : ""}`;
  say(gone, state === "gone" ? `${words}${again > Date.now() + 500 ? `Trying again in ${about((again - Date.now()) / 1000)}.` : "Trying again …"}` : "");
  gone.hidden = state !== "gone";
  if (state !== "live") return;
  /** @type {HTMLDialogElement} */ (at("ask")).close();
  // A link shows no token: that page does.
  set(at("metrics"), "href", feed.shown ? "../docs#/health/exposition_metrics_get" : "../metrics");
}

/** @param {string} why */
function askToken(why) {
  const dialog = /** @type {HTMLDialogElement} */ (at("ask"));
  say(at("ask-wrong"), why);
  if (!dialog.open) dialog.showModal();
  at("token").focus();
}

/** @param {string} text @param {number} x @param {number} y */
function hint(text, x, y) {
  const box = at("hint");
  box.hidden = !text;
  say(box, text);
  box.style.left = `${Math.min(x + 14, innerWidth - 280)}px`;
  box.style.top = `${y + 16}px`;
}

at("ask").addEventListener("cancel", (event) => event.preventDefault());
onToken((token) => feed.use(token));
filter.addEventListener("input", ask);
addEventListener("keydown", (event) => {
  const typing = /** @type {HTMLElement} */ (event.target).matches("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "Escape" && event.target === filter) {
    filter.value = "";
    ask();
  }
});
addEventListener("hashchange", () => {
  chosen = named();
  ask();
});
const theme = /** @type {HTMLSelectElement} */ (at("theme"));
theme.value = document.documentElement.dataset.theme ?? "auto";
theme.addEventListener("change", () => {
  document.documentElement.dataset.theme = theme.value;
  try {
    localStorage.setItem("rfork-theme", theme.value);
  } catch {
    // It holds for this visit.
  }
  drawing.recolour();
});
const planner = new URL("..", location.href).href.replace(/\/$/, "");
const commands = [`RFORK_PLANNER=${planner} rfork seed ./MODEL`, `RFORK_PLANNER=${planner} vllm serve MODEL --load-format rfork`, `python -m sglang.launch_server --model-path MODEL --rfork-planner ${planner}`];
at("commands").append(...commands.map((command) => make("li", {}, make("code", {}, command))));
addEventListener("error", (event) => {
  // A fault of the page's own: better told than a picture that stands still.
  at("gone").hidden = false;
  say(at("gone"), `This page has failed, and what you see may be old: ${event.message}. Load it again; \`rfork status\` tells the same.`);
});
setInterval(() => {
  if (link.state === "gone") showLink();
  else if (fleet.known && fleet.forks.size) ask();
}, TICK_MS);
feed.run();
