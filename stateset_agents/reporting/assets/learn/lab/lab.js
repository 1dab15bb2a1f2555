// GRPO on a run: what other settings would have done with its recorded rewards and log-probs.

const own = data.settings;
const told = own.told;
settings({
  step: data.steps.length - 1, group: 0, baseline: own.baseline, scaling: own.scaling, loss: own.loss, low: own.low, high: own.high, dual: own.dual ?? 0,
  beta: own.beta, kl: own.kl, source: data.steps.some(isRecorded) ? "recorded" : "assumed", ratio: 1, moved: "alike", d: 0, member: 0, token: 0,
});
/** Did the run record the learner's log-probs before its last pass over this step? */
function isRecorded(step) {
  return step.groups.some((group) => group.members.some(({ learner_logprobs: learner }) => learner));
}

const at = () => data.steps[clamp(view.step, 0, data.steps.length - 1)];
const groupAt = () => at().groups[clamp(view.group, 0, at().groups.length - 1)];
const held = (reward) => (reward === null || told.reward_clip === undefined ? reward : clamp(reward, -told.reward_clip, told.reward_clip));
const rewardsOf = (step) => step.groups.map((group) => group.members.map(({ reward }) => held(reward)));
const spreadOut = (runs) => runs.flatMap(([value, count]) => Array(count).fill(value));

/** Of all groups of a step, under the settings of the page or of the run. */
function advantagesOf(step, chosen) {
  const clip = chosen.scaling === "none" ? null : (told.advantage_clip ?? null);
  return groupAdvantages(rewardsOf(step), { baseline: chosen.baseline, scaling: chosen.scaling, clip });
}

/** The step's loss with each token's slope: `chosen` settings, ratios as recorded, and a ratio and a distance that stand in for what was not. */
function lossOf(step, chosen, { source, ratio, moved, d }) {
  const credit = advantagesOf(step, chosen);
  const batch = { lengths: [], logprobs: [], old: [], advantages: [], reference: chosen.beta > 0 ? [] : null };
  step.groups.forEach((group, g) => group.members.forEach((member, m) => {
    const advantage = credit[g].advantages[m];
    if (advantage === null) return;
    batch.lengths.push(member.ids.length);
    const known = source === "recorded" && member.learner_logprobs;
    const shift = Math.log(ratio) * (moved === "alike" ? 1 : Math.sign(advantage));
    member.logprobs.forEach((logprob, k) => {
      const live = known ? member.learner_logprobs[k] : logprob + shift;
      batch.logprobs.push(live);
      batch.old.push(known ? member.old_logprobs[k] : logprob);
      batch.advantages.push(advantage);
      batch.reference?.push(live - d);
    });
  }));
  const result = batchLoss(batch, { ...chosen, dual: chosen.dual > 1 ? chosen.dual : null, length: own.length });
  let next = 0;
  const tokens = step.groups.map((group, g) => group.members.map((member, m) => {
    if (credit[g].advantages[m] === null) return null;
    const from = next;
    next += member.ids.length;
    return { slopes: result.slopes.slice(from, next), clipped: result.clipped.slice(from, next), ratios: result.ratios.slice(from, next) };
  }));
  return { ...result, credit, tokens };
}

let known = null, now = null, then = null;
/** The step under the page's settings (`now`) and under the run's own (`then`), at its recorded ratios or else on its first pass. */
function compute() {
  const key = JSON.stringify(view);
  if (key === known) return;
  known = key;
  then = lossOf(at(), own, { source: "recorded", ratio: 1, moved: "alike", d: 0 });
  now = lossOf(at(), view, view);
}
const changedToken = (g, m, k) => Math.abs(now.tokens[g][m].slopes[k] - then.tokens[g][m].slopes[k]) > 1e-12 + 1e-9 * Math.abs(then.tokens[g][m].slopes[k]);
const each = (visit) => at().groups.forEach((group, g) => group.members.forEach((member, m) => now.tokens[g][m] && member.ids.forEach((_, k) => visit(g, m, k))));
function counts() {
  const found = { all: 0, changed: 0, turned: 0, silent: 0, clipped: 0 };
  each((g, m, k) => {
    const [one, other] = [now.tokens[g][m].slopes[k], then.tokens[g][m].slopes[k]];
    found.all += 1;
    found.changed += changedToken(g, m, k) ? 1 : 0;
    found.turned += one * other < 0 ? 1 : 0;
    found.silent += one === 0 ? 1 : 0;
    found.clipped += now.tokens[g][m].clipped[k] ? 1 : 0;
  });
  return found;
}
drawers.push(compute);

