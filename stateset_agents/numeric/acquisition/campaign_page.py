"""The page of campaigns: every player's regret against its budget, and one campaign to look into.

page = campaigns(family, {"policy": by_policy(network), "EI per cost": by_rule(rule)}, seeds)
page.write("campaigns.html")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.numeric.acquisition.campaign import measured
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.acquisition.lookahead import knowledge_values
from stateset_agents.numeric.acquisition.rules import Rule
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.numeric.policy import NumericPolicy, logits_of, sample_actions
from stateset_agents.reporting.curves import Chart, Series, axis
from stateset_agents.reporting.html import CHART_SCRIPTS, html_page
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.types.errors import ConfigurationError

Player = Callable[[AcquisitionEnv], IntArray]
"""[B] experiments that it makes now; of rows that have ended any."""

_POINTS = 21
"""Number of points on the budget's axis."""
_IMAGINED = 128
"""Outcomes of each experiment, for what it is expected to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaigns:
    """The page: charts of all players, and one campaign whose model's variables can be asked."""

    name: str
    note: str
    charts: Sequence[Chart]
    model: Mapping[str, Any]
    """Campaign of one player, as the page's script reads it; see `_drawn`."""

    def html(self) -> str:
        """The page, with everything inside."""
        styles = ["page/shared/page.css", "campaigns/campaigns.css"]
        scripts = [*CHART_SCRIPTS, "campaigns/campaigns.js"]
        return html_page("campaigns/campaigns.html", styles, scripts, asdict(self), plotly=None)

    def write(self, path: str | Path) -> Path:
        """Write the page. Raises ConfigurationError where it cannot be written."""
        path = Path(path)
        replace_file(path, self.html(), "copy to a folder that you may write")
        return path


def by_rule(rule: Rule) -> Player:
    """A rule, as the page takes it."""
    return lambda environment: environment.rule_actions(rule)


def by_policy(policy: NumericPolicy) -> Player:
    """A policy's likeliest experiments."""

    def act(environment: AcquisitionEnv) -> IntArray:
        situation = environment.situation
        mask = situation.affordable | ~situation.goes_on[:, None]
        observations = environment.observe()
        return sample_actions(logits_of(policy, len(mask))(observations), mask, None)[0]

    return act


def campaigns(
    family: LinearFamily, players: Mapping[str, Player], seeds: Sequence[int], *, name: str = "Campaigns"
) -> Campaigns:
    """Every player's campaigns of the same tasks with the same noise; the first player's campaign of the
    first task is the one to look into. Raises ConfigurationError without players or seeds, and for a family
    with several graphs, of which no single one can be drawn."""
    if not players or not seeds:
        raise ConfigurationError(f"campaigns need players and seeds, got {len(players)} and {len(seeds)}")
    if family.num_graphs > 1:
        raise ConfigurationError(
            f"the page draws one graph, got num_graphs {family.num_graphs}: take a family with num_graphs 1"
        )
    runs = {who: _run(family, player, seeds) for who, player in players.items()}
    first = next(iter(players))
    return Campaigns(
        name=name,
        note=f"{len(seeds):,} tasks of {family.num_variables} variables, costs {family.costs[0]:g} to "
        f"{family.costs[1]:g}, budget {family.budget:g}; the same tasks and noise for every player.",
        charts=[_regret_chart(runs, family.budget), _choice_chart(runs)],
        model=_drawn(family, first, players[first], seeds[0]),
    )


# ------------------------------------------------------------------------------------------ many


@dataclass(frozen=True, slots=True, eq=False)
class _Spending:
    spent: Array  # [T + 1, B] after each experiment
    regret: Array  # [T + 1, B]
    places: Ints
    """Rank by cost of every experiment: 0 is the cheapest of the task's menu."""


