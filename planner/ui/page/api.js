// The REST API to read and to try, by Swagger UI, which draws the planner's own OpenAPI document.

import { at, say } from "./dom.js";
import { onToken, session, whyRefused } from "./token.js";

let token = session("get");

/** @returns {Record<string, string>} */
function shown() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function show() {
  const tried = token;
  /** @type {Response} */
  let answer;
  try {
    answer = await fetch("openapi.json", { headers: shown(), cache: "no-store" });
  } catch {
    return say(at("api"), "The planner does not answer. Reload the page once it does.");
  }
  // One that was given meanwhile is tried by itself.
  if (tried !== token) return;
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
  say(at("ask-wrong"), whyRefused(status, token));
  token = "";
  session("remove");
  at("ask-form").hidden = false;
  at("token").focus();
}

onToken((given) => {
  token = given;
  show();
});

show();
