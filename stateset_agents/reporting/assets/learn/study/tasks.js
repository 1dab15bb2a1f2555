// A study task by task: curves, weights, fairness, when each converged.

const MIXES = SUITES.filter((name) => tasksOf(name).length > 1); // a suite of one task has nothing to tell apart
settings({ suite: MIXES[0] ?? SUITES[0], arm: "", weighting: "balanced", smoothing: 3, seed: "all", hidden: [] });
const suite = () => (SUITES.includes(view.suite) ? view.suite : standard.suite);
const arm = () => (ARMS_OF(suite()).includes(view.arm) ? view.arm : ARMS_OF(suite()).find((name) => name === "task") ?? ARMS_OF(suite())[0]);
const chosen = () => { const cells = cellsOf(suite(), arm()), one = cells.filter(({ seed }) => String(seed) === view.seed); return one.length ? one : cells; };
const names = () => tasksOf(suite());
const visible = () => names().map((_, task) => task).filter((task) => !view.hidden.includes(task));
/** Mean, lowest and highest over the seeds, by point of the curves. */
const band = (task, of = column) => { const curves = chosen().map((cell) => eased(of(cell, task), view.smoothing)), steps = chosen()[0].curve.steps; return steps.map((step, at) => { const values = curves.map((curve) => curve[at]).filter((value) => value !== null && value !== undefined); return { step, mean: values.length ? mean(values) : null, low: Math.min(...values), high: Math.max(...values) }; }); };
const fairnessOf = (cell) => cell.curve.scores.map((scores) => (scores.some((score) => score === null) ? null : groupFairness(scores)));
const weights = () => weightSeries(view.weighting, chosen()[0].curve.scores);

