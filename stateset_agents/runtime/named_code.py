"""Code of the user's own by name, "package.module:name", as YAML files and command lines give it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from stateset_agents.runtime.user_code import told, user_line
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.settings import nearest

__all__ = ["imported"]


def imported(what: str, name: str) -> Any:
    """What "package.module:name" leads to, or "folder/package.module:name" in a folder that is searched too.

    Raises ConfigurationError where that is nowhere; `what` is for its text.
    """
    folder, slash, rest = name.rpartition("/")
    module, _, attribute = rest.partition(":")
    if slash and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        home = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{what} {name!r} cannot be imported: {_why(error, module)}") from error
    file = getattr(home, "__file__", None)
    if slash and file is not None and not Path(file).is_relative_to(folder):
        raise ConfigurationError(
            f"{what} {name!r}: {module} is imported from {file} already; rename one of them"
        )
    try:
        return getattr(home, attribute)
    except AttributeError as error:
        if file is None and getattr(home, "__path__", None):  # a namespace package
            raise ConfigurationError(
                f"{what} {name!r}: {module!r} is only a folder here: name a module in it, "
                f"{module}.file:{attribute}, or give the command where the file lies"
            ) from error
        there = [one for one in vars(home) if not one.startswith("_")]
        raise ConfigurationError(
            f"{what} {name!r}: module {module!r} has no {attribute!r}{nearest(attribute, there)}"
        ) from error


def _why(error: Exception, module: str) -> str:
    """What an import broke on: the module is nowhere, or something inside it broke."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module == missing or module.startswith(f"{missing}.")):
        return f"{error}; give the command where it lies, or put that folder on PYTHONPATH"
    if isinstance(error, StatesetError):  # of a @tool or an AgentConfig at the module's own level
        return f"{error} (at {user_line(error)})"
    return told(error)
