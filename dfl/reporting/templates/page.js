"use strict";
// The script of a page: charts, the graph, maps and the table of peers, drawn from the JSON in it.

const data = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const tip = get("tip");
const COLOURS = 6;
const DASHES = ["", "8 3", "2 3", "10 3 2 3", "5 5"];
const VIRIDIS = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141],
  [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
];
const COUNTED = new Set(["round", "index"]); // x axes without fractions
const NAMED = 32; // the most peers that are labelled by their number
const PAGE = 50; // rows of a table at a time
const IDENTIFIERS = new Set(["peer", "rank", "most_frequent_label"]); // columns that name, not count

// What a reader has chosen survives a reload, where the browser keeps it.
const KEY = "dfl " + location.pathname;
const state = { x: "round", colour: "", frame: null, own: true, hidden: {}, sort: "", down: false, filter: "" };
try {
  Object.assign(state, JSON.parse(sessionStorage.getItem(KEY)));
} catch { /* without storage */ }
function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(state));
  } catch { /* without storage */ }
}

function make(name, attributes = {}, text = "") {
  const svg = ["svg", "g", "path", "line", "text", "rect", "circle"].includes(name);
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Numbers of an array as `packed` or `floats` in page.py writes it; NaN where one is missing.
function unpacked({ low, step, codes, floats }) {
  const bytes = Uint8Array.from(atob(codes ?? floats), (c) => c.charCodeAt(0));
  const held = new DataView(bytes.buffer);
  const values = new Float64Array(bytes.length / (floats ? 4 : 2));
  for (let i = 0; i < values.length; i++) {
    if (floats) {
      values[i] = held.getFloat32(4 * i, true);
      continue;
    }
    const code = held.getUint16(2 * i, true);
    values[i] = code === 65535 ? NaN : low + step * code;
  }
  return values;
}

function shown(value, name = "") {
  if (value === null || Number.isNaN(value)) return "–";
  if (name.includes("bytes")) return prefixed(value) + "B";
  if (IDENTIFIERS.has(name)) return String(value);
  if (!isPlain(value)) return value.toExponential(2);
  return rounded(value, name).toLocaleString("en", { maximumFractionDigits: 12 });
}

// Whether a number is shown without an exponent.
function isPlain(value) {
  const size = Math.abs(value);
  return Number.isInteger(value) ? size < 1e9 : size >= 1e-3 && size < 1e5;
}

// A number to the digits that `shown` shows.
function rounded(value, name) {
  if (name.includes("bytes")) return Number(value.toPrecision(3));
  if (!isPlain(value)) return Number(value.toPrecision(3));
  return Number.isInteger(value) ? value : Number(value.toPrecision(4));
}

// Numbers beside an axis, in all their digits: neighbours may differ in the last of them. They have
// one form, but for a logarithmic axis, whose numbers differ in size.
function tickTexts(values, most, log = false) {
  const largest = Math.max(...values.map(Math.abs));
  return values.map((value) => {
    const size = log ? Math.abs(value) : largest;
    if (value && (size >= most || size < 1e-3)) return value.toExponential();
    return value.toLocaleString("en", { maximumFractionDigits: 12 });
  });
}

function prefixed(value) {
  const units = ["", "k", "M", "G", "T", "P"];
  let k = 0;
  while (Math.abs(value) >= 1000 && k < units.length - 1) {
    value /= 1000;
    k++;
  }
  return Number(value.toPrecision(3)) + " " + units[k];
}

// Append a name of a column, which may be broken after each _.
function appendName(parent, name) {
  name.split(/(?<=_)/).forEach((part, i) => parent.append(...(i ? [make("wbr"), part] : [part])));
}

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const right = x + tip.offsetWidth + 24 > innerWidth;
  const left = right ? x - tip.offsetWidth - 12 : x + 12;
  const top = Math.min(y + 12, innerHeight - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}
function hideTip() {
  tip.hidden = true;
}

// ---- charts

function ticks(low, high, about, least = 0) {
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, [1, 2, 5, 10].find((m) => m * power >= raw * 0.7) * power);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
    found.push(Number((k * step).toPrecision(12)) + 0);
  }
  return found;
}

