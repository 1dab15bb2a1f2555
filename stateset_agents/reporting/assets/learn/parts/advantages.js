// PPO's one normalisation beside parts: what each does to a batch of advantages.

const B = data.steps, T = data.trajectories, tasksK = data.task_names.length;
settings({ parts: "task", compare: true, scale: 1, task: tasksK - 1, gamma: 0.99, lam: 0.95, ddof: "0", low: 0.2, high: 0.2, ratio: 1, seed: 0, shown: 40 });

const WAYS = [["task", "task"], ["difficulty", "return quartile (outcome)"], ["random", "4 random parts"]];
let now = null, known = null;
function compute() {
  const key = JSON.stringify({ ...view, compare: 0, shown: 0, ratio: 0, low: 0, high: 0 });
  if (key === known) return;
  known = key;
  const factor = (task) => (task === view.task ? view.scale : 1);
  let raw, tasks, returns;
  if (B) {
    const scaled = (rows) => rows.map((row) => row.map((value, n) => value * factor(B.tasks[n])));
    const credit = gaeBatch({ ...B, rewards: scaled(B.rewards), values: scaled(B.values), next: scaled(B.next) }, { gamma: view.gamma, lam: view.lam });
    raw = credit.flat();
    tasks = credit.flatMap((row) => row.map((_, n) => B.tasks[n]));
    const sums = B.tasks.map((_, n) => factor(B.tasks[n]) * inOrder(B.rewards.map((row) => row[n])));
    returns = credit.flatMap((row) => row.map((_, n) => sums[n]));
  } else {
    tasks = T.tasks;
    raw = T.raw.map((value, at) => value * factor(tasks[at]));
    returns = T.returns.map((value, at) => value * factor(tasks[at]));
  }
  const labels = { task: () => tasks, difficulty: () => labelsBetween(returns, quantileBoundaries(returns, 4)), random: () => randomLabels(raw.length, 4, view.seed) }[view.parts]();
  const K = view.parts === "task" ? tasksK : 4, ddof = Number(view.ddof);
  now = { raw, tasks, labels, K, plain: normaliseByPart(raw, raw.map(() => 0), { ddof }), parts: normaliseByPart(raw, labels, { ddof }), names: Array.from({ length: K }, (_, k) => (view.parts === "task" ? data.task_names[k] : `part ${k + 1}`)) };
}
drawers.push(compute);

head("One normalisation, or one for each part", "PPO divides a whole batch's advantages by one standard deviation. Where tasks differ in scale, the small one drowns; known parts repair that.",
  note(`${B ? `A made-up batch of ${B.rewards.length * B.tasks.length} steps of two tasks` : data.source}. `, B ? "Advantages are computed from its rewards and values by GAE." : "Conversations have no critic: a raw advantage is the reward less its group's mean."));

