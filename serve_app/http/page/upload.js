// Sends a large file in parts (/v1/uploads). A part that is cut is sent again alone; so is one after a reload.
import { headers, getJson, postJson } from "./server.js";

const PART_BYTES = 8 << 20, MOST_ATTEMPTS = 5, FIRST_PAUSE_MS = 500;
const KEPT_S = 24 * 3600;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// fetch does not tell how much of a body was sent.
function post(path, form, onSent, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => onSent(event.loaded);
    request.onload = () => resolve(request);
    request.onerror = () => reject(new TypeError("the connection was lost"));
    request.onabort = () => reject(new DOMException("", "AbortError"));
    signal.addEventListener("abort", () => request.abort(), { once: true });
    request.send(form);
  });
}

export class Upload {
  // onChange: called when `sent`, `state` or `error` change. state: sending, paused, done, cancelled.
  constructor(file, limits, onChange) {
    this.file = file;
    this.partBytes = Math.min(PART_BYTES, limits.max_part_bytes);
    this.onChange = onChange;
    this.key = `upload ${file.name} ${file.size} ${file.lastModified}`;
    this.sent = 0;
    this.state = "paused";
    this.error = "";
    this.done = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }));
    this.done.catch(() => {}); // who waits for it hears of it
  }

  set(state, error = "") {
    Object.assign(this, { state, error });
    this.onChange();
  }

  // {id, parts}: an unfinished upload of this file, or a new one. parts: ids by their place.
  async begun() {
    const before = JSON.parse(localStorage.getItem(this.key) ?? "null");
    if (before && before.partBytes === this.partBytes) {
      const state = await getJson(`v1/uploads/${before.id}`).catch(() => null);
      const there = new Set(state?.status === "pending" ? state.parts.map((part) => part.id) : []);
      if (there.size) return { ...before, parts: before.parts.map((id) => (there.has(id) ? id : null)) };
    }
    const { file } = this;
    const { id } = await postJson("v1/uploads", {
      filename: file.name.slice(-200) || "file", bytes: file.size, purpose: "user_data", mime_type: file.type,
      expires_after: { anchor: "created_at", seconds: KEPT_S },
    });
    return { id, partBytes: this.partBytes, parts: Array(Math.ceil(file.size / this.partBytes)).fill(null) };
  }

  async start() {
    if (this.state !== "paused") return;
    this.aborter = new AbortController();
    const { signal } = this.aborter;
    this.set("sending");
    try {
      this.kept ??= await this.begun();
      await this.sendParts(signal);
      const { file } = await postJson(`v1/uploads/${this.kept.id}/complete`, { part_ids: this.kept.parts });
      localStorage.removeItem(this.key);
      this.set("done");
      this.resolve(file.id);
    } catch (error) {
      if (signal.aborted && this.state === "cancelled") this.discard();
      if (signal.aborted) return; // paused or cancelled meanwhile
      if (error.code === "not_found") this.forget();
      this.set("paused", error.message);
      if (error.code === "request_limit") this.reject(error);
    }
  }

  async sendParts(signal) {
    const { parts } = this.kept;
    for (const [place, id] of parts.entries()) {
      this.sent = place * this.partBytes;
      this.onChange();
      parts[place] = id ?? (await this.sendPart(place, signal));
      localStorage.setItem(this.key, JSON.stringify(this.kept));
    }
    this.sent = this.file.size;
  }

  async sendPart(place, signal) {
    const start = place * this.partBytes;
    for (let attempt = 1; ; attempt += 1) {
      signal.throwIfAborted();
      const form = new FormData();
      form.append("data", this.file.slice(start, start + this.partBytes));
      try {
        const reply = await post(`v1/uploads/${this.kept.id}/parts`, form, (sent) => {
          this.sent = Math.min(start + sent, this.file.size);
          this.onChange();
        }, signal);
        if (reply.status === 200) return JSON.parse(reply.responseText).id;
        const { message, code } = JSON.parse(reply.responseText).error;
        if (reply.status < 500) throw Object.assign(new Error(message), { code });
        if (attempt === MOST_ATTEMPTS) throw new Error(message);
      } catch (error) {
        if (!(error instanceof TypeError) || attempt === MOST_ATTEMPTS) throw error;
      }
      await pause(FIRST_PAUSE_MS * 2 ** (attempt - 1));
    }
  }

  pause() {
    if (this.state !== "sending") return;
    this.set("paused");
    this.aborter.abort();
  }

  forget() {
    this.kept = undefined;
    localStorage.removeItem(this.key);
  }

  cancel() {
    if (this.state === "done" || this.state === "cancelled") return;
    this.set("cancelled");
    if (this.aborter && !this.aborter.signal.aborted) this.aborter.abort(); // and then it is discarded
    else this.discard();
    this.reject(new Error("the upload was cancelled"));
  }

  discard() {
    if (this.kept) postJson(`v1/uploads/${this.kept.id}/cancel`, {}).catch(() => {});
    this.forget();
  }
}
