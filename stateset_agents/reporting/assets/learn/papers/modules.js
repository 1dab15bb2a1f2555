// Soft modularization: Yang et al., arXiv 2003.13661.

settings({ lean: [0.4, -0.3], temperature: 1, slopes: [0.5, 0.2], targets: [1, -1], steps: 60, rate: 0.3, routed: true, shift: 0.5, little: 0.001 });

const begun = (leanings = view.lean) => ({ slopes: [...view.slopes], logits: leanings.map((lean) => [lean, -lean]) });
function trained(routed, steps = view.steps, leanings = view.lean) {
  const history = [];
  let now = begun(leanings);
  for (let step = 0; step <= steps; step += 1) {
    const next = moduleStep(now, view.targets, { rate: view.rate, temperature: view.temperature, routed });
    history.push({ ...now, loss: next.loss, outputs: next.outputs, weights: next.weights });
    now = next;
  }
  return history;
}
const TASKS = [tint(0), tint(1)], MODULES = [tint(2), tint(3)];
const firstWeights = () => begun().logits.map((own) => softmax(own, view.temperature));

head("Soft modularization", "One network of modules for many tasks; a routing network gives each task its own soft mixture of them, learned with everything else.",
  note(source("Yang et al., Multi-Task Reinforcement Learning with Soft Modularization, arXiv 2003.13661", "https://arxiv.org/abs/2003.13661"), ". Drag what is round, or move it by the arrow keys."));

section("routing", "1. A routing matrix", [
  text("Each task has a number for each connection; a softmax turns them into shares that sum to 1. No module is picked: all are mixed, so the choice can be learned by gradients."),
  formula("p̂ᵢⱼ = exp(pᵢⱼ / τ) / Σₖ exp(pᵢₖ / τ)"),
  controls(slider("temperature", "Temperature τ", { min: 0.1, max: 5, step: 0.02, log: true }), ...[0, 1].map((task) => h("div", { class: "row" }, live(() => [`Task ${task + 1}: `, num(`weight-${task}-0`, firstWeights()[task][0]), " of module 1, ", num(`weight-${task}-1`, firstWeights()[task][1]), " of module 2"], "span")))),
  live(() => { const weights = firstWeights(), overlap = dot(weights[0], weights[1]) / Math.sqrt(dot(weights[0], weights[0]) * dot(weights[1], weights[1])); return ["The two tasks' routes have a cosine of ", num("overlap", overlap), ": 1 shares everything, 0 nothing."]; }),
  aside("τ is ours, to play with: at a low one routing is nearly hard, at a high one all modules are shared alike. The paper's routing network computes the numbers from the task and the observation, for every layer."),
], [figure("routing", "Who uses which module", {
  height: 300, key: legend([TASKS[0], "task 1"], [TASKS[1], "task 2"]),
  draw: (width, height, grip) => {
    const xs = [width * 0.17, width * 0.72], y = (at) => height * (at ? 0.72 : 0.27), weights = firstWeights();
    const range = [height * 0.1, height * 0.9];
    const reach = 3, slide = (lean) => range[0] + ((reach - lean) / (2 * reach)) * (range[1] - range[0]);
    const turn = (task, lean) => set({ lean: view.lean.map((old, i) => (i === task ? rounded(clamp(lean, -reach, reach), 0.01) : old)) });
    return [
      [0, 1].map((task) => [0, 1].map((module) => { const from = [xs[0] + 22, y(task)], to = [xs[1] - 34, y(module)]; return [line([from, to], { style: `--own: ${TASKS[task]}; stroke-width: ${place(1 + 13 * weights[task][module])}`, opacity: place(0.25 + 0.6 * weights[task][module]) }), label(from[0] + (to[0] - from[0]) * 0.24, from[1] + (to[1] - from[1]) * 0.24 - 9, number(weights[task][module]), { "text-anchor": "middle", class: "strong" })]; })),
      [0, 1].map((module) => [s("rect", { x: place(xs[1] - 34), y: place(y(module) - 22), width: 92, height: 44, rx: 8, fill: "var(--card)", stroke: MODULES[module], "stroke-width": 2 }), label(xs[1] + 12, y(module) + 4, `module ${module + 1}`, { "text-anchor": "middle", class: "strong" })]),
      [0, 1].map((task) => [s("circle", { cx: place(xs[0]), cy: place(y(task)), r: 20, fill: "var(--card)", stroke: TASKS[task], "stroke-width": 2 }), label(xs[0], y(task) + 4, String(task + 1), { "text-anchor": "middle", class: "strong" })]),
      [0, 1].map((task) => { const x = 14 + task * 22; return [s("path", { d: `M${x},${range[0]}V${range[1]}`, stroke: "var(--zero)", "stroke-width": 2 }), grip(`lean-${task}`, x, slide(view.lean[task]), { says: `Leaning of task ${task + 1} to module 1`, now: view.lean[task], low: -reach, high: reach, value: `${view.lean[task]}: ${number(weights[task][0])} of module 1`, hue: TASKS[task], move: (_, at) => turn(task, reach - ((at - range[0]) / (range[1] - range[0])) * 2 * reach), keys: (dx, dy) => turn(task, view.lean[task] + 0.05 * (dy || dx)) })]; }),
    ];
  },
  says: () => firstWeights().map((own, task) => `Task ${task + 1}: ${own.map((value) => number(value)).join(" and ")}`).join("; "),
  rows: () => [["task", "module 1", "module 2"], ...firstWeights().map((own, task) => [task + 1, ...own])],
})]);

