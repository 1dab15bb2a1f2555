"""Linear layers of generation, by packed copies of their weights where the processor is faster with them.

A decode step multiplies a few rows by every weight, so that much of its time goes into bringing the weights
into the order that the processor's kernel reads. A copy in that order, made anew whenever they change, saves
it. Who packs is decided by processor and dtype and, as in onednn_linear.py, never by timing:

fp32, AMD's processors     oneDNN, whose products are faster there anyway
fp32, Intel's processors   MKL, 1.1 to 1.4 times as fast with 32 rows
bf16, on both with units for it    oneDNN, 1.1 to 1.5 times as fast with 32 to 128 rows

The figures are of one core of a Xeon with AMX (`python -m benchmarks.products`). Elsewhere there is no copy,
and the original weights become views of one tensor.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from stateset_agents.backends.linears.matmul_precision import MatmulPrecision, is_usable, product, rounded
from stateset_agents.backends.linears.onednn_linear import (
    is_available,
    onednn_agrees,
    onednn_packed,
    onednn_product,
    processor_vendor,
)

Packing: TypeAlias = Literal["oneDNN", "MKL"]
_ROWS = 32
"""The number of rows that a packing is told to expect. Any other is multiplied correctly, too."""


def packing(weight: Tensor) -> Packing | None:
    """The library that packs a weight like this one; None where products are not faster by packed copies."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.bfloat16:
        return "oneDNN" if is_usable("medium", weight.device) and _packs_bf16() else None
    if weight.dtype != torch.float32:
        return None
    if is_available():
        return "oneDNN"
    return "MKL" if _packs_by_mkl() else None


@functools.cache
def _packs_bf16() -> bool:
    """Do oneDNN's packed copies in bf16 give the products of `F.linear`, on a make that was measured?"""
    return processor_vendor() in ("AuthenticAMD", "GenuineIntel") and onednn_agrees(torch.bfloat16, 2e-2)


@functools.cache
def _packs_by_mkl() -> bool:
    """Is this a processor of Intel's, and do MKL's packed copies give the products of `F.linear`?"""
    if processor_vendor() != "GenuineIntel" or os.environ.get("STATESET_AGENTS_FAST_LINEARS") == "0":
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for rows, into, out in ((1, 32, 96), (8, 64, 33), (40, 96, 256), (300, 33, 17)):
                x, weight = (torch.randn(n, into, generator=generator) for n in (rows, out))
                expected = F.linear(x, weight, weight[:, 0])
                actual = _mkl_product(x, _mkl_packed(weight), weight, weight[:, 0])
                if not (actual - expected).abs().max() <= 1e-5 * expected.abs().max():
                    return False
    except (AttributeError, RuntimeError, TypeError):  # another torch, or one without MKL
        return False
    return True


def _mkl_packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS)
    return packed


def _mkl_product(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, K] to [M, N]. Told another number of rows than x has, torch would multiply by the plain weight."""
    result: Tensor = torch.ops.mkl._mkl_linear(x, packed, weight, bias, len(x))
    return result


class PackedLinear:
    """Several linear layers with the same input as one, for inference: their outputs side by side.

    Packed or at reduced precision it has a copy of the weights (`copied_bytes`), from its first use until
    `refresh`. Otherwise there is no copy: the original weights become views of one tensor.
    """

    precision: MatmulPrecision = "highest"
    """Of its products. Call `refresh` after a change."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None], *, packed: bool) -> None:
        """`weights` [N_i, K] and `biases` [N_i] are parameters of a model; all biases or none are None."""
        self._weights = weights
        self._packing = packing(weights[0]) if packed else None
        # MKL asks for the plain weight, too; oneDNN's copy is made of them all at once and stands alone.
        self._joined = None if self._packing == "oneDNN" else _joined(weights)
        self._multiply: Callable[[Tensor], Tensor] | None = None
        present = [bias for bias in biases if bias is not None]
        self._bias = _joined(present) if present else None

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy, whenever there is one."""
        if self.precision == "highest" and self._packing is None:
            return 0
        return sum(weight.nbytes for weight in self._weights) // (2 if self.precision == "medium" else 1)

    def refresh(self) -> None:
        """Drop the copy: the weights changed, or memory is to be freed."""
        self._multiply = None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] to [M, sum of N_i]."""
        if self._multiply is None:
            self._multiply = self._exact() if self.precision == "highest" else self._rounded()
        return self._multiply(x)

    def _exact(self) -> Callable[[Tensor], Tensor]:
        """A product with the weights as they are now."""
        bias, joined = self._bias, self._joined
        if joined is None:
            copy = onednn_packed(self._whole())
            return lambda x: onednn_product(x, copy, bias)
        if self._packing == "MKL":
            packed = _mkl_packed(joined)
            return lambda x: _mkl_product(x, packed, joined, bias)
        return lambda x: F.linear(x, joined, bias)

    def _rounded(self) -> Callable[[Tensor], Tensor]:
        """The same from rounded operands."""
        parts, bias, precision = rounded(self._whole(), self.precision), self._bias, self.precision
        if precision == "medium" and self._packing is not None and _packs_bf16():
            parts = (onednn_packed(parts[0]),)

        def multiply(x: Tensor) -> Tensor:
            if parts[0].is_mkldnn:
                result = onednn_product(x.bfloat16(), parts[0]).float()
            else:
                result = product(rounded(x, precision), parts)
            return result if bias is None else result.add_(bias)

        return multiply

    def _whole(self) -> Tensor:
        """All weights, one below the other."""
        if self._joined is not None:
            return self._joined
        return self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)


def _joined(parts: list[Tensor]) -> Tensor:
    """The concatenated parts. Each part becomes a view of the result, so that it follows their changes."""
    # An inference parameter cannot become a view of a normal tensor, and a normal parameter that became a
    # view of an inference tensor could never be changed again. So the result is of the parts' kind.
    with torch.inference_mode(any(part.is_inference() for part in parts)):
        if len(parts) == 1:
            return parts[0].detach()
        joined = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
            part.data = view
        return joined
