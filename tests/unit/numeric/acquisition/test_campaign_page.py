"""The page of campaigns: its numbers are those of the campaigns themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from acquisition_campaigns import FAMILY, small_campaigns

from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.campaign_page import by_rule, campaigns
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.graphs import SACHS
from stateset_agents.numeric.acquisition.rules import RULES
from stateset_agents.types.errors import ConfigurationError


def test_charts_are_of_the_campaigns() -> None:
    page = small_campaigns()
    rule = RULES["EI per cost"]
    tasks = FAMILY.draw(range(12))
    outcome = play(rule, tasks)
    regret, choices = page.charts
    line = regret.series[0]
    assert (line.name, len(line.steps), line.steps[-1]) == ("EI per cost", 21, 8.0)
    first = (
        tasks.effects.max(axis=1) - tasks.effects[np.arange(12), tasks.belief.effect_means().argmax(axis=1)]
    )
    assert line.values[0] == pytest.approx(first.mean(), rel=1e-5)
    assert line.values[-1] == pytest.approx(outcome.regret.mean(), rel=1e-5)
    assert line.low is not None
    assert line.high is not None
    assert all(a <= b <= c for a, b, c in zip(line.low, line.values, line.high, strict=True))  # type: ignore[operator]  # all are numbers
    shares = [value for value in choices.series[0].values if value is not None]
    assert sum(shares) == pytest.approx(1.0, abs=1e-4)
    ranks = tasks.menu.costs.argsort(axis=1, kind="stable").argsort(axis=1)
    cheapest = sum(
        int((ranks[b, outcome.actions[:, b][outcome.actions[:, b] >= 0]] == 0).sum()) for b in range(12)
    )
    assert shares[0] == pytest.approx(cheapest / outcome.num_experiments.sum(), rel=1e-4)


def test_one_model_is_drawn_with_what_is_known_at_every_moment() -> None:
    model = small_campaigns().model
    tasks = FAMILY.draw([0])
    outcome = play(RULES["EI per cost"], tasks)
    made = outcome.actions[:, 0]
    assert [one["intervention"] for one in model["experiments"]] == made[made >= 0].tolist()
    assert len(model["moments"]) == len(model["experiments"]) + 1
    assert model["moments"][-1]["regret"] == pytest.approx(outcome.regret[0], rel=1e-5)
    mean, deviation = tasks.belief.effect_moments()
    assert [one["mean"] for one in model["moments"][0]["effects"]] == pytest.approx(mean[0], abs=1e-6)
    deviations = [one["deviation"] for one in model["moments"][0]["effects"]]
    assert deviations == pytest.approx(deviation[0], rel=1e-5)
    assert [one["truth"] for one in model["interventions"]] == pytest.approx(tasks.effects[0], rel=1e-5)
    assert [one["name"] for one in model["nodes"]] == ["X1", "X2", "X3", "Y"]
    assert [one["is_target"] for one in model["nodes"]] == [False, False, False, True]
    for edge, known in zip(model["edges"], model["moments"][0]["edges"], strict=True):
        assert model["nodes"][edge["child"]]["level"] > model["nodes"][edge["parent"]]["level"]
        assert (known["mean"], known["deviation"]) == (0.0, 1.0)  # the family's prior of a weight
    *others, target = (node["level"] for node in model["nodes"])
    assert max(others) < target
    assert any(
        edge["truth"] == pytest.approx(w, rel=1e-5)
        for edge in model["edges"]
        for w in tasks.models.weights[0, -1, 1:]
    )


def test_setting_a_variable_tells_nothing_of_its_own_causes() -> None:
    model = small_campaigns().model
    for moment in model["moments"]:
        for one, shares in zip(model["interventions"], moment["tells"], strict=True):
            for edge, share in zip(model["edges"], shares, strict=True):
                if edge["child"] in one["nodes"]:
                    assert share == pytest.approx(0.0, abs=1e-9)
                else:
                    assert 0 < share < 1
    early, late = model["moments"][0], model["moments"][-1]
    assert np.mean(early["tells"]) > np.mean(late["tells"])  # the more is known, the less is new
    assert max(early["gains"]) > 0


def test_a_given_graph_keeps_its_names_and_bad_input_is_one_line(tmp_path: Path) -> None:
    sachs = LinearFamily(num_variables=11, graph=SACHS)
    rule = {"random": by_rule(RULES["random"])}
    model = campaigns(sachs, rule, [5]).model
    for edge in model["edges"]:
        assert model["nodes"][edge["child"]]["level"] > model["nodes"][edge["parent"]]["level"]
    assert {node["name"] for node in model["nodes"]} == set(SACHS.names)
    assert model["nodes"][-1]["name"] == SACHS.target
    assert len(model["edges"]) == sum(len(parents) for parents in SACHS.parents.values())
    with pytest.raises(ConfigurationError, match="campaigns need players and seeds, got 0 and 1"):
        campaigns(FAMILY, {}, [0])
    with pytest.raises(ConfigurationError, match="the page draws one graph, got num_graphs 2"):
        campaigns(LinearFamily(num_graphs=2), rule, [0])


def test_the_page_holds_its_data_as_text(tmp_path: Path) -> None:
    path = small_campaigns().write(tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "<title>Small &lt;campaigns&gt; · campaigns</title>" in text
    assert "connect-src 'none'" in text
