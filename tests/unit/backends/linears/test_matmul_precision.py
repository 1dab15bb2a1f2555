"""fp32 products of rounded operands: how far off they are, and that a training learns by them."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_environment, make_trainer, reward_curve
from torch import Tensor
from torch.nn import functional as F

from stateset_agents.backends import linears
from stateset_agents.backends.linears import (
    MatmulPrecision,
    PackedLinear,
    add_product,
    fast_linears,
    linear,
    packing,
    usable_precision,
    wide_product,
)
from stateset_agents.backends.loading import load_backend
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.training.rows import chunked_head
from stateset_agents.training.rows.chunked_head import Head, TokenScores, chunked_loss, chunked_scores
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import SamplingParams

OFF: dict[MatmulPrecision, tuple[float, float]] = {"medium": (5e-4, 4e-3), "high": (1e-6, 1e-5)}
"""Least and most that products are off those of float64, as a share of their norm."""


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the processor: without its units the same numbers take longer."""
    monkeypatch.setattr(linears, "_has_units", lambda name, lacking: True)
    if linears._gemm() is None:
        monkeypatch.setitem(OFF, "high", (0.0, 1e-5))  # and stays at highest
    linears.sums_in_fp32.cache_clear()
    linears._is_correct.cache_clear()
    yield
    linears.sums_in_fp32.cache_clear()
    linears._is_correct.cache_clear()


