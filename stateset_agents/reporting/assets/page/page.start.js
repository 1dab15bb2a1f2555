// The page's parts, from its data; on a live page again whenever the run has gone on.

function showTop(data) {
  const facts = data.facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)));
  const live = "live" in document.body.dataset ? h("span", { id: "live", role: "status" }, "live") : null;
  part("top").replaceChildren(h("div", { class: "title" }, h("h1", {}, data.name), live), h("dl", { class: "facts" }, facts));
}

/** Charts as they stand, for a page that is shown again. */
let standing = "";

function showCurves(data) {
  const others = data.others.flatMap(({ charts }) => charts);
  const all = new Map([["curve", data.curves], ["term", data.terms], ["other", others]].flatMap(([kind, charts]) => charts.map((chart) => [`${kind} ${chart.title}`, chart])));
  const names = JSON.stringify([...all].map(([name, chart]) => [name, chart.series.map((one) => one.name)]));
  if (names === standing) {
    for (const place of part("curves").querySelectorAll(".plot")) give(place, all.get(place.dataset.key));
    return;
  }
  standing = names;
  const open = new Set([...part("curves").querySelectorAll("details[open]")].map((one) => one.id));
  dropCharts(part("curves"));
  const grid = (kind, charts) => h("div", { class: "charts" }, charts.map((chart) => {
    const figure = chartFigure(chart);
    figure.querySelector(".plot").dataset.key = `${kind} ${chart.title}`;
    return figure;
  }));
  part("curves").replaceChildren(
    h("h2", {}, "Learning curves"),
    data.curves.length
      ? note(`${data.curves.some((chart) => stepsOf(chart).length >= SMOOTHED_FROM) ? `Thin: each ${data.update}. Strong: moving average over about a tenth of the run. ` : ""}Point at a curve, or focus it and use the arrow keys, for ${data.update === "update" ? "an update" : "a step"}'s values; drag to zoom, double-click to go back.${whenChosen ? " A click, or Enter, shows the conversations of that step." : ""}`)
      : note("No step has finished yet."),
    grid("curve", data.curves),
    ...(data.terms.length ? [h("h3", {}, "Terms of the reward"), grid("term", data.terms)] : []),
    ...(others.length ? [wall(others, open.has("all-metrics") || state.has("metrics"), grid)] : []),
  );
}

/** Does a curve never change? Rounding does not count: 1e-17 is 0. */
function isConstant(chart) {
  const values = chart.series.flatMap((one) => one.values).filter((value) => value !== null);
  const largest = Math.max(0, ...values.map(Math.abs));
  return largest < 1e-12 || Math.max(...values) - Math.min(...values) <= 1e-9 * largest;
}

/** All other metrics: those whose name fits what is typed; those that never change are named in a line. */
function wall(charts, open, grid) {
  const constant = charts.filter(isConstant);
  const moving = charts.filter((chart) => !constant.includes(chart));
  const status = h("span", { class: "note", role: "status" });
  const place = h("div");
  const show = () => {
    const fits = nameFilter(typed.value);
    const found = fits ? moving.filter(({ title }) => fits(title)) : [];
    status.textContent = fits ? `${found.length} of ${moving.length}` : "no regular expression";
    dropCharts(place);
    place.replaceChildren(grid("other", found));
  };
  const typed = h("input", { type: "search", name: "metrics", "aria-label": "Metrics whose name fits", placeholder: "part of a name, or /regex/", autocomplete: "off", oninput: () => {
    remember({ metrics: typed.value }, { anchor: "curves" });
    show();
  } });
  typed.value = state.get("metrics") ?? "";
  show();
  const still = constant.length ? h("details", { class: "still" }, h("summary", {}, `${plural(constant.length, "metric")} that never changed`),
    h("p", { class: "note" }, constant.map((chart) => `${chart.title} ${number(chart.series[0].values.find((value) => value !== null && Math.abs(value) >= 1e-12) ?? 0)}`).join(", "))) : null;
  return h("details", { id: "all-metrics", open }, h("summary", {}, `All other metrics (${moving.length}${constant.length ? `, and ${constant.length} that never changed` : ""})`),
    h("div", { class: "tools" }, h("label", { class: "beside" }, typed), status), place, still);
}

function showDiagnostics(data) {
  const findings = data.findings.map((one) => h("li", { class: one.verdict },
    h("span", { class: "sign", role: "img", "aria-label": one.verdict }, one.sign), h("span", { class: "check" }, one.check),
    h("span", {}, one.seen, one.cure ? h("strong", { class: "cure" }, one.cure) : null)));
  part("diagnostics").replaceChildren(h("h2", {}, "Diagnostics"),
    findings.length ? h("ul", { class: "findings" }, findings) : note("No step has finished yet: nothing to diagnose."));
}

function showSettings(data) {
  const rows = data.settings.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)));
  part("settings").replaceChildren(h("h2", {}, "Settings"),
    h("details", {}, h("summary", {}, `${plural(rows.length, "setting")}, from config.yaml`), h("table", { class: "settings" }, h("tbody", {}, rows))));
}

let shown = {}; // the last data of the page

function showPage(data) {
  shown = { moved: shown.moved, ...data };
  data = shown;
  const measured = data.numeric ? [showPlayers, showCurves, showEpisodes, showWindows] : [showMeasured, showCurves];
  for (const show of [showTop, ...measured, showDiagnostics, showVerdicts, showSettings]) show(data);
}

/** Follow a run that goes on: the server says what is new. */
function follow(timeline, browser) {
  const events = new EventSource("events");
  const say = (text) => (part("live").textContent = text);
  events.addEventListener("page", (event) => {
    const data = JSON.parse(event.data);
    showPage(data);
    say(data.ended ?? "live");
  });
  events.addEventListener("trouble", (event) => say(JSON.parse(event.data).text));
  events.onerror = () => say("connection lost");
  if (!browser) return;
  events.addEventListener("conversations", async () => {
    const browsed = await (await fetch("conversations.json")).json();
    timeline.update(browsed.timeline);
    showDistributions(browsed.distributions, browser);
    showMeasured({ ...shown, moved: browsed.moved });
    browser.update(browsed);
  });
}

const data = JSON.parse(await unpacked("data"));
let browser = null;
let timeline = null;
if (!data.numeric) whenChosen = (step) => browser.openStep(step);
showPage(data);
if (!data.numeric) {
  browser = new Browser(part("conversations"), data);
  showDistributions(data.distributions, browser);
  timeline = new Timeline(part("timeline"), data.timeline, (...group) => browser.open(...group));
  timeline.restore();
}
if (readAddress()[0]) part(readAddress()[0])?.scrollIntoView({ block: "start" });
if ("live" in document.body.dataset) follow(timeline, browser);
