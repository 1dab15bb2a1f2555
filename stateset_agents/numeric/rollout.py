"""Groups of episodes, played by one policy: all rows are stepped together.

Rows are in group-major order: row g * G + m is member m of group g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.algorithms.group_arrays import returns_to_go_array
from stateset_agents.numeric.environments.base import (
    BatchedEnvironment,
    BoolArray,
    FloatArray,
    IntArray,
    Observations,
    Rule,
    Tasked,
    TaskRows,
    Transition,
    check_observations,
    check_transition,
    map_observations,
)
from stateset_agents.numeric.policy import NumericPolicy, logits_of, sample_actions
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect, expect_that

Act = Callable[[Observations, BoolArray | None, int], tuple[IntArray, FloatArray]]
"""(observations [B, ...], mask, step) -> [B] actions and their log-probs."""


_Step = tuple[Observations, IntArray, FloatArray, BoolArray, BoolArray | None, Transition]
"""Observations before a step of all rows, actions, their log-probs, rows that live, mask, and its result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branches:
    """Other ways on from the states between steps, [T, B] each; 0 where none was played."""

    means: NDArray[np.float64]
    """Mean discounted return from the state before the step."""
    counts: IntArray
    num_steps: int
    """Environment steps that they took."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Groups of episodes from their starts to their ends, T steps at most, B rows."""

    observations: Observations  # [T, B, ...] before each step
    actions: IntArray  # [T, B]
    logprobs: FloatArray  # [T, B] under the policy that chose
    rewards: NDArray[np.float64]  # [T, B]
    alive: BoolArray  # [T, B]
    """True where the row took this step; other arrays mean nothing elsewhere. A failed row took none."""
    masks: BoolArray | None  # [T, B, A]
    """Actions that were allowed; None where all always were."""
    components: Mapping[str, NDArray[np.float64]]  # [T, B] each
    seeds: Sequence[int]  # [B]
    group_ids: IntArray  # [B]
    group_size: int
    terminated: BoolArray  # [B]
    """True where the episode ended by itself."""
    truncated: BoolArray  # [B]
    """True where a limit cut the episode. A failed row has neither."""
    failed: BoolArray  # [B]
    """True where the environment gave an observation or a reward that is no finite number."""
    final_observations: Observations  # [B, ...] after the row's last step
    branches: Branches | None = None
    tasks: TaskRows | None = None
    """Tasks of the rows, if the environment has several."""

    @property
    def num_steps(self) -> int:
        """Environment steps that were taken, those of branches included."""
        return int(self.alive.sum()) + (self.branches.num_steps if self.branches is not None else 0)

    @property
    def num_groups(self) -> int:
        return len(self.group_ids) // self.group_size

    @property
    def returns(self) -> NDArray[np.float64]:
        """[B] undiscounted sums of rewards; 0 for a failed row."""
        total: NDArray[np.float64] = np.where(self.alive, self.rewards, 0.0).sum(axis=0)
        return total

    @property
    def task(self) -> str | None:
        """The task of a rollout of one row; None where there is one task."""
        return None if self.tasks is None else self.tasks.names[int(self.tasks.ids[0])]

    @property
    def score(self) -> float | None:
        """The mean score of the rows, 0 for a random policy and 1 for a solved task; None without tasks."""
        return None if self.tasks is None else float(self.tasks.scores(self.returns).mean())

    @property
    def lengths(self) -> IntArray:
        """[B] steps of each row."""
        lengths: IntArray = self.alive.sum(axis=0)
        return lengths

    def seen(self) -> Observations:
        """[N, ...] the observations on which an action was taken."""
        observations: Observations = map_observations(lambda part: part[self.alive], self.observations)
        return observations

    def action_counts(self) -> NDArray[np.int64]:
        """[A] how often each action was taken, up to the last one that was."""
        return np.bincount(self.actions[self.alive])

    def grouped(self, values: NDArray[Any]) -> NDArray[Any]:
        """[..., B] as [..., groups, G]."""
        return values.reshape(*values.shape[:-1], self.num_groups, self.group_size)

    def rows(self) -> list[Rollout]:
        """The rows that did not fail, each a rollout by itself and as long as its episode."""

        def row(place: int) -> Rollout:
            steps, here = slice(self.lengths[place]), slice(place, place + 1)
            return _remade([self], lambda parts: parts[0][steps, here], lambda parts: parts[0][here])

        return [row(int(place)) for place in np.flatnonzero(~self.failed)]

    def episodes(self) -> list[dict[str, Any]]:
        """One record per row, for episodes.jsonl."""
        returns, lengths = self.returns, self.lengths
        sums = {name: np.where(self.alive, part, 0.0).sum(axis=0) for name, part in self.components.items()}
        endings = ("failed", "terminated", "truncated")
        return [
            {
                "group": int(self.group_ids[row]),
                "member": row % self.group_size,
                "seed": self.seeds[row],
                "return": None if self.failed[row] else round(float(returns[row]), 6),
                "components": {name: round(float(part[row]), 6) for name, part in sums.items()},
                "length": int(lengths[row]),
                "ended": next(name for name in endings if getattr(self, name)[row]),
            }
            for row in range(len(lengths))
        ]


