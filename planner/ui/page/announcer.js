// Says what changed to those who hear the page: seldom, and in one sentence.

import { many } from "./words.js";

const APART_MS = 6000;

export class Announcer {
  /** @param {HTMLElement} region a polite live region */
  constructor(region) {
    this.region = region;
    this.at = 0;
    /** @type {{live: number, ended: Set<string>, troubles: Set<string>} | undefined} */
    this.before = undefined;
  }

  /** @param {import("./fleet.js").Sums} sums @param {import("./troubles.js").Trouble[]} troubles */
  tell(sums, troubles) {
    if (performance.now() - this.at < APART_MS) return;
    const now = { live: sums.live.length, ended: new Set(sums.ended.map((fork) => fork.id)), troubles: new Set(troubles.map((each) => each.key)) };
    const { before } = this;
    this.before = now;
    if (!before) return;
    const fresh = troubles.filter((each) => !before.troubles.has(each.key));
    const ended = sums.ended.filter((fork) => !before.ended.has(fork.id));
    const said = [
      fresh.length === 1 ? `${fresh[0].what}: ${fresh[0].why}.` : fresh.length ? `${many(fresh.length, "new thing")} need a look: ${fresh[0].what}, and others.` : "",
      ended.length ? `${many(ended.length, "fork")} ended, ${ended.filter((fork) => fork.outcome === "forked").length} forked.` : "",
      now.live !== before.live ? `${many(now.live, "fork")} under way.` : "",
      before.troubles.size && !troubles.length ? "All is well again." : "",
    ].filter(Boolean);
    if (!said.length) return;
    this.at = performance.now();
    this.region.textContent = said.join(" ");
  }
}
