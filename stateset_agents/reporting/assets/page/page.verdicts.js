// What `audit` and `rescore` found, where their results stand in the run's folder.

function showVerdicts(data) {
  const { audit, rescore } = data.verdicts;
  part("verdicts").hidden = document.querySelector("nav [href='#verdicts']").hidden = !audit && !rescore;
  const parts = [];
  if (audit) {
    parts.push(h("h3", {}, "Agents that deserve nothing"), note("What the environment and its reward pay to agents that cheat or do nothing (audit). An honest agent, where there is one, is for comparison."),
      ...audit.over.map((text) => h("p", { class: "error" }, text)),
      plainTable("Agents that deserve nothing", ["agent", "success", "mean reward", "n"], audit.agents.map((one) => [one.name, one.success === null ? "no verdict" : `${share(one.success)} [${one.interval.map(share).join(", ")}]`, one.reward === null ? "unscored" : signed(one.reward), one.n])));
  }
  if (rescore) {
    const rank = (value) => (value === null ? "–" : signed(value));
    const go = (flip) => h("button", { type: "button", class: "link", onclick: () => browser.show({ stage: "train", "step-from": flip.step, "step-to": flip.step, text: `scenario:"${flip.scenario}"` }) }, `step ${flip.step}, ${flip.scenario}, member ${flip.member}`);
    parts.push(h("h3", {}, "Under another reward"), note(`${plural(rescore.num_groups, "group")} of this run scored again (rescore): how far the two rewards agree, and whose advantage changes its sign.`),
      plainTable("Under another reward, by family", ["family", "mean reward", "rank correlation", "within groups", "advantages that change sign", "n"], rescore.rows.map((row) => [row.name, `${number(row.old_mean)} → ${number(row.new_mean)}`, rank(row.rank_correlation), rank(row.within_groups), share(row.flipped), row.n])),
      ...(rescore.flips.length ? [h("h4", {}, `The largest changes of sign${rescore.num_flips > rescore.flips.length ? `, ${rescore.flips.length} of ${rescore.num_flips.toLocaleString("en")}` : ""}`),
        plainTable("Largest changes of sign", ["conversation", "advantage", "reward"], rescore.flips.map((flip) => [go(flip), `${signed(flip.old_advantage)} → ${signed(flip.new_advantage)}`, `${number(flip.old_reward)} → ${number(flip.new_reward)}`]))] : []));
  }
  part("verdicts").replaceChildren(h("h2", {}, "Audit and other rewards"), ...parts);
}
