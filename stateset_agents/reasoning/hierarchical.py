"""Problems that are decomposed, solved part by part and put together, trained on the verdict of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import EnvironmentReward, Reward
from stateset_agents.environments.decomposed import (
    ROLES,
    DecomposedConversation,
    DecomposedProblems,
    Role,
    RolePlayer,
    SolvedPart,
    player_of,
    seen_by,
    share_thread,
    updated,
    with_roles,
)
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import nearest
from stateset_agents.types.trajectory import Trajectory


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


@dataclass(frozen=True, slots=True)
class Decomposer:
    """Whoever decomposes, by itself."""

    hierarchical: HierarchicalGRPO

    @awaitable_or_blocking
    async def generate(self, complex_problem: str | Scenario) -> list[str]:
        """The parts that are asked for; they are solved on the way, since one may follow from another."""
        talk = await self.hierarchical.play(complex_problem)
        return [part.problem for part in talk.parts]


@dataclass(frozen=True, slots=True)
class Synthesizer:
    """Whoever puts together, by itself."""

    hierarchical: HierarchicalGRPO

    @awaitable_or_blocking
    async def combine(
        self, solutions: Sequence[SolvedPart], complex_problem: str | Scenario | None = None
    ) -> str | None:
        """The answer to a problem whose parts are solved; the parts' own texts stand for a problem that is
        not given."""
        replies = iter(solutions)
        talk = await self.hierarchical.play(
            "\n".join(part.problem for part in solutions) if complex_problem is None else complex_problem,
            decomposer=lambda problem: [part.problem for part in solutions],
            solver=lambda problem: next(replies).reply,
        )
        return talk.final_answer


class HierarchicalGRPO:
    """Trains three roles, `decomposer`, `solver` and `synthesizer`, of one agent or of several.

    >>> environment = DecomposedProblems(ReasoningGymProblems("leg_counting"))
    >>> async with HierarchicalGRPO(agent, environment, config) as hierarchical:
    ...     await hierarchical.train()
    ...     print((await hierarchical.decompose_problem("how many legs have 3 cats and 2 ants?")).answer)

    The roles of an agent are turns of one conversation, each trained on the tokens that it was sampled from,
    so `train` runs `MultiTurnGRPOTrainer`: every role's tokens have the advantage of the final answer's
    reward. What another agent or a function says in it trains nothing. Where no event loop runs, each method
    blocks and returns its result, so that `hierarchical.decompose_problem(problem)` is a whole script.
    """

    def __init__(
        self,
        base_model: MultiTurnAgent | AgentConfig | str,
        environment: Environment | None = None,
        config: TrainingConfig | None = None,
        *,
        decomposer: RolePlayer | None = None,
        solver: RolePlayer | None = None,
        synthesizer: RolePlayer | None = None,
        reward: Reward | None = None,
    ) -> None:
        """
        Args:
            base_model: An agent, its settings, or the name of a model, trained in its place. It plays every
                role that nobody else is named for.
            environment: Any; one that is not in parts is taken as `DecomposedProblems(environment)`.
            config: Of each training.
            decomposer: Who plays the role, as in `DecomposedProblems`; where absent, whoever the
                environment names. `solver` and `synthesizer` likewise.
            reward: The environment's verdict where absent.

        Raises ConfigurationError where no role is left for `base_model`.
        """
        if isinstance(base_model, str):
            base_model = AgentConfig(model_name=base_model, allow_hidden_tools=True)
        self.agent = base_model if isinstance(base_model, MultiTurnAgent) else MultiTurnAgent(base_model)
        in_parts = environment
        if not isinstance(in_parts, DecomposedProblems):
            in_parts = DecomposedProblems(environment)
        players = {"decomposer": decomposer, "solver": solver, "synthesizer": synthesizer}
        self.roles = updated(in_parts.roles, players)
        self.environment = with_roles(in_parts, seen_by(self.agent, ROLES, self.roles, self.agent))
        self.config = config or TrainingConfig()
        self.decomposer, self.synthesizer = Decomposer(self), Synthesizer(self)
        self._reward = EnvironmentReward() if reward is None else reward
        self.agents = {role: player_of(role, self.roles, self.agent) for role in ROLES}
        """Role -> the agent that plays it; None for a function."""
        if self.agent not in self.agents.values():
            raise ConfigurationError("base_model plays no role: leave out decomposer, solver or synthesizer")

    async def __aenter__(self) -> HierarchicalGRPO:
        await self._initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self._agents():
            await agent.close()

    @awaitable_or_blocking
    async def train(self, *roles: Role) -> dict[Role, Path]:
        """Train these roles on the environment's problems, all where none is named; role -> run folder.

        The agents train one after another. Each is updated on what it says in these roles alone, while all
        others play with the weights that they have. Whoever goes on in the decomposer's thread as the
        synthesizer trains in both roles.
        """
        for role in roles:
            if role not in ROLES:
                raise ConfigurationError(f"there is no role {role!r:.40}{nearest(role, ROLES)}")
        trained_roles = set(roles or ROLES)
        if share_thread(self.roles) and trained_roles & {"decomposer", "synthesizer"}:
            trained_roles |= {"decomposer", "synthesizer"}
        await self._initialize()
        folders: dict[Role, Path] = {}
        for agent in self._agents():
            own = [role for role in ROLES if role in trained_roles and self.agents[role] is agent]
            if not own:
                continue
            environment = with_roles(self.environment, seen_by(agent, own, self.roles, self.agent))
            trainer = MultiTurnGRPOTrainer(agent, environment, self._reward, self.config)
            try:
                await trainer.train()
                folders |= dict.fromkeys(own, trainer.run.path)
            finally:
                await trainer.stop()
        return folders

    @awaitable_or_blocking
    async def decompose_problem(
        self, complex_problem: str | Scenario, *, temperature: float = 0.0, seed: int = 0
    ) -> Decomposition:
        """Have a problem decomposed, its parts solved and put together; a text is a problem of one's own.

        `temperature` is of `base_model`; other agents have their own. Raises ConfigurationError for what the
        environment takes for no problem.
        """
        scenario = self._scenario(complex_problem)
        await self._initialize()
        local = self.environment.local
        engine = ComputationalEngine(
            self.agent, self.environment, self._reward, num_generations=1, deterministic=local
        )
        [group] = await engine.rollout(
            [scenario],
            seed=derive(seed, "decompose", scenario.opening),
            step=0,
            temperature=temperature,
        )
        [trajectory] = group.trajectories
        return Decomposition(
            parts=tuple(SolvedPart(**part) for part in trajectory.metadata.get("parts", ())),
            answer=trajectory.metadata.get("answer"),
            tokens=tokens_by_role(trajectory),
            trajectory=trajectory,
        )

    @awaitable_or_blocking
    async def solve_with_grpo(self, subproblem: str) -> SolvedPart:
        """One part as the solver solves it, whom `train` trains by GRPO on the verdict of the whole."""
        talk = await self.play(
            subproblem, decomposer=lambda problem: [subproblem], synthesizer=lambda solutions: ""
        )
        return talk.parts[0]

    async def play(self, complex_problem: str | Scenario, **players: RolePlayer) -> DecomposedConversation:
        """A conversation on a problem, played to its end; agents sample as they answer people, and `players`
        stand in for the roles of these names."""
        await self._initialize()
        roles = seen_by(None, (), updated(self.roles, players), self.agent)
        environment = with_roles(self.environment, roles)
        talk = await environment.conversation(self._scenario(complex_problem), self.config.seed)
        try:
            return await talk.play()
        finally:
            await talk.close()

    def _scenario(self, problem: str | Scenario) -> Scenario:
        return problem if isinstance(problem, Scenario) else self.environment.scenario_of(problem)

    def _agents(self) -> list[MultiTurnAgent]:
        """Every agent once, in the order of the roles."""
        return list(dict.fromkeys(agent for agent in self.agents.values() if agent is not None))

    async def _initialize(self) -> None:
        for agent in self._agents():
            await agent.initialize()


def tokens_by_role(trajectory: Trajectory) -> dict[str, int]:
    """Tokens that each role sampled; none of a conversation that failed."""
    tokens = Counter(trajectory.metadata.get("tokens_elsewhere", {}))
    for role, turn in zip(trajectory.metadata.get("roles", ()), trajectory.turns, strict=False):
        tokens[role] += len(turn.completion.token_ids)
    return dict(tokens)
