// Instances by zone, rack and host, one symbol each. Elements are created once and updated only when they change.

import { byId, createElement, setAttribute, setText, updateList } from "./dom.js";
import { many, STATES } from "./format.js";

/** @typedef {{key: string, name: string, hosts: Map<string, import("./fleet.js").Instance[]>, count: number}} Rack */

/** @param {import("./fleet.js").Summary} summary @param {(instance: import("./fleet.js").Instance) => boolean} isMatch @param {(id: string) => void} open */
export function showLocations(summary, isMatch, open) {
  const racks = racksOf([...summary.fleet.instances.values()].filter(isMatch));
  byId("locations").hidden = racks.length === 0;
  const hosts = racks.reduce((sum, rack) => sum + rack.hosts.size, 0);
  const named = racks.filter((rack) => rack.key !== NO_TOPOLOGY).length;
  setText(byId("locations-words"), `${many(hosts, "host")}${named ? ` in ${many(named, "rack")}` : ", no topology reported"}`);
  updateList(byId("racks"), racks, (rack) => rack.key, () => createElement("section.rack", {}, createElement("h3", {}, createElement("span"), createElement("span.soft.count")), createElement("ul.hosts")), (element, rack) => {
    setText(element.children[0].children[0], rack.name);
    setText(element.children[0].children[1], ` ${many(rack.count, "instance")}`);
    const shown = [...rack.hosts];
    updateList(/** @type {HTMLElement} */ (element.children[1]), shown, ([host]) => host, ([host]) => createElement("li", {}, createElement("span.host", { title: host }, host), createElement("span.hidden"), createElement("span.dots", { "aria-hidden": "true" })), (item, [, instances]) => {
      const states = instances.map((instance) => summary.states.get(instance.id) ?? "loading");
      // Most hosts have not changed: one comparison, and no DOM access.
      const fingerprint = instances.map((instance, index) => `${instance.id} ${states[index]}`).join();
      if (item.dataset.fingerprint === fingerprint) return;
      item.dataset.fingerprint = fingerprint;
      setText(item.children[1], counts(states));
      updateList(/** @type {HTMLElement} */ (item.children[2]), instances, (instance) => instance.id, (instance) => createElement("span.dot", { click: () => open(instance.id) }), (dot, instance) => {
        const state = summary.states.get(instance.id) ?? "loading";
        setAttribute(dot, "data-state", state);
        setAttribute(dot, "title", `${instance.id}: ${STATES[state].word}, ${instance.model}`);
        setText(dot, ["seed", "target", "loading"].includes(state) ? "" : STATES[state].sign);
      });
    });
  });
}

const NO_TOPOLOGY = "\u0000";

/** @param {import("./fleet.js").Instance[]} instances @returns {Rack[]} */
function racksOf(instances) {
  /** @type {Map<string, Rack>} */
  const racks = new Map();
  for (const instance of instances) {
    const hasTopology = instance.rack !== undefined || instance.zone !== undefined;
    const key = hasTopology ? `${instance.zone ?? ""}\n${instance.rack ?? ""}` : NO_TOPOLOGY;
    const name = hasTopology ? [instance.rack ? `rack ${instance.rack}` : "unknown rack", instance.zone ? `zone ${instance.zone}` : ""].filter(Boolean).join(", ") : "Hosts";
    const rack = racks.get(key) ?? { key, name, hosts: new Map(), count: 0 };
    racks.set(key, rack);
    rack.count += 1;
    const host = rack.hosts.get(instance.host);
    if (host) host.push(instance);
    else rack.hosts.set(instance.host, [instance]);
  }
  const order = new Intl.Collator("en", { numeric: true });
  for (const rack of racks.values()) rack.hosts = new Map([...rack.hosts].sort(([one], [other]) => order.compare(one, other)));
  return [...racks.values()].sort((one, other) => order.compare(one.key, other.key));
}

/** @param {string[]} states `3 seeds, 1 relay`, for screen readers */
function counts(states) {
  return [...new Set(states)].map((state) => `${states.filter((each) => each === state).length} ${STATES[state].word}`).join(", ");
}
