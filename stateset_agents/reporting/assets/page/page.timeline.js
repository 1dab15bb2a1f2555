// One step's time: a row for each conversation, group by group, and the updates above them.

const TICKS = 10000; // of a second
const DOINGS = {
  m: ["model", "being sampled"],
  w: ["waiting", "for the model, asked for a turn"],
  e: ["environment", "its user, its tools, its verdict"],
  r: ["reward", "being scored"],
  i: ["idle", "over; the rest of its group plays on"],
};
const seconds = (ticks) => `${number(ticks / TICKS)} s`;

class Timeline {
  /** `open(step, group, show)` shows a group's conversations where asked to; does the page have them? */
  constructor(place, data, open) {
    this.place = place;
    this.open = open;
    this.rows = new Map(); // row element -> what it says
    this.choice = h("select", { "aria-label": "Step", onchange: () => {
      this.show(Number(this.choice.value));
      remember({ timeline: this.choice.value }, { anchor: "timeline" });
    } });
    listeners.push(() => this.restore());
    this.about = h("span", { class: "note" });
    this.left = h("span");
    this.legend = h("ul", { class: "legend" });
    this.chart = h("div", { class: "timeline", onkeydown: (event) => this.key(event) });
    for (const event of ["mousemove", "focusin"]) this.chart.addEventListener(event, (event_) => this.read(event_));
    this.readout = h("output", { class: "note", "aria-live": "polite" });
    place.replaceChildren(h("h2", {}, "Timeline of a step"),
      note("Who waited for whom: one row for each conversation; seconds in the legend are summed over them. Point at a row, or go through rows and their spans with the arrow keys.", this.left),
      h("div", { class: "tools" }, this.choice, this.about), this.legend, this.readout, this.chart);
    this.update(data);
  }

  /** Other steps, on a live page. Who looks at the newest one follows the run; who reads an older one stays. */
  update({ steps, total }) {
    this.place.hidden = document.querySelector("nav [href='#timeline']").hidden = !steps.length;
    if (!steps.length) return;
    const follows = !this.steps || (this.shown === this.steps.at(-1).step && !this.place.contains(document.activeElement));
    const stays = !follows && steps.some(({ step }) => step === this.shown);
    this.steps = steps;
    this.left.textContent = steps.length < total ? ` ${steps.length} of ${total} steps are in this page; all are in timeline.jsonl.` : "";
    this.choice.replaceChildren(...steps.map(({ step }) => h("option", { value: step }, `step ${step}`)));
    if (!stays) this.show(steps.at(-1).step);
    this.choice.value = this.shown;
  }

  /** The step that the address names, where the page has it. */
  restore() {
    const wanted = Number(state.get("timeline"));
    if (!this.steps?.some(({ step }) => step === wanted)) return;
    this.show(wanted);
    this.choice.value = wanted;
  }

  show(number_) {
    this.shown = number_;
    const step = this.steps.find((one) => one.step === number_);
    const rows = step.groups.flatMap((group) => group.rows);
    this.about.textContent = `${plural(rows.length, "conversation")} in ${plural(step.groups.length, "group")}; ${seconds(step.length)} from the first one's beginning to the end of the step's update${step.rows ? `; ${number(step.rows[0])} training rows a conversation, ${number(step.rows[1])} at most` : ""}`;
    this.legend.replaceChildren(...Object.entries(DOINGS).map(([letter, [name, what]]) => h("li", { style: `--key: var(--did-${letter})` }, `${name} `, h("b", {}, seconds(spent(rows, letter))), h("span", { class: "what" }, `, ${what}`))),
      h("li", { style: "--key: var(--did-u)" }, "update ", h("b", {}, seconds(step.updates.reduce((sum, one) => sum + Math.min(one.end, step.length) - Math.max(one.begin, 0), 0)))));
    this.rows.clear();
    const ticks = axisTicks(step.length);
    const axis = h("div", { class: "axis", "aria-hidden": "true" }, h("span"), h("span", { class: "lane" }, ticks.map((at) => h("i", { style: `left:${(100 * at) / step.length}%` }, seconds(at)))));
    const updates = step.updates.map((one) => ({ what: `update of step ${one.step}`, letter: "u", begin: one.begin, end: one.end }));
    this.chart.replaceChildren(axis, this.row("update", "updates of the weights", updates, step),
      ...step.groups.flatMap((group) => [this.heading(step, group), ...group.rows.map((row) => this.row(row.branch_of ? "branch" : row.member, rowName(row), spansOf(row), step))]));
    this.readout.textContent = "";
    this.chart.querySelector(".row").tabIndex = 0;
  }