function logTicks(low, high) {
  if (high / low < 5) return ticks(low, high, 4);
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) {
    for (const m of high / low < 30 ? [1, 2, 5] : [1]) {
      const value = Number((m * 10 ** k).toPrecision(12));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length > 8 ? found.filter((_, i) => i % Math.ceil(found.length / 8) === 0) : found;
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value !== null && value !== undefined && Number.isFinite(value)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return low <= high ? [low, high] : null;
}

// A chart of the lines of `spec` over columns of `tables`; returns the function that draws it.
function chart(parent, spec, tables) {
  const figure = make("figure");
  const caption = make("figcaption", {}, spec.title);
  const about = [spec.unit, spec.log && "logarithmic axis without zeros"].filter(Boolean);
  if (about.length) caption.append(make("small", {}, about.join("; ")));
  const svg = make("svg", { tabindex: 0, role: "img" });
  svg.setAttribute("aria-label", `${spec.title}: line chart; the arrow keys read its values`);
  const readout = make("div", { class: "readout", "aria-live": "polite" });
  const legend = make("ul", { class: "legend" });
  figure.append(caption, svg, legend, readout);
  parent.append(figure);
  const hidden = new Set(state.hidden[spec.title] ?? []);
  spec.lines.forEach((line, i) => legend.append(entry(line, line.style ?? i)));
  let points = []; // of each line that is drawn: name, x, y, and the place of both
  let cursor = null;

  function entry(line, i) {
    const button = make("button", { type: "button", "aria-pressed": !hidden.has(line.name), title: line.name.slice(0, 300) });
    const sample = make("svg", { "aria-hidden": true, viewBox: "0 0 26 12" });
    sample.append(make("path", { class: "line", d: "M0 6H26", style: style(i) }));
    button.append(sample, make("span", {}, line.name));
    button.addEventListener("click", () => {
      if (!hidden.delete(line.name)) hidden.add(line.name);
      button.setAttribute("aria-pressed", !hidden.has(line.name));
      state.hidden[spec.title] = [...hidden];
      keep();
      draw();
    });
    const item = make("li");
    item.append(button);
    return item;
  }

  function style(i) {
    return `stroke: var(--s${i % COLOURS}); stroke-dasharray: ${DASHES[i % DASHES.length] || "none"}`;
  }

  function draw() {
    const xName = spec.x || state.x;
    const wide = svg.clientWidth || 480;
    const high = svg.clientHeight || 260;
    const box = { left: 58, right: wide - 14, top: 12, bottom: high - 42 };
    svg.replaceChildren();
    const lines = spec.lines
      .map((line, i) => ({ ...line, i: line.style ?? i, table: tables[line.table] }))
      .filter((line) => !hidden.has(line.name) && line.table[xName] && line.table[line.y]);
    const usable = (v) => v !== null && v !== undefined && Number.isFinite(v) && (!spec.log || v > 0);
    const xs = extent(lines.flatMap((line) => line.table[xName]));
    const columns = lines.flatMap((l) => [l.y, l.low, l.high].filter(Boolean).map((n) => l.table[n] ?? []));
    const ys = extent(columns.flat().filter(usable));
    points = [];
    cursor = null;
    if (!xs || !ys) {
      svg.append(make("text", { x: box.left, y: 40 }, "nothing to draw"));
      return;
    }
    let [x0, x1] = xs;
    let [y0, y1] = ys;
    if (x0 === x1) x1 = x0 + 1;
    if (spec.log) {
      if (y1 < y0 * 1.2) [y0, y1] = [y0 / 1.5, y1 * 1.5];
    } else {
      const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
      const flat = y0 >= 0 && y0 - room < 0;
      [y0, y1] = [flat ? 0 : y0 - room, y1 + room];
    }
    const of = spec.log ? Math.log : (v) => v;
    const toX = (v) => box.left + ((v - x0) / (x1 - x0)) * (box.right - box.left);
    const toY = (v) => box.bottom - ((of(v) - of(y0)) / (of(y1) - of(y0))) * (box.bottom - box.top);
    axes(box, { x0, x1, y0, y1, toX, toY, xName });
    for (const line of lines) {
      const x = line.table[xName];
      const y = line.table[line.y];
      const low = line.table[line.low];
      const top = line.table[line.high];
      if (low && top) {
        const known = (k) => usable(top[k]) && usable(x[k] + 1) && low[k] !== null;
        const there = x.map((_, k) => k).filter(known);
        const up = there.map((k) => `${toX(x[k]).toFixed(1)} ${toY(top[k]).toFixed(1)}`);
        const down = there.map((k) => `${toX(x[k]).toFixed(1)} ${(usable(low[k]) ? toY(low[k]) : box.bottom).toFixed(1)}`).reverse();
        if (there.length > 1) {
          const d = `M${[...up, ...down].join("L")}Z`;
          svg.append(make("path", { class: "band", d, style: `fill: var(--s${line.i % COLOURS})` }));
        }
      }
      let d = "";
      const own = [];
      x.forEach((at, k) => {
        if (at === null || !usable(y[k])) return;
        const place = [toX(at), toY(y[k])];
        d += `${own.length && own[own.length - 1].k === k - 1 ? "L" : "M"}${place[0].toFixed(1)} ${place[1].toFixed(1)}`;
        own.push({ k, x: at, y: y[k], low: low?.[k], high: top?.[k], place });
      });
      svg.append(make("path", { class: "line", d, style: style(line.i) }));
      if (own.length <= 30) {
        for (const { place } of own) {
          svg.append(make("circle", { cx: place[0], cy: place[1], r: 2.5, style: `fill: var(--s${line.i % COLOURS})` }));
        }
      }
      points.push({ name: line.name, own });
    }
  }

  function axes(box, { x0, x1, y0, y1, toX, toY, xName }) {
    const xLabel = spec.x || data.x[xName];
    const bytes = spec.lines.some((line) => line.y.includes("bytes"));
    const up = spec.log ? logTicks(y0, y1) : ticks(y0, y1, 5);
    const upTexts = bytes ? up.map(prefixed) : tickTexts(up, 1e6, spec.log);
    for (const [k, v] of up.entries()) {
      svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: toY(v), y2: toY(v) }));
      svg.append(make("text", { x: box.left - 6, y: toY(v) + 4, "text-anchor": "end" }, upTexts[k]));
    }
    const along = ticks(x0, x1, (box.right - box.left) / 90, COUNTED.has(xName) ? 1 : 0);
    const alongTexts = xName.includes("bytes") ? along.map((v) => prefixed(v) + "B") : tickTexts(along, 1e9);
    for (const [k, v] of along.entries()) {
      svg.append(make("line", { class: "grid", x1: toX(v), x2: toX(v), y1: box.bottom, y2: box.bottom + 5 }));
      const anchor = toX(v) > box.right - 20 ? "end" : "middle";
      const place = anchor === "end" ? box.right + 12 : toX(v);
      svg.append(make("text", { x: place, y: box.bottom + 19, "text-anchor": anchor }, alongTexts[k]));
    }
    const middle = (box.left + box.right) / 2;
    svg.append(make("text", { x: middle, y: box.bottom + 36, "text-anchor": "middle" }, xLabel));
  }

  function read(at) {
    svg.querySelector(".cursor")?.remove();
    const every = points.flatMap((line) => line.own);
    if (!every.length) return "";
    const nearest = every.reduce((a, b) => (Math.abs(b.place[0] - at) < Math.abs(a.place[0] - at) ? b : a));
    cursor = nearest.place[0];
    svg.append(make("line", { class: "cursor", x1: cursor, x2: cursor, y1: 12, y2: svg.clientHeight - 42 }));
    const xName = spec.x || state.x;
    const lines = points.flatMap(({ name, own }) => {
      const here = own.find((point) => Math.abs(point.place[0] - cursor) < 0.6);
      if (!here) return [];
      const range = here.low !== undefined && here.low !== null ? ` (${shown(here.low)} to ${shown(here.high)})` : "";
      return [`${name.slice(0, 80)}: ${shown(here.y)}${range}`];
    });
    return [`${spec.x || data.x[xName]} ${shown(nearest.x, xName)}`, ...lines.slice(0, 14)].join("\n");
  }

  svg.addEventListener("pointermove", (event) => {
    const text = read(event.clientX - svg.getBoundingClientRect().left);
    if (text) showTip(text, event.clientX, event.clientY);
  });
  svg.addEventListener("pointerleave", () => {
    svg.querySelector(".cursor")?.remove();
    hideTip();
  });
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const places = [...new Set(points.flatMap((line) => line.own.map((p) => p.place[0])))].sort((a, b) => a - b);
    if (!places.length) return;
    const at = cursor === null ? -1 : places.findIndex((place) => place >= cursor - 0.1);
    const next = cursor === null ? (way > 0 ? 0 : places.length - 1) : at + way;
    readout.textContent = read(places[Math.max(0, Math.min(places.length - 1, next))]).replaceAll("\n", ", ");
  });
  return draw;
}

