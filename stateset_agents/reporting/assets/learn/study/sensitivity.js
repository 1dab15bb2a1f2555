// A grid of settings: what was measured, what was not, and the cheapest of those that cannot be told from the best.

const grouped = [...new Map(data.cells.map((cell) => [`${cell.suite} ${cell.arm}`, cell])).values()];
const plain = (value) => typeof value !== "object" || value === null;
const VARIED = unique(grouped.flatMap(({ settings: own }) => Object.keys(own ?? {}))).filter((name) => unique(grouped.filter(({ settings: own }) => own && plain(own[name])).map(({ settings: own }) => String(own[name]))).length > 1);
settings({ suite: SUITES[0], metric: "final_performance", x: VARIED[0] ?? "", y: VARIED[1] ?? VARIED[0] ?? "", margin: 0.02, seed: 0, point: "" });
const suite = () => (SUITES.includes(view.suite) ? view.suite : SUITES[0]);
const valuesOf = (name) => unique(ARMS_OF(suite()).map((arm) => cellsOf(suite(), arm)[0].settings?.[name]).filter((value) => value !== undefined)).sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : 1));
let found = null, known = null;
function compute() {
  const key = JSON.stringify({ ...view, point: "", x: "", y: "" });
  if (key === known) return;
  known = key;
  found = ARMS_OF(suite()).map((arm) => { const rows = rowsOf(suite(), arm, view.metric), cells = cellsOf(suite(), arm); return { arm, rows, settings: cells[0].settings ?? {}, iqm: iqmOf(rows), interval: bootstrap(rows, iqmOf, { seed: view.seed }), cost: mean(cells.map(({ cpu_seconds: seconds }) => seconds)) }; });
}
drawers.push(compute);
/** The best IQM, those that cannot be told from it, and the cheapest of them. */
function recommended() {
  const best = found.reduce((one, other) => (other.iqm > one.iqm ? other : one));
  const close = found.filter((own) => own.iqm >= best.iqm - view.margin || (own.interval && best.interval && own.interval[1] >= best.interval[0]));
  return { best, close, cheapest: close.reduce((one, other) => (other.cost < one.cost ? other : one)) };
}
const at = (x, y) => found.filter((own) => own.settings[view.x] === x && (view.x === view.y || own.settings[view.y] === y));
/** Values down the grid: one row where a single setting differs. */
const downs = () => (view.x === view.y ? [""] : valuesOf(view.y));
const cellOf = (x, y) => { const own = at(x, y); return own.length ? own.reduce((one, other) => (other.iqm > one.iqm ? other : one)) : null; };
const range = () => { const all = found.map(({ iqm: middle }) => middle); return [Math.min(...all), Math.max(...all)]; };
const ratioOf = (value) => { const [low, high] = range(); return high > low ? (value - low) / (high - low) : 1; };
const wash = (value) => `color-mix(in srgb, var(--new) ${Math.round(12 + 78 * ratioOf(value))}%, var(--card))`;
const point = () => found.find(({ arm }) => arm === view.point) ?? recommended().cheapest;
const described = (own) => VARIED.filter((name) => own.settings[name] !== undefined).map((name) => `${name} ${own.settings[name]}`).join(", ") || own.arm;

