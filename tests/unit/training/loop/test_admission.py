"""Admission: what may begin, what trains next, how stale it may be, however groups fare."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.training.loop.rollouts import Admission, End, Verdict
from stateset_agents.types.errors import TrainingStopped

SIGNAL, NO_SIGNAL, FAILED = Verdict.SIGNAL, Verdict.NO_SIGNAL, Verdict.FAILED


def admit_all(admission: Admission) -> list[int]:
    return [admission.admit() for _ in range(admission.capacity)]


def test_on_policy_exactly_one_step_is_admitted_at_a_time() -> None:
    admission = Admission(groups_per_step=3, remaining=5, first=10)
    assert admit_all(admission) == [10, 11, 12]
    for place in (12, 10, 11):
        assert not admission.is_ready
        admission.finish(place, SIGNAL)
    batch = admission.next_batch()
    assert batch.selected == (10, 11, 12)
    assert batch.ends == {10: End.TRAINED, 11: End.TRAINED, 12: End.TRAINED}
    assert admission.capacity == 0  # until the step has trained
    admission.complete_step()
    assert admit_all(admission) == [13, 14]  # the last step is short
    admission.finish(13, SIGNAL)
    admission.finish(14, FAILED)
    batch = admission.next_batch()
    assert batch.selected == (13, 14)
    assert batch.ends == {13: End.TRAINED, 14: End.FAILED}
    admission.complete_step()
    assert admission.capacity == 0


def test_with_staleness_one_the_next_step_s_groups_begin_before_this_step_trains() -> None:
    admission = Admission(groups_per_step=2, remaining=100, max_staleness=1)
    assert admit_all(admission) == [0, 1, 2, 3]
    for place in (3, 2, 1):
        admission.finish(place, SIGNAL)
    assert (admission.num_waiting, admission.is_ready) == (3, False)  # the head is still under way
    admission.finish(0, SIGNAL)
    assert admission.next_batch().selected == (0, 1)
    assert (admission.num_waiting, admission.capacity) == (2, 0)
    admission.complete_step()
    assert admission.capacity == 2


def test_conversations_bound_how_many_groups_begin_and_a_free_one_lets_the_next_group_in() -> None:
    admission = Admission(groups_per_step=9, remaining=99, max_concurrent=7, group_size=4)
    assert admit_all(admission) == [0, 1]  # seven at once, and the eighth waits for a free place
    admission.conversation_ended(0)
    assert admission.capacity == 0
    admission.conversation_ended(1)
    assert admit_all(admission) == [2]
    admission.finish(0, SIGNAL)
    assert (admission.running, admission.capacity) == (2, 0)


def test_groups_without_signal_are_replaced_by_the_next_up_to_the_limit() -> None:
    admission = Admission(groups_per_step=2, remaining=4, max_resamples=2)
    assert admit_all(admission) == [0, 1]
    admission.finish(1, NO_SIGNAL)
    admission.finish(0, FAILED)
    assert admit_all(admission) == [2, 3]
    admission.finish(2, NO_SIGNAL)  # the third without signal: now it is selected
    admission.finish(3, SIGNAL)
    batch = admission.next_batch()
    assert (batch.selected, batch.filtered) == ((2, 3), (0, 1))
    assert batch.ends == {0: End.FAILED, 1: End.FILTERED, 2: End.TRAINED, 3: End.TRAINED}
    admission.complete_step()
    assert admit_all(admission) == [4, 5]


def test_a_group_that_is_too_old_is_refused_at_training_time() -> None:
    admission = Admission(groups_per_step=1, remaining=9)
    admission.admit()
    admission.admit()  # without asking for capacity
    for place in (0, 1):
        admission.finish(place, SIGNAL)
    admission.next_batch()
    admission.complete_step()
    with pytest.raises(TrainingStopped, match=r"staleness 1 .* max_staleness is 0"):
        admission.next_batch()


# ------------------------------------------------------------------------------ whatever happens


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 23),
    st.integers(0, 3),
    st.integers(0, 10**9),
)
def test_whatever_happens_every_group_ends_once_in_time_and_in_order(
    groups_per_step: int,
    max_staleness: int,
    max_concurrent: int,
    group_size: int,
    max_resamples: int,
    total: int,
    kills: int,
    seed: int,
) -> None:
    """Groups fail, time out, are alike, and the program is killed and started again, all at random."""
    chance = random.Random(seed)
    num_scenarios = 5
    ends: dict[int, End] = {}
    done_before = trained = 0
    frontier = 0

    def start() -> Admission:
        return Admission(
            groups_per_step=groups_per_step,
            remaining=total - trained,
            max_staleness=max_staleness,
            max_concurrent=max_concurrent,
            group_size=group_size,
            max_resamples=max_resamples,
            first=frontier,
        )

    admission = start()
    running: dict[int, tuple[int, int]] = {}  # place -> (conversations left, steps done when it began)
    in_training = None
    most = 4 * (kills + 1) * (total + 1) * (max_resamples + 1) * (group_size + 3)
    for _ in range(most):  # progress: it ends
        assert admission.submitted == admission.accepted + admission.rejected + admission.running
        assert admission.running == len(running)
        assert sum(left for left, _ in running.values()) < max_concurrent + group_size
        if trained == total:
            break
        able = []
        if admission.capacity:
            able.append("admit")
        able += ["play"] * (2 * bool(running))
        if in_training is None and admission.is_ready:
            able.append("next_batch")
        if in_training is not None:
            able.append("complete_step")
        assert able, "nothing can go on"
        if kills and chance.random() < 0.05:
            able, kills = ["kill"], kills - 1
        match chance.choice(able):
            case "kill":
                admission, running, in_training = start(), {}, None
            case "admit":
                running[admission.admit()] = (group_size, admission.steps_done)
            case "play":
                place = chance.choice(sorted(running))
                left, began = running[place]
                if left > 1:
                    admission.conversation_ended(place)
                    running[place] = (left - 1, began)
                else:
                    del running[place]
                    admission.finish(place, chance.choice([SIGNAL, NO_SIGNAL, FAILED]))
            case "next_batch":
                in_training = admission.next_batch()  # its own check raises where a group is too old
                expected = min(groups_per_step, total - trained)
                assert len(in_training.selected) == expected
                assert len(in_training.filtered) <= max_resamples
                assert list(in_training.ends) == list(range(frontier, frontier + len(in_training.ends)))
            case "complete_step":
                assert in_training is not None
                admission.complete_step()
                assert not in_training.ends.keys() & ends.keys()
                ends |= in_training.ends
                trained += len(in_training.selected)
                frontier, in_training = frontier + len(in_training.ends), None
                done_before += 1
    assert trained == total
    assert sorted(ends) == list(range(frontier))  # one record of each, none left out
    per_epoch = Counter(divmod(place, num_scenarios) for place in ends)
    assert set(per_epoch.values()) == {1}
    assert done_before == math.ceil(total / groups_per_step)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 10**9))
def test_no_group_trains_staler_than_allowed(groups_per_step: int, max_staleness: int, seed: int) -> None:
    chance = random.Random(seed)
    admission = Admission(groups_per_step=groups_per_step, remaining=40, max_staleness=max_staleness)
    began: dict[int, int] = {}
    running: list[int] = []
    worst = 0
    while admission.steps_done * groups_per_step < 40:
        for place in admit_all(admission):
            began[place] = admission.steps_done
            running.append(place)
        if running and chance.random() < 0.8:
            admission.finish(running.pop(chance.randrange(len(running))), chance.choice([SIGNAL, FAILED]))
        if admission.is_ready:
            worst = max(
                worst, *(admission.steps_done - began[place] for place in admission.next_batch().selected)
            )
            admission.complete_step()
    assert worst <= max_staleness


# ------------------------------------------------------------------------------ slow conversations

STEPS, GROUPS, STALENESS, CONCURRENT = 150, 32, 1, 64


def simulate(*, in_order: bool, drop_stale: bool = False) -> tuple[list[float], list[float], int]:
    """Lengths offered, lengths trained, worst staleness, of 64 conversations at once with lognormal lengths
    (sigma 1.5) and updates of a length of 2. `in_order` is `Admission`; else the same capacity, but a step
    trains what finished first, and may drop what is too stale."""
    lengths = random.Random(0)
    admission = Admission(
        groups_per_step=GROUPS,
        remaining=STEPS * GROUPS,
        max_staleness=STALENESS,
        max_concurrent=CONCURRENT,
    )
    clock, free_at, done = 0.0, 0.0, 0
    running: list[tuple[float, int]] = []
    finished: list[int] = []
    length_of: dict[int, float] = {}
    began: dict[int, int] = {}
    trained: list[float] = []
    num_dropped = worst = 0
    while done < STEPS:
        if in_order:
            capacity = admission.capacity
        else:
            accepted = len(length_of) - len(running) - num_dropped
            capacity = min(
                CONCURRENT - len(running), (STALENESS + done + 1) * GROUPS - accepted - len(running)
            )
        for _ in range(capacity):
            place = admission.admit()
            length_of[place], began[place] = lengths.lognormvariate(0.0, 1.5), done
            heapq.heappush(running, (clock + length_of[place], place))
        if clock >= free_at:
            batch: list[int] = []
            if in_order and admission.is_ready:
                batch = list(admission.next_batch().selected)
                admission.complete_step()
            elif not in_order:
                if drop_stale:
                    fresh = [place for place in finished if done - began[place] <= STALENESS]
                    num_dropped += len(finished) - len(fresh)
                    finished = fresh
                if len(finished) >= GROUPS:
                    batch, finished = finished[:GROUPS], finished[GROUPS:]
            if batch:
                trained += [length_of[place] for place in batch]
                worst = max(worst, *(done - began[place] for place in batch))
                done, free_at = done + 1, clock + 2.0
                continue
        if running and (clock >= free_at or running[0][0] <= free_at):
            clock, place = heapq.heappop(running)
            finished.append(place)
            admission.finish(place, SIGNAL)
        else:
            clock = free_at
    return list(length_of.values()), trained, worst


def test_slow_conversations_train_as_often_as_they_are_offered_and_staleness_stays_in_bounds() -> None:
    offered, trained, worst = simulate(in_order=True)
    assert worst <= STALENESS
    assert trained == offered[: len(trained)]  # every one, in order
    assert fmean(trained) == pytest.approx(fmean(offered), rel=0.03)


def test_training_what_finished_first_is_stale_and_dropping_the_stale_is_biased() -> None:
    _, _, worst = simulate(in_order=False)
    assert worst > 10 * STALENESS
    offered, trained, worst = simulate(in_order=False, drop_stale=True)
    assert worst <= STALENESS
    assert fmean(trained) < 0.8 * fmean(offered)
