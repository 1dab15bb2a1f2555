"""The cache's memory is zeros to begin with, can be written, and goes back to the system when it is freed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from stateset_agents.backends.models.slot_store import zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("columns", [32, 65536])  # 4 KB and 8 MB
def test_a_cache_begins_as_zeros_that_can_be_written(columns: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        store = zeros((2, columns, 16), dtype, CPU)
        assert store.shape == (2, columns, 16)
        assert store.dtype == dtype
        assert not store.any()
        store[1, columns - 1] = 3.0
        assert store.float().sum() == 48.0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_freed_cache_is_given_back_at_once() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    store = zeros((16, 2**20), torch.float32, CPU).fill_(1.0)  # 64 MB
    growth = resident() - before
    assert growth > 60 * 2**20
    assert store[0, 0] == 1.0
    del store
    assert resident() - before < growth - 60 * 2**20
