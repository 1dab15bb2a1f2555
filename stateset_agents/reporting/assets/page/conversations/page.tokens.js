// One group: its members side by side, as transcripts or token by token.

/** [T] mask, log-probs, versions and advantages of a conversation, from their runs; null off the mask. */
function unpack(one) {
  const spread = (runs) => (runs ?? []).flatMap(([value, count]) => Array(count).fill(value));
  const mask = spread(one.mask);
  const of = (values) => {
    let at = 0;
    return mask.map((bit) => (bit ? (values[at++] ?? null) : null));
  };
  return { mask, logprobs: of(one.logprobs), versions: of(spread(one.versions)), advantages: of(spread(one.advantages)) };
}

/** A token's text with its line ends; marks of a tokenizer's own (private characters) have no look. */
const visible = (text) => text.replaceAll("\n", "⏎\n").replace(/[\ue000-\uf8ff]/g, "");

const HUES = {
  logprob: ["Log-prob", "strong: surprising, −5 nats or less"],
  advantage: ["Advantage", "blue: made likelier; orange: made less likely; strongest: the group's largest"],
  version: ["Policy version", "one colour for each version"],
};

class GroupView {
  constructor() {
    this.tokens = {};
    this.terms = []; // of the search
    this.mode = state.get("view") === "tokens" ? "tokens" : "transcript";
    this.hue = state.get("colour") in HUES ? state.get("colour") : "logprob";
    this.branches = false; // shown, too
    this.members = new Map(); // card element -> its conversation
    this.lazy = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => this.fill(entry.target)), { rootMargin: "200px" });
    this.inspector = h("div", { class: "inspector", id: "inspector", role: "status", hidden: true });
    this.element = h("div", { class: "group", role: "region", "aria-label": "The group's conversations" });
    for (const event of ["mouseover", "focusin"]) this.element.addEventListener(event, (event_) => this.inspect(event_.target));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  clear() {
    this.unit = null;
    this.element.replaceChildren();
  }

  show(unit, terms = this.terms) {
    const asked = JSON.stringify(terms, (_, value) => (value instanceof RegExp ? value.source : value));
    const same = this.unit?.key === unit.key && this.unit.members.length === unit.members.length && this.unit.branches.length === unit.branches.length;
    if (same && [...unit.fitting].map((one) => unit.members.indexOf(one)).join() === this.fitting && asked === this.asked) return; // a live update leaves the reader in peace
    this.unit = unit;
    [this.terms, this.asked] = [terms, asked];
    this.fitting = [...unit.fitting].map((one) => unit.members.indexOf(one)).join();
    this.build();
  }

  toggle() {
    this.mode = this.mode === "tokens" ? "transcript" : "tokens";
    this.told();
    if (this.unit) this.build();
  }

  told() {
    remember({ view: this.mode === "tokens" ? "tokens" : null, colour: this.hue === "logprob" ? null : this.hue }, { anchor: "conversations" });
  }

  /** The view, the member and the token that the address names. */
  restore() {
    const mode = state.get("view") === "tokens" ? "tokens" : "transcript";
    const hue = state.get("colour") in HUES ? state.get("colour") : "logprob";
    const [member, token] = [state.get("member"), state.get("token")];
    if (!this.unit) return;
    if (mode !== this.mode || hue !== this.hue) {
      [this.mode, this.hue] = [mode, hue];
      this.build();
    }
    const one = member === undefined ? null : [...this.members.values()].find((each) => this.nameOf(each) === member);
    if (one) this.open(one, token === undefined ? null : Number(token));
  }

  /** A member's name in the address: stage and step where there are several. */
  nameOf(one) {
    return one.stage === "train" ? String(one.member) : `${one.stage}-${one.step}-${one.member}`;
  }

  /** Bring a member's card into view; with `at` token by token, that token in focus. */
  open(one, at) {
    if (at !== null && this.mode !== "tokens") {
      this.mode = "tokens";
      this.build();
    }
    const card = [...this.members].find(([, each]) => each === one)?.[0];
    if (!card) return;
    this.fill(card);
    card.scrollIntoView({ inline: "start", block: "nearest" });
    const chip = at === null ? null : card.querySelector(`.t[data-at="${at}"]`);
    (chip ?? card).focus({ preventScroll: true });
    chip?.scrollIntoView({ block: "center", inline: "nearest" });
    remember({ group: this.unit.key, member: this.nameOf(one), token: chip ? at : null, view: this.mode === "tokens" ? "tokens" : null }, { anchor: "conversations" });
  }

  build() {
    const { unit } = this;
    this.lazy.disconnect();
    this.members.clear();
    const byReward = (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.member - b.member;
    const members = unit.training ? [...unit.members].sort(byReward) : unit.members;
    const shown = [...members, ...(this.branches ? unit.branches : [])];
    this.partings = partings(unit);
    const cards = shown.map((one) => this.card(one));
    const choice = (name, options, chosen, change) => h("span", { class: "choice", role: "radiogroup", "aria-label": name },
      options.map(([value, text]) => h("label", {}, h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => change(value) }), h("span", {}, text))));
    const modes = choice("view", [["transcript", "Transcript"], ["tokens", "Tokens"]], this.mode, (mode) => { this.mode = mode; this.told(); this.build(); this.element.querySelector(`[value="${mode}"]`).focus(); });
    const hues = this.mode === "tokens"
      ? [choice("colour", Object.entries(HUES).map(([value, [text]]) => [value, text]), this.hue, (hue) => { this.hue = hue; this.told(); this.build(); this.element.querySelector(`[value="${hue}"]`).focus(); }),
        h("span", { class: "note" }, HUES[this.hue][1], h("span", { class: "env-key" }, "grey: environment, not trained"))] : [];
    const jumps = unit.training ? memberTable(unit, members, this.tokens, (one) => this.called(one), (one, at) => this.open(one, at)) : h("div", { class: "jumps", role: "group", "aria-label": "Members" }, shown.map((one, at) => h("button", {
      type: "button", class: verdict(one).replace(" ", "-"), onclick: () => this.open(one, null), "aria-controls": `card-${at}`,
    }, h("span", {}, this.called(one)), h("b", {}, one.reward === null ? "unscored" : signed(one.reward)))));
    const others = unit.branches.length
      ? h("label", { class: "check" }, h("input", { type: "checkbox", checked: this.branches, onchange: (event) => { this.branches = event.target.checked; this.build(); this.element.querySelector("[type=checkbox]").focus(); } }), ` ${plural(unit.branches.length, "branch").replace("branchs", "branches")}`) : null;
    const context = Object.entries(unit.members[0].context ?? {});
    const about = context.length ? h("details", {}, h("summary", {}, "Scenario's context"), h("dl", { class: "terms" }, context.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value)))))) : null;
    const where = unit.training ? `training, step ${unit.step}` : "held-out";
    this.inspector.hidden = this.mode !== "tokens";
    this.inspector.replaceChildren(h("span", { class: "note" }, matchMedia("(hover: none)").matches ? "Tap a token." : "Point at a token, or focus one and use the arrow keys."));
    this.element.replaceChildren(
      h("header", {}, h("h3", {}, unit.family, " ", h("span", { class: "n" }, `${unit.scenario} · ${where}`)), about, jumps, h("div", { class: "tools" }, modes, hues, others, h("button", { type: "button", class: "save", "aria-label": "The group as JSON", onclick: () => saveJson(unit.key, [...unit.members, ...unit.branches].map(({ wording: _, ...one }) => one)) }, "JSON"))),
      h("div", { class: "members", tabindex: "0", role: "group", "aria-label": "Conversations side by side" }, cards), this.inspector);
    cards.forEach((card, at) => {
      card.id = `card-${at}`;
      if (this.terms.length) this.fill(card); // so that all hits can be gone through
      else this.lazy.observe(card);
    });
  }

  called(one) {
    if (one.stage !== "train") {
      const tries = this.unit.members.filter((other) => other.stage === one.stage && other.step === one.step).length;
      return `${one.stage === "validation" ? `step ${one.step}` : one.stage}${tries > 1 ? `, try ${one.member + 1}` : ""}`;
    }
    return one.branch_of ? `branch of ${one.branch_of[0]}, turn ${one.branch_of[1] + 1}` : `member ${one.member}`;
  }

  /** A conversation's frame; what was said comes when it is in view. */
  card(one) {
    const kind = verdict(one);
    const scored = one.reward === null ? "unscored" : `reward ${exact(Number(one.reward.toFixed(6)))}`;
    const terms = Object.entries(one.breakdown).filter(([, value]) => value !== 0);
    const zero = Object.keys(one.breakdown).length - terms.length;
    const card = h("article", { tabindex: "-1", class: one.branch_of || this.unit.fitting.has(one) ? "" : "off", "aria-label": `${this.called(one)}, ${kind}, ${scored}` },
      h("header", {}, h("h4", {}, this.called(one)),
        h("p", { class: "verdict" }, h("span", { class: `badge ${kind.replace(" ", "-")}` }, kind), ` ${scored}${one.status === "terminated" ? "" : ` · ${one.status}`}${one.rows ? ` · ${plural(one.rows.number, "row")}` : ""}`),
        one.error ? h("p", { class: "error" }, one.error) : null,
        terms.length || zero ? h("dl", { class: "terms", "aria-label": "Terms of the reward" }, terms.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, exact(Number(value.toFixed(6)))))), zero ? h("div", {}, h("dt", {}, `${zero} at 0`)) : null) : null),
      h("div", { class: "said" }));
    this.members.set(card, one);
    return card;
  }

  fill(card) {
    this.lazy.unobserve(card);
    const one = this.members.get(card);
    const parts = this.mode === "tokens" ? this.tokenTurns(one) : this.turns(one);
    card.querySelector(".said").replaceChildren(h("ol", { class: "transcript" }, parts), ...changesOf(one));
    if (this.mode === "transcript" && this.unit.fitting.has(one)) markHits(card, this.terms);
  }

  turns(one) {
    const said = (from, to) => one.messages.slice(from, to).flatMap((message, i) => lines(message, goneOf(one, from + i)));
    const parts = said(0, one.opening);
    let at = one.opening;
    one.turns.forEach((turn, number_) => {
      const reply = lines(one.messages[at], goneOf(one, at), turn.is_summary ? "agent sums up, for itself" : "agent");
      const parting = this.partings.get(one);
      const parts_ = parting?.sampled && parting.turn === number_ ? [h("li", { class: "parting" }, "parts here: ", partingWords(one, parting, this.tokens, (each) => this.called(each)))] : [];
      parts.push(...rowBegin(one, number_), ...reply, ...parts_, turnFacts(one, turn, number_), ...said(at + 1, at + 1 + turn.feedback));
      at += 1 + turn.feedback;
    });
    return parts;
  }

  tokenTurns(one) {
    const row = unpack(one);
    const largest = Math.max(1e-9, ...this.unit.members.flatMap((member) => (member.advantages ?? []).map(([value]) => Math.abs(value))));
    const lowest = Math.min(...row.versions.filter((version) => version !== null));
    const parting = this.partings.get(one);
    let at = 0;
    let entry = true;
    const chip = (turn) => {
      const place = at++;
      const text = this.tokens[one.token_ids[place]] ?? `#${one.token_ids[place]} `;
      const attributes = { class: "t", "data-at": place, "data-turn": turn, tabindex: entry && row.mask[place] ? "0" : "-1", "aria-describedby": "inspector" };
      if (row.mask[place]) {
        entry = false;
        Object.assign(attributes, this.colours(row, place, largest, lowest));
      } else attributes.class += " env";
      if (place === parting?.at && parting.sampled) attributes.class += " part";
      return h("span", attributes, visible(text));
    };
    const chips = (count, turn) => Array.from({ length: count }, () => chip(turn));
    return one.turns.flatMap((turn, number_) => [
      ...rowBegin(one, number_),
      h("li", { class: "raw env-part" }, h("span", { class: "who" }, `${turn.follows === null ? "whole prompt" : "environment"}, ${plural(turn.prompt_tokens, "token")}`), h("p", {}, chips(turn.prompt_tokens, number_))),
      h("li", { class: "raw agent" }, h("span", { class: "who" }, `agent, ${plural(turn.sampled_tokens, "token")}`), h("p", {}, chips(turn.sampled_tokens, number_))),
      turnFacts(one, turn, number_),
    ]);
  }

  colours(row, place, largest, lowest) {
    if (this.hue === "advantage") {
      const value = row.advantages[place];
      if (value === null) return {};
      return { class: `t ${value < 0 ? "minus" : "plus"}`, style: `--w: ${Math.round((70 * Math.abs(value)) / largest)}%` };
    }
    if (this.hue === "version") return { class: "t version", style: `--key: var(--c${(row.versions[place] - lowest) % 12})` };
    return { class: "t hot", style: `--w: ${Math.round(14 * Math.min(5, -(row.logprobs[place] ?? -5)))}%` };
  }

  inspect(target) {
    const chip = target.closest?.(".t");
    if (!chip) return;
    const one = this.members.get(chip.closest("article"));
    const [row, at, turn] = [unpack(one), Number(chip.dataset.at), Number(chip.dataset.turn)];
    const { recorded, inRow } = turnStarts(one)[turn];
    const agent = row.mask[at] === 1;
    const facts = [
      ["token", JSON.stringify(this.tokens[one.token_ids[at]] ?? null)], ["id", one.token_ids[at]], [one.rows ? "position in its row" : "position", at - recorded + inRow], ["turn", turn + 1],
      ["mask", agent ? "1, sampled by the agent" : "0, environment"],
      ...(agent ? [["log-prob", exact(row.logprobs[at])], ["probability", row.logprobs[at] === null ? "–" : number(Math.exp(row.logprobs[at]))],
        ["advantage", row.advantages[at] === null ? "did not train" : exact(row.advantages[at])], ["policy version", row.versions[at]]] : []),
    ];
    if (chip === document.activeElement) remember({ group: this.unit.key, member: this.nameOf(one), token: at, view: "tokens" }, { anchor: "conversations" });
    for (const marked of this.element.querySelectorAll(".t.here")) marked.classList.remove("here");
    chip.classList.add("here");
    this.inspector.replaceChildren(h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { "data-fact": name }, String(value))))));
  }

  /** Arrow keys go from token to token; one token of each conversation is a tab stop. */
  key(event) {
    const chip = event.target.closest?.(".t");
    if (!chip) return;
    const chips = [...chip.closest("article").querySelectorAll(".t")];
    const at = chips.indexOf(chip);
    const agents = (from, by) => { let i = from + by; while (chips[i] && chips[i].classList.contains("env")) i += by; return i; };
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: agents(at, 1), ArrowUp: agents(at, -1), Home: 0, End: chips.length - 1 };
    const next = chips[moves[event.key]];
    if (!next) return;
    event.preventDefault();
    chip.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }
}

