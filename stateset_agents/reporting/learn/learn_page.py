"""One learning page from its scripts and data, and the list of them all. `learn_pages` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stateset_agents.reporting.html import html_page

_STYLES = ("page/shared/page.css", "learn/learn.css")
_SHARED = (
    "page/shared/page.js",
    "page/shared/page.state.js",
    "learn/learn.math.js",
    "learn/learn.page.js",
    "learn/learn.figures.js",
)
_GROUPING = "parts/grouping.math.js"
_STUDY = (_GROUPING, "study/study.math.js", "study/study.js")


@dataclass(frozen=True, slots=True)
class LearnPage:
    """What a page is made of."""

    title: str
    scripts: tuple[str, ...]
    """Its own, from `reporting/learn/` on, behind those that all pages have."""


PAGES: Mapping[str, LearnPage] = {
    "lab": LearnPage("GRPO on your own run", ("learn.grpo.js", "lab/lab.js")),
    "grpo": LearnPage("GRPO, step by step", ("learn.grpo.js", "papers/grpo.js")),
    "gradient_surgery": LearnPage("Gradient surgery", ("papers/surgery.js",)),
    "soft_modularization": LearnPage("Soft modularization", ("papers/modules.js",)),
    "infinite_mixture": LearnPage("An infinite mixture of Gaussian processes", ("papers/mixture.js",)),
    "formation": LearnPage("How parts form", (_GROUPING, "parts/formation.js")),
    "advantages": LearnPage("One normalisation, or one for each part", (_GROUPING, "parts/advantages.js")),
    "grpo_vs_ppo": LearnPage("Parts against PPO", (*_STUDY, "study/comparison.js")),
    "tasks": LearnPage("Task by task", (*_STUDY, "study/tasks.js")),
    "sensitivity": LearnPage("Which settings matter", (*_STUDY, "study/sensitivity.js")),
}
"""By the name of the file, without `.html`."""


def render_learn_page(name: str, data: Mapping[str, Any]) -> str:
    """The page as HTML, with its data inside; it draws in SVG and needs no plotly.js."""
    page = PAGES[name]
    scripts = [*_SHARED, *(f"learn/{script}" for script in page.scripts)]
    return html_page("learn/learn.html", _STYLES, scripts, {"name": page.title, **data}, charts=False)
