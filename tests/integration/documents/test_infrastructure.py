"""GRPO for infrastructure as its document prints it: every call, with the printed arguments.

rows_s0.yaml says which test shows which row. Scripts of the document have no event loop, so these tests are
plain functions; where one runs, `train`, `evaluate` and the checkpoints are awaited.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import pickle
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from repository_paths import ROOT

from stateset_agents.deployment.guards import (
    max_scaling_constraint,
    min_replicas_constraint,
    rate_limit_constraint,
)
from stateset_agents.deployment.numeric import SafeGRPODeployment
from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.grpo.config import AdvantageComparison, GRPOConfig, GRPOLoss
from stateset_agents.numeric.autoscaling.grpo.environments import ClusterEnvironment, EnvironmentCopies
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork, InfrastructureStateEncoder
from stateset_agents.numeric.autoscaling.grpo.trainer import LEARNING, GRPOTrainer
from stateset_agents.numeric.autoscaling.metrics import InfrastructureMetricsNormalizer
from stateset_agents.numeric.autoscaling.rewards import (
    InfrastructureRewardFunction,
    RewardShaper,
    RewardWeights,
)
from stateset_agents.numeric.environments.base import check_environment
from stateset_agents.types.errors import CheckpointError, ConfigurationError

PRINTED = {
    "group_size": 8,
    "clip_epsilon": 0.2,
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.01,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "max_grad_norm": 0.5,
    "num_epochs": 4,
    "batch_size": 64,
}
SPACE = InfrastructureActionSpace(config_actions=[ConfigAction.NO_CHANGE], enable_traffic_actions=False)
SIGNALS = InfrastructureActionSpace(
    [ScalingAction.SCALE_DOWN_SMALL, ScalingAction.MAINTAIN, ScalingAction.SCALE_UP_SMALL],
    [ConfigAction.NO_CHANGE],
    False,
)


class Service:
    """A service under a load that wanders, by the document's protocol; its noise is drawn by `draw`."""

    def __init__(self, length: int = 6, *, draw: Any = None) -> None:
        self.length, self.draw = length, draw or random.Random(3).gauss

    def reset(self) -> dict[str, Any]:
        self.time, self.replicas, self.load = 0, 5, 300 + 50 * self.draw(0, 1)
        self.window = np.zeros((3, 3))
        return self.state()

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        self.time += 1
        self.replicas = max(1, self.replicas + action["scaling"].value)
        self.load += 30 * self.draw(0, 1)
        return self.state(), {"done": self.time == self.length}

    def state(self) -> dict[str, Any]:
        busy = self.load / self.replicas
        metrics = [busy / 100 - 0.5, self.load / 300 - 1, self.replicas / 5 - 1]
        self.window = np.concatenate([self.window[1:], [metrics]])
        return {
            "metrics_history": self.window,
            "current_metrics": metrics,
            "cost_per_hour": 100.0 * self.replicas,
            "latency_p99_ms": 100 + 2 * max(busy - 70, 0),
            "throughput_rps": self.load,
            "target_throughput": self.load,
            "error_rate_percent": max(busy - 100, 0) / 20,
            "availability_percent": 99.95,
            "cpu_percent": min(busy, 100),
            "memory_percent": 60.0,
        }


class Signal:
    """One of three signals in each step; naming it earns 1."""

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        self.drawn, self.time = random.Random(seed).choices((-1, 0, 1), k=7), 0
        return self.state()

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        named = self.drawn[self.time] == action["scaling"].value
        self.time += 1
        return {**self.state(), "named": float(named)}, {"done": self.time == 6}

    def state(self) -> dict[str, Any]:
        seen = np.eye(3)[self.drawn[self.time] + 1]
        return {"metrics_history": [seen], "current_metrics": seen}


class Named:
    def compute_reward(
        self, state: Any, previous_state: Any, action_taken: Any
    ) -> tuple[float, dict[str, float]]:
        return state["named"], {"named": state["named"]}


def small(space: InfrastructureActionSpace = SPACE, **changes: Any) -> GRPOPolicyNetwork:
    widths = {"state_dim": 8, "hidden_dim": 16, "num_heads": 2, "num_layers": 1, "num_metrics": 3}
    return GRPOPolicyNetwork(**{**widths, "history_length": 3, "action_space": space, **changes})


def trainer(folder: Path, **settings: Any) -> GRPOTrainer:
    chosen = {"progress": False, "output_dir": str(folder), **settings}
    return GRPOTrainer(small(), GRPOConfig(**chosen), SPACE, InfrastructureRewardFunction(), "cpu")


