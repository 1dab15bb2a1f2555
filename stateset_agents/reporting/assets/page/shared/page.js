// What the other parts stand on: elements, numbers, and the page's own data. All parts are one module.

/** An element. Children are elements or text; text never becomes markup. `on...` attributes are listeners. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** A minus sign that can be seen. */
const minus = (text) => text.replace(/^-/, "−");

/** A number short enough for a caption: 38%, 0.0012, 5,120, 1.2e-5. */
function number(value, percent = false) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (percent) return minus(`${(value * 100).toFixed(1).replace(/\.0$/, "")}%`);
  const size = Math.abs(value);
  if (size < 1e-12) return "0"; // rounding
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(size < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(3))));
}

/** A value as it was logged; below 1e-12 is rounding. */
const exact = (value) => (value === null || value === undefined ? "–" : minus(String(Math.abs(value) < 1e-12 ? 0 : value)));

const signed = (value) => (value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${exact(Number(value.toFixed(3)))}`);
const signedNumber = (value) => `${value > 0 ? "+" : ""}${number(value)}`;
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const note = (...text) => h("p", { class: "note" }, ...text);

/** A table; the first cell of each row is its name. */
function plainTable(label, head, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => (at ? h("td", {}, cell) : h("th", { scope: "row" }, cell))))))));
}

const part = (id) => document.getElementById(id);

/** The text of a compressed data block of this page. */
async function unpacked(id) {
  const letters = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** plotly.js: beside the page, or inside it; loaded once. */
let loading = null;
function plotly() {
  loading ??= (async () => {
    if (document.getElementById("plotly-data")) {
      document.body.append(h("script", {}, await unpacked("plotly-data")));
    }
    if (!window.Plotly) {
      const missing = document.querySelector("script[src]")?.getAttribute("src") ?? "plotly.js";
      (document.querySelector("#curves h2") ?? document.querySelector("h1")).after(note(`The curves cannot be drawn: this page needs ${missing}, as seen from its folder. Put it there, or make the report again without --shared-assets.`));
      throw new Error(`${missing} is missing`);
    }
    return window.Plotly;
  })();
  return loading;
}
