"""How the embedded model behaves at the desk: the shipped one, and a short rebuild by the same recipe."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository_paths import ROOT

from scripts.build_embedded import build_embedded
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.replies.thoughts import num_steps, read_reasoned
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.problems import ArithmeticProblems
from stateset_agents.environments.retail_desk.environment import RetailDesk
from stateset_agents.evaluation.evaluator import Evaluation, evaluate
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.experiment import Experiment, load_experiment
from stateset_agents.types.messages import ToolCall
from stateset_agents.types.trajectory import Trajectory


async def measured(model: str, *, temperature: float, number: int = 120) -> Evaluation:
    """`model` on the first held-out scenarios."""
    desk = RetailDesk()
    async with MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=48)) as agent:
        scenarios = desk.scenarios("test")[:number]
        return await evaluate(agent, desk, EnvironmentReward(), scenarios, temperature=temperature)


def trajectories(evaluation: Evaluation) -> Iterator[Trajectory]:
    for group in evaluation.groups:
        yield from group.trajectories


def calls(evaluation: Evaluation) -> list[tuple[Trajectory, ToolCall]]:
    return [
        (trajectory, call)
        for trajectory in trajectories(evaluation)
        for reply in trajectory.replies
        for call in reply.tool_calls
    ]


def share_well_formed(evaluation: Evaluation) -> float:
    num_calls = calls(evaluation)
    return sum(call.error is None for _, call in num_calls) / len(num_calls)


def share_copied(evaluation: Evaluation) -> float:
    """Among the order ids written by an agent that could read the right one in the opening."""
    answers = [
        (trajectory.scenario.context["order_id"], call.arguments["order_id"])
        for trajectory, call in calls(evaluation)
        if "order_id" in call.arguments and re.search(r"[A-Z]\d\d", trajectory.scenario.opening)
    ]
    return sum(right == written for right, written in answers) / len(answers)


async def test_the_shipped_model_has_its_skills() -> None:
    sampled = await measured("embedded:desk", temperature=1.0, number=60)
    assert 0.05 <= sampled.success <= 0.40
    assert share_well_formed(sampled) > 0.95
    assert share_copied(sampled) > 0.95


@pytest.mark.long
async def test_the_shipped_model_has_its_skills_in_each_family_and_its_bad_habits() -> None:
    sampled = await measured("embedded:desk", temperature=1.0, number=300)
    assert 0.10 <= sampled.success <= 0.30
    assert all(family.success >= 0.02 for family in sampled.families.values())
    assert share_well_formed(sampled) > 0.97
    assert share_copied(sampled) > 0.97
    greedy = await measured("embedded:desk", temperature=0.0, number=300)
    assert greedy.success <= 0.5


@pytest.mark.long
async def test_a_short_rebuild_by_the_same_recipe_behaves_alike(tmp_path: Path) -> None:
    folder = tmp_path / "desk"
    built = await asyncio.to_thread(build_embedded, folder, seed=1, steps=450, dialogues=2400)
    assert built.losses[0] > 4
    assert 0.05 < sum(built.losses[-20:]) / 20 < 0.25
    sampled = await measured(str(folder), temperature=1.0)
    assert share_well_formed(sampled) > 0.9
    assert share_copied(sampled) > 0.75
    assert 0.05 <= sampled.success <= 0.35


@pytest.mark.long
async def test_the_shipped_reasoner_mostly_guesses_and_once_in_a_while_thinks() -> None:
    problems = ArithmeticProblems(system_prompt="")
    scenarios = problems.scenarios("test")
    async with MultiTurnAgent(AgentConfig(model_name="embedded:reasoner", max_new_tokens=64)) as agent:
        sampled = await evaluate(agent, problems, EnvironmentReward(), scenarios, temperature=1.0)
        greedy = await evaluate(agent, problems, EnvironmentReward(), scenarios, temperature=0.0)
    assert 0.10 <= sampled.success <= 0.40
    assert greedy.success <= 0.5
    careful = [
        trajectory.success
        for trajectory in trajectories(sampled)
        if (reasoned := read_reasoned(trajectory.replies[-1])) is not None
        and num_steps(reasoned.thinking) == trajectory.scenario.context["difficulty"]
    ]
    assert 30 < len(careful) < 120
    assert sum(careful) / len(careful) > 0.5  # guesses are right once in eight times


@pytest.mark.long
async def test_reinforced_it_thinks_a_step_for_each_operation(tmp_path: Path) -> None:
    changes = {"training.output_dir": str(tmp_path), "training.progress": False, "training.seed": 0}
    async with Experiment(load_experiment(str(ROOT / "examples" / "reason.yaml"), changes)) as experiment:
        await experiment.train()
        after = await experiment.after()
        format_at_end = [line.values["reasoning/format"] for line in RunLog(experiment.run).metrics()][-5:]
    assert after is not None
    assert after["success"] >= 0.9
    assert after["greedy"] >= 0.9
    assert min(format_at_end) >= 0.97