  heading(step, group) {
    const text = group.group.replace(/^\d+\//, "");
    return h("div", { class: "heading" }, this.open(step.step, group.group, false) ? h("button", { type: "button", class: "link", onclick: () => this.open(step.step, group.group, true) }, text) : text);
  }

  row(label, name, spans, step) {
    const said = Object.values(DOINGS).map(([what]) => [what, spans.filter((one) => one.doing === what).reduce((sum, one) => sum + one.end - one.begin, 0)]).filter(([, ticks]) => ticks > 0);
    const summary = spans.length ? `${name}: ${(said.length ? said : spans.map((one) => [one.what, one.end - one.begin])).map(([what, ticks]) => `${what} ${seconds(ticks)}`).join(", ")}` : `${name}: none`;
    const row = h("div", { class: "row", role: "img", tabindex: "-1", "aria-label": summary }, h("span", { class: "who" }, label), h("span", { class: "lane", style: `background-image:${painted(spans, step.length)}` }));
    this.rows.set(row, { summary, spans, length: step.length, at: null });
    return row;
  }

  /** What the row under the pointer or in focus did, and at that moment. */
  read(event) {
    const row = event.target.closest?.(".row");
    if (!row) return;
    const told = this.rows.get(row);
    if (event.type === "mousemove") {
      const box = row.querySelector(".lane").getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * told.length;
      told.at = told.spans.findIndex((one) => one.begin <= at && at < one.end);
      if (told.at < 0) told.at = null;
    }
    this.say(told);
  }

  say({ summary, spans, at }) {
    const span = spans[at];
    this.readout.textContent = span ? `${summary} · at ${seconds(span.begin)}: ${span.what}, ${seconds(span.end - span.begin)}` : summary;
  }

  /** Up and down go from row to row, left and right from span to span. */
  key(event) {
    const row = event.target.closest?.(".row");
    if (!row) return;
    const all = [...this.rows.keys()];
    const [own, told] = [all.indexOf(row), this.rows.get(row)];
    const next = all[{ ArrowDown: own + 1, ArrowUp: own - 1, Home: 0, End: all.length - 1 }[event.key]];
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by && told.spans.length) {
      told.at = Math.max(0, Math.min(told.spans.length - 1, (told.at ?? (by > 0 ? -1 : told.spans.length)) + by));
      this.say(told);
    } else if (next) {
      row.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  }
}

const spent = (rows, letter) => rows.reduce((sum, row) => sum + [...row.did].reduce((own, did, at) => own + (did === letter ? row.ticks[at] : 0), 0), 0);
const rowName = (row) => (row.branch_of ? `branch of ${row.branch_of[0]}, turn ${row.branch_of[1] + 1}` : `member ${row.member}`);

/** A row's spans with their places in the step, and what each of them was. */
function spansOf(row) {
  let [at, turn] = [row.begin, row.branch_of ? row.branch_of[1] : 0];
  let asked = false;
  return [...row.did].map((letter, place) => {
    const doing = DOINGS[letter][0];
    if (letter === "w" || (letter === "m" && !asked)) turn += 1;
    asked = letter === "w";
    const begin = at;
    at += row.ticks[place];
    return { letter, doing, what: "wm".includes(letter) ? `${doing}, turn ${turn}` : doing, begin, end: at };
  });
}

/** Spans as hard stops of a gradient: one element a row, however many turns it has. */
function painted(spans, length) {
  const stops = [];
  let at = 0;
  for (const { letter, begin, end } of spans) {
    const [from, to] = [Math.max(0, begin), Math.min(length, end)].map((ticks) => `${((100 * ticks) / length).toFixed(3)}%`);
    if (begin > at) stops.push(`transparent ${((100 * at) / length).toFixed(3)}% ${from}`);
    stops.push(`var(--did-${letter}) ${from} ${to}`);
    at = end;
  }
  return stops.length ? `linear-gradient(90deg, ${stops.join(", ")}, transparent ${((100 * Math.min(length, at)) / length).toFixed(3)}%)` : "none";
}

/** About four round numbers from 0 on, none at the very end. */
function axisTicks(length) {
  const rough = length / 4;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const size = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough) ?? 10 * power;
  return Array.from({ length: Math.floor((0.93 * length) / size) + 1 }, (_, at) => at * size);
}
