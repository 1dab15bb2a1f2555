// GRPO, step by step: DeepSeekMath, arXiv 2402.03300.

settings({
  rewards: [1, 0, 0, 1, 0, 0.5, 0, 0], baseline: "group_mean", scaling: "population", p: 0.25, size: 8,
  loss: "grpo", low: 0.2, high: 0.2, dual: 0, a: 1, ratio: 1, kl: "k3", weighting: "live", d: 0.5, q: 0.5,
  lengths: [4, 12, 30], averaging: "grpo", broken: "none", beta: 0.3, seed: 0, rate: 1,
  win: 1, lose: 0.2, b: 0.4, b_extra: 0, p_old: 0.4, num_groups: 300, by_std: false, with_rho: true,
});

const options = () => ({ baseline: view.baseline, scaling: view.scaling });
const group = () => groupAdvantages([view.rewards], options())[0];
const PRESETS = [["One success", [1, 0, 0, 0, 0, 0, 0, 0]], ["Half succeed", [1, 1, 1, 1, 0, 0, 0, 0]], ["All alike", [1, 1, 1, 1, 1, 1, 1, 1]], ["Shades", [0.2, 0.35, 0.4, 0.5, 0.55, 0.6, 0.8, 0.9]]];

head("GRPO, step by step", "Play one prompt several times; what did better than its siblings becomes likelier. The group takes the place of PPO's critic.",
  note(source("DeepSeekMath, arXiv 2402.03300", "https://arxiv.org/abs/2402.03300"), ". Drag what is round, or move it by the arrow keys; the address keeps all settings."));

// 1. The group
const setReward = (at, value) => set({ rewards: view.rewards.map((own, i) => (i === at ? rounded(clamp(value, 0, 1), 0.01) : own)) });
const withSize = (count) => Array.from({ length: count }, (_, at) => view.rewards[at] ?? 0);
section("group", "1. A group and its advantages", [
  text("G replies to one prompt get G rewards. The advantage of each is its distance from a baseline, here from their mean, over their standard deviation:"),
  formula("Aᵢ = (rᵢ − mean r) / (std r + 10⁻⁸)"),
  controls(
    h("div", { class: "row" }, PRESETS.map(([words, rewards]) => press(words, () => set({ rewards: [...rewards] })))),
    h("div", { class: "row" }, press("One reply more", () => set({ rewards: withSize(Math.min(16, view.rewards.length + 1)) }), { "data-act": "more" }), press("One less", () => set({ rewards: withSize(Math.max(2, view.rewards.length - 1)) }), { "data-act": "less" })),
    choice("baseline", "Baseline", BASELINE_NAMES.filter(([name]) => name !== "global_mean")),
    choice("scaling", "Divided by", SCALING_NAMES.filter(([name]) => name !== "batch"))),
  live(() => {
    const { expected, spread, advantages } = group(), G = view.rewards.length;
    return ["Mean reward ", num("mean", mean(view.rewards)), ", divided by ", num("spread", spread), ". The first reply's baseline is ", num("baseline", expected[0]), " and its advantage ", num("first", advantages[0]),
      ". The largest |A| is ", num("largest", Math.max(...advantages.map(Math.abs))), "; with the mean and std of G = ", num("G", G, 0), " replies it never passes √(G − 1) = ", num("bound", Math.sqrt(G - 1)), ". The advantages sum to ", num("total", sum(advantages)), "."];
  }),
  live(() => (spreadless() ? ["All rewards are alike: every advantage is exactly 0, and the group teaches nothing. (With a critic it would still be better or worse than expected.)"] : view.baseline === "leave_one_out" && view.scaling !== "none" ? ["Leave one out is there for an unbiased gradient; dividing it by a spread bends that again. The trainer refuses this pair."] : [""]), "p", { class: "aside" }),
], [
  figure("rewards", "Rewards of the group", {
    key: legend(["var(--new)", "reward (drag it)"], ["var(--c1)", "its baseline", "dashes"]),
    height: 230,
    draw: (width, height, grip) => {
      const G = view.rewards.length, { expected } = group();
      const frame = axes(width, height, { x: [0.4, G + 0.6], y: [-0.05, 1.05], across: "reply", up: "reward", xTicks: view.rewards.map((_, at) => at + 1), yTicks: [0, 0.25, 0.5, 0.75, 1] });
      const half = (frame.px(2) - frame.px(1)) * 0.46;
      return [frame.nodes, view.rewards.map((reward, at) => [
        s("path", { d: `M${place(frame.px(at + 1))},${place(frame.py(expected[at]))}V${place(frame.py(reward))}`, class: "line thin", style: `--own: ${reward >= expected[at] ? "var(--plus)" : "var(--minus)"}` }),
        line([[frame.px(at + 1) - half, frame.py(expected[at])], [frame.px(at + 1) + half, frame.py(expected[at])]], { class: "line dashed", style: "--own: var(--c1)" })]),
      view.rewards.map((reward, at) => grip(`reward-${at}`, frame.px(at + 1), frame.py(reward), { says: `Reward of reply ${at + 1}`, now: reward, low: 0, high: 1, value: number(reward), move: (_, y) => setReward(at, frame.toY(y)), keys: (dx, dy) => setReward(at, view.rewards[at] + 0.01 * (dy || dx)) }))];
    },
    says: () => `${view.rewards.length} rewards with mean ${number(mean(view.rewards))}.`,
    rows: () => [["reply", "reward", "baseline", "advantage"], ...view.rewards.map((reward, at) => [at + 1, reward, group().expected[at], group().advantages[at]])],
  }),
  figure("advantages", "Their advantages", {
    key: legend(["var(--plus)", "becomes likelier", "bar"], ["var(--minus)", "becomes less likely", "bar"]),
    height: 210,
    draw: (width, height) => {
      const { advantages } = group(), G = view.rewards.length, bound = Math.sqrt(G - 1), scaled = view.scaling !== "none";
      const top = Math.max(scaled ? bound : 1, ...advantages.map(Math.abs)) * 1.12;
      const frame = axes(width, height, { x: [0.4, G + 0.6], y: [-top, top], up: "advantage", xTicks: view.rewards.map((_, at) => at + 1), bottom: 22 });
      const wide = { ...frame, left: frame.px(0.5), right: frame.px(G + 0.5) };
      return [frame.nodes, bars(wide, advantages.map((value) => [value]), (i) => (advantages[i] >= 0 ? "var(--plus)" : "var(--minus)")),
        scaled ? [bound, -bound].map((edge) => [line([[frame.left, frame.py(edge)], [frame.right, frame.py(edge)]], { class: "line dashed thin", style: "--own: var(--soft)" }), label(frame.right - 4, frame.py(edge) + (edge > 0 ? -4 : 13), `${edge > 0 ? "" : "−"}√(G − 1)`, { "text-anchor": "end" })]) : null];
    },
    says: () => group().advantages.map((value) => number(value)).join(", "),
    rows: () => [["reply", "advantage"], ...group().advantages.map((value, at) => [at + 1, value])],
  }),
]);
function spreadless() {
  return ties(view.rewards);
}

