"use strict";
// Draws the page's charts out of the data embedded above. No library, no network.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const state = { axis: "step", smooth: 0.5, log: false, hidden: new Set(), hover: null, evaluation: 1 };
const MARGIN = { left: 52, right: 10, top: 8, bottom: 24 };
const HEIGHT = 230;
const drawn = [];

function colour(index) { return `var(--run-${index % 8})`; }
function dash(index) { return index < 8 ? "" : index < 16 ? "6 4" : "2 3"; }

function element(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function format(value, digits) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (digits !== undefined && (size === 0 || size >= 10 ** -digits)) {
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

// Round numbers that divide a range into about `count` parts.
function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(+at.toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) {
      const at = factor * 10 ** power;
      if (at >= low * 0.999 && at <= high * 1.001) found.push(at);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

// Exponential moving mean with the bias of its start taken out; 0 leaves the values as they are.
function smoothed(values, amount) {
  if (amount <= 0) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

// The lines of one chart as {run, x, y, low, high}, hidden runs left out.
function lines(chart) {
  const found = [];
  DATA.runs.forEach((run, index) => {
    if (state.hidden.has(index)) return;
    if (chart.slots) {
      const profiles = run.slots[chart.key] || [];
      if (!profiles.length) return;
      const at = Math.round(state.evaluation * (profiles.length - 1));
      const profile = profiles[at];
      found.push({ index, x: profile.y.map((_, slot) => slot + 1), y: profile.y, step: profile.step });
    } else {
      const series = run.series[chart.key];
      if (!series) return;
      const smooth = chart.points ? 0 : state.smooth;
      found.push({ index, x: series[state.axis], y: smoothed(series.y, smooth), low: series.low, high: series.high });
    }
  });
  return found;
}

// The range of what is drawn. A few values far above all others are cut off, or one slow or odd step would flatten
// the rest; the numbers above the chart still tell them.
function extent(found, log) {
  let low = Infinity, high = -Infinity, left = Infinity, right = -Infinity;
  const values = [];
  for (const line of found) {
    line.y.forEach((value, at) => {
      if (value === null || (log && value <= 0) || line.x[at] === null) return;
      low = Math.min(low, value); high = Math.max(high, value);
      values.push(value);
      left = Math.min(left, line.x[at]); right = Math.max(right, line.x[at]);
    });
  }
  if (values.length > 100 && !log) {
    values.sort((a, b) => a - b);
    const usual = values[Math.floor(0.99 * (values.length - 1))];
    if (usual > low && high - low > 2.5 * (usual - low)) high = low + 1.2 * (usual - low);
  }
  return { low, high, left, right };
}

function path(points) {
  let text = "", pen = false;
  for (const [x, y] of points) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = true;
  }
  return text;
}

function draw(item) {
  const { chart, svg } = item;
  svg.replaceChildren();
  const width = Math.max(200, svg.clientWidth || 460);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const found = lines(chart);
  const log = state.log && !chart.slots && chart.log;
  const box = extent(found, log);
  if (!Number.isFinite(box.low)) {
    element(svg, "text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show");
    item.lines = []; readout(item); return;
  }
  if (chart.zero && !log) box.low = Math.min(0, box.low);
  if (chart.top !== undefined) box.high = Math.max(chart.top, box.high);
  const pad = log ? 0 : (box.high - box.low || Math.abs(box.high) || 1) * 0.05;
  if (!log) { box.high += pad; if (!(chart.zero && box.low === 0)) box.low -= pad; }
  if (box.right === box.left) { box.left -= 0.5; box.right += 0.5; }
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const value = log ? Math.log10 : (v) => v;
  const bottom = value(box.low), top = value(box.high);
  const X = (x) => MARGIN.left + ((x - box.left) / (box.right - box.left)) * inner.width;
  const Y = (y) => MARGIN.top + (1 - (value(y) - bottom) / (top - bottom || 1)) * inner.height;
  for (const at of log ? logTicks(box.low, box.high) : ticks(box.low, box.high, 4)) {
    element(svg, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: Y(at), y2: Y(at) });
    element(svg, "text", { x: MARGIN.left - 6, y: Y(at) + 4, "text-anchor": "end" }, format(at));
  }
  const whole = chart.slots || state.axis === "step";
  for (const at of ticks(box.left, box.right, chart.slots ? 8 : Math.max(3, Math.floor(inner.width / 90)))) {
    if (whole && at !== Math.round(at)) continue;
    const end = X(at) > width - 24;
    element(svg, "text", { x: end ? width - MARGIN.right : X(at), y: HEIGHT - 6, "text-anchor": end ? "end" : "middle" }, compact(at));
  }
  element(svg, "line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom });
  const clip = (y) => Math.min(HEIGHT - MARGIN.bottom, Math.max(MARGIN.top, y));
  for (const line of found) {
    const points = line.y.map((y, at) => [X(line.x[at]), y === null || (log && y <= 0) ? NaN : clip(Y(y))]);
    if (line.low && line.low.length > 2) {
      const edge = (values) => values.map((y, at) => [X(line.x[at]), clip(Y(log ? Math.max(y, box.low) : y))]);
      element(svg, "path", { class: "band", fill: colour(line.index), d: path(edge(line.high).concat(edge(line.low).reverse())) + "Z" });
    }
    element(svg, "path", { class: "line", stroke: colour(line.index), "stroke-dasharray": dash(line.index), d: path(points) });
    if (chart.points || chart.slots) {
      for (const [x, y] of points) if (Number.isFinite(y)) element(svg, "circle", { cx: x, cy: y, r: 2.6, fill: colour(line.index) });
    }
  }
  Object.assign(item, { lines: found, X, box, width });
  item.cross = element(svg, "line", { class: "cross", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  readout(item);
}

function compact(value) {
  if (Math.abs(value) >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
  return format(value);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(xs[low - 1] - x) <= Math.abs(xs[low] - x) ? low - 1 : low;
}

// The numbers above a chart: at the pointer, or the last ones.
function readout(item) {
  const { chart, box, X } = item;
  const hover = state.hover && state.hover.slots === Boolean(chart.slots) ? state.hover.x : null;
  const inside = hover !== null && item.lines.length && hover >= box.left && hover <= box.right;
  item.text.replaceChildren();
  if (inside) {
    item.cross.setAttribute("x1", X(hover)); item.cross.setAttribute("x2", X(hover));
    item.cross.setAttribute("visibility", "visible");
    const where = document.createElement("span");
    where.className = "at";
    where.textContent = chart.slots ? `slot ${Math.round(hover)}` : `${AXES[state.axis]} ${compact(+hover.toPrecision(4))}`;
    item.text.append(where);
  } else if (item.cross) item.cross.setAttribute("visibility", "hidden");
  for (const line of item.lines) {
    const at = inside ? nearest(line.x, hover) : line.y.length - 1;
    const span = document.createElement("span");
    const dot = document.createElement("i");
    dot.className = "dot"; dot.style.background = colour(line.index);
    const number = document.createElement("b");
    if (chart.slots && !inside) number.textContent = `at step ${compact(line.step)}`;
    else number.textContent = format(line.y[at], chart.digits);
    span.append(dot, number);
    item.text.append(span);
  }
}

const AXES = { step: "step", hours: "hour", tokens: "context tokens (millions)" };

function build() {
  const grid = document.getElementById("charts");
  for (const chart of DATA.charts) {
    const card = document.createElement("section");
    card.className = "card chart";
    card.id = `chart-${chart.key}`;
    const title = document.createElement("h3");
    title.textContent = chart.title;
    const unit = document.createElement("small");
    unit.textContent = chart.unit || "";
    title.append(unit);
    const note = document.createElement("p");
    note.className = "note"; note.textContent = chart.note || "";
    const text = document.createElement("div");
    text.className = "readout";
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("role", "img"); svg.setAttribute("aria-label", chart.title);
    card.append(title, note, text, svg);
    grid.append(card);
    const item = { chart, svg, text, lines: [] };
    drawn.push(item);
    svg.addEventListener("pointermove", (event) => {
      if (!item.box) return;
      const share = (event.offsetX - MARGIN.left) / (item.width - MARGIN.left - MARGIN.right);
      const x = item.box.left + Math.min(1, Math.max(0, share)) * (item.box.right - item.box.left);
      state.hover = { slots: Boolean(chart.slots), x };
      drawn.forEach(readout);
    });
    svg.addEventListener("pointerleave", () => { state.hover = null; drawn.forEach(readout); });
  }
}

function redraw() { drawn.forEach(draw); }

function controls() {
  const runs = document.getElementById("runs");
  DATA.runs.forEach((run, index) => {
    const button = document.createElement("button");
    const dot = document.createElement("i");
    dot.className = "dot"; dot.style.background = colour(index);
    button.append(dot, run.name);
    button.setAttribute("aria-pressed", "true");
    button.title = "show or hide this run";
    button.addEventListener("click", () => {
      if (state.hidden.has(index)) state.hidden.delete(index); else state.hidden.add(index);
      button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      redraw();
    });
    runs.append(button);
  });
  const on = (id, event, act) => document.getElementById(id).addEventListener(event, (e) => { act(e.target); redraw(); });
  on("axis", "change", (input) => { state.axis = input.value; });
  on("smooth", "input", (input) => { state.smooth = Math.min(0.99, input.value / 100); });
  on("log", "change", (input) => { state.log = input.checked; });
  on("evaluation", "input", (input) => { state.evaluation = input.value / 100; });
}

build();
controls();
redraw();
new ResizeObserver(redraw).observe(document.getElementById("charts"));
document.documentElement.dataset.ready = "true";
