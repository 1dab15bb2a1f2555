"""The arithmetic floor of a decode row: its matrix products alone, with packed weights, and nothing else.

The products of the linear layers for every prompt token once and every sampled token once, 32 rows at a time;
no attention, no norms, no sampling, no Python between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

from benchmarks.shapes import requests
from benchmarks.worker import Task, serve

Product = Callable[[Tensor], Tensor]
_PREFILL_ROWS = 1024


def product(inputs: int, outputs: int, rows: int) -> tuple[Product, bool]:
    """x [rows, inputs] -> [rows, outputs] as fast as this torch can; is it oneDNN's with a packed weight?

    Packing is a private part of torch: it is used where it is there and gives the same result.
    """
    weight, example = torch.randn(outputs, inputs) * 0.02, torch.randn(rows, inputs)

    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight)

    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

        def fast(x: Tensor) -> Tensor:
            product_x: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            return product_x

        if torch.allclose(fast(example), plain(example), atol=1e-4, rtol=1e-4):
            return fast, True
    except (AttributeError, RuntimeError, TypeError):
        pass  # another torch, with other private operators
    return plain, False


class Floor:
    """Every product of the requests' prefill and decode."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        config = AutoConfig.from_pretrained(job["model"], local_files_only=True)
        wanted = requests(**job["requests"])
        self.sampled = sum(request.reply for request in wanted)
        prompt = sum(len(request.ids) for request in wanted)
        slots: int = job["slots"]
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        keys = hidden * config.num_key_value_heads // config.num_attention_heads
        # Those that read the same input are one product: queries, keys and values; gate and up.
        block = [(hidden, hidden + 2 * keys), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
        head = [(hidden, config.vocab_size)]
        # The first token of a reply comes from the prefill, its last is never forwarded.
        steps = -(-(self.sampled - len(wanted)) // slots)
        self.work = [
            self._products(block * layers, _PREFILL_ROWS, -(-prompt // _PREFILL_ROWS)),
            self._products(head, slots, -(-len(wanted) // slots)),
            self._products(block * layers + head, slots, steps),
        ]

    @staticmethod
    def _products(
        shapes: list[tuple[int, int]], rows: int, times: int
    ) -> tuple[list[tuple[Product, Tensor]], int, bool]:
        product_x = [
            (product(inputs, outputs, rows), torch.randn(rows, inputs)) for inputs, outputs in shapes
        ]
        return (
            [(product_call, x) for (product_call, _), x in product_x],
            times,
            all(packed for (_, packed), _ in product_x),
        )

    def run(self, repetition: int) -> Mapping[str, float]:
        with torch.inference_mode():
            for products, times, _ in self.work:
                for _ in range(times):
                    for product_call, x in products:
                        product_call(x)
        return {"tokens": self.sampled, "packed": float(all(packed for _, _, packed in self.work))}

    def close(self) -> None:
        pass


def make(job: Mapping[str, Any]) -> Task:
    """There is one task."""
    return Floor(job)


if __name__ == "__main__":
    serve(make)
