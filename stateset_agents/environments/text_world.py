"""Worlds of observations and actions as conversations: what the Gymnasium and OpenEnv environments share.

A `World` is reset and stepped; a `TextAdapter` renders observations as text and parses replies as actions.
A reply that is no action costs the agent a turn; the world is not stepped.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.core.sources.scenario_files import load_scenarios, read_scenarios
from stateset_agents.core.tools import Toolbox
from stateset_agents.runtime.named_code import NamedCall
from stateset_agents.runtime.user_code import guarded
from stateset_agents.types.comparison import nfc
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Outcome

_SEEDS = 2**31
"""Seeds of worlds stay below: many worlds hand them on to generators of 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStep:
    """The result of a reset or a step."""

    observation: Any
    info: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    """Reward of the step; None where the world gives none."""
    terminated: bool = False
    truncated: bool = False


class InvalidAction(StatesetError):
    """The reply is no action here; the agent reads the text."""


class World(Protocol):
    """One live world, at the state that `result` shows."""

    name: str
    """Name of the world in errors."""
    result: WorldStep

    @property
    def offers(self) -> Mapping[str, Any]:
        """Values that render, parse and success may ask for by name, besides the result."""
        ...

    async def step(self, action: Any) -> WorldStep:
        """Raises InvalidAction for what is none, anything else when the world breaks."""
        ...

    def fork(self) -> World: ...

    async def close(self) -> None: ...


class TextAdapter:
    """Renders observations, parses replies and judges success; checked once, shared by conversations."""

    def __init__(
        self,
        *,
        render: Callable[..., str] | str | None,
        parse: Callable[..., Any] | str | None,
        actions: Sequence[str] | Mapping[str, Any] | None,
        success: Callable[..., Any] | str | float | None,
        system_prompt: str | None,
        max_turns: int,
        misread_reward: float,
        offers: Sequence[str] = (),
    ) -> None:
        """The environments document the arguments; `offers` are the names of the world's `offers`."""
        expect_that(is_whole(max_turns, 1), "max_turns", "be at least 1", max_turns, length=60)
        if not isinstance(system_prompt, str | None):
            raise ConfigurationError(f"system_prompt must be text, got {system_prompt!r:.60}")
        expect_that(_is_number(misread_reward), "misread_reward", "be a number", misread_reward, length=60)
        if (parse is None) == (actions is None):
            raise ConfigurationError("give parse, a function of the reply, or actions, the words that act")
        self.max_turns = max_turns
        self.misread_reward = float(misread_reward)
        self.system = () if system_prompt is None else (Message(role="system", content=system_prompt),)
        keys = ("observation", "info", "scenario", *offers)
        self.render = NamedCall("render", _plain if render is None else render, keys)
        self.parse = NamedCall("parse", _action_parser(actions) if parse is None else parse, ("reply", *keys))
        self.least: float | None = None
        self.success: NamedCall | None = None
        if isinstance(success, int | float) and _is_number(success):
            self.least = float(success)
        elif success is not None:
            judged = ("total", "rewards", "terminated", "truncated", "messages", *keys)
            self.success = NamedCall("success", success, judged)

    async def shown(self, world: World, scenario: Scenario) -> Message:
        """The result as the user's words."""
        text = await guarded("render", self.render.call(_arguments(world, scenario)))
        expect_that(isinstance(text, str), "render", "return text", text, length=60)
        return Message(role="user", content=text)

    async def judged(self, arguments: Mapping[str, Any]) -> bool | None:
        """True where the task was done; None where no rule decides it."""
        if self.least is not None:
            # who does nothing has a total of 0: where that would do, the world must have come to its own end
            return bool(arguments["total"] >= self.least and (self.least > 0 or arguments["ended"]))
        if self.success is None:
            return None
        verdict = await guarded("success", self.success.call(arguments))
        if verdict is not None and verdict not in (True, False):
            raise ConfigurationError(f"success must return True, False or None, got {verdict!r:.60}")
        return None if verdict is None else bool(verdict)


async def world_conversation(world: World, adapter: TextAdapter, scenario: Scenario) -> Conversation:
    """A conversation in a world that was just reset; closes the world when it cannot be shown."""
    try:
        opening = (*adapter.system, await adapter.shown(world, scenario))
    except BaseException:
        await world.close()
        raise
    return _WorldConversation(opening=opening, world=world, adapter=adapter, scenario=scenario)


