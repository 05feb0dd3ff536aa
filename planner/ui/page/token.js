// The token of this tab: requested once, shared by both pages, and kept until the tab is closed.

import { byId, setText } from "./dom.js";

const TOKEN = "rfork-token";

/** The token of this tab; if the browser blocks storage, it is requested again after a reload.
 * @param {"get" | "set" | "remove"} action @param {string} [value] @returns {string} */
export function session(action, value = "") {
  try {
    if (action === "set") sessionStorage.setItem(TOKEN, value);
    else if (action === "remove") sessionStorage.removeItem(TOKEN);
    else return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    // The token is still used until the page is closed.
  }
  return "";
}

/** Message for a rejected token. @param {number} status @param {string} token */
export function refusalText(status, token) {
  if (!token) return "";
  return status === 403 ? "This token lacks the role reader." : "The token is not valid.";
}

/** Call `use` with the token entered in the page's form. @param {(token: string) => void} use */
export function onToken(use) {
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = /** @type {HTMLInputElement} */ (byId("token"));
    const token = field.value.trim();
    // Other characters cannot be sent in a header.
    if (!/^[!-~]+$/.test(token)) return setText(byId("token-error"), "A token contains only ASCII characters, without spaces.");
    field.value = "";
    session("set", token);
    use(token);
  });
}
