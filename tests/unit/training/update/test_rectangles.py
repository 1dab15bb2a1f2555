"""Segments that are attended to together see what they see one after the other, and so do their gradients."""

from __future__ import annotations

import random

import pytest
import torch

from stateset_agents.training.rows import packed_attention as module
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
    together = layout.packing.rectangles(window, 3, inputs[0])
    other = together.attend(*inputs, dropout=0.0, scaling=None)
    found = torch.autograd.grad((other * weights).sum(), inputs)

    torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    for name, gradient, expected in zip(("query", "key", "value"), found, wanted, strict=True):
        torch.testing.assert_close(
            gradient, expected, atol=1e-4, rtol=1e-4, msg=f"the gradient of the {name}"
        )
    assert len(together.parts) <= 2 or seed % 2


def test_a_long_segment_is_cut_where_its_mask_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3000)
    prompt = list(range(40))
    rows = [prompt + [member] * 60 for member in range(3)]
    (layout,) = packed_layouts(rows, max_rows=99, max_tokens=10_000)
    assert layout.packing is not None
    inputs = [torch.randn(1, heads, layout.input_ids.shape[1], 8) for heads in (4, 2, 2)]
    query, key, value = inputs
    one, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packing=layout.packing)
    together = layout.packing.rectangles(None, 2, query)
    torch.testing.assert_close(together.attend(*inputs, dropout=0.0, scaling=None), one, atol=1e-5, rtol=1e-5)
    masks = [part.mask for part in together.parts if part.mask is not None]
    assert len(masks) > 2  # two segments of 60 by 100
    assert all(mask.numel() <= 3000 * 1.2 for mask in masks)  # keys are padded to a multiple of 8
    layout.forget_masks()
    assert not layout.packing._rectangles


def test_whole_rows_have_no_mask() -> None:
    rows = [[member] * (50 + 3 * member) for member in range(1, 5)]
    (layout,) = packed_layouts(rows, max_rows=99, max_tokens=10_000)
    assert layout.packing is not None
    (part,) = layout.packing.rectangles(None, 1, torch.zeros(1)).parts
    assert part.mask is None
    assert part.count == 4
    wide = layout.packing.rectangles(1000, 1, torch.zeros(1))  # wider than any row: the same
    assert wide is layout.packing.rectangles(None, 1, torch.zeros(1))


def test_in_bf16_masks_and_copies_are_bf16() -> None:
    (layout,) = packed_layouts(some_rows(2), max_rows=99, max_tokens=10_000)
    assert layout.packing is not None
    exact = [torch.randn(1, heads, layout.input_ids.shape[1], 8) for heads in (6, 2, 2)]
    rounded = [tensor.bfloat16() for tensor in exact]
    wanted = layout.packing.rectangles(None, 3, exact[0]).attend(*exact, dropout=0.0, scaling=None)
    together = layout.packing.rectangles(None, 3, rounded[0])
    found = together.attend(*rounded, dropout=0.0, scaling=None)
    assert {part.mask.dtype for part in together.parts if part.mask is not None} == {torch.bfloat16}
    assert float((found.float() - wanted).abs().max() / wanted.abs().max()) < 0.03
