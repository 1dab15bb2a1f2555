"""`stateset-agents engine MODEL`: the command that starts a vLLM server for rollouts. It starts nothing."""

from __future__ import annotations

import argparse
import shlex
from typing import Any


def add_parser(subparsers: Any) -> None:
    """The verb and its arguments."""
    parser = subparsers.add_parser(
        "engine",
        help="print the command that starts a vLLM server for rollouts",
        description="Print the command that starts a vLLM server as the vllm: backend needs it.",
    )
    parser.add_argument("model", help="as everywhere: a folder, a run, a hub name, embedded:desk")
    parser.add_argument("--host", default="127.0.0.1", help="address it listens on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port it listens on (8000)")
    parser.set_defaults(run=run)


def command(model: str, *, host: str = "127.0.0.1", port: int = 8000) -> str:
    """One line for a shell. Raises ConfigurationError for a model's name that leads nowhere."""
    from stateset_agents.backends.pretrained.loading import model_folder

    words = [
        *("vllm", "serve", model_folder(model), "--host", host, "--port", str(port)),
        *("--generation-config", "vllm"),  # not what the model's folder likes its answers sampled with
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that is sampled from
    ]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"  # with it new weights are taken


def run(args: argparse.Namespace) -> int:
    """Print it, and what to give for the agent's model then."""
    print(command(args.model, host=args.host, port=args.port))
    print(f"# then: model_name: vllm:http://{args.host}:{args.port}")
    return 0
