"""The update of replies under top-k and top-p is that of the truncated policy, by enumeration."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_learner import LOOSE, derivative, distance, gradient
from tiny_grammars import END, PROMPT, constraint_of, letters, letters_model
from torch import Tensor

from stateset_agents.backends.grammars import Grammars
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.slots import SlotModel
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.token_masks import TokenMasks
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import Completion, Message, SamplingMask, SamplingParams
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

GRAMMARS = Grammars(letters())
LENGTH = 3
TRUNCATIONS = [(2, 1.0), (0, 0.9), (3, 0.95)]


def allowed(constraint: Constraint | None, prefix: Sequence[int]) -> list[int]:
    if constraint is None:
        return list(range(6))
    matcher = GRAMMARS.matcher(constraint)
    for token in prefix:
        matcher.advance(token)
    (word,) = matcher.allowed()
    return [token for token in range(6) if int(word) >> token & 1]


def kept(logits: Tensor, top_k: int, top_p: float, among: Sequence[int]) -> list[int]:
    """The tokens that can be drawn, by hand: the likeliest, until their mass reaches top_p."""
    ranked = sorted(among, key=lambda token: -float(logits[token].detach()))[: top_k or None]
    p = torch.softmax(logits[ranked].detach(), 0).tolist()
    return sorted(token for place, token in enumerate(ranked) if place == 0 or sum(p[:place]) < top_p)


def logits_after(model: Any, prefix: Sequence[int], temperature: float = 1.0) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([[*PROMPT, *prefix]])).logits[0, -1] / temperature
    return logits


def replies_of(
    model: Any, truncation: tuple[int, float], constraint: Constraint | None, temperature: float
) -> Iterator[tuple[tuple[int, ...], list[list[int]]]]:
    """Every reply of at most three tokens with the set that each token was drawn from."""

    def grow(
        prefix: tuple[int, ...], sets: list[list[int]]
    ) -> Iterator[tuple[tuple[int, ...], list[list[int]]]]:
        if len(prefix) == LENGTH or prefix[-1:] == (END,):
            yield prefix, sets
            return
        among = kept(logits_after(model, prefix, temperature), *truncation, allowed(constraint, prefix))
        for token in among:
            yield from grow((*prefix, token), [*sets, among])

    yield from grow((), [])


def logprobs_of(
    model: Any, reply: Sequence[int], sets: Sequence[Sequence[int]], temperature: float
) -> Tensor:
    """[T] among each set; with gradient."""
    rows = []
    for place, (token, among) in enumerate(zip(reply, sets, strict=True)):
        logits = logits_after(model, reply[:place], temperature)
        rows.append(torch.log_softmax(logits[list(among)], 0)[list(among).index(token)])
    return torch.stack(rows)


def reward_of(reply: tuple[int, ...]) -> float:
    return (hash(reply) % 97) / 97 - 0.3  # ints hash to themselves: the same everywhere


def learner_of(model: Any, **settings: Any) -> Learner:
    settings = {"beta": 0.0, **LOOSE, "loss_type": "dr_grpo", "loss_length": LENGTH, **settings}
    return Learner(model, TrainingConfig(**settings), num_steps=9, exact_logprobs=True, grammars=GRAMMARS)


def sample_of(
    reply: Sequence[int],
    logprobs: Tensor,
    advantage: float,
    sets: Sequence[Sequence[int]],
    constraint: Constraint | None = None,
) -> Sample:
    completion = Completion(
        message=Message(role="assistant", content=""),
        prompt_ids=PROMPT,
        token_ids=tuple(reply),
        logprobs=tuple(logprobs.tolist()),
        finish_reason="stop",
        sampling_mask=SamplingMask.of(sets) if sets else None,
        constraint=constraint,
    )
    turn = Turn(prompt_ids=PROMPT, completion=completion)
    trajectory = Trajectory(scenario=Scenario(id="s"), turns=(turn,))
    return Sample(trajectory=trajectory, advantages=(advantage,) * len(reply))


@pytest.mark.parametrize("row_layout", ["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("constraint", [None, constraint_of()], ids=["free", "grammar"])
def test_the_gradient_is_that_of_the_truncated_policy_s_expected_reward(
    row_layout: str, temperature: float, truncation: tuple[int, float], constraint: Constraint | None
) -> None:
    model = letters_model().double()
    replies = list(replies_of(model, truncation, constraint, temperature))
    if constraint is not None:  # a set of one is a forced token there, which does not train
        replies = [(reply, sets) for reply, sets in replies if any(len(among) > 1 for among in sets)]
    expected, samples = torch.zeros((), dtype=torch.float64), []
    for reply, sets in replies:
        logprobs = logprobs_of(model, reply, sets, temperature)
        probability = logprobs.sum().exp()
        expected = expected + probability * reward_of(reply)
        advantage = float(probability.detach()) * reward_of(reply) * len(replies) * LENGTH
        samples.append(sample_of(reply, logprobs.detach(), advantage, sets, constraint))
    assert len(samples) > 2
    settings = {"row_layout": row_layout, "temperature": temperature}
    update, metrics = gradient(learner_of(copy.deepcopy(model), **settings), samples)
    truth = derivative(model, -expected)
    assert distance(update, truth) < 1e-6
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    whole = []
    for sample in samples:
        (turn,) = sample.trajectory.turns
        turn = replace(turn, completion=replace(turn.completion, sampling_mask=None))
        whole.append(replace(sample, trajectory=replace(sample.trajectory, turns=(turn,))))
    without, _ = gradient(learner_of(copy.deepcopy(model), **settings), whole)
    assert distance(without, truth) > 0.01


def test_kl_and_entropy_are_of_what_was_kept() -> None:
    model, other = letters_model().double(), letters_model(seed=1).double()
    replies = list(replies_of(model, (2, 1.0), None, 1.0))
    samples = [
        sample_of(reply, logprobs_of(model, reply, sets, 1.0).detach(), 0.0, sets) for reply, sets in replies
    ]
    learner = learner_of(copy.deepcopy(model), beta=0.5, kl_estimator="k3", entropy_coef=0.1)
    assert learner.reference is not None
    learner.reference.model.load_state_dict(other.state_dict())
    _, metrics = gradient(learner, samples)
    gaps, entropies = [], []
    for reply, sets in replies:
        with torch.no_grad():
            gap = logprobs_of(other, reply, sets, 1.0) - logprobs_of(model, reply, sets, 1.0)
            gaps.append(gap.exp() - gap - 1)
            for place, among in enumerate(sets):
                p = torch.softmax(logits_after(model, reply[:place])[among], 0)
                entropies.append(float(-(p * p.log()).sum()))
    assert metrics["kl/reference"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


def test_a_token_without_a_set_was_drawn_from_all() -> None:
    model = letters_model().double()
    reply, sets = (0, 1, 2), [[0, 3], [], [2, 4, 5]]
    with torch.no_grad():
        every = [among or range(6) for among in sets]
        logprobs = logprobs_of(model, reply, every, 1.0)
    learner = learner_of(copy.deepcopy(model))
    (batch,) = learner._micro_batches([sample_of(reply, logprobs, 1.0, sets)])
    assert learner.policy.score(batch).logprobs.tolist() == pytest.approx(logprobs.tolist(), abs=1e-9)


def test_a_sampled_token_outside_its_set_is_an_error_that_names_it() -> None:
    sample = sample_of((0, 1), torch.tensor([-0.5, -0.5]), 1.0, [[0], [2, 4]])
    with pytest.raises(BackendError, match="the sampled token 1 at place 1 is outside the 2"):
        learner_of(letters_model().double()).update([sample], step=0)


def test_slices_of_masks_are_the_masks_of_the_slice() -> None:
    sets = [SamplingMask.of([among]).token_ids for among in ([0, 3], [], [5], [1, 2, 3])]
    masks = TokenMasks.of([None] * 4, sets)
    assert masks is not None
    whole = torch.randn(4, 6)
    parts = [whole[:2].clone(), whole[2:].clone()]
    masks[slice(0, 2)].apply(parts[0])
    masks[slice(2, 4)].apply(parts[1])
    masks.apply(whole)
    assert torch.equal(torch.cat(parts), whole)
    assert [row.nonzero()[:, 0].tolist() for row in whole > -1e8] == [[0, 3], [*range(6)], [5], [1, 2, 3]]


def turn(member: int, truncation: tuple[int, float], constraint: Constraint | None) -> GenerationRequest:
    top_k, top_p = truncation
    params = SamplingParams(
        max_new_tokens=LENGTH, stream=member, top_k=top_k, top_p=top_p, return_sampling_mask=True
    )
    matcher = None if constraint is None else GRAMMARS.matcher(constraint)
    return new_request((0, 0, member), list(PROMPT), params, frozenset({END}), 32, matcher=matcher)


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("constraint", [None, constraint_of()], ids=["free", "grammar"])
def test_replies_come_as_often_as_the_truncated_policy_says_with_their_sets(
    count: int, truncation: tuple[int, float], constraint: Constraint | None
) -> None:
    model = letters_model()
    with torch.inference_mode():
        by_hand = dict(replies_of(model, truncation, constraint, 1.0))
        expected = {reply: logprobs_of(model, reply, sets, 1.0) for reply, sets in by_hand.items()}
        work, counts = Batcher(SlotModel(letters_model()), max_cached_tokens=100_000), Counter[Any]()
        for start in range(0, count, 500):
            turns = [turn(number, truncation, constraint) for number in range(start, start + 500)]
            for request in turns:
                assert work.admit(request)
            live = list(turns)
            while live:
                work.step(live)
                live = [request for request in live if request.finish_reason is None]
            for request in turns:
                work.release(request.key)
                reply = tuple(request.sampled)
                counts[reply] += 1
                assert request.logprobs == pytest.approx(expected[reply].tolist(), abs=1e-5)
                for place, among in request.kept.items():
                    assert list(among) == by_hand[reply][place]
                assert len(request.kept) >= len(reply) - len(request.forced)
        for reply, logprobs in expected.items():
            p = float(logprobs.sum().exp())
            assert abs(counts[reply] - count * p) <= 5 * (count * p * (1 - p)) ** 0.5 + 1