def _run(family: LinearFamily, player: Player, seeds: Sequence[int]) -> _Spending:
    environment = AcquisitionEnv(family)
    environment.reset(seeds)
    budget, rows = environment.tasks.budget, np.arange(len(seeds))
    order = environment.situation.costs.argsort(axis=1, kind="stable").argsort(axis=1)
    spent, regret, places = [np.zeros(len(seeds))], [environment.regret], []
    while (goes_on := environment.situation.goes_on).any():
        actions = player(environment)
        environment.step(actions)
        spent.append(budget - environment.situation.left)
        regret.append(environment.regret)
        places.append(order[rows, actions][goes_on])
    return _Spending(np.stack(spent), np.stack(regret), np.concatenate(places))


def _regret_chart(runs: Mapping[str, _Spending], budget: float) -> Chart:
    grid = np.linspace(0.0, budget, _POINTS)
    series = []
    for name, run in runs.items():
        last_paid = (run.spent[..., None] <= grid + 1e-9).sum(axis=0) - 1  # [B, points] the last that is paid
        at = np.take_along_axis(run.regret.T, last_paid, axis=1)
        bands = [mean_interval(column.tolist()) or (column.mean(),) * 2 for column in at.T]
        series.append(
            Series(
                name=name,
                steps=[round(float(place), 4) for place in grid],
                values=[_short(value) for value in at.mean(axis=0)],
                low=[_short(low) for low, _ in bands],
                high=[_short(high) for _, high in bands],
            )
        )
    top = [value for line in series for value in line.high or [] if value is not None]
    return Chart(
        title="Regret against budget",
        note="best true effect less that of what is recommended, mean of the tasks; band: 95 % interval",
        range=axis([0.0, *top]),
        series=series,
        along="cost",
        smoothed=False,
    )