/** The largest difference between recorded advantages and those computed here by the run's own settings; null if none. */
function difference() {
  const found = [];
  advantagesOf(at(), own).forEach(({ advantages }, g) => advantages.forEach((advantage, m) => {
    const recorded = at().groups[g].members[m].advantages;
    if (recorded && advantage !== null) found.push(...recorded.map(([value]) => Math.abs(value - advantage)));
  }));
  return found.length ? Math.max(...found) : null;
}

head(`GRPO on ${data.run}`, "This run's rewards and log-probs, as they were recorded, under settings of your choice: whose gradient changes?",
  note(`${plural(data.steps.length, "step")} of ${data.total_steps} are in this page. ${Object.entries(told).map(([name, value]) => `${name} ${value}`).join(", ")}. `, source("GRPO: arXiv 2402.03300", "https://arxiv.org/abs/2402.03300")));

const stepName = () => `${at().step}`;
section("advantages", "1. Who is pushed which way", [
  text("A step of the run, and one of its groups. Each reply's reward is compared with a baseline and divided by a spread."),
  controls(
    slider("step", "Step", { min: 0, max: data.steps.length - 1, step: 1, text: stepName }),
    dropdown("group", "Group", () => at().groups.map((group, g) => [g, `${g + 1}: ${group.family} ${group.scenario} (${group.members.length})`])),
    choice("baseline", "Baseline", BASELINE_NAMES), choice("scaling", "Divided by", SCALING_NAMES),
    h("div", { class: "row" }, press("The run's own settings", () => set({ baseline: own.baseline, scaling: own.scaling, loss: own.loss, low: own.low, high: own.high, dual: own.dual ?? 0, beta: own.beta, kl: own.kl, source: standard.source, ratio: 1, moved: "alike", d: 0 })))),
  live(() => {
    const credit = now.credit[groupIndex()], known_ = credit.advantages.filter((value) => value !== null);
    const tied = at().groups.filter((group) => { const scored = group.members.map(({ reward }) => held(reward)).filter((reward) => reward !== null); return scored.length && ties(scored); }).length;
    return ["Baseline ", num("baseline", credit.expected.find((value) => value !== null) ?? null), ", spread ", num("spread", credit.spread), ", largest |A| ", num("largest", known_.length ? Math.max(...known_.map(Math.abs)) : null), ". In this step ", num("tied", tied, 0), " of ", num("groups", at().groups.length, 0), " groups tie, and compared with themselves teach nothing."];
  }),
  live(() => {
    if ((told.advantage_estimator ?? "group") !== "group") return [`The run's credit is by ${told.advantage_estimator}, which this page does not compute: it compares whole conversations. Recorded advantages stand beside its own.`];
    const off = difference();
    return off === null ? ["The run recorded no advantages for this step."] : ["With the run's own settings this page gives the recorded advantages: largest difference ", num("difference", off, 7), " (they are recorded with six decimals)."];
  }, "p", { class: "aside" }),
], [
  figure("rewards", "Rewards and baselines", {
    height: 210, key: legend(["var(--new)", "reward"], ["var(--c1)", "its baseline", "dashes"]),
    draw: (width, height) => {
      const rewards = rewardsOf(at())[groupIndex()], { expected } = now.credit[groupIndex()];
      const all = [...rewards, ...expected].filter((value) => value !== null), low = Math.min(0, ...all), high = Math.max(1, ...all);
      const frame = axes(width, height, { x: [-0.6, rewards.length - 0.4], y: [low - 0.06 * (high - low), high + 0.06 * (high - low)], across: "member of the group", up: "reward", xTicks: rewards.map((_, i) => i) });
      const half = 0.4 * (frame.px(2) - frame.px(1));
      return [frame.nodes, rewards.map((reward, i) => (reward === null ? label(frame.px(i), frame.bottom - 4, "unscored", { "text-anchor": "middle" }) : [
        s("path", { d: `M${place(frame.px(i))},${place(frame.py(expected[i]))}V${place(frame.py(reward))}`, class: "line thin", style: `--own: ${reward >= expected[i] ? "var(--plus)" : "var(--minus)"}` }),
        line([[frame.px(i) - half, frame.py(expected[i])], [frame.px(i) + half, frame.py(expected[i])]], { class: "line dashed", style: "--own: var(--c1)" }),
        s("circle", { cx: place(frame.px(i)), cy: place(frame.py(reward)), r: 5.5, fill: "var(--new)" }, tip(`member ${i}: ${number(reward)}`))]))];
    },
    says: () => `Rewards ${rewardsOf(at())[groupIndex()].map((value) => number(value)).join(", ")}.`,
    rows: () => [["member", "reward", "baseline", "advantage now", "recorded"], ...groupAt().members.map((member, m) => [m, member.reward, now.credit[groupIndex()].expected[m], now.credit[groupIndex()].advantages[m], member.advantages?.[0]?.[0] ?? null])],
  }),
  figure("advantages", "Advantages: recorded, and now", {
    height: 210, key: legend(["var(--zero)", "recorded (first token)", "bar"], ["var(--new)", "now", "bar"]),
    draw: (width, height) => {
      const values = groupAt().members.map((member, m) => [member.advantages?.[0]?.[0] ?? null, now.credit[groupIndex()].advantages[m]]);
      const top = Math.max(1, ...values.flat().map((value) => Math.abs(value ?? 0))) * 1.1;
      const frame = axes(width, height, { x: [0.5, values.length + 0.5], y: [-top, top], up: "advantage", xTicks: values.map((_, i) => i + 1), bottom: 24, formatX: (place) => String(place - 1) });
      return [frame.nodes, bars(frame, values, ["var(--zero)", "var(--new)"])];
    },
    says: () => `Now ${now.credit[groupIndex()].advantages.map((value) => number(value)).join(", ")}.`,
    rows: () => [["member", "recorded", "now"], ...groupAt().members.map((member, m) => [m, member.advantages?.[0]?.[0] ?? null, now.credit[groupIndex()].advantages[m]])],
  }),
]);
function groupIndex() {
  return clamp(view.group, 0, at().groups.length - 1);
}