def test_every_row_names_a_test_of_this_file() -> None:
    rows = yaml.safe_load((Path(__file__).parent / "rows_s0.yaml").read_text())
    assert [row["id"] for row in rows] == [f"S0-{number:02}" for number in range(1, 31)]
    for row in rows:
        assert row["state"] in ("works", "differs")
        assert (row["state"] == "differs") == ("line" in row)
        assert row["tests"]
        assert set(row["tests"]) <= globals().keys(), row
    assert sum(row["state"] == "differs" for row in rows) <= 2


# ------------------------------------------------------------------------------------------ mathematics


def test_the_ten_settings() -> None:
    config = GRPOConfig()
    assert {name: getattr(config, name) for name in PRINTED} == PRINTED
    assert GRPOConfig(*PRINTED.values()) == config == GRPOConfig(**PRINTED)
    assert GRPOConfig(4, 0.1).group_size == 4
    with pytest.raises(ConfigurationError, match="GRPOConfig must get 10 values at most, got 11"):
        GRPOConfig(*PRINTED.values(), 1)


def test_advantages_of_groups() -> None:
    loss = GRPOLoss(GRPOConfig())
    rewards = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    assert loss.compute_group_advantages(rewards).tolist() == [[-1, 1], [0, 0]]
    mask = torch.tensor([[1, 1], [1, 0]])
    masked = loss.compute_group_advantages(rewards, group_mask=mask)
    assert masked.tolist() == [[-1, 1], [0, 0]]


def test_the_loss() -> None:
    grpo_loss = GRPOLoss(GRPOConfig(group_size=2))
    log_probs = torch.tensor([-1.0, -2.0, -1.5, -0.5], requires_grad=True)
    total_loss, metrics = grpo_loss(
        log_probs, log_probs.detach(), torch.tensor([1.0, 0.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1])
    )
    total_loss.backward()
    assert log_probs.grad is not None
    assert metrics.keys() >= {
        *("policy_loss", "kl_div", "entropy", "advantage_mean", "advantage_std", "ratio_mean")
    }
    assert metrics["ratio_mean"] == 1


def test_the_comparison_of_advantages() -> None:
    rewards, values = np.array([1.0, 0.0, 2.0]), np.array([0.5, 0.1, 0.4])
    traditional = AdvantageComparison.traditional_advantage(rewards, values, gamma=0.99)
    assert traditional[-1] == pytest.approx(1.6)
    assert AdvantageComparison.traditional_advantage(rewards, np.append(values, 1.0))[-1] == pytest.approx(
        2.59
    )
    advantages = AdvantageComparison.grpo_advantage(np.arange(20.0), group_size=8)
    assert isinstance(advantages, np.ndarray)
    assert len(advantages) == 16
    assert advantages.mean() == pytest.approx(0)
    assert len(AdvantageComparison.grpo_advantage(np.arange(20.0))) == 16


# ------------------------------------------------------------------------------------------ state, action


def test_the_encoder() -> None:
    encoder = InfrastructureStateEncoder(num_metrics=20, hidden_dim=128, history_length=60)
    history, current = torch.randn(2, 60, 20), torch.randn(2, 20)
    assert encoder(metrics_history=history, current_state=current).shape == (2, 128)
    assert [*inspect.signature(InfrastructureStateEncoder).parameters][:3] == [
        *("num_metrics", "hidden_dim", "history_length")
    ]
    assert (encoder.history_length, encoder.attention.num_heads) == (60, 4)
    assert len(encoder.temporal_encoder) == 2
    assert isinstance(encoder.encoder, torch.nn.Sequential)


def test_the_ranges_of_metrics() -> None:
    normalizer = InfrastructureMetricsNormalizer()
    assert normalizer.metric_ranges.items() >= {
        ("cpu_percent", (0, 100)),
        ("latency_p50_ms", (0, 1000)),
        ("latency_p99_ms", (0, 10000)),
        ("disk_iops", (0, 100000)),
        ("replica_count", (0, 100)),
    }
    normalizer.metric_ranges["gc_pause_ms"] = (10, 20)
    assert normalizer.normalize({"gc_pause_ms": 15}).tolist() == [0]


def test_metrics_become_numbers() -> None:
    normalizer = InfrastructureMetricsNormalizer()
    values = {"memory_percent": 75.0, "cpu_percent": 25.0, "sessions": math.e - 1}
    found = normalizer.normalize(values)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([0.5, -0.5, 0.1])  # in the order of the dict
    normalizer.running_stats["sessions"] = (1.0, 2.0)
    assert normalizer.normalize(values | {"sessions": 4.0})[2] == pytest.approx(0.5)
    plain = normalizer.normalize(values | {"sessions": math.e - 1}, use_running_stats=False)
    assert plain[2] == pytest.approx(0.1)


