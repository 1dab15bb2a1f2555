"""Linear layers by packed copies: who packs where, the numbers of torch's own, and weights that change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from stateset_agents.backends import linears
from stateset_agents.backends.linears import PackedLinear, packing

HAS_MKL = torch.backends.mkl.is_available()
HAS_ONEDNN = torch.backends.mkldnn.is_available()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Set the vendor with `made_by`; what was decided before is forgotten, then and afterwards."""
    monkeypatch.delenv("STATESET_AGENTS_FAST_LINEARS", raising=False)
    yield monkeypatch
    _forget()


def _forget() -> None:
    for decision in (linears.is_available, linears._packs_bf16, linears._packs_by_mkl):
        decision.cache_clear()


def made_by(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(linears, "_has_units", lambda name, lacking: True)
    _forget()


@pytest.mark.parametrize(
    ("vendor", "fp32", "packs_bf16"),
    [
        ("AuthenticAMD", "oneDNN" if HAS_ONEDNN and HAS_MKL else None, True),
        ("GenuineIntel", "MKL" if HAS_MKL else None, True),
        ("HygonGenuine", None, False),
    ],
)
def test_vendor_and_dtype_decide_who_packs(
    vendor: str, fp32: str | None, packs_bf16: bool, on: pytest.MonkeyPatch
) -> None:
    made_by(vendor, on)
    # On a processor without AVX-512 oneDNN has no products of bf16.
    can = linears.onednn_agrees(torch.bfloat16, 2e-2)
    assert packing(torch.ones(2, 2)) == fp32
    assert packing(torch.ones(2, 2, dtype=torch.bfloat16)) == ("oneDNN" if packs_bf16 and can else None)
    assert packing(torch.ones(2, 2, dtype=torch.float64)) is None
    assert packing(torch.ones(2, 2, device="meta")) is None
    on.setenv("STATESET_AGENTS_FAST_LINEARS", "0")
    _forget()
    assert packing(torch.ones(2, 2)) is None
    assert packing(torch.ones(2, 2, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("wrong", ["_mkl_product", "_mkl_packed"])
def test_a_library_that_is_off_or_lacks_its_operators_is_not_taken(
    wrong: str, on: pytest.MonkeyPatch
) -> None:
    made_by("GenuineIntel", on)
    if wrong == "_mkl_product":
        on.setattr(linears, wrong, lambda x, packed, weight, bias: F.linear(x, weight, bias) * 1.001)
    else:
        on.setattr(linears, wrong, lambda weight: torch.ops.mkl.no_such_operator(weight))
    assert packing(torch.ones(2, 2)) is None


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", "HygonGenuine"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_stacked_weights_are_one_product_that_follows_their_changes(
    vendor: str, packed: bool, has_bias: bool, on: pytest.MonkeyPatch
) -> None:
    made_by(vendor, on)
    torch.manual_seed(0)
    parts = [torch.nn.Linear(33, n, bias=has_bias) for n in (8, 24)]
    stacked = PackedLinear([p.weight for p in parts], [p.bias for p in parts], packed=packed)
    with torch.no_grad():
        for rows in (1, 5, 32, 300):
            x = torch.randn(rows, 33)
            for part in parts:
                part.weight.mul_(2)
                if has_bias:
                    part.bias.add_(1)
            stacked.refresh()
            exact = [
                F.linear(x.double(), p.weight.double(), p.bias.double() if has_bias else None) for p in parts
            ]
            wanted = torch.cat(exact, dim=-1)
            for _ in range(2):
                assert (stacked(x) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert stacked.copied_bytes == (32 * 33 * 4 if packed and packing(parts[0].weight) else 0)


def test_a_packed_copy_multiplies_the_same_whatever_the_number_of_threads(on: pytest.MonkeyPatch) -> None:
    """It is made on one number of threads, and a host may change that number."""
    made_by("GenuineIntel", on)
    torch.manual_seed(0)
    layer, x = PackedLinear([torch.randn(700, 96)], [None], packed=True), torch.randn(130, 96)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3, 1):
            torch.set_num_threads(count)
            results.append(layer(x))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert (result - results[0]).abs().max() <= 1e-5 * results[0].abs().max()


def test_weights_made_in_inference_mode_go_on_in_it() -> None:
    """They had become tensors that their own model could not read, wherever oneDNN is not taken."""
    with torch.inference_mode():
        parts = [torch.nn.Linear(16, n) for n in (8, 24)]
        stacked = PackedLinear([p.weight for p in parts], [p.bias for p in parts], packed=False)
        x = torch.randn(5, 16)
        wanted = torch.cat([part(x) for part in parts], dim=-1)
        assert torch.allclose(stacked(x), wanted, atol=1e-6)


def test_an_adapter_of_another_layer_leaves_nothing_of_the_one_before() -> None:
    weights = [torch.nn.Parameter(torch.randn(3, 4), requires_grad=False) for _ in range(2)]
    linear = PackedLinear(weights, [None, None], packed=False)
    x, factors = torch.randn(5, 4), (torch.randn(2, 4), torch.randn(3, 2))
    linear.set_adapter([factors, None])
    linear.set_adapter([None, factors])
    first, second = linear(x).split(3, dim=1)
    assert torch.allclose(first, F.linear(x, weights[0]), atol=1e-5)
    assert torch.allclose(second, F.linear(x, weights[1] + factors[1] @ factors[0]), atol=1e-5)
