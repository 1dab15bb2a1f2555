"""HierarchicalGRPO as the document prints it: generate, solve_with_grpo, combine, decompose_problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.reward import FunctionReward
from stateset_agents.environments.decomposed import DecomposedProblems
from stateset_agents.environments.problems import ArithmeticProblems
from stateset_agents.reasoning import HierarchicalGRPO
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory

PROBLEM = "what do 3 cats and 2 ants weigh?"


class Decomposer:
    def generate(self, complex_problem: str) -> list[str]:
        return ["what do 3 cats weigh?", "what do 2 ants weigh?"]


class Synthesizer:
    def combine(self, solutions: list[str]) -> str:
        return " and ".join(solutions)


def scripted(*replies: str) -> MultiTurnAgent:
    """Says these, and the only one again and again."""
    script: Any = [*replies] if len(replies) > 1 else lambda request: replies[0]
    return MultiTurnAgent(AgentConfig(allow_hidden_tools=True), backend=ScriptedBackend(script))


def test_the_printed_body_runs_in_a_plain_script() -> None:
    class Printed(HierarchicalGRPO):
        def printed(self, complex_problem: str) -> Any:
            subproblems = self.decomposer.generate(complex_problem)
            solutions = []
            for subproblem in subproblems:
                solution = self.solve_with_grpo(subproblem)
                solutions.append(solution)
            return self.synthesizer.combine(solutions)

    hierarchical = Printed(scripted("12 kg"), decomposer=Decomposer(), synthesizer=Synthesizer())
    assert hierarchical.printed(PROBLEM) == "12 kg and 12 kg"
    found: Any = hierarchical.decompose_problem(PROBLEM)
    assert found.answer == "12 kg and 12 kg"
    assert found.tokens.keys() == {"solver"}


async def test_in_a_program_with_an_event_loop_each_call_is_awaited_and_says_so() -> None:
    async with HierarchicalGRPO(scripted("12 kg"), decomposer=Decomposer()) as hierarchical:
        assert await hierarchical.decomposer.generate(PROBLEM) == Decomposer().generate(PROBLEM)
        with pytest.raises(ConfigurationError, match=r"generate is async.*write await generate"):
            for _ in hierarchical.decomposer.generate(PROBLEM):
                pass


CALLS = "".join(
    f'<tool_call>{{"name": "solve", "arguments": {{"problem": "{part}"}}}}</tool_call>'
    for part in Decomposer().generate(PROBLEM)
)


async def test_one_policy_plays_all_roles_each_in_rows_of_its_own() -> None:
    agent = scripted(CALLS, "12 kg", "a gram", "12 kg and a gram")
    async with HierarchicalGRPO(agent, decomposer="split", synthesizer="put together") as hierarchical:
        found = await hierarchical.decompose_problem(complex_problem=PROBLEM)
    assert found.answer == "12 kg and a gram"
    assert [(part.problem, part.answer) for part in found.parts] == [
        ("what do 3 cats weigh?", "12 kg"),
        ("what do 2 ants weigh?", "a gram"),
    ]
    assert [row.indices for row in found.trajectory.rows] == [(0,), (1,), (2,), (3,)]
    assert sum(found.tokens.values()) == found.trajectory.num_agent_tokens
    assert found.trajectory.reward is None  # nobody knows the answer to a problem of one's own


async def test_a_base_model_without_a_role_and_an_unknown_role_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="base_model plays no role"):
        HierarchicalGRPO(
            scripted(""), decomposer=Decomposer(), solver=lambda text: "", synthesizer=Synthesizer()
        )
    with pytest.raises(ConfigurationError, match="there is no role 'solvr'"):
        await HierarchicalGRPO(scripted("")).train("solvr")  # type: ignore[arg-type]  # on purpose


# ------------------------------------------------------------------------------------- who is trained

SUMS = DecomposedProblems(
    ArithmeticProblems(system_prompt="", num_train=2, min_operations=2, max_operations=2),
    decomposer=lambda text: [text.removeprefix("compute ")],
)


def only(role: str) -> FunctionReward:
    """Pays conversations of which this role's turns are trained, by what is sampled; all others alike."""

    def chance(trajectory: Trajectory) -> float:
        sampled = sum(sum(turn.completion.token_ids) for turn in trajectory.turns)
        return sampled % 7 if role in trajectory.metadata["roles"] else 0.0

    return FunctionReward(chance)


async def weights(agent: MultiTurnAgent, folder: Path) -> bytes:
    return (await agent.save_pretrained(folder) / "model.safetensors").read_bytes()


async def test_of_two_agents_each_is_updated_on_its_own_roles_rows_alone(tmp_path: Path) -> None:
    config = AgentConfig(model_name="embedded:reasoner", max_new_tokens=8)
    solver, synthesizer = MultiTurnAgent(config), MultiTurnAgent(config)
    training = TrainingConfig(
        max_steps=1,
        per_device_train_batch_size=1,
        num_generations=4,
        learning_rate=1e-3,
        beta=0.0,
        output_dir=str(tmp_path),
        progress=False,
    )
    hierarchical = HierarchicalGRPO(solver, SUMS, training, synthesizer=synthesizer, reward=only("solver"))
    async with hierarchical:
        before = await weights(solver, tmp_path / "before")
        assert await weights(synthesizer, tmp_path / "other") == before
        folders = await hierarchical.train()
        assert folders["solver"] != folders["synthesizer"]
        assert "decomposer" not in folders  # a function
        solved = await weights(solver, tmp_path / "solver")
        assert solved != before
        assert await weights(synthesizer, tmp_path / "same") == before  # its rows had no signal
        hierarchical._reward = only("synthesizer")
        assert list(await hierarchical.train("synthesizer")) == ["synthesizer"]
        assert await weights(solver, tmp_path / "frozen") == solved
        assert await weights(synthesizer, tmp_path / "trained") != before


async def test_one_role_of_a_policy_trains_while_the_others_are_frozen(tmp_path: Path) -> None:
    config = AgentConfig(model_name="embedded:reasoner", max_new_tokens=8)
    training = TrainingConfig(
        max_steps=1,
        per_device_train_batch_size=1,
        num_generations=2,
        output_dir=str(tmp_path),
        log_rollouts=True,
        progress=False,
    )
    agent = MultiTurnAgent(config)
    async with HierarchicalGRPO(agent, SUMS, training, synthesizer="", reward=only("solver")) as hierarchical:
        folders = await hierarchical.train("solver")
    assert '"roles":["solver"]' in (folders["solver"] / "rollouts.jsonl").read_text()
