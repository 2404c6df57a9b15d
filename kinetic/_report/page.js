"use strict";
(() => {
/** What the reader has chosen; it stays when a live page is drawn again. */
const kept = { query: "", hidden: new Set(), sort: { key: "item", down: false }, page: 0, choices: new Map(), open: new Set() };
const skeleton = ["header", "main", "footer"].map((tag) => document.querySelector(tag).cloneNode(true));
/** The figures, which are drawn again when the width changes. */
let drawn = [];

function draw(facts) {
drawn = [];
const STATES = facts.states;
const byId = (id) => document.getElementById(id);

// --- making elements: names, inputs, and messages are always text -----------------------------

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
/** Somebody else's text: its direction is its own affair. */
const said = (text) => el("bdi", {}, String(text));
const hidden = (text) => el("span", { class: "hidden" }, text);

// --- words for numbers ----------------------------------------------------------------------

const count = (number) => number.toLocaleString("en-US");
const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const brief = Number(value.toPrecision(5));
  return Math.abs(brief) >= 1e-4 && Math.abs(brief) < 1e6 ? String(brief) : brief.toExponential();
}

/** Never 100 % of less than all, and never 0 % of more than nothing. */
function percent(part, all) {
  const share = Number(((100 * part) / all).toPrecision(3));
  return part === all ? "100 %" : share < 0.1 ? "< 0.1 %" : share > 99.9 ? "> 99.9 %" : `${share} %`;
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.001) return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s).padStart(2, "0")} s`;
}

const when = (epoch) =>
  epoch ? new Date(epoch * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "";

// --- the items and their columns --------------------------------------------------------------

const raw = facts.items;
const ROWS = raw.state.length;
const rows = Array.from({ length: ROWS }, (_, row) => row);
/** A comparison numbers the items of all batches on; the reader sees the number within the batch. */
const parts = facts.parts;
const positionOf = (row) => (raw.index === null ? row : raw.index[row]);
const partAt = (position) => parts.findLastIndex((part) => part.first <= position);
const indexAt = (position) => (parts.length ? position - parts[partAt(position)].first : position);
const nameAt = (position) => (parts.length ? `${indexAt(position)} of ${parts[partAt(position)].label}` : String(position));
const indexOf = (row) => indexAt(positionOf(row));
const nameOf = (row) => nameAt(positionOf(row));
const jobOf = (row) => `${parts.length ? parts[partAt(positionOf(row))].group : facts.group}-${indexOf(row)}`;
const rowOf = raw.index === null
  ? (index) => (index < ROWS ? index : undefined)
  : ((places) => (index) => places.get(index))(new Map(raw.index.map((index, row) => [index, row])));
const stateOf = (row) => STATES[Number(raw.state[row])];
const begunOf = (row) => (raw.begun[row] === null ? null : raw.begun[row] * raw.step);
const takenOf = (row) => raw.taken[row];
const triesOf = (row) => raw.tries[row];
const attemptsOf = (row) => {
  const before = triesOf(row);
  return (before ? before[0] + before.length - 1 : 0) + (stateOf(row) === "waiting" ? 0 : 1);
};
// Seconds from the end of the attempt before, or from the start of the batch; null if the page lacks that attempt.
const waitedOf = (row) => {
  const until = stateOf(row) === "waiting" ? facts.seconds : begunOf(row), before = triesOf(row);
  if (until === null || (!before && raw.unlisted)) return null;
  const [when, taken] = before ? before[before.length - 1] : [0, 0];
  return when === null || taken === null ? null : Math.max(0, until - when * raw.step - taken);
};
const groupOf = (row) => (row in raw.why ? raw.messages[raw.why[row]][1] : -1);
const whyOf = (row) => {
  if (!(row in raw.why)) return "";
  const [words, group] = raw.messages[raw.why[row]];
  return words || (group >= 0 ? facts.failures[group].message : "");
};

function noted(column) {
  const numeric = column.kind === "number";
  const at = (row) => column.values[row];
  return {
    name: column.name, of: column.of, numeric,
    label: column.of === "input" ? column.name : `${column.name} (${column.of})`,
    value: numeric
      ? (row) => (typeof at(row) === "number" ? at(row) : null)
      : (row) => at(row),
    text: numeric ? (row) => number(at(row)) : (row) => (at(row) === null ? "" : column.texts[at(row)]),
    texts: column.texts,
  };
}
const columns = facts.columns.map(noted);
const inputs = columns.filter((one) => one.of === "input");
const results = columns.filter((one) => one.of !== "input");
const batchColumn = parts.length
  ? { name: "batch", label: "batch", of: "", numeric: false, value: (row) => partAt(positionOf(row)), text: (row) => parts[partAt(positionOf(row))].label, texts: parts.map((part) => part.label) }
  : null;
const built = [
  { name: "took", label: "duration in seconds", of: "", numeric: true, value: takenOf, text: (row) => span(takenOf(row)) },
  { name: "waited", label: "time waited in seconds", of: "", numeric: true, value: waitedOf, text: (row) => span(waitedOf(row)) },
  { name: "started", label: "start in seconds", of: "", numeric: true, value: begunOf, text: (row) => span(begunOf(row)) },
  { name: "item", label: "item number", of: "", numeric: true, value: indexOf, text: (row) => String(indexOf(row)) },
];
const axes = [...(batchColumn ? [batchColumn] : []), ...columns, ...built];
const noteOf = (row, some) => some.map((one) => [one.name, one.text(row)]).filter(([, text]) => text !== "")
  .map(([name, text]) => `${name}=${text}`).join(", ");

function described(row) {
  const words = [`item ${nameOf(row)}: ${stateOf(row)}`];
  if (takenOf(row) !== null) words.push(`took ${span(takenOf(row))}`);
  if (waitedOf(row) !== null) words.push(`waited ${span(waitedOf(row))}`);
  if (attemptsOf(row) > 1) words.push(plural(attemptsOf(row), "attempt"));
  const given = noteOf(row, inputs), came = noteOf(row, results);
  if (given) words.push(given);
  if (came) words.push(`→ ${came}`);
  if (whyOf(row)) words.push(whyOf(row));
  return words.join("; ");
}

// --- scales -----------------------------------------------------------------------------------

function steps(least, most, wanted) {
  const rough = (most - least) / Math.max(1, wanted);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((one) => one * unit).find((one) => one >= rough * 0.75) || rough;
  // A step may be smaller than the distance between two huge numbers.
  const first = Math.ceil(least / size - 1e-9), found = new Set();
  for (let step = 0; step <= most / size - first + 1e-9; step++) {
    const at = (first + step) * size;
    found.add(Math.abs(at) < size * 1e-9 ? 0 : at);
  }
  return [...found];
}

function decades(least, most, wanted) {
  const found = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most) + 1e-9; power++)
    for (const one of [1, 2, 5]) found.push(Number(`${one}e${power}`));
  const inside = found.filter((one) => one >= least * 0.999 && one <= most * 1.001);
  const whole = inside.filter((one) => /^1(e|$)|^10*$|^0\.0*1$/.test(String(one)));
  return inside.length <= wanted * 1.5 ? inside : whole.length > 1 ? whole : inside.slice(0, wanted);
}

/** From values to pixels *from* … *to*; logarithmic where most are small and few are large. */
function scaleOf(values, from, to, { zero = false, logarithmic } = {}) {
  let least = Infinity, most = -Infinity;
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  if (least > most) [least, most] = [0, 1];
  if (zero) least = Math.min(0, least);
  const middle = () => [...values].sort((a, b) => a - b)[values.length >> 1];
  const log = logarithmic ?? (!zero && least > 0 && most / least >= 50 && middle() < most / 5);
  if (least === most) [least, most] = least === 0 ? [0, 1] : [least - Math.abs(least) * 0.5, most + Math.abs(most) * 0.5];
  const on = log ? Math.log : (value) => value;
  const [low, high] = [on(least), on(most)];
  const pixel = (value) => from + ((on(value) - low) / (high - low)) * (to - from);
  const share = (value) => (on(value) - low) / (high - low);
  return { least, most, log, pixel, share, ticks: (wanted) => (log ? decades : steps)(least, most, wanted) };
}

/** As `scaleOf` for a column; texts are evenly spaced. */
function scaleOfColumn(column, some, from, to) {
  if (column.numeric) {
    const values = some.map(column.value).filter((value) => value !== null);
    const scale = scaleOf(values, from, to), counted = values.every(Number.isInteger);
    const marks = (wanted) => scale.ticks(wanted).filter((value) => !counted || Number.isInteger(value));
    return { ...scale, marks: (wanted) => marks(wanted).map((value) => [scale.pixel(value), number(value)]) };
  }
  const present = [...new Set(some.map(column.value).filter((value) => value !== null))].sort((a, b) => a - b);
  const place = new Map(present.map((value, at) => [value, at]));
  const share = (value) => (present.length > 1 ? place.get(value) / (present.length - 1) : 0.5);
  const pixel = (value) => from + (0.06 + 0.88 * share(value)) * (to - from);
  const every = (wanted) => Math.max(1, Math.ceil(present.length / wanted));
  return {
    pixel, share, log: false,
    marks: (wanted) => present.filter((_, at) => at % every(wanted) === 0)
      .map((value) => [pixel(value), short(column.texts[value], 16)]),
  };
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const px = (value) => Math.round(value * 10) / 10;

// --- charts -----------------------------------------------------------------------------------

const widthOf = (node) => Math.max(280, Math.round(node.getBoundingClientRect().width) || 960);
/** A figure that is drawn again when its width, or what is shown, changes. */
function figure(parent, { title, describe, height, draw, after = [] }) {
  const id = `c${drawn.length}`;
  const holder = el("div");
  const caption = el("figcaption", { id: `${id}-d` });
  parent.append(el("figure", {}, el("h3", { id: `${id}-t` }, title), holder, caption, ...after));
  const again = () => {
    const width = widthOf(holder);
    const high = typeof height === "function" ? height(width) : height;
    const chart = svg("svg", {
      class: "chart", viewBox: `0 0 ${width} ${high}`, role: "img", "aria-labelledby": `${id}-t ${id}-d`,
    });
    caption.replaceChildren(...[describe()].flat());
    draw(chart, width, high);
    holder.replaceChildren(chart);
  };
  drawn.push(again);
  return again;
}

function bottomAxis(chart, scale, left, right, y, label, words) {
  chart.append(svg("path", { class: "grid", d: `M${left} ${y}H${right}` }));
  for (const [at, text] of words(Math.max(3, Math.floor((right - left) / 90)))) {
    chart.append(svg("path", { class: "grid", d: `M${px(at)} ${y}v4` }));
    const side = at > right - 24 ? "end" : at < left + 12 ? "start" : "middle";
    chart.append(svg("text", { x: px(at), y: y + 16, "text-anchor": side }, text));
  }
  if (label) chart.append(svg("text", { class: "label", x: right, y: y + 32, "text-anchor": "end" }, label));
}

function leftAxis(chart, left, right, top, label, marks) {
  for (const [at, text] of marks) {
    chart.append(svg("path", { class: "grid", d: `M${left} ${px(at)}H${right}` }));
    chart.append(svg("text", { x: left - 6, y: px(at) + 4, "text-anchor": "end" }, text));
  }
  if (label) chart.append(svg("text", { class: "label", x: 0, y: top - 8 }, label));
}

const seconds = (scale) => (wanted) => {
  const unit = scale.most >= 7200 ? [3600, "h"] : scale.most >= 180 ? [60, "min"] : scale.most >= 1 ? [1, "s"] : [0.001, "ms"];
  return steps(scale.least / unit[0], scale.most / unit[0], wanted)
    .map((value) => [scale.pixel(value * unit[0]), `${number(Number(value.toPrecision(6)))} ${unit[1]}`]);
};
const whole = (scale, wanted) => scale.ticks(wanted).filter(Number.isInteger).map((value) => [scale.pixel(value), count(value)]);

/** A table of what a chart shows, made when somebody opens it. */
function tabled(summary, heads, lines) {
  const details = el("details", {}, el("summary", {}, summary));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(table(summary, heads, lines()));
  });
  return details;
}

function table(caption, heads, lines) {
  const labels = heads.map(([text]) => (typeof text === "string" ? text : text.textContent));
  return el("div", { class: "wide", role: "region", "aria-label": caption, tabindex: 0 },
    el("table", { role: "table" }, el("caption", {}, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads.map(([text, numeric]) => el("th", { scope: "col", role: "columnheader", class: numeric === true && "num" }, text)))),
      el("tbody", { role: "rowgroup" }, lines.map((cells) => el("tr", { role: "row" }, cells.map((content, at) =>
        cell(at === 0, labels[at], heads[at][1] === true ? "num" : heads[at][1] || "text", content)))))));
}

/** A cell that a narrow screen shows on a line of its own, after its heading. */
const cell = (heads, label, kind, content) => el(heads ? "th" : "td",
  { class: kind, scope: heads ? "row" : null, role: heads ? "rowheader" : "cell", "data-label": label },
  el("div", {}, content));

// --- the head ---------------------------------------------------------------------------------

const states = (list) => STATES.map((name, at) => [name, list[at]]).filter(([, items]) => items > 0);

function head() {
  const ended = facts.counts.slice(2).reduce((sum, items) => sum + items, 0);
  const over = facts.total !== null && ended >= facts.total;
  byId("title").append(said(parts.length ? `Comparison of ${plural(parts.length, "batch", "batches")}` : facts.name || facts.function || facts.group));
  const of = facts.total === null ? plural(facts.known, "item") + " so far" : plural(facts.total, "item");
  byId("subtitle").append(over
    ? `${of}, all ended after ${span(facts.seconds)}`
    : `${of}; ${count(ended)} had ended ${span(facts.seconds)} after the start, when this snapshot was taken`);
  const all = Math.max(1, facts.known);
  let at = 0;
  const shares = [...states(facts.counts)].sort((a, b) => ORDER.indexOf(a[0]) - ORDER.indexOf(b[0]));
  byId("bar").append(svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", role: "img", "aria-label": "Items by state: " + shares.map(([name, items]) => `${count(items)} ${name}`).join(", ") },
    shares.map(([name, items]) => {
      const wide = Math.max(1.5, (items / all) * 1000);
      const part = svg("rect", { class: `f-${name}`, x: px(at), y: 0, width: px(wide), height: 18 }, svg("title", {}, `${count(items)} ${name}`));
      at += wide;
      return part;
    })));
  byId("legend").append(...shares.map(([name, items]) =>
    el("li", {}, el("span", { class: `dot f-${name}` }), `${count(items)} ${name} (${percent(items, all)})`)));
  const about = [
    ["Batch", parts.length ? "" : facts.group], ["Function", facts.function], ["Started", parts.length ? "" : when(facts.created)],
    ["Snapshot taken", when(facts.read_at)], ["Where", facts.where], ["Accelerator", facts.accelerator],
    ["Max concurrency", facts.limit === null ? "" : String(facts.limit)],
    ["Concurrency", facts.peak && !parts.length ? `peak ${count(facts.peak)}, mean ${meanTold()}` : ""],
    ...facts.tags, ...facts.constants.map(([of, name, value]) => [`${name} (${of}, the same for all)`, number(value)]),
  ];
  byId("about").append(...about.filter(([, text]) => text !== "")
    .map(([name, text]) => el("div", {}, el("dt", {}, said(name)), el("dd", {}, said(text)))));
}

// --- what is shown: the filter ------------------------------------------------------------------

const shown = { rows };
const texts = new Array(ROWS);
const textOf = (row) => (texts[row] ??= [
  `item ${nameOf(row)}`, stateOf(row), ...columns.map((one) => one.text(row)), whyOf(row),
  ...(triesOf(row) || []).slice(1).map((one) => one[3]),
].join("\n").toLowerCase());

const COMPARE = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
};

/**
 * Return a test for each word of a search: `#17`, `lr<0.01`, `optimizer=adam`, `failure=2`, or any text.
 *
 * Quotation marks keep a name, a value, or a text together: `"batch size">8`.
 */
