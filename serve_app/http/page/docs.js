// Shows the operations that openapi.json describes, with the fields of their bodies.

const main = document.getElementById("operations");
const answer = await fetch("openapi.json");
const schema = await answer.json();

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function resolved(kind) {
  return kind?.$ref ? schema.components.schemas[kind.$ref.split("/").at(-1)] : kind;
}

function typeOf(kind) {
  if (!kind) return "";
  if (kind.$ref) return kind.$ref.split("/").at(-1);
  if (kind.enum) return kind.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in kind) return JSON.stringify(kind.const);
  if (kind.anyOf) return [...new Set(kind.anyOf.map(typeOf))].join(" | ");
  if (kind.items) return `${typeOf(kind.items)}[]`;
  return kind.type ?? "any";
}

function fieldsTable(kind) {
  const table = element("table", "", element("caption", kind.title ?? "body"));
  for (const [name, field] of Object.entries(kind.properties ?? {})) {
    const isRequired = kind.required?.includes(name);
    const about = [field.description, "default" in field && `default ${JSON.stringify(field.default)}`];
    table.append(
      element("tr", "", element("th", isRequired ? `${name} (required)` : name),
        element("td", typeOf(field)), element("td", about.filter(Boolean).join("; "))),
    );
  }
  return table;
}

function section(path, method, operation) {
  const made = element("section", "", element("h2", `${method.toUpperCase()} ${path}`));
  made.className = "card";
  made.append(element("p", operation.description ?? operation.summary ?? ""));
  for (const each of operation.parameters ?? []) {
    made.append(element("p", `${each.in} ${each.name}: ${typeOf(each.schema)}`));
  }
  const bodies = Object.values(operation.requestBody?.content ?? {}).map((content) => resolved(content.schema));
  made.append(...bodies.filter((body) => body?.properties).map(fieldsTable));
  return made;
}

const sections = Object.entries(schema.paths).flatMap(([path, operations]) =>
  Object.entries(operations).map(([method, operation]) => section(path, method, operation)));
const records = Object.entries(schema.components.schemas).filter(([, kind]) => kind.properties).map(([name, kind]) =>
  element("details", "", element("summary", name), fieldsTable(kind)));
main.replaceChildren(...sections, element("h2", "Records"), ...records);
