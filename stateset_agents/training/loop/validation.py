"""The policy on held-out scenarios, during a training."""

from __future__ import annotations

from dataclasses import replace

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import RewardFunction
from stateset_agents.evaluation.evaluator import Divide, Evaluation, evaluate, held_out, spread
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.types.scenario import Scenarios
from stateset_agents.types.seeds import derive


class Validation:
    """Evaluates the agent, and says which step was the best so far."""

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward_fn: RewardFunction,
        config: TrainingConfig,
        divide: Divide,
        *,
        deterministic: bool,
    ) -> None:
        """`divide`: who of the processes plays which scenario."""
        self._agent = agent
        self._environment = environment
        self._reward_fn = reward_fn
        self.config = config
        self._divide = divide
        self._deterministic = deterministic

    async def evaluate(
        self, split: str | Scenarios = "validation", *, episodes: int | None = None, temperature: float = 1.0
    ) -> Evaluation:
        """The agent on held-out scenarios of a split (at most `eval_episodes`, or `episodes` of them), or on
        all of a list, with users of its own seed."""
        config = self.config
        name, scenarios = "given", split
        if isinstance(scenarios, str):
            name, every = scenarios, await in_thread(held_out, self._environment, scenarios, episodes)
            scenarios = every if episodes is not None else spread(every, config.eval_episodes)
        return await evaluate(
            self._agent,
            self._environment,
            self._reward_fn,
            scenarios,
            temperature=temperature,
            seed=derive(config.seed, "evaluate", name),
            deterministic=self._deterministic,
            limits=config.rollout_limits(),
            divide=self._divide,
        )

    def judged(self, result: Evaluation, state: RunState) -> RunState:
        """The state with this evaluation of its step; `best.step` is the step where it is the best so far."""
        metrics = result.metrics()
        best = state.best.chosen(self.config.metric_for_best, metrics)
        value = metrics.get(best.metric or "")
        best = best.after(state.step, value, threshold=self.config.early_stopping_threshold)
        return replace(state, evaluated_step=state.step, best=best)
