// Chart draws a line over the last minutes as SVG.

const MOST = 300; // seconds on the axis, once there are so many
const LEAST = 60;
const GAP = 6; // longer without a value, and the line is interrupted
const WIDTH = 300;
const HEIGHT = 72;

const svg = (name, attributes, parent) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
};

export class Chart {
  #points = []; // [seconds, value], ascending

  // `figure` holds a caption, a .value and an svg; `format` turns a value into text; `floor` is where the axis begins.
  constructor(figure, format, floor = 0) {
    this.value = figure.querySelector(".value");
    this.root = figure.querySelector("svg");
    this.name = figure.querySelector("figcaption").textContent;
    this.format = format;
    this.floor = floor;
    this.begin = figure.querySelector(".axis").firstElementChild;
    this.root.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.root.setAttribute("preserveAspectRatio", "none");
    svg("path", { class: "base", d: `M0 ${HEIGHT}H${WIDTH}` }, this.root);
    this.area = svg("path", { class: "area" }, this.root);
    this.line = svg("path", { class: "line" }, this.root);
  }

  // Adds a value at `seconds` on the caller's clock; null adds none.
  add(seconds, value) {
    if (value !== null && Number.isFinite(value)) this.#points.push([seconds, value]);
    while (this.#points.length && this.#points[0][0] < seconds - MOST) this.#points.shift();
    this.#draw(seconds);
  }

  #draw(now) {
    const most = Math.max(...this.#points.map((point) => point[1]), this.floor + 1e-9);
    const span = Math.max(LEAST, now - (this.#points[0]?.[0] ?? now));
    const ago = `${Math.round(span / 60)} min ago`;
    if (this.begin.textContent !== ago) this.begin.textContent = ago;
    const x = (seconds) => (WIDTH * (1 - (now - seconds) / span)).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 6) * ((value - this.floor) / (most - this.floor))).toFixed(1);
    let line = "";
    let area = "";
    let before = null;
    for (const [seconds, value] of this.#points) {
      const start = before === null || seconds - before > GAP;
      if (start && before !== null) area += `V${HEIGHT}Z`;
      line += `${start ? "M" : "L"}${x(seconds)} ${y(value)}`;
      area += start ? `M${x(seconds)} ${HEIGHT}V${y(value)}` : `L${x(seconds)} ${y(value)}`;
      before = seconds;
    }
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", before === null ? "" : `${area}V${HEIGHT}Z`);
    this.root.setAttribute("aria-label", this.#describe());
  }

  #describe() {
    if (this.#points.length === 0) return `${this.name}: no figures yet`;
    const values = this.#points.map((point) => point[1]);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return `${this.name} over the last minutes: from ${this.format(least)} to ${this.format(most)}, now ${this.format(values.at(-1))}`;
  }
}
