// JobCard is the card of one job. Its elements are made once and then updated, so that focus and
// selection stay.

import { Chart } from "./chart.js";
import { Track, bytes, countersOf, digits, duration, percent, plural, rate, ratesOf, slowest, times, whole } from "./rates.js";

const perSecond = (value) => (value === null ? "–" : `${digits(value)}/s`);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Shows "value" in the element's own size and "note" in small print.
export function setFigure(element, value, note = "") {
  setText(element, value);
  if (note === "") return;
  const small = document.createElement("small");
  small.textContent = ` ${note}`;
  element.append(small);
}

export class JobCard {
  #track = new Track();

  // `id` is unlike that of any other card.
  constructor(name, id) {
    this.element = document.getElementById("job").content.firstElementChild.cloneNode(true);
    const heading = this.element.querySelector("h3");
    heading.textContent = name;
    heading.id = `job-${encodeURIComponent(id)}`;
    this.element.setAttribute("aria-labelledby", heading.id);
    this.element.querySelector(".scroll").setAttribute("aria-label", `Nodes of ${name}`);
    this.element.querySelector("caption").textContent = `Nodes of ${name}`;
    this.rows = this.element.querySelector("tbody");
    const chart = (key, ...rest) => new Chart(this.element.querySelector(`[data-chart="${key}"]`), ...rest);
    this.charts = { rounds: chart("rounds", perSecond), bytes: chart("bytes", rate), ratio: chart("ratio", times) };
  }

  // `answer` is the head of the API's answer; `now` is a clock in seconds that also advances while
  // the shard is down.
  show(job, answer, now) {
    const counters = countersOf(job);
    this.#track.add(answer.started_unix_seconds, answer.uptime_seconds, counters);
    const rates = ratesOf(counters, this.#track.growth());
    this.#showState(job);
    this.#showCharts(job, rates, now);
    this.#showPhases(job, rates);
    this.#showNodes(job, rates.nodes);
    this.#showDetails(job);
    return rates;
  }

  #field(name) {
    return this.element.querySelector(`[data-field="${name}"]`);
  }

  #showState(job) {
    const present = job.nodes.filter((node) => node.state === "active").length;
    const state = this.#field("state");
    state.dataset.state = job.state;
    setText(state, job.state === "gathering" ? `${present} of ${job.nodes.length} nodes are here` : job.state);
    const place = `shard ${job.shard} of ${job.shards}`;
    const size = `${plural(job.nodes.length, "node", "nodes")}, ${plural(job.workers, "worker", "workers")}`;
    setText(this.#field("facts"), `${size} · ${place} · for ${duration(job.age_seconds)}`);
    this.#showWaiting(job);
  }

