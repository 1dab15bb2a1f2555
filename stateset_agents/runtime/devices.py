"""Which GPU this process uses when a launcher such as torchrun started several processes on one machine."""

from __future__ import annotations

import os

from stateset_agents.types.errors import ConfigurationError


def local_gpu() -> int | None:
    """Index of this process's GPU: LOCAL_RANK, or None without a launcher.

    A process that sees a single GPU uses that: some launchers show each process only its own. Raises
    ConfigurationError if more processes were started on this machine than it has GPUs.
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
