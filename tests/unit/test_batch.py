"""Rows for the model: what is trained, what predicts it, and how a step is cut."""

from __future__ import annotations

import pytest
from tiny_training import sample, talk

from stateset_agents.training.batch import Sample, make_micro_batches


def one(*samples, max_rows=8, max_tokens=1000):
    (batch,) = make_micro_batches(samples, max_rows=max_rows, max_tokens=max_tokens)
    return batch


def test_prompt_reply_user_reply_is_one_row_trained_on_the_replies_only():
    batch = one(sample(talk(([1, 2], [3, 4]), ([5, 6], [7]), logprobs=[-0.1, -0.2, -0.3]), 0.5))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [3, 4, 7]
    assert batch.positions.tolist() == [1, 2, 5]  # the position before each trained token predicts it
    assert batch.old_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5]
    assert batch.trajectory_ids.tolist() == [0, 0, 0]


def test_the_end_token_put_after_a_turn_cut_by_length_is_not_trained():
    end = 99  # the episode puts it at the start of the next delta, since the agent did not say it
    batch = one(sample(talk(([1], [2, 3]), ([end, 4], [5]))))
    assert batch.input_ids.tolist() == [[1, 2, 3, 99, 4, 5]]
    assert batch.targets.tolist() == [2, 3, 5]


def test_a_second_row_predicts_from_its_own_positions_and_padding_is_never_a_target():
    batch = one(sample(talk(([1], [2]))), sample(talk(([3, 4], [5, 6]))))
    assert batch.input_ids.tolist() == [[1, 2, -1, -1], [3, 4, 5, 6]]
    assert batch.positions.tolist() == [0, 5, 6]  # row 1 begins at flat index 4
    assert batch.targets.tolist() == [2, 5, 6]
    assert batch.num_padding == 2
    assert batch.model_input.min() >= 0


def test_each_token_has_its_own_advantage_and_the_group_weight_multiplies_it():
    trajectory = talk(([1], [2, 3]))
    batch = one(Sample(trajectory=trajectory, advantages=(1.0, -2.0), weight=0.5))
    assert batch.advantages.tolist() == [0.5, -1.0]


def test_rows_are_cut_by_length_so_that_little_is_padded_and_ids_stay_the_samples_places():
    long, short = sample(talk(([1] * 9, [2]))), sample(talk(([1], [2])))
    batches = make_micro_batches([long, short, long, short], max_rows=2, max_tokens=1000)
    assert [batch.trajectory_ids.tolist() for batch in batches] == [[1, 3], [0, 2]]
    assert sum(batch.num_padding for batch in batches) == 0


def test_no_micro_batch_has_more_rows_or_tokens_than_allowed_save_one_row_that_is_longer():
    samples = [sample(talk(([1] * length, [2]))) for length in (1, 3, 3, 5, 40)]
    batches = make_micro_batches(samples, max_rows=3, max_tokens=12)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(3, 4), (1, 6), (1, 41)]


def test_samples_that_teach_nothing_stand_apart():
    samples = [sample(talk(([1], [2])), advantage) for advantage in (1.0, 0.0, -1.0, 0.0)]
    batches = make_micro_batches(samples, max_rows=8, max_tokens=1000)
    assert [(batch.trajectory_ids.tolist(), batch.has_advantages) for batch in batches] == [
        ([0, 2], True),
        ([1, 3], False),
    ]


def test_a_sample_needs_an_advantage_for_each_agent_token():
    with pytest.raises(ValueError, match="2 agent tokens needs an advantage each, got 1"):
        Sample(trajectory=talk(([1], [2, 3])), advantages=(1.0,))


def test_a_token_that_nothing_predicts_is_refused():
    with pytest.raises(ValueError, match="give a prompt"):
        sample(talk(([], [2])))
