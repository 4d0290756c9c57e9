// The operations that /openapi.json describes, as tables.

import { byId, cell, element, row, say } from "./dom.js";

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
  const asked = parameters.map((one) => field(one.name, one.schema, one.required, one.in));
  const [body] = Object.entries(requestBody?.content ?? {});
  const written = body ? [field("body", body[1].schema, true, body[0]), ...fields(body[1].schema)] : [];
  const good = Object.entries(responses).filter(([status]) => status < 300);
  const bad = Object.keys(responses).filter((status) => status >= 300);
  const answers = good.map(([status, one]) => row([], cell("id", status), schemaOf(one), "the answer"));
  if (bad.length) answers.push(row([], cell("id", bad.join(" ")), schemaOf(responses[bad[0]]), "what was wrong and what to do"));
  return element("section", { class: "card operation" },
    element("h2", {}, element("b", {}, method.toUpperCase()), path),
    element("p", { class: "soft" }, description ?? ""),
    table([...asked, ...written, ...answers]),
  );
}

const schemaOf = (answer) => type(answer.content?.["application/json"]?.schema);

function model(name, schema) {
  return element("section", { class: "card model", id: name },
    element("h2", {}, name), element("p", { class: "soft" }, schema.description ?? ""), table(fields(schema)));
}

function fields(schema) {
  return Object.entries(schema.properties ?? {}).map(([name, one]) => field(name, one, schema.required?.includes(name)));
}

function field(name, schema, isRequired, where = null) {
  const place = where === "query" || where === "path" ? null : where;
  const words = [place, isRequired ? "required" : null, schema.description, limits(schema)];
  return row([], cell("id", name), type(schema), words.filter(Boolean).join("; "));
}

function limits(schema) {
  const all = Object.assign({}, ...(schema.anyOf ?? []), schema);
  const length = range(all.minLength, all.maxLength);
  const words = [
    range(all.minimum, all.maximum),
    length && `${length} characters`,
    all.pattern && `pattern ${all.pattern}`,
    all.default !== undefined && all.default !== null && `default ${all.default}`,
  ];
  return words.filter(Boolean).join(", ");
}

function range(least, most) {
  if (most === undefined) return least === undefined ? null : `from ${least}`;
  return least === undefined ? `up to ${most}` : `${least} to ${most}`;
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

function table(rows) {
  return element("div", { class: "scroll" }, element("table", { class: "described" }, element("tbody", {}, ...rows)));
}

show().catch((error) => say(byId("trouble"), `Cannot load the API’s description: ${error.message}. Reload the page in a moment.`));
