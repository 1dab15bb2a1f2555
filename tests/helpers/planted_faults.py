"""Faults of mask, position and cache to plant into an engine with a `SlotStore`: `plant(engine)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from stateset_agents.backends.models import slot_store
from stateset_agents.backends.models.slot_store import PackedRows, SlotStore
from stateset_agents.backends.models.slots import Plan

__all__ = ["FAULTS"]


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """`function` gets the method that it stands in for, then the method's arguments."""
    setattr(owner, name, partial(function, getattr(owner, name)))


def _scale(engine: SlotStore) -> None:
    _around(engine, "attend", lambda attend, *args: attend(*args[:-1], 0.9 * args[-1]))


def _no_window(engine: SlotStore) -> None:
    engine._windows = [0 for _ in engine._windows]


def _wide_window(engine: SlotStore) -> None:
    engine._windows = [window and window + 1 for window in engine._windows]


def _masked(engine: SlotStore, visible: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> None:
    def begin(original: Any, plan: Plan, rows: PackedRows) -> None:
        with mock.patch.object(slot_store, "_visible", visible):
            original(plan, rows)

    _around(engine, "begin", begin)


def _one_ahead(engine: SlotStore) -> None:
    right = slot_store._visible
    _masked(engine, lambda positions, columns, window: right(positions + 1, columns, window and window + 1))


def _first_hidden(engine: SlotStore) -> None:
    right = slot_store._visible

    def visible(positions: torch.Tensor, columns: torch.Tensor, window: int) -> torch.Tensor:
        return right(positions, columns, window) & ((columns > 0) | (positions[..., None] == 0))

    _masked(engine, visible)


def _not_causal(engine: SlotStore) -> None:
    attention = slot_store.F.scaled_dot_product_attention

    def prefill(original: Any, *args: Any) -> Any:
        with mock.patch.object(
            slot_store.F,
            "scaled_dot_product_attention",
            lambda *tensors, **options: attention(*tensors, **{**options, "is_causal": False}),
        ):
            return original(*args)

    _around(engine, "_attend_prefill", prefill)


def _positioned(engine: SlotStore, wrong: Callable[[Plan, torch.Tensor], None]) -> None:
    """The model is told other positions than the store."""
    right = PackedRows.of

    def of(plan: Plan, device: torch.device) -> PackedRows:
        rows = right(plan, device)
        positions = rows.positions.clone()
        wrong(plan, positions[: rows.count])
        return replace(rows, positions=positions)

    def forward(original: Any, plan: Plan) -> torch.Tensor:
        with mock.patch.object(sys.modules[type(engine).__module__], "PackedRows", SimpleNamespace(of=of)):
            logits: torch.Tensor = original(plan)
            return logits

    _around(engine, "forward", forward)
    _around(engine, "begin", lambda begin, plan, _: begin(plan, right(plan, engine.device)))


def _restarted(plan: Plan, positions: torch.Tensor) -> None:
    if plan.lengths.max() > 1:
        positions -= torch.from_numpy(np.repeat(plan.starts, plan.lengths))


def _one_late(plan: Plan, positions: torch.Tensor) -> None:
    if plan.lengths.max() == 1:
        positions += 1


def _no_key(engine: SlotStore) -> None:
    def attend(original: Any, layer: int, query: Any, key: torch.Tensor, *args: Any) -> Any:
        return original(layer, query, torch.zeros_like(key) if engine._decodes else key, *args)

    _around(engine, "attend", attend)


def _other_heads(engine: SlotStore) -> None:
    def attend(original: Any, layer: int, query: Any, key: Any, value: torch.Tensor, scaling: float) -> Any:
        return original(layer, query, key, value.roll(1, 1), scaling)

    _around(engine, "attend", attend)


def _other_slot(engine: SlotStore) -> None:
    def begin(original: Any, plan: Plan, rows: PackedRows) -> None:
        if plan.lengths.max() > 1 and (plan.starts > 0).all() and len(plan.slots) > 1:
            engine.permute([0, 1], [1, 0], engine.num_columns)
        original(plan, rows)

    _around(engine, "begin", begin)


def _last_lost(engine: SlotStore) -> None:
    def begin(original: Any, plan: Plan, rows: PackedRows) -> None:
        if plan.lengths.max() > 1:
            for slot, start in zip(plan.slots, plan.starts, strict=True):
                for values in engine._values if start else ():
                    values[int(slot), :, int(start) - 1] = 0
        original(plan, rows)

    _around(engine, "begin", begin)


FAULTS: Mapping[str, Callable[[Any], None]] = {
    "mask: no window": _no_window,
    "mask: a window that is one too wide": _wide_window,
    "mask: the next token is seen": _one_ahead,
    "mask: the first token is hidden": _first_hidden,
    "mask: a prompt is not causal": _not_causal,
    "position: a second turn starts at 0": partial(_positioned, wrong=_restarted),
    "position: decode steps are one late": partial(_positioned, wrong=_one_late),
    "cache: a decode step's keys are not stored": _no_key,
    "cache: values of another head": _other_heads,
    "cache: another conversation's slot": _other_slot,
    "cache: the last token of a turn is lost": _last_lost,
    "scale": _scale,
}
