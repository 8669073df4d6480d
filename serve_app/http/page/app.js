// Asks questions over the server's own OpenAI-compatible interface and shows what comes back.
import { Dialogue, newName } from "./dialogue.js";
import { Frames } from "./frames.js";
import { Timeline } from "./timeline.js";

const STATUS_EVERY_MS = 1000;
const STAGES = { v: ["decode_video", "decode video"], e: ["encode", "encode"], p: ["prefill", "prefill"], d: ["decode", "decode"] };

const $ = (id) => document.getElementById(id);
const media = []; // {file, kind, url, uuid, isKept, item}, in the order they are sent; isKept: at the server
const dialogue = new Dialogue();
const timeline = new Timeline($("timeline"));
const frames = new Frames($("looked-at"));
const looked = new Map(); // by the number of a video that is asked about: {times, windows}
let asked = []; // the media of the question that is being answered
let running = null; // the AbortController of the answer that is being read

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const headers = () => ($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {});

// ---- media -------------------------------------------------------------------------------------------------

function addFiles(files) {
  for (const file of files) {
    const kind = file.type.split("/")[0];
    if (kind !== "image" && kind !== "video") {
      showError(`${file.name} is neither a video nor an image.`);
      continue;
    }
    const url = URL.createObjectURL(file);
    const shown = kind === "image" ? element("img", { src: url, alt: "" }) : element("video", { src: url, muted: true });
    const entry = { file, kind, url, uuid: newName(), isKept: false };
    const remove = element("button", { type: "button", textContent: "×", title: `remove ${file.name}` });
    remove.addEventListener("click", () => removeMedia(entry));
    entry.item = element("li", { title: file.name }, shown, remove, file.name);
    media.push(entry);
    $("media").append(entry.item);
  }
}

function removeMedia(entry) {
  if (running && asked.includes(entry)) return; // it is being asked about
  if (dialogue.media.includes(entry)) startOver();
  media.splice(media.indexOf(entry), 1);
  URL.revokeObjectURL(entry.url);
  entry.item.remove();
}

// ---- asking ------------------------------------------------------------------------------------------------

function numberIn(id) {
  const value = $(id).valueAsNumber;
  return Number.isFinite(value) ? value : undefined;
}

async function send(turn) {
  const body = JSON.stringify({
    model: $("model").value || undefined,
    messages: await dialogue.messages(turn),
    stream: true,
    stream_options: { include_usage: true },
    max_completion_tokens: numberIn("max-tokens"),
    temperature: numberIn("temperature"),
    epd: { events: true, fps: numberIn("fps"), num_frames: numberIn("frames"), retention: numberIn("retention") },
  });
  timeline.start();
  return fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body,
    signal: running.signal,
  });
}