section("training", "2. With and without routing", [
  text("The smallest case. A module multiplies its input by its slope; a task's output is its mixture of the two and wants a slope of its own. Slopes and routes learn together, by gradient descent. Without routing the shares stay as they were set above."),
  controls(tick("routed", "Routes learn"), slider("steps", "Steps", { min: 0, max: 300, step: 1 }), slider("rate", "Learning rate", { min: 0.05, max: 1, step: 0.05 }),
    h("div", { class: "row" }, player(() => { if (view.steps >= 300) return false; set({ steps: Math.min(300, view.steps + 5) }); return view.steps < 300; }, { label: "Train", every: 90 }), press("Back to the start", () => set({ steps: 0 })), press("Share everything", () => set({ lean: [0, 0] })), press("Opposite targets", () => set({ targets: [1, -1] })), press("Equal targets", () => set({ targets: [1, 1] })))),
  live(() => { const own = trained(view.routed).at(-1), other = trained(!view.routed).at(-1); return ["After ", num("steps", view.steps, 0), " steps the loss is ", num("loss", own.loss, 5), ", ", view.routed ? "without" : "with", " learned routes ", num("other-loss", other.loss, 5), ". Outputs ", num("output-0", own.outputs[0]), " and ", num("output-1", own.outputs[1]), "; modules ", num("module-0", own.slopes[0]), " and ", num("module-1", own.slopes[1]), "; task 1 uses ", num("share-0", own.weights[0][0]), " of module 1, task 2 ", num("share-1", own.weights[1][0]), "."]; }),
  aside("Press “Share everything”: with equal shares both tasks are the same function, and opposite targets can never be met; the modules differ too little to tell the routes apart at first. With fixed, different shares this toy can be solved too, by larger slopes; learned routes get there in fewer steps."),
], [figure("outputs", "Modules, and what each task makes of them", {
  height: 260, key: legend([TASKS[0], "output of task 1"], [TASKS[1], "of task 2"], [MODULES[0], "module 1", "stroke"], [MODULES[1], "module 2", "stroke"], ["var(--soft)", "target (drag it)", "empty"]),
  draw: (width, height, grip) => {
    const way = trained(view.routed), top = Math.max(1.6, ...way.flatMap(({ slopes, outputs }) => [...slopes, ...outputs].map(Math.abs))) * 1.08;
    const frame = axes(width, height, { x: [0, Math.max(1, view.steps) * 1.12], y: [-top, top], across: "step", up: "slope" });
    const curve = (of, hue, kind = "line") => line(way.map((own, at) => [frame.px(at), frame.py(of(own))]), { class: kind, style: `--own: ${hue}` });
    const aim = (task, value) => set({ targets: view.targets.map((old, i) => (i === task ? rounded(clamp(value, -1.5, 1.5), 0.01) : old)) });
    return [frame.nodes, [0, 1].map((module) => curve((own) => own.slopes[module], MODULES[module], "line dashed thin")), [0, 1].map((task) => curve((own) => own.outputs[task], TASKS[task])),
      [0, 1].map((task) => grip(`target-${task}`, frame.px(Math.max(1, view.steps) * (1.05 + 0.035 * task)), frame.py(view.targets[task]), { says: `Target of task ${task + 1}`, now: view.targets[task], low: -1.5, high: 1.5, value: String(view.targets[task]), hue: TASKS[task], shape: s("circle", { r: 7, fill: "var(--card)", stroke: TASKS[task], "stroke-width": 3 }), move: (_, y) => aim(task, frame.toY(y)), keys: (dx, dy) => aim(task, view.targets[task] + 0.05 * (dy || dx)) }))];
  },
  says: () => `Outputs ${trained(view.routed).at(-1).outputs.map((value) => number(value)).join(" and ")}, targets ${view.targets.join(" and ")}.`,
  rows: () => [["step", "output 1", "output 2", "module 1", "module 2", "loss"], ...[0, 5, 10, 20, 40, 80, 150, 300].filter((at) => at <= view.steps).map((at) => { const own = trained(view.routed)[at]; return [at, ...own.outputs, ...own.slopes, own.loss]; })],
}), figure("loss", "Loss, with routes learned and fixed", {
  height: 190, key: legend([tint(2), "learned", "stroke"], ["var(--soft)", "fixed", "stroke"]),
  draw: (width, height) => {
    const ways = [trained(true), trained(false)], top = Math.max(0.01, ...ways.flat().map(({ loss }) => loss)) * 1.05;
    const frame = axes(width, height, { x: [0, Math.max(1, view.steps)], y: [0, top], across: "step", up: "loss" });
    return [frame.nodes, ways.map((way, i) => line(way.map(({ loss }, at) => [frame.px(at), frame.py(loss)]), { style: `--own: ${i ? "var(--soft)" : tint(2)}` }))];
  },
  says: () => `Learned ${number(trained(true).at(-1).loss)}, fixed ${number(trained(false).at(-1).loss)}.`,
})]);
// 3. The derivation, over the page's two modules and two tasks at their start
const item = (name, at, value) => ({ [name]: view[name].map((old, i) => (i === at ? value : old)) });
const itemSlider = (name, at, words, [min, max]) => slider(`${name}-${at}`, words, { min, max, step: 0.05, read: () => view[name][at], write: (value) => item(name, at, value) });
const LEAN = (task) => itemSlider("lean", task, `Leaning of task ${task + 1}`, [-3, 3]);
const SLOPE = (module) => itemSlider("slopes", module, `Slope of module ${module + 1}`, [-2, 2]);
const TARGET = (task) => itemSlider("targets", task, `Target of task ${task + 1}`, [-1.5, 1.5]);
const TAU = () => slider("temperature", "Temperature τ", { min: 0.1, max: 5, step: 0.02, log: true });
const certainty = () => { const [own] = firstWeights()[0]; return (own * (1 - own)) / view.temperature; };
/** The loss at the start, with one slope or one number of a task moved by `by`. */
const lossWith = (name, at, by) => {
  const { slopes, logits } = begun();
  if (name === "slopes") slopes[at] += by;
  else logits[at][0] += by;
  return moduleStep({ slopes, logits }, view.targets, { rate: 0, temperature: view.temperature }).loss;
};
/** A step of the page, and the gradient that it took: of slopes [2], and of each task's numbers [2][2]. */
function gradientAt(rate = 1) {
  const from = begun(), to = moduleStep(from, view.targets, { rate, temperature: view.temperature });
  return { loss: to.loss, next: to, slopes: from.slopes.map((slope, j) => (slope - to.slopes[j]) / rate), logits: from.logits.map((own, k) => own.map((value, j) => (value - to.logits[k][j]) / rate)) };
}
derivation("3. The derivation, step by step", [text("From shares to the gradients that teach modules and routes, one claim at a time. mⱼ is a module's slope, yₖ = Σⱼ p̂ₖⱼ mⱼ a task's output, tₖ its target, and L = ½ Σₖ (yₖ − tₖ)². The left side is found by moving one number a little, the right one by the formula.")], [
  { claim: "Shares are positive and depend on differences alone: the same added to all numbers of a task changes nothing.", shows: "p̂₁ = exp((p₁ + c) / τ) / Σⱼ exp((pⱼ + c) / τ) = 1 / (1 + exp(−(p₁ − p₂) / τ))", knobs: [slider("shift", "Added to both: c", { min: -3, max: 3, step: 0.1 }), LEAN(0), TAU()],
    sides: () => ({ left: ["share of module 1 in task 1", softmax(begun().logits[0].map((value) => value + view.shift), view.temperature)[0]], right: ["by the difference", 1 / (1 + Math.exp((-2 * view.lean[0]) / view.temperature))] }) },
  { claim: "A number moves its share most where the choice is open, and hardly where it is made.", shows: "∂p̂₁ / ∂p₁ = p̂₁ (1 − p̂₁) / τ", knobs: [LEAN(0), TAU()],
    sides: () => ({ left: ["slope of the share", slopeOf((value) => softmax([value, -view.lean[0]], view.temperature)[0], view.lean[0])], right: ["p̂₁ (1 − p̂₁) / τ", certainty()] }) },
  { claim: "A module learns from each task by the share with which that task uses it: where shares differ, tasks pull at different modules.", shows: "∂L / ∂m₁ = Σₖ (yₖ − tₖ) p̂ₖ₁", knobs: [LEAN(0), LEAN(1), SLOPE(0), TARGET(0), TARGET(1)],
    sides: () => ({ left: ["slope of L by m₁", slopeOf((by) => lossWith("slopes", 0, by), 0)], right: ["what a step takes", gradientAt().slopes[0]], more: ["Of that task 1 gives ", num("pull-0", (gradientAt().next.outputs[0] - view.targets[0]) * firstWeights()[0][0]), " and task 2 ", num("pull-1", (gradientAt().next.outputs[1] - view.targets[1]) * firstWeights()[1][0]), "."] }) },
  { claim: "A route learns by how much its module would have helped: its slope less the mixture, times the error.", shows: "∂L / ∂p₁₁ = (y₁ − t₁) p̂₁₁ (m₁ − y₁) / τ", knobs: [LEAN(0), SLOPE(0), SLOPE(1), TARGET(0), TAU()],
    sides: () => ({ left: ["slope of L by p₁₁", slopeOf((by) => lossWith("logits", 0, by), 0)], right: ["what a step takes", gradientAt().logits[0][0]] }) },
  { claim: "A small step along both lowers the loss by its size times the squared length of the gradient.", shows: "( L(before) − L(after) ) / η → ‖∇L‖²", knobs: [slider("little", "Step size η", { min: 0.001, max: 3, step: 0.05, log: true }), LEAN(0), SLOPE(0), TARGET(0)],
    sides: () => { const { loss, next, slopes, logits } = gradientAt(view.little); return { left: ["fall of L, over η", (loss - moduleStep(next, view.targets, { rate: 0, temperature: view.temperature }).loss) / view.little], right: ["‖∇L‖²", sum([...slopes, ...logits.flat()].map((value) => value ** 2))], within: 0.01, otherwise: "the step is too long." }; } },
]);

