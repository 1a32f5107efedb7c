// The page: a live server behind its admin key, or a decision log with a slider.
import { codeOfLink, endToken, forgetToken, getToken, keptToken } from "./access.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { by, clock, themed } from "./elements.js";
import { Feed } from "./feed.js";
import { PlacementMap } from "./map.js";
import { Operator } from "./operate.js";
import { showInstance, showMoves, showNodes, showOrchestrator, showStore } from "./panels.js";
import { Player } from "./player.js";
import { Requests } from "./requests.js";
import { Stream } from "./stream.js";

const VERSION = 1;

// What opens the admin API: the key that was typed, or this tab's token.
let key = "";
let stream = null;
let snapshot = null;
let board = null;

function notice(words) {
  by("notice").textContent = words;
  by("notice").hidden = !words;
}

// ---- what both modes show

class Board {
  constructor() {
    by("board").hidden = false;
    this.charts = new Charts();
    this.map = new PlacementMap((id) => this.choose(id));
    this.feed = new Feed();
    this.chosen = null;
    this.operator = null;
  }

  show(next) {
    snapshot = next;
    this.map.show(next);
    showNodes(next.instances);
    showMoves(next.moves);
    showOrchestrator(next.controller, next.routing);
    this.showChosen();
  }

  choose(id) {
    this.chosen = this.chosen === id ? null : id;
    this.map.choose(this.chosen);
    this.showChosen();
    if (this.chosen) by("instance").scrollIntoView({ block: "nearest" });
  }

  showChosen() {
    const panel = snapshot.instances.find((one) => one.status.id === this.chosen);
    const names = snapshot.instances.map((one) => one.status.id);
    const actions = panel && this.operator ? this.operator.actions(panel, names, snapshot.num_layers) : null;
    showInstance(panel, actions, () => { const id = this.chosen; this.choose(id); this.map.focus(id); });
  }
}

// ---- live

async function call(method, path, body) {
  let answer;
  try {
    answer = await fetch(`../admin/${path}`, {
      method, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
      headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
    });
  } catch (error) {
    throw new Error("The server does not answer.");
  }
  const text = await answer.text();
  let told = null;
  try { told = JSON.parse(text); } catch (error) { /* said below */ }
  if (!answer.ok) throw new Error(told?.error?.message || `The server answers ${answer.status}.`);
  return told;
}

function signIn(words = "") {
  stream?.stop();
  stream = null;
  key = "";
  board?.chat?.stop();
  by("board").hidden = true;
  by("login").hidden = false;
  by("leave").hidden = by("pause").hidden = true;
  by("clock").textContent = "";
  by("clock").className = "clock";
  by("orchestrator").textContent = "";
  by("login-error").textContent = words;
  by("key").focus();
}

function open(given, isToken = false) {
  stream?.stop();
  key = given;
  by("login-error").textContent = "";
  let requests = null;
  stream = new Stream(key, {
    state(kind, words) {
      if (kind === "open") { board?.feed.clear(); return; }
      if (kind === "refused") {
        notice("");
        forgetToken();
        signIn(isToken ? "What opened this tab has ended, as it does with its server. `banaserve ui` gives a new link." : words);
        return;
      }
      by("clock").className = `clock ${kind === "live" ? "live" : ""}`;
      notice(kind === "live" ? "" : words);
    },
    event(name, value) {
      if (by("board").hidden) {
        by("login").hidden = true;
        by("leave").hidden = false;
        by("key").value = "";
        if (!board) {
          board = new Board();
          board.operator = new Operator(call, said);
          board.requests = new Requests((id) => call("GET", `traces/${encodeURIComponent(id)}`));
          board.chat = new Chat();
        }
        by("board").hidden = false;
        by("main").focus();
        if (!isToken) getToken(key);
      }
      requests = board.requests;
      if (name === "decision") { board.feed.add(value); return; }
      if (name !== "snapshot") return;
      if (value.version !== VERSION) {
        stream.stop();
        notice("The server has been replaced by one with another page: load this page again.");
        return;
      }
      board.charts.add(value.at_s, value.figures);
      board.show(value);
      showStore(value.store);
      requests.show(value.requests);
      board.chat.seen(value.requests);
      by("clock").textContent = clock(value.at_s);
      const isOff = value.controller.mode === "off";
      by("pause").hidden = isOff;
      by("pause").textContent = value.controller.state === "paused" ? "Resume" : "Pause";
    },
  });
  stream.start();
}

function said(words) {
  notice(words);
  setTimeout(() => { if (by("notice").textContent === words) notice(""); }, 5000);
}

function live() {
  by("login-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = by("key").value.trim();
    // What no header can carry is no key; fetch would throw at it.
    if (/^[\x21-\x7e]+$/.test(given)) open(given);
    else signIn("A key has no spaces and only ASCII characters.");
  });
  // Nothing of this server stays in the tab.
  by("leave").addEventListener("click", async () => {
    stream?.stop();
    await endToken();
    location.reload();
  });
  by("pause").addEventListener("click", () => board.operator.pause(snapshot.controller.state === "paused"));
  // A link that is opened in this tab changes the fragment of its address alone.
  window.addEventListener("hashchange", () => enter(codeOfLink()));
  const code = codeOfLink();
  if (code) enter(code);
  else if (keptToken()) open(keptToken(), true);
  else signIn();
}

// With a link's code.
async function enter(code) {
  if (!code) return;
  const token = await getToken(code);
  if (token) open(token, true);
  else if (!stream) signIn("This link has been used, or is too old. `banaserve ui` gives another.");
}

// ---- replay

async function replay() {
  const index = await (await fetch("../replay/index.json", { cache: "no-store" })).json();
  by("store-section").hidden = by("requests-section").hidden = true;
  board = new Board();
  board.charts.whole(index.at_s, index.series);
  let wanted = 0;
  const player = new Player(index, async (frame) => {
    wanted = frame;
    let moment;
    try {
      moment = await (await fetch(`../replay/moment.json?frame=${frame}`, { cache: "no-store" })).json();
      notice("");
    } catch (error) {
      player.stop();
      notice("The replay's server does not answer: start `banaserve ui --replay` again.");
      return;
    }
    if (frame !== wanted) return;
    board.feed.whole(moment.decisions);
    board.charts.show(moment.snapshot.figures, moment.snapshot.at_s);
    board.show(moment.snapshot);
    by("clock").textContent = `replay of ${info.title}`;
  });
  await player.go(0);
}

// ---- start

themed(() => board?.charts.recolour());

let info = null;
try {
  info = await (await fetch("page.json", { cache: "no-store" })).json();
  by("title").textContent = info.title;
  document.title = `${info.title} · banaserve`;
  if (info.time) { by("modelled").textContent = `Time is ${info.time}`; by("modelled").hidden = false; }
  if (info.mode === "replay") await replay();
  else live();
} catch (error) {
  notice(`This page cannot start: ${error.message}`);
}
