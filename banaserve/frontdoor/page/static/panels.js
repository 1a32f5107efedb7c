// Panels beside the map: one instance, moves, the store, the orchestrator.
import { bytes, by, chip, count, h, isPressed, percent, renew, roleWords, s, seconds, table } from "./elements.js";

export function showMoves(moves) {
  if (!moves.length) {
    by("moves").replaceChildren(h("p", { class: "hint" }, "Nothing moves, and nothing has lately."));
    return;
  }
  const rows = moves.map((one) => {
    const isOpen = ["waiting", "running"].includes(one.state);
    const goes = one.source ? `${one.source} → ${one.target || "home"}: ` : "";
    const progress = isOpen && one.total_bytes
      ? h("progress", { max: one.total_bytes, value: one.num_bytes, "aria-label": `${one.id}: ${bytesOf(one)}` }) : null;
    return [
      one.id, chip(one.state), h("span", null, `${goes}${one.what}`, one.error ? h("span", { class: "error" }, ` ${one.error}`) : null),
      h("span", null, one.phase && one.state !== "done" ? one.phase : "", progress),
      isOpen ? bytesOf(one) : one.num_bytes ? bytes(one.num_bytes) : "", seconds(one.seconds), one.stall_s ? seconds(one.stall_s) : "",
    ];
  });
  const shown = table(["Id", "State", "What", "Phase", ">Bytes", ">Time", ">Stall"], rows);
  renew(by("moves"), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Moves" }, shown));
}

// How many bytes of a move have travelled, of how many: exactly once copies have begun.
export function bytesOf({ num_bytes, total_bytes, predicted_bytes }) {
  if (total_bytes) return `${bytes(num_bytes)} of ${bytes(total_bytes)}`;
  return predicted_bytes ? `${bytes(num_bytes)} of at most ${bytes(predicted_bytes)}` : num_bytes ? bytes(num_bytes) : "";
}

let before = null;

export function showStore(store) {
  by("store-section").hidden = !store;
  if (!store) return;
  const asked = store.hits + store.misses;
  const hits = before ? store.hits - before.hits : 0, lately = before ? hits + store.misses - before.misses : 0;
  before = store;
  const rows = store.levels.map((one) => [
    h("span", null, one.name, one.problem ? h("span", { class: "error" }, ` ${one.problem}`) : null),
    one.capacity_bytes ? meter(one.used_bytes / one.capacity_bytes, `${one.name} in use`) : "",
    `${bytes(one.used_bytes)}${one.capacity_bytes ? ` of ${bytes(one.capacity_bytes)}` : ""}`,
    count(one.num_blocks), count(one.hits), count(one.evictions),
  ]);
  renew(by("store"),
    h("dl", { class: "facts" },
      fact("Hit rate since start", asked ? percent(store.hits / asked) : "–"),
      fact("Hit rate of the last second", lately > 0 ? percent(hits / lately) : "–"),
      fact("Leases", count(store.num_leases)),
      store.lent_bytes ? fact("Lent to other machines", bytes(store.lent_bytes)) : null),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Tiers" },
      table(["Tier", "", "In use", ">Blocks", ">Delivered", ">Evicted"], rows)));
}

export function meter(part, words) {
  const bar = (width) => s("rect", { x: 0, y: 0, width, height: 8, rx: 3 });
  return s("svg", { class: "meter", role: "img", "aria-label": `${words}: ${percent(part)}`, viewBox: "0 0 100 8", preserveAspectRatio: "none" }, bar(100), bar(100 * Math.min(1, part)));
}

const fact = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));

// One instance with what an operator may do to it; without actions in a replay.
export function showInstance(panel, actions, close) {
  const place = by("instance");
  if (!panel) { place.hidden = true; return; }
  if (isPressed(place)) return;
  const { status, away } = panel;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.action : null;
  place.hidden = false;
  const facts = [
    fact("Compute", percent(status.compute)), fact("KV blocks in use", percent(status.memory)),
    fact("Running and waiting", `${status.num_running} and ${status.num_waiting}`), fact("Sent and not ended", count(status.inflight_requests)),
    fact("A step", status.step_s ? `${seconds(status.step_s)}, ${count(status.step_tokens)} tokens` : "–"),
    fact("KV blocks", `${count(status.kv_blocks)}${status.kv_blocks_gained ? ` (${status.kv_blocks_gained > 0 ? "+" : ""}${status.kv_blocks_gained} by moves)` : ""}`),
    status.gpu_busy_fraction === null || status.gpu_busy_fraction === undefined ? null : fact("GPU busy, memory", `${percent(status.gpu_busy_fraction)}, ${percent(status.gpu_memory_fraction)}`),
    status.guest_bytes ? fact("Held for others", bytes(status.guest_bytes)) : null,
    status.node ? fact("Node", status.node) : null,
    status.age_s === null || status.age_s === undefined ? null : fact("Report", `${status.age_s.toFixed(1)} s old`),
  ];
  const lines = [
    ...away.map((one) => `${one.words} run at ${one.at}`),
    ...status.guests.map((one) => `holds ${one}`),
    ...(status.left_out ? [`Left out of decisions: ${status.left_out}`] : []),
  ];
  place.replaceChildren(
    h("div", { class: "title" }, h("h3", null, `${status.id}, ${roleWords[status.role] || status.role}`), chip(status.state),
      h("button", { "aria-label": `Close ${status.id}`, "data-action": "close", onclick: close }, "Close")),
    h("dl", { class: "facts" }, facts), h("ul", null, lines.map((one) => h("li", null, one))),
    ...(actions ? [h("div", { class: "buttons" }, actions.map(([name, words, run]) => h("button", { "data-action": name, onclick: run }, words)))] : []));
  if (focused) place.querySelector(`[data-action="${focused}"]`)?.focus();
}

// Which instances run on which machine; nothing where all run on the server's own.
export function showNodes(instances) {
  const nodes = new Map();
  for (const { status } of instances) nodes.set(status.node, [...(nodes.get(status.node) || []), `${status.id}${status.state === "away" ? " (away)" : ""}`]);
  by("nodes").hidden = nodes.size < 2 && !nodes.keys().next().value;
  by("nodes").textContent = `Nodes: ${[...nodes].map(([node, ids]) => `${node || "this machine"}: ${ids.join(", ")}`).join(" · ")}`;
}

export function showOrchestrator(controller, routing) {
  const words = controller.mode === "off" ? "orchestrator off"
    : `orchestrator ${controller.mode}, ${controller.state}: ${controller.policy}`;
  by("orchestrator").textContent = `${words}${routing ? ` · routing ${routing}` : ""}${controller.error ? ` · failed: ${controller.error}` : ""}`;
}
