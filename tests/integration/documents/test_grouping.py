"""The document on grouping: every call as it is printed there, in plain scripts.

`rows_s4.yaml` says which test shows which row, docs/documents.md what each name is called here. Tests without
`async` have no event loop, as the document's programs have none.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from control_toys import Signals

from stateset_agents.cli.main import main
from stateset_agents.grouping import partitions
from stateset_agents.grouping.advantages import (
    GroupAdvantageNormalizer,
    compute_group_advantages_vectorized,
)
from stateset_agents.grouping.partitioner import AdaptiveGrouper
from stateset_agents.grouping.partitions import GroupingStrategy, create_group_masks
from stateset_agents.grouping.weights import GroupWeightCalculator
from stateset_agents.numeric.environments.base import Spec
from stateset_agents.numeric.environments.classic import BatchedCartPole
from stateset_agents.numeric.environments.suites import REFERENCES, SUITES, Task, TaskMix, mix
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.rollout import Rollout, action_keys, collect
from stateset_agents.numeric.studies.analyzer import GRPOvsPPOAnalyzer
from stateset_agents.numeric.studies.partitioned import GRPO, PPO
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

STRATEGIES = ("auto", "task", "difficulty", "length")
SHORT = {
    "total_steps": 60,
    "num_groups": 4,
    "steps_per_rollout": 40,
    "minibatch_size": 16,
    "num_iterations": 1,
    "max_episode_steps": 10,
    "episodes": 1,
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # and registries as they were
    monkeypatch.chdir(tmp_path)
    for registry in (SUITES, REFERENCES):
        for name in registry:
            monkeypatch.setitem(registry, name, registry[name])
    monkeypatch.setattr(partitions, "_warned", set())


def two_tasks(scale: float = 0.01) -> TaskMix:
    """Two tasks of one kind, of which the second ends early and pays a hundredth."""
    return TaskMix(
        [
            Task(name="one", environment=Signals(), random=-2.0, solved=4.5),
            Task(name="two", environment=Signals(stop=4), random=-2.0, solved=4.5, scale=scale),
        ],
        name="signals at two scales",
    )


def played(environment: TaskMix, policy: torch.nn.Module, rows: int = 12) -> list[Rollout]:
    """Twelve episodes, each a trajectory by itself."""
    keys = action_keys(0, 0, rows, 1)
    return collect(policy, environment, list(range(rows)), group_size=1, keys=keys).rows()


# ------------------------------------------------------------------------------------------ the algorithm


def test_grpo_has_the_printed_arguments_and_attributes() -> None:
    grpo = GRPO(group_strategy="auto", n_groups=4, group_weight_method="balanced", learning_rate=3e-4)
    positional = GRPO("task", 3, "adaptive")
    assert (positional.config.group_strategy, positional.config.n_groups) == ("task", 3)
    assert positional.config.group_weight_method == "adaptive"
    assert GRPO().config.group_strategy == "auto"
    assert isinstance(grpo.base_ppo, PPO)
    assert not isinstance(grpo.base_ppo, GRPO)
    assert (grpo.base_ppo.config.learning_rate, grpo.base_ppo.config.group_strategy) == (3e-4, "none")
    assert isinstance(PPO(learning_rate=3e-4), PPO)
    assert (grpo.grouping_strategy.strategy_type, grpo.grouping_strategy.n_groups) == ("auto", 4)
    assert isinstance(grpo.group_normalizer, GroupAdvantageNormalizer)
    assert grpo.group_weight_calculator.method == "balanced"


def test_what_an_environment_or_a_policy_is_needed_for_is_one_line() -> None:
    grpo = GRPO(group_strategy="auto")
    environment = two_tasks()
    with pytest.raises(ConfigurationError, match=r"write GRPO\(environment=...\)"):
        _ = grpo.trainer
    with pytest.raises(ConfigurationError, match="give policy=, the one that played, or environment="):
        grpo.update(played(environment, MlpPolicy(environment.spec)))
    with pytest.raises(ConfigurationError, match="give an environment by its name, environment="):
        GRPO(environment)  # type: ignore[arg-type]  # the mistake that is tested
    strange: list[Any] = [{"rewards": [1.0]}]
    with pytest.raises(ConfigurationError, match="each of the rollouts must be a Rollout, got dict"):
        GRPO(policy=MlpPolicy(environment.spec, critic=True)).update(strange)
    with pytest.raises(ConfigurationError, match="at least one episode, got none"):
        GRPO(policy=MlpPolicy(environment.spec, critic=True)).update([])


@pytest.mark.parametrize("group_weight_method", ["balanced", "performance"])
@pytest.mark.parametrize("group_strategy", STRATEGIES)
def test_the_printed_update_by_hand_has_the_gradient_of_update(
    group_strategy: str, group_weight_method: str
) -> None:
    environment = two_tasks()
    grpo = GRPO(
        group_strategy=group_strategy,
        n_groups=2,  # none of them empty: then the floor of the weights is the same
        group_weight_method=group_weight_method,
        environment=environment,
        num_iterations=1,
        minibatch_size=10_000,
        entropy_coef=0.0,
        value_coef=0.0,
        lr_scheduler_type="constant",
        learning_rate=0.0,  # the step is looked at, not taken
        max_grad_norm=1e9,
    )
    rollouts = played(environment, grpo.policy)

    grouped_rollouts = grpo.grouping_strategy.group_trajectories(rollouts)
    group_advantages = {}
    for group_id, group_data in grouped_rollouts.items():
        advantages = grpo.base_ppo.compute_gae(group_data)
        group_advantages[group_id] = grpo.group_normalizer.normalize(advantages, group_id)
    group_weights = grpo.group_weight_calculator.compute_weights(grouped_rollouts, group_advantages)
    policy_loss = torch.zeros(())
    for group_id, weight in group_weights.items():
        group_loss = grpo.compute_group_policy_loss(grouped_rollouts[group_id], group_advantages[group_id])
        policy_loss = policy_loss + weight * group_loss

    assert sum(group_weights.values()) == pytest.approx(1)
    assert sum(len(group) for group in grouped_rollouts.values()) == len(rollouts)
    by_hand = torch.autograd.grad(policy_loss, list(grpo.policy.actor.parameters()))
    gradients: dict[int, torch.Tensor] = {}
    for place, parameter in enumerate(grpo.policy.actor.parameters()):
        parameter.register_hook(
            partial(lambda place, gradient: gradients.update({place: gradient.clone()}), place)
        )
    loss = grpo.update(rollouts)
    assert loss.failure is None
    assert float(policy_loss.detach()) == pytest.approx(loss, abs=1e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    for place, gradient in enumerate(by_hand):
        assert torch.allclose(gradients[place], gradient, atol=1e-6)
    names = grouped_rollouts.keys() if group_strategy != "task" else ("one", "two")
    assert {f"part_weight/{name}" for name in names} <= loss.metrics.keys()


def test_update_learns_from_a_list_as_from_the_whole_rollout() -> None:
    environment = two_tasks()
    policies = []
    for as_list in (True, False):
        grpo = GRPO("task", environment=environment, minibatch_size=16, num_iterations=2)
        keys = action_keys(0, 0, 12, 1)
        whole = collect(grpo.policy, environment, list(range(12)), group_size=1, keys=keys)
        before = {name: value.clone() for name, value in grpo.policy.state_dict().items()}
        loss = grpo.update(whole.rows() if as_list else whole)
        assert np.isfinite(loss)
        assert any(not torch.equal(value, before[name]) for name, value in grpo.policy.state_dict().items())
        policies.append(grpo.policy.state_dict())
    assert all(torch.equal(value, policies[1][name]) for name, value in policies[0].items())


# ------------------------------------------------------------------------------------------ parts


def trajectory(rewards: list[float], **others: object) -> SimpleNamespace:
    return SimpleNamespace(rewards=np.array(rewards), **others)


def test_difficulty_is_by_the_printed_quartiles() -> None:
    rollouts = [trajectory([float(value), 1.0]) for value in range(9)]
    total_rewards = [r.rewards.sum() for r in rollouts]
    quartiles = np.percentile(total_rewards, [25, 50, 75])
    printed: dict[int, list[SimpleNamespace]] = {}
    for r, total in zip(rollouts, total_rewards, strict=True):
        printed.setdefault(int(np.searchsorted(quartiles, total)), []).append(r)
    groups = GroupingStrategy("difficulty", 4).group_trajectories(rollouts)
    assert groups == printed
    assert [len(group) for group in groups.values()] == [3, 2, 2, 2]


@pytest.mark.parametrize("strategy_type", STRATEGIES)
def test_each_printed_strategy_divides_a_list(strategy_type: str) -> None:
    rollouts = [
        trajectory(
            [1.0] * (length + 1), task=f"task {length % 2}", observations=np.full((length + 1, 2), length)
        )
        for length in range(8)
    ]
    groups = GroupingStrategy(strategy_type=strategy_type, n_groups=2).group_trajectories(rollouts)
    assert len(groups) == 2
    assert sorted(len(each.rewards) for group in groups.values() for each in group) == list(range(1, 9))
    if strategy_type == "task":
        assert list(groups) == ["task 0", "task 1"]


def test_a_strategy_by_outcomes_says_what_it_loses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for strategy_type in STRATEGIES:
            GroupingStrategy(strategy_type, 4)
    assert [record.getMessage().split(" are made")[0] for record in caplog.records] == [
        "parts by difficulty",
        "parts by length",
    ]
    assert "good members of the best part are pushed down" in caplog.text


def test_what_a_strategy_lacks_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="give tasks, or take group_strategy auto"):
        GroupingStrategy("task", 4).group_trajectories([trajectory([1.0])])
    with pytest.raises(ConfigurationError, match="SimpleNamespace has no observations"):
        GroupingStrategy("auto", 4).group_trajectories([trajectory([1.0])])
    with pytest.raises(ConfigurationError, match=r"a trajectory needs rewards .*got dict without"):
        GroupingStrategy("length", 4).group_trajectories([{}])


def test_normalizer_and_weights_take_a_group_and_its_id() -> None:
    normalizer = GroupAdvantageNormalizer()
    assert normalizer.normalize([1.0, 3.0], 2).tolist() == pytest.approx([-1, 1])
    assert normalizer.normalize(np.array([100.0, 300.0]), "a task").tolist() == pytest.approx([-1, 1])
    grouped = {0: [trajectory([9.0])], 1: [trajectory([0.0]), trajectory([8.0])], 2: [trajectory([10.0])]}
    advantages = {group: np.zeros(len(members)) for group, members in grouped.items()}
    assert GroupWeightCalculator("balanced").compute_weights(grouped, advantages) == pytest.approx(
        dict.fromkeys(range(3), 1 / 3)
    )
    # scores .9, .4 and 1 of 10: what is asked for is .1, .6 and 0
    performance = GroupWeightCalculator("performance").compute_weights(grouped, advantages)
    assert performance == pytest.approx({0: 0.05 + 0.85 / 7, 1: 0.05 + 5.1 / 7, 2: 0.05})
    adaptive = GroupWeightCalculator("adaptive")
    assert adaptive.compute_weights(grouped, advantages)[0] == pytest.approx(1 / 3)  # nothing moved yet
    moved = {**grouped, 1: [trajectory([0.0]), trajectory([0.0])]}
    assert adaptive.compute_weights(moved, advantages) == pytest.approx({0: 0.05, 1: 0.9, 2: 0.05})
    with pytest.raises(ConfigurationError, match=r"of the same parts, got \['0', '1', '2'\] and \['0'\]"):
        adaptive.compute_weights(grouped, {0: advantages[0]})


def test_an_adaptive_grouper_remembers_the_printed_window() -> None:
    grouper = AdaptiveGrouper(history_window=1000)
    assert grouper.history.maxlen == 1000
    new_trajectories = [trajectory([1.0], observations=np.array([[10.0 * (k % 3), 0.0]])) for k in range(12)]
    first = grouper.update_groups(new_trajectories)
    assert len(grouper.history) == 12
    assert [len(set(first[kind::3].tolist())) for kind in range(3)] == [1, 1, 1]
    assert grouper.update_groups(new_trajectories[:3]).tolist() == first[:3].tolist()
    assert AdaptiveGrouper(5).history.maxlen == 5


def test_vectorised_advantages_run_with_the_printed_arguments() -> None:
    values, rewards = np.full(5, 0.5), np.array([0, 1, 0, 0, 2])  # two trajectories behind one another
    dones, groups = np.array([0.0, 1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 1, 1, 1])
    group_masks = create_group_masks(groups)
    assert (values * group_masks).tolist() == [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0.5]]
    advantages = compute_group_advantages_vectorized(values, rewards, dones, groups)
    assert advantages.shape == values.shape
    # A = r - V at an end, and before it gamma V' - V + gamma lambda A': (.465, .5), and .9^n towards 1.5
    delta, decay = 0.99 * 0.5 - 0.5, 0.99 * 0.95
    two = [delta + decay * 0.5, 0.5]
    three = [delta + decay * (delta + decay * 1.5), delta + decay * 1.5, 1.5]
    expected = [(value - np.mean(part)) / np.std(part) for part in (two, three) for value in part]
    assert advantages == pytest.approx(expected, abs=1e-6)
    stacked = compute_group_advantages_vectorized(
        values[:4].reshape(2, 2), rewards[:4].reshape(2, 2), np.array([[0, 0], [1, 1]]), np.array([0, 1])
    )
    assert stacked.shape == (2, 2)
    with pytest.raises(ConfigurationError, match="next_values is needed: 1 rows are cut"):
        compute_group_advantages_vectorized(values, rewards, np.zeros(5), groups)


# ------------------------------------------------------------------------------------------ comparison


def own_environment() -> Signals:
    environment = Signals()
    environment.spec = Spec(**{**vars_of(environment.spec), "name": "my signals"})
    return environment


def vars_of(spec: Spec) -> dict[str, object]:
    return {
        name: getattr(spec, name) for name in ("observation_shape", "num_actions", "horizon", "components")
    }


def test_an_analyzer_compares_ids_mixes_and_environments_of_ones_own() -> None:
    analyzer = GRPOvsPPOAnalyzer()
    assert {
        "sample_efficiency",
        "final_performance",
        "training_stability",
        "group_fairness",
    } <= analyzer.metrics.keys()
    assert not any(analyzer.metrics.values())
    env_suite = ["CartPole-v1", two_tasks(), own_environment()]
    report = analyzer.run_comparison(env_suite, n_seeds=1, **SHORT)
    assert report == analyzer.generate_report()
    assert "7 cells of 7." in report  # by task where there are several
    found = analyzer.analyze_results()
    assert {suite: list(arms) for suite, arms in found["suites"].items()} == {
        "CartPole-v1": ["PPO", "auto"],
        "signals at two scales": ["PPO", "auto", "task"],
        "my signals": ["PPO", "auto"],
    }
    assert [len(values) for values in analyzer.metrics.values()] == [7] * 5
    assert REFERENCES["CartPole-v1"][1] == 475.0  # Gymnasium's own
    low, high = REFERENCES["my signals"]  # of twenty episodes of uniform actions: 6 / 3 - 6 / 4 = .5
    assert low == pytest.approx(0.5, abs=0.6)
    assert high > low
    assert analyzer.run_comparison(env_suite, n_seeds=1, **SHORT) == report  # nothing is run again
    with pytest.raises(ConfigurationError, match="give another folder"):
        analyzer.run_comparison(["CartPole-v1"], n_seeds=1, **SHORT)


def test_the_printed_comparison_by_hand_gives_a_report() -> None:
    analyzer, env = GRPOvsPPOAnalyzer(), two_tasks()
    for seed in range(2):
        ppo_results = analyzer.train_ppo(env, seed, **SHORT)
        grpo_auto = analyzer.train_grpo(env, seed, strategy="auto", **SHORT)
        grpo_task = analyzer.train_grpo(env, seed, strategy="task", **SHORT)
        found = analyzer.analyze_results(ppo_results, grpo_auto, grpo_task)
    assert found["num_cells"] == 6
    assert found["reference"] == "PPO"
    assert [len(values) for values in analyzer.metrics.values()] == [6] * 5
    assert "6 cells of 6." in analyzer.generate_report()


async def test_in_an_event_loop_the_comparison_says_what_to_await() -> None:
    analyzer = GRPOvsPPOAnalyzer()
    with pytest.raises(ConfigurationError, match=r"write await analyzer.compare\(...\)"):
        analyzer.run_comparison([own_environment()], n_seeds=1, **SHORT)
    found = await analyzer.compare([own_environment()], n_seeds=1, **SHORT)
    assert list(found["arms"]) == ["PPO", "auto"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("LunarLander-v2", "gymnasium cannot make LunarLander-v2: .*Please use `LunarLander-v3` instead"),
        ("Hopper-v5", r'MuJoCo is not installed, run `pip install "gymnasium\[mujoco\]"`'),
        ("ALE/Pong-v5", r'ALE/Pong-v5 needs Atari: pip install "ale-py>=0.11"'),
        (
            "CartPole",
            "or a Gymnasium id such as CartPole-v1|a Gymnasium id such as CartPole-v1, got 'CartPole'",
        ),
    ],
)
def test_an_id_that_cannot_be_made_is_one_line(env_id: str, line: str) -> None:
    with pytest.raises(ConfigurationError, match=line) as error:
        GRPOvsPPOAnalyzer().run_comparison([env_id], n_seeds=1, **SHORT)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------ pages, guidance


async def test_learn_opens_on_a_finished_run_and_on_ppos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"progress": False, "total_steps": 60, "num_groups": 6, "minibatch_size": 16}
    runs = []
    for ppo in (
        GRPO("task", environment=two_tasks(), run_name="parts", **settings),
        PPO(BatchedCartPole(horizon=20), run_name="plain", **settings),
    ):
        async with ppo:
            await ppo.train()
        runs.append(ppo.trainer.run)
    for run in runs:
        assert main(["learn", str(run.path)]) == 0
        assert (run.path / "learn" / "parts.html").is_file()
    assert capsys.readouterr().out.count("parts.html") == 2
    line = next(RunLog(runs[0]).metrics())
    sizes = [line.values[f"part_size/{name}"] for name in ("one", "two")]
    assert sum(sizes) == line.values["rollout/episodes"]
    # the second task pays a hundredth: its raw deviation says so, its share of the loss does not
    assert line.values["part_raw_std/two"] < 0.1 * line.values["part_raw_std/one"]
    assert line.values["part_share/one"] + line.values["part_share/two"] == pytest.approx(1)
    assert 0.3 < line.values["part_share/two"] < 0.7


def test_agents_of_different_capability_are_parts() -> None:
    """The page's advice for them: each kind of agent is a task, with observations and actions of its own."""
    environment = mix({"cart_pole": 1.0, "acrobot": 1.0})  # two actions, three actions
    grpo = GRPO(group_strategy="task", environment=environment, max_episode_steps=10)
    keys = action_keys(0, 0, 8, 1)
    rollout = collect(grpo.policy, environment, list(range(8)), group_size=1, keys=keys, max_steps=10)
    groups = grpo.grouping_strategy.group_trajectories(rollout.rows())
    assert {task: len(group) for task, group in groups.items()} == {"acrobot": 4, "cart_pole": 4}
    assert max(int(each.actions.max()) for each in groups["cart_pole"]) == 1
    assert grpo.update(rollout).failure is None
