"""One MCP server's session: opened, listed, called, closed. `McpEnvironment` holds one for each server.

The mcp library may be of version 1 or of version 2, which writes fields as `is_error`, not `isError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from stateset_agents.core.tools import Tool, ToolError
from stateset_agents.runtime.tasks import Deadline
from stateset_agents.types.errors import (
    ConfigurationError,
    EnvironmentFailure,
    EnvironmentTimeout,
    StatesetError,
)
from stateset_agents.types.settings import Settings

if TYPE_CHECKING:
    import mcp
    from mcp.types import CallToolResult, ErrorData
    from mcp.types import Tool as ListedTool


_SESSION_TERMINATED = frozenset({32600, -32600})
"""The library's own code, first version and second, for a server that no longer knows the session, as after a
restart."""
_PING_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
"""Seconds that a server has to end its session; the library kills a stdio server's process after 4."""


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors for want of files, memory or processes: the command is right, and may run when other conversations
have ended."""


class McpServer(Settings):
    """An MCP server's address: a command that is run and talked to over stdio, or the URL of one that runs.

    `${NAME}` in env and headers is replaced by that environment variable, so that a run's settings hold the
    names of secrets and not the secrets.
    """

    command: str | None = Field(default=None, description="The program of a stdio server.")
    args: tuple[str, ...] = Field(default=(), description="Its arguments.")
    env: Mapping[str, str] = Field(
        default={}, description="Its environment, besides PATH, HOME and the like."
    )
    cwd: Path | None = Field(default=None, description="The folder it runs in.")
    url: str | None = Field(default=None, description="Of a streamable HTTP server, e.g. http://host/mcp.")
    headers: Mapping[str, str] = Field(default={}, description="Sent with every HTTP request.")
    only: tuple[str, ...] | None = Field(default=None, description="Tools to offer; all when unset.")
    timeout: float = Field(default=60.0, gt=0, description="Seconds a call may take.")
    start_timeout: float = Field(default=30.0, gt=0, description="Seconds until its tools are listed.")

    @model_validator(mode="after")
    def _is_one_of_two(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ConfigurationError("an MCP server needs command (and args), or url")
        unused = ("headers",) if self.url is None else ("args", "env", "cwd")
        for name in unused:
            if getattr(self, name):
                raise ConfigurationError(f"{name} has no effect on an MCP server given by its other door")
        return self


class McpSession:
    """Made by `await McpSession.open(name, server)`; its `tools` are ours.

    A task of its own keeps the connection, for the library wants it closed by the task that opened it.
    """

    def __init__(self, name: str, server: McpServer, *, one_by_one: bool) -> None:
        self.name = name
        self.tools: list[Tool] = []
        self._server = server
        self._lock = asyncio.Lock() if one_by_one else contextlib.nullcontext()
        self._stop = asyncio.Event()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # the connection's task closes it
        self._final_error = ""
        """The last words in it, once it is closed."""
        self._is_lost = False
        self._session: asyncio.Future[mcp.ClientSession] = asyncio.get_running_loop().create_future()
        self._pings: set[asyncio.Task[None]] = set()
        self._connection = asyncio.create_task(self._connect(), name=f"MCP server {name}")
        # Its error is told by those who wait for it.
        self._connection.add_done_callback(lambda task: task.cancelled() or task.exception())

    @classmethod
    async def open(cls, name: str, server: McpServer, *, one_by_one: bool = True) -> McpSession:
        """Connect and list the tools. `one_by_one`: a call waits for the one before.

        Raises EnvironmentFailure where the server does not answer, ConfigurationError where its command or
        the tools it is asked for do not exist.
        """
        session = cls(name, server, one_by_one=one_by_one)
        late = EnvironmentTimeout(
            f"MCP server {name!r} did not list its tools within {server.start_timeout} s: raise start_timeout"
        )
        try:
            async with Deadline(server.start_timeout).bound(late):
                first: set[asyncio.Future[Any]] = {session._connection, session._session}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not session._session.done():
                raise session._not_started()
        except BaseException:
            session._connection.cancel()
            await session._ended()
            raise
        return session

    @property
    def is_alive(self) -> bool:
        return not (self._is_lost or self._connection.done())

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its answer as text; `_outcome` says what may be raised."""
        async with self._lock:
            return await self._call(tool, arguments)

    async def close(self) -> None:
        """End the session and its process; what goes wrong meanwhile no longer matters."""
        self._stop.set()
        await self._ended()

    async def _ended(self) -> None:
        """Wait for the connection's task; a server that does not answer is left behind."""
        for _ in range(3):
            ended, _ = await asyncio.wait({self._connection}, timeout=_CLOSE_SECONDS)
            if ended:
                break
            self._connection.cancel()
        for pings in (left := [*self._pings]):
            pings.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        late = EnvironmentTimeout(
            f"tool {tool} of MCP server {self.name!r} took longer than {self._server.timeout} s: mend what "
            "hangs, or raise the server's timeout"
        )
        session = self._session.result()
        call = asyncio.ensure_future(session.call_tool(tool, dict(arguments)))
        over = asyncio.Event()
        pings = asyncio.create_task(self._ping(session, over), name=f"pings of MCP server {self.name}")
        self._pings.add(pings)
        pings.add_done_callback(self._ping_ended)
        try:
            async with Deadline(self._server.timeout).bound(late):
                await asyncio.wait({call, self._connection}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._gone()
            return self._outcome(tool, call)
        finally:
            over.set()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _ping(self, session: mcp.ClientSession, over: asyncio.Event) -> None:
        """Ping an HTTP server now and then until the call is over.

        Only when it sends does the library learn that a server died; the connection's task then ends. A busy
        server may answer after the call: to cancel a ping as its answer comes would end the session.
        """
        while self._server.url is not None and not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _PING_SECONDS)
            if not over.is_set():
                await session.send_ping()

    def _ping_ended(self, pings: asyncio.Task[None]) -> None:
        self._pings.discard(pings)
        if not pings.cancelled():
            pings.exception()  # told by the connection's task

    def _outcome(self, tool: str, call: asyncio.Future[CallToolResult]) -> str:
        """Raises ToolError for what the agent is told, EnvironmentFailure for a server that broke."""
        import anyio
        from mcp.shared import exceptions
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        mcp_error: type[Exception] = _either(exceptions, "McpError", "MCPError")
        try:
            result = call.result()
        except mcp_error as error:
            mcp_failure: ErrorData = error.error  # type: ignore[attr-defined]  # both versions have it
            if mcp_failure.code == INVALID_PARAMS:
                raise ToolError(mcp_failure.message) from error
            if mcp_failure.code == CONNECTION_CLOSED:
                raise self._gone() from error
            self._is_lost |= mcp_failure.code in _SESSION_TERMINATED
            raise EnvironmentFailure(
                f"MCP {self.name!r} answered {tool} with error {mcp_failure.code}: {mcp_failure.message:.200}"
            ) from error
        except (ValidationError, RuntimeError) as error:  # of another shape than MCP's, or the tool's schema
            raise EnvironmentFailure(
                f"MCP server {self.name!r} answered {tool} with what is no result ({_why(error)}): mend it"
            ) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, asyncio.CancelledError) as error:
            raise self._gone() from error
        text = _text_of(result)
        if _either(result, "isError", "is_error"):
            raise ToolError(text)
        return text

    def _gone(self) -> EnvironmentFailure:
        self._is_lost = True
        return EnvironmentFailure(f"MCP server {self.name!r} is gone{self._saying()}")

    def _not_started(self) -> StatesetError:
        """Why the connection's task ended before the tools were listed."""
        error = _cause(self._connection.exception())
        if isinstance(error, StatesetError):
            return error
        return EnvironmentFailure(
            f"MCP server {self.name!r} cannot be reached: {_why(error)}{self._saying()}"
        )

    def _saying(self) -> str:
        last_line = self._last_error_line()
        return f", saying: {last_line}" if last_line else ""

    async def _connect(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._close_errors)
            try:
                session = await self._connected(stack)
            except OSError as error:
                kind = EnvironmentFailure if error.errno in _SHORTAGES else ConfigurationError
                where = "" if error.filename is None else f": {error.filename!r}"
                raise kind(f"MCP server {self.name!r} cannot be run: {error.strerror}{where}") from error
            await session.initialize()
            self.tools = self._offered(await _listed(session))
            self._session.set_result(session)
            await self._stop.wait()

    def _close_errors(self) -> None:
        self._final_error = self._last_error_line()
        self._errors.close()

    async def _connected(self, stack: AsyncExitStack) -> mcp.ClientSession:
        import mcp
        from mcp.client import streamable_http
        from mcp.client.stdio import stdio_client

        server = self._server
        if server.command is not None:
            program = mcp.StdioServerParameters(
                command=server.command,
                args=list(server.args),
                env=self._filled(server.env),
                cwd=server.cwd,
            )
            read, write = await stack.enter_async_context(stdio_client(program, errlog=self._errors))
        else:
            http = _either(streamable_http, "httpx", "httpx2")
            timeout = http.Timeout(server.start_timeout, read=None)  # each call has its own limit
            client = http.AsyncClient(headers=self._filled(server.headers), timeout=timeout)
            await stack.enter_async_context(client)
            transport = streamable_http.streamable_http_client(str(server.url), http_client=client)
            read, write, *_ = await stack.enter_async_context(transport)
        return await stack.enter_async_context(mcp.ClientSession(read, write))

    def _filled(self, values: Mapping[str, str]) -> dict[str, str]:
        """The values with ${NAME} replaced by the environment variable."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in os.environ:
                raise ConfigurationError(
                    f"MCP server {self.name!r} wants the environment variable {match[1]}: set it"
                )
            return os.environ[match[1]]

        return {name: re.sub(r"\$\{(\w+)\}", value, text) for name, text in values.items()}

    def _offered(self, listed: Sequence[ListedTool]) -> list[Tool]:
        """The listed tools, or those that `only` asks for."""
        only = self._server.only
        names = [entry.name for entry in listed]
        missing = [name for name in only or () if name not in names]
        if missing:
            raise ConfigurationError(
                f"MCP server {self.name!r} has no tool {', '.join(missing)}; it has: {', '.join(names)}"
            )
        return [self._as_ours(entry) for entry in listed if only is None or entry.name in only]

    def _as_ours(self, listed: ListedTool) -> Tool:
        async def call(**arguments: Any) -> str:
            return await self.call(listed.name, arguments)

        return Tool(
            name=listed.name,
            description=listed.description or "",
            function=call,
            arguments=_either(listed, "inputSchema", "input_schema"),
            local=False,
        )

    def _last_error_line(self) -> str:
        """The last line of the program's error output."""
        if self._errors.closed:
            return self._final_error
        size = os.fstat(self._errors.fileno()).st_size  # pread: the program writes at the file's position
        tail = os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        return (tail.strip().splitlines() or [""])[-1].strip()


