// Slider over the moments of a log.
import { by, clock, h, s } from "./elements.js";

const SPEEDS = [1, 5, 20, 100];
const LONGEST_MS = 1500, SHORTEST_MS = 40;

export class Player {
  // show(frame) draws a moment; it returns a promise.
  constructor(index, show) {
    this.index = index;
    this.show = show;
    this.frame = 0;
    this.isPlaying = false;
    this.last = index.at_s.length - 1;
    this.speed = 5;
    this.play = h("button", { id: "play", class: "primary", onclick: () => this.toggle() }, "Play");
    this.slider = h("input", { type: "range", id: "time", min: 0, max: this.last, value: 0, step: 1, "aria-label": "Time", oninput: () => { this.stop(); this.go(Number(this.slider.value)); } });
    this.out = h("output", { for: "time" });
    const step = (words, by) => h("button", { onclick: () => { this.stop(); this.jump(by); } }, words);
    const speed = h("select", { "aria-label": "Speed", onchange: (event) => { this.speed = Number(event.target.value); } },
      SPEEDS.map((one) => h("option", { value: one, selected: one === this.speed }, `${one}×`)));
    by("player").replaceChildren(h("div", { class: "buttons" }, this.play, step("‹ Move", -1), step("Move ›", 1), speed),
      h("div", { class: "rail" }, this.slider, this.marks()), this.out);
    by("player").hidden = false;
  }

  // Where steps begin or end.
  marks() {
    const places = [...new Set(this.index.marks.map((one) => Math.round((300 * one.frame) / Math.max(1, this.last))))];
    return s("svg", { viewBox: "0 0 302 9", preserveAspectRatio: "none", "aria-hidden": "true" }, places.map((x) => s("rect", { x, y: 1, width: 1.2, height: 7 })));
  }

  async go(frame) {
    this.frame = Math.max(0, Math.min(this.last, frame));
    this.slider.value = String(this.frame);
    const at = this.index.at_s[this.frame], since = at - this.index.at_s[0];
    const words = `${at > 1e8 ? `${clock(at)} ` : ""}+${since.toFixed(1)} s`;
    this.out.textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
    await this.show(this.frame);
  }

  jump(by) {
    const frames = this.index.marks.map((one) => one.frame);
    const next = by > 0 ? frames.find((one) => one > this.frame) : frames.findLast((one) => one < this.frame);
    if (next !== undefined) this.go(next);
  }

  toggle() {
    if (this.isPlaying) { this.stop(); return; }
    this.isPlaying = true;
    this.play.textContent = "Stop";
    if (this.frame === this.last) this.frame = -1;
    this.run();
  }

  stop() {
    this.isPlaying = false;
    this.play.textContent = "Play";
    clearTimeout(this.timer);
  }

  async run() {
    if (!this.isPlaying) return;
    await this.go(this.frame + 1);
    if (this.frame >= this.last) { this.stop(); return; }
    const gap = 1e3 * (this.index.at_s[this.frame + 1] - this.index.at_s[this.frame]) / this.speed;
    if (this.isPlaying) this.timer = setTimeout(() => this.run(), Math.max(SHORTEST_MS, Math.min(LONGEST_MS, gap)));
  }
}
