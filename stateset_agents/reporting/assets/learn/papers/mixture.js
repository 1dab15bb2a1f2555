// An infinite mixture of Gaussian processes: Xu et al., arXiv 2006.11441.

settings({ alpha: 0.5, beta: 3, length: 0.8, signal: 1.5, noise: 0.15, most: 0, seen: 30, stay: 10, seed: 1, probe: 0.5, tasks: 3, y: 0.8, finite: 100000, runs: 200, odds: 4 });

const FUNCTIONS = [(x) => Math.sin(1.5 * x), (x) => 1.6 - 0.5 * x, (x) => -1.5 + 0.35 * x];
/** Points of tasks that take turns: task k for `stay` points, then the next, and round again. */
function stream() {
  const draw = mulberry32(view.seed);
  return Array.from({ length: 60 }, (_, at) => {
    const task = Math.floor(at / view.stay) % view.tasks, x = -3 + 6 * draw();
    const normal = Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
    return [x, FUNCTIONS[task](x) + 0.1 * normal, task];
  });
}
const settings_ = (most = view.most || null) => ({ alpha: view.alpha, beta: view.beta, length: view.length, signal: view.signal, noise: view.noise, most });
let found = null, points = null, key_ = null;
function compute() {
  const key = JSON.stringify({ ...view, probe: 0, y: 0, finite: 0, runs: 0, odds: 0 });
  if (key !== key_) {
    points = stream().slice(0, view.seen);
    found = mixture(points.map(([x, y]) => [x, y]), settings_());
  }
  key_ = key;
}
drawers.push(compute);
/** Share of pairs of points that are together in the mixture as in the tasks (the Rand index). */
function rand(chosen) {
  let same = 0;
  for (let i = 0; i < points.length; i += 1) for (let k = 0; k < i; k += 1) same += (points[i][2] === points[k][2]) === (chosen[i] === chosen[k]) ? 1 : 0;
  return points.length > 1 ? same / ((points.length * (points.length - 1)) / 2) : null;
}
const nextOf = (alpha = view.alpha) => {
  const counts = found.experts.map(({ xs }) => xs.length), last = found.steps.length ? found.steps.at(-1).chosen : null;
  const prior = restaurant(counts, last, { alpha, beta: view.beta });
  const seen = [...found.experts, { xs: [], ys: [] }].map(({ xs, ys }) => gpPredict(xs, ys, view.probe, view));
  const scores = seen.map((own, k) => Math.log(prior[k]) - 0.5 * (Math.log(2 * Math.PI * own.variance) + (view.y - own.mean) ** 2 / own.variance));
  return { prior, seen, posterior: softmax(scores) };
};

head("An infinite mixture of Gaussian processes", "A stream of data whose tasks change without notice: each point joins the model that explains it, or opens a new one; old models are found again.",
  note(source("Xu et al., Task-Agnostic Online Reinforcement Learning with an Infinite Mixture of Gaussian Processes, arXiv 2006.11441", "https://arxiv.org/abs/2006.11441"), ". Drag what is round, or move it by the arrow keys."));