_OF_STEPS = ("observations", "actions", "logprobs", "rewards", "alive", "masks", "components")
_OF_ROWS = ("final_observations", "terminated", "truncated", "failed", "seeds")


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts of single episodes beside one another, each row a group of its own.

    Raises ConfigurationError for none, for another object, and for rollouts whose rows are compared.
    """
    if not rollouts:
        raise ConfigurationError("an update needs at least one episode, got none")
    for each in rollouts:
        expect("each of the rollouts", each, Rollout, "see collect(...).rows()")
        expect_that(each.group_size == 1, "group_size of each rollout in a list", "be 1", each.group_size)
    longest = max(len(each.alive) for each in rollouts)

    def beside(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        ends = [[(0, longest - len(part)), *[(0, 0)] * (part.ndim - 1)] for part in parts]
        return np.concatenate([np.pad(part, end) for part, end in zip(parts, ends, strict=True)], axis=1)

    return _remade(rollouts, beside, np.concatenate)


def _remade(
    rollouts: Sequence[Rollout], of_steps: Callable[[Any], Any], of_rows: Callable[[Any], Any]
) -> Rollout:
    """A rollout of single episodes, each array made of these rollouts' by one of the two functions."""

    def merged(name: str, merge: Callable[[Any], Any]) -> Any:
        values = [getattr(each, name) for each in rollouts]
        if isinstance(values[0], Mapping):
            return {key: merge([value[key] for value in values]) for key in values[0]}
        return None if values[0] is None else merge(values)

    first = rollouts[0]
    parts = {name: merged(name, of_steps) for name in _OF_STEPS}
    parts |= {name: merged(name, of_rows) for name in _OF_ROWS}
    parts["group_ids"] = np.arange(len(parts["failed"]))
    if first.tasks is not None:
        parts["tasks"] = replace(
            first.tasks, ids=of_rows([each.tasks.ids for each in rollouts if each.tasks])
        )
    return replace(first, **parts, group_size=1, branches=None)


# ------------------------------------------------------------------------------------------ streams


def action_keys(seed: int, update: int, num_groups: int, group_size: int) -> NDArray[np.uint64]:
    """[B] a stream of its own for each member's actions: the derivation `(seed, "action", update)`, then
    group and member by a counter, so that thousands of rows cost no thousands of generators."""
    first = derive(seed, "action", update)
    rows = np.arange(num_groups * group_size, dtype=np.uint64)
    return _mixed(np.uint64(first) + rows * _INCREMENT)


