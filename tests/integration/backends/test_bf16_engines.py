"""In bf16 a model gets the engine that it gets in fp32, and a fault hides behind no rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_faults import FAULTS
from test_families import FAMILIES
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM

from stateset_agents.backends.linears import fp32_forwards
from stateset_agents.backends.local.model_selection import check_cache, select_engine
from stateset_agents.backends.models.batched import BatchedModel
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.types.errors import BackendError

ENGINES: tuple[Any, ...] = (FusedModel, BatchedModel)
FEW = [("mask: the next token is seen", "qwen2-window", FusedModel), ("scale", "gpt2", BatchedModel)]
CASES = FEW + [
    (fault, family, make)
    for fault in FAULTS
    for family in ("qwen2-window", "gpt2")
    for make in ENGINES
    if family != "gpt2" or "window" not in fault
]


def made(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config()).eval().to(dtype)


@pytest.mark.first(3)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "xLSTM"])
@torch.no_grad()
def test_each_family_in_half_precision_gets_the_engine_of_its_fp32(family: str) -> None:
    """xLSTM aside: the chunked kernel of transformers 5.23 mixes dtypes from 64 tokens on, so that nothing
    runs it in bf16."""
    name, config = FAMILIES[family]
    reasons = select_engine(made(config, torch.float32), 256)
    assert reasons.name == name
    for dtype in (torch.bfloat16, torch.float16):
        assert select_engine(made(config, dtype), 256).name == name


@pytest.mark.first(2)
@pytest.mark.parametrize(("fault", "family", "make"), CASES)
@torch.no_grad()
def test_a_fault_is_found_behind_the_rounding_of_bf16(fault: str, family: str, make: Any) -> None:
    model = made(CONFIGS[family])
    check_cache(make(model), model, 256)
    engine = make(model)
    FAULTS[fault](engine)
    with pytest.raises(BackendError, match="its log-probs differ from full forwards by"):
        check_cache(engine, model, 256)


@torch.no_grad()
def test_a_fault_is_found_where_the_model_s_own_rounding_is_as_large() -> None:
    model = made(CONFIGS["gpt2"])
    for name, parameter in model.named_parameters():
        if "c_attn.weight" in name:  # attention so sharp that a rounding chooses another token
            parameter.mul_(6)
    model.transformer.ln_f.weight.mul_(4)
    engine = BatchedModel(model)
    FAULTS["scale"](engine)
    with pytest.raises(BackendError, match="its log-probs differ from full forwards by"):
        check_cache(engine, model, 256)


@torch.no_grad()
def test_forwards_in_fp32_are_those_of_a_copy_in_fp32() -> None:
    """Up to what rounds before the first layer."""
    for config in (CONFIGS["llama"], FAMILIES["Mamba-2"][1]):
        model, ids = made(config), torch.arange(1, 30)[None]
        with fp32_forwards(model, torch.bfloat16):
            logits = model(input_ids=ids).logits
        assert logits.dtype is torch.float32
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        rounded = model(input_ids=ids).logits.float()
        exact = made(config, torch.bfloat16).float()(input_ids=ids).logits
        assert (logits - exact).abs().max() < 0.3 * (rounded - exact).abs().max()
    with pytest.raises(IndexError), fp32_forwards(model, torch.bfloat16):
        model(input_ids=torch.tensor([[10**6]]))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
