// The page of runs and deployments; on a live page again whenever something is new. It shows and changes nothing.

const data = JSON.parse(await unpacked("data"));
const live = "live" in document.body.dataset;
const CURVES = 3; // of the runs
const parts = new Map(); // place -> what it shows, as text: equal data are not shown again

/** Fill a place if its data are new; what is open and what has the focus stays so. */
function fill(place, value, make) {
  const text = JSON.stringify(value);
  if (parts.get(place) === text) return;
  parts.set(place, text);
  const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.key));
  const scrolled = [...place.querySelectorAll(".scroll, .entries")].map((one) => [one.scrollLeft, one.scrollTop]);
  const focused = place.contains(document.activeElement) ? [...place.querySelectorAll("summary, button, a, [tabindex]")].indexOf(document.activeElement) : -1;
  place.replaceChildren(...[make()].flat(Infinity));
  for (const one of place.querySelectorAll("details")) if (open.has(one.dataset.key)) one.open = true;
  [...place.querySelectorAll(".scroll, .entries")].forEach((one, at) => ([one.scrollLeft, one.scrollTop] = scrolled[at] ?? [0, 0]));
  if (focused >= 0) [...place.querySelectorAll("summary, button, a, [tabindex]")][focused]?.focus({ preventScroll: true });
}

function showTop() {
  const { runs, deployments } = data;
  const said = [plural(runs?.runs.length ?? 0, "run"), deployments ? plural(deployments.length, "deployment") : ""].filter(Boolean).join(", ");
  fill(part("top"), [data.name, said], () => [h("div", { class: "title" }, h("h1", {}, data.name), live ? h("span", { id: "live", role: "status" }, "live") : ""), note(said)]);
  const links = [["runs", "Runs"], ...(runs ? [["curves", "Curves"]] : []), ...(deployments ?? []).map(({ id, candidate }) => [`deployment-${id}`, `${id} ${candidate}`])];
  fill(part("nav"), links, () => [h("a", { href: "#top", class: "to-top" }, "Top"), ...links.map(([id, name]) => h("a", { href: `#${id}` }, name))]);
}

function showRuns() {
  const { runs } = data;
  const view = { shown: new Set(runs ? runs.experiments.keys() : []), sort: state.get("sort") ?? "", down: state.get("order") === "down", apart: false };
  const change = ({ sort, down }) => {
    remember({ sort, order: down ? "down" : null });
    showRuns();
  };
  fill(part("runs"), [runs?.runs, runs?.damaged, runs?.experiments, view.sort, view.down], () => [h("h2", {}, "Runs"), runs ? damagedRuns(runs) : "", runs ? runsTable(runs, view, change) : note("There is no run in this folder yet.")]);
  const names = runs ? FIRST.filter((name) => name in runs.curves).slice(0, CURVES) : [];
  const charts = new Map(names.map((name) => [name, overlay(runs, view, name)]).filter(([, chart]) => chart.series.length));
  part("curves").hidden = !charts.size;
  showCharts(part("curves"), charts, (grid) => [h("h2", {}, "Curves"), note("Line: mean over an experiment's seeds. Band: from the lowest to the highest of them."), grid]);
}

/** Charts in a place: made once, later given new values, unless there are other lines in them. */
function showCharts(place, charts, around, below = () => "") {
  const names = JSON.stringify([...charts].map(([name, chart]) => [name, chart.series.map((one) => one.name), chart.along]));
  if (place.dataset.charts === names) {
    for (const plot of place.querySelectorAll(".plot")) give(plot, charts.get(plot.dataset.key));
    return;
  }
  place.dataset.charts = names;
  dropCharts(place);
  const figures_ = [...charts].map(([name, chart]) => {
    const figure = chartFigure(chart);
    const plot = figure.querySelector(".plot");
    plot.dataset.key = name;
    plot.after(below(name));
    return figure;
  });
  place.replaceChildren(...around(h("div", { class: "charts" }, figures_)));
}

/** The places of one deployment's parts. */
function deploymentSection(one) {
  const place = (name) => h("div", { class: name, "data-part": name });
  const titled = (title, name) => [h("h3", {}, title), place(name)];
  return h("section", { id: `deployment-${one.id}`, class: "deployment", tabindex: "-1" }, h("h2", {}, `Deployment ${one.id}`),
    place("facts-of"), place("charts-of"), h("div", { class: "pair" }, h("div", {}, titled("Arms", "arms")), h("div", {}, titled("Guards of the candidate", "guards"))),
    titled("Last violations", "violations"), titled("Last conversations", "conversations"), titled("Journal", "journal"));
}

function showDeployment(one) {
  let section = part(`deployment-${one.id}`);
  if (!section) {
    section = deploymentSection(one);
    const newer = [...part("deployments").children].find((other) => other.id < section.id);
    part("deployments").insertBefore(section, newer ?? null); // the newest first
  }
  const of = (name) => section.querySelector(`[data-part="${name}"]`);
  fill(of("facts-of"), [one.status, one.candidate, one.baseline], () => deploymentFacts(one));
  const legend = h("div", { class: "mode-legend" });
  showCharts(of("charts-of"), new Map(Object.entries(deploymentCharts(one))), (grid) => [grid], (name) => (name === "share" ? legend : ""));
  fill(of("charts-of").querySelector(".mode-legend"), one.modes, () => modeLegend(one));
  fill(of("arms"), [one.status.arms, one.arms], () => armsTable(one));
  fill(of("guards"), [one.guards, one.brakes, one.status.arms.candidate], () => guardsTable(one));
  fill(of("violations"), one.violations, () => violations(one));
  fill(of("conversations"), one.conversations, () => conversations(one));
  fill(of("journal"), one.journal, () => journal(one));
}

function showDeployments() {
  const { deployments } = data;
  if (deployments?.length) {
    part("deployments").querySelector(":scope > .none")?.remove();
    for (const one of deployments) showDeployment(one);
  } else if (deployments && !part("deployments").children.length) part("deployments").append(h("section", { class: "none" }, h("h2", {}, "Deployments"), note("There is no deployment in this journal yet.")));
}

function show() {
  showTop();
  showRuns();
  showDeployments();
}

const newestFirst = (deployments) => deployments.sort((a, b) => (a.id < b.id ? 1 : -1));

/** Follow what goes on. */
function follow() {
  const events = new EventSource("events");
  const say = (text) => (part("live").textContent = text);
  for (const name of ["runs", "deployments"]) {
    events.addEventListener(name, (event) => {
      const found = JSON.parse(event.data).data;
      data[name] = name === "runs" || found === null ? found : newestFirst([...found, ...data.deployments.filter(({ id }) => !found.some((one) => one.id === id))]);
      show();
      say("live");
    });
  }
  events.addEventListener("trouble", (event) => say(JSON.parse(event.data).text));
  events.onerror = () => say("connection lost");
}

show();
listeners.push(show);
if (readAddress()[0]) part(readAddress()[0])?.scrollIntoView({ block: "start" });
if (live) follow();