def uniforms(keys: NDArray[np.uint64], step: int | IntArray) -> NDArray[np.float64]:
    """[B] in [0, 1): number `step` of each stream, of several steps [S, 1] all [S, B] (SplitMix64, https://doi.org/10.1145/2660193.2660195)."""
    with np.errstate(over="ignore"):
        mixed = _mixed(keys + (np.uint64(1) + np.asarray(step).astype(np.uint64)) * _INCREMENT)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


_DRAWN = 32
"""Steps for which actions' numbers are drawn at once."""
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function; uint64 arithmetic wraps."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


# ------------------------------------------------------------------------------------------ playing


def collect(
    policy: NumericPolicy,
    environment: BatchedEnvironment,
    seeds: Sequence[int],
    *,
    group_size: int,
    keys: NDArray[np.uint64] | None,
    max_steps: int | None = None,
) -> Rollout:
    """Play `group_size` episodes of each seed to their ends, or for `max_steps`, which truncates them.

    `keys`: [groups * G] the members' streams of actions; None: always the likeliest action. A row whose
    observation or reward is no finite number fails: it takes no part, and its group is smaller by one.
    Blocking. Raises ConfigurationError for arrays of a wrong shape or dtype, and for a row without an
    allowed action.
    """
    rows = [seed for seed in seeds for _ in range(group_size)]
    play = _begun(environment, rows, _actor(policy, keys, len(rows)), max_steps)
    play.to_the_end()
    return play.rollout(rows, group_size)


def collect_by(
    rule: Rule,
    environment: BatchedEnvironment,
    seeds: Sequence[int],
    *,
    max_steps: int | None = None,
) -> Rollout:
    """Play one episode of each seed by a rule; the log-probs are 0. Blocking.

    Raises ConfigurationError for actions that are no [B] of integers, and for one that is not allowed.
    """
    spec = environment.spec

    def act(observations: Observations, mask: BoolArray | None, step: int) -> tuple[IntArray, FloatArray]:
        actions = np.asarray(choose())
        if actions.shape != (len(seeds),) or actions.dtype.kind != "i":
            raise ConfigurationError(
                f"{spec.name}: a rule must give integers {(len(seeds),)}, got {actions.dtype} {actions.shape}"
            )
        allowed = (actions >= 0) & (actions < spec.num_actions)
        if mask is not None:
            allowed &= mask[np.arange(len(seeds)), np.clip(actions, 0, spec.num_actions - 1)]
        if not (allowed | ~play.live).all():
            row = int((~allowed & play.live).argmax())
            raise ConfigurationError(
                f"{spec.name}: action {int(actions[row])} is not allowed in row {row} at step {step + 1}"
            )
        return actions, np.zeros(len(seeds), dtype=np.float32)

    play = _begun(environment, seeds, act, max_steps)
    choose = rule(environment)
    play.to_the_end()
    return play.rollout(seeds, 1)


