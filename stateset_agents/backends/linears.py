"""Linear layers: which library multiplies, from which copy of the weights, and how exactly.

On x86, torch uses MKL for fp32 matrix products, which runs at less than half speed on AMD's processors
(measured on Zen 5: 100 GFLOP/s against oneDNN's 190 to 250, equal to 1e-6). torch offers oneDNN by private
operators, which `torch.compile` uses. They are used here only if the processor is AMD's and the operators
exist and agree with `F.linear`. Nothing is timed: a run must be repeatable. In all other cases, and for every
other dtype and device, this is `F.linear`. Generation multiplies by packed copies (`PackedLinear`).

On request, products are computed in less than fp32, on processors that have the units. The names are those of
`torch.set_float32_matmul_precision`. That is a setting of the whole process: it would apply to other threads,
too, and its `medium` rounds nothing on processors without AMX. So no setting is changed here: the operands
are rounded, and then multiplied.

medium    both operands in bf16, summed in fp32, the product rounded to bf16: a relative error of 3e-3
high      each operand as the sum of two in bf16, three products summed in fp32: 5e-6
highest   fp32

The errors are those of a product of random matrices, relative to its norm.

Packed copies: a decode step multiplies a few rows by every weight, so that much of its time goes into
bringing the weights into the order that the processor's kernel reads. A copy in that order, made anew
whenever they change, saves it. Processor and dtype decide who packs:

fp32, AMD's processors     oneDNN, whose products are faster there anyway
fp32, Intel's processors   MKL, 1.1 to 1.4 times as fast with 32 rows
bf16, on both with units for it    oneDNN, 1.1 to 1.5 times as fast with 32 to 128 rows

The figures are of one core of a Xeon with AMX (`python -m benchmarks.products`). Elsewhere there is no copy,
and the original weights become views of one tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stateset_agents.types.logs import get_logger

# --- fp32 products from bf16 operands

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
    """True if products on this device can have that precision."""
    return wanted == "highest" or _reason_against(wanted, device) is None


def _reason_against(precision: MatmulPrecision, device: torch.device) -> str | None:
    """The reason against that precision, by rule and never by timing: a run must be repeatable."""
    if device.type != "cpu":
        return f"it is of processors, and the model is on {device.type}; use dtype and precision bf16 there"
    if precision == "medium" and not _has_units("_is_avx512_bf16_supported", _WITHOUT_BF16):
        return "this processor has no bf16 units (AVX512-BF16 or AMX), or oneDNN may not use them"
    if precision == "high" and not _has_units("_is_amx_tile_supported", _WITHOUT_AMX):
        return "three bf16 products take longer than one in fp32 on a processor without AMX"
    if precision == "high" and _gemm() is None:
        return "this build of torch has no MKL, which makes its products"
    if precision == "high" and not _is_correct():
        return "this build of torch has an MKL whose products of bf16 are wrong"
    return None


@functools.cache
def _is_correct() -> bool:
    """True if MKL's product agrees with torch's, to 5e-5 of the largest element."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 48, generator=generator, dtype=torch.float32, device="cpu") for n in (33, 17))
    expected = F.linear(a, b)
    actual = product(rounded(a, "high"), rounded(b, "high"))
    return bool((actual - expected).abs().max() <= 5e-5 * expected.abs().max())


def _has_units(name: str, lacking: set[str]) -> bool:
    """True if the processor has these units, by torch's private test `name`, and oneDNN may use them."""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    test: Any = getattr(torch.cpu, name, lambda: False)
    return cap.upper() not in lacking and bool(test())


def head_weight(model: Any) -> Tensor | None:
    """The weight of a causal model's head, or None; its products, the logits, stay in fp32."""
    return getattr(model.get_output_embeddings(), "weight", None)


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
        return F.linear(a[0], b[0]).float() if a[0].is_cpu else wide_product(a[0], b[0])
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
    """a · b' in fp32, [M, K] and [N, K] of bf16 to [M, N], as `add_product` sums it; on a GPU nothing is
    rounded in between, either."""
    if not a.is_cpu:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    if not sums_in_fp32():
        return F.linear(a, b).float()
    result = a.new_empty(len(a), len(b), dtype=torch.float32)
    _add_product(result, a, b, keep=0.0)
    return result


@functools.cache
def sums_in_fp32() -> bool:
    """True if `add_product` and `wide_product` sum products of bf16 in fp32 on this processor."""
    return is_usable("high", torch.device("cpu"))


def multiplies_wide(weight: Tensor) -> bool:
    """True if `wide_product` takes this weight and rounds nothing: bf16, on a GPU or a processor with AMX."""
    if weight.dtype is not torch.bfloat16:
        return False
    return sums_in_fp32() if weight.is_cpu else hasattr(torch.ops.aten.mm, "dtype")  # from torch 2.8 on