const redraw = []; // functions that draw again what depends on the size and the colours of the page

function drawCharts() {
  const parent = get("charts");
  if (!parent || !data.charts) return;
  const select = get("x-axis");
  const used = Object.keys(data.x).filter((name) => data.tables.some((table) => table[name]?.some((v) => v > 0) || (table[name] && name === "round")));
  for (const name of used) select.append(make("option", { value: name }, data.x[name]));
  if (!used.includes(state.x)) state.x = used[0] ?? "round";
  select.value = state.x;
  const drawn = data.charts.map((spec) => chart(parent, spec, data.tables));
  select.addEventListener("change", () => {
    state.x = select.value;
    keep();
    drawn.forEach((draw) => draw());
  });
  redraw.push(...drawn);
}

function drawSpectrum() {
  const parent = get("spectrum-chart");
  if (parent && data.spectrum) redraw.push(chart(parent, data.spectrum.chart, [data.spectrum.table]));
}

// ---- canvases

function fitted(canvas) {
  const ratio = Math.max(devicePixelRatio || 1, 1);
  const wide = canvas.clientWidth || 600;
  const high = canvas.clientHeight || 20;
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, high);
  return { pen, wide, high };
}

function viridis(share) {
  const at = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1);
  const k = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[k].map((low, c) => Math.round(low + (VIRIDIS[k + 1][c] - low) * (at - k)));
}
const SHADES = Array.from({ length: 257 }, (_, k) => `rgb(${viridis(k / 256)})`);

