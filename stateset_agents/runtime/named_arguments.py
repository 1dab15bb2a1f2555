"""User functions that get the arguments which their parameters name: rewards, verdicts, users, states.

def success(messages, state): ...   # is called as success(messages=..., state=...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stateset_agents.runtime.named_code import imported
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.foreign_names import argument_hint


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
        known = (*offered, *cures)
        self._is_positional = positional is not None and _is_positional(target, offered, known, positional)
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
    wanted = []
    for parameter in parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in offered:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            cure = (cures or {}).get(parameter.name)
            hint = argument_hint(parameter.name, offered) if cure is None else f" ({cure})"
            raise ConfigurationError(
                f"{label}: cannot give parameter {str(parameter)!r}{hint}; there are: {', '.join(offered)}"
            )
    return tuple(wanted)


def _is_positional(
    function: Callable[..., Any], offered: Sequence[str], known: Sequence[str], positional: Sequence[str]
) -> bool:
    """Does the function take the `positional` arguments in their order, under other names?

    A known name must be at its own position, or `def success(state, talk)` would get a scenario as its state.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    parameters = list(signature.parameters.values())
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if all(parameter.name in offered and parameter.kind != parameter.POSITIONAL_ONLY for parameter in needed):
        return False
    try:
        signature.bind(*positional)
    except TypeError:
        return False
    return all(
        parameter.name == expected or parameter.name not in known
        for parameter, expected in zip(parameters, positional, strict=False)
    )
