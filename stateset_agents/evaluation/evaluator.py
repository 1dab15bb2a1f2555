"""Measures an agent on held-out scenarios: success and reward with their intervals, families, k tries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from stateset_agents.algorithms.intervals import mean_interval, pass_at_k, pass_hat_k, share_interval
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.sources.scenario_files import as_scenarios
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.scenario import Scenario, Scenarios, expect_split
from stateset_agents.types.settings import expect, expect_that, is_whole
from stateset_agents.types.trajectory import UNANSWERED, Status, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
    from stateset_agents.evaluation.kept_conversations import KeptConversations

# Measures: each within a scenario first, then over scenarios, as tries of one scenario are alike

USER_MISS, VIOLATIONS = "user_miss", "violations"
"""Keys of a trajectory's metadata; an environment gives them by `Outcome.metadata`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """A mean over scenarios and how sure it is."""

    value: float
    interval: tuple[float, float] | None
    """95 %, over scenarios; None of a mean that is no share where no two scenarios differ."""
    n: int
    """Scenarios (for matched pairs: pairs) behind it."""

    def summary(self) -> dict[str, Any]:
        """The estimate as plain JSON."""
        return {"value": self.value, "interval": self.interval and list(self.interval), "n": self.n}


def tries_of(groups: Sequence[TrajectoryGroup]) -> dict[str, list[Trajectory]]:
    """Scenario id -> its conversations that were played to an end; none failed ones."""
    tries: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.status is not Status.FAILED:
                tries[trajectory.scenario.id].append(trajectory)
    return dict(tries)


def success_of_scenarios(tries: Iterable[Sequence[Trajectory]]) -> list[float]:
    """The share of judged tries that succeeded, of each scenario that has any."""
    verdicts = map(_verdicts, tries)
    return [sum(judged) / len(judged) for judged in verdicts if judged]


def _verdicts(tries: Sequence[Trajectory]) -> list[bool]:
    return [trajectory.success for trajectory in tries if trajectory.success is not None]


def share(shares: Sequence[float]) -> MeanEstimate | None:
    """The mean share over scenarios; None without any scenario."""
    if not shares:
        return None
    return MeanEstimate(value=sum(shares) / len(shares), interval=share_interval(shares), n=len(shares))


def mean_of_scenarios(
    tries: Iterable[Sequence[Trajectory]], value: Callable[[Trajectory], float | None]
) -> MeanEstimate | None:
    """The mean of a number of conversations; those of None don't count, None where all are."""
    numbers = [[number for t in attempts if (number := value(t)) is not None] for attempts in tries]
    means = [sum(of_scenario) / len(of_scenario) for of_scenario in numbers if of_scenario]
    if not means:
        return None
    return MeanEstimate(value=sum(means) / len(means), interval=mean_interval(means), n=len(means))