def off_by(actual: Tensor | None, wanted: Tensor | None) -> float:
    assert actual is not None
    assert wanted is not None
    assert actual.dtype == torch.float32
    assert actual.shape == wanted.shape
    return float((actual.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("precision", ["medium", "high"])
@pytest.mark.parametrize("shape", [(96, 64), (3, 5, 64), (1, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_as_far_off_as_is_said(
    precision: MatmulPrecision, shape: tuple[int, ...], has_bias: bool
) -> None:
    precision = usable_precision(precision, torch.device("cpu"))
    torch.manual_seed(0)
    tensors = [torch.randn(*shape), torch.randn(40, 64), torch.randn(40) if has_bias else None]
    exact = [t if t is None else t.double().requires_grad_() for t in tensors]
    mine = [t if t is None else t.requires_grad_() for t in tensors]
    wanted = F.linear(*exact)  # type: ignore[arg-type]  # the first two are tensors
    actual = linear(*mine, precision=precision)  # type: ignore[arg-type]  # the first two are tensors
    weights = torch.randn_like(actual)
    (wanted * weights).sum().backward()
    (actual * weights).sum().backward()
    lower, upper = OFF[precision]
    assert lower < off_by(actual, wanted) < upper
    for a, b in zip(mine[:2], exact[:2], strict=True):
        assert a is not None
        assert b is not None
        assert lower < off_by(a.grad, b.grad) < upper
    if has_bias:
        assert off_by(mine[2].grad, exact[2].grad) < 1e-6  # type: ignore[union-attr]  # both are there


@pytest.mark.parametrize("precision", ["medium", "high"])
@pytest.mark.parametrize("packed", [True, False])
def test_weights_of_generation_are_rounded_once_until_they_change(
    precision: MatmulPrecision, packed: bool
) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(8, 64), torch.randn(24, 64)]
    layer = PackedLinear(weights, [torch.randn(8), torch.randn(24)], packed=packed)
    layer.precision = precision = usable_precision(precision, torch.device("cpu"))
    layer.refresh()
    lower, upper = OFF[precision]
    with torch.inference_mode():
        x = torch.randn(32, 64)
        for _ in range(2):
            assert layer._bias is not None
            wanted = F.linear(x.double(), torch.cat(weights).double(), layer._bias.double())
            assert lower < off_by(layer(x), wanted) < upper
            weights[1].mul_(2)
            layer.refresh()
    size = sum(weight.nbytes for weight in weights)
    assert layer.copied_bytes == {"medium": size // 2, "high": size}[precision]


@pytest.mark.parametrize("has_units", [True, False])
def test_weights_in_bf16_are_packed_only_where_the_processor_has_units_for_them(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them there is no copy; the product is bf16's everywhere."""
    monkeypatch.setattr(linears, "_has_units", lambda name, lacking: has_units)
    torch.manual_seed(0)
    weights = [torch.randn(8, 64).bfloat16(), torch.randn(24, 64).bfloat16()]
    layer = PackedLinear(weights, [torch.randn(8).bfloat16(), torch.randn(24).bfloat16()], packed=True)
    assert has_units or packing(weights[0]) is None
    assert layer.copied_bytes == (32 * 64 * 2 if packing(weights[0]) else 0)
    with torch.inference_mode():
        x = torch.randn(5, 64).bfloat16()
        for _ in range(2):
            assert layer._bias is not None
            wanted = F.linear(x.double(), torch.cat(weights).double(), layer._bias.double())
            actual = layer(x)
            assert actual.dtype is torch.bfloat16
            assert off_by(actual.float(), wanted) < 5e-3
            weights[1].mul_(2)
            layer.refresh()


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_products_do_not_depend_on_torchs_defaults(precision: MatmulPrecision) -> None:
    """Whoever loads a model changes them for the whole process; bf16 would be half the memory needed."""
    precision = usable_precision(precision, torch.device("cpu"))
    x, weight = torch.randn(32, 64), torch.randn(40, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        actual = linear(x, weight, precision=precision)
    finally:
        torch.set_default_dtype(before)
    lower, upper = OFF[precision]
    assert lower < off_by(actual, F.linear(x.double(), weight.double())) < upper


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_is_added_to_what_is_there(
    in_fp32: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_fp32 and linears._gemm() is None:
        pytest.skip("this build of torch has no MKL")
    sums = functools.cache(lambda: in_fp32)
    monkeypatch.setattr(linears, "sums_in_fp32", sums)
    torch.manual_seed(0)
    a, b, into = torch.randn(33, 70).bfloat16(), torch.randn(20, 70).bfloat16(), torch.randn(33, 20)
    first = torch.full((33, 20), torch.nan)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    wanted = into.double() + a.double() @ b.double().t()
    torch.set_default_dtype(torch.float64)
    try:
        fresh = wide_product(a, b)
        add_product(into, a, b)
        add_product(first, a, b, is_first=True)
    finally:
        torch.set_default_dtype(torch.float32)
    least, most = (0.0, 1e-6) if in_fp32 else (1e-4, 4e-3)
    assert least <= off_by(into, wanted) <= most
    for made in (fresh, first):
        assert least <= off_by(made, a.double() @ b.double().t()) <= most
    add_product(into, a[:, :0], b[:, :0])
    add_product(first, a[:, :0], b[:, :0], is_first=True)
    assert off_by(into, wanted) <= most
    assert not first.any()


def test_high_is_left_where_mkls_product_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_gemm", lambda: lambda *arguments: None)
    assert usable_precision("high", torch.device("cpu")) == "highest"


@pytest.mark.parametrize("rounds_logits", [False, True])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_head_s_gradient_is_close_however_its_weight_lies_in_memory(
    transposed: bool, rounds_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_head, "_CHUNK_ROWS", (128, 128))  # three chunks
    torch.manual_seed(0)
    hidden, targets, bias = torch.randn(300, 24), torch.randint(0, 90, (300,)), torch.randn(90)
    found: list[list[Tensor]] = []
    precisions: tuple[MatmulPrecision, ...] = ("highest", "medium")
    for precision in precisions:
        torch.manual_seed(1)
        weight = torch.randn(90, 24)
        weight = (weight.t().contiguous().t() if transposed else weight).requires_grad_()
        states = hidden.clone().requires_grad_()
        head = Head(weight, bias, 0.7, precision, rounds_logits and precision == "medium")

        def loss_of(scores: TokenScores, part: slice) -> tuple[Tensor, TokenScores]:
            return -scores.logprobs.sum(), TokenScores(*(score.detach() for score in scores))

        loss, measured = chunked_loss(states, head, targets, loss_of)
        (2.0 * loss).backward()
        scores = chunked_scores(hidden, head, targets)
        assert torch.equal(torch.cat([part.logprobs for part in measured]), scores.logprobs)
        assert weight.grad is not None
        assert states.grad is not None
        found.append([weight.grad, states.grad, *scores])
    for exact, rounded in zip(found[0][:2], found[1][:2], strict=True):
        assert 1e-4 < off_by(rounded, exact) < 4e-3 * (1 + rounds_logits)
    for exact, rounded in zip(found[0][2:], found[1][2:], strict=True):
        assert 1e-4 * rounds_logits <= off_by(rounded, exact) < 1e-2 * rounds_logits + 1e-9


def test_logits_stay_in_fp32() -> None:
    x, head, inner = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8, 16)
    with fast_linears(False, "medium", wide=head):
        assert torch.equal(F.linear(x, head), x @ head.t())
        assert not torch.equal(F.linear(x, inner), x @ inner.t())


@pytest.mark.parametrize("engine", ["lean", "general", "plain"])
async def test_a_model_in_bf16_generates_as_if_nothing_were_set(
    engine: Literal["lean", "general", "plain"],
) -> None:
    replies = []
    for precision in ("highest", "medium"):
        backend = HuggingFaceBackend(
            tiny_model("llama"), tiny_tokenizer(), dtype="bf16", engine=engine, matmul_precision=precision
        )
        await backend.start()
        replies.append(await backend.generate([3, 4, 5], SamplingParams(max_new_tokens=4, stream=1)))
        await backend.close()
    assert replies[0].token_ids == replies[1].token_ids
    assert replies[0].logprobs == replies[1].logprobs


# ------------------------------------------------------------------------------ in a training


def agent_at(precision: MatmulPrecision, family: str = "llama", **settings: Any) -> MultiTurnAgent:
    """Over the tiny model."""
    model = tiny_model(family)
    backend = HuggingFaceBackend(model, tiny_tokenizer(), copy_model=False, matmul_precision=precision)
    config = AgentConfig(model_name="tiny", chat_template="plain", max_new_tokens=2, **settings)
    return MultiTurnAgent(config, backend=backend)


def trainer_at(folder: Path, precision: MatmulPrecision, **settings: Any) -> Any:
    """A training in which even tokens pay."""
    return make_trainer(
        folder,
        agent=agent_at(precision),
        environment=make_environment(max_turns=1),
        reward=even_share,
        lr_scheduler_type="constant",
        save_steps=0,
        log_rollouts=False,
        **{"num_generations": 8, "learning_rate": 1e-2, "beta": 0.0, **settings},
    )


@pytest.mark.long
async def test_a_training_learns_and_takes_its_own_log_probs_anew(tmp_path: Path) -> None:
    curves, first = {}, {}
    for precision in ("highest", "medium"):
        trainer = trainer_at(tmp_path / precision, precision, gradient_accumulation_steps=4, max_steps=12)
        await trainer.initialize()
        curves[precision] = reward_curve(trainer)
        first[precision] = await trainer.step()
        await trainer.train()
        await trainer.close()
    assert "policy/rollout_mismatch" not in first["highest"]
    assert 0 < first["medium"]["policy/rollout_mismatch"] < 0.05
    assert first["medium"]["policy/first_ratio_max"] == 1.0  # to what the update computes itself
    assert first["medium"]["optimizer/grad_norm"] != first["highest"]["optimizer/grad_norm"]
    for curve in curves.values():
        assert fmean(curve[:2]) < 0.7
        assert fmean(curve[-3:]) > 0.85


@pytest.mark.parametrize("engine", ["lean", "general", "plain"])
async def test_every_way_of_generating_rounds_its_products(engine: Any) -> None:
    warned = []
    for precision in ("highest", "medium"):
        backend = HuggingFaceBackend(
            tiny_model("llama"), tiny_tokenizer(), engine=engine, matmul_precision=precision
        )
        await backend.start()
        prompt = backend.tokenizer.encode("hello")
        params = AgentConfig(model_name="tiny", max_new_tokens=4)
        agent = MultiTurnAgent(params, backend=backend)
        await agent.initialize()
        completion = await backend.generate(prompt, agent.sampling(stream=1, temperature=0.0))
        warned.append((backend.is_exact, completion.logprobs, backend.running.linears))
        await agent.close()
    assert [exact for exact, _, _ in warned] == [True, False]
    assert warned[0][1] != warned[1][1]
    assert warned[0][1] == pytest.approx(warned[1][1], abs=0.05)
    assert "matmul_precision medium" in warned[1][2]


def test_layers_that_are_computed_again_round_as_at_first() -> None:
    """With gradient checkpointing the gradients are the same, bit for bit."""
    from tiny_training import sample, talk

    from stateset_agents.training.config import TrainingConfig

    samples = [sample(talk(([1, 2, 3], [4, 5, 6]), logprobs=[-5.0] * 3), 1.0)]
    actual = []
    for again in (False, True):
        config = TrainingConfig(beta=0.0, gradient_checkpointing=again)
        learner = Learner(
            tiny_model("llama"), config, num_steps=1, exact_logprobs=False, matmul_precision="medium"
        )
        learner.losses(samples)["total_loss"].backward()
        actual.append([p.grad.clone() for p in learner.policy.model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


# ------------------------------------------------------------------------------ torch's own settings


def process_settings() -> tuple[Any, ...]:
    """What torch keeps for the process."""
    backends: Any = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        backends.mkldnn.matmul.fp32_precision,
        backends.mkldnn.fp32_precision,
        torch.backends.mkldnn.enabled,
    )


class Watcher:
    """Looks at torch's settings, and computes a product, again and again in a thread of its own."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()
        self.products: set[bytes] = set()
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        while not self._over.wait(0.002):
            self.seen.add(process_settings())
            self.products.add((x @ x).numpy().tobytes())
            self.looks += 1

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(params=["highest", "high"])
def host(request: pytest.FixtureRequest) -> Iterator[str]:
    """The program that trains has a setting of its own."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("ending", ["finished", "cancelled", "failed"])
async def test_the_process_s_own_setting_is_never_touched(ending: str, host: str, tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, "medium", max_steps=3)
    before = process_settings()
    with Watcher() as watcher:
        await trainer.initialize()
        if ending == "failed":
            trainer.learner.policy.model.register_forward_pre_hook(_fail)
            trainer.learner.policy.trunk.register_forward_pre_hook(_fail)
        training = asyncio.ensure_future(trainer.train())
        if ending == "cancelled":
            await asyncio.sleep(0.05)
            training.cancel()
        done = (await asyncio.gather(training, return_exceptions=True))[0]
    await trainer.close()
    assert isinstance(done, BaseException) == (ending != "finished")
    assert before[0] == host
    assert process_settings() == before
    assert watcher.looks > 0
    assert watcher.seen == {before}
    assert len(watcher.products) == 1


def _fail(module: Any, inputs: Any) -> None:
    raise ZeroDivisionError("in the middle of a forward")


# ------------------------------------------------------------------------------ where there are no units

PROGRAM = """
import logging, torch
from stateset_agents.backends.linears import usable_precision
logging.basicConfig(format="%(message)s")
print(usable_precision({!r}, torch.device("cpu")))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "isa", "reason"),
    [
        (
            "medium",
            "AVX2",
            "this processor has no bf16 units (AVX512-BF16 or AMX), or oneDNN may not use them",
        ),
        ("high", "AVX512_CORE_BF16", "three bf16 products take longer than one in fp32"),
    ],
)
def test_a_processor_without_the_units_says_so_once_and_stays_at_highest(
    precision: str, isa: str, reason: str
) -> None:
    """oneDNN is kept from them, in a process of its own: what it may use is read once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(precision)],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "highest"
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"matmul_precision {precision} stays at highest: {reason}")


def test_a_gpu_s_products_are_left_to_its_own_settings(caplog: pytest.LogCaptureFixture) -> None:
    assert usable_precision("medium", torch.device("cuda")) == "highest"
    assert "the model is on cuda; use dtype and precision bf16 there" in caplog.text


async def test_a_model_that_runs_elsewhere_has_no_such_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"matmul_precision medium .* leave it at highest"):
        await load_backend("scripted", script=["hi"], matmul_precision="medium")