// 2. What the baseline and the spread do to the gradient
const ESTIMATES = [["group mean", tint(0), { baseline: "group_mean", scaling: "none" }], ["leave one out", tint(2), { baseline: "leave_one_out", scaling: "none" }], ["group mean / std", tint(1), { baseline: "group_mean", scaling: "population" }]];
const relative = (p, choice_, size = view.size) => expectedGradient(p, size, choice_) / (p * (1 - p));
const curvesOf = cached((size) => ESTIMATES.map(([, , choice_]) => Array.from({ length: 49 }, (_, at) => relative((at + 1) / 50, choice_, size))));
section("bias", "2. What it does to the gradient", [
  text("Your own reward is in the mean that you are compared with. That shrinks the expected gradient by 1 − 1/G, everywhere alike: a smaller step, no other direction. Leave one out has no such factor."),
  text("Dividing by the standard deviation does change the direction: scenarios that nearly always fail, or nearly always succeed, have a small spread and are weighed up."),
  controls(slider("size", "Replies G", { min: 2, max: 32, step: 1 }), slider("p", "Chance of success", { min: 0.02, max: 0.98, step: 0.01 })),
  live(() => ["At a success rate of ", num("rate", view.p), " the expected gradient, over the true one, is ", num("shrunk", relative(view.p, ESTIMATES[0][2])), " with the group's mean (1 − 1/G = ", num("factor", 1 - 1 / view.size), "), ", num("loo", relative(view.p, ESTIMATES[1][2])), " with leave one out, and ", num("scaled", relative(view.p, ESTIMATES[2][2])), " once divided by the std."]),
  aside("Computed exactly, over every number of successes in a group. ", source("Dr. GRPO, arXiv 2503.20783", "https://arxiv.org/abs/2503.20783"), " leaves the std out for this reason; ", source("RLOO, arXiv 2402.14740", "https://arxiv.org/abs/2402.14740"), " leaves the own reward out."),
], [
  figure("bias", "Expected gradient over the true one", {
    key: legend(...ESTIMATES.map(([name, hue]) => [hue, name, "stroke"])),
    height: 300,
    draw: (width, height, grip) => {
      const lines = curvesOf(view.size);
      const frame = axes(width, height, { x: [0, 1], y: [0, Math.max(2.2, ...lines.flat()) * 1.04], across: "success rate of the scenario", up: "times the true gradient" });
      const at = relative(view.p, ESTIMATES[2][2]);
      const move = (p) => set({ p: rounded(clamp(p, 0.02, 0.98), 0.01) });
      return [frame.nodes, lines.map((values, i) => line(values.map((value, k) => [frame.px((k + 1) / 50), frame.py(value)]), { style: `--own: ${ESTIMATES[i][1]}` })),
        grip("p", frame.px(view.p), frame.py(at), { says: "Chance of success", now: view.p, low: 0.02, high: 0.98, value: `${number(view.p)}: ${number(at)} times the true gradient with std`, hue: tint(1), move: (x) => move(frame.toX(x)), keys: (dx, dy) => move(view.p + 0.01 * (dx || dy)) })];
    },
    says: () => ESTIMATES.map(([name, , choice_]) => `${name}: ${number(relative(view.p, choice_))}`).join(", "),
    rows: () => [["success rate", ...ESTIMATES.map(([name]) => name)], ...[0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95].map((p) => [p, ...ESTIMATES.map(([, , choice_]) => relative(p, choice_))])],
  }),
]);

