// Figures in SVG: axes, marks, and grips that the mouse drags and the arrow keys move.

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element; text children become text. */
function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const place = (x) => Math.round(x * 100) / 100;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const rounded = (value, step) => Number((Math.round(value / step) * step).toFixed(6));
const tip = (words) => s("title", {}, words);
const line = (points, attributes = {}) => s("path", { d: `M${points.map(([x, y]) => `${place(x)},${place(y)}`).join("L")}`, class: "line", ...attributes });
const label = (x, y, words, attributes = {}) => s("text", { x: place(x), y: place(y), ...attributes }, words);
const tint = (at) => `var(--c${at % 12})`;

/** About `count` round values from low to high. */
function ticks(low, high, count = 5) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

/** Steps in thousands or millions. */
const thousands = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1000 ? `${value / 1000}k` : String(value));

/** Axes in a frame, and the way from values to pixels and back. */
function axes(width, height, { x, y, across = "", up = "", left = 44, right = 18, top = up ? 24 : 12, bottom = 36, xTicks = null, yTicks = null, format = (value) => minus(String(value)), formatX = format }) {
  const px = (value) => left + ((value - x[0]) / (x[1] - x[0])) * (width - left - right);
  const py = (value) => height - bottom - ((value - y[0]) / (y[1] - y[0])) * (height - top - bottom);
  const nodes = [
    ...(yTicks ?? ticks(...y)).map((value) => s("g", { class: value === 0 ? "grid zero" : "grid" }, s("path", { d: `M${left},${place(py(value))}H${width - right}` }), label(left - 6, py(value) + 4, format(value), { "text-anchor": "end" }))),
    ...(xTicks ?? ticks(...x, Math.max(2, Math.min(8, Math.floor(width / 80)))).filter((value) => !/steps?$/.test(across) || Number.isInteger(value))).map((value) => label(px(value), height - bottom + 16, formatX(value), { "text-anchor": "middle", class: "tick" })),
    across ? label((left + width - right) / 2, height - 4, across, { "text-anchor": "middle", class: "axis" }) : null,
    up ? label(left, 11, up, { class: "axis" }) : null,
  ];
  return {
    nodes, px, py, left, right: width - right, top, bottom: height - bottom,
    toX: (at) => x[0] + ((at - left) / (width - left - right)) * (x[1] - x[0]),
    toY: (at) => y[0] + ((height - bottom - at) / (height - top - bottom)) * (y[1] - y[0]),
  };
}

const themes = matchMedia("(prefers-color-scheme: dark)");

/**
 * A figure that is drawn again after each change. `draw(width, height, grip)` gives its nodes; `grip(key, x, y, ...)` makes a
 * handle. `rows()` are its values as a table, `says()` what it shows in a sentence.
 */
