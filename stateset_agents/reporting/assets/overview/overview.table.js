// The table of runs: sorted by a click on a column, and which experiments all other parts show.

const points = (value) => (value === null || value === undefined ? "–" : minus(`${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`));
const spread = ([low, high]) => `[${points(low)}, ${points(high)}]`;
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);
const shareOrNumber = (measure) => (measure === "success" ? percent : number);
const duration = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);
const swatch = (key) => h("span", { class: "swatch", style: `--key: var(--c${key % 12})`, "aria-hidden": "true" });

const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["seed", "seed", (run) => run.seed],
  ["state", "state", (run) => run.ended ?? "not ended"],
  ["steps", "steps", (run) => run.steps],
  ["before", "before", (run) => run.before?.value],
  ["after", "after", (run) => run.after?.value],
  ["gain", "after − before", (run) => run.gain?.mean],
  ["reward", "last reward", (run) => run.reward],
  ["time", "training", (run) => run.seconds],
];

/** What each cell says. */
function cells(run, data) {
  const name = [swatch(run.experiment), run.has_report ? h("a", { href: `${data.base ?? ""}${run.name}/report.html` }, run.name) : run.name];
  const within = (interval, say) => (interval ? h("span", { class: "interval" }, ` [${interval.map((end) => say(end)).join(", ")}]`) : "");
  const side = (part, say = shareOrNumber(part?.measure)) => (part ? [say(part.value), within(part.interval, say)] : "–");
  const isSuccess = run.gain?.measure === "success";
  const by = isSuccess ? points : signedNumber;
  const gain = run.gain ? [h("b", {}, by(run.gain.mean)), within(run.gain.interval, by), isSuccess && !inPoints(data) ? " points" : ""] : "–";
  const steps = run.planned && run.planned !== run.steps ? `${number(run.steps)} of ${number(run.planned)}` : number(run.steps);
  const { label } = data.experiments[run.experiment];
  return [[...name, label === run.name ? "" : h("span", { class: "n" }, ` ${label}`)], run.seed ?? "–", run.ended ?? "not ended", steps, run.before ? shareOrNumber(run.before.measure)(run.before.value) : "–", side(run.after), gain, number(run.reward), duration(run.seconds)];
}

/** Runs that could not be read, each with the reason. */
const damagedRuns = (data) => h("div", { class: "damaged" }, data.damaged.map(([name, reason]) => note(h("b", {}, name), ` is left out: ${reason}`)));
const inPoints = ({ runs }) => runs.every(({ gain }) => !gain || gain.measure === "success");
const NUMERIC = { steps: "environment steps", reward: "last return" }; // in place of those names, where no run is of conversations

function runsTable(data, view, change) {
  const isNumeric = data.runs.every(({ kind }) => kind === "numeric");
  const at = COLUMNS.findIndex(([name]) => name === view.sort);
  const runs = data.runs.filter((run) => view.shown.has(run.experiment));
  if (at >= 0) {
    const value = COLUMNS[at][2];
    const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    runs.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if ((x ?? null) === null || (y ?? null) === null) return ((x ?? null) === null) - ((y ?? null) === null); // unknown last
      return view.down ? order(y, x) : order(x, y);
    });
  }
  const head = COLUMNS.map(([name, text], column) => h("th", { scope: "col", "aria-sort": column === at ? (view.down ? "descending" : "ascending") : null },
    h("button", { type: "button", class: "sort", "data-sort": name, onclick: () => change({ sort: name, down: view.sort === name ? !view.down : !["name", "seed", "state"].includes(name) }) }, isNumeric ? (NUMERIC[name] ?? text) : text, name === "gain" && inPoints(data) ? ", points" : "", h("span", { "aria-hidden": "true" }, column === at ? (view.down ? " ▾" : " ▴") : ""))));
  const rows = runs.map((run) => h("tr", {}, cells(run, data).map((cell, column) => (column ? h("td", {}, cell) : h("th", { scope: "row" }, cell)))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

/** The table as rows of plain values. */
function runsRows(data) {
  const names = data.settings.map(([name]) => name);
  const head = ["run", "experiment", "seed", "ended", "steps", "before", "before low", "before high", "after", "after low", "after high", "gain", "gain low", "gain high", "gained", "lost", "last reward", "seconds", ...names];
  const side = (part) => [part?.value, part?.interval?.[0], part?.interval?.[1]];
  return [head, ...data.runs.map((run, at) => [run.name, data.experiments[run.experiment].label, run.seed, run.ended, run.steps, ...side(run.before), ...side(run.after),
    run.gain?.mean, run.gain?.interval?.[0], run.gain?.interval?.[1], run.gain?.gained, run.gain?.lost, run.reward, run.seconds, ...data.settings.map(([, values]) => values[at])])];
}

/** A box to tick for each experiment; all other parts show those that are ticked. */
function experimentBoxes(data, view, change) {
  const count = (at) => data.runs.filter((run) => run.experiment === at).length;
  const box = (one, at) => h("label", { class: "check" }, h("input", { type: "checkbox", "data-experiment": at, checked: view.shown.has(at), onchange: (event) => {
    const shown = new Set(view.shown);
    shown[event.target.checked ? "add" : "delete"](at);
    change({ shown });
  } }), " ", swatch(at), one.label, h("span", { class: "n" }, ` ${plural(count(at), "run")}`));
  const link = (text, shown) => h("button", { type: "button", class: "link", onclick: () => change({ shown: new Set(shown) }) }, text);
  return h("fieldset", { class: "experiments" }, h("legend", {}, "Experiments: runs that differ in nothing but their seed"),
    h("div", { class: "boxes" }, data.experiments.map(box)), h("div", { class: "tools" }, link("all", data.experiments.keys()), link("none", [])));
}

/** Which settings differ, between the experiments shown and within one. */
function settingsTable(data, view) {
  const shown = data.experiments.map((one, at) => [one, at]).filter(([, at]) => view.shown.has(at));
  const of = (values, experiment) => [...new Set(data.runs.map((run, at) => [run, at]).filter(([run]) => run.experiment === experiment).map(([, at]) => values[at] ?? "not set"))].join(", ");
  const rows = data.settings.map(([name, values]) => [name, shown.map(([, at]) => of(values, at))]);
  if (!rows.length) return note("All runs have the same settings.");
  const body = rows.map(([name, values]) => h("tr", { class: new Set(values).size > 1 ? "differs" : "" }, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, value))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings that differ" }, h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), shown.map(([one, at]) => h("th", { scope: "col" }, swatch(at), one.label)))), h("tbody", {}, body)));
}