function drawScale(canvas) {
  const { pen, wide, high } = fitted(canvas);
  for (let x = 0; x < wide; x++) {
    pen.fillStyle = SHADES[Math.round((x / wide) * 256)];
    pen.fillRect(x, 0, 1.5, high);
  }
}

// ---- peers: the graph, the slider and the table

function readPeers() {
  if (!data.peers) return null;
  const { count, rounds, attackers, fixed, moving } = data.peers;
  const columns = new Map([["peer", { values: Float64Array.from({ length: count }, (_, i) => i) }]]);
  for (const [name, value] of Object.entries(fixed)) columns.set(name, { values: unpacked(value) });
  for (const [name, value] of Object.entries(moving)) {
    columns.set(name, { values: unpacked(value), moves: true });
  }
  for (const column of columns.values()) column.range = extent(column.values) ?? [0, 0];
  return { count, rounds, columns, attackers: new Set(attackers) };
}
const peers = readPeers();
let picked = null; // the peer that a reader has chosen

function frame() {
  return Math.min(state.frame ?? Infinity, peers.rounds.length - 1);
}

function valueOf(name, peer) {
  const { values, moves } = peers.columns.get(name);
  return values[moves ? frame() * peers.count + peer : peer];
}

function described(peer) {
  const names = [...peers.columns.keys()];
  return names.map((name) => `${name} ${shown(valueOf(name, peer), name)}`).join("\n");
}

function describePicked() {
  if (picked !== null) get("chosen-peer").textContent = described(picked);
}

