"""The headroom script goes on where it was, and its table is of what has been measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts import acquisition_curriculum, acquisition_policy
from scripts import acquisition_headroom as script
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork


def test_what_is_measured_is_kept_and_the_rest_is_added(tmp_path: Path) -> None:
    path, family = tmp_path / "headroom.jsonl", "costs 1-20, budget 20"
    script.measure(path, [family], [script.BASE], 1)
    first = path.read_text()
    path.write_text(first + '{"family": "torn')
    script.measure(path, [family], [script.BASE, "random"], 1)
    assert path.read_text().startswith(first)
    assert [line["rule"] for line in script.read(path)] == [script.BASE, "random"]
    head, _, random, base = script.table(path).splitlines()
    assert head.startswith("| family | rule | tasks | regret |")
    assert base.startswith(f"| {family} | EI per cost | 50 | ")
    assert " | - | " in base
    assert f"| {family} | random | 50 | " in random
    assert "% [-" in random


def test_a_policy_is_compared_on_tasks_of_any_size() -> None:
    networks = {"0": AcquisitionPolicyNetwork(), "1": AcquisitionPolicyNetwork(seed=1)}
    rules = list(acquisition_policy.RIVALS)
    rows = acquisition_policy.compare(networks, "small", acquisition_policy.family(3), 50, rules)
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert [cell[:4] for cell in cells] == [["small", s, rule, "50"] for rule in rules for s in ("0", "1")]
    assert cells[0][4] == cells[2][4]  # a policy's, on the same tasks
    assert cells[0][5] == cells[1][5]  # a rule's


def test_what_is_saved_is_paired_and_a_share() -> None:
    mine, other = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.5, 3.5])
    assert acquisition_policy.saved(mine + np.array([0.1, 0.0, -0.1]), other, 5.0).startswith("+10.0% [+")


@pytest.mark.long
def test_lookahead_s_gain_and_time_are_measured() -> None:
    ahead, policy = acquisition_policy.against_lookahead({"0": AcquisitionPolicyNetwork()}, 4)
    assert ahead.startswith("lookahead: ")
    assert " CPU ms a decision, 4 tasks" in ahead
    assert policy.startswith("0: ")
    assert " of lookahead's gain, " in policy


@pytest.mark.long
def test_a_curriculum_and_plain_training_are_paired() -> None:
    plain, other = (row.strip("| ").split(" | ") for row in acquisition_curriculum.rows(0, 1, 4))
    assert [plain[1], other[1]] == ["plain", "curriculum"]
    assert plain[6] == "-"
    assert other[6][0] in "+-"
    assert "%" in other[6]
