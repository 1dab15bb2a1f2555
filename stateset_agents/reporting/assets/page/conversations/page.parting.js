// Where the good and the bad members of a group part: the first token that differs between one and the sibling of the
// other kind that goes with it longest. Before it both have the same tokens, so both probabilities are of one choice.

/** [good, bad] members: by verdict where both are there, else by reward above and below the mean; or null. */
function goodAndBad(unit) {
  const judged = [true, false].map((wanted) => unit.members.filter((one) => one.success === wanted));
  if (judged.every((side) => side.length)) return judged;
  const scored = unit.members.filter((one) => one.reward !== null);
  const mean = scored.reduce((sum, one) => sum + one.reward, 0) / Math.max(1, scored.length);
  const sides = [scored.filter((one) => one.reward > mean + 1e-9), scored.filter((one) => one.reward < mean - 1e-9)];
  return sides.every((side) => side.length) ? sides : null;
}

/** Member -> {at, turn, inTurn, sibling, sampled}: where it parts from its closest sibling of the other kind. */
function partings(unit) {
  const found = new Map();
  const sides = unit.training ? goodAndBad(unit) : null;
  if (!sides) return found;
  const shared = (a, b) => {
    const end = Math.min(a.token_ids.length, b.token_ids.length);
    let at = 0;
    while (at < end && a.token_ids[at] === b.token_ids[at]) at += 1;
    return at;
  };
  for (const [own, others] of [sides, [...sides].reverse()]) {
    for (const one of own) {
      const lengths = others.map((other) => shared(one, other));
      const at = Math.max(...lengths);
      const sibling = others[lengths.indexOf(at)];
      found.set(one, { at, sibling, ...turnAt(one, at), sampled: isSampled(one, at) && isSampled(sibling, at) });
    }
  }
  return found;
}

/** The turn of a token, and its place among the turn's sampled tokens, from 1 on (0 or less: in the prompt). */
function turnAt(one, at) {
  let start = 0;
  for (const [turn, { prompt_tokens, sampled_tokens }] of one.turns.entries()) {
    if (at < start + prompt_tokens + sampled_tokens) return { turn, inTurn: at - start - prompt_tokens + 1 };
    start += prompt_tokens + sampled_tokens;
  }
  return { turn: one.turns.length - 1, inTurn: 0 };
}

const isSampled = (one, at) => at < one.token_ids.length && unpack(one).mask[at] === 1;

/** What a member says from a token on, to the end of the turn, `most` tokens at most. */
function sayingFrom(one, at, tokens, most) {
  const { mask } = unpack(one);
  const ids = [];
  while (ids.length < most && mask[at + ids.length] === 1) ids.push(one.token_ids[at + ids.length]);
  return ids.map((id) => tokens[id] ?? `#${id} `);
}

const quoted = (text) => `“${visible(text).replaceAll("⏎\n", "⏎")}”`;
const chance = (one, at) => {
  const logprob = unpack(one).logprobs[at];
  return logprob === null ? "p –" : `p ${number(Math.exp(logprob))}`;
};

/** `“ refund” (p 0.61), member 2 “ cancel” (p 0.12)`, or who differs if not the agent. */
function partingWords(one, parting, tokens, called) {
  const { at, sibling, turn, inTurn, sampled } = parting;
  if (!sampled) {
    const ends = at >= Math.min(one.token_ids.length, sibling.token_ids.length);
    return ends ? `says all that ${called(sibling)} says` : `the environment answers otherwise than to ${called(sibling)}, before turn ${turn + 1}`;
  }
  const [own, other] = [one, sibling].map((each) => quoted(tokens[each.token_ids[at]] ?? `#${each.token_ids[at]}`));
  return `turn ${turn + 1}, token ${inTurn}: ${own} (${chance(one, at)}), ${called(sibling)} ${other} (${chance(sibling, at)})`;
}

/** All members of a group in one table, the highest reward first; its roles are named, for on a phone it is no table to
 *  the eye. `open(member)` shows its card, with `at` that token. */
function memberTable(unit, members, tokens, called, open) {
  const found = partings(unit);
  const advantage = (one) => [...new Set((one.advantages ?? []).map(([value]) => value))];
  const rows = members.map((one) => {
    const parting = found.get(one);
    const advantages = advantage(one);
    const low = Math.min(...advantages);
    const high = Math.max(...advantages);
    const how = parting ? [h("button", { type: "button", class: "link part-link", onclick: () => open(one, parting.sampled ? parting.at : null) }, partingWords(one, parting, tokens, called)),
      parting.sampled ? h("code", {}, h("mark", { class: "first" }, visible(sayingFrom(one, parting.at, tokens, 1).join("")).trimEnd() || "␣"), sayingFrom(one, parting.at, tokens, 16).slice(1).map(visible).join("").replaceAll("⏎\n", "⏎")) : null] : h("span", { class: "n" }, found.size ? "no verdict" : "no two members differ in what they got");
    return h("tr", { role: "row" }, h("th", { scope: "row", role: "rowheader" }, h("button", { type: "button", class: "link", onclick: () => open(one, null) }, called(one))),
      h("td", { role: "cell" }, h("span", { class: `badge ${verdict(one).replace(" ", "-")}` }, verdict(one))), h("td", { role: "cell" }, one.reward === null ? "unscored" : signed(one.reward)),
      h("td", { role: "cell" }, advantages.length ? `${signed(low)}${high === low ? "" : ` to ${signed(high)}`}` : "–"), h("td", { class: "how", role: "cell" }, how));
  });
  const head = ["member", "verdict", "reward", "advantage", "parts from its closest sibling of the other kind"].map((text) => h("th", { scope: "col", role: "columnheader" }, text));
  return h("div", { class: "scroll members-table", tabindex: "0", role: "region", "aria-label": "The group's members, highest reward first" }, h("table", { role: "table" }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)), h("tbody", { role: "rowgroup" }, rows)));
}