def test_the_actions() -> None:
    assert [action.value for action in ScalingAction] == [-4, -2, -1, 0, 1, 2, 4]
    assert [action.value for action in ConfigAction] == [0, 1, 2, 3, 4, 5, 6]
    assert ScalingAction.SCALE_DOWN_LARGE.name == "SCALE_DOWN_LARGE"
    assert ConfigAction.NO_CHANGE is ConfigAction(6)


def test_the_action_space() -> None:
    space = InfrastructureActionSpace()
    assert (space.num_scaling, space.num_config, space.num_traffic, space.total_actions) == (7, 7, 11, 539)
    plain = InfrastructureActionSpace(scaling_actions=None, config_actions=None, enable_traffic_actions=False)
    assert (plain.num_traffic, plain.total_actions) == (0, 49)
    index = space.encode_action(ScalingAction.SCALE_UP_SMALL, ConfigAction.NO_CHANGE, 30)
    assert space.decode_action(index) == {
        "scaling": ScalingAction.SCALE_UP_SMALL,
        "config": ConfigAction.NO_CHANGE,
        "traffic_weight": 30,
    }
    assert space.decode_action(action_idx=index)["traffic_weight"] == 30
    named = space.encode_action(scaling=ScalingAction.MAINTAIN, config=ConfigAction.NO_CHANGE)
    assert space.decode_action(named)["traffic_weight"] == 0
    without = plain.encode_action(ScalingAction.MAINTAIN, ConfigAction.NO_CHANGE)
    assert plain.decode_action(without)["traffic_weight"] is None


# ------------------------------------------------------------------------------------------ rewards


def test_weights_and_bounds() -> None:
    weights = RewardWeights(0.3, 0.3, 0.25, 0.15)
    assert weights == RewardWeights()
    reward_fn = InfrastructureRewardFunction(weights)
    assert reward_fn.weights.cost == 0.3
    assert reward_fn.sla == {
        "latency_p99_ms": 200,
        "error_rate_percent": 0.1,
        "availability_percent": 99.9,
    }
    assert reward_fn.cost_baseline == 1000
    reward_fn.sla["latency_p99_ms"] = 100
    assert reward_fn.compute_performance_reward(100, 900, 1000) == pytest.approx(0)
    assert InfrastructureRewardFunction().sla["latency_p99_ms"] == 200
    assert InfrastructureRewardFunction(weights=weights).weights is weights


def test_the_four_rewards() -> None:
    reward_fn = InfrastructureRewardFunction()
    assert reward_fn.compute_cost_reward(current_cost=700, previous_cost=900) == pytest.approx(0.3)
    assert reward_fn.compute_performance_reward(
        latency_p99=160, throughput=1000, target_throughput=1000
    ) == pytest.approx((0.25 + 0.1) / 2)
    assert reward_fn.compute_reliability_reward(error_rate=1.1, availability=99.9) == pytest.approx(
        (1 - math.e + 0.5) / 2
    )
    assert reward_fn.compute_efficiency_reward(
        cpu_utilization=50, memory_utilization=50, target_utilization=50
    ) == pytest.approx(1)
    assert reward_fn.compute_efficiency_reward(50, 50) == pytest.approx(math.exp(-0.5))


def test_the_reward_of_a_transition() -> None:
    service = Service()
    previous = service.reset()
    state, _ = service.step({"scaling": ScalingAction.SCALE_UP_SMALL, "config": ConfigAction.NO_CHANGE})
    reward_fn = InfrastructureRewardFunction()
    total, components = reward_fn.compute_reward(state, previous, {"scaling": ScalingAction.SCALE_UP_SMALL})
    assert components.keys() == {"cost", "performance", "reliability", "efficiency"}
    assert components["cost"] == pytest.approx(0.0)  # 100 $ more of 1000, and a bonus of .1
    weights = (0.3, 0.3, 0.25, 0.15)
    assert total == pytest.approx(sum(map(math.prod, zip(weights, components.values(), strict=True))))


def test_the_shaper() -> None:
    shaper = RewardShaper(gamma=0.99, clip_range=(-10, 10))
    assert (shaper.running_mean, shaper.running_std) == (0, 1)
    assert shaper.shape(reward=1.0, potential_current=2.0, potential_next=3.0) == pytest.approx(1.97)
    assert shaper.shape(1000.0, 0.0, 0.0) == 10
    assert list(shaper.reward_history) == pytest.approx([1.97, 1000])
    assert shaper.running_mean == pytest.approx(500.985)
    assert RewardShaper.compute_potential(
        {"latency_p99_ms": 160, "error_rate_percent": 0.05, "cpu_percent": 60, "memory_percent": 80}
    ) == pytest.approx(-0.66)
    scored = RewardShaper(normalize=True)  # as the document does always
    assert [scored.shape(reward, 0, 0) for reward in (1.0, 3.0)] == pytest.approx([0, 1])


