// Charts: drawn when they come into view, in the colours of the page, readable with the arrow keys.

const SMOOTHED_FROM = 10; // steps
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const WHOLE = /(^| )(step|outcome|place)$/; // what axes count in whole numbers
const LEGEND = 6; // lines; of more the legend is folded
const dark = matchMedia("(prefers-color-scheme: dark)");
const figures = new Map(); // chart element -> {chart, drawn, at}
let whenChosen = null; // (step, series) => ..., for a click on a point, or Enter at a step of a single series
const hue = (one, at) => `--c${(one.key ?? at) % 12}`;

const inView = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "300px" },
);
dark.addEventListener("change", () => [...figures].filter(([, figure]) => figure.drawn).forEach(([place]) => draw(place)));

/** A figure with caption and the value under the pointer; the last one at first. */
function chartFigure(chart) {
  const readout = h("output", { "aria-live": "off" });
  const speaks = (how) => () => readout.setAttribute("aria-live", how); // of the chart in focus alone
  const place = h("div", {
    class: "plot", role: "img", tabindex: "0",
    onkeydown: (event) => step(place, event), onfocus: speaks("polite"), onblur: speaks("off"),
  });
  const legend = chart.series.length < 2 ? null
    : h("ul", { class: "legend" }, chart.series.map((one, at) => h("li", { style: `--key: var(${hue(one, at)})` }, `${one.name} `, h("b", {}))));
  const words = h("span");
  const saved = (text, save) => h("button", { type: "button", class: "save", "aria-label": `${chart.title} as ${text}`, onclick: save }, text);
  const saves = h("span", { class: "saves" }, saved("CSV", () => saveCsv(chart.title, chartRows(figures.get(place).chart))), saved("PNG", async () => { await draw(place); await savePng(chart.title, place); }));
  const shownLegend = legend && chart.series.length > LEGEND ? h("details", { class: "folded" }, h("summary", {}, `${chart.series.length} lines`), legend) : legend;
  const figure = h("figure", {}, h("figcaption", {}, h("strong", {}, chart.title), readout, words), place, h("div", { class: "below" }, shownLegend, saves));
  figures.set(place, { readout, legend, words, drawn: false, at: null });
  give(place, chart);
  inView.observe(place);
  return figure;
}

/** All steps of its series, in order. */
const stepsOf = (chart) => [...new Set(chart.series.flatMap((one) => one.steps))].sort((a, b) => a - b);

/** Values for a chart: its first, or later ones on a live page. */
function give(place, chart) {
  const figure = figures.get(place);
  figure.chart = chart;
  figure.steps = stepsOf(chart);
  const spoken = chart.series.map((one) => `${one.name}: ${ends(one, chart)}`).join("; ");
  place.setAttribute("aria-label", `${chart.title}. ${spoken}. Arrow keys read the ${chart.along}s${whenChosen ? "; Enter shows a step's conversations" : ""}.`);
  const beyond = outside(chart).length;
  figure.words.textContent = [chart.note, beyond ? `${plural(beyond, chart.along)} beyond the axis` : ""].filter(Boolean).join("; ");
  read(place, null);
  if (figure.drawn) draw(place);
}

/** Take the charts of an element out, before others come. */
function dropCharts(element) {
  for (const place of element.querySelectorAll(".plot")) {
    inView.unobserve(place);
    if (figures.get(place)?.drawn) window.Plotly.purge(place);
    figures.delete(place);
  }
}

function ends(one, { percent, along }) {
  const known = one.values.map((value, at) => [one.steps[at], value]).filter(([, value]) => value !== null);
  if (!known.length) return "no value";
  return [...new Set([0, known.length - 1])].map((at) => `${number(known[at][1], percent)} at ${along} ${known[at][0].toLocaleString("en")}`).join(", ");
}

/** The steps whose value, or sum of parts, the axis leaves out. */
function outside(chart) {
  if (!chart.range || chart.signed) return []; // whose axis has room for all
  const [low, high] = chart.range;
  const sums = new Map();
  const points = chart.series.flatMap((one) => one.values.map((value, at) => ({ step: one.steps[at], value })));
  for (const { step, value } of points) sums.set(step, (sums.get(step) ?? 0) + value);
  return (chart.stacked ? [...sums].map(([step, value]) => ({ step, value })) : points)
    .filter(({ value }) => value !== null && (value < low || value > high));
}

/** Show the values of one step, beside the title or in the legend; of the last step without one. */
function read(place, at) {
  const figure = figures.get(place);
  const { chart, steps, readout, legend } = figure;
  figure.at = at;
  const step = steps[at ?? steps.length - 1];
  const said = chart.series.map((one) => {
    const own = one.steps.indexOf(step);
    const band = one.low && (one.low[own] ?? null) !== null ? ` [${number(one.low[own], chart.percent)}, ${number(one.high[own], chart.percent)}]` : "";
    return `${number(one.values[own], chart.percent)}${band}`;
  });
  const place_ = `${chart.along} ${Number.isInteger(step) ? step.toLocaleString("en") : number(step)}`;
  readout.textContent = !steps.length ? "no value" : legend ? place_ : `${said[0]} at ${place_}`;
  legend?.querySelectorAll("b").forEach((value, i) => (value.textContent = said[i]));
}

