"""Who trains an agent's model now, and whose weights it speaks with: its trainers take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from stateset_agents.types.errors import ConfigurationError

__all__ = ["at_work", "edition", "new_edition"]

_at_work: WeakKeyDictionary[object, list[object]] = WeakKeyDictionary()
_editions: WeakKeyDictionary[object, object] = WeakKeyDictionary()


@contextlib.contextmanager
def at_work(backend: object, trainer: object) -> Iterator[None]:
    """While open, no other trainer may train the backend's model; the same one may enter again.

    Raises ConfigurationError while another one is at work: each would sample from the other's weights.
    """
    present = _at_work.setdefault(backend, [])
    if any(one is not trainer for one in present):
        raise ConfigurationError(
            "another trainer is training this agent: await its end, or give each trainer an agent of its own"
        )
    present.append(trainer)
    try:
        yield
    finally:
        present.remove(trainer)


def edition(backend: object) -> object:
    """Stands for the weights the backend has now: the same object until a trainer hands over others."""
    return _editions.get(backend)


def new_edition(backend: object) -> object:
    """The backend has been given other weights."""
    _editions[backend] = made = object()
    return made
