"""fp32 matrix products from operands in bf16, one product at a time; called by onednn_linear.py.

The names are those of `torch.set_float32_matmul_precision`, which is a setting of the whole process: other
threads would compute with it, too, and on processors without AMX its `medium` rounds nothing. So no setting
is touched here: the operands are rounded, and the product of what they became is asked for.

medium    both operands in bf16, added up in fp32, the product rounded to bf16: a relative error of 3e-3
high      each operand as the sum of two in bf16, three products added up in fp32: 5e-6
highest   fp32, which is not here

Errors are those of a product of random matrices, as a share of its norm.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from stateset_agents.types.logs import get_logger

__all__ = [
    "MatmulPrecision",
    "Rounded",
    "head_weight",
    "product",
    "rounded",
    "transposed",
    "usable_precision",
]

_log = get_logger(__name__)

MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]
Rounded: TypeAlias = tuple[Tensor, ...]
"""Matrices in bf16 whose sum stands for one in fp32."""

_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_WITHOUT_AMX = {*_WITHOUT_BF16, "AVX512_CORE_BF16", "AVX10_1_512", "AVX512_CORE_FP16"}
"""Values of ONEDNN_MAX_CPU_ISA, by which a user keeps oneDNN from what the processor has."""


def usable_precision(wanted: MatmulPrecision, device: torch.device) -> MatmulPrecision:
    """What products on this device are made in; one warning where that is not what was asked for."""
    reason = None if wanted == "highest" else _why_not(wanted, device)
    if reason is None:
        return wanted
    _log.warning(f"matmul_precision {wanted} stays at highest: {reason}")
    return "highest"


def _why_not(wanted: MatmulPrecision, device: torch.device) -> str | None:
    """By rule, never by timing, so that a run repeats itself."""
    if device.type != "cpu":
        return f"it is of processors, and the model is on {device.type}; use dtype and precision bf16 there"
    if wanted == "medium" and not _has_units("_is_avx512_bf16_supported", _WITHOUT_BF16):
        return "this processor has no bf16 units (AVX512-BF16 or AMX), or oneDNN may not use them"
    if wanted == "high" and not _has_units("_is_amx_tile_supported", _WITHOUT_AMX):
        return "three bf16 products take longer than one in fp32 on a processor without AMX"
    if wanted == "high" and _gemm() is None:
        return "this build of torch has no MKL, which makes its products"
    if wanted == "high" and not _is_right():
        return "this build of torch has an MKL whose products of bf16 are wrong"
    return None


def _is_right() -> bool:
    """Does MKL's product agree with torch's, to 5e-5 of the largest element?"""
    dice = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 48, generator=dice, dtype=torch.float32, device="cpu") for n in (33, 17))
    wanted = F.linear(a, b)
    found = product(rounded(a, "high"), rounded(b, "high"))
    return bool((found - wanted).abs().max() <= 5e-5 * wanted.abs().max())


def _has_units(name: str, lacking: set[str]) -> bool:
    """Has the processor got them, by torch's private test of that name, and may oneDNN use them?"""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    test: Any = getattr(torch.cpu, name, lambda: False)
    return cap.upper() not in lacking and bool(test())


def head_weight(model: Any) -> Tensor | None:
    """The weight whose products are a causal model's logits, None where it has none; they stay in fp32."""
    weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
    return weight


def rounded(x: Tensor, precision: MatmulPrecision) -> Rounded:
    """A matrix in fp32 as a product at this precision sees it."""
    first = x.bfloat16()
    return (first,) if precision == "medium" else (first, (x - first).bfloat16())


def transposed(x: Rounded) -> Rounded:
    """Views of each part."""
    return tuple(part.t() for part in x)


def product(a: Rounded, b: Rounded) -> Tensor:
    """a·b' in fp32, [M, K] and [N, K] to [M, N], without gradient; any strides."""
    if len(a) == len(b) == 1:
        return F.linear(a[0], b[0]).float()
    # MKL writes fp32 into this memory, whatever torch's default dtype and device are at the moment.
    made = torch.zeros(len(a[0]), len(b[0]), dtype=torch.float32, device=a[0].device)
    for left, right in ((a[1], b[0]), (a[0], b[1]), (a[0], b[0])):  # the smallest terms first
        _add_product(made, left, right)
    return made


@functools.cache
def _gemm() -> Any:
    """MKL's product of bf16 matrices in fp32, out of torch's own library; None where it is not there.

    torch makes no such product on a CPU by itself: its results have the dtype of what is multiplied.
    """
    try:
        gemm: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        gemm = gemm.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    integer, pointer, number = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    matrix = [pointer, integer]
    gemm.argtypes = [*[integer] * 6, number, *matrix, *matrix, number, *matrix]
    gemm.restype = None
    return gemm


_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # of CBLAS


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into [M, N] += a [M, K] · b' [N, K]."""
    (a, of_a, step_a), (b, of_b, step_b) = _for_blas(a), _for_blas(b)
    _gemm()(
        _ROW_MAJOR,
        of_a,
        _TRANSPOSED if of_b == _PLAIN else _PLAIN,
        *into.shape,
        a.shape[1],
        1.0,
        a.data_ptr(),
        step_a,
        b.data_ptr(),
        step_b,
        1.0,
        into.data_ptr(),
        into.shape[1],
    )


def _for_blas(x: Tensor) -> tuple[Tensor, int, int]:
    """A matrix as it lies, by rows or by columns, and how far its rows or columns are apart."""
    rows, columns = x.shape
    if x.stride(1) == 1 and x.stride(0) >= columns:
        return x, _PLAIN, x.stride(0)
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return x, _TRANSPOSED, x.stride(1)
    return x.contiguous(), _PLAIN, columns