head("Which settings matter", "A grid of runs as it was measured. Nothing between its points is filled in, and the advice is the cheapest setting that cannot be told from the best.", studyNote());
const names = () => VARIED.map((name) => [name, name]);
section("grid", "1. The grid", [
  controls(dropdown("suite", "Suite", SUITES.map((name) => [name, name])), dropdown("metric", "Metric", Object.entries(METRICS).map(([name, [words]]) => [name, words])), dropdown("x", "Across", names), dropdown("y", "Down", names), slider("margin", "Close enough to the best", { min: 0, max: 0.5, step: 0.01 }), slider("seed", "Seed of the resamples", { min: 0, max: 20, step: 1 })),
  live(() => { const { best, close, cheapest } = recommended(); return VARIED.length ? ["Best: ", described(best), ", IQM ", num("best", best.iqm), " (", fromTo(best.interval), "). ", num("close", close.length, 0), " of ", num("measured", found.length, 0), " settings cannot be told from it, since their intervals overlap or they are within ", num("margin", view.margin), ". ", ...(best.interval && best.interval[0] > 0 ? [h("b", {}, "Take the cheapest of them: ", described(cheapest)), ", IQM ", num("advised", cheapest.iqm), ", ", num("cost", cheapest.cost, 1), " CPU seconds a run."] : ["It is not shown above 0, a random policy's score: nothing is recommended."])] : ["No setting differs between the arms of this study: there is no grid."]; }, "p", { role: "status" }),
  aside("Where several settings fall into one square, it has the best of them. A hatched square was not measured."),
], [figure("grid", "Interquartile mean by two settings", {
  height: () => 60 + 46 * Math.max(1, downs().length),
  draw: (width, height) => { const xs = valuesOf(view.x), ys = downs(), left = view.x === view.y ? 12 : 92, wide = (width - left - 10) / Math.max(1, xs.length); return [hatch(), ys.map((y, j) => [label(left - 8, 8 + 46 * j + 26, String(y), { "text-anchor": "end" }), xs.map((x, i) => { const own = cellOf(x, y); const box = { x: place(left + i * wide), y: 8 + 46 * j, width: place(wide - 3), height: 43, rx: 4 }; return own ? [s("rect", { ...box, fill: wash(own.iqm), stroke: own === point() ? "var(--ink)" : "none", "stroke-width": 2.5, "data-arm": own.arm, style: "cursor: pointer" }, tip(`${described(own)}: ${number(own.iqm)}, ${fromTo(own.interval)}`)), wide > 44 ? label(left + i * wide + wide / 2 - 1, 8 + 46 * j + 26, number(own.iqm), { "text-anchor": "middle", class: "strong", "pointer-events": "none", style: ratioOf(own.iqm) > 0.55 ? "fill: var(--card)" : "" }) : null] : s("rect", { ...box, fill: "url(#hatch)", stroke: "var(--rule)" }, tip("not measured")); })]), xs.map((x, i) => label(left + (i + 0.5) * wide, height - 30, String(x), { "text-anchor": "middle" })), label(left + (width - left) / 2, height - 8, view.x, { "text-anchor": "middle", class: "axis" }), view.x === view.y ? null : label(8, height - 30, view.y, { class: "axis" })]; },
  says: () => `${found.length} settings measured; the best has ${number(recommended().best.iqm)}.`,
  rows: () => [["setting", "runs", "IQM", "low", "high", "CPU s"], ...found.map((own) => [described(own), own.rows.length, own.iqm, ...(own.interval ?? [null, null]), own.cost])],
}), figure("surface", "The same as a surface", {
  height: () => (view.x === view.y ? 70 : 260),
  draw: (width, height) => {
    if (view.x === view.y) return [label(width / 2, 40, "A surface needs two settings that differ.", { "text-anchor": "middle" })];
    const xs = valuesOf(view.x), ys = valuesOf(view.y), wide = Math.min((width - 90) / (xs.length + ys.length), 90, 100 / (0.3 * Math.max(1, xs.length + ys.length - 2))), flat = wide * 0.5, tall = 110;
    const base = [width / 2 - ((xs.length - ys.length) * wide) / 2, 140];
    const spot = (i, j, value) => [base[0] + (i - j) * wide, base[1] - 20 + (i + j) * flat * 0.6 - ratioOf(value) * tall];
    const corners = (i, j) => [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]];
    const pieces = [];
    for (let i = 0; i + 1 < xs.length; i += 1) for (let j = 0; j + 1 < ys.length; j += 1) {
      const own = corners(i, j).map(([a, b]) => cellOf(xs[a], ys[b]));
      if (own.every(Boolean)) pieces.push(s("path", { d: `M${own.map((cell, k) => spot(...corners(i, j)[k], cell.iqm).map(place).join(",")).join("L")}Z`, fill: wash(mean(own.map(({ iqm: middle }) => middle))), stroke: "var(--card)", "fill-opacity": 0.9 }));
    }
    const low = range()[0];
    return [pieces, xs.map((x, i) => ys.map((y, j) => { const own = cellOf(x, y), ground = spot(i, j, low); return own ? [line([ground, spot(i, j, own.iqm)], { class: "line thin", style: "--own: var(--zero)" }), s("circle", { cx: place(spot(i, j, own.iqm)[0]), cy: place(spot(i, j, own.iqm)[1]), r: 4, fill: "var(--new)" }, tip(`${described(own)}: ${number(own.iqm)}`))] : s("circle", { cx: place(ground[0]), cy: place(ground[1]), r: 4, fill: "none", stroke: "var(--zero)" }, tip("not measured")); })),
      xs.map((x, i) => { const [a, b] = spot(i, ys.length - 1, low); return label(a + (i < xs.length - 1 ? 8 : -4), b + 18, String(x)); }), ys.map((y, j) => { const [a, b] = spot(xs.length - 1, j, low); return label(a + 10, b + 4, String(y)); })];
  },
  says: () => "Heights are interquartile means; a piece stands only where its four corners were measured.",
})]);
function hatch() {
  return s("defs", {}, s("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { width: 7, height: 7, fill: "none" }), s("path", { d: "M0,0V7", stroke: "var(--zero)", "stroke-width": 1.5 })));
}
section("settings", "2. Setting by setting", [
  text("Each line is one setting of the grid, through the values it has, to its score. Choose one, also by a click on its square, to see its curves."),
  controls(dropdown("point", "Setting", () => [["", "the advised one"], ...found.map((own) => [own.arm, described(own)])])),
  live(() => [h("b", {}, described(point())), ": IQM ", num("point", point().iqm), " (", fromTo(point().interval), "), ", num("point-runs", point().rows.length, 0), " seeds."]),
], [figure("parallel", "Parallel coordinates", {
  height: 260,
  draw: (width, height) => { const columns = [...VARIED, "score"], x = (at) => 50 + (at / Math.max(1, columns.length - 1)) * (width - 100), y = (part) => height - 46 - part * (height - 80); const where = (own, name) => { if (name === "score") return ratioOf(own.iqm); const values = valuesOf(name); return values.length > 1 ? values.indexOf(own.settings[name]) / (values.length - 1) : 0.5; }; return [[...found].sort((a, b) => (a === point()) - (b === point()) || a.iqm - b.iqm).map((own) => line(columns.map((name, at) => [x(at), y(where(own, name))]), { class: "line", style: `--own: ${own === point() ? "var(--hot)" : wash(own.iqm)}; stroke-width: ${own === point() ? 3.5 : 1.75}` })), columns.map((name, at) => [s("path", { d: `M${place(x(at))},${y(1)}V${y(0)}`, stroke: "var(--zero)" }), label(x(at), height - 10, name, { "text-anchor": "middle", class: "axis" }), name === "score" ? range().map((value, end) => label(x(at) + 6, y(end) + 4, number(value))) : valuesOf(name).map((value, i, all) => label(x(at) - 6, y(all.length > 1 ? i / (all.length - 1) : 0.5) + 4, String(value), { "text-anchor": "end" }))])]; },
  says: () => `${found.length} settings; the chosen one has ${number(point().iqm)}.`,
}), figure("curves", "Curves of the chosen setting", {
  height: 230, key: live(() => legend(...tasksOf(suite()).map((name, task) => [tint(task), name, "stroke"])), "div"),
  draw: (width, height) => { const cells = cellsOf(suite(), point().arm), frame = axes(width, height, { x: [0, Math.max(1, ...cells.flatMap((cell) => cell.curve.steps))], y: [Math.min(0, ...cells.flatMap((cell) => cell.curve.scores.flat().filter((value) => value !== null))), 1.05], across: "environment steps", up: "score", formatX: (value) => (value >= 1000 ? `${value / 1000}k` : String(value)) }); return [frame.nodes, cells.map((cell) => cell.tasks.map((_, task) => { const known = eased(column(cell, task), 2).flatMap((value, i) => (value === null ? [] : [[frame.px(cell.curve.steps[i]), frame.py(Math.min(1.05, value))]])); return known.length ? line(known, { class: "line thin", style: `--own: ${tint(task)}` }) : null; }))]; },
  says: () => `${cellsOf(suite(), point().arm).length} seeds of ${described(point())}.`,
})]);
document.querySelector('[data-figure="grid"]').addEventListener("click", (event) => { const arm = event.target.closest("[data-arm]")?.dataset.arm; if (arm) set({ point: arm }); });
begin();
