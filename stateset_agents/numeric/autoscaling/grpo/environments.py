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
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

    def reset(self) -> State: ...
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
                f"{environment.spec.name}: observations must be one array [rows, metrics] to be remembered, "
                f"got the shape {shape!r}"
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
    """States of all rows around one step."""

    before: list[State]
    after: list[State]


_KEPT_STARTS = 1000


class EnvironmentCopies:
    """Copies of an environment of dicts as one `BatchedEnvironment`, scored by a reward function.

    The rows of a group are deep copies of one start, with generators of their own copied: start and noise are
    the same. Where `reset` takes a `seed`, a start follows from it. Where it takes none, a new seed's start is
    what `reset()` gives next, and the last 1000 are remembered: such a training is not repeated bit by bit.

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
        self._takes_seed = "seed" in inspect.signature(environment.reset).parameters
        self._time = 0
        self._draws_globally = self._touches_generators()
        self._starts: OrderedDict[int, tuple[DictEnvironment, State]] = OrderedDict()
        self.visits: list[Visit] | None = None
        """Steps since the last `reset`, where it is set to a list."""
        first = self._start(derive(0, "shape"))[1]
        shapes = {part: np.shape(first[part]) for part in PARTS if part in first}
        history, current = shapes.get("metrics_history", ()), shapes.get("current_metrics", ())
        if len(history) != 2 or current != history[1:]:
            raise ConfigurationError(
                f"{self.name}: reset() must give a dict with metrics_history [T, M] and current_metrics [M], "
                f"got {', '.join(f'{name} {list(shape)}' for name, shape in shapes.items()) or list(first)}"
            )
        number = action_space.total_actions
        self.spec = Spec(name=self.name, observation_shape=shapes, num_actions=number, horizon=horizon)

    def reset(self, seeds: Sequence[int]) -> Observations:
        """Copies of each seed's start; see `BatchedEnvironment`."""
        self._time = 0
        starts = {seed: self._start(seed) for seed in dict.fromkeys(seeds)}
        self._seeds = list(seeds)
        self._rows = [self._copied(starts[seed][0]) for seed in seeds]
        self._states = [starts[seed][1] for seed in seeds]
        self._ended = np.zeros(len(seeds), dtype=np.bool_)
        if self.visits is not None:
            self.visits = []
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """Each row that has not ended takes its action."""
        number, self._time = len(self._rows), self._time + 1
        before, after = self._states, list(self._states)
        rewards, terminated = np.zeros(number), np.zeros(number, dtype=np.bool_)
        components: dict[str, Any] = {}
        for row in np.flatnonzero(~self._ended):
            action = self.action_space.decode_action(int(actions[row]))
            with self._global_draws(self._seeds[row]):
                result = self._rows[row].step(action)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
                raise ConfigurationError(
                    f"{self.name}: step must give (state, info), both dicts, got {type(result).__name__}"
                    + (f" of {len(result)}" if isinstance(result, tuple) else "")
                )
            after[row] = self._checked(result[0])
            rewards[row], parts = self.reward_fn.compute_reward(after[row], before[row], action)
            terminated[row] = bool(result[1].get("done", False))
            for name, value in parts.items():
                components.setdefault(name, np.zeros(number))[row] = value
        self._states = after
        if self.visits is not None:
            self.visits.append(Visit(before, after))
        self._ended = self._ended | terminated
        cut = np.full(number, self._time >= self.spec.horizon) & ~self._ended
        return Transition(
            observations=self._observations(),
            rewards=rewards,
            terminated=terminated,
            truncated=cut,
            components=components,
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

    def _start(self, seed: int) -> tuple[DictEnvironment, State]:
        """The environment after the reset of this seed, and its state."""
        if seed in self._starts:
            self._starts.move_to_end(seed)
            return self._starts[seed]
        source = self._copied(self.source) if self._takes_seed else self.source
        options: dict[str, Any] = {"seed": seed} if self._takes_seed else {}
        with self._global_draws(seed):
            state = self._checked(source.reset(**options))
        if self._takes_seed:
            return source, state
        self._starts[seed] = self._copied(source), state
        if len(self._starts) > _KEPT_STARTS:
            self._starts.popitem(last=False)
        return self._starts[seed]

    def _copied(self, environment: DictEnvironment) -> DictEnvironment:
        try:
            return copy.deepcopy(environment)
        except Exception as error:  # what a deepcopy of a user's object raises is its own
            raise ConfigurationError(
                f"{self.name} cannot be copied ({error}), and a group is copies of one start: give it a "
                "__deepcopy__"
            ) from error

    def _checked(self, state: Any) -> State:
        """A copy, as an environment may go on writing in its own."""
        if not isinstance(state, Mapping):
            raise ConfigurationError(f"{self.name}: a state must be a dict, got {type(state).__name__}")
        return {**state, **{part: np.array(state[part], dtype=np.float32) for part in PARTS if part in state}}

    def _observations(self) -> Observations:
        rows = {part: [state.get(part) for state in self._states] for part in PARTS}
        for part, shape in self.spec.observation_shape.items():  # type: ignore[union-attr]  # of parts
            for value in rows[part]:
                if np.shape(value) != shape:
                    raise ConfigurationError(
                        f"{self.name}: {part} must have the shape {list(shape)} of the first state, got "
                        f"{list(np.shape(value))}: fill a window that begins with its first entry"
                    )
        return {part: np.stack(values) for part, values in rows.items()}

    def _touches_generators(self) -> bool:
        """Does a reset, or the first step, draw from a global generator?"""
        probe = self._copied(self.source)
        with _generators_put_back() as before:
            probe.reset()
            probe.step(self.action_space.decode_action(0))
            return before != _generators()

    @contextmanager
    def _global_draws(self, seed: int) -> Iterator[None]:
        """Draws from the global generators inside follow from the seed and the step."""
        if not self._draws_globally:
            yield
            return
        with _generators_put_back():
            number = derive(seed, "global draws", self._time)
            np.random.seed(number % 2**32)
            random.seed(number)
            yield


def _generators() -> bytes:
    """The state of numpy's and of Python's global generator."""
    return pickle.dumps((np.random.get_state(), random.getstate()))


@contextmanager
def _generators_put_back() -> Iterator[bytes]:
    """Their state, to which they return at the end."""
    before = _generators()
    try:
        yield before
    finally:
        numpy_state, python_state = pickle.loads(before)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


# ------------------------------------------------------------------------------------------ a cluster


class ClusterEnvironment:
    """One simulated cluster by the document's protocol.

    >>> state = ClusterEnvironment(InfrastructureActionSpace()).reset()
    >>> state["metrics_history"].shape, state["replica_count"] > 0
    ((60, 18), True)

    A state has the observations of `InfrastructureEnv`, the values that `InfrastructureRewardFunction` reads,
    `replica_count`, and after a step `money`, the simulator's own reward of it. A row of `InfrastructureEnv`
    costs a hundredth of this where a thousand are stepped together.
    """

    def __init__(
        self,
        action_space: InfrastructureActionSpace,
        environment: InfrastructureEnv | None = None,
        *,
        history_length: int = 60,
        seed: int = 0,
    ) -> None:
        """`environment`: load, cluster and horizon, with the same action space; `seed`: of the starts of
        resets without one."""
        self.action_space, self.seed, self.num_resets = action_space, seed, 0
        self.environment = environment or InfrastructureEnv(actions=action_space)
        number = self.environment.spec.num_actions
        expect_that(
            number == action_space.total_actions,
            "environment",
            f"have the {action_space.total_actions} actions of action_space",
            number,
            "make it with actions=action_space",
        )
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
