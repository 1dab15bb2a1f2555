"""Numeric policies learn, and their runs pause, stop, resume and survive a kill with the same bits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from control_toys import Signals
from repository_paths import HELPERS, ROOT
from warm_python import warm_python

from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.numeric.credit import ESTIMATORS
from stateset_agents.numeric.environments.classic import BatchedCartPole
from stateset_agents.numeric.evaluation import evaluate, evaluation_seeds, paired_difference
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import CheckpointError, ConfigurationError, TrainingStopped

BEST = 6 * 0.75
"""What naming every signal earns."""


def make_trainer(folder, environment=None, *, policy=None, policy_seed=0, **settings):
    environment = environment or Signals()
    chosen = {"total_steps": 3072, "num_groups": 8, "group_size": 8, "minibatch_size": 128, "progress": False}
    extra = {name: settings.pop(name) for name in ("callbacks", "run") if name in settings}
    config = ControlConfig(**{**chosen, "learning_rate": 1e-2, "output_dir": str(folder), **settings})
    critic = config.advantage_estimator == "gae"
    policy = policy or MlpPolicy(environment.spec, hidden=(16,), critic=critic, seed=policy_seed)
    return ControlTrainer(policy, environment, config, **extra)


async def trained(trainer, path=None):
    async with trainer:
        if path is not None:
            await trainer.load_checkpoint(path)
        await trainer.train()
    return trainer


async def reached(trainer, step):
    for _ in range(10_000):
        if trainer.step_number >= step:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"step {step} was never reached")


def weights(trainer):
    return {name: value.tolist() for name, value in trainer.policy.state_dict().items()}


def logged(trainer):
    """All that a run wrote, without what another run need not repeat."""
    log = RunLog(trainer.run)
    timed = ("time/", "rollout/steps_per_second")
    lines = [
        (line.step, {name: value for name, value in line.values.items() if not name.startswith(timed)})
        for line in log.metrics()
    ]
    return lines, list(log.episodes())


@pytest.mark.first(2)
@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_every_estimator_learns(tmp_path, estimator):
    settings = {"advantage_estimator": estimator, "branch_every": 2, "gamma": 0.9}
    steps = 15_000 if estimator == "branch" else 3072  # most of them in branches
    trainer = make_trainer(tmp_path, Signals(stop=3), total_steps=steps, **settings)
    await trained(trainer)
    found = evaluate(trainer.policy, Signals(), evaluation_seeds(0, 50))
    assert found.mean == BEST
    first, *_, last = [line for _, line in logged(trainer)[0]]
    assert last["reward/mean"] / last["episode/length"] > first["reward/mean"] / first["episode/length"] + 0.3
    assert first["policy/first_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert last["policy/entropy"] < first["policy/entropy"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.first(2)
async def test_every_loss_learns_with_named_and_masked_actions(tmp_path, loss):
    clips = {"clip_ratio": 0.2, "clip_ratio_high": 0.3}
    trainer = make_trainer(tmp_path, Signals(masked=True), loss_type=loss, total_steps=6144, **clips)
    await trained(trainer)
    assert evaluate(trainer.policy, Signals(masked=True), evaluation_seeds(0, 50)).mean > 4


async def test_cart_pole_is_learned_in_seconds(tmp_path):
    environment = BatchedCartPole()
    config = ControlConfig(
        total_steps=60_000,
        steps_per_rollout=4096,
        eval_steps=12_000,
        load_best_at_end=True,
        output_dir=str(tmp_path),
        progress=False,
    )
    trainer = ControlTrainer(MlpPolicy(environment.spec), environment, config)
    await trained(trainer)
    found = evaluate(trainer.policy, environment, evaluation_seeds(1, 20))
    assert found.mean > 400
    assert found.mean >= trainer.progress.best_value - 60


async def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path):
    whole = await trained(make_trainer(tmp_path / "whole", save_steps=500, eval_steps=1000, beta=0.1))

    class Stop(Callback):
        def on_step_end(self, step, metrics):
            if step >= 1000:
                trainer.request_stop()

    options = {"save_steps": 500, "eval_steps": 1000, "beta": 0.1}
    trainer = make_trainer(tmp_path / "parts", callbacks=[Stop()], **options)
    await trained(trainer)
    assert trainer.state == "stopped"
    assert trainer.summary()["why"].startswith("stopped as asked after step 1")
    stopped = trainer.step_number
    trainer = make_trainer(tmp_path / "parts", run=trainer.run, **options)
    async with trainer:
        await trainer.load_checkpoint()
        assert trainer.step_number == stopped
        await trainer.train()
    assert weights(trainer) == weights(whole)
    assert logged(trainer) == logged(whole)
    assert trainer.summary()["deterministic"]


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_control_trainer import make_trainer
from stateset_agents.tracking.run_folder import RunFolder
folder = Path(sys.argv[1])
runs = sorted(folder.glob("0*"))
trainer = make_trainer(folder, total_steps=20_000, save_steps=1, eval_steps=1000,
                       **({"run": RunFolder(runs[-1])} if runs else {}))
async def main():
    async with trainer:
        await trainer.load_checkpoint()
        print("begins", flush=True)
        await trainer.train()
asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("waits", [(0.5,), pytest.param((0.3, 0.7, 0.15), marks=pytest.mark.long)])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, waits):
    def begun(folder):
        command = [
            *warm_python(),
            "-c",
            KILLED,
            str(folder),
            str(HELPERS),
            str(HELPERS / "servers"),
            str(ROOT),
            os.path.dirname(__file__),
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True
        )

    with begun(tmp_path / "whole") as run:
        assert run.wait(300) == 0
    for wait in waits:
        with begun(tmp_path / "killed") as run:
            assert run.stdout.readline() == "begins\n"
            time.sleep(wait)
            run.send_signal(signal.SIGKILL)
    with begun(tmp_path / "killed") as run:
        assert run.wait(300) == 0

    def left(folder):
        log = RunLog.open(next((folder).glob("0001-*")))
        checkpoints = sorted((log.folder.checkpoints).glob("step-*"))[-1]
        return [
            (checkpoints / name).read_bytes() for name in ("model/model.safetensors", "optimizer.safetensors")
        ], list(log.episodes())

    assert left(tmp_path / "killed") == left(tmp_path / "whole")
    assert len(list((tmp_path / "killed").glob("0*"))) == 1


async def test_pause_holds_between_updates_and_stop_ends(tmp_path):
    trainer = make_trainer(tmp_path, total_steps=10**9)
    task = asyncio.create_task(trainer.train())
    await reached(trainer, 1)
    trainer.pause()
    assert await trainer.wait_for("paused") == "paused"
    held = trainer.step_number
    await asyncio.sleep(0.1)
    assert trainer.step_number == held
    with pytest.raises(ConfigurationError, match="this trainer is training: await that call"):
        await trainer.train()
    trainer.resume()
    await reached(trainer, held + 1)
    await trainer.stop()
    assert await task is trainer.policy
    summary = json.loads(trainer.run.summary.read_text())
    assert (summary["ended"], summary["steps"]) == ("stopped", trainer.step_number)
    assert trainer.run.report.is_file()
    assert not trainer.run.rollouts.exists()
    with pytest.raises(ConfigurationError, match="the trainer was stopped"):
        await trainer.train()


async def test_the_event_loop_goes_on_while_it_trains(tmp_path):
    trainer = make_trainer(
        tmp_path, BatchedCartPole(), total_steps=20_000, num_groups=16, minibatch_size=1024
    )
    late, over = [], asyncio.Event()

    async def watch():
        while not over.is_set():
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - due)

    watching = asyncio.create_task(watch())
    await trained(trainer)
    over.set()
    await watching
    assert len(late) > 20
    assert np.quantile(late, 0.9) < 0.05  # of a machine that other tests share


async def test_callbacks_hear_of_updates_evaluations_and_checkpoints(tmp_path):
    heard = []

    class Listen(Callback):
        def on_train_begin(self, trainer):
            heard.append("begin")

        def on_step_end(self, step, metrics):
            heard.append("step")

        async def on_evaluate(self, step, evaluation):
            heard.append(("evaluate", len(evaluation.returns)))
            assert evaluation.metrics()["eval/named"] >= 0

        def on_checkpoint(self, step, path):
            heard.append(("checkpoint", path.name == f"step-{step:06d}"))

        def on_train_end(self, trainer):
            heard.append(trainer.progress.state)

    trainer = make_trainer(
        tmp_path, total_steps=768, eval_steps=500, eval_episodes=7, save_steps=0, callbacks=[Listen()]
    )
    await trained(trainer)
    assert heard == ["begin", "step", "step", ("evaluate", 7), ("checkpoint", True), "finished"]
    validation = list(RunLog(trainer.run).episodes("validation"))
    assert len(validation) == 7
    assert len(list(RunLog(trainer.run).episodes("train"))) == 128


async def test_early_stopping_and_the_best_weights(tmp_path):
    trainer = make_trainer(
        tmp_path, total_steps=10**6, eval_steps=1, early_stopping_patience=3, load_best_at_end=True
    )
    await trained(trainer)
    assert "stopped early: eval/reward did not improve" in trainer.summary()["why"]
    found = evaluate(trainer.policy, Signals(), evaluation_seeds(0, 100))
    assert trainer.progress.best_value == found.mean == BEST
    assert trainer.progress.best_step < trainer.step_number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "training.seed was 0 and is 1"),
        ({"gamma": 0.5}, "training.gamma was 0.99 and is 0.5"),
        ({"environment": Signals(masked=True)}, "environment.num_actions was 3 and is 4"),
        ({"environment": Signals(horizon=7)}, "environment.horizon was 6 and is 7"),
        ({"policy_seed": 1}, "was trained from other weights"),
    ],
)
async def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    first = await trained(make_trainer(tmp_path / "first", total_steps=400))
    other = make_trainer(tmp_path / "other", **{"total_steps": 400, **change})
    with pytest.raises(CheckpointError, match=message):
        await trained(other, first.run.path)
    wider = Signals()
    wider.spec = dataclasses.replace(wider.spec, observation_shape=(5,))
    wider._observations = lambda: np.zeros((wider.signals.shape[1], 5), dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"environment.observation_shape was \[3\] and is \[5\]"):
        await trained(make_trainer(tmp_path / "other", wider, total_steps=400), first.run.path)


async def test_a_longer_run_goes_on_and_says_that_it_is_another(tmp_path, capsys):
    first = await trained(make_trainer(tmp_path / "first", total_steps=400))
    longer = make_trainer(tmp_path / "longer", total_steps=1200)
    await trained(longer, first.run.path)
    assert longer.step_number >= 1200
    assert longer.summary()["deterministic"] is False


class Dead(Signals):
    """Every reward is no number."""

    def step(self, actions):
        transition = super().step(actions)
        return dataclasses.replace(transition, rewards=transition.rewards * np.nan)


async def test_a_run_in_which_every_row_fails_ends_and_says_why(tmp_path):
    with pytest.raises(
        TrainingStopped, match="update 1 has no group with enough members: 64 of 64 rows failed"
    ):
        await trained(make_trainer(tmp_path, Dead()))


async def test_rows_that_fail_make_their_group_smaller(tmp_path):
    class Sometimes(Signals):
        def step(self, actions):
            transition = super().step(actions)
            rewards = transition.rewards.copy()
            rewards[: 9 * (len(actions) > 9)] = np.nan  # a whole group, and one of the next
            return dataclasses.replace(transition, rewards=rewards)

    trainer = make_trainer(tmp_path, Sometimes(), total_steps=300)
    await trained(trainer)
    line = logged(trainer)[0][0][1]
    assert (line["episode/failed"], line["group/dropped"], line["rollout/steps"]) == (9, 1, 55 * 6)


async def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_weights(tmp_path):
    policy = MlpPolicy(Signals().spec, hidden=(4,))

    class Poisoned(torch.nn.Module):
        """Its gradient is no number, while what it says is one."""

        def __init__(self):
            super().__init__()
            self.inner = policy

        def forward(self, observations):
            logits = self.inner(observations)
            return logits + (logits * 0).clamp(min=0).sqrt()

    poisoned = Poisoned()
    before = {name: value.clone() for name, value in poisoned.state_dict().items()}
    with pytest.raises(
        TrainingStopped, match=r"update 1 has no finite loss in any of its .* lower learning_rate"
    ):
        await trained(make_trainer(tmp_path, policy=poisoned))
    assert all(torch.equal(value, before[name]) for name, value in poisoned.state_dict().items())


async def test_equal_members_are_counted_and_teach_nothing(tmp_path):
    class Flat(Signals):
        def step(self, actions):
            return dataclasses.replace(super().step(actions), rewards=np.ones(len(actions), dtype=np.float32))

    trainer = make_trainer(tmp_path, Flat(), total_steps=300, entropy_coef=0.0)
    before = weights(trainer)
    await trained(trainer)
    assert weights(trainer) == before
    assert logged(trainer)[0][0][1]["group/zero_variance"] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: ControlTrainer("x", Signals()), "policy must be a Module, got str 'x'"),
        (
            lambda path: ControlTrainer(MlpPolicy(Signals().spec), "CartPole-v1"),
            "environment must be a BatchedEnvironment, got str: see GymnasiumBatch",
        ),
        (
            lambda path: ControlTrainer(MlpPolicy(Signals().spec), Signals(), {}),
            "config must be a ControlConfig",
        ),
        (
            lambda path: ControlConfig(group_size=1),
            "group_size must be at least 2, got 1: step_group compares",
        ),
        (
            lambda path: ControlConfig(lone_steps="zero", advantage_estimator="group"),
            "lone_steps zero is for step_group: leave it out",
        ),
        (
            lambda path: ControlConfig(clip_ration=1),
            r"ControlConfig has no field 'clip_ration' \(did you mean",
        ),
        (
            lambda path: ControlConfig(advantage_normalization="sample"),
            "advantage_normalization of step_group must be one of batch, none, got sample",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(tmp_path, make, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        make(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: make_trainer(path, Signals(forks=False), advantage_estimator="branch"),
            "signals cannot fork: set advantage_estimator to step_group",
        ),
        (
            lambda path: make_trainer(
                path, advantage_estimator="gae", policy=torch.nn.Sequential(torch.nn.Linear(3, 3))
            ),
            "gae needs a critic, and Sequential has no values",
        ),
        (
            lambda path: make_trainer(path, policy=torch.nn.Linear(3, 2)),
            r"Linear must give logits of shape \(2, 3\) for 2 rows, got \(2, 2\)",
        ),
        (
            lambda path: make_trainer(path, advantage_estimator="gae", policy=MlpPolicy(Signals().spec)),
            "this MlpPolicy has no critic: make it with critic=True",
        ),
    ],
)
async def test_a_policy_or_environment_that_does_not_fit_is_refused_at_the_start(tmp_path, make, message):
    with pytest.raises(ConfigurationError, match=message):
        await trained(make(tmp_path))


def test_a_single_episode_per_start_needs_a_critic():
    assert ControlConfig(group_size=1, advantage_estimator="gae").group_size == 1
    assert ControlConfig(scale_rewards=False).advantage_normalization == "none"


def test_two_policies_are_compared_on_the_same_starts():
    ours = evaluate(MlpPolicy(Signals().spec, seed=1), Signals(), [1, 2, 3])
    theirs = evaluate(MlpPolicy(Signals().spec, seed=2), Signals(), [1, 2, 3], deterministic=False)
    mean, _ = paired_difference(ours, theirs)
    assert mean == pytest.approx(ours.mean - theirs.mean)
    assert paired_difference(ours, ours) == (0.0, None)
    with pytest.raises(ConfigurationError, match="the two evaluations have other seeds"):
        paired_difference(ours, evaluate(MlpPolicy(Signals().spec), Signals(), [4]))
    with pytest.raises(ConfigurationError, match="at least one seed"):
        evaluate(MlpPolicy(Signals().spec), Signals(), [])
