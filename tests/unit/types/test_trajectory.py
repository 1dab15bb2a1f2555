"""A trajectory's token row, action mask, log-probs and versions line up, or it cannot be made."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
from builders import trajectory
from repository_paths import ROOT

from stateset_agents.tracking.run_log import RecordedTurn
from stateset_agents.types.messages import Completion, Message, VersionSpan
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory, TrajectoryGroup, Turn

END = 9


def turn(before: list[int], delta: list[int], sampled: list[int], **fields: object) -> Turn:
    completion = Completion(
        message=Message(role="assistant", content=""),
        prompt_ids=(*before, *delta),
        token_ids=tuple(sampled),
        logprobs=tuple(-0.1 * token for token in sampled),
        finish_reason="stop",
        version_spans=(VersionSpan(7, 0, len(sampled)),),
    )
    return Turn(prompt_ids=tuple(delta), completion=completion, **fields)  # type: ignore[arg-type]  # test data


FIRST = turn([], [1, 2], [3, END])
SECOND = turn([1, 2, 3, END], [4], [5, 6, END])
TALK = Trajectory(scenario=Scenario(id="s"), turns=(FIRST, SECOND))


def test_only_sampled_tokens_are_actions_their_first_end_token_included() -> None:
    assert TALK.token_ids == [1, 2, 3, END, 4, 5, 6, END]
    assert TALK.action_mask == [0, 0, 1, 1, 0, 1, 1, 1]
    assert TALK.num_agent_tokens == 5


def test_the_mask_goes_by_position_so_the_same_token_from_the_template_is_no_action() -> None:
    cut = turn([], [1, END], [3])
    after = turn([1, END, 3], [END, 4], [END])
    talk = Trajectory(scenario=Scenario(id="s"), turns=(cut, after))
    assert talk.token_ids == [1, END, 3, END, 4, END]
    assert talk.action_mask == [0, 0, 1, 0, 0, 1]


def test_log_probs_and_versions_stand_on_sampled_tokens_alone() -> None:
    assert TALK.logprobs == pytest.approx([0, 0, -0.3, -0.9, 0, -0.5, -0.6, -0.9])
    assert TALK.versions == [-1, -1, 7, 7, -1, 7, 7, 7]
    lengths = {len(TALK.token_ids), len(TALK.action_mask), len(TALK.logprobs), len(TALK.versions)}
    assert lengths == {8}


@pytest.mark.parametrize(
    "second",
    [
        turn([1, 2, 3], [4], [5]),  # a token is missing
        turn([1, 2, 3, END], [4], [5]).completion,  # below: another delta than the model saw
        turn([1, 2, 8, END], [4], [5]),  # a token differs
    ],
    ids=["missing", "delta", "other"],
)
def test_a_turn_whose_prompt_is_not_what_came_before_cannot_be_added(second: Turn | Completion) -> None:
    if isinstance(second, Completion):
        second = Turn(prompt_ids=(4, 4), completion=second)
    with pytest.raises(ValueError, match="not what stood in the conversation before it"):
        replace(TALK, turns=(FIRST, second))


def test_turns_that_follow_one_another_are_one_row() -> None:
    (row,) = TALK.rows
    assert row.indices == (0, 1)
    assert row.token_ids == TALK.token_ids
    assert row.action_mask == TALK.action_mask
    assert row.logprobs == TALK.logprobs
    assert row.versions == TALK.versions


def test_a_turn_that_follows_nothing_opens_a_row() -> None:
    talk = replace(TALK, turns=(FIRST, turn([], [1, 4], [5, END], follows=None)))
    assert [row.token_ids for row in talk.rows] == [[1, 2, 3, END], [1, 4, 5, END]]
    assert [row.action_mask for row in talk.rows] == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_a_turn_that_two_rows_share_trains_in_the_first() -> None:
    other = turn([1, 2, 3, END], [8], [7, END], follows=0)
    talk = replace(TALK, turns=(FIRST, SECOND, other))
    assert [row.indices for row in talk.rows] == [(0, 1), (0, 2)]
    assert [row.token_ids for row in talk.rows] == [[1, 2, 3, END, 4, 5, 6, END], [1, 2, 3, END, 8, 7, END]]
    assert [row.action_mask for row in talk.rows] == [[0, 0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]]
    assert talk.rows[1].logprobs == pytest.approx([0, 0, 0, 0, 0, -0.7, -0.9])
    assert talk.rows[1].versions == [-1, -1, -1, -1, -1, 7, 7]


def test_a_turn_follows_one_before_it() -> None:
    with pytest.raises(ValueError, match="turn 1 follows turn 1, which is none before it"):
        replace(TALK, turns=(FIRST, replace(SECOND, follows=1)))


def test_messages_are_the_opening_the_replies_and_what_answered_them() -> None:
    talk = trajectory("hi", "yes?", "bye", "goodbye")
    assert [(m.role, m.content) for m in talk.messages] == [
        ("user", "hi"),
        ("assistant", "yes?"),
        ("user", "bye"),
        ("assistant", "goodbye"),
    ]
    assert [m.content for m in talk.replies] == ["yes?", "goodbye"]


@pytest.mark.parametrize(
    ("turn_rewards", "final", "total"),
    [
        ((0.5, None), None, 0.5),
        ((None, None), 1.0, 1.0),
        ((0.5, 0.25), 1.0, 1.75),
        ((None, None), None, None),
    ],
)
def test_the_environment_s_reward_is_its_turns_and_its_outcome_s(
    turn_rewards: tuple[float | None, ...], final: float | None, total: float | None
) -> None:
    talk = trajectory("a", "b", "c", "d", turn_rewards=turn_rewards, outcome=Outcome(reward=final))
    assert talk.environment_reward == total


def test_without_an_outcome_nothing_is_known() -> None:
    assert TALK.success is None
    assert TALK.environment_reward is None
    assert replace(TALK, outcome=Outcome(reward=1.0, success=True)).success is True


def test_a_group_knows_which_of_its_members_are_scored() -> None:
    members = (replace(TALK, reward=1.0), TALK, replace(TALK, reward=0.0))
    group = TrajectoryGroup(key="0/s", trajectories=members)
    assert group.rewards == [1.0, None, 0.0]
    assert list(group.scored) == [members[0], members[2]]


def test_the_last_turn_earns_what_the_conversation_earned_as_a_whole():
    unscored_turns = trajectory("Hi", "a", "b", "c", reward=2.0, turn_rewards=[None, None])
    scored = replace(unscored_turns, turn_rewards=(0.5, 0.25))
    assert scored.outcome_reward == 1.25
    assert scored.rewards_by_turn == [0.5, 1.5]


@pytest.mark.parametrize("kind", [Trajectory, Turn, Outcome, RecordedTurn])
def test_the_reference_page_has_a_row_for_every_field(kind: type) -> None:
    page = (ROOT / "docs" / "trajectories.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- fields: {kind.__name__} -->")[2].partition("<!-- end of fields -->")[0]
    computed = [name for name, value in vars(kind).items() if isinstance(value, property)]
    names = [field.name for field in dataclasses.fields(kind)] + computed
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(names)
