// Reads the options of a request, and shows the values that hold where none is set.
import { $ } from "./dom.js";

function numberIn(id) {
  const value = $(id).valueAsNumber;
  return Number.isFinite(value) ? value : undefined;
}

// Raises Error for text that is no JSON.
function schemaIn() {
  const text = $("schema").value.trim();
  if (!text) return undefined;
  try {
    return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } };
  } catch (error) {
    throw new Error(`The schema in Options is no JSON: ${error.message}`);
  }
}

// The fields of a request, beside its messages. part: {start_s, end_s}
export function options(part) {
  return {
    model: $("model").value || undefined,
    max_completion_tokens: numberIn("max-tokens"),
    temperature: numberIn("temperature"),
    seed: numberIn("seed"),
    response_format: schemaIn(),
    epd: {
      fps: numberIn("fps"), num_frames: numberIn("frames"), retention: numberIn("retention"),
      reduction: $("reduction").value || undefined, ...part,
    },
  };
}

// defaults: of the server, from /v1/models.
export function showDefaults(defaults = {}) {
  const show = (id, value, otherwise) => ($(id).placeholder = value === null || value === undefined ? otherwise : String(value));
  show("temperature", defaults.temperature, "the server's");
  show("max-tokens", defaults.max_tokens, "to the context's end");
  show("retention", defaults.retention, "the server's");
  if (defaults.reduction) $("reduction").options[0].textContent = `${defaults.reduction}, the server's`;
}

// What the model took by itself for the last answer.
export function showTaken(report) {
  if (!report.frames) return;
  $("frames").placeholder = `the model's own: ${report.frames}`;
}
