// How parts form: a strategy, its boundaries or centres, and what the parts do to the advantages.

const T = data.trajectories, count = T.returns.length;
settings({ strategy: data.begin.strategy, parts: 4, seed: 0, round: 20, x: data.begin.x, y: data.begin.y, overlay: "part", boundaries: [], centres: [] });

const [OF_RETURN, OF_LENGTH] = data.outcome_names;
const COLUMNS = [...data.feature_names.map((name, at) => [name, T.features.map((row) => row[at])]), [OF_RETURN, T.returns], [OF_LENGTH, T.lengths], ["raw advantage", T.raw]];
const STRATEGIES = { none: "none: PPO, one part", task: "task", auto: "auto: k-means of what is known before", random: "random: the control", difficulty: "difficulty: quantiles of return", length: "length: quantiles", auto_outcome: "auto_outcome: k-means of return and length" };
const OUTCOMES = ["difficulty", "length", "auto_outcome"], LLOYD = 20;
const byCentres = () => view.strategy === "auto" || view.strategy === "auto_outcome";
const byQuantiles = () => view.strategy === "difficulty" || view.strategy === "length";
const keyValues = () => (view.strategy === "length" ? T.lengths : T.returns);
const dims = () => (view.strategy === "auto" ? data.feature_names.map((_, at) => at) : [COLUMNS.length - 3, COLUMNS.length - 2]);

let now = null, known = null;
function compute() {
  const key = JSON.stringify([view.strategy, view.parts, view.seed, view.round, view.boundaries, view.centres]);
  if (key === known) return;
  known = key;
  now = { K: view.parts, boundaries: null, centres: null, rounds: null };
  if (view.strategy === "none") Object.assign(now, { K: 1, labels: T.returns.map(() => 0) });
  if (view.strategy === "task") Object.assign(now, { K: data.task_names.length, labels: T.tasks });
  if (view.strategy === "random") now.labels = randomLabels(count, view.parts, view.seed);
  if (byQuantiles()) {
    now.boundaries = view.boundaries.length === view.parts - 1 ? [...view.boundaries].sort((a, b) => a - b) : quantileBoundaries(keyValues(), view.parts);
    now.labels = labelsBetween(keyValues(), now.boundaries);
  }
  if (byCentres()) {
    const width = dims().length, { rows, means, spreads } = standardised(T.returns.map((_, at) => dims().map((dim) => COLUMNS[dim][1][at])));
    const given = view.centres.length && view.centres.length % width === 0 && view.centres.length <= width * view.parts
      ? Array.from({ length: view.centres.length / width }, (_, k) => means.map((middle, at) => (view.centres[k * width + at] - middle) / spreads[at])) : null;
    const found = kmeans(rows, view.parts, view.seed, { centres: given, rounds: view.round >= LLOYD ? 100 : view.round });
    Object.assign(now, { labels: found.labels, rounds: found.rounds, centres: found.centres.map((centre) => centre.map((value, at) => value * spreads[at] + means[at])) });
  }
  now.normalised = normaliseByPart(T.raw, now.labels);
  now.plain = normaliseByPart(T.raw, T.raw.map(() => 0));
  now.members = partsOf(now.labels, now.K);
  now.names = now.members.map((_, k) => (view.strategy === "task" ? data.task_names[k] : `part ${k + 1}`));
}
drawers.push(compute);

head("How parts form", "Advantages may be normalised within parts of a batch instead of over all of it. What the parts are made of decides whether that repairs or harms.",
  note(`${data.source}. Drag a boundary or a centre, or move it by the arrow keys.`));

