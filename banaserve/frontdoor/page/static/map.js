// Map of instances x layers: each row is an instance, each column a layer of the model.
import { by, percent, roleClass, roleShape, roleWords, s } from "./elements.js";
import { bytesOf } from "./panels.js";

const AXIS = 20;

export class PlacementMap {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.rows = new Map();
    this.chosen = null;
    this.focused = null;
    this.svg = s("svg", { role: "listbox", "aria-label": "Instances", "aria-describedby": "map-hint" });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.axis = s("g", { "aria-hidden": "true" });
    this.over = s("g", { class: "drawn", "aria-hidden": "true" });
    this.svg.append(hatch(), this.axis, this.over);
    by("map").append(this.svg);
    legend();
    new ResizeObserver(() => this.draw()).observe(by("map"));
  }

  show(snapshot) {
    this.snapshot = snapshot;
    this.draw();
  }

  choose(id) {
    this.chosen = id;
    for (const [name, row] of this.rows) row.setAttribute("aria-selected", String(name === id));
  }

  key(event) {
    const names = (this.snapshot?.instances || []).map((one) => one.status.id);
    const at = names.indexOf(this.focused);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (next !== undefined) {
      this.focus(names[Math.max(0, Math.min(names.length - 1, next))]);
    } else if ((event.key === "Enter" || event.key === " ") && at >= 0) {
      this.onChoose(names[at]);
    } else {
      return;
    }
    event.preventDefault();
  }

  focus(id) {
    this.focused = id;
    for (const [name, row] of this.rows) row.setAttribute("tabindex", name === id ? "0" : "-1");
    this.rows.get(id)?.focus();
  }

  draw() {
    const snapshot = this.snapshot;
    const width = by("map").clientWidth;
    if (!snapshot || !width) return;
    const place = layout(snapshot, width);
    const height = AXIS + place.height * snapshot.instances.length + 2;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.axis.replaceChildren(...axis(place));
    const names = snapshot.instances.map((one) => one.status.id);
    for (const [name, row] of this.rows) {
      if (!names.includes(name)) { row.remove(); this.rows.delete(name); }
    }
    if (!names.includes(this.focused)) this.focused = names[0];
    const guests = guestsOf(snapshot);
    snapshot.instances.forEach((one, index) => {
      const id = one.status.id;
      let row = this.rows.get(id);
      if (!row) {
        // What is pressed stays in its place, or the click would be lost: only what takes no pointer is drawn anew.
        row = s("g", { role: "option", id: `row-${id}`, "aria-selected": String(id === this.chosen), "data-instance": id },
          s("rect", { class: "back", x: 1, y: 0.5, rx: 5 }), s("g", { class: "drawn" }));
        row.addEventListener("click", () => { this.focus(id); this.onChoose(id); });
        this.rows.set(id, row);
      }
      row.setAttribute("tabindex", id === this.focused ? "0" : "-1");
      row.setAttribute("class", `row ${roleClass(one.status.role)} ${one.status.state === "ready" ? "" : "off"}`);
      row.setAttribute("transform", `translate(0 ${AXIS + index * place.height})`);
      row.firstChild.setAttribute("width", width - 2);
      row.firstChild.setAttribute("height", place.height - 1);
      row.lastChild.replaceChildren(...drawRow(one, place, guests.get(id) || []));
      if (this.svg.children[index + 2] !== row) this.svg.insertBefore(row, this.svg.children[index + 2] || null);
    });
    this.over.replaceChildren(...snapshot.moves.flatMap((move) => drawMove(move, place, names)));
    this.svg.append(this.over);
  }
}

function layout(snapshot, width) {
  const num = snapshot.instances.length;
  const narrow = width < 560;
  const left = narrow ? 62 : 136, right = narrow ? 52 : 150;
  const height = num <= 8 ? 46 : num <= 20 ? 36 : 23;
  const layers = Math.max(1, snapshot.num_layers);
  const cell = (width - left - right) / layers;
  const busiest = height >= 36;
  return {
    width, narrow, left, right, height, layers, cell, heads: Math.max(1, snapshot.num_kv_heads), busiest,
    band: Math.round(height * (busiest ? 0.5 : 0.52)), bandY: busiest ? 5 : 2,
    lane: Math.round(height * (busiest ? 0.24 : 0.26)),
    laneY: Math.round(height * (busiest ? 0.64 : 0.66)),
    x: (layer) => left + layer * cell,
  };
}

