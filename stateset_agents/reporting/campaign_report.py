"""Write the page of campaigns: charts of many, and one model whose variables can be asked.

`control.acquisition.campaign_page` fills these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stateset_agents.reporting.curves import Chart
from stateset_agents.reporting.html import html_page
from stateset_agents.tracking.run_folder import replace_file

_SCRIPTS = (
    *(f"page/shared/page.{part}js" for part in ("", "state.", "export.", "charts.")),
    "campaigns/campaigns.js",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A variable."""

    name: str
    level: int
    """0 for what has no parents; below every parent else."""
    is_target: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A link from a parent to a child, by their indices among the nodes."""

    parent: int
    child: int
    truth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """An experiment of the menu."""

    label: str
    """`do(X1 = -1)`"""
    nodes: Sequence[int]
    """The variables that it sets."""
    cost: float
    truth: float
    """The target's mean under it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A belief about a number: its mean and standard deviation."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The beliefs between two experiments."""

    left: float
    """The part of the budget that is left."""
    regret: float
    edges: Sequence[Estimate]
    effects: Sequence[Estimate]
    """The beliefs about the effect of each intervention."""
    gains: Sequence[float]
    """The expected rise of the best mean after each intervention."""
    tells: Sequence[Sequence[float]]
    """[interventions][edges] what share of the weight's deviation each is expected to take away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment that was made."""

    intervention: int
    outcome: float
    """The target's value in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnModel:
    """One campaign of one player, from its start (moment 0) to its end."""

    player: str
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    interventions: Sequence[Intervention]
    moments: Sequence[Moment]
    experiments: Sequence[Experiment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaigns:
    """All that the page shows."""

    name: str
    note: str
    charts: Sequence[Chart]
    model: DrawnModel

    def html(self) -> str:
        """The page, with everything inside."""
        styles = ["page/shared/page.css", "campaigns/campaigns.css"]
        return html_page("campaigns/campaigns.html", styles, _SCRIPTS, asdict(self), plotly=None)

    def write(self, path: str | Path) -> Path:
        """Write the page. Raises ConfigurationError where it cannot be written."""
        place = Path(path)
        replace_file(place, self.html(), "copy to a folder that you may write")
        return place
