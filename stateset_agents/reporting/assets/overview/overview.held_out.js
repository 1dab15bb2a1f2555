// Held-out results of each experiment, and how much two of them differ, pair by pair.

/** The words for an experiment's kind of run. */
const wordsOf = (data, experiment) => data.kinds[data.runs.find((run) => run.experiment === experiment).kind];

/** Interquartile means with their intervals and each run's mean, drawn and in figures. */
function scores(data, view) {
  const shown = data.experiments.map((one, at) => ({ ...one, at })).filter(({ at, score }) => view.shown.has(at) && score);
  if (!shown.length) return [note("None of these runs was measured on held-out scenarios after training.")];
  const measureOf = ({ at, score }) => (score.measure === "success" ? "success" : wordsOf(data, at).reward);
  return [note("IQM: interquartile mean over runs, of four runs the middle two. Its interval is a bootstrap over runs, so it says how much another seed would change; it is too narrow for few runs: with three it holds the truth in about 75 % of the cases, with ten in 93 %. Small marks are the runs."),
    ...[...new Set(shown.map(measureOf))].map((measure) => scoresTable(data, measure, shown.filter((one) => measureOf(one) === measure)))];
}

/** Of the experiments that were measured alike. */
function scoresTable(data, measure, shown) {
  const all = shown.flatMap(({ score }) => [...score.runs, score.iqm, ...(score.interval ?? [])]);
  const isShare = measure === "success";
  const [low, high] = isShare ? [0, 1] : [Math.min(0, ...all), Math.max(1e-9, ...all)];
  const place = (value) => `${(100 * (value - low)) / (high - low)}%`;
  const say = (value) => (isShare ? percent(value) : number(value));
  const rows = shown.map(({ label, score, at }) => h("div", { class: "family", role: "row" },
    h("span", { class: "name", role: "rowheader" }, swatch(at), `${label} `, h("span", { class: "n" }, `${plural(score.runs.length, "run")}, ${plural(score.num_scenarios, wordsOf(data, at).scenario)}`)),
    h("span", { class: "track", role: "cell", "aria-hidden": "true", style: `--key: var(--c${at % 12})` },
      score.runs.map((value) => h("span", { class: "seed", style: `left:${place(value)}` })),
      score.interval ? h("span", { class: "range", style: `left:${place(score.interval[0])};width:calc(${place(score.interval[1])} - ${place(score.interval[0])})` }) : null,
      h("span", { class: "spot", style: `left:${place(score.iqm)}` })),
    h("span", { class: "values", role: "cell" }, h("span", {}, say(score.iqm), " ", h("span", { class: "interval" }, score.interval ? `[${say(score.interval[0])}, ${say(score.interval[1])}]` : score.runs.length < 3 ? "interval: from 3 runs on" : "")),
      h("span", { class: "interval" }, score.runs.length > 1 ? `${say(Math.min(...score.runs))} to ${say(Math.max(...score.runs))}` : ""))));
  const head = h("div", { class: "family head", role: "row" }, h("span", { role: "columnheader" }, `${measure} after training`),
    h("span", { class: "scale", role: "columnheader" }, ...[low, (low + high) / 2, high].map((value) => h("i", {}, isShare ? `${Math.round(100 * value)} %` : number(value)))),
    h("span", { role: "columnheader" }, "IQM [95 %]; lowest to highest run"));
  return h("div", { class: "families", role: "table", "aria-label": `Held-out ${measure} of each experiment` }, head, rows);
}

/** b minus a, as the data has it for a < b. */
function differenceOf(data, a, b) {
  const found = data.differences.find(([x, y]) => x === Math.min(a, b) && y === Math.max(a, b))?.[2];
  if (!found || a < b) return found ?? null;
  const verdict = { better: "worse", worse: "better", unclear: "unclear" }[found.verdict];
  return { ...found, verdict, mean: -found.mean, interval: found.interval && [-found.interval[1], -found.interval[0]], wins: found.losses, losses: found.wins };
}