function step(place, event) {
  const { chart, steps, drawn, at } = figures.get(place);
  const last = steps.length - 1;
  if (event.key === "Enter" && whenChosen && steps.length) {
    event.preventDefault();
    whenChosen(steps[at ?? last], chart.series.length === 1 ? chart.series[0] : null);
    return;
  }
  const moves = { ArrowLeft: (at ?? last + 1) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: last };
  if (!(event.key in moves) || !drawn) return;
  event.preventDefault();
  const next = Math.max(0, Math.min(last, moves[event.key]));
  const points = place.data.map((trace, curveNumber) => ({ curveNumber, pointNumber: trace.meta ? trace.x.indexOf(steps[next]) : -1 }));
  window.Plotly.Fx.hover(place, points.filter(({ pointNumber }) => pointNumber >= 0));
  read(place, next);
}

async function draw(place) {
  const figure = figures.get(place);
  if (!figure) return;
  const Plotly = await plotly();
  if (!figures.has(place)) return;
  const options = { displayModeBar: false, responsive: true, scrollZoom: false, showTips: false };
  await Plotly.react(place, traces(figure.chart), layout(figure.chart), options);
  if (!figure.drawn) {
    place.on("plotly_relayout", () => keepWhole(place));
    place.on("plotly_hover", (event) => read(place, figure.steps.indexOf(event.points[0].x)));
    place.on("plotly_unhover", () => read(place, null));
    place.on("plotly_click", (event) => whenChosen?.(event.points[0].x, nearest(place, event)));
  }
  figure.drawn = true;
}

