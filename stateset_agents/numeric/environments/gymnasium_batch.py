"""Gymnasium environments as rows of a batch: each row has an environment of its own and a seed of its own.

Gymnasium's vector environments reset all rows from one seed, which makes no groups; so rows are stepped one
after the other here. Write a `BatchedEnvironment` where that is too slow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.environments.base import (
    BoolArray,
    FloatArray,
    IntArray,
    Observations,
    Spec,
    Transition,
)
from stateset_agents.runtime.named_code import library
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    import gymnasium


class GymnasiumBatch:
    """Any Gymnasium environment with discrete actions and `Box`, or a `Dict` of `Box`, observations.

    >>> environment = GymnasiumBatch("CartPole-v1")
    >>> environment = GymnasiumBatch("Hopper-v5", levels=3)  # 27 actions

    Bytes (uint8) are observed as shares of 255. A row that has ended stays as it ended. Groups begin at a
    reset with one seed; `fork` copies rows by `copy.deepcopy`, for environments that can be copied so.
    """

    def __init__(
        self,
        environment: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        horizon: int | None = None,
        levels: int | None = None,
        **options: Any,
    ) -> None:
        """`environment`: an id, or a function that makes one; `horizon`: by default the id's own limit of
        steps; `levels`: values of each continuous action between its bounds, see `action_points`;
        `options`: for `gymnasium.make`.

        Raises ConfigurationError where Gymnasium or the id is missing, for continuous actions, for
        observations of another kind, and without a horizon.
        """
        make = _maker(environment, options)
        self._make = make if levels is None else partial(_discretised, make, levels)
        first = self._make()
        self.solved: float | None = first.spec.reward_threshold if first.spec is not None else None
        """The return from which Gymnasium calls it solved, where it says so."""
        self._rows: list[gymnasium.Env[Any, Any]] = [first]
        self._offset = _check_actions(first)
        limit = horizon or (first.spec.max_episode_steps if first.spec is not None else None)
        name = environment if isinstance(environment, str) else type(first.unwrapped).__name__
        if limit is None:
            raise ConfigurationError(f"{name} has no limit of steps: give GymnasiumBatch a horizon")
        self.spec = Spec(
            name=name,
            observation_shape=_shapes(first.observation_space, name),
            num_actions=int(first.action_space.n),  # type: ignore[attr-defined]  # Discrete, as was checked
            horizon=limit,
        )
        self._last: list[Any] = []
        self._ended = np.zeros(0, dtype=np.bool_)
        self._steps = 0

    def reset(self, seeds: Sequence[int]) -> Observations:
        """Each row as Gymnasium's `reset(seed=...)`."""
        while len(self._rows) < len(seeds):
            self._rows.append(self._make())
        rows = zip(self._rows, seeds, strict=False)
        self._last = [self._reset(environment, seed) for environment, seed in rows]
        self._ended = np.zeros(len(seeds), dtype=np.bool_)
        self._steps = 0
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """Each row that has not ended takes its action."""
        rewards = np.zeros(len(actions), dtype=np.float32)
        terminated, truncated = np.zeros((2, len(actions)), dtype=np.bool_)
        for row in np.flatnonzero(~self._ended):
            step = self._rows[row].step(int(actions[row]) + self._offset)
            if not (isinstance(step, tuple) and len(step) == 5):
                raise self._unlike("step", "(observation, reward, terminated, truncated, info)", step)
            self._last[row], reward, terminated[row], truncated[row], _ = step
            rewards[row] = self._reward(reward)
        self._steps += 1
        if self._steps >= self.spec.horizon:
            truncated |= ~terminated & ~self._ended
        self._ended = self._ended | terminated | truncated
        return Transition(
            observations=self._observations(), rewards=rewards, terminated=terminated, truncated=truncated
        )

    def fork(self, rows: IntArray) -> Self:
        """Deep copies of these rows. Raises NotImplementedError where Gymnasium's cannot be copied; one of
        EzPickle (LunarLander, Atari) would come out new, at no state at all."""
        from gymnasium.utils import EzPickle

        if any(isinstance(self._rows[row].unwrapped, EzPickle) for row in rows):
            raise NotImplementedError(f"{self.spec.name} is made anew where it is copied")
        copied = copy.copy(self)
        try:
            copied._rows = [copy.deepcopy(self._rows[row]) for row in rows]
        except Exception as error:  # what a deepcopy of a user's object raises is its own
            raise NotImplementedError(f"{self.spec.name} cannot be copied: {error}") from error
        copied._last = [self._last[row] for row in rows]
        copied._ended = self._ended[rows].copy()
        return copied

    def action_mask(self) -> BoolArray | None:
        """Every action is always allowed."""
        return None

    def close(self) -> None:
        """Close every row."""
        for row in self._rows:
            row.close()

    def _reset(self, environment: gymnasium.Env[Any, Any], seed: int) -> Any:
        result: Any = environment.reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise self._unlike("reset", "(observation, info)", result)
        return result[0]

    def _reward(self, reward: Any) -> float:
        """One number, also as an array of one."""
        value = np.asarray(reward)
        if value.size != 1 or value.dtype.kind not in "fiub":
            raise ConfigurationError(
                f"{self.spec.name}: step must give one number as its reward, got {reward!r:.60}"
            )
        return float(value.item())

    def _unlike(self, method: str, expected: str, result: Any) -> ConfigurationError:
        """The error for a method that does not return what Gymnasium's does."""
        kind = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        return ConfigurationError(
            f"{self.spec.name}: {method} must return {expected} as Gymnasium's does, got {kind}: wrap the "
            "environment, one of the old Gym by shimmy's GymV21CompatibilityV0"
        )

    def _observations(self) -> Observations:
        shape = self.spec.observation_shape
        if not isinstance(shape, Mapping):
            return _floats(self._last)
        return {name: _floats([row[name] for row in self._last]) for name in shape}