// 4. Pitfalls
pitfalls("4. Pitfalls", [
  { wrong: "Modules that are alike cannot be told apart.", show: { slopes: [0.5, 0.5], targets: [1, -1], lean: [0.4, -0.3] },
    here: () => ["the slopes are ", num("pit-slope-0", view.slopes[0]), " and ", num("pit-slope-1", view.slopes[1]), "; the first task's error is ", num("pit-error", gradientAt().next.outputs[0] - view.targets[0]), ", and the gradient of its route ", num("pit-route", gradientAt().logits[0][0]), "."],
    cure: ["begin with modules that differ, by random weights."] },
  { wrong: "Equal shares at the start: for long both tasks are one function.", show: { lean: [0, 0], targets: [1, -1], slopes: [0.5, 0.2], steps: 10, routed: true, temperature: 1 },
    here: () => ["after ", num("pit-steps", view.steps, 0), " steps the outputs are ", num("pit-output-0", trained(view.routed).at(-1).outputs[0]), " and ", num("pit-output-1", trained(view.routed).at(-1).outputs[1]), ", the loss ", num("pit-loss", trained(view.routed).at(-1).loss), "; begun with leanings of .4 and −.3 it would be ", num("pit-apart", trained(view.routed, view.steps, [0.4, -0.3]).at(-1).loss), "."],
    cure: ["give each task a routing of its own from the start; a curve that is flat at first need not stay so: raise the steps."] },
  { wrong: "A cold softmax freezes its routes.", show: { temperature: 0.1, lean: [1.5, 1.5], targets: [1, -1] },
    here: () => ["at τ = ", num("pit-tau", view.temperature), " task 1 uses ", num("pit-share", firstWeights()[0][0], 5), " of module 1, and a change of its number by 1 would move that by ", num("pit-certainty", certainty(), 5), "."],
    cure: ["begin warm, with small numbers; cool only when routes have been found."] },
  { wrong: "The task with the large error owns the shared module.", show: { targets: [1.5, -0.1], lean: [0, 0], slopes: [0.5, 0.2], temperature: 1 },
    here: () => { const pulls = [0, 1].map((k) => Math.abs((gradientAt().next.outputs[k] - view.targets[k]) * firstWeights()[k][0])); return ["of the pull at module 1 task 1 has ", share("pit-pull", sum(pulls) > 0 ? pulls[0] / sum(pulls) : null), "."]; },
    cure: ["bring tasks to one scale (docs/grouping.md). The paper weighs its tasks, too, beside routing."] },
  { wrong: "Without fixed routes beside it a gain proves nothing.", show: { lean: [0.4, -0.3], targets: [1, -1], slopes: [0.5, 0.2], steps: 300, rate: 0.3, temperature: 1, routed: true },
    here: () => ["after ", num("pit-steps-2", view.steps, 0), " steps the loss is ", num("pit-learned", trained(true).at(-1).loss, 5), " with learned routes and ", num("pit-fixed", trained(false).at(-1).loss, 5), " with those of the start, never changed."],
    cure: ["train fixed, different routes as well, for as long."] },
]);
document.getElementById("foot").append(text("The paper's figures come from robot tasks (Meta-World); none is repeated here. The toy is toys.module_step in Python; a test compares the numbers."));
begin();
