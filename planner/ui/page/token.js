// The token that this tab shows to the planner: asked for once, on whichever page, and kept until the tab is closed.

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

/** What is wrong with it, or nothing: what cannot stand in a header would throw, or be cut. @param {string} token */
export function wrongWith(token) {
  return /^[!-~]+$/.test(token) ? "" : "A token has no spaces and no letters beyond ASCII.";
}
