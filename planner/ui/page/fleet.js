// The fleet as reported by the planner, and derived values: states, readers, rates and remaining times.

/**
 * @typedef {{id: string, model: string, version?: string, rank: string, state: string, host: string, rack?: string, zone?: string, pod?: string,
 *   weights?: string, generation?: number, bytes?: number, chunks?: number, verified?: number, slots?: number, readers?: number,
 *   egress?: number, transports?: string[], storage?: string[], quarantine?: string, quarantined_until?: number,
 *   missing?: boolean, slow?: boolean, silent?: boolean, since?: number, dp?: number, holder?: boolean}} Instance
 * @typedef {{id: string, instance: string, model: string, version?: string, rank: string, state: string, bytes?: number, chunks?: number,
 *   requested_at: number, seen_at: number, reason?: string, plan?: Record<string, number>, storage?: Record<string, number>,
 *   verified?: number, read?: number, rate?: number, sources?: Record<string, number>, rates?: Record<string, number>, link?: number,
 *   transports?: Record<string, string>, phases?: Record<string, number>, source_rate_limits?: Record<string, number>, outcome?: string,
 *   seconds?: number, fallback?: string, reasons?: string[], efficiency?: number, repeated?: number, replans?: number,
 *   abandoned?: boolean, stalled_since?: number, speed?: number}} Fork  `rates`: of its sources, current
 *   or, once finished, maximum; `stalled_since`: time since which it reports no progress; `speed`: current rate
 * @typedef {{model: string, version: string | null, rank_key: string, layout_id: string, weights_id: string | null, image_bytes: number, seeds: number,
 *   relays: number, forks_running: number, storage_bytes: number, forked_bytes: number, storage_s: number | null,
 *   fork_s: number | null, seconds_saved: number}} Model
 * @typedef {{scaleup: {scaleup_id: string, model: string, version?: string | null, replicas: number, announced_by: string}, arrived_count: number, seeds: number,
 *   image_bytes: number, reason: string}} ScaleUp
 * @typedef {{key: string, model: string, version: string, rank: string, instances: Instance[], live: Fork[]}} Group
 * @typedef {{version: string, serving: number, loading: number}} VersionCount  `loading`: instances that are receiving it
 * @typedef {{model: string, versions: VersionCount[]}} Rollout  a model with several versions
 */

/** Forks report progress about once a second; an older rate counts as 0. */
const STALE_S = 5;

export class Fleet {
  constructor() {
    this.version = "";
    this.heartbeat = 5;
    this.ready = true;
    /** Whether the complete state was received. */
    this.complete = false;
    this.clock = { planner: 0, local: 0 };
    this.empty();
  }

  empty() {
    /** @type {Map<string, Instance>} */
    this.instances = new Map();
    /** @type {Map<string, Fork>} */
    this.forks = new Map();
    /** @type {Model[]} */
    this.models = [];
    /** Seconds saved by forking instead of reading storage, including removed models; null: unknown.
     * @type {number | null} */
    this.secondsSaved = null;
    /** @type {ScaleUp[]} */
    this.scaleups = [];
  }

  /** Seconds on the planner's clock. */
  now() {
    return this.clock.planner + (performance.now() - this.clock.local) / 1000;
  }

  /**
   * Handle one event. Until `ready`, the page keeps its contents, so that a reconnect does not flicker.
   * @param {string} event @param {any} data @returns {Fleet} the fleet to show from now on
   */
  handle(event, data) {
    if (event === "begin") {
      this.next = new Fleet();
      Object.assign(this.next, { version: data.version, heartbeat: data.heartbeat_s });
    }
    const fleet = this.next ?? this;
    fleet.clock = { planner: data.now, local: performance.now() };
    if (event === "change") fleet.apply(data);
    if (event === "ready" && this.next) {
      this.next.complete = true;
      return this.next;
    }
    return this;
  }

  /** @param {any} data */
  apply(data) {
    for (const id of data.removed ?? []) this.instances.delete(id);
    for (const id of data.dropped ?? []) this.forks.delete(id);
    for (const fields of data.instances ?? []) merge(this.instances, fields);
    for (const fields of data.forks ?? []) {
      const fork = merge(this.forks, fields);
      if (fork.rate) delete fork.stalled_since;
      else fork.stalled_since ??= fork.seen_at;
    }
    if (data.models) this.models = data.models;
    if (data.seconds_saved !== undefined) this.secondsSaved = data.seconds_saved;
    if (data.scaleups) this.scaleups = data.scaleups;
    if (data.ready !== undefined) this.ready = data.ready;
  }

