// Arms against PPO: every sentence comes from an interval.

settings({ suite: SUITES[0], metric: "final_performance", against: "", tau: 0.5, seed: 0 });
const suite = () => (SUITES.includes(view.suite) ? view.suite : SUITES[0]);
const arms = () => ARMS_OF(suite());
const against = () => (arms().includes(view.against) ? view.against : plainOf(suite()));
let found = null, known = null;
function compute() {
  const key = JSON.stringify({ ...view, tau: 0 });
  if (key === known) return;
  known = key;
  const base = rowsOf(suite(), against(), view.metric);
  found = arms().map((arm) => {
    const rows = rowsOf(suite(), arm, view.metric), own = arm === against(), cells = cellsOf(suite(), arm), finals = cells.map((cell) => mean(cell.final.scores));
    return {
      arm, rows, iqm: iqmOf(rows), interval: bootstrap(rows, iqmOf, { seed: view.seed }),
      chance: own ? null : improvement(rows, base), chances: own ? null : improvementInterval(rows, base, { seed: view.seed }),
      spread: finals.length > 1 ? deviation(finals, 1) : null, fall: Math.max(...cells.map((cell) => drawdown(meanCurve(cell.curve.scores)))), fairness: mean(cells.map((cell) => cell.fairness)), area: mean(cells.flatMap((cell) => METRICS.sample_efficiency[1](cell))), final: mean(finals),
    };
  });
}
drawers.push(compute);

