// The page of campaigns: charts of many, and one model. A click on a variable says what setting it would tell.

const data = JSON.parse(await unpacked("data"));
const { model } = data;
const last = model.moments.length - 1;
const within = (text, least, most, otherwise) => (/^\d+$/.test(text ?? "") && Number(text) >= least && Number(text) <= most ? Number(text) : otherwise);
const view = {
  moment: within(state.get("after"), 0, last, last),
  node: Math.max(0, model.nodes.findIndex(({ name, is_target }) => name === state.get("variable") && !is_target)),
};

const WIDTH = 620;
const ROW = 120;
const RADIUS = 26;

/** An SVG element. */
function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

const about = ({ mean, deviation }) => `${number(mean)} ± ${number(deviation)}`;

/** Where each variable stands: a row for each level, shifted so that edges over two rows pass beside. */
function places() {
  const levels = Math.max(...model.nodes.map(({ level }) => level));
  return model.nodes.map(({ level }, at) => {
    const row = model.nodes.map((node, index) => (node.level === level ? index : -1)).filter((index) => index >= 0);
    const shift = row.length === 1 && level < levels ? (level % 2 ? 0.2 : -0.2) : 0;
    return { x: WIDTH * ((row.indexOf(at) + 0.5) / row.length + shift), y: ROW * (level + 0.5) };
  });
}

const where = places();

function choose(changed) {
  Object.assign(view, changed);
  remember({ variable: view.node ? model.nodes[view.node].name : null, after: view.moment === last ? null : view.moment }, { anchor: "model" });
  show();
}

/** What setting this variable is expected to tell of each edge: the most of any way to set it. */
function told(node) {
  const own = model.interventions.map(({ nodes }, at) => (nodes.includes(node) ? at : -1)).filter((at) => at >= 0);
  return model.edges.map((_, edge) => Math.max(0, ...own.map((at) => model.moments[view.moment].tells[at][edge])));
}

function drawing() {
  const now = model.moments[view.moment];
  const shares = told(view.node);
  const edges = model.edges.map(({ parent, child }, at) => {
    const [from, to] = [where[parent], where[child]];
    const length = Math.hypot(to.x - from.x, to.y - from.y);
    const [x, y] = [(to.x - from.x) / length, (to.y - from.y) / length];
    const share = shares[at];
    return s("path", {
      class: `edge${share > 0.005 ? " told" : ""}`, "marker-end": "url(#arrow)",
      d: `M${from.x + RADIUS * x},${from.y + RADIUS * y}L${to.x - (RADIUS + 8) * x},${to.y - (RADIUS + 8) * y}`,
      style: `stroke-width:${(1.5 + 3 * Math.min(1, Math.abs(now.edges[at].mean))).toFixed(1)};opacity:${(share > 0.005 ? 0.35 + 0.65 * Math.min(1, share / 0.4) : 0.55).toFixed(2)}`,
    });
  });
  const weights = model.edges.map(({ parent, child }, at) => {
    const middle = 0.4; // nearer to the parent, where fewer arrows meet
    return s("text", { class: "weight", x: where[parent].x + middle * (where[child].x - where[parent].x), y: where[parent].y + middle * (where[child].y - where[parent].y) }, about(now.edges[at]));
  });
  const nodes = model.nodes.map(({ name, is_target }, at) => {
    const pressed = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose({ node: at });
      part("model").querySelector(`.node[data-at="${at}"]`).focus();
    };
    const acts = is_target ? { role: "img", "aria-label": `${name}, the target` }
      : { role: "button", tabindex: "0", "aria-label": `Ask ${name}`, "aria-pressed": String(at === view.node), onclick: () => choose({ node: at }), onkeydown: pressed };
    return s("g", { class: `node${is_target ? " target" : ""}${at === view.node ? " chosen" : ""}`, "data-at": at, transform: `translate(${where[at].x},${where[at].y})`, ...acts },
      s("circle", { r: RADIUS }), s("text", {}, name));
  });
  const height = ROW * (1 + Math.max(...model.nodes.map(({ level }) => level)));
  const arrow = s("marker", { id: "arrow", viewBox: "0 0 10 10", refX: "6", refY: "5", markerWidth: "9", markerHeight: "9", markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { d: "M0,0L10,5L0,10z" }));
  return s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "group", "aria-label": "The causal model; each arrow has its weight's posterior mean and deviation" }, s("defs", {}, arrow), edges, weights, nodes);
}

