// Makes elements. Text is only ever set as text: no HTML is parsed, whatever a model or a file name says.
export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function button(name, onClick, properties = {}) {
  const made = element("button", { type: "button", textContent: name, ...properties });
  made.addEventListener("click", onClick);
  return made;
}

// 0:12, 1:02:03; with tenths below a minute, where frames are close.
export function clock(seconds, hasTenths = false) {
  const whole = hasTenths ? Math.round(seconds * 10) / 10 : Math.round(seconds);
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60), rest = whole % 60;
  const shown = hasTenths ? rest.toFixed(1).padStart(4, "0") : String(Math.floor(rest)).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${shown}` : `${minutes}:${shown}`;
}

export function size(bytes) {
  const units = ["bytes", "KB", "MB", "GB"];
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${(bytes / 1000 ** power).toFixed(power && bytes / 1000 ** power < 10 ? 1 : 0)} ${units[power]}`;
}

// Over plain HTTP from another machine a page has no clipboard of its own.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
