// Writes a request as a command of curl, and as Python with OpenAI's client.
import { $, copy } from "./dom.js";

const MARK = "\u0000";

// A file that comes with the question stands for its bytes; what runs reads it where it lies.
export const standIn = async (file) => `${MARK}${file.type || "application/octet-stream"}${MARK}${file.name}${MARK}`;

const base = () => new URL("v1", document.baseURI).href;

export function asCurl(body) {
  const files = [];
  const numbered = (_, value) => (typeof value === "string" && value.startsWith(MARK) ? `${MARK}${files.push(value) - 1}${MARK}` : value);
  const escaped = JSON.stringify(body, numbered, 2).replace(/\\(?!u0000)|[$`]/g, "\\$&");
  const quoted = (name) => `'${name.replaceAll("'", "'\\''")}'`;
  const data = escaped.replace(/\\u0000(\d+)\\u0000/g, (_, number) => {
    const [, type, name] = files[number].split(MARK);
    return `data:${type};base64,$(base64 -w0 -- ${quoted(name)})`;
  });
  return `curl -s ${base()}/chat/completions -H "Authorization: Bearer $EPD_API_KEY" \\
  -H 'Content-Type: application/json' -d @- <<END
${data}
END
`;
}

function python(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((each) => `${inner}${python(each, inner)},\n`).join("")}${indent}]` : "[]";
  if (typeof value === "object") {
    const rows = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${python(each, inner)},\n`);
    return rows.length ? `{\n${rows.join("")}${indent}}` : "{}";
  }
  if (typeof value === "string" && value.startsWith(MARK)) {
    const [, type, name] = value.split(MARK);
    return `data_url(${JSON.stringify(name)}, ${JSON.stringify(type)})`;
  }
  return JSON.stringify(value);
}

export function asPython(body) {
  const { model, messages, epd, ...others } = body;
  const more = Object.entries(others).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");
  return `import base64
import os
from pathlib import Path

from openai import OpenAI


def data_url(path, media_type):
    return f"data:{media_type};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


client = OpenAI(base_url=${JSON.stringify(base())}, api_key=os.environ.get("EPD_API_KEY", "none"))
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${python(messages, "    ")},
${more}    extra_body={"epd": ${python(epd, "    ")}},
)
print(answer.choices[0].message.content)
`;
}

// Shows a request in the dialog. body: as it is sent, with stand-ins.
export function showCode(body) {
  const plain = JSON.parse(JSON.stringify(body)); // without what is undefined
  const show = (write) => ($("code-text").textContent = write(plain));
  $("as-curl").onclick = () => show(asCurl);
  $("as-python").onclick = () => show(asPython);
  $("copy-code").onclick = () => copy($("code-text").textContent);
  $("close-code").onclick = () => $("code").close();
  show(asCurl);
  $("code").showModal();
}
