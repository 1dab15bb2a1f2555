"""One domain after the other, with replayed prompts of the earlier ones, and what was forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Environment, expect_environment
from stateset_agents.core.reward import EnvironmentReward, Reward
from stateset_agents.environments.domains import Domains
from stateset_agents.environments.problems import ProblemFiles
from stateset_agents.evaluation.evaluator import Evaluation, evaluate, held_out
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.prompt_memory import PromptMemory
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import table
from stateset_agents.types.scenario import Scenario, expect_split


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedDomain:
    """Success on every domain so far, before and after the training on one."""

    domain: str
    run: Path
    """Run folder of the training."""
    before: Mapping[str, Evaluation]
    """Domain -> held-out success before the training, of this domain and all earlier ones."""
    after: Mapping[str, Evaluation]

    @property
    def kept(self) -> dict[str, float]:
        """Earlier domain -> its success now, as a share of that before."""
        return {
            name: retention(before, self.after[name])
            for name, before in self.before.items()
            if name != self.domain
        }


class ContinualGRPO:
    """Teaches an agent domain after domain by GRPO, and replays prompts of the earlier ones.

    >>> async with ContinualGRPO(agent, memory_size=10_000, replay_share=0.25) as continual:
    ...     await continual.learn_new_domain(ArithmeticProblems(), "arithmetic", config)
    ...     learned = await continual.learn_new_domain(EquationProblems(), "equations", config)
    ...     print(learned.kept)

    The memory has prompts and no replies, so that a replay is on-policy: the policy of the day answers them
    anew. Of each domain it keeps an equal share, those whose measured success was nearest to one half.
    """

    def __init__(
        self,
        base_model: MultiTurnAgent | AgentConfig | str,
        memory_size: int = 10_000,
        *,
        replay_share: float = 0.25,
        reward: Reward | None = None,
        eval_episodes: int | None = None,
        eval_split: str = "test",
        eval_tries: int = 1,
    ) -> None:
        """
        Args:
            base_model: An agent, its settings, or the name of a model. It is trained in its place.
            memory_size: Most prompts that are remembered, of all domains together.
            replay_share: Share of a training's groups that replay earlier domains, once there are any; 0
                replays nothing.
            reward: Of all domains; the environments' own where absent.
            eval_episodes: Held-out scenarios of each domain that success is measured on; all when absent.
            eval_split: Where these are from.
            eval_tries: Of each, sampled at temperature 1.
        """
        if isinstance(base_model, str):
            base_model = AgentConfig(model_name=base_model)
        self.agent = base_model if isinstance(base_model, MultiTurnAgent) else MultiTurnAgent(base_model)
        if isinstance(replay_share, bool) or not 0 <= replay_share < 1:
            raise ConfigurationError(f"replay_share must be from 0 to less than 1, got {replay_share!r}")
        self.replay_share = replay_share
        self.memory = PromptMemory(capacity=memory_size)
        """Prompts of all domains that were learned; `PromptMemory.load` gives one of another program."""
        self.learned: list[LearnedDomain] = []
        """The trainings in their order; the forgetting matrix is their `after`."""
        self._reward = EnvironmentReward() if reward is None else reward
        self._environments: dict[str, Environment] = {}
        self._eval = (eval_split, eval_episodes, eval_tries)

    async def __aenter__(self) -> ContinualGRPO:
        await self.agent.initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @awaitable_or_blocking
    async def close(self) -> None:
        """Close the agent."""
        await self.agent.close()

    model = property(attrgetter("agent"))

    @awaitable_or_blocking
    async def learn_new_domain(
        self,
        new_data: Environment | Sequence[Mapping[str, Any]] | str | Path,
        name: str | None = None,
        config: TrainingConfig | None = None,
        *,
        resume: str | Path | None = None,
    ) -> LearnedDomain:
        """Train on a domain, replaying the earlier ones, and measure all of them before and after.

        `new_data`: an environment; or problems with their answers, as rows or a file that `ProblemFiles`
        reads, of which some are held out. `name`: "domain 1" and so on where it is left out. `config`: of
        the training; its `replay_share` and `track_success` are set here. `resume`: the folder of a run that
        was stopped, which goes on from its newest checkpoint, bit by bit. The domains before
        it must be those of that run, learned or restored with `add_domain`, and the same memory.

        Raises ConfigurationError for a domain that has been learned.
        """
        name = name or f"domain {len(self._environments) + 1}"
        if name in self._environments:
            raise ConfigurationError(f"{name} has been learned: a domain needs a name of its own")
        environment = await in_thread(_as_environment, new_data, self._eval[0])
        environments = {**self._environments, name: environment}
        replayed = self._replayed()
        config = (config or TrainingConfig()).model_copy(
            update={"track_success": True, "replay_share": self.replay_share if replayed else 0.0}
        )
        config = TrainingConfig(**config.model_dump(exclude_unset=True))
        await self.agent.initialize()
        before = await self._measured(environments)
        domains = Domains(environments, new=name, replayed=replayed)
        run = None if resume is None else RunFolder.open(resume)
        trainer = MultiTurnGRPOTrainer(self.agent, domains, self._reward, config, run=run)
        try:
            if run is not None:
                await trainer.load_checkpoint()
            await trainer.train()
            successes, folder = trainer.successes, trainer.run.path
        finally:
            await trainer.stop()
        memory = self.memory
        for earlier in replayed:
            memory = memory.with_successes(earlier, successes)
        scenarios = await in_thread(environment.scenarios, "train")
        self.memory = memory.with_domain(name, scenarios, successes)
        self._environments = environments
        learned = LearnedDomain(
            domain=name, run=folder, before=before, after=await self._measured(environments)
        )
        self.learned.append(learned)
        return learned

    def add_domain(self, name: str, environment: Environment) -> None:
        """Name a domain that the base model has learned elsewhere: it is measured, and replayed as far as
        `memory` has prompts of it."""
        if name in self._environments:
            raise ConfigurationError(f"{name} is there already: a domain needs a name of its own")
        self._environments[name] = environment

    def forgetting_matrix(self) -> str:
        """Success of every domain (columns) after each training (rows), as a table to print."""
        names = list(self._environments)
        header = ["after", *names]
        rows = [
            [learned.domain, *(_percent(learned.after.get(name)) for name in names)]
            for learned in self.learned
        ]
        return "\n".join(table([header, *rows], indent=""))

    def _replayed(self) -> dict[str, Sequence[Scenario]]:
        if not self.replay_share:
            return {}
        return {
            domain: [prompt.scenario for prompt in prompts]
            for domain, prompts in self.memory.by_domain.items()
            if domain in self._environments
        }

    async def _measured(self, environments: Mapping[str, Environment]) -> dict[str, Evaluation]:
        split, episodes, tries = self._eval
        return {
            name: await evaluate(
                self.agent,
                environment,
                self._reward,
                held_out(environment, split, episodes),
                tries=tries,
            )
            for name, environment in environments.items()
        }


def _as_environment(
    data: Environment | Sequence[Mapping[str, Any]] | str | Path, eval_split: str
) -> Environment:
    if not isinstance(data, str | Path | Sequence):
        expect_environment(data)
        return data
    problems = ProblemFiles(data, system_prompt="")
    problems.hold_out(expect_split(eval_split, "eval_split"))
    return problems


def retention(before: Evaluation, after: Evaluation) -> float:
    """Success after as a share of that before; NaN where there was none, or no verdict."""
    if not before.success or after.success is None:
        return float("nan")
    return after.success / before.success


def _percent(result: Evaluation | None) -> str:
    if result is None or result.success is None or result.interval is None:
        return "-"
    return f"{result.success:.1%}{interval_text(result.interval, '.1%')}"
