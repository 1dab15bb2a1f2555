// What is looked for: words, /a regular expression/, or either in one field, such as tool:refund or user:/where.s/.

/** Field -> where the transcript shows it. */
const FIELDS = {
  agent: ".agent:not(.thought) > p", thought: ".thought p", tool: ".agent > code", result: ".tool > code", user: ".user > p", system: ".system p", scenario: null, broke: null, status: null,
};
const TERM = new RegExp(`(?:^|\\s)(${Object.keys(FIELDS).join("|")}):(/(?:[^/\\\\]|\\\\.)+/|"[^"]*"|\\S+)`, "gi");

/** {terms: [{field, pattern}]}, or {error}. Without a field, a text is taken as it stands, spaces included. */
function parseQuery(text) {
  const terms = [];
  try {
    const rest = text.replace(TERM, (_, field, words) => {
      terms.push({ field: field.toLowerCase(), pattern: patternOf(words.replace(/^"(.*)"$/, "$1")) });
      return " ";
    }).trim();
    if (rest) terms.push({ field: null, pattern: patternOf(rest) });
  } catch (error) {
    return { error: `no regular expression: ${error.message.split(": ").at(-1)}` };
  }
  return { terms };
}

function patternOf(words) {
  const expression = words.match(/^\/(.+)\/$/s);
  return new RegExp(expression ? expression[1] : words.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
}

/** [field, text] of everything that was thought and said in a conversation, as the transcript shows it. */
function wording(one) {
  const broke = one.broken.length ? one.broken : one.success === false ? ["none"] : [];
  one.wording ??= [["scenario", one.scenario], ["status", one.status], ...broke.map((rule) => ["broke", rule]), ...one.messages.flatMap((message) => [
    ...(message.reasoning ? [["thought", message.reasoning]] : []),
    ...(message.content ? [[{ assistant: "agent", tool: "result" }[message.role] ?? message.role, message.content]] : []),
    ...(message.tool_calls ?? []).map((call) => ["tool", callText(call)]),
  ])];
  return one.wording;
}

/** How often all terms together are found; 0 where one of them is not. */
function hitsIn(one, terms) {
  let sum = 0;
  for (const { field, pattern } of terms) {
    let found = 0;
    for (const [where, text] of wording(one)) if (field ? field === where : where !== "status" && where !== "broke") for (const [hit] of text.matchAll(pattern)) found += hit ? 1 : 0;
    if (!found) return 0;
    sum += found;
  }
  return sum;
}

/** Mark the hits in an element of the transcript. */
function markHits(element, terms) {
  for (const { field, pattern } of terms) {
    const selectors = field ? FIELDS[field] : Object.values(FIELDS).filter(Boolean).join(", ");
    if (!selectors) continue;
    for (const place of element.querySelectorAll(selectors)) markIn(place, pattern);
  }
}

function markIn(place, pattern) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const found = [...text.data.matchAll(pattern)].filter(([hit]) => hit);
    if (!found.length) continue;
    const parts = [];
    let at = 0;
    for (const hit of found) {
      parts.push(text.data.slice(at, hit.index), h("mark", { class: "hit" }, hit[0]));
      at = hit.index + hit[0].length;
    }
    text.replaceWith(...parts, text.data.slice(at));
    const folded = place.closest("details");
    if (folded) folded.open = true;
  }
}

/** Does a name fit what was typed: a part of it, or /a regular expression/? Null where that is none. */
function nameFilter(text) {
  try {
    const pattern = patternOf(text);
    return (name) => !text || name.search(pattern) >= 0;
  } catch {
    return null;
  }
}