section("stream", "1. A stream with task switches", [
  text("Points come one after the other. Their task is not told. Each goes to its likeliest component: the chance to sit there, times how well that component's Gaussian process foresaw the point."),
  controls(slider("seen", "Points seen", { min: 1, max: 60, step: 1 }), h("div", { class: "row" }, player(() => { if (view.seen >= 60) return false; set({ seen: view.seen + 1 }); return view.seen < 60; }, { label: "Play", every: 300 }), press("From the start", () => set({ seen: 1 }))),
    slider("tasks", "Tasks", { min: 1, max: 3, step: 1 }), slider("stay", "Points before a switch", { min: 1, max: 20, step: 1 }), slider("alpha", "Concentration α", { min: 0.001, max: 100, step: 0.05, log: true }), slider("beta", "Stickiness β", { min: 0, max: 30, step: 0.5 }), slider("most", "At most (0: no bound)", { min: 0, max: 5, step: 1, text: (value) => (value ? `${value}` : "none") }), slider("seed", "Seed", { min: 0, max: 20, step: 1 })),
  live(() => ["Components: ", num("components", found.experts.length, 0), " for ", num("tasks", new Set(points.map(([, , task]) => task)).size, 0), " tasks seen. Together as in the tasks: ", share("rand", rand(found.steps.map(({ chosen }) => chosen))), " of all pairs. With the number fixed at 1: ", share("rand-one", rand(points.map(() => 0))), "."]),
  aside("A fixed number is the ablation: set “At most” to 1 or 2 and one process has to explain two tasks. A larger α opens components sooner; β keeps a point with the one before it, since tasks last."),
], [figure("stream", "Points by component, and each component's process", {
  height: 330, key: live(() => [legend(...found.experts.map((_, k) => [tint(k), `component ${k + 1}`]))], "div"),
  draw: (width, height, grip) => {
    const frame = axes(width, height, { x: [-3.2, 3.2], y: [-3.4, 3.8], across: "x", up: "y" });
    const xs = Array.from({ length: 41 }, (_, i) => -3 + (6 * i) / 40);
    const probe = (at) => set({ probe: rounded(clamp(at[0], -3, 3), 0.05), y: rounded(clamp(at[1], -3, 3.4), 0.05) });
    return [frame.nodes, found.experts.map(({ xs: seenX, ys }, k) => { const own = xs.map((x) => gpPredict(seenX, ys, x, view)); const edge = (sign) => own.map(({ mean: middle, variance }, i) => [frame.px(xs[i]), frame.py(clamp(middle + sign * 2 * Math.sqrt(variance), -3.4, 3.8))]); return [s("path", { d: `M${[...edge(1), ...edge(-1).reverse()].map(([x, y]) => `${place(x)},${place(y)}`).join("L")}Z`, fill: tint(k), opacity: 0.1 }), line(own.map(({ mean: middle }, i) => [frame.px(xs[i]), frame.py(middle)]), { style: `--own: ${tint(k)}` })]; }),
      points.map(([x, y], i) => s("circle", { cx: place(frame.px(x)), cy: place(frame.py(y)), r: i === points.length - 1 ? 6.5 : 4, fill: tint(found.steps[i].chosen), stroke: i === points.length - 1 ? "var(--ink)" : "var(--card)", "stroke-width": i === points.length - 1 ? 2 : 1 }, tip(`point ${i + 1}: component ${found.steps[i].chosen + 1}, task ${points[i][2] + 1}`))),
      grip("probe", frame.px(view.probe), frame.py(view.y), { says: "A next point", now: view.probe, low: -3, high: 3, value: `x ${view.probe}, y ${view.y}`, hue: "var(--ink)", move: (x, y) => probe([frame.toX(x), frame.toY(y)]), keys: (dx, dy) => probe([view.probe + 0.05 * dx, view.y + 0.05 * dy]) })];
  },
  says: () => `${points.length} points in ${found.experts.length} components.`,
  rows: () => [["point", "x", "y", "task", "component", "its share"], ...points.map(([x, y, task], i) => [i + 1, x, y, task + 1, found.steps[i].chosen + 1, found.steps[i].posterior[found.steps[i].chosen]])],
}), figure("timeline", "In order: the task above, the component below", {
  height: 84, key: null,
  draw: (width, height) => {
    const wide = (width - 12) / 60;
    return [points.map(([, , task], i) => [s("rect", { x: place(6 + i * wide), y: 8, width: place(wide - 1), height: 22, rx: 2, fill: "var(--ink)", opacity: 0.18 + 0.3 * task }), s("rect", { x: place(6 + i * wide), y: 36, width: place(wide - 1), height: 22, rx: 2, fill: tint(found.steps[i].chosen) })]), label(6, 76, "first"), label(width - 6, 76, "60th", { "text-anchor": "end" })];
  },
  says: () => `Components in order: ${found.steps.map(({ chosen }) => chosen + 1).join(" ")}.`,
})]);