// 3. Ratio and clip
const clipped = () => tokenLoss(view.loss, Math.log(0.5), view.ratio, view.a, { low: view.low, high: view.high, dual: view.dual || null });
section("clip", "3. The ratio and the clip", [
  text("A batch may be used for several optimiser steps. After the first one the policy is no longer the one that sampled, and each token is weighed by the ratio of the two. The clip takes the gradient away where a token has already moved far enough in the direction of its advantage:"),
  formula("−min( ρ A, clip(ρ, 1 − ε, 1 + ε) A )"),
  controls(dropdown("loss", "Loss", LOSS_NAMES.filter(([name]) => name !== "gspo")), slider("a", "Advantage", { min: -2, max: 2, step: 0.1 }), slider("ratio", "Ratio ρ", { min: 0.02, max: 2.4, step: 0.01 }), slider("low", "ε below", { min: 0.05, max: 0.9, step: 0.01 }), slider("high", "ε above", { min: 0.05, max: 1, step: 0.01 }), slider("dual", "Dual clip (0: none)", { min: 0, max: 3, step: 0.1, text: (value) => (value > 1 ? String(value) : "none") })),
  live(() => { const own = clipped(); return ["Loss ", num("token-loss", own.value), ", slope by the log-prob ", num("token-slope", own.slope), own.clipped ? `: clipped (${own.clipped}).` : ": not clipped."]; }),
  aside("The clip is one-sided: a token that moved the wrong way keeps its whole gradient. On the first pass ρ is 1 for all tokens and nothing is clipped. DAPO (", source("arXiv 2503.14476", "https://arxiv.org/abs/2503.14476"), ") sets ε above apart, .28, so that rare tokens can grow."),
], [lossFigure("loss", () => ({ loss: view.loss, low: view.low, high: view.high, dual: view.dual > 1 ? view.dual : null, advantage: view.a, ratio: view.ratio }), (ratio) => set({ ratio }))]);