function tests(query) {
  const words = query.match(/(?:"[^"]*"|\S)+/g) || [];
  const bare = (text) => text.replace(/^"|"$/g, "");
  return words.map((word) => {
    const exact = /^#(\d+)$/.exec(word);
    if (exact) return (row) => indexOf(row) === Number(exact[1]);
    const parts = /^("[^"]+"|[^<>="]+)(<=|>=|<|>|=)(.+)$/.exec(word);
    if (parts) {
      const [name, sign, wanted] = parts.slice(1).map(bare);
      const compare = COMPARE[sign];
      if (name === "failure") return (row) => groupOf(row) >= 0 && compare(groupOf(row) + 1, Number(wanted));
      if (name === "attempts") return (row) => compare(attemptsOf(row), Number(wanted));
      const column = axes.find((one) => one.name.toLowerCase() === name.toLowerCase());
      if (column && column.numeric && !Number.isNaN(Number(wanted)))
        return (row) => column.value(row) !== null && compare(column.value(row), Number(wanted));
      if (column && sign === "=") return (row) => column.text(row).toLowerCase() === wanted.toLowerCase();
    }
    const text = bare(word).toLowerCase();
    return (row) => textOf(row).includes(text);
  });
}

const later = [];
function filter() {
  const asked = tests(kept.query);
  shown.rows = rows.filter((row) => !kept.hidden.has(stateOf(row)) && asked.every((test) => test(row)));
}
function refilter() {
  filter();
  kept.page = 0;
  for (const again of later) again();
}

const search = el("input", {
  type: "search", id: "search", spellcheck: false, autocomplete: "off", "aria-describedby": "search-help",
  input: debounced(() => { kept.query = search.value; refilter(); }),
});

