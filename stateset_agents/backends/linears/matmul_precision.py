"""fp32 matrix products from bf16 operands, for single products; called by onednn_linear.py.

The names are those of `torch.set_float32_matmul_precision`. That is a setting of the whole process: it would
apply to other threads, too, and its `medium` rounds nothing on processors without AMX. So no setting is
changed here: the operands are rounded, and then multiplied.

medium    both operands in bf16, summed in fp32, the product rounded to bf16: a relative error of 3e-3
high      each operand as the sum of two in bf16, three products summed in fp32: 5e-6
highest   fp32, by onednn_linear.py

The errors are those of a product of random matrices, relative to its norm.
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

_log = get_logger(__name__)

MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]
Rounded: TypeAlias = tuple[Tensor, ...]
"""bf16 matrices whose sum approximates an fp32 matrix."""

_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_WITHOUT_AMX = {*_WITHOUT_BF16, "AVX512_CORE_BF16", "AVX10_1_512", "AVX512_CORE_FP16"}
"""Values of ONEDNN_MAX_CPU_ISA, with which a user forbids oneDNN some of the processor's instructions."""


def usable_precision(wanted: MatmulPrecision, device: torch.device) -> MatmulPrecision:
    """The precision of products on this device; a warning if it is not the one asked for."""
    reason = None if wanted == "highest" else _reason_against(wanted, device)
    if reason is None:
        return wanted
    _log.warning(f"matmul_precision {wanted} stays at highest: {reason}")
    return "highest"


def is_usable(wanted: MatmulPrecision, device: torch.device) -> bool:
    """Can products on this device have that precision?"""
    return wanted == "highest" or _reason_against(wanted, device) is None


def _reason_against(wanted: MatmulPrecision, device: torch.device) -> str | None:
    """By rule, never by timing: a run must be repeatable."""
    if device.type != "cpu":
        return f"it is of processors, and the model is on {device.type}; use dtype and precision bf16 there"
    if wanted == "medium" and not _has_units("_is_avx512_bf16_supported", _WITHOUT_BF16):
        return "this processor has no bf16 units (AVX512-BF16 or AMX), or oneDNN may not use them"
    if wanted == "high" and not _has_units("_is_amx_tile_supported", _WITHOUT_AMX):
        return "three bf16 products take longer than one in fp32 on a processor without AMX"
    if wanted == "high" and _gemm() is None:
        return "this build of torch has no MKL, which makes its products"
    if wanted == "high" and not _is_correct():
        return "this build of torch has an MKL whose products of bf16 are wrong"
    return None


def _is_correct() -> bool:
    """Does MKL's product agree with torch's, to 5e-5 of the largest element?"""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 48, generator=generator, dtype=torch.float32, device="cpu") for n in (33, 17))
    expected = F.linear(a, b)
    actual = product(rounded(a, "high"), rounded(b, "high"))
    return bool((actual - expected).abs().max() <= 5e-5 * expected.abs().max())


def _has_units(name: str, lacking: set[str]) -> bool:
    """Does the processor have these units, by torch's private test `name`, and may oneDNN use them?"""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    test: Any = getattr(torch.cpu, name, lambda: False)
    return cap.upper() not in lacking and bool(test())


def head_weight(model: Any) -> Tensor | None:
    """The weight of a causal model's head, or None; its products, the logits, stay in fp32."""
    weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
    return weight


def rounded(x: Tensor, precision: MatmulPrecision) -> Rounded:
    """An fp32 matrix, rounded as an operand at this precision."""
    first = x.bfloat16()
    return (first,) if precision == "medium" else (first, (x - first).bfloat16())


def transposed(x: Rounded) -> Rounded:
    """Views of each part."""
    return tuple(part.t() for part in x)


def product(a: Rounded, b: Rounded) -> Tensor:
    """a·b' in fp32, [M, K] and [N, K] to [M, N], without gradient; any strides."""
    if len(a) == len(b) == 1:
        return F.linear(a[0], b[0]).float()
    # MKL writes fp32 into this memory, whatever torch's default dtype and device are now.
    result = torch.zeros(len(a[0]), len(b[0]), dtype=torch.float32, device=a[0].device)
    for left, right in ((a[1], b[0]), (a[0], b[1]), (a[0], b[0])):  # the smallest terms first
        _add_product(result, left, right)
    return result


def add_product(into: Tensor, a: Tensor, b: Tensor, *, is_first: bool = False) -> None:
    """into [M, N] += a [M, K] · b' [N, K], of bf16 into fp32; any strides of the operands.

    What was in `into` before the first product counts for nothing. On a processor with AMX nothing is rounded
    in between, and long sums take half the time; elsewhere the product is rounded to bf16.
    """
    if sums_in_fp32():
        _add_product(into, a, b, keep=0.0 if is_first else 1.0)
    elif is_first:
        into.copy_(F.linear(a, b))
    else:
        into += F.linear(a, b)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a · b' in fp32, [M, K] and [N, K] of bf16 to [M, N], as `add_product` sums it."""
    if not sums_in_fp32():
        return F.linear(a, b).float()
    result = a.new_empty(len(a), len(b), dtype=torch.float32)
    _add_product(result, a, b, keep=0.0)
    return result


@functools.cache
def sums_in_fp32() -> bool:
    """Do `add_product` and `wide_product` sum products of bf16 in fp32?"""
    return is_usable("high", torch.device("cpu"))


@functools.cache
def _gemm() -> Any:
    """MKL's product of bf16 matrices in fp32, from torch's own library; None if the library has none.

    torch itself has no such product on a CPU: its results have the dtype of the operands.
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


def _add_product(into: Tensor, a: Tensor, b: Tensor, *, keep: float = 1.0) -> None:
    """into [M, N] = keep * into + a [M, K] · b' [N, K]; nothing is read of it where `keep` is 0."""
    assert into.is_contiguous()  # MKL writes rows of floats there
    assert into.dtype is torch.float32
    if 0 in (*into.shape, a.shape[1]):
        into.mul_(keep) if keep else into.zero_()
        return
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
        keep,
        into.data_ptr(),
        into.shape[1],
    )


def _for_blas(x: Tensor) -> tuple[Tensor, int, int]:
    """A matrix, its order in memory (by rows or by columns), and the stride of its rows or columns."""
    rows, columns = x.shape
    if x.stride(1) == 1 and x.stride(0) >= columns:
        return x, _PLAIN, x.stride(0)
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return x, _TRANSPOSED, x.stride(1)
    return x.contiguous(), _PLAIN, columns
