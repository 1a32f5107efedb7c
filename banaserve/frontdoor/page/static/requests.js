// The last requests; each opens as a waterfall of the parts of its time.
import { by, chip, clock, count, h, isPressed, renew, s, seconds, table } from "./elements.js";

const LANE = 24, LEFT = 116, AXIS = 22;

export class Requests {
  // fetchTrace(id) gives the trace of a request, or throws an Error whose message is for people.
  constructor(fetchTrace) {
    this.fetchTrace = fetchTrace;
    this.open = null;
    this.waterfall = h("div", { class: "waterfall" });
  }

  show(requests) {
    if (isPressed(by("requests"))) return;
    if (!requests.length) {
      by("requests").replaceChildren(h("p", { class: "hint" }, "None so far."));
      return;
    }
    const focused = document.activeElement?.dataset?.request;
    const rows = [...requests].reverse().map((one) => [
      h("button", { class: "link", "data-request": one.id, "aria-expanded": String(this.open === one.id), onclick: () => this.toggle(one.id) }, short(one.id)),
      clock(one.arrived_at_s), one.end ? chip(one.end) : chip("running"), one.instances.join(" → "),
      `${count(one.prompt_tokens)}${one.cached_tokens ? ` (${count(one.cached_tokens)} cached)` : ""}`,
      count(one.output_tokens), seconds(one.ttft_s), seconds(one.took_s),
    ]);
    const shown = table(["Request", "Arrived", "End", "Instances", ">Prompt", ">Output", ">First token", ">Took"], rows);
    const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Last requests" }, shown);
    renew(by("requests"), scroll, this.waterfall);
    this.place();
    if (focused) this.button(focused)?.focus({ preventScroll: true });
  }

  button(id) {
    return [...by("requests").querySelectorAll("[data-request]")].find((one) => one.dataset.request === id);
  }

  // Below its request; below all of them once that is no longer among the last.
  place() {
    this.waterfall.hidden = !this.open;
    this.waterfall.closest("tr")?.remove();
    const row = this.open && this.button(this.open)?.closest("tr");
    if (row) row.after(h("tr", null, h("td", { colspan: row.children.length }, this.waterfall)));
    else by("requests").append(this.waterfall);
  }

  async toggle(id) {
    this.open = this.open === id ? null : id;
    for (const one of by("requests").querySelectorAll("[data-request]")) one.setAttribute("aria-expanded", String(one.dataset.request === this.open));
    this.place();
    if (!this.open) return;
    this.waterfall.replaceChildren(h("p", { class: "hint" }, `Asking the engines about ${short(id)}`));
    try {
      const trace = await this.fetchTrace(id);
      if (this.open === id) this.waterfall.replaceChildren(...drawTrace(trace, this.waterfall.clientWidth));
    } catch (error) {
      if (this.open === id) this.waterfall.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }
}

const short = (id) => (id.length > 22 ? `${id.slice(0, 21)}…` : id);

const KINDS = {
  receive: "front", prepare: "front", route: "front", lookup: "front", respond: "front", queue: "waits", promote: "waits",
  "wait for an instance": "waits", prefill: "prefill", "hand-over": "hand-over", decode: "decode", fetch: "store", save: "store", move: "move",
};
const SHORTEST_S = 5e-5;

// A lane for each part of the request's time, each below the one that it belongs to.
export function lanesOf(trace) {
  const { spans } = trace;
  const has = new Set(spans.map((one) => one.parent));
  const below = (parent, depth) => spans.map((one, index) => ({ ...one, index, depth })).filter((one) => one.parent === parent)
    .sort((one, other) => one.start_s - other.start_s).flatMap((one) => [one, ...below(one.index, depth + 1)]);
  const lanes = below(-1, 0).filter((one) => one.end_s - one.start_s >= SHORTEST_S || has.has(one.index) || one.error);
  const first = trace.lines.find((one) => one.event.type === "FirstToken");
  return {
    start: Math.min(0, ...lanes.map((one) => one.start_s)),
    end: Math.max(trace.summary.took_s, ...lanes.map((one) => one.end_s), 1e-6),
    lanes,
    first: first ? first.at_s : null,
  };
}

function aboutLane(lane) {
  const where = lane.process === "front door" ? lane.name : `${lane.name} on ${lane.process}`;
  const told = Object.entries(lane.attributes).map(([key, value]) => `${key.replaceAll("_", " ")} ${number(value)}`);
  return `${where}: ${[...(lane.error ? [lane.error] : []), ...told, `${seconds(lane.end_s - lane.start_s)} from ${seconds(lane.start_s)}`].join(", ")}`;
}

function drawTrace(trace, clientWidth) {
  const { start, end, lanes, first } = lanesOf(trace);
  const width = Math.max(300, clientWidth), left = width < 480 ? 86 : LEFT;
  const x = (at) => left + ((at - start) / (end - start)) * (width - left - 12);
  const height = AXIS + LANE * lanes.length + 4;
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => {
    const at = start + part * (end - start);
    return [
      s("line", { x1: x(at), x2: x(at), y1: AXIS - 6, y2: height }),
      s("text", { class: "soft", x: x(at), y: 8, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, seconds(at - start)),
    ];
  });
  const rows = lanes.map((lane, i) => [
    s("text", { x: 10 * lane.depth, y: AXIS + LANE * i + LANE / 2, class: lane.depth ? "soft" : "" }, lane.name),
    s("rect", { class: `${KINDS[lane.name] ?? "front"}${lane.error ? " failed" : ""}`, x: x(lane.start_s), width: Math.max(1.5, x(lane.end_s) - x(lane.start_s)), y: AXIS + LANE * i + (lane.depth ? 6 : 4), height: LANE - (lane.depth ? 12 : 8), rx: 2 },
      s("title", null, aboutLane(lane))),
  ]);
  const token = first === null ? [] : [s("line", { class: "first", x1: x(first), x2: x(first), y1: AXIS - 2, y2: height })];
  const { summary } = trace;
  return [
    h("h3", null, summary.id),
    h("p", { class: "hint" }, `First token after ${seconds(summary.ttft_s)} (dashed line), ${count(summary.output_tokens)} tokens in ${seconds(summary.took_s)}. Rows follow each other; what is further right in the names is part of the row above, such as blocks fetched and saved while the engine computes. Dashed boxes: waiting.${summary.trace_id ? ` OpenTelemetry trace ${summary.trace_id}.` : ""}`),
    s("svg", { role: "img", "aria-label": `Waterfall. ${lanes.map(aboutLane).join("; ")}`, viewBox: `0 0 ${width} ${height}`, height }, marks, rows, token),
    ...trace.missing.map((one) => h("p", { class: "hint" }, one)),
    h("details", { class: "events" }, h("summary", null, `All ${trace.lines.length} events`),
      h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Events" },
        table([">At", "Process", "Event"], trace.lines.map((one) => [seconds(one.at_s), one.process, eventWords(one.event)])))),
  ];
}

const number = (value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(3)) : value);

function eventWords(event) {
  const { type, candidates, ...rest } = event;
  const name = type.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
  const told = Object.entries(rest).filter(([, value]) => value !== null && value !== "" && value !== false);
  return `${name}: ${told.map(([key, value]) => `${key.replaceAll("_", " ")} ${number(value)}`).join(", ")}`;
}
