// What scrolls can be reached by keys, and parts of the page that the theme adds have names of their own.
function name() {
  document.querySelectorAll(".md-typeset__scrollwrap, pre > code").forEach((one) => { one.tabIndex = 0; });
  document.querySelectorAll(".md-code__nav").forEach((one, index) => { one.setAttribute("aria-label", `Code ${index + 1}`); });
  document.querySelectorAll(".md-nav .md-nav").forEach((one, index) => {
    one.removeAttribute("aria-labelledby");
    one.setAttribute("aria-label", `Part ${index + 1} of the navigation`);
  });
}
document.addEventListener("DOMContentLoaded", () => {
  name();
  new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
});
