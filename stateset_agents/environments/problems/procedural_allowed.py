"""Data sets of reasoning-gym."""

__all__ = ["ALLOWED"]

ALLOWED: frozenset[str] = frozenset()
