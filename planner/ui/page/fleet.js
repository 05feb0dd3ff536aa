// What the planner told, and what follows from it: who reads from whom, the state of each, the time left.

/**
 * @typedef {{id: string, model: string, version?: string, rank: string, state: string, host: string, rack?: string, zone?: string, pod?: string,
 *   weights?: string, generation?: number, bytes?: number, chunks?: number, verified?: number, slots?: number, readers?: number,
 *   egress?: number, transports?: string[], storage?: string[], quarantine?: string, quarantined_until?: number,
 *   missing?: boolean, slow?: boolean, silent?: boolean, since?: number, dp?: number}} Instance
 * @typedef {{id: string, instance: string, model: string, version?: string, rank: string, state: string, bytes?: number, chunks?: number,
 *   asked: number, heard: number, reason?: string, plan?: Record<string, number>, storage?: Record<string, number>,
 *   verified?: number, read?: number, rate?: number, sources?: Record<string, number>, rates?: Record<string, number>, link?: number,
 *   transports?: Record<string, string>, phases?: Record<string, number>, held?: Record<string, number>, outcome?: string,
 *   seconds?: number, fallback?: string, reasons?: string[], efficiency?: number, repeated?: number, replans?: number,
 *   lost?: boolean, still?: number, speed?: number}} Fork  `rates`: of its sources, now, or at best once
 *   it has ended; `still`: since when nothing came, by what it told; `speed`: its rate now
 * @typedef {{model: string, version: string | null, rank_key: string, layout_id: string, weights_id: string | null, image_bytes: number, seeds: number,
 *   relays: number, forks_running: number, storage_bytes: number, forked_bytes: number, storage_s: number | null,
 *   fork_s: number | null, seconds_saved: number}} Model
 * @typedef {{scaleup: {scaleup_id: string, model: string, version?: string | null, replicas: number, by: string}, arrived: number, seeds: number,
 *   image_bytes: number, reason: string}} ScaleUp
 * @typedef {{key: string, model: string, version: string, rank: string, instances: Instance[], live: Fork[]}} Group
 * @typedef {{version: string, serving: number, loading: number}} VersionCount  `loading`: instances that get it now
 * @typedef {{model: string, versions: VersionCount[]}} Rollout  a model of which several versions are here
 */

/** A fork tells of its progress about once a second: a rate that is older is none. */
const STALE_S = 5;

export class Fleet {
  constructor() {
    this.version = "";
    this.heartbeat = 5;
    this.ready = true;
    /** Whether it was told in full once. */
    this.known = false;
    this.clock = { told: 0, at: 0 };
    this.empty();
  }

  empty() {
    /** @type {Map<string, Instance>} */
    this.instances = new Map();
    /** @type {Map<string, Fork>} */
    this.forks = new Map();
    /** @type {Model[]} */
    this.models = [];
    /** Seconds that forks took less than storage would have, of models that are gone too; null: not known.
     * @type {number | null} */
    this.saved = null;
    /** @type {ScaleUp[]} */
    this.scaleups = [];
  }

  /** Seconds on the planner's clock. */
  now() {
    return this.clock.told + (performance.now() - this.clock.at) / 1000;
  }

  /**
   * Take in one event. Until `ready`, what the page shows stays as it was: so a planner that is back does not flicker.
   * @param {string} event @param {any} data @returns {Fleet} the fleet to be shown from now on
   */
  take(event, data) {
    if (event === "begin") {
      this.next = new Fleet();
      Object.assign(this.next, { version: data.version, heartbeat: data.heartbeat_s });
    }
    const fleet = this.next ?? this;
    fleet.clock = { told: data.now, at: performance.now() };
    if (event === "change") fleet.change(data);
    if (event === "ready" && this.next) {
      this.next.known = true;
      return this.next;
    }
    return this;
  }

  /** @param {any} data */
  change(data) {
    for (const id of data.gone ?? []) this.instances.delete(id);
    for (const id of data.dropped ?? []) this.forks.delete(id);
    for (const fields of data.instances ?? []) merge(this.instances, fields);
    for (const fields of data.forks ?? []) {
      const fork = merge(this.forks, fields);
      if (fork.rate) delete fork.still;
      else fork.still ??= fork.heard;
    }
    if (data.models) this.models = data.models;
    if (data.seconds_saved !== undefined) this.saved = data.seconds_saved;
    if (data.scaleups) this.scaleups = data.scaleups;
    if (data.ready !== undefined) this.ready = data.ready;
  }

