// What every learning page stands on: its settings, which the address holds, controls, sections, numbers in the text.

const data = JSON.parse(await unpacked("data"));
const view = {}; // what is set
const standard = {}; // and what stood there at first, which the address leaves out
const drawers = []; // run after each change
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Declare the page's settings: numbers, texts, booleans or lists of numbers. The address overrides them. */
function settings(first) {
  Object.assign(standard, first);
  restore();
}

function restore() {
  for (const [name, first] of Object.entries(standard)) {
    const text = state.get(name);
    const read = (value) => (typeof first === "number" || Array.isArray(first) ? Number(value) : typeof first === "boolean" ? value === "1" : value);
    const given = text === undefined ? null : Array.isArray(first) ? (text === "none" ? [] : text.split("~").map(read)) : read(text);
    const sound = given !== null && [given].flat().every((value) => !Number.isNaN(value));
    view[name] = sound ? given : Array.isArray(first) ? [...first] : first;
  }
}

const written = (value) => (Array.isArray(value) ? value.join("~") || "none" : typeof value === "boolean" ? (value ? "1" : "0") : String(value));

/** Change settings, write them into the address, and draw again. */
function set(changes) {
  Object.assign(view, changes);
  remember(Object.fromEntries(Object.keys(standard).map((name) => [name, written(view[name]) === written(standard[name]) ? null : written(view[name])])));
  show();
}

function show() {
  for (const draw of drawers) draw();
}

listeners.push(() => {
  restore();
  show();
});

/** A number in the text that a test, or a reader who points at it, sees in full. */
function num(name, value, digits = 3) {
  const known = value !== null && value !== undefined && Number.isFinite(value);
  const short = known ? minus(Math.abs(value) >= 1e-4 || Math.abs(value) < 1e-12 ? String(Number(value.toFixed(digits))) : value.toExponential(1)) : "–";
  return h("output", { class: "num", "data-number": name, "data-value": known ? String(value) : "", title: known ? String(value) : null, "aria-live": "off" }, short);
}
const share = (name, value) => h("span", { class: "nobreak" }, num(name, value === null ? null : 100 * value, 1), " %");

/** A paragraph, or another element, whose content follows the settings. */
function live(make, tag = "p", attributes = {}) {
  const place = h(tag, attributes);
  drawers.push(() => place.replaceChildren(...[make()].flat(Infinity).filter((child) => child !== null && child !== undefined)));
  return place;
}

// --------------------------------------------------------------------------------------------- controls

/** A slider of a setting, or of what `read` and `write` make of one; `log`: it moves the logarithm. `text` says the value. */
function slider(name, label, { min, max, step, log = false, text = (value) => minus(String(value)), when = null, read = () => view[name], write = (value) => ({ [name]: value }) }) {
  const to = (value) => (log ? Math.log10(value) : value);
  const from = (value) => (log ? Number((10 ** value).toPrecision(3)) : value);
  const input = h("input", { type: "range", name, min: to(min), max: to(max), step, oninput: () => set(write(from(Number(input.value)))) });
  const said = h("output", { "aria-live": "off" });
  const place = h("label", { class: "slider" }, h("span", {}, label), input, said);
  drawers.push(() => {
    const high = typeof max === "function" ? max() : max;
    input.max = to(high);
    input.value = to(read());
    said.textContent = text(read());
    input.setAttribute("aria-valuetext", text(read()));
    place.hidden = when !== null && !when();
  });
  return place;
}

/** One of a few values. */
function choice(name, label, options, { when = null } = {}) {
  const radios = options.map(([value, text]) => [value, h("input", { type: "radio", name, value, onchange: () => set({ [name]: value }) }), text]);
  const place = h("fieldset", { class: "chosen" }, h("legend", {}, label), h("span", { class: "choice" }, radios.map(([, input, text]) => h("label", {}, input, h("span", {}, text)))));
  drawers.push(() => {
    for (const [value, input] of radios) input.checked = view[name] === value;
    place.hidden = when !== null && !when();
  });
  return place;
}

/** One of many values; `options` may be a function of the settings. */
function dropdown(name, label, options, { when = null } = {}) {
  const numeric = typeof standard[name] === "number";
  const input = h("select", { name, onchange: () => set({ [name]: numeric ? Number(input.value) : input.value }) });
  const place = h("label", { class: "dropdown" }, h("span", {}, label), input);
  let shown = null;
  drawers.push(() => {
    const now = typeof options === "function" ? options() : options;
    const key = JSON.stringify(now);
    if (key !== shown) input.replaceChildren(...now.map(([value, text]) => h("option", { value }, text)));
    shown = key;
    input.value = String(view[name]);
    place.hidden = when !== null && !when();
  });
  return place;
}

function tick(name, label) {
  const input = h("input", { type: "checkbox", name, onchange: () => set({ [name]: input.checked }) });
  drawers.push(() => (input.checked = view[name]));
  return h("label", { class: "check" }, input, ` ${label}`);
}

const press = (text, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, text);

/** "Play" takes steps until none is left; with reduced motion all at once. `step` is false at the end. */
function player(step, { label = "Play", every = 450 } = {}) {
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = label;
  };
  const button = press(label, () => {
    if (timer !== null) return stop();
    if (calm.matches) {
      for (let count = 0; count < 1000 && step(); count += 1);
      return undefined;
    }
    button.textContent = "Pause";
    timer = setInterval(() => step() || stop(), every);
    return undefined;
  });
  return button;
}

// --------------------------------------------------------------------------------------------- sections

/** The head of the page: title, claim, source. */
function head(title, claim, ...more) {
  document.getElementById("top").replaceChildren(h("h1", {}, title), h("p", { class: "claim" }, claim), ...more);
}

const source = (text, link) => h("a", { href: link, rel: "noreferrer" }, text);

/** A section with its words and controls beside its figures. */
function section(id, title, words, figures = []) {
  const short = title.replace(/^\d+\. /, "");
  const place = h("section", { id, class: figures.length ? "step" : "step wide" }, h("h2", {}, title), h("div", { class: "words" }, words), figures.length ? h("div", { class: "figures" }, figures) : null);
  document.getElementById("content").append(place);
  document.getElementById("nav").append(h("a", { href: `#${id}` }, short));
  return place;
}

const controls = (...children) => h("div", { class: "controls", role: "group", "aria-label": "Settings" }, children);
const text = (...children) => h("p", {}, ...children);
const formula = (...children) => h("p", { class: "formula" }, ...children);
const aside = (...children) => h("p", { class: "aside" }, ...children);

/** A table of rows of cells; the first row is its head. */
function table(caption, rows, { keyed = true } = {}) {
  const cell = (value) => (typeof value === "number" ? minus(String(Number(value.toPrecision(6)))) : (value ?? "–"));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { class: "plain" },
    h("caption", {}, caption), h("thead", {}, h("tr", {}, rows[0].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.slice(1).map((row) => h("tr", {}, row.map((value, at) => h(keyed && at === 0 ? "th" : "td", keyed && at === 0 ? { scope: "row" } : {}, cell(value))))))));
}

/** Draw all, and go to the part that the address names. */
function begin() {
  show();
  document.documentElement.dataset.ready = "";
  if (location.hash.length > 1) document.getElementById(readAddress()[0])?.scrollIntoView({ block: "start" });
}
