"""Long trainings hold no more at their end than near their beginning: memory, files, threads, tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from soaking import Held, scripted_trainer, soak

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

MB = 1_000_000


def assert_equal_handles(one: Held, other: Held) -> None:
    assert (one.files, one.threads, one.tasks) == (other.files, other.threads, other.tasks)


@pytest.mark.long
async def test_a_hundred_and_fifty_steps_leave_nothing_behind(tmp_path: Path) -> None:
    before = Held.now()
    held = await soak(scripted_trainer(tmp_path, max_steps=150, fast_linears=False), every=75)
    assert_equal_handles(held[75], held[150])
    assert held[150].bytes_since(held[75]) < 75 * 25_000
    after = Held.now()
    assert (after.files, after.tasks) == (before.files, before.tasks)
    assert not [name for name in after.threads if name.startswith("update")]


@pytest.mark.long
async def test_the_check_sees_a_leak_of_fifty_kilobytes_a_step() -> None:
    kinds: list[Callable[[], Any]] = [
        lambda: bytes(50_000),
        lambda: torch.zeros(12_500),
        lambda: [object() for _ in range(800)],
    ]
    before = Held.now()
    for kind in kinds:
        held = [kind() for _ in range(75)]
        assert Held.now().bytes_since(before) > 75 * 25_000
        held.clear()
    assert Held.now().bytes_since(before) < 75 * 25_000


@pytest.mark.long
async def test_three_thousand_steps_of_the_scripted_backend_grow_by_less_than_5_mb_a_thousand(
    tmp_path: Path,
) -> None:
    held = await soak(scripted_trainer(tmp_path, max_steps=3000), every=250)
    show(held)
    assert (held[3000].resident - held[500].resident) / 2.5 < 5 * MB
    assert_equal_handles(held[500], held[3000])
    assert held[3000].helpers < 50


@pytest.mark.long
async def test_the_embedded_model_grows_no_more_once_its_caches_are_full(tmp_path: Path) -> None:
    """With little room for cached keys and values and without oneDNN's code, both of which fill for long: the
    former up to `max_cached_tokens`, the latter up to its bound of shapes. The rest fills in 320 steps."""
    config = TrainingConfig(
        max_steps=500,
        num_generations=8,
        per_device_train_batch_size=2,
        eval_steps=20,
        eval_episodes=8,
        save_steps=20,
        output_dir=str(tmp_path),
        fast_linears=False,
    )
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48, max_cached_tokens=4096))
    held = await soak(MultiTurnGRPOTrainer(agent, RetailDesk(), EnvironmentReward(), config), every=20)
    show(held)
    assert held[500].bytes_since(held[360]) < 2 * MB
    # glibc gives pages back and takes them again, 5 MB at a time: the highest is what counts.
    early, late = (max(held[step].resident for step in range(end - 120, end + 1, 20)) for end in (360, 500))
    assert late - early < 2 * MB
    assert_equal_handles(held[360], held[500])


def show(held: dict[int, Held]) -> None:
    for step, one in held.items():
        print(f"step {step}: {one.resident / MB:.1f} MB resident, {one.allocated / MB:.1f} MB in use, {one}")
