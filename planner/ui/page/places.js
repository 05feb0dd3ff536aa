// Instances by zone, rack and host: one sign each. What is many is drawn once and changed only where it changed.

import { at, list, make, say, set } from "./dom.js";
import { STATES, many } from "./words.js";

/** @typedef {{key: string, name: string, hosts: Map<string, import("./fleet.js").Instance[]>, count: number}} Rack */

/** @param {import("./fleet.js").Sums} sums @param {(instance: import("./fleet.js").Instance) => boolean} wanted @param {(id: string) => void} open */
export function showPlaces(sums, wanted, open) {
  const racks = racksOf([...sums.fleet.instances.values()].filter(wanted));
  at("places").hidden = racks.length === 0;
  const hosts = racks.reduce((sum, rack) => sum + rack.hosts.size, 0);
  const named = racks.filter((rack) => rack.key !== NOWHERE).length;
  say(at("places-words"), `${many(hosts, "host")}${named ? ` in ${many(named, "rack")}` : ", no rack is told"}`);
  list(at("racks"), racks, (rack) => rack.key, () => make("section.rack", {}, make("h3", {}, make("span"), make("span.soft.count")), make("ul.hosts")), (element, rack) => {
    say(element.children[0].children[0], rack.name);
    say(element.children[0].children[1], ` ${many(rack.count, "instance")}`);
    const shown = [...rack.hosts];
    list(/** @type {HTMLElement} */ (element.children[1]), shown, ([host]) => host, ([host]) => make("li", {}, make("span.host", { title: host }, host), make("span.hidden"), make("span.dots", { "aria-hidden": "true" })), (item, [, instances]) => {
      const states = instances.map((instance) => sums.states.get(instance.id) ?? "loading");
      // Most hosts are as they were: one comparison, and nothing is touched.
      const seen = instances.map((instance, index) => `${instance.id} ${states[index]}`).join();
      if (item.dataset.seen === seen) return;
      item.dataset.seen = seen;
      say(item.children[1], counts(states));
      list(/** @type {HTMLElement} */ (item.children[2]), instances, (instance) => instance.id, (instance) => make("span.dot", { click: () => open(instance.id) }), (dot, instance) => {
        const state = sums.states.get(instance.id) ?? "loading";
        set(dot, "data-state", state);
        set(dot, "title", `${instance.id}: ${STATES[state].word}, ${instance.model}`);
        say(dot, ["seed", "target", "loading"].includes(state) ? "" : STATES[state].sign);
      });
    });
  });
}

const NOWHERE = "\u0000";

/** @param {import("./fleet.js").Instance[]} instances @returns {Rack[]} */
function racksOf(instances) {
  /** @type {Map<string, Rack>} */
  const racks = new Map();
  for (const instance of instances) {
    const told = instance.rack !== undefined || instance.zone !== undefined;
    const key = told ? `${instance.zone ?? ""}\n${instance.rack ?? ""}` : NOWHERE;
    const name = told ? [instance.rack ? `rack ${instance.rack}` : "no rack told", instance.zone ? `zone ${instance.zone}` : ""].filter(Boolean).join(", ") : "Hosts";
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

/** @param {string[]} states `3 seeds, 1 relay`, for those who hear the page */
function counts(states) {
  return [...new Set(states)].map((state) => `${states.filter((each) => each === state).length} ${STATES[state].word}`).join(", ");
}
