"""The headroom script goes on where it was, and its table is of what has been measured."""

from __future__ import annotations

from pathlib import Path

from scripts import acquisition_headroom as script
from scripts import acquisition_policy
from stateset_agents.control.acquisition.network import AcquisitionPolicyNetwork


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
    rows = acquisition_policy.compare(AcquisitionPolicyNetwork(), 3, 50)
    assert [row.split(" | ")[1] for row in rows] == list(acquisition_policy.RIVALS)
    assert all(row.startswith("| 3 | ") and " | 50 | " in row for row in rows)
    assert rows[0].split(" | ")[3] == rows[1].split(" | ")[3]  # the policy's, on the same tasks
