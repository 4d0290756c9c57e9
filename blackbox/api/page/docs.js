// The operations that /openapi.json describes, as tables.

import { byId, cell, element, row, say } from "./dom.js";

const LABELS = ["", "type", ""];

async function show() {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const api = await answer.json();
  byId("version").textContent = `HTTP API of ${api.info.title} ${api.info.version}`;
  const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => about(method, path, operation)));
  const models = Object.entries(api.components.schemas).map(([name, schema]) => model(name, schema));
  byId("operations").replaceChildren(...operations, ...models);
}

function about(method, path, { description, parameters = [], requestBody, responses }) {
  const title = element("h2", {}, element("b", {}, method.toUpperCase()), path);
  const asked = parameters.map((one) => fields(one.name, one.schema, one.required, one.in));
  const [body] = Object.entries(requestBody?.content ?? {});
  const written = body ? [[fields("the body", body[1].schema, true, body[0]), ...properties(body[1].schema)]] : [];
  const answers = Object.entries(responses).map(([status, one]) =>
    row(LABELS, cell("id", status), type(one.content?.["application/json"]?.schema), one.description));
  return element("section", { class: "card operation" },
    title,
    element("p", { class: "soft" }, description ?? ""),
    ...table("asked", [...asked, ...written.flat()]),
    ...table("answered", answers),
  );
}

function model(name, schema) {
  return element("section", { class: "card model", id: name },
    element("h2", {}, name), element("p", { class: "soft" }, schema.description ?? ""), ...table("fields", properties(schema)));
}

function properties(schema) {
  return Object.entries(schema.properties ?? {}).map(([name, one]) => fields(name, one, schema.required?.includes(name)));
}

function fields(name, schema, isRequired, where = null) {
  const words = [where === "query" || where === "path" ? null : where, isRequired ? "required" : null, schema.description, limits(schema)];
  return row(LABELS, cell("id", name), type(schema), words.filter(Boolean).join("; "));
}

function limits(schema) {
  const known = { minimum: "from", maximum: "to", minLength: "characters, from", maxLength: "characters, to", maxItems: "items, to", pattern: "like", default: "by default" };
  const flat = Object.assign({}, ...(schema.anyOf ?? []), schema);
  return Object.entries(known).filter(([name]) => flat[name] !== undefined && flat[name] !== null)
    .map(([name, word]) => `${word} ${flat[name]}`).join(" ");
}

function type(schema = {}) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return element("a", { href: `#${name}` }, name);
  }
  if (schema.items) return element("span", {}, "list of ", type(schema.items));
  if (schema.anyOf && !schema.type) {
    const [first, ...rest] = schema.anyOf.filter((one) => one.type !== "null").map(type);
    return element("span", {}, first, ...rest.flatMap((one) => [" or ", one]));
  }
  if (schema.const) return JSON.stringify(schema.const);
  return [schema.type ?? "any"].flat().join(" or ");
}

function table(title, rows) {
  if (!rows.length) return [];
  return [element("h3", {}, title), element("div", { class: "scroll" }, element("table", { class: "list fields-of" }, element("tbody", {}, ...rows)))];
}

show().catch((error) => say(byId("trouble"), `The API’s description cannot be had: ${error.message}. Load the page again in a moment.`));