// 4. KL
const KL_TERMS = [["k1", "none", "k1: the signed difference"], ["k2", "none", "k2"], ["k3", "none", "k3 (DeepSeekMath)"], ["k3", "live", "ρ·k3 (default here)"]];
const logit = (p) => Math.log(p / (1 - p));
const reverse = () => view.p * (1 - view.p) * (logit(view.p) - logit(view.q));
const forward = () => view.p - view.q;
section("kl", "4. Staying near the reference", [
  text("β times an estimate of KL(π", h("sub", {}, "θ"), " ‖ π", h("sub", {}, "ref"), ") is added to the loss. All three estimate the value; as a loss they pull in different directions."),
  controls(choice("kl", "Estimator", [["k1", "k1"], ["k2", "k2"], ["k3", "k3"]]), slider("d", "d at the token", { min: -2.5, max: 2.5, step: 0.01 }), slider("p", "Policy: p of token 1", { min: 0.02, max: 0.98, step: 0.01 }), slider("q", "Reference: p of token 1", { min: 0.02, max: 0.98, step: 0.01 })),
  live(() => ["At d = ", num("d", view.d), ": k1 ", num("k1", klToken(view.d, 0, "k1").value), ", k2 ", num("k2", klToken(view.d, 0, "k2").value), ", k3 ", num("k3", klToken(view.d, 0, "k3").value), ". For two tokens, p = ", num("policy", view.p), " against ", num("reference", view.q), ", the gradient of the reverse KL is ", num("reverse", reverse()), " and that of the forward KL ", num("forward", forward()), "."]),
  live(() => table("Expected gradient of each term as a loss", [["term", "expected gradient", "is that of"], ...KL_TERMS.map(([kind, weighting, words]) => { const value = expectedKlGradient(view.p, view.q, kind, weighting); return [words, num(`grad-${kind}-${weighting}`, value, 4), Math.abs(value) < 1e-12 && view.p !== view.q ? "nothing: zero" : Math.abs(value - reverse()) < 1e-9 ? "the reverse KL" : "the forward KL"]; })]), "div"),
  aside(source("Schulman 2020", "http://joschu.net/blog/kl-approx.html"), " names k1, k2 and k3; ", source("Tang & Munos, arXiv 2506.09477", "https://arxiv.org/abs/2506.09477"), " compare their gradients."),
], [klFigure("kl", () => ({ d: view.d, kl: view.kl }), (d) => set({ d }))]);

// 5. Averages
const AVERAGES = [["grpo", "conversation", "GRPO"], ["dapo", "token", "DAPO"], ["dr_grpo", "constant", "Dr. GRPO"]];
const shares = (loss) => {
  const N = sum(view.lengths), B = view.lengths.length;
  return view.lengths.map((count) => count * { trajectory: 1 / (B * count), token: 1 / N, constant: 1 / (B * 50) }[LOSSES[loss].averaging]);
};
section("average", "5. What a token weighs", [
  text("GRPO averages within each conversation first, so a token of a long reply weighs less: a long wrong reply is punished mildly per token. DAPO averages over all tokens; Dr. GRPO divides by a constant (50 tokens here)."),
  controls(choice("averaging", "Mean over", AVERAGES.map(([name, words]) => [name, words])), ...[0, 1, 2].map((at) => h("p", { class: "note" }, live(() => [`Reply ${at + 1}: `, num(`length-${at}`, view.lengths[at], 0), " tokens, each weighs ", num(`weight-${at}`, shares(view.averaging)[at] / view.lengths[at], 5), ", together ", num(`share-${at}`, shares(view.averaging)[at])], "span")))),
], [figure("average", "Weight of each reply and of its tokens", {
  height: 210,
  key: legend(["var(--new)", "drag the end of a reply"]),
  draw: (width, height, grip) => {
    const frame = axes(width, height, { x: [0, 50], y: [0, 3], across: "tokens of the reply", yTicks: [], left: 14 });
    const own = shares(view.averaging), most = Math.max(...own.map((value, at) => value / view.lengths[at]));
    return [frame.nodes, view.lengths.map((count, at) => {
      const y = frame.py(3 - at - 0.75), depth = own[at] / count / most;
      const move = (value) => set({ lengths: view.lengths.map((old, i) => (i === at ? clamp(Math.round(value), 1, 50) : old)) });
      return [Array.from({ length: count }, (_, k) => s("rect", { x: place(frame.px(k) + 0.5), y: place(y - 14), width: place(Math.max(1.5, frame.px(1) - frame.px(0) - 1.5)), height: 28, rx: 2, fill: "var(--new)", opacity: place(0.12 + 0.88 * depth) })),
        grip(`length-${at}`, frame.px(count), y, { says: `Tokens of reply ${at + 1}`, now: count, low: 1, high: 50, value: `${count} tokens, weight ${number(own[at])}`, move: (x) => move(frame.toX(x)), keys: (dx, dy) => move(view.lengths[at] + (dx || dy)) })];
    })];
  },
  says: () => shares(view.averaging).map((value, at) => `reply ${at + 1} weighs ${number(value)}`).join(", "),
  rows: () => [["reply", "tokens", ...AVERAGES.map(([, words]) => `mean over ${words}`)], ...view.lengths.map((count, at) => [at + 1, count, ...AVERAGES.map(([name]) => shares(name)[at])])],
})]);

