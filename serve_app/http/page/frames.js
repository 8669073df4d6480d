// Shows which frames of the user's own videos were looked at, and which of their tokens the model was given.
// The server names the frames' times, and the page seeks them in the file that it has.
import { button, clock, element } from "./dom.js";

const MOST = 48; // frames that are drawn
const HEIGHT = 72, SEEK_MS = 10_000, SHOW_MS = 250;

// Whether the video shows the frame; on a busy machine one took more than three seconds. A browser may say
// that it has seeked before the new frame has taken the place of the one before.
async function seeked(video, seconds) {
  const shown = new Promise((resolve) => (video.requestVideoFrameCallback ?? resolve).call(video, resolve));
  const isFound = await new Promise((resolve) => {
    const done = (event) => {
      clearTimeout(timer);
      video.removeEventListener("seeked", done);
      resolve(event !== undefined);
    };
    const timer = setTimeout(done, SEEK_MS);
    video.addEventListener("seeked", done);
    video.currentTime = seconds;
  });
  await Promise.race([shown, new Promise((resolve) => setTimeout(resolve, SHOW_MS))]);
  return isFound;
}

// The numbers of those that are drawn, evenly spread.
function chosen(count) {
  if (count <= MOST) return Array.from({ length: count }, (_, number) => number);
  return Array.from({ length: MOST }, (_, number) => Math.round((number * (count - 1)) / (MOST - 1)));
}

// Which cells of a frame's unit are kept; undefined where the server has not said.
function cellsOf(windows, frame) {
  for (const { first_unit: first, num_units: units, frames_per_unit: frames, rows, columns, bits } of windows) {
    const unit = Math.floor(frame / frames) - first;
    if (unit < 0 || unit >= units) continue;
    const bytes = Uint8Array.from(atob(bits), (letter) => letter.charCodeAt(0));
    const isKept = (cell) => (bytes[(unit * rows * columns + cell) >> 3] >> (7 - ((unit * rows * columns + cell) & 7))) & 1;
    return { rows, columns, kept: Array.from({ length: rows * columns }, (_, cell) => isKept(cell) === 1) };
  }
}

// Shades what was dropped, over the picture of a frame.
function shade(canvas, { rows, columns, kept }) {
  const context = canvas.getContext("2d"), width = canvas.width / columns, height = canvas.height / rows;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#000b";
  kept.forEach((isKept, cell) => {
    if (!isKept) context.fillRect((cell % columns) * width, Math.floor(cell / columns) * height, width, height);
  });
}

// Arrows go from frame to frame: the strip is one stop of Tab.
function moveFocus(event, list) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const rows = [...list.querySelectorAll("button")], to = rows[rows.indexOf(document.activeElement) + step];
  if (!to) return;
  event.preventDefault();
  for (const row of rows) row.tabIndex = row === to ? 0 : -1;
  to.focus();
}

export class Frames {
  // player: a video that a click on a frame seeks
  constructor(place, player) {
    Object.assign(this, { place, player });
    this.turn = 0; // of the question; what is still being drawn for an earlier one ends
    this.playable = new Set(); // URLs of videos that this browser shows
    this.strips = new Map(); // by the number of the medium: {windows, shades, title}; a shade for each frame drawn
  }

  clear() {
    this.turn += 1;
    this.strips.clear();
    this.place.replaceChildren();
    this.player.hidden = true;
    this.player.removeAttribute("src");
  }

  // times: middle of each frame's time on screen, seconds. url: of the video.
  async show(item, name, url, times) {
    const turn = this.turn, shown = chosen(times.length);
    const strip = { windows: [], shades: new Map(), title: document.createElement("p") };
    this.strips.set(item, strip);
    const many = shown.length < times.length ? `${shown.length} of ${times.length} frames` : `${times.length} frames`;
    const list = document.createElement("ol");
    list.setAttribute("aria-label", `frames of ${name}`);
    list.addEventListener("keydown", (event) => moveFocus(event, list));
    Object.assign(strip.title, { textContent: `${name}: ${many}`, className: "hint" });
    this.place.append(strip.title, list);
    const video = Object.assign(document.createElement("video"), { src: url, muted: true, preload: "auto" });
    await new Promise((resolve) => {
      video.addEventListener("loadeddata", resolve, { once: true });
      video.addEventListener("error", resolve, { once: true });
    });
    if (!video.videoHeight) {
      strip.title.textContent += "; this browser cannot show the video";
      return;
    }
    this.playable.add(url);
    for (const frame of shown) {
      const isFound = await seeked(video, times[frame]);
      if (turn !== this.turn) return;
      const picture = document.createElement("canvas");
      picture.height = HEIGHT;
      picture.width = Math.max(1, Math.round((HEIGHT * video.videoWidth) / video.videoHeight));
      if (isFound) picture.getContext("2d").drawImage(video, 0, 0, picture.width, picture.height);
      const dropped = picture.cloneNode();
      dropped.className = "dropped";
      dropped.hidden = true;
      const time = clock(times[frame], times.length > 1.5 * times.at(-1)), label = `frame at ${time}`;
      picture.role = "img";
      picture.ariaLabel = label;
      const both = document.createElement("div");
      both.append(picture, dropped);
      const row = button("", () => this.play(url, times[frame]), { title: `play from ${time}`, tabIndex: list.children.length ? -1 : 0 });
      row.append(both, time);
      list.append(element("li", {}, row));
      strip.shades.set(frame, { picture, dropped, name: label });
      this.shadeFrame(strip, frame);
    }
  }

  play(url, seconds) {
    const { player } = this;
    if (!this.playable.has(url)) return;
    if (player.src !== url) player.src = url;
    player.hidden = false;
    player.currentTime = seconds;
    player.scrollIntoView({ block: "nearest" });
  }

  // windows: runs of units of a medium, as the server reports them.
  keep(item, windows) {
    const strip = this.strips.get(item);
    if (!strip) return;
    if (!strip.windows.length) strip.title.textContent += "; what is shaded was dropped before the model";
    strip.windows.push(...windows);
    for (const frame of strip.shades.keys()) this.shadeFrame(strip, frame);
  }

  shadeFrame(strip, frame) {
    const { picture, dropped, name } = strip.shades.get(frame);
    const cells = cellsOf(strip.windows, frame);
    dropped.hidden = !cells;
    if (!cells) return;
    shade(dropped, cells);
    picture.ariaLabel = `${name}, ${cells.kept.filter(Boolean).length} of ${cells.kept.length} tokens kept`;
  }
}