/** A message as lines of a transcript: an agent's thought before its words, its tool calls behind them. `gone`: what
 *  of it no later turn sees. */
function lines(message, gone, agent = "agent") {
  const speaker = message.role === "assistant" ? "agent" : message.role;
  const grey = (kind) => (gone[kind] ? " gone" : "");
  const why = (kind) => (gone[kind] ? h("span", { class: "why" }, ` · ${gone[kind]}`) : null);
  if (speaker === "system") return [h("li", { class: `system${grey("words")}` }, h("details", {}, h("summary", {}, "system message", why("words")), h("p", {}, message.content)))];
  const calls = message.tool_calls ?? [];
  const who = { agent, tool: "tool answers" }[speaker] ?? speaker;
  const thought = message.reasoning
    ? [h("li", { class: `agent thought${grey("thought")}` }, h("details", {}, h("summary", {}, h("span", { class: "who" }, "agent thinks", why("thought")), h("span", { class: "preview" }, message.reasoning.slice(0, 200))), h("p", {}, message.reasoning)))] : [];
  const said = message.content || !calls.length
    ? [h("li", { class: `${speaker}${grey("words")}` }, h("span", { class: "who" }, who, why("words")), h(speaker === "tool" ? "code" : "p", {}, message.content || "(nothing)"))] : [];
  return [...thought, ...said, ...calls.map((call) => h("li", { class: `agent${grey("words")}` }, h("span", { class: "who" }, "agent calls", why("words")), h("code", {}, callText(call))))];
}

