"""Conversations as TRL's rows: where they are cut, and what trains."""

from __future__ import annotations

import pytest
from tiny_training import talk

from stateset_agents.training.trl.rows import TrlRow, padding_row, shares_of_conversations, trl_rows


def test_a_row_is_cut_before_the_first_reply_and_trains_replies_alone():
    trajectory = talk(([1, 2], [4, 5]), ([6], [7]), logprobs=[-0.5, -0.25, -2.0], reward=1.0)
    (row,) = trl_rows(trajectory, [0.5, 0.5, -1.0], weight=2.0)
    assert row.prompt_ids == [1, 2]
    assert row.completion_ids == [4, 5, 6, 7]
    assert row.env_mask == [1, 1, 0, 1]
    assert row.advantages == [1.0, 1.0, 0.0, -2.0]
    assert row.logprobs == [-0.5, -0.25, 0.0, -2.0]
    assert row.reward == 1.0


def test_cut_earlier_the_rest_of_the_prompt_is_not_trained():
    (row,) = trl_rows(talk(([1, 2, 3], [4])), [0.5], prompt_tokens=1)
    assert (row.prompt_ids, row.completion_ids, row.env_mask) == ([1], [2, 3, 4], [0, 0, 1])


def test_each_row_has_the_advantages_of_the_turns_that_train_in_it():
    trajectory = talk(
        ([1, 2], [3]),
        ([4], [5, 6]),
        ([7], [8]),
        ([1, 9], [3, 3]),
        ([5], []),
        follows=[None, -1, 0, None, None],
    )
    rows = trl_rows(trajectory, [0.5, 1.0, 2.0, 3.0, 4.0, 5.0], weight=2.0, conversation=6)
    assert [(row.prompt_ids, row.completion_ids) for row in rows] == [
        ([1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 7], [8]),  # the shared turn trains in the first row
        ([1, 9], [3, 3]),
    ]
    assert [row.advantages for row in rows] == [[1.0, 0.0, 2.0, 4.0], [6.0], [8.0, 10.0]]
    assert {row.conversation for row in rows} == {6}
    other = trl_rows(talk(([1], [2, 3])), [1.0, 1.0], conversation=7)
    assert shares_of_conversations([*rows, *other, padding_row(9, reward=0.0)]) == [
        0.5,
        1 / 6,
        1 / 3,
        1.0,
        0.0,
    ]


def test_without_advantages_nothing_trains():
    (row,) = trl_rows(talk(([1], [4, 5])), None)
    assert row.env_mask == [0, 0]
    assert padding_row(9, reward=0.5).env_mask == [0]


def test_lengths_that_differ_are_refused_before_trl_fills_them_with_ones():
    whole = {"prompt_ids": [1], "completion_ids": [4, 5], "env_mask": [1, 1], "logprobs": [0.0, 0.0]}
    TrlRow(**whole, advantages=[1.0, 1.0])
    for name in ("completion_ids", "env_mask", "logprobs"):
        with pytest.raises(ValueError, match="of one length"):
            TrlRow(**{**whole, name: whole[name][:1]}, advantages=[1.0, 1.0])
    with pytest.raises(ValueError, match="of one length"):
        TrlRow(**whole, advantages=[1.0])
    with pytest.raises(ValueError, match="3 agent tokens need an advantage each, got 2"):
        trl_rows(talk(([1], [4, 5, 6])), [1.0, 1.0])
    with pytest.raises(ValueError, match="before token 2"):
        trl_rows(talk(([1], [4, 5])), [1.0, 1.0], prompt_tokens=2)
