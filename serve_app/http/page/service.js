// Watches the server: its models and what they know, whether it is ready, its workers and queues.
import { $, element } from "./dom.js";
import { showDefaults } from "./options.js";
import { getJson } from "./server.js";

const STATUS_EVERY_MS = 1000;
const STAGES = { v: ["decode_video", "decode video"], e: ["encode", "encode"], p: ["prefill", "prefill"], d: ["decode", "decode"] };
let models = [];

function showModel() {
  const model = models.find(({ id }) => id === $("model").value);
  showDefaults(model?.defaults);
  $("knows").hidden = !model?.knows;
  if (!model?.knows) return;
  // What stands between backticks is a command.
  const words = model.knows.replace(/\.$/, "").split("`").map((text, index) => (index % 2 ? element("code", { textContent: text }) : text));
  $("knows").replaceChildren(element("strong", { textContent: model.id }), ": ", ...words, `. For real pictures, start the server with a model's name or folder: `,
    element("code", { textContent: "epd serve Qwen/Qwen3-VL-2B-Instruct" }));
}

async function showModels(onLimits) {
  models = (await getJson("v1/models")).data;
  $("model").replaceChildren(...models.map(({ id }) => element("option", { value: id, textContent: id })));
  showModel();
  onLimits(models[0]?.limits ?? {});
}

async function showStatus(onLimits) {
  try {
    if (!models.length) await showModels(onLimits);
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

// onLimits: gets the limits of requests, as soon as the server names them.
export async function watchService(onLimits) {
  $("model").addEventListener("change", showModel);
  for (;;) {
    if (!document.hidden) await showStatus(onLimits);
    await new Promise((resolve) => setTimeout(resolve, STATUS_EVERY_MS));
  }
}