section("next", "2. Where would the next point go?", [
  text("The dark point is yours. Its chances before it is seen are those of a sticky Chinese restaurant: the size of each component, β more for the last one used, α for a new one."),
  formula("P(k) ∝ nₖ + β [k = last],   P(new) ∝ α"),
  controls(slider("probe", "x", { min: -3, max: 3, step: 0.05 }), slider("y", "y", { min: -3, max: 3.4, step: 0.05 }), slider("length", "Length scale", { min: 0.2, max: 2, step: 0.05 }), slider("signal", "Signal", { min: 0.3, max: 3, step: 0.1 }), slider("noise", "Noise", { min: 0.05, max: 1, step: 0.05 })),
  live(() => { const { prior, seen, posterior } = nextOf(); return table("Prior, prediction and posterior of each component", [["component", "prior", "foreseen mean", "std", "posterior"], ...posterior.map((value, k) => [k < found.experts.length ? String(k + 1) : "new", num(`prior-${k}`, prior[k]), num(`mean-${k}`, seen[k].mean), num(`std-${k}`, Math.sqrt(seen[k].variance)), num(`posterior-${k}`, value)])]); }, "div"),
  aside("The paper updates by online variational inference and merges and prunes components; here each point takes its likeliest place at once. The prior is our reading of its sticky concentration."),
], [figure("chances", "Before it is seen, and after", {
  height: 230, key: legend(["var(--zero)", "prior", "bar"], ["var(--new)", "posterior", "bar"]),
  draw: (width, height) => {
    const { prior, posterior } = nextOf(), names = posterior.map((_, k) => (k < found.experts.length ? String(k + 1) : "new"));
    const frame = axes(width, height, { x: [0.5, names.length + 0.5], y: [0, 1], up: "chance", xTicks: names.map((_, k) => k + 1), formatX: (at) => names[at - 1], bottom: 24 });
    return [frame.nodes, bars(frame, posterior.map((value, k) => [prior[k], value]), ["var(--zero)", "var(--new)"], { names })];
  },
  says: () => `Posterior ${nextOf().posterior.map((value) => number(value)).join(", ")}.`,
  rows: () => [["component", "prior", "posterior"], ...nextOf().posterior.map((value, k) => [k < found.experts.length ? k + 1 : "new", nextOf().prior[k], value])],
})]);
// 3. The derivation
const density = (value, { mean: middle, variance }) => Math.exp(-((value - middle) ** 2) / (2 * variance)) / Math.sqrt(2 * Math.PI * variance);
const chanceOfNew = (at) => view.alpha / (view.alpha + at + (at > 0 ? view.beta : 0));
/** Numbers of components of restaurants that seat as many points as are seen, without looking at them. */
const seatings = cached((seen, alpha, beta, seed, runs) => {
  const draw = mulberry32(seed + 1);
  return Array.from({ length: runs }, () => {
    const counts = [];
    for (let at = 0, last = null; at < seen; at += 1) {
      let [left, k] = [draw(), 0];
      for (const chance of restaurant(counts, last, { alpha, beta }).slice(0, -1)) { left -= chance; if (left < 0) break; k += 1; }
      counts[k] = (counts[k] ?? 0) + 1;
      last = k;
    }
    return counts.length;
  });
});
/** Log density of the first point and the probe under one process, as a pair. */
function pairDensity() {
  const [[x, y]] = points, same = view.signal ** 2, own = same + view.noise ** 2, between = same * Math.exp(-((x - view.probe) ** 2) / (2 * view.length ** 2));
  const area = own ** 2 - between ** 2, distance = (own * (y ** 2 + view.y ** 2) - 2 * between * y * view.y) / area;
  return -Math.log(2 * Math.PI) - Math.log(area) / 2 - distance / 2;
}
const oddsOfNew = (alpha) => { const { posterior } = nextOf(alpha), odds = posterior.at(-1) / posterior[0]; return Number.isFinite(odds) ? odds : null; };
const ALPHA = () => slider("alpha", "Concentration α", { min: 0.001, max: 100, step: 0.05, log: true });
const SEEN = () => slider("seen", "Points seen: n", { min: 1, max: 60, step: 1 });
const PROBE = () => [slider("probe", "x", { min: -3, max: 3, step: 0.05 }), slider("y", "y", { min: -3, max: 3.4, step: 0.05 })];
derivation("3. The derivation, step by step", [text("From a mixture of K components to one that needs no K, and to a point's share, one claim at a time. The left side is counted, drawn or what the page uses; the right one is the formula.")], [
  { claim: "Let K components share a chance α evenly, and let K grow: together the unused ones keep the chance of a new table in the Chinese restaurant.", shows: "(K − used) · (α / K) / (n + α) → α / (n + α)", knobs: [slider("finite", "Components K", { min: 10, max: 1000000, step: 0.1, log: true, write: (value) => ({ finite: Math.round(value) }) }), ALPHA(), SEEN()],
    sides: () => ({ left: ["of K components", (Math.max(0, view.finite - found.experts.length) * (view.alpha / view.finite)) / (view.seen + view.alpha)], right: ["α / (n + α)", view.alpha / (view.seen + view.alpha)], within: 0.01, otherwise: "K is too small to stand for infinity." }) },
  { claim: "So the number of components grows slowly, like α log n, before any point has been looked at, and β makes new ones rarer.", shows: "E[components] = Σᵢ α / (α + i + β [i > 0]),   i = 0 … n − 1", knobs: [ALPHA(), slider("beta", "Stickiness β", { min: 0, max: 30, step: 0.5 }), SEEN(), slider("runs", "Restaurants drawn", { min: 10, max: 1000, step: 0.05, log: true, write: (value) => ({ runs: Math.round(value) }) })],
    sides: () => { const chances = points.map((_, at) => chanceOfNew(at)); return { left: ["mean of those drawn", mean(seatings(view.seen, view.alpha, view.beta, view.seed, view.runs))], right: ["by the formula", sum(chances)], error: Math.max(1e-9, Math.sqrt(sum(chances.map((chance) => chance * (1 - chance))) / view.runs)), otherwise: "that is rare, but it happens: another seed, or more restaurants." }; } },
  { claim: "How well a component explains its points is how well it foresaw each of them, one after the other.", shows: "log p(y₁, y₂) = log p(y₁) + log p(y₂ | y₁)", knobs: [...PROBE(), slider("length", "Length scale", { min: 0.2, max: 2, step: 0.05 }), slider("noise", "Noise", { min: 0.05, max: 1, step: 0.05 })],
    sides: () => { const [[x, y]] = points, one = gpPredict([], [], x, view), two = gpPredict([x], [y], view.probe, view); return { left: ["of the first point and yours, as a pair", pairDensity()], right: ["one after the other", sum([one, two].map((own, k) => -0.5 * (Math.log(2 * Math.PI * own.variance) + ((k ? view.y : y) - own.mean) ** 2 / own.variance)))] }; } },
  { claim: "A point's share in a component is its seats times how well the component foresaw the point, by the sum over all.", shows: "P(k | y) ∝ (nₖ + β [k = last]) pₖ(y),   P(new | y) ∝ α N(y; 0, s² + σ²)", knobs: [...PROBE(), ALPHA(), slider("beta", "Stickiness β", { min: 0, max: 30, step: 0.5 })],
    sides: () => { const { prior, seen, posterior } = nextOf(), weights = prior.map((chance, k) => chance * density(view.y, seen[k])); return { left: ["posterior of a new component", posterior.at(-1)], right: ["by the formula", weights.at(-1) / sum(weights)] }; } },
  { claim: "So α multiplies the odds of a new component, whatever the point; move the point instead, and they change by powers of ten.", shows: "odds(new : first; c α) = c · odds(new : first; α)", knobs: [slider("odds", "Factor c", { min: 0.1, max: 20, step: 0.05, log: true }), ...PROBE(), ALPHA()],
    sides: () => { const odds = oddsOfNew(view.alpha); return { left: ["odds at c α", oddsOfNew(view.alpha * view.odds)], right: ["c times the odds at α", odds === null ? null : view.odds * odds], otherwise: "the first component's share is too small for a number." }; } },
]);