# ------------------------------------------------------------------------------------------ the policy


def test_the_network() -> None:
    policy = GRPOPolicyNetwork(
        state_dim=128, action_dim=49, hidden_dim=256, num_heads=8, num_layers=4, dropout=0.1
    )
    logits, values = policy(torch.randn(2, 60, 20), torch.randn(2, 20))
    assert (logits.shape, values.shape) == ((2, 49), (2, 1))
    assert torch.isfinite(F.mse_loss(values.squeeze(-1), torch.zeros(2)))
    assert policy.state_encoder.history_length == 60
    assert len(policy.transformer) == 4
    assert policy.policy_head[-1].out_features == 49
    assert GRPOPolicyNetwork(num_layers=1).action_dim == 539  # of the default action space
    with pytest.raises(
        ConfigurationError, match="has 49 actions and the action space 539: make the policy with action_space"
    ):
        GRPOTrainer(policy, GRPOConfig(), InfrastructureActionSpace(), InfrastructureRewardFunction(), "cpu")


def test_an_action_of_the_policy() -> None:
    policy = small()
    history, current = torch.randn(1, 3, 3), torch.randn(1, 3)
    action, log_prob = policy.get_action(history, current)
    assert (type(action), type(log_prob)) == (int, float)
    action, log_prob = policy.get_action(metrics_history=history, current_state=current, deterministic=True)
    with torch.no_grad():
        logits, _ = policy.eval()(history, current)
    assert action == int(logits.argmax())
    assert log_prob == pytest.approx(float(F.log_softmax(logits, dim=-1)[0, action]), abs=1e-6)


# ------------------------------------------------------------------------------------------ the trainer


def test_the_trainer_and_its_parts(tmp_path: Path) -> None:
    config = GRPOConfig(progress=False, output_dir=str(tmp_path))
    teacher = GRPOTrainer(
        policy=small(),
        config=config,
        action_space=SPACE,
        reward_fn=InfrastructureRewardFunction(),
        device="cpu",
    )
    assert isinstance(teacher.optimizer, torch.optim.AdamW)
    assert teacher.optimizer.param_groups[0]["weight_decay"] == 0.01
    trained = {id(weight) for group in teacher.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in teacher.policy.parameters()}
    assert teacher.scheduler.get_last_lr() == [3e-4]
    assert teacher.scheduler.state_dict()["step"] == 0
    assert isinstance(teacher.grpo_loss, GRPOLoss)
    assert (teacher.experience_buffer, teacher.group_buffer) == ([], [])
    assert teacher.metrics_history.maxlen == 1000
    teacher.logger.info("a line")
    assert (teacher.config, teacher.action_space) == (config, SPACE)
    assert config.learning_rate * config.lr_min_ratio == pytest.approx(1e-6)
    if not torch.cuda.is_available():
        assert GRPOTrainer(small(), config, SPACE, InfrastructureRewardFunction()).device.type == "cpu"
        with pytest.raises(ConfigurationError, match="device is 'cuda' and torch sees 0 GPUs"):
            GRPOTrainer(small(), config, SPACE, InfrastructureRewardFunction(), device="cuda")