def _choice_chart(runs: Mapping[str, _Spending]) -> Chart:
    number = 1 + max(int(run.places.max()) for run in runs.values())
    series = [
        Series(
            name=name,
            steps=[place + 1 for place in range(number)],
            values=[_short(share) for share in np.bincount(run.places, minlength=number) / len(run.places)],
        )
        for name, run in runs.items()
    ]
    return Chart(
        title="Which experiments were made",
        note="share of a player's experiments, by their place in the menu: 1 is the cheapest",
        percent=True,
        range=axis([0.0, *(value for line in series for value in line.values if value is not None)]),
        series=series,
        along="place",
        smoothed=False,
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# ------------------------------------------------------------------------------------------ one


def _drawn(family: LinearFamily, name: str, player: Player, seed: int) -> dict[str, Any]:
    """One player's campaign of a task, from its start (moment 0) to its end.

    `nodes` have a level, 0 without parents and below every parent else; `edges` name parent and child by
    their places among the nodes, with the true weight; `interventions` have the variables that they set, a
    cost and the target's true mean; `experiments` an intervention and the target's value in it. `moments`:
    see `_moment`.
    """
    environment = AcquisitionEnv(family)
    environment.reset([seed])
    tasks, belief = environment.tasks, environment.situation.exact
    order, is_parent = belief.order[0, 0], belief.is_parent[0, 0]
    pairs = [(q, p) for p in range(len(order)) for q in range(p) if is_parent[p, q + 1]]  # by position
    moments = [_moment(environment, pairs)]
    experiments: list[dict[str, Any]] = []
    while environment.situation.goes_on[0]:
        actions = player(environment)
        values, _ = measured(tasks, actions, len(experiments))
        environment.step(actions)
        outcome = _short(values[0, tasks.models.target])
        experiments.append({"intervention": int(actions[0]), "outcome": outcome})
        moments.append(_moment(environment, pairs))
    names = _names(family)
    truths = [_short(tasks.models.weights[0, p, q + 1]) for q, p in pairs]
    return {
        "player": name,
        "nodes": _nodes(names, order, pairs),
        "edges": [
            {"parent": int(order[q]), "child": int(order[p]), "truth": truth}
            for (q, p), truth in zip(pairs, truths, strict=True)
        ],
        "interventions": _interventions(environment, names),
        "moments": moments,
        "experiments": experiments,
    }


def _names(family: LinearFamily) -> list[str]:
    """Names by the variables' numbers; the target is the last."""
    graph = family.graph
    if graph is not None:
        return [name for name in graph.names if name != graph.target] + [graph.target]
    return [f"X{number + 1}" for number in range(family.num_variables - 1)] + ["Y"]


def _nodes(names: Sequence[str], order: Ints, pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    levels = [0] * len(order)  # by position, parents first
    for place in range(len(order)):
        levels[place] = max((levels[q] + 1 for q, p in pairs if p == place), default=0)
    by_number = {int(number): level for number, level in zip(order, levels, strict=True)}
    last = len(names) - 1
    if all(order[q] != last for q, _ in pairs):  # a target without children stands alone, below all others
        by_number[last] = 1 + max(level for number, level in by_number.items() if number != last)
    return [
        {"name": name, "level": by_number[number], "is_target": number == last}
        for number, name in enumerate(names)
    ]


def _interventions(environment: AcquisitionEnv, names: Sequence[str]) -> list[dict[str, Any]]:
    menu, effects = environment.tasks.menu, environment.tasks.effects[0]
    interventions = []
    for action in range(len(effects)):
        nodes = np.flatnonzero(menu.is_set[0, action])
        parts = [f"{names[node]} = {menu.values[0, action, node]:.3g}" for node in nodes.tolist()]
        interventions.append(
            {
                "label": f"do({', '.join(parts)})",
                "nodes": nodes.tolist(),
                "cost": _short(menu.costs[0, action]),
                "truth": _short(effects[action]),
            }
        )
    return interventions


def _moment(environment: AcquisitionEnv, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The beliefs between two experiments, as the page's script reads them.

    `left`: the part of the budget that is left; `edges` and `effects`: means and deviations of what is
    believed of each weight and of each intervention's effect; `gains`: the expected rise of the best mean
    after each intervention; `tells` [interventions][edges]: what share of the weight's deviation each is
    expected to take away.
    """
    situation = environment.situation
    belief = situation.exact
    means, deviations = belief.effect_moments()
    weights = belief.means[0, 0]
    spreads = _spreads(belief.covariances[:1, 0], pairs)[0]
    num_actions = means.shape[1]
    random = np.random.default_rng(0)  # the same imagined outcomes at every moment
    normals = np.tile(random.standard_normal((_IMAGINED, len(weights))), (num_actions, 1))
    imagined = belief.take(np.zeros(num_actions * _IMAGINED, dtype=np.int64)).imagined(
        np.repeat(np.arange(num_actions), _IMAGINED), normals, np.zeros(len(normals))
    )
    after = _spreads(imagined.covariances[:, 0], pairs).reshape(num_actions, _IMAGINED, -1).mean(axis=1)
    shares = 1.0 - after / np.maximum(spreads, 1e-12)
    gains = knowledge_values(replace(situation, random=random), _IMAGINED)[0]
    return {
        "left": _short(situation.left[0]),
        "regret": _short(environment.regret[0]),
        "edges": _estimates([weights[p, q + 1] for q, p in pairs], spreads),
        "effects": _estimates(means[0], deviations[0]),
        "gains": [_short(gain) if gain > 1e-9 else 0.0 for gain in gains],
        "tells": [[_short(share) for share in row] for row in shares],
    }


def _estimates(means: Iterable[float], deviations: Iterable[float]) -> list[dict[str, float]]:
    return [
        {"mean": _short(mean), "deviation": _short(deviation)}
        for mean, deviation in zip(means, deviations, strict=True)
    ]


def _spreads(covariances: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    """[B, edges] deviations of the weights. `covariances`: [B, d, d + 1, d + 1]."""
    of = np.array([(p, q + 1) for q, p in pairs])
    return np.sqrt(covariances[:, of[:, 0], of[:, 1], of[:, 1]])
