// Draws what stages did for one request: a lane for each stage of each worker, a box for each group.
const SVG = "http://www.w3.org/2000/svg";
const LANE = 26, HEAD = 22, MIN_BOX = 2;
const MOST_LEFT = 150, LEFT_SHARE = 0.3, TICK = 60; // room for names, at most that share, and for a label
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300];
const ORDER = ["probe", "decode_video", "preprocess", "encode", "transfer", "prefill", "decode"];

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Timeline {
  // onGroup: called with the item and the number of a group of frames that is pressed
  constructor(place, onGroup) {
    Object.assign(this, { place, onGroup });
    this.spans = [];
    this.tokens = [];
    this.begun = null;
    this.isRunning = false;
    this.isDue = false;
    new ResizeObserver(() => this.redraw()).observe(place);
  }

  start() {
    this.spans = [];
    this.tokens = [];
    this.begun = performance.now();
    this.isRunning = true;
    this.place.replaceChildren();
    this.redraw();
  }

  stop() {
    this.isRunning = false;
    this.redraw();
  }

  add(spans) {
    this.spans.push(...spans);
    this.redraw();
  }

  // A piece of the answer, at the time it came to this page.
  token() {
    this.tokens.push((performance.now() - this.begun) / 1000);
    this.redraw();
  }

  // The number of a group's first frame; undefined while groups before it are not encoded.
  firstFrame(item, group) {
    const sizes = new Map();
    for (const span of this.spans) if (span.item === item && span.frames) sizes.set(span.group, span.frames);
    const before = Array.from({ length: group }, (_, number) => sizes.get(number));
    return before.every(Boolean) ? before.reduce((sum, size) => sum + size, 0) : undefined;
  }

  redraw() {
    if (this.isDue || this.begun === null) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
      if (this.isRunning) this.redraw();
    });
  }

  get now() {
    return this.isRunning ? (performance.now() - this.begun) / 1000 : 0;
  }

  draw() {
    const lanes = this.lanes();
    const width = Math.max(this.place.clientWidth, 280);
    const left = Math.min(MOST_LEFT, width * LEFT_SHARE);
    const height = HEAD + LANE * (lanes.length + 1);
    const end = Math.max(0.05, this.now, ...this.spans.map((span) => span.stop_s), ...this.tokens);
    const x = (seconds) => left + (Math.max(0, seconds) / end) * (width - left - 2);
    const drawing = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "timeline" });
    this.drawAxis(drawing, x, end, height, Math.max(2, Math.floor((width - left) / TICK)));
    lanes.forEach(([name, spans], row) => this.drawLane(drawing, x, HEAD + row * LANE, name, spans));
    this.drawTokens(drawing, x, HEAD + lanes.length * LANE);
    this.place.replaceChildren(drawing);
  }

  // [name, spans] by stage and worker, in the order of the pipeline.
  lanes() {
    const lanes = new Map();
    for (const span of this.spans) {
      const name = `${span.stage.replace("_", " ")} · ${span.worker}`;
      if (!lanes.has(name)) lanes.set(name, []);
      lanes.get(name).push(span);
    }
    const place = ([, spans]) => ORDER.indexOf(spans[0].stage);
    return [...lanes].sort((a, b) => place(a) - place(b) || a[0].localeCompare(b[0]));
  }

  drawAxis(drawing, x, end, height, maxTicks) {
    const step = STEPS.find((one) => end / one <= maxTicks) ?? 600;
    for (let at = 0; at <= end; at += step) {
      drawing.append(svg("line", { x1: x(at), x2: x(at), y1: 16, y2: height, class: "grid" }));
      if (x(end) - x(at) < 0.75 * TICK) continue; // it would be cut
      drawing.append(svg("text", { x: x(at) + 3, y: 12 }, `${Number(at.toFixed(2))} s`));
    }
  }

  drawLane(drawing, x, top, name, spans) {
    drawing.append(svg("text", { x: 0, y: top + 17 }, name));
    for (const span of spans) {
      const left = x(span.start_s), wide = Math.max(MIN_BOX, x(span.stop_s) - left - 1);
      const box = svg("g", { class: "box" });
      const label = span.group === null || span.group === undefined ? "" : String(span.group);
      const rect = svg("rect", { x: left, y: top + 3, width: wide, height: LANE - 6, rx: 3, class: span.stage });
      const seconds = (span.stop_s - span.start_s).toFixed(3);
      rect.append(svg("title", {}, `${name}${label && `, group ${label} of item ${span.item}`}: ${seconds} s`));
      box.append(rect);
      if (label) box.addEventListener("click", () => this.onGroup(span.item, span.group));
      if (wide > 9 * label.length + 4) box.append(svg("text", { x: left + 4, y: top + 17 }, label));
      drawing.append(box);
    }
  }

  drawTokens(drawing, x, top) {
    drawing.append(svg("text", { x: 0, y: top + 17 }, "answer · this page"));
    for (const at of this.tokens) {
      drawing.append(svg("line", { x1: x(at), x2: x(at), y1: top + 4, y2: top + LANE - 4, class: "token" }));
    }
  }
}
