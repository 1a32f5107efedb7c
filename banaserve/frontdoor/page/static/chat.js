// A conversation with the model, through the API of all clients; `banaserve chat` asks the same.
import { keepApiKey, keptApiKey } from "./access.js";
import { by, count, h, seconds } from "./elements.js";
import { events } from "./stream.js";

// What has gone wrong, in one line for people.
class Problem extends Error {}

// An answer as it comes, and the time that it takes.
class Answer {
  constructor() {
    this.aborter = new AbortController();
    this.id = this.text = this.content = this.end = "";
    this.instances = [];
    this.tokens = 0;
    this.first = null;
  }

  take(chunk) {
    if (chunk.error) throw new Problem(`The answer broke off: ${chunk.error.message}`);
    this.id = chunk.id;
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    const [choice] = chunk.choices;
    if (!choice) return;
    const { content, reasoning } = choice.delta;
    this.content += content || "";
    this.text += content || reasoning || "";
    this.end = choice.finish_reason || "";
    this.lastMs = performance.now();
    if (this.tokens || this.text) this.first ??= { ms: this.lastMs, tokens: this.tokens };
  }

  figures() {
    if (!this.first) return "";
    const tookS = (this.lastMs - this.first.ms) / 1e3, later = this.tokens - this.first.tokens;
    return [
      `First token after ${seconds((this.first.ms - this.sentMs) / 1e3)}`,
      later > 0 && tookS > 0 && `${(later / tookS).toFixed(1)} tokens/s`,
      `${count(this.tokens)} token${this.tokens === 1 ? "" : "s"}`,
      this.instances.length && `served by ${this.instances.join(" → ")}`,
      this.end === "length" && "cut off at the maximum length",
      !this.end && this.aborter.signal.aborted && "stopped",
    ].filter(Boolean).join(" · ");
  }
}

const turn = (name, words) => h("div", { class: "turn" }, h("h3", null, name), h("p", null, words));

export class Chat {
  constructor() {
    this.key = keptApiKey();
    this.begin();
    by("chat").hidden = false;
    by("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    by("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    by("chat-key-form").addEventListener("submit", (event) => { event.preventDefault(); this.takeKey(); });
    by("chat-stop").addEventListener("click", () => this.stop());
    by("chat-new").addEventListener("click", () => { this.begin(); by("chat-text").focus(); });
  }

  // An empty conversation.
  begin() {
    this.stop();
    this.answer = null;
    this.messages = [];
    this.model = "";
    by("chat-log").replaceChildren();
    this.show();
  }

  stop() {
    this.answer?.aborter.abort();
  }

  // requests: the last ones of the server, with the instances of each, which only become more.
  seen(requests) {
    const instances = requests.find((one) => one.id === this.answer?.id)?.instances ?? [];
    if (instances.length <= (this.answer?.instances.length ?? 0)) return;
    this.answer.instances = instances;
    by("chat-figures").textContent = this.answer.figures();
  }

  async send() {
    const question = by("chat-text").value.trim();
    if (!question || this.isAnswering) return;
    const answer = (this.answer = new Answer());
    const asked = turn("You", question), told = turn("", "");
    by("chat-log").append(asked);
    by("chat-now").replaceChildren(told);
    by("chat-text").value = "";
    by("chat-text").focus();
    this.show(true);
    const messages = [...this.messages, { role: "user", content: question }];
    let problem = "";
    try {
      this.model ||= await this.firstModel(answer);
      told.firstChild.textContent = this.model;
      await this.ask(messages, answer, () => this.showText(told.lastChild, answer));
    } catch (error) {
      if (!answer.aborter.signal.aborted) problem = error instanceof Problem ? error.message : "The answer broke off.";
    }
    if (this.answer !== answer) return; // begun anew meanwhile
    // Another server may be there next time.
    if (problem) this.model = "";
    if (answer.text || answer.end) {
      this.messages = [...messages, { role: "assistant", content: answer.content }];
      // What is added to the log is read aloud: the whole answer, once.
      by("chat-log").append(told);
    } else {
      asked.remove();
      by("chat-text").value ||= question;
    }
    this.show(false, problem);
  }

  async firstModel(answer) {
    const { data } = await (await this.call("models", answer)).json();
    if (!data?.length) throw new Problem("The server lists no models.");
    return data[0].id;
  }

  async ask(messages, answer, show) {
    const body = { model: this.model, messages, temperature: 0, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    answer.sentMs = performance.now();
    const { body: stream } = await this.call("chat/completions", answer, { method: "POST", body: JSON.stringify(body) });
    for await (const [, chunk] of events(stream)) {
      answer.take(chunk);
      show();
    }
    if (!answer.end) throw new Problem("The answer broke off.");
  }

  async call(path, { aborter }, options) {
    const headers = { "Content-Type": "application/json", ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    const asked = fetch(`../v1/${path}`, { ...options, headers, cache: "no-store", signal: aborter.signal });
    const response = await asked.catch(() => { throw new Problem("The server does not answer."); });
    if (response.ok) return response;
    if (response.status === 401) {
      const isRefused = this.key !== "";
      this.keep("");
      by("chat-key-form").hidden = false;
      throw new Problem(isRefused ? "The server refuses this API key." : "The server needs an API key.");
    }
    const told = await response.json().catch(() => null);
    const words = told?.error?.message || `The server answers ${response.status}.`;
    throw new Problem(words.includes("provide a chat template") ? "This model has no chat template: ask it through /v1/completions." : words);
  }

  keep(key) {
    this.key = key;
    keepApiKey(key);
  }

  takeKey() {
    const key = by("chat-key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) { this.show(false, "A key has no spaces and only ASCII characters."); return; }
    this.keep(key);
    by("chat-key").value = "";
    by("chat-key-form").hidden = true;
    by("chat-text").focus();
    this.send();
  }

  showText(place, answer) {
    if (this.answer !== answer) return;
    const talk = by("chat-talk"), isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    place.textContent = answer.text;
    by("chat-figures").textContent = answer.figures();
    if (isAtEnd) talk.scrollTop = talk.scrollHeight;
  }

  show(isAnswering = false, problem = "") {
    const hadFocus = document.activeElement === by("chat-stop");
    this.isAnswering = isAnswering;
    by("chat-send").hidden = isAnswering;
    by("chat-stop").hidden = !isAnswering;
    by("chat-talk").hidden = by("chat-new").hidden = !by("chat-log").childElementCount;
    if (isAnswering) by("chat-talk").scrollTop = by("chat-talk").scrollHeight;
    else by("chat-now").replaceChildren();
    by("chat-figures").textContent = this.answer?.figures() ?? "";
    by("chat-error").textContent = problem.replaceAll(/\s+/g, " ");
    if (!by("chat-key-form").hidden) by("chat-key").focus();
    else if (hadFocus) by("chat-text").focus();
  }
}
