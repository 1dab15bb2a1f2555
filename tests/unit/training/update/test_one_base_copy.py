"""A training with an adapter stands on the sampler's own weights: counted on real tensors, and said alike."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import sample, talk
from torch import Tensor

from stateset_agents.backends.linears import PackedLinear
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.weight_sync import initial_tokens
from stateset_agents.training.processes import Processes
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.factory import LearnerFactory
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.messages import SamplingParams

PROMPT = [1, 5, 9, 200, 7]


def make_learner(backend: HuggingFaceBackend, **settings: Any) -> Learner:
    config = TrainingConfig(**{"lora": {"rank": 4}, "precision": "fp32", **settings})
    return LearnerFactory().make(None, backend, config, Processes())  # type: ignore[arg-type]  # no agent


def tensors(backend: HuggingFaceBackend, learner: Learner) -> Iterator[Tensor]:
    """Those of both models, and what the engine joined of weights; without copies in a kernel's own order."""
    for model in (backend.model, learner.policy.model):
        yield from model.parameters()
        yield from model.buffers()
    for linear in getattr(backend.running.model, "_layers", ()):
        assert isinstance(linear, PackedLinear)
        yield from (linear._weights if linear._joined is None else [linear._joined])


def num_bytes(some: Iterator[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in some}
    return sum(storages.values())


@pytest.mark.parametrize("first", ["engine", "training"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
async def test_both_models_together_are_one_base_and_one_adapter(family: str, dtype: Any, first: str) -> None:
    backend = HuggingFaceBackend(tiny_model(family), tiny_tokenizer(), dtype=dtype)
    base = num_bytes(iter([*backend.model.parameters(), *backend.model.buffers()]))
    learner = None
    if first == "training":
        learner = make_learner(backend, precision=dtype)
    await backend.start()
    learner = learner or make_learner(backend, precision=dtype)
    await backend.generate(PROMPT, SamplingParams(max_new_tokens=2))
    adapter = sum(parameter.nbytes for parameter in learner.optimization.trained_parameters)
    assert num_bytes(tensors(backend, learner)) == base + adapter
    learner.close()
    await backend.close()


def moved(learner: Learner) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in learner.optimization.trained_parameters:
            parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("engine", ["lean", "general", "plain"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
async def test_every_engine_says_what_the_merged_weights_say(
    family: str, engine: Any, precision: Any
) -> None:
    model = tiny_model(family)
    backend = HuggingFaceBackend(model, tiny_tokenizer(), engine=engine, matmul_precision=precision)
    await backend.start()
    learner = make_learner(backend)
    moved(learner)
    for version in (1, 2):
        adapter = learner.adapter()
        assert adapter is not None
        await backend.update_adapter(adapter, version)
        plain = tiny_model(family).eval()
        plain.load_state_dict(dict(learner.weights()))
        completion = await backend.generate(PROMPT, SamplingParams(max_new_tokens=12))
        assert backend.version == version
        with torch.no_grad():
            logits = plain(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        bound = 1e-4 if precision == "highest" else 0.1
        torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=bound, rtol=0)
        scores = await backend.score([*PROMPT, *completion.token_ids])
        torch.testing.assert_close(torch.tensor(scores[len(PROMPT) - 1 :]), exact, atol=bound, rtol=0)
        moved(learner)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in learner.base_weights().items())
    learner.close()
    await backend.close()


# In bf16 a layer's rounding depends on its kernel: packed rows are up to .032 of a tensor's norm from peft's
# plain forward row by row, peft's own forward in one batch .011, with another attention kernel (eager) .052.
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 4e-2)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_gradient_is_that_of_peft_s_plain_forward(family: str, dtype: Any, bound: float) -> None:
    backend = HuggingFaceBackend(tiny_model(family), tiny_tokenizer(), dtype=dtype)
    settings = {"precision": dtype, "importance": "none"}  # the stored log-probs are made up
    learner = make_learner(backend, **settings)
    plain = make_learner(backend, **settings, row_layout="padded", micro_batch_tokens=1)  # row by row
    gradients = []
    for one in (learner, plain):
        moved(one)
        one.losses(ragged())["total_loss"].backward()
        gradients.append([parameter.grad for parameter in one.optimization.trained_parameters])
        one.close()
    assert [one.layout["rows"] for one in (learner, plain)] == ["packed", "padded"]
    assert next(learner.base.parameters()).dtype is backend.model.dtype
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype is torch.float32
        assert (ours - theirs).norm() <= bound * theirs.norm()


def ragged() -> list[Sample]:
    """Eight conversations of one to three turns, with good and bad advantages."""
    dice = torch.Generator().manual_seed(3)

    def some() -> list[int]:
        length = int(torch.randint(1, 9, (1,), generator=dice))
        return torch.randint(258, (length,), generator=dice).tolist()

    talks = [talk(*((some(), some()) for _ in range(1 + number % 3))) for number in range(8)]
    return [sample(one, advantage=(-1.0) ** number * (1 + number / 8)) for number, one in enumerate(talks)]


async def spoken(backend: HuggingFaceBackend) -> list[float]:
    return list((await backend.generate(PROMPT, SamplingParams(max_new_tokens=8))).logprobs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_sleep_and_a_restart_keep_the_adapter(dtype: Any) -> None:
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer(), dtype=dtype)
    await backend.start()
    learner = make_learner(backend, precision=dtype)
    plain = await spoken(backend)
    moved(learner)
    await backend.update_adapter(learner.adapter() or {}, 1)
    adapted = await spoken(backend)
    assert adapted != plain
    await backend.sleep()
    assert await spoken(backend) == adapted
    await backend.close()
    await backend.start()
    assert await spoken(backend) == adapted
    learner.close()
    await backend.close()


async def test_other_weights_leave_the_training_s_own_as_they_are() -> None:
    backend = HuggingFaceBackend(tiny_model("qwen3"), tiny_tokenizer())
    await backend.start()
    learner = make_learner(backend)
    before = {name: value.clone() for name, value in learner.base_weights().items()}
    base, other = backend.base, tiny_model("qwen3", seed=1)
    await backend.update_weights(other.state_dict(), 1)
    assert backend.base is not base
    assert all(torch.equal(value, before[name]) for name, value in learner.base_weights().items())
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in backend.model.named_parameters()
    )
    head = learner.policy.model.get_output_embeddings().weight
    assert head is learner.policy.model.get_input_embeddings().weight  # tied weights stay one
    learner.close()
    await backend.close()


async def test_a_saved_state_gives_the_adapter_of_its_step() -> None:
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer())
    await backend.start()
    learner = make_learner(backend)
    moved(learner)
    await backend.update_adapter(learner.adapter() or {}, 1)
    then = await spoken(backend)
    state = copy.deepcopy(learner.state())
    moved(learner)
    await backend.update_adapter(learner.adapter() or {}, 2)
    assert await spoken(backend) != then
    await backend.update_adapter(learner.adapter(state) or {}, 3)
    assert await spoken(backend) == then
    learner.close()
    await backend.close()


async def test_an_adapter_of_another_size_takes_the_place_of_the_one_before() -> None:
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer())
    await backend.start()
    learners = [
        make_learner(backend, lora=lora) for lora in ({"rank": 4}, {"rank": 8}, {"rank": 8, "alpha": 9})
    ]
    said = []
    for version, learner in enumerate((*learners, learners[0]), start=1):
        if version <= len(learners):
            moved(learner)
        await backend.update_adapter(learner.adapter() or {}, version)
        said.append(await spoken(backend))
    assert said[0] == said[3]
    assert said[0] != said[1] != said[2]
    for learner in learners:
        learner.close()
    await backend.close()


async def test_a_second_training_on_an_adapter_begins_with_merged_weights() -> None:
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer())
    await backend.start()
    first = make_learner(backend)
    moved(first)
    await backend.update_adapter(first.adapter() or {}, 1)
    second = make_learner(backend)
    merged = dict(first.weights())
    assert all(torch.equal(value, merged[name]) for name, value in second.base_weights().items())
    _, base = initial_tokens(backend, is_quantized=False)
    assert base is None  # so that the second one's base is handed over before its adapter
    for learner in (first, second):
        learner.close()
    await backend.close()
