"""The plain path that `make demo`'s training is timed against does the trainer's own work."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from repository_paths import ROOT

from benchmarks.plain_hf import PlainTrainer
from stateset_agents.training.experiment import Experiment, load_experiment
from stateset_agents.types.trajectory import Trajectory

DEMO = ROOT / "examples" / "demo.yaml"
SMALL = {"training.num_generations": 4, "training.per_device_train_batch_size": 1}


def with_logprobs(model: Any, trajectory: Trajectory) -> Trajectory:
    """The plain path keeps none; the trainer's ratio needs those of the policy that sampled."""
    ids = torch.tensor([trajectory.token_ids])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    turns = []
    for turn in trajectory.turns:
        said = turn.completion
        first = len(said.prompt_ids) - 1
        known = tuple(scores[first : first + len(said.token_ids)].tolist())
        turns.append(replace(turn, completion=replace(said, logprobs=known)))
    return replace(trajectory, turns=tuple(turns))


async def test_the_plain_path_has_the_trainer_s_gradient_and_plays_its_conversations(tmp_path: Path) -> None:
    config = load_experiment(DEMO, {"training.output_dir": str(tmp_path), **SMALL})
    async with Experiment(config, measures=False).trainer as trainer:
        own = trainer.learner.policy.model
        plain = PlainTrainer(
            trainer.agent, trainer.environment, trainer.reward_fn, trainer.config, copy.deepcopy(own)
        )
        with torch.no_grad():  # or the KL to the reference has no gradient
            own.model.norm.weight.mul_(1.01)
            plain.model.model.norm.weight.mul_(1.01)

        scenarios = trainer.environment.scenarios("train")
        for scenario in scenarios:
            played = await plain.rollout([scenario])
            if len({one.trajectory.reward for one in played}) > 1:
                break
        assert [one.row for one in played] == [one.trajectory.token_ids for one in played]
        assert [one.mask for one in played] == [one.trajectory.action_mask for one in played]
        assert {len(one.trajectory.turns) > 0 for one in played} == {True}

        torch.autograd.backward(plain.loss(played))
        sampled = [with_logprobs(own, one.trajectory) for one in played]
        losses = await trainer.compute_enhanced_grpo_loss(sampled, beta=plain.config.beta)
        torch.autograd.backward(losses["total_loss"])
        for name, parameter in own.named_parameters():
            theirs = dict(plain.model.named_parameters())[name].grad
            torch.testing.assert_close(theirs, parameter.grad, atol=1e-6, rtol=1e-4)
