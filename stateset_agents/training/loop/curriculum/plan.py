"""The curriculum: it plans each step before the step begins, and follows what steps have shown.

Sources of rollouts ask `Curriculum.plan`; the trainer asks `Curriculum.after`. A plan is a function of the
settings, the scenarios, the frontier and the curriculum's state, which are all in the checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from stateset_agents.algorithms.group_sizes import adaptive_group_size, group_sizes
from stateset_agents.core.reward import RewardFunction
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.orders import (
    REPLAYED,
    Order,
    ReplayOrder,
    ScenarioOrder,
    SuccessOrder,
    is_replayed,
    num_replayed,
    shuffled,
    stratified,
)
from stateset_agents.training.loop.curriculum.state import CurriculumState
from stateset_agents.training.settings.curriculum import DifficultyBounds, Stage, level_of
from stateset_agents.types.comparison import nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import nearest
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

# The parts of a reward: whether it has them, and a group's rewards put together by other weights.


def check_parts(reward: RewardFunction, config: TrainingConfig) -> None:
    """Raises ConfigurationError for weights of parts that the reward does not have, as far as it says so, and
    where its parts are to be normalised and it has none."""
    parts, named = reward.part_weights, config.all_weights()
    if config.multi_objective_aggregation == "normalize_then_sum":
        for weights in [*named, *([] if config.reward_weights else [parts])]:
            if len(weights) < 2:
                raise ConfigurationError(
                    "multi_objective_aggregation normalize_then_sum needs a reward of several parts, and "
                    f"{reward.name} has {', '.join(weights) or 'none that it names'}: use a composite "
                    "reward, or name parts of its breakdown in reward_weights"
                )
    for name in dict.fromkeys(name for weights in named for name in weights) if parts else ():
        if name not in parts and name.split("/")[0] not in parts:
            raise ConfigurationError(
                f"reward {reward.name} has no part {name!r}{nearest(name, parts)}: it has {', '.join(parts)}"
            )


def weighted_score(breakdown: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the parts; where some do not apply, the others share their weight.

    None where no part with a weight applies.

    >>> weighted_score({"format": 1.0, "answer": 0.5}, {"format": 0.5, "answer": 1.0})
    1.0
    >>> weighted_score({"answer": 0.5}, {"format": 0.5, "answer": 1.0})
    0.75
    """
    present = {name: weight for name, weight in weights.items() if name in breakdown}
    applicable = math.fsum(present.values())
    if not applicable:
        return None
    score = math.fsum(weight * breakdown[name] for name, weight in present.items())
    return score * (math.fsum(weights.values()) / applicable)


def weighted(group: TrajectoryGroup, weights: Mapping[str, float]) -> TrajectoryGroup:
    """The group with rewards made of its members' breakdowns, which stay as they are.

    Without weights it is the same group. An unscored member stays unscored; turn rewards, which no breakdown
    has, are gone.
    """
    if not weights:
        return group
    branches = tuple(
        replace(branch, trajectory=_weighted(branch.trajectory, weights)) for branch in group.branches
    )
    members = tuple(_weighted(member, weights) for member in group.trajectories)
    return replace(group, trajectories=members, branches=branches, reward_weights=dict(weights))