@dataclass(kw_only=True, eq=False)
class _WorldConversation:
    opening: tuple[Message, ...]
    world: World
    adapter: TextAdapter
    scenario: Scenario
    tools: Sequence[Mapping[str, Any]] = ()
    rewards: tuple[float, ...] = ()
    """The world's own, one for each action."""
    num_misread: int = 0

    def __post_init__(self) -> None:
        self.messages = self.opening
        self.turns_left = self.adapter.max_turns

    async def step(self, reply: Message) -> Observation:
        self.turns_left -= 1
        refused = await self._act(reply)
        self.num_misread += bool(refused)
        result = self.world.result
        answer = refused or (await self.adapter.shown(self.world, self.scenario),)
        self.messages += (reply, *answer)
        if refused:
            reward: float | None = self.adapter.misread_reward
        else:
            reward = None if result.reward is None else float(result.reward)
            self.rewards += () if reward is None else (reward,)
        return Observation(
            messages=answer,
            reward=reward,
            terminated=result.terminated,
            truncated=result.truncated or self.turns_left == 0,
        )

    async def _act(self, reply: Message) -> tuple[Message, ...]:
        """Move the world; or, where the reply is no action, what the agent is told."""
        if reply.tool_calls:
            return tuple(await Toolbox().call_all(reply.tool_calls))  # there are no tools
        arguments = {**_arguments(self.world, self.scenario), "reply": reply.content}
        try:
            action = await guarded("parse", _read(self.adapter.parse, arguments))
            await guarded(self.world.name, self.world.step(action))
        except InvalidAction as error:
            return (Message(role="user", content=str(error)),)
        return ()

    async def outcome(self) -> Outcome:
        result = self.world.result
        total = math.fsum(self.rewards)
        arguments = {
            **_arguments(self.world, self.scenario),
            "ended": result.terminated or result.truncated,
            "total": total,
            "rewards": self.rewards,
            "terminated": result.terminated,
            "truncated": result.truncated or self.turns_left == 0,
            "messages": self.messages,
        }
        success = await self.adapter.judged(arguments)
        success_reward = None if success is None else float(success)
        return Outcome(
            reward=0.0 if self.rewards else success_reward,
            success=success,
            breakdown={"misread": float(self.num_misread)},
        )

    def fork(self) -> Conversation:
        twin = copy.copy(self)
        twin.world = self.world.fork()
        return twin

    async def close(self) -> None:
        await guarded(f"closing {self.world.name}", self.world.close())


async def _read(parse: NamedCall, arguments: Mapping[str, Any]) -> Any:
    try:
        return await parse.call(arguments)
    except StatesetError:
        raise
    except ValueError as error:
        raise InvalidAction(str(error) or "that is no action") from error


def _arguments(world: World, scenario: Scenario) -> dict[str, Any]:
    return {
        "observation": world.result.observation,
        "info": world.result.info,
        "scenario": scenario,
        **world.offers,
    }


def _plain(observation: Any) -> str:
    """Text as it is; a mapping, which is what a server answers, as JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return json.dumps(observation, ensure_ascii=False, default=str)
    raise ConfigurationError(
        f"the observation is a {type(observation).__name__}, no text: give render, a function that says it"
    )


def _action_parser(actions: Sequence[str] | Mapping[str, Any] | None) -> Callable[[str], Any]:
    """Reads a reply that names one of the words, whatever stands around it, and no other of them.

    TextAdapter without actions stand for their places: ["left", "right"] for 0 and 1.
    """
    if not isinstance(actions, Mapping):
        listed = isinstance(actions, Sequence) and not isinstance(actions, str)
        actions = {word: index for index, word in enumerate(actions or ())} if listed else {}
    if not actions or not all(isinstance(word, str) and word.strip() for word in actions):
        raise ConfigurationError(f"actions must be words (quote yes and no in YAML), got {actions!r:.60}")
    by_word = {nfc(word).lower(): action for word, action in actions.items()}
    if len(by_word) < len(actions):
        raise ConfigurationError(f"two actions have the same word: {', '.join(actions)}")
    longest_first = "|".join(re.escape(word) for word in sorted(by_word, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)", re.IGNORECASE)

    def parse(reply: str) -> Any:
        named = {word.lower() for word in pattern.findall(nfc(reply))}
        if len(named) != 1:
            raise ValueError(f"say one of: {', '.join(actions)}")
        return by_word[named.pop()]

    return parse


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def world_scenarios(
    scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | None,
    *,
    family: str,
    num_train: int | None,
    num_held_out: int | None,
    seed: int,
) -> tuple[Scenario, ...]:
    """The scenarios given; or `num_train` seeds (1000 when absent), and `num_held_out` (100) of each held-out
    split, which do not depend on `seed`."""
    if isinstance(scenarios, str | Path):
        scenarios = read_scenarios(scenarios)
    if scenarios is not None:
        if num_train is not None or num_held_out is not None:
            raise ConfigurationError("give scenarios, or num_train and num_held_out, not both")
        return tuple(load_scenarios(scenarios))
    held_out = 100 if num_held_out is None else num_held_out
    sizes: dict[Split, int] = {
        "train": 1000 if num_train is None else num_train,
        "validation": held_out,
        "test": held_out,
    }
    for split, size in sizes.items():
        name, least = ("num_train", 1) if split == "train" else ("num_held_out", 0)
        rule = "be at least 1" if least else "be 0 or more"
        expect_that(is_whole(size, least), name, rule, size, length=60)
    return tuple(
        Scenario(
            id=f"{split}-{number}",
            family=family,
            context={"seed": derive(seed if split == "train" else 0, "world", split, number) % _SEEDS},
            split=split,
        )
        for split, size in sizes.items()
        for number in range(size)
    )


def reset_seed(scenario: Scenario, seed: int) -> int:
    """The scenario's own seed where its context has one, else the group's: members start alike either way."""
    own_seed: int = scenario.context.get("seed", seed % _SEEDS)
    rule = "be a whole number from 0"
    expect_that(is_whole(own_seed, 0), f"scenario {scenario.id}: seed", rule, own_seed, length=60)
    return own_seed
