"""Rows for the model: what is trained, what predicts it, and how a step is cut."""

from __future__ import annotations

import pytest
from tiny_training import sample, talk

from stateset_agents.training.rows.layout import packed_layouts, padded_layouts
from stateset_agents.training.update.batch import Sample, micro_batch


def batches(*samples, lay=padded_layouts, max_rows=8, max_tokens=1000):
    rows = [sample.trajectory.token_ids for sample in samples]
    return [micro_batch(samples, layout) for layout in lay(rows, max_rows=max_rows, max_tokens=max_tokens)]


def one(*samples, **bounds):
    (batch,) = batches(*samples, **bounds)
    return batch


def test_prompt_reply_user_reply_is_one_row_trained_on_the_replies_only():
    batch = one(sample(talk(([1, 2], [3, 4]), ([5, 6], [7]), logprobs=[-0.1, -0.2, -0.3]), 0.5))
    assert batch.layout.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [3, 4, 7]
    assert batch.positions.tolist() == [1, 2, 5]  # the position before each trained token predicts it
    assert batch.old_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5]
    assert batch.trajectory_ids.tolist() == [0, 0, 0]


def test_the_end_token_put_after_a_turn_cut_by_length_is_not_trained():
    end = 99  # the episode puts it at the start of the next delta, since the agent did not say it
    batch = one(sample(talk(([1], [2, 3]), ([end, 4], [5]))))
    assert batch.layout.input_ids.tolist() == [[1, 2, 3, 99, 4, 5]]
    assert batch.targets.tolist() == [2, 3, 5]


def test_a_second_row_predicts_from_its_own_positions_and_padding_is_never_a_target():
    batch = one(sample(talk(([1], [2]))), sample(talk(([3, 4], [5, 6]))))
    assert batch.layout.input_ids.tolist() == [[1, 2, -1, -1], [3, 4, 5, 6]]
    assert batch.positions.tolist() == [0, 5, 6]  # row 1 begins at flat index 4
    assert batch.targets.tolist() == [2, 5, 6]
    assert batch.layout.num_padding == 2


def test_each_token_has_its_own_advantage_and_the_group_weight_multiplies_it():
    trajectory = talk(([1], [2, 3]))
    batch = one(Sample(trajectory=trajectory, advantages=(1.0, -2.0), weight=0.5))
    assert batch.advantages.tolist() == [0.5, -1.0]


def test_rows_are_cut_by_length_so_that_little_is_padded_and_ids_stay_the_samples_places():
    long, short = sample(talk(([1] * 9, [2]))), sample(talk(([1], [2])))
    cut = batches(long, short, long, short, max_rows=2)
    assert [batch.trajectory_ids.tolist() for batch in cut] == [[1, 3], [0, 2]]
    assert sum(batch.layout.num_padding for batch in cut) == 0


def test_no_micro_batch_has_more_rows_or_tokens_than_allowed_save_one_row_that_is_longer():
    samples = [sample(talk(([1] * length, [2]))) for length in (1, 3, 3, 5, 40)]
    cut = batches(*samples, max_rows=3, max_tokens=12)
    assert [tuple(batch.layout.input_ids.shape) for batch in cut] == [(3, 4), (1, 6), (1, 41)]


def test_packed_rows_stand_behind_one_another_without_what_they_share_with_the_row_before():
    prompt = [1, 2, 3]
    first, second, other = talk((prompt, [4, 5])), talk((prompt, [4, 6, 7])), talk(([9], [8]))
    batch = one(sample(other), sample(second), sample(first), lay=packed_layouts)
    assert batch.layout.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 9, 8]]
    assert batch.layout.packing.positions.tolist() == [[0, 1, 2, 3, 4, 4, 5, 0, 1]]
    assert [flat.tolist() for flat in batch.layout.flat] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6], [7, 8]]
    assert batch.trajectory_ids.tolist() == [2, 2, 1, 1, 1, 0]
    assert batch.positions.tolist() == [2, 3, 2, 3, 5, 7]  # the prompt's last token predicts two rows' first
    assert batch.targets.tolist() == [4, 5, 4, 6, 7, 8]


def test_a_packed_row_that_another_begins_with_adds_nothing_and_predicts_from_it():
    twin = talk(([1, 2], [3]))
    batch = one(sample(twin), sample(twin), sample(talk(([1, 2], [3, 4]))), lay=packed_layouts)
    assert batch.layout.input_ids.tolist() == [[1, 2, 3, 4]]
    assert batch.positions.tolist() == [1, 1, 1, 2]
    assert len(batch.layout.packing.segments) == 2


def test_packs_keep_the_bounds_and_what_is_shared_counts_once():
    rows = [[1] * 10 + [place] for place in range(2, 7)]
    sizes = [
        layout.num_tokens for layout in packed_layouts(rows, max_rows=8, max_tokens=13)
    ]  # 11 and two more
    assert sizes == [13, 12]
    assert [layout.rows for layout in packed_layouts(rows, max_rows=2, max_tokens=99)] == [
        (0, 1),
        (2, 3),
        (4,),
    ]
    assert [layout.num_tokens for layout in packed_layouts(rows, max_rows=8, max_tokens=1)] == [11] * 5


def test_packs_are_as_few_as_can_be_and_then_of_like_size():
    rows = [[place] * 10 for place in range(8)]
    sizes = [layout.num_tokens for layout in packed_layouts(rows, max_rows=8, max_tokens=60)]
    assert sizes == [40, 40]  # not 60 and 20


def test_a_sample_needs_an_advantage_for_each_agent_token():
    with pytest.raises(ValueError, match="2 tokens need advantages, got 1"):
        Sample(trajectory=talk(([1], [2, 3])), advantages=(1.0,))


def test_a_token_that_nothing_predicts_is_refused():
    with pytest.raises(ValueError, match="give a prompt"):
        sample(talk(([], [2])))
