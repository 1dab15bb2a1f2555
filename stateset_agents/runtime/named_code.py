"""User code by its name "package.module:name", as YAML files and command lines write it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from stateset_agents.runtime.user_code import format_error, user_line
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.settings import nearest

__all__ = ["imported"]


def imported(label: str, name: str) -> Any:
    """The object "package.module:name", or "folder/package.module:name" with the folder put on `sys.path`.

    Raises ConfigurationError if there is none; `label` names it in the error.
    """
    folder, slash, dotted = name.rpartition("/")
    module, _, attribute = dotted.partition(":")
    if slash and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        home = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{label} {name!r} cannot be imported: {_why(error, module)}") from error
    file = getattr(home, "__file__", None)
    if slash and file is not None and not Path(file).is_relative_to(folder):
        raise ConfigurationError(
            f"{label} {name!r}: {module} is imported from {file} already; rename one of them"
        )
    try:
        return getattr(home, attribute)
    except AttributeError as error:
        if file is None and getattr(home, "__path__", None):  # a namespace package
            raise ConfigurationError(
                f"{label} {name!r}: {module!r} is only a folder here: name a module in it, "
                f"{module}.file:{attribute}, or give the command where the file lies"
            ) from error
        public = [key for key in vars(home) if not key.startswith("_")]
        raise ConfigurationError(
            f"{label} {name!r}: module {module!r} has no {attribute!r}{nearest(attribute, public)}"
        ) from error


def _why(error: Exception, module: str) -> str:
    """Why an import failed: the module does not exist, or code in it raised."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module == missing or module.startswith(f"{missing}.")):
        return f"{error}; give the command where it lies, or put that folder on PYTHONPATH"
    if isinstance(error, StatesetError):  # raised by a @tool or an AgentConfig at module level
        return f"{error} (at {user_line(error)})"
    return format_error(error)
