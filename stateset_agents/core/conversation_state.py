"""The state of one conversation: tools change it, users and success functions read it.

`ConversationEnvironment(state=...)` makes it when a conversation starts, copies it where the conversation
forks, and closes it at the end.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from stateset_agents.runtime.named_arguments import NamedCall
from stateset_agents.runtime.user_code import call_user_code, format_error, guarded
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

StateFactory = Callable[..., Any]
"""Makes the state of one conversation; may ask for `scenario` and `seed` by name. The members of a group
share both, and must start from equal states."""


class StateMaker:
    """Makes states, and refuses an object that two conversations would share."""

    def __init__(self, make: StateFactory | str, kind: type | None = None) -> None:
        """`kind` is the class whose methods are tools: each state must be one of it, and is `reset`.

        Raises ConfigurationError for what makes no states.
        """
        if not callable(make) and not isinstance(make, str):
            raise ConfigurationError(
                f"state must be a function that makes the state of a conversation, got {make!r:.60}: one "
                "object would be shared by all conversations; give lambda: ..."
            )
        self._make = NamedCall("state", make, ("scenario", "seed"), positional=())
        self._kind = kind
        if kind is not None and inspect.iscoroutinefunction(getattr(kind, "reset", None)):
            raise ConfigurationError(
                f"{kind.__name__}.reset is async: give state=..., an async function that makes what waits"
            )
        self._last: Any = None
        """Kept, so that another object cannot have its identity."""

    @property
    def local(self) -> bool:
        return not inspect.iscoroutinefunction(self._make.function)

    async def make(self, scenario: Scenario, seed: int) -> Any:
        """Raises EnvironmentFailure where making it breaks, ConfigurationError for None or the last one."""
        made = await guarded("making the state", self._make.call({"scenario": scenario, "seed": seed}))
        await guarded("resetting the state", call_user_code(self._reset, made, scenario, seed))
        if made is self._last and made is not None:
            raise ConfigurationError(
                f"state gave the same {type(made).__name__} to two conversations, which would see what the "
                "other did: make a new one in each call"
            )
        self._last = self._checked(made)
        return made

    @contextlib.contextmanager
    def preview(self, scenario: Scenario, seed: int) -> Iterator[Any]:
        """A state for inspection before anything runs, closed at the end. Only for a sync function.

        Raises ConfigurationError where its `close` is async: nothing awaits it here.
        """
        args, kwargs = self._make.bound({"scenario": scenario, "seed": seed})
        made = self._checked(self._make.function(*args, **kwargs))
        self._reset(made, scenario, seed)
        close = getattr(made, "close", None)
        if inspect.iscoroutinefunction(close):
            raise ConfigurationError(
                f"{type(made).__name__}.close is async, so no state can be made to look at the user first: "
                "give ConversationEnvironment(local=True), or False where a step waits on anything remote"
            )
        try:
            yield made
        finally:
            if callable(close):
                close()

    def _reset(self, made: Any, scenario: Scenario, seed: int) -> None:
        """Call the `reset` of the class whose methods are tools, where it has one, with what it asks for by
        name: `scenario`, `seed` and keys of the scenario's context, all of these for `**kwargs`."""
        kind = self._kind
        if kind is None or made is None:
            return
        if not isinstance(made, kind):
            raise ConfigurationError(
                f"state must make a {kind.__name__}, whose methods are tools, got {type(made).__name__}"
            )
        reset = getattr(made, "reset", None)
        if reset is None:
            return
        values = {**scenario.context, "scenario": scenario, "seed": seed}
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {parameter.name for parameter in parameters}
        given = {name: value for name, value in values.items() if takes_all or name in named}
        try:
            inspect.signature(reset).bind(**given)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind.__name__}.reset cannot be called for scenario {scenario.id} ({error}): there are "
                f"{', '.join(values)}"
            ) from None
        if (returned := reset(**given)) is not None:
            raise ConfigurationError(
                f"{kind.__name__}.reset returned {returned!r:.60}, which nobody would read: put what the "
                "agent is told into the scenario's opening"
            )

    @staticmethod
    def _checked(made: Any) -> Any:
        if made is None:
            raise ConfigurationError(
                "state must return a conversation's state, got None: is a return missing?"
            )
        return made


def copy_state(state: Any) -> Any:
    """An independent copy: by the state's own `fork()` where it has one, else by `copy.deepcopy`.

    Raises ConfigurationError for what cannot be copied.
    """
    fork = getattr(state, "fork", None)
    if callable(fork):
        twin = fork()
        if twin is state:
            raise ConfigurationError(
                f"{type(state).__name__}.fork() gave the state itself, and two conversations would change "
                "it: give an independent copy"
            )
        return twin
    try:
        return copy.deepcopy(state)
    except Exception as error:
        raise ConfigurationError(
            f"the state, a {type(state).__name__}, cannot be copied ({format_error(error)}), and a fork of "
            "the conversation needs a copy: give it fork() or __deepcopy__, or train without branches and "
            "turn_retries"
        ) from error


async def close_state(state: Any) -> None:
    """Call its `close()`, sync or async, where it has one."""
    close = getattr(state, "close", None)
    if callable(close):
        await guarded("closing the state", call_user_code(close))