function debounced(work) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(work, 120); };
}

/** The search and the states, above all that shows only the items that match. */
function filterBar() {
  const place = byId("filter"), status = el("p", { role: "status" });
  search.value = kept.query;
  const boxes = states(facts.counts).map(([name]) => el("label", {}, el("input", { type: "checkbox", "data-key": `state ${name}`, checked: !kept.hidden.has(name), change: (event) => {
    if (event.target.checked) kept.hidden.delete(name); else kept.hidden.add(name);
    refilter();
  } }), el("span", { class: `dot f-${name}` }), name));
  const show = () => {
    const of = ROWS < facts.known ? `${count(ROWS)} of ${count(facts.known)} items are listed: the failed ones first, the slowest, and every nth of the others. ` : "";
    status.replaceChildren(`${of}${shown.rows.length === ROWS ? `All ${plural(ROWS, "item")}` : `${count(shown.rows.length)} of ${plural(ROWS, "item")} match`}.`);
  };
  place.append(el("form", { class: "controls", role: "search", submit: (event) => event.preventDefault() },
    el("label", { for: "search" }, "Show the items that match", search),
    el("fieldset", {}, el("legend", {}, "State"), ...boxes),
    el("button", { type: "button", "data-key": "all", click: () => {
      for (const box of place.querySelectorAll("[type=checkbox]")) box.checked = true;
      kept.hidden.clear();
      ask("", null);
    } }, "Show all"), status),
  el("p", { id: "search-help", class: "faint" }, "Type a text, an item number such as ", el("code", {}, "#0"), ", or a comparison such as ", el("code", {}, example()), ". All words must match."));
  later.push(show);
  show();
}

function ask(query, place) {
  search.value = kept.query = query;
  refilter();
  if (!place) return;
  byId(place).scrollIntoView();
  byId(place).focus({ preventScroll: true });
}

/** Show one item in the table, with all that is known of it. */
function reveal(row) {
  kept.open.add(positionOf(row));
  ask(`#${indexOf(row)}${parts.length ? ` batch="${batchColumn.text(row)}"` : ""}`, "items");
}
const link = (row, text) => el("button", { type: "button", "data-key": `reveal ${positionOf(row)}`, click: () => reveal(row) }, text);

// --- failures -----------------------------------------------------------------------------------

function failures() {
  const place = byId("failures");
  if (!facts.failures.length) { place.remove(); return; }
  const lines = facts.failures.map((group, at) => {
    const example = group.words === undefined ? null : el("details", {},
      el("summary", {}, `Example: item ${nameAt(group.example)}`),
      group.words && group.words !== group.message ? el("p", {}, said(group.words)) : null,
      group.traceback ? el("pre", { tabindex: 0 }, group.traceback) : null,
      group.log ? [el("p", { class: "faint" }, "The end of its log:"), el("pre", { tabindex: 0 }, group.log)] : null);
    const button = el("button", { type: "button", click: () => ask(`failure=${at + 1}`, "items") }, plural(group.count, "item"), hidden(` of failure ${at + 1}`));
    return [String(at + 1), count(group.count), el("div", {}, said(group.message || "no message"), example), said(group.reason), button];
  });
  place.append(table("By message; numbers in messages are ignored", [["No.", true], ["Items", true], ["Message", "text why"], ["Reason"], ["Show", "brief"]], lines));
  if (facts.more_failures > 0) place.append(el("p", { class: "faint" }, `${plural(facts.more_failures, "more kind")} of failure ${facts.more_failures === 1 ? "is" : "are"} not listed.`));
}

// --- results against inputs ---------------------------------------------------------------------

const RAMP = 8;
const PALETTE = "c0 c1 c2 c3 c4 c5 c6 c7".split(" ");

/** Which of the colours a row has by *column*; the last is that of no value. */
function colouring(column, some) {
  if (!column) return { of: () => 3, legend: [] };
  const values = some.map(column.value).filter((value) => value !== null);
  const scale = scaleOfColumn(column, some, 0, 1);
  const of = (row) => {
    const value = column.value(row);
    return value === null ? RAMP : Math.min(RAMP - 1, Math.floor(scale.share(value) * RAMP));
  };
  const key = (at, text) => el("span", {}, el("span", { class: `dot k${at === RAMP ? "n" : at}` }), said(text));
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= RAMP) {
    const spread = (at) => (distinct.length > 1 ? Math.round((at * (RAMP - 1)) / (distinct.length - 1)) : 3);
    const place = new Map(distinct.map((value, at) => [value, spread(at)]));
    const word = (value) => (column.numeric ? number(value) : column.texts[value]);
    return {
      of: (row) => place.get(column.value(row)) ?? RAMP,
      legend: [...distinct.map((value) => key(place.get(value), word(value))),
        ...(values.length < some.length ? [key(RAMP, "none")] : [])],
    };
  }
  const missing = values.length < some.length ? [key(RAMP, "none")] : [];
  if (column.numeric) {
    const range = scaleOf(values, 0, 1);
    const edge = (at) => range.log ? Math.exp(Math.log(range.least) + (at / RAMP) * Math.log(range.most / range.least)) : range.least + (at / RAMP) * (range.most - range.least);
    const few = (value) => number(Number(value.toPrecision(3)));
    return { of, legend: [...PALETTE.map((_, at) => key(at, `${few(edge(at))} – ${few(edge(at + 1))}`)), ...missing] };
  }
  const first = new Map();
  for (const row of some) if (column.value(row) !== null) {
    const colour = of(row);
    if (!first.has(colour)) first.set(colour, new Set());
    first.get(colour).add(column.texts[column.value(row)]);
  }
  const named = [...first].sort((a, b) => a[0] - b[0]).map(([at, names]) =>
    key(at, [...names].slice(0, 3).join(", ") + (names.size > 3 ? ", …" : "")));
  return { of, legend: [...named, ...missing] };
}

/** A list to choose from; a live page keeps the choice. */
function chooser(label, key, options, chosen, change) {
  const word = (one) => (one ? one.label : "nothing");
  const list = el("select", { "data-key": key, change: () => { kept.choices.set(key, word(options[list.selectedIndex])); change(options[list.selectedIndex]); } },
    options.map((one) => el("option", { selected: one === chosen }, word(one))));
  return el("label", {}, label, list);
}
/** The option that the reader has chosen before, or else *usual*. */
function choiceOf(key, options, usual) {
  const at = options.findIndex((one) => kept.choices.get(key) === (one ? one.label : "nothing"));
  return at < 0 ? usual : options[at];
}

const different = new Map(columns.map((one) => [one, new Set(rows.map(one.value).filter((value) => value !== null)).size]));
const varying = columns.filter((one) => different.get(one) > 1);
/** The numeric results that can be a metric: the one asked for first, then the most varied. */
const metrics = (() => {
  // A result with the name of an input most likely repeats that input.
  const echo = (one) => inputs.some((input) => input.name === one.name);
  const rank = (one) => (one.name === facts.metric ? 0 : echo(one) ? 2 : 1);
  return varying.filter((one) => one.of === "result" && one.numeric)
    .sort((a, b) => rank(a) - rank(b) || different.get(b) - different.get(a));
})();

