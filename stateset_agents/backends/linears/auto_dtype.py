"""What `auto` means, of weights and of autocast: bf16 where a model of this size is known to be faster in it.

On a CPU that is one with bf16 matrix units (AMX), for models of 135 million parameters: a GRPO step took
twice as long in fp32 (docs/performance.md). One of 6 million gained an eighth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stateset_agents.backends.linears.matmul_precision import is_usable

_LEAST_PARAMETERS = 100_000_000


def auto_dtype(device: torch.device, num_parameters: Callable[[], int]) -> torch.dtype:
    """bf16 or fp32, by rule, never by timing; `num_parameters` is called only where it matters."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if is_usable("high", device) and num_parameters() >= _LEAST_PARAMETERS:
        return torch.bfloat16
    return torch.float32
