// Small plots: six figures, each over the last minutes, or over a whole log.
import { by, clock, count, h, percent, s, seconds } from "./elements.js";

const KEPT = 600;
const HEIGHT = 80, FONT = "10.5px system-ui, sans-serif";
const DASH = [4, 3];
// lines: names of figures, with the words of the legend.
const FIGURES = [
  { name: "Time to first token", lines: [["ttft_p50_s", "p50"], ["ttft_p99_s", "p99"]], words: seconds },
  { name: "Time per output token", lines: [["tpot_p50_s", "p50"], ["tpot_p99_s", "p99"]], words: seconds },
  { name: "Requests", lines: [["num_running", "running"], ["num_waiting", "waiting"]], words: count, whole: true },
  { name: "KV blocks in use", lines: [["kv_mean_fraction", "mean"], ["kv_max_fraction", "fullest"]], words: percent, top: 1 },
  { name: "Output", lines: [["tokens_per_s", "tokens/s"]], words: count, unit: "/s", whole: true },
  { name: "Compute", lines: [["compute_mean_fraction", "engines"], ["cpu_fraction", "CPU"]], words: percent, top: 1, gpu: true },
];
const isKnown = (value) => value !== null && value !== undefined;

export class Charts {
  constructor(figures = FIGURES) {
    this.atS = [];
    this.values = {};
    this.markS = null;
    this.cards = figures.map((figure) => this.card(figure));
    by("figures").replaceChildren(...this.cards.map((one) => one.element));
  }

  card(figure) {
    const value = h("ul", { class: "value" });
    const plot = h("div", { class: "plot", role: "img", "aria-label": figure.name });
    const name = h("p", { class: "name" }, figure.name);
    const times = h("p", { class: "times" });
    const element = h("div", { class: "card figure" }, name, value, plot, times);
    const card = { figure, value, plot, times, element, chart: null };
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
      element.hidden = !figure.lines.some(([name]) => series[name]?.some(isKnown));
    }
    this.draw();
  }

  show(figures, markS = null) {
    this.markS = markS;
    for (const card of this.cards) this.say(card, figures);
    this.draw();
  }

  // A GPU tells more of the load than the processors beside it.
  lines({ lines, gpu }) {
    return gpu && this.values.gpu_fraction?.some(isKnown) ? [lines[0], ["gpu_fraction", "GPU"]] : lines;
  }

  // The legend of the plot, with the values of this moment.
  say(card, figures) {
    const entries = this.lines(card.figure).map(([name, label], i) =>
      h("li", null, swatch(i), `${label} `, h("strong", null, isKnown(figures[name]) ? card.figure.words(figures[name]) : "–")));
    card.value.replaceChildren(...entries);
    card.plot.setAttribute("aria-label", `${card.figure.name}: ${entries.map((one) => one.textContent).join(", ")}`);
  }

  draw() {
    const ends = this.atS.length > 1 ? [this.atS[0], this.atS.at(-1)] : [];
    for (const card of this.cards) {
      card.times.replaceChildren(...ends.map((one) => h("span", null, clock(one))));
      const data = [this.atS, ...this.lines(card.figure).map(([name]) => this.values[name] || this.atS.map(() => null))];
      if (card.chart) card.chart.setData(data);
      else this.make(card, data);
    }
  }

  make(card, data) {
    const width = card.plot.clientWidth;
    if (!width || !window.uPlot) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { lines, top, words, unit, whole } = card.figure;
    const present = (chart) => {
      if (this.markS === null) return;
      const x = chart.valToPos(this.markS, "x", true);
      chart.ctx.fillStyle = colour("--text");
      chart.ctx.fillRect(x - 1, chart.bbox.top, 2, chart.bbox.height);
    };
    const scaled = (value) => (value === 0 ? "0" : `${words === seconds ? shortSeconds(value) : words(value)}${unit || ""}`);
    card.chart = new window.uPlot({
      width, height: HEIGHT, padding: [7, 2, 6, 0], legend: { show: false }, cursor: { show: false },
      axes: [
        { show: false },
        {
          stroke: colour("--soft"), font: FONT, gap: 3, size: 48, space: 24, values: (_, splits) => splits.map(scaled),
          incrs: top ? [0.5] : whole ? INCREMENTS.filter(Number.isInteger) : INCREMENTS,
          ticks: { show: false }, grid: { stroke: colour("--track"), width: 1 },
        },
      ],
      scales: { x: { time: true }, y: { range: (_, __, high) => [0, top || (high > 0 ? 1.1 * high : 1)] } },
      series: [{}, ...lines.map((_, i) => ({
        stroke: colour(i ? "--decode" : "--prefill"), width: i ? 1.25 : 2, dash: i ? DASH : undefined,
        fill: i ? undefined : `${colour("--prefill")}22`, points: { show: false }, spanGaps: false,
      }))],
      hooks: { draw: [present] },
    }, data, card.plot);
  }

  size(card) {
    if (card.chart) card.chart.setSize({ width: card.plot.clientWidth, height: HEIGHT });
    else this.draw();
  }

  // Colours are read when a chart is made.
  recolour() {
    for (const card of this.cards) { card.chart?.destroy(); card.chart = null; }
    this.draw();
  }
}

// From one value of a scale to the next: 1, 2 or 5 of each power of ten.
const INCREMENTS = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((one) => Number(`${one}e${power - 5}`))).flat();

// Values of a scale are round: 50 ms, 1.5 s.
const shortSeconds = (value) => (value >= 1 ? `${Number(value.toPrecision(3))} s` : value >= 1e-3 ? `${Number((1e3 * value).toPrecision(3))} ms` : `${Number((1e6 * value).toPrecision(3))} µs`);

// The line as the plot draws it.
const swatch = (i) => s("svg", { class: `swatch ${i ? "second" : ""}`, viewBox: "0 0 16 6", "aria-hidden": "true" },
  s("line", { x1: 0, x2: 16, y1: 3, y2: 3, "stroke-dasharray": i ? DASH.join(" ") : null }));
