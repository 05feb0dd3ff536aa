// The token that this tab shows to the planner: asked for once, on whichever page, and kept until the tab is closed.

import { at, say } from "./dom.js";

const TOKEN = "rfork-token";

/** The token of this tab; a browser that shuts its storage asks again after a reload.
 * @param {"get" | "set" | "remove"} what @param {string} [value] @returns {string} */
export function session(what, value = "") {
  try {
    if (what === "set") sessionStorage.setItem(TOKEN, value);
    else if (what === "remove") sessionStorage.removeItem(TOKEN);
    else return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    // It is used all the same, until the page is left.
  }
  return "";
}

/** Why the planner refused, in words for whoever showed the token. @param {number} status @param {string} shown */
export function whyRefused(status, shown) {
  if (!shown) return "";
  return status === 403 ? "This token may not look: it needs the role reader." : "The planner does not know this token.";
}

/** Take what is given in the page's form. @param {(token: string) => void} use */
export function onToken(use) {
  at("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = /** @type {HTMLInputElement} */ (at("token"));
    const token = field.value.trim();
    // What cannot stand in a header would throw, or be cut.
    if (!/^[!-~]+$/.test(token)) return say(at("ask-wrong"), "A token has no spaces and no letters beyond ASCII.");
    field.value = "";
    session("set", token);
    use(token);
  });
}
