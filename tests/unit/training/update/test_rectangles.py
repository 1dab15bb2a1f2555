"""Segments that are attended to together see what they see one after the other, and so do their gradients."""

from __future__ import annotations

import random

import pytest
import torch

from stateset_agents.training.rows import rectangles as module
from stateset_agents.training.rows.layout import packed_layouts
from stateset_agents.training.rows.packed_attention import packed_attention


def some_rows(seed: int) -> list[list[int]]:
    """Groups that share a prompt, of lengths from one token to a hundred."""
    dice = random.Random(seed)
    rows = []
    for _ in range(dice.randint(1, 5)):
        prompt = [dice.randrange(50) for _ in range(dice.randint(1, 40))]
        for _ in range(dice.randint(1, 6)):
            rows.append(prompt + [dice.randrange(50) for _ in range(dice.randint(1, 60))])
    return rows


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("seed", range(6))
def test_together_is_one_after_the_other(
    seed: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # else all go into one call
        monkeypatch.setattr(module, "_FREE", 0)
    (layout,) = packed_layouts(some_rows(seed), max_rows=99, max_tokens=10_000)
    assert layout.packing is not None
    length = layout.input_ids.shape[1]
    torch.manual_seed(seed)
    inputs = [torch.randn(1, heads, length, 8, requires_grad=True) for heads in (6, 2, 2)]
    weights = torch.randn(1, length, 6, 8)

    query, key, value = inputs
    one, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, packing=layout.packing, sliding_window=window
    )
    wanted = torch.autograd.grad((one * weights).sum(), inputs)
    together = layout.packing.rectangles(window, inputs[0])
    other = together.attend(*inputs, dropout=0.0, scaling=None)
    found = torch.autograd.grad((other * weights).sum(), inputs)

    torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    for name, gradient, expected in zip(("query", "key", "value"), found, wanted, strict=True):
        torch.testing.assert_close(
            gradient, expected, atol=1e-4, rtol=1e-4, msg=f"the gradient of the {name}"
        )
    assert (len(together.parts) > 1) == bool(seed % 2) or len(layout.packing.segments) == 1


def test_no_call_has_more_scores_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 5000)
    (layout,) = packed_layouts(some_rows(2), max_rows=99, max_tokens=10_000)
    assert layout.packing is not None
    parts = layout.packing.rectangles(None, torch.zeros(1)).parts
    assert len(parts) > 1
    assert all(part.mask.numel() <= 5000 * 1.3 or part.count == 1 for part in parts)
    layout.forget_masks()
    assert not layout.packing._rectangles