def _weighted(trajectory: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return replace(trajectory, reward=weighted_score(trajectory.breakdown, weights), turn_rewards=())


_log = get_logger(__name__)

DIFFICULTY = "difficulty"
"""The key of a scenario's context."""
DOMAIN = "domain"
"""The key that says which domain a scenario is of, where there are several."""
FAMILY = "family"
"""The strata that are no key of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one step's groups."""

    order: Order
    sizes: Callable[[Sequence[Scenario]], list[int] | None]
    """Members of the groups of these scenarios; None where all have `num_generations`."""
    weights: Mapping[str, float]
    """Weights of the parts of the reward; empty where the score is the reward function's own."""
    metrics: Callable[[Sequence[TrajectoryGroup]], dict[str, float]]
    """Figures of the step that played these groups."""


class Curriculum:
    """Plans each step from the settings and from what the steps before have shown."""

    def __init__(
        self, scenarios: Sequence[Scenario], config: TrainingConfig, part_weights: Mapping[str, float]
    ) -> None:
        """`part_weights`: the reward's own (`RewardFunction.part_weights`).

        Raises ConfigurationError where no scenario has what the settings ask for.
        """
        self.config = config
        self._scenarios = scenarios
        self._part_weights = part_weights
        self._warned: set[str] = set()
        self._orders: dict[DifficultyBounds | None, Order] = {}
        self._pools: dict[DifficultyBounds | None, list[Scenario]] = {}
        self._replayed = [scenario for scenario in scenarios if config.replay_share and is_replayed(scenario)]
        """Scenarios of earlier domains; none where none of them is set apart."""
        self._check_scenarios()
        for stage in (None, *config.stages):
            self._pool(stage)
        self.order = self._order(None)
        """Order of the scenarios outside of all stages, where it does not follow measured success."""

    # ------------------------------------------------------------------------------ plans

    def plan(self, frontier: int, state: CurriculumState) -> StepPlan:
        """The plan of the step whose first episode is `frontier`."""
        config = self.config
        stage = config.stages[state.stage] if config.stages else None
        order = self._order(stage)
        if config.scenario_order == "success":
            order = self._success_order(stage, frontier, state)
        return StepPlan(
            order=order,
            sizes=lambda scenarios: self._sizes(scenarios, state),
            weights=self._weights(stage),
            metrics=lambda groups: self._metrics(groups, state),
        )

    def after(
        self,
        state: CurriculumState,
        step: int,
        groups: Sequence[TrajectoryGroup],
        metrics: Mapping[str, float],
    ) -> CurriculumState:
        """The state after this step, which played these groups and has these metrics."""
        config = self.config
        if config.uses_success:
            successes = state.successes.after(groups, self._stratum, config.success_memory)
            state = replace(state, successes=successes)
        if not config.stages:
            return state
        state = replace(state, streak=self._streak(state, metrics))
        while self._has_ended(state, step):
            state = replace(state, stage=state.stage + 1, streak=0)
        return state

    def put_together(self, groups: Sequence[TrajectoryGroup], plan: StepPlan) -> list[TrajectoryGroup]:
        """The groups with their rewards as the plan weighs them.

        Raises ConfigurationError where no scored conversation has any of the parts, and where measured
        success is asked for and none has a verdict.
        """
        played = [m for group in groups for m in group.trajectories if m.status is not Status.FAILED]
        if self.config.uses_success and played and all(member.success is None for member in played):
            config = self.config
            setting = "track_success"
            if "success" in (config.scenario_order, config.group_sizes):
                setting = "scenario_order" if config.scenario_order == "success" else "group_sizes"
                setting += " success"
            raise ConfigurationError(
                f"{setting} needs an environment that says whether a task was done, and this one does not: "
                f"give it a `success`, or set {setting.split()[0]} to another value"
            )
        if not plan.weights:
            return list(groups)
        self._check_parts(groups, plan.weights)
        return [weighted(group, plan.weights) for group in groups]

    # ------------------------------------------------------------------------------ scenarios

    def _bounds(self, stage: Stage | None) -> DifficultyBounds | None:
        difficulty = self._difficulty(stage)
        return None if difficulty is None else DifficultyBounds.of(difficulty)

    def _difficulty(self, stage: Stage | None) -> object:
        return self.config.difficulty if stage is None or stage.difficulty is None else stage.difficulty

    def _pool(self, stage: Stage | None) -> list[Scenario]:
        bounds = self._bounds(stage)
        if bounds not in self._pools:
            pool = [
                scenario
                for scenario in self._scenarios
                if (bounds is None or bounds.has(scenario.context.get(DIFFICULTY)))
                and not (self._replayed and is_replayed(scenario))
            ]
            if not pool:
                difficulties = sorted({str(scenario.context.get(DIFFICULTY)) for scenario in self._scenarios})
                raise ConfigurationError(
                    f"no train scenario has difficulty {self._difficulty(stage)} in its context: they have "
                    f"{', '.join(difficulties[:8])}"
                )
            self._pools[bounds] = pool
        return self._pools[bounds]

    def _order(self, stage: Stage | None) -> Order:
        bounds, config = self._bounds(stage), self.config
        if bounds not in self._orders:
            arrange = stratified(self._stratum) if config.scenario_order == "stratified" else shuffled
            order: Order = ScenarioOrder(self._pool(stage), config.seed, arrange)
            if self._replayed:
                replayed = ScenarioOrder(self._replayed, derive(config.seed, REPLAYED), stratified(_domain))
                order = ReplayOrder(order, replayed, config.replay_share)
            self._orders[bounds] = order
        return self._orders[bounds]

    def _success_order(self, stage: Stage | None, frontier: int, state: CurriculumState) -> Order:
        """The order of the step whose first episode is `frontier`."""
        seed, share = self.config.seed, self.config.replay_share

        def by_success(pool: Sequence[Scenario], seed: int, frontier: int) -> Order:
            rates = [self._rate(scenario, state) for scenario in pool]
            return SuccessOrder(pool, rates, seed=seed, frontier=frontier)

        if not self._replayed:
            return by_success(self._pool(stage), seed, frontier)
        before = num_replayed(frontier, share)
        return ReplayOrder(
            by_success(self._pool(stage), seed, frontier - before),
            by_success(self._replayed, derive(seed, REPLAYED), before),
            share,
        )

    def _stratum(self, scenario: Scenario) -> str:
        values = [
            scenario.family if key == FAMILY else nfc(str(scenario.context.get(key)))
            for key in self.config.strata_keys
        ]
        return values[0] if len(values) == 1 else json.dumps(values)

    def _rate(self, scenario: Scenario, state: CurriculumState) -> float:
        return state.successes.rate(scenario.id, self._stratum(scenario))

    def _sizes(self, scenarios: Sequence[Scenario], state: CurriculumState) -> list[int] | None:
        base = self.config.num_generations
        match self.config.group_sizes:
            case "difficulty":
                return [adaptive_group_size(scenario.context.get(DIFFICULTY), base) for scenario in scenarios]
            case "success":
                rates = [self._rate(scenario, state) for scenario in scenarios]
                return group_sizes(rates, base * len(scenarios))
            case _:
                return None

    def _check_scenarios(self) -> None:
        config = self.config
        if config.replay_share and not 0 < len(self._replayed) < len(self._scenarios):
            kind = "every" if self._replayed else "no"
            raise ConfigurationError(
                f"replay_share {config.replay_share:g} mixes scenarios of earlier domains among new ones, "
                f"and {kind} train scenario has {REPLAYED}: true in its context: give both kinds, "
                "or leave it out"
            )
        for key in config.strata_keys:
            if key != FAMILY and not any(key in scenario.context for scenario in self._scenarios):
                raise ConfigurationError(
                    f"no scenario has {key!r} in its context: set strata to {FAMILY}, or a key of theirs"
                )
        strata = {self._stratum(scenario) for scenario in self._scenarios}
        if config.scenario_order == "stratified" and len(strata) < 2:
            raise ConfigurationError(
                "scenario_order stratified has nothing to tell apart: every train scenario has "
                f"{', '.join(config.strata_keys)} {next(iter(strata))!r}; set strata to a key of their "
                "context, or the order to shuffled"
            )
        if config.group_sizes == "difficulty" and not any(map(_has_label, self._scenarios)):
            raise ConfigurationError(
                "group_sizes difficulty reads easy, medium or hard as `difficulty` in a scenario's context, "
                "and no train scenario has it: add it, or set group_sizes to success"
            )

    # ------------------------------------------------------------------------------ rewards

    def _weights(self, stage: Stage | None) -> Mapping[str, float]:
        config = self.config
        weights = config.reward_weights if stage is None or stage.weights is None else stage.weights
        if weights is None and config.multi_objective_aggregation == "normalize_then_sum":
            weights = dict(self._part_weights)
        return weights or {}

    def _check_parts(self, groups: Sequence[TrajectoryGroup], weights: Mapping[str, float]) -> None:
        scored = [member for group in groups for member in group.scored]
        there = dict.fromkeys(name for member in scored for name in member.breakdown)
        missing = [name for name, weight in weights.items() if weight and name not in there]
        has = f"its breakdown has {', '.join(there)}" if there else "it has no breakdown"
        if scored and len(missing) == sum(weight > 0 for weight in weights.values()):
            raise ConfigurationError(
                f"the reward has no part called {' or '.join(missing)}: {has}; name its parts in the weights"
            )
        for name in missing if scored else ():
            if name not in self._part_weights:
                self._warn(name, f"no conversation's reward has the part {name!r}, which has a weight: {has}")

    # ------------------------------------------------------------------------------ stages

    def _streak(self, state: CurriculumState, metrics: Mapping[str, float]) -> int:
        """Steps in a row in which the stage's condition held; one that says nothing of it changes nothing."""
        condition = self.config.stages[state.stage].condition
        if condition is None:
            return 0
        value = condition.read(metrics)
        if value is not None:
            return state.streak + 1 if condition.holds(value) else 0
        if "reward/mean" in metrics:
            parts = [name for name in metrics if name.startswith(("reward/", "success/"))]
            self._warn(
                str(condition),
                f"stage {state.stage + 1} waits for {condition}, but the step has {', '.join(parts)}",
            )
        return state.streak

    def _has_ended(self, state: CurriculumState, step: int) -> bool:
        stages = self.config.stages
        if state.stage == len(stages) - 1:
            return False
        stage = stages[state.stage]
        if (condition := stage.condition) is not None:
            return state.streak >= condition.steps
        last = stage.last_step(self.config.num_steps())
        return last is not None and step >= last

    # ------------------------------------------------------------------------------ what is written

    def _metrics(self, groups: Sequence[TrajectoryGroup], state: CurriculumState) -> dict[str, float]:
        """`state` is that before the step."""
        metrics: dict[str, float] = {}
        if self.config.stages:
            metrics["curriculum/stage"] = float(state.stage + 1)
        if self.config.uses_success and groups:
            rates = [self._rate(group.trajectories[0].scenario, state) for group in groups]
            metrics["curriculum/expected_success"] = fmean(rates)
        replayed = [is_replayed(group.trajectories[0].scenario) for group in groups]
        if self._replayed and groups:
            metrics["replay/share"] = fmean(replayed)
            metrics |= _success_of([group for group, again in zip(groups, replayed, strict=True) if again])
        if self.config.group_sizes != "fixed" and groups:
            sizes = [len(group.trajectories) for group in groups]
            metrics |= {"group/size_min": float(min(sizes)), "group/size_max": float(max(sizes))}
        return metrics

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(message)


def _domain(scenario: Scenario) -> str:
    """The stratum of a replay: the domain that they name, or their family."""
    return str(scenario.context.get(DOMAIN, scenario.family))


def _success_of(replays: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The success of replayed groups; nothing where nobody judged one."""
    verdicts = [
        member.success
        for group in replays
        for member in group.trajectories
        if member.status is not Status.FAILED and member.success is not None
    ]
    return {"replay/success": fmean(verdicts)} if verdicts else {}


def _has_label(scenario: Scenario) -> bool:
    level = level_of(scenario.context.get(DIFFICULTY))
    return level is not None and level[0]
