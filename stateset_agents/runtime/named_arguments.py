"""User code that asks by name for what it wants to see: rewards, verdicts, users, states, renderers.

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

__all__ = ["NamedCall", "wanted_arguments"]


class NamedCall:
    """A function that is given what its parameters name.

    Where `positional` is given, a function whose parameters have other names, as `lambda s, m: ...`, gets
    these arguments in their order; so does a built-in that does not tell its parameters, such as `dict`.
    """

    def __init__(
        self,
        what: str,
        function: object,
        offered: Sequence[str],
        *,
        positional: Sequence[str] | None = None,
        cures: Mapping[str, str] | None = None,
    ) -> None:
        """`what` is for errors; a function may be named as "module:function". `cures` says of names that are
        known and not offered what would offer them.

        Raises ConfigurationError for what is no function, and for one that asks for something else.
        """
        found = imported(what, function) if isinstance(function, str) else function
        if not callable(found):
            raise ConfigurationError(
                f"{what} must be a function with named parameters or 'module:function', got {found!r:.60}"
            )
        self.function: Callable[..., Any] = found
        cures = cures or {}
        known = (*offered, *cures)
        self._is_positional = positional is not None and _is_positional(found, offered, known, positional)
        self.wanted: tuple[str, ...] = (
            tuple(positional or ()) if self._is_positional else wanted_arguments(what, found, offered, cures)
        )

    def bound(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments of one call, out of what there is."""
        if self._is_positional:
            return tuple(given[name] for name in self.wanted), {}
        return (), {name: given[name] for name in self.wanted}

    async def call(self, given: Mapping[str, Any]) -> Any:
        """What it returns: an async function is awaited, a sync one runs in a thread."""
        args, kwargs = self.bound(given)
        return await call_user_code(self.function, *args, **kwargs)


def wanted_arguments(
    what: str, function: Callable[..., Any], offered: Sequence[str], cures: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The names among `offered` that the function asks for; ConfigurationError where it asks for others."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # no function, or a built-in that does not tell
        raise ConfigurationError(f"{what} must be a function with named parameters: {error}") from None
    wanted = []
    for parameter in parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in offered:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            cure = (cures or {}).get(parameter.name)
            hint = argument_hint(parameter.name, offered) if cure is None else f" ({cure})"
            raise ConfigurationError(
                f"{what}: cannot give parameter {str(parameter)!r}{hint}; there are: {', '.join(offered)}"
            )
    return tuple(wanted)


def _is_positional(
    function: Callable[..., Any], offered: Sequence[str], known: Sequence[str], positional: Sequence[str]
) -> bool:
    """Does it take `positional` in their order, under names of its own? A known name must stand in its place,
    or `def success(state, talk)` would be given a scenario as its state."""
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
        parameter.name == place or parameter.name not in known
        for parameter, place in zip(parameters, positional, strict=False)
    )
