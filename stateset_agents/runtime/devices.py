"""Which GPU is this process's own, where a launcher started several processes on a machine."""

from __future__ import annotations

import os

from stateset_agents.types.errors import ConfigurationError

__all__ = ["own_gpu"]


def own_gpu() -> int | None:
    """The GPU of that number among those it sees, by LOCAL_RANK; None without a launcher.

    One that sees a single GPU takes that: its launcher may show each its own. Raises ConfigurationError where
    more processes were started on this machine than it has GPUs.
    """
    import torch

    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return None
    count = torch.cuda.device_count()
    if count < 2:
        return 0
    started = int(os.environ.get("LOCAL_WORLD_SIZE", int(rank) + 1))
    if started > count:
        raise ConfigurationError(
            f"{started} processes were started on a machine with {count} GPUs: start {count} "
            f"(--nproc-per-node {count}), or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on its CPU"
        )
    return int(rank)
