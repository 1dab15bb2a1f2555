// Gradient surgery: Yu et al., arXiv 2001.06782.

settings({ first: [1.6, 0.4], second: [-0.9, 0.9], surgery: true, adam: false, steps: 60, start: [2, 0.5], steep: 2, rate: 0.05, eta: 0.001, bend: 2, third: 200 });

const both = () => pcgrad([view.first, view.second]);
const size = (vector) => Math.sqrt(dot(vector, vector));
const cosine = () => { const all = size(view.first) * size(view.second); return all > 0 ? dot(view.first, view.second) / all : null; };
const HUES = [tint(0), tint(1)], SUM = tint(2);

head("Gradient surgery", "When two tasks pull a shared parameter in opposite directions, cut from each gradient the part that works against the other.",
  note(source("Yu et al., Gradient Surgery for Multi-Task Learning, arXiv 2001.06782", "https://arxiv.org/abs/2001.06782"), ". Drag the tips of the arrows, or move them by the arrow keys."));

const arrow = (frame, from, to, hue) => {
  const [x0, y0, x1, y1] = [frame.px(from[0]), frame.py(from[1]), frame.px(to[0]), frame.py(to[1])];
  const length = Math.hypot(x1 - x0, y1 - y0), [ux, uy] = length > 0 ? [(x1 - x0) / length, (y1 - y0) / length] : [0, 0];
  const [bx, by] = [x1 - 9 * ux, y1 - 9 * uy];
  return [line([[x0, y0], [bx, by]], { style: `--own: ${hue}; stroke-width: 2.5` }), length > 10 ? s("path", { d: `M${place(x1)},${place(y1)}L${place(bx - 5 * uy)},${place(by + 5 * ux)}L${place(bx + 5 * uy)},${place(by - 5 * ux)}Z`, fill: hue }) : null];
};
const bounded = (vector) => vector.map((value) => rounded(clamp(value, -2, 2), 0.01));

section("projection", "1. Two gradients", [
  text("Two tasks share a parameter vector. If the cosine of their gradients is negative they conflict: a step along one raises the other's loss. PCGrad projects each onto the normal plane of the other:"),
  formula("gᵢ ← gᵢ − (gᵢ·gⱼ / ‖gⱼ‖²) gⱼ   if gᵢ·gⱼ < 0"),
  controls(h("div", { class: "row" }, press("Conflict", () => set({ first: [1.6, 0.4], second: [-0.9, 0.9] })), press("Opposite", () => set({ first: [1.5, 0], second: [-0.8, 0] })), press("Agree", () => set({ first: [1.5, 0.3], second: [0.7, 1.1] })), press("One is large", () => set({ first: [2, 0.2], second: [-0.25, 0.3] })))),
  live(() => { const { projected, total } = both(); const plain = view.first.map((value, i) => value + view.second[i]); return ["Cosine ", num("cosine", cosine()), cosine() < 0 ? ": they conflict. " : ": no conflict, nothing is cut. ", "The first becomes (", num("first-x", projected[0][0]), ", ", num("first-y", projected[0][1]), "), the second (", num("second-x", projected[1][0]), ", ", num("second-y", projected[1][1]), "); their sum is (", num("total-x", total[0]), ", ", num("total-y", total[1]), ") in place of (", num("plain-x", plain[0]), ", ", num("plain-y", plain[1]), ")."]; }),
  live(() => { const { total } = both(), plain = view.first.map((value, i) => value + view.second[i]); return table("First-order change of each loss by a unit step along the sum", [["task", "plain sum", "PCGrad"], ...[view.first, view.second].map((own, i) => [`task ${i + 1}`, num(`plain-change-${i}`, -dot(own, plain)), num(`change-${i}`, -dot(own, total))])]); }, "div"),
  aside("With PCGrad neither loss rises to first order. With more than two tasks the others are taken in random order. Opposite gradients leave nothing: the sum is 0."),
], [figure("arrows", "Two gradients, projected, and their sum", {
  height: (width) => Math.min(460, width * 0.86),
  key: legend([HUES[0], "task 1", "stroke"], [HUES[1], "task 2", "stroke"], ["var(--soft)", "projected", "dashes"], [SUM, "PCGrad's sum", "stroke"], ["var(--zero)", "plain sum", "stroke"]),
  draw: (width, height, grip) => {
    const half = 2.3, wide = half * (width - 56) / (height - 56);
    const frame = axes(width, height, { x: [-wide, wide], y: [-half, half], bottom: 28 });
    const { projected, total } = both(), plain = view.first.map((value, i) => value + view.second[i]), zero = [0, 0];
    return [frame.nodes, arrow(frame, zero, plain, "var(--zero)"), arrow(frame, zero, total, SUM),
      projected.map((own, i) => [line([[frame.px(0), frame.py(0)], [frame.px(own[0]), frame.py(own[1])]], { class: "line dashed", style: `--own: ${HUES[i]}` }), s("circle", { cx: place(frame.px(own[0])), cy: place(frame.py(own[1])), r: 4, fill: "var(--card)", stroke: HUES[i], "stroke-width": 2 }),
        line([[frame.px([view.first, view.second][i][0]), frame.py([view.first, view.second][i][1])], [frame.px(own[0]), frame.py(own[1])]], { class: "line dashed thin", style: "--own: var(--zero)" })]),
      ["first", "second"].map((name, i) => [arrow(frame, zero, view[name], HUES[i]),
        grip(name, frame.px(view[name][0]), frame.py(view[name][1]), { says: `Gradient of task ${i + 1}`, now: view[name][0], low: -2, high: 2, value: `${view[name][0]}, ${view[name][1]}`, hue: HUES[i], move: (x, y) => set({ [name]: bounded([frame.toX(x), frame.toY(y)]) }), keys: (dx, dy) => set({ [name]: bounded([view[name][0] + 0.05 * dx, view[name][1] + 0.05 * dy]) }) })])];
  },
  says: () => `Cosine ${number(cosine())}; PCGrad's sum is ${both().total.map((value) => number(value)).join(", ")}.`,
  rows: () => [["vector", "x", "y"], ["task 1", ...view.first], ["task 2", ...view.second], ["task 1 projected", ...both().projected[0]], ["task 2 projected", ...both().projected[1]], ["PCGrad's sum", ...both().total]],
})]);

