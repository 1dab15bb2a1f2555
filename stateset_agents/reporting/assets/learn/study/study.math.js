// The arithmetic of comparing arms of a study: pure functions of scores.

/** The mean without the lowest and the highest quarter, each rounded down to whole values. */
function iqm(values) {
  const cut = Math.floor(values.length / 4);
  return mean([...values].sort((a, b) => a - b).slice(cut, values.length - cut));
}

/** 95 % percentile bootstrap of `statistic` over runs [runs][tasks], drawn whole; null for fewer than three runs. */
function bootstrap(rows, statistic, { seed = 0, resamples = 1000 } = {}) {
  if (rows.length < 3) return null;
  const draw = mulberry32(seed), cut = Math.round(0.025 * resamples);
  const found = Array.from({ length: resamples }, () => statistic(rows.map(() => rows[Math.floor(draw() * rows.length)]))).sort((a, b) => a - b);
  return [found[cut], found[resamples - 1 - cut]];
}
const iqmOf = (rows) => iqm(rows.flat());

/** The chance that a run of the first arm scores above one of the second, by mean score; a tie counts half. */
function improvement(first, second) {
  const [ours, theirs] = [first.map(mean), second.map(mean)];
  return mean(ours.flatMap((one) => theirs.map((other) => (one > other ? 1 : one === other ? 0.5 : 0))));
}

/** 95 % percentile bootstrap of it over the runs of both arms; null for fewer than three of either. */
function improvementInterval(first, second, { seed = 0, resamples = 500 } = {}) {
  if (first.length < 3 || second.length < 3) return null;
  const draw = mulberry32(seed), cut = Math.round(0.025 * resamples), again = (rows) => rows.map(() => rows[Math.floor(draw() * rows.length)]);
  const found = Array.from({ length: resamples }, () => improvement(again(first), again(second))).sort((a, b) => a - b);
  return [found[cut], found[resamples - 1 - cut]];
}

/** Share of the scores above tau. */
const profile = (rows, tau) => mean(rows.flat().map((score) => (score > tau ? 1 : 0)));

/** A run's mean score over its tasks at each point; a task keeps its last one where it had no episode, 0 before. */
function meanCurve(scores) {
  let last = scores[0].map(() => 0);
  return scores.map((point) => {
    last = last.map((before, task) => point[task] ?? before);
    return mean(last);
  });
}

/** The mean height of a curve from step 0, where the score is 0, to `length`, scores held within 0 and 1. */
function areaUnder(steps, scores, length) {
  let [total, before, height] = [0, 0, 0];
  [...steps, Math.max(length, steps.at(-1))].forEach((step, at) => {
    const to = Math.min(step, length), now = Math.min(1, Math.max(0, scores[at] ?? scores.at(-1)));
    total += ((to - before) * (height + now)) / 2;
    [before, height] = [to, now];
  });
  return total / length;
}

/** The largest fall of a curve below its best so far. */
function drawdown(scores) {
  let [best, worst] = [-Infinity, 0];
  for (const score of scores) {
    if (score === null) continue;
    best = Math.max(best, score);
    worst = Math.max(worst, best - score);
  }
  return worst;
}

/** The first step at which a curve has `share` of its last score; null where it never had, or ended at 0 or below. */
function firstStepAt(steps, scores, share = 0.9) {
  const end = scores.filter((score) => score !== null).at(-1) ?? 0, at = scores.findIndex((score) => score !== null && score >= share * end);
  return end > 0 && at >= 0 ? steps[at] : null;
}

/** Means of matrices [runs][tasks][tasks], of those that know a pair; null where none does. */
function cosineMeans(matrices) {
  return matrices[0].map((row, one) => row.map((_, other) => {
    const known = matrices.map((matrix) => matrix[one][other]).filter((value) => value !== null);
    return known.length ? mean(known) : null;
  }));
}

/** A moving average over `reach` points to either side; nulls stay. */
const eased = (values, reach) => values.map((value, at) => (value === null ? null : mean(values.slice(Math.max(0, at - reach), at + reach + 1).filter((other) => other !== null))));