function figure(name, title, { height = 280, draw, rows = null, says, key = null, tools = [] }) {
  const grips = new Map();
  let known = 0; // the frame's width when it last changed
  const svg = s("svg", { class: "drawn", "data-figure": name, role: "group" });
  const frame = h("div", { class: "frame" });
  frame.append(svg);
  const values = rows && h("details", { class: "readings" }, h("summary", {}, "Values"));
  const element = h("figure", { class: "drawing" }, h("figcaption", {}, h("strong", {}, title), key), frame, h("div", { class: "below" }, tools), values);
  const grip = (id, x, y, { says: spoken, now, low, high, value, move, keys, hue = "var(--new)", shape = null }) => {
    grips.set(id, { move, keys });
    return s("g", { class: "grip", "data-grip": id, tabindex: "0", role: "slider", "aria-label": spoken, "aria-valuenow": now, "aria-valuemin": low, "aria-valuemax": high, "aria-valuetext": value, style: `--own: ${hue}`, transform: `translate(${place(x)},${place(y)})` },
      s("circle", { class: "halo", r: 15 }), shape ?? s("circle", { class: "knob", r: 7.5 }), tip(`${spoken}: ${value}. Drag it, or use the arrow keys.`));
  };
  const fill = () => values?.open && values.replaceChildren(values.firstChild, table(`Values of “${title}”`, rows()));
  const redraw = () => {
    const width = Math.max(260, Math.floor(known || frame.clientWidth || 560)); // asking makes the browser lay the page out
    const tall = typeof height === "function" ? height(width) : height;
    const focused = svg.contains(document.activeElement) ? document.activeElement.getAttribute("data-grip") : null;
    grips.clear();
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", tall);
    svg.replaceChildren(...draw(width, tall, grip).flat(Infinity).filter((node) => node !== null && node !== undefined));
    svg.setAttribute("role", grips.size ? "group" : "img");
    svg.setAttribute("aria-label", `${title}. ${says()}`);
    if (focused !== null) svg.querySelector(`[data-grip="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    fill();
  };
  let dragged = null;
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  svg.addEventListener("pointerdown", (event) => {
    const held = event.target.closest("[data-grip]");
    if (!held) return;
    event.preventDefault();
    dragged = held.getAttribute("data-grip");
    held.focus({ preventScroll: true });
    svg.setPointerCapture(event.pointerId);
    svg.classList.add("dragging");
  });
  svg.addEventListener("pointermove", (event) => dragged !== null && grips.get(dragged)?.move(...at(event)));
  for (const end of ["pointerup", "pointercancel"]) {
    svg.addEventListener(end, () => {
      dragged = null;
      svg.classList.remove("dragging");
    });
  }
  svg.addEventListener("keydown", (event) => {
    const held = event.target.closest("[data-grip]");
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!held || !way) return;
    event.preventDefault();
    grips.get(held.getAttribute("data-grip"))?.keys(way[0] * (event.shiftKey ? 10 : 1), way[1] * (event.shiftKey ? 10 : 1));
  });
  values?.addEventListener("toggle", fill);
  drawers.push(redraw);
  new ResizeObserver(() => {
    if (frame.clientWidth !== known) requestAnimationFrame(redraw);
    known = frame.clientWidth;
  }).observe(frame);
  themes.addEventListener("change", redraw);
  return element;
}

/** A legend: [colour, words], with a mark of its kind. */
const legend = (...entries) => h("ul", { class: "legend" }, entries.map(([own, words, kind = "dot"]) => h("li", { class: kind, style: `--key: ${own}` }, words)));

/** Bars beside one another in groups: `values` [groups][series], drawn from 0. */
function bars(frame, values, hues, { gap = 0.3, names = [] } = {}) {
  const span = (frame.right - frame.left) / values.length;
  return values.map((row, i) => row.map((value, k) => {
    const width = (span * (1 - gap)) / row.length, x = frame.left + span * (i + gap / 2) + k * width;
    const [from, to] = [frame.py(0), frame.py(value ?? 0)];
    return s("rect", { x: place(x), y: place(Math.min(from, to)), width: place(Math.max(1, width - 1)), height: place(Math.max(0.5, Math.abs(from - to))), fill: typeof hues === "function" ? hues(i, k) : hues[k], rx: 1.5 }, tip(`${names[i] ?? i + 1}: ${number(value)}`));
  }));
}

/** A name where it has room below its bar, else its number. */
const short = (names, at, width) => ((width - 60) / names.length > 7.2 * Math.max(...names.map((name) => name.length)) ? names[at] : String(at + 1));

/** Areas upon one another: `series` [points][layers] at `steps`. */
const stacked = (frame, steps, series) => series[0].map((_, layer) => {
  const below = series.map((row) => sum(row.slice(0, layer))), above = series.map((row, at) => below[at] + row[layer]);
  const edge = (values) => values.map((value, at) => [frame.px(steps[at]), frame.py(value)]);
  return s("path", { d: `M${[...edge(above), ...edge(below).reverse()].map(([x, y]) => `${place(x)},${place(y)}`).join("L")}Z`, fill: tint(layer), opacity: 0.65 });
});
