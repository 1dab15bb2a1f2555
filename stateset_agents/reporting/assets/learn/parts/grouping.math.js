// The arithmetic of grouping over trajectories: pure functions, each equal to one of stateset_agents/grouping.
// Sums run in the order of the rows, as there, so that labels are identical.

const inOrder = (values) => values.reduce((all, value) => all + value, 0);

/** [K - 1] quantiles k / K of the values, in a line between two of them. */
function quantileBoundaries(values, K) {
  const ordered = [...values].sort((a, b) => a - b);
  return Array.from({ length: K - 1 }, (_, at) => {
    const where = ((ordered.length - 1) * (at + 1)) / K, below = Math.floor(where), above = Math.min(below + 1, ordered.length - 1);
    return ordered[below] + (ordered[above] - ordered[below]) * (where - below);
  });
}

/** The number of boundaries strictly below each value. */
const labelsBetween = (values, boundaries) => values.map((value) => boundaries.filter((boundary) => boundary < value).length);

function randomLabels(count, K, seed) {
  const draw = mulberry32(seed);
  return Array.from({ length: count }, () => Math.floor(draw() * K));
}

const distance = (row, centre) => inOrder(row.map((value, at) => (value - centre[at]) ** 2));

/** Each feature less its mean and by its population deviation, 1 where that is 0. */
function standardised(rows) {
  const columns = rows[0].map((_, at) => rows.map((row) => row[at]));
  const means = columns.map((column) => inOrder(column) / rows.length);
  const spreads = columns.map((column, at) => {
    const spread = Math.sqrt(inOrder(column.map((value) => (value - means[at]) ** 2)) / rows.length);
    return spread > 1e-12 * Math.max(1, Math.abs(means[at])) ? spread : 1;
  });
  return { rows: rows.map((row) => row.map((value, at) => (value - means[at]) / spreads[at])), means, spreads };
}

/** The number of each row's nearest centre, the lowest where several are. */
const nearestCentres = (rows, centres) => rows.map((row) => centres.reduce((best, centre, at) => (distance(row, centre) < distance(row, centres[best]) ? at : best), 0));

/** k-means++. */
function firstCentres(rows, K, seed) {
  const draw = mulberry32(seed), chosen = [Math.floor(draw() * rows.length)];
  while (chosen.length < K) {
    const heights = [];
    for (const row of rows) heights.push((heights.at(-1) ?? 0) + Math.min(...chosen.map((at) => distance(row, rows[at]))));
    if (heights.at(-1) === 0) break;
    const height = draw() * heights.at(-1);
    chosen.push(heights.findIndex((value) => value > height));
  }
  return chosen.map((at) => rows[at]);
}

/** Lloyd's iterations until no label changes, at most `rounds`: labels and centres, and after how many it ended. */
function kmeans(rows, K, seed, { centres = null, rounds = 100 } = {}) {
  let found = centres ?? firstCentres(rows, K, seed), labels = nearestCentres(rows, found), count = 0;
  for (; count < rounds; count += 1) {
    found = found.map((centre, k) => {
      const own = rows.filter((_, at) => labels[at] === k);
      return own.length ? centre.map((_, at) => inOrder(own.map((row) => row[at])) / own.length) : centre;
    });
    const before = labels;
    labels = nearestCentres(rows, found);
    if (labels.every((label, at) => label === before[at])) break;
  }
  return { centres: found, labels, rounds: count };
}

const partsOf = (labels, K) => Array.from({ length: K }, (_, k) => labels.flatMap((label, at) => (label === k ? [at] : [])));

/** Less the part's mean and by its deviation + eps; exactly 0 where a part's values are all equal. */
function normaliseByPart(values, labels, { eps = 1e-8, ddof = 0 } = {}) {
  const result = values.map(() => 0);
  for (const within of partsOf(labels, Math.max(-1, ...labels) + 1)) {
    const own = within.map((at) => values[at]);
    if (!own.length || ties(own)) continue;
    const centre = mean(own), spread = deviation(own) * (ddof ? Math.sqrt(own.length / (own.length - 1)) : 1) + eps;
    for (const at of within) result[at] = (values[at] - centre) / spread;
  }
  return result;
}

