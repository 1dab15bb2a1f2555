"""Autoscaling from a YAML file: rules to compare with, a warm start from one, and what happened in a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from repository_paths import ROOT

from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.baselines import Autoscaling, Hpa, autoscaling, in_actions
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import check_environment
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule
from stateset_agents.numeric.experiment import ControlExperiment, load_control, make_environment
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

SEEDS = range(6)


def test_its_rules_do_what_the_autoscaler_does_on_the_clusters_alone() -> None:
    made = autoscaling(horizon=60)
    check_environment(made)
    for name, rule in made.rules().items():
        alone = {hpa.name: hpa for hpa in (Hpa(target=0.6, window_seconds=0.0), Hpa())}[name]
        expected = evaluate_rule(in_actions(alone), InfrastructureEnv(horizon=60), SEEDS)
        assert evaluate_rule(rule, made, SEEDS).returns == expected.returns


def test_a_trace_is_what_the_clusters_were_in_after_each_step() -> None:
    made = autoscaling(horizon=30)
    made.reset([1, 2])
    replicas, late = [], []
    for step in range(30):
        made.step(np.array([4, step % 10]))
        replicas.append(int(made.clusters.fleet.replicas[1]))
        late.append(100 * float(made.clusters.outcome.late_share[1]))
        if step == 11:
            fork = made.fork(np.array([1]))
    trace = made.trace(1)
    series = {name: values for panel in trace.panels for name, values in panel.series.items()}
    assert trace.seconds_per_step == 15.0
    assert series["replicas"] == replicas
    assert series["late"] == late
    assert len(set(series["load"])) > 20
    assert min(series["p99"]) > 0
    assert fork.trace(0).panels[1].series["replicas"] == replicas[:12]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"load": "burst"}, "kind must be"),
        ({"rates": 5}, "rates must be two that rise from above 0, got 5"),
        ({"severity": "x"}, "severity must be a number, got 'x'"),
        (
            {"load_file": "x.csv", "load": "bursts", "severity": 2.0},
            "load_file has the load: leave out load, severity",
        ),
        ({"rates": [500]}, r"rates must be two that rise from above 0, got \[500\]"),
        ({"rates": [5000, 500]}, "rates must be two that rise"),
        ({"max_replicas": 0}, "min_replicas must be at most max_replicas, got 1 and 0"),
        ({"load_file": "nowhere.csv"}, "nowhere.csv"),
        ({"reward": "fame"}, "reward must be money or document, got 'fame'"),
        ({"replicas": 3}, "replicas"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as found:
        make_environment({"name": "autoscaling", **arguments})
    assert "\n" not in str(found.value)


def test_clusters_that_change_more_than_replicas_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="without `actions`"):
        Autoscaling(InfrastructureEnv(actions=InfrastructureActionSpace()))


async def test_a_file_begins_as_the_rule_and_the_report_has_both_in_three_windows(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    settings = {
        "kind": "control",
        "environment": {"name": "autoscaling", "horizon": 60},
        "policy": {"clone": "HPA 60 %, 0 s"},
        "training": {
            "total_steps": 1,
            "num_groups": 1,
            "output_dir": str(tmp_path / "runs"),
            "progress": False,
        },
        "evaluation": {"episodes": 8},
    }
    file.write_text(yaml.safe_dump(settings))
    async with ControlExperiment(load_control(file)) as experiment:
        before = await experiment.before()
        await experiment.train()
        await experiment.after()
        cloned = experiment.trainer.validation
    assert before is not None
    assert experiment.summary["cloned"]["agreement"] > experiment.summary["cloned"]["commonest"]
    rule = evaluate_rule(cloned.rules()["HPA 60 %, 0 s"], cloned, range(50))
    random = evaluate(load_control(file, {"policy.clone": None}).new_policy(cloned), cloned, range(50))
    assert rule.mean is not None
    assert random.mean is not None
    assert before["mean_reward"] > rule.mean + 0.5 * (random.mean - rule.mean)  # nearer to the rule
    windows = RunLog(experiment.run).windows()
    assert [window.name for window in windows] == ["worst", "median", "best"]
    assert set(windows[0].traces) == {"policy", "HPA 60 %, 0 s"}


async def test_a_rule_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    config = load_control(ROOT / "examples" / "autoscaling.yaml", {"policy.clone": "HPA 61 %"})
    with pytest.raises(
        ConfigurationError, match=r"policy.clone must be one of HPA 60 %, 0 s, HPA 70 %, 300 s"
    ):
        await ControlExperiment(config).initialize()
    config = load_control(ROOT / "examples" / "cartpole.yaml", {"policy.clone": "HPA 61 %"})
    with pytest.raises(
        ConfigurationError, match="left out, as this environment has no rules, got 'HPA 61 %'"
    ):
        await ControlExperiment(config).initialize()
