// The parts of a numeric run, update by update: sizes, weights, advantages before and after, turned signs, scores.

const S = data.series, STEPS = data.steps, setting = data.training;
const named = (prefix) => Object.keys(S).filter((name) => name.startsWith(`${prefix}/`)).map((name) => name.slice(prefix.length + 1));
const PARTS = named("part_size"), TASKS = named("score"), TASK_SHARES = named("absolute_share");
const partName = (name) => (/^\d+$/.test(name) ? `part ${name}` : name);
const series = (prefix) => STEPS.map((_, at) => PARTS.map((name) => S[`${prefix}/${name}`][at] ?? 0));
const [SIZES, WEIGHTS] = [series("part_size"), series("part_weight")];
settings({ update: STEPS.length - 1 });
const now = () => clamp(view.update, 0, STEPS.length - 1);
const of = (metric, k, at = now()) => S[`${metric}/${PARTS[k]}`]?.[at] ?? null;
const strategy = setting.group_strategy ?? "none", several = PARTS.length > 1;

head(`The parts of ${data.run}`, "What the run divided its updates into, what each part counted, and what that did to the advantages: as it was recorded.",
  note(`${data.environment}: group_strategy ${strategy}${several ? `, group_weight_method ${setting.group_weight_method}` : ""}, advantage_estimator ${setting.advantage_estimator}. In this page: ${STEPS.length} of ${plural(data.total_updates, "update")}, the last after ${plural(STEPS.at(-1), "step")}.`));

const stepAxis = STEPS.length > 1 ? [STEPS[0], STEPS.at(-1)] : [0, STEPS[0]];
const mark = (frame) => s("path", { d: `M${place(frame.px(STEPS[now()]))},${frame.top}V${frame.bottom}`, class: "line dashed thin", style: "--own: var(--ink)" });
/** A line of what is known, and a dot where it is a single point. */
function course(frame, values, hue, attributes = {}) {
  const known = values.flatMap((value, at) => (value === null || value === undefined ? [] : [[frame.px(STEPS[at]), frame.py(value)]]));
  return known.length > 1 ? line(known, { style: `--own: ${hue}`, ...attributes }) : known.map(([x, y]) => s("circle", { cx: place(x), cy: place(y), r: 4, fill: hue }));
}
const sampled = () => STEPS.map((_, at) => at).filter((at) => at % Math.max(1, Math.ceil(STEPS.length / 12)) === 0 || at === STEPS.length - 1);
const overTime = (names, values) => () => [["steps", ...names], ...sampled().map((at) => [STEPS[at], ...values(at)])];
const drawn = (width, height, options) => axes(width, height, { x: stepAxis, across: "environment steps", formatX: thousands, ...options });
const areas = (frame, rows) => (STEPS.length > 1 ? stacked(frame, STEPS, rows) : stacked(frame, stepAxis, [rows[0], rows[0]]));
const partLegend = (kind) => legend(...PARTS.map((name, k) => [tint(k), partName(name), kind]));
const updates = () => slider("update", "Update", { min: 0, max: STEPS.length - 1, step: 1, text: (at) => `${clamp(at, 0, STEPS.length - 1) + 1} of ${STEPS.length}` });
let sections = 0;
const chapter = (id, title, words, figures) => section(id, `${(sections += 1)}. ${title}`, words, figures);

if (S["partition/outcome"]?.some(Boolean)) {
  document.getElementById("top").append(h("p", { class: "warning" }, `Parts by ${strategy} are made by outcomes of the actions: good members of the best part are below its mean and are pushed down. Take this run as a diagnosis.`));
}

