"""Linear layers in fp32 by oneDNN, on CPUs where torch's own are twice as slow; called by lean.py, policy.py.

On x86 torch hands fp32 matrix products to MKL, which runs at less than half speed on AMD's processors
(measured on Zen 5: 100 GFLOP/s against oneDNN's 190 to 250, equal to 1e-6). torch reaches oneDNN by private
operators that `torch.compile` uses. So they are taken only where the processor is AMD's, the operators exist
and give `F.linear`'s numbers; nothing is timed, so that a run repeats itself. Everywhere else, and for every
other dtype and device, all of this is `F.linear`.
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

__all__ = ["PackedLinear", "fast_linears", "is_available", "linear"]


@functools.cache
def is_available() -> bool:
    """Does this machine run fp32 linears by oneDNN? Found once, by rule and by comparing a few products."""
    able = (
        os.environ.get("STATESET_AGENTS_FAST_LINEARS") != "0"
        and _vendor() == "AuthenticAMD"
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's own
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own
    )
    if able:
        _remember_few_shapes()
    return able and _agrees()


def _remember_few_shapes() -> None:
    """Bound the code that oneDNN makes and keeps for each shape of product.

    Each new number of rows brings half a megabyte, kept for the last 1,024 shapes by oneDNN and again by
    every thread: a training would come to hold several hundred MB. All shapes of one step are within 128.
    Both caches read their environment as they are first used, the second one in each thread.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def _vendor() -> str:
    """The processor's maker as it names itself: AuthenticAMD, GenuineIntel, ..."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.split(":")[1].strip()
    return platform.processor().rpartition(", ")[2]  # "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD"


def _agrees() -> bool:
    """Do the private operators exist and give `F.linear`'s products to 1e-5 of the largest?"""
    dice = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for rows, into, out in ((1, 32, 96), (8, 64, 33), (40, 96, 256)):
                x, weight = (torch.randn(n, into, generator=dice) for n in (rows, out))
                bias = torch.randn(out, generator=dice)
                wanted = F.linear(x, weight, bias)
                for found in (
                    _product(x, weight, bias),
                    _product(x, _pack(weight), bias),
                    _product(weight.t().contiguous().t(), x).t() + bias,
                ):
                    if not (found - wanted).abs().max() <= 1e-5 * wanted.abs().max():
                        return False
    except (AttributeError, RuntimeError, TypeError):  # another torch, with other private operators
        return False
    return True


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.t() + bias` by oneDNN, without gradients; any strides; the weight may be packed."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _pack(weight: Tensor) -> Tensor:
    """A copy of [N, K] in the order in which oneDNN reads it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 32)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, differentiable once, by oneDNN where that is faster and the tensors are fp32 on the CPU.

    A product of any two matrices is one: a·b is `linear(a, b.t())`.
    """
    if not is_available() or not _takes(x, weight, bias):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        result: Tensor = _FastLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch
        return result
    return _product(x, weight, bias)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Are these plain fp32 matrices on the CPU that autocast leaves alone?"""
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
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        rows = upstream.reshape(-1, upstream.shape[-1])  # [M, N]
        if ctx.needs_input_grad[0]:
            to_x = _product(rows, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = _product(x.reshape(-1, x.shape[-1]).t(), rows.t()).t()  # this way round is faster
        if ctx.needs_input_grad[2]:
            to_bias = rows.sum(0)
        return to_x, to_weight, to_bias


class _FastLinears(TorchFunctionMode):
    """Sends `F.linear`, and the `torch.addmm` that GPT-2's layers are, through `linear`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return linear(*args, **kwargs)
        if func is torch.addmm and not kwargs and args[0].dim() == 1:
            bias, x, weight = args
            return linear(x, weight.t(), bias)
        return func(*args, **kwargs)


@contextlib.contextmanager
def fast_linears(enabled: bool = True) -> Iterator[None]:
    """Inside, the linear layers of any model run by `linear`, gradients included. Of this thread alone.

    >>> with fast_linears():
    ...     loss = model(input_ids=ids, labels=ids).loss
    >>> loss.backward()  # may stand outside

    Code of a custom autograd function's `backward` is not reached, nor is what checkpointing runs again
    there: it calls `linear` itself, or stays with torch's. Does nothing where `is_available()` is false.
    """
    if not enabled or not is_available():
        yield
        return
    with _FastLinears():
        yield


class PackedLinear:
    """One linear map for inference, out of several that read the same input: their outputs side by side.

    Where oneDNN is taken it holds a packed copy of the weights (`copied_bytes`) from its first use on, until
    `refresh`. Elsewhere nothing is held twice: the weights given become views of one tensor.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None], *, packed: bool) -> None:
        """`weights` [N_i, K] and `biases` [N_i] are parameters of a model, of which all or none are None."""
        self._weights, self._biases = weights, biases
        self._packed = packed and is_available() and weights[0].dtype == torch.float32
        self._packed = self._packed and weights[0].device.type == "cpu"
        self._weight = None if self._packed else _joined(weights)
        given = [bias for bias in biases if bias is not None]
        self._bias = _joined(given) if given else None

    @property
    def copied_bytes(self) -> int:
        """Memory that the packed copy takes while there is one."""
        return sum(weight.nbytes for weight in self._weights) if self._packed else 0

    def refresh(self) -> None:
        """Forget the packed copy: the weights changed, or nobody needs it for a while."""
        if self._packed:
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] to [M, sum of N_i]."""
        if not self._packed:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        if self._weight is None:
            self._weight = _pack(self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights))
        return _product(x, self._weight, self._bias)


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts one under the other, each of them made a view of it, so that it follows their changes."""
    # A parameter takes only its own kind: made for inference it can't become a tensor that tracks its
    # versions, and one for training that became an inference tensor could never be changed again.
    with torch.inference_mode(any(part.is_inference() for part in parts)):
        if len(parts) == 1:
            return parts[0].detach()
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = view
        return whole
