"""`stateset-agents chat`: talk to an agent, run its tools, save and load conversations."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.chat.chat_loop import COMMANDS, ChatLoop
from stateset_agents.cli.chat.terminal import Terminal
from stateset_agents.cli.run_settings import enclosing_run, overrides, settings_of_run
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

if TYPE_CHECKING:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.core.environment import Environment
    from stateset_agents.core.tools import Tool
    from stateset_agents.serving.chat_session import ChatSession
    from stateset_agents.types.scenario import Scenario


_MAX_REPLIES = 1_000_000
"""Of the agent, in a conversation with a person."""


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to an agent",
        description=f"Talk to an agent, line by line. In the chat: {COMMANDS}; Ctrl-C stops an answer, "
        "Ctrl-D leaves. Without --model and --environment it is the embedded agent at its retail desk.",
    )
    parser.add_argument(
        "--model",
        help='"embedded:desk", a Hugging Face name, a folder, a GGUF file; a run or its checkpoint comes '
        "with its agent settings and, without --environment, --tools and --load, with its environment",
    )
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="retail_desk, package.module:Class, or that of a YAML file or a run; you play its user",
    )
    parser.add_argument("--scenario", metavar="ID", help="of the environment; its first test one by default")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--context", metavar="FILE", help="text, or a JSON object, for the system message")
    parser.add_argument("--temperature", type=float, help="of sampling; 0 is greedy (default 1)")
    parser.add_argument("--seed", type=int, help="of sampling (default 0)")
    parser.add_argument("--tools", nargs="+", default=[], metavar="MODULE:FUNCTION", help="offered to it")
    parser.add_argument("--save", metavar="FILE", help="append each conversation to this JSON lines file")
    parser.add_argument("--load", metavar="FILE", help="go on with the last conversation of such a file")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="agent.NAME=VALUE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; an error of the options, or of a line from a pipe, travels."""
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.serving.saved_conversations import check_writable

    if args.model is None and args.environment is None and not args.load and not args.tools:
        args.environment = "retail_desk"
    options = _ChatOptions.of(args)
    if args.save:
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
    from stateset_agents.core.chat.system_message import add_context
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
        lines = [f"{self.agent.model_name}; {COMMANDS}; Ctrl-C stops an answer, Ctrl-D leaves"]
        if self.loaded:
            lines.append(f"going on after {len(self.loaded)} messages")
        if self.scenario is not None:
            lines.append(f"what is known of {self.scenario.id}: {dict(self.scenario.context)}")
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
    from stateset_agents.runtime.named_code import imported

    function = imported("tool", name) if ":" in name else None
    if not callable(function):
        raise ConfigurationError(f"--tools takes module:function with typed parameters, got {name!r}")
    offer = function if isinstance(function, Tool) else tool(function)
    if offer.scenario_parameter is not None:
        raise ConfigurationError(
            f"tool {offer.name} reads the scenario, and --tools has none: give --environment NAME, one that "
            "offers this tool, instead"
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
