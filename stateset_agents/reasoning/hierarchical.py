"""One policy that decomposes, solves and puts together, trained on the verdict of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward, Reward
from stateset_agents.environments.problems.decomposed import DecomposedArithmetic
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class SolvedPart:
    """A part that was asked for, and what its solver said."""

    problem: str
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """A problem's parts, their solutions and the answer."""

    parts: tuple[SolvedPart, ...]
    """Parts in the order in which they were solved."""
    answer: str | None
    """The final answer; None where nobody put the parts together."""
    tokens: Mapping[str, int]
    """Role -> tokens that it sampled."""
    trajectory: Trajectory


class HierarchicalGRPO:
    """Trains one policy in three roles: `decomposer`, `solver`, `synthesizer`.

    >>> async with HierarchicalGRPO(agent, DecomposedArithmetic(), config) as hierarchical:
    ...     await hierarchical.train()
    ...     print((await hierarchical.decompose_problem("2 + 3 * 4 - 1")).parts)

    The roles are turns of one conversation, each trained on the tokens that it was sampled from, so `train`
    runs `MultiTurnGRPOTrainer`: every role's tokens have the advantage of the final answer's reward.
    """

    def __init__(
        self,
        base_model: MultiTurnAgent | AgentConfig | str,
        environment: DecomposedArithmetic | None = None,
        config: TrainingConfig | None = None,
        *,
        reward: Reward | None = None,
    ) -> None:
        """`base_model`: an agent, its settings, or the name of a model, trained in its place; `reward`: the
        environment's verdict where absent."""
        if isinstance(base_model, str):
            base_model = AgentConfig(model_name=base_model, allow_hidden_tools=True)
        self.agent = base_model if isinstance(base_model, MultiTurnAgent) else MultiTurnAgent(base_model)
        self.environment = DecomposedArithmetic() if environment is None else environment
        self.config = config or TrainingConfig()
        self._reward = EnvironmentReward() if reward is None else reward

    async def __aenter__(self) -> HierarchicalGRPO:
        await self.agent.initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.agent.close()

    async def train(self) -> Path:
        """Train all roles on the environment's problems; the run folder."""
        trainer = MultiTurnGRPOTrainer(self.agent, self.environment, self._reward, self.config)
        try:
            await trainer.train()
            return trainer.run.path
        finally:
            await trainer.stop()

    async def decompose_problem(
        self, problem: str, *, temperature: float = 0.0, seed: int = 0
    ) -> Decomposition:
        """Have the agent decompose an expression, solve its parts and put them together.

        Raises ConfigurationError for what is no expression of whole numbers with + - and *.
        """
        scenario: Scenario = self.environment.scenario_of(problem)
        await self.agent.initialize()
        engine = ComputationalEngine(self.agent, self.environment, self._reward, num_generations=1)
        [group] = await engine.rollout(
            [scenario], seed=derive(seed, "decompose", problem), step=0, temperature=temperature
        )
        [trajectory] = group.trajectories
        return _read(trajectory, self.environment)


def tokens_by_role(trajectory: Trajectory) -> dict[str, int]:
    """Tokens that each role sampled; none of a conversation that failed."""
    tokens: Counter[str] = Counter()
    for role, turn in zip(trajectory.metadata.get("roles", ()), trajectory.turns, strict=False):
        tokens[role] += len(turn.completion.token_ids)
    return dict(tokens)


def _read(trajectory: Trajectory, environment: DecomposedArithmetic) -> Decomposition:
    parts = []
    problem = ""
    for role, turn in zip(trajectory.metadata.get("roles", ()), trajectory.turns, strict=False):
        if role == "solver":
            parts.append(SolvedPart(problem, turn.completion.message.content))
        if turn.feedback and turn.feedback[-1].role == "user":
            problem = turn.feedback[-1].content.removeprefix("compute ")
    roles = trajectory.metadata.get("roles", ())
    final = trajectory.turns[-1].completion.message if roles and roles[-1] == "synthesizer" else None
    return Decomposition(
        parts=tuple(parts),
        answer=None if final is None else environment.answer(final),
        tokens=tokens_by_role(trajectory),
        trajectory=trajectory,
    )
