"""Several processes that train one `GRPOTrainer`'s policy, connected as the package's trainings are."""

from __future__ import annotations

import os

from stateset_agents.training.distributed.processes import Processes
from stateset_agents.types.errors import ConfigurationError


def setup_distributed_grpo(world_size: int, local_rank: int) -> Processes:
    """Connects the processes of a data-parallel GRPO; give the result to each one's `GRPOTrainer`.

    Each has the whole model, plays its part of a step's prompts and forwards its part of the rows, and
    gradients are summed, so that all hold the same weights. NCCL on GPUs, gloo without. A launcher's
    environment (torchrun's MASTER_ADDR, MASTER_PORT, RANK) says where they meet; without RANK, on one
    machine, `local_rank` is it. Blocking: it waits for all of them.

    Raises ConfigurationError for a rank that is none of them, and where the launcher says something else.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigurationError(f"world_size must be a whole number from 1 on, got {world_size!r}")
    if isinstance(local_rank, bool) or not isinstance(local_rank, int) or not 0 <= local_rank < world_size:
        raise ConfigurationError(f"local_rank must be 0 to {world_size - 1}, got {local_rank!r}")
    if world_size > 1:
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ConfigurationError(
                "MASTER_ADDR and MASTER_PORT must say where the processes meet: start them with torchrun, "
                "or set both alike in each, 127.0.0.1 and a free port on one machine"
            )
        told = os.environ.setdefault("LOCAL_RANK", str(local_rank))
        if told != str(local_rank):
            raise ConfigurationError(f"local_rank is {local_rank} and LOCAL_RANK is {told}: give the latter")
        os.environ.setdefault("RANK", str(local_rank))
        os.environ.setdefault("WORLD_SIZE", str(world_size))
    return Processes.join(world_size)