def collect_branches(
    policy: NumericPolicy,
    environment: BatchedEnvironment,
    seeds: Sequence[int],
    *,
    group_size: int,
    keys: NDArray[np.uint64],
    gamma: float,
    num_branches: int,
    every: int,
    max_steps: int | None = None,
) -> Rollout:
    """`collect`, with `num_branches` other ways on from every `every`-th state of each row that lives there.

    A branch is a fork with the same exogenous future and actions of its own, played by the same policy to
    its end; the state before the first step has none, since its siblings are its other ways on. Raises
    ConfigurationError where the environment cannot fork.
    """
    rows = [seed for seed in seeds for _ in range(group_size)]
    play = _begun(environment, rows, _actor(policy, keys, len(rows)), max_steps)
    means: list[NDArray[np.float64]] = []
    counts: list[IntArray] = []
    num_steps = 0
    while play.goes_on:
        means.append(np.zeros(len(rows)))
        counts.append(np.zeros(len(rows), dtype=np.int64))
        if play.num_steps and play.num_steps % every == 0:
            live = np.flatnonzero(play.live)
            twigs = np.repeat(live, num_branches)
            try:
                fork = environment.fork(twigs)
            except NotImplementedError as error:
                raise ConfigurationError(
                    f"{environment.spec.name} cannot fork: set advantage_estimator to step_group"
                ) from error
            starts = map_observations(partial(np.take, indices=twigs, axis=0), play.observations)
            # The streams of a state's branches follow from the row's own and from where it is.
            places = np.tile(np.arange(1, num_branches + 1, dtype=np.uint64), len(live))
            with np.errstate(over="ignore"):
                own_keys = _mixed(keys[twigs] + _mixed(places + np.uint64(play.num_steps << 20)))
            branch = _Play(fork, starts, _actor(policy, own_keys, len(own_keys)), play.limit - play.num_steps)
            branch.to_the_end()
            ended = branch.rollout([rows[row] for row in twigs], num_branches)
            returns = returns_to_go_array(ended.rewards, ended.alive, gamma=gamma)[0].reshape(
                -1, num_branches
            )
            whole = ~ended.failed.reshape(-1, num_branches)
            counts[-1][live] = whole.sum(axis=1)
            means[-1][live] = (returns * whole).sum(axis=1) / np.maximum(whole.sum(axis=1), 1)
            num_steps += ended.num_steps
        play.step()
    rollout = play.rollout(rows, group_size)
    branches = Branches(means=np.stack(means), counts=np.stack(counts), num_steps=num_steps)
    return replace(rollout, branches=branches)


def _begun(environment: BatchedEnvironment, seeds: Sequence[int], act: Act, max_steps: int | None) -> _Play:
    """Episodes of these seeds at their starts."""
    observations = environment.reset(seeds)
    check_observations(observations, environment.spec, len(seeds))
    horizon = environment.spec.horizon
    return _Play(environment, observations, act, min(max_steps or horizon, horizon))


def _actor(policy: NumericPolicy, keys: NDArray[np.uint64] | None, num_rows: int) -> Act:
    draws: NDArray[np.float64] | None = None
    logits = logits_of(policy, num_rows)

    def act(observations: Observations, mask: BoolArray | None, step: int) -> tuple[IntArray, FloatArray]:
        nonlocal draws
        if keys is not None and step % _DRAWN == 0:
            draws = uniforms(keys, np.arange(step, step + _DRAWN)[:, None])
        return sample_actions(logits(observations), mask, None if draws is None else draws[step % _DRAWN])

    return act


