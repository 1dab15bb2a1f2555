"""User code by its name "package.module:name", as YAML files and command lines write it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stateset_agents.runtime.user_code import format_error, user_line
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.foreign_names import setting_hint
from stateset_agents.types.settings import nearest

_CODE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


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


def registered(what: str, known: Mapping[str, str], name: str) -> Any:
    """The object of a registry's entry ("package.module:name" by a short name), or of `name` itself.

    Raises ConfigurationError for a name that leads nowhere, with the nearest one.
    """
    if ":" not in name and name not in known:
        raise ConfigurationError(
            f"{what} must be one of {', '.join(known)}, or package.module:Class, got {name!r}"
            f"{nearest(name, known) or _with_colon(name)}"
        )
    return imported(what, known.get(name, name))


def check_arguments(what: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for arguments that `make` does not take, and for one that it lacks."""
    parameters = inspect.signature(make).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument in arguments:
        if argument not in parameters and not open_ended:
            hint = nearest(argument, parameters) or setting_hint(argument) or ""
            raise ConfigurationError(f"{what} has no argument {argument!r}{hint}")
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(f"{what}: {error}") from error


def is_code_below(name: str, base: Path) -> bool:
    """Is "package.module:attribute" a file below `base`?"""
    if not _CODE.fullmatch(name):
        return False
    file = base.joinpath(*name.partition(":")[0].split("."))
    return file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()


def _with_colon(name: str) -> str:
    module, dot, attribute = name.rpartition(".")
    if dot:
        return f" (did you mean '{module}:{attribute}'?)"
    return f" (of a file of your own: 'module:{name}')" if name.isidentifier() else ""
