// All that is known of one instance and its fork, in a dialog that goes on being told.

import { at, list, make, say } from "./dom.js";
import { flow, left, share } from "./fleet.js";
import { sourcesOf, storageName } from "./graph.js";
import { reasonOf } from "./troubles.js";
import { STATES, about, many, name, percent, plain, rank, rate, size, time } from "./words.js";

export class Details {
  constructor() {
    this.dialog = /** @type {HTMLDialogElement} */ (at("details"));
    this.id = "";
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
    this.dialog.addEventListener("close", () => (this.id = ""));
  }

  /** @param {string} id of an instance @param {import("./fleet.js").Sums} sums */
  open(id, sums) {
    this.id = id;
    this.show(sums);
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** @param {import("./fleet.js").Sums} sums */
  show(sums) {
    if (!this.id) return;
    const instance = sums.fleet.instances.get(this.id);
    const fork = sums.forkOf.get(this.id) ?? sums.endOf.get(this.id);
    say(at("details-title"), sourceName(this.id));

    const facts = [...(instance ? ofInstance(instance, sums) : unknown(fork)), ...(fork ? ofFork(fork, sums) : [])];
    list(at("details-body"), facts, ([name]) => name, ([name]) => make("dl", {}, make("dt", {}, name), make("dd")), (element, [, value]) => say(element.children[1], value));
  }
}


/** @param {import("./fleet.js").Instance} one @param {import("./fleet.js").Sums} sums @returns {[string, string][]} */
function ofInstance(one, sums) {
  const state = sums.states.get(one.id) ?? "loading";
  const readers = sums.readers.get(one.id) ?? [];
  const gives = readers.reduce((sum, fork) => sum + flow(fork, one.id), 0);
  const held = readers.map((fork) => fork.source_rate_limits?.[one.id] ?? 0).filter(Boolean);
  return kept([
    ["Id", name(one.id) === one.id ? "" : one.id],
    ["State", `${STATES[state].sign} ${STATES[state].word}: ${STATES[state].means}`],
    ["Quarantined", one.quarantine ? `${one.quarantine} (for ${about((one.quarantined_until ?? 0) - sums.now)} yet)` : ""],
    ["Model", `${one.model}${rank(one.rank) ? `, ${rank(one.rank)}` : ""}${one.dp ? `, DP ${one.dp}` : ""}`],
    ["Version", one.version ?? "not settled yet"],
    ["Where", [one.host, one.rack && `rack ${one.rack}`, one.zone && `zone ${one.zone}`, one.pod && `Pod ${one.pod}`].filter(Boolean).join(", ")],
    ["Holds", `${(one.verified ?? 0).toLocaleString("en")} of ${many(one.chunks ?? 0, "chunk")} (${percent(share(one))} of ${size(one.bytes ?? 0)})`],
    ["Weights", one.weights ? `${one.weights.slice(0, 12)}…, generation ${one.generation ?? 0}` : "not known yet"],
    ["Gives", `to ${readers.length} of ${many(one.slots ?? 0, "slot")}${gives ? `, ${rate(gives)}` : ""}${one.egress ? `, at most ${rate(one.egress)}` : ""}`],
    ["Held to", held.length ? `${rate(Math.min(...held))}, by its governor` : ""],
    ["Read by", readers.slice(0, 20).map((fork) => name(fork.instance)).join(", ")],
    ["Offers", (one.transports ?? []).join(", ")],
    ["Could read", (one.storage ?? []).join(", ")],
    ["Known for", time(Math.max(0, sums.now - (one.since ?? sums.now)))],
  ]);
}

/** @param {import("./fleet.js").Fork} fork @param {import("./fleet.js").Sums} sums @returns {[string, string][]} */
function ofFork(fork, sums) {
  const more = left(fork);
  const reads = sourcesOf(fork).map((source) => {
    const over = fork.transports?.[source];
    return `${sourceName(source)}${over ? ` over ${over}` : ""}${flow(fork, source) ? ` at ${rate(flow(fork, source))}` : ""}`;
  });
  const got = Object.entries(fork.sources ?? {}).map(([source, bytes]) => {
    const best = fork.outcome && fork.rates?.[source];
    return `${size(bytes)} from ${sourceName(source)}${best ? ` (${rate(best)} in its fastest second)` : ""}`;
  });
  return kept([
    ["Fork", `${fork.id}, asked ${about(Math.max(0, sums.now - fork.asked))} ago`],
    ["Progress", fork.outcome ? "" : `${percent(share(fork))}${fork.speed ? ` at ${rate(fork.speed)}` : ", gets nothing now"}${more === undefined ? "" : `, about ${about(more)} left`}`],
    ["Reads", fork.outcome ? "" : reads.join("; ") || "from nobody"],
    ["Why so", plain(fork.reason ?? "")],
    ["Ended", fork.outcome ? `${fork.outcome} in ${time(fork.seconds ?? 0)}${fork.fallback ? `, loaded by ${fork.fallback}` : ""}` : ""],
    ["Because", fork.outcome && fork.outcome !== "forked" ? reasonOf(fork) : ""],
    ["Got", got.join("; ")],
    ["Phases", Object.entries(fork.phases ?? {}).map(([name, seconds]) => `${name.replaceAll("_", " ")} ${time(seconds)}`).join(", ")],
    ["Its link", fork.link ? `${rate(fork.link)} in its fastest second` : ""],
    ["Efficiency η", fork.efficiency ? fork.efficiency.toFixed(2) : ""],
    ["Read again", fork.repeated ? size(fork.repeated) : ""],
    ["Planned again", fork.replans ? many(fork.replans, "time") : ""],
  ]);
}

/** What its last fork says of an instance that is not known. @param {import("./fleet.js").Fork | undefined} fork @returns {[string, string][]} */
function unknown(fork) {
  return kept([["State", "the planner does not know it (any more)"], ["Version", fork?.version ?? ""]]);
}

/** @param {string} source */
function sourceName(source) {
  return /^(snapshot|checkpoint|loader):/.test(source) ? storageName(source) : name(source);
}

/** @param {[string, string][]} facts */
function kept(facts) {
  return facts.filter(([, value]) => value);
}