const fresh = (more) => ({ boundaries: [], centres: [], round: LLOYD, ...more });
const strategyInput = dropdown("strategy", "Strategy", Object.entries(STRATEGIES));
strategyInput.querySelector("select").onchange = null;
strategyInput.addEventListener("change", () => set(fresh({ strategy: view.strategy, ...(byCentres() ? { x: dims()[0], y: dims()[1] } : {}) })));
section("parts", "1. Which part each trajectory belongs to", [
  controls(
    strategyInput, slider("parts", "Parts", { min: 2, max: 8, step: 1 }), slider("seed", "Seed", { min: 0, max: 20, step: 1 }),
    slider("round", "Lloyd’s iterations", { min: 0, max: LLOYD, step: 1, text: (value) => (value >= LLOYD ? "until still" : String(value)), when: byCentres }),
    h("div", { class: "row" }, player(() => { if (!byCentres()) return false; const next = view.round >= LLOYD ? 0 : view.round + 1; set({ round: next >= (now.rounds ?? 0) + 2 && next > 1 ? LLOYD : next }); return view.round < LLOYD; }, { label: "Play k-means" }), press("One iteration", () => set({ round: view.round >= LLOYD ? 0 : view.round + 1 })), press("As it was", () => set(fresh({})))),
    dropdown("x", "Across", COLUMNS.map(([name], at) => [at, name])), dropdown("y", "Up", COLUMNS.map(([name], at) => [at, name])),
    choice("overlay", "Colour", [["part", "part"], ["task", "task"], ["return", OF_RETURN], ["length", OF_LENGTH]])),
  live(() => [OUTCOMES.includes(view.strategy) ? h("span", { class: "warning", style: "display:block", role: "status" }, "This key is an outcome of the actions. Parts made of outcomes push good members of the best part down: for diagnosis, never for training.") : view.strategy === "random" ? "Random parts are the control that any other strategy has to beat." : view.strategy === "task" && data.task_names.length === 1 ? "There is one task, so this is one part: nothing changes." : ""], "div"),
  live(() => ["The sign of ", share("flips", signFlipShare(T.raw, now.normalised, T.tasks)), " of the advantages is turned around, against ", share("plain-flips", signFlipShare(T.raw, now.plain, T.tasks)), " in one part. Parts: ", num("used", now.members.filter((own) => own.length).length, 0), " of ", num("parts", now.K, 0), " are in use.", ...(now.rounds === null ? [] : [" k-means took ", num("rounds", now.rounds, 0), " iterations."])]),
  aside("A sign is turned where a trajectory that did better than the mean of its task is pushed down, or a worse one up."),
], [
  figure("scatter", "Trajectories", {
    height: (width) => Math.min(400, width * 0.7),
    key: live(() => legend(...(view.overlay === "part" ? now.names.map((name, k) => [tint(k), name]) : view.overlay === "task" ? data.task_names.map((name, k) => [tint(k), name]) : [["var(--new)", `more ${view.overlay === "length" ? OF_LENGTH : OF_RETURN}`], ["var(--raw)", "less"]])), "div"),
    draw: (width, height, grip) => {
      const [xs, ys] = [COLUMNS[view.x][1], COLUMNS[view.y][1]];
      const range = (values) => { const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]); const pad = 0.06 * (high - low || 1); return [low - pad, high + pad]; };
      const frame = axes(width, height, { x: range(xs), y: range(ys), across: COLUMNS[view.x][0], up: COLUMNS[view.y][0], left: 52, format: number });
      const ranked = (values) => { const [low, high] = range(values); return (at) => (values[at] - low) / (high - low); };
      const deep = view.overlay === "return" ? ranked(T.returns) : view.overlay === "length" ? ranked(T.lengths) : null;
      const hue = (at) => (deep ? `color-mix(in srgb, var(--new) ${Math.round(100 * deep(at))}%, var(--raw))` : tint(view.overlay === "task" ? T.tasks[at] : now.labels[at]));
      const points = xs.map((x, at) => [frame.px(x), frame.py(ys[at])]);
      const [ix, iy] = byCentres() ? [dims().indexOf(view.x), dims().indexOf(view.y)] : [-1, -1];
      const put = (k, x, y) => set({ centres: now.centres.flatMap((centre, other) => centre.map((value, at) => Number((other !== k ? value : at === ix ? x : at === iy ? y : value).toPrecision(6)))), round: 0 });
      const reach = [(frame.toX(frame.right) - frame.toX(frame.left)) / 100, (frame.toY(frame.top) - frame.toY(frame.bottom)) / 100];
      return [frame.nodes,
        view.overlay === "part" ? now.members.map((own, k) => (own.length > 2 ? s("path", { d: `M${hull(own.map((at) => points[at])).map(([x, y]) => `${place(x)},${place(y)}`).join("L")}Z`, fill: tint(k), stroke: tint(k), "fill-opacity": 0.08, "stroke-opacity": 0.5 }) : null)) : null,
        points.map(([x, y], at) => s("circle", { cx: place(x), cy: place(y), r: 3, fill: hue(at), opacity: 0.75 })),
        ix < 0 || iy < 0 || ix === iy ? null : now.centres.map((centre, k) => grip(`centre-${k}`, frame.px(centre[ix]), frame.py(centre[iy]), { says: `Centre of part ${k + 1}`, now: centre[ix], low: frame.toX(frame.left), high: frame.toX(frame.right), value: `${number(centre[ix])}, ${number(centre[iy])}, ${now.members[k].length} trajectories`, hue: tint(k), shape: s("path", { d: "M-9,0H9M0,-9V9", stroke: "var(--ink)", "stroke-width": 3.5 }), move: (x, y) => put(k, frame.toX(x), frame.toY(y)), keys: (dx, dy) => put(k, centre[ix] + reach[0] * dx, centre[iy] + reach[1] * dy) }))];
    },
    says: () => `${count} trajectories by ${COLUMNS[view.x][0]} and ${COLUMNS[view.y][0]}, in ${now.K} parts.`,
    rows: () => [["part", "trajectories", ...COLUMNS.map(([name]) => `mean ${name}`)], ...now.members.map((own, k) => [now.names[k], own.length, ...COLUMNS.map(([, values]) => (own.length ? mean(own.map((at) => values[at])) : null))])],
  }),
  ...[figure("boundaries", "The key and its boundaries", {
    height: 190,
    draw: (width, height, grip) => {
      if (!byQuantiles()) return [];
      const values = keyValues(), low = Math.min(...values), high = Math.max(...values), bins = 40, step = (high - low) / bins || 1;
      const heights = Array.from({ length: bins }, () => 0);
      for (const value of values) heights[Math.min(bins - 1, Math.floor((value - low) / step))] += 1;
      const frame = axes(width, height, { x: [low - step, high + step], y: [0, Math.max(...heights) * 1.1], across: view.strategy === "length" ? OF_LENGTH : OF_RETURN, up: "trajectories" });
      const put = (k, value) => set({ boundaries: now.boundaries.map((old, at) => (at === k ? Number(clamp(value, low, high).toPrecision(6)) : old)) });
      return [frame.nodes, heights.map((tall, at) => s("rect", { x: place(frame.px(low + at * step)), width: place(Math.max(1, frame.px(low + step) - frame.px(low) - 1)), y: place(frame.py(tall)), height: place(frame.py(0) - frame.py(tall)), fill: tint(labelsBetween([low + (at + 0.5) * step], now.boundaries)[0]) })),
        now.boundaries.map((boundary, k) => [s("path", { d: `M${place(frame.px(boundary))},${frame.top}V${frame.bottom}`, class: "line dashed", style: "--own: var(--ink)" }),
          grip(`boundary-${k}`, frame.px(boundary), frame.top + 8 + 18 * (k % 2), { says: `Boundary ${k + 1}`, now: boundary, low, high, value: number(boundary), hue: "var(--ink)", move: (x) => put(k, frame.toX(x)), keys: (dx, dy) => put(k, boundary + (step / 2) * (dx || dy)) })])];
    },
    says: () => (now.boundaries ? `Boundaries ${now.boundaries.map((value) => number(value)).join(", ")}.` : "No boundaries."),
    rows: () => [["boundary", "value"], ...(now.boundaries ?? []).map((value, k) => [k + 1, value])],
  })].map((element) => { drawers.push(() => (element.hidden = !byQuantiles())); return element; }),
]);

