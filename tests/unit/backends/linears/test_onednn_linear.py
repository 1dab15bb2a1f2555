"""Linear layers by oneDNN: the same numbers and gradients as torch's own, and out of the way elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from torch.nn import functional as F

from stateset_agents.backends import linears as fast_linear
from stateset_agents.backends.linears import fast_linears, linear


@pytest.fixture
def as_on_amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """oneDNN is taken on any processor that has it; the list grows by the rows of each of its products."""
    products: list[int] = []
    real = fast_linear.onednn_product

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products.append(len(x))
        return real(x, weight, bias)

    monkeypatch.delenv("STATESET_AGENTS_FAST_LINEARS", raising=False)
    monkeypatch.setattr(fast_linear, "processor_vendor", lambda: "AuthenticAMD")
    fast_linear.is_available.cache_clear()
    fast_linear.is_available()
    monkeypatch.setattr(fast_linear, "onednn_product", counted)
    yield products
    fast_linear.is_available.cache_clear()


@pytest.mark.long
def test_code_made_for_shapes_of_long_ago_is_given_back() -> None:
    """In a process of its own, for the bounds are read once: 600 shapes would hold 300 MB without them."""
    program = """
import resource, torch
from stateset_agents.backends import linears as fast_linear
fast_linear.processor_vendor = lambda: "AuthenticAMD"
if fast_linear.is_available():
    weight, held = torch.randn(96, 32), []
    for rows in range(1, 601):
        fast_linear.linear(torch.randn(rows, 32), weight)
        if rows in (300, 600):
            held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert held[1] - held[0] < 50_000, held  # kB
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def off_by(actual: Tensor | None, wanted: Tensor | None) -> float:
    assert actual is not None
    assert wanted is not None
    assert actual.shape == wanted.shape
    return float((actual.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("shape", [(1, 16), (7, 16), (2, 3, 16), (16,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_float64_to_1e_5(
    shape: tuple[int, ...], has_bias: bool, as_on_amd: list[int]
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape), torch.randn(40, 16), torch.randn(40) if has_bias else None]
    exact = [t if t is None else t.double().requires_grad_() for t in tensors]
    fast = [t if t is None else t.requires_grad_() for t in tensors]
    wanted, actual = F.linear(*exact), linear(*fast)  # type: ignore[arg-type]  # the first two are tensors
    weights = torch.randn_like(actual)
    (wanted * weights).sum().backward()
    (actual * weights).sum().backward()
    assert off_by(actual.detach(), wanted.detach()) < 1e-5
    for mine, theirs in zip(fast, exact, strict=True):
        if mine is not None and theirs is not None:
            assert off_by(mine.grad, theirs.grad) < 1e-5


def test_frozen_tensors_get_no_gradient_and_none_is_no_cost(as_on_amd: list[int]) -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch_bit_for_bit(dtype: torch.dtype, as_on_amd: list[int]) -> None:
    x, weight = torch.randn(4, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    with fast_linears():
        assert torch.equal(F.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert as_on_amd == []


def test_autocast_decides_before_we_do(as_on_amd: list[int]) -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16), fast_linears():
        assert F.linear(x, weight).dtype == torch.bfloat16
    assert as_on_amd == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_trained_inside_gets_the_gradients_it_gets_outside(family: str, as_on_amd: list[int]) -> None:
    model = tiny_model(family).eval()  # no dropout
    ids = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(1))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert as_on_amd == []
    with fast_linears():
        fast = gradients()
    # Per layer 7 linears (Llama) or 4 (GPT-2), and the head; forward and two gradients each.
    if fast_linear.is_available():
        assert len(as_on_amd) == 3 * (2 * {"llama": 7, "gpt2": 4}[family] + 1)
    assert fast.keys() == plain.keys()
    assert max(off_by(fast[name], plain[name].double()) for name in plain) < 1e-5
    with fast_linears(enabled=False):
        assert all(torch.equal(gradients()[name], plain[name]) for name in plain)


def test_it_is_off_where_torch_has_the_fast_route_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "processor_vendor", lambda: "GenuineIntel")
    fast_linear.is_available.cache_clear()
    assert not fast_linear.is_available()
    fast_linear.is_available.cache_clear()


def test_the_environment_turns_it_off_for_a_whole_process(
    as_on_amd: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATESET_AGENTS_FAST_LINEARS", "0")
    fast_linear.is_available.cache_clear()
    assert not fast_linear.is_available()


def test_a_product_that_is_off_turns_it_off(as_on_amd: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fast_linear.is_available.cache_clear()
    monkeypatch.setattr(
        fast_linear, "onednn_product", lambda x, w, b=None: F.linear(x, w.to_dense(), b) * 1.001
    )
    assert not fast_linear.is_available()
