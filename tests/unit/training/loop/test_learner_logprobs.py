"""The learner's log-probs before the last pass, as rollouts.jsonl has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import lines
from tiny_models import tiny_model
from tiny_training import make_agent, make_trainer, plain_logprobs, same_bits, snapshot
from torch import Tensor

from stateset_agents.core.reward import reward_function
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.run_log import RecordedRollout, RunLog
from stateset_agents.training.config import TrainingConfig

RECORDED = {"log_learner_logprobs": True, "num_iterations": 2, "max_steps": 2, "beta": 0.0}
CLIPPED = {"loss_type": "dapo", "learning_rate": 0.05, "clip_ratio": 0.1, "clip_ratio_high": 0.1}


Weights = dict[str, Tensor]


async def trained(
    folder: Path, *, passes: list[Weights] | None = None, **settings: Any
) -> tuple[RunLog, Weights]:
    """The log of a training, and what it ends with; `passes` gets the weights before each optimiser step."""
    dtype = settings.pop("dtype", torch.float32)
    trainer = make_trainer(folder, agent=make_agent(dtype=dtype), **{**RECORDED, **settings})
    await trainer.initialize()
    learner: Any = trainer.learner
    step = learner.optimization.step

    def watched(**how: Any) -> Any:
        if passes is not None:
            passes.append({name: value.detach().clone() for name, value in learner.weights().items()})
        return step(**how)

    learner.optimization.step = watched
    await trainer.train()
    end = snapshot(trainer)
    await trainer.close()
    return RunLog(trainer.run), end


def under(weights: Weights, rollout: RecordedRollout, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N] an independent forward of each turn in its own context; `dtype`: of the agent at first."""
    model = tiny_model().to(dtype).float()  # there and back: buffers are rounded, too
    model.load_state_dict(weights)
    with torch.no_grad():
        return plain_logprobs(model.eval(), trajectory_of(rollout))


def recorded(log: RunLog) -> Iterator[tuple[RecordedRollout, Tensor, Tensor]]:
    for rollout in log.rollouts("train"):
        if rollout.learner_logprobs is not None:
            assert rollout.old_logprobs is not None
            yield rollout, torch.tensor(rollout.old_logprobs), torch.tensor(rollout.learner_logprobs)


def sampled(rollout: RecordedRollout) -> Tensor:
    return torch.tensor([one for one, bit in zip(rollout.logprobs, rollout.mask, strict=True) if bit])


@pytest.mark.parametrize(
    "how",
    [
        {"row_layout": "packed", "beta": 0.1},
        pytest.param({"row_layout": "padded", "micro_batch_tokens": 40}, marks=pytest.mark.long),
    ],
)
async def test_they_are_those_of_the_policy_before_the_last_pass(tmp_path: Path, how: dict[str, Any]) -> None:
    passes: list[Weights] = []
    log, _ = await trained(tmp_path, passes=passes, **how)
    found = [*recorded(log)]
    assert len(found) >= 12  # of 16; groups whose members tie train nothing
    moved = 0.0
    for rollout, old, learner in found:
        before_last = passes[2 * rollout.step - 1]  # two passes a step
        assert (under(before_last, rollout) - learner).abs().max() < 1e-5
        assert torch.equal(old, sampled(rollout))  # in fp32 pi_old is the policy that sampled
        moved = max(moved, float((learner - old).abs().max()))
    assert moved > 1e-2


async def test_a_ratio_to_a_recomputed_policy_is_recorded_as_such(tmp_path: Path) -> None:
    passes: list[Weights] = []
    log, _ = await trained(tmp_path, passes=passes, dtype=torch.bfloat16, precision="fp32")
    for rollout, old, learner in recorded(log):
        first, last = passes[2 * rollout.step - 2], passes[2 * rollout.step - 1]
        assert (under(first, rollout, torch.bfloat16) - old).abs().max() < 1e-5
        assert (under(last, rollout, torch.bfloat16) - learner).abs().max() < 1e-5
        assert not torch.equal(old, sampled(rollout))  # bf16 rounds


async def test_with_one_pass_both_are_of_one_policy(tmp_path: Path) -> None:
    log, _ = await trained(tmp_path, num_iterations=1, dtype=torch.bfloat16)
    found = [*recorded(log)]
    assert found
    assert all(torch.equal(old, learner) for _, old, learner in found)


async def test_they_change_nothing_else_and_without_the_setting_there_are_none(tmp_path: Path) -> None:
    on, weights = await trained(tmp_path / "on")
    off, same = await trained(tmp_path / "off", log_learner_logprobs=False)
    assert same_bits(weights, same)
    one, other = (lines(log.folder.rollouts) for log in (on, off))
    assert not any("logprobs" in name and name != "logprobs" for line in other for name in line)
    for line in one:
        for name in ("old_logprobs", "learner_logprobs"):
            line.pop(name, None)
    assert one == other


@reward_function(name="one_group_ties", local=True)
async def one_group_ties(trajectory: Any) -> float:
    return float(trajectory.member % 2) if trajectory.scenario.opening in ("hi", "hello") else 1.0


async def test_a_conversation_that_was_not_forwarded_has_none(tmp_path: Path) -> None:
    log, _ = await trained(tmp_path, reward=one_group_ties)
    for rollout in log.rollouts("train"):
        assert rollout.advantages is not None
        assert (rollout.learner_logprobs is None) is (not any(rollout.advantages))


@pytest.mark.long
async def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    whole, _ = await trained(tmp_path / "whole", max_steps=3)
    first = make_trainer(tmp_path / "cut", **{**RECORDED, "max_steps": 3})
    await first.initialize()
    await first.step()
    await first.save_checkpoint()
    await first.step()  # in the log, and in no checkpoint
    await first.close()
    with first.run.rollouts.open("a") as file:
        file.write('{"step":')  # what a kill leaves of a line
    again = make_trainer(tmp_path / "cut", run=first.run, **{**RECORDED, "max_steps": 3})
    await again.load_checkpoint()
    await again.train()
    await again.close()
    assert lines(first.run.rollouts) == lines(whole.folder.rollouts)


def test_without_the_file_the_setting_says_so() -> None:
    with pytest.raises(ValueError, match="log_rollouts"):
        TrainingConfig(log_learner_logprobs=True, log_rollouts=False)


async def test_the_share_of_clipped_tokens_is_the_metric_s(tmp_path: Path) -> None:
    log, _ = await trained(
        tmp_path, loss_type="dapo", learning_rate=0.05, clip_ratio=0.1, clip_ratio_high=0.1
    )
    shares: dict[int, list[float]] = {}
    for rollout, old, learner in recorded(log):
        advantages = torch.tensor(rollout.advantages)
        ratios = (learner - old).exp()
        clipped = torch.where(advantages > 0, ratios > 1.1, ratios < 0.9)
        shares.setdefault(rollout.step, []).extend(clipped.double().tolist())
    metrics = {line.step: line.values for line in log.metrics()}
    for step, clipped_tokens in shares.items():
        wanted = metrics[step]["policy/clip_fraction_low"] + metrics[step]["policy/clip_fraction_high"]
        assert sum(clipped_tokens) / len(clipped_tokens) == pytest.approx(wanted, abs=1e-6)
    assert any(map(sum, shares.values()))
    assert json.loads(log.folder.rollouts.read_text().splitlines()[1])["old_logprobs"]