/** The series whose line is nearest to a click; the hover box has all of them. */
function nearest(place, { points, event }) {
  const { chart } = figures.get(place);
  const top = place.querySelector(".nsewdrag").getBoundingClientRect().top;
  const away = (point) => Math.abs(point.yaxis.d2p(point.y) - (event.clientY - top));
  const best = points.reduce((one, other) => (away(other) < away(one) ? other : one));
  return chart.series.find(({ name }) => name === best.data.name) ?? (chart.series.length === 1 ? chart.series[0] : null);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function traces(chart) {
  const single = chart.series.length === 1 && chart.series[0].key === undefined;
  const isAlone = stepsOf(chart).length === 1;
  const marks = { type: "scatter", hoverinfo: "skip", showlegend: false };
  return [...chart.series.flatMap((one, at) => {
    const own = single ? colour("--new") : colour(hue(one, at));
    const long = one.values.length >= SMOOTHED_FROM;
    const smoothed = chart.smoothed && stepsOf(chart).length >= SMOOTHED_FROM;
    const digits = chart.percent ? "%{y:.1%}" : "%{y:,.4~g}";
    const shape = chart.stepped ? "hv" : "linear";
    const base = { x: one.steps, type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, connectgaps: true };
    const reaches = isAlone && one.low ? { error_y: { type: "data", symmetric: false, array: [one.high[0] - one.values[0]], arrayminus: [one.values[0] - one.low[0]], color: own, thickness: 1.5, width: 4 } } : {};
    const shown = { ...base, ...reaches, hoverinfo: "all", meta: "values", name: single ? "" : one.name, y: one.values };
    if (chart.signed || (chart.stacked && isAlone)) { // an area over one step has no width
      return [{ ...shown, type: "bar", marker: { color: own }, hovertemplate: digits, ...(isAlone ? { width: 0.3 } : {}) }];
    }
    if (chart.stacked) {
      return [{ ...shown, stackgroup: "all", line: { color: own, width: 1 }, fillcolor: `${own}99`, hovertemplate: digits }];
    }
    if (!single) {
      const line = { color: own, width: 1.75, shape, dash: DASHES[(one.dash ?? Math.floor((one.key ?? at) / 12)) % DASHES.length] };
      const eased = (values) => (smoothed ? smooth(values) : values);
      const dots = long ? {} : { mode: "lines+markers", marker: { color: own, size: 5 } };
      const reach = one.low ? [
        { ...base, y: eased(one.low), line: { width: 0 } },
        { ...base, y: eased(one.high), line: { width: 0 }, fill: "tonexty", fillcolor: `${own}26` },
      ] : [];
      return [...reach, { ...shown, ...dots, y: eased(one.values), line, hovertemplate: digits }];
    }
    const band = one.low ? [
      { ...base, y: one.low, line: { width: 0 } },
      { ...base, y: one.high, line: { width: 0 }, fill: "tonexty", fillcolor: colour("--band") },
    ] : [];
    const interval = one.low ? one.low.map((low, i) => (low === null ? "" : ` [${number(low, chart.percent)}, ${number(one.high[i], chart.percent)}]`)) : null;
    const few = !long ? { mode: "lines+markers", marker: { color: own, size: 6 } } : {};
    const raw = { ...shown, ...few, text: interval, hovertemplate: `${digits}${interval ? "%{text}" : ""}<extra></extra>`, line: { color: smoothed ? colour("--raw") : own, width: smoothed ? 1.25 : 2, shape } };
    const mean = smoothed ? [{ ...base, y: smooth(one.values), line: { color: own, width: 2.25 } }] : [];
    return [...band, raw, ...mean];
  }), ...limits(chart, marks), ...edges(chart, marks)];
}

/** Values that the curves are to be seen against, as dotted lines with their names. */
function limits(chart, base) {
  const steps = chart.series.flatMap((one) => one.steps);
  if (!steps.length) return [];
  const x = [Math.min(...steps), Math.max(...steps)];
  return (chart.limits ?? []).map(({ value, name, key, under }) => {
    const own = colour(key === undefined ? "--soft" : `--c${key}`);
    return { ...base, mode: "lines+text", x, y: [value, value], line: { color: own, width: 1.25, dash: "dot" }, text: [name, ""],
      textposition: under ? "bottom right" : "top right", textfont: { size: 11, color: own }, cliponaxis: false };
  });
}

/** Marks at the edge of the axis for the values beyond it. */
function edges(chart, base) {
  const beyond = outside(chart);
  if (!beyond.length) return [];
  const [low, high] = chart.range;
  const symbol = beyond.map(({ value }) => (value > high ? "triangle-up" : "triangle-down"));
  return [{
    ...base, mode: "markers", x: beyond.map(({ step }) => step), cliponaxis: false,
    y: beyond.map(({ value }) => Math.min(high, Math.max(low, value))), marker: { color: colour("--warn"), size: 9, symbol },
  }];
}

/** Moving average over about a tenth of the curve, centred. */
function smooth(values) {
  const half = Math.max(1, Math.floor(values.length / 20));
  return values.map((own, at) => {
    const near = values.slice(Math.max(0, at - half), at + half + 1).filter((value) => value !== null);
    return own === null || !near.length ? null : near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

/** Are all values whole numbers, so that none between them is a tick? */
const countsWhole = (chart) => !chart.percent && !chart.log && chart.series.every(({ values }) => values.every((value) => value === null || Number.isInteger(value)));
const wholeTicks = ([low, high]) => (high - low < 6 ? { tickmode: "linear", tick0: 0, dtick: 1 } : { tickmode: "auto" });

/** Whole ticks also of a part that was zoomed into. */
function keepWhole(place) {
  const { chart } = figures.get(place) ?? {};
  if (!chart) return;
  const changes = [["xaxis", WHOLE.test(chart.along)], ["yaxis", countsWhole(chart)]].filter(([, isWhole]) => isWhole)
    .map(([name]) => [name, wholeTicks(place.layout[name].range ?? [0, Infinity])]).filter(([name, { tickmode }]) => tickmode !== (place.layout[name].tickmode ?? "auto"));
  if (changes.length) window.Plotly.relayout(place, Object.fromEntries(changes.flatMap(([name, ticks]) => Object.entries(ticks).map(([key, value]) => [`${name}.${key}`, value]))));
}

function layout(chart) {
  const steps = chart.series.flatMap((one) => one.steps);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const isWhole = WHOLE.test(chart.along);
  const pad = Math.max(isWhole || first === last ? 0.5 : 0, 0.01 * (last - first));
  const across = [first - pad, last + pad], up = chart.range;
  const axis = { gridcolor: colour("--rule"), zeroline: true, zerolinecolor: colour("--zero"), zerolinewidth: 1, tickfont: { size: 11, color: colour("--soft") }, fixedrange: matchMedia("(pointer: coarse)").matches, automargin: true };
  return {
    autosize: true, barmode: "relative", bargap: 0.1, uirevision: "kept", margin: { l: 44, r: 8, t: 8, b: 26 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: "system-ui, sans-serif", color: colour("--ink") }, hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--rule"), font: { color: colour("--ink"), size: 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, range: across, showgrid: false, zeroline: false, nticks: 6, ...(isWhole ? wholeTicks(across) : {}), tickformat: isWhole ? ",d" : "~g", hoverformat: isWhole ? ",d" : "~g", unifiedhovertitle: { text: `${chart.along} %{x}` } },
    shapes: (chart.zones ?? []).map(({ from, to, key }) => ({ type: "rect", layer: "below", yref: "paper", y0: 0, y1: 1, x0: from, x1: to, line: { width: 0 }, fillcolor: colour(`--c${key}`), opacity: 0.13 })),
    yaxis: chart.log ? { ...axis, type: "log", dtick: 1, tickformat: "~g", zeroline: false, range: chart.range.map(Math.log10) } : { ...axis, nticks: 5, ...(up && countsWhole(chart) ? wholeTicks(up) : {}), tickformat: chart.percent ? "~%" : "~g", rangemode: "tozero", ...(up ? { range: up } : {}) },
  };
}
