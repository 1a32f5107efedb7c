// The live stream. EventSource sends no header, so the key would have to go into the URL or into a
// cookie; fetch sends it as the admin API wants it.
const PATIENCE_S = 6;
const AWAY_S = 60;

export class Stream {
  // told: {event(name, value), state(kind, words)}; kind is live, waiting, refused or stopped.
  constructor(key, told) {
    this.key = key;
    this.told = told;
    this.failures = 0;
    this.isStopped = false;
    document.addEventListener("visibilitychange", (this.onVisible = () => this.visible()));
  }

  async start() {
    while (!this.isStopped) {
      if (document.hidden && this.isAway) await new Promise((wake) => (this.wake = wake));
      const words = await this.once();
      if (this.isStopped) return;
      if (document.hidden && this.isAway) continue;
      const pause = Math.min(15, 2 ** this.failures);
      this.failures += 1;
      this.told.state("waiting", `${words} Trying again in ${pause} s.`);
      await new Promise((wake) => { this.wake = wake; setTimeout(wake, 1e3 * pause); });
    }
  }

  stop() {
    this.isStopped = true;
    document.removeEventListener("visibilitychange", this.onVisible);
    this.abort?.abort();
    this.wake?.();
  }

  // A tab that nobody looks at for a minute lets go of the server.
  visible() {
    clearTimeout(this.leaving);
    if (document.hidden) {
      this.leaving = setTimeout(() => { this.isAway = true; this.abort?.abort(); }, 1e3 * AWAY_S);
    } else {
      this.isAway = false;
      this.failures = 0;
      this.wake?.();
    }
  }

  // Returns why it has ended, in words.
  async once() {
    this.abort = new AbortController();
    let answer;
    try {
      answer = await fetch("../admin/live", {
        headers: { Authorization: `Bearer ${this.key}` }, signal: this.abort.signal, cache: "no-store",
      });
    } catch (error) {
      return "The server does not answer.";
    }
    if (answer.status === 401) {
      this.stop();
      this.told.state("refused", "The server refuses this key.");
      return "";
    }
    if (answer.ok) this.told.state("open", "");
    if (!answer.ok) return `The server answers ${answer.status}${await reason(answer)}.`;
    try {
      for await (const [name, value] of events(answer.body)) {
        if (name === "end") return "The server is about to end.";
        this.failures = 0;
        this.told.event(name, value);
        this.told.state("live", "");
        clearTimeout(this.quiet);
        this.quiet = setTimeout(() => this.told.state("waiting", `Nothing has come for ${PATIENCE_S} s.`), 1e3 * PATIENCE_S);
      }
    } catch (error) {
      // Cut, or aborted by us.
    } finally {
      clearTimeout(this.quiet);
    }
    return "The stream was cut.";
  }
}

async function reason(answer) {
  try {
    return `: ${(await answer.json()).error.message}`;
  } catch (error) {
    return "";
  }
}

// Events of a body, as [name, value]; lines end as the server ends them.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    // A chunk may end between the two characters of a line's end.
    const parts = text.split(/\r\n\r\n|\n\n/);
    text = parts.pop();
    for (const part of parts) {
      const event = parsed(part);
      if (event) yield event;
    }
  }
}

function parsed(part) {
  let name = "message";
  const data = [];
  for (const line of part.split(/\r?\n/)) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  // The last event of an answer of the OpenAI API.
  if (data[0] === "[DONE]") return null;
  return data.length ? [name, JSON.parse(data.join("\n"))] : null;
}
