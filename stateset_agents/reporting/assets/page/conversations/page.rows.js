// Conversations of several rows: where a row begins, and what the agent no longer sees from there on.

/** Before a turn that does not follow the one before it: a line that says so; else nothing. */
function rowBegin(one, at) {
  const lost = one.rows?.begins[at];
  if (lost === undefined) return [];
  const { follows } = one.turns[at];
  const listed = new Intl.ListFormat("en");
  const things = [];
  if (lost?.thoughts.length) things.push(`the ${lost.thoughts.length > 1 ? "thoughts of turns" : "thought of turn"} ${listed.format(lost.thoughts.map((turn) => String(turn + 1)))}`);
  if (lost?.messages.length) things.push(plural(lost.messages.length, "message"));
  const summary = one.turns[at - 1].is_summary && things.length ? "; its summary stands for them" : "";
  const seen = things.length ? `the agent no longer sees ${listed.format(things)}${summary}` : lost ? "the agent sees all that it saw" : null;
  const head = follows === null ? "new row" : `goes on from turn ${follows + 1}`;
  return [h("li", { class: "row-begin" }, h("b", {}, head), seen ? `: ${seen}` : "")];
}

/** Of a message, what no later turn sees: `{thought, words}`, each with the reason and the first such turn. */
function goneOf(one, message) {
  const found = (one.rows?.gone ?? []).filter(([index]) => index === message);
  return Object.fromEntries(found.map(([, isThought, turn, why]) => [isThought ? "thought" : "words", `${why} from turn ${turn + 1} on`]));
}

/** [turns] where each turn's tokens begin, in the record and in its row. */
function turnStarts(one) {
  const starts = [];
  let recorded = 0;
  one.turns.forEach((turn, at) => {
    const before = starts[turn.follows === undefined ? at - 1 : turn.follows];
    const length = turn.prompt_tokens + turn.sampled_tokens;
    starts.push({ recorded, inRow: before ? before.inRow + before.length : 0, length });
    recorded += length;
  });
  return starts;
}
