"""Environments for the document's network and trainer: windows of observations, copies of an environment of
dicts as rows of a batch, and the simulated cluster as such an environment.

The document's protocol: `reset()` gives a state, a dict with metrics_history [T, M], current_metrics [M] and
the raw values that the reward reads; `step(action)` takes an action by name and gives the next state and
`info`, whose "done" says that the episode is over.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import (
    BatchedEnvironment,
    BoolArray,
    FloatArray,
    IntArray,
    Observations,
    Spec,
    Transition,
)
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that

State = Mapping[str, Any]
PARTS = ("metrics_history", "current_metrics")
"""Values of a state that the network reads."""


class DictEnvironment(Protocol):
    """The document's protocol. `reset` may take a `seed`, and then is a function of it."""

    @property
    def reset(self) -> Callable[..., State]: ...
    def step(self, action: dict[str, Any]) -> tuple[State, Mapping[str, Any]]: ...


class DictReward(Protocol):
    """What scores a step: `InfrastructureRewardFunction`, or another with this method."""

    def compute_reward(
        self, state: State, previous_state: State, action_taken: Mapping[str, Any]
    ) -> tuple[float, Mapping[str, float]]: ...


# ------------------------------------------------------------------------------------------ windows


class MetricsHistory:
    """An environment whose observations are the last ones, and the one of now.

    metrics_history [B, T, M], oldest first and the one of now last, and current_metrics [B, M]. Before the
    start the first observation is taken to have stood for ever. Starts, noise, rewards and forks are those of
    the environment inside.
    """

    def __init__(self, environment: BatchedEnvironment, history_length: int = 60) -> None:
        """Raises ConfigurationError for observations that are not one array [B, M]."""
        shape = environment.spec.observation_shape
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise ConfigurationError(
                f"{environment.spec.name}: observations must be one array [rows, metrics], got {shape!r}"
            )
        expect_that(history_length >= 1, "history_length", "be at least 1", history_length)
        self.environment, self.history_length = environment, history_length
        shapes = {"metrics_history": (history_length, *shape), "current_metrics": shape}
        self.spec = replace(environment.spec, observation_shape=shapes)

    def reset(self, seeds: Sequence[int]) -> Observations:
        """One episode per seed; see `BatchedEnvironment`."""
        first = self.environment.reset(seeds)
        assert isinstance(first, np.ndarray)  # as its spec says
        self._window: FloatArray = np.repeat(first[:, None], self.history_length, axis=1)
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """One action per row; see `BatchedEnvironment`."""
        transition = self.environment.step(actions)
        now = transition.observations
        assert isinstance(now, np.ndarray)
        self._window = np.concatenate([self._window[:, 1:], now[:, None]], axis=1)  # earlier ones are kept
        return replace(transition, observations=self._observations())

    def fork(self, rows: IntArray) -> Self:
        """A new batch with copies of these episodes and their history; see `BatchedEnvironment`."""
        fork = copy.copy(self)
        fork.environment, fork._window = self.environment.fork(rows), self._window[rows]
        return fork

    def action_mask(self) -> BoolArray | None:
        """The mask of the environment inside."""
        return self.environment.action_mask()

    def _observations(self) -> Observations:
        return {"metrics_history": self._window, "current_metrics": self._window[:, -1]}


# ------------------------------------------------------------------------------------------ copies


class Visit(NamedTuple):
    """One step of all rows: the states around it, and the parts of each row's reward."""

    before: list[State]
    after: list[State]
    parts: list[Mapping[str, float]]


_KEPT_STARTS = 1000