def _floats(rows: Sequence[Any]) -> FloatArray:
    stacked = np.stack(rows)
    return stacked.astype(np.float32) / np.float32(255 if stacked.dtype == np.uint8 else 1)


_MOST_POINTS = 729
"""Actions of the largest grid: three levels of six continuous numbers."""


def action_points(low: NDArray[Any], high: NDArray[Any], levels: int) -> NDArray[np.float32]:
    """[A, d] the grid of `levels` values of each number between its bounds; with more than 729 points all in
    the middle, then each alone at either bound. Raises ConfigurationError for bounds that are infinite."""
    if levels < 2 or not np.isfinite([low, high]).all():
        raise ConfigurationError(
            f"levels must be at least 2 and actions have finite bounds, got {levels}, {low} and {high}"
        )
    if levels**low.size <= _MOST_POINTS:
        axes = np.linspace(low.ravel(), high.ravel(), levels).T
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, low.size).astype(np.float32)
    points = np.tile((low.ravel() + high.ravel()) / 2, (2 * low.size + 1, 1))
    each = np.arange(low.size)
    points[1 + 2 * each, each], points[2 + 2 * each, each] = low.ravel(), high.ravel()
    return points.astype(np.float32)


def _discretised(make: Callable[[], gymnasium.Env[Any, Any]], levels: int) -> gymnasium.Env[Any, Any]:
    import gymnasium

    environment = make()
    space = environment.action_space
    if not isinstance(space, gymnasium.spaces.Box):
        return environment
    points = action_points(space.low, space.high, levels).reshape(-1, *space.shape)
    number = gymnasium.spaces.Discrete(len(points))
    return gymnasium.wrappers.TransformAction(environment, points.__getitem__, number)


def _maker(
    environment: str | Callable[[], gymnasium.Env[Any, Any]], options: Mapping[str, Any]
) -> Callable[[], gymnasium.Env[Any, Any]]:
    if not isinstance(environment, str):
        if options:
            raise ConfigurationError(
                f"{', '.join(options)}: options are for an id; let your function set them itself"
            )
        return environment
    library("gymnasium", f'{environment} needs Gymnasium: pip install "gymnasium>=1"')
    import gymnasium

    if environment.startswith("ALE/"):
        missing = f'{environment} needs Atari: pip install "ale-py>=0.11"'
        gymnasium.register_envs(library("ale_py", missing))

    def make() -> gymnasium.Env[Any, Any]:
        try:
            return gymnasium.make(environment, **options)
        except gymnasium.error.Error as error:  # an unknown id, a missing package of its own
            raise ConfigurationError(
                " ".join(f"gymnasium cannot make {environment}: {error}".split())
            ) from error

    return make


def _check_actions(environment: gymnasium.Env[Any, Any]) -> int:
    """The number of the first action."""
    import gymnasium

    space = environment.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigurationError(f"actions must be Discrete, got {space}: give GymnasiumBatch levels=3")
    return int(space.start)


def _shapes(space: Any, name: str) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    import gymnasium

    if isinstance(space, gymnasium.spaces.Box):
        return tuple(space.shape)
    if isinstance(space, gymnasium.spaces.Dict) and all(
        isinstance(part, gymnasium.spaces.Box) for part in space.values()
    ):
        return {key: tuple(part.shape) for key, part in space.items() if part.shape is not None}
    raise ConfigurationError(f"{name}: observations must be a Box or a Dict of Boxes, got {space}: wrap it")