def test_experiences_are_groups_of_one_start(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    experiences = teacher.collect_experience(Service(), num_steps=100)
    assert len(experiences) == 96  # whole groups
    assert teacher.experience_buffer is experiences
    assert [len(group) for group in teacher.group_buffer] == [8] * 12
    for entry in experiences:
        assert entry.keys() >= {
            *("state", "action", "log_prob", "reward", "reward_components", "next_state", "done")
        }
        action = SPACE.decode_action(entry["action"])
        again, parts = teacher.reward_fn.compute_reward(entry["next_state"], entry["state"], action)
        assert entry["reward"] == pytest.approx(again)
        assert entry["reward_components"] == parts
    first, second = teacher.group_buffer[0], teacher.group_buffer[6]
    assert len({entry["state"]["throughput_rps"] for entry in first}) == 1  # copies of one start
    assert first[0]["state"]["throughput_rps"] != second[0]["state"]["throughput_rps"]
    assert [group[0]["done"] for group in teacher.group_buffer] == [*[False] * 5, True] * 2
    assert len(teacher.collect_experience(Service(), 1024)) == 1024


def test_groups_in_which_a_copy_ends_early_are_left_out(tmp_path: Path) -> None:
    class Ends(Service):
        def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
            state, info = super().step(action)
            return state, {"done": info["done"] or self.replicas > 9}

    experiences = trainer(tmp_path).collect_experience(Ends(), 80)
    assert len(experiences) == 80
    assert {entry["done"] for entry in experiences} == {False, True}


def test_returns_are_of_each_copy(tmp_path: Path) -> None:
    teacher = trainer(tmp_path)
    teacher.collect_experience(Service(), 48)
    returns, advantages = teacher.compute_returns_and_advantages(teacher.experience_buffer)
    assert (returns.shape, advantages.shape) == ((48,), (48,))
    rewards = torch.tensor([[entry["reward"] for entry in group] for group in teacher.group_buffer])
    own = sum(0.99**step * rewards[step] for step in range(6))
    assert returns[:8].tolist() == pytest.approx(own.tolist(), abs=1e-5)
    centred = (own - own.mean()) / own.std(correction=0)
    assert advantages[:8].tolist() == pytest.approx(centred.tolist(), abs=1e-3)
    plain = [{**entry, "return": entry["reward"]} for entry in teacher.experience_buffer]
    foreign = [{name: part for name, part in entry.items() if name != "return"} for entry in plain]
    assert torch.equal(
        teacher.compute_returns_and_advantages(foreign)[0], teacher.compute_returns_and_advantages(plain)[0]
    )
    with pytest.raises(ConfigurationError, match="experiences must be whole groups of 8, got 7"):
        teacher.compute_returns_and_advantages(plain[:7])


def test_an_update_step_by_step(tmp_path: Path) -> None:
    teacher = trainer(tmp_path, batch_size=16, total_steps=1000)
    before = copy.deepcopy(teacher.policy.state_dict())
    for _ in range(2):
        experiences = teacher.collect_experience(Service(), num_steps=64)
        returns, advantages = teacher.compute_returns_and_advantages(experiences)
        metrics = teacher.update_policy(experiences, returns, advantages)
    assert metrics.keys() == {"policy_loss", "value_loss", "entropy", "kl_div"}
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["value_loss"] == 0  # group advantages have no critic
    assert not torch.equal(
        before["policy_head.4.weight"], teacher.policy.state_dict()["policy_head.4.weight"]
    )
    assert teacher.scheduler.state_dict()["step"] == 128
    assert teacher.scheduler.get_last_lr()[0] < 3e-4
    critic = trainer(tmp_path, advantage_estimator="gae", advantage_normalization="batch")
    experiences = critic.collect_experience(Service(), 64)
    returns, advantages = critic.compute_returns_and_advantages(experiences)
    assert critic.update_policy(experiences, returns, advantages)["value_loss"] > 0


def test_good_actions_become_likelier(tmp_path: Path) -> None:
    teacher = trainer(tmp_path, learning_rate=0.01, total_steps=10_000)
    experiences = teacher.collect_experience(Service(), 64)
    wanted = torch.tensor([entry["action"] == 3 for entry in experiences]).float()

    def likelihood() -> float:
        states = [entry["state"] for entry in experiences]
        parts = (
            torch.tensor(np.array([state[name] for state in states])).float()
            for name in ("metrics_history", "current_metrics")
        )
        with torch.no_grad():
            return float(teacher.policy.eval().logits(*parts).softmax(-1)[:, 3].mean())

    before = likelihood()
    teacher.update_policy(experiences, wanted, wanted - wanted.mean())
    assert likelihood() > 1.1 * before


def test_whole_groups_are_shuffled(tmp_path: Path) -> None:
    order = trainer(tmp_path)._get_shuffled_group_indices(64)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(64))
    assert order.tolist() != list(range(64))
    groups = order.reshape(8, 8) // 8
    assert (groups == groups[:, :1]).all()


def test_a_script_trains_as_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher = trainer(tmp_path, num_groups=2, num_epochs=1)
    with caplog.at_level(logging.INFO, "stateset_agents.GRPOTrainer"):
        teacher.train(Service(), total_steps=400, eval_interval=200, save_interval=200)
    lines = [record.message for record in caplog.records if record.name == "stateset_agents.GRPOTrainer"]
    assert lines[0].startswith("Starting GRPO training of 400 steps by the document's defaults")
    assert all(f"{name}={value!r}" in lines[0] for name, value in LEARNING.items())
    assert lines[1].startswith("Step 48: reward=")
    assert sum(line.startswith("Evaluation reward: ") for line in lines) == 2
    steps = [line["step"] for line in teacher.metrics_history]
    assert steps == [48, 144, 240, 336, 432]  # after the first rollout there are two groups
    assert teacher.metrics_history[-1].keys() >= {"step", "mean_reward", "policy_loss", "entropy", "kl_div"}
    run = teacher.training.run.path
    assert {path.name for path in run.glob("*.pt")} >= {"best_model.pt", "checkpoint_240.pt"}
    defaults = inspect.signature(GRPOTrainer.train).parameters
    assert [*defaults][:5] == ["self", "env", "total_steps", "eval_interval", "save_interval"]
    own = GRPOConfig()
    assert (own.total_steps, own.eval_steps, own.save_steps) == (1_000_000, 10_000, 50_000)
    assert own.steps_per_rollout == 2048