  #showWaiting(job) {
    const element = this.#field("waiting");
    const long = job.waiting !== null && job.waiting.seconds >= 1;
    element.hidden = !(long || job.state === "failed");
    element.dataset.state = job.state;
    if (job.state === "failed") {
      setText(element, job.failure);
    } else if (long) {
      const names = job.waiting.nodes.map((i) => `node ${i} (${job.nodes[i].name})`).join(", ");
      const left = Math.max(0, job.round_timeout_seconds - job.waiting.seconds);
      setText(element, `Waiting for ${names} for ${duration(job.waiting.seconds)}; the job fails in ${duration(left)}.`);
    }
  }

  #showCharts(job, rates, now) {
    const { rounds, bytes: wire, ratio } = this.charts;
    setFigure(rounds.value, perSecond(rates.rounds), `${whole(job.rounds)} in all`);
    setFigure(wire.value, rate(rates.wire), rates.up === null ? "" : `${rate(rates.up)} in, ${rate(rates.down)} out`);
    setFigure(ratio.value, times(rates.ratio), this.#volume(job));
    rounds.add(now, rates.rounds);
    wire.add(now, rates.wire);
    ratio.add(now, rates.ratio);
  }

  #volume(job) {
    const raw = job.received.raw_bytes + job.sent.raw_bytes;
    const wire = job.received.wire_bytes + job.sent.wire_bytes;
    return raw > 0 ? `${bytes(raw)} as ${bytes(wire)}` : "";
  }

  #showPhases(job, rates) {
    const total = (rates.wait ?? 0) + (rates.fold ?? 0) + (rates.update ?? 0);
    const width = (value) => (total > 0 ? `${(100 * (value ?? 0)) / total}%` : "0");
    this.element.querySelector('[data-phase="wait"]').style.width = width(rates.wait);
    this.element.querySelector('[data-phase="fold"]').style.width = width(rates.fold);
    this.element.querySelector('[data-phase="update"]').style.width = width(rates.update);
    const wait = document.createElement("span");
    wait.className = "key-wait";
    wait.textContent = `${duration(rates.wait)} from the first node to the last`;
    const fold = document.createElement("span");
    fold.className = "key-fold";
    fold.textContent = `${duration(rates.fold)} summing`;
    const update = document.createElement("span");
    update.className = "key-update";
    update.textContent = `${duration(rates.update)} updating weights`;
    update.hidden = job.update_seconds === 0;
    this.#field("phases").replaceChildren(wait, fold, update);
  }

  #showNodes(job, rates) {
    const slow = slowest(rates);
    while (this.rows.children.length > job.nodes.length) this.rows.lastElementChild.remove();
    job.nodes.forEach((node, i) => {
      const row = this.rows.children[i] ?? this.#addRow();
      const [name, state, workers, silent, last, waited, share] = row.children;
      setText(name.firstElementChild, `${i}`);
      setText(name.lastElementChild, node.name);
      const states = [node.state];
      if (i === slow) states.push("slowest");
      if (node.reconnections) states.push(`reconnected ${plural(node.reconnections, "time", "times")}`);
      setText(state, states.join(", "));
      state.dataset.state = node.state;
      state.classList.toggle("slowest", i === slow);
      setText(workers, node.state === "missing" ? "–" : `${node.workers}`);
      setText(silent, node.state === "active" ? `${duration(node.silent_seconds)} ago` : "–");
      setText(last, percent(rates[i].last));
      setText(waited, duration(rates[i].waited));
      share.classList.toggle("slowest", i === slow);
      share.firstElementChild.style.width = `${Math.round(70 * rates[i].share)}%`;
      setText(share.lastElementChild, ` ${percent(rates[i].share)}`);
    });
  }

  #addRow() {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    const number = document.createElement("span");
    number.className = "quiet";
    head.append(number, document.createElement("span"));
    row.append(head);
    for (const kind of ["", "number", "number", "number", "number", "share"]) {
      const cell = document.createElement("td");
      if (kind) cell.className = kind;
      row.append(cell);
    }
    row.lastElementChild.append(document.createElement("i"), document.createElement("span"));
    this.rows.append(row);
    return row;
  }

  #showDetails(job) {
    const format = (f) => (f.factors ? `PowerSGD factors in ${f.format}` : f.format);
    const described = job.formats.map((f) => `${format(f)} (${bytes(f.received.wire_bytes)})`);
    const speed = job.link_bytes_per_second;
    const link = `${rate(speed)}, ${duration(job.link_round_trip_seconds)} there and back`;
    const flow = `chunks of ${bytes(job.chunk_bytes)}, window of ${job.window_chunks}`;
    // Only the first shard knows it, and not before all nodes are there.
    const unknown = job.shard > 0 ? "the first shard says it" : "not known";
    setText(this.#field("codec"), job.codec);
    setText(this.#field("placement"), job.placement === null ? unknown : job.placement.text);
    // With a lossy codec it has residuals, but then nothing is updated.
    const weights = this.#field("weights");
    weights.parentElement.hidden = job.update_seconds === 0;
    setText(weights, `${bytes(job.residual_bytes)} here, with the optimizer's state`);
    setText(this.#field("key"), job.identity === "" ? "none: whoever reaches the shard can join" : job.identity.slice(0, 8));
    setText(this.#field("formats"), described.join(", ") || "nothing yet");
    setText(this.#field("link"), speed > 0 ? link : "not measured");
    setText(this.#field("flow"), job.chunk_bytes > 0 ? flow : "not agreed yet");
  }
}
