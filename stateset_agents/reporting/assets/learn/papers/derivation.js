// A derivation: claims in order, each with the two sides of its equality, computed again at every change. And pitfalls.

/** `make`, which remembers its last values: one change of a setting asks for each several times. */
function cached(make) {
  const known = new Map();
  return (...parts) => {
    const key = JSON.stringify(parts);
    if (!known.has(key)) {
      if (known.size > 20) known.clear();
      known.set(key, make(...parts));
    }
    return known.get(key);
  };
}

/** The slope of a function of one number, by finite differences; `side` -1 or 1 takes it from one side alone. */
const slopeOf = (value, at, side = 0) => {
  const step = side ? 1e-7 : 1e-5;
  return side ? (value(at + side * step) - value(at)) / (side * step) : (value(at + step) - value(at - step)) / (2 * step);
};

/** How far two sides may lie apart: three standard errors of what is drawn, a share of an approximation (of `scale`, at least), or rounding. */
const allowance = ({ left, right, within, scale, error }) => error ? 3 * error : (within ?? 1e-6) * Math.max(within ? scale : 1, Math.abs(left), Math.abs(right));

/** Both sides of one claim, and whether they agree. `sides`: left and right as [words, number], `otherwise`: why not. */
function equality(name, { left, right, within = null, scale = 0, error = null, otherwise = "", more = null }) {
  const missing = left[1] === null || right[1] === null, apart = missing ? null : Math.abs(left[1] - right[1]);
  const agree = !missing && apart <= allowance({ left: left[1], right: right[1], within, scale, error });
  const measure = error !== null ? ["They lie ", num(`${name}-errors`, apart / error, 1), " standard errors apart: "] : within !== null ? ["They differ by ", num(`${name}-apart`, apart), `, where ${100 * within} % is allowed: `] : [];
  const verdict = missing ? ["Nothing to compare: ", otherwise] : [agree ? "= " : "≠ ", measure, agree ? "both sides agree." : measure.length ? otherwise : ["they differ by ", num(`${name}-apart`, apart), ": ", otherwise]];
  return [
    h("dl", { class: "sides" }, [["left", left], ["right", right]].map(([side, [words, value]]) => h("div", {}, h("dt", {}, words), h("dd", {}, num(`${name}-${side}`, value, 5))))),
    h("p", { class: `verdict ${agree ? "agree" : "differ"}`, "data-verdict": missing ? "none" : agree ? "agree" : "differ", "data-claim": name }, verdict),
    more && h("p", { class: "note" }, more),
  ];
}

/** `claims`: {claim, shows, knobs, sides, figure}, `shows` with _low and ^high; none stands without its sides. */
function derivation(title, words, claims) {
  return section("derivation", title, [...words, h("ol", { class: "claims" }, claims.map(({ claim, shows, knobs, sides, figure: drawn = null }, at) => h("li", {},
    h("div", {}, text(claim), formula(...shows.split(/([_^]\w+)/).map((part, i) => (i % 2 ? h(part[0] === "_" ? "sub" : "sup", {}, part.slice(1)) : part))), drawn),
    h("div", {}, controls(...knobs), live(() => equality(`claim-${at + 1}`, sides()), "div")))))]);
}

/** `entries`: {wrong, here, cure, show, knobs}: what goes wrong, its number here, what to do, the settings that show it, sliders. */
function pitfalls(title, entries) {
  return section("pitfalls", title, [h("ol", { class: "claims" }, entries.map(({ wrong, here, cure, show, knobs = [] }, at) => h("li", {},
    h("div", {}, text(h("strong", {}, wrong)), text("What to do: ", cure)),
    h("div", {}, live(() => ["Here: ", here()]), knobs, press("Show it", () => set(show), { "data-pitfall": at + 1, "aria-label": `Show it: ${wrong}` })))))]);
}
