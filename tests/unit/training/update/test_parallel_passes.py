"""Passes side by side give the gradients of passes one after the other, to the last bit."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import same_bits, talk
from torch import nn

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


def gradient_of_passes(order, *, at_once, pause=lambda number: None):
    """The gradient of a weight to which each pass adds a number of another size."""
    weight = nn.Parameter(torch.zeros(3))
    terms = [torch.tensor([1e8, 1.0, -3.0]), torch.tensor([1.0, 1e-8, 7.0]), torch.tensor([-1e8, -1.0, 1e9])]

    def work(number):
        pause(number)
        (weight * terms[number]).sum().backward()
        return number * number

    found = ParallelPasses().run(work, order, at_once=at_once, parameters=[weight])
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

    passes = ParallelPasses()
    first, second = passes.run(work, ["a", "b"], at_once=2)
    assert first[0] != second[0]
    assert first[1] == second[1] == 1
    assert torch.get_num_threads() == 2
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]  # not what a pass had
    assert {thread for thread, _ in passes.run(work, ["a", "b"], at_once=2)} == {first[0], second[0]}
    torch.set_num_threads(4)
    assert [threads for _, threads in passes.run(work, ["a", "b"], at_once=2)] == [2, 2]


def test_one_pass_or_one_at_once_stays_in_the_callers_thread(two_threads):
    passes, here = ParallelPasses(), threading.get_ident()
    assert passes.run(lambda _: threading.get_ident(), [1, 2], at_once=1) == [here, here]
    assert passes.run(lambda _: threading.get_ident(), [1], at_once=2) == [here]
    assert passes.run(lambda _: threading.get_ident(), [], at_once=2) == []


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

    ParallelPasses().run(work, [0, 1], at_once=2, parameters=[left, right])
    assert left.grad.tolist() == [2, 2]
    assert right.grad is None

    def other(number):
        (left if number == 0 else right).sum().backward()

    ParallelPasses().run(other, [0, 1], at_once=2, parameters=[left, right])
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

    passes = ParallelPasses()
    with pytest.raises(ValueError, match="pass 1"):
        passes.run(work, range(4), at_once=2, parameters=[weight])
    assert sorted(ended) == [0, 1, 2, 3]
    weight.grad = None
    passes.run(lambda _: weight.sum().backward(), range(5), at_once=2, parameters=[weight])
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

    def in_turn(_, work, items, **__):
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
    assert sizes(2, 5) == [10] * 12  # no row is cut
