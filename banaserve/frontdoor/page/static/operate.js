// What an operator does: every action is asked about first, with the command that does the same.
import { by, h } from "./elements.js";

export class Operator {
  // call(method, path, body) asks the admin API; done(words) tells that something has begun.
  constructor(call, done) {
    this.call = call;
    this.done = done;
    by("ask-no").addEventListener("click", () => by("ask").close());
    by("ask-yes").addEventListener("click", () => this.confirm());
    by("ask-form").addEventListener("submit", (event) => { event.preventDefault(); this.confirm(); });
    by("ask-fields").addEventListener("input", () => this.update());
  }

  // plan: {title, yes, fields: [{name, label, options|type, value}], build(values) -> {command, method, path, body, said}}
  ask(plan) {
    this.plan = plan;
    by("ask-title").textContent = plan.title;
    by("ask-yes").textContent = plan.yes;
    by("ask-error").textContent = "";
    by("ask-fields").replaceChildren(...(plan.fields || []).map(field));
    by("ask-yes").disabled = false;
    this.update();
    by("ask").showModal();
    (by("ask-fields").querySelector("select, input") || by("ask-no")).focus();
  }

  values() {
    return Object.fromEntries([...by("ask-fields").querySelectorAll("[name]")].map((one) => [one.name, one.value.trim()]));
  }

  update() {
    const values = this.values();
    for (const one of by("ask-fields").querySelectorAll("[data-for]")) one.hidden = !one.dataset.for.split(" ").includes(values.kind);
    this.built = this.plan.build(values);
    by("ask-command").textContent = this.built.command;
  }

  async confirm() {
    by("ask-yes").disabled = true;
    by("ask-error").textContent = "";
    const { method, path, body, said, problem } = this.built;
    try {
      if (problem) throw new Error(problem);
      await this.call(method, path, body);
      by("ask").close();
      this.done(said);
    } catch (error) {
      by("ask-error").textContent = error.message;
    } finally {
      by("ask-yes").disabled = false;
    }
  }

  pause(isPaused) {
    const word = isPaused ? "resume" : "pause";
    this.ask({
      title: isPaused ? "Let the orchestrator begin steps again?" : "Pause the orchestrator? What is under way comes to its end.",
      yes: isPaused ? "Resume" : "Pause",
      build: () => ({ command: `banaserve orchestrator ${word}`, method: "POST", path: "orchestrator", body: { paused: !isPaused }, said: isPaused ? "The orchestrator goes on." : "The orchestrator is paused." }),
    });
  }

  // Actions on one instance: name, words, what a click does.
  actions({ status, away }, names, numLayers) {
    const { id } = status;
    const isHeld = status.state === "drained";
    const others = names.filter((one) => one !== id);
    const found = [[isHeld ? "undo" : "drain", isHeld ? "Serve again" : "Drain", () => this.drain(id, isHeld)]];
    found.push(["role", "Role", () => this.role(id, status.role)]);
    if (others.length && numLayers) found.push(["move", "Move modules", () => this.move(id, others, numLayers)]);
    if (away.length) found.push(["return", "Take home", () => this.takeHome(id, away)]);
    return found;
  }

  drain(id, isHeld) {
    const path = `drains/${encodeURIComponent(id)}`;
    this.ask(isHeld
      ? { title: `Let ${id} serve again?`, yes: "Serve again", build: () => ({ command: `banaserve drain ${id} --undo`, method: "DELETE", path, said: `${id} serves again.` }) }
      : { title: `Drain ${id}? Its streams go on elsewhere, and it is sent nothing more.`, yes: "Drain", build: () => ({ command: `banaserve drain ${id}`, method: "POST", path, said: `${id} is being drained.` }) });
  }

  role(id, now) {
    const options = [["prefill", "prefill"], ["decode", "decode"], ["both", "both"]].filter(([, value]) => value !== (now === "colocated" ? "both" : now));
    this.ask({
      title: `Give ${id} another role once the requests that it has have ended?`, yes: "Change role",
      fields: [{ name: "role", label: "Role", options }],
      build: ({ role }) => ({ command: `banaserve role ${id} ${role}`, method: "POST", path: "roles", body: { instance: id, role }, said: `${id} goes to ${role}.` }),
    });
  }

  move(id, others, numLayers) {
    this.ask({
      title: `Move modules of ${id}?`, yes: "Move",
      fields: [
        { name: "kind", label: "What", options: [["layers", "layers"], ["KV heads", "heads"], ["older KV blocks", "context"]] },
        { name: "to", label: "To", options: others.map((one) => [one, one]) },
        { name: "start", label: "First layer", type: "number", value: 0, min: 0, max: numLayers - 1 },
        { name: "end", label: "Last layer", type: "number", value: Math.max(0, Math.ceil(numLayers / 4) - 1), min: 0, max: numLayers - 1 },
        { name: "heads", label: "KV heads", type: "text", value: "0", only: "heads" },
      ],
      build: ({ kind, to, start, end, heads }) => {
        const first = Number(start), last = Number(end) + 1;
        const isRange = start !== "" && end !== "" && Number.isInteger(first) && Number.isInteger(last) && first >= 0 && first < last && last <= numLayers;
        const span = `${start}:${last}`;
        const base = `banaserve migrate ${kind} --from ${id} --to ${to}`;
        const ask = { method: "POST", path: "migrations", said: `${kind} of ${id} are on their way to ${to}.`, problem: isRange ? "" : `Layers are from 0 to ${numLayers - 1}, the first not after the last.` };
        if (kind !== "heads") return { ...ask, command: `${base} --layers ${span}`, body: { kind, from: id, to, layers: [first, last] } };
        const chosen = heads.split(",").map((one) => one.trim());
        if (!ask.problem && !chosen.every((one) => /^\d+$/.test(one))) ask.problem = "KV heads are numbers with commas between, such as 0,1.";
        const body = { kind, from: id, to, heads: {} };
        if (!ask.problem) for (let layer = first; layer < last; layer += 1) body.heads[layer] = chosen.map(Number);
        return { ...ask, command: `${base} --layer ${span} --heads ${chosen.join(",")}`, body };
      },
    });
  }

  takeHome(id, away) {
    const options = [["everything", ""], ...away.filter((one) => one.kind === "layers").map((one) => [one.words, `${one.spans[0].first_layer}:${one.spans[0].end_layer}`])];
    this.ask({
      title: `Take home what ${id} has away?`, yes: "Take home",
      fields: [{ name: "which", label: "What", options }],
      build: ({ which }) => ({
        command: `banaserve migrate return --from ${id}${which ? ` --layers ${which}` : ""}`, method: "POST", path: "migrations",
        body: { kind: "return", from: id, ...(which ? { layers: which.split(":").map(Number) } : {}) }, said: `${which ? `Layers ${which}` : "All modules"} of ${id} come home.`,
      }),
    });
  }
}

function field({ name, label, options, type, value, only, ...rest }) {
  const input = options
    ? h("select", { name }, options.map(([words, one]) => h("option", { value: one }, words)))
    : h("input", { name, type, value, ...rest });
  return h("label", { "data-for": only }, label, input);
}
