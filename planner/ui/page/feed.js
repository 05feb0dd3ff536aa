// The stream from the planner: opened, read, watched, and opened again. By fetch and not by EventSource,
// which cannot send a token but in its URL, where logs would keep it.

import { session, whyRefused } from "./token.js";

/** Without a word for so long, the stream is taken for dead: the planner sends a comment every 5 s. */
const SILENCE_MS = 16_000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8_000;

/**
 * How the stream is: `opening`, `live`, `gone` (with why, and when it is tried again) or `token`.
 * @typedef {{state: "opening" | "live" | "gone" | "token", why: string, again?: number, since?: number}} Link
 */

export class Feed {
  /**
   * @param {(event: string, data: any) => void} tell  told each event
   * @param {(link: Link) => void} linked  told each change of the connection
   */
  constructor(tell, linked) {
    this.tell = tell;
    this.linked = linked;
    this.wait = FIRST_WAIT_MS;
    this.since = 0;
    /** @type {AbortController | undefined} */
    this.running = undefined;
    /** @type {(() => void) | undefined} */
    this.wake = undefined;
    this.shown = session("get");
  }

  /** Read for as long as the page lives. */
  async run() {
    addEventListener("online", () => this.wake?.());
    for (;;) {
      const why = await this.once();
      if (why === "again") continue;
      if (why === "token") {
        await new Promise((resolve) => (this.wake = () => resolve(undefined)));
        continue;
      }
      this.since ||= Date.now();
      const again = Date.now() + this.wait;
      this.linked({ state: "gone", why, again, since: this.since });
      const wait = this.wait * (0.8 + 0.4 * Math.random());
      this.wait = Math.min(LONGEST_WAIT_MS, this.wait * 2);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, wait);
        this.wake = () => (clearTimeout(timer), resolve(undefined));
      });
    }
  }

  /** Use this token from now on. @param {string} token */
  use(token) {
    this.shown = token;
    this.wake?.();
  }

  /** One connection, to its end; says why it ended. @returns {Promise<string>} */
  async once() {
    const stop = (this.running = new AbortController());
    const { shown } = this;
    let watch = setTimeout(() => stop.abort(), SILENCE_MS);
    try {
      /** @type {Record<string, string>} */
      const headers = shown ? { Authorization: `Bearer ${shown}` } : {};
      const answer = await fetch("feed", { headers, cache: "no-store", credentials: "omit", signal: stop.signal });
      // One that was given meanwhile is not the one that was refused.
      if (answer.status === 401 || answer.status === 403) return shown === this.shown ? this.refused(answer.status) : "again";
      if (!answer.ok || !answer.body) return `it answers ${answer.status}: ${await reason(answer)}`;
      const words = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await words.read();
        if (done) return "it ended the stream: it stops, or starts again";
        clearTimeout(watch);
        watch = setTimeout(() => stop.abort(), SILENCE_MS);
        const events = (rest + value).split("\n\n");
        rest = events.pop() ?? "";
        for (const event of events) this.take(event);
      }
    } catch (error) {
      return stop.signal.aborted ? "it says nothing any more" : "it cannot be reached";
    } finally {
      clearTimeout(watch);
      stop.abort();
    }
  }

  /** @param {string} event  one event, without the empty line behind it */
  take(event) {
    let name = "";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!name) return;
    if (name === "ready") {
      this.wait = FIRST_WAIT_MS;
      this.since = 0;
      this.linked({ state: "live", why: "" });
    }
    this.tell(name, JSON.parse(data));
  }

  /** @param {number} status @returns {string} */
  refused(status) {
    const why = whyRefused(status, this.shown);
    session("remove");
    this.shown = "";
    this.linked({ state: "token", why });
    return "token";
  }
}

/** What the planner says of a refusal. @param {Response} answer */
async function reason(answer) {
  try {
    return String((await answer.json()).detail ?? answer.statusText);
  } catch {
    return answer.statusText || "no reason given";
  }
}
