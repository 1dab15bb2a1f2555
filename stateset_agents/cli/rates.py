"""How a measured success is printed; `train` and `evaluate` share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["rate"]


def rate(result: Mapping[str, Any]) -> str:
    """`success 16.0% [13.3%, 19.1%]`, or the mean reward where the environment gives no verdict."""
    if result["success"] is not None:
        low, high = result["interval"]
        return f"success {result['success']:.1%} [{low:.1%}, {high:.1%}]"
    reward = result["mean_reward"]
    return "no verdict, " + ("nothing scored" if reward is None else f"mean reward {reward:.3f}")
