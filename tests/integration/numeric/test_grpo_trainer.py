"""The document's trainer: its defaults, its names, and runs that go on with the same bits."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from control_toys import Signals

import stateset_agents
from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.grpo.config import GRPOConfig
from stateset_agents.numeric.autoscaling.grpo.environments import MetricsHistory
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork, NetworkPolicy
from stateset_agents.numeric.autoscaling.grpo.trainer import GRPOTrainer
from stateset_agents.numeric.autoscaling.rewards import InfrastructureRewardFunction
from stateset_agents.numeric.evaluation import evaluate, paired_difference
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.rollout import action_keys, collect
from stateset_agents.numeric.update import update
from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.types.errors import CheckpointError, ConfigurationError


def network(**changes) -> GRPOPolicyNetwork:
    widths = {"state_dim": 8, "hidden_dim": 16, "num_heads": 2, "num_layers": 1}
    return GRPOPolicyNetwork(**{**widths, "action_dim": 3, "num_metrics": 3, "history_length": 3, **changes})


def trainer(folder, **settings) -> GRPOTrainer:
    chosen = {"total_steps": 1000, "num_groups": 4, "progress": False, "output_dir": str(folder)}
    return GRPOTrainer(network(), GRPOConfig(**{**chosen, **settings}), device="cpu")


def test_the_settings_have_the_defaults_and_the_names_of_the_document() -> None:
    config = GRPOConfig()
    documented = {"group_size": 8, "clip_epsilon": 0.2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    documented |= {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "max_grad_norm": 0.5}
    documented |= {"num_epochs": 4, "batch_size": 64, "weight_decay": 0.01, "total_steps": 1_000_000}
    documented |= {"eval_steps": 10_000, "save_steps": 50_000, "eval_episodes": 10, "steps_per_rollout": 2048}
    assert {name: getattr(config, name) for name in documented} == documented
    assert config.learning_rate * config.lr_min_ratio == pytest.approx(1e-6)
    aliases = {"clip_epsilon": 0.1, "kl_coefficient": 0.3, "entropy_coefficient": 0.4, "num_epochs": 5}
    aliases |= {"batch_size": 6}
    given = GRPOConfig(**aliases)
    assert {name: getattr(given, name) for name in aliases} == aliases
    assert (given.clip_ratio, given.beta, given.entropy_coef) == (0.1, 0.3, 0.4)
    assert (given.num_iterations, given.minibatch_size) == (5, 6)
    with pytest.raises(
        ConfigurationError, match="group_size must be at least 2, got 1: group compares members"
    ):
        GRPOConfig(group_size=1)
    assert not {"GRPOConfig", "GRPOTrainer", "GRPOLoss", "GRPOPolicyNetwork"} & set(stateset_agents.__all__)


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 4},
        {"clip_epsilon": 0.01},
        {"kl_coefficient": 2.0},
        {"entropy_coefficient": 0.5},
        {"learning_rate": 0.05},
        {"gamma": 0.5},
        {"advantage_estimator": "step_group", "advantage_normalization": "none"},
        {"gae_lambda": 0.1},
        {"max_grad_norm": 1e-3},
        {"num_epochs": 2},
        {"batch_size": 8},
        {"weight_decay": 0.9},
        {"advantage_normalization": "none"},
        {"lr_scheduler_type": "constant"},
        {"lr_min_ratio": 0.9},
    ],
)
def test_each_setting_changes_an_update(change) -> None:
    def learned(**settings) -> torch.Tensor:
        config = GRPOConfig(**{"learning_rate": 0.01, "total_steps": 1000, **settings})
        environment = Signals(stop=2)
        policy = MlpPolicy(environment.spec, hidden=(8,), critic=True)
        keys = action_keys(0, 0, 3, config.group_size)
        rollout = collect(policy, environment, [1, 2, 3], group_size=config.group_size, keys=keys)
        optimization = Optimization(policy, config, num_updates=config.total_steps)
        reference = MlpPolicy(environment.spec, hidden=(8,), seed=5) if config.beta else None
        update(policy, optimization, rollout, config, reference=reference, position=300)
        return torch.cat([value.detach().flatten() for value in policy.parameters()])

    gae = {"advantage_estimator": "gae", "advantage_normalization": "batch"}
    base = gae if "gae_lambda" in change else {}
    assert not torch.equal(learned(**base, **change), learned(**base))


@pytest.mark.long
async def test_the_network_learns_and_is_judged_in_the_mode_that_it_was_in(tmp_path) -> None:
    teacher = trainer(
        tmp_path,
        total_steps=4000,
        learning_rate=0.01,
        kl_coefficient=0,
        gamma=0.5,
        advantage_estimator="step_group",
        advantage_normalization="batch",
        num_groups=8,
    )
    teacher.policy.train()
    windows = MetricsHistory(Signals(), 3)
    before = evaluate(NetworkPolicy(teacher.policy), windows, range(20))
    teacher.policy.train()
    assert await teacher.evaluate(windows, seeds=range(20)) == before.mean  # without dropout
    await teacher.train(Signals(), eval_interval=10**6)
    assert teacher.policy.training
    after = evaluate(NetworkPolicy(teacher.policy), windows, range(20))
    teacher.policy.train()
    mean, interval = paired_difference(after, before)
    assert mean > 1
    assert interval[0] > 0
    assert teacher.policy.training
    last = teacher.metrics_history[-1]
    names = {"step", "mean_reward", "policy_loss", "value_loss", "entropy", "kl_div", "learning_rate"}
    assert last.keys() == names
    assert last["value_loss"] == 0  # there is no critic
    assert last["mean_reward"] > teacher.metrics_history[0]["mean_reward"]
    assert last["learning_rate"] < 0.01 / 50  # nearly all steps are made, however many updates they were


@pytest.mark.long
async def test_passing_a_multiple_evaluates_and_saves_under_the_names_of_the_document(tmp_path) -> None:
    heard = []

    class Listen(Callback):
        def on_evaluate(self, step, evaluation):
            heard.append((step, len(evaluation.returns)))

    teacher = trainer(tmp_path, save_total_limit=10)
    await teacher.train(Signals(), 900, 300, 500, callbacks=[Listen()])
    # updates are of 4 * 8 * 6 = 192 steps
    assert heard == [(384, 10), (768, 10), (960, 10)]
    run = teacher.training.run.path
    names = {path.name for path in run.glob("*.pt")}
    assert {"checkpoint_576.pt", "checkpoint_960.pt", "best_model.pt"} <= names
    assert torch.load(run / "checkpoint_576.pt")["scheduler_state_dict"]["step"] == 576
    best = torch.load(run / "best_model.pt")
    assert best["scheduler_state_dict"]["step"] == teacher.training.progress.best_step
    other = trainer(tmp_path)
    await other.load_checkpoint(run / "best_model.pt")
    assert torch.equal(other.policy.policy_head[0].bias, best["policy_state_dict"]["policy_head.0.bias"])


async def test_rollouts_smaller_than_a_minibatch_are_one(tmp_path) -> None:
    teacher = trainer(tmp_path, num_groups=1, group_size=2, total_steps=24)
    await teacher.train(Signals())
    assert [line["step"] for line in teacher.metrics_history] == [12, 24]
    assert all(np.isfinite(list(line.values())).all() for line in teacher.metrics_history)


@pytest.mark.long
async def test_a_training_goes_on_from_a_file_with_the_same_bits(tmp_path) -> None:
    class Stop(Callback):
        def on_step_end(self, step, metrics):
            if step >= 400:
                stopped.training.request_stop()

    whole, stopped, resumed = (trainer(tmp_path / name) for name in ("whole", "parts", "more"))
    await whole.train(Signals())
    with pytest.raises(ConfigurationError, match="nothing was trained yet"):
        stopped.training.request_stop()
    await stopped.train(Signals(), callbacks=[Stop()])
    assert stopped.training.step_number == 576
    assert await stopped.save_checkpoint(tmp_path / "model.pt") == tmp_path / "model.pt"
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved.keys() > {"policy_state_dict", "optimizer_state_dict", "scheduler_state_dict", "config"}
    assert GRPOConfig(**saved["config"]) == stopped.config
    for state in resumed.policy.parameters():
        state.data += 1  # the KL is to the weights that the training began with, not to these
    await resumed.load_checkpoint(tmp_path / "model.pt")
    assert resumed.scheduler.get_last_lr() == stopped.scheduler.get_last_lr()
    assert all(
        torch.equal(value, stopped.policy.state_dict()[name])
        for name, value in resumed.policy.state_dict().items()
    )
    await resumed.train(Signals())
    assert resumed.training.step_number == whole.training.step_number == 1152
    assert len(resumed.metrics_history) == 3
    assert all(
        torch.equal(value, whole.policy.state_dict()[name])
        for name, value in resumed.policy.state_dict().items()
    )


async def test_checkpoints_from_elsewhere_are_refused(tmp_path) -> None:
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "theirs.pt").write_bytes(pickle.dumps(Bomb()))
    teacher = trainer(tmp_path, total_steps=100)
    with pytest.raises(CheckpointError, match=r"theirs.pt is damaged, or holds more than tensors"):
        await teacher.load_checkpoint(tmp_path / "theirs.pt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"missing cannot be read \(No such file or directory\)"):
        await teacher.load_checkpoint(tmp_path / "missing")
    torch.save({"policy_state_dict": {}}, tmp_path / "part.pt")
    with pytest.raises(CheckpointError, match=r"part.pt has no policy_state_dict, optimizer_state_dict"):
        await teacher.load_checkpoint(tmp_path / "part.pt")
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*mine .*: choose another path"):
        await teacher.save_checkpoint(tmp_path / "mine")
    await teacher.save_checkpoint(tmp_path / "ours.pt")
    wider = GRPOTrainer(network(hidden_dim=20), teacher.config)
    with pytest.raises(CheckpointError, match=r"is of another network \(policy_head.0.bias differs\)"):
        await wider.load_checkpoint(tmp_path / "ours.pt")


async def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch) -> None:
    teacher = trainer(tmp_path)
    with pytest.raises(
        ConfigurationError, match="the policy has 3 actions and signals 4: make it with action_dim=4"
    ):
        await teacher.train(Signals(masked=True))
    wider = Signals()
    wider.spec = dataclasses.replace(wider.spec, observation_shape=(5,))
    with pytest.raises(
        ConfigurationError,
        match="steps of 3 metrics and signals has 3 of 5: give it history_length=3 and num_metrics=5",
    ):
        await teacher.evaluate(wider)
    with pytest.raises(ConfigurationError, match="the policy has 3 actions and the action space 539"):
        GRPOTrainer(network(), action_space=InfrastructureActionSpace())
    with pytest.raises(ConfigurationError, match="reward_fn must have compute_reward, got <function"):
        GRPOTrainer(network(), reward_fn=lambda state: 1.0)
    paid = GRPOTrainer(network(), teacher.config, reward_fn=InfrastructureRewardFunction())
    with pytest.raises(
        ConfigurationError, match="signals has rewards of its own and reward_fn would not act"
    ):
        await paid.train(Signals())
    with pytest.raises(ConfigurationError, match="signals has no states to collect"):
        teacher.collect_experience(Signals())
    with pytest.raises(ConfigurationError, match="device must be auto, cpu or cuda, got 'tpu'"):
        GRPOTrainer(network(), device="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigurationError, match="device is 'cuda' and torch sees 0 GPUs: take device 'auto'"
    ):
        GRPOTrainer(network(), device="cuda")
    assert GRPOTrainer(network()).device.type == "cpu"


@pytest.mark.gpu
async def test_a_network_on_a_gpu_learns_from_a_simulation_on_the_cpu(tmp_path) -> None:
    teacher = GRPOTrainer(network(), trainer(tmp_path).config, device="cuda")
    before = {name: value.clone() for name, value in teacher.policy.state_dict().items()}
    await teacher.train(Signals())
    assert teacher.policy.state_encoder.current.weight.device.type == "cuda"
    assert not torch.equal(
        before["policy_head.4.weight"], teacher.policy.state_dict()["policy_head.4.weight"]
    )
    history, now = np.zeros((3, 3)), np.zeros(3)
    action, logprob = teacher.policy.get_action(history, now, deterministic=True)
    same = network(seed=1)
    same.load_state_dict(teacher.policy.state_dict())
    assert same.get_action(history, now, deterministic=True) == (action, pytest.approx(logprob, abs=1e-4))
    assert (
        NetworkPolicy(teacher.policy)(
            {"metrics_history": torch.zeros(1, 3, 3), "current_metrics": torch.zeros(1, 3)}
        ).device.type
        == "cpu"
    )
