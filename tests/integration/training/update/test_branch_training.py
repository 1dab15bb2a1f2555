"""Training on branches, through the whole trainer: it learns, repeats, resumes, and logs what it played."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tiny_training import make_agent, make_environment, make_trainer, reward_curve, same_bits, snapshot

from stateset_agents.core.reward import reward_function
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory

THREE_TURNS = [
    {"id": name, "opening": name, "context": {"script": ["go on", "and then?"]}} for name in ("hi", "hello")
]


@reward_function(local=True)
async def starts_in_kind(trajectory: Trajectory) -> float:
    """Share of turns that start with an even token; known only when the conversation is over."""
    return fmean(turn.completion.token_ids[0] % 2 == 0 for turn in trajectory.turns)


def trainer_of(folder: Path, **settings: Any) -> Any:
    return make_trainer(
        folder,
        agent=make_agent(max_new_tokens=2),
        environment=make_environment(scenarios=THREE_TURNS, max_turns=3),
        **{
            "reward": starts_in_kind,
            "advantage_estimator": "branch",
            "beta": 0.0,
            "lr_scheduler_type": "constant",
            **settings,
        },
    )


@pytest.mark.long
async def test_it_learns_what_each_of_three_turns_is_for(tmp_path: Path) -> None:
    """tests/integration/training/update/test_credit_learning.py has five seeds of a shorter task."""
    settings = {"max_steps": 18, "num_iterations": 2, "learning_rate": 8e-3, "log_rollouts": False}
    trainer = trainer_of(tmp_path, **settings)
    curve = reward_curve(trainer)
    async with trainer:
        await trainer.train()
    assert fmean(curve[:3]) < 0.7
    assert fmean(curve[-5:]) > 0.9


async def test_the_run_says_what_it_played_and_counts_only_members_as_conversations(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1, num_branches=3)
    async with trainer:
        metrics = await trainer.train() and next(RunLog(trainer.run).metrics()).values
    log = RunLog(trainer.run)
    members = list(log.rollouts("train"))
    branches = [one for one in log.rollouts("train", branches=True) if one.branch_of]
    # 2 groups of 4 members, 3 branches from after each of the first two of three turns
    assert (len(members), len(branches)) == (8, 48)
    assert Counter(one.branch_of for one in branches) == {(m, t): 6 for m in range(4) for t in (1, 2)}
    assert all(one.advantages for one in members)
    assert not any(one.advantages for one in branches)
    assert (metrics["rollout/conversations"], metrics["rollout/branches"]) == (8.0, 48.0)
    assert metrics["reward/mean"] == pytest.approx(fmean(one.reward or 0.0 for one in members))
    own = sum(turn.sampled_tokens for one in branches for turn in one.turns[(one.branch_of or (0, 0))[1] :])
    assert metrics["tokens/branches"] == own
    assert metrics["tokens/agent"] == sum(sum(one.mask) for one in members)


@pytest.mark.long
async def test_a_resumed_run_ends_bit_equal_to_one_that_was_never_stopped(tmp_path: Path) -> None:
    async with trainer_of(tmp_path / "whole") as whole:
        await whole.train()
        expected = snapshot(whole)
    async with trainer_of(tmp_path / "half") as half:
        await half.step()
        await half.save_checkpoint()
    async with trainer_of(tmp_path / "half", run=half.run) as rest:
        await rest.load_checkpoint()
        await rest.train()
        assert same_bits(snapshot(rest), expected)


async def test_a_reward_that_compares_members_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    @reward_function(scope="group")
    def best(trajectories: tuple[Trajectory, ...]) -> list[float]:
        return [0.0 for _ in trajectories]

    trainer = trainer_of(tmp_path, reward=best)
    with pytest.raises(ConfigurationError, match="reward best compares the members of a group"):
        await trainer.initialize()
    await trainer.close()
    assert not (tmp_path / "runs").exists()
