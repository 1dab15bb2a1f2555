"""The protocol of numeric environments, whose rows are stepped as one array, and its checks at the start.

A group is rows with one seed: the same start and the same exogenous noise, so that their returns differ by
their actions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stateset_agents.tracking.windows import Trace
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Observations = FloatArray | Mapping[str, FloatArray]
"""[B, ...], or several of them by name."""

Rule = Callable[[Any], Callable[[], IntArray]]
"""A policy without a network: called with an environment that has just been reset, it gives a function
that is called before each step and gives [B] actions. What a rule remembers of an episode is in there."""

_CHECKED_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Properties of an environment that a policy and a trainer need beforehand."""

    name: str
    observation_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    """Shape of one row's observation; by name if it has several parts."""
    num_actions: int
    """Actions are 0 to num_actions - 1."""
    horizon: int
    """Steps after which every episode is over, as `truncated` where it did not end by itself."""
    components: tuple[str, ...] = ()
    """Names of the parts of the reward, in the order in which they are shown."""
    action_names: tuple[str, ...] = ()
    """Display name of each action; numbers if empty."""

    def __post_init__(self) -> None:
        expect_that(self.num_actions >= 2, "num_actions", "be at least 2", self.num_actions)
        if self.action_names and len(self.action_names) != self.num_actions:
            raise ConfigurationError(
                f"action_names must be {self.num_actions}, one per action, got {len(self.action_names)}"
            )
        hint = "say after how many steps an episode is over"
        expect_that(self.horizon >= 1, "horizon", "be at least 1", self.horizon, hint)

    def to_json(self) -> dict[str, Any]:
        """The record in config.yaml and checkpoints."""
        shape = self.observation_shape
        plain = (
            {name: list(part) for name, part in shape.items()} if isinstance(shape, Mapping) else list(shape)
        )
        return {
            "name": self.name,
            "observation_shape": plain,
            "num_actions": self.num_actions,
            "horizon": self.horizon,
            "components": list(self.components),
            **({"action_names": list(self.action_names)} if self.action_names else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transition:
    """Result of one step of all rows."""

    observations: Observations
    """[B, ...] after the step, of an episode that has just ended too; numpy float32."""
    rewards: NDArray[np.floating[Any]]  # [B]
    terminated: BoolArray  # [B]
    """True where the episode ended by itself; nothing is earned after it."""
    truncated: BoolArray  # [B]
    """True where a limit cut the episode, which would have gone on earning."""
    components: Mapping[str, NDArray[np.floating[Any]]] = field(default_factory=dict)
    """[B] each: the parts of the reward, by name."""


@runtime_checkable
class BatchedEnvironment(Protocol):
    """B rows at once; numpy in and out.

    `step` is called for all rows until the last one has ended: a row that has ended takes any action, and
    what it gives is not read.
    """

    spec: Spec

    def reset(self, seeds: Sequence[int]) -> Observations:
        """Begin one episode per seed; [B, ...] first observations.

        Row i is a function of `seeds[i]` alone: equal seeds mean the same start and the same exogenous noise
        in every later step, in one batch and over batches.
        """

    def step(self, actions: IntArray) -> Transition:
        """One action per row, [B] int64."""

    def fork(self, rows: IntArray) -> Self:
        """A new environment whose row i is a copy of row `rows[i]`, with the same exogenous future.

        Raises NotImplementedError where that cannot be: groups then begin at a reset only.
        """

    def action_mask(self) -> BoolArray | None:
        """[B, num_actions] True where an action is allowed now; None where all always are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskRows:
    """The task of each row in an environment of several tasks."""

    names: tuple[str, ...]
    ids: IntArray  # [B], places in `names`
    references: NDArray[np.float64]
    """[tasks, 2] returns of a random policy and of a solved task, in the task's own rewards."""
    scales: NDArray[np.float64]
    """[tasks] what the task's own rewards are multiplied by."""

    def scores(self, returns: NDArray[np.float64]) -> NDArray[np.float64]:
        """[B] 0 for a random policy's return and 1 for a solved task's, not clipped."""
        low, high = self.references[self.ids].T
        scores: NDArray[np.float64] = (returns / self.scales[self.ids] - low) / (high - low)
        return scores


@runtime_checkable
class Tasked(Protocol):
    """An environment of several tasks, each known before its row acts."""

    def task_rows(self) -> TaskRows:
        """The tasks of the rows since the last `reset`."""


@runtime_checkable
class Ruled(Protocol):
    """An environment that has rules to compare a policy with."""

    def rules(self) -> Mapping[str, Rule]:
        """Rules by name."""


@runtime_checkable
class Traced(Protocol):
    """An environment that can say what happened in a row, for the report."""

    def trace(self, row: int) -> Trace:
        """The row from the last `reset` to its end; called when all rows have ended."""


def map_observations(function: Callable[..., Any], *observations: Any) -> Any:
    """Apply `function` to observations, arrays or several by name: then to those of each name."""
    if isinstance(observations[0], Mapping):
        return {name: function(*(each[name] for each in observations)) for name in observations[0]}
    return function(*observations)


# ------------------------------------------------------------------------------------------ checks


def check_observations(observations: Observations, spec: Spec, num_rows: int) -> None:
    """Raises ConfigurationError for a wrong shape, a wrong dtype, or a part that is missing."""
    shape = spec.observation_shape
    if isinstance(shape, Mapping) != isinstance(observations, Mapping):
        raise ConfigurationError(
            f"{spec.name}: spec.observation_shape is {shape!r} and the observations are "
            f"{type(observations).__name__}: both must be one array, or both several by name"
        )
    if not isinstance(shape, Mapping):
        _check_observation("observations", observations, (num_rows, *shape), spec)
        return
    assert isinstance(observations, Mapping)
    for name, part in shape.items():
        if name not in observations:
            raise ConfigurationError(
                f"{spec.name}: observations lack {name!r}, which spec.observation_shape has"
            )
        _check_observation(f"observations[{name!r}]", observations[name], (num_rows, *part), spec)


def check_transition(transition: Transition, spec: Spec, num_rows: int) -> None:
    """Raises ConfigurationError for arrays of a wrong shape or dtype."""
    check_observations(transition.observations, spec, num_rows)
    _check_array("rewards", transition.rewards, (num_rows,), spec, kinds="f")
    for name in ("terminated", "truncated"):
        _check_array(name, getattr(transition, name), (num_rows,), spec, kinds="b")
    if spec.components and transition.components.keys() != set(spec.components):
        raise ConfigurationError(
            f"{spec.name}: a step's components are {sorted(transition.components)} and spec.components "
            f"{sorted(spec.components)}: give the same names"
        )
    for name, part in transition.components.items():
        _check_array(f"components[{name!r}]", part, (num_rows,), spec, kinds="f")


_KINDS = {"f": "a float", "b": "bool"}


def _check_observation(name: str, array: Any, shape: tuple[int, ...], spec: Spec) -> None:
    if isinstance(array, np.ndarray) and array.shape == shape and array.dtype != np.float32:
        raise ConfigurationError(
            f"{spec.name}: {name} must be float32, got {array.dtype}: give {name}.astype(np.float32)"
        )
    _check_array(name, array, shape, spec)


def _check_array(name: str, array: Any, shape: tuple[int, ...], spec: Spec, *, kinds: str = "f") -> None:
    if not isinstance(array, np.ndarray):
        raise ConfigurationError(f"{spec.name}: {name} must be a numpy array, got {type(array).__name__}")
    if array.shape != shape:
        raise ConfigurationError(f"{spec.name}: {name} must have shape {shape}, got {array.shape}")
    if array.dtype.kind not in kinds:
        raise ConfigurationError(f"{spec.name}: {name} must be {_KINDS[kinds]}, got {array.dtype}")


def check_environment(environment: BatchedEnvironment, *, seed: int = 0) -> bool:
    """Play a few steps of four rows twice; says whether the environment can fork.

    Raises ConfigurationError where equal seeds give unequal episodes, or a fork goes another way under the
    same actions. What it gives is checked as `check_transition` does.
    """
    spec = environment.spec
    seeds = [derive(seed, "check", index) for index in (0, 0, 1, 1)]
    actions = np.random.default_rng(seed).integers(0, spec.num_actions, size=(_CHECKED_STEPS, 4))
    actions[:, 1::2] = actions[:, ::2]
    first, second = (_played(environment, seeds, actions) for _ in range(2))
    for index, (first_rows, other) in enumerate(zip(first, second, strict=True)):
        when = "start" if index == 0 else f"step {index}"
        if not np.array_equal(first_rows[0], first_rows[1], equal_nan=True) or not np.array_equal(
            first_rows[2], first_rows[3], equal_nan=True
        ):
            raise ConfigurationError(
                f"{spec.name}: two rows with one seed and the same actions differ at the {when}: let reset "
                "draw start and noise of a row from its seed alone"
            )
        if not np.array_equal(first_rows, other, equal_nan=True):
            raise ConfigurationError(
                f"{spec.name}: two resets with the same seeds differ at the {when}: let reset forget what "
                "was before, and draw from the seeds alone"
            )
    environment.reset(seeds)
    environment.step(_allowed(environment, actions[0]))
    try:
        copy = environment.fork(np.arange(4))
    except NotImplementedError:
        return False
    for step, step_actions in enumerate(actions[1:], start=2):
        step_actions = _allowed(environment, step_actions)
        ours, theirs = environment.step(step_actions), copy.step(step_actions)
        if not np.array_equal(_as_rows(ours), _as_rows(theirs), equal_nan=True):
            raise ConfigurationError(
                f"{spec.name}: a fork differs from its original at step {step} under the same actions: let "
                "fork copy the rows' whole state and their noise to come"
            )
        if (ours.terminated | ours.truncated).any():
            break
    return True


def _played(
    environment: BatchedEnvironment, seeds: Sequence[int], actions: IntArray
) -> list[NDArray[np.float64]]:
    """[4, ...] of the start and of each step: all that it gave, a row per row, until an episode has ended."""
    observations = environment.reset(seeds)
    check_observations(observations, environment.spec, len(seeds))
    played = [_flat_rows(observations)]
    for step_actions in actions:
        transition = environment.step(_allowed(environment, step_actions))
        check_transition(transition, environment.spec, len(seeds))
        played.append(_as_rows(transition))
        if (transition.terminated | transition.truncated).any():
            break
    return played


def _allowed(environment: BatchedEnvironment, actions: IntArray) -> IntArray:
    """The actions, each moved to the next allowed one."""
    mask = environment.action_mask()
    if mask is None:
        return actions
    shape = (len(actions), environment.spec.num_actions)
    _check_array("action_mask()", mask, shape, environment.spec, kinds="b")
    order = (actions[:, None] + np.arange(shape[1])) % shape[1]
    allowed = np.take_along_axis(mask, order, axis=1)
    return np.take_along_axis(order, allowed.argmax(1)[:, None], axis=1)[:, 0]


def _as_rows(transition: Transition) -> NDArray[np.float64]:
    columns = [
        transition.rewards,
        transition.terminated,
        transition.truncated,
        *transition.components.values(),
    ]
    return np.concatenate([_flat_rows(transition.observations), np.stack(columns, axis=1)], axis=1)


def _flat_rows(observations: Observations) -> NDArray[np.float64]:
    parts = list(observations.values()) if isinstance(observations, Mapping) else [observations]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1).astype(np.float64)
