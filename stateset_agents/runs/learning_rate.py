"""The learning rate's schedule: a warm-up, and how it goes on."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt"]
"""How the learning rate goes on after the warm-up."""


def schedule(
    step: int,
    num_steps: int,
    *,
    kind: Schedule,
    warmup_ratio: float,
    min_ratio: float = 0.0,
) -> float:
    """Factor on the learning rate for the update number `step` (0-based) of `num_steps`.

    Rises in a line over the first `warmup_ratio` of the updates (the first update is never at 0), then
    stays, falls in a line, in a half cosine, or as 1/sqrt(n) with n counted from the end of the warm-up in
    units of its length. A line and a cosine fall to `min_ratio`, which the update after the last would
    have; all of the fall is scaled to end there.

    With 10 updates and a warm-up of .2, linear: 1/2, 1, 1, 7/8, 6/8, ... 1/8.
    """
    warmup = math.ceil(warmup_ratio * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    since = step - warmup
    done = min(1.0, since / max(1, num_steps - warmup))
    if kind == "constant":
        height = 1.0
    elif kind == "linear":
        height = 1.0 - done
    elif kind == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        height = math.sqrt(max(1, warmup) / (max(1, warmup) + since))
    return min_ratio + (1.0 - min_ratio) * height
