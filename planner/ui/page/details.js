// Dialog with everything known about one instance and its fork, updated live.

import { byId, createElement, setText, updateList } from "./dom.js";
import { secondsLeft, sourceRate, verifiedShare } from "./fleet.js";
import { sourcesOf, storageName } from "./graph.js";
import { reasonOf } from "./problems.js";
import { about, many, name, percent, withNames, rank, rate, size, STATES, time } from "./format.js";

export class Details {
  constructor() {
    this.dialog = /** @type {HTMLDialogElement} */ (byId("details"));
    this.id = "";
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
    this.dialog.addEventListener("close", () => (this.id = ""));
  }

  /** @param {string} id of an instance @param {import("./fleet.js").Summary} summary */
  open(id, summary) {
    this.id = id;
    this.show(summary);
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** @param {import("./fleet.js").Summary} summary */
  show(summary) {
    if (!this.id) return;
    const instance = summary.fleet.instances.get(this.id);
    const fork = summary.forkOf.get(this.id) ?? summary.lastForkOf.get(this.id);
    setText(byId("details-title"), sourceName(this.id));

    const facts = [...(instance ? ofInstance(instance, summary) : unknown(fork)), ...(fork ? ofFork(fork, summary) : [])];
    updateList(byId("details-body"), facts, ([name]) => name, ([name]) => createElement("dl", {}, createElement("dt", {}, name), createElement("dd")), (element, [, value]) => setText(element.children[1], value));
  }
}


/** @param {import("./fleet.js").Instance} one @param {import("./fleet.js").Summary} summary @returns {[string, string][]} */
function ofInstance(one, summary) {
  const state = summary.states.get(one.id) ?? "loading";
  const readers = summary.readers.get(one.id) ?? [];
  const servedRate = readers.reduce((sum, fork) => sum + sourceRate(fork, one.id), 0);
  const limits = readers.map((fork) => fork.source_rate_limits?.[one.id] ?? 0).filter(Boolean);
  return nonEmpty([
    ["Id", name(one.id) === one.id ? "" : one.id],
    ["State", `${STATES[state].sign} ${STATES[state].word}: ${STATES[state].means}`],
    ["Quarantined", one.quarantine ? `${one.quarantine} (for another ${about((one.quarantined_until ?? 0) - summary.now)})` : ""],
    ["Model", `${one.model}${rank(one.rank) ? `, ${rank(one.rank)}` : ""}${one.dp ? `, DP ${one.dp}` : ""}`],
    ["Version", one.version ?? "not resolved yet"],
    ["Location", [one.host, one.rack && `rack ${one.rack}`, one.zone && `zone ${one.zone}`, one.pod && `Pod ${one.pod}`].filter(Boolean).join(", ")],
    ["Chunks", `${(one.verified ?? 0).toLocaleString("en")} of ${many(one.chunks ?? 0, "chunk")} (${percent(verifiedShare(one))} of ${size(one.bytes ?? 0)})`],
    ["Weights", one.weights ? `${one.weights.slice(0, 12)}…, generation ${one.generation ?? 0}` : "unknown"],
    ["Readers", `${readers.length} of ${many(one.slots ?? 0, "slot")}${servedRate ? `, ${rate(servedRate)}` : ""}${one.egress ? `, at most ${rate(one.egress)}` : ""}`],
    ["Rate limit", limits.length ? `${rate(Math.min(...limits))}, by its latency controller` : ""],
    ["Read by", readers.slice(0, 20).map((fork) => name(fork.instance)).join(", ")],
    ["Transports", (one.transports ?? []).join(", ")],
    ["Storage", (one.storage ?? []).join(", ")],
    ["Registered for", time(Math.max(0, summary.now - (one.since ?? summary.now)))],
  ]);
}

/** @param {import("./fleet.js").Fork} fork @param {import("./fleet.js").Summary} summary @returns {[string, string][]} */
function ofFork(fork, summary) {
  const remaining = secondsLeft(fork);
  const reads = sourcesOf(fork).map((source) => {
    const over = fork.transports?.[source];
    return `${sourceName(source)}${over ? ` over ${over}` : ""}${sourceRate(fork, source) ? ` at ${rate(sourceRate(fork, source))}` : ""}`;
  });
  const received = Object.entries(fork.sources ?? {}).map(([source, bytes]) => {
    const best = fork.outcome && fork.rates?.[source];
    return `${size(bytes)} from ${sourceName(source)}${best ? ` (${rate(best)} in its fastest second)` : ""}`;
  });
  return nonEmpty([
    ["Fork", `${fork.id}, requested ${about(Math.max(0, summary.now - fork.requested_at))} ago`],
    ["Progress", fork.outcome ? "" : `${percent(verifiedShare(fork))}${fork.speed ? ` at ${rate(fork.speed)}` : ", receiving nothing"}${remaining === undefined ? "" : `, about ${about(remaining)} left`}`],
    ["Reads", fork.outcome ? "" : reads.join("; ") || "no sources"],
    ["Reason", withNames(fork.reason ?? "")],
    ["Result", fork.outcome ? `${fork.outcome} in ${time(fork.seconds ?? 0)}${fork.fallback ? `, loaded by ${fork.fallback}` : ""}` : ""],
    ["Failure", fork.outcome && fork.outcome !== "forked" ? reasonOf(fork) : ""],
    ["Received", received.join("; ")],
    ["Phases", Object.entries(fork.phases ?? {}).map(([name, seconds]) => `${name.replaceAll("_", " ")} ${time(seconds)}`).join(", ")],
    ["Link", fork.link ? `${rate(fork.link)} in its fastest second` : ""],
    ["Efficiency η", fork.efficiency ? fork.efficiency.toFixed(2) : ""],
    ["Repeated bytes", fork.repeated ? size(fork.repeated) : ""],
    ["Replans", fork.replans ? many(fork.replans, "time") : ""],
  ]);
}

/** Facts about an unknown instance, from its last fork. @param {import("./fleet.js").Fork | undefined} fork @returns {[string, string][]} */
function unknown(fork) {
  return nonEmpty([["State", "unknown to the planner"], ["Version", fork?.version ?? ""]]);
}

/** @param {string} source */
function sourceName(source) {
  return /^(snapshot|checkpoint|loader):/.test(source) ? storageName(source) : name(source);
}

/** @param {[string, string][]} facts */
function nonEmpty(facts) {
  return facts.filter(([, value]) => value);
}