const onePass = (told.num_iterations ?? 1) === 1 && !told.max_staleness;
/** Of this step, under the run's own settings: the recorded ratios, how many tokens the clip silenced, and who has none. */
function recordedRatios() {
  const found = { ratios: [], clipped: 0, without: 0 };
  at().groups.forEach((group, g) => group.members.forEach((member, m) => {
    if (!then.tokens[g][m]) return;
    if (!member.learner_logprobs) return void (found.without += 1);
    found.ratios.push(...member.learner_logprobs.map((logprob, k) => Math.exp(logRatio(logprob, member.old_logprobs[k]))));
    found.clipped += then.tokens[g][m].clipped.filter(Boolean).length;
  }));
  return found;
}
function ratioSaid() {
  const { ratios, clipped, without } = recordedRatios();
  return ["The run recorded the learner's log-probs before its last pass: over this step's ", num("ratio-tokens", ratios.length, 0), " tokens ρ is ", num("ratio-low", ratios.reduce((one, other) => Math.min(one, other))), " to ", num("ratio-high", ratios.reduce((one, other) => Math.max(one, other))), ", its mean ", num("ratio-mean", mean(ratios)), ", and its clip silenced ", num("ratio-clipped", clipped, 0), ".",
    without ? [" ", num("ratio-without", without, 0), ` of the conversations had no advantage and were not forwarded: for these ρ is the slider's.`] : []];
}
const notRecorded = onePass
  ? "The learner's log-probs were not recorded. With one pass on each batch they are those of the policy that sampled, but for rounding, so ρ was 1 and nothing was clipped. The slider asks what a later pass would do."
  : "The learner's log-probs before the last pass were not recorded (training.log_learner_logprobs does), so the ratio ρ of this run is not known. The slider stands in for it: it is an assumption, not a measurement.";
