// Announces changes to screen readers: rarely, and in one sentence.

import { many } from "./format.js";

const MIN_INTERVAL_MS = 6000;

export class Announcer {
  /** @param {HTMLElement} region a polite live region */
  constructor(region) {
    this.region = region;
    this.at = 0;
    /** @type {{live: number, ended: Set<string>, problems: Set<string>} | undefined} */
    this.before = undefined;
  }

  /** @param {import("./fleet.js").Summary} summary @param {import("./problems.js").Problem[]} problems */
  announce(summary, problems) {
    if (performance.now() - this.at < MIN_INTERVAL_MS) return;
    const now = { live: summary.live.length, ended: new Set(summary.ended.map((fork) => fork.id)), problems: new Set(problems.map((each) => each.key)) };
    const { before } = this;
    this.before = now;
    if (!before) return;
    const fresh = problems.filter((each) => !before.problems.has(each.key));
    const ended = summary.ended.filter((fork) => !before.ended.has(fork.id));
    const sentences = [
      fresh.length === 1 ? `${fresh[0].title}: ${fresh[0].reason}.` : fresh.length ? `${many(fresh.length, "new problem")}: ${fresh[0].title}, and others.` : "",
      ended.length ? `${many(ended.length, "fork")} finished, ${ended.filter((fork) => fork.outcome === "forked").length} forked.` : "",
      now.live !== before.live ? `${many(now.live, "fork")} running.` : "",
      before.problems.size && !problems.length ? "No problems any more." : "",
    ].filter(Boolean);
    if (!sentences.length) return;
    this.at = performance.now();
    this.region.textContent = sentences.join(" ");
  }
}