async def _listed(session: mcp.ClientSession) -> list[ListedTool]:
    """All pages of them."""
    from mcp.types import PaginatedRequestParams

    tools: list[ListedTool] = []
    cursor: str | None = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools.extend(page.tools)
        cursor = _either(page, "nextCursor", "next_cursor")
        if not cursor:
            return tools


def _text_of(result: CallToolResult) -> str:
    """The blocks' texts; of what is no text (pictures, sound) the agent reads that it was left out."""
    parts = []
    for block in result.content:
        holder = getattr(block, "resource", block)
        text = getattr(holder, "text", None)
        parts.append(f"[{block.type}, which is no text, was left out]" if text is None else str(text))
    structured = _either(result, "structuredContent", "structured_content")
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts)


def _either(holder: Any, *names: str) -> Any:
    """The attribute that the installed version of the library has under one of these names."""
    return getattr(holder, next(name for name in names if hasattr(holder, name)))


def _why(error: BaseException | None) -> str:
    """The error in one line; pydantic's has several for each field."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r:.60}"
    return " ".join(str(error).split())[:300] or type(error).__name__  # a broken pipe has no words


def _cause(error: BaseException | None) -> BaseException | None:
    """The first error of a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def expect_library() -> None:
    """Raises ConfigurationError with the cure where the library is missing; loads it otherwise, which takes a
    while and is not for an event loop."""
    try:
        from mcp.client.streamable_http import streamable_http_client  # noqa: F401  # is it there?
    except ImportError as error:
        raise ConfigurationError('MCP servers need the mcp library: pip install "mcp>=1.24,<3"') from error
