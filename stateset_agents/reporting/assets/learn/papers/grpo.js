// GRPO, step by step: DeepSeekMath, arXiv 2402.03300.

settings({
  rewards: [1, 0, 0, 1, 0, 0.5, 0, 0], baseline: "group_mean", scaling: "population", p: 0.25, size: 8,
  loss: "grpo", low: 0.2, high: 0.2, dual: 0, a: 1, ratio: 1, kl: "k3", weighting: "live", d: 0.5, q: 0.5,
  lengths: [4, 12, 30], averaging: "grpo", broken: "none", beta: 0.3, seed: 0, rate: 1,
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
const relative = (p, choice_) => expectedGradient(p, view.size, choice_) / (p * (1 - p));
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
      const xs = Array.from({ length: 49 }, (_, at) => (at + 1) / 50);
      const lines = ESTIMATES.map(([, , choice_]) => xs.map((p) => relative(p, choice_)));
      const frame = axes(width, height, { x: [0, 1], y: [0, Math.max(2.2, ...lines.flat()) * 1.04], across: "success rate of the scenario", up: "times the true gradient" });
      const at = relative(view.p, ESTIMATES[2][2]);
      const move = (p) => set({ p: rounded(clamp(p, 0.02, 0.98), 0.01) });
      return [frame.nodes, lines.map((values, i) => line(values.map((value, k) => [frame.px(xs[k]), frame.py(value)]), { style: `--own: ${ESTIMATES[i][1]}` })),
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

// 6. Break it
const ARMS = [0, 0.2, 0.5, 1];
const BREAKS = [
  ["none", "As it should be", "The policy finds the best of four arms, and β holds it near its start."],
  ["reference ratio", "ρ against the reference", "The ratio is taken to the reference, not to the policy that sampled. Once a token is ε away from the reference its gradient is gone for good: learning stalls near the start. ρ must be 1 on the first pass."],
  ["signed kl", "Signed KL as the loss", "The mean of log π − log π of the reference, as a loss, has expected gradient 0 on-policy: β does nothing but add noise, and the KL runs away."],
  ["clipped advantage", "Clip the advantage", "max(A·NLL, clip(A, ±ε)·NLL) has no ratio: good replies are never held back, bad ones count ε at most."],
];
const run = (broken) => bandit(ARMS, { size: 8, steps: 60, passes: 2, rate: view.rate, seed: view.seed, beta: view.beta, broken: broken === "none" ? null : broken, baseline: "group_mean", scaling: "population", loss: "grpo", low: 0.2, high: 0.2, kl: "k3" });
const skipped = () => { const kept = group().advantages.filter((value) => Math.abs(value) >= 0.5); return kept.length ? mean(kept) : 0; };
section("break", "6. Break it yourself", [
  text("A policy over four arms with rewards 0, .2, .5 and 1 learns from groups of eight, two passes each. Press a button to plant one of the mistakes that GRPO code has been published with."),
  h("ul", { class: "breaks" }, BREAKS.map(([name, words, why]) => { const button = press(words, () => set({ broken: name }), { "data-break": name }); drawers.push(() => button.setAttribute("aria-pressed", String(view.broken === name))); return h("li", {}, button, h("span", {}, why)); })),
  controls(slider("beta", "β", { min: 0, max: 1, step: 0.01 }), slider("rate", "Learning rate", { min: 0.1, max: 3, step: 0.1 }), slider("seed", "Seed", { min: 0, max: 20, step: 1 })),
  live(() => { const end = run(view.broken).at(-1); return ["After 60 steps: expected reward ", num("end-reward", end.reward), ", KL to the start ", num("end-kl", end.kl), "."]; }),
  live(() => ["Two more, on the group of part 1. Where all rewards are alike, the group teaches nothing (press “All alike”). Leaving out members with |A| < .5 as “neutral”: the mean advantage of the rest is ", num("skipped", skipped()), " in place of 0, and what is left out feels no KL either; the option is off by default."], "p", { class: "aside" }),
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
document.getElementById("foot").append(text("Formulas and names are those of the trainer: stateset_agents/algorithms. Tests compare the arithmetic with Python's."));
begin();
