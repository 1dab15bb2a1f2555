"""Which GPU is this process's own, where a launcher started several processes on a machine."""

from __future__ import annotations

import os

__all__ = ["own_gpu"]


def own_gpu() -> int | None:
    """The GPU of that number among those it sees, by LOCAL_RANK; None without a launcher."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return None if rank is None else int(rank) % max(1, torch.cuda.device_count())