function plots() {
  const place = byId("results");
  const given = varying.filter((one) => one.of === "input");
  const options = axes.filter((one) => varying.includes(one) || built.includes(one) || one === batchColumn);
  const usual = given.find((one) => one.numeric) || given[0] || varying.find((one) => one !== metrics[0] && one.numeric) || built[2];
  const chosen = { y: choiceOf("y", options, metrics[0] || built[0]), x: choiceOf("x", options, usual) };
  chosen.colour = choiceOf("color", [null, ...options], batchColumn || given.find((one) => one !== chosen.x) || null);
  if (!columns.length) {
    place.append(el("p", { class: "faint" }, "These inputs and results have no numbers or short texts. You can still plot the facts that every item has."));
  }
  const told = el("output", { class: "output", "aria-live": "polite" });
  const key = el("div", { class: "ramp", "aria-hidden": "true" });
  const redraw = () => { scatter(); if (parallel) parallel(); };
  place.append(el("div", { class: "controls" },
    chooser("Y", "y", options, chosen.y, (one) => { chosen.y = one; redraw(); }),
    chooser("X", "x", options, chosen.x, (one) => { chosen.x = one; redraw(); }),
    chooser("Color", "color", [null, ...options], chosen.colour, (one) => { chosen.colour = one; redraw(); })));

  const scatter = figure(place, {
    title: "Each item as a point",
    height: (width) => Math.min(440, Math.max(280, width * 0.5)),
    describe: () => {
      const some = shown.rows.filter((row) => chosen.x.value(row) !== null && chosen.y.value(row) !== null);
      const without = shown.rows.length - some.length;
      return [said(chosen.y.label), " by ", said(chosen.x.label), ...(chosen.colour ? [", colored by ", said(chosen.colour.label)] : []),
        `: ${plural(some.length, "point")}.`, without ? ` ${plural(without, "item")} without one of the two.` : "",
        " Arrow keys go from point to point, Enter shows the item."];
    },
    draw: (chart, width, high) => {
      const some = shown.rows.filter((row) => chosen.x.value(row) !== null && chosen.y.value(row) !== null);
      const [left, right, top, bottom] = [64, width - 12, 26, high - 42];
      const x = scaleOfColumn(chosen.x, some, left + 8, right - 8), y = scaleOfColumn(chosen.y, some, bottom - 6, top + 6);
      leftAxis(chart, left, right, top, chosen.y.label + (y.log ? ", logarithmic" : ""), y.marks(6));
      bottomAxis(chart, x, left, right, bottom, chosen.x.label + (x.log ? ", logarithmic" : ""), x.marks);
      const colour = colouring(chosen.colour, some);
      key.replaceChildren(...(chosen.colour ? [said(`${chosen.colour.label}:`), ...colour.legend] : []));
      const size = some.length > 3000 ? 3 : some.length > 400 ? 4.5 : 7;
      const marks = Array.from({ length: RAMP + 1 }, () => []);
      const points = some.map((row) => [x.pixel(chosen.x.value(row)), y.pixel(chosen.y.value(row)), row]);
      for (const [across, up, row] of points) marks[colour.of(row)].push(`M${px(across)} ${px(up)}h0`);
      marks.forEach((list, at) => list.length && chart.append(
        svg("path", { class: `points ${at === RAMP ? "cn" : PALETTE[at]}`, "stroke-width": size, d: list.join("") })));
      pointing(chart, points.sort((a, b) => a[0] - b[0] || a[1] - b[1]), width, told);
    },
    after: [key, told],
  });
  later.push(scatter);

  let parallel = null;
  const all = [...given.slice(0, 7), ...varying.filter((one) => one.of === "result").slice(0, 3)];
  if (all.length > 1 && given.length) {
    const MOST = 800;
    const every = () => Math.max(1, Math.ceil(shown.rows.length / MOST));
    // The names of axes that are closer can't be read: a narrow screen has fewer, the last ones of all.
    const fitting = (width) => all.slice(-Math.max(2, Math.min(all.length, Math.floor((width - 120) / 68) + 1)));
    const hiddenAt = () => all.slice(0, all.length - fitting(widthOf(place)).length);
    parallel = figure(place, {
      title: "Each item as a line through its inputs and results",
      height: 320,
      describe: () => ["Colored by ", said(chosen.y.label), ".", every() > 1 ? ` One of ${every()} items is drawn.` : "",
        " The values of a text column are evenly spaced.",
        ...(hiddenAt().length ? [" This screen is too narrow for ", said(hiddenAt().map((one) => one.name).join(", ")), "."] : [])],
      draw: (chart, width, high) => {
        const across = fitting(width), some = shown.rows.filter((_, at) => at % every() === 0);
        const [top, bottom, side] = [42, high - 14, 60];
        const gap = (width - 2 * side) / (across.length - 1);
        const scales = across.map((one) => scaleOfColumn(one, some, bottom, top));
        const colour = colouring(chosen.y, some);
        const lines = Array.from({ length: RAMP + 1 }, () => []);
        for (const row of some) {
          let pen = "M", path = "";
          across.forEach((one, at) => {
            const value = one.value(row);
            if (value === null) { pen = "M"; return; }
            path += `${pen}${px(side + at * gap)} ${px(scales[at].pixel(value))}`;
            pen = "L";
          });
          lines[colour.of(row)].push(path);
        }
        lines.forEach((list, at) => list.length && chart.append(svg("path", { class: `lines ${at === RAMP ? "cn" : PALETTE[at]}`, d: list.join("") })));
        across.forEach((one, at) => {
          const place = side + at * gap, anchor = at === 0 ? "start" : at === across.length - 1 ? "end" : "middle";
          const edge = at === 0 ? 0 : at === across.length - 1 ? width : place;
          chart.append(svg("path", { class: "grid", d: `M${px(place)} ${top}V${bottom}` }));
          const name = short(one.name, Math.max(6, Math.floor(gap / 7)));
          chart.append(svg("text", { class: "label", x: px(edge), y: 14, "text-anchor": anchor }, name));
          if (one.of === "result") chart.append(svg("text", { x: px(edge), y: 28, "text-anchor": anchor }, "result"));
          for (const [up, text] of scales[at].marks(5))
            chart.append(svg("text", { x: px(place + (anchor === "end" ? 4 : -4)), y: px(up) + 4, "text-anchor": anchor === "end" ? "start" : "end" }, short(text, 8)));
        });
      },
    });
    later.push(parallel);
  }
  if (facts.left_out.length)
    place.append(el("p", { class: "faint" }, "Left out to keep this page small: ", said(facts.left_out.join(", ")), "."));
}

/**
 * What is under the pointer, or the point that the arrow keys have come to, is told in words.
 *
 * The keys go through *points*; the pointer finds the item of the nearest of *near*.
 */
function pointing(chart, points, width, told, { near = points, mark = () => {} } = {}) {
  if (!points.length) return;
  const ring = svg("circle", { class: "over", r: 6, visibility: "hidden" });
  chart.append(ring);
  let at = -1;
  const go = (next) => {
    at = Math.max(0, Math.min(points.length - 1, next));
    const [across, up, row] = points[at];
    fill(ring, { cx: px(across), cy: px(up), visibility: "visible" }, []);
    told.replaceChildren(said(described(row)));
    mark(row);
  };
  const nearest = (event) => {
    const box = chart.getBoundingClientRect(), ratio = width / box.width;
    const [across, up] = [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
    let found = -1, least = 20 ** 2;
    near.forEach(([x, y], place) => {
      const far = (x - across) ** 2 + (y - up) ** 2;
      if (far < least) [found, least] = [place, far];
    });
    return found < 0 || near === points ? found : points.findIndex((point) => point[2] === near[found][2]);
  };
  fill(chart, {
    tabindex: 0,
    pointermove: (event) => { const found = nearest(event); if (found >= 0 && found !== at) go(found); },
    click: (event) => { const found = nearest(event); if (found >= 0) reveal(points[found][2]); },
    keydown: (event) => {
      const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }[event.key];
      if (move !== undefined) { event.preventDefault(); go(at + move); }
      if (event.key === "Enter" && at >= 0) { event.preventDefault(); reveal(points[at][2]); }
    },
  }, []);
}

// --- the best items ---------------------------------------------------------------------------

const TOP = 10;

/** The items shown that have a value of *metric*, the best first. */
function ranked(metric, maximize) {
  const sign = maximize ? -1 : 1;
  return shown.rows.filter((row) => metric.value(row) !== null)
    .sort((a, b) => sign * (metric.value(a) - metric.value(b)) || a - b);
}

/**
 * How much of the ranking each input explains alone, from 0 to 1.
 *
 * Items are grouped by the input's value, or by equal parts of its range of ranks where it is a
 * number with many values. The figure is epsilon squared of the Kruskal-Wallis test: the share of
 * the variance of ranks that lies between groups, corrected for the number of groups.
 */
function importance(order) {
  const rank = new Map(order.map((row, at) => [row, at]));
  const mean = (some) => some.reduce((sum, row) => sum + rank.get(row), 0) / some.length;
  return varying.filter((one) => one.of === "input").map((input) => {
    const some = order.filter((row) => input.value(row) !== null).sort((a, b) => input.value(a) - input.value(b));
    const parts = Math.min(RAMP, Math.floor(Math.sqrt(some.length)));
    const values = new Set(some.map(input.value)).size;
    const groups = new Map();
    some.forEach((row, at) => {
      const group = input.numeric && values > parts ? Math.floor((at / some.length) * parts) : input.value(row);
      groups.set(group, [...(groups.get(group) || []), row]);
    });
    if (groups.size < 2 || some.length <= groups.size) return [input, null];
    const middle = mean(some);
    const all = some.reduce((sum, row) => sum + (rank.get(row) - middle) ** 2, 0);
    const between = [...groups.values()].reduce((sum, group) => sum + group.length * (mean(group) - middle) ** 2, 0);
    const within = (all - between) / (some.length - groups.size);
    return [input, Math.max(0, (between - (groups.size - 1) * within) / all)];
  }).filter(([, share]) => share !== null).sort((a, b) => b[1] - a[1]);
}

