"""A small environment for tests of episodes and the engine: `from environments import ChattyEnvironment`."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome

__all__ = ["ChattyConversation", "ChattyEnvironment", "scenarios"]

Answer = Callable[["ChattyConversation", Message], Awaitable[Observation | None]]


def scenarios(number: int) -> list[Scenario]:
    return [Scenario(id=f"s{place}", family=f"family {place % 2}") for place in range(number)]


@dataclass
class ChattyEnvironment:
    """Says "go on" until the conversation has had `turns` turns; `answer` may answer instead.

    `log` keeps what happened: ("start" | "fork" | "close", scenario id, seed).
    """

    turns: int = 2
    answer: Answer | None = None
    opening: tuple[Message, ...] = (Message(role="user", content="hi"),)
    verdict: Outcome = field(default_factory=lambda: Outcome(reward=1.0, success=True))
    local: bool = True
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return scenarios(4) if split == "test" else ()

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        self.log.append(("start", scenario.id, seed))
        return ChattyConversation(self, scenario, seed)

    @property
    def num_open(self) -> int:
        what = [entry[0] for entry in self.log]
        return what.count("start") + what.count("fork") - what.count("close")


class ChattyConversation:
    def __init__(self, environment: ChattyEnvironment, scenario: Scenario, seed: int) -> None:
        self.opening = environment.opening
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.scenario = scenario
        self.seed = seed
        self.turn = 0
        self.is_fork = False
        self._environment = environment

    async def step(self, reply: Message) -> Observation:
        self.turn += 1
        if self._environment.answer is not None:
            observation = await self._environment.answer(self, reply)
            if observation is not None:
                return observation
        if self.turn == self._environment.turns:
            return Observation(terminated=True, reward=0.25)
        return Observation(messages=(Message(role="user", content="go on"),), reward=0.5)

    async def outcome(self) -> Outcome:
        return self._environment.verdict

    def fork(self) -> Conversation:
        self._environment.log.append(("fork", self.scenario.id, self.seed))
        twin = copy.copy(self)
        twin.is_fork = True
        return twin

    async def close(self) -> None:
        self._environment.log.append(("close", self.scenario.id, self.seed))