if (several) {
  chapter("parts", "Sizes and weights", [
    text("How many episodes each part had in an update, and what it counted in the loss, whatever its number of steps."),
    controls(updates()),
    live(() => table("Parts in this update", [["part", "episodes", "weight"], ...PARTS.map((name, k) => [partName(name), num(`size-${k}`, of("part_size", k), 0), num(`weight-${k}`, of("part_weight", k))])]), "div"),
  ], [
    figure("sizes", "Episodes of each part", {
      height: 210, key: partLegend("bar"),
      draw: (width, height) => { const frame = drawn(width, height, { y: [0, Math.max(1, ...SIZES.map(sum)) * 1.06], up: "episodes" }); return [frame.nodes, areas(frame, SIZES), mark(frame)]; },
      says: () => PARTS.map((name, k) => `${partName(name)}: ${number(of("part_size", k))}`).join(", "),
      rows: overTime(PARTS.map(partName), (at) => SIZES[at]),
    }),
    figure("weights", "Weight of each part in the loss", {
      height: 210, key: partLegend("bar"),
      draw: (width, height) => { const frame = drawn(width, height, { y: [0, 1], up: "weight" }); return [frame.nodes, areas(frame, WEIGHTS), mark(frame)]; },
      says: () => PARTS.map((name, k) => `${partName(name)}: ${number(of("part_weight", k))}`).join(", "),
      rows: overTime(PARTS.map(partName), (at) => WEIGHTS[at]),
    }),
  ]);
  const plusMinus = (name, metric, k) => h("span", { class: "nobreak" }, num(`${name}mean-${k}`, of(`${metric}mean`, k), 2), " ± ", num(`${name}std-${k}`, of(`${metric}std`, k), 2));
  const spread = (mean_, std) => PARTS.map((_, k) => [of(mean_, k), of(std, k)]);
  const spans = (name, title, metric, hue) => figure(name, title, {
    height: () => 52 + 36 * PARTS.length,
    draw: (width, height) => {
      const values = spread(`${metric}_mean`, `${metric}_std`).map(([middle, deviation_]) => [middle ?? 0, deviation_ ?? 0]);
      const far = Math.max(1e-6, ...values.map(([middle, deviation_]) => Math.abs(middle) + deviation_)) * 1.1, left = Math.min(130, width * 0.3);
      const frame = axes(width, height, { x: [-far, far], y: [0, PARTS.length], yTicks: [], across: "advantage", left, formatX: (value) => number(value) });
      return [frame.nodes, s("path", { d: `M${place(frame.px(0))},${frame.top}V${frame.bottom}`, class: "line dashed thin", style: "--own: var(--zero)" }), values.map(([middle, deviation_], k) => { const y = frame.py(PARTS.length - k - 0.5); return [label(left - 10, y + 4, partName(PARTS[k]), { "text-anchor": "end", class: "strong" }), of("part_size", k) ? [line([[frame.px(middle - deviation_), y], [frame.px(middle + deviation_), y]], { style: `--own: ${hue(k)}; stroke-width: 6`, opacity: 0.5 }), s("circle", { cx: place(frame.px(middle)), cy: place(y), r: 5.5, fill: hue(k) }, tip(`${partName(PARTS[k])}: ${number(middle)} ± ${number(deviation_)}`))] : label(frame.px(0) + 6, y + 4, "empty")]; })];
    },
    says: () => spread(`${metric}_mean`, `${metric}_std`).map(([middle, deviation_], k) => `${partName(PARTS[k])}: ${number(middle)} ± ${number(deviation_)}`).join(", "),
    rows: () => [["part", "mean", "deviation"], ...spread(`${metric}_mean`, `${metric}_std`).map((row, k) => [partName(PARTS[k]), ...row])],
  });
  chapter("advantages", "Advantages before and after", [
    text("The raw advantages of each part in this update, and what the loss took: less the part's mean, by its deviation, times its weight by its share of the steps. Where raw deviations lie far apart, one normalisation for all would leave the small part next to nothing."),
    controls(updates()),
    live(() => table("Mean and deviation, and the part's share of all |advantages|", [["part", "raw", "in the loss", "share, raw", "in the loss"], ...PARTS.map((name, k) => [partName(name), plusMinus("raw-", "part_raw_", k), plusMinus("", "part_", k), share(`raw-share-${k}`, of("part_raw_share", k)), share(`share-${k}`, of("part_share", k))])]), "div"),
    live(() => { const known = PARTS.map((_, k) => of("part_raw_std", k)).filter((value) => value > 0); return known.length > 1 ? ["The largest raw deviation is ", num("raw-ratio", Math.max(...known) / Math.min(...known), 1), " times the smallest."] : ["Only one part of this update has advantages that differ."]; }),
    aside("A bar goes from one deviation below the part's mean to one above."),
  ], [spans("raw", "Raw advantages, by part", "part_raw", () => "var(--soft)"), spans("normalised", "What the loss took, by part", "part", tint)]);
}

