"""Who trains a backend's model, and which weights it has, for trainers that take turns and caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from stateset_agents.backends.base import Backend
from stateset_agents.types.errors import ConfigurationError

_trainers: WeakKeyDictionary[Backend, list[object]] = WeakKeyDictionary()
"""Who trains a backend's model now."""
_tokens: WeakKeyDictionary[Backend, object] = WeakKeyDictionary()
"""Of the weights that each backend has."""


@contextlib.contextmanager
def exclusive(backend: Backend, owner: object) -> Iterator[None]:
    """While open, no other owner's trainer may train the backend's model; the same one may enter again.

    Raises ConfigurationError while another one trains it: each would sample from the other's weights.
    """
    owners = _trainers.setdefault(backend, [])
    if any(other is not owner for other in owners):
        raise ConfigurationError(
            "another trainer is training this agent: await its end, or give each trainer an agent of its own"
        )
    owners.append(owner)
    try:
        yield
    finally:
        owners.remove(owner)


def is_training(backend: Backend) -> bool:
    """Is a trainer at work on the backend's model?"""
    return bool(_trainers.get(backend))


def weights_token(backend: Backend) -> object:
    """Stands for the weights the backend has now: the same object until a trainer pushes others."""
    return _tokens.setdefault(backend, object())


def new_weights(backend: Backend) -> object:
    """Note that a trainer has pushed other weights; returns their token."""
    _tokens[backend] = token = object()
    return token