function best() {
  const place = byId("best");
  if (!metrics.length) { place.remove(); return; }
  const directions = [{ label: "lowest", maximize: false }, { label: "highest", maximize: true }];
  const chosen = { metric: choiceOf("metric", metrics, metrics[0]), ...choiceOf("best", directions, directions[Number(facts.direction === "maximize")]) };
  const top = el("div"), effects = el("div");
  const show = () => {
    const { metric } = chosen, order = ranked(metric, chosen.maximize), first = order.slice(0, TOP);
    top.replaceChildren(table(`The ${Math.min(TOP, order.length)} best of ${plural(order.length, "item")}`,
      [["Item", true], [said(metric.name), true], ["Took", true], ["Input", "text why"]],
      first.map((row) => [link(row, nameOf(row)), metric.text(row), span(takenOf(row)), said(noteOf(row, inputs))])));
    const shares = importance(order);
    effects.replaceChildren(el("h3", {}, "Importance of inputs"), shares.length
      ? table("The share of the ranking that an input explains alone, from 0 to 1", [["Input", "text"], ["Importance", true], ["", false]],
        shares.map(([input, share]) => [said(input.name), share.toFixed(2),
          svg("svg", { viewBox: "0 0 100 10", width: 120, height: 12, "aria-hidden": "true" }, svg("rect", { class: "column", width: px(100 * share), height: 10 }))]))
      : el("p", { class: "faint" }, "Too few items to tell."));
    curve();
  };
  place.append(el("div", { class: "controls" },
    chooser("Metric", "metric", metrics, chosen.metric, (one) => { chosen.metric = one; show(); }),
    chooser("Best is", "best", directions, directions[Number(chosen.maximize)], (one) => { chosen.maximize = one.maximize; show(); })), top);
  const halves = el("div", { class: "columns" });
  place.append(halves);
  const better = (a, b) => (chosen.maximize ? a > b : a < b);
  /** The items that ended with a value, in the order of their ends, and those that improved on all before, by batch. */
  const course = () => {
    const { metric } = chosen, end = (row) => begunOf(row) + (takenOf(row) || 0);
    const some = shown.rows.filter((row) => metric.value(row) !== null && begunOf(row) !== null).sort((a, b) => end(a) - end(b) || a - b);
    const lines = (parts.length ? parts.map((_, part) => some.filter((row) => batchColumn.value(row) === part)) : [some]).map((mine) => {
      const records = [];
      for (const row of mine) if (!records.length || better(metric.value(row), metric.value(records[records.length - 1]))) records.push(row);
      return records;
    });
    return { some, lines, end };
  };
  const curve = figure(halves, {
    title: "Best so far",
    height: 240,
    describe: () => {
      const { some, lines } = course();
      if (!some.length) return "No item with this metric is shown.";
      const told = (records) => [`${plural(records.length, "improvement")}; best `, said(chosen.metric.name), `: ${chosen.metric.text(records[records.length - 1])} (item ${nameOf(records[records.length - 1])}).`];
      return [`${plural(some.length, "item")}, `, ...(parts.length ? ["by batch: ", ...lines.flatMap((records, part) => [" ", el("span", { class: "entry" }, el("span", { class: `dot k${shadeOf(part)}` }), said(`${parts[part].label}: ${records.length ? chosen.metric.text(records[records.length - 1]) : "none"}`))])] : told(lines[0]))];
    },
    draw: (chart, width, high) => {
      const { some, lines, end } = course();
      if (!some.length) return;
      const [left, right, top, bottom] = [64, width - 12, 26, high - 26];
      const x = scaleOf([0, facts.seconds || 1], left, right, { zero: true });
      const y = scaleOfColumn(chosen.metric, some, bottom - 6, top + 6);
      leftAxis(chart, left, right, top, chosen.metric.name + (y.log ? ", logarithmic" : ""), y.marks(5));
      bottomAxis(chart, x, left, right, bottom, "", seconds(x));
      const at = (row) => [px(x.pixel(end(row))), px(y.pixel(chosen.metric.value(row)))];
      chart.append(svg("path", { class: "points cn", "stroke-width": some.length > 400 ? 3 : 5, d: some.map((row) => `M${at(row).join(" ")}h0`).join("") }));
      lines.forEach((records, part) => {
        const steps = records.map((row, place) => (place ? `H${at(row)[0]}V${at(row)[1]}` : `M${at(row).join(" ")}`));
        if (records.length) chart.append(svg("path", { class: parts.length ? `line c${shadeOf(part)}` : "step", d: `${steps.join("")}H${right}` }));
      });
    },
  });
  halves.append(effects);
  later.push(show);
  show();
}

// --- over time ----------------------------------------------------------------------------------

/** How many attempts ran at once on average, for people. */
const meanTold = () => (facts.mean < 0.01 ? "less than 0.01" : number(Number(facts.mean.toPrecision(3))));

/** The limit as a line above the attempts, if it would not press them flat; 0 if not. */
const limitDrawn = () => (facts.limit && facts.limit <= facts.peak * 2 ? facts.limit : 0);

const ORDER = ["succeeded", "pruned", "failed", "lost", "cancelled", "running", "waiting"];

/** Up to this many items have a row each; a lane has at least 4 pixels. */
const ITEM_ROWS = 60, LANES = 150;
/** Pixels of the shortest bar: what took no time is still seen. */
const SHORTEST = 2;
const laneHeight = (lanes) => Math.max(4, Math.min(16, Math.floor(440 / Math.max(1, lanes))));

const ended = (kind) => ({ error: "failed", lost: "lost", cancelled: "cancelled" })[kind] || "running";

/** The attempts of an item, and before them its wait, in seconds. */
function barsOf(row) {
  const bars = (triesOf(row) || []).slice(1).filter(([when]) => when !== null)
    .map(([when, taken, kind]) => ({ row, state: ended(kind), from: when * raw.step, to: when * raw.step + (taken || 0) }));
  if (stateOf(row) !== "waiting" && begunOf(row) !== null)
    bars.push({ row, state: stateOf(row), from: begunOf(row), to: begunOf(row) + (takenOf(row) || 0) });
  return [{ row, state: "waiting", from: 0, to: bars.length ? bars[0].from : facts.seconds }, ...bars];
}

/** All attempts of *some* items by lane: each lies in the first lane that is free when it begins. */
function lanesOf(some) {
  const bars = some.flatMap((row) => barsOf(row).slice(1)).sort((a, b) => a.from - b.from);
  const lanes = [];
  for (const bar of bars) {
    let lane = lanes.find((one) => one.free <= bar.from + raw.step);
    if (!lane) lanes.push((lane = { free: 0, bars: [] }));
    lane.bars.push(bar);
    lane.free = bar.to;
  }
  return lanes;
}

const frame = (width, high) => ({ left: 56, right: width - 12, top: 14, bottom: high - 26 });

function timelines() {
  const place = byId("timeline");
  const rowsTold = el("output", { class: "output", "aria-live": "polite" });
  const byItem = () => shown.rows.length <= ITEM_ROWS;
  // One row for each item while rows stay readable; then each attempt in the first free lane.
  const lined = () => {
    if (byItem()) return shown.rows.map((row) => ({ row, bars: barsOf(row) }));
    const some = parts.map((_, part) => lanesOf(shown.rows.filter((row) => batchColumn.value(row) === part)));
    return parts.length ? some.flatMap((lanes, part) => lanes.slice(0, Math.floor(LANES / parts.length)).map((lane, at) => (at ? lane : { ...lane, label: parts[part].label }))) : lanesOf(shown.rows);
  };
  let lines = lined();
  const timeline = figure(place, {
    title: "When each attempt ran",
    height: () => Math.max(50, Math.min(lines.length, LANES) * (byItem() ? 16 : laneHeight(lines.length))) + 40,
    describe: () => {
      const items = plural(shown.rows.length, "item");
      const where = byItem() ? `${items}, one row each`
        : `${items} in ${plural(lines.length, "lane")}; an attempt takes the first lane that is free`;
      const cut = lines.length > LANES ? ` The first ${LANES} lanes are drawn.` : "";
      return [`${where}. A bar is an attempt; its color is the state in which it ended.${cut}`, ...legendOf(new Set(lines.flatMap((line) => line.bars.map((bar) => bar.state))))];
    },
    draw: (chart, width, high) => {
      const { left, right, top, bottom } = frame(width, high);
      const x = scaleOf([0, facts.seconds || 1], left, right, { zero: true });
      const tall = (bottom - top) / Math.max(1, Math.min(lines.length, LANES));
      bottomAxis(chart, x, left, right, bottom, "", seconds(x));
      const paths = {}, placed = [];
      lines.slice(0, LANES).forEach(({ bars, row, label }, at) => {
        const y = top + (at + 0.5) * tall;
        for (const bar of bars) {
          const from = Math.min(x.pixel(bar.from), right - SHORTEST), to = Math.max(x.pixel(bar.to), from + SHORTEST);
          (paths[bar.state] ??= []).push(`M${px(from)} ${px(y)}H${px(to - (to - from > 3 ? 0.6 : 0))}`);
          placed.push({ at, from, to, row: bar.row });
        }
        const name = row !== undefined ? String(indexOf(row)) : label ? short(label, 8) : "";
        if (name) chart.append(svg("text", { x: left - 6, y: px(y) + 4, "text-anchor": "end" }, name));
      });
      for (const state of ["waiting", ...ORDER.filter((name) => name !== "waiting")]) if (paths[state])
        chart.append(svg("path", { class: `bar s-${state}`, "stroke-width": px(Math.min(10, tall * 0.8)), opacity: state === "waiting" ? 0.35 : 1, d: paths[state].join("") }));
      const under = (event) => {
        const box = chart.getBoundingClientRect(), ratio = width / box.width;
        const across = (event.clientX - box.left) * ratio, at = Math.floor(((event.clientY - box.top) * ratio - top) / tall);
        const far = (bar) => Math.max(0, bar.from - across, across - bar.to);
        return placed.filter((bar) => bar.at === at).reduce((least, bar) => (least && far(least) <= far(bar) ? least : bar), undefined)?.row;
      };
      fill(chart, {
        pointermove: (event) => { const row = under(event); if (row !== undefined) rowsTold.replaceChildren(said(described(row))); },
        click: (event) => { const row = under(event); if (row !== undefined) reveal(row); },
      }, []);
    },
    after: [rowsTold],
  });
  later.push(() => { lines = lined(); timeline(); });
}