const unrecorded = live(() => (isRecorded(at()) ? [] : [notRecorded]), "p", { class: "warning" });
drawers.push(() => (unrecorded.hidden = isRecorded(at())));
const assumes = () => view.source === "assumed" || !isRecorded(at()) || recordedRatios().without > 0;
section("loss", "2. Whose gradient changes", [
  unrecorded,
  live(() => (isRecorded(at()) ? ratioSaid() : [])),
  text("The reference's log-probs were not recorded; a slider stands in for their distance."),
  controls(
    choice("source", "Ratio ρ", [["recorded", "as recorded"], ["assumed", "assumed"]], { when: () => isRecorded(at()) }),
    slider("ratio", "Ratio ρ (assumed)", { min: 0.4, max: 2.5, step: 0.002, log: true, text: (value) => String(Number(value.toFixed(3))), when: assumes }),
    choice("moved", "Tokens moved", [["alike", "all alike"], ["along", "with their advantage"]], { when: assumes }),
    dropdown("loss", "Loss", LOSS_NAMES), slider("low", "ε below", { min: 0.0001, max: 0.9, step: 0.01, log: false, text: (value) => String(value) }), slider("high", "ε above", { min: 0.0001, max: 1, step: 0.01, text: (value) => String(value) }),
    slider("dual", "Dual clip", { min: 0, max: 4, step: 0.1, text: (value) => (value > 1 ? String(value) : "none") }),
    slider("beta", "β", { min: 0, max: 0.5, step: 0.005 }), choice("kl", "KL estimator", [["k1", "ρ·k1"], ["k2", "ρ·k2"], ["k3", "ρ·k3"]], { when: () => view.beta > 0 }), slider("d", "d to the reference (assumed)", { min: -2, max: 2, step: 0.01, when: () => view.beta > 0 })),
  live(() => {
    const found = counts();
    return ["The gradient of ", num("changed", found.changed, 0), " of the step's ", num("tokens", found.all, 0), " tokens changes (", share("changed-share", found.all ? found.changed / found.all : null), "), ", num("turned", found.turned, 0), " turn around. ", num("silent", found.silent, 0), " have none now, ", num("clipped", found.clipped, 0), " by the clip. Loss ", num("loss", now.total, 5), " (policy ", num("policy-loss", now.policy, 5), ", KL ", num("kl-loss", now.kl, 5), "); sum of |slope| ", num("size", sum(now.slopes.map(Math.abs)), 5), ", under the run's own settings ", num("own-size", sum(then.slopes.map(Math.abs)), 5), "."];
  }),
], [
  lossFigure("loss", () => ({ loss: view.loss, low: view.low, high: view.high, dual: view.dual > 1 ? view.dual : null, advantage: chosenAdvantage(), ratio: chosenRatio() }), (ratio) => set({ source: "assumed", ratio: Number(clamp(turnedRound() ? 1 / ratio : ratio, 0.4, 2.5).toPrecision(4)) })),
  figure("sizes", "Gradient by group: sum of |slope|", {
    height: 220, key: legend(["var(--zero)", "the run's own settings", "bar"], ["var(--new)", "now", "bar"]),
    draw: (width, height) => {
      const values = groupSizes(), top = Math.max(1e-9, ...values.flat()) * 1.08;
      const frame = axes(width, height, { x: [0.5, values.length + 0.5], y: [0, top], across: "group", up: "sum of |slope|", left: 56, xTicks: values.map((_, i) => i + 1).filter((i) => values.length <= 20 || i % 5 === 0), format: (value) => number(value), formatX: String });
      return [frame.nodes, bars(frame, values, ["var(--zero)", "var(--new)"])];
    },
    says: () => `Group ${groupIndex() + 1}: ${number(groupSizes()[groupIndex()][1])}.`,
    rows: () => [["group", "run's own", "now"], ...groupSizes().map((row, i) => [i + 1, ...row])],
  }),
]);
function chosenAdvantage() {
  return now.credit[groupIndex()].advantages[clamp(view.member, 0, groupAt().members.length - 1)] ?? 0;
}
/** Of the chosen token; 1 where its member trains nothing. */
function chosenRatio() {
  const { k, tokens } = inspected();
  return tokens?.ratios[k] ?? 1;
}
/** Does the chosen member's ratio move the other way? */
function turnedRound() {
  return view.moved === "along" && chosenAdvantage() < 0;
}
function groupSizes() {
  const size = (tokens) => sum(tokens.filter(Boolean).flatMap(({ slopes }) => slopes.map(Math.abs)));
  return now.tokens.map((tokens, g) => [size(then.tokens[g]), size(tokens)]);
}