async function ask(question) {
  const turn = dialogue.turn(media, question);
  running = new AbortController();
  asked = [...dialogue.media, ...turn.media];
  begin(question);
  try {
    let response = await send(turn);
    let refused = await refusal(response);
    if (refused?.code === "unknown_uuid" && asked.some((entry) => entry.isKept)) {
      for (const entry of asked) entry.isKept = false; // one is forgotten, others may be
      response = await send(turn);
      refused = await refusal(response);
    }
    if (refused) throw new Error(refused.message);
    for (const entry of asked) entry.isKept = true;
    for await (const chunk of eventsOf(response.body)) show(chunk);
    dialogue.add(turn, $("answer").textContent);
  } catch (error) {
    showError(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    end();
  }
}

// The next question knows nothing of the earlier ones.
function startOver() {
  if (running || !dialogue.turns.length) return;
  begin("");
  dialogue.clear();
  end();
  $("history").prepend(element("li", { className: "over", textContent: "started over" }));
}

// {message, code} of what is refused, as far as the server says; null for an answer.
async function refusal(response) {
  if (response.ok) return null;
  try {
    const { message, code } = JSON.parse(await response.text()).error;
    return { message, code };
  } catch {
    return { message: `${response.status} ${response.statusText}` };
  }
}

async function* eventsOf(body) {
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

function show(chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.epd?.events) showSpans(chunk.epd.events);
  const text = chunk.choices[0]?.delta.content;
  if (text) {
    $("answer").textContent += text;
    timeline.token();
  }
  if (chunk.epd && !chunk.epd.events) showReport(chunk.epd);
  if (chunk.usage) addFact("tokens of prompt / answer", `${chunk.usage.prompt_tokens} / ${chunk.usage.completion_tokens}`);
}

function showSpans(spans) {
  timeline.add(spans);
  for (const { item, frame_times_s: times, kept } of spans) {
    if (times?.length) {
      frames.show(item, asked[item].file.name, asked[item].url, times);
      looked.set(item, { times: times.join(), windows: [] });
    }
    if (kept) {
      frames.keep(item, kept);
      looked.get(item).windows.push(...kept);
    }
  }
}

// Of a video that is known to the server nothing is chosen again: what was kept then is kept now.
function recallKept(retention) {
  for (const [item, { times, windows }] of looked) {
    const entry = asked[item];
    if (windows.length) entry.seen = { times, retention, windows };
    else if (entry.seen?.times === times && entry.seen.retention === retention) frames.keep(item, entry.seen.windows);
  }
}

// The answer that is shown moves down to the earlier ones.
function keepAnswer() {
  const text = $("answer").textContent;
  if (!text) return;
  const first = element("span", { textContent: $("answer").dataset.ttft ?? "" });
  const asked = element("span", { textContent: $("asked").textContent });
  $("history").prepend(element("li", {}, asked, first, element("p", { textContent: text })));
}

function begin(question) {
  keepAnswer();
  delete $("answer").dataset.ttft;
  $("asked").textContent = question;
  $("answer").textContent = "";
  $("answer").classList.add("busy");
  $("facts").replaceChildren();
  frames.clear();
  looked.clear();
  $("error").hidden = true;
  $("ask").disabled = true;
  $("stop").hidden = false;
}

function end() {
  running = null;
  timeline.stop();
  $("answer").classList.remove("busy");
  $("ask").disabled = false;
  $("stop").hidden = true;
  $("over").hidden = !dialogue.turns.length;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = false;
}

function addFact(name, value) {
  $("facts").append(element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
}

function showReport(report) {
  recallKept(report.retention);
  $("answer").dataset.ttft = `${report.ttft_s.toFixed(2)} s to the first token`;
  addFact("to the first token", `${report.ttft_s.toFixed(2)} s`);
  addFact("in all", `${report.total_s.toFixed(2)} s`);
  if (report.frames) addFact("frames", report.frames);
  if (report.substituted_frames) addFact("frames that could not be decoded", report.substituted_frames);
  const before = report.visual_tokens_before_reduction;
  const reduced = before > report.visual_tokens ? `${before} → ` : "";
  if (before) addFact("visual tokens", `${reduced}${report.visual_tokens}`);
  addFact("tokens not computed again", report.cached_tokens);
}

// ---- the service -------------------------------------------------------------------------------------------

async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) throw new Error("the server asks for an API key: see Options");
  const refused = await refusal(response);
  if (refused) throw new Error(refused.message);
  return response.json();
}

async function showModels() {
  const models = (await getJson("v1/models")).data;
  const names = models.map(({ id }) => element("option", { value: id, textContent: id }));
  $("model").replaceChildren(...names);
}

async function showStatus() {
  try {
    if (!$("model").options.length) await showModels();
    const status = await getJson("v1/epd/status");
    const many = status.num_requests === 1 ? "1 request" : `${status.num_requests} requests`;
    $("service").textContent = status.is_ready ? `ready, ${many}` : "not ready";
    $("service").className = `service ${status.is_ready ? "ok" : "bad"}`;
    $("topology").textContent = status.topology;
    $("workers").replaceChildren(...status.workers.map(workerCard));
  } catch (error) {
    $("service").textContent = error instanceof TypeError ? "no connection" : error.message;
    $("service").className = "service bad";
  }
}

function workerCard(worker) {
  const roles = [...worker.roles].map((letter) => {
    const [stage, name] = STAGES[letter] ?? ["", letter];
    return element("span", { className: `stage ${stage}`, textContent: name });
  });
  const queue = worker.is_alive ? `${worker.num_running} running, ${worker.num_waiting} waiting` : "gone";
  const card = element("article", { className: worker.is_alive ? "worker" : "worker dead" });
  card.append(element("h3", {}, element("span", { textContent: worker.name }), ...roles), element("p", { textContent: queue }));
  if (worker.kv_usage !== null) card.append(meter("KV blocks", worker.kv_usage));
  if (worker.encoder_cache_usage !== null) card.append(meter("cache", worker.encoder_cache_usage));
  if (worker.num_role_switches) card.append(element("p", { textContent: `${worker.num_role_switches} role switches` }));
  return card;
}

function meter(name, share) {
  const bar = element("progress", { max: 1, value: share });
  bar.setAttribute("aria-label", name);
  return element("div", { className: "meter" }, name, bar, `${Math.round(share * 100)} %`);
}

async function watchStatus() {
  if (!document.hidden) await showStatus();
  setTimeout(watchStatus, STATUS_EVERY_MS);
}

// ---- events ------------------------------------------------------------------------------------------------

$("files").addEventListener("change", () => {
  addFiles($("files").files);
  $("files").value = "";
});
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") addFiles(event.dataTransfer.files);
  });
}
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (question && !running) ask(question);
  else $("question").focus();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("over").addEventListener("click", () => {
  startOver();
  $("question").focus();
});

watchStatus();
