"""Conversations whose tools come from MCP servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from stateset_agents.core.environment import (
    Conversation,
    ConversationEnvironment,
    Observation,
    StateFactory,
    Success,
)
from stateset_agents.core.tools import Tool
from stateset_agents.core.users.simulated_user import UserFactory, default_user
from stateset_agents.environments.mcp.session import McpServer, McpSession, expect_library
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome


class McpEnvironment:
    """A `ConversationEnvironment` with the tools of MCP servers.

        McpEnvironment(
            [{"topic": "sum", "opening": "what is 2 + 3?"}],
            servers={"sums": {"command": "python", "args": ["sums.py"]}},
        )

    What a server says of a call (an error of the tool, an argument that does not fit) is told to the agent; a
    server that is gone, breaks the protocol or takes too long fails the conversation.
    """

    def __init__(
        self,
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path,
        servers: Mapping[str, McpServer | Mapping[str, Any]],
        *,
        session: Literal["conversation", "shared"] = "conversation",
        tools: Sequence[Tool | Callable[..., Any]] | type = (),
        max_turns: int = 6,
        user: UserFactory | str | None = default_user,
        success: Success | str | None = None,
        state: StateFactory | str | None = None,
        system_prompt: str | None = None,
        local: bool = False,
        max_result_chars: int = 10_000,
    ) -> None:
        """
        Args:
            scenarios: Scenarios as `ConversationEnvironment` takes them; it explains what is not listed here.
            servers: Name -> `McpServer` or its fields.
            session: "conversation" opens the servers anew for each conversation and ends them with it: a
                stdio server is a fresh process, so that no conversation sees what another did. "shared" has
                one session for all, for servers that keep nothing between calls (search, sums); only such
                conversations can be forked.
            tools: Functions of your own besides.
            local: Say True where no call leaves this machine and the run shall be repeatable.
        """
        if session not in ("conversation", "shared"):
            raise ConfigurationError(f"session must be conversation or shared, got {session!r:.60}")
        if not isinstance(servers, Mapping) or not servers:
            raise ConfigurationError(
                f'servers must be {{"shop": {{"command": ...}} or {{"url": ...}}}}, got {servers!r:.60}'
            )
        expect_library()
        self._servers = {name: _server(name, settings) for name, settings in servers.items()}
        self._shares = session == "shared"
        self._own_tools = (tools,) if isinstance(tools, type) else tuple(tools)
        self._options: dict[str, Any] = {
            "max_turns": max_turns,
            "user": user,
            "success": success,
            "state": state,
            "system_prompt": system_prompt,
            "local": local,
            "max_result_chars": max_result_chars,
        }
        self._inner = ConversationEnvironment(scenarios, tools=self._own_tools, **self._options)
        self.local = self._inner.local
        self._opening: asyncio.Task[list[McpSession]] | None = None
        """The task that opens the shared sessions."""

    def scenarios(self, split: str) -> list[Scenario]:
        return self._inner.scenarios(split)

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Open the servers, or take the shared ones, and the conversation."""
        sessions = await (self._shared() if self._shares else self._open(one_by_one=True))
        own_sessions = [] if self._shares else sessions
        try:
            tools: list[Tool | Callable[..., Any]] = [*_tools(sessions), *self._own_tools]
            environment = ConversationEnvironment([scenario], tools=tools, **self._options)
            return _McpConversation(await environment.start(scenario, seed), own_sessions)
        except BaseException:
            await _close(own_sessions)
            raise

    async def close(self) -> None:
        """End the shared sessions; conversations end their own."""
        opening, self._opening = self._opening, None
        if opening is not None and opening.get_loop() is asyncio.get_running_loop():
            opening.cancel()
            await asyncio.wait({opening})
            await _close(_opened(opening))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(self, *, one_by_one: bool, instead_of: Sequence[McpSession] = ()) -> list[McpSession]:
        """All servers at once; where one cannot be opened, none stays open."""
        await _close(instead_of)
        opening = [
            asyncio.ensure_future(McpSession.open(name, server, one_by_one=one_by_one))
            for name, server in self._servers.items()
        ]
        try:
            return await gather_or_cancel(opening)
        except BaseException:
            done = [task for task in opening if not task.cancelled() and task.exception() is None]
            await _close([task.result() for task in done])
            raise

    async def _shared(self) -> list[McpSession]:
        """Everybody waits for one opening; sessions that were lost, or of another loop, are opened anew."""
        opening = self._opening
        stale: list[McpSession] = []
        if opening is not None and opening.get_loop() is not asyncio.get_running_loop():
            opening = None
        elif opening is not None and opening.done():
            stale = _opened(opening)
            opening = opening if stale and all(session.is_alive for session in stale) else None
        if opening is None:
            opening = asyncio.create_task(self._open(one_by_one=False, instead_of=stale))
            # Whoever waited may be gone: nobody else would look at its error.
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._opening = opening
        return await asyncio.shield(opening)


class _McpConversation:
    def __init__(self, inner: Conversation, sessions: Sequence[McpSession]) -> None:
        self.opening = inner.opening
        self.tools = inner.tools
        self._inner = inner
        self._sessions = sessions
        """Sessions that this conversation must close; empty where sessions are shared."""

    async def step(self, reply: Message) -> Observation:
        return await self._inner.step(reply)

    async def outcome(self) -> Outcome:
        return await self._inner.outcome()

    def fork(self) -> Conversation:
        if self._sessions:
            raise ConfigurationError(
                "a conversation with MCP sessions of its own cannot be forked, for what its servers hold "
                "cannot be copied: give session: shared where they hold nothing, or another "
                "advantage_estimator"
            )
        return _McpConversation(self._inner.fork(), ())

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            await _close(self._sessions)


def _server(name: str, server: McpServer | Mapping[str, Any]) -> McpServer:
    if isinstance(server, McpServer):
        return server
    if not isinstance(server, Mapping):
        raise ConfigurationError(f"MCP server {name!r} must have command or url, got {server!r:.60}")
    try:
        return McpServer(**server)
    except ConfigurationError as error:
        raise ConfigurationError(f"MCP server {name!r}: {error}") from None


def _tools(sessions: Sequence[McpSession]) -> list[Tool]:
    """The tools of all servers; two of one name are refused."""
    tools = [tool for session in sessions for tool in session.tools]
    for name, times in Counter(tool.name for tool in tools).items():
        if times > 1:
            raise ConfigurationError(f"two MCP servers have a tool {name!r}: leave one out, with `only`")
    return tools


def _opened(opening: asyncio.Task[list[McpSession]]) -> list[McpSession]:
    """The sessions that were opened; none where opening failed."""
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return []
    return opening.result()


async def _close(sessions: Sequence[McpSession]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))