// 6. The derivation, over a policy that says one of two replies: the first with probability p
const chance = (logit_) => 1 / (1 + Math.exp(-logit_));
/** The mean over replies drawn with probability `from` of value(first?) times the slope of the reply's log-prob. */
const meanSlope = (value, from = view.p) => from * value(true) * (1 - view.p) - (1 - from) * value(false) * view.p;
const paid = (first) => (first ? view.win : view.lose);
const steepness = () => slopeOf((at) => chance(at) * view.win + (1 - chance(at)) * view.lose, logit(view.p));
const ratioOf = (first) => (first ? view.p / view.p_old : (1 - view.p) / (1 - view.p_old));
const spreadOfOne = (baseline) => meanSlope((first) => (paid(first) - baseline) ** 2 * (first ? 1 - view.p : -view.p)) - steepness() ** 2;
/** KL to the reference by drawn replies: of each its term, or the term's slope, weighed by rho or not. */
const klTerms = (what) => (first) => { const [p, q, from] = first ? [view.p, view.q, view.p_old] : [1 - view.p, 1 - view.q, 1 - view.p_old]; return klToken(Math.log(p / q), Math.log(p / from), "k3", view.with_rho ? "live" : "none")[what]; };
const klOf = (p) => p * Math.log(p / view.q) + (1 - p) * Math.log((1 - p) / (1 - view.q));
/** Means of drawn groups of G rewards, each 1 with probability p, else 0. */
const drawMeans = cached((p, size, num_groups, seed) => {
  const draw = mulberry32(seed + 1);
  return Array.from({ length: num_groups }, () => { let wins = 0; for (let member = 0; member < size; member += 1) wins += draw() < p; return wins / size; });
});
const drawnMeans = () => drawMeans(view.p, view.size, view.num_groups, view.seed);
/** The variance of a group's mean, and the standard error of what so many groups show of it. */
function meanVariance() {
  const one = view.p * (1 - view.p), exact = one / view.size, fourth = (3 * one ** 2 + (one * (1 - 6 * one)) / view.size) / view.size ** 2;
  return { exact, error: Math.sqrt((fourth - (exact ** 2 * (view.num_groups - 3)) / (view.num_groups - 1)) / view.num_groups) };
}
/** The loss of the group of part 1, a token each, with every log-prob moved by `shift`; and the tokens' slopes. */
function groupLoss(shift = 0) {
  const { advantages } = group(), of = (value) => advantages.map(() => value), now = Math.log(0.5) + shift;
  return batchLoss({ lengths: of(1), logprobs: of(now), old: of(Math.log(0.5) - Math.log(view.ratio)), advantages, reference: of(Math.log(0.5) - view.d) }, { loss: "grpo", low: view.low, high: view.high, beta: view.beta });
}
const inwards = () => (view.ratio > 1 ? -1 : 1); // at the edge of the clip the slope is that of the side of 1
const P = () => slider("p", "p of reply 1", { min: 0.02, max: 0.98, step: 0.01 });
const PAY = () => [slider("win", "Reward of reply 1", { min: 0, max: 1, step: 0.05 }), slider("lose", "Reward of reply 2", { min: 0, max: 1, step: 0.05 })];
const SAMPLED = () => [slider("p_old", "p when it was sampled", { min: 0.02, max: 0.98, step: 0.01 }), tick("with_rho", "Weighed by ρ")];
derivation("6. The derivation, step by step", [text("From “make good replies likelier” to the loss above, one claim at a time. A policy says reply 1 with probability p, else reply 2. Move what a claim speaks of: both sides are computed anew, the left one by counting or by differences, the right one by the formula.")], [
  { claim: "The slope of the expected reward is a mean over replies, so sampled replies can estimate it.", shows: "∇ E[r] = E[ r ∇log π ]", knobs: [P(), ...PAY()],
    sides: () => ({ left: ["slope of E[r] by p's logit", steepness()], right: ["mean of r ∇log π", meanSlope(paid)] }) },
  { claim: "A baseline b that does not read the reply leaves the mean as it is; only the noise changes.", shows: "E[ (r − b) ∇log π ] = E[ r ∇log π ]", knobs: [slider("b", "Baseline b", { min: -1, max: 2, step: 0.05 }), slider("b_extra", "More at reply 1", { min: -1, max: 1, step: 0.05 }), P(), ...PAY()],
    sides: () => ({ left: ["with the baseline", meanSlope((first) => paid(first) - view.b - (first ? view.b_extra : 0))], right: ["without", meanSlope(paid)], otherwise: "the baseline reads the reply.", more: ["Variance of one reply's term: ", num("noise-with", spreadOfOne(view.b)), " with b, ", num("noise-without", spreadOfOne(0)), " without."] }) },
  { claim: "The group's mean does read the reply, whose own reward is one of the G, and leaves 1 − 1/G of the gradient.", shows: "E[ (r − mean r) ∇log π ] = (1 − 1/G) ∇ E[r]", knobs: [slider("size", "Replies G", { min: 2, max: 32, step: 1 }), P(), tick("by_std", "Divided by the std, too")],
    sides: () => ({ left: ["over every group of rewards 1 and 0", expectedGradient(view.p, view.size, { baseline: "group_mean", scaling: view.by_std ? "population" : "none" })], right: ["(1 − 1/G) p (1 − p)", (1 - 1 / view.size) * view.p * (1 - view.p)], otherwise: "by the std the factor depends on p, see part 2." }) },
  { claim: "As a baseline it is the truer the larger the group: the variance of its mean is σ²/G.", shows: "Var[ mean r ] = σ² / G,   here σ² = p (1 − p)", knobs: [slider("size", "Replies G", { min: 2, max: 32, step: 1 }), P(), slider("num_groups", "Groups drawn", { min: 10, max: 3000, step: 0.05, log: true, write: (value) => ({ num_groups: Math.round(value) }) }), slider("seed", "Seed", { min: 0, max: 20, step: 1 })],
    sides: () => ({ left: ["of the drawn means", deviation(drawnMeans(), 1) ** 2], right: ["σ² / G", meanVariance().exact], error: meanVariance().error, otherwise: "that is rare, but it happens: another seed, or more groups." }),
    figure: figure("means", "Means of the drawn groups", {
      height: 170, key: legend(["var(--new)", "groups drawn", "bar"], ["var(--c1)", "one σ/√G to each side", "dashes"]),
      draw: (width, height) => {
        const means = drawnMeans(), counts = Array.from({ length: view.size + 1 }, (_, wins) => means.filter((value) => Math.round(value * view.size) === wins).length / view.num_groups);
        const frame = axes(width, height, { x: [-0.5 / view.size, 1 + 0.5 / view.size], y: [0, Math.max(...counts) * 1.05], across: "mean reward of a group", up: "share of groups", xTicks: [0, 0.25, 0.5, 0.75, 1] });
        return [frame.nodes, bars(frame, counts.map((value) => [value]), ["var(--new)"], { gap: 0.1 }), [-1, 1].map((side) => { const at = frame.px(view.p + side * Math.sqrt(meanVariance().exact)); return at < frame.left || at > frame.right ? null : line([[at, frame.top], [at, frame.bottom]], { class: "line dashed", style: "--own: var(--c1)" }); })];
      },
      says: () => `${view.num_groups} groups of ${view.size}: their means have a standard deviation of ${number(deviation(drawnMeans(), 1))}, σ/√G is ${number(Math.sqrt(meanVariance().exact))}.`,
    }) },
  { claim: "Replies of an earlier policy can stand for those of now if each is weighed by the ratio of the two.", shows: "E_old[ ρ r ∇log π ] = ∇ E[r],   ρ = π / π_old", knobs: [P(), ...SAMPLED(), ...PAY()],
    sides: () => ({ left: ["mean over earlier replies", meanSlope((first) => (view.with_rho ? ratioOf(first) : 1) * paid(first), view.p_old)], right: ["slope of E[r] now", steepness()], otherwise: "without ρ it is no gradient of E[r] at all, unless the policy has not moved." }) },
  { claim: "Inside of the clip the loss has that slope, −ρA by the log-prob; beyond it, on the side of its advantage, none.", shows: "∂ −min( ρA, clip(ρ, 1 − ε, 1 + ε) A ) = −ρA, or 0 if A > 0, ρ > 1 + ε or A < 0, ρ < 1 − ε", knobs: [slider("ratio", "Ratio ρ", { min: 0.02, max: 2.4, step: 0.01 }), slider("a", "Advantage", { min: -2, max: 2, step: 0.1 }), slider("low", "ε below", { min: 0.05, max: 0.9, step: 0.01 }), slider("high", "ε above", { min: 0.05, max: 1, step: 0.01 })],
    sides: () => { const own = tokenLoss("grpo", 0, view.ratio, view.a, { low: view.low, high: view.high }); return { left: ["slope of the formula", slopeOf((shift) => { const moved = view.ratio * Math.exp(shift); return -Math.min(moved * view.a, clamp(moved, 1 - view.low, 1 + view.high) * view.a); }, 0, inwards())], right: ["the page's slope", own.slope], more: own.clipped ? [`Clipped (${own.clipped}): this token is done.`] : view.ratio === 1 ? ["On the first pass ρ is 1: what is left is −A, as in the first claims."] : null }; } },
  { claim: "k3 is never below 0, and its mean over sampled replies is the KL to the reference.", shows: "E_old[ ρ (e⁻ᵈ − 1 + d) ] = KL(π ‖ π_ref),   d = log π − log π_ref", knobs: [P(), slider("q", "p of the reference", { min: 0.02, max: 0.98, step: 0.01 }), ...SAMPLED()],
    sides: () => ({ left: ["mean of k3", view.p_old * klTerms("value")(true) + (1 - view.p_old) * klTerms("value")(false)], right: ["KL, summed", klOf(view.p)], otherwise: "the replies come from another policy and are not weighed." }) },
  { claim: "The gradient of ρ·k3 is that of the KL, whoever sampled; k3 alone has another one.", shows: "E_old[ ∇ ρ k3 ] = ∇ KL(π ‖ π_ref)", knobs: [P(), slider("q", "p of the reference", { min: 0.02, max: 0.98, step: 0.01 }), ...SAMPLED()],
    sides: () => ({ left: ["mean of the term's slope", meanSlope(klTerms("slope"), view.p_old)], right: ["slope of the KL", slopeOf((at) => klOf(chance(at)), logit(view.p))], otherwise: view.p_old === view.p ? "on-policy, k3 alone has the gradient p − q of the forward KL." : "k3 alone is weighed by nothing." }) },
  { claim: "So the loss of a group is the mean of both terms, and its slope the sum of the tokens' slopes: the update.", shows: "L = 1/G Σᵢ [ −min( ρAᵢ, clip(ρ) Aᵢ ) + β ρ k3 ]", knobs: [slider("ratio", "Ratio ρ", { min: 0.02, max: 2.4, step: 0.01 }), slider("beta", "β", { min: 0, max: 1, step: 0.01 }), slider("d", "d at the token", { min: -2.5, max: 2.5, step: 0.01 })],
    sides: () => ({ left: ["slope of L, all log-probs moved alike", slopeOf((shift) => groupLoss(shift).total, 0, inwards())], right: ["sum of the tokens' slopes", sum(groupLoss().slopes)], more: ["The rewards are those of part 1, a token each."] }) },
]);

