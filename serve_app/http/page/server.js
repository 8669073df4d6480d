// Speaks to the server that the page came from.
import { $ } from "./dom.js";

export const headers = () => ($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {});

// {message, code} of what is refused, as far as the server says; null for an answer.
export async function refusal(response) {
  if (response.ok) return null;
  try {
    const { message, code } = JSON.parse(await response.text()).error;
    return { message, code };
  } catch {
    return { message: `${response.status} ${response.statusText}` };
  }
}

export async function getJson(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  if (response.status === 401) throw new Error("the server asks for an API key: see Options");
  const refused = await refusal(response);
  if (refused) throw Object.assign(new Error(refused.message), { code: refused.code });
  return response.json();
}

// A picture of a medium, which is the part of a message.
export async function pictureOf(part) {
  const body = JSON.stringify({ model: $("model").value || undefined, messages: [{ role: "user", content: [part] }] });
  const response = await fetch("v1/epd/picture", { method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body });
  const refused = await refusal(response);
  if (refused) throw new Error(refused.message);
  return response.blob();
}

export function postJson(path, body) {
  const asked = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return getJson(path, asked);
}

// The data of server-sent events, until the stream says that it is done.
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment that keeps the connection alive
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
