// Asks questions over the server's own OpenAI-compatible interface and shows what comes back.
import { showCode, standIn } from "./code.js";
import { Shown } from "./conversation.js";
import { Dialogue } from "./dialogue.js";
import { $, element } from "./dom.js";
import { Frames } from "./frames.js";
import { keep, kept } from "./kept.js";
import { MediaList, Medium } from "./media.js";
import { options, showTaken } from "./options.js";
import { eventsOf, headers, refusal } from "./server.js";
import { watchService } from "./service.js";
import { Timeline } from "./timeline.js";

const dialogue = new Dialogue();
const frames = new Frames($("looked-at"), $("player"));
const timeline = new Timeline($("timeline"), (item, group) => {
  const time = looked.get(item)?.times[timeline.firstFrame(item, group)];
  if (time !== undefined) frames.play(asked[item].url, time);
});
const media = new MediaList(showState, (entry) => {
  if (running && asked.includes(entry)) return false; // it is being asked about
  if (dialogue.media.includes(entry)) forget();
  return true;
});
const looked = new Map(); // by the number of a video that is asked about: {times, windows}
let asked = []; // the media of the question that is being answered
let running = null; // the AbortController of the answer that is being read
let shown = null; // the question that is shown last

// ---- asking ------------------------------------------------------------------------------------------------

async function send(turn, fields) {
  const messages = await dialogue.messages(turn, $("system").value.trim());
  running.signal.throwIfAborted();
  timeline.start();
  return fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({
      ...fields, messages, stream: true, stream_options: { include_usage: true }, epd: { ...fields.epd, events: true },
    }),
    signal: running.signal,
  });
}

// Whether the server has lost some of the media, which are then sent again.
function isLost(refused) {
  if (refused?.code === "unknown_uuid" && asked.some((entry) => entry.isKept)) {
    for (const entry of asked) entry.isKept = false; // one is forgotten, others may be
    return true;
  }
  const files = asked.filter((entry) => entry.fileId && entry.file.size);
  if (refused?.code !== "not_found" || !files.length) return false;
  for (const entry of files) {
    entry.forgetFile();
    media.send(entry);
  }
  return true;
}

async function ask(question) {
  const turn = dialogue.turn(media.entries, question);
  running = new AbortController();
  asked = [...dialogue.media, ...turn.media];
  begin(turn);
  try {
    const fields = options(media.part());
    let response = await send(turn, fields);
    let refused = await refusal(response);
    if (isLost(refused)) {
      response = await send(turn, fields);
      refused = await refusal(response);
    }
    if (refused) throw new Error(refused.message);
    for (const entry of asked) entry.isKept = true;
    for await (const chunk of eventsOf(response.body)) show(chunk);
    Object.assign(turn, { answer: shown.answer, facts: shown.facts });
    dialogue.add(turn);
    keep(dialogue.turns).catch(() => {}); // a private window keeps nothing
  } catch (error) {
    const isStopped = error.name === "AbortError";
    shown.say(isStopped ? "Stopped." : error.message, !isStopped);
    $("question").value ||= question;
  } finally {
    end();
  }
}

function startOver() {
  forget();
  $("turns").replaceChildren();
  frames.clear();
  showState();
}

// The next question knows nothing of the earlier ones, which stay in view.
function forget() {
  dialogue.clear();
  keep([]).catch(() => {});
  document.querySelector(".over-here")?.remove();
  $("turns").append(element("li", { className: "over-here", textContent: "The next question knows nothing of these." }));
}

function show(chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.epd?.events) showSpans(chunk.epd.events);
  const text = chunk.choices[0]?.delta.content;
  if (text) {
    shown.add(text);
    timeline.token();
  }
  if (chunk.epd && !chunk.epd.events) {
    recallKept(chunk.epd.retention);
    shown.report(chunk.epd);
    showTaken(chunk.epd);
  }
  if (chunk.usage) shown.fact("prompt / answer tokens", `${chunk.usage.prompt_tokens} / ${chunk.usage.completion_tokens}`);
}

function showSpans(spans) {
  timeline.add(spans);
  for (const { item, frame_times_s: times, kept: windows } of spans) {
    if (times?.length) {
      frames.show(item, asked[item].file.name, asked[item].url, times);
      looked.set(item, { times, windows: [] });
    }
    if (windows) {
      frames.keep(item, windows);
      looked.get(item).windows.push(...windows);
    }
  }
}

// Of a video that is known to the server nothing is chosen again: what was kept then is kept now.
function recallKept(retention) {
  for (const [item, { times, windows }] of looked) {
    const entry = asked[item];
    if (windows.length) entry.seen = { times, retention, windows };
    else if (entry.seen?.times.join() === times.join() && entry.seen.retention === retention) frames.keep(item, entry.seen.windows);
  }
}

function shownTurn(turn) {
  const made = new Shown(turn.question, turn.media.map(({ file }) => file.name), () => showAsCode(turn));
  showState();
  return made;
}

async function showAsCode(turn) {
  const messages = await dialogue.messages(turn, $("system").value.trim(), standIn);
  const { model, epd, ...others } = options(media.part());
  showCode({ model, messages, ...others, epd });
}

function begin(turn) {
  shown = shownTurn(turn);
  $("question").value = "";
  $("refused").replaceChildren();
  frames.clear();
  looked.clear();
  shown.item.scrollIntoView({ block: "nearest" });
  $("ask").disabled = true;
  $("stop").hidden = false;
}

function end() {
  running = null;
  timeline.stop();
  shown.end();
  shown.item.scrollIntoView({ block: "nearest" });
  $("ask").disabled = false;
  $("stop").hidden = true;
  showState();
}

function showState() {
  $("over").hidden = !$("turns").children.length || running !== null;
  $("first").hidden = $("turns").children.length > 0 || media.entries.length > 0;
}

// ---- what an earlier visit left ----------------------------------------------------------------------------

async function recall() {
  for (const turn of await kept()) {
    turn.media = turn.media.map(({ file, kind, ...names }) => Object.assign(new Medium(file, kind, names), { isKept: true }));
    turn.media.forEach((medium) => media.put(medium));
    shown = shownTurn(turn);
    shown.add(turn.answer);
    for (const [name, value] of turn.facts) shown.fact(name, value);
    shown.end();
    dialogue.add(turn);
  }
}

// ---- events ------------------------------------------------------------------------------------------------

async function addSample() {
  if (!media.entries.length) {
    const response = await fetch("page/sample.mp4");
    media.add([new File([await response.blob()], "sample.mp4", { type: "video/mp4" })]);
  }
  $("question").focus();
}

$("sample").addEventListener("click", addSample);
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", async () => {
    await addSample();
    $("question").value = example.textContent;
    $("form").requestSubmit();
  });
}
function addTyped() {
  const typed = $("address").value.trim();
  $("address").value = "";
  if (typed) media.addAddress(typed);
}

$("address").addEventListener("change", addTyped);
$("address").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // it asks nothing
  addTyped();
});
// A number out of range may stand in the closed fold, where the browser could not show it.
$("form").addEventListener("invalid", ({ target }) => (target.closest("details").open = true), true);
$("files").addEventListener("change", () => {
  media.add($("files").files);
  $("files").value = "";
});
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") media.add(event.dataTransfer.files);
  });
}
document.addEventListener("paste", (event) => media.add(event.clipboardData.files));
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
$("details").open = localStorage.getItem("details") === "open";
$("details").addEventListener("toggle", () => localStorage.setItem("details", $("details").open ? "open" : "closed"));

recall().catch(() => {}); // a private window keeps nothing
watchService((limits) => (media.limits = limits));
