// Files made in the browser from what the page shows: CSV, JSON, PNG. Nothing is sent anywhere.

function download(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Rows of cells as CSV (RFC 4180); a text that a spreadsheet would take for a formula gets an apostrophe. */
function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) && !Number.isFinite(Number(value)) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

const fileName = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart";
const saveCsv = (name, rows) => download(`${fileName(name)}.csv`, csv(rows), "text/csv");
const saveJson = (name, value) => download(`${fileName(name)}.json`, JSON.stringify(value, null, 1), "application/json");

/** A chart's values by step, a column for each series, with its band where it has one. */
function chartRows(chart) {
  const steps = [...new Set(chart.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const columns = chart.series.flatMap((one) => [[one.name, one, one.values], ...(one.low ? [[`${one.name} low`, one, one.low], [`${one.name} high`, one, one.high]] : [])]);
  const places = new Map(chart.series.map((one) => [one, new Map(one.steps.map((step, at) => [step, at]))]));
  return [[chart.along, ...columns.map(([name]) => name)], ...steps.map((step) => [step, ...columns.map(([, one, values]) => values[places.get(one).get(step)] ?? null)])];
}

/** A drawn chart as a picture, twice its size, on the page's own ground. */
async function savePng(name, place) {
  const svg = await window.Plotly.toImage(place, { format: "svg", width: place.clientWidth, height: place.clientHeight });
  const image = new Image();
  image.src = svg;
  await image.decode();
  const canvas = h("canvas", { width: 2 * place.clientWidth, height: 2 * place.clientHeight });
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(`${fileName(name)}.png`, blob), "image/png");
}
