// Before and after: success, and what else an evaluation found, as shares with their intervals.

const share = (value) => `${(value * 100).toFixed(1)}%`;
const interval = (side) => `[${share(side.low)}, ${share(side.high)}]`;

function showMeasured(data) {
  const [all] = data.measured;
  if (!all) {
    part("measured").replaceChildren(h("h2", {}, "Before and after"), note("This run was not measured before and after training."));
    return;
  }
  const { moved } = data;
  const inPoints = (value) => minus(`${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`);
  const change = moved?.n && moved.difference !== null ? [h("p", { class: `change ${moved.interval[0] > 0 ? "up" : moved.interval[1] < 0 ? "down" : ""}` }, h("span", { class: "label" }, "after − before, paired by scenario"),
    h("span", { class: "figure" }, inPoints(moved.difference), h("small", {}, " points")),
    h("span", { class: "detail" }, `95 %: ${inPoints(moved.interval[0])} to ${inPoints(moved.interval[1])}; ${moved.gained} gained, ${moved.lost} lost of ${moved.n}`))] : [];
  const headline = [["before", "old"], ["after", "new"]].filter(([side]) => all[side]).map(([side, kind]) => {
    const greedy = data.greedy[side];
    const { n, tries } = all[side];
    const of = tries > 1 ? `${n} tries, ${tries} of each held-out scenario` : `${n} held-out scenarios`;
    const detail = `95 %: ${share(all[side].low)} to ${share(all[side].high)}, ${of}${greedy === null ? "" : `; greedy ${share(greedy)}`}`;
    return h("p", { class: kind }, h("span", { class: "label" }, side), h("span", { class: "figure" }, share(all[side].value)), h("span", { class: "detail" }, detail));
  });
  const success = sharesTable("Success before and after, with 95 % intervals", "success, 95 % interval", data.measured);
  const also = data.also.length ? h("details", { open: part("measured").querySelector("details")?.open }, h("summary", {}, data.also.map(inShort).join(" · ")),
    data.also.map(({ title, note: about, rows }) => [
      h("h3", {}, title, about ? h("span", { class: "n" }, ` ${about}`) : null),
      sharesTable(`${title}, before and after, with 95 % intervals`, "95 % interval", rows),
    ])) : null;
  part("measured").replaceChildren(h("h2", {}, "Before and after"), h("div", { class: "headline" }, change, headline), success, ...(also ? [also] : []));
}

/** A table by the one row that says most: `Twins, both of a pair right: 0.4% → 86.7%`. */
function inShort({ title, main, rows }) {
  const { name, before, after } = rows.find((row) => row.name === main) ?? rows[0];
  return `${title}, ${name}: ${[before, after].filter(Boolean).map((side) => share(side.value)).join(" → ")}`;
}

/** Rows of {name, before, after}, drawn and in figures; a side is null where it was not measured. */
function sharesTable(label, title, measured) {
  const mark = (side, kind) => side ? [
    h("span", { class: `range ${kind}`, style: `left:${side.low * 100}%;width:${(side.high - side.low) * 100}%` }),
    h("span", { class: `spot ${kind}`, style: `left:${side.value * 100}%` }),
  ] : [];
  const words = (side, kind) => side ? h("span", { class: kind }, `${share(side.value)} `, h("span", { class: "interval" }, interval(side))) : h("span", { class: "n" }, "not measured");
  const count = ({ n, tries }) => (tries > 1 ? `n = ${n}, ${tries} tries each` : `n = ${n}`);
  const counts = ({ before, after }) => [...new Set([before, after].filter(Boolean).map(count))].join("; then ");
  const rows = measured.map((row) => h("div", { class: row.name === "All scenarios" ? "family total" : "family", role: "row" },
    h("span", { class: "name", role: "rowheader" }, `${row.name} `, h("span", { class: "n" }, counts(row))),
    h("span", { class: "track", role: "cell", "aria-hidden": "true" }, mark(row.before, "old"), mark(row.after, "new")),
    h("span", { class: "values", role: "cell" }, words(row.before, "old"), words(row.after, "new"))));
  const head = h("div", { class: "family head", role: "row" }, h("span", { role: "columnheader" }, title),
    h("span", { class: "scale", role: "columnheader" }, ...["0 %", "50 %", "100 %"].map((text) => h("i", {}, text))),
    h("span", { role: "columnheader" }, h("b", { class: "key old" }), "before ", h("b", { class: "key new" }), "after"));
  return h("div", { class: "families", role: "table", "aria-label": label }, head, rows);
}
