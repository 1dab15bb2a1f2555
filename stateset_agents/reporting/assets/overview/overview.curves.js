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
  if (!known.length) return { title: metric, note: "", percent: /^success\/|_fraction|zero_variance/.test(metric), range: null };
  const [titles, notes] = ["title", "note"].map((name) => [...new Set(known.map((one) => one[name]))]);
  return { ...known[0], title: titles.join(" / "), note: notes.length > 1 ? known.map(({ kind, note: own }) => `${kind}: ${own}`).join("; ") : notes[0] };
}

/** Where a line is at each of some rising steps; null before its first and after its last. */
function heights({ steps, values }, at) {
  let next = 0;
  return at.map((step) => {
    while (steps[next] < step) next += 1;
    if (steps[next] === step) return values[next];
    if (next === 0 || next === steps.length) return null;
    const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
    return values[next - 1] + share * (values[next] - values[next - 1]);
  });
}

/** Mean over runs, with the lowest and the highest, where most runs are, so that no run's end is a jump. Runs may have other steps: numeric ones end their updates where their episodes end. */
function together(lines) {
  if (lines.length === 1) return lines[0];
  const { steps } = lines.reduce((longest, line) => (line.steps.length > longest.steps.length ? line : longest));
  const each = lines.map((line) => heights(line, steps));
  const found = steps.map((step, i) => [step, each.map((values) => values[i]).filter((value) => value !== null)]);
  const most = Math.max(0, ...found.map(([, values]) => values.length));
  const kept = found.filter(([, values]) => values.length === most);
  return {
    steps: kept.map(([step]) => step), values: kept.map(([, values]) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: kept.map(([, values]) => Math.min(...values)), high: kept.map(([, values]) => Math.max(...values)),
  };
}