def test_mean_reward_is_that_of_a_step(tmp_path: Path) -> None:
    class One:
        def compute_reward(self, state: Any, previous: Any, action: Any) -> tuple[float, dict[str, float]]:
            return 1.0, {}

    teacher = GRPOTrainer(
        small(),
        GRPOConfig(progress=False, output_dir=str(tmp_path), num_groups=1, eval_steps=0),
        SPACE,
        One(),
        "cpu",
    )
    teacher.train(Service(), total_steps=48)
    assert teacher.metrics_history[0]["mean_reward"] == 1
    assert teacher.evaluate(Service(), num_episodes=3) == 6


async def test_where_an_event_loop_runs_a_training_is_awaited(tmp_path: Path) -> None:
    teacher = trainer(tmp_path, num_groups=1, num_epochs=1, eval_steps=0)
    assert await teacher.train(Service(), 48) is teacher.policy
    assert isinstance(await teacher.evaluate(Service(), 2), float)
    await teacher.save_checkpoint(tmp_path / "awaited.pt")
    await teacher.load_checkpoint(tmp_path / "awaited.pt")


def test_evaluation_and_checkpoints(tmp_path: Path) -> None:
    teacher = trainer(tmp_path, num_groups=1, num_epochs=1, eval_steps=0)
    teacher.train(Service(), total_steps=48)
    env = Service()
    eval_reward = teacher.evaluate(env, num_episodes=10)
    assert f"{eval_reward:.3f}" == f"{teacher.evaluate(env):.3f}"  # the same starts, nothing drawn
    assert teacher.policy.training
    path = str(tmp_path / "model.pt")
    teacher.save_checkpoint(path)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    small().load_state_dict(checkpoint["policy_state_dict"])
    teacher.optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    teacher.scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
    assert GRPOConfig(**checkpoint["config"]) == teacher.config
    other = trainer(tmp_path)
    other.load_checkpoint(path)
    assert other.scheduler.state_dict() == teacher.scheduler.state_dict()
    assert other.evaluate(Service()) == eval_reward

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "theirs.pt").write_bytes(pickle.dumps({"policy_state_dict": Bomb()}))
    with pytest.raises(CheckpointError, match="is damaged, or holds more than tensors"):
        other.load_checkpoint(tmp_path / "theirs.pt")
    assert not (tmp_path / "ran").exists()


def test_a_training_learns_what_the_environment_of_dicts_pays(tmp_path: Path) -> None:
    settings = {**LEARNING, "learning_rate": 0.01, "gamma": 0.5, "num_groups": 8, "batch_size": 192}
    config = GRPOConfig(progress=False, output_dir=str(tmp_path), eval_steps=0, **settings)
    teacher = GRPOTrainer(small(SIGNALS, history_length=1), config, SIGNALS, Named(), "cpu")
    before = teacher.evaluate(Signal(), 40)
    teacher.train(Signal(), total_steps=3_000)
    assert before < 3
    assert teacher.evaluate(Signal(), 40) > before + 1.5


# ------------------------------------------------------------------------------------------ environments


@pytest.mark.parametrize(
    "draw",
    [None, lambda *spread: np.random.normal(*spread), lambda *spread: random.gauss(*spread)],
    ids=["own", "numpy's", "Python's"],
)
def test_copies_of_one_start_have_one_noise(draw: Any) -> None:
    state = np.random.get_state()[1].tolist(), random.getstate()
    env = Service(draw=draw)
    copies = EnvironmentCopies(env, SPACE, InfrastructureRewardFunction(), horizon=4)
    assert check_environment(copies)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state
    seen = copies.reset([1, 1, 2])["current_metrics"]
    assert np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    for step in range(4):
        transition = copies.step(np.array([3, 3, 3]))
        assert transition.truncated.all() == (step == 3)  # the horizon cuts what is not done
    assert transition.rewards[0] == transition.rewards[1] != transition.rewards[2]