/** Share of the steps whose normalised advantage has another sign than the raw one less its task's mean. */
function signFlipShare(raw, normalised, tasks = raw.map(() => 0)) {
  const means = partsOf(tasks, Math.max(-1, ...tasks) + 1).map((within) => (within.length ? mean(within.map((at) => raw[at])) : 0));
  const flipped = raw.filter((value, at) => (value - means[tasks[at]]) * normalised[at] < 0).length;
  return raw.length ? flipped / raw.length : 0;
}

function absoluteShares(values, labels, K) {
  const sums = partsOf(labels, K).map((within) => inOrder(within.map((at) => Math.abs(values[at])))), all = inOrder(sums);
  return sums.map((value) => (all ? value / all : 0));
}

function partStatistics(values, labels, K) {
  const shares = absoluteShares(values, labels, K);
  return partsOf(labels, K).map((within, k) => {
    const own = within.map((at) => values[at]);
    return { count: own.length, mean: own.length ? mean(own) : 0, std: own.length ? deviation(own) : 0, share: shares[k] };
  });
}

/** GAE of rows [T][N]: a cut goes on by the next value, an end does not, and neither leaks into the row before. */
function gaeBatch({ rewards, values, next, terminated, ended }, { gamma = 0.99, lam = 0.95 } = {}) {
  const advantages = rewards.map((row) => row.map(() => 0));
  for (let t = rewards.length - 1; t >= 0; t -= 1) {
    for (let n = 0; n < rewards[t].length; n += 1) {
      const delta = rewards[t][n] + gamma * (terminated[t][n] ? 0 : next[t][n]) - values[t][n];
      advantages[t][n] = delta + gamma * lam * (ended[t][n] || t + 1 === rewards.length ? 0 : advantages[t + 1][n]);
    }
  }
  return advantages;
}

/** [K] positive weights that sum to 1; null where a score is not known. */
function partWeights(method, scores, progress = scores.map(() => 0)) {
  const K = scores.length;
  const raw = scores.map((score, k) => ({ balanced: 1, performance: score === null ? null : 1 - Math.max(0, Math.min(1, score)), adaptive: progress[k] })[method]);
  const known = raw.filter((value) => value !== null), other = known.length ? mean(known) : 1;
  const asked = raw.map((value) => value ?? other), all = sum(asked), floor = Math.min(0.05, 1 / K);
  return asked.map((value) => floor + (1 - K * floor) * (all > 0 ? value / all : 1 / K));
}

/** Weights over the updates of a training, from each part's scores [updates][K]; null where a part had no episode. */
function weightSeries(method, series) {
  let last = series[0].map(() => null), progress = series[0].map(() => 0);
  return series.map((scores) => {
    progress = progress.map((value, k) => (scores[k] !== null && last[k] !== null ? 0.9 * value + 0.1 * Math.abs(scores[k] - last[k]) : value));
    last = scores.map((score, k) => score ?? last[k]);
    return partWeights(method, last, progress);
  });
}

/** The worst score by the mean one; scores below 0 count as 0. */
function groupFairness(scores) {
  const known = scores.map((score) => Math.max(0, score)), middle = mean(known);
  return middle ? Math.min(...known) / middle : 0;
}

/** The convex hull of points, anticlockwise (Andrew's monotone chain). */
function hull(points) {
  const sorted = [...points].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const half = (from) => from.reduce((chain, point) => {
    const turn = () => { const [a, b] = chain.slice(-2); return (b[0] - a[0]) * (point[1] - a[1]) - (b[1] - a[1]) * (point[0] - a[0]); };
    while (chain.length > 1 && turn() <= 0) chain.pop();
    return [...chain, point];
  }, []);
  return sorted.length < 3 ? sorted : [...half(sorted).slice(0, -1), ...half([...sorted].reverse()).slice(0, -1)];
}
