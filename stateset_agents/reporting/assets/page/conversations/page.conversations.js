// The conversation browser: filters, a list of groups, and one group's conversations side by side.

const CHUNK = 60; // list entries at a time

const unitKey = (one) => (one.stage === "train" ? `${one.step}|${one.group}` : `held-out|${one.scenario}`);

/** Conversations that are read side by side: a group of training, or a held-out scenario over time. Branches are
 *  apart, for they count in no reward or success. */
function units(conversations) {
  const found = new Map();
  for (const one of conversations) {
    const training = one.stage === "train";
    const key = unitKey(one);
    if (!found.has(key)) found.set(key, { key, training, scenario: one.scenario, family: one.family, step: one.step, members: [], branches: [] });
    found.get(key)[one.branch_of ? "branches" : "members"].push(one);
  }
  for (const unit of found.values()) {
    if (!unit.training) unit.members.sort((a, b) => a.step - b.step || ORDER.indexOf(a.stage) - ORDER.indexOf(b.stage));
    unit.rewards = unit.members.map((one) => one.reward).filter((reward) => reward !== null);
  }
  return [...found.values()];
}

const ORDER = ["before", "validation", "after"];
const SORTS = {
  written: ["as written", null],
  widest: ["widest spread first", (unit) => Math.min(...unit.rewards) - Math.max(...unit.rewards)],
  lowest: ["lowest reward first", (unit) => Math.min(...unit.rewards)],
  highest: ["highest reward first", (unit) => -Math.max(...unit.rewards)],
};

const verdict = (one) => (one.success === true ? "succeeded" : one.success === false ? "failed" : "no verdict");
const turned = (unit) => {
  const [first, last] = [unit.members.find((one) => one.stage === "before"), unit.members.find((one) => one.stage === "after")];
  if (!first || !last) return null;
  return last.success === true ? (first.success === true ? "kept" : "gained") : first.success === true ? "lost" : "missed";
};

/** A group's mean reward; of a held-out scenario that of each time: before, at evaluations, after. */
function meanRewards({ training, members }) {
  const times = new Map();
  for (const one of members) {
    const time = training ? "" : `${one.step} ${one.stage}`;
    times.set(time, [...(times.get(time) ?? []), ...(one.reward === null ? [] : [one.reward])]);
  }
  const mean = (rewards) => (rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null);
  return [...times.values()].map((rewards) => signed(mean(rewards))).join(" → ");
}

