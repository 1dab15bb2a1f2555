"""The loop of the chat command: it reads a line, runs the agent and its tools, and prints the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.chat.terminal import Terminal
from stateset_agents.types.errors import ConfigurationError, StatesetError

if TYPE_CHECKING:
    from stateset_agents.serving.chat_session import ChatSession
    from stateset_agents.types.messages import ToolCall


COMMANDS = "/save FILE, /reset, /quit"


class ChatLoop:
    """Answers lines until they end; the event loop runs only while the agent answers."""

    def __init__(
        self,
        open_session: Callable[[], Coroutine[Any, Any, ChatSession]],
        terminal: Terminal,
        runner: asyncio.Runner,
        save_path: str | None,
    ) -> None:
        """`open_session` starts a conversation; each one is appended to the file `save_path` at its end."""
        self._open_session = open_session
        self._terminal = terminal
        self._runner = runner
        self._save_path = save_path

    def run(self) -> None:
        """Run until the lines end or /quit. Errors are printed to a person, and raised if a pipe is read."""
        self._open()
        try:
            while True:
                try:
                    line = self._terminal.read()
                    if line is None or not self._handle(line):
                        return
                except StatesetError as error:
                    if not self._terminal.has_person:
                        raise
                    self._terminal.error(str(error))
                except KeyboardInterrupt:
                    if not self._terminal.has_person:
                        raise
                    self._terminal.note("(stopped)")
        finally:
            self._terminal.end_line()
            self._save_session()

    def _handle(self, line: str) -> bool:
        """Handle one line; False after the last one."""
        command, _, argument = line.strip().partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self._save_session()
            self._runner.run(self._session.close())
            self._open()
            self._terminal.remark("(a new conversation)")
        elif command == "/save":
            self._write(argument.strip())
        elif command.startswith("/"):
            raise ConfigurationError(f"no command {command!r}; there are {COMMANDS}")
        elif command:
            self._runner.run(self._answer(line))
        return True

    async def _answer(self, text: str) -> None:
        from stateset_agents.types.messages import ToolCall

        async with aclosing(self._session.stream(text)) as events:
            async for event in events:
                if isinstance(event, str):
                    self._terminal.write(event)
                elif isinstance(event, ToolCall):
                    self._terminal.note(_format_call(event))
                else:
                    self._terminal.note(f"-> {event.content}")
        if not self._session.messages[-1].content:
            self._terminal.note("(no answer in words)")
        self._terminal.end_line()

    def _open(self) -> None:
        self._session = self._runner.run(self._open_session())

    def _save_session(self) -> None:
        if self._save_path and any(message.role == "assistant" for message in self._session.messages):
            self._write(self._save_path)

    def _write(self, path: str) -> None:
        from stateset_agents.serving.saved_conversations import save_conversation

        if not path:
            raise ConfigurationError("/save needs a file, for example /save chat.jsonl")
        if not self._session.messages:
            raise ConfigurationError("there is nothing to save yet")
        save_conversation(path, self._session.messages)
        self._terminal.remark(f"(saved in {path})")


def _format_call(call: ToolCall) -> str:
    if call.error is not None:
        return f"{call.name or 'tool call'}: {call.error}; it wrote {call.written!r}"
    arguments = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items()
    )
    return f"{call.name}({arguments})"
