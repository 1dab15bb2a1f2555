"""What a submission to the sandbox costs: within the aim, with room for a loaded machine."""

from __future__ import annotations

import pytest

from scripts.sandbox_cost import LEAST_A_SECOND, WORKLOADS, measured, peak_mib
from stateset_agents.sandbox import Sandbox


@pytest.mark.parametrize("name", WORKLOADS)
async def test_a_core_does_its_share_of_submissions(name: str) -> None:
    cost = await measured(Sandbox(), WORKLOADS[name], 7)
    assert cost.a_second > LEAST_A_SECOND / 2  # a core that is shared does as little as half


async def test_a_child_takes_little_memory() -> None:
    assert 4 < await peak_mib(Sandbox()) < 32
