"""The process's peak memory grows with what it takes, and lies below what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stateset_agents.runtime import machine as memory_use
from stateset_agents.runtime.machine import peak_memory

GROWING = """
from stateset_agents.runtime.machine import peak_memory
before = peak_memory()
taken = bytearray(int(before["memory/peak_mib"] * 2**20))
taken[::4096] = b"1" * len(taken[::4096])  # or no page of it is there
during = peak_memory()
del taken
assert during["memory/peak_mib"] > 1.5 * before["memory/peak_mib"]
assert peak_memory()["memory/peak_mib"] > 0.95 * during["memory/peak_mib"]  # the kernel counts in batches
assert during["memory/peak_mib"] < during["memory/limit_mib"] == before["memory/limit_mib"]
"""


def test_the_peak_grows_by_what_is_taken_and_stays() -> None:
    subprocess.run([sys.executable, "-c", GROWING], check=True)  # the suite's own peak is large


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1.0), ("max\n", None), (None, None)])
def test_a_container_s_limit_counts_where_it_is_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, limit: float | None
) -> None:
    memory_use._limit.cache_clear()
    monkeypatch.setattr(memory_use, "_CGROUP_LIMIT", tmp_path / "none")
    machine = peak_memory()["memory/limit_mib"]
    memory_use._limit.cache_clear()
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(memory_use, "_CGROUP_LIMIT", file)
    assert peak_memory()["memory/limit_mib"] == (limit or machine)
    memory_use._limit.cache_clear()


def test_a_system_without_proc_says_it_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_status = peak_memory()["memory/peak_mib"]
    monkeypatch.setattr(memory_use, "_STATUS", tmp_path / "none")
    assert peak_memory()["memory/peak_mib"] > 0.95 * by_status > 1  # more, where a larger one started this
