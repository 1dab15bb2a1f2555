// The page of many runs: what is shown is kept in the address.

const data = JSON.parse(await unpacked("data"));
const FEW = 12; // experiments that are shown at first
const view = {};

function readView() {
  const shown = (state.get("shown") ?? "").split(",").filter(Boolean).map((name) => data.experiments.findIndex(({ label }) => label === decodeURIComponent(name))).filter((at) => at >= 0);
  view.shown = new Set(state.has("shown") ? shown : data.experiments.slice(-FEW).map((_, at, all) => data.experiments.length - all.length + at));
  view.base = Math.max(0, data.experiments.findIndex(({ label }) => label === state.get("base")));
  view.apart = state.get("seeds") === "apart";
  view.metrics = state.get("metrics") ?? "";
  view.sort = state.get("sort") ?? "";
  view.down = state.get("order") === "down";
}

/** Take a change over, and show it everywhere. */
function change(changed) {
  Object.assign(view, changed);
  const few = data.experiments.length <= FEW ? data.experiments.length : FEW;
  const standard = view.shown.size === few && [...view.shown].every((at) => at >= data.experiments.length - few);
  remember({
    shown: standard ? null : [...view.shown].map((at) => encodeURIComponent(data.experiments[at].label)).join(",") || ",",
    base: view.base ? data.experiments[view.base].label : null, seeds: view.apart ? "apart" : null, metrics: view.metrics,
    sort: view.sort, order: view.sort && view.down ? "down" : null,
  });
  show();
}

function show() {
  const focused = document.activeElement;
  const again = ["data-experiment", "data-sort", "name", "aria-label"].map((name) => [name, focused?.getAttribute?.(name)]).find(([, value]) => value !== null && value !== undefined);
  const inside = focused?.closest?.("section, header")?.id;
  const caret = focused?.selectionStart;
  const scrolled = new Map([...document.querySelectorAll(".scroll")].map((element) => [element.getAttribute("aria-label"), element.scrollLeft]));
  const saved = (text, save) => h("button", { type: "button", class: "save", onclick: save }, text);
  const experiments_ = `${plural(data.runs.length, "run")} of ${plural(data.experiments.length, "experiment")}`;
  part("top").replaceChildren(h("div", { class: "title" }, h("h1", {}, data.name), "live" in document.body.dataset ? h("span", { id: "live", role: "status" }, "live") : null), note(experiments_));
  part("experiments").replaceChildren(experimentBoxes(data, view, change));
  part("runs").replaceChildren(h("h2", {}, "Runs"), damagedRuns(data), runsTable(data, view, change), h("div", { class: "tools" }, saved("CSV", () => saveCsv(`${data.name}-runs`, runsRows(data))), saved("JSON", () => saveJson(`${data.name}-runs`, { runs: data.runs, experiments: data.experiments, differences: data.differences, settings: data.settings }))));
  part("held-out").replaceChildren(h("h2", {}, "Held-out results"), ...scores(data, view));
  part("differences").replaceChildren(h("h2", {}, "Differences"), ...differences(data, view, change));
  part("settings").replaceChildren(h("h2", {}, "Settings that differ"), settingsTable(data, view));
  showCurves();
  for (const element of document.querySelectorAll(".scroll")) element.scrollLeft = scrolled.get(element.getAttribute("aria-label")) ?? 0;
  if (again && inside && !focused.isConnected) {
    const found = document.querySelector(`#${inside} [${again[0]}="${CSS.escape(again[1])}"]`);
    found?.focus({ preventScroll: true });
    if (found?.type === "search") found.setSelectionRange(caret, caret);
  }
}

function showCurves() {
  const place = part("curves");
  const open = state.has("metrics") || place.querySelector("details")?.open;
  dropCharts(place);
  const names = Object.keys(data.curves);
  const first = FIRST.filter((name) => names.includes(name));
  const others = names.filter((name) => !first.includes(name));
  const grid = (metrics) => h("div", { class: "charts" }, metrics.map((name) => overlay(data, view, name)).filter((chart) => chart.series.length).map(chartFigure));
  const fits = nameFilter(view.metrics);
  const found = fits ? others.filter(fits) : [];
  const typed = h("input", { type: "search", name: "metrics", "aria-label": "Metrics whose name fits", placeholder: "part of a name, or /regex/", autocomplete: "off", value: view.metrics || null, oninput: (event) => change({ metrics: event.target.value }) });
  const apart = h("label", { class: "check" }, h("input", { type: "checkbox", name: "apart", checked: view.apart, onchange: (event) => change({ apart: event.target.checked }) }), " each run apart");
  const constant = Object.entries(data.constant);
  const wall = h("details", { id: "all-metrics", open: open || null });
  const fill = () => wall.open && wall.children.length === 1 && wall.append(
    h("div", { class: "tools" }, h("label", { class: "beside" }, typed), h("span", { class: "note", role: "status" }, fits ? `${found.length} of ${others.length}` : "no regular expression")),
    grid(found), constant.length ? h("details", {}, h("summary", {}, `${plural(constant.length, "metric")} that never changed`), h("p", { class: "note" }, constant.map(([name, value]) => `${name} ${number(value)}`).join(", "))) : "");
  wall.append(h("summary", {}, `All other metrics (${others.length}${constant.length ? `, and ${constant.length} that never changed` : ""})`));
  wall.addEventListener("toggle", fill);
  place.replaceChildren(h("h2", {}, "Curves"),
    note(view.apart ? "One line for each run: a moving average over about a tenth of it." : "Line: mean over an experiment's seeds. Band: from the lowest to the highest of them. Both are moving averages over about a tenth of the run.", " A click on the line of a single run opens its page at that step."),
    h("div", { class: "tools" }, apart), view.shown.size ? grid(first) : note("No experiment is ticked."), ...(others.length || constant.length ? [wall] : []));
  fill();
}

/** Follow runs that go on. */
function follow() {
  const events = new EventSource("events");
  events.addEventListener("page", (event) => {
    Object.assign(data, JSON.parse(event.data));
    readView();
    show();
  });
  events.addEventListener("trouble", (event) => (part("live").textContent = JSON.parse(event.data).text));
  events.onerror = () => (part("live").textContent = "connection lost");
}

whenChosen = (step, series) => {
  const run = data.runs[series?.run ?? -1];
  if (run?.has_report) location.href = `${run.name}/report.html#conversations?at=${step}`;
};
readView();
show();
listeners.push(() => { readView(); show(); });
if (readAddress()[0]) document.getElementById(readAddress()[0])?.scrollIntoView();
if ("live" in document.body.dataset) follow();
