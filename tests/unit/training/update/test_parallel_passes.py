"""Passes side by side give the gradients of passes one after the other, to the last bit."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import same_bits, talk
from torch import nn
from transformers import LlamaForCausalLM

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.layout import packed_layouts
from stateset_agents.training.rows.parallel_passes import ParallelPasses
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.policy import Policy

WAIT = 20
"""Seconds after which a pass that nobody lets go on is a failure."""


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def side_by_side(work, items, passes=None, **options):
    """Each of one token."""
    return (passes or ParallelPasses(max_tokens=9)).run(work, items, [1] * len(items), **options)


def gradient_of_passes(order, *, at_once, pause=lambda number: None):
    """The gradient of a weight to which each pass adds a number of another size."""
    weight = nn.Parameter(torch.zeros(3))
    terms = [torch.tensor([1e8, 1.0, -3.0]), torch.tensor([1.0, 1e-8, 7.0]), torch.tensor([-1e8, -1.0, 1e9])]

    def work(number):
        pause(number)
        (weight * terms[number]).sum().backward()
        return number * number

    found = side_by_side(work, order, at_once=at_once, parameters=[weight])
    assert found == [number * number for number in order]
    return weight.grad.tolist()


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_gradients_are_added_in_the_order_of_the_passes(slowest, two_threads):
    expected = gradient_of_passes([0, 1, 2], at_once=1)
    assert expected != gradient_of_passes([0, 2, 1], at_once=1)  # the order can be told
    slow = gradient_of_passes(
        [0, 1, 2], at_once=3, pause=lambda number: time.sleep(0.1 * (number == slowest))
    )
    assert slow == expected


def test_passes_run_side_by_side_in_threads_that_share_the_callers(two_threads):
    together = threading.Barrier(2, timeout=WAIT)

    def work(_):
        together.wait()  # breaks unless both are there at once
        return threading.get_ident(), torch.get_num_threads()

    passes = ParallelPasses(max_tokens=2)
    first, second = side_by_side(work, ["a", "b"], passes, at_once=2)
    assert first[0] != second[0]
    assert first[1] == second[1] == 1
    assert torch.get_num_threads() == 2
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]  # not what a pass had
    again = side_by_side(work, ["a", "b"], passes, at_once=2)
    assert {thread for thread, _ in again} == {first[0], second[0]}
    torch.set_num_threads(4)
    assert [threads for _, threads in side_by_side(work, ["a", "b"], passes, at_once=2)] == [2, 2]


def test_one_pass_or_one_at_once_stays_in_the_callers_thread(two_threads):
    here = threading.get_ident()
    assert side_by_side(lambda _: threading.get_ident(), [1, 2], at_once=1) == [here, here]
    assert side_by_side(lambda _: threading.get_ident(), [1], at_once=2) == [here]
    assert side_by_side(lambda _: threading.get_ident(), [], at_once=2) == []


@pytest.mark.parametrize(("tokens", "alone"), [([5, 4, 5], False), ([5, 1, 6], True)])
def test_passes_of_too_many_tokens_together_go_one_after_the_other(tokens, alone, two_threads):
    passes, under_way, most = ParallelPasses(max_tokens=10), set(), []

    def work(item):
        under_way.add(item)
        time.sleep(0.05)
        most.append(len(under_way))
        under_way.remove(item)

    passes.run(work, range(3), tokens, at_once=2)
    assert (max(most) == 1) is alone


def test_a_pass_that_leaves_a_weight_alone_holds_up_nobody(two_threads):
    left, right = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    second_is_over = threading.Event()

    def work(number):
        if number == 0:  # adds to another weight, and ends only after the second pass
            left.sum().backward()
            assert second_is_over.wait(WAIT)
        else:
            left.sum().backward()
            second_is_over.set()

    side_by_side(work, [0, 1], at_once=2, parameters=[left, right])
    assert left.grad.tolist() == [2, 2]
    assert right.grad is None

    def other(number):
        (left if number == 0 else right).sum().backward()

    side_by_side(other, [0, 1], at_once=2, parameters=[left, right])
    assert (left.grad.tolist(), right.grad.tolist()) == ([3, 3], [1, 1])


def test_the_first_error_is_raised_when_all_have_ended_and_the_next_run_works(two_threads):
    weight, ended = nn.Parameter(torch.zeros(1)), []

    def work(number):
        try:
            if number in (1, 2):
                raise ValueError(f"pass {number}")
            time.sleep(0.05)
            weight.sum().backward()
        finally:
            ended.append(number)

    passes = ParallelPasses(max_tokens=2)
    with pytest.raises(ValueError, match="pass 1"):
        side_by_side(work, range(4), passes, at_once=2, parameters=[weight])
    assert sorted(ended) == [0, 1, 2, 3]
    weight.grad = None
    side_by_side(lambda _: weight.sum().backward(), range(5), passes, at_once=2, parameters=[weight])
    assert weight.grad.tolist() == [5]
    weight.sum().backward()  # and no hook is left
    assert weight.grad.tolist() == [6]


def samples(count):
    dice = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(250, (length,), generator=dice).tolist()

    talks = [talk((ids(9), ids(6)), (ids(5), ids(4 + index))) for index in range(count)]
    return [
        Sample(trajectory=one, advantages=(0.5 - index % 2,) * one.num_agent_tokens)
        for index, one in enumerate(talks)
    ]


def updated():
    """A learner after two updates in bf16, their metrics, and how likely samples are to it then."""
    torch.manual_seed(0)
    config = TrainingConfig(
        precision="bf16", beta=0.1, micro_batch_tokens=60, learning_rate=0.1, max_grad_norm=0.5
    )
    learner = Learner(tiny_model("llama"), config, num_steps=5, exact_logprobs=False)
    assert learner.policy.fuses
    metrics = [learner.update(samples(7), step=step) for step in range(2)]
    return learner, metrics, learner.negative_log_likelihood(samples(3))


def test_an_update_side_by_side_is_the_update_one_after_the_other(two_threads, monkeypatch):
    """With one thread in each pass, as they have here, in whatever order their threads run."""
    threads, real = set(), Policy.hidden

    def watched(policy, layout):
        threads.add(threading.current_thread())
        return real(policy, layout)

    monkeypatch.setattr(Policy, "hidden", watched)
    learner, metrics, likelihood = updated()
    assert learner.policy.passes_at_once == 2
    assert metrics[0]["batch/micro_batches"] > 2
    assert len(threads) == 2
    assert threading.current_thread() not in threads
    assert all(thread.is_alive() for thread in threads)
    learner.close()
    assert not any(thread.is_alive() for thread in threads)
    again, *same = updated()
    assert same == [metrics, likelihood]
    assert same_bits(learner.weights(), again.weights())

    def in_turn(_, work, items, *__, **___):
        return [work(item) for item in items]

    torch.set_num_threads(1)
    monkeypatch.setattr(Policy, "passes_at_once", property(lambda _: 2))  # the same micro-batches
    monkeypatch.setattr(ParallelPasses, "run", in_turn)
    plain, *expected = updated()
    assert expected == [metrics, likelihood]
    assert same_bits(learner.weights(), plain.weights())
    assert not same_bits(plain.weights(), tiny_model("llama").state_dict())


def test_passes_are_side_by_side_only_where_layers_are_fused_and_threads_are_two(two_threads):
    def policy(**options):
        return Policy(tiny_model("llama"), **options)

    fused = policy(autocast=torch.bfloat16)
    assert fused.passes_at_once == 2
    assert policy().passes_at_once == 1  # in fp32: other layers, whose attention is set in the model
    torch.set_num_threads(1)
    assert fused.passes_at_once == 1
    torch.set_num_threads(2)
    hook = fused.trunk.layers[0].register_forward_hook(lambda *_: None)
    assert fused.passes_at_once == 1
    hook.remove()
    assert fused.passes_at_once == 2


def test_passes_are_one_after_the_other_where_a_forward_changes_the_rotary_frequencies(two_threads):
    config = tiny_model("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    dynamic = Policy(LlamaForCausalLM(config), autocast=torch.bfloat16)
    assert dynamic.fuses
    assert dynamic.passes_at_once == 1


def test_a_reference_with_other_layers_is_asked_by_one_pass_at_a_time(two_threads, monkeypatch):
    seen, real = [], ParallelPasses.run

    def watched(passes, *arguments, at_once, **options):
        seen.append(at_once)
        return real(passes, *arguments, at_once=at_once, **options)

    monkeypatch.setattr(ParallelPasses, "run", watched)
    config = TrainingConfig(precision="bf16", beta=0.1, micro_batch_tokens=60)
    other = tiny_model("llama")
    other.config.attention_dropout = 0.1  # which the fused layers leave to others
    for reference, expected in ((None, [2, 2]), (other, [1, 2])):
        seen.clear()
        learner = Learner(
            tiny_model("llama"), config, num_steps=5, exact_logprobs=False, reference_model=reference
        )
        learner.update(samples(7), step=0)
        learner.close()
        assert seen == expected  # scores, then gradients


def test_layouts_for_passes_side_by_side_share_the_tokens_evenly():
    rows = [[100 * index + token for token in range(10)] for index in range(12)]

    def sizes(at_once, max_tokens):
        layouts = packed_layouts(rows, max_rows=99, max_tokens=max_tokens, at_once=at_once)
        assert sorted(row for layout in layouts for row in layout.rows) == list(range(12))
        return [layout.num_tokens for layout in layouts]

    assert sizes(1, 60) == [60, 60]
    assert sizes(2, 60) == [30, 30, 30, 30]
    assert sizes(2, 120) == [60, 60]
    assert sizes(2, 1000) == [60, 60]
    assert sizes(2, 70) == [30, 30, 30, 30]
    assert sizes(3, 119) == [20] * 6
    assert sizes(2, 20) == [10] * 12
    assert sizes(2, 19) == [10] * 12  # a row is more than half: one at a time, and no row is cut
    assert sizes(2, 5) == [10] * 12


def test_no_two_layouts_side_by_side_have_more_tokens_than_one_may():
    rows = [[*range(4), *range(100 * index, 100 * index + 3 + index % 5)] for index in range(20)]
    for max_tokens in range(22, 90):
        layouts = packed_layouts(rows, max_rows=99, max_tokens=max_tokens, at_once=2)
        largest = sorted(layout.num_tokens for layout in layouts)[-2:]
        assert sum(largest) <= max_tokens
