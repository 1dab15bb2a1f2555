"""An environment behind a running OpenEnv server as a conversation, through the installed OpenEnv client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stateset_agents.core.environment import Conversation
from stateset_agents.environments.text_world import (
    InvalidAction,
    TextAdapter,
    World,
    WorldStep,
    reset_seed,
    world_conversation,
    world_scenarios,
)
from stateset_agents.runtime.circuit_breakers import retry
from stateset_agents.runtime.named_code import library
from stateset_agents.runtime.user_code import guarded
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure, EnvironmentTimeout
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import expect_that, is_number, is_whole

_log = get_logger(__name__)
_FIRST_PAUSE = 0.5
"""Seconds before the second attempt to open a session; each later pause is twice as long."""


class OpenEnvText:
    """Every conversation is a session of its own on an OpenEnv server: one WebSocket, one reset, then steps.

        OpenEnvText("http://localhost:8000", reply_field="message")

    Each step's reward is its turn's; `EnvironmentReward` adds them up. A reply that is no action, or that the
    server finds invalid, is told to the agent and costs a turn (`misread_reward`). A connection that drops,
    an error of the server and a time-out fail the conversation: its session is lost, and it goes on in no
    other.
    """

    def __init__(
        self,
        url: str,
        *,
        reply_field: str | None = None,
        parse: Callable[..., Mapping[str, Any]] | str | None = None,
        actions: Mapping[str, Mapping[str, Any]] | None = None,
        render: Callable[..., str] | str | None = None,
        success: Callable[..., Any] | str | float | None = None,
        system_prompt: str | None = None,
        reset: Mapping[str, Any] | None = None,
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | None = None,
        num_train: int | None = None,
        num_held_out: int | None = None,
        seed: int = 0,
        max_turns: int = 20,
        misread_reward: float = 0.0,
        attempts: int = 3,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`render`, `parse` and `success` ask for what they want by name: observation, info, scenario.

        Args:
            url: Address of the server, http:// or ws://.
            reply_field: The field of the server's action that the whole reply goes into; or instead
            parse: makes the action's fields of the `reply`, a ValueError's text is told to the agent; or
            actions: the words that act, with the fields of each: a reply must name one, and no other.
            render: Says the observation, a mapping; absent, the agent reads it as JSON.
            success: The least total reward that is a success (one of 0 or less only where the world came to
                its own end, for doing nothing earns 0), or a function, which may also ask for total, rewards,
                terminated, truncated and messages. Absent, success is unknown.
            system_prompt: Opens every conversation.
            reset: Arguments of every reset besides `seed`; a scenario may have more.
            scenarios: A scenario's context may have `seed` and `reset`.
            num_train: Where scenarios are absent: how many seeds to train on (1000).
            num_held_out: Number of validation and of test seeds (100 each), the same whatever `seed` is.
            seed: Chooses the training seeds.
            max_turns: Maximum replies, those that were no action included; the conversation is truncated
                then.
            misread_reward: Reward of a turn whose reply is no action.
            attempts: Number of attempts to open a session, with growing pauses; a step is never tried again.
            timeout: Seconds for connecting, and for each answer.
            headers: HTTP headers of the connection.

        Functions may be named as "module:function", which is how a YAML file gives them.
        """
        if not isinstance(url, str) or not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigurationError(
                f"url must be an OpenEnv server's, http://... or ws://..., got {url!r:.60}"
            )
        if sum(way is not None for way in (reply_field, parse, actions)) != 1:
            raise ConfigurationError("give one of reply_field, parse and actions: what a reply does")
        expect_that(is_whole(attempts, 1), "attempts", "be at least 1", attempts, length=60)
        expect_that(is_number(timeout) and timeout > 0, "timeout", "be seconds above 0", timeout, length=60)
        self._client_class = _client_class()
        self._url = url
        self._reset = dict(reset or {})
        self._attempts = attempts
        self._timeout = timeout
        self._headers = dict(headers or {})
        self._adapter = TextAdapter(
            render=render,
            parse=parse if reply_field is None else _into(reply_field),
            actions=actions,
            success=success,
            system_prompt=system_prompt,
            max_turns=max_turns,
            misread_reward=misread_reward,
        )
        self._scenarios = world_scenarios(
            scenarios, family="openenv", num_train=num_train, num_held_out=num_held_out, seed=seed
        )
        self.local = False

    def scenarios(self, split: str) -> list[Scenario]:
        expect_split(split)
        return [scenario for scenario in self._scenarios if scenario.split == split]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Open a session, reset it by the scenario's seed (else the group's), and say what it shows."""
        extra = scenario.context.get("reset", {})
        if not isinstance(extra, Mapping):
            raise ConfigurationError(f"scenario {scenario.id}: reset must be a mapping, got {extra!r:.60}")
        reset_arguments = {"seed": reset_seed(scenario, seed), **self._reset, **extra}
        return await world_conversation(await self._opened(reset_arguments), self._adapter, scenario)

    async def _opened(self, reset_arguments: Mapping[str, Any]) -> World:
        """A session that was reset; raises EnvironmentFailure when no attempt comes to one."""

        async def attempt(_: int) -> World:
            world = _OpenEnvWorld(self._url, self._client(), self._timeout)
            try:
                await guarded(f"a session of {world.name}", world.reset(reset_arguments))
            except BaseException:
                await world.close()
                raise
            return world

        async def wait(failures: int, error: Exception) -> None:
            _log.warning("opening a session again", error=str(error), attempt=failures)
            await asyncio.sleep(_FIRST_PAUSE * 2 ** (failures - 1))

        return await retry(
            attempt,
            times=self._attempts - 1,
            is_final=lambda error: not isinstance(error, EnvironmentFailure),
            wait=wait,
        )

    def _client(self) -> Any:
        return self._client_class(
            base_url=self._url,
            connect_timeout_s=self._timeout,
            message_timeout_s=self._timeout,
            mode="simulation",
            headers=self._headers or None,
        )


class _OpenEnvWorld:
    """One session. Where the connection drops, the library would connect anew and step a session that was
    never reset; here that is an error."""

    offers: Mapping[str, Any] = {}

    def __init__(self, url: str, client: Any, timeout: float) -> None:
        self.name = f"the OpenEnv server at {url}"
        self.result = WorldStep(observation={})
        self._client = client
        self._timeout = timeout

    async def reset(self, reset_arguments: Mapping[str, Any]) -> None:
        await self._answered(self._client.connect())
        self.result = self._seen(await self._answered(self._client.reset(**reset_arguments)))
        _keep_connection(self._client)

    async def step(self, action: Any) -> WorldStep:
        if not isinstance(action, Mapping):
            raise ConfigurationError(f"parse must make the action's fields, a mapping, got {action!r:.60}")
        try:
            self.result = self._seen(await self._answered(self._client.step(dict(action))))
        except RuntimeError as error:
            if str(error).endswith("(code: VALIDATION_ERROR)"):
                raise InvalidAction(f"that is no valid action: {dict(action)!r:.200}") from error
            raise
        return self.result

    async def _answered(self, answer: Any) -> Any:
        try:
            return await answer
        except TimeoutError as error:
            raise EnvironmentTimeout(
                f"{self.name} did not answer within {self._timeout} s: mend what hangs, or raise timeout"
            ) from error

    @staticmethod
    def _seen(result: Any) -> WorldStep:
        observation = {name: value for name, value in result.observation.items() if name != "metadata"}
        return WorldStep(
            observation=observation,
            info=result.metadata or {},
            reward=None if result.reward is None else float(result.reward),
            terminated=bool(result.done),
        )

    def fork(self) -> World:
        raise ConfigurationError(
            "a session of an OpenEnv server cannot be forked: train with another advantage_estimator"
        )

    async def close(self) -> None:
        await self._client.close()


def _keep_connection(client: Any) -> None:
    """Let the client go on with the connection it has, and with no other."""
    connect, connection = client._connect_async, client._ws

    async def stay() -> Any:
        await connect()
        if client._ws is not connection:
            raise ConnectionError("the connection was lost, and the session with it")
        return client

    client._connect_async = stay


def _into(field: str) -> Callable[[str], Mapping[str, Any]]:
    if not isinstance(field, str) or not field:
        raise ConfigurationError(f"reply_field must be the name of a field, got {field!r:.60}")

    return lambda reply: {field: reply}


def _client_class() -> Any:
    hint = 'pip install "openenv>=0.10,<0.11", in an environment of its own if it does not suit your others'
    missing = f"OpenEnv servers need the openenv library: {hint}"
    client_class = library("openenv.core.generic_client", missing).GenericEnvClient
    if not hasattr(client_class, "_connect_async"):  # 0.3, say, which would go on in another session
        raise ConfigurationError(f"this version of the openenv library is not supported: {hint}")
    return client_class
