// The page's parts, from its data; on a live page again whenever the run has gone on.

function showTop(data) {
  const facts = data.facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)));
  const live = "live" in document.body.dataset ? h("span", { id: "live", role: "status" }, "live") : null;
  part("top").replaceChildren(h("h1", {}, data.name, live), h("dl", { class: "facts" }, facts));
}

/** Charts as they stand, for a page that is shown again. */
let standing = "";

function showCurves(data) {
  const all = [...data.curves, ...data.terms, ...data.others.flatMap(({ charts }) => charts)];
  const names = JSON.stringify(all.map((chart) => [chart.title, chart.series.map((one) => one.name)]));
  if (names === standing) {
    [...part("curves").querySelectorAll(".plot")].forEach((place, at) => give(place, all[at]));
    return;
  }
  standing = names;
  const open = new Set([...part("curves").querySelectorAll("details[open]")].map((one) => one.id));
  dropCharts(part("curves"));
  const grid = (charts) => h("div", { class: "charts" }, charts.map(chartFigure));
  const folded = (id, title, ...inside) => h("details", { id, open: open.has(id) }, h("summary", {}, title), ...inside);
  const count = data.others.reduce((sum, { charts }) => sum + charts.length, 0);
  part("curves").replaceChildren(
    h("h2", {}, "Learning curves"),
    data.curves.length
      ? note("Thin: each step. Strong: moving average over about a tenth of the run. Point at a curve, or focus it and use the arrow keys, for a step's values; drag to zoom, double-click to go back.")
      : note("No step has finished yet."),
    grid(data.curves),
    ...(data.terms.length ? [h("h3", {}, "Terms of the reward"), grid(data.terms)] : []),
    ...(count ? [folded("all-metrics", `All other metrics (${count})`, ...data.others.map(({ stage, charts }) => [h("h4", { class: "stage" }, stage), grid(charts)]).flat())] : []),
  );
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

function showPage(data) {
  const measured = data.numeric ? [showPlayers, showCurves, showEpisodes, showWindows] : [showMeasured, showCurves];
  for (const show of [showTop, ...measured, showDiagnostics, showSettings]) show(data);
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
  events.onerror = () => say("connection lost");
  if (!browser) return;
  events.addEventListener("conversations", async () => {
    const browsed = await (await fetch("conversations.json")).json();
    timeline.update(browsed.timeline);
    browser.update(browsed);
  });
}

const data = JSON.parse(await unpacked("data"));
showPage(data);
const browser = data.numeric ? null : new Browser(part("conversations"), data);
const timeline = data.numeric ? null : new Timeline(part("timeline"), data.timeline, (...group) => browser.open(...group));
if ("live" in document.body.dataset) follow(timeline, browser);
