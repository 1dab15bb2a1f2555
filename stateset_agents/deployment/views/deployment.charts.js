// A deployment's charts: mode and share over time, the effect with its band, and the evidence on both sides.

const MODES = { shadow: 7, gradual: 0, full: 2, rolled_back: 1 }; // colours
const PROMOTE = 2, ROLL_BACK = 1;
const modeName = (mode) => mode.replace("_", " ");
const plain = { stacked: false, signed: false, smoothed: false, percent: false, range: null, note: "" };
const wealth = (log) => Math.exp(Math.min(log, 690)); // what a number holds

/** A unit in which a time span is short to say. */
function unitOf(seconds) {
  if (seconds < 180) return ["second", 1];
  if (seconds < 3 * 3600) return ["minute", 60];
  return seconds < 3 * 86400 ? ["hour", 3600] : ["day", 86400];
}

function shareChart(one) {
  const [along, unit] = unitOf(one.last_at - one.at);
  const x = (at) => (at - one.at) / unit;
  const end = x(Math.max(one.last_at, one.modes.at(-1).at));
  const zones = one.modes.map(({ at, mode }, n) => ({ from: x(at), to: n + 1 < one.modes.length ? x(one.modes[n + 1].at) : end, key: MODES[mode] }));
  const steps = [...one.modes.map(({ at }) => x(at)), end];
  const values = [...one.modes.map(({ share }) => share), one.modes.at(-1).share];
  return { ...plain, title: "Share of new conversations", percent: true, stepped: true, along, range: [-0.02, 1.05], zones, series: [{ name: "share", steps, values }] };
}

function effectChart(one) {
  const { outcomes, effect, low, high } = one.evidence;
  const { margin } = one.status.evidence;
  const kept = outcomes.map((_, at) => at).filter((at) => effect[at] !== null);
  const pick = (values) => kept.map((at) => values[at]);
  const late = kept.slice(Math.floor(kept.length / 4)); // the band of the first ones is wide
  const reach = Math.max(3 * margin, 0.04, ...late.flatMap((at) => [Math.abs(low[at]), Math.abs(high[at])]));
  const long = late.length > 2 ? reach : Math.max(reach, ...kept.flatMap((at) => [Math.abs(low[at]), Math.abs(high[at])]));
  return { ...plain, title: "Effect on success", note: kept.length ? `candidate minus baseline, with its ${number(1 - one.alpha, true)} confidence sequence` : "candidate minus baseline: from 50 outcomes of each arm on", percent: true, along: "outcome", range: [-1.05 * long, 1.05 * long],
    limits: [{ value: -margin, name: `−${number(margin, true)} margin`, under: true, key: 4 }], series: [{ name: "effect", steps: pick(outcomes), values: pick(effect), low: pick(low), high: pick(high) }] };
}

function wealthChart(one) {
  const { outcomes, log_wealth_promote: promote, log_wealth_roll_back: rollBack } = one.evidence;
  const needed = { promote: one.status.evidence.promote.needed, roll_back: one.status.evidence.roll_back.needed };
  const all = [...promote, ...rollBack].map(wealth);
  const range = [Math.max(1e-4, Math.min(0.5, ...all) / 2), Math.max(needed.promote, needed.roll_back, ...all) * 4];
  const differs = needed.promote !== needed.roll_back;
  return { ...plain, title: "Evidence", note: "wealth of who bets on it; a decision at 1/alpha", log: true, along: "outcome", range,
    limits: [{ value: needed.promote, name: `promote at ${number(needed.promote)}`, key: PROMOTE, under: differs }, { value: needed.roll_back, name: `roll back at ${number(needed.roll_back)}`, key: ROLL_BACK }],
    series: [{ name: "to promote", key: PROMOTE, steps: outcomes, values: promote.map(wealth) }, { name: "to roll back", key: ROLL_BACK, steps: outcomes, values: rollBack.map(wealth) }] };
}

const deploymentCharts = (one) => ({ share: shareChart(one), effect: effectChart(one), wealth: wealthChart(one) });

/** What the colours behind the share say. */
const modeLegend = (one) => h("ul", { class: "legend modes" }, [...new Set(one.modes.map(({ mode }) => mode))].map((mode) => h("li", { style: `--key: var(--c${MODES[mode]})` }, modeName(mode))));
