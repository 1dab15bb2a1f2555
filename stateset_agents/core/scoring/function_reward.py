"""Plain functions as rewards, called with the arguments that their parameters name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from stateset_agents.core.scoring.base import (
    Result,
    RewardFunction,
    RewardResult,
    Scope,
    as_member_result,
    as_result,
)
from stateset_agents.runtime.named_code import NamedCall
from stateset_agents.runtime.user_code import is_async
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.foreign_names import ARGUMENTS
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory, Turn

Reward = RewardFunction | Callable[..., Any]
"""A reward, or a function that `as_reward` makes one of."""


def _heard(*messages: Message) -> tuple[Message, ...]:
    """The messages as users hear them: without thoughts, which are in the trajectory alone."""
    return tuple(replace(one, reasoning=None) if one.reasoning is not None else one for one in messages)


_TRAJECTORY_ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = {
    "trajectory": lambda trajectory: trajectory,
    "messages": lambda trajectory: _heard(*trajectory.messages),
    "replies": lambda trajectory: _heard(*trajectory.replies),
    "scenario": lambda trajectory: trajectory.scenario,
    "context": lambda trajectory: trajectory.scenario.context,
    "success": lambda trajectory: trajectory.success,
    "outcome": lambda trajectory: trajectory.outcome,
}
_TURN_ARGUMENTS: Mapping[str, Callable[[Turn], Any]] = {
    "turn": lambda turn: turn,
    "reply": lambda turn: _heard(turn.completion.message)[0],
    "feedback": lambda turn: turn.feedback,
}
_ARGUMENTS: Mapping[Scope, tuple[str, ...]] = {
    "turn": (*_TURN_ARGUMENTS, *_TRAJECTORY_ARGUMENTS),
    "trajectory": tuple(_TRAJECTORY_ARGUMENTS),
    "group": ("trajectories",),
}


class FunctionReward(RewardFunction):
    """A plain function as a reward; made by `@reward_function`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        scope: Scope = "trajectory",
        local: bool | None = None,
    ) -> None:
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        if scope not in _ARGUMENTS:
            raise ConfigurationError(
                f"reward {self.name}: scope must be one of {', '.join(_ARGUMENTS)}, got {scope!r}"
            )
        self.scope = scope
        self.answers_as_a_whole = scope == "group"
        self.local = not is_async(function) if local is None else local
        self._function = function
        self._named = NamedCall(f"reward {self.name}", function, _ARGUMENTS[scope])
        self.wanted = self._named.wanted

    async def score(self, trajectory: Trajectory) -> RewardResult:
        if self.scope == "group":
            return await self.score_as_group(trajectory)
        if self.scope == "turn":
            return await self._score_turns(trajectory)
        return as_result(await self._named.call(self._given(trajectory)))

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        if self.scope != "group":
            return await super().score_group(trajectories)
        results = await self._named.call({"trajectories": tuple(trajectories)})
        if not isinstance(results, Iterable):
            missing = ": is a return missing?" if results is None else ""
            raise ConfigurationError(
                f"reward {self.name} of scope group must score each trajectory, got {results!r:.60}{missing}"
            )
        return [as_member_result(self.name, result) for result in results]

    async def _score_turns(self, trajectory: Trajectory) -> RewardResult:
        """Return the mean of all turns' scores; each turn sees the conversation up to its own reply.

        A turn earns what it moves the mean by, so that no turn's reward depends on later ones.
        """
        scores: list[float | None] = []
        for index, turn in enumerate(trajectory.turns):
            so_far = replace(trajectory, turns=(*trajectory.turns[:index], replace(turn, feedback=())))
            arguments = self._given(so_far)
            arguments.update({key: of(turn) for key, of in _TURN_ARGUMENTS.items()})
            scores.append(as_result(await self._named.call(arguments)).score)
        applicable = [score for score in scores if score is not None]
        if not applicable:
            return RewardResult(score=None)
        return RewardResult(score=math.fsum(applicable) / len(applicable), turn_rewards=_mean_moves(scores))

    def _given(self, trajectory: Trajectory) -> dict[str, Any]:
        names = [name for name in self.wanted if name in _TRAJECTORY_ARGUMENTS]
        return {name: _TRAJECTORY_ARGUMENTS[name](trajectory) for name in names}


def _mean_moves(scores: Sequence[float | None]) -> tuple[float, ...]:
    """Return by how much each score moves the mean of those so far: (0, 1, None) -> (0, .5, 0)."""
    moves, total, count, mean = [], 0.0, 0, 0.0
    for score in scores:
        if score is not None:
            total, count = total + score, count + 1
        moves.append((total / count if count else 0.0) - mean)
        mean += moves[-1]
    return tuple(moves)


@overload
def reward_function(function: Callable[..., Any], /) -> FunctionReward: ...
@overload
def reward_function(
    *, name: str | None = None, scope: Scope = "trajectory", local: bool | None = None
) -> Callable[[Callable[..., Any]], FunctionReward]: ...
def reward_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    scope: Scope = "trajectory",
    local: bool | None = None,
) -> FunctionReward | Callable[[Callable[..., Any]], FunctionReward]:
    """Make a reward of a function that names what it wants to see.

        @reward_function
        def brief(replies, success):
            return None if success is None else success / len(replies)

    It may ask for trajectory, messages, replies, scenario, context, success, outcome; with
    `scope="turn"` also for turn, reply and feedback, and is called once per turn; with `scope="group"` for
    trajectories, and returns one score for each. It returns a number, None, or a RewardResult. Sync
    functions run in a thread and count as local; async ones count as remote unless `local=True`.
    """
    if function is None:
        return lambda decorated: FunctionReward(decorated, name=name, scope=scope, local=local)
    return FunctionReward(function, name=name, scope=scope, local=local)


def as_reward(value: Reward) -> RewardFunction:
    """A reward as it is; a plain function as `@reward_function` makes it.

    Everything that takes a reward (trainer, evaluator, engine, composites) goes through here. Raises
    ConfigurationError for a class that was not called, and for what is neither.
    """
    if isinstance(value, RewardFunction):
        return value
    if isinstance(value, type):
        raise ConfigurationError(f"a reward must be an object, got the class: write {value.__name__}()")
    if not callable(value):
        several = ": several are a CompositeReward([(reward, weight), ...])"
        raise ConfigurationError(
            f"a reward must be a RewardFunction or a function, got {type(value).__name__}: {value!r:.60}"
            f"{several if isinstance(value, list | tuple) else ''}"
        )
    return FunctionReward(value)


def asks_for_a_conversation(value: object) -> bool:
    """True for a function of a conversation, as `def brief(replies): ...`, not for one that makes a reward.

    One that asks for it in another library's words is such a function too, and is told so by `as_reward`.
    """
    if isinstance(value, type) or not callable(value):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # a built-in that does not tell
        return False
    names = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    foreign = any(name in ARGUMENTS for name in names)
    return foreign or (bool(names) and all(name in _TRAJECTORY_ARGUMENTS for name in names))
