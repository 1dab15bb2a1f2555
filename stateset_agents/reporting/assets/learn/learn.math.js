// The arithmetic of the learning pages: pure functions of plain numbers, each equal to one of Python's.

/** A sum whose rounding does not depend on the order (Neumaier), as near to `math.fsum` as doubles are. */
function sum(values) {
  let [total, lost] = [0, 0];
  for (const value of values) {
    const next = total + value;
    lost += Math.abs(total) >= Math.abs(value) ? total - next + value : value - next + total;
    total = next;
  }
  return total + lost;
}
const mean = (values) => sum(values) / values.length;
const ties = (values) => values.every((value) => value === values[0]);
const dot = (a, b) => sum(a.map((value, at) => value * b[at]));
const squaredDistance = (a, b) => sum(a.map((value, at) => (value - b[at]) ** 2));

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function deviation(values, ddof = 0) {
  const centre = mean(values);
  return Math.sqrt(sum(values.map((value) => (value - centre) ** 2)) / (values.length - ddof));
}

/** Uniform numbers in [0, 1) by mulberry32. */
function mulberry32(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// ------------------------------------------------- advantages of groups: algorithms/advantages.py, baselines.py

const BASELINES = {
  group_mean: (rewards) => rewards.map(() => mean(rewards)),
  group_median: (rewards) => rewards.map(() => median(rewards)),
  global_mean: (rewards) => rewards.map(() => mean(rewards)),
  leave_one_out: (rewards) => rewards.map((reward) => (sum(rewards) - reward) / (rewards.length - 1)),
};
const SCALINGS = { population: 1e-8, sample: 1e-6, batch: 1e-8, none: 0 }; // and the eps of each

/** [groups][members] rewards, null unscored -> for each group `expected` and `advantages` [members] and its `spread`. */
function groupAdvantages(groups, { baseline = "group_mean", scaling = "population", eps = null, clip = null } = {}) {
  const scored = groups.map((group) => group.filter((reward) => reward !== null));
  const batch = scored.flat(), overBatch = baseline === "global_mean", margin = eps ?? SCALINGS[scaling];
  return groups.map((group, at) => {
    const peers = overBatch ? batch : scored[at], tied = ties(peers);
    const spread = tied ? 0 : scaling === "none" ? 1 : deviation(scaling === "batch" ? batch : peers, scaling === "sample" ? 1 : 0) + margin;
    const rule = tied || overBatch ? scored[at].map(() => (tied ? peers[0] : mean(batch))) : BASELINES[baseline](scored[at]);
    const next = rule[Symbol.iterator]();
    const expected = group.map((reward) => (reward === null ? null : next.next().value));
    const bound = (value) => (clip === null ? value : Math.max(-clip, Math.min(clip, value)));
    const advantages = group.map((reward, i) => (reward === null ? null : spread === 0 ? 0 : bound((reward - expected[i]) / spread)));
    return { expected, spread, advantages };
  });
}

// ------------------------------------------------- losses: algorithms/policy_losses.py, losses.py

const LOSSES = {
  grpo: { averaging: "trajectory", low: 0.2, high: 0.2 }, dapo: { averaging: "token", low: 0.2, high: 0.28 },
  dr_grpo: { averaging: "constant", low: 0.2, high: 0.2 }, gspo: { averaging: "trajectory", low: 3e-4, high: 4e-4, sequence: true },
  cispo: { averaging: "token", low: 0.2, high: 0.2, above: true }, reinforce: { averaging: "token", low: 0.2, high: 0.2, never: true },
  ppo: { averaging: "token", low: 0.2, high: 0.2 },
};
const logRatio = (logprob, other) => Math.max(-20, Math.min(20, logprob - other));

/** The loss of one token, its slope by the token's log-prob, and the side on which the clip acts, or null. */
function tokenLoss(name, logprob, ratio, advantage, { low, high, dual = null }) {
  const loss = LOSSES[name], above = ratio > 1 + high;
  if (loss.never) return { value: -advantage * logprob, slope: -advantage, clipped: null };
  if (loss.above) {
    const weight = Math.min(ratio, 1 + high);
    return { value: -weight * advantage * logprob, slope: -weight * advantage, clipped: advantage !== 0 && above ? "high" : null };
  }
  if (advantage > 0 && above) return { value: -(1 + high) * advantage, slope: 0, clipped: "high" };
  if (advantage < 0 && ratio < 1 - low) return { value: -(1 - low) * advantage, slope: 0, clipped: "low" };
  if (dual !== null && advantage < 0 && ratio > dual) return { value: -dual * advantage, slope: 0, clipped: "dual" };
  return { value: -ratio * advantage, slope: -ratio * advantage, clipped: null };
}

const WEIGHTINGS = { k1: ["live"], k2: ["detached", "none"], k3: ["live", "detached", "none"] };

/** The KL term of one token and its slope; `d` is log pi - log pi_ref, `live` log pi - log mu. */
function klToken(d, live, estimator = "k3", weighting = WEIGHTINGS[estimator][0]) {
  const less = Math.expm1(-d);
  const value = { k1: d, k2: (d * d) / 2, k3: less + d }[estimator], slope = { k1: 1, k2: d, k3: -less }[estimator];
  if (weighting === "none") return { value, slope };
  const rho = Math.exp(live);
  return { value: rho * value, slope: rho * (weighting === "detached" ? slope : estimator === "k3" ? d : value + slope) };
}

/**
 * A batch's loss and each token's slope. `lengths` [B] tokens of each conversation; `logprobs`, `old`, `advantages` and
 * `reference` (or null) [N] over them, one conversation behind the other.
 */
function batchLoss({ lengths, logprobs, old, advantages, reference }, { loss, low, high, dual = null, beta = 0, kl = "k3", weighting, length = 512 }) {
  const { averaging, sequence } = LOSSES[loss], N = sum(lengths), B = lengths.filter((count) => count > 0).length;
  const parts = { policy: [], kl: [], slopes: [], clipped: [], ratios: [] };
  let at = 0;
  for (const count of lengths) {
    const share = { trajectory: 1 / (B * count), token: 1 / N, constant: 1 / (B * length) }[averaging];
    const lives = Array.from({ length: count }, (_, i) => logRatio(logprobs[at + i], old[at + i]));
    const whole = sequence && count ? Math.exp(mean(lives)) : null;
    for (const live of lives) {
      const ratio = whole ?? Math.exp(live);
      const own = tokenLoss(loss, logprobs[at], ratio, advantages[at], { low, high, dual });
      const term = reference && beta ? klToken(logRatio(logprobs[at], reference[at]), live, kl, weighting) : { value: 0, slope: 0 };
      parts.policy.push(share * own.value);
      parts.kl.push(share * beta * term.value);
      parts.slopes.push(share * (own.slope + beta * term.slope));
      parts.clipped.push(own.clipped);
      parts.ratios.push(ratio);
      at += 1;
    }
  }
  return { ...parts, policy: sum(parts.policy), kl: sum(parts.kl), total: sum(parts.policy) + sum(parts.kl) };
}

/** Expected gradient by the logit of a policy that succeeds (reward 1) with probability p, of groups of `size`. */
function expectedGradient(p, size, options) {
  const terms = [];
  let chance = (1 - p) ** size; // of no success
  for (let wins = 0; wins <= size; wins += 1) {
    const group = Array.from({ length: size }, (_, at) => (at < wins ? 1 : 0));
    const own = groupAdvantages([group], options)[0].advantages;
    terms.push(chance * mean(own.map((advantage, at) => advantage * (group[at] - p))));
    chance *= ((size - wins) / (wins + 1)) * (p / (1 - p));
  }
  return sum(terms);
}

/** Expected gradient of a KL term by the logit of a policy (p, 1 - p) against a reference (q, 1 - q), on-policy. */
function expectedKlGradient(p, q, estimator, weighting) {
  const first = klToken(Math.log(p / q), 0, estimator, weighting).slope, second = klToken(Math.log((1 - p) / (1 - q)), 0, estimator, weighting).slope;
  return p * (1 - p) * (first - second);
}

/**
 * A softmax policy over arms with fixed `rewards` [K] learns from groups of `size` draws by gradient descent: each group
 * is used in `passes` passes. `broken`: null, "reference ratio", "signed kl", "clipped advantage". Returns steps of {reward, kl}.
 */
function bandit(rewards, { size = 8, steps = 60, passes = 2, rate = 1, seed = 0, beta = 0, broken = null, baseline, scaling, ...loss }) {
  const draw = mulberry32(seed), count = rewards.length, history = [];
  let logits = rewards.map(() => 0);
  const reference = rewards.map(() => Math.log(1 / count));
  for (let step = 0; step < steps; step += 1) {
    const old = softmax(logits).map(Math.log), arms = [];
    history.push({ reward: dot(old.map(Math.exp), rewards), kl: sum(old.map((value, k) => Math.exp(value) * (value - reference[k]))) });
    for (let member = 0; member < size; member += 1) {
      let [at, left] = [draw(), count - 1];
      for (let k = 0; k < count - 1 && left === count - 1; k += 1) {
        at -= Math.exp(old[k]);
        if (at < 0) left = k;
      }
      arms.push(left);
    }
    const { advantages } = groupAdvantages([arms.map((arm) => rewards[arm])], { baseline, scaling })[0];
    for (let pass = 0; pass < passes; pass += 1) {
      const now = softmax(logits).map(Math.log), of = (values) => arms.map((arm) => values[arm]);
      const batch = { lengths: arms.map(() => 1), logprobs: of(now), old: of(broken === "reference ratio" ? reference : old), advantages, reference: of(reference) };
      const slopes = broken === "clipped advantage"
        ? advantages.map((advantage) => -Math.max(advantage, -loss.low) / size)
        : batchLoss(batch, { ...loss, beta: broken === "signed kl" ? 0 : beta, length: 1 }).slopes.map((slope) => slope + (broken === "signed kl" ? beta / size : 0));
      logits = logits.map((logit, k) => logit - rate * sum(slopes.map((slope, i) => slope * ((arms[i] === k ? 1 : 0) - Math.exp(now[k])))));
    }
  }
  return history;
}

// ------------------------------------------------- the papers' toys: tests/helpers/learn_toys.py

/** PCGrad: each gradient without what conflicts with the others, taken in `order`; and their sum. */
function pcgrad(gradients, order = gradients.map((_, at) => at)) {
  const projected = gradients.map((gradient, i) => order.filter((j) => j !== i).reduce((own, j) => {
    const along = dot(own, gradients[j]), size = dot(gradients[j], gradients[j]);
    return along < 0 && size > 0 ? own.map((value, at) => value - (along / size) * gradients[j][at]) : own;
  }, gradient));
  return { projected, total: gradients[0].map((_, at) => sum(projected.map((own) => own[at]))) };
}

/** Two parabolas with minima (1, 0) and (-1, -1); the first is `steep` times steeper across. */
function twoTasks([x, y], steep) {
  return { losses: [(0.2 * (x - 1) ** 2 + steep * y * y) / 2, ((x + 1) ** 2 + 0.4 * (y + 1) ** 2) / 2], gradients: [[0.2 * (x - 1), steep * y], [x + 1, 0.4 * (y + 1)]] };
}

/** Steps of gradient descent, or of Adam, on both, with or without PCGrad: [{at, losses}]. */
function surgeryDescent(start, { surgery, adam, steps, steep, rate }) {
  let [at, first, second] = [start, [0, 0], [0, 0]];
  const way = [{ at, losses: twoTasks(at, steep).losses }];
  for (let step = 1; step <= steps; step += 1) {
    const { gradients } = twoTasks(at, steep);
    const gradient = surgery ? pcgrad(gradients).total : [0, 1].map((i) => gradients[0][i] + gradients[1][i]);
    first = first.map((value, i) => 0.9 * value + 0.1 * gradient[i]);
    second = second.map((value, i) => 0.999 * value + 0.001 * gradient[i] ** 2);
    const adams = first.map((value, i) => value / (1 - 0.9 ** step) / (Math.sqrt(second[i] / (1 - 0.999 ** step)) + 1e-8));
    at = at.map((value, i) => value - rate * (adam ? adams : gradient)[i]);
    way.push({ at, losses: twoTasks(at, steep).losses });
  }
  return way;
}

function softmax(values, temperature = 1) {
  const top = Math.max(...values), raised = values.map((value) => Math.exp((value - top) / temperature)), all = sum(raised);
  return raised.map((value) => value / all);
}

/**
 * One step of gradient descent on two tasks that share `slopes` [M]: a module multiplies its input, a task mixes modules
 * by softmax(logits / temperature) and wants `targets`. Loss: half the squared error, over tasks. Logits learn if `routed`.
 */
function moduleStep({ slopes, logits }, targets, { rate, temperature = 1, routed = true }) {
  const weights = logits.map((own) => softmax(own, temperature)), outputs = weights.map((own) => dot(own, slopes));
  const errors = outputs.map((output, k) => output - targets[k]);
  const loss = sum(errors.map((error) => (error * error) / 2));
  const next = slopes.map((slope, j) => slope - rate * sum(errors.map((error, k) => error * weights[k][j])));
  const turned = logits.map((own, k) => own.map((logit, j) => (routed ? logit - (rate * errors[k] * weights[k][j] * (slopes[j] - outputs[k])) / temperature : logit)));
  return { loss, outputs, weights, slopes: next, logits: turned };
}

/** A Gaussian process (RBF) seen at `xs`, `ys`: mean and variance of a new observation at x. */
function gpPredict(xs, ys, x, { length, signal, noise }) {
  const kernel = (a, b) => signal * signal * Math.exp(-((a - b) ** 2) / (2 * length * length)), n = xs.length;
  const lower = [], half = [], seen = [];
  for (let i = 0; i < n; i += 1) {
    lower.push([]);
    for (let j = 0; j <= i; j += 1) {
      let value = kernel(xs[i], xs[j]) + (i === j ? noise * noise : 0);
      for (let k = 0; k < j; k += 1) value -= lower[i][k] * lower[j][k];
      lower[i].push(i === j ? Math.sqrt(value) : value / lower[j][j]);
    }
    const solve = (right, solved) => (right - sum(solved.map((value, k) => lower[i][k] * value))) / lower[i][i];
    half.push(solve(ys[i], half));
    seen.push(solve(kernel(xs[i], x), seen));
  }
  return { mean: dot(half, seen), variance: signal * signal + noise * noise - dot(seen, seen) };
}

/** A sticky Chinese restaurant: the share of each component with `counts`, and of a new one last. */
function restaurant(counts, last, { alpha, beta }) {
  const seats = [...counts.map((count, k) => count + (k === last ? beta : 0)), alpha], all = sum(seats);
  return seats.map((seat) => seat / all);
}

/** Points of a stream go to their likeliest component, one after the other; `most` bounds the components, or null. */
function mixture(stream, { alpha, beta, length, signal, noise, most = null }) {
  const experts = [], steps = [];
  let last = null;
  for (const [x, y] of stream) {
    const prior = restaurant(experts.map((own) => own.xs.length), last, { alpha, beta });
    const scores = [...experts, { xs: [], ys: [] }].map((own, k) => {
      const { mean: middle, variance } = gpPredict(own.xs, own.ys, x, { length, signal, noise });
      return Math.log(prior[k]) - 0.5 * (Math.log(2 * Math.PI * variance) + (y - middle) ** 2 / variance);
    });
    const open = most === null || experts.length < most || !experts.length ? scores : scores.slice(0, -1);
    const posterior = softmax(open), chosen = posterior.indexOf(Math.max(...posterior));
    if (chosen === experts.length) experts.push({ xs: [], ys: [] });
    experts[chosen].xs.push(x);
    experts[chosen].ys.push(y);
    steps.push({ prior, posterior, chosen });
    last = chosen;
  }
  return { experts, steps };
}