const quartiles = (values) => { const ordered = [...values].sort((a, b) => a - b); return [0, 0.25, 0.5, 0.75, 1].map((q) => { const where = (ordered.length - 1) * q, below = Math.floor(where); return ordered[below] + ((ordered[below + 1] ?? ordered[below]) - ordered[below]) * (where - below); }); };
const characters = () => { const all = COLUMNS.map(([, values]) => [mean(values), deviation(values) || 1]); return now.members.map((own) => COLUMNS.map(([, values], at) => (own.length ? (mean(own.map((row) => values[row])) - all[at][0]) / all[at][1] : 0))); };
section("inside", "2. What is in the parts", [
  text("How many trajectories each part has, what it is like, and the advantages within it once normalised."),
  live(() => table("Parts", [["part", "n", "mean", "std", "share of |A|"], ...partStatistics(now.normalised, now.labels, now.K).map((own, k) => [now.names[k], num(`size-${k}`, own.count, 0), num(`mean-${k}`, own.mean), num(`std-${k}`, own.std), num(`share-${k}`, own.share)])]), "div"),
  live(() => { const shares_ = absoluteShares(now.normalised, T.tasks, data.task_names.length), plain = absoluteShares(now.plain, T.tasks, data.task_names.length); return table("Share of |advantage| by task", [["task", "in one part", "in these parts"], ...data.task_names.map((name, k) => [name, num(`task-plain-${k}`, plain[k]), num(`task-share-${k}`, shares_[k])])]); }, "div"),
], [
  figure("sizes", "Trajectories in each part", {
    height: 180, draw: (width, height) => { const frame = axes(width, height, { x: [0.5, now.K + 0.5], y: [0, Math.max(1, ...now.members.map((own) => own.length)) * 1.1], xTicks: now.members.map((_, k) => k + 1), formatX: (k) => short(now.names, k - 1, width), bottom: 24 }); return [frame.nodes, bars(frame, now.members.map((own) => [own.length]), (k) => tint(k), { names: now.names })]; },
    says: () => now.members.map((own, k) => `${now.names[k]}: ${own.length}`).join(", "),
    rows: () => [["part", "trajectories"], ...now.members.map((own, k) => [now.names[k], own.length])],
  }),
  figure("radar", "Characteristics: means, in standard deviations", {
    height: (width) => Math.min(330, width * 0.75), key: live(() => legend(...now.names.map((name, k) => [tint(k), name, "stroke"])), "div"),
    draw: (width, height) => {
      const centre = [width / 2, height / 2 + 4], radius = Math.min(width / 2 - 90, height / 2 - 30), spokes = COLUMNS.length;
      const at = (spoke, value) => { const angle = (2 * Math.PI * spoke) / spokes - Math.PI / 2, far = (radius * (clamp(value, -2, 2) + 2)) / 4; return [centre[0] + far * Math.cos(angle), centre[1] + far * Math.sin(angle)]; };
      const ring = (value) => COLUMNS.map((_, spoke) => at(spoke, value));
      return [[-1, 0, 1, 2].map((value) => line([...ring(value), ring(value)[0]], { class: "line thin", style: `--own: var(${value ? "--rule" : "--zero"})` })), COLUMNS.map(([name], spoke) => { const [x, y] = at(spoke, 2), away = x - centre[0]; return label(x + Math.sign(Math.round(away)) * 6, y + (y < centre[1] - radius * 0.7 ? -6 : y > centre[1] + radius * 0.7 ? 14 : 4), name, { "text-anchor": Math.abs(away) < 8 ? "middle" : away > 0 ? "start" : "end" }); }), label(at(0, 0)[0] + 4, at(0, 0)[1] + 4, "mean"),
        characters().map((values, k) => (now.members[k].length ? s("path", { d: `M${values.map((value, spoke) => at(spoke, value).map(place).join(",")).join("L")}Z`, fill: tint(k), "fill-opacity": 0.08, stroke: tint(k), "stroke-width": 2 }) : null))];
    },
    says: () => characters().map((values, k) => `${now.names[k]}: ${values.map((value) => number(value)).join(", ")}`).join("; "),
    rows: () => [["part", ...COLUMNS.map(([name]) => name)], ...characters().map((values, k) => [now.names[k], ...values])],
  }),
  figure("boxes", "Advantages within each part, normalised", {
    height: 220, draw: (width, height) => {
      const all = now.normalised, low = Math.min(...all, -1), high = Math.max(...all, 1);
      const frame = axes(width, height, { x: [0.5, now.K + 0.5], y: [low, high], up: "advantage", xTicks: now.members.map((_, k) => k + 1), formatX: (k) => short(now.names, k - 1, width), bottom: 24 });
      const half = Math.min(34, 0.3 * (frame.px(2) - frame.px(1)));
      return [frame.nodes, now.members.map((own, k) => { if (!own.length) return null; const [a, b, c, d, e] = quartiles(own.map((at) => all[at])).map(frame.py), x = frame.px(k + 1); return [s("path", { d: `M${place(x)},${place(a)}V${place(b)}M${place(x)},${place(d)}V${place(e)}`, stroke: tint(k), "stroke-width": 1.5 }), s("rect", { x: place(x - half), width: place(2 * half), y: place(d), height: place(Math.max(1, b - d)), fill: tint(k), "fill-opacity": 0.2, stroke: tint(k), "stroke-width": 1.5 }), s("path", { d: `M${place(x - half)},${place(c)}H${place(x + half)}`, stroke: tint(k), "stroke-width": 3 })]; })];
    },
    says: () => now.members.map((own, k) => (own.length ? `${now.names[k]}: median ${number(quartiles(own.map((at) => now.normalised[at]))[2])}` : `${now.names[k]}: empty`)).join(", "),
    rows: () => [["part", "least", "25 %", "median", "75 %", "most"], ...now.members.map((own, k) => [now.names[k], ...(own.length ? quartiles(own.map((at) => now.normalised[at])) : [null, null, null, null, null])])],
  }),
]);
document.getElementById("foot").append(text("Parts, normalisation and flips are those of stateset_agents.grouping; k-means draws the same numbers there. Parts are no groups of GRPO: a group is several replies to one prompt."));
begin();