class EnvironmentCopies:
    """Copies of an environment of dicts as one `BatchedEnvironment`, scored by a reward function.

    The rows of a group are deep copies of one start, with generators of their own copied: start and noise are
    the same. Where `reset` takes a `seed`, a start follows from it. Where it takes none, the start of a new
    seed is what `reset()` gives next, and the last 1000 are remembered: such a training is not repeated bit
    by bit.

    An environment that draws from numpy's or Python's global generator has these seeded before each of its
    calls, by the row's seed and the step, and put back after them. Rows are stepped one after the other:
    write a `BatchedEnvironment` where that is too slow.
    """

    def __init__(
        self,
        environment: DictEnvironment,
        action_space: InfrastructureActionSpace,
        reward_fn: DictReward,
        *,
        horizon: int,
    ) -> None:
        """`horizon`: steps after which an episode that is not done is cut.

        Raises ConfigurationError for an environment that cannot be copied, and for a first state without
        metrics_history [T, M] and current_metrics [M].
        """
        self.source, self.action_space, self.reward_fn = environment, action_space, reward_fn
        self.name = type(environment).__name__
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._takes_seed = "seed" in inspect.signature(environment.reset).parameters
        self._start = lru_cache(_KEPT_STARTS)(self._begun)
        self._time = 0
        self.visits: list[Visit] | None = None
        """Steps since the last `reset`, where it is set to a list."""
        probe, before = self._copied(environment), _generators()
        first = self._checked(probe.reset())
        probe.step(action_space.decode_action(0))
        self._draws_globally = pickle.dumps(before) != pickle.dumps(_generators())
        _put_back(before)
        self._shapes = {part: first[part].shape for part in PARTS}
        number = action_space.total_actions
        self.spec = Spec(name=self.name, observation_shape=self._shapes, num_actions=number, horizon=horizon)

    def reset(self, seeds: Sequence[int]) -> Observations:
        """Copies of each seed's start; see `BatchedEnvironment`."""
        self._time, self._seeds = 0, list(seeds)
        starts = [self._start(seed) for seed in seeds]
        self._rows = [self._copied(environment) for environment, _ in starts]
        self._states = [state for _, state in starts]
        self._ended = np.zeros(len(seeds), dtype=np.bool_)
        self.visits = None if self.visits is None else []
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """Each row that has not ended takes its action."""
        number, self._time = len(self._rows), self._time + 1
        rewards, terminated = np.zeros(number), np.zeros(number, dtype=np.bool_)
        visit = Visit(self._states, list(self._states), [{} for _ in range(number)])
        for row in np.flatnonzero(~self._ended):
            action = self.action_space.decode_action(int(actions[row]))
            result = self._drawn(self._seeds[row], self._rows[row].step, action)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
                raise ConfigurationError(f"{self.name}: step must give (state, info), got {result!r:.60}")
            visit.after[row] = self._checked(result[0])
            rewards[row], visit.parts[row] = self.reward_fn.compute_reward(
                visit.after[row], visit.before[row], action
            )
            terminated[row] = bool(result[1].get("done", False))
        if self.visits is not None:
            self.visits.append(visit)
        names = dict.fromkeys(name for parts in visit.parts for name in parts)
        self._states, self._ended = visit.after, self._ended | terminated
        return Transition(
            observations=self._observations(),
            rewards=rewards,
            terminated=terminated,
            truncated=(self._time >= self.spec.horizon) & ~self._ended,
            components={
                name: np.array([float(parts.get(name, 0)) for parts in visit.parts]) for name in names
            },
        )

    def fork(self, rows: IntArray) -> Self:
        """Deep copies of these rows; see `BatchedEnvironment`."""
        fork = copy.copy(self)
        fork._rows = [self._copied(self._rows[row]) for row in rows]
        fork._states, fork._seeds = ([part[row] for row in rows] for part in (self._states, self._seeds))
        fork._ended, fork.visits = self._ended[rows], None
        return fork

    def action_mask(self) -> BoolArray | None:
        """Every action is always allowed."""
        return None

    def _begun(self, seed: int) -> tuple[DictEnvironment, State]:
        """The environment after the reset of this seed, and its state."""
        if self._takes_seed:
            environment = self._copied(self.source)
            return environment, self._checked(self._drawn(seed, partial(environment.reset, seed=seed)))
        state = self._checked(self._drawn(seed, self.source.reset))
        return self._copied(self.source), state

    def _copied(self, environment: DictEnvironment) -> DictEnvironment:
        try:
            return copy.deepcopy(environment)
        except Exception as error:  # what a deepcopy of a user's object raises is its own
            raise ConfigurationError(
                f"{self.name} cannot be copied ({error}), as a group needs: give it a __deepcopy__"
            ) from error

    def _checked(self, state: Any) -> State:
        """A copy, as an environment may go on writing in its own."""
        given = [part for part in PARTS if isinstance(state, Mapping) and part in state]
        values = {part: np.array(state[part], dtype=np.float32) for part in given}
        shapes = {part: value.shape for part, value in values.items()}
        history = shapes.get("metrics_history", ())
        if len(history) != 2 or shapes.get("current_metrics") != history[1:]:
            raise ConfigurationError(
                f"{self.name}: a state must be a dict with metrics_history [T, M] and current_metrics [M], "
                f"got {shapes or type(state).__name__}"
            )
        if self._shapes and shapes != self._shapes:
            raise ConfigurationError(
                f"{self.name}: a state must have the shapes of the first one, {self._shapes}, got {shapes}: "
                "fill a window that begins with its first entry"
            )
        return {**state, **values}

    def _observations(self) -> Observations:
        return {part: np.stack([state[part] for state in self._states]) for part in PARTS}

    def _drawn(self, seed: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the call, whose draws from global generators follow from the seed and the step."""
        if not self._draws_globally:
            return call(*arguments)
        before, number = _generators(), derive(seed, "global draws", self._time)
        np.random.seed(number % 2**32)
        random.seed(number)
        try:
            return call(*arguments)
        finally:
            _put_back(before)


def _generators() -> tuple[Any, Any]:
    """The state of numpy's and of Python's global generator."""
    return np.random.get_state(), random.getstate()


def _put_back(state: tuple[Any, Any]) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])


# ------------------------------------------------------------------------------------------ a cluster


class ClusterEnvironment:
    """One simulated cluster by the document's protocol.

    >>> state = ClusterEnvironment(InfrastructureActionSpace()).reset()
    >>> state["metrics_history"].shape, state["replica_count"] > 0
    ((60, 18), True)

    A state has the observations of `InfrastructureEnv`, the values that `InfrastructureRewardFunction` reads,
    `replica_count`, and after a step `money`, the simulator's own reward of it. A step costs a millisecond:
    a thousand rows of `InfrastructureEnv`, stepped together, cost two.
    """

    def __init__(
        self,
        action_space: InfrastructureActionSpace,
        *,
        history_length: int = 60,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """`seed`: of the starts of resets without one; `options`: of `InfrastructureEnv`, such as horizon."""
        self.action_space, self.seed, self.num_resets = action_space, seed, 0
        self.environment = InfrastructureEnv(actions=action_space, **options)
        self._length = history_length
        self.reset(derive(seed, "reset"))

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """The state of a new load; without a seed another one each time."""
        self.num_resets += seed is None
        chosen = derive(self.seed, "reset", self.num_resets) if seed is None else seed
        self._window = np.repeat(self.environment.reset([chosen]), self._length, axis=0)
        return self._state()

    def step(self, action: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state 15 s later (`Cluster.step_seconds`), and whether the horizon is reached."""
        transition = self.environment.step(np.array([self.action_space.encode_action(**action)]))
        assert isinstance(transition.observations, np.ndarray)  # as the spec of this environment says
        self._window = np.concatenate([self._window[1:], transition.observations])
        state = {**self._state(), "money": float(transition.components["money"][0])}
        return state, {"done": bool(transition.truncated[0])}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same load to come, which is not copied itself."""
        copied = copy.copy(self)
        copied.environment = self.environment.fork(np.zeros(1, dtype=np.int64))
        return copied

    def _state(self) -> dict[str, Any]:
        replicas = int(self.environment.fleet.replicas[0])
        window = {"metrics_history": self._window, "current_metrics": self._window[-1]}
        return {**window, **self.environment.document_state(0), "replica_count": replicas}
