"""`stateset-agents serve MODEL`: an agent behind OpenAI's chat-completions interface, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The verb and its arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="answer OpenAI's clients with an agent",
        description="Serve an agent as /v1/chat/completions, until Ctrl-C. Nobody is asked for a key.",
    )
    parser.add_argument("model", help='"embedded:desk", a Hugging Face name, a folder, a run or a checkpoint')
    parser.add_argument("--system", metavar="TEXT", help="system prompt, before the client's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (8080); 0 takes a free one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 after Ctrl-C or SIGTERM."""
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.serving.agents import AgentServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C is a KeyboardInterrupt there
            loop.add_signal_handler(number, stop.set)
    config = AgentConfig(model_name=args.model, system_prompt=args.system)
    async with (
        MultiTurnAgent(config) as agent,
        AgentServer(agent, host=args.host, port=args.port) as server,
    ):
        print(f"{args.model} answers at {server.url}", flush=True)
        await stop.wait()