function axis(place) {
  const step = [1, 2, 5, 10, 20, 50, 100].find((one) => one * place.cell >= 30) || 200;
  const found = [s("text", { class: "soft", x: 4, y: 13 }, "layer")];
  for (let layer = 0; layer <= place.layers; layer += step) {
    found.push(s("text", { class: "soft", x: place.x(layer), y: 13, "text-anchor": "middle" }, String(layer)));
  }
  if (!place.narrow) {
    const x = place.width - place.right + 14;
    found.push(s("text", { class: "soft", x, y: 13 }, "compute · KV · run+wait"));
  }
  return found;
}

// What a row says beyond its words, to those who hear it: its name is all of its text.
function rowWords({ status, away }) {
  const parts = [status.state, `compute ${percent(status.compute)}`, `KV ${percent(status.memory)}`];
  parts.push(`${status.num_running} running, ${status.num_waiting} waiting`);
  parts.push(...away.map((one) => `${one.words} at ${one.at}`), ...status.guests.map((one) => `holds ${one}`));
  if (status.left_out) parts.push(status.left_out);
  return parts.join(", ");
}

// What runs beside each instance, with whose it is.
function guestsOf(snapshot) {
  const found = new Map();
  for (const one of snapshot.instances) {
    for (const away of one.away) {
      if (!found.has(away.at)) found.set(away.at, []);
      found.get(away.at).push({ host: one.status, away });
    }
  }
  return found;
}

function drawRow({ status, away }, place, guests) {
  const { height, band, bandY, lane, laneY, left, narrow } = place;
  const middle = bandY + band / 2;
  const parts = [
    roleShape(status.role, 13, middle, 5),
    s("text", { class: "id", x: 25, y: middle + 4 }, status.id),
  ];
  if (!narrow) parts.push(s("text", { class: "soft", x: 64, y: middle + 4 }, roleWords[status.role] || status.role));
  const isOff = status.state !== "ready";
  const below = isOff ? status.state : place.busiest ? status.node : "";
  if (below && (place.busiest || isOff)) {
    const y = place.busiest ? laneY + lane - 1 : middle + 4;
    const x = place.busiest ? 25 : narrow ? left - 8 : left - 30;
    if (place.busiest || !narrow) parts.push(s("text", { class: isOff ? "soft state" : "soft", x, y }, below));
  }
  parts.push(s("rect", { class: "home", x: left, y: bandY, width: place.layers * place.cell, height: band, rx: 3 }));
  if (place.cell >= 5) {
    for (let layer = 1; layer < place.layers; layer += 1) {
      parts.push(s("line", { class: "tick", x1: place.x(layer), x2: place.x(layer), y1: bandY + 1, y2: bandY + band - 1 }));
    }
  }
  for (const one of away) parts.push(...drawAway(one, place));
  for (const guest of guests) parts.push(...drawGuest(guest, place));
  const heard = s("text", { class: "heard", x: 1, y: 1 }, rowWords({ status, away }));
  return [...parts, ...drawLoad(status, place), heard];
}

// A hole where modules of this instance are missing: whole layers, rows of heads, older blocks, or experts.
function drawAway(one, place) {
  const found = [];
  for (const span of one.spans) {
    const x = place.x(span.first_layer), width = (span.end_layer - span.first_layer) * place.cell;
    const bars = strips(one.kind, span.heads, place.heads, place.bandY, place.band);
    for (const [y, height] of bars) {
      found.push(s("rect", { class: "hole", x: x + 0.5, y, width: Math.max(1, width - 1), height, rx: 2 }));
      if (one.kind === "context") found.push(s("rect", { fill: "url(#dots)", x, y, width, height }));
    }
    const words = `→ ${one.at}`;
    if (width > 8 * words.length && one.kind === "layers") {
      found.push(s("text", { class: "label", x: x + width / 2, y: place.bandY + place.band / 2 }, words));
    }
  }
  return found;
}

function strips(kind, heads, numHeads, y, height) {
  if (!heads.length) return [kind === "layers" ? [y, height] : [y + height / 2, height / 2]];
  const each = height / numHeads;
  return heads.map((head) => [y + head * each, Math.max(1.5, each)]);
}