function overTime() {
  const place = byId("time");
  if (parts.length) { place.remove(); return; }  // the batches ran at different times
  const halves = el("div", { class: "columns" });
  place.append(halves);
  const none = !facts.series.length;
  figure(halves, {
    title: "Items by state",
    height: none ? 30 : 240,
    describe: () => (none ? "Nothing has happened yet." : ["All items, by state:", ...legendOf(new Set(STATES.filter((_, at) => facts.series.some((point) => point[at + 1]))))]),
    draw: (chart, width, high) => {
      if (none) return;
      const { left, right, top, bottom } = frame(width, high);
      const x = scaleOf([0, facts.seconds || 1], left, right, { zero: true });
      const y = scaleOf([0, facts.known || 1], bottom, top, { zero: true });
      leftAxis(chart, left, right, top, "", whole(y, 5));
      const below = facts.series.map(() => 0);
      for (const state of ORDER) {
        const at = STATES.indexOf(state) + 1;
        if (!facts.series.some((point) => point[at])) continue;
        const lower = [], upper = [];
        facts.series.forEach((point, place) => {
          const across = px(x.pixel(point[0]));
          lower.unshift(`L${across} ${px(y.pixel(below[place]))}`);
          below[place] += point[at];
          upper.push(`${place ? "L" : "M"}${across} ${px(y.pixel(below[place]))}`);
        });
        chart.append(svg("path", { class: `f-${state}`, d: `${upper.join("")}${lower.join("")}Z` }, svg("title", {}, state)));
      }
      bottomAxis(chart, x, left, right, bottom, "", seconds(x));
    },
    after: [none ? null : tabled("As a table", [["After", true], ...STATES.map((state) => [state, true])], () =>
      facts.series.filter((_, at) => at % 8 === 0).map(([at, ...counts]) => [span(at), ...counts.map(count)]))],
  });
  const banded = facts.concurrency.some(([, low, , high]) => low !== high);
  figure(halves, {
    title: "Concurrency",
    height: facts.peak ? 240 : 30,
    describe: () => facts.peak
      ? `Attempts running at once: peak ${count(facts.peak)}, mean ${meanTold()}${banded ? "; the line is the mean of each interval, and the area is its range" : ""}${limitDrawn() ? `; the dashed line is max_concurrent=${facts.limit}` : ""}.`
      : "No attempt has begun.",
    draw: (chart, width, high) => {
      if (!facts.peak) return;
      const { left, right, top, bottom } = frame(width, high);
      const limit = limitDrawn();
      const x = scaleOf([0, facts.seconds || 1], left, right, { zero: true });
      const y = scaleOf([0, Math.max(facts.peak, limit)], bottom, top, { zero: true });
      leftAxis(chart, left, right, top, "", whole(y, 5));
      const stepped = (part) => facts.concurrency.map((one, place) =>
        place ? `H${px(x.pixel(one[0]))}V${px(y.pixel(one[part]))}` : `M${px(x.pixel(one[0]))} ${px(y.pixel(one[part]))}`).join("");
      const back = () => [...facts.concurrency].reverse().map((one, place, all) =>
        `V${px(y.pixel(all[Math.min(place + 1, all.length - 1)][1]))}H${px(x.pixel(all[Math.min(place + 1, all.length - 1)][0]))}`).join("");
      chart.append(svg("path", { class: "under", d: banded ? `${stepped(3)}${back()}Z` : `${stepped(2)}V${bottom}H${left}Z` }), svg("path", { class: "step", d: stepped(2) }));
      if (limit) chart.append(svg("path", { class: "limit", d: `M${left} ${px(y.pixel(limit))}H${right}` }));
      bottomAxis(chart, x, left, right, bottom, "", seconds(x));
    },
    after: [facts.peak ? tabled("As a table", [["After", true], ["At least", true], ["On average", true], ["At most", true]], () =>
      facts.concurrency.filter((_, at) => at % Math.ceil(facts.concurrency.length / 40) === 0).map(([at, low, mean, high]) => [span(at), count(low), number(mean), count(high)])) : null],
  });
}

const legendOf = (names) => ORDER.filter((name) => names.has(name)).map((name) =>
  [" ", el("span", { class: "entry" }, el("span", { class: `dot f-${name}` }), name)]).flat();

// --- durations and retries ------------------------------------------------------------------------

function durations() {
  const place = byId("durations"), found = facts.durations;
  const parts = el("div", { class: "columns" });
  place.append(parts);
  if (found) {
    const left = el("div");
    parts.append(left);
    const bins = found.bins, most = Math.max(...bins.map((bin) => bin[2]));
    figure(left, {
      title: "Durations of successful items",
      height: 240,
      describe: () => `${plural(found.count, "item")}: half took at most ${span(found.p50)} (p50), 95 % at most ${span(found.p95)} (p95); shortest ${span(found.least)}, longest ${span(found.most)}, total ${span(found.total)}.`,
      draw: (chart, width, high) => {
        const [from, to, top, bottom] = [56, width - 14, 22, high - 26];
        const edges = [bins[0][0], bins[bins.length - 1][1]];
        const log = bins.length > 2 && bins[1][1] - bins[1][0] > 1.01 * (bins[0][1] - bins[0][0]);
        const x = scaleOf(edges, from, to, { logarithmic: log });
        const y = scaleOf([0, most], bottom, top, { zero: true });
        leftAxis(chart, from, to, top, "", whole(y, 4));
        for (const [start, stop, items] of bins) {
          const at = bins.length > 1 ? x.pixel(start) : from + (to - from) * 0.35;
          const wide = bins.length > 1 ? x.pixel(stop) - at : (to - from) * 0.3;
          chart.append(svg("rect", { class: "column", x: px(at + 0.5), y: px(y.pixel(items)), width: px(Math.max(1, wide - 1)), height: px(bottom - y.pixel(items)) },
            svg("title", {}, `${span(start)} to ${span(stop)}: ${plural(items, "item")}`)));
        }
        const words = log ? (wanted) => x.ticks(wanted).map((value) => [x.pixel(value), span(value)]) : seconds(x);
        bottomAxis(chart, x, from, to, bottom, "", bins.length > 1 ? words : () => [[(from + to) / 2, span(bins[0][0])]]);
        if (bins.length > 1) for (const [name, value, anchor] of [["p50", found.p50, "end"], ["p95", found.p95, "start"]]) {
          const at = px(x.pixel(value));
          const turned = at < from + 40 ? "start" : at > to - 40 ? "end" : anchor;
          chart.append(svg("path", { class: "mark", d: `M${at} ${top - 6}V${bottom}` }));
          chart.append(svg("text", { class: "label", x: at + (turned === "end" ? -4 : 4), y: top - 8, "text-anchor": turned }, name));
        }
      },
      after: [tabled("As a table", [["From", true], ["To", true], ["Items", true]], () => bins.map(([a, b, items]) => [span(a), span(b), count(items)]))],
    });
  }
  const slow = facts.slowest.map((index) => rowOf(index)).filter((row) => row !== undefined);
  if (slow.length) {
    parts.append(el("div", {}, el("h3", {}, "The slowest"), table("By duration of the last attempt", [["Item", true], ["Took", true], ["Waited", true], ["State", "brief"], ["Input", "text why"]],
      slow.slice(0, 10).map((row) => [link(row, nameOf(row)), span(takenOf(row)), span(waitedOf(row)), stateOf(row), said(noteOf(row, inputs))])),
    slow.length > 10 ? el("p", { class: "faint" }, "Sort the items by “Took” for more.") : null));
  }
  if (!found && !slow.length) place.append(el("p", { class: "faint" }, "Nothing has ended yet."));
}

