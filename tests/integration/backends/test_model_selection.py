"""Which way a model is run: the fastest that says what its full forwards say, or the one asked for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCKS, SIZES, tiny_model, tiny_tokenizer
from trained_models import ODD, assert_same, learnt_rows, say, trained_model
from transformers import AutoModelForCausalLM, GPTNeoConfig, LlamaConfig, MistralConfig, Qwen3NextConfig

from stateset_agents.backends.base import Session
from stateset_agents.backends.local import model_selection as paths
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.model_selection import check_cache
from stateset_agents.backends.models import fused as lean
from stateset_agents.backends.models.batched import BatchedModel
from stateset_agents.backends.models.slots import SlotModel
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import SamplingParams

EXPECTED: dict[str, tuple[str, str, Any]] = {
    "mistral": (
        "lean",
        "the first that may",
        lambda: MistralConfig(**SIZES, **BLOCKS, num_key_value_heads=2, sliding_window=8),
    ),
    "dynamic rope": (
        "general",
        "rotary embedding of type dynamic",
        lambda: LlamaConfig(
            **SIZES, **BLOCKS, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
        ),
    ),
    "phi3": ("general", "not lean: Phi3ForCausalLM is none of", ODD["phi3"]),
    "gemma2": (
        "general",
        "not general with our attention: it can't run there (ValueError: attention with softcap)",
        ODD["gemma2"],
    ),
    "gpt-neo": (
        "plain",
        "not general: its log-probs differ from full forwards by",
        lambda: GPTNeoConfig(
            **SIZES,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=64,
            max_position_embeddings=256,
            initializer_range=0.3,
        ),
    ),
    "qwen3-next": (
        "plain",
        "not general: Qwen3NextForCausalLM has layers of type linear_attention, whose masks are unknown",
        lambda: Qwen3NextConfig(
            **SIZES,
            **{**BLOCKS, "num_hidden_layers": 4},
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
}


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def serving(model: Any, **options: Any) -> HuggingFaceBackend:
    return HuggingFaceBackend(model, tiny_tokenizer(), scheduling="throughput", **options)


async def assert_exact(backend: HuggingFaceBackend) -> None:
    """Three conversations of two turns store what full forwards say."""

    async def converse(member: int) -> None:
        ids = list(range(1, 2 + 40 * member))
        for turn in range(2):
            params = SamplingParams(max_new_tokens=4 + member, stream=10 * member + turn)
            completion = await backend.generate(ids, params, session=Session(0, member))
            ids = [*completion.prompt_ids, *completion.token_ids]
            fresh = (await backend.score(ids))[len(completion.prompt_ids) - 1 :]
            assert completion.logprobs == pytest.approx(fresh, abs=1e-4)
            ids += [7, 8, 9]

    await asyncio.gather(*(converse(member) for member in range(3)))


@pytest.mark.parametrize("architecture", EXPECTED)
async def test_each_model_gets_the_fastest_way_that_is_right_and_hears_why(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, reason, config = EXPECTED[architecture]
    torch.manual_seed(0)
    backend = serving(AutoModelForCausalLM.from_config(config()))
    with caplog.at_level("DEBUG", "stateset_agents"):
        await backend.start()
    try:
        assert backend.running.name == name
        assert reason in backend.running.why
        messages = [line for line in caplog.messages if f"generates on the {name} path" in line]
        assert len(messages) == 1
        assert reason in messages[0]
        await assert_exact(backend)
    finally:
        await backend.close()


@pytest.mark.parametrize("engine", ["lean", "general", "plain"])
async def test_the_way_asked_for_is_taken(engine: Any) -> None:
    backend = serving(tiny_model("llama"), engine=engine)
    await backend.start()
    assert (backend.running.name, backend.running.why) == (engine, "as asked")
    await assert_exact(backend)
    await backend.close()


async def test_a_way_that_cannot_run_the_model_is_refused_with_the_cure() -> None:
    torch.manual_seed(0)
    backend = serving(AutoModelForCausalLM.from_config(ODD["phi3"]()), engine="lean")
    with pytest.raises(ConfigurationError, match=r"can't run Phi3ForCausalLM .* leave engine at auto"):
        await backend.start()
    with pytest.raises(ConfigurationError, match="engine must be one of auto, lean, general, plain, got 'x'"):
        await serving(tiny_model(), engine="x").start()


async def test_new_weights_reach_every_way() -> None:
    for engine in ("lean", "general", "plain"):
        backend = serving(tiny_model("llama"), engine=engine)
        await backend.start()
        await assert_exact(backend)
        await backend.update_weights(tiny_model("llama", seed=3).state_dict(), 1)
        await assert_exact(backend)
        await backend.close()


@pytest.mark.parametrize("fault", ["scaling", "window"])
def test_a_lean_forward_that_is_wrong_is_found_out(
    fault: str, monkeypatch: pytest.MonkeyPatch, no_gradients: None
) -> None:
    """A wrong scale shows at once; a window that is not kept, only beyond its end."""
    model = tiny_model("qwen2-window").eval()
    original_init = lean.FusedModel.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if fault == "window":
            self._windows = [0, 0]
        else:
            self._blocks = [replace(block, scaling=0.9 * block.scaling) for block in self._blocks]

    monkeypatch.setattr(lean.FusedModel, "__init__", wrong)
    running = paths.select_engine(model, 256)
    assert running.name == "general"
    assert running.why.startswith("not lean: its log-probs differ from full forwards by")


def test_where_no_way_is_right_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise BackendError("it is one of a kind")

    monkeypatch.setattr(paths, "check_cache", never)
    with pytest.raises(BackendError, match=r"can't be served .* \(not lean: it is one of a kind"):
        paths.select_engine(tiny_model(), 256)


@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("phi3", BatchedModel),
        ("qwen2-window", BatchedModel),
        ("gpt2", BatchedModel),
        ("gemma2", SlotModel),
        ("phi3", SlotModel),
    ],
)
@pytest.mark.first(1)
def test_the_general_ways_say_what_full_forwards_say_on_trained_weights(
    family: str, make: Any, no_gradients: None
) -> None:
    model = trained_model(family)
    before = model.config._attn_implementation
    engine = make(model)
    check_cache(engine, model, 256)
    work = Batcher(engine, max_cached_tokens=1 << 16)
    rows = learnt_rows()
    prompts = [rows[index % 8, :length].tolist() for index, length in enumerate([1, 2, 31, 33, 40, 12])]
    for lap in range(2):
        turns = say(work, prompts, temperature=float(lap == 1))
        assert_same(model, turns)
        prompts = [[*turn.ids, *rows[3, : 1 + 9 * member].tolist()] for member, turn in enumerate(turns)]
    assert_same(model, say(Batcher(make(model), max_cached_tokens=1 << 16), [rows[2, :9].tolist()]))
    assert model.config._attn_implementation == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
async def test_a_start_gives_back_what_an_earlier_training_freed() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    # 60 KB each, as small as glibc keeps them; of each two one stays, so that no end of the heap is free.
    taken = [torch.ones(15_000) for _ in range(4000)]
    del taken[::2]
    before = resident()
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer())
    await backend.start()
    after = resident()
    await backend.close()
    assert len(taken) == 2000
    assert after < before - 60 * 2**20, "of 120 MB that were freed at least half must go back"
