// Sparklines: six figures, each over the last minutes, or over a whole log.
import { by, count, h, percent, seconds } from "./elements.js";

const KEPT = 600;
const FIGURES = [
  { name: "Time to first token", lines: ["ttft_p50_s", "ttft_p99_s"], words: seconds, labels: ["p50", "p99"] },
  { name: "Time per output token", lines: ["tpot_p50_s", "tpot_p99_s"], words: seconds, labels: ["p50", "p99"] },
  { name: "Requests", lines: ["num_running", "num_waiting"], words: count, labels: ["running", "waiting"] },
  { name: "KV blocks in use", lines: ["kv_mean_fraction", "kv_max_fraction"], words: percent, labels: ["mean", "fullest"], top: 1 },
  { name: "Output", lines: ["tokens_per_s"], words: count, labels: ["tokens/s"] },
  { name: "Compute", lines: ["compute_mean_fraction", "cpu_fraction"], words: percent, labels: ["engines", "CPU"], top: 1, gpu: true },
];

export class Charts {
  constructor() {
    this.atS = [];
    this.values = {};
    this.markS = null;
    this.cards = FIGURES.map((figure) => this.card(figure));
    by("figures").replaceChildren(...this.cards.map((one) => one.element));
  }

  card(figure) {
    const value = h("p", { class: "value" });
    const plot = h("div", { class: "plot", role: "img", "aria-label": figure.name });
    const name = h("p", { class: "name" }, figure.name);
    const element = h("div", { class: "card figure" }, name, value, plot);
    const card = { figure, value, plot, element, chart: null };
    new ResizeObserver(() => this.size(card)).observe(plot);
    return card;
  }

  // One more moment of a live server.
  add(atS, figures) {
    this.atS.push(atS);
    for (const [name, value] of Object.entries(figures)) (this.values[name] ||= new Array(this.atS.length - 1).fill(null)).push(value);
    if (this.atS.length > KEPT) {
      this.atS.shift();
      for (const one of Object.values(this.values)) one.shift();
    }
    this.show(figures);
  }

  // All of a log at once; show() then says which moment is the present.
  whole(atS, series) {
    this.atS = atS;
    this.values = series;
    // A log knows nothing of requests: a card without a value would only take room.
    for (const { figure, element } of this.cards) {
      element.hidden = !figure.lines.some((name) => series[name]?.some((one) => one !== null));
    }
    this.draw();
  }

  show(figures, markS = null) {
    this.markS = markS;
    for (const card of this.cards) this.say(card, figures);
    this.draw();
  }

  say(card, figures) {
    const { lines, labels, words, gpu } = card.figure;
    const isKnown = (name) => figures[name] !== null && figures[name] !== undefined;
    const all = gpu && isKnown("gpu_fraction") ? [["engines", lines[0]], ["GPU", "gpu_fraction"]] : labels.map((one, i) => [one, lines[i]]);
    const shown = all.filter(([, name], i) => i === 0 || isKnown(name));
    const parts = shown.map(([label, name], i) => {
      const text = isKnown(name) ? words(figures[name]) : "–";
      return i ? h("small", null, ` · ${text} ${label}`) : h("span", null, text, h("small", null, ` ${label}`));
    });
    card.value.replaceChildren(...parts);
    card.plot.setAttribute("aria-label", `${card.figure.name}: ${card.value.textContent}`);
  }

  draw() {
    for (const card of this.cards) {
      const data = [this.atS, ...card.figure.lines.map((name) => this.values[name] || this.atS.map(() => null))];
      if (card.chart) card.chart.setData(data);
      else this.make(card, data);
    }
  }

  make(card, data) {
    const width = card.plot.clientWidth;
    if (!width || !window.uPlot) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { lines, top } = card.figure;
    const present = (chart) => {
      if (this.markS === null) return;
      const x = chart.valToPos(this.markS, "x", true);
      chart.ctx.fillStyle = colour("--text");
      chart.ctx.fillRect(x - 1, chart.bbox.top, 2, chart.bbox.height);
    };
    card.chart = new window.uPlot({
      width, height: 56, padding: [4, 0, 2, 0], legend: { show: false }, cursor: { show: false },
      axes: [{ show: false }, { show: false }],
      scales: { x: { time: true }, y: { range: (_, __, high) => [0, top || (high > 0 ? 1.1 * high : 1)] } },
      series: [{}, ...lines.map((_, i) => ({
        stroke: colour(i ? "--decode" : "--prefill"), width: i ? 1.25 : 2, dash: i ? [4, 3] : undefined,
        fill: i ? undefined : `${colour("--prefill")}22`, points: { show: false }, spanGaps: false,
      }))],
      hooks: { draw: [present] },
    }, data, card.plot);
  }

  size(card) {
    if (card.chart) card.chart.setSize({ width: card.plot.clientWidth, height: 56 });
    else this.draw();
  }

  // Colours are read when a chart is made.
  recolour() {
    for (const card of this.cards) { card.chart?.destroy(); card.chart = null; }
    this.draw();
  }
}