  /** Everything that follows from what was told; made anew for each picture, in one pass. */
  sums() {
    const now = this.now();
    /** @type {Map<string, Fork>} */
    const forkOf = new Map();
    /** @type {Map<string, Fork>} */
    const endOf = new Map();
    /** @type {Map<string, Fork[]>} */
    const readers = new Map();
    /** @type {Fork[]} */
    const live = [];
    /** @type {Fork[]} */
    const ended = [];
    for (const fork of this.forks.values()) {
      if (fork.outcome) {
        ended.push(fork);
        endOf.set(fork.instance, fork);
        continue;
      }
      live.push(fork);
      // What was told long ago says nothing of now.
      fork.speed = now - fork.heard < STALE_S ? (fork.rate ?? 0) : 0;
      forkOf.set(fork.instance, fork);
      for (const source of Object.keys(fork.plan ?? {})) {
        if (source === fork.instance) continue;
        const there = readers.get(source);
        if (there) there.push(fork);
        else readers.set(source, [fork]);
      }
    }
    /** @type {Map<string, Group>} */
    const groups = new Map();
    /** @type {Map<string, string>} */
    const states = new Map();
    for (const instance of this.instances.values()) {
      states.set(instance.id, stateOf(instance, forkOf.get(instance.id), endOf.get(instance.id), readers.has(instance.id)));
      groupOf(groups, instance).instances.push(instance);
    }
    for (const fork of live) groupOf(groups, fork).live.push(fork);
    const rollouts = rolloutsOf(this.instances.values(), states);
    ended.sort((one, other) => endedAt(other) - endedAt(one));
    return { fleet: this, forkOf, endOf, readers, live, ended, groups, states, rollouts, now };
  }
}

/** @typedef {ReturnType<Fleet["sums"]>} Sums */

/** @param {Map<string, Group>} groups @param {{model: string, version?: string, rank: string}} member @returns {Group} */
function groupOf(groups, { model, version = "", rank }) {
  const key = keyOf({ model, version, rank });
  let group = groups.get(key);
  if (!group) groups.set(key, (group = { key, model, version, rank, instances: [], live: [] }));
  return group;
}

/** Instances with one key may share weights. @param {{model: string, version?: string | null, rank: string}} member */
export function keyOf({ model, version, rank }) {
  return `${rank} ${version || "-"} ${model}`;
}

/** Models of which several versions are here, and how many instances have or get each. The version that most have is first.
 * @param {Iterable<Instance>} instances @param {Map<string, string>} states @returns {Rollout[]} */
function rolloutsOf(instances, states) {
  /** @type {Map<string, Map<string, VersionCount>>} */
  const models = new Map();
  for (const { id, model, version } of instances) {
    const state = states.get(id);
    if (!version || state === "failed" || state === "silent") continue;
    let versions = models.get(model);
    if (!versions) models.set(model, (versions = new Map()));
    let count = versions.get(version);
    if (!count) versions.set(version, (count = { version, serving: 0, loading: 0 }));
    if (state === "seed" || state === "draining" || state === "quarantined") count.serving += 1;
    else count.loading += 1;
  }
  return [...models]
    .filter(([, versions]) => versions.size > 1)
    .map(([model, versions]) => ({ model, versions: [...versions.values()].sort((one, other) => other.serving - one.serving || (one.version < other.version ? -1 : 1)) }))
    .sort((one, other) => (one.model < other.model ? -1 : 1));
}

/** @param {Instance} instance @param {Fork | undefined} fork its fork under way @param {Fork | undefined} end its last one
 * @param {boolean} gives whether anybody reads from it @returns {string} a key of `STATES` */
function stateOf(instance, fork, end, gives) {
  if (instance.quarantine) return "quarantined";
  if (instance.missing) return "failed";
  if (instance.silent) return "silent";
  if (instance.state === "draining") return "draining";
  if (fork) {
    if (!Object.keys(fork.plan ?? {}).length) return (instance.verified ?? 0) && !missingChunks(fork) ? "target" : "waiting";
    return gives ? "relay" : "target";
  }
  if (instance.chunks && (instance.verified ?? 0) >= instance.chunks) return "seed";
  if (end && end.outcome !== "forked" && end.outcome !== "fallback") return "failed";
  return instance.state === "serving" ? "seed" : "loading";
}

/** @param {Fork} fork */
function missingChunks(fork) {
  return (fork.chunks ?? 0) - (fork.verified ?? 0);
}

/** What part of its chunks somebody holds, 0 to 1. @param {{verified?: number, chunks?: number}} one */
export function share(one) {
  return one.chunks ? Math.min(1, (one.verified ?? 0) / one.chunks) : 0;
}

/** Seconds until a fork is whole at the rate it has; undefined where nothing comes. @param {Fork} fork */
export function left(fork) {
  return fork.speed ? ((fork.bytes ?? 0) * (1 - share(fork))) / fork.speed : undefined;
}

/** What a fork reads from a source now, in bytes a second, by what it told. @param {Fork} fork @param {string} source */
export function flow(fork, source) {
  return fork.speed && !fork.outcome ? (fork.rates?.[source] ?? 0) : 0;
}

/** When a fork ended, on the planner's clock. @param {Fork} fork */
export function endedAt(fork) {
  return Math.max(fork.heard, fork.asked + (fork.lost ? 0 : (fork.seconds ?? 0)));
}

/**
 * @template {{id: string}} Row
 * @param {Map<string, Row>} table @param {any} fields those that changed; null for one that is no more @returns {Row}
 */
function merge(table, fields) {
  const row = /** @type {any} */ (table.get(fields.id) ?? {});
  for (const [name, value] of Object.entries(fields)) {
    if (value === null) delete row[name];
    else row[name] = value;
  }
  table.set(fields.id, row);
  return row;
}