head("Task by task", "How each task of a mix learned, what weight it would have had, and whether one was left behind.", studyNote());
const stepAxis = () => [0, Math.max(1, ...chosen().flatMap((cell) => cell.curve.steps))];
section("curves", "1. Performance", [
  controls(dropdown("suite", "Suite", SUITES.map((name) => [name, name])), dropdown("arm", "Arm", () => [["", arm()], ...ARMS_OF(suite()).filter((name) => name !== arm() || view.arm).map((name) => [name, armName(suite(), name)])]), dropdown("seed", "Seed", () => [["all", "all: mean and band"], ...cellsOf(suite(), arm()).map(({ seed }) => [String(seed), String(seed)])]), slider("smoothing", "Smoothing", { min: 0, max: 15, step: 1 }),
    live(() => names().map((name, task) => h("label", { class: "check" }, h("input", { type: "checkbox", name: `task-${task}`, ...(view.hidden.includes(task) ? {} : { checked: true }), onchange: () => set({ hidden: view.hidden.includes(task) ? view.hidden.filter((other) => other !== task) : [...view.hidden, task] }) }), ` ${name}`)), "div", { class: "row" })),
  live(() => ["At the end of training: ", names().map((name, task) => [`${name} `, num(`last-${task}`, band(task).at(-1).mean), "; "]), "held out, over these seeds: ", names().map((name, task) => [`${name} `, num(`final-${task}`, mean(chosen().map((cell) => cell.final.scores[task]))), task + 1 < names().length ? "; " : "."])]),
  live(() => (chosen().length < 2 ? "One seed: there is no band." : `The band goes from the lowest to the highest of ${chosen().length} seeds, update by update; the steps are those of the first.`), "p", { class: "aside" }),
], [figure("performance", "Score of each task over training", {
  height: 300, key: live(() => legend(...visible().map((task) => [tint(task), names()[task], "stroke"])), "div"),
  draw: (width, height) => { const curves = visible().map((task) => band(task)), all = curves.flat().flatMap(({ low, high }) => [low, high]).filter(Number.isFinite); const frame = axes(width, height, { x: stepAxis(), y: [Math.min(0, ...all), Math.max(1, ...all)], across: "environment steps", up: "score", formatX: thousands }); return [frame.nodes, curves.map((points, i) => { const known = points.filter(({ mean: value }) => value !== null), hue = tint(visible()[i]); return [known.length > 1 && chosen().length > 1 ? s("path", { d: `M${[...known.map(({ step, high }) => [frame.px(step), frame.py(high)]), ...[...known].reverse().map(({ step, low }) => [frame.px(step), frame.py(low)])].map(([x, y]) => `${place(x)},${place(y)}`).join("L")}Z`, fill: hue, opacity: 0.14 }) : null, known.length ? line(known.map(({ step, mean: value }) => [frame.px(step), frame.py(value)]), { style: `--own: ${hue}` }) : null]; })]; },
  says: () => names().map((name, task) => `${name} ends at ${number(band(task).at(-1).mean)}`).join(", "),
  rows: () => { const points = chosen()[0].curve.steps, at = [0, 0.25, 0.5, 0.75, 1].map((part) => Math.round(part * (points.length - 1))); return [["steps", ...names()], ...at.map((i) => [points[i], ...names().map((_, task) => band(task)[i].mean)])]; },
})]);
section("weights", "2. Weights", [
  text("What each task would weigh in the loss, computed here from the recorded scores: alike, by how far from solved it is, or by how fast it moves."),
  controls(choice("weighting", "Weights", [["balanced", "balanced"], ["performance", "performance"], ["adaptive", "adaptive"]])),
  live(() => ["At the end ", names().map((name, task) => [`${name} `, num(`weight-${task}`, weights().at(-1)[task]), task + 1 < names().length ? ", " : "."])]),
  aside("Of one seed: the first, or the one chosen above. No weight falls below .05."),
], [figure("weights", "Weight of each task over training", {
  height: 220, key: live(() => legend(...names().map((name, task) => [tint(task), name, "bar"])), "div"),
  draw: (width, height) => { const steps = chosen()[0].curve.steps, series = weights(), frame = axes(width, height, { x: stepAxis(), y: [0, 1], across: "environment steps", up: "weight", formatX: thousands }); return [frame.nodes, stacked(frame, steps, series)]; },
  says: () => names().map((name, task) => `${name} ${number(weights().at(-1)[task])}`).join(", "),
  rows: () => { const series = weights(); return [["steps", ...names()], ...chosen()[0].curve.steps.flatMap((step, at) => (at % Math.max(1, Math.floor(series.length / 8)) === 0 ? [[step, ...series[at]]] : []))]; },
})]);
section("fairness", "3. Fairness and convergence", [
  text("Fairness is the worst task's score by the mean one: 1 where all are alike, 0 where one is no better than chance."),
  live(() => ["Fairness at the end of training: ", num("fairness", mean(chosen().map((cell) => fairnessOf(cell).filter((value) => value !== null).at(-1) ?? 0))), "; held out, as recorded: ", num("held-out-fairness", mean(chosen().map((cell) => cell.fairness))), "."]),
  live(() => table("First step with 90 % of the last score, mean over the seeds that got there", [["task", "steps", "seeds"], ...names().map((name, task) => { const steps = converged(task); return [name, num(`converged-${task}`, steps.length ? mean(steps) : null, 0), num(`seeds-${task}`, steps.length, 0)]; })]), "div"),
], [figure("fairness", "Fairness over training", {
  height: 190, draw: (width, height) => { const steps = chosen()[0].curve.steps, curves = chosen().map((cell) => eased(fairnessOf(cell), view.smoothing)), frame = axes(width, height, { x: stepAxis(), y: [0, 1], across: "environment steps", up: "worst by mean", formatX: thousands }); return [frame.nodes, curves.map((curve, at) => { const known = curve.flatMap((value, i) => (value === null ? [] : [[frame.px(chosen()[at].curve.steps[i]), frame.py(value)]])); return known.length ? line(known, { class: "line thin", style: `--own: ${tint(at)}` }) : null; })]; },
  says: () => `One line for each of ${chosen().length} seeds.`,
}), figure("convergence", "First step with 90 % of the last score, by arm", {
  height: 220, key: live(() => legend(...names().map((name, task) => [tint(task), name, "bar"])), "div"),
  draw: (width, height) => { const all = ARMS_OF(suite()), values = all.map((name) => names().map((_, task) => { const steps = converged(task, cellsOf(suite(), name)); return steps.length ? mean(steps) : null; })); const frame = axes(width, height, { x: [0.5, all.length + 0.5], y: [0, Math.max(1, ...values.flat().map((value) => value ?? 0)) * 1.08], up: "environment steps", format: thousands, xTicks: all.map((_, at) => at + 1), formatX: (at) => short(all, at - 1, width), bottom: 24 }); return [frame.nodes, bars(frame, values, names().map((_, task) => tint(task)), { names: all })]; },
  says: () => names().map((name, task) => `${name}: ${number(converged(task).length ? mean(converged(task)) : null)} steps`).join(", "),
  rows: () => [["arm", ...names()], ...ARMS_OF(suite()).map((own) => [own, ...names().map((_, task) => { const steps = converged(task, cellsOf(suite(), own)); return steps.length ? mean(steps) : null; })])],
})]);
/** [tasks][tasks] cosines between gradients, means over the chosen seeds that have a pair; null where none has. */
function cosines() {
  const known = chosen().filter((cell) => cell.gradient_cosines.length);
  return known.length ? cosineMeans(known.map((cell) => cell.gradient_cosines)) : null;
}
const pulls = (cosine) => (cosine === null ? "not known" : cosine < 0 ? "pull against each other" : "pull the same way");
section("interference", "4. Interference", [
  text("The cosine between two tasks' gradients of the policy loss, each over its own steps of a rollout: 1 where both pull the weights the same way, 0 where neither minds the other, below 0 where what helps one harms the other."),
  live(() => {
    const found = cosines(), seeds = chosen().filter((cell) => cell.gradient_cosines.length).length;
    if (names().length < 2) return "This suite is one task: there is nobody to interfere with.";
    if (!found) return "These runs recorded no cosines: they are older, or gradient_cosines_every was 0.";
    const pairs = found.flatMap((row, one) => row.flatMap((cosine, other) => (other > one && cosine !== null ? [[cosine, one, other]] : []))).sort((a, b) => a[0] - b[0]);
    return [`Mean over the updates that compared them, and over ${plural(seeds, "seed")}. `, pairs.length ? [`Furthest apart: ${names()[pairs[0][1]]} and ${names()[pairs[0][2]]}, `, num("lowest-cosine", pairs[0][0]), ` (${pulls(pairs[0][0])}).`] : "No pair had two gradients."];
  }),
  aside("A task whose steps have inputs of their own shares only the later layers: its cosine with the others is nearer to 0 than those of tasks that look alike."),
], [live(() => (cosines() ? matrix(cosines()) : null), "div")]);
function matrix(values) {
  const cell = (cosine, one, other) => h("td", { class: cosine === null ? "cosine none" : `cosine ${cosine < 0 ? "against" : "along"}`, style: `--w: ${Math.round(55 * Math.abs(cosine ?? 0))}%`, "data-pair": `${one}-${other}`, title: `${names()[one]} and ${names()[other]}: ${pulls(cosine)}` }, num(`cosine-${one}-${other}`, cosine));
  const caption = "Cosines between the tasks' gradients";
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { class: "plain matrix" }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ["task", ...names()].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, values.map((row, one) => h("tr", {}, h("th", { scope: "row" }, names()[one]), row.map((cosine, other) => cell(cosine, one, other)))))));
}
function converged(task, cells = chosen()) {
  return cells.map((cell) => firstStepAt(cell.curve.steps, column(cell, task))).filter((step) => step !== null);
}
begin();
