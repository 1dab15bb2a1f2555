"""`stateset-agents serve MODEL`: an agent behind OpenAI's chat-completions interface, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import Any

from stateset_agents.http_guard import API_KEY_VARIABLE, HttpGuard, read_api_keys

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The verb and its arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="answer OpenAI's clients with an agent",
        description="Serve an agent as /v1/chat/completions, until Ctrl-C or SIGTERM.",
    )
    parser.add_argument("model", help='"embedded:desk", a Hugging Face name, a folder, a run or a checkpoint')
    parser.add_argument("--system", metavar="TEXT", help="system prompt, before the client's")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need a key"
    )
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (8080); 0 takes a free one")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"keys, one a line, of which a request must send one; without it {API_KEY_VARIABLE} is the key",
    )
    parser.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name besides this machine's that requests may have as their Host; may be repeated",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 after Ctrl-C or SIGTERM."""
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.serving.agents import AgentServer

    keys = read_api_keys(args.api_key_file)
    HttpGuard.listening_on(args.host, api_keys=keys)  # refused before the model is loaded
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C is a KeyboardInterrupt there
            loop.add_signal_handler(number, stop.set)
    config = AgentConfig(model_name=args.model, system_prompt=args.system)
    async with (
        MultiTurnAgent(config) as agent,
        AgentServer(
            agent, host=args.host, port=args.port, api_keys=keys, allowed_hosts=args.allowed_host
        ) as server,
    ):
        print(f"{args.model} answers at {server.url}", flush=True)
        await stop.wait()
