// What stands beside a deployment's charts: its arms, guards, violations, conversations and journal.

const when = (at) => `${new Date(1000 * at).toISOString().slice(0, 19).replace("T", " ")}`;
const seconds = (value) => (value === null || value === undefined ? "–" : `${number(value)} s`);
const count = (value) => (value ?? 0).toLocaleString("en");
const ARMS = ["candidate", "baseline"];

const agreementFact = (found) => (found.answers
  ? [["in shadow", `${percent(found.same_calls / found.answers)} of ${plural(found.answers, "answer")} did the same as the baseline's, ${percent(found.same_reply / found.answers)} said the same`]]
  : []);

function deploymentFacts(one) {
  const { status } = one;
  const { evidence } = status;
  const chip = h("b", { class: `mode ${status.mode}` }, modeName(status.mode));
  const effect = evidence.effect === null ? "not known yet" : h("span", {}, h("b", {}, `${points(evidence.effect)} points`), ` ${spread(evidence.interval)}`);
  const waiting = [evidence.waiting ? `${count(evidence.waiting)} waiting` : "", evidence.timeouts ? `${count(evidence.timeouts)} timed out` : ""].filter(Boolean).join(", ");
  const facts = [["mode", chip], ["share", number(status.share, true)], ["candidate", one.candidate], ["baseline", one.baseline], ["effect", effect],
    ["outcomes", `${count(evidence.outcomes)}${waiting ? ` (${waiting})` : ""}`], ...agreementFact(status.agreement), ["since", `${when(status.since)} UTC`], ["why", status.why]];
  return h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

function armsTable(one) {
  const of = (arm) => one.status.arms[arm];
  const both = (make) => ARMS.map((arm) => make(of(arm), one.arms[arm]));
  const quantiles = (found, say) => (found ? `${say(found.p50)}, ${say(found.p95)}` : "–");
  const cost = (value) => number(value);
  const rows = [
    ["conversations", ...both((arm) => count(arm.conversations))],
    ["outcomes compared", ...both((arm) => count(arm.outcomes))],
    ["success", ...both((arm) => percent(arm.success))],
    ["answers", ...both((arm) => count(arm.answers))],
    ["unsafe answers", ...both((arm) => `${count(arm.unsafe_answers)}${arm.answers ? ` (${percent(arm.unsafe_answers / arm.answers)})` : ""}`)],
    ["latency, mean", ...both((arm) => seconds(arm.mean_seconds))],
    ["latency, median and 95 %", ...both((_, recent) => quantiles(recent.seconds, seconds))],
    ["cost, mean", ...both((arm) => cost(arm.mean_cost))],
    ["cost, median and 95 %", ...both((_, recent) => quantiles(recent.cost, cost))],
  ].filter(([name, ...cells]) => !name.startsWith("cost") || cells.some((cell) => cell !== "–"));
  return plainTable(`Arms of deployment ${one.id}`, ["measure", ...ARMS], rows);
}

function guardsTable(one) {
  const answers = one.status.arms.candidate.answers;
  const limit = ({ name, limit: value }) => (value === null ? "–" : name === "latency" ? seconds(value) : number(value));
  const rows = one.guards.map((guard) => [guard.name, limit(guard), `${count(guard.count)} of ${count(answers)}`, percent(guard.rate)]);
  const unsafe = one.status.arms.candidate.unsafe_answers;
  const brake = (found) => (found.log_wealth === undefined
    ? [`window of ${count(found.size)}`, `${number(found.limit, true)} of them`, `${count(found.unsafe)} of ${count(found.answers)}`, found.answers ? percent(found.unsafe / found.answers) : "–"]
    : ["rate", `${number(found.limit, true)} of answers`, `${count(unsafe)} of ${count(answers)}`, `evidence ${number(wealth(found.log_wealth))} of ${number(found.needed)}`]);
  const brakes = one.brakes.map((found) => { const [name, ...cells] = brake(found); return [found.fires ? h("span", { class: "fires" }, `${name}: rolls back`) : name, ...cells]; });
  return plainTable(`Guards of deployment ${one.id}`, ["guard", "limit", "unsafe answers", "rate, or evidence"], [...rows, ...brakes]);
}

/** Two lists beside one another, the candidate's first. */
const sides = (make) => h("div", { class: "sides" }, ARMS.map((arm) => h("div", {}, h("h4", {}, arm), make(arm))));

function violations(one) {
  if (!ARMS.some((arm) => one.violations[arm].length)) return note("No answer was unsafe.");
  return sides((arm) => (one.violations[arm].length ? h("ul", { class: "entries", tabindex: "0", "aria-label": `Violations of the ${arm} of deployment ${one.id}` }, one.violations[arm].map((answer) => h("li", {},
    h("span", { class: "line" }, h("b", {}, answer.conversation), h("span", { class: "n" }, `answer ${answer.turn + 1}, ${when(answer.at)}`)),
    answer.found.map(({ guard, why }) => h("span", { class: "found-one" }, h("b", {}, guard), ` ${why}`))))) : note("None.")));
}

function outcomeOf(conversation) {
  if (conversation.is_timeout) return ["timed out", "failed"];
  if (conversation.success === null) return ["no outcome yet", "open"];
  if (conversation.success === 1) return ["succeeded", "succeeded"];
  return conversation.success === 0 ? ["failed", "failed"] : [number(conversation.success, true), "partly"];
}

function conversationEntry(one, conversation) {
  const [said, kind] = outcomeOf(conversation);
  const answers = ARMS.filter((arm) => conversation.answers[arm]).map((arm) => `${arm}: ${plural(conversation.answers[arm], "answer")}${conversation.unsafe[arm] ? `, ${conversation.unsafe[arm]} unsafe` : ""}${conversation.seconds[arm] === undefined ? "" : `, ${seconds(conversation.seconds[arm])}`}`);
  const facts = [`candidate's share ${number(conversation.probability, true)}`, ...answers, conversation.is_moved ? "moved to the baseline" : "", conversation.reward === null ? "" : `reward ${number(conversation.reward)}`].filter(Boolean).join("; ");
  const head = [h("b", {}, conversation.id), h("span", { class: `outcome ${kind}` }, said)];
  const below = h("span", { class: "n wrap" }, facts);
  if (!conversation.messages) return h("li", {}, h("span", { class: "line" }, head), below);
  return h("li", {}, h("details", { "data-key": `${one.id} ${conversation.number}` }, h("summary", {}, h("span", { class: "line" }, head), below),
    h("div", { class: "talk" }, conversation.messages.map(({ role, text }) => h("p", { class: role }, h("span", { class: "who" }, role), text)))));
}

function conversations(one) {
  const known = ARMS.flatMap((arm) => one.conversations[arm]);
  if (!known.length) return note("No conversation was assigned yet.");
  const list = (arm) => (one.conversations[arm].length
    ? h("ul", { class: "entries", tabindex: "0", "aria-label": `Last conversations of the ${arm} of deployment ${one.id}` }, one.conversations[arm].map((conversation) => conversationEntry(one, conversation)))
    : note("None."));
  return h("div", {}, known.some(({ messages }) => messages) ? "" : note("Words are shown with --conversations FILE, without personal text."), sides(list));
}

function journal(one) {
  const rows = one.journal.map((move) => [`${when(move.at)}`, h("b", { class: `mode ${move.mode}` }, modeName(move.mode)), number(move.share, true), move.who,
    h("span", {}, move.why, move.forced ? h("b", { class: "fires" }, " forced") : ""), count(move.outcomes), move.log_wealth_promote === undefined ? "–" : `${number(wealth(move.log_wealth_promote))}, ${number(wealth(move.log_wealth_roll_back))}`]);
  rows.push([when(one.at), h("b", { class: "mode shadow" }, "shadow"), "0%", one.who, "started", "0", "1, 1"]);
  return plainTable(`Journal of deployment ${one.id}`, ["when (UTC)", "mode", "share", "who", "why", "outcomes", "evidence to promote, to roll back"], rows);
}
