"""One pass that draws tokens and says how likely they were."""

from __future__ import annotations

import math

import pytest
import torch

from stateset_agents.backends.sampling import SamplingMetadata, sample, turn_uniforms


def knobs(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingMetadata:
    truncated = top_k > 0 or top_p < 1
    return SamplingMetadata(
        temperature=torch.full((rows,), temperature or 1.0),
        greedy=torch.full((rows,), temperature == 0) if temperature == 0 else None,
        top_k=torch.full((rows,), top_k) if truncated else None,
        top_p=torch.full((rows,), top_p) if truncated else None,
    )


def draw(probs: list[float], uniforms: list[float], **options: float) -> tuple[list[int], list[float]]:
    logits = torch.tensor(probs).log().repeat(len(uniforms), 1)
    settings = knobs(len(uniforms), **options)  # type: ignore[arg-type]  # ints and floats by name
    tokens, logprobs, _ = sample(logits, torch.tensor(uniforms, dtype=torch.float64), settings)
    return tokens.tolist(), logprobs.tolist()


def test_uniforms_fall_into_the_cumulative_distribution() -> None:
    tokens, logprobs = draw([0.5, 0.25, 0.25], [0.0, 0.49, 0.51, 0.74, 0.76, 0.999999])
    assert tokens == [0, 0, 1, 1, 2, 2]
    assert logprobs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)])


@pytest.mark.first(3)
@pytest.mark.parametrize("vocab", [3, 32, 33, 1000, 4097])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_an_even_grid_of_uniforms_hits_each_token_as_often_as_it_is_likely(
    vocab: int, temperature: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs, _ = sample(logits.repeat(count, 1), uniforms, knobs(count, temperature))
    expected = (logits / temperature).log_softmax(-1)
    hits = torch.bincount(tokens, minlength=vocab) / count
    assert (hits - expected.exp()).abs().max() <= 1.01 / count
    assert torch.allclose(logprobs, expected[tokens], atol=1e-5)


def test_a_token_without_probability_is_never_drawn() -> None:
    probs = [0.0, 0.3, 0.0, 0.7, *[0.0] * 60]
    tokens, _ = draw(probs, [0.0, 1e-18, 0.3, 1 - 2**-53, 1.0])
    assert set(tokens) == {1, 3}
    assert tokens[0] == 1
    assert tokens[-1] == 3


def test_temperature_zero_takes_the_likeliest_with_its_plain_log_prob() -> None:
    tokens, logprobs = draw([0.2, 0.5, 0.3], [0.0, 0.99], temperature=0.0)
    assert tokens == [1, 1]
    assert logprobs == pytest.approx([math.log(0.5)] * 2)


def test_top_k_draws_from_the_renormalised_likeliest() -> None:
    tokens, logprobs = draw([0.1, 0.4, 0.2, 0.3], [0.1, 0.9], top_k=2)
    assert tokens == [1, 3]  # in the vocabulary's order: .4/.7 then .3/.7
    assert logprobs == pytest.approx([math.log(4 / 7), math.log(3 / 7)])


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    tokens, logprobs = draw([0.1, 0.45, 0.15, 0.3], [0.0, 0.5, 0.7, 0.99], top_p=0.6)
    assert tokens == [1, 1, 3, 3]
    assert logprobs == pytest.approx([math.log(0.45 / 0.75)] * 2 + [math.log(0.3 / 0.75)] * 2)


def test_the_likeliest_token_survives_a_tiny_top_p() -> None:
    assert draw([0.3, 0.7], [0.0, 0.99], top_p=1e-9) == ([1, 1], pytest.approx([0.0, 0.0], abs=1e-6))


def test_rows_with_different_knobs_share_a_call() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(4, 1)
    settings = SamplingMetadata(
        temperature=torch.ones(4),
        greedy=torch.tensor([False, True, False, False]),
        top_k=torch.tensor([0, 0, 2, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5]),
    )
    tokens, logprobs, _ = sample(logits, torch.tensor([0.05, 0.9, 0.9, 0.9], dtype=torch.float64), settings)
    assert tokens.tolist() == [0, 1, 3, 3]
    expected = [math.log(0.1), math.log(0.4), math.log(3 / 7), math.log(3 / 7)]
    assert logprobs.tolist() == pytest.approx(expected)


def test_a_turns_uniforms_do_not_depend_on_how_many_are_asked_for() -> None:
    assert turn_uniforms(7, 3).tolist() == turn_uniforms(7, 100)[:3].tolist()
    assert turn_uniforms(7, 3).tolist() != turn_uniforms(8, 3).tolist()
    assert all(0 <= uniform < 1 for uniform in turn_uniforms(7, 1000))


def test_logits_that_are_no_numbers_show_in_the_log_prob() -> None:
    logits = torch.zeros(2, 100)
    logits[1, 7] = math.nan
    tokens, logprobs, _ = sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), knobs(2))
    assert 0 <= int(tokens[1]) < 100
    assert logprobs[0] == pytest.approx(math.log(1 / 100))
    assert logprobs[1].isnan()