  /** All derived values, computed for each frame in one pass. */
  summarize() {
    const now = this.now();
    /** @type {Map<string, Fork>} */
    const forkOf = new Map();
    /** @type {Map<string, Fork>} */
    const lastForkOf = new Map();
    /** @type {Map<string, Fork[]>} */
    const readers = new Map();
    /** @type {Fork[]} */
    const live = [];
    /** @type {Fork[]} */
    const ended = [];
    for (const fork of this.forks.values()) {
      if (fork.outcome) {
        ended.push(fork);
        lastForkOf.set(fork.instance, fork);
        continue;
      }
      live.push(fork);
      // An old rate is not the current one.
      fork.speed = now - fork.seen_at < STALE_S ? (fork.rate ?? 0) : 0;
      forkOf.set(fork.instance, fork);
      for (const source of Object.keys(fork.plan ?? {})) {
        if (source === fork.instance) continue;
        const known = readers.get(source);
        if (known) known.push(fork);
        else readers.set(source, [fork]);
      }
    }
    /** @type {Map<string, Group>} */
    const groups = new Map();
    /** @type {Map<string, string>} */
    const states = new Map();
    for (const instance of this.instances.values()) {
      states.set(instance.id, stateOf(instance, forkOf.get(instance.id), lastForkOf.get(instance.id), readers.has(instance.id)));
      groupOf(groups, instance).instances.push(instance);
    }
    for (const fork of live) groupOf(groups, fork).live.push(fork);
    const rollouts = rolloutsOf(this.instances.values(), states);
    ended.sort((one, other) => endedAt(other) - endedAt(one));
    return { fleet: this, forkOf, lastForkOf, readers, live, ended, groups, states, rollouts, now };
  }
}

/** @typedef {ReturnType<Fleet["summary"]>} Summary */

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

/** Models with several versions, and the number of engines that serve or load each: a holder keeps old versions too. The most served version is first.
 * @param {Iterable<Instance>} instances @param {Map<string, string>} states @returns {Rollout[]} */
function rolloutsOf(instances, states) {
  /** @type {Map<string, Map<string, VersionCount>>} */
  const models = new Map();
  for (const { id, model, version, holder } of instances) {
    const state = states.get(id);
    if (holder || !version || state === "failed" || state === "silent") continue;
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

/** @param {Instance} instance @param {Fork | undefined} fork its running fork @param {Fork | undefined} end its last one
 * @param {boolean} hasReaders whether a fork reads from it @returns {string} a key of `STATES` */
function stateOf(instance, fork, end, hasReaders) {
  if (instance.quarantine) return "quarantined";
  if (instance.missing) return "failed";
  if (instance.silent) return "silent";
  if (instance.state === "draining") return "draining";
  if (fork) {
    if (!Object.keys(fork.plan ?? {}).length) return (instance.verified ?? 0) && !missingChunks(fork) ? "target" : "waiting";
    return hasReaders ? "relay" : "target";
  }
  if (instance.chunks && (instance.verified ?? 0) >= instance.chunks) return instance.holder ? "holder" : "seed";
  if (end && end.outcome !== "forked" && end.outcome !== "fallback") return "failed";
  return instance.state === "serving" ? "seed" : "loading";
}

/** @param {Fork} fork */
function missingChunks(fork) {
  return (fork.chunks ?? 0) - (fork.verified ?? 0);
}

/** Verified fraction of the chunks, 0 to 1. @param {{verified?: number, chunks?: number}} one */
export function verifiedShare(one) {
  return one.chunks ? Math.min(1, (one.verified ?? 0) / one.chunks) : 0;
}

/** Seconds until a fork completes at its current rate; undefined if nothing arrives. @param {Fork} fork */
export function secondsLeft(fork) {
  return fork.speed ? ((fork.bytes ?? 0) * (1 - verifiedShare(fork))) / fork.speed : undefined;
}

/** Current rate at which a fork reads from a source, in bytes per second, as reported. @param {Fork} fork @param {string} source */
export function sourceRate(fork, source) {
  return fork.speed && !fork.outcome ? (fork.rates?.[source] ?? 0) : 0;
}

/** Time at which a fork finished, on the planner's clock. @param {Fork} fork */
export function endedAt(fork) {
  return Math.max(fork.seen_at, fork.requested_at + (fork.abandoned ? 0 : (fork.seconds ?? 0)));
}

/**
 * @template {{id: string}} Row
 * @param {Map<string, Row>} table @param {any} fields changed fields; null for a removed one @returns {Row}
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
