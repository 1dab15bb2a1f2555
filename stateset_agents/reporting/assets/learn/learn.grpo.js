// Figures that GRPO's derivation and the page of one's own run share.

const LOSS_NAMES = Object.keys(LOSSES).map((name) => [name, name]);
const BASELINE_NAMES = [["group_mean", "group mean"], ["group_median", "median"], ["global_mean", "mean of the batch"], ["leave_one_out", "leave one out"]];
const SCALING_NAMES = [["population", "std"], ["sample", "sample std"], ["batch", "std of the batch"], ["none", "none"]];

/** The loss of one token over its ratio, with a grip at `ratio`; `options()` gives the loss, clip and advantage. */
function lossFigure(name, options, move) {
  const span = [0, 2.4];
  const at = (ratio) => {
    const { loss, low, high, dual, advantage, logprob = Math.log(0.5) } = options();
    return tokenLoss(loss, logprob, Math.max(ratio, 1e-9), advantage, { low, high, dual });
  };
  return figure(name, "The loss of one token over its ratio", {
    height: 280,
    key: legend(["var(--new)", "pulls", "stroke"], ["var(--zero)", "clipped: no gradient", "stroke"]),
    draw: (width, height, grip) => {
      const { low, high, advantage, loss, ratio } = options();
      const xs = Array.from({ length: 121 }, (_, i) => span[0] + (i / 120) * (span[1] - span[0]));
      const values = xs.map((x) => at(x).value), top = Math.max(0.5, ...values.map(Math.abs)) * 1.1;
      const frame = axes(width, height, { x: span, y: [-top, top], across: "ratio ρ of the policy to the one that sampled", up: "loss" });
      const point = (x) => [frame.px(x), frame.py(at(x).value)];
      const pieces = [];
      for (let i = 0; i + 1 < xs.length; i += 1) pieces.push(line([point(xs[i]), point(xs[i + 1])], { style: `--own: ${at((xs[i] + xs[i + 1]) / 2).clipped && !LOSSES[loss].above ? "var(--zero)" : "var(--new)"}; stroke-width: 2.75` }));
      const edges = LOSSES[loss].never ? [] : [LOSSES[loss].above ? null : 1 - low, 1 + high].filter((edge) => edge !== null && edge < span[1]);
      const shown = clamp(ratio, 0.02, span[1]);
      const own = at(ratio), reach = 0.22;
      return [frame.nodes,
        edges.map((edge) => s("path", { d: `M${place(frame.px(edge))},${frame.top}V${frame.bottom}`, class: "line dashed thin", style: "--own: var(--soft)" })),
        edges.map((edge) => label(frame.px(edge) + (edge < 1 ? -5 : 5), frame.top + 10, edge < 1 ? "1 − ε" : "1 + ε", { "text-anchor": edge < 1 ? "end" : "start" })), pieces,
        own.slope ? line([[frame.px(shown - reach), frame.py(own.value - (own.slope / ratio) * reach)], [frame.px(shown + reach), frame.py(own.value + (own.slope / ratio) * reach)]], { class: "line thin dashed", style: "--own: var(--ink)" }) : null,
        grip("ratio", frame.px(shown), frame.py(own.value), { says: "Ratio", now: ratio, low: 0.02, high: span[1], value: `${number(ratio)}, loss ${number(own.value)}, slope ${number(own.slope)}, advantage ${number(advantage)}`, move: (x) => move(rounded(clamp(frame.toX(x), 0.02, span[1]), 0.01)), keys: (dx, dy) => move(rounded(clamp(ratio + 0.01 * (dx || dy), 0.02, span[1]), 0.01)) })];
    },
    says: () => `At ratio ${number(options().ratio)} the loss is ${number(at(options().ratio).value)}, the gradient ${at(options().ratio).clipped ? "clipped" : "whole"}.`,
    rows: () => [["ratio", "loss", "slope by log-prob", "clipped"], ...[0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.2, 1.28, 1.5, 2, options().ratio].sort((a, b) => a - b).map((ratio) => [ratio, at(ratio).value, at(ratio).slope, at(ratio).clipped ?? "no"])],
  });
}

/** k1, k2 and k3 over the difference of log-probs, with a grip at `d`. */
function klFigure(name, options, move) {
  const span = [-2.5, 2.5], kinds = [["k1", tint(1)], ["k2", tint(2)], ["k3", tint(0)]];
  return figure(name, "Three estimators of the KL at one token", {
    height: 280,
    key: legend(...kinds.map(([kind, hue]) => [hue, kind, "stroke"])),
    draw: (width, height, grip) => {
      const { d, kl } = options();
      const frame = axes(width, height, { x: span, y: [-2.6, 4.2], across: "d = log-prob under the policy − under the reference", up: "value" });
      const xs = Array.from({ length: 101 }, (_, i) => span[0] + (i / 100) * (span[1] - span[0]));
      const value = (kind, at) => klToken(at, 0, kind).value;
      return [frame.nodes, kinds.map(([kind, hue]) => line(xs.filter((x) => value(kind, x) <= 4.2).map((x) => [frame.px(x), frame.py(value(kind, x))]), { style: `--own: ${hue}; ${kind === kl ? "stroke-width: 3.5" : ""}` })),
        grip("d", frame.px(d), frame.py(clamp(value(kl, d), -2.6, 4.2)), { says: "Difference of log-probs d", now: d, low: span[0], high: span[1], value: `${number(d)}, ${kl} ${number(value(kl, d))}`, hue: kinds.find(([kind]) => kind === kl)[1], move: (x) => move(rounded(clamp(frame.toX(x), ...span), 0.01)), keys: (dx, dy) => move(rounded(clamp(d + 0.01 * (dx || dy), ...span), 0.01)) })];
    },
    says: () => kinds.map(([kind]) => `${kind} is ${number(klToken(options().d, 0, kind).value)}`).join(", "),
    rows: () => [["d", "k1", "k2", "k3"], ...[-2, -1, -0.5, 0, 0.5, 1, 2].map((d) => [d, ...kinds.map(([kind]) => klToken(d, 0, kind).value)])],
  });
}
