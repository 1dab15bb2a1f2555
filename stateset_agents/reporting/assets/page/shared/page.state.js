// What is selected stands in the address, behind the part of the page: #conversations?step=55&member=2. A link
// restores it.

const state = new Map(); // name -> text; names without a value are left out
const listeners = []; // of states that come from a link or from going back

const WRITTEN = "written"; // an address of the page's own; a link to a part of the page has no state

const readAddress = () => {
  const [anchor, query = ""] = location.hash.slice(1).split("?", 2);
  return [anchor, new URLSearchParams(query)];
};

/** Write values into the address; null or "" leaves a name out. `jump`: a place that "back" leads away from. */
function remember(values, { anchor = readAddress()[0], jump = false } = {}) {
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") state.delete(name);
    else state.set(name, String(value));
  }
  const query = new URLSearchParams([...state]).toString();
  const hash = `#${anchor}${query ? `?${query}` : ""}`;
  if (hash === (location.hash || "#")) return;
  history[jump ? "pushState" : "replaceState"](WRITTEN, "", hash);
}

/** Take the state from the address; a link to a part of the page alone keeps it. */
function recall() {
  const [anchor, query] = readAddress();
  if (!location.hash.includes("?") && history.state !== WRITTEN) {
    remember({}, { anchor });
    return;
  }
  state.clear();
  for (const [name, value] of query) state.set(name, value);
  for (const listen of listeners) listen(state);
  if (anchor) document.getElementById(anchor)?.scrollIntoView({ block: "start" });
}

addEventListener("hashchange", recall);
history.replaceState(WRITTEN, "");
for (const [name, value] of readAddress()[1]) state.set(name, value);
