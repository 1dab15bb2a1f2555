"""`stateset-agents serve MODEL`: an agent, or a deployment of two, behind OpenAI's interface."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import sys
from typing import TYPE_CHECKING

from stateset_agents.cli.deployment import last_record
from stateset_agents.cli.output import OPTIONS, add_arguments, check_writable
from stateset_agents.cli.run_settings import overrides, settings_of_run
from stateset_agents.runtime.http_guard import HttpGuard, read_api_keys
from stateset_agents.serving.limits import Limits
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.serving.routing import Router


_WATCH_SECONDS = 0.5


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Register an option for each of the server's limits, and those that follow them."""
    texts = Limits.descriptions()
    for name, field in Limits.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float if isinstance(field.default, float) else int,
            default=field.default,
            metavar="N",
            help=texts[name] + ("" if field.default is None else f" ({field.default:,})"),
        )
    add_arguments(parser, OPTIONS["of serve, after its limits"]["arguments"])


def run(args: argparse.Namespace) -> int:
    """Exit code 0 after Ctrl-C or SIGTERM, 1 where the backend broke or requests were broken off."""
    for name in ("drain", "rest_after"):
        seconds = getattr(args, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigurationError(f"--{name.replace('_', '-')} must be seconds from 0 on, got {seconds}")
    if args.max_body is not None and args.max_body < 1:
        raise ConfigurationError(f"--max-body must be bytes from 1 on, got {args.max_body}")
    if args.save_conversations is not None:
        if args.deployment is None:
            raise ConfigurationError("--save-conversations is for --deployment: add it, or leave it out")
        check_writable(args.save_conversations)
    expect_that(0 <= args.port <= 65535, "--port", "be from 0 to 65535", args.port)
    return asyncio.run(_serve(args))


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits that the flags say; raises ConfigurationError for one that cannot be."""
    return Limits(**{name: getattr(args, name) for name in Limits.model_fields})


def agent_config_of(args: argparse.Namespace, model: str | None = None) -> AgentConfig:
    """The agent's settings: those of the model's run, and what the flags say.

    `model`: instead of that of the flags. Raises ConfigurationError for a setting that no agent has.
    """
    from stateset_agents.core.agent import AgentConfig

    model = args.model if model is None else model
    named = {"agent.model_name": model, "agent.system_prompt": args.system}
    settings = dict(settings_of_run(model).get("agent", {}))
    for name, value in overrides(args.set, named).items():
        section, _, field = name.partition(".")
        if section != "agent" or not field:
            raise ConfigurationError(f"--set takes agent.NAME=VALUE here, got {name!r}")
        settings[field] = value
    return AgentConfig(**settings)


async def _serve(args: argparse.Namespace) -> int:
    from stateset_agents.serving.server import AgentServer

    keys = read_api_keys(args.api_key_file)
    HttpGuard.listening_on(
        args.host, api_keys=keys, allowed_hosts=args.allowed_host
    )  # refused before the model is loaded
    limits = limits_of(args)
    stop, stop_waiting = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C is a KeyboardInterrupt there
            loop.add_signal_handler(number, lambda: (stop_waiting if stop.is_set() else stop).set())
    async with (
        _agents(args) as (agent, name),
        AgentServer(
            agent,
            host=args.host,
            port=args.port,
            api_keys=keys,
            allowed_hosts=args.allowed_host,
            limits=limits,
            max_body=args.max_body,
            rest_after=args.rest_after,
            name=args.served_model_name,
        ) as server,
    ):
        print(f"{name} at {server.url}", flush=True)
        watch = asyncio.ensure_future(_until_broken(server.agent))
        wait = asyncio.ensure_future(stop.wait())
        await asyncio.wait({watch, wait}, return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        if watch.done():
            watch.result()  # raises what broke, which main says in one line
        watch.cancel()
        drain = asyncio.create_task(server.drain(args.drain))
        stopped = asyncio.create_task(stop_waiting.wait())
        await asyncio.wait({drain, stopped}, return_when=asyncio.FIRST_COMPLETED)
        server.stop_waiting()
        broken_off = await drain
        stopped.cancel()
    if broken_off:
        print(
            f"stateset-agents: {broken_off} requests were broken off: give them longer than --drain "
            f"{args.drain:g}, or wait before the second signal",
            file=sys.stderr,
        )
    return 1 if broken_off else 0


@contextlib.asynccontextmanager
async def _agents(args: argparse.Namespace) -> AsyncIterator[tuple[MultiTurnAgent | Router, str]]:
    """The agent or router that answers, started, and the words that say so."""
    from stateset_agents.core.agent import MultiTurnAgent

    if args.deployment is None:
        async with MultiTurnAgent(agent_config_of(args)) as agent:
            yield agent, f"{args.model} answers"
        return
    from stateset_agents.deployment.conversations import Deployed
    from stateset_agents.deployment.journal import Journal
    from stateset_agents.serving.routing import SavingRouter

    with Journal(args.deployment, create=False) as journal:
        record = last_record(journal)
        async with (
            MultiTurnAgent(agent_config_of(args, record.baseline)) as baseline,
            MultiTurnAgent(agent_config_of(args, record.candidate)) as candidate,
            Deployed(baseline, candidate, None, journal, deployment=record.id) as deployed,
        ):
            mode = deployed.controller.state.mode
            who = f"{record.baseline}, and {record.candidate} by deployment {record.id} ({mode}), answer"
            if args.save_conversations is None:
                yield deployed, who
            else:
                yield SavingRouter(deployed, args.save_conversations), who


async def _until_broken(agent: MultiTurnAgent) -> None:
    """Raises BackendError once the agent's backend can serve no turn any more; a supervisor starts us anew.

    A vLLM server that is away may come back, so that is left to `/health`.
    """
    from stateset_agents.backends.vllm import Unreachable

    while True:
        with contextlib.suppress(Unreachable):
            await agent.check_health()
        await asyncio.sleep(_WATCH_SECONDS)