if (!several) {
  chapter("one", "One part", [
    text("This run divided nothing, so that all its advantages had one deviation: as in PPO. Train with group_strategy task, auto or another to see parts here."),
    live(() => ["Before normalisation that deviation was ", num("raw-std", S["credit/std"]?.at(-1) ?? null), " in the last update."]),
  ], S["credit/std"] ? [figure("raw-std", "Deviation of the raw advantages", {
    height: 210, draw: (width, height) => { const frame = drawn(width, height, { y: [0, Math.max(1e-9, ...S["credit/std"]) * 1.08], up: "deviation", left: 56, format: (value) => number(value) }); return [frame.nodes, course(frame, S["credit/std"], "var(--new)")]; },
    says: () => `${number(S["credit/std"].at(-1))} in the last update.`, rows: overTime(["deviation"], (at) => [S["credit/std"][at]]),
  })] : []);
}

const flips = S["partition/sign_flips"];
if (flips) {
  const known = flips.filter((value) => value !== null);
  chapter("flips", "Turned signs", [
    text("The share of steps whose advantage in the loss has another sign than the raw one less its task's mean: such a step is pushed the wrong way. By task it is 0 by construction."),
    live(() => ["Mean over the run ", share("flips-mean", mean(known)), ", highest ", share("flips-highest", Math.max(...known)), ", in the last update ", share("flips-last", known.at(-1)), "."]),
  ], [figure("flips", "Share of steps with a turned sign", {
    height: 200, draw: (width, height) => { const frame = drawn(width, height, { y: [0, Math.max(0.02, ...known) * 1.08], up: "share of the steps", format: (value) => number(value) }); return [frame.nodes, course(frame, flips, "var(--new)"), several ? mark(frame) : null]; },
    says: () => `${number(100 * known.at(-1))} % in the last update.`, rows: overTime(["turned signs"], (at) => [flips[at]]),
  })]);
}

const CURVES = TASKS.length ? TASKS.map((name) => [name, S[`score/${name}`]]) : S["reward/mean"] ? [["mean return", S["reward/mean"]]] : [];
if (CURVES.length) {
  const all = CURVES.flatMap(([, values]) => values).filter((value) => value !== null), low = Math.min(...(TASKS.length ? [0] : []), ...all), high = Math.max(...(TASKS.length ? [1] : [low + 1e-6]), ...all);
  chapter("scores", TASKS.length ? "Task by task" : "Returns", [
    text(TASKS.length ? "Each task's mean score in training, 0 for a random policy and 1 for a solved task, and its share of all |advantages| in the loss: a drowned task lacks it." : "The mean return of the episodes of each update."),
    live(() => ["In the last update: ", CURVES.map(([name, values], k) => [`${name} `, num(`last-${k}`, values.at(-1)), k + 1 < CURVES.length ? ", " : "."])]),
  ], [
    figure("scores", TASKS.length ? "Score of each task" : "Mean return", {
      height: 240, key: TASKS.length ? legend(...CURVES.map(([name], k) => [tint(k), name, "stroke"])) : null,
      draw: (width, height) => { const frame = drawn(width, height, { y: [low, high], up: TASKS.length ? "score" : "return" }); return [frame.nodes, CURVES.map(([, values], k) => course(frame, values, tint(k))), several ? mark(frame) : null]; },
      says: () => CURVES.map(([name, values]) => `${name}: ${number(values.at(-1))} in the last update`).join(", "), rows: overTime(CURVES.map(([name]) => name), (at) => CURVES.map(([, values]) => values[at])),
    }),
    ...(TASK_SHARES.length ? [figure("shares", "Share of all |advantages| in the loss, by task", {
      height: 210, key: legend(...TASK_SHARES.map((name, k) => [tint(k), name, "stroke"])),
      draw: (width, height) => { const frame = drawn(width, height, { y: [0, 1], up: "share" }); return [frame.nodes, TASK_SHARES.map((name, k) => course(frame, S[`absolute_share/${name}`], tint(k))), several ? mark(frame) : null]; },
      says: () => TASK_SHARES.map((name) => `${name}: ${number(S[`absolute_share/${name}`].at(-1))}`).join(", "), rows: overTime(TASK_SHARES, (at) => TASK_SHARES.map((name) => S[`absolute_share/${name}`][at])),
    })] : []),
  ]);
}
document.getElementById("foot").append(text("Everything here is read from the run's metrics.jsonl. Parts are no groups of GRPO: a group is several episodes from one start. To try other ways of dividing, see formation.html of stateset-agents learn."));
begin();