function retries() {
  const place = byId("retries");
  if (!facts.retries.length) { place.append(el("p", { class: "faint" }, "No item was retried.")); return; }
  const all = facts.retries.reduce((sum, one) => sum + one[1], 0);
  place.append(table(`${plural(all, "retry", "retries")}, by the reason why the attempt before failed`, [["Reason"], ["Attempts", true], ["Items", true], ["", false]],
    facts.retries.map(([reason, tries, items]) => [said(reason), count(tries), count(items),
      svg("svg", { viewBox: "0 0 100 10", width: 120, height: 12, "aria-hidden": "true" }, svg("rect", { class: "column", width: px((100 * tries) / facts.retries[0][1]), height: 10 }))])));
  place.append(el("p", {}, el("button", { type: "button", click: () => ask("attempts>1", "items") }, "Show the retried items")));
}

// --- the items ------------------------------------------------------------------------------------

/** A narrow screen shows each item as a card, which needs much more height. */
const PAGE = innerWidth > 640 ? 100 : 20;

function itemsTable() {
  const place = byId("items");
  const heads = [
    { key: "item", name: "Item", numeric: true, value: positionOf, text: (row) => String(indexOf(row)) },
    ...(batchColumn ? [{ key: "batch", name: "Batch", value: batchColumn.text, text: batchColumn.text }] : []),
    { key: "state", name: "State", value: stateOf, text: stateOf },
    { key: "started", name: "Started", numeric: true, value: begunOf, text: (row) => (begunOf(row) === null ? "" : `+${span(begunOf(row))}`) },
    { key: "waited", name: "Waited", numeric: true, value: waitedOf, text: (row) => span(waitedOf(row)) },
    { key: "took", name: "Took", numeric: true, value: takenOf, text: (row) => span(takenOf(row)) },
    { key: "attempts", name: "Attempts", numeric: true, value: attemptsOf, text: (row) => (attemptsOf(row) ? String(attemptsOf(row)) : "") },
    ...columns.map((one) => ({ key: `${one.of} ${one.name}`, name: one.name, of: one.of, numeric: one.numeric, value: one.numeric ? one.value : (row) => one.text(row) || null, text: one.text })),
    ...(facts.failures.length ? [{ key: "why", name: "Why", value: (row) => whyOf(row) || null, text: whyOf, why: true }] : []),
  ];
  const labelOf = (head) => (head.of && head.of !== "input" ? `${head.name} (${head.of})` : head.name);
  const body = el("tbody", { role: "rowgroup" });
  const names = el("tr", { role: "row" });
  const previous = el("button", { type: "button", "data-key": "previous", click: () => turn(-1) }, "Previous");
  const next = el("button", { type: "button", "data-key": "next", click: () => turn(1) }, "Next");
  const pages = el("span");
  const turn = (by) => { kept.page += by; show(); };
  const sort = (key, down) => { kept.sort = { key, down }; kept.page = 0; show(); };

  const buttons = heads.map((head) => {
    const arrow = el("span", { "aria-hidden": "true" });
    const button = el("button", { type: "button", "data-key": `sort ${head.key}`, click: () => sort(head.key, kept.sort.key === head.key && !kept.sort.down) }, said(head.name), arrow);
    const heading = el("th", { scope: "col", role: "columnheader", class: head.numeric && "num" }, button, head.of && head.of !== "input" ? el("span", { class: "faint" }, ` ${head.of}`) : null);
    names.append(heading);
    return { head, heading, arrow };
  });
  // A narrow screen has no headings to sort by.
  const orders = heads.flatMap((head) => [false, true].map((down) => ({ label: `${labelOf(head)}${down ? ", descending" : ""}`, key: head.key, down })));
  const sorting = el("select", { "data-key": "sort", change: () => { const one = orders[sorting.selectedIndex]; sort(one.key, one.down); } }, orders.map((one) => el("option", {}, one.label)));

  const sorted = () => {
    const { key, down } = kept.sort;
    const head = heads.find((one) => one.key === key) || heads[0];
    if (head.key === "item" && !down) return shown.rows;
    return [...shown.rows].sort((a, b) => {
      const [x, y] = [head.value(a), head.value(b)];
      if (x === y) return a - b;
      if (x === null || y === null) return x === null ? 1 : -1;
      return (x < y ? -1 : 1) * (down ? -1 : 1);
    });
  };

  /** All that is known of an item, and how to read its log. */
  const details = (row) => {
    const command = `kinetic jobs logs ${jobOf(row)}`;
    const code = el("code", {}, command), copy = el("button", { type: "button", click: () => {
      getSelection().selectAllChildren(code);
      navigator.clipboard?.writeText(command).then(() => copy.replaceChildren("Copied"), () => {});
    } }, "Copy");
    const before = triesOf(row), [more, ...told] = before || [0];
    const facts_ = [...[...inputs, ...results].map((one) => [one.of === "input" ? one.name : `${one.name} (${one.of})`, one.text(row)]), ["why", whyOf(row)]].filter(([, text]) => text !== "");
    return [
      el("dl", {}, facts_.map(([name, text]) => el("div", {}, el("dt", {}, said(name)), el("dd", {}, said(text))))),
      before ? el("div", {}, "Earlier attempts:", el("ol", { start: more + 1 }, told.map(([, taken, kind, reason]) =>
        el("li", {}, said(reason || kind || "unknown"), taken === null ? "" : ` after ${span(taken)}`)))) : null,
      el("p", { class: "log" }, "Log: ", facts.live ? el("a", { href: `log/${positionOf(row)}`, target: "_blank", rel: "noopener" }, "the last lines") : null, facts.live ? ", or " : null, code, " ", copy),
    ];
  };

  const show = () => {
    const all = sorted(), last = Math.max(0, Math.ceil(all.length / PAGE) - 1);
    kept.page = Math.max(0, Math.min(last, kept.page));
    const some = all.slice(kept.page * PAGE, (kept.page + 1) * PAGE);
    body.replaceChildren(...some.flatMap((row) => {
      const key = positionOf(row), more = el("tr", { class: "more", role: "row", hidden: !kept.open.has(key) },
        el("td", { colspan: heads.length, role: "cell" }, el("div", {}, kept.open.has(key) ? details(row) : null)));
      const toggle = el("button", { type: "button", "data-key": `item ${key}`, "aria-expanded": String(kept.open.has(key)), click: () => {
        if (!kept.open.delete(key)) { kept.open.add(key); more.firstChild.firstChild.replaceChildren(...details(row).filter(Boolean)); }
        more.hidden = !kept.open.has(key);
        toggle.setAttribute("aria-expanded", String(!more.hidden));
      } }, String(indexOf(row)));
      return [el("tr", { role: "row" }, heads.map((head, at) => {
        if (head.key === "item") return cell(true, "Item", "num", toggle);
        if (head.key === "state") return cell(false, "State", "brief", [el("span", { class: `dot f-${stateOf(row)}` }), stateOf(row)]);
        return cell(false, labelOf(head), head.numeric ? "num" : head.why ? "text why" : "text", head.numeric ? head.text(row) : said(head.text(row)));
      })), more];
    }));
    pages.replaceChildren(`${count(kept.page * PAGE + (some.length ? 1 : 0))} – ${count(kept.page * PAGE + some.length)} of ${count(all.length)}`);
    previous.disabled = kept.page === 0;
    next.disabled = kept.page === last;
    sorting.selectedIndex = orders.findIndex((one) => one.key === kept.sort.key && one.down === kept.sort.down);
    for (const { head, heading, arrow } of buttons) {
      const mine = head.key === kept.sort.key;
      if (mine) heading.setAttribute("aria-sort", kept.sort.down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
      arrow.replaceChildren(mine ? (kept.sort.down ? " ▼" : " ▲") : "");
    }
  };

  place.append(
    el("div", { class: "controls narrow" }, el("label", {}, "Sort by", sorting)),
    el("div", { class: "wide", role: "region", "aria-label": "Items", tabindex: 0 },
      el("table", { role: "table" }, el("caption", {}, "A heading sorts by its column. The number of an item opens its details and its log."), el("thead", { role: "rowgroup" }, names), body)),
    el("div", { class: "controls pages" }, previous, pages, next));
  if (raw.unlisted) place.append(el("p", { class: "faint" }, `The earlier attempts of ${plural(raw.unlisted, "item")} are not listed, to keep this page small.`));
  later.push(show);
  show();
}

function example() {
  const known = inputs.find((one) => one.numeric && !one.name.includes('"')) || built[0];
  const name = /[\s<>=]/.test(known.name) ? `"${known.name}"` : known.name;
  const value = rows.map(known.value).find((one) => one !== null);
  return `${name}<${number(value === undefined ? 1 : Number(value.toPrecision(3)))}`;
}

// --- several batches, sweeps, and curves ---------------------------------------------------------------

/** Which of the colors a batch has. */
const shadeOf = (part) => (parts.length > 1 ? Math.round((part * (RAMP - 1)) / (parts.length - 1)) % RAMP : 3);

function batches() {
  const place = byId("batches");
  if (!parts.length) { place.remove(); return; }
  const states_ = (one) => states(one.counts).map(([name, items]) => `${count(items)} ${name}`).join(", ");
  place.append(table("Times count from the start of each batch", [["Batch", "text"], ["ID", "text"], ["Function", "text"], ["Accelerator", "text"], ["Started"], ["Items", "text"], ["Took", true], ["p50", true], ["p95", true], ["Peak concurrency", true]],
    parts.map((one, part) => [el("span", {}, el("span", { class: `dot k${shadeOf(part)}` }), said(one.label)), said(one.group), said(one.function), said(one.accelerator), when(one.created),
      states_(one), span(one.seconds), span(one.p50), span(one.p95), count(one.peak)])));
}

function sweep() {
  const place = byId("sweep"), found = facts.sweep;
  if (!found) { place.remove(); return; }
  const of = (name) => facts.counts[STATES.indexOf(name)], ended = facts.counts.slice(2).reduce((sum, items) => sum + items, 0);
  const [best, value] = found.best ? [rowOf(found.best[0]), found.best[1]] : [];
  const told = [`${count(of("succeeded"))} of ${plural(ended, "ended trial")} ${of("succeeded") === 1 ? "is" : "are"} complete.`];
  if (of("pruned")) told.push(` ${count(of("pruned"))} ${of("pruned") === 1 ? "was" : "were"} pruned (${percent(of("pruned"), ended)}).`);
  place.append(el("p", {}, ...told));
  place.append(el("p", {}, "Best so far: ", ...(best !== undefined ? [el("strong", {}, number(value)), " by ", link(best, `trial ${nameOf(best)}`), ": ", said(noteOf(best, inputs))] : ["no trial has a value."])));
  if (!found.rungs.length) return;
  const most = Math.max(...found.rungs.map(([, pruned]) => pruned));
  place.append(table("Pruned trials, by the last rung that they have reached", [["Rung", true], ["Pruned", true], ["Went on", true], ["", false]],
    found.rungs.map(([rung, pruned, left]) => [rung ? `step ${count(rung)}` : "before the first", count(pruned), count(left),
      svg("svg", { viewBox: "0 0 100 10", width: 120, height: 12, "aria-hidden": "true" }, svg("rect", { class: "f-pruned", width: px((100 * pruned) / most), height: 10 }))])));
}

function curves() {
  const place = byId("curves"), found = facts.curves;
  if (!found.shown.length) { place.remove(); return; }
  const numbers = found.names.map((name, at) => ({ label: name || "value", at }));
  const options = axes.filter((one) => varying.includes(one) || one === batchColumn);
  const chosen = { number: choiceOf("curve", numbers, numbers[0]), colour: choiceOf("curve color", [null, ...options], batchColumn || metrics[0] || varying.find((one) => one.of === "input") || null) };
  const told = el("output", { class: "output", "aria-live": "polite" }), key = el("div", { class: "ramp", "aria-hidden": "true" });
  const drawnCurves = () => {
    const wanted = new Set(shown.rows);
    return found.shown.filter(([row]) => wanted.has(row))
      .map(([row, at, numbers_]) => [row, at.map((step, place) => [step, (numbers_[chosen.number.at] || [])[place]]).filter(([, value]) => value !== null && value !== undefined)])
      .filter(([, points]) => points.length);
  };
  place.append(el("div", { class: "controls" },
    numbers.length > 1 ? chooser("Curve of", "curve", numbers, chosen.number, (one) => { chosen.number = one; show(); }) : null,
    chooser("Color", "curve color", [null, ...options], chosen.colour, (one) => { chosen.colour = one; show(); })));
  const show = figure(place, {
    title: "What each item has reported",
    height: (width) => Math.min(400, Math.max(280, width * 0.45)),
    describe: () => {
      const some = drawnCurves(), kinds = new Set(some.map(([row]) => stateOf(row)));
      return [`${plural(some.length, "curve")} of `, said(chosen.number.label), " by step", ...(chosen.colour ? [", colored by ", said(chosen.colour.label)] : []), ".",
        found.reported > found.shown.length ? ` ${count(found.reported)} items have reported; the page has the curves of ${count(found.shown.length)}: the best ones and every nth.` : "",
        kinds.has("pruned") ? " A dot ends a pruned one." : "", " Arrow keys go from curve to curve, Enter shows the item."];
    },
    draw: (chart, width, high) => {
      const some = drawnCurves(), points = some.flatMap(([row, list]) => list.map(([step, value]) => [step, value, row]));
      const [left, right, top, bottom] = [64, width - 12, 26, high - 42];
      const x = scaleOf(points.map(([step]) => step), left + 4, right - 8), y = scaleOf(points.map(([, value]) => value), bottom - 6, top + 6);
      leftAxis(chart, left, right, top, chosen.number.label + (y.log ? ", logarithmic" : ""), y.ticks(6).map((value) => [y.pixel(value), number(value)]));
      bottomAxis(chart, x, left, right, bottom, "step" + (x.log ? ", logarithmic" : ""), (wanted) => x.ticks(wanted).filter(Number.isInteger).map((value) => [x.pixel(value), count(value)]));
      const colour = colouring(chosen.colour, some.map(([row]) => row));
      key.replaceChildren(...(chosen.colour ? [said(`${chosen.colour.label}:`), ...colour.legend] : []));
      const paths = new Map(some.map(([row, list]) => [row, list.map(([step, value], place) => `${place ? "L" : "M"}${px(x.pixel(step))} ${px(y.pixel(value))}`).join("") + (list.length === 1 ? "h0" : "")]));
      const lines = Array.from({ length: RAMP + 1 }, () => []), ends = Array.from({ length: RAMP + 1 }, () => []);
      for (const [row, list] of some) {
        const [step, value] = list[list.length - 1];
        lines[colour.of(row)].push(paths.get(row));
        if (stateOf(row) === "pruned") ends[colour.of(row)].push(`M${px(x.pixel(step))} ${px(y.pixel(value))}h0`);
      }
      const shade = (at) => (at === RAMP ? "cn" : PALETTE[at]);
      // Items without the value that colors the others, such as pruned ones, lie below them.
      for (const at of [RAMP, ...PALETTE.keys()]) {
        if (lines[at].length) chart.append(svg("path", { class: `curve ${shade(at)}`, d: lines[at].join("") }));
        if (ends[at].length) chart.append(svg("path", { class: `points ${shade(at)}`, "stroke-width": 5, d: ends[at].join("") }));
      }
      const over = svg("path", { class: "over" });
      chart.append(over);
      const place_ = ([step, value, row]) => [x.pixel(step), y.pixel(value), row];
      pointing(chart, some.map(([row, list]) => place_([...list[list.length - 1], row])), width, told,
        { near: points.map(place_), mark: (row) => over.setAttribute("d", paths.get(row)) });
    },
    after: [key, told],
  });
  later.push(show);
}

/** A link to each section. */
function contents() {
  const more = { failures: facts.failures.length + facts.more_failures, items: facts.known };
  byId("contents").append(el("ul", {}, [...document.querySelectorAll("main section")].map((section) =>
    el("li", {}, el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent), more[section.id] ? ` (${count(more[section.id])})` : ""))));
}

