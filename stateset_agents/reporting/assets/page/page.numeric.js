// The parts of a numeric run's page: returns from held-out starts, episodes, actions, and windows of time.

const band = (interval, style = number) => (interval ? ` [${style(interval[0])}, ${style(interval[1])}]` : "");

/** Who earned what from the same starts, and what training was worth against each. */
function showPlayers(data) {
  const rows = data.numeric.players;
  const body = rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.name),
    h("td", {}, h("b", {}, number(row.mean)), h("span", { class: "interval" }, band(row.interval))),
    h("td", {}, row.difference === null ? "" : [h("b", {}, signedNumber(row.difference)), h("span", { class: "interval" }, band(row.difference_interval, signedNumber))]),
    h("td", {}, number(row.length)), h("td", {}, String(row.n))));
  const head = ["", "mean return", "trained policy less it", "length", "episodes"].map((title) => h("th", { scope: "col" }, title));
  part("measured").replaceChildren(h("h2", {}, "Before and after"), ...(rows.length ? [
    note("From held-out starts, by the likeliest actions, with 95 % intervals; differences are paired, start by start."),
    h("div", { class: "wide" }, h("table", { class: "players" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body))),
  ] : [note("This run was not measured before and after training.")]));
}

let shownEpisodes = "";

function showEpisodes(data) {
  const { episodes, actions } = data.numeric;
  const said = JSON.stringify([episodes, actions]);
  if (said === shownEpisodes) return;
  shownEpisodes = said;
  part("episodes").hidden = document.querySelector("nav [href='#episodes']").hidden = !episodes.length && !actions;
  dropCharts(part("episodes"));
  part("episodes").replaceChildren(h("h2", {}, "Episodes"), h("div", { class: "charts" }, episodes.map(chartFigure)),
    ...(actions ? actionTable(actions) : []));
}

/** How often each action was taken, at the start of training and at its end. */
function actionTable({ rows, updates }) {
  const most = Math.max(...rows.flatMap(({ first, last }) => [first, last]), 1e-9);
  const bar = (value, kind) => h("span", { class: `bar ${kind}`, style: `width:${(100 * value) / most}%` });
  const lines = rows.map(({ name, first, last }) => h("div", { class: "family action", role: "row" },
    h("span", { class: "name", role: "rowheader" }, name),
    h("span", { class: "bars", role: "cell", "aria-hidden": "true" }, bar(first, "old"), bar(last, "new")),
    h("span", { class: "values", role: "cell" }, h("span", { class: "old" }, share(first)), h("span", { class: "new" }, share(last)))));
  const head = h("div", { class: "family action head", role: "row" }, h("span", { role: "columnheader" }, "action"), h("span", { role: "columnheader" }, "share of the steps"),
    h("span", { class: "values", role: "columnheader" }, h("span", {}, h("b", { class: "key old" }), "first"), h("span", {}, h("b", { class: "key new" }), "last")));
  const tenth = updates === 1 ? "update" : `${updates} updates`;
  return [h("h3", {}, "Actions", h("span", { class: "n" }, ` in the first and the last ${tenth} of the training`)),
    h("div", { class: "families", role: "table", "aria-label": "Shares of the actions" }, head, lines)];
}

let shownWindows = "";

/** Held-out episodes over time: one is chosen, all its panels are drawn. */
function showWindows(data) {
  const { windows } = data.numeric;
  const place = part("windows");
  place.hidden = document.querySelector("nav [href='#windows']").hidden = !windows.length;
  const said = JSON.stringify(windows);
  if (!windows.length || said === shownWindows) return;
  shownWindows = said;
  const charts = h("div", { class: "charts panels" });
  const about = h("span", { class: "note" });
  const choice = h("select", { "aria-label": "Window", onchange: () => show() }, windows.map(({ name }, at) => h("option", { value: at }, name)));
  const show = () => {
    const chosen = windows[Number(choice.value)];
    about.textContent = `return: ${chosen.note}`;
    dropCharts(charts);
    charts.replaceChildren(...chosen.charts.map(chartFigure));
  };
  choice.value = String(windows.findIndex(({ name }) => name === "median"));
  place.replaceChildren(h("h2", {}, "Windows"),
    note("One held-out episode, played by the policy and by a rule from the same start with the same noise. Worst, median and best are by the policy's gain on the rule, or by its return."),
    h("div", { class: "tools" }, choice, about), charts);
  show();
}