// 4. Pitfalls
const START = { alpha: 0.5, beta: 3, length: 0.8, signal: 1.5, noise: 0.15, most: 0, seen: 60, stay: 10, seed: 1, tasks: 3 };
const components = (name) => [num(`pit-${name}`, found.experts.length, 0), " components for ", num(`pit-${name}-tasks`, new Set(points.map(([, , task]) => task)).size, 0), " tasks, and ", share(`pit-${name}-rand`, rand(found.steps.map(({ chosen }) => chosen))), " of all pairs as in the tasks"];
pitfalls("4. Pitfalls", [
  { wrong: "A large concentration opens a component for every oddity.", show: { ...START, alpha: 50 },
    here: () => ["at α = ", num("pit-alpha", view.alpha), ": ", components("alpha"), "."],
    cure: ["choose α by the number of components that you expect, the second claim above; merge and prune, as the paper does and this page does not."] },
  { wrong: "Stickiness hides a switch.", show: { ...START, stay: 1, beta: 30, noise: 0.6 },
    here: () => ["at β = ", num("pit-beta", view.beta), " and a switch every ", num("pit-stay", view.stay, 0), " points: ", components("beta"), "."],
    cure: ["β is right where tasks last; where they alternate set it to 0."] },
  { wrong: "Noise that is set too small turns scatter into tasks.", show: { ...START, noise: 0.05, length: 1.6, seed: 4 },
    here: () => ["the stream's noise is .1, the processes' ", num("pit-noise", view.noise), ": ", components("noise"), "."],
    cure: ["learn length scale and noise from the data; here they stay as they are set."] },
  { wrong: "A short length scale forgets between points: every component foresees the same.", show: { ...START, length: 0.2, seen: 12, probe: 2, y: 0.8 },
    here: () => { const { seen, posterior, prior } = nextOf(); return ["at your point the first component's std is ", num("pit-std", Math.sqrt(seen[0].variance)), ", a new one's ", num("pit-std-new", Math.sqrt(seen.at(-1).variance)), "; seeing it moves the first one's share from ", num("pit-prior", prior[0]), " to ", num("pit-posterior", posterior[0]), "."]; },
    cure: ["a length scale as large as the functions are smooth; where it is unknown, more points before trusting a new component."] },
  { wrong: "A point that sat down stays, right or wrong.", show: { ...START, tasks: 3, stay: 1, seen: 60, beta: 0 },
    here: () => ["the least sure of the points seen went to its component with a share of ", num("pit-sure", Math.min(...found.steps.map(({ posterior, chosen }) => posterior[chosen]))), ", and counts there as a whole: ", components("hard"), "."],
    cure: ["keep shares instead of choices: the paper updates by sequential variational inference."] },
]);
document.getElementById("foot").append(text("The stream is made up: three functions of x with noise. toys.mixture is the same in Python; a test compares the numbers."));
begin();
