// Keeps the media that questions are about: their files, previews, uploads, and the part that is asked about.
import { $, button, clock, element, size } from "./dom.js";
import { getJson, pictureOf } from "./server.js";
import { Upload } from "./upload.js";

// Larger files go up by themselves; smaller ones come with the question.
const MOST_INLINE = 8 << 20;
const BY_NAME = {
  image: ["heic", "heif", "avif", "bmp", "tif", "tiff", "jpg", "jpeg", "png", "gif", "webp"],
  video: ["avi", "mkv", "mov", "m4v", "ts", "mts", "flv", "wmv"],
  audio: ["wav", "mp3", "flac", "m4a", "ogg", "opus"],
};

function kindOf(file) {
  const kind = file.type.split("/")[0], ending = file.name.split(/[?#]/)[0].split(".").at(-1).toLowerCase();
  if (kind in BY_NAME) return kind;
  return Object.keys(BY_NAME).find((each) => BY_NAME[each].includes(ending)) ?? null;
}

// The URL of what was typed: a path is one on the server. null for anything else.
function urlOf(typed) {
  if (/^[a-z]+:/i.test(typed)) return typed;
  const escaped = typed.replace(/[%?#]/g, encodeURIComponent).replace(/^\/+/, "/");
  return typed.startsWith("/") ? new URL(`file:${escaped}`).href : null;
}

// Not crypto.randomUUID: it is for pages from this machine or over TLS.
function newName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export class Medium {
  // A medium is sent once, with a name, and by that name alone from then on; or it is a file of the server's,
  // or has an address that the server reads.
  constructor(file, kind, { uuid = newName(), fileId = null, address = null } = {}) {
    Object.assign(this, { file, kind, uuid, fileId, address, isKept: false, upload: null, duration: null });
    this.url = URL.createObjectURL(file);
  }

  // The part of a message. inline: gives the URL of a file that comes with the question, of those that came before too.
  async part(inline = dataUrl) {
    const type = `${this.kind}_url`;
    if (this.address) return { type, [type]: { url: this.address } };
    if (this.upload || this.fileId) {
      this.fileId ??= await this.upload.done;
      return { type, [type]: { url: this.fileId } };
    }
    if (inline !== dataUrl) return { type, [type]: { url: await inline(this.file) } };
    return this.isKept ? { type, uuid: this.uuid } : { type, uuid: this.uuid, [type]: { url: await dataUrl(this.file) } };
  }

  forgetFile() {
    this.fileId = this.upload = null;
  }
}

export class MediaList {
  // onChange: after a medium came or went. mayRemove: whether one may go now.
  constructor(onChange, mayRemove) {
    Object.assign(this, { onChange, mayRemove, entries: [], limits: {} });
    for (const id of ["from", "to"]) $(id).addEventListener("input", () => this.showPart(id));
  }

  add(files) {
    $("refused").replaceChildren();
    for (const file of files) {
      const kind = kindOf(file);
      const most = this.limits.max_upload_bytes ?? (this.limits.max_body_bytes ?? Infinity) * 0.74;
      if (!kind) this.refuse(`${file.name} is no video, image or sound.`);
      else if (file.size > most) this.refuse(`${file.name} has ${size(file.size)}; this server takes ${size(most)}.`);
      else this.put(new Medium(file, kind));
    }
  }

  // typed: a URL, or a path on the server. Without a known ending it is a video.
  addAddress(typed) {
    $("refused").replaceChildren();
    const address = urlOf(typed), name = typed.split("/").at(-1) || typed;
    if (!address) this.refuse(`${typed} is neither a URL nor a path on the server: begin with https: or with /.`);
    else this.put(new Medium(new File([], name), kindOf({ name, type: "" }) ?? "video", { address }));
  }

  refuse(message) {
    $("refused").append(element("li", { textContent: message }));
  }

  put(medium) {
    this.entries.push(medium);
    medium.item = element("li", { title: medium.file.name }, this.preview(medium), element("span", { textContent: medium.file.name }));
    medium.item.append(button("×", () => this.mayRemove(medium) && this.remove(medium), { className: "remove", title: `remove ${medium.file.name}` }));
    $("media").append(medium.item);
    this.send(medium);
    this.changed();
  }

  // Begins to send a large file, or one that the server has lost.
  send(medium) {
    if (medium.fileId || medium.address || !this.limits.max_upload_bytes || medium.file.size <= MOST_INLINE) return;
    const bar = element("progress", { max: medium.file.size, value: 0, ariaLabel: `sent of ${medium.file.name}` });
    const note = element("small", { role: "status" });
    const toggle = button("Pause", () => (medium.upload.state === "paused" ? medium.upload.start() : medium.upload.pause()));
    const row = element("div", { className: "upload" }, bar, note, toggle);
    medium.upload = new Upload(medium.file, this.limits, () => {
      const { state, sent, error } = medium.upload;
      bar.value = sent;
      note.textContent = error || (state === "done" ? "sent" : `${size(sent)} of ${size(medium.file.size)}`);
      note.className = error ? "bad" : "";
      toggle.textContent = state === "paused" ? "Resume" : "Pause";
      toggle.hidden = bar.hidden = state === "done" || state === "cancelled";
    });
    medium.item.querySelector(".upload")?.remove();
    medium.item.append(row);
    medium.upload.start();
  }

  preview(medium) {
    const { kind, url } = medium;
    const blank = element("div", { className: "blank", textContent: kind === "audio" ? "sound" : kind });
    if (kind === "audio") return blank;
    if (!medium.file.size) {
      this.showPicture(medium, blank);
      return blank;
    }
    const shown = element(kind === "image" ? "img" : "video", { src: url, alt: "", muted: true, preload: "metadata" });
    const replace = () => {
      shown.replaceWith(blank);
      this.showPicture(medium, blank);
    };
    shown.addEventListener("error", replace, { once: true });
    shown.addEventListener("loadedmetadata", () => {
      medium.duration = Number.isFinite(shown.duration) ? shown.duration : null;
      if (!shown.videoHeight) replace();
      this.changed();
    });
    return shown;
  }

  // What this browser cannot show, the server can. It has the medium from then on.
  async showPicture(medium, blank) {
    try {
      const picture = await pictureOf(await medium.part());
      medium.isKept = !medium.address;
      const shown = element("img", { src: URL.createObjectURL(picture), alt: "", className: "from-server" });
      shown.addEventListener("load", () => URL.revokeObjectURL(shown.src), { once: true });
      blank.replaceWith(shown);
    } catch (error) {
      blank.textContent = `${medium.kind}, no preview`;
      blank.title = error.message;
      if (medium.address && this.entries.includes(medium)) this.refuse(error.message);
    }
  }

  remove(medium) {
    medium.upload?.cancel();
    if (medium.fileId) getJson(`v1/files/${medium.fileId}`, { method: "DELETE" }).catch(() => {});
    this.entries.splice(this.entries.indexOf(medium), 1);
    URL.revokeObjectURL(medium.url);
    medium.item.remove();
    this.changed();
  }

  changed() {
    this.showPart();
    this.onChange();
  }

  // ---- the part of the video: `start_s` and `end_s` hold for all videos, so there are handles for one --------

  get only() {
    const videos = this.entries.filter(({ kind }) => kind !== "image");
    return videos.length === 1 && videos[0].duration ? videos[0] : null;
  }

  showPart(moved) {
    const { only } = this;
    $("part").hidden = !only;
    if (!only) return;
    const from = $("from"), to = $("to");
    if (from.max !== String(only.duration)) {
      from.max = to.max = only.duration;
      from.value = 0;
      to.value = only.duration;
    }
    if (moved === "from" && from.valueAsNumber >= to.valueAsNumber) from.value = Math.max(0, to.valueAsNumber - 0.1);
    if (moved === "to" && to.valueAsNumber <= from.valueAsNumber) to.value = from.valueAsNumber + 0.1;
    const { start_s: start, end_s: end } = this.part();
    const shown = `${clock(start ?? 0)} to ${clock(end ?? only.duration)}`;
    $("part-shown").textContent = start === undefined && end === undefined ? `all of it, ${shown}` : shown;
    const preview = only.item?.querySelector("video");
    if (moved && preview) preview.currentTime = $(moved).valueAsNumber;
  }

  part() {
    if (!this.only) return {};
    const from = $("from"), to = $("to");
    return {
      start_s: from.valueAsNumber > 0 ? from.valueAsNumber : undefined,
      end_s: to.valueAsNumber < Number(to.max) - 0.1 ? to.valueAsNumber : undefined,
    };
  }
}