// 2. A landscape
const descent = (surgery) => surgeryDescent(view.start, { surgery, adam: view.adam, steps: view.steps, steep: view.steep, rate: view.rate });
section("landscape", "2. A ball on two tasks", [
  text("Task 1 is a valley, steep across and gentle along; task 2 has its minimum elsewhere. Where the two conflict the plain sum follows the larger gradient, and PCGrad takes only what costs neither. The ball starts where you drag it."),
  controls(tick("surgery", "With PCGrad"), tick("adam", "Adam, not plain gradient descent"), slider("steps", "Steps", { min: 0, max: 200, step: 1 }), slider("steep", "Steepness of task 1", { min: 1, max: 20, step: 0.5 }), slider("rate", "Learning rate", { min: 0.01, max: 0.2, step: 0.01 }),
    h("div", { class: "row" }, player(() => { if (view.steps >= 200) return false; set({ steps: view.steps + 4 }); return view.steps < 200; }, { label: "Roll", every: 90 }), press("Back to the start", () => set({ steps: 0 })))),
  live(() => { const own = descent(view.surgery).at(-1), other = descent(!view.surgery).at(-1); return ["After ", num("steps", view.steps, 0), " steps: loss of task 1 ", num("loss-1", own.losses[0]), ", of task 2 ", num("loss-2", own.losses[1]), ". ", view.surgery ? "Without" : "With", " PCGrad ", num("other-1", other.losses[0]), " and ", num("other-2", other.losses[1]), "."]; }),
  aside("Two parabolas, where PCGrad gains nothing: it may stop as soon as the gradients are opposite, since then neither task gains without the other losing (the paper proves that it ends there or at the optimum), while the sum goes on to a compromise. The paper's gains are with deep networks, where conflict, gradients of very different size and high curvature come together."),
], [figure("landscape", "Sum of the two losses, and the way down", {
  height: (width) => Math.min(400, width * 0.72),
  key: legend([tint(0), "with PCGrad", "stroke"], [tint(1), "without", "stroke"], ["var(--good)", "minimum of a task", "empty"]),
  draw: (width, height, grip) => {
    const frame = axes(width, height, { x: [-3, 3], y: [-2.2, 2.2], bottom: 28 });
    const cells = 36, rows = 26, tall = (frame.bottom - frame.top) / rows, wide = (frame.right - frame.left) / cells;
    const worst = 14;
    const ground = Array.from({ length: cells * rows }, (_, i) => { const [x, y] = [frame.left + (i % cells) * wide, frame.top + Math.floor(i / cells) * tall]; const total = sum(twoTasks([frame.toX(x + wide / 2), frame.toY(y + tall / 2)], view.steep).losses); return s("rect", { x: Math.floor(x), y: Math.floor(y), width: Math.floor(x + wide) - Math.floor(x), height: Math.floor(y + tall) - Math.floor(y), "shape-rendering": "crispEdges", fill: "var(--ink)", opacity: place(0.22 * Math.min(1, Math.log1p(total) / Math.log1p(worst * view.steep))) }); });
    const way = (surgery) => descent(surgery).map(({ at }) => [frame.px(clamp(at[0], -3, 3)), frame.py(clamp(at[1], -2.2, 2.2))]);
    const move = (at) => set({ start: [rounded(clamp(at[0], -2.8, 2.8), 0.01), rounded(clamp(at[1], -2, 2), 0.01)] });
    const ball = way(view.surgery).at(-1);
    return [ground, frame.nodes, [[1, 0], [-1, -1]].map(([x, y], i) => [s("circle", { cx: place(frame.px(x)), cy: place(frame.py(y)), r: 5, fill: "none", stroke: "var(--good)", "stroke-width": 2 }), label(frame.px(x) + 9, frame.py(y) + 4, `task ${i + 1}`, { class: "strong" })]),
      view.steps ? [line(way(false), { style: `--own: ${tint(1)}` }), line(way(true), { style: `--own: ${tint(0)}` })] : null,
      s("circle", { cx: place(ball[0]), cy: place(ball[1]), r: 6, fill: view.surgery ? tint(0) : tint(1), stroke: "var(--card)", "stroke-width": 2 }),
      grip("start", frame.px(view.start[0]), frame.py(view.start[1]), { says: "Start of the ball", now: view.start[0], low: -2.8, high: 2.8, value: `${view.start[0]}, ${view.start[1]}`, hue: "var(--ink)", move: (x, y) => move([frame.toX(x), frame.toY(y)]), keys: (dx, dy) => move([view.start[0] + 0.05 * dx, view.start[1] + 0.05 * dy]) })];
  },
  says: () => `With PCGrad the ball ends at ${descent(true).at(-1).at.map((value) => number(value)).join(", ")}, without at ${descent(false).at(-1).at.map((value) => number(value)).join(", ")}.`,
  rows: () => [["step", "with: task 1", "task 2", "without: task 1", "task 2"], ...[0, 5, 10, 20, 40, 80, 120, 200].filter((at) => at <= view.steps).map((at) => [at, ...descent(true)[at].losses, ...descent(false)[at].losses])],
}), figure("losses", "Losses of both tasks over the steps", {
  height: 190, key: legend([tint(0), "with PCGrad", "stroke"], [tint(1), "without", "stroke"]),
  draw: (width, height) => {
    const ways = [descent(true), descent(false)], top = Math.max(0.1, ...ways.flatMap((way) => way.map(({ losses }) => sum(losses)))) * 1.05;
    const frame = axes(width, height, { x: [0, Math.max(1, view.steps)], y: [0, top], across: "step", up: "loss: sum of both (whole), task 2 (dashed)" });
    return [frame.nodes, ways.map((way, i) => [line(way.map(({ losses }, at) => [frame.px(at), frame.py(sum(losses))]), { style: `--own: ${tint(i)}` }), line(way.map(({ losses }, at) => [frame.px(at), frame.py(losses[1])]), { class: "line dashed", style: `--own: ${tint(i)}` })])];
  },
  says: () => `Sum with PCGrad ${number(sum(descent(true).at(-1).losses))}, without ${number(sum(descent(false).at(-1).losses))}.`,
})]);
// 3. The derivation, over the two arrows of part 1; the knobs turn and stretch them
const degrees = (vector) => (Math.atan2(vector[1], vector[0]) * 180) / Math.PI;
const polar = (length, angle) => [length * Math.cos((angle * Math.PI) / 180), length * Math.sin((angle * Math.PI) / 180)].map((value) => rounded(value, 0.0001));
const between = () => { const apart = Math.abs(degrees(view.second) - degrees(view.first)) % 360; return Math.min(apart, 360 - apart); };
const KNOBS = () => [
  slider("angle", "Angle between them", { min: 0, max: 180, step: 1, text: (value) => `${Math.round(value)}°`, read: between, write: (angle) => ({ second: polar(size(view.second) || 1, degrees(view.first) + angle) }) }),
  ...[["first", "Length of g₁"], ["second", "Length of g₂"]].map(([name, words]) => slider(`length-${name}`, words, { min: 0.1, max: 2, step: 0.05, text: (value) => String(rounded(value, 0.01)), read: () => size(view[name]), write: (length) => ({ [name]: polar(length, degrees(view[name])) }) })),
];
const along = () => dot(view.first, view.second);
const conflict = () => along() < 0;
const plainSum = () => view.first.map((value, i) => value + view.second[i]);
/** What is left of the square of g1's length at right angles to g2, in a conflict. */
const across = () => dot(view.first, view.first) * (conflict() ? 1 - cosine() ** 2 : 1);
/** A loss with gradient g1 at 0, and curvature alike in all directions. */
const bowl = (at) => dot(view.first, at) + (view.bend / 2) * dot(at, at);
/** The cosine of PCGrad's sum and the plain one, by the vectors and by the formula; null where one of them is 0. */
function kept() {
  const { total } = both(), plain = plainSum(), lengths = size(total) * size(plain), [a, b] = [dot(view.first, view.first), dot(view.second, view.second)];
  if (lengths < 1e-9) return [null, null];
  return [dot(total, plain) / lengths, conflict() ? (Math.sqrt(1 - cosine() ** 2) * (a + b)) / Math.sqrt((a + b) ** 2 - 4 * along() ** 2) : 1];
}
derivation("3. The derivation, step by step", [text("From two losses that share parameters to the projection, one claim at a time. φ is the angle between the gradients; the left side is computed from vectors, the right one by the formula.")], [
  { claim: "A small step against the other's gradient changes my loss by −g₁·g₂ times its size: in a conflict it rises.", shows: "( L₁(θ − η g₂) − L₁(θ) ) / η → −g₁·g₂", knobs: [slider("eta", "Step size η", { min: 0.001, max: 1, step: 0.05, log: true }), slider("bend", "Curvature of L₁", { min: 0, max: 5, step: 0.1 }), ...KNOBS()],
    sides: () => ({ left: ["change of L₁ by the step, over η", (bowl(view.second.map((value) => -view.eta * value)) - bowl([0, 0])) / view.eta], right: ["−g₁·g₂", -along()], within: 0.01, scale: size(view.first) * size(view.second), otherwise: "the step is too long for its curvature." }) },
  { claim: "The projection takes just that away: what is left of g₁ is at right angles to g₂.", shows: "g₁^PC·g₂ = max(0, g₁·g₂)", knobs: KNOBS(),
    sides: () => ({ left: ["projected g₁, times g₂", dot(both().projected[0], view.second)], right: ["max(0, g₁·g₂)", Math.max(0, along())] }) },
  { claim: "It shortens g₁ by sin φ: the nearer to opposite, the less is left.", shows: "‖g₁^PC‖² = ‖g₁‖² sin² φ   if cos φ < 0", knobs: KNOBS(),
    sides: () => ({ left: ["squared length of the projected g₁", dot(both().projected[0], both().projected[0])], right: [conflict() ? "‖g₁‖² sin² φ" : "‖g₁‖²: no conflict", across()] }) },
  { claim: "So a small step along the sum of both projections raises neither loss.", shows: "g₁·(g₁^PC + g₂^PC) = ‖g₁‖² sin² φ ≥ 0", knobs: KNOBS(),
    sides: () => ({ left: ["g₁ times PCGrad's sum", dot(view.first, both().total)], right: [conflict() ? "‖g₁‖² sin² φ" : "‖g₁‖² + g₁·g₂", conflict() ? across() : dot(view.first, view.first) + along()], more: ["The plain sum would have ", num("plain-rate", dot(view.first, plainSum())), " for task 1 and ", num("plain-rate-2", dot(view.second, plainSum())), " for task 2; below 0 a loss rises."] }) },
  { claim: "The sum pays with direction: of the steepest way down both losses together the share cos ψ is kept, all of it where both gradients are of one length.", shows: "cos ψ = sin φ (‖g₁‖² + ‖g₂‖²) / √( (‖g₁‖² + ‖g₂‖²)² − 4 (g₁·g₂)² )", knobs: KNOBS(),
    sides: () => ({ left: ["cosine of both sums", kept()[0]], right: ["by the formula", kept()[1]], otherwise: "one of the sums is 0." }) },
]);