// 3. Tokens
const words = (id) => (data.texts[id] ?? `[${id}]`).replaceAll("\n", "↵").replace(/\p{C}/gu, "·");
function memberTokens(member, m) {
  const credit = now.tokens[groupIndex()][m];
  const most = Math.max(1e-12, ...now.tokens[groupIndex()].filter(Boolean).flatMap(({ slopes }) => slopes.map(Math.abs)));
  const verdict = h("h3", {}, "Member ", h("b", {}, String(m)), `: reward ${number(member.reward)}, advantage `, h("b", {}, number(now.credit[groupIndex()].advantages[m])), member.success === null ? "" : member.success ? ", succeeded" : ", failed");
  if (!credit) return h("div", { class: "member" }, verdict, note("Unscored: it trains nothing."));
  const ends = new Set(member.turns.map((_, i) => sum(member.turns.slice(0, i + 1))));
  return h("div", { class: "member" }, verdict, h("p", { class: "tokens" }, member.ids.map((id, k) => {
    const slope = credit.slopes[k];
    const kinds = ["k", slope < 0 ? "plus" : slope > 0 ? "minus" : "", changedToken(groupIndex(), m, k) ? "changed" : "", credit.clipped[k] ? "clipped" : "", m === view.member && k === view.token ? "here" : ""];
    return [h("span", { class: kinds.filter(Boolean).join(" "), style: `--w: ${Math.round(10 + 45 * Math.abs(slope) / most)}%`, "data-token": `${m}-${k}` }, words(id)), ends.has(k + 1) && k + 1 < member.ids.length ? h("span", { class: "gap" }, " ⏎ ") : null];
  })));
}
const inspected = () => {
  const m = clamp(view.member, 0, groupAt().members.length - 1), member = groupAt().members[m], k = clamp(view.token, 0, Math.max(0, member.ids.length - 1));
  return { m, k, member, tokens: now.tokens[groupIndex()][m], before: then.tokens[groupIndex()][m] };
};
const tokenList = live(() => groupAt().members.map(memberTokens), "div", { tabindex: "0", class: "token-list", role: "group", "aria-label": "Tokens of the group; the arrow keys go through them" });
const go = (m, k) => set({ member: m, token: k });
tokenList.addEventListener("click", (event) => {
  const hit = event.target.closest("[data-token]");
  if (hit) go(...hit.dataset.token.split("-").map(Number));
});
tokenList.addEventListener("keydown", (event) => {
  const { m, k, member } = inspected(), members = groupAt().members;
  const moves = { ArrowRight: [m, Math.min(member.ids.length - 1, k + 1)], ArrowLeft: [m, Math.max(0, k - 1)], ArrowDown: [Math.min(members.length - 1, m + 1), 0], ArrowUp: [Math.max(0, m - 1), 0] };
  if (!moves[event.key]) return;
  event.preventDefault();
  go(...moves[event.key]);
});
section("tokens", "3. Token by token", [
  text("What the agent sampled in this group. Blue becomes likelier, orange less likely, as deep as the gradient; underlined: changed against the run's own settings; struck out: silenced by the clip. Click a token, or go through them with the arrow keys."),
  live(() => {
    const { m, k, member, tokens, before } = inspected();
    if (!tokens) return ["This member is unscored."];
    return ["Member ", num("member", m, 0), ", token ", num("token", k, 0), " “", words(member.ids[k]), "”: log-prob ", num("logprob", member.logprobs[k], 6), ", slope ", num("slope", tokens.slopes[k], 6), ", under the run's own settings ", num("own-slope", before.slopes[k], 6), member.learner_logprobs ? [", recorded ρ ", num("recorded-ratio", Math.exp(logRatio(member.learner_logprobs[k], member.old_logprobs[k])), 6)] : [], tokens.clipped[k] ? ", clipped." : "."];
  }, "p", { class: "inspector", role: "status" }),
  tokenList,
]);
document.getElementById("foot").append(text("The slope is the derivative of the step's loss by that token's log-prob. Loss, clip, KL and averages are those of stateset_agents/algorithms; entropy, staleness weights and the critic are left out."));
begin();