class Browser {
  constructor(place, data) {
    this.place = place;
    this.selected = null;
    this.list = h("ul", { class: "units", role: "listbox", tabindex: "0", "aria-label": "Groups", onkeydown: (event) => this.key(event) });
    this.count = h("p", { class: "note", role: "status" });
    this.view = new GroupView();
    this.more = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && this.extend(), { root: this.list, rootMargin: "400px" });
    this.about = h("div");
    this.controls = h("div");
    this.found = [];
    this.fetched = { conversations: [], tokens: {} }; // on a live page: asked for later, beside the page's
    this.cell = null; // of a heatmap: its filters, and how many conversations of the run it has
    this.hits = h("span", { class: "hits" });
    this.chips = h("span", { class: "chips" });
    this.save = h("button", { type: "button", class: "save", "aria-label": "The conversations that fit, as CSV", onclick: () => this.saveList() }, "CSV");
    this.panes = h("div", { class: "browser" }, this.list, this.view.element);
    place.replaceChildren(h("h2", {}, "Conversations"), this.about, this.controls, h("div", { class: "found" }, this.count, this.hits, this.chips, this.save), this.panes);
    this.update(data);
    document.addEventListener("keydown", (event) => this.shortcut(event));
    listeners.push(() => this.restore());
  }

  /** What the address says: filters, group, member, token. */
  restore() {
    if (!this.data.total) return;
    for (const control of this.form.elements) if (control.name) control.value = state.get(control.name) ?? (control.options?.[0].value ?? "");
    this.filter(false, state.get("group") ?? null);
    this.view.restore();
    if (state.has("at")) { // a step, of a link from the page of many runs
      const at = Number(state.get("at"));
      remember({ at: null });
      this.openStep(at);
    }
  }

  /** Other data; what is chosen and typed stays. */
  update(data) {
    this.data = data;
    const own = new Set(data.conversations.map(unitKey));
    const more = this.fetched.conversations.filter((one) => !own.has(unitKey(one)));
    this.units = units(more.length ? [...data.conversations, ...more].sort((a, b) => a.step - b.step) : data.conversations);
    this.view.tokens = { ...this.fetched.tokens, ...data.tokens };
    this.about.replaceChildren(this.words());
    for (const element of [this.controls, this.count.parentElement, this.panes]) element.hidden = !data.total;
    const isFirst = !this.ready; // a live page gets its conversations later than its form
    this.ready ||= Boolean(data.total);
    const typed = isFirst ? state : new Map(new FormData(this.form));
    const focused = this.form?.contains(document.activeElement) ? document.activeElement : null;
    this.form = this.filters(typed);
    this.controls.replaceChildren(this.form);
    if (focused?.name) {
      const again = this.form.elements[focused.name];
      again.focus();
      if (focused.type === "search") again.setSelectionRange(focused.selectionStart, focused.selectionEnd);
    }
    const [shown, scrolled] = [this.shown, this.list.scrollTop];
    if (isFirst) this.restore();
    else this.filter(true);
    while (this.shown < Math.min(shown, this.found?.length ?? 0)) this.extend();
    this.list.scrollTop = scrolled;
  }

  words() {
    const { total, moved } = this.data;
    if (!total) return note("No conversation was recorded yet.");
    const kept = this.held() === total ? `All ${total.toLocaleString("en")} conversations are in this page.`
      : [`${this.share()} are in this page: whole groups, those with failures first, then those whose rewards differ, spread over the run. `, ...("live" in document.body.dataset ? ["The others are fetched where a list lacks some."] : ["All are in rollouts.jsonl; ", h("code", {}, "report --conversations N"), " takes more, ", h("code", {}, "report --live"), " serves all."])];
    const only = (outcome, text) => h("button", { type: "button", class: "link", onclick: () => this.ask({ outcome }) }, text);
    const of = moved.n > moved.scenarios ? `${moved.n} tries on ${moved.scenarios} held-out scenarios` : `${moved.n} held-out scenarios`;
    const changes = moved.n ? [` Of ${of}, `, only("gained", `${moved.gained} went from failure to success`), " and ", only("lost", `${moved.lost} the other way`), "."] : [];
    const keys = h("span", { class: "keys" }, " Keys: ", h("kbd", {}, "/"), " search, ", h("kbd", {}, "Esc"), " clear it, ", h("kbd", {}, "n"), " ", h("kbd", {}, "N"), " next and previous hit, ", h("kbd", {}, "j"), " ", h("kbd", {}, "k"), " next and previous group, ", h("kbd", {}, "t"), " tokens.");
    return note(...[kept].flat(), ...changes, keys);
  }

  /** How many conversations the page holds, branches included. */
  held() {
    return this.units.reduce((sum, unit) => sum + unit.members.length + unit.branches.length, 0);
  }

  share() {
    return `${this.held().toLocaleString("en")} of ${plural(this.data.total, "conversation")}`;
  }

  filters(typed) {
    const values = (name) => [...new Set(this.units.flatMap((unit) => unit.members.map((one) => one[name])))].sort();
    const field = (label, control) => h("label", {}, h("span", {}, label), control);
    const select = (name, options) => {
      const control = h("select", { name }, options.map(([value, text]) => h("option", { value }, text)));
      control.value = options.some(([value]) => value === typed.get(name)) ? typed.get(name) : options[0][0];
      return control;
    };
    const input = (name, type, options = {}) => {
      const control = h("input", { name, type, ...options });
      control.value = typed.get(name) ?? "";
      return control;
    };
    const range = (name, label) => h("fieldset", {}, h("legend", {}, label),
      input(`${name}-from`, "number", { step: "any", placeholder: "from", "aria-label": `${label} from` }),
      input(`${name}-to`, "number", { step: "any", placeholder: "to", "aria-label": `${label} to` }));
    const stages = [["", "all stages"], ...values("stage").map((stage) => [stage, stage === "train" ? "training" : stage])];
    const turns = this.data.moved.n ? [["gained", "gained"], ["lost", "lost"], ["missed", "failed both times"]] : [];
    return h("form", { class: "filters", role: "search", oninput: () => this.filter(), onreset: () => setTimeout(() => this.filter()), onsubmit: (event) => event.preventDefault() },
      field("Text", input("text", "search", { placeholder: "words, /regex/, tool:refund", title: `Fields: ${Object.keys(FIELDS).join(", ")}; "a phrase" or /a regular expression/ behind them`, autocomplete: "off" })),
      field("Stage", select("stage", stages)),
      field("Family", select("family", [["", "all families"], ...values("family").map((family) => [family, family])])),
      field("Outcome", select("outcome", [["", "any outcome"], ["succeeded", "succeeded"], ["failed", "failed"], ["no verdict", "no verdict"], ...turns])),
      range("reward", "Reward"), range("step", "Step"),
      field("Order", select("order", Object.entries(SORTS).map(([value, [text]]) => [value, text]))),
      h("button", { type: "reset" }, "Reset"));
  }

  /** Set these filters and no others. */
  ask(filters) {
    for (const control of this.form.elements) if (control.name) control.value = filters[control.name] ?? (control.options?.[0].value ?? "");
    this.filter();
  }

  /** Set filters from elsewhere in the page, and go to the list; "back" leads to where it came from. `of`: how many
   *  conversations of the run fit them, where it is known. */
  show(filters, of = null) {
    remember({}, { jump: true, anchor: "conversations" });
    this.cell = { of, filters: null };
    this.ask(filters);
    remember({}, { anchor: "conversations" });
    this.place.scrollIntoView({ block: "start" });
    this.list.focus({ preventScroll: true });
  }

  /** List what fits, and show the first group; `stays`: the chosen one, also where a live page holds it no more. */
  filter(stays = false, key = null) {
    if (!this.data.total) return;
    const asked = new Map(new FormData(this.form));
    const [, rank] = SORTS[asked.get("order")];
    const bound = (name) => (asked.get(name) === "" ? null : Number(asked.get(name)));
    const within = (value, name) => (bound(`${name}-from`) === null || (value !== null && value >= bound(`${name}-from`))) && (bound(`${name}-to`) === null || (value !== null && value <= bound(`${name}-to`)));
    const query = parseQuery(asked.get("text").trim());
    const terms = query.terms ?? [];
    this.form.elements.text.setAttribute("aria-invalid", String(Boolean(query.error)));
    const hits = new Map(); // conversation -> how often what was typed is in it
    const isFound = (one) => {
      if (!terms.length) return true;
      hits.set(one, hitsIn(one, terms));
      return hits.get(one) > 0;
    };
    const outcome = asked.get("outcome");
    const isTurn = ["gained", "lost", "missed"].includes(outcome);
    const fits = (one) => (!asked.get("stage") || one.stage === asked.get("stage")) && within(one.step, "step") && within(one.reward, "reward")
      && (!outcome || isTurn || verdict(one) === outcome) && isFound(one);
    this.found = [];
    for (const unit of this.units) {
      if ((asked.get("family") && unit.family !== asked.get("family")) || (isTurn && turned(unit) !== outcome)) continue;
      unit.fitting = new Set(unit.members.filter(fits));
      if (unit.fitting.size) this.found.push(unit);
    }
    if (rank) this.found = this.found.filter((unit) => unit.rewards.length).sort((a, b) => rank(a) - rank(b));
    const number = this.found.reduce((sum, unit) => sum + unit.fitting.size, 0);
    this.count.replaceChildren(...(query.error ? [query.error] : this.countOf(number, asked)));
    this.terms = terms;
    this.sayHits(this.found.reduce((sum, unit) => sum + [...unit.fitting].reduce((own, one) => own + (hits.get(one) ?? 0), 0), 0));
    this.sayFilters(asked);
    this.panes.hidden = !number;
    this.list.replaceChildren();
    this.shown = 0;
    this.extend();
    const wanted = key ?? (stays ? this.selected : null);
    const again = wanted ? this.found.findIndex((unit) => unit.key === wanted) : 0;
    if (again < 0 && key) this.count.append(". The group that the address names is not among them.");
    if (again < 0 && stays && this.selected) this.at = -1;
    else this.select(Math.max(0, again), false);
    if (again <= 0) this.list.scrollTop = 0;
    else this.list.children[again].scrollIntoView({ block: "nearest" });
    if (!stays) remember({ ...Object.fromEntries([...asked].map(([name, value]) => [name, name === "order" && value === "written" ? null : value])), ...(key ? {} : { group: null, member: null, token: null }) }, this.place.contains(document.activeElement) ? { anchor: "conversations" } : {});
  }

  /** How many conversations fit, of how many of the run, and where the others are. */
  countOf(number_, asked) {
    const listed = `${plural(number_, "conversation")} in ${plural(this.found.length, "group")}`;
    if (this.held() === this.data.total) return [number_ ? listed : "No conversation fits: widen the filters."];
    const of = this.fittingOfRun(asked);
    if (of === null) return [number_ ? `${listed}, among the ${this.share()} that are in this page. ` : `No conversation fits among the ${this.share()} that are in this page. `, ...this.others(asked)];
    if (number_ >= of) return [number_ ? listed : "No conversation of the run fits: widen the filters."];
    const groups = ` in ${plural(this.found.length, "group")}. `;
    return [number_ ? `${number_.toLocaleString("en")} of ${plural(of, "conversation")}${groups}` : `None of ${plural(of, "conversation")} that fit is in this page. `, ...this.others(asked)];
  }

  /** How many conversations of the run fit the filters; null where they ask for what the page knows of its own alone. */
  fittingOfRun(asked) {
    const filters = JSON.stringify([...asked].filter(([name]) => name !== "order"));
    if (this.cell) this.cell.filters ??= filters;
    if (this.cell?.filters === filters && this.cell.of !== null) return this.cell.of;
    const { text, stage, family, outcome, ...rest } = Object.fromEntries(asked);
    if (text.trim() || rest["reward-from"] || rest["reward-to"] || ["gained", "lost", "missed"].includes(outcome)) return null;
    const [first, last] = [rest["step-from"] || -Infinity, rest["step-to"] || Infinity].map(Number);
    return this.data.counts.filter(([stage_, step, family_, success]) => (!stage || stage_ === stage) && (!family || family_ === family) && (!outcome || verdict({ success }) === outcome) && step >= first && step <= last)
      .reduce((sum, row) => sum + row.at(-1), 0);
  }

  /** Where the conversations are that the page lacks. */
  others(asked) {
    if ("live" in document.body.dataset) return [h("button", { type: "button", class: "link", onclick: () => this.fetch(asked) }, "Fetch the others")];
    return ["The others are in rollouts.jsonl; ", h("code", {}, "stateset-agents report RUN --live"), " shows them."];
  }

  /** From the server of a live page: the groups of the steps, or of the stage, that the filters name. */
  async fetch(asked) {
    const query = new URLSearchParams({ stage: asked.get("stage"), first: asked.get("step-from"), last: asked.get("step-to") });
    const { conversations, tokens } = await (await fetch(`steps.json?${query}`)).json();
    const own = new Set(conversations.map(unitKey));
    const held = this.held();
    this.fetched = { conversations: [...this.fetched.conversations.filter((one) => !own.has(unitKey(one))), ...conversations], tokens: { ...this.fetched.tokens, ...tokens } };
    this.update(this.data);
    if (this.held() === held) this.count.append(". So many are not fetched at once: take fewer steps.");
  }

  /** How many hits, and a way through them. */
  sayHits(number_) {
    const go = (by, text, name) => h("button", { type: "button", class: "save", "aria-label": name, onclick: () => this.goToHit(by) }, text);
    this.hits.replaceChildren(...(this.terms.some(({ field }) => !field || FIELDS[field]) && number_ ? [h("b", {}, plural(number_, "hit")), go(-1, "‹", "Previous hit"), go(1, "›", "Next hit")] : []));
    this.save.hidden = !this.found.length;
  }

  /** A line for each conversation that fits. */
  saveList() {
    const terms = [...new Set(this.found.flatMap((unit) => unit.members.flatMap((one) => Object.keys(one.breakdown))))].sort();
    const sampled = (one) => one.turns.reduce((sum, turn) => sum + turn.sampled_tokens, 0);
    saveCsv(`${this.data.name ?? "conversations"}-conversations`, [["step", "stage", "group", "member", "scenario", "family", "status", "success", "reward", "turns", "sampled tokens", "broken rules", ...terms],
      ...this.found.flatMap((unit) => unit.members.filter((one) => unit.fitting.has(one)).map((one) => [one.step, one.stage, one.group, one.member, one.scenario, one.family, one.status, one.success, one.reward, one.turns.length, sampled(one), one.broken.join(" "), ...terms.map((name) => one.breakdown[name])]))]);
  }

  /** The next or previous hit, in this group or the one after it. */
  goToHit(by) {
    if (!this.terms.length || !this.found.length) return;
    if (this.view.mode === "tokens") this.view.toggle();
    const marks = () => [...this.view.element.querySelectorAll("mark.hit")];
    let all = marks();
    let next = this.hit + by;
    if (this.hit < 0 && by < 0) next = -1;
    if (next < 0 || next >= all.length) {
      const group = this.at + by;
      if (group >= 0 && group < this.found.length) {
        this.select(group, true);
        all = marks();
        next = by > 0 ? 0 : all.length - 1;
      } else next = Math.max(0, Math.min(all.length - 1, next));
    }
    this.view.element.querySelector("mark.now")?.classList.remove("now");
    this.hit = next;
    all[next]?.classList.add("now");
    all[next]?.scrollIntoView({ block: "center", inline: "nearest" });
  }

  /** What is filtered, each with a way out of it, so that none is left behind unseen. */
  sayFilters(asked) {
    const out = ([name, value]) => h("button", { type: "button", class: "chip", "aria-label": `Leave out the filter ${name} ${value}`, onclick: () => {
      const control = this.form.elements[name];
      control.value = control.options?.[0].value ?? "";
      this.filter();
    } }, `${name.replaceAll("-", " ")} ${value}`, h("span", { "aria-hidden": "true" }, " ✕"));
    this.chips.replaceChildren(...[...asked].filter(([name, value]) => value && name !== "order").map(out));
  }

  /** Show a training step's groups, from a point of a curve; of the nearest step whose conversations were recorded. */
  openStep(step) {
    const steps = [...new Set(this.data.counts.filter(([stage]) => stage === "train").map(([, own]) => own))];
    if (!steps.length) return;
    const nearest = steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    this.show({ stage: "train", "step-from": nearest, "step-to": nearest });
    if (nearest !== step) this.count.append(`. Of step ${step} none was recorded; ${nearest} is the nearest with conversations.`);
  }

  /** Show a training group of the page, where it has it and is asked to; does it have it? */
  open(step, group, show) {
    const unit = this.units.find(({ key }) => key === `${step}|${group}`);
    if (!unit || !show) return Boolean(unit);
    this.ask({ stage: "train", "step-from": step, "step-to": step });
    this.select(this.found.indexOf(unit), true);
    this.place.scrollIntoView({ block: "start" });
    return true;
  }

  /** Some more entries at the end of the list. */
  extend() {
    this.more.disconnect();
    const next = this.found.slice(this.shown, this.shown + CHUNK);
    this.list.append(...next.map((unit, at) => this.entry(unit, this.shown + at)));
    this.shown += next.length;
    if (this.shown < this.found.length) this.more.observe(this.list.lastElementChild);
  }

  entry(unit, at) {
    const succeeded = unit.members.filter((one) => one.success === true).length;
    const strip = h("span", { class: "strip", "aria-hidden": "true" }, unit.members.map((one) => h("i", { class: `${verdict(one).replace(" ", "-")}${unit.fitting.has(one) ? "" : " off"}` })));
    const branches = unit.branches.length ? ` + ${unit.branches.length}` : "";
    const where = unit.training ? `step ${unit.step}` : unit.members.map((one) => one.stage).filter((stage, i, all) => all.indexOf(stage) === i).join(", ");
    return h("li", { role: "option", id: `unit-${at}`, "aria-selected": "false", onclick: () => this.select(at, true) },
      h("span", { class: "line" }, h("b", {}, unit.family), h("span", { class: "mean", title: unit.training ? "mean reward" : "mean reward, each time it was played" }, meanRewards(unit))),
      h("span", { class: "line" }, strip, h("span", { class: "where" }, `${where} · ${succeeded}/${unit.members.length}${branches}`)),
      h("span", { class: "scenario" }, unit.scenario));
  }

  select(at, byUser) {
    const unit = this.found[at];
    for (const entry of this.list.querySelectorAll('[aria-selected="true"]')) entry.setAttribute("aria-selected", "false");
    if (!unit) {
      this.selected = null;
      this.at = -1;
      this.view.clear();
      return;
    }
    while (this.shown <= at) this.extend();
    const entry = this.list.children[at];
    entry.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", entry.id);
    if (byUser) {
      entry.scrollIntoView({ block: "nearest" });
      remember({ group: unit.key, member: null, token: null }, { anchor: "conversations" });
    }
    this.at = at;
    this.selected = unit.key;
    this.view.show(unit, this.terms);
    this.hit = -1;
    if (byUser && matchMedia("(max-width: 760px)").matches) this.view.element.scrollIntoView({ block: "start" });
  }

  move(by) {
    if (this.found.length) this.select(Math.max(0, Math.min(this.found.length - 1, this.at + by)), true);
  }

  key(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.move(moves[event.key]);
  }

  shortcut(event) {
    if (event.key === "Escape" && this.form.elements.text.value) {
      this.form.elements.text.value = "";
      this.filter();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "/") {
      event.preventDefault();
      this.form.elements.text.focus();
    } else if (event.key === "n") this.goToHit(1);
    else if (event.key === "N") this.goToHit(-1);
    else if (event.key === "j") this.move(1);
    else if (event.key === "k") this.move(-1);
    else if (event.key === "t") this.view.toggle();
  }
}