function callText(call) {
  if (call.error) return `${call.function.name}: ${call.error}`;
  try {
    const given = Object.entries(JSON.parse(call.function.arguments)).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
    return `${call.function.name}(${given.join(", ")})`;
  } catch {
    return `${call.function.name}(${call.function.arguments})`;
  }
}

/** What one turn of the agent was worth. */
function turnFacts(one, turn, at) {
  const before = one.turns.slice(0, at).reduce((sum, earlier) => sum + earlier.sampled_tokens, 0);
  const own = one.logprobs.slice(before, before + turn.sampled_tokens).filter((value) => value !== null);
  const advantages = (one.advantages ?? []).flatMap(([value, count]) => Array(count).fill(value)).slice(before, before + turn.sampled_tokens);
  const [low, high] = [Math.min(...advantages), Math.max(...advantages)];
  const terms = Object.entries(turn.breakdown ?? {}).map(([name, value]) => `${name} ${exact(value)}`);
  const facts = [
    turn.reward === null ? null : `reward ${exact(turn.reward)}${terms.length ? ` (${terms.join(", ")})` : ""}`,
    turn.earned === null || turn.earned === turn.reward ? null : `earned ${exact(turn.earned)}`,
    advantages.length ? `advantage ${signed(low)}${high === low ? "" : ` to ${signed(high)}`}` : null,
    own.length ? `log-prob ${signed(own.reduce((sum, value) => sum + value, 0))}` : null,
    turn.finish_reason === "stop" ? null : `ended by ${turn.finish_reason}`,
  ].filter(Boolean);
  return h("li", { class: "turn" }, h("b", {}, `turn ${at + 1}`), ` ${facts.join(" · ")}`);
}