def passes(
    tries: Iterable[Sequence[Trajectory]], num_tries: int
) -> tuple[Mapping[int, MeanEstimate], Mapping[int, MeanEstimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and `num_tries`; a scenario with fewer judged tries is left out
    of that k."""
    counts = [(sum(verdicts), len(verdicts)) for verdicts in map(_verdicts, tries)]
    sizes = sorted({num_tries, *(2**power for power in range(num_tries.bit_length()))})
    at_least_one: dict[int, MeanEstimate] = {}
    every_one: dict[int, MeanEstimate] = {}
    for k in sizes:
        enough = [(successes, n) for successes, n in counts if n >= k]
        for estimates, estimator in ((at_least_one, pass_at_k), (every_one, pass_hat_k)):
            estimate = share([estimator(successes, n, k) for successes, n in enough])
            if estimate is not None:
                estimates[k] = estimate
    return at_least_one, every_one


def matched_pairs_right(tries: Iterable[Sequence[Trajectory]]) -> MeanEstimate | None:
    """The share of matched pairs of which both scenarios succeed. The scenarios of a pair have the same
    `context["pair"]` and differ in one fact that changes the right answer. Try k of one goes with try k of
    the other.

    None without a pair of which both were played. An agent that always agrees, or always refuses, has half of
    the scenarios right and none of the pairs.
    """
    pairs: dict[str, list[dict[int, bool]]] = defaultdict(list)
    for attempts in tries:
        pair = attempts[0].scenario.context.get("pair")
        verdicts = {attempt.member: attempt.success for attempt in attempts if attempt.success is not None}
        if pair is not None and verdicts:
            pairs[str(pair)].append(verdicts)
    shares = []
    for scenarios in pairs.values():
        members = set.intersection(*map(set, scenarios))
        if len(scenarios) > 1 and members:
            both = [all(verdicts[member] for verdicts in scenarios) for member in members]
            shares.append(sum(both) / len(both))
    return share(shares)


def violation_rates(tries: Iterable[Sequence[Trajectory]]) -> Mapping[str, MeanEstimate]:
    """Rule -> the share of conversations in which it was broken, and under "any" that of at least one rule.

    Read from `metadata["violations"]`; empty where no environment gives that.
    """
    reported = [
        [counts for t in attempts if isinstance(counts := t.metadata.get(VIOLATIONS), Mapping)]
        for attempts in tries
    ]
    reported = [counts_of_tries for counts_of_tries in reported if counts_of_tries]

    def rate(is_broken: Callable[[Mapping[str, Any]], object]) -> MeanEstimate:
        estimate = share([sum(bool(is_broken(c)) for c in counts) / len(counts) for counts in reported])
        assert estimate is not None  # some scenario reports
        return estimate

    rules = sorted(
        {str(rule) for counts_of_tries in reported for counts in counts_of_tries for rule in counts}
    )
    rates = {rule: rate(methodcaller("get", rule)) for rule in rules}
    return {**rates, "any": rate(lambda counts: any(counts.values()))} if reported else {}


def user_misses(tries: Iterable[Sequence[Trajectory]]) -> MeanEstimate | None:
    """Replies of a conversation of which its user could make nothing; None where nobody counts them."""

    def misses(trajectory: Trajectory) -> float | None:
        count = trajectory.metadata.get(USER_MISS)
        return float(count) if isinstance(count, int | float) else None

    return mean_of_scenarios(tries, misses)


PlayPart = Callable[[Sequence[Scenario], Sequence[Scenario]], Awaitable[list[TrajectoryGroup]]]
"""(scenarios, those that stand before them) -> a group of each."""
Divide = Callable[[Sequence[Scenario], PlayPart], Awaitable[list[TrajectoryGroup]]]
"""(scenarios, how a part of them is played) -> the groups of all; by several processes, each its part."""
OnProgress = Callable[[int, int], None]
"""Hears how many scenarios have been played so far, of how many (of several processes, this one's part)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """One family's share."""

    success: float
    interval: tuple[float, float]
    """95 % interval, as in `Evaluation.interval`."""
    n: int
    """Judged conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one pass over held-out scenarios; every scenario counts once, however often tried."""

    success: float | None
    """Share of the judged conversations that succeeded; None where the environment judged none.
    Failed ones (environment or backend errors) are left out."""
    interval: tuple[float, float] | None
    """95 %: Wilson over scenarios, with the design effect of several tries (`share_interval`)."""
    mean_reward: float | None
    """Over the scored conversations; None where none was scored."""
    n: int
    """Conversations that count: the judged ones, or all that were played where none was judged."""
    num_failed: int
    """Conversations that broke and are left out of everything."""
    temperature: float
    families: Mapping[str, FamilyResult]
    groups: Sequence[TrajectoryGroup]
    parts: Mapping[str, FamilyResult] = field(default_factory=dict)
    """Part -> its share: scenarios of several families that are counted together, by their `context["part"]`;
    empty where no scenario names one."""
    floors: Mapping[str, Evaluation] = field(default_factory=dict)
    """Agent that knows nothing -> what it got on the same scenarios (`with_floors`); empty where the
    environment offers none."""
    tries: int = 1
    """Number of times that each scenario was played."""
    num_scored: int = 0
    """Conversations behind `mean_reward`."""
    num_unanswered: int = 0
    """Failed conversations whose agent's endpoint gave no answer; part of `num_failed`."""
    num_unscored: int = 0
    """Conversations that were played and whose reward failed; not those to which it does not apply."""
    reward_interval: tuple[float, float] | None = None
    """95 % over scenarios (`mean_interval`); None where no two differ."""
    pass_at: Mapping[int, MeanEstimate] = field(default_factory=dict)
    """k -> pass@k, the chance that one of k tries succeeds."""
    pass_hat: Mapping[int, MeanEstimate] = field(default_factory=dict)
    """k -> pass^k, the chance that all of k tries succeed."""
    twins: MeanEstimate | None = None
    """Share of the pairs of twins in which both succeed (`matched_pairs_right`); None without twins."""
    violations: Mapping[str, MeanEstimate] = field(default_factory=dict)
    """Rule -> the share of conversations that broke it; empty where the environment counts none."""
    user_miss: MeanEstimate | None = None
    """Replies of a conversation of which its user could make nothing; None where nobody counts them."""

    def metrics(self) -> dict[str, float]:
        """The metrics for metrics.jsonl during a training; what has no verdict or no score is left out."""
        metrics = {}
        if self.success is not None and self.interval is not None:
            low, high = self.interval
            metrics = {"eval/success": self.success, "eval/success_low": low, "eval/success_high": high}
        return metrics if self.mean_reward is None else {**metrics, "eval/reward": self.mean_reward}

    def summary(self) -> dict[str, Any]:
        """The evaluation for `summary.json`, without the conversations; what was not measured is left out."""
        summary: dict[str, Any] = {
            "success": self.success,
            "interval": None if self.interval is None else list(self.interval),
            "mean_reward": self.mean_reward,
            "reward_interval": None if self.reward_interval is None else list(self.reward_interval),
            "n": self.n,
            "tries": self.tries,
            "num_failed": self.num_failed,
            "num_unanswered": self.num_unanswered,
            "num_scored": self.num_scored,
            "num_unscored": self.num_unscored,
            "temperature": self.temperature,
            "families": _shares(self.families),
        }
        if self.parts:
            summary["parts"] = _shares(self.parts)
        if self.floors:
            summary["floors"] = {
                name: {
                    "success": floor.success,
                    "interval": None if floor.interval is None else list(floor.interval),
                    "n": floor.n,
                    "families": _shares(floor.families),
                    "parts": _shares(floor.parts),
                }
                for name, floor in self.floors.items()
            }
        if self.tries > 1:
            summary["pass_at"] = {str(k): estimate.summary() for k, estimate in self.pass_at.items()}
            summary["pass_hat"] = {str(k): estimate.summary() for k, estimate in self.pass_hat.items()}
        if self.twins is not None:
            summary["twins"] = self.twins.summary()
        if self.violations:
            summary["violations"] = {rule: estimate.summary() for rule, estimate in self.violations.items()}
        if self.user_miss is not None:
            summary["user_miss"] = self.user_miss.summary()
        return summary


def held_out(environment: Environment, split: str, number: int | None) -> Sequence[Scenario]:
    """`number` scenarios of a split, one of each family in turn (all, as they stand, for None); the same in
    every run.

    Raises ConfigurationError when the environment has none there, or fewer than asked for.
    """
    expect(
        "split", split, str, "scenarios of your own are played by evaluate(agent, environment, reward, ...)"
    )
    scenarios = environment.scenarios(split)
    if not scenarios:
        expect_split(split)
        raise ConfigurationError(
            f"the environment has no {split} scenario: give some split={split!r}, or name another split "
            "(in a file evaluation.split)"
        )
    if number is None:
        return scenarios
    expect_that(number >= 1, f"the number of {split} scenarios", "be at least 1", number)
    if number > len(scenarios):
        raise ConfigurationError(
            f"the environment has {len(scenarios)} {split} scenarios, got {number} to play: ask for fewer"
        )
    return spread(scenarios, number)


def spread(scenarios: Sequence[Scenario], number: int) -> Sequence[Scenario]:
    """The first of each family, then the second of each, up to `number`; all, as they stand, where that is
    not more."""
    if number >= len(scenarios):
        return scenarios
    nth: dict[str, int] = {}
    rounds = []
    for scenario in scenarios:
        nth[scenario.family] = nth.get(scenario.family, -1) + 1
        rounds.append(nth[scenario.family])
    order = sorted(range(len(scenarios)), key=rounds.__getitem__)  # stable: families as they first come
    return [scenarios[index] for index in order[:number]]


async def evaluate(
    agent: MultiTurnAgent | EndpointAgent,
    environment: Environment,
    reward_fn: Reward,
    scenarios: Scenarios,
    *,
    tries: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    deterministic: bool | None = None,
    limits: RolloutLimits | None = None,
    divide: Divide | None = None,
    on_progress: OnProgress | None = None,
    kept: KeptConversations | None = None,
) -> Evaluation:
    """Play every scenario `tries` times at `temperature` (0 is greedy); the same seed meets the same users.

    `deterministic` and `limits` as in the engine; `deterministic` unset, it is what the environment's `local`
    says. `divide`: who plays which scenario; this process all of them when absent.
    `on_progress`: called whenever all tries of a scenario are played and scored.
    `kept`: where conversations are written as they end; those that stand there are not played again.
    Success is the environment's verdict; a conversation without one counts for the reward alone.

    Raises ConfigurationError for an empty list, and where what is kept is of another evaluation;
    EnvironmentFailure where no conversation could be played at all.
    """
    scenarios = as_scenarios(scenarios)
    if not scenarios:
        raise ConfigurationError("there is no scenario to evaluate: give at least one")
    expect_that(is_whole(tries, 1), "tries", "be a whole number of at least 1", tries)
    is_remote = not isinstance(agent, MultiTurnAgent)
    if kept is not None:
        kept.begin({**_identity(agent), "seed": seed, "temperature": temperature, "tries": tries})
    engine = ComputationalEngine(
        agent,
        environment,
        reward_fn,
        num_generations=tries,
        deterministic=environment.local and not is_remote if deterministic is None else deterministic,
        limits=limits,
    )

    async def play(part: Sequence[Scenario], before: Sequence[Scenario]) -> list[TrajectoryGroup]:
        done = count(1)

        def scored(_: int) -> None:
            if on_progress is not None:
                on_progress(next(done), len(part))

        return await engine.rollout(
            part,
            seed=seed,
            step=0,
            temperature=temperature,
            earlier=before,
            on_scored=scored,
            kept=kept,
        )

    groups = await (play(scenarios, ()) if divide is None else divide(scenarios, play))
    by_scenario = tries_of(groups)
    if not by_scenario:
        raise EnvironmentFailure(
            f"none of {len(scenarios) * tries} conversations was played: {groups[0].trajectories[0].error}"
        )
    return await in_thread(measured, groups, tries=tries, temperature=temperature)


def _identity(agent: MultiTurnAgent | EndpointAgent) -> dict[str, Any]:
    """Settings on which its replies depend, as plain JSON; a trained agent is another one after each step."""
    if isinstance(agent, MultiTurnAgent):
        return {**agent.config.model_dump(mode="json"), "version": agent.backend.version}
    return agent.identity


def measured(groups: Sequence[TrajectoryGroup], *, tries: int, temperature: float) -> Evaluation:
    """The evaluation of scored groups, one of each scenario with `tries` conversations.

    Linear in the conversations; thousands take tenths of a second: not for an event loop.
    """
    by_scenario = tries_of(groups)
    played = [trajectory for tries_of_one in by_scenario.values() for trajectory in tries_of_one]
    num_judged = sum(trajectory.success is not None for trajectory in played)
    shares = success_of_scenarios(by_scenario.values())
    reward = mean_of_scenarios(by_scenario.values(), lambda trajectory: trajectory.reward)
    any_try, all_tries = passes(by_scenario.values(), tries)
    return Evaluation(
        success=sum(shares) / len(shares) if shares else None,
        interval=share_interval(shares) if shares else None,
        mean_reward=None if reward is None else reward.value,
        reward_interval=None if reward is None else reward.interval,
        n=num_judged or len(played),
        num_failed=sum(len(group.trajectories) for group in groups) - len(played),
        num_unanswered=sum(
            bool(trajectory.metadata.get(UNANSWERED)) for group in groups for trajectory in group.trajectories
        ),
        num_scored=sum(trajectory.reward is not None for trajectory in played),
        num_unscored=sum(trajectory.reward is None and trajectory.error is not None for trajectory in played),
        temperature=temperature,
        families=_results_by(lambda scenario: scenario.family, by_scenario.values()),
        parts=_results_by(lambda scenario: scenario.context.get("part"), by_scenario.values()),
        groups=groups,
        tries=tries,
        pass_at=any_try,
        pass_hat=all_tries,
        twins=matched_pairs_right(by_scenario.values()),
        violations=violation_rates(by_scenario.values()),
        user_miss=user_misses(by_scenario.values()),
    )


def _results_by(
    name_of: Callable[[Scenario], Any], scenarios: Iterable[Sequence[Trajectory]]
) -> dict[str, FamilyResult]:
    """The share of each group of scenarios that has a name; their tries are given."""
    named: dict[str, list[Sequence[Trajectory]]] = defaultdict(list)
    for tries in scenarios:
        name = name_of(tries[0].scenario)
        if name is not None:
            named[str(name)].append(tries)
    results = {}
    for name in sorted(named):
        shares = success_of_scenarios(named[name])
        if shares:
            results[name] = FamilyResult(
                success=sum(shares) / len(shares),
                interval=share_interval(shares),
                n=sum(trajectory.success is not None for tries in named[name] for trajectory in tries),
            )
    return results


def _shares(results: Mapping[str, FamilyResult]) -> dict[str, Any]:
    return {
        name: {"success": result.success, "interval": list(result.interval), "n": result.n}
        for name, result in results.items()
    }