def test_the_simulated_cluster_is_such_an_environment(tmp_path: Path) -> None:
    env = ClusterEnvironment(SPACE, history_length=3, horizon=5)
    state = env.reset()
    assert state["metrics_history"].shape == (3, len(state["current_metrics"]))
    state, info = env.step(SPACE.decode_action(6))
    assert state.keys() >= {"cost_per_hour", "latency_p99_ms", "replica_count", "money"}
    assert info == {"done": False}
    copies = EnvironmentCopies(env, SPACE, InfrastructureRewardFunction(), horizon=9)
    assert check_environment(copies)
    rows = InfrastructureEnv(actions=SPACE, horizon=5)
    seen, together = copies.reset([7, 8])["current_metrics"], rows.reset([7, 8])
    assert np.array_equal(seen, together)  # one by one is the same as side by side
    for action in (6, 0, 3):
        ours, theirs = (batch.step(np.array([action, 3])) for batch in (copies, rows))
        assert np.array_equal(ours.observations["current_metrics"], theirs.observations)
    network = small(num_metrics=len(seen[0]))
    config = GRPOConfig(progress=False, output_dir=str(tmp_path), num_groups=1, num_epochs=1, eval_steps=0)
    teacher = GRPOTrainer(network, config, SPACE, InfrastructureRewardFunction(), "cpu")
    teacher.train(env, total_steps=40)
    assert teacher.training.step_number == 40