const VERDICTS = { better: "higher", worse: "lower", unclear: "no difference shown" };

/** How two experiments' runs were paired. */
function pairing({ num_pairs: pairs, seeds }) {
  if (pairs === 1) return "one seed each: another seed may differ";
  return seeds.length ? `seeds ${seeds.join(", ")}` : `${pairs} runs each, with other seeds`;
}

function differences(data, view, change) {
  const shown = [...view.shown].sort((a, b) => a - b);
  if (shown.length < 2) return [note("Tick two experiments to see how much they differ.")];
  const base = view.shown.has(view.base) ? view.base : shown[0];
  const choice = h("select", { "aria-label": "Compared with", onchange: (event) => change({ base: Number(event.target.value) }) }, shown.map((at) => h("option", { value: at }, data.experiments[at].label)));
  choice.value = base;
  const found = shown.filter((at) => at !== base).map((at) => [at, differenceOf(data, base, at)]);
  const known = found.filter(([, one]) => one);
  const reach = Math.max(0.05, ...known.flatMap(([, one]) => [one.mean, ...(one.interval ?? [])].map(Math.abs)));
  const place = (value) => `${50 + (50 * value) / reach}%`;
  const rows = found.map(([at, one]) => {
    const say = one?.measure === "reward" ? signedNumber : points;
    const about = one ? `${plural(one.num_scenarios, wordsOf(data, at).scenario)}, ${pairing(one)}; ${one.wins} won, ${one.losses} lost${one.p_value === null ? "" : `, sign flips p ${one.p_value < 1e-4 ? "< 0.0001" : `= ${one.p_value.toFixed(4)}`}`}${one.reason ? `; ${one.reason}` : ""}` : "";
    return h("div", { class: "family", role: "row" }, h("span", { class: "name", role: "rowheader" }, swatch(at), `${data.experiments[at].label} `, h("span", { class: "n wrap" }, about)),
      h("span", { class: "track", role: "cell", "aria-hidden": "true", style: `--key: var(--c${at % 12})` }, one ? [
        one.interval ? h("span", { class: "range", style: `left:${place(one.interval[0])};width:calc(${place(one.interval[1])} - ${place(one.interval[0])})` }) : null,
        h("span", { class: "spot", style: `left:${place(one.mean)}` })] : []),
      h("span", { class: "values", role: "cell" }, one ? [h("span", {}, h("b", {}, say(one.mean)), h("span", { class: "interval" }, one.interval ? ` [${one.interval.map(say).join(", ")}]` : "")), h("span", { class: `said-so ${VERDICTS[one.verdict].replaceAll(" ", "-")}` }, VERDICTS[one.verdict])]
        : h("span", { class: "n wrap" }, `no ${wordsOf(data, at).scenario} in common`)));
  });
  const isPoints = known.every(([, one]) => one.measure === "success");
  const edge = isPoints ? points(reach) : number(reach);
  const head = h("div", { class: "family head", role: "row" }, h("span", { role: "columnheader" }, isPoints ? "success, points" : `${known.some(([, one]) => one.measure === "success") ? "success in points, or " : ""}${wordsOf(data, base).reward}`),
    h("span", { class: "scale", role: "columnheader" }, ...[`−${edge.replace("+", "")}`, "0", `+${edge.replace("+", "")}`].map((text) => h("i", {}, text))), h("span", { role: "columnheader" }, "difference [95 %]"));
  const many = found.length > 1 ? ` ${found.length} are compared at once: of twenty such intervals one misses the truth.` : "";
  return [h("div", { class: "tools" }, h("label", { class: "beside" }, "minus ", choice)),
    note(`Paired by ${wordsOf(data, base).scenario}, with several runs by seed, too (in their order where no seed is in both), and the interval is over both; of one run each it is over ${wordsOf(data, base).scenario}s alone.${many}`),
    h("div", { class: "families", role: "table", "aria-label": `Difference to ${data.experiments[base].label}` }, head, rows)];
}
