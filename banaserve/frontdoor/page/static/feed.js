// Decision feed: what was seen, what was chosen, what was refused, and what came of it.
import { bytes, by, chip, clock, count, h, percent, roleWords, seconds, signed, table } from "./elements.js";

const KEPT = 40;
const REFUSED_SHOWN = 25;

export class Feed {
  constructor() {
    this.items = new Map();
  }

  // A stream begins anew, perhaps that of another server.
  clear() {
    for (const item of this.items.values()) item.remove();
    this.items.clear();
    by("feed-empty").hidden = false;
  }

  // A decision that is new or has changed.
  add(decision) {
    const known = this.items.get(decision.number);
    const item = known || h("li", { "data-decision": decision.number });
    const isOpen = known?.firstChild.open;
    const mark = JSON.stringify(decision.steps.map((one) => [one.held, one.result]));
    if (isOpen && known.mark === mark) {
      // Who reads it keeps the numbers that were seen, and what is unfolded.
      known.firstChild.firstChild.replaceChildren(...summary(decision).filter((one) => one !== null));
      return;
    }
    item.mark = mark;
    const details = h("details", { class: outcome(decision) }, h("summary", null, summary(decision)));
    const fill = () => details.open && details.childElementCount === 1 && details.append(detail(decision));
    details.addEventListener("toggle", fill);
    item.replaceChildren(details);
    if (isOpen) { details.open = true; fill(); }
    if (!known) {
      this.items.set(decision.number, item);
      const next = [...by("feed").children].find((one) => Number(one.dataset.decision) < decision.number);
      by("feed").insertBefore(item, next || null);
    }
    while (this.items.size > KEPT) {
      const oldest = Math.min(...this.items.keys());
      this.items.get(oldest).remove();
      this.items.delete(oldest);
    }
    by("feed-empty").hidden = true;
  }

  // Exactly these: a replay goes back too. What stays the same keeps its place and stays open.
  whole(decisions) {
    const numbers = new Set(decisions.map((one) => one.number));
    for (const [number, item] of this.items) {
      if (!numbers.has(number)) { item.remove(); this.items.delete(number); }
    }
    this.told ||= new Map();
    for (const one of decisions) {
      const text = JSON.stringify(one);
      if (this.told.get(one.number) !== text || !this.items.has(one.number)) this.add(one);
      this.told.set(one.number, text);
    }
    by("feed-empty").hidden = decisions.length > 0;
  }
}

function outcome(decision) {
  if (decision.steps.some((one) => !one.held)) return "began";
  return decision.steps.length ? "held" : "none";
}

function summary(decision) {
  const begun = decision.steps.filter((one) => !one.held);
  const words = begun.length ? begun.map((one) => one.what).join("; ")
    : decision.steps.length ? `wants: ${decision.steps.map((one) => one.what).join("; ")}` : `nothing: ${decision.reason}`;
  const results = begun.map((one) => one.result?.ending || "running");
  const turns = decision.turns > 1 ? `, ${decision.turns} times` : "";
  return [
    h("span", { class: "when" }, `#${decision.number} ${clock(decision.at_s)}${turns} · gap ${decision.gap.toFixed(2)} `),
    decision.mode === "on" ? null : [chip(decision.mode), " "],
    [...new Set(results)].flatMap((one) => [chip(one), " "]),
    h("span", { class: "what" }, decision.back_pressure ? `${words} · ${decision.back_pressure}` : words),
  ].flat(2);
}

function detail(decision) {
  const parts = [h("p", { class: "hint" }, `${decision.policy}, decided in ${seconds(decision.took_s)}${decision.is_balancing ? ", balancing" : ""}. No ${decision.steps.length ? "further " : ""}step: ${decision.reason}`)];
  parts.push(...decision.steps.map((step) => stepCard(step)));
  const left = Object.entries(decision.left_out);
  if (left.length) parts.push(h("div", null, h("h3", null, "Left out"), h("ul", null, left.map(([id, why]) => h("li", null, `${id}: ${why}`)))));
  parts.push(h("div", null, h("h3", null, "Seen"), h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Numbers seen" }, seen(decision.instances))));
  if (decision.rejected.length) parts.push(refused(decision.rejected));
  return h("div", { class: "detail" }, parts);
}

function seen(instances) {
  return table(["Instance", ">Compute", ">KV", ">Run", ">Wait", ">Step", ">Blocks", "Away"],
    Object.entries(instances).map(([id, one]) => [
      `${id} ${roleWords[one.role] || one.role}`, percent(one.compute), percent(one.memory), count(one.num_running),
      count(one.num_waiting), seconds(one.step_s), count(one.num_kv_blocks), one.away.join("; "),
    ]));
}

function stepCard(step) {
  const { result } = step;
  const parts = [
    h("p", null, h("strong", null, step.what), " ", chip(step.held ? "held" : result ? result.ending : "running")),
    h("p", { class: "against hint" }, h("span", null, `predicted: ${seconds(step.cost_s)} for a gain of ${seconds(step.benefit_s)}`),
      result ? h("span", null, `took ${seconds(result.seconds)}${result.num_bytes ? `, ${bytes(result.num_bytes)}, stall ${seconds(result.stall_s)}` : ""}${result.blocks_gained ? `, ${signed(count(result.blocks_gained), result.blocks_gained)} blocks` : ""}`) : null),
  ];
  if (step.held) parts.push(h("p", null, `Not begun: ${step.held}`));
  if (result?.reason) parts.push(h("p", { class: "error" }, `${result.reason}${result.reverted ? " (taken back)" : ""}`));
  const names = [...new Set([...Object.keys(step.predicted), ...Object.keys(result?.changed || {})])];
  if (names.length) {
    const pair = (name, key, words) => {
      const said = step.predicted[name]?.[key], came = result?.changed[name]?.[key];
      const tell = (one) => (one === undefined ? "–" : signed(words(one), one));
      return `${tell(said)} → ${tell(came)}`;
    };
    const share = (one) => `${(100 * one).toFixed(1)}%`;
    parts.push(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Prediction and outcome" },
      table(["Predicted → measured", ...names.map((name) => `>${name}`)], [
        ["Compute", "compute", share], ["KV", "memory", share], ["Blocks", "kv_blocks", count], ["A step", "step_s", seconds],
      ].map(([words, key, tell]) => [words, ...names.map((name) => pair(name, key, tell))]))));
  }
  return h("div", { class: "step" }, parts);
}

function refused(rejected) {
  const groups = new Map();
  for (const one of rejected) groups.set(one.reason, [...(groups.get(one.reason) || []), one]);
  const sorted = [...groups].sort((a, b) => b[1].length - a[1].length);
  return h("div", null, h("h3", null, `Refused: ${rejected.length}`), sorted.map(([reason, ones]) => h("details", null,
    h("summary", null, `${ones.length} because ${reason}`),
    h("ul", { class: "tall hint" }, ones.slice(0, REFUSED_SHOWN).map((one) => h("li", null, `${one.candidate}${one.value === null || one.value === undefined ? "" : ` (${Number(one.value.toPrecision(3))})`}`)),
      ones.length > REFUSED_SHOWN ? h("li", null, `and ${ones.length - REFUSED_SHOWN} more`) : null))));
}