def test_what_is_no_such_environment_is_refused_in_one_line(tmp_path: Path) -> None:
    class Locked(Service):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a socket")

    class Pairs(Service):
        def reset(self) -> Any:
            return np.zeros(3), {}

    class Five(Service):
        def step(self, action: Any) -> Any:
            state, info = super().step(action)
            return state, 0.0, False, False, info

    class Grows(Service):
        def state(self) -> dict[str, Any]:
            grown = super().state()
            return {**grown, "metrics_history": self.window[: 1 + self.time]}

    teacher = trainer(tmp_path)
    for env, message in (
        (Locked(), r"Locked cannot be copied \(cannot pickle a socket\), as a group needs"),
        (
            Pairs(),
            r"a state must be a dict with metrics_history \[T, M\] and current_metrics \[M\], got tuple",
        ),
        (Five(), r"Five: step must give \(state, info\), got \("),
        (Grows(), r"a state must have the shapes of the first one, .* fill a window"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            teacher.collect_experience(env, 32)
    bare = GRPOTrainer(small(), teacher.config)
    with pytest.raises(ConfigurationError, match="make the trainer with action_space and reward_fn"):
        bare.train(Service())


# ------------------------------------------------------------------------------------------ deployment

KEEP = {"scaling": ScalingAction.MAINTAIN, "config": ConfigAction.NO_CHANGE, "traffic_weight": None}
CONSTRAINTS = {
    "max_scaling": max_scaling_constraint,
    "min_replicas": min_replicas_constraint,
    "rate_limit": rate_limit_constraint,
}


def window(**values: Any) -> dict[str, Any]:
    return {"metrics_history": np.ones((3, 3)), "current_metrics": np.ones(3), "replica_count": 20, **values}


def test_the_network_is_deployed() -> None:
    deployment = SafeGRPODeployment(small(), SPACE, CONSTRAINTS)
    assert (deployment.deployment_mode, deployment.rollout_percentage) == ("shadow", 0.0)
    assert deployment.deployment_start is None
    execute_action, policy_action = deployment.get_action(window(), KEEP)
    assert execute_action == KEEP
    assert policy_action["config"] is ConfigAction.NO_CHANGE
    deployment.set_deployment_mode("gradual", rollout_pct=0.1)
    deployment.set_deployment_mode("gradual")
    assert deployment.rollout_percentage == 0.0
    deployment.set_deployment_mode("full")
    assert isinstance(deployment.deployment_start, datetime)
    executed, wanted = deployment.get_action(window(), fallback_action=KEEP)
    assert executed == wanted
    assert deployment.violation_count == 0
    with pytest.raises(ValueError, match="mode must be shadow, gradual, full"):
        deployment.set_deployment_mode("canary")


def test_constraints_in_either_order_act_and_others_are_refused() -> None:
    def document(action: Any, state: Any) -> bool:
        return bool(action["scaling"] == 0 or state["calm"])

    def ours(state: Any, action: Any) -> bool:
        return bool(action["scaling"] == 0 or state["calm"])

    up = SPACE.encode_action(ScalingAction.SCALE_UP_LARGE, ConfigAction.NO_CHANGE)
    for constraint in (
        document,
        ours,
        lambda action, now: document(action, now),
        lambda s, action: ours(s, action),
    ):
        deployment = SafeGRPODeployment(lambda state: up, SPACE, {"calm": constraint})
        deployment.set_deployment_mode("full")
        assert deployment.get_action({"calm": True}, KEEP).executed["scaling"] == 4
        assert deployment.get_action({"calm": False}, KEEP).executed["scaling"] == 0
        assert deployment.violation_count == 1
    for wrong in (lambda a, b: True, lambda state: True, lambda **both: True, max, "no function"):
        with pytest.raises(
            ConfigurationError, match="the constraint calm must have two parameters, action and state, got"
        ):
            SafeGRPODeployment(lambda state: up, SPACE, {"calm": wrong})


def test_what_could_never_act_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="the policy has 7 actions and the action space 539"):
        SafeGRPODeployment(small(), InfrastructureActionSpace(), CONSTRAINTS)
    with pytest.raises(ConfigurationError, match="policy must take a state, got Linear"):
        SafeGRPODeployment(torch.nn.Linear(2, 2), SPACE, CONSTRAINTS)
    with pytest.raises(ConfigurationError, match="policy must take a state, got 'policy'"):
        SafeGRPODeployment("policy", SPACE, CONSTRAINTS)


def test_an_unsafe_action_is_replaced_and_remembered() -> None:
    down = SPACE.encode_action(ScalingAction.SCALE_DOWN_LARGE, ConfigAction.NO_CHANGE)
    deployment = SafeGRPODeployment(lambda state: down, SPACE, CONSTRAINTS)
    deployment.set_deployment_mode("full")
    executed, wanted = deployment.get_action({"replica_count": 3}, KEEP)
    assert (executed["scaling"], wanted["scaling"]) == (
        ScalingAction.MAINTAIN,
        ScalingAction.SCALE_DOWN_LARGE,
    )
    entry = deployment.action_history[-1]
    assert not entry["was_safe"]
    assert entry["policy_action"] == wanted
    assert entry["executed_action"] == executed
    assert entry["mode"] == "full"
    assert datetime.now() - entry["timestamp"] < timedelta(minutes=1)
    assert deployment.action_history.maxlen == 1000
    assert deployment.violation_count == 1


def test_unsafe_actions_roll_back_and_a_clean_hour_gives_more() -> None:
    now = [1_000_000.0]
    up = SPACE.encode_action(ScalingAction.SCALE_UP_LARGE, ConfigAction.NO_CHANGE)
    deployment = SafeGRPODeployment(lambda state: up, SPACE, CONSTRAINTS, clock=lambda: now[0])
    deployment.set_deployment_mode("gradual", 0.9)
    now[0] += 3601
    deployment.get_action({"replica_count": 20}, KEEP)
    assert (deployment.deployment_mode, deployment.rollout_percentage) == ("full", 1.0)
    for number in range(100):
        deployment.get_action({"replica_count": 3 if number % 5 == 0 else 20}, KEEP)
    recent_actions = list(deployment.action_history)[-100:]
    assert sum(1 for a in recent_actions if not a["was_safe"]) / len(recent_actions) == 0.2
    assert deployment.rollback_triggered
    assert (deployment.deployment_mode, deployment.rollout_percentage) == ("shadow", 0.0)


def test_the_three_constraints() -> None:
    def up(value: int) -> dict[str, Any]:
        return {"scaling": ScalingAction(value)}

    assert max_scaling_constraint(up(4), {"replica_count": 8})
    assert not max_scaling_constraint(up(4), {"replica_count": 7})
    assert max_scaling_constraint(action=up(4), state={"replicas": 8})
    assert min_replicas_constraint(up(-1), {"replica_count": 3})
    assert not min_replicas_constraint(up(-2), {"replicas": 3})
    assert rate_limit_constraint(up(1), {})
    assert not rate_limit_constraint(up(1), {"last_scale_time": datetime.now() - timedelta(minutes=4)})
    assert rate_limit_constraint(up(1), {"last_scale_time": datetime.now() - timedelta(minutes=6)})
    assert rate_limit_constraint(up(0), {"last_scale_time": datetime.now()})
    with pytest.raises(ConfigurationError, match="neither replica_count nor replicas"):
        max_scaling_constraint(up(1), {})


def test_the_four_figures_and_the_hierarchy_are_on_the_pages() -> None:
    docs = ROOT / "docs"
    pages = (docs / "control.md").read_text() + (docs / "autoscaling.md").read_text()
    for name in ("architecture", "advantages", "actions", "pipeline"):
        assert f"images/control-{name}.svg" in pages
        assert (docs / "images" / f"control-{name}.svg").stat().st_size > 1000
    assert "instance types" in pages
