// Interactive REST API documentation: Swagger UI with the planner's own OpenAPI document.

import { byId, setText } from "./dom.js";
import { onToken, session, refusalText } from "./token.js";

let token = session("get");

/** @returns {Record<string, string>} */
function authorization() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function load() {
  const sentToken = token;
  /** @type {Response} */
  let response;
  try {
    response = await fetch("openapi.json", { headers: authorization(), cache: "no-store" });
  } catch {
    return setText(byId("api"), "The planner is unreachable. Reload the page to retry.");
  }
  // A token entered meanwhile is sent separately.
  if (sentToken !== token) return;
  if (response.status === 401 || response.status === 403) return requestToken(response.status);
  if (!response.ok) return setText(byId("api"), `The planner returned ${response.status}: ${await response.text()}`);
  byId("token-form").hidden = true;
  // @ts-ignore: from swagger-ui-bundle.js, which is not a module
  SwaggerUIBundle({
    spec: await response.json(),
    dom_id: "#api",
    deepLinking: true,
    tryItOutEnabled: false,
    validatorUrl: null,
    requestInterceptor: (/** @type {{headers: Record<string, string>}} */ request) => {
      request.headers = { ...authorization(), ...request.headers };
      return request;
    },
  });
}

/** @param {number} status */
function requestToken(status) {
  setText(byId("token-error"), refusalText(status, token));
  token = "";
  session("remove");
  byId("token-form").hidden = false;
  byId("token").focus();
}

onToken((entered) => {
  token = entered;
  load();
});

load();