// 7. Break it
const ARMS = [0, 0.2, 0.5, 1];
const BREAKS = [
  ["none", "As it should be", "The policy finds the best of four arms, and β holds it near its start."],
  ["reference ratio", "ρ against the reference", "The ratio is taken to the reference, not to the policy that sampled. Once a token is ε away from the reference its gradient is gone for good: learning stalls near the start. ρ must be 1 on the first pass."],
  ["signed kl", "Signed KL as the loss", "The mean of log π − log π of the reference, as a loss, has expected gradient 0 on-policy: β does nothing but add noise, and the KL runs away."],
  ["clipped advantage", "Clip the advantage", "max(A·NLL, clip(A, ±ε)·NLL) has no ratio: good replies are never held back, bad ones count ε at most."],
];
const trained = cached((broken, rate, seed, beta) => bandit(ARMS, { size: 8, steps: 60, passes: 2, rate, seed, beta, broken: broken === "none" ? null : broken, baseline: "group_mean", scaling: "population", loss: "grpo", low: 0.2, high: 0.2, kl: "k3" }));
const run = (broken) => trained(broken, view.rate, view.seed, view.beta);
const neutral = () => { const kept = group().advantages.filter((value) => Math.abs(value) >= 0.5); return kept.length ? mean(kept) : 0; };
section("break", "7. Break it yourself", [
  text("A policy over four arms with rewards 0, .2, .5 and 1 learns from groups of eight, two passes each. Press a button to plant one of the mistakes that GRPO code has been published with."),
  h("ul", { class: "breaks" }, BREAKS.map(([name, words, why]) => { const button = press(words, () => set({ broken: name }), { "data-break": name }); drawers.push(() => button.setAttribute("aria-pressed", String(view.broken === name))); return h("li", {}, button, h("span", {}, why)); })),
  controls(slider("beta", "β", { min: 0, max: 1, step: 0.01 }), slider("rate", "Learning rate", { min: 0.1, max: 3, step: 0.1 }), slider("seed", "Seed", { min: 0, max: 20, step: 1 })),
  live(() => { const end = run(view.broken).at(-1); return ["After 60 steps: expected reward ", num("end-reward", end.reward), ", KL to the start ", num("end-kl", end.kl), "."]; }),
], [
  ...[["reward", "Expected reward", [0, 1.02]], ["kl", "KL to the start", [0, 1.5]]].map(([what, words, range]) => figure(`break-${what}`, words, {
    height: 215,
    key: legend(["var(--soft)", "as it should be", "stroke"], ["var(--c1)", "with the mistake", "stroke"]),
    draw: (width, height) => {
      const frame = axes(width, height, { x: [0, 60], y: range, across: "step" });
      const curve = (name, hue) => line(run(name).map((own, at) => [frame.px(at), frame.py(own[what])]), { style: `--own: ${hue}` });
      return [frame.nodes, curve("none", "var(--soft)"), view.broken === "none" ? null : curve(view.broken, "var(--c1)")];
    },
    says: () => `At the end ${number(run("none").at(-1)[what])} as it should be, ${number(run(view.broken).at(-1)[what])} as chosen.`,
    rows: () => [["step", "as it should be", "as chosen"], ...[0, 5, 10, 20, 30, 40, 59].map((at) => [at, run("none")[at][what], run(view.broken)[at][what]])],
  })),
]);
// 8. Pitfalls
const mixed = () => 1 - view.p ** view.size - (1 - view.p) ** view.size;
pitfalls("8. Pitfalls", [
  { wrong: "Groups that are all alike teach nothing.", show: { rewards: [...PRESETS[2][1]], p: 0.95, size: 4 },
    here: () => ["the group of part 1 has a largest |A| of ", num("pit-largest", Math.max(...group().advantages.map(Math.abs))), ". At a success rate of ", num("pit-rate", view.p), " groups of ", num("pit-size", view.size, 0), " have both successes and failures in ", share("pit-mixed", mixed()), " of all cases."],
    cure: ["problems that are solved now and then, larger groups, ", h("code", {}, "max_resamples"), " or ", h("code", {}, "group_sizes: success"), "."] },
  { wrong: "A hair's breadth counts as much as success.", show: { rewards: [0.5, 0.5, 0.51, 0.5, 0.5, 0.5, 0.5, 0.5], scaling: "population" },
    here: () => ["rewards between ", num("pit-low", Math.min(...view.rewards)), " and ", num("pit-high", Math.max(...view.rewards)), " give a largest |A| of ", num("pit-hair", Math.max(...group().advantages.map(Math.abs))), ", divided by ", num("pit-spread", group().spread), "."],
    cure: [h("code", {}, "advantage_normalization: none"), " or ", h("code", {}, "batch"), ", and rewards without noise in the last digit."] },
  { wrong: "Clipping advantages at 3 does nothing in small groups.", show: { rewards: [...PRESETS[0][1]], baseline: "group_mean", scaling: "population" },
    here: () => ["the largest |A| is ", num("pit-now", Math.max(...group().advantages.map(Math.abs))), "; of ", num("pit-members", view.rewards.length, 0), " members none can pass √(G − 1) = ", num("pit-bound", Math.sqrt(view.rewards.length - 1)), "."],
    cure: ["leave it out below G = 11; bound the reward instead (", h("code", {}, "reward_clip"), ")."] },
  { wrong: "The loss says nothing about learning.", show: { ratio: 1, rewards: [...PRESETS[3][1]], scaling: "population", baseline: "group_mean" },
    here: () => ["at ρ = ", num("pit-ratio", view.ratio), " the group's policy loss is ", num("pit-loss", groupLoss().policy), " and the sum of |slopes| ", num("pit-slopes", sum(groupLoss().slopes.map(Math.abs))), ". On a first pass the loss is 0 whatever is learned, and the clip fraction, too."],
    cure: ["watch ", h("code", {}, "reward/mean"), " and held-out success; a clip fraction means something from the second pass on (", h("code", {}, "num_iterations"), " above 1, or stale conversations)."] },
  { wrong: "Long wrong replies are punished mildly.", show: { averaging: "grpo", lengths: [4, 12, 50] },
    here: () => ["a token of the longest reply of part 5 weighs ", num("pit-weight", Math.min(...shares(view.averaging).map((value, at) => value / view.lengths[at])) / Math.max(...shares(view.averaging).map((value, at) => value / view.lengths[at]))), " of one of the shortest."],
    cure: [h("code", {}, "loss_type: dr_grpo"), " with ", h("code", {}, "loss_length"), " near a full conversation, or ", h("code", {}, "dapo"), "."] },
  { wrong: "Leaving out “neutral” members bends the group.", show: { rewards: [...PRESETS[0][1]], scaling: "population", baseline: "group_mean" },
    here: () => ["without those of |A| < .5 the mean advantage is ", num("skipped", neutral()), " in place of 0; what is left out feels no KL either."],
    cure: [h("code", {}, "advantage_skip"), " stays 0, its default."] },
]);
document.getElementById("foot").append(text("Formulas and names are those of the trainer: stateset_agents/algorithms. Tests compare the arithmetic with Python's."));
begin();