function drawGuest({ host, away }, place) {
  const found = [];
  for (const span of away.spans) {
    const x = place.x(span.first_layer), width = (span.end_layer - span.first_layer) * place.cell;
    const kind = `guest ${away.kind} ${roleClass(host.role)}`;
    found.push(s("rect", { class: kind, x: x + 0.5, y: place.laneY, width: Math.max(2, width - 1), height: place.lane, rx: 2 }));
    const words = `${host.id}${{ heads: " heads", context: " older KV", experts: " experts" }[away.kind] || ""}`;
    if (place.lane >= 10 && width > 7.5 * words.length) {
      const on = away.kind === "context" ? "" : "on";
      found.push(s("text", { class: `label ${on}`, x: x + width / 2, y: place.laneY + place.lane / 2 + 0.5 }, words));
    }
  }
  return found;
}

function drawLoad(status, place) {
  const { narrow, bandY, band, laneY, lane } = place;
  const x = place.width - place.right + (narrow ? 8 : 14), width = narrow ? 40 : 56;
  const bar = (value, y, height) => [
    s("rect", { class: "track", x, y, width, height, rx: 2 }),
    s("rect", { class: `fill ${value > 0.9 ? "high" : ""}`, x, y, width: width * Math.min(1, value || 0), height, rx: 2 }),
  ];
  const height = place.busiest ? 6 : 4;
  const found = [...bar(status.compute, bandY + 1, height), ...bar(status.memory, bandY + height + 4, height)];
  if (!narrow) {
    found.push(s("text", { class: "soft", x: x + width + 8, y: bandY + band / 2 + 4 }, `${status.num_running}+${status.num_waiting}`));
  } else if (place.busiest) {
    found.push(s("text", { class: "soft", x, y: laneY + lane }, `${status.num_running}+${status.num_waiting}`));
  }
  return found;
}

const OPEN = ["waiting", "running"];

// A move under way: its layers marked at home, an arrow to where they go, and how far it is.
function drawMove(move, place, names) {
  const from = names.indexOf(move.source);
  if (!OPEN.includes(move.state) || from < 0 || !move.spans.length) return [];
  const home = AXIS + from * place.height;
  const first = Math.min(...move.spans.map((one) => one.first_layer));
  const end = Math.max(...move.spans.map((one) => one.end_layer));
  const x = place.x(first), width = Math.max(4, (end - first) * place.cell);
  const y = home + place.bandY;
  const found = [s("rect", { class: "move", x, y, width, height: place.band, rx: 3 })];
  if (move.total_bytes && move.num_bytes) {
    const part = Math.min(1, move.num_bytes / move.total_bytes);
    found.unshift(s("rect", { class: "moved", x, y, width: width * part, height: place.band }));
  }
  const to = names.indexOf(move.target);
  const middle = x + width / 2;
  if (to >= 0) {
    const goal = AXIS + to * place.height + (to > from ? place.bandY : place.laneY + place.lane);
    const start = to > from ? y + place.band : y;
    const bend = middle + Math.min(60, 12 + Math.abs(goal - start) / 4);
    found.push(s("path", { class: "move arc", d: `M${middle} ${start}C${bend} ${start} ${bend} ${goal} ${middle} ${goal}` }));
  }
  const words = `${move.phase || move.state}${move.total_bytes ? ` ${bytesOf(move)}` : ""}`;
  const size = 6.4 * words.length + 12;
  const left = Math.max(place.left, Math.min(place.width - place.right - size, middle - size / 2));
  const top = y + place.band / 2 - 8;
  found.push(s("rect", { class: "tag", x: left, y: top, width: size, height: 16, rx: 8 }));
  found.push(s("text", { class: "tagged", x: left + 6, y: top + 8.5 }, words));
  return found;
}

function hatch() {
  const dots = s("pattern", { id: "dots", width: 4, height: 4, patternUnits: "userSpaceOnUse" },
    s("circle", { cx: 1, cy: 1, r: 0.8, fill: "currentColor" }));
  return s("defs", { "aria-hidden": "true" }, dots);
}

function legend() {
  const roles = Object.entries(roleWords).map(([role, words]) => [s("g", null, roleShape(role, 11, 6, 5)), words]);
  const box = (kind) => s("rect", { class: kind, x: 0.5, y: 1, width: 21, height: 10, rx: 2 });
  const entries = [
    ...roles,
    [s("g", { class: "decode" }, s("rect", { class: "home", x: 0.5, y: 1, width: 21, height: 10, "stroke-dasharray": "3 2", "fill-opacity": 0 })), "runs elsewhere"],
    [s("g", { class: "decode" }, box("guest")), "runs here for another"],
    [s("g", { class: "decode" }, box("guest context")), "older KV blocks"],
  ];
  by("legend").replaceChildren(...entries.map(([mark, words]) => {
    const item = document.createElement("li");
    item.append(s("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, mark), words);
    return item;
  }));
}
