// The balancer's page: figures and replicas, read every second with the admin key.
import { Charts } from "./charts.js";
import { by, chip, clock, count, h, percent, renew, seconds, table, themed } from "./elements.js";

const READ_MS = 1000, PATIENCE_MS = 5000;
const FIGURES = [
  { name: "Time to first token", lines: [["ttft_p50_s", "p50"], ["ttft_p99_s", "p99"]], words: seconds },
  { name: "Requests", lines: [["num_under_way", "under way"], ["num_waiting", "in the queue"]], words: count, whole: true },
  { name: "Answers", lines: [["answers_per_s", "all"], ["failures_per_s", "failed"]], words: (value) => value.toFixed(1), unit: "/s" },
];

let charts = null;
let before = null;

function notice(words) {
  by("notice").textContent = words;
  by("notice").hidden = !words;
  by("clock").classList.toggle("live", !words);
}

// How fast a counter has risen since the last reading.
function rate(status, name) {
  const passed = before ? status.at_s - before.at_s : 0;
  return passed > 0 ? Math.max(0, (status[name] - before[name]) / passed) : null;
}

function show(status) {
  by("title").textContent = `${status.region}, ${status.policy}`;
  by("clock").textContent = clock(status.at_s);
  const figures = { ...status.figures, answers_per_s: rate(status, "num_answers"), failures_per_s: rate(status, "num_failures") };
  charts.add(status.at_s, figures);
  renew(by("replicas"), replicas(status.targets));
  const hedges = Object.entries(status.hedges).map(([event, number]) => `${number} ${event.replace("_", " ")}`);
  by("hedges").textContent = `Late requests: ${hedges.join(", ")}.`;
  by("hedges").hidden = !hedges.length;
  before = status;
}

function replicas(targets) {
  const known = new Map(before?.targets.map((one) => [one.id, one]));
  const headings = ["Replica", "State", ">Outstanding", ">No token yet", ">Waits there", ">Runs there", ">Answers", ">Failed",
    ">First token", ">In cache", ">Round trip", "Ejections"];
  const perSecond = (one) => {
    const past = known.get(one.id);
    return past ? Math.max(0, one.num_answers - past.num_answers) : null;
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Replicas and peers" },
    table(headings, targets.map((one) => [
      one.id === new URL(one.url).host ? one.url : `${one.id} (${one.url})`,
      [chip(one.state), one.ejected_s ? ` ${seconds(one.ejected_s)} left` : null],
      count(one.num_outstanding), count(one.num_prefilling), count(one.num_pending), count(one.num_running),
      `${count(one.num_answers)}${perSecond(one) === null ? "" : ` (+${perSecond(one)})`}`,
      count(one.num_failures), seconds(one.first_token_s),
      `${percent(one.hit_fraction)}${one.cache ? `, ${one.cache}` : ""}`,
      seconds(one.round_trip_ms / 1e3 || null), // 0: not measured yet
      Object.entries(one.ejections).map(([reason, number]) => `${number} for ${reason}`).join(", ") || "–",
    ])));
}

// Returns whether to go on.
async function read(key) {
  let answer;
  try {
    answer = await fetch("../admin/status", {
      headers: { Authorization: `Bearer ${key}` }, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (answer.status === 401) {
      by("login-error").textContent = "The balancer refuses this key.";
      by("login").hidden = false;
      by("board").hidden = by("leave").hidden = true;
      return false;
    }
    if (!answer.ok) throw new Error(`The balancer answers ${answer.status}.`);
    const status = await answer.json();
    by("login").hidden = true;
    by("board").hidden = by("leave").hidden = false;
    charts ||= new Charts(FIGURES);
    show(status);
    notice("");
  } catch (error) {
    notice(answer && !answer.ok ? error.message : "The balancer does not answer.");
  }
  return true;
}

// A tab in the background asks for nothing.
const shown = () => document.hidden && new Promise((wake) => document.addEventListener("visibilitychange", wake, { once: true }));

async function open(key) {
  while (await read(key)) {
    await new Promise((wake) => setTimeout(wake, READ_MS));
    await shown();
  }
}

by("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = by("key").value.trim();
  by("key").value = by("login-error").textContent = "";
  // What no header can carry is no key; fetch would throw at it.
  if (/^[\x21-\x7e]+$/.test(key)) open(key);
  else by("login-error").textContent = "A key has no spaces and only ASCII characters.";
});
by("leave").addEventListener("click", () => location.reload());
themed(() => charts?.recolour());
by("key").focus();
