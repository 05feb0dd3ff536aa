// The event stream from the planner, with reconnects. Uses fetch instead of EventSource, which could send a token
// only in its URL, where it would end up in logs.

import { session, refusalText } from "./token.js";

/** Idle time after which the stream counts as dead: the planner sends a comment every 5 s. */
const IDLE_TIMEOUT_MS = 16_000;
const MIN_RETRY_MS = 500;
const MAX_RETRY_MS = 8_000;

/**
 * State of the stream: `opening`, `live`, `disconnected` (with reason and time of the next attempt) or `token`.
 * @typedef {{state: "opening" | "live" | "disconnected" | "token", reason: string, retryAt?: number, since?: number}} Link
 */

export class Feed {
  /**
   * @param {(event: string, data: any) => void} onEvent  called for each event
   * @param {(link: Link) => void} onLink  called for each change of the connection
   */
  constructor(onEvent, onLink) {
    this.onEvent = onEvent;
    this.onLink = onLink;
    this.retryMs = MIN_RETRY_MS;
    this.since = 0;
    /** @type {AbortController | undefined} */
    this.running = undefined;
    /** @type {(() => void) | undefined} */
    this.wake = undefined;
    this.token = session("get");
  }

  /** Read until the page is closed. */
  async run() {
    addEventListener("online", () => this.wake?.());
    for (;;) {
      const reason = await this.connect();
      if (reason === "retry") continue;
      if (reason === "token") {
        await new Promise((resolve) => (this.wake = () => resolve(undefined)));
        continue;
      }
      this.since ||= Date.now();
      const retryAt = Date.now() + this.retryMs;
      this.onLink({ state: "disconnected", reason, retryAt, since: this.since });
      const delay = this.retryMs * (0.8 + 0.4 * Math.random());
      this.retryMs = Math.min(MAX_RETRY_MS, this.retryMs * 2);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, delay);
        this.wake = () => (clearTimeout(timer), resolve(undefined));
      });
    }
  }

  /** Use this token from now on. @param {string} token */
  setToken(token) {
    this.token = token;
    this.wake?.();
  }

  /** One connection, until it ends; returns why it ended. @returns {Promise<string>} */
  async connect() {
    const stop = (this.running = new AbortController());
    const { token } = this;
    let watch = setTimeout(() => stop.abort(), IDLE_TIMEOUT_MS);
    try {
      /** @type {Record<string, string>} */
      const headers = token ? { Authorization: `Bearer ${token}` } : {};
      const response = await fetch("feed", { headers, cache: "no-store", credentials: "omit", signal: stop.signal });
      // A token entered meanwhile is not the rejected one.
      if (response.status === 401 || response.status === 403) return token === this.token ? this.reject(response.status) : "retry";
      if (!response.ok || !response.body) return `status ${response.status}: ${await problemDetail(response)}`;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return "it closed the stream";
        clearTimeout(watch);
        watch = setTimeout(() => stop.abort(), IDLE_TIMEOUT_MS);
        const events = (rest + value).split("\n\n");
        rest = events.pop() ?? "";
        for (const event of events) this.dispatch(event);
      }
    } catch (error) {
      return stop.signal.aborted ? "no response" : "unreachable";
    } finally {
      clearTimeout(watch);
      stop.abort();
    }
  }

  /** @param {string} event  one event, without the blank line after it */
  dispatch(event) {
    let name = "";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!name) return;
    if (name === "ready") {
      this.retryMs = MIN_RETRY_MS;
      this.since = 0;
      this.onLink({ state: "live", reason: "" });
    }
    this.onEvent(name, JSON.parse(data));
  }

  /** @param {number} status @returns {string} */
  reject(status) {
    const reason = refusalText(status, this.token);
    session("remove");
    this.token = "";
    this.onLink({ state: "token", reason });
    return "token";
  }
}

/** Detail of a problem response. @param {Response} response */
async function problemDetail(response) {
  try {
    return String((await response.json()).detail ?? response.statusText);
  } catch {
    return response.statusText || "no detail";
  }
}