/** A table that can be scrolled with keys where it is too wide. */
const table = (label, head, rows) => h("div", { class: "wide", role: "group", tabindex: "0", "aria-label": label },
  h("table", { class: "players" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));

/** What is known of setting the variable, and what doing it next would tell. */
function asked() {
  const { name } = model.nodes[view.node];
  const [before, now] = [model.moments[0], model.moments[view.moment]];
  const own = model.interventions.map((one, at) => ({ ...one, at })).filter(({ nodes }) => nodes.includes(view.node));
  const rows = own.map(({ label, cost, truth, at }) => h("tr", {}, h("th", { scope: "row" }, label), h("td", {}, number(cost), cost > now.left + 1e-9 ? h("span", { class: "dear" }, "too dear now") : null),
    h("td", {}, about(before.effects[at])), h("td", {}, h("b", {}, about(now.effects[at]))), h("td", {}, number(truth)), h("td", {}, number(now.gains[at]))));
  const head = ["experiment", "cost", "before", "now", "truth", "gain"].map((title) => h("th", { scope: "col" }, title));
  const shares = told(view.node).map((share, at) => ({ share, at })).filter(({ share }) => share > 0.005).sort((a, b) => b.share - a.share);
  const arrows = shares.map(({ share, at }) => {
    const { parent, child, truth } = model.edges[at];
    return h("li", {}, `${model.nodes[parent].name} → ${model.nodes[child].name}: ${number(share, true)} of its deviation; now ${about(now.edges[at])}, truth ${number(truth)}`);
  });
  return h("div", { class: "asked", role: "region", "aria-live": "polite", "aria-label": `What setting ${name} would tell` },
    h("h3", {}, `Set ${name}`), table(`Experiments that set ${name}`, head, rows),
    h("h4", {}, "One such experiment is expected to take away"), arrows.length ? h("ul", {}, arrows) : note("nothing: every weight that it could tell of is known"),
    note("Before, now, truth: the target's mean under the experiment, give or take the posterior's deviation. Gain: by how much the best mean is expected to rise after the experiment."));
}

function show() {
  const focused = document.activeElement?.id;
  const now = model.moments[view.moment];
  const said = view.moment === 0 ? "before the first experiment" : `after ${plural(view.moment, "experiment")} of ${last}`;
  const slider = h("input", { type: "range", id: "moment", min: "0", max: String(last), step: "1", "aria-label": "Experiments made", "aria-valuetext": said, oninput: (event) => choose({ moment: Number(event.target.value) }) });
  slider.value = String(view.moment);
  part("model").replaceChildren(h("h2", {}, "One model"),
    note("Click a variable: the arrows of which setting it would tell light up, and the table says what is known of it. An arrow is as wide as its weight is believed to be strong."),
    h("div", { class: "moment" }, slider, h("output", {}, `${said}: ${number(now.left)} of the budget left, regret ${number(now.regret)}`)),
    h("div", { class: "model" }, drawing(), asked()));
  if (focused === "moment") part("moment").focus();
  for (const row of part("experiments").querySelectorAll("tbody tr")) row.classList.toggle("here", Number(row.dataset.number) === view.moment);
}

function showExperiments() {
  const rows = model.experiments.map(({ intervention, outcome }, at) => {
    const { label, cost } = model.interventions[intervention];
    return h("tr", { "data-number": at + 1 }, h("th", { scope: "row" }, String(at + 1)), h("td", {}, label), h("td", {}, number(cost)), h("td", {}, number(outcome)), h("td", {}, number(model.moments[at + 1].regret)));
  });
  const head = ["number", "experiment", "cost", "target measured", "regret after it"].map((title) => h("th", { scope: "col" }, title));
  part("experiments").replaceChildren(h("h2", {}, "Its experiments"), note(`As chosen by ${model.player}.`),
    table("Experiments that were made", head, rows));
}

part("top").replaceChildren(h("div", { class: "title" }, h("h1", {}, data.name)), note(data.note));
part("curves").replaceChildren(h("h2", {}, "Regret and choices"), h("div", { class: "charts panels" }, data.charts.map(chartFigure)));
showExperiments();
show();
