// This module computes rates from counters and formats numbers. It is independent of the page.

const WINDOW = 3; // seconds over which a rate is taken

// Returns a job's counters: sums that only grow within one process and one job.
export function countersOf(job) {
  return {
    rounds: job.rounds,
    raw: job.received.raw_bytes + job.sent.raw_bytes,
    wire: job.received.wire_bytes + job.sent.wire_bytes,
    wireUp: job.received.wire_bytes,
    wireDown: job.sent.wire_bytes,
    wait: job.wait_seconds,
    fold: job.fold_seconds,
    update: job.update_seconds ?? 0, // only jobs have them
    last: (job.nodes ?? []).map((node) => node.last_rounds), // a shard has no nodes, only jobs have
    waited: (job.nodes ?? []).map((node) => node.waited_seconds),
  };
}

// A Track keeps the latest samples of counters and computes their growth.
export class Track {
  #samples = [];

  // `time` is the process's uptime in seconds; `era` names process and job: counters of different
  // eras are not comparable.
  add(era, time, counters) {
    const before = this.#samples.at(-1);
    const reset = before && (before.era !== era || time <= before.time || counters.rounds < before.counters.rounds);
    if (reset) this.#samples = [];
    this.#samples.push({ era, time, counters });
    while (this.#samples.length > 2 && time - this.#samples[1].time >= WINDOW) this.#samples.shift();
  }

  // Returns the growth over the window with the window's length in seconds; null before there are
  // two samples.
  growth() {
    if (this.#samples.length < 2) return null;
    const first = this.#samples[0];
    const last = this.#samples.at(-1);
    const minus = (a, b) => (Array.isArray(a) ? a.map((x, i) => x - (b[i] ?? 0)) : a - b);
    const grown = { seconds: last.time - first.time };
    for (const key of Object.keys(last.counters)) grown[key] = minus(last.counters[key], first.counters[key]);
    return grown;
  }
}

// Returns what a job does now: rates over the window; ratios over the window or, while nothing
// moves, since the job began.
export function ratesOf(counters, growth) {
  const moving = growth !== null && growth.rounds > 0;
  const base = moving ? growth : counters;
  const per = (value) => (growth === null ? null : value / growth.seconds);
  const each = (value) => (base.rounds > 0 ? value / base.rounds : null);
  const sum = base.waited.reduce((a, b) => a + b, 0);
  return {
    rounds: per(growth?.rounds),
    wire: per(growth?.wire),
    up: per(growth?.wireUp),
    down: per(growth?.wireDown),
    ratio: base.wire > 0 && base.raw > 0 ? base.raw / base.wire : null,
    wait: each(base.wait),
    fold: each(base.fold),
    update: each(base.update),
    nodes: base.last.map((last, i) => ({
      last: each(last),
      waited: last > 0 ? base.waited[i] / last : null,
      share: sum > 0 ? base.waited[i] / sum : 0,
    })),
  };
}

const NOTABLE_SECONDS = 0.002; // a mean delay below it makes no node the slowest

// Returns the node that others wait for most, if it stands out; else -1.
export function slowest(nodes) {
  if (nodes.length < 2) return -1;
  const order = nodes.map((node, i) => [node.share, i]).sort((a, b) => b[0] - a[0]);
  const [most] = order;
  if (nodes[most[1]].waited === null || nodes[most[1]].waited < NOTABLE_SECONDS) return -1;
  return most[0] >= 0.5 && most[0] >= 1.5 * order[1][0] ? most[1] : -1;
}

const NONE = "–";
const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function whole(value) {
  return integer.format(value);
}

// Formats three significant digits without an exponent.
export function digits(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 100) return whole(value);
  if (value >= 9.95) return value.toFixed(1);
  if (value === 0) return "0";
  return value >= 0.995 ? value.toFixed(2) : value.toPrecision(2);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? whole(value) : digits(value)} ${units[unit]}`;
}

export function rate(value) {
  return value === null ? NONE : `${bytes(value)}/s`;
}

export function times(value) {
  return value === null ? NONE : `${digits(value)}×`;
}

export function percent(value) {
  return value === null ? NONE : `${Math.round(100 * value)} %`;
}

// Formats two significant digits: a third digit of a single measured time has no meaning.
const brief = (value) => (value < 9.95 ? value.toFixed(1) : value.toFixed(0));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.9995e-3) return `${(1e6 * seconds).toFixed(0)} µs`;
  if (seconds < 0.9995) return `${brief(1e3 * seconds)} ms`;
  if (seconds < 59.5) return `${brief(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function plural(count, one, many) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}