function graph() {
  const canvas = get("drawing");
  const select = get("colour");
  const slider = get("frame");
  const places = unpacked(data.graph.places);
  const edges = unpacked(data.graph.edges);
  const lines = document.createElement("canvas"); // the edges, which stay while colours change
  let size = { wide: 0, high: 0, radius: 4 };

  for (const name of peers.columns.keys()) select.append(make("option", { value: name }, name));
  const first = ["accuracy", "train_loss"].find((name) => peers.columns.has(name)) ?? "peer";
  if (!peers.columns.has(state.colour)) state.colour = first;
  select.value = state.colour;
  slider.max = peers.rounds.length - 1;
  slider.value = frame();

  function at(peer) {
    const { wide, high, radius } = size;
    const room = radius + 3;
    const half = Math.min(wide, high) / 2 - room;
    return [wide / 2 + places[2 * peer] * half, high / 2 - places[2 * peer + 1] * half];
  }

  function drawEdges() {
    lines.width = canvas.width;
    lines.height = canvas.height;
    const pen = lines.getContext("2d");
    const ratio = canvas.width / size.wide;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.strokeStyle = pen.fillStyle = css("--faint");
    pen.globalAlpha = Math.max(0.12, Math.min(0.6, 2000 / Math.max(1, edges.length)));
    pen.lineWidth = edges.length > 2000 ? 0.6 : 1;
    pen.beginPath();
    for (let e = 0; e < edges.length; e += 2) {
      const [to, from] = [at(edges[e]), at(edges[e + 1])];
      pen.moveTo(...from);
      pen.lineTo(...to);
    }
    pen.stroke();
    if (data.graph.mutual || edges.length > 4000) return;
    for (let e = 0; e < edges.length; e += 2) {
      const [to, from] = [at(edges[e]), at(edges[e + 1])];
      const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
      const tipX = to[0] - Math.cos(angle) * (size.radius + 1);
      const tipY = to[1] - Math.sin(angle) * (size.radius + 1);
      pen.beginPath();
      pen.moveTo(tipX, tipY);
      pen.lineTo(tipX - 7 * Math.cos(angle - 0.4), tipY - 7 * Math.sin(angle - 0.4));
      pen.lineTo(tipX - 7 * Math.cos(angle + 0.4), tipY - 7 * Math.sin(angle + 0.4));
      pen.fill();
    }
  }

  function draw(again = true) {
    const { pen, wide, high } = fitted(canvas);
    const radius = Math.max(1.6, Math.min(13, 0.2 * Math.sqrt((wide * high) / peers.count)));
    if (again || wide !== size.wide || high !== size.high) {
      size = { wide, high, radius };
      drawEdges();
    }
    pen.drawImage(lines, 0, 0, wide, high);
    const [low, top] = range();
    const ground = css("--ground");
    const grey = css("--faint");
    pen.lineWidth = radius > 4 ? 1 : 0.4;
    pen.font = `${Math.min(11, radius)}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let i = 0; i < peers.count; i++) {
      const [x, y] = at(i);
      const value = valueOf(state.colour, i);
      const share = top > low ? (value - low) / (top - low) : 0.5;
      pen.fillStyle = Number.isNaN(value) ? grey : SHADES[Math.round(share * 256)];
      pen.strokeStyle = ground;
      pen.beginPath();
      if (peers.attackers.has(i)) pen.rect(x - radius, y - radius, 2 * radius, 2 * radius);
      else pen.arc(x, y, radius, 0, 2 * Math.PI);
      pen.fill();
      pen.stroke();
      if (peers.count <= NAMED) {
        pen.fillStyle = share > 0.6 ? "#000" : "#fff";
        pen.fillText(String(i), x, y + 0.5);
      }
    }
    if (picked !== null) {
      const [x, y] = at(picked);
      pen.strokeStyle = css("--ink");
      pen.lineWidth = 2.5;
      pen.beginPath();
      pen.arc(x, y, radius + 4, 0, 2 * Math.PI);
      pen.stroke();
    }
    get("scale-low").textContent = shown(low, state.colour);
    get("scale-high").textContent = shown(top, state.colour);
    get("frame-round").textContent = `round ${peers.rounds[frame()].toLocaleString("en")}`;
    slider.setAttribute("aria-valuetext", `round ${peers.rounds[frame()]}`);
  }

  function range() {
    const { values, moves, range: whole } = peers.columns.get(state.colour);
    if (!state.own || !moves) return whole;
    return extent(values.subarray(frame() * peers.count, (frame() + 1) * peers.count)) ?? [0, 0];
  }

  function nearest(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let least = Math.max(size.radius + 2, 8) ** 2;
    for (let i = 0; i < peers.count; i++) {
      const [px, py] = at(i);
      const far = (px - x) ** 2 + (py - y) ** 2;
      if (far < least) [best, least] = [i, far];
    }
    return best;
  }

  function pick(peer) {
    picked = peer;
    describePicked();
    draw(false);
    fillTable();
  }

  select.addEventListener("change", () => {
    state.colour = select.value;
    keep();
    draw(false);
  });
  get("own-range").checked = state.own;
  get("own-range").addEventListener("change", () => {
    state.own = get("own-range").checked;
    keep();
    draw(false);
  });
  slider.addEventListener("input", () => {
    const last = Number(slider.value) === peers.rounds.length - 1;
    state.frame = last ? null : Number(slider.value);
    keep();
    draw(false);
    describePicked();
    fillTable();
  });
  canvas.addEventListener("pointermove", (event) => {
    const peer = nearest(event);
    canvas.style.cursor = peer === null ? "default" : "pointer";
    if (peer === null) hideTip();
    else showTip(described(peer), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const peer = nearest(event);
    if (peer !== null) pick(peer);
  });
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    pick(((picked ?? (way > 0 ? -1 : 0)) + way + peers.count) % peers.count);
  });
  redraw.push(draw, () => drawScale(get("scale")));
}

let page = 0;

// The peers that a filter finds, or what is wrong with it. Figures are compared as they are shown.
function matching(text) {
  text = text.trim().toLowerCase().replaceAll(",", "");
  if (!text) return () => true;
  if (/^\d+$/.test(text)) return (peer) => peer === Number(text);
  const parts = text.match(/^([\w ]+?)\s*(<=|>=|<|>|=)\s*(-?[\d.e+-]+)$/);
  const bound = Number(parts?.[3]);
  if (Number.isNaN(bound)) return "no filter";
  const name = parts[1].trim().replaceAll(" ", "_");
  if (!peers.columns.has(name)) return `no column ${name}`;
  const same = (v) => rounded(v, name) === rounded(bound, name);
  const test = {
    "<": (v) => v < bound && !same(v), ">": (v) => v > bound && !same(v), "=": same,
    "<=": (v) => v < bound || same(v), ">=": (v) => v > bound || same(v),
  }[parts[2]];
  return (peer) => test(valueOf(name, peer));
}

function sorted() {
  const first = ["accuracy", "train_loss"].find((name) => peers.columns.has(name)) ?? "peer";
  const name = peers.columns.has(state.sort) ? state.sort : first;
  const down = peers.columns.has(state.sort) ? state.down : name === "train_loss";
  const found = matching(state.filter);
  const wrong = typeof found === "string" ? found : "";
  const order = wrong ? [] : Array.from({ length: peers.count }, (_, i) => i).filter(found);
  const rank = (i) => {
    const value = valueOf(name, i);
    return Number.isNaN(value) ? Infinity : down ? -value : value;
  };
  order.sort((a, b) => rank(a) - rank(b) || a - b);
  return { order, name, down, wrong };
}

function fillTable() {
  const { order, name, down, wrong } = sorted();
  const pages = Math.max(1, Math.ceil(order.length / PAGE));
  page = Math.max(0, Math.min(page, pages - 1));
  const names = [...peers.columns.keys()];
  for (const cell of get("peer-table").tHead.rows[0].cells) {
    const own = cell.dataset.name === name;
    if (own) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
    cell.querySelector("span").textContent = own ? (down ? " ▼" : " ▲") : "";
  }
  const rows = order.slice(page * PAGE, (page + 1) * PAGE).map((peer) => {
    const row = make("tr", peer === picked ? { class: "picked" } : {});
    for (const each of names) row.append(make("td", { class: "number" }, shown(valueOf(each, peer), each)));
    return row;
  });
  get("peer-table").tBodies[0].replaceChildren(...rows);
  const from = order.length ? page * PAGE + 1 : 0;
  get("shown-peers").textContent = wrong || `${from} to ${Math.min(order.length, (page + 1) * PAGE)} of ${order.length.toLocaleString("en")} peers`;
  get("earlier").disabled = page === 0;
  get("later").disabled = page === pages - 1;
}

function peerTable() {
  const head = make("tr");
  for (const name of peers.columns.keys()) {
    const cell = make("th", { scope: "col", class: "number", "data-name": name });
    const button = make("button", { type: "button" });
    appendName(button, name);
    button.append(make("span", { "aria-hidden": true }));
    button.addEventListener("click", () => {
      const before = sorted();
      state.down = before.name === name ? !before.down : false;
      state.sort = name;
      page = 0;
      keep();
      fillTable();
    });
    cell.append(button);
    head.append(cell);
  }
  get("peer-table").tHead.append(head);
  const filter = get("filter");
  filter.value = state.filter;
  filter.addEventListener("input", () => {
    state.filter = filter.value;
    page = 0;
    keep();
    fillTable();
  });
  get("earlier").addEventListener("click", () => {
    page--;
    fillTable();
  });
  get("later").addEventListener("click", () => {
    page++;
    fillTable();
  });
  fillTable();
}

function labelMap() {
  const { classes } = data.labels;
  const counts = unpacked(data.labels.counts);
  const count = counts.length / classes;
  const order = Array.from({ length: count }, (_, i) => i);
  const most = extent(counts)?.[1] ?? 0;
  if (count > NAMED) {
    const main = order.map((i) => {
      const own = counts.subarray(i * classes, (i + 1) * classes);
      return own.indexOf(Math.max(...own));
    });
    order.sort((a, b) => main[a] - main[b] || counts[b * classes + main[b]] - counts[a * classes + main[a]]);
    get("label-order").textContent = "Peers are ordered by their most frequent label.";
  }
  get("label-most").textContent = shown(most);
  const canvas = get("label-map");
  const image = document.createElement("canvas");
  image.width = count;
  image.height = classes;
  const pixels = image.getContext("2d").createImageData(count, classes);
  order.forEach((peer, x) => {
    for (let label = 0; label < classes; label++) {
      const value = counts[peer * classes + label];
      const at = 4 * ((classes - 1 - label) * count + x);
      pixels.data.set([...viridis(most ? value / most : 0), value ? 255 : 0], at);
    }
  });
  image.getContext("2d").putImageData(pixels, 0, 0);
  const LEFT = 34;
  const BELOW = 22;
  function draw() {
    const { pen, wide, high } = fitted(canvas);
    const narrow = document.createElement("canvas"); // many peers share a column, labels no row
    narrow.width = Math.min(count, canvas.width);
    narrow.height = classes;
    narrow.getContext("2d").drawImage(image, 0, 0, narrow.width, classes);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(narrow, LEFT, 0, wide - LEFT, high - BELOW);
    pen.fillStyle = css("--faint");
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const cell = (high - BELOW) / classes;
    const every = Math.ceil(14 / cell);
    for (let label = 0; label < classes; label += every) {
      pen.fillText(String(label), LEFT - 6, (classes - label - 0.5) * cell);
    }
    pen.textAlign = "center";
    const step = Math.ceil(count / Math.max(1, Math.floor((wide - LEFT) / 30)));
    if (count <= NAMED) {
      for (let i = 0; i < count; i += step) {
        pen.fillText(String(i), LEFT + ((i + 0.5) * (wide - LEFT)) / count, high - BELOW / 2);
      }
    } else pen.fillText("peers", (LEFT + wide) / 2, high - BELOW / 2);
    drawScale(get("label-scale"));
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * count);
    const y = Math.floor(((event.clientY - box.top) / (box.height - BELOW)) * classes);
    if (x < 0 || x >= count || y < 0 || y >= classes) return hideTip();
    const [peer, label] = [order[x], classes - 1 - y];
    showTip(`peer ${peer}, label ${label}: ${shown(counts[peer * classes + label])} examples`, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hideTip);
  redraw.push(draw);
}

// ---- tables that stand in the page, as those of sweeps

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = make("button", { type: "button" });
    appendName(button, cell.textContent);
    const mark = make("span", { "aria-hidden": true });
    button.append(mark);
    cell.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) {
        other.removeAttribute("aria-sort");
        other.querySelector("span").textContent = "";
      }
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      mark.textContent = down ? " ▼" : " ▲";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compared = (a, b) => {
        const [x, y] = [key(a), key(b)];
        const numbers = x !== "" && y !== "" && !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
        return numbers ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
      };
      const rows = [...body.rows].sort(compared);
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}

// ---- the page

drawCharts();
drawSpectrum();
if (peers && data.graph && get("drawing")) graph();
if (peers && get("peer-table")) peerTable();
if (data.labels && get("label-map")) labelMap();
document.querySelectorAll("table.sortable").forEach(sortable);

function drawAll() {
  redraw.forEach((draw) => draw());
}
let waiting = 0;
let width = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawAll);
}).observe(document.body);
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", drawAll);
}
drawAll();

if (data.live && get("live")) {
  setInterval(() => {
    if (get("live").checked) location.reload();
  }, 10000);
}