class _Play:
    """Episodes under way."""

    def __init__(
        self, environment: BatchedEnvironment, observations: Observations, act: Act, limit: int
    ) -> None:
        """`limit`: steps at most."""
        self.environment, self.observations, self.act, self.limit = environment, observations, act, limit
        self._steps: list[_Step] = []
        finite = _finite_rows(observations)
        self.live: BoolArray = finite.copy()
        """[B] rows that have not ended."""
        self._failed = ~finite
        self._terminated = np.zeros(len(finite), dtype=np.bool_)
        self._any_ended = not finite.all()
        self._final: Observations = map_observations(np.copy, observations)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def goes_on(self) -> bool:
        return bool(self.live.any()) and self.num_steps < self.limit

    def to_the_end(self) -> None:
        """Step until every row has ended."""
        while self.goes_on:
            self.step()

    def step(self) -> None:
        """All rows act once; those that have ended do something that nobody reads."""
        spec, num_rows = self.environment.spec, len(self.live)
        mask = self.environment.action_mask()
        if mask is not None:
            mask = self._checked(mask)
        readable = self.observations
        if self._any_ended:  # a row that has ended may hold anything
            readable = map_observations(self._without_ended, readable)
        actions, logprobs = self.act(readable, mask, self.num_steps)
        transition = self.environment.step(actions)
        check_transition(transition, spec, num_rows)
        self._steps.append((self.observations, actions, logprobs, self.live, mask, transition))
        ended = transition.terminated | transition.truncated
        finite = _finite_rows(transition.observations) & np.isfinite(transition.rewards)
        before = self.live
        self.observations = transition.observations
        if ended.any() or not finite.all():
            broken = before & ~finite
            self._failed = self._failed | broken
            self._terminated = self._terminated | (before & transition.terminated & ~broken)
            self.live = before & ~(ended | broken)
            self._any_ended = True
            self._keep_final(before)
        elif self.num_steps == self.limit:
            self._keep_final(before)

    def rollout(self, seeds: Sequence[int], group_size: int) -> Rollout:
        """The finished rollout."""
        num_rows = len(seeds)
        if not self._steps:
            raise ConfigurationError(
                f"{self.environment.spec.name}: no row has a start that is a finite number: look at reset"
            )
        observations, actions, logprobs, alive, masks, transitions = zip(*self._steps, strict=True)
        names = transitions[0].components
        return Rollout(
            observations=map_observations(lambda *parts: np.stack(parts), *observations),
            actions=np.stack(actions),
            logprobs=np.stack(logprobs),
            rewards=np.stack([transition.rewards for transition in transitions]).astype(np.float64),
            alive=np.stack(alive) & ~self._failed,
            masks=None if masks[0] is None else np.stack(masks),
            components={
                name: np.stack([transition.components[name] for transition in transitions]).astype(np.float64)
                for name in names
            },
            seeds=seeds,
            group_ids=np.arange(num_rows) // group_size,
            group_size=group_size,
            terminated=self._terminated & ~self._failed,
            truncated=~self._terminated & ~self._failed,
            failed=self._failed,
            final_observations=self._final,
            tasks=self.environment.task_rows() if isinstance(self.environment, Tasked) else None,
        )

    def _checked(self, mask: BoolArray) -> BoolArray:
        spec = self.environment.spec
        if mask.shape != (len(self.live), spec.num_actions) or mask.dtype != np.bool_:
            raise ConfigurationError(
                f"{spec.name}: action_mask() must be bool of shape {(len(self.live), spec.num_actions)}, got "
                f"{mask.dtype} of {mask.shape}"
            )
        is_stuck = self.live & ~mask.any(axis=1)
        if is_stuck.any():
            raise ConfigurationError(
                f"{spec.name}: action_mask() allows row {int(is_stuck.argmax())} no action at step "
                f"{self.num_steps + 1}: allow one, or end its episode"
            )
        return mask | ~mask.any(axis=1, keepdims=True)  # of a row that has ended

    def _without_ended(self, part: FloatArray) -> FloatArray:
        shape = (len(part), *[1] * (part.ndim - 1))
        return np.where(self.live.reshape(shape), part, np.float32(0.0))

    def _keep_final(self, were_live: BoolArray) -> None:
        """Note the observation of rows that took this step; of those that go on a later one replaces it."""

        def kept(now: FloatArray, final: FloatArray) -> FloatArray:
            return np.where(were_live.reshape(len(now), *[1] * (now.ndim - 1)), now, final)

        self._final = map_observations(kept, self.observations, self._final)


def largest_rms(observations: Observations) -> float:
    """The largest root mean square of an observed number over [N, ...]; 0 without a row."""
    parts = observations.values() if isinstance(observations, Mapping) else [observations]
    squares = [np.square(part, dtype=np.float64).mean(axis=0).max() for part in parts if part.size]
    return math.sqrt(max(squares, default=0.0))


def _finite_rows(observations: Observations) -> BoolArray:
    """[B] are all numbers of the row finite?"""
    parts = list(observations.values()) if isinstance(observations, Mapping) else [observations]
    finite = [np.isfinite(part).reshape(len(part), -1).all(axis=1) for part in parts]
    together: BoolArray = np.logical_and.reduce(finite)
    return together
