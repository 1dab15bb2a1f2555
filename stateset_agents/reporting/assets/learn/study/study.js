// What the pages of a study share: its suites, arms, runs and metrics.

/** A setting that is a number, which YAML reads as text where it is written as 5e-4. */
const plainNumber = (value) => (typeof value === "string" && /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(value.trim()) ? Number(value) : value);
for (const cell of data.cells) cell.settings = Object.fromEntries(Object.entries(cell.settings ?? {}).map(([name, value]) => [name, plainNumber(value)]));

const unique = (values) => [...new Set(values)];
const SUITES = unique(data.cells.map(({ suite }) => suite)), ARMS_OF = (suite) => unique(data.cells.filter((cell) => cell.suite === suite).map(({ arm }) => arm));
const cellsOf = (suite, arm) => data.cells.filter((cell) => cell.suite === suite && cell.arm === arm);
const tasksOf = (suite) => data.cells.find((cell) => cell.suite === suite).tasks;
const plainOf = (suite) => (ARMS_OF(suite).includes(data.reference) ? data.reference : ARMS_OF(suite)[0]);
const column = (cell, task) => cell.curve.scores.map((row) => row[task]);
const isOutcome = (suite, arm) => cellsOf(suite, arm).some((cell) => cell.parts?.outcome);
const armName = (suite, arm) => `${arm}${arm === data.reference ? " (reference)" : ""}${isOutcome(suite, arm) ? " (diagnostic)" : ""}`;
const METRICS = {
  final_performance: ["final performance", (cell) => cell.final.scores],
  sample_efficiency: ["sample efficiency: area under the curve", (cell) => [areaUnder(cell.curve.steps, meanCurve(cell.curve.scores), data.total_steps)]],
  worst_task: ["worst task", (cell) => [cell.worst_task]],
  group_fairness: ["fairness: worst by mean", (cell) => [cell.fairness]],
};
const rowsOf = (suite, arm, metric) => cellsOf(suite, arm).map(METRICS[metric][1]);
const fromTo = (interval) => (interval ? `${number(interval[0])} to ${number(interval[1])}` : "no interval: fewer than three seeds");
const studyNote = () => note(`The study ${data.run}: ${plural(data.cells.length, "run")} of ${plural(unique(data.cells.map(({ arm }) => arm)).length, "arm")} on ${plural(SUITES.length, "suite")}. Scores are 0 for a random policy and 1 for a solved task.${data.missing ? ` ${plural(data.missing, "run")} of the study are still to be made.` : ""}`);