@contextlib.contextmanager
def wide_logits(model: Any) -> Iterator[None]:
    """Inside, the head of a model in half precision gives its logits in fp32: in bf16 those of 20 have steps
    of .125."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight.dtype not in (torch.bfloat16, torch.float16):
        yield
        return

    def widen(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if layer.weight.dtype == torch.float32:  # as the check of an engine has it
            return output
        states = inputs[0].reshape(-1, inputs[0].shape[-1])
        return wide_linear(states, layer.weight, layer.bias).view(output.shape)

    hook = head.register_forward_hook(widen)
    try:
        yield
    finally:
        hook.remove()


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in fp32 of [M, K] states and a weight in half precision."""
    if not multiplies_wide(weight):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    result = wide_product(x.to(weight.dtype), weight)
    return result if bias is None else result.add_(bias)


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


@contextlib.contextmanager
def fp32_forwards(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, the forwards of a model whose weights are of `dtype` compute in fp32.

    One layer at a time has its weights widened, so that the memory of a whole copy is not needed.
    """
    narrow: dict[nn.Module, list[tuple[nn.Module, dict[str, nn.Parameter | None]]]] = {}

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

    def widen(unit: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        narrow[unit] = [(module, dict(module._parameters)) for module in unit.modules()]
        for module, parameters in narrow[unit]:
            for name, parameter in parameters.items():
                if parameter is not None and parameter.dtype is dtype:
                    module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)
        # What comes before a layer may round to the weights that it had.
        return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}

    def restore(unit: nn.Module, *_: Any) -> None:
        for module, parameters in narrow.pop(unit):
            module._parameters.update(parameters)

    with contextlib.ExitStack() as hooks:
        for unit in _units(model):
            before = unit.register_forward_pre_hook(widen, with_kwargs=True)
            after = unit.register_forward_hook(restore, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Layers whole, for their parts may read each other's weights, and what else has weights of its own."""
    if module._parameters:
        yield module
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _units(child)


# --- what `auto` means, of weights and of autocast
#
# bf16 where a model of this size is known to be faster in it: on a CPU with bf16 matrix units (AMX), models
# of 135 million parameters took half the time for a GRPO step (docs/evidence/step-times.md). One of 6 million
# gained an eighth.

_LEAST_PARAMETERS = 100_000_000


def auto_dtype(device: torch.device, num_parameters: Callable[[], int]) -> torch.dtype:
    """bf16 or fp32, by rule, never by timing; `num_parameters` is called only where it matters."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if is_usable("high", device) and num_parameters() >= _LEAST_PARAMETERS:
        return torch.bfloat16
    return torch.float32


@functools.cache
def is_available() -> bool:
    """True if this machine runs fp32 linear layers by oneDNN; decided once, by comparing a few products."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's own
    return processor_vendor() == "AuthenticAMD" and has_mkl and onednn_agrees(torch.float32, 1e-5)


def processor_vendor() -> str:
    """The processor's vendor id: AuthenticAMD, GenuineIntel, ..."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.split(":")[1].strip()
    return platform.processor().rpartition(", ")[2]  # "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD"


def onednn_agrees(dtype: torch.dtype, tolerance: float) -> bool:
    """True if torch's private operators of oneDNN exist, may be taken, and agree with `F.linear`."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own
    if not is_built or os.environ.get("STATESET_AGENTS_FAST_LINEARS") == "0":
        return False
    # oneDNN compiles a kernel for each shape of product. Each new number of rows costs half a megabyte, which
    # oneDNN caches for the last 1,024 shapes, and each thread again: several hundred MB in a training. A step
    # needs fewer than 128 shapes. Both caches read their variable at the first use, the second in each
    # thread.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")

    def products(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[Tensor]:
        yield onednn_product(x, weight, bias)
        yield onednn_product(x, onednn_packed(weight), bias)
        yield onednn_product(weight.t().contiguous().t(), x).t() + bias

    return _agree(products, _SHAPES, dtype, tolerance)


_SHAPES = ((1, 32, 96), (8, 64, 33), (40, 96, 256))
"""Rows, inputs and outputs of the products that are compared."""


def _agree(
    products: Callable[[Tensor, Tensor, Tensor], Iterator[Tensor]],
    shapes: Iterable[tuple[int, int, int]],
    dtype: torch.dtype,
    tolerance: float,
) -> bool:
    """True if all `products(x, weight, bias)` are those of `F.linear`, relative to the largest element."""
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for rows, into, out in shapes:
                x, weight = (torch.randn(n, into, generator=generator).to(dtype) for n in (rows, out))
                bias = torch.randn(out, generator=generator).to(dtype)
                expected = F.linear(x, weight, bias)
                for actual in products(x, weight, bias):
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
    are_fp32_matrices_on_cpu = (
        x.dtype == weight.dtype == torch.float32
        and (bias is None or (bias.dtype == torch.float32 and bias.dim() == 1))
        and x.device.type == weight.device.type == "cpu"
        and weight.dim() == 2
        and x.dim() >= 2
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )
    if not are_fp32_matrices_on_cpu or (precision == "highest" and not is_available()):
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


# --- packed copies of the weights, for generation

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
    """True if oneDNN's packed copies in bf16 give the products of `F.linear`, on a make that was measured."""
    return processor_vendor() in ("AuthenticAMD", "GenuineIntel") and onednn_agrees(torch.bfloat16, 2e-2)


@functools.cache
def _packs_by_mkl() -> bool:
    """True if the processor is Intel's, and MKL's packed copies give the products of `F.linear`."""
    if processor_vendor() != "GenuineIntel" or os.environ.get("STATESET_AGENTS_FAST_LINEARS") == "0":
        return False

    def products(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[Tensor]:
        yield _mkl_product(x, _mkl_packed(weight), weight, bias)

    return _agree(products, (*_SHAPES, (300, 33, 17)), torch.float32, 1e-5)


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
    """Precision of its products. Call `refresh` after a change."""

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor | None], *, packed: bool, wide: bool = False
    ) -> None:
        """`weights` [N_i, K] and `biases` [N_i] are parameters of a model; all biases or none are None.

        `wide`: products of weights in half precision are in fp32, by a wide copy where the processor has no
        such product.
        """
        self._weights = weights
        self._widens = wide and weights[0].dtype in (torch.bfloat16, torch.float16)
        self._packing = packing(weights[0]) if packed and not self._widens else None
        # MKL asks for the plain weight, too; oneDNN's copy is made of them all at once and stands alone.
        self._joined = None if self._packing == "oneDNN" else _joined(weights)
        self._multiply: Callable[[Tensor], Tensor] | None = None
        present = [bias for bias in biases if bias is not None]
        self._bias = _joined(present) if present else None
        self._adapter: tuple[Tensor, Tensor] | None = None
        """[K, R] and [R, sum of N_i]: the factors of a product that is added, of all layers' adapters."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy, whenever there is one."""
        if self._widens:
            return 0 if multiplies_wide(self._weights[0]) else 2 * sum(part.nbytes for part in self._weights)
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
        result = self._multiply(x)
        if self._adapter is None:
            return result
        down, up = self._adapter
        return result.addmm_(x @ down, up)

    def set_adapter(self, factors: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Add x A_i' B_i' to the outputs of each layer i: [rank, K] and [N_i, rank], or None for a layer
        without one.

        One product holds them all: A_i below one another, B_i on the diagonal. New factors of the same
        shapes are written into the memory of the old ones.
        """
        if not any(factors):
            self._adapter = None
            return
        like = self._weights[0]
        rank = sum(len(pair[0]) for pair in factors if pair is not None)
        shapes = (like.shape[1], rank), (rank, sum(map(len, self._weights)))
        if self._adapter is None or tuple(part.shape for part in self._adapter) != shapes:
            self._adapter = like.new_zeros(shapes[0]), like.new_zeros(shapes[1])
        down, up = self._adapter
        up.zero_()  # the old factors may have been another layer's
        row = column = 0
        for weight, pair in zip(self._weights, factors, strict=True):
            if pair is not None:
                rows = slice(row, row + len(pair[0]))
                down[:, rows] = pair[0].t()
                up[rows, column : column + len(weight)] = pair[1].t()
                row = rows.stop
            column += len(weight)

    def _exact(self) -> Callable[[Tensor], Tensor]:
        """A product with the weights as they are now."""
        bias, joined = self._bias, self._joined
        if self._widens and not multiplies_wide(self._weights[0]):
            wide, wide_bias = self._whole().float(), None if bias is None else bias.float()
            return lambda x: F.linear(x.float(), wide, wide_bias)
        if self._widens:
            whole = self._whole()
            return lambda x: wide_linear(x, whole, bias)
        if joined is None:
            copy = onednn_packed(self._whole())
            return lambda x: onednn_product(x, copy, bias)
        if self._packing == "MKL":
            packed = _mkl_packed(joined)
            return lambda x: _mkl_product(x, packed, joined, bias)
        return lambda x: F.linear(x, joined, bias)

    def _rounded(self) -> Callable[[Tensor], Tensor]:
        """A product with the weights as they are now, rounded, and with each input rounded."""
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