head("Parts against PPO", "Does it help to normalise advantages within parts? What the runs of a study carry, and no more.", studyNote());
const known_ = () => data.differences.filter((own) => own.suite === suite() && own.measure === view.metric);
const SAYS = { better: "is better than", worse: "is worse than", "none shown": "shows no difference to" };
const sentence = (own) => h("li", { "data-verdict": own.verdict }, h("b", {}, armName(suite(), own.arm)), ` ${own.interval || own.mean !== null ? SAYS[own.verdict] : "cannot be compared with"} ${own.than}: `, num(`difference-${own.arm}`, own.mean), own.interval ? [" (", num(`difference-low-${own.arm}`, own.interval[0]), " to ", num(`difference-high-${own.arm}`, own.interval[1]), `), ${plural(own.num_seeds, "seed")}.`] : `, no interval from ${plural(own.num_seeds, "seed")}.`);
section("verdict", "1. The verdict", [
  controls(dropdown("suite", "Suite", SUITES.map((name) => [name, name])), dropdown("metric", "Metric", Object.entries(METRICS).map(([name, [words]]) => [name, words])), dropdown("against", "Against", () => [["", `the reference (${plainOf(suite())})`], ...arms().map((arm) => [arm, arm])]), slider("seed", "Seed of the resamples", { min: 0, max: 20, step: 1 })),
  live(() => (known_().length ? known_().map(sentence) : h("li", {}, "With one task this measure says nothing.")), "ul"),
  live(() => found.filter(({ chance }) => chance !== null).map(({ arm, chance, chances }) => ["A run of ", h("b", {}, arm), ` scores above one of ${against()} with probability `, num(`chance-${arm}`, chance), chances ? ` (${fromTo(chances)}). ` : " (no interval: fewer than three seeds). "])),
  live(() => found.map(({ arm, iqm: middle, interval }) => ["IQM of ", h("b", {}, armName(suite(), arm)), " ", num(`iqm-${arm}`, middle), interval ? [" (", num(`low-${arm}`, interval[0]), " to ", num(`high-${arm}`, interval[1]), ")"] : " (no interval)", ". "])),
  aside("Differences are paired by seed, to the study’s first arm, with the 95 % intervals of study report. The other intervals are drawn again here, 95 % percentile bootstraps over runs; they are too narrow for few seeds: with five they hold the truth in 82 to 91 % of the cases (", source("arXiv 2108.13264", "https://arxiv.org/abs/2108.13264"), ")."),
], [
  figure("iqm", "Interquartile mean and its interval", {
    height: () => 56 + 38 * arms().length,
    draw: (width, height) => {
      const all = found.flatMap(({ rows, interval }) => [...rows.flat(), ...(interval ?? [])]), low = Math.min(0, ...all), high = Math.max(1, ...all);
      const left = Math.min(190, width * 0.36), frame = axes(width, height, { x: [low, high], y: [0, arms().length], yTicks: [], across: METRICS[view.metric][0], left });
      return [frame.nodes, found.map(({ arm, rows, iqm: middle, interval }, at) => { const y = frame.py(arms().length - at - 0.5), hue = tint(at); return [label(left - 10, y + 4, width < 480 ? arm : armName(suite(), arm), { "text-anchor": "end", class: "strong" }), rows.flat().map((score) => s("circle", { cx: place(frame.px(score)), cy: place(y + 9), r: 2.5, fill: hue, opacity: 0.45 })), interval ? line([[frame.px(interval[0]), y - 3], [frame.px(interval[1]), y - 3]], { style: `--own: ${hue}; stroke-width: 5`, opacity: 0.4 }) : null, s("circle", { cx: place(frame.px(middle)), cy: place(y - 3), r: 5.5, fill: hue })]; })];
    },
    says: () => found.map(({ arm, iqm: middle, interval }) => `${arm} ${number(middle)}, ${fromTo(interval)}`).join("; "),
    rows: () => [["arm", "runs", "IQM", "low", "high", "P(improvement)", "low", "high"], ...found.map((own) => [own.arm, own.rows.length, own.iqm, ...(own.interval ?? [null, null]), own.chance, ...(own.chances ?? [null, null])])],
  }),
  figure("chances", "Probability of improvement", {
    height: () => 56 + 34 * Math.max(1, arms().length - 1),
    draw: (width, height) => { const shown = found.filter(({ chance }) => chance !== null), left = Math.min(190, width * 0.36), frame = axes(width, height, { x: [0, 1], y: [0, Math.max(1, shown.length)], yTicks: [], across: "chance to score above the other", left }); return [frame.nodes, s("path", { d: `M${place(frame.px(0.5))},${frame.top}V${frame.bottom}`, class: "line dashed thin", style: "--own: var(--soft)" }), shown.map(({ arm, chance, chances }, i) => { const y = frame.py(shown.length - i - 0.5), hue = tint(arms().indexOf(arm)); return [label(left - 10, y + 4, width < 480 ? arm : armName(suite(), arm), { "text-anchor": "end", class: "strong" }), chances ? line([[frame.px(chances[0]), y], [frame.px(chances[1]), y]], { style: `--own: ${hue}; stroke-width: 5`, opacity: 0.4 }) : null, s("circle", { cx: place(frame.px(chance)), cy: place(y), r: 5.5, fill: hue })]; })]; },
    says: () => found.filter(({ chance }) => chance !== null).map(({ arm, chance }) => `${arm} ${number(chance)}`).join(", "),
  }),
]);
section("profile", "2. Performance profile", [
  text("The share of runs and tasks that score above a threshold τ. A curve that lies above another everywhere is better everywhere."),
  controls(slider("tau", "Threshold τ", { min: 0, max: 1.2, step: 0.01 })),
  live(() => table("Share above τ", [["arm", "share"], ...found.map(({ arm, rows }) => [armName(suite(), arm), num(`above-${arm}`, profile(rows, view.tau))])]), "div"),
], [figure("profile", "Share of scores above τ", {
  height: 260, key: live(() => legend(...arms().map((arm, at) => [tint(at), armName(suite(), arm), "stroke"])), "div"),
  draw: (width, height, grip) => { const frame = axes(width, height, { x: [0, 1.2], y: [0, 1], across: "τ", up: "share of runs and tasks" }), xs = Array.from({ length: 121 }, (_, at) => at / 100), move = (tau) => set({ tau: rounded(clamp(tau, 0, 1.2), 0.01) }); return [frame.nodes, found.map(({ rows }, at) => line(xs.map((x) => [frame.px(x), frame.py(profile(rows, x))]), { style: `--own: ${tint(at)}` })), s("path", { d: `M${place(frame.px(view.tau))},${frame.top}V${frame.bottom}`, class: "line dashed thin", style: "--own: var(--ink)" }), grip("tau", frame.px(view.tau), frame.py(profile(found[0].rows, view.tau)), { says: "Threshold", now: view.tau, low: 0, high: 1.2, value: number(view.tau), hue: "var(--ink)", move: (x) => move(frame.toX(x)), keys: (dx, dy) => move(view.tau + 0.01 * (dx || dy)) })]; },
  says: () => found.map(({ arm, rows }) => `${arm} ${number(profile(rows, view.tau))}`).join(", "),
  rows: () => [["tau", ...arms()], ...[0, 0.25, 0.5, 0.75, 0.9, 1].map((tau) => [tau, ...found.map(({ rows }) => profile(rows, tau))])],
})]);
section("numbers", "3. All numbers", [
  live(() => table("By arm", [["arm", "sample efficiency", "final performance", "std over seeds", "worst drawdown", "fairness"], ...found.map((own) => [armName(suite(), own.arm), num(`area-${own.arm}`, own.area), num(`final-${own.arm}`, own.final), num(`spread-${own.arm}`, own.spread), num(`fall-${own.arm}`, own.fall), num(`fairness-${own.arm}`, own.fairness)])]), "div"),
  live(() => table("Every run", [["arm", "seed", "steps", ...tasksOf(suite()).map((task) => `${task}: return`), ...tasksOf(suite()).map((task) => `${task}: score`), "worst task", "fairness", "sign flips", "CPU s", "command"], ...data.cells.filter((cell) => cell.suite === suite()).map((cell) => [cell.arm, cell.seed, cell.steps, ...cell.final.returns, ...cell.final.scores, cell.worst_task, cell.fairness, cell.sign_flips, cell.cpu_seconds, cell.command])]), "div", { id: "cells" }),
]);
begin();