const SHOWN = () => [["in one part (PPO)", "var(--soft)", now.plain], ["in parts", "var(--new)", now.parts]].filter((_, at) => at === 1 || view.compare);
section("drown", "1. Watch a task drown", [
  text("Multiply one task's rewards. In one part its share of the gradient follows; within parts by task it changes nothing at all."),
  controls(dropdown("task", "Task", data.task_names.map((name, k) => [k, name])), slider("scale", "Its rewards, times", { min: 0.01, max: 100, step: 0.02, log: true }), choice("parts", "Parts by", WAYS), tick("compare", "Beside PPO’s one part"), choice("ddof", "Deviation", [["0", "population"], ["1", "sample"]]),
    ...(B ? [slider("gamma", "γ", { min: 0.8, max: 1, step: 0.005 }), slider("lam", "λ", { min: 0, max: 1, step: 0.01 })] : []), slider("seed", "Seed", { min: 0, max: 20, step: 1, when: () => view.parts === "random" })),
  live(() => { const plain = absoluteShares(now.plain, now.tasks, tasksK), parts = absoluteShares(now.parts, now.tasks, tasksK); return ["Of all |A| ", h("b", {}, data.task_names[view.task]), " has ", share("plain-share", plain[view.task]), " in one part and ", share("part-share", parts[view.task]), " in parts. Signs turned around: ", share("plain-flips", signFlipShare(now.raw, now.plain, now.tasks)), " and ", share("part-flips", signFlipShare(now.raw, now.parts, now.tasks)), "."]; }),
  live(() => [view.parts === "difficulty" ? h("span", { class: "warning", style: "display:block" }, "Return is an outcome of the actions. Quartiles look like tasks here only because returns of different scale fall into different quartiles.") : ""], "div"),
], [
  figure("histogram", "Advantages after normalisation", {
    height: 250, key: live(() => legend(...SHOWN().map(([name, hue]) => [hue, name, "bar"])), "div"),
    draw: (width, height) => {
      const low = -4, high = 4, bins = 48, step = (high - low) / bins;
      const heights = SHOWN().map(([, , values]) => { const own = Array(bins).fill(0); for (const value of values) own[clamp(Math.floor((value - low) / step), 0, bins - 1)] += 1; return own; });
      const frame = axes(width, height, { x: [low, high], y: [0, Math.max(...heights.flat()) * 1.08], across: "advantage (beyond ±4 at the edge)", up: "steps" });
      return [frame.nodes, heights.map((own, i) => own.map((tall, at) => s("rect", { x: place(frame.px(low + at * step) + 0.5), width: place(Math.max(1, frame.px(low + step) - frame.px(low) - 1)), y: place(frame.py(tall)), height: place(frame.py(0) - frame.py(tall)), fill: SHOWN()[i][1], "fill-opacity": 0.5 })))];
    },
    says: () => SHOWN().map(([name, , values]) => `${name}: standard deviation ${number(deviation(values))}`).join(", "),
    rows: () => { const edges = [-2, -1, -0.5, 0, 0.5, 1, 2]; const counted = (values, at) => values.filter((value) => (at === 0 || value > edges[at - 1]) && (at === edges.length || value <= edges[at])).length; return [["up to", ...SHOWN().map(([name]) => name)], ...[...edges, "more"].map((edge, at) => [edge, ...SHOWN().map(([, , values]) => counted(values, at))])]; },
  }),
  figure("slopes", "Before and after: raw, one part, parts", {
    height: 270, key: live(() => legend(...data.task_names.map((name, k) => [tint(k), name, "stroke"])), "div"),
    draw: (width, height) => {
      const every = Math.max(1, Math.floor(now.raw.length / view.shown)), chosen = now.raw.flatMap((_, at) => (at % every === 0 ? [at] : []));
      const spread = deviation(now.raw) || 1;
      const columns = [["raw / std", now.raw.map((value) => value / spread)], ["one part", now.plain], ["parts", now.parts]].filter((_, at) => at !== 1 || view.compare);
      const frame = axes(width, height, { x: [0, columns.length - 1], y: [-4, 4], up: "advantage", xTicks: [], left: 60, right: 40, bottom: 26 });
      return [frame.nodes, columns.map(([name], at) => label(frame.px(at), frame.bottom + 18, name, { "text-anchor": at === 0 ? "start" : at === columns.length - 1 ? "end" : "middle", class: "axis" })), chosen.map((at) => line(columns.map(([, values], column) => [frame.px(column), frame.py(clamp(values[at], -4, 4))]), { class: "line thin", style: `--own: ${tint(now.tasks[at])}`, opacity: 0.55 }))];
    },
    says: () => `Lines of about ${view.shown} steps from the raw to the normalised advantage.`,
    rows: () => [["step", "task", "raw", "one part", "parts"], ...now.raw.slice(0, 20).map((value, at) => [at, data.task_names[now.tasks[at]], value, now.plain[at], now.parts[at]])],
  }),
]);

section("statistics", "2. Part by part", [
  live(() => table("Advantages by part, raw and normalised", [["part", "n", "raw mean", "raw std", "|A| in one part", "|A| in parts"], ...partStatistics(now.raw, now.labels, now.K).map((own, k) => [now.names[k], num(`size-${k}`, own.count, 0), num(`mean-${k}`, own.mean, 4), num(`std-${k}`, own.std, 4), num(`plain-share-${k}`, absoluteShares(now.plain, now.labels, now.K)[k]), num(`share-${k}`, absoluteShares(now.parts, now.labels, now.K)[k])])]), "div"),
  text("Each row of the heatmap is a part, each column a tenth of all raw advantages, from the worst to the best. Where parts know the scale, the rows look alike."),
], [figure("heatmap", "Mean advantage by part and decile of the raw one", {
  height: () => 34 + 44 * now.K, key: legend(["var(--plus)", "pushed up", "bar"], ["var(--minus)", "pushed down", "bar"]),
  draw: (width) => {
    const cells = deciles(), wide = (width - 110) / 10;
    return [cells.map((row, k) => [label(96, 34 + 44 * k, now.names[k], { "text-anchor": "end" }), row.map((value, d) => { const x = 106 + d * wide, y = 8 + 44 * k; return value === null ? s("rect", { x: place(x), y, width: place(wide - 2), height: 40, rx: 3, fill: "none", stroke: "var(--rule)" }) : [s("rect", { x: place(x), y, width: place(wide - 2), height: 40, rx: 3, fill: value >= 0 ? "var(--plus)" : "var(--minus)", "fill-opacity": place(Math.min(1, Math.abs(value) / 2)) }, tip(`${now.names[k]}, decile ${d + 1}: ${number(value)}`)), wide > 36 ? label(x + wide / 2 - 1, y + 24, minus(String(rounded(value, 0.1) + 0)), { "text-anchor": "middle", class: "strong" }) : null]; })]),
      [1, 10].map((d) => label(106 + (d - 0.5) * wide, 8 + 44 * now.K + 14, d === 1 ? "worst" : "best", { "text-anchor": "middle" }))];
  },
  says: () => `${now.K} parts by ten deciles.`,
  rows: () => [["part", ...Array.from({ length: 10 }, (_, d) => `decile ${d + 1}`)], ...deciles().map((row, k) => [now.names[k], ...row])],
})]);
function deciles() {
  const edges = quantileBoundaries(now.raw, 10), tenth = labelsBetween(now.raw, edges), values = now.parts;
  return Array.from({ length: now.K }, (_, k) => Array.from({ length: 10 }, (__, d) => { const own = values.filter((_value, at) => now.labels[at] === k && tenth[at] === d); return own.length ? mean(own) : null; }));
}

