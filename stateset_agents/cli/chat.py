"""`stateset-agents chat`: talk to an agent, run its tools, save and load conversations."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import check_writable
from stateset_agents.cli.run_settings import enclosing_run, overrides, settings_of_run
from stateset_agents.runtime import event_loop
from stateset_agents.runtime.named_code import imported
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.logs import shown, shown_line
from stateset_agents.types.messages import ToolCall
from stateset_agents.types.settings import nearest

if TYPE_CHECKING:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.core.environment import Environment
    from stateset_agents.core.tools import Tool
    from stateset_agents.serving.chat_session import ChatSession
    from stateset_agents.types.scenario import Scenario

# ------------------------------------------------------------------------------ the terminal

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_MAX_SHOWN = 2000
"""Characters of one tool's answer."""


class Terminal:
    """People also get prompts, colours and remarks; a pipe gets only the agent's text and its tools."""

    def __init__(self) -> None:
        self.has_person = sys.stdin.isatty()
        self._has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._in_line = False
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        if self.has_person:
            with contextlib.suppress(ImportError):  # line editing, where Python was built with it
                import readline  # noqa: F401 - importing it is its effect

    def read(self) -> str | None:
        """The next line; None at the end. Ctrl-C discards what was typed."""
        was_interrupted = False
        while True:
            try:
                if was_interrupted:
                    print("\n(Ctrl-D leaves)")
                if self.has_person:
                    return input("you> ")
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not self.has_person:
                    raise
                was_interrupted = True

    def write(self, piece: str) -> None:
        """Print a piece of the agent's text."""
        if not self._in_line and self.has_person:
            print("agent> ", end="")
        self._in_line = True
        print(shown(piece), end="", flush=True)

    def note(self, text: str) -> None:
        """Print a tool call or its result on lines of its own."""
        self.end_line()
        if len(text) > _MAX_SHOWN:
            text = f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
        for line in shown(text).split("\n"):
            print(f"{_DIM}  {line}{_PLAIN}" if self._has_colours else f"  {line}", flush=True)

    def remark(self, text: str) -> None:
        """Print a note for people only."""
        if self.has_person:
            self.note(text)

    def to_stderr(self, text: str) -> None:
        """Print one line on stderr, so that a pipe's reader does not take it for the agent's text."""
        self.end_line()
        print(shown_line(text), file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Print an error as one line on stderr."""
        self.to_stderr(f"stateset-agents: {text}")

    def end_line(self) -> None:
        """End the line of the agent's text."""
        if self._in_line:
            print(flush=True)
            self._in_line = False


COMMANDS = {
    "/save FILE": "append the conversation so far to a file",
    "/reset": "begin a new conversation",
    "/help": "say this",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


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
        elif command == "/help":
            self._terminal.note("\n".join(f"{name:<12}{effect}" for name, effect in COMMANDS.items()))
        elif command.startswith("/"):
            raise ConfigurationError(f"no command {command!r}; there are {', '.join(COMMANDS)}")
        elif command:
            self._runner.run(self._answer(line))
        return True

    async def _answer(self, text: str) -> None:

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


_MAX_REPLIES = 1_000_000
"""The most replies of the agent in a conversation with a person."""


def run(args: argparse.Namespace) -> int:
    """Exit code 0; an error of the options, or of a line from a pipe, travels."""
    from stateset_agents.core.agent import MultiTurnAgent

    if args.model is None and args.environment is None and not args.load and not args.tools:
        args.environment = "retail_desk"
    options = _ChatOptions.of(args)
    check_writable(args.save)
    with event_loop.runner() as runner:
        exit_stack = AsyncExitStack()
        terminal = Terminal()
        try:
            agent = runner.run(exit_stack.enter_async_context(MultiTurnAgent(options.agent)))
            chat = ChatLoop(lambda: _open_session(options, agent, exit_stack), terminal, runner, args.save)
            for line in options.introduction():
                terminal.remark(line)
            if options.scenario is not None:
                opening = options.scenario.opening or "(no opening of their own)"
                terminal.to_stderr(f"you play {options.scenario.id}: {opening} (--scenario ID for another)")
            chat.run()
        except BrokenPipeError:  # the reader of the answers has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        finally:
            runner.run(exit_stack.aclose())
    return 0


async def _open_session(
    options: _ChatOptions, agent: MultiTurnAgent, exit_stack: AsyncExitStack
) -> ChatSession:
    """A new conversation. One of the environment, if there is one, starts without its user's words."""
    from stateset_agents.core.agent import add_context
    from stateset_agents.serving.chat_session import ChatSession, ConversationTools

    if options.environment is None or options.scenario is None:
        context = None if options.loaded else options.context
        return ChatSession(agent, tools=options.tools, context=context, messages=options.loaded)
    conversation = await options.environment.start(options.scenario, agent.config.seed)
    exit_stack.push_async_callback(conversation.close)
    system = [message for message in conversation.opening if message.role == "system"]
    return ChatSession(
        agent,
        tools=ConversationTools(conversation),
        messages=agent.with_system_prompt(add_context(system, options.context)),
    )


@dataclass(frozen=True, kw_only=True)
class _ChatOptions:
    """The agent, the conversation's environment and scenario, and the agent's tools."""

    agent: AgentConfig
    environment: Environment | None = None
    scenario: Scenario | None = None
    tools: tuple[Any, ...] = ()
    context: Any = None
    loaded: tuple[Any, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> _ChatOptions:
        """Check all options before the model is loaded. Raises ConfigurationError for an invalid one."""
        from stateset_agents.serving.saved_conversations import load_conversations

        conflicting = {"system": args.system, "context": args.context, "environment": args.environment}
        for name, value in conflicting.items():
            if args.load and value is not None:
                raise ConfigurationError(
                    f"--load goes on with a conversation as it was saved, so leave --{name} out"
                )
        if args.tools and args.environment:
            raise ConfigurationError("an environment has its own tools: give --tools or --environment")
        agent, environment = _agent_and_environment(args)
        if args.scenario and environment is None:
            raise ConfigurationError("--scenario is one of an environment's: give --environment as well")
        return cls(
            agent=agent,
            environment=environment,
            scenario=None if environment is None else _scenario(environment, args.scenario),
            tools=tuple(map(_tool, args.tools)),
            context=None if args.context is None else _context(Path(args.context)),
            loaded=tuple(load_conversations(args.load)[-1]) if args.load else (),
        )

    def introduction(self) -> list[str]:
        """Lines to show before the first prompt."""
        lines = [f"{self.agent.model_name}; {', '.join(COMMANDS)}; Ctrl-C stops an answer, Ctrl-D leaves"]
        if self.loaded:
            lines.append(f"going on after {len(self.loaded)} messages")
        if self.scenario is not None:
            facts = {name: value for name, value in self.scenario.context.items() if value not in ("", None)}
            lines.append(f"what you know as the user of {self.scenario.id}:")
            lines += [f"  {name.replace('_', ' ')}: {value!s:.200}" for name, value in facts.items()]
        return lines


def _agent_and_environment(args: argparse.Namespace) -> tuple[AgentConfig, Environment | None]:
    from stateset_agents.core.agent import AgentConfig
    from stateset_agents.training.components import ENVIRONMENTS, make_environment
    from stateset_agents.training.experiment import load_experiment

    named = {
        "agent.model_name": args.model,
        "agent.system_prompt": args.system,
        "agent.temperature": args.temperature,
        "agent.seed": args.seed,
    }
    settings = overrides(args.set, named)
    name = args.environment
    trained = settings_of_run(args.model)
    if name is None and "environment" in trained and not (args.tools or args.load):
        name = args.model
    if name is not None and (name.endswith((".yaml", ".yml")) or Path(name).is_dir()):
        of_run = {f"agent.{field}": value for field, value in trained.get("agent", {}).items()}
        config = load_experiment(enclosing_run(name) or name, of_run | settings)
        agent, spec = config.agent, dict(config.environment)
    else:
        settings.setdefault("agent.model_name", "embedded:desk")
        sections: dict[str, dict[str, Any]] = {"agent": dict(trained.get("agent", {})), "environment": {}}
        for setting, value in settings.items():
            section, _, field_name = setting.partition(".")
            if section not in sections or not field_name:
                raise ConfigurationError(
                    f"--set takes agent.NAME=VALUE or environment.NAME=VALUE here, got {setting!r}"
                    + (f" (did you mean 'agent.{setting}'?)" if setting in AgentConfig.field_names() else "")
                )
            sections[section][field_name] = value
        agent, spec = AgentConfig(**sections["agent"]), {"name": name, **sections["environment"]}
        if name is None:
            if sections["environment"]:
                raise ConfigurationError(f"--set {setting}: there is no environment, give --environment")
            return agent, None
    if spec["name"] in ENVIRONMENTS:
        spec["max_turns"] = _MAX_REPLIES
    return agent, make_environment(spec)


def _scenario(environment: Environment, id: str | None) -> Scenario:
    scenarios = [s for split in ("test", "validation", "train") for s in environment.scenarios(split)]
    if not scenarios:
        raise ConfigurationError("the environment has no scenarios: give it at least one")
    if id is None:
        return scenarios[0]
    match = next((scenario for scenario in scenarios if scenario.id == id), None)
    if match is None:
        ids = [scenario.id for scenario in scenarios]
        hint = nearest(id, ids) or f"; there is, for example, {ids[0]}"
        raise ConfigurationError(f"the environment has no scenario {id!r}{hint}")
    return match


def _tool(name: str) -> Tool:
    from stateset_agents.core.tools import Tool, tool

    function = imported("tool", name) if ":" in name else None
    if not callable(function):
        raise ConfigurationError(f"--tools takes module:function with typed parameters, got {name!r}")
    offer = function if isinstance(function, Tool) else tool(function)
    if offer.scenario_parameter is not None:
        raise ConfigurationError(
            f"tool {offer.name} reads the scenario, and --tools has none: give --environment NAME"
        )
    return offer


def _context(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigurationError(
            f"cannot read --context {path} ({reason}): give a text or JSON file"
        ) from error
    if path.suffix != ".json":
        return text.strip()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--context {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"--context {path} must hold a JSON object, got {type(data).__name__}")
    return data
