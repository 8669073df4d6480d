// Shows questions, each above its answer, the newest at the end.
import { $, button, copy, element } from "./dom.js";
import { markdown } from "./markdown.js";

const FACTS = {
  "to the first token": "from the arrival of the question to the first piece of the answer",
  total: "from the arrival of the question to the end of the answer",
  frames: "of videos that the model looked at",
  "frames that could not be decoded": "each shows a neighbour",
  "visual tokens": "that the language model got, and how many there were before",
  "prompt / answer tokens": "of the whole prompt with media, and of the answer",
  "from cache": "tokens of the prompt that were not computed again",
};

export class Shown {
  // A question with room for its answer. names: of its media. onCode: shows it as a program.
  constructor(question, names, onCode) {
    this.answer = "";
    this.facts = [];
    this.text = element("div", { className: "text busy", ariaLive: "polite" });
    this.list = element("dl", { className: "facts" });
    this.note = element("p", { className: "note", hidden: true });
    this.tools = element("p", { className: "tools", hidden: true },
      button("Copy", () => copy(this.answer), { title: "copy the answer" }),
      button("As curl or Python", onCode));
    const asked = element("p", { className: "asked", textContent: question });
    if (names.length) asked.prepend(element("small", { textContent: names.join(", ") }));
    this.item = element("li", { className: "turn" }, asked, this.text, this.note, this.list, this.tools);
    $("turns").append(this.item);
    this.isDue = false;
  }

  add(text) {
    this.answer += text;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.text.replaceChildren(...markdown(this.answer));
    });
  }

  fact(name, value) {
    this.facts.push([name, value]);
    const row = element("div", { title: FACTS[name] ?? "" });
    row.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
    this.list.append(row);
  }

  report(report) {
    this.fact("to the first token", `${report.ttft_s.toFixed(2)} s`);
    this.fact("total", `${report.total_s.toFixed(2)} s`);
    if (report.frames) this.fact("frames", report.frames);
    if (report.substituted_frames) this.fact("frames that could not be decoded", report.substituted_frames);
    const before = report.visual_tokens_before_reduction;
    const reduced = before > report.visual_tokens ? `${before} → ` : "";
    if (before) this.fact("visual tokens", `${reduced}${report.visual_tokens}`);
    this.fact("from cache", report.cached_tokens);
  }

  // isError: of what ended it; that it was stopped is none.
  say(message, isError) {
    Object.assign(this.note, { textContent: message, hidden: false, className: isError ? "note error" : "note" });
    if (isError) this.note.role = "alert";
  }

  end() {
    this.text.classList.remove("busy");
    this.tools.hidden = !this.answer;
  }
}
