"""What the report says of several rows: where they begin, and what the agent no longer sees there."""

from __future__ import annotations

import random
from typing import Any

import pytest
from row_talks import TOKENIZER, RowTalk, agent, compacted_talk, forked_talk, thinking_talk, tool, user

from stateset_agents.reporting.row_changes import row_changes
from stateset_agents.tracking.tracker import rollout_record

TEXTS = {id: TOKENIZER.piece(id) for id in range(261)}


def changes(talk: RowTalk) -> dict[str, Any]:
    found = row_changes(rollout_record(talk.trajectory()), TEXTS)
    assert found is not None
    return found


def test_a_conversation_of_one_row_has_none() -> None:
    talk = RowTalk(user("hi")).says(agent("yes?", "who?"), user("bye")).says(agent("bye"))
    assert row_changes(rollout_record(talk.trajectory()), TEXTS) is None


def test_thoughts_that_the_next_prompt_drops_are_gone_and_words_are_not() -> None:
    assert changes(thinking_talk()) == {
        "number": 2,
        "begins": {2: {"messages": [], "thoughts": [0, 1]}},
        "gone": [[2, True, 2, "dropped"], [4, True, 2, "dropped"]],
    }


def test_a_summary_stands_for_what_was_said_before() -> None:
    # 0 name, 1 hello, 2 kettle, 3 size?, 4 small, 5 summary, 6 ordered; the new row has 0, 5, 3, 4
    assert changes(compacted_talk()) == {
        "number": 2,
        "begins": {3: {"messages": [1, 2], "thoughts": [2]}},
        "gone": [
            [1, True, 3, "summarized"],
            [1, False, 3, "summarized"],
            [2, False, 3, "summarized"],
            [5, True, 3, "dropped"],
        ],
    }


def test_what_a_later_turn_sees_again_is_not_gone() -> None:
    # 0 trip, 1 when?, 2 May, 3 mild; the sub-agent's turn 1 sees nothing of it, turn 2 goes on from turn 0
    assert changes(forked_talk()) == {
        "number": 2,
        "begins": {
            1: {"messages": [0, 1, 2], "thoughts": []},
            2: {"messages": [3], "thoughts": []},
        },
        "gone": [[3, False, 2, "in another row"]],
    }


def test_the_oldest_exchange_that_no_longer_fits_is_left_out() -> None:
    talk = RowTalk(user("first question")).says(agent("first answer"), user("second question"))
    talk.says(agent("second answer"), shown=(user("second question"),), follows=None)
    found = changes(talk)
    assert found["begins"] == {1: {"messages": [0, 1], "thoughts": []}}
    assert found["gone"] == [[0, False, 1, "left out"], [1, False, 1, "left out"]]


def test_a_row_that_holds_all_that_was_said_loses_nothing() -> None:
    said = (user("ok"), agent("ok", "ok, ok"), user("so be it, ok"))
    talk = RowTalk(said[0]).says(said[1], said[2]).says(agent("bye"), shown=said, follows=None)
    assert changes(talk) == {"number": 2, "begins": {1: {"messages": [], "thoughts": []}}, "gone": []}


def test_short_words_do_not_hide_long_ones() -> None:
    # "ok" is gone, and stands in "broken" behind what is still there
    talk = RowTalk(user("ok")).says(agent("what is it?"), user("it is broken"))
    talk.says(agent("oh"), shown=(agent("what is it?"), user("it is broken")), follows=None)
    assert changes(talk)["begins"] == {1: {"messages": [0], "thoughts": []}}


def test_a_tool_s_result_is_found_as_a_json_string_too() -> None:
    result = tool('{"city": "Oslo"}')
    talk = RowTalk(user("where?")).says(agent("", None, "look"), result)
    talk.says(
        agent("bye"),
        shown=(user("where?"), agent("", None, "look"), tool(r"\"{\"city\": \"Oslo\"}\"")),
        follows=None,
    )
    assert changes(talk)["gone"] == []


def test_of_a_text_that_its_template_changes_nothing_is_said() -> None:
    talk = RowTalk(user("hi")).says(agent("what?"), user("A question"))
    shouting = talk.says(agent("yes"), shown=(user("A QUESTION"),)).says(
        agent("and?"), shown=(user("hi"),), follows=None
    )
    assert changes(shouting)["begins"] == {2: {"messages": [1, 3], "thoughts": []}}


def test_rows_are_counted_where_the_tokens_texts_are_not_known() -> None:
    assert row_changes(rollout_record(thinking_talk().trajectory()), {}) == {
        "number": 2,
        "begins": {2: None},
        "gone": [],
    }


GERMAN = ("Ist sie schön verpackt? Sie käme früh an.", "Schöne Grüße, sie ist unterwegs!")
CHINESE = (
    "\u987e\u5ba2\u60f3\u77e5\u9053\u8ba2\u5355\u5728\u54ea\u91cc",
    "\u5305\u88f9\u5df2\u7ecf\u5230\u4e86",
)


def asked(thought: str, words: str, *, keeps: bool) -> RowTalk:
    said = agent(words, thought)
    shown = (user("Wo?"), said if keeps else agent(words), user("Danke"))
    return RowTalk(user("Wo?")).says(said, user("Danke")).says(agent("Bitte"), shown=shown, follows=None)


def in_characters(record: dict[str, Any], split: str) -> tuple[dict[str, Any], dict[int, str]]:
    """The record with a token for each character, and two for those that are split; their texts."""
    ids: list[int] = []
    turns, start = [], 0
    for turn in record["turns"]:
        lengths = []
        for name in ("prompt_tokens", "sampled_tokens"):
            text = TOKENIZER.decode(record["token_ids"][start : start + turn[name]])
            start += turn[name]
            tokens = [token for one in text for token in ([-1, -1] if one in split else [ord(one)])]
            ids += tokens
            lengths.append(len(tokens))
        turns.append(turn | {"prompt_tokens": lengths[0], "sampled_tokens": lengths[1]})
    return record | {"turns": turns, "token_ids": ids}, {id: "\ufffd" if id < 0 else chr(id) for id in ids}


@pytest.mark.parametrize("keeps", [True, False])
def test_characters_that_are_split_over_tokens_are_found(keeps: bool) -> None:
    dropped = {1: {"messages": [], "thoughts": [] if keeps else [0]}}
    assert changes(asked(*GERMAN, keeps=keeps))["begins"] == dropped
    for split in ("", "\u5355\u54ea\u5230"):
        record = rollout_record(asked(*CHINESE, keeps=keeps).trajectory())
        found = row_changes(*in_characters(record, split))
        assert found is not None
        assert found["begins"] == dropped


def test_of_a_text_all_of_whose_characters_are_split_nothing_is_said() -> None:
    found = changes(asked(*CHINESE, keeps=False))
    assert found["begins"] == {1: {"messages": [], "thoughts": []}}
    assert found["gone"] == []


def test_every_thought_of_forty_rows_is_gone_at_the_next() -> None:
    words = random.Random(0)

    def line() -> str:
        return " ".join(words.choices(["order", "city", "thanks", "look", "sent", "schön"], k=60))

    said = [user(line())]
    talk = RowTalk(said[0])
    for _ in range(40):
        reply, answer = agent(line(), line()), user(line())
        talk.says(reply, answer, shown=said, follows=None)
        said += [agent(reply.content), answer]
    found = changes(talk)
    assert found["number"] == 40
    assert found["gone"] == [[1 + 2 * turn, True, turn + 1, "dropped"] for turn in range(39)]
