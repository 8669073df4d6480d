// Shows which frames of the user's own videos were looked at: the server names their times, the page seeks them.
const MOST = 48; // frames that are drawn
const HEIGHT = 72, SEEK_MS = 3000;

function seeked(video, seconds) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      video.removeEventListener("seeked", done);
      resolve();
    };
    const timer = setTimeout(done, SEEK_MS); // a frame that cannot be found stays as the one before
    video.addEventListener("seeked", done);
    video.currentTime = seconds;
  });
}

// At most as many as are drawn, evenly spread.
function chosen(times) {
  if (times.length <= MOST) return times;
  return Array.from({ length: MOST }, (_, number) => times[Math.round((number * (times.length - 1)) / (MOST - 1))]);
}

export class Frames {
  constructor(place) {
    this.place = place;
    this.turn = 0; // of the question; what is still being drawn for an earlier one ends
  }

  clear() {
    this.turn += 1;
    this.place.replaceChildren();
  }

  // times: middle of each frame's time on screen, seconds. url: of the video.
  async show(name, url, times) {
    const turn = this.turn, shown = chosen(times);
    const many = shown.length < times.length ? `${shown.length} of ${times.length} frames` : `${times.length} frames`;
    const strip = document.createElement("ol");
    strip.setAttribute("aria-label", `frames of ${name}`);
    const title = Object.assign(document.createElement("p"), { textContent: `${name}: ${many}`, className: "hint" });
    this.place.append(title, strip);
    const video = Object.assign(document.createElement("video"), { src: url, muted: true, preload: "auto" });
    await new Promise((resolve) => {
      video.addEventListener("loadeddata", resolve, { once: true });
      video.addEventListener("error", resolve, { once: true });
    });
    if (!video.videoHeight) {
      title.textContent += "; this browser cannot show the video";
      return;
    }
    for (const seconds of shown) {
      await seeked(video, seconds);
      if (turn !== this.turn) return;
      const canvas = document.createElement("canvas");
      canvas.height = HEIGHT;
      canvas.width = Math.max(1, Math.round((HEIGHT * video.videoWidth) / video.videoHeight));
      canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
      const item = document.createElement("li");
      item.append(canvas, `${seconds.toFixed(2)} s`);
      strip.append(item);
    }
  }
}