const gradient = (values, ratio, task) => { const own = values.filter((_, at) => now.tasks[at] === task); return own.length ? mean(own.map((advantage) => Math.abs(tokenLoss("ppo", 0, ratio, advantage, { low: view.low, high: view.high }).slope))) : 0; };
section("gradient", "3. The size of the gradient", [
  text("The mean size of the clipped loss's gradient, by task, if every step had ratio ρ. Outside the clip range only steps that moved the wrong way still pull."),
  controls(slider("ratio", "Ratio ρ", { min: 0.4, max: 1.8, step: 0.01 }), slider("low", "ε below", { min: 0.05, max: 0.5, step: 0.01 }), slider("high", "ε above", { min: 0.05, max: 0.5, step: 0.01 })),
  live(() => table("Mean |gradient| at this ratio", [["task", "in one part", "in parts"], ...data.task_names.map((name, k) => [name, num(`plain-gradient-${k}`, gradient(now.plain, view.ratio, k), 4), num(`gradient-${k}`, gradient(now.parts, view.ratio, k), 4)])]), "div"),
], [figure("gradient", "Mean |gradient| over the ratio", {
  height: 260, key: legend(...data.task_names.map((name, k) => [tint(k), `${name}, in parts`, "stroke"]), ["var(--soft)", "the same in one part", "dashes"]),
  draw: (width, height, grip) => {
    const xs = Array.from({ length: 57 }, (_, at) => 0.4 + at * 0.025);
    const curves = data.task_names.map((_, k) => [xs.map((x) => gradient(now.parts, x, k)), xs.map((x) => gradient(now.plain, x, k))]);
    const frame = axes(width, height, { x: [0.4, 1.8], y: [0, Math.max(0.1, ...curves.flat(2)) * 1.08], across: "ratio ρ", up: "mean |gradient|" });
    const move = (value) => set({ ratio: rounded(clamp(value, 0.4, 1.8), 0.01) });
    return [frame.nodes, curves.map(([parts, plain], k) => [view.compare ? line(plain.map((value, at) => [frame.px(xs[at]), frame.py(value)]), { class: "line dashed thin", style: `--own: ${tint(k)}` }) : null, line(parts.map((value, at) => [frame.px(xs[at]), frame.py(value)]), { style: `--own: ${tint(k)}` })]),
      grip("ratio", frame.px(view.ratio), frame.py(gradient(now.parts, view.ratio, 0)), { says: "Ratio", now: view.ratio, low: 0.4, high: 1.8, value: number(view.ratio), hue: tint(0), move: (x) => move(frame.toX(x)), keys: (dx, dy) => move(view.ratio + 0.01 * (dx || dy)) })];
  },
  says: () => data.task_names.map((name, k) => `${name}: ${number(gradient(now.parts, view.ratio, k))} in parts`).join(", "),
  rows: () => [["ratio", ...data.task_names.flatMap((name) => [`${name}, parts`, `${name}, one part`])], ...[0.5, 0.7, 0.8, 1, 1.2, 1.3, 1.5].map((ratio) => [ratio, ...data.task_names.flatMap((_, k) => [gradient(now.parts, ratio, k), gradient(now.plain, ratio, k)])])],
})]);
document.getElementById("foot").append(text("Normalisation, shares, flips and GAE are those of stateset_agents.grouping. The advantage is only half: a critic trained on raw returns drowns the small task, too, whatever the parts; values need a scale of their own for each task."));
begin();