/** What the environment changed: rows before and after. */
function changesOf(one) {
  if (!one.changes.length) return [];
  const value = (data) => (data === null || data === undefined ? "none" : typeof data === "string" ? data : JSON.stringify(data));
  const row = (change) => {
    if (!("before" in change || "after" in change)) return h("li", {}, h("code", {}, JSON.stringify(change)));
    const [old, now] = [change.before, change.after];
    const isRow = (data) => data === null || data === undefined || typeof data === "object";
    if (!isRow(old) || !isRow(now)) return h("li", {}, h("code", {}, JSON.stringify(change)));
    const fields = [...new Set([...Object.keys(old ?? {}), ...Object.keys(now ?? {})])].filter((name) => value(old?.[name]) !== value(now?.[name]) || !old || !now);
    const how = !old ? "added" : !now ? "removed" : "changed";
    return h("li", { class: how }, h("b", {}, [change.table, change.key].filter((part) => part !== undefined).map(value).join(" ") || "row"), ` ${how}`,
      h("dl", { class: "terms" }, fields.map((name) => h("div", {}, h("dt", {}, name), h("dd", {}, old ? h("del", {}, value(old[name])) : null, old && now ? " → " : null, now ? h("ins", {}, value(now[name])) : null)))));
  };
  return [h("div", { class: "changes" }, h("h5", {}, "What the environment changed"), h("ul", {}, one.changes.map(row)))];
}
