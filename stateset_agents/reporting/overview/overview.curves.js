// Curves of many runs over one another: a line for each experiment with a band over its seeds, or one for each run.

const FIRST = ["reward/mean", "success/rate", "eval/success", "sft/loss", "eval/loss", "kl/reference", "policy/entropy", "optimizer/grad_norm"];

/** A metric's chart of what is shown. */
function overlay(data, view, metric) {
  const runs = data.runs.map((run, at) => ({ ...run, at })).filter((run) => view.shown.has(run.experiment) && data.curves[metric][run.at]);
  const kinds = [...new Set(runs.map(({ kind }) => kind))];
  const known = captionOf(data, metric, kinds);
  const line = (run) => {
    const kept = data.curves[metric][run.at].map((value, i) => [data.steps[run.at][i], value]).filter(([, value]) => value !== null);
    return { steps: kept.map(([step]) => step), values: kept.map(([, value]) => value) };
  };
  const series = [];
  if (view.apart) for (const run of runs) series.push({ name: run.name, key: run.experiment, dash: series.filter((one) => one.key === run.experiment).length, run: run.at, ...line(run) });
  else for (const experiment of view.shown) {
    const lines = runs.filter((run) => run.experiment === experiment).map(line);
    const only = runs.filter((run) => run.experiment === experiment);
    if (lines.length) series.push({ name: data.experiments[experiment].label, key: experiment, run: only.length === 1 ? only[0].at : null, ...together(lines) });
  }
  return { title: known.title, note: known.note, percent: known.percent, stacked: false, signed: false, along: kinds.length === 1 ? data.kinds[kinds[0]].along : "step", smoothed: !data.unsmoothed.includes(metric), range: known.range, series: series.filter((one) => one.values.length) };
}

/** A metric's title and units, of each kind of run that is shown. */
function captionOf(data, metric, kinds) {
  const known = kinds.map((kind) => ({ kind, ...data.kinds[kind].captions[metric] })).filter(({ title }) => title);
  if (!known.length) return { title: metric, note: "", percent: /^success\/|_fraction|_rate$|zero_variance/.test(metric), range: null };
  const [titles, notes] = ["title", "note"].map((name) => [...new Set(known.map((one) => one[name]))]);
  return { ...known[0], title: titles.join(" / "), note: notes.length > 1 ? known.map(({ kind, note: own }) => `${kind}: ${own}`).join("; ") : notes[0] };
}

/** Mean over runs, with the lowest and the highest; of the steps that most runs have, so that no run's end is a jump. */
function together(lines) {
  if (lines.length === 1) return lines[0];
  const at = new Map();
  for (const { steps, values } of lines) steps.forEach((step, i) => at.set(step, [...(at.get(step) ?? []), values[i]]));
  const most = Math.max(0, ...[...at.values()].map((values) => values.length));
  const kept = [...at].filter(([, values]) => values.length === most).sort(([a], [b]) => a - b);
  return {
    steps: kept.map(([step]) => step), values: kept.map(([, values]) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: kept.map(([, values]) => Math.min(...values)), high: kept.map(([, values]) => Math.max(...values)),
  };
}
