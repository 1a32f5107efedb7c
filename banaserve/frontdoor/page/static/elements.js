// Elements and words: everything from the server becomes text, never markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const by = (id) => document.getElementById(id);

export function bytes(count) {
  if (!count) return "0 B";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(count) / 10));
  const value = count / 2 ** (10 * power);
  return `${value >= 100 || power === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[power]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  if (size >= 0.1 || size === 0) return `${(1e3 * value).toFixed(0)} ms`;
  return size >= 1e-3 ? `${(1e3 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)}%`);
export const signed = (text, value) => (value > 0 ? `+${text}` : text);
export const count = (value) => Math.round(value).toLocaleString("en");

// Seconds of a simulation begin at 0 and are no time of a day.
export function clock(atS) {
  if (atS < 1e8) return `${atS.toFixed(1)} s`;
  return new Date(1e3 * atS).toLocaleTimeString("en-GB");
}

// Whether something within is being pressed: a click is lost if its button is replaced before the release.
export const isPressed = (place) => place.matches(":active");

// New children in the place of old ones; what was scrolled, or had the focus, stays so.
export function renew(place, ...children) {
  const old = place.querySelector(".scroll");
  const [left, top, focused] = old ? [old.scrollLeft, old.scrollTop, old === document.activeElement] : [0, 0, false];
  place.replaceChildren(...children);
  const now = place.querySelector(".scroll");
  if (!old || !now) return;
  now.scrollLeft = left;
  now.scrollTop = top;
  if (focused) now.focus({ preventScroll: true });
}

export const roleWords = { prefill: "prefill", decode: "decode", colocated: "both" };
export const roleClass = (role) => (role in roleWords ? role : "colocated");

// A shape for each role, since colour alone tells too little: around (x, y), of this radius.
export function roleShape(role, x, y, r) {
  const points = {
    prefill: `${x - r},${y - r} ${x + r},${y} ${x - r},${y + r}`,
    colocated: `${x},${y - r} ${x + r},${y} ${x},${y + r} ${x - r},${y}`,
  }[role];
  const kind = `shape ${roleClass(role)}`;
  return points ? s("polygon", { class: kind, points }) : s("circle", { class: kind, cx: x, cy: y, r });
}

export function table(headings, rows) {
  const head = headings.map((one) => h("th", { scope: "col", class: one.startsWith(">") ? "right" : null }, one.replace(">", "")));
  const right = headings.map((one) => one.startsWith(">"));
  const cell = (one, i) => h("td", { class: right[i] ? "right" : null }, one);
  return h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, rows.map((row) => h("tr", null, row.map(cell)))));
}

export function chip(words) {
  const kinds = {
    ready: "good", done: "good", running: "now", starting: "now", waiting: "now", draining: "warn",
    drained: "warn", restarting: "warn", ejected: "warn", "circuit open": "warn", full: "now", aborted: "warn", paused: "warn", refused: "warn",
    "timed out": "warn", "going back": "warn", down: "bad", away: "bad", failed: "bad", error: "bad",
  };
  return h("span", { class: `chip ${kinds[words] || ""}` }, words);
}

// Light or dark, as the browser's user prefers or the button says; told is called after each change.
export function themed(told) {
  const set = (isDark) => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    by("theme").textContent = isDark ? "Light" : "Dark";
    told();
  };
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  preferred.addEventListener("change", () => set(preferred.matches));
  by("theme").addEventListener("click", () => set(document.documentElement.dataset.theme !== "dark"));
  set(preferred.matches);
}
