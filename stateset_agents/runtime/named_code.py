"""User code by its name "package.module:name", as YAML files write it, and its arguments by theirs; libraries
that need not be installed."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.runtime.user_code import call_user_code, format_error, user_line
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.foreign_names import argument_hint, setting_hint
from stateset_agents.types.settings import expect_that, nearest

_CODE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def library(module: str, missing: str) -> Any:
    """The module of a library that need not be installed.

    Raises ConfigurationError with the text `missing` where it is not; `{error}` in it is what the import
    said.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(missing.replace("{error}", str(error))) from error


def imported(label: str, name: str) -> Any:
    """The object "package.module:name", or "folder/package.module:name" with the folder put on `sys.path`.

    Raises ConfigurationError if there is none; `label` names it in the error.
    """
    folder, slash, dotted = name.rpartition("/")
    folder = os.path.abspath(folder)
    module, _, attribute = dotted.partition(":")
    expect_that(attribute != "", label, "be 'module:name'", name, "say which object of the module")
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
    """The reason why an import failed: the module does not exist, or code in it raised."""
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
    """True if "package.module:attribute" is a file below `base`."""
    if not _CODE.fullmatch(name):
        return False
    file = base.joinpath(*name.partition(":")[0].split("."))
    return file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()


def _with_colon(name: str) -> str:
    module, dot, attribute = name.rpartition(".")
    if dot:
        return f" (did you mean '{module}:{attribute}'?)"
    return f" (of a file of your own: 'module:{name}')" if name.isidentifier() else ""


# --- functions that get the arguments which their parameters name: rewards, verdicts, users, states
#
# def success(messages, state): ...   # is called as success(messages=..., state=...)


class NamedCall:
    """Calls a function with the arguments that its parameters name.

    With `positional`, a function whose parameters have other names, such as `lambda s, m: ...`, gets these
    arguments in their order. So does a built-in without a signature, such as `dict`.
    """

    def __init__(
        self,
        label: str,
        function: object,
        offered: Sequence[str],
        *,
        positional: Sequence[str] | None = None,
        cures: Mapping[str, str] | None = None,
    ) -> None:
        """`label` names the function in errors. `function` may be a name, "module:function". `offered` are
        the arguments there are; `cures` maps an argument that is known but not offered to how to get it.

        Raises ConfigurationError if it is no function, or if it asks for an argument that is not offered.
        """
        target = imported(label, function) if isinstance(function, str) else function
        if not callable(target):
            raise ConfigurationError(
                f"{label} must be a function with named parameters or 'module:function', got {target!r:.60}"
            )
        self.function: Callable[..., Any] = target
        cures = cures or {}
        names = (*offered, *cures)
        self._is_positional = positional is not None and _is_positional(target, offered, names, positional)
        self.wanted: tuple[str, ...] = (
            tuple(positional or ())
            if self._is_positional
            else wanted_arguments(label, target, offered, cures)
        )

    def bound(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of one call, taken from `values`."""
        if self._is_positional:
            return tuple(values[name] for name in self.wanted), {}
        return (), {name: values[name] for name in self.wanted}

    async def call(self, values: Mapping[str, Any]) -> Any:
        """The function's result: an async function is awaited, a sync one runs in a thread."""
        args, kwargs = self.bound(values)
        return await call_user_code(self.function, *args, **kwargs)


def wanted_arguments(
    label: str, function: Callable[..., Any], offered: Sequence[str], cures: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The `offered` names that the function asks for. Raises ConfigurationError if it asks for others."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # no function, or a built-in without a signature
        raise ConfigurationError(f"{label} must be a function with named parameters: {error}") from None
    names = []
    for parameter in parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in offered:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            cure = (cures or {}).get(parameter.name)
            hint = argument_hint(parameter.name, offered) if cure is None else f" ({cure})"
            raise ConfigurationError(
                f"{label}: cannot give parameter {str(parameter)!r}{hint}; there are: {', '.join(offered)}"
            )
    return tuple(names)


def _is_positional(
    function: Callable[..., Any], offered: Sequence[str], names: Sequence[str], positional: Sequence[str]
) -> bool:
    """True if the function takes the `positional` arguments in their order, under other names.

    A known name must be at its own position, or `def success(state, talk)` would get a scenario as its state.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    parameters = list(signature.parameters.values())
    needs = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if all(parameter.name in offered and parameter.kind != parameter.POSITIONAL_ONLY for parameter in needs):
        return False
    try:
        signature.bind(*positional)
    except TypeError:
        return False
    return all(
        parameter.name == expected or parameter.name not in names
        for parameter, expected in zip(parameters, positional, strict=False)
    )
