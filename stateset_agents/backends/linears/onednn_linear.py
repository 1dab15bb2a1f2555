"""fp32 linear layers by oneDNN, on CPUs where torch's own are twice as slow.

On x86, torch uses MKL for fp32 matrix products, which runs at less than half speed on AMD's processors
(measured on Zen 5: 100 GFLOP/s against oneDNN's 190 to 250, equal to 1e-6). torch offers oneDNN by private
operators, which `torch.compile` uses. They are used here only if the processor is AMD's and the operators
exist and agree with `F.linear`. Nothing is timed: a run must be repeatable. In all other cases, and for every
other dtype and device, this is `F.linear`. Generation multiplies by packed copies (packed_linear.py).

On request, products are computed in less than fp32 (matmul_precision.py), on processors that have the units.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stateset_agents.backends.linears.matmul_precision import (
    MatmulPrecision,
    product,
    rounded,
    transposed,
)


@functools.cache
def is_available() -> bool:
    """Does this machine run fp32 linear layers by oneDNN? Decided once, by comparing a few products."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's own
    return processor_vendor() == "AuthenticAMD" and has_mkl and onednn_agrees(torch.float32, 1e-5)


def _limit_kernel_caches() -> None:
    """Limit the kernels that oneDNN compiles and caches for each shape of product.

    Each new number of rows costs half a megabyte, cached for the last 1,024 shapes by oneDNN and again by
    each thread: several hundred MB in a training. A step needs fewer than 128 shapes. Both caches read their
    environment variable at the first use, the second one in each thread.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def processor_vendor() -> str:
    """The processor's vendor id: AuthenticAMD, GenuineIntel, ..."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.split(":")[1].strip()
    return platform.processor().rpartition(", ")[2]  # "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD"


def onednn_agrees(dtype: torch.dtype, tolerance: float) -> bool:
    """Do torch's private operators of oneDNN exist, may they be taken, and do they agree with `F.linear`,
    relative to the largest element?"""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own
    if not is_built or os.environ.get("STATESET_AGENTS_FAST_LINEARS") == "0":
        return False
    _limit_kernel_caches()
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for rows, into, out in ((1, 32, 96), (8, 64, 33), (40, 96, 256)):
                x, weight = (torch.randn(n, into, generator=generator).to(dtype) for n in (rows, out))
                bias = torch.randn(out, generator=generator).to(dtype)
                expected = F.linear(x, weight, bias)
                for actual in (
                    onednn_product(x, weight, bias),
                    onednn_product(x, onednn_packed(weight), bias),
                    onednn_product(weight.t().contiguous().t(), x).t() + bias,
                ):
                    if not (actual - expected).abs().max() <= tolerance * expected.abs().max():
                        return False
    except (AttributeError, RuntimeError, TypeError):  # another torch, with other private operators
        return False
    return True


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.t() + bias` by oneDNN, without gradients; for any strides; the weight may be packed."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def onednn_packed(weight: Tensor) -> Tensor:
    """A copy of [N, K] in oneDNN's memory layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 32)
    return packed


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, precision: MatmulPrecision = "highest"
) -> Tensor:
    """`F.linear`, differentiable once; by oneDNN where that is faster and the tensors are fp32 on the CPU.

    It computes any product of two matrices: a·b is `linear(a, b.t())`. Below the highest `precision`, the
    product and its gradients are computed from rounded operands.
    """
    if (precision == "highest" and not is_available()) or not _takes(x, weight, bias):
        return F.linear(x, weight, bias)
    with_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    result: Tensor
    if precision != "highest":
        result = _RoundedLinear.apply(x, weight, bias, precision)  # type: ignore[no-untyped-call]  # torch
    elif with_gradient:
        result = _FastLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch
    else:
        result = onednn_product(x, weight, bias)
    return result


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Are these fp32 matrices on the CPU, without autocast?"""
    return (
        x.dtype == weight.dtype == torch.float32
        and (bias is None or (bias.dtype == torch.float32 and bias.dim() == 1))
        and x.device.type == weight.device.type == "cpu"
        and weight.dim() == 2
        and x.dim() >= 2
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


class _FastLinear(torch.autograd.Function):
    """The product and both of its gradients by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        rows = upstream.reshape(-1, upstream.shape[-1])  # [M, N]
        if ctx.needs_input_grad[0]:
            to_x = onednn_product(rows, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            # Faster than the product that needs no transposing afterwards.
            to_weight = onednn_product(x.reshape(-1, x.shape[-1]).t(), rows.t()).t()
        if ctx.needs_input_grad[2]:
            to_bias = rows.sum(0)
        return to_x, to_weight, to_bias


class _RoundedLinear(torch.autograd.Function):
    """The product and both of its gradients from rounded operands, which are saved for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, precision: MatmulPrecision
    ) -> Tensor:
        left, right = rounded(x.reshape(-1, x.shape[-1]), precision), rounded(weight, precision)
        ctx.save_for_backward(*left, *right)
        ctx.shape, ctx.precision = x.shape, precision
        result = product(left, right)
        return (result if bias is None else result.add_(bias)).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        saved = ctx.saved_tensors  # read once: gradient checkpointing refuses a second access
        x, weight = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        to_x = to_weight = to_bias = None
        exact = upstream.reshape(-1, upstream.shape[-1])  # [M, N]
        rows = rounded(exact, ctx.precision)
        if ctx.needs_input_grad[0]:
            to_x = product(rows, transposed(weight)).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            to_weight = product(transposed(rows), transposed(x))
        if ctx.needs_input_grad[2]:
            to_bias = exact.sum(0)
        return to_x, to_weight, to_bias, None


class _FastLinears(TorchFunctionMode):
    """Replaces `F.linear`, and `torch.addmm` of GPT-2's layers, by `linear`."""

    def __init__(self, fast: bool, precision: MatmulPrecision, wide: Tensor | None) -> None:
        super().__init__()
        self._fast, self._precision, self._wide = fast, precision, wide

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.addmm and not kwargs and args[0].dim() == 1:
            bias, x, weight = args
            func, args = F.linear, (x, weight.t(), bias)
        if func is not F.linear:
            return func(*args, **kwargs)
        if self._precision != "highest" and not any(part is self._wide for part in args):
            return linear(*args, **{**kwargs, "precision": self._precision})
        return linear(*args, **kwargs) if self._fast else F.linear(*args, **kwargs)


@contextlib.contextmanager
def fast_linears(
    enabled: bool = True, precision: MatmulPrecision = "highest", *, wide: Tensor | None = None
) -> Iterator[None]:
    """Inside, the linear layers of any model run by `linear`, gradients included; in this thread only.

    >>> with fast_linears():
    ...     loss = model(input_ids=ids, labels=ids).loss
    >>> loss.backward()  # may be outside

    It does not apply inside the `backward` of a custom autograd function, nor to what checkpointing computes
    again there: such code calls `linear` itself, or uses torch's. In fp32 it does nothing if `is_available()`
    or `enabled` is false. Below the highest `precision`, products are computed from rounded operands, except
    those with the weight `wide`: the logits of the head are always in fp32.
    """
    fast = enabled and is_available()
    if not fast and precision == "highest":
        yield
        return
    with _FastLinears(fast, precision, wide):
        yield
