// This module polls the API and shows its answers.

import { JobCard, setFigure, setText } from "./job.js";
import { Track, bytes, countersOf, digits, duration, plural, rate, ratesOf, times, whole } from "./rates.js";

const INTERVAL = 1000; // ms
const PATIENCE = 5000; // ms, for an answer

const byId = (id) => document.getElementById(id);
const clock = () => performance.now() / 1000;
const timeOf = (date) => date.toLocaleTimeString("en-GB");

const cards = new Map(); // by identity and name
const sums = new Track();
let lostSince = null;
let paused = false;
let timer = 0;

class NoAnswer extends Error {}

async function get(path) {
  try {
    const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (reply.ok) return await reply.json();
  } catch {
    // A failed connection, a timeout and a truncated answer look the same to the user.
  }
  throw new NoAnswer(path);
}

async function update() {
  try {
    const [shard, jobs] = await Promise.all([get("api/v1/shard"), get("api/v1/jobs")]);
    lostSince = null;
    setStatus("live", shard.draining ? "Shutting down: takes no new jobs" : "Live");
    show(shard, jobs);
  } catch (error) {
    if (!(error instanceof NoAnswer)) throw error;
    lostSince ??= new Date();
    setStatus("lost", `Not reachable since ${timeOf(lostSince)}; trying again`);
  } finally {
    if (!paused) timer = setTimeout(update, INTERVAL);
  }
}

// Screen readers announce the status only when it changes.
function setStatus(state, text) {
  byId("status").dataset.state = state;
  setText(byId("status"), text);
}

function show(shard, jobs) {
  setText(byId("place"), `shard ${location.host}`);
  document.title = `Thalweg shard ${location.host}`;
  setText(byId("version"), `Thalweg ${shard.version}, up for ${duration(shard.uptime_seconds)}`);
  showSums(shard);
  showJobs(jobs);
  showFaults(shard);
}

function showSums(shard) {
  const counters = countersOf({ ...shard, wait_seconds: 0 });
  sums.add(shard.started_unix_seconds, shard.uptime_seconds, counters);
  const rates = ratesOf(counters, sums.growth());
  const sum = (name) => document.querySelector(`[data-sum="${name}"]`);
  setText(sum("jobs"), whole(shard.jobs));
  setFigure(sum("rounds"), rates.rounds === null ? "–" : `${digits(rates.rounds)}/s`);
  setText(sum("received"), rate(rates.up));
  setText(sum("sent"), rate(rates.down));
  setText(sum("ratio"), times(rates.ratio));
  setText(sum("held"), bytes(shard.held_bytes));
}

function showJobs(answer) {
  const list = byId("job-list");
  const idOf = (job) => `${job.identity}-${job.name}`; // different jobs may have one name
  const present = new Set(answer.jobs.map(idOf));
  for (const [id, card] of cards) {
    if (present.has(id)) continue;
    card.element.remove();
    cards.delete(id);
  }
  answer.jobs.forEach((job, i) => {
    const card = cards.get(idOf(job)) ?? new JobCard(job.name, idOf(job));
    cards.set(idOf(job), card);
    if (list.children[i] !== card.element) list.insertBefore(card.element, list.children[i] ?? null);
    card.show(job, answer, clock());
  });
  byId("no-jobs").hidden = answer.jobs.length > 0;
}

function showFaults(shard) {
  byId("no-faults").hidden = shard.faults.length > 0;
  byId("faults").hidden = shard.faults.length === 0;
  const reasons = shard.reasons.map((r) => {
    const what = [];
    if (r.jobs_failed) what.push(`${plural(r.jobs_failed, "job", "jobs")} failed`);
    if (r.nodes_refused) what.push(`${plural(r.nodes_refused, "node", "nodes")} refused`);
    return `${r.reason}: ${what.join(", ")}`;
  });
  setText(byId("reasons"), reasons.join(" · "));
  const rows = shard.faults.map((fault) => {
    const row = document.createElement("tr");
    const cells = [
      ["when", `${timeOf(new Date(Date.now() - 1000 * fault.seconds_ago))}, ${duration(fault.seconds_ago)} ago`],
      ["job-name", fault.job],
      ["", fault.kind === "refused" ? `${fault.reason}, node refused` : fault.reason],
      ["message", fault.message],
      ["number", fault.rounds_lost === 0 ? "–" : whole(fault.rounds_lost)],
    ];
    for (const [kind, text] of cells) {
      const cell = document.createElement("td");
      if (kind) cell.className = kind;
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  byId("fault-rows").replaceChildren(...rows);
}

byId("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  setText(event.target, paused ? "Go on" : "Pause");
  clearTimeout(timer);
  if (paused) setStatus("paused", `Paused at ${timeOf(new Date())}`);
  else update();
});

update();
