"""A trained policy takes a cluster over from Kubernetes' autoscaler; a worse one never executes an action."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from repository_paths import ROOT

from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.simulator import Cluster
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad
from stateset_agents.numeric.policy import MlpPolicy

WHOLE_TRAINING = 2_600_000
LOW = GeneratedLoad(rates=(50.0, 500.0))
"""A tenth of the load that is served here."""
TENTHS = [("shadow", 0.0), *(("gradual", tenth / 10) for tenth in range(1, 10)), ("full", 1.0)]


@functools.cache
def example() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "deploy_autoscaler.py"))


def on_its_way(policy: MlpPolicy, load: Any, *, cluster: Cluster | None = None, steps: int = 750) -> Any:
    """A deployment after replays of 300 half hours, and its moves; four hours of the clock in one."""
    environment = InfrastructureEnv(load, cluster, horizon=steps)
    scaled = example()["Scaled"](environment, policy, step_seconds=60.0)
    scaled.replay(example()["recorded"](load, 300))
    return scaled, scaled.scale(seed=5)


def assert_kept_out(scaled: Any, moves: list[Any]) -> None:
    assert moves == [("shadow", 0.0)]
    assert set(scaled.executed) == {"fallback"}
    assert scaled.deployment.replays.is_worse
    assert any(alert.startswith("kept in shadow: the policy is worse in") for alert in scaled.alerts)


@pytest.mark.long
async def test_a_trained_policy_replaces_the_autoscaler_and_a_ruined_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = await example()["trained"](30_000, passes=10)
    scaled, moves = on_its_way(policy, GeneratedLoad())
    assert moves == TENTHS
    assert scaled.deployment.violations.total() == 0
    assert (scaled.executed[-1], scaled.executed[0], scaled.alerts) == ("policy", "fallback", [])
    scaled, moves = on_its_way(example()["ruined"](policy), GeneratedLoad(), steps=150)
    assert_kept_out(scaled, moves)
    wished = [entry.policy_action for entry in scaled.deployment.action_history]
    assert len(wished) == 150
    assert None not in wished  # checked in shadow, and never done


@pytest.mark.long
async def test_shadow_keeps_out_what_was_trained_on_another_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    shifts = runpy.run_path(str(ROOT / "scripts" / "autoscaling_seeds.py"))["shifts"](tmp_path)
    policy = await example()["trained"](WHOLE_TRAINING)
    assert on_its_way(policy, GeneratedLoad())[1] == TENTHS
    assert on_its_way(policy, shifts["flash crowds, twice as large"])[1] == TENTHS
    other = await example()["trained"](WHOLE_TRAINING, LOW)
    assert_kept_out(*on_its_way(other, GeneratedLoad(), steps=150))
    at_home, _ = on_its_way(other, LOW, steps=150)
    assert at_home.deployment.replays.is_as_good
