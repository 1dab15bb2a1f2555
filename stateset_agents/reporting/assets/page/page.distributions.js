// Heatmaps of all conversations of training: rewards and failures by step. A cell opens the conversations in it.

const CELL = 14; // pixels of height

/** `open(column, row, count)` shows the conversations of a cell, or is null. */
function heatmap(chart, open) {
  const { columns, rows, counts, totals } = chart;
  const kinds = typeof rows[0] === "string";
  const name = ([low, high]) => (low === high ? number(low) : `${number(low)} to ${number(high)}`);
  const rowName = (row) => (kinds ? kindName(rows[row]) : `reward ${name(rows[row])}`);
  const part_ = (column, row) => (totals[column] ? counts[column][row] / totals[column] : 0);
  const most = Math.max(...columns.flatMap((_, column) => rows.map((_row, row) => part_(column, row))));
  const say = (column, row) => `${chart.column_name} ${name(columns[column])}, ${rowName(row)}: ${counts[column][row].toLocaleString("en")} of ${plural(totals[column], "conversation")}, ${number(part_(column, row), true)}`;
  const readout = h("output", { "aria-live": "off" });
  const summary = `${chart.title}: ${rows.map((_, row) => [rowName(row), counts.reduce((sum, column) => sum + column[row], 0)]).filter(([, sum]) => sum).map(([text, sum]) => `${text} ${sum}`).join(", ")}`;
  const body = h("div", { class: "heat", tabindex: "0", role: "application", "aria-roledescription": "heatmap", "aria-label": `${summary}. Arrow keys read the cells${open ? ", Enter opens one" : ""}.`, style: `grid-template-columns: repeat(${columns.length}, minmax(0, 1fr)); grid-auto-rows: ${kinds ? 24 : CELL}px` });
  const cells = [];
  let at = null;
  const read = (next) => {
    if (at) cells[at[1]][at[0]].classList.remove("here");
    at = next;
    readout.textContent = at ? say(...at) : "";
    if (at) cells[at[1]][at[0]].classList.add("here");
  };
  for (let row = rows.length - 1; row >= 0; row -= 1) {
    cells[row] = columns.map((_, column) => {
      const full = part_(column, row) / (most || 1);
      const cell = h("i", { style: counts[column][row] ? `--w: ${Math.round(12 + 88 * full)}%` : null });
      cell.addEventListener("mouseenter", () => read([column, row]));
      if (open) cell.addEventListener("click", () => counts[column][row] && open(columns[column], rows[row], counts[column][row]));
      return cell;
    });
    body.append(...cells[row]);
  }
  body.addEventListener("mouseleave", () => read(null));
  body.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  body.addEventListener("blur", () => { readout.setAttribute("aria-live", "off"); read(null); });
  body.addEventListener("keydown", (event) => {
    const [column, row] = at ?? [columns.length - 1, 0];
    const moves = { ArrowLeft: [column - 1, row], ArrowRight: [column + 1, row], ArrowUp: [column, row + 1], ArrowDown: [column, row - 1], Home: [0, row], End: [columns.length - 1, row] };
    if (event.key === "Enter" && at && open && counts[column][row]) open(columns[column], rows[row], counts[column][row]);
    else if (moves[event.key]) read(at ? [Math.max(0, Math.min(columns.length - 1, moves[event.key][0])), Math.max(0, Math.min(rows.length - 1, moves[event.key][1]))] : [column, row]);
    else return;
    event.preventDefault();
  });
  const labels = kinds ? rows.map(kindName).reverse() : [number(rows.at(-1)[1]), number(rows[0][0])];
  const scale = h("div", { class: `heat-rows${kinds ? " kinds" : ""}`, "aria-hidden": "true" }, labels.map((text) => h("span", {}, text)));
  const axis = h("div", { class: "heat-columns", "aria-hidden": "true" }, h("span", {}, number(columns[0][0])), h("span", {}, chart.column_name), h("span", {}, number(columns.at(-1)[1])));
  const saved = h("button", { type: "button", class: "save", "aria-label": `${chart.title} as CSV`, onclick: () => saveCsv(chart.title, [[`${chart.column_name} from`, "to", "conversations", ...rows.map((_, row) => rowName(row))], ...columns.map((ends_, column) => [...ends_, totals[column], ...counts[column]])]) }, "CSV");
  return h("figure", {}, h("figcaption", {}, h("strong", {}, chart.title), readout, h("span", {}, `${chart.note}; strong: a large share of the column`)), h("div", { class: "heat-frame" }, scale, body, axis), h("div", { class: "below" }, h("span", { class: "saves" }, saved)));
}

const kindName = (kind) => ({ none: "failed, no rule broken", truncated: "cut by a limit", failed: "broke off" }[kind] ?? `broke: ${kind}`);

function showDistributions(heatmaps, browser) {
  part("distributions").hidden = document.querySelector("nav [href='#distributions']").hidden = !heatmaps.length;
  const open = (chart) => (chart.column_name !== "step" ? null : ([first, last], row, count) => {
    const what = typeof row === "string" ? (["truncated", "failed"].includes(row) ? { text: `status:${row}` } : { outcome: "failed", text: `broke:${row}` }) : { "reward-from": row[0], "reward-to": row[1] };
    browser.show({ stage: "train", "step-from": first, "step-to": last, ...what }, count);
  });
  part("distributions").replaceChildren(h("h2", {}, "Distributions"),
    note("Point at a cell, or focus a map and use the arrow keys. A click, or Enter, lists the conversations of a cell."),
    h("div", { class: "charts" }, heatmaps.map((chart) => heatmap(chart, open(chart)))));
}
