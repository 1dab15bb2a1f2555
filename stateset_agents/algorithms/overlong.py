"""DAPO's soft punishment of replies that come close to the length limit; a reward term, not a loss."""

from __future__ import annotations

from stateset_agents.types.errors import ConfigurationError

__all__ = ["overlong_penalty"]


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """min(-(length - (max_length - buffer)) / buffer * factor, 0): 0 up to the buffer, -factor at the limit.

    From DAPO, https://arxiv.org/abs/2503.14476, equation 13. The paper stays at -1 beyond `max_length`;
    generation stops there, so this has no third piece. With max_length 100 and buffer 20:
    80 -> 0, 90 -> -.5, 100 -> -1.
    """
    if not 0 < buffer <= max_length:
        raise ConfigurationError(
            f"overlong buffer must lie between 1 and max_length {max_length}, got {buffer!r}"
        )
    if factor < 0:
        raise ConfigurationError(f"overlong factor must not be negative, got {factor!r}")
    return min(-(length - (max_length - buffer)) / buffer * factor, 0.0)
