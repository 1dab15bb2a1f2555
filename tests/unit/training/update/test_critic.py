"""Where the trainer's critic reads its values, and what it learns there."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import talk
from torch import nn

from stateset_agents.core.value_function import create_value_function
from stateset_agents.training.update.critic import Critic
from stateset_agents.training.update.policy import Policy
from stateset_agents.types.trajectory import Status

TALKS = [
    talk(([5, 9, 3], [7, 2]), ([8, 1], [4]), ([6], [6, 6, 6])),
    talk(([1], [2])),
    talk(([3, 3], [4, 4, 4]), ([5], [])),
]


def critic(per="turn", *, bootstrap=True, iterations=1, max_rows=8, row_layout="packed", **settings):
    torch.manual_seed(0)
    function = create_value_function(tiny_model(), gamma=0.5, dropout=0.0, value_clip=None, **settings)
    nn.init.normal_(function.head.outer.weight)
    policy = Policy(function.model.eval(), row_layout=row_layout)

    def layouts(rows):
        return policy.layouts([row.token_ids for _, row in rows], max_rows=max_rows, max_tokens=64)

    return Critic(
        function, per=per, iterations=iterations, bootstrap=bootstrap, layouts=layouts, hidden=policy.hidden
    )


def test_a_turn_s_value_is_read_at_the_last_prompt_token_before_it():
    made = critic()
    for one, valued in zip(TALKS, made.predict(TALKS).estimates, strict=True):
        row = made.value_function.compute_values(torch.tensor([one.token_ids]))[0].tolist()
        starts = [len(turn.completion.prompt_ids) - 1 for turn in one.turns]
        assert valued.values == pytest.approx([row[t] for t in starts], abs=1e-4)
        assert valued.final == pytest.approx(row[-1], abs=1e-4)


def test_a_token_s_value_is_read_where_the_token_is_predicted():
    made = critic("token")
    for one, valued in zip(TALKS, made.predict(TALKS).estimates, strict=True):
        row = made.value_function.compute_values(torch.tensor([one.token_ids]))[0].tolist()
        predicting = [t - 1 for t, bit in enumerate(one.action_mask) if bit]
        assert valued.values == pytest.approx([row[t] for t in predicting], abs=1e-4)


@pytest.mark.parametrize("per", ["turn", "token"])
@pytest.mark.parametrize("bounds", [{}, {"max_rows": 1}, {"row_layout": "padded"}])
def test_of_several_rows_each_turn_is_read_in_the_one_in_which_it_trains(per, bounds):
    first, second, third, fourth = ([5, 9], [7, 2]), ([8, 1], [4]), ([5, 9, 2, 8], [6, 6, 3]), ([1], [2])
    talks = [talk(first, second, third, fourth, follows=(None, 0, None, 0)), *TALKS]
    made = critic(per, **bounds)
    read = made.predict(talks).estimates[0]

    def values(*ids):
        return made.value_function.compute_values(torch.tensor([ids]))[0].tolist()

    rows = [values(5, 9, 7, 2, 8, 1, 4), values(5, 9, 2, 8, 6, 6, 3), values(5, 9, 7, 2, 1, 2)]
    expected = [rows[0][1], rows[0][5], rows[1][3], rows[2][4]]
    if per == "token":
        expected = [*rows[0][1:3], rows[0][5], *rows[1][3:6], rows[2][4]]
    assert read.values == pytest.approx(expected, abs=1e-4)
    assert read.final == pytest.approx(rows[2][-1], abs=1e-4)
    after = [float(value) for value in made.predict(talks).old_values[0][-4:]]
    assert after == pytest.approx([rows[0][3], rows[0][6], rows[1][6], rows[2][5]], abs=1e-4)


@pytest.mark.parametrize("per", ["turn", "token"])
def test_the_cut_into_forwards_changes_no_value(per):
    together = critic(per).predict(TALKS).estimates
    for made in (critic(per, max_rows=1), critic(per, row_layout="padded")):
        for one, other in zip(together, made.predict(TALKS).estimates, strict=True):
            assert one.values == pytest.approx(other.values, abs=1e-4)


def test_after_a_turn_it_learns_what_the_next_one_brought():
    returns = [[4.0, 2.0, 1.0], [3.0], [5.0, 6.0]]
    made = critic("turn")
    # gamma .5: after the first turn half of 2, after the second half of 1, after the last nothing
    assert made._returns_after(TALKS[0], returns[0]) == [1.0, 0.5, 0.0]
    assert made._returns_after(TALKS[1], returns[1]) == [0.0]
    per_token = critic("token")
    assert per_token._returns_after(TALKS[0], [4, 3, 2, 1, 1, 1]) == [1.0, 0.5, 0.0]
    assert per_token._returns_after(TALKS[2], [3, 3, 3]) == [0.0, 0.0]  # the second turn has no token


def test_what_comes_after_a_cut_is_not_known():
    cut = talk(([1], [2]), ([3], [4]), status=Status.TRUNCATED)
    after = critic()._returns_after(cut, [4.0, 2.0])
    assert after[0] == 1.0
    assert after[1] != after[1]
    assert critic(bootstrap=False)._returns_after(cut, [4.0, 2.0]) == [1.0, 0.0]
    made = critic(iterations=300)
    predictions = made.predict([cut])
    made.learn(predictions, [cut], [[4.0, 2.0]])
    (now,) = made.predict([cut]).estimates
    assert now.values == pytest.approx([4.0, 2.0], abs=0.1)


@pytest.mark.parametrize("per", ["turn", "token"])
def test_it_comes_to_expect_what_was_paid(per):
    made, talks = critic(per, iterations=40), TALKS[:2]
    returns = [[1.0, 0.5, -1.0], [2.0]]
    if per == "token":
        returns = [[1.0, 0.9, 0.5, -1.0, -1.0, -1.0], [2.0]]
    seen = [made.learn(made.predict(talks), talks, returns) for _ in range(6)]
    assert seen[-1]["value/explained_variance"] > 0.9 > seen[0]["value/explained_variance"]
    assert seen[-1]["loss/value"] < 0.1 * seen[0]["loss/value"]