// 4. Pitfalls
const third = () => polar(1, view.third);
const orders = () => [[1, 2], [2, 1]].map((order) => pcgrad([view.first, view.second, third()], order).projected[0]);
const signs = () => both().total.map((value) => Math.sign(rounded(value, 1e-6)));
pitfalls("4. Pitfalls", [
  { wrong: "Opposite gradients stop the training.", show: { first: [1.5, 0], second: [-0.8, 0] },
    here: () => ["PCGrad's sum has length ", num("pit-total", size(both().total)), ", the plain sum ", num("pit-plain", size(plainSum())), "."],
    cure: ["watch the length of the sum; where it nears 0 while both losses are high, only weighing the tasks goes on."] },
  { wrong: "A large gradient stays large.", show: { first: [2, 0.2], second: [-0.25, 0.3] },
    here: () => ["before, g₁ is ", num("pit-before", size(view.first) / (size(view.second) || NaN)), " times as long as g₂, and ", num("pit-after", size(both().projected[0]) / (size(both().projected[1]) || NaN)), " times after: both shrink by sin φ."],
    cure: ["bring the tasks' rewards and values to one scale first (docs/grouping.md: advantages and critic by task)."] },
  { wrong: "Adam steps in another direction, which may raise a loss.", show: { first: [2, 0.4], second: [-1, 0.1] },
    here: () => ["along PCGrad's sum the losses change by ", num("pit-sum-1", -dot(view.first, both().total)), " and ", num("pit-sum-2", -dot(view.second, both().total)), "; along Adam's first step, the signs of that sum, by ", num("pit-adam-1", -dot(view.first, signs())), " and ", num("pit-adam-2", -dot(view.second, signs())), ". Above 0 a loss rises."],
    cure: ["count on less conflict, not on none; compare with plain Adam on your tasks."] },
  { wrong: "With three tasks the order decides, and a conflict may come back.", show: { first: [1.6, 0.4], second: [-0.9, 0.9], third: 250 },
    here: () => { const [one, other] = orders(); return ["cut by g₂ and then by a third gradient at ", num("pit-third", view.third, 0), "°, g₁ is (", num("pit-order-x", one[0]), ", ", num("pit-order-y", one[1]), "), the other way round (", num("pit-other-x", other[0]), ", ", num("pit-other-y", other[1]), "); with g₂ the first still has ", num("pit-again", dot(one, view.second)), "."]; }, knobs: slider("third", "Third gradient", { min: 0, max: 360, step: 5, text: (value) => `${value}°` }),
    cure: ["take the others in a new random order each time, as the paper does."] },
  { wrong: "Often there is no conflict to cut.", show: { first: [1.5, 0], second: [-0.075, 1.5] },
    here: () => ["at a cosine of ", num("pit-cosine", cosine()), " PCGrad takes ", share("pit-taken", conflict() ? 1 - Math.sqrt(1 - cosine() ** 2) : 0), " of g₁'s length. Our mix of CartPole and Acrobot has cosines of −.02 to .05 (docs/evidence/ppo-and-parts.md)."],
    cure: ["measure before you cut: ", h("code", {}, "gradient_cosines_every"), " writes them to the metrics, and tasks.html shows them. The trainer has no PCGrad."] },
]);
document.getElementById("foot").append(text("The projection is gradient surgery's algorithm 1 (toys.pcgrad in Python). A test compares the numbers."));
begin();