// --- all of it --------------------------------------------------------------------------------------

filter();
head();
filterBar();
batches();
sweep();
best();
curves();
failures();
plots();
timelines();
itemsTable();
overTime();
durations();
retries();
contents();
byId("foot").append(`Written by kinetic ${document.querySelector("meta[name=generator]").content.replace(/^kinetic /, "")}. The snapshot was taken at ${when(facts.read_at)}. ${facts.live ? "This page asks only the kinetic command that serves it, on this machine." : "This page loads nothing and sends nothing."} Times are those of the jobs' clocks.`);
for (const again of drawn) again();
}

/** Draw new facts; the reader's choices, the place on the page, and the focus stay. */
function renew(facts) {
  const active = document.activeElement, key = active?.dataset?.key, id = active?.id;
  const [start, end, top] = [active?.selectionStart, active?.selectionEnd, scrollY];
  skeleton.forEach((node) => document.querySelector(node.localName).replaceWith(node.cloneNode(true)));
  draw(facts);
  const again = key ? [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key) : id ? document.getElementById(id) : null;
  again?.focus({ preventScroll: true });
  if (again && typeof start === "number") again.setSelectionRange(start, end);
  scrollTo({ top, behavior: "instant" });
}

draw(JSON.parse(document.getElementById("facts").textContent));
document.addEventListener("kinetic-facts", (event) => renew(event.detail));
let wide = innerWidth, timer = 0;
addEventListener("resize", () => {
  if (innerWidth === wide) return;
  wide = innerWidth;
  clearTimeout(timer);
  timer = setTimeout(() => { for (const again of drawn) again(); }, 120);
});
document.documentElement.dataset.ready = "yes";
})();
