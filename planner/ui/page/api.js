// The REST API to read and to try, by Swagger UI, which draws the planner's own OpenAPI document.

import { at, say } from "./dom.js";
import { session, wrongWith } from "./token.js";

/** @returns {Record<string, string>} */
function shown() {
  const token = session("get");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function show() {
  /** @type {Response} */
  let answer;
  try {
    answer = await fetch("openapi.json", { headers: shown(), cache: "no-store" });
  } catch {
    return say(at("api"), "The planner does not answer. Reload the page once it does.");
  }
  if (answer.status === 401 || answer.status === 403) return ask(answer.status);
  if (!answer.ok) return say(at("api"), `The planner answers ${answer.status}: ${await answer.text()}`);
  at("ask-form").hidden = true;
  // @ts-ignore: of swagger-ui-bundle.js, which is no module
  SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#api",
    deepLinking: true,
    tryItOutEnabled: false,
    validatorUrl: null,
    requestInterceptor: (/** @type {{headers: Record<string, string>}} */ request) => {
      request.headers = { ...shown(), ...request.headers };
      return request;
    },
  });
}

/** @param {number} status */
function ask(status) {
  const before = session("get");
  session("remove");
  say(at("ask-wrong"), !before ? "" : status === 403 ? "This token may not look: it needs the role reader." : "The planner does not know this token.");
  at("ask-form").hidden = false;
  at("token").focus();
}

at("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = /** @type {HTMLInputElement} */ (at("token"));
  const token = field.value.trim();
  const wrong = wrongWith(token);
  if (wrong) return say(at("ask-wrong"), wrong);
  field.value = "";
  session("set", token);
  show();
});

show();
