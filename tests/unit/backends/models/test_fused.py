"""The lean forward says what the model's own full forward says, on weights that have learnt something."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch.nn import functional as F
from trained_models import assert_same, learnt_rows, say, trained_model

from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.models import slot_store
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.backends.models.slot_store import HeadShape, PackedRows, SlotStore
from stateset_agents.backends.models.slots import CachedModel, Plan, SlotModel
from stateset_agents.types.errors import BackendError

FAMILIES = ["llama", "qwen2", "qwen2-window", "qwen3", "gpt2"]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("fast_linears", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.first(2)
def test_ragged_rows_over_three_turns_say_what_full_forwards_say(family: str, fast_linears: bool) -> None:
    model = trained_model(family)
    work = Batcher(FusedModel(model, fast_linears=fast_linears), max_cached_tokens=1 << 16)
    rows = learnt_rows()
    prompts = [
        rows[index % 8, :length].tolist() for index, length in enumerate([1, 2, 3, 31, 32, 33, 40, 12, 1])
    ]
    for lap in range(3):
        turns = say(work, prompts, temperature=float(lap == 1))
        assert_same(model, turns)
        prompts = [
            [*turn.prompt, *turn.sampled, *rows[3, : 1 + 9 * member].tolist()]
            for member, turn in enumerate(turns)
        ]


@pytest.mark.first(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_says_what_it_says_among_others(family: str) -> None:
    model = trained_model(family)
    alone = say(
        Batcher(FusedModel(model), max_cached_tokens=1 << 16), [learnt_rows()[5, :9].tolist()], new=30
    )
    assert_same(model, alone)
    learnt = learnt_rows()[5, 9:39].tolist()
    assert sum(a == b for a, b in zip(alone[0].sampled, learnt, strict=True)) > 24  # it did learn


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_new_weights_are_taken_over_by_refresh(family: str) -> None:
    for fast_linears in (True, False):
        model = copy.deepcopy(trained_model(family))
        lean = FusedModel(model, fast_linears=fast_linears)
        for name, tensor in tiny_model(family, seed=5).named_parameters():
            model.get_parameter(name).copy_(0.9 * model.get_parameter(name) + 0.1 * tensor)
        lean.refresh()
        assert_same(model, say(Batcher(lean, max_cached_tokens=1 << 16), [[1, 2, 3], [4]]))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_unpacked_weights_are_held_once_and_stay_the_model_s_own(family: str) -> None:
    model = copy.deepcopy(trained_model(family))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lean = FusedModel(model, fast_linears=False)
    assert lean.copied_bytes == 0
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(sizes.values()) == sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    trained = copy.deepcopy(model).requires_grad_(True)  # as the trainer's master weights are made
    with torch.enable_grad():
        trained(input_ids=learnt_rows(), labels=learnt_rows()).loss.backward()
    assert all(p.grad is not None for p in trained.parameters())


@pytest.mark.parametrize("by_bags", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3", "gpt2"])
def test_bf16_rollouts_stay_near_the_model_s_own_bf16(
    family: str, by_bags: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_store, "_BAG_DTYPES", {torch.bfloat16} if by_bags else set())
    model = copy.deepcopy(trained_model(family)).to(torch.bfloat16)
    work = Batcher(FusedModel(model), max_cached_tokens=1 << 16)
    prompts = [learnt_rows()[m, : 1 + 8 * m].tolist() for m in range(5)]
    for _ in range(2):
        turns = say(work, prompts, temperature=1.0)
        assert_same(model, turns, within=0.25)
        prompts = [[*turn.prompt, *turn.sampled, *learnt_rows()[4, 2:21].tolist()] for turn in turns]


@pytest.mark.parametrize("by_bags", [True, False])
def test_bf16_attention_is_near_where_queries_and_keys_have_a_large_bias(
    by_bags: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_store, "_BAG_DTYPES", {torch.bfloat16} if by_bags else set())
    shape = HeadShape(num_heads=6, num_kv_heads=2, size=64)
    store = SlotStore(shape, [0], torch.bfloat16, torch.device("cpu"))
    store.resize(4, 256, [])
    torch.manual_seed(0)
    bias, length = 5.0 * torch.randn(64), 200
    keys, values = (bias + torch.randn(length, 2, 64)).bfloat16(), torch.randn(length, 2, 64).bfloat16()
    queries = (bias + torch.randn(length, 6, 64)).bfloat16()
    attended = []
    for start, stop in ((0, length - 40), (length - 40, length - 1), (length - 1, length)):
        plan = Plan(
            slots=np.array([2]),
            starts=np.array([start]),
            lengths=np.array([stop - start]),
            tokens=np.zeros(stop - start, np.int64),
        )
        rows = PackedRows.of(plan, torch.device("cpu"))
        store.begin(plan, rows)
        given = [
            F.pad(x[start:stop], (0, 0, 0, 0, 0, len(rows.tokens) - stop + start))
            for x in (queries, keys, values)
        ]
        attended.append(store.attend(0, *given, 0.125)[: stop - start])
    exact = F.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (queries, keys, values)),
        is_causal=True,
        scale=0.125,
        enable_gqa=True,
    )
    wanted = exact.transpose(0, 1).flatten(1)
    off = (torch.cat(attended).double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert off.max() < 0.01


@pytest.mark.parametrize("make", [FusedModel, SlotModel])
def test_a_window_is_kept_when_a_long_prompt_is_prefilled_in_two_turns(make: Any) -> None:
    model = trained_model("qwen2-window")  # 8 columns, in the second of two layers
    lean: CachedModel = make(model)
    work = Batcher(lean, max_cached_tokens=1 << 16)
    prompt = (learnt_rows()[0].tolist() * 2)[:100]
    first = say(work, [prompt, prompt[:3]], new=4)
    second = say(work, [[*turn.prompt, *turn.sampled, *prompt] for turn in first], new=4)
    assert_same(model, [*first, *second])


def test_models_it_does_not_know_are_refused_with_the_reason() -> None:
    class LlamaLike(type(tiny_model("llama"))):  # type: ignore[misc]  # another class may compute anything
        pass

    with pytest.raises(BackendError, match="LlamaLike is none of"):
        FusedModel(LlamaLike(tiny_model("llama").config))
    longer = tiny_model("llama")
    longer.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(BackendError, match="type dynamic, which changes with length"):
        FusedModel(longer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_holds_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(trained_model(family)).to("cuda", dtype)
    work = Batcher(FusedModel(model), max_cached_tokens=1 << 16)
    turns = say(work, [learnt_rows()[m, : 1 + 8 * m].tolist() for m in range(5)], temperature=1.0)
    for turn in turns:
        ids = torch.tensor([[*turn.prompt, *turn.sampled]], device="cuda")
        logits = model(input_ids=ids, use_cache=False).logits[0, len(turn.prompt) - 1 : -1]
        wanted = logits.float().log_softmax(-1).cpu().gather(-1, torch.tensor(turn.sampled)[:, None])[:, 0]
        assert (wanted - torch.tensor(turn.logprobs)).abs().max() < (1e-3 if dtype == torch.float32 else 0.25)
