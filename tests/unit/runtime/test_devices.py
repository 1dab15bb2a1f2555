"""Which GPU is a process's own."""

from __future__ import annotations

import pytest
import torch

from stateset_agents.runtime.machine import local_gpu
from stateset_agents.types.errors import ConfigurationError


def test_each_process_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert local_gpu() is None
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_gpu() == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # the launcher shows each its own
    assert local_gpu() == 0


def test_more_processes_than_gpus_are_refused_in_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in "012":
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(
            ConfigurationError, match="3 processes were started on a machine with 2 GPUs: start 2"
        ):
            local_gpu()
