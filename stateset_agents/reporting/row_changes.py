"""The places where a conversation's rows begin and the messages that the agent no longer sees there.

A prompt that is rendered anew has tokens of its own, so thoughts and messages are looked for as text: in what
the prompt's token ids say, without whitespace, in the order in which they were said.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_PROBE = 80
"""Characters of a text that are looked for where some of them may be split over tokens."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The thought or the words of a message."""

    message: int
    is_thought: bool
    turn: int
    """The turn that it belongs to; -1 in the opening."""
    is_reply: bool
    is_summary: bool
    texts: tuple[str, ...]
    """The text as templates may write it, without whitespace."""


def row_changes(record: Mapping[str, Any], token_texts: Mapping[int, str]) -> dict[str, Any] | None:
    """The page's data on the rows of a line of rollouts.jsonl; None where it is one row.

    `number` of rows; `begins`: by turn that does not follow the one before it, the messages and the turns
    whose thoughts the agent saw one turn before and no longer sees, None if the tokens' texts are not known;
    `gone`: for each thought or message that no turn sees from some turn on, [message, is it the thought, that
    turn, why].
    """
    turns = record["turns"]
    follows = [_follows(turn, index) for index, turn in enumerate(turns)]
    breaks = [index for index in range(1, len(turns)) if follows[index] != index - 1]
    if not breaks:
        return None
    number = len(turns) - len({index for index in follows if index is not None})
    if not token_texts.keys() >= set(record["token_ids"]):
        return {"number": number, "begins": dict.fromkeys(breaks), "gone": []}
    tokens = list(_texts_of_turns(record, token_texts))
    parts = [part for part in _parts(record) if _is_findable(part, follows, tokens)]
    views = _seen(parts, follows, [prompt for prompt, _ in tokens])
    begins = {}
    for index in breaks:
        lost = (views[index - 1] | _said(parts, index - 1)) - views[index]
        messages = sorted(part.message for part in lost if not part.is_thought)
        thoughts = sorted(part.turn for part in lost if part.is_thought and part.message not in messages)
        begins[index] = {"messages": messages, "thoughts": thoughts}
    gone = []
    for part in parts:
        last = max((index for index, parts_seen in enumerate(views) if part in parts_seen), default=part.turn)
        since = max(last, part.turn) + 1
        if since < len(turns):
            summarized = bool(turns[since - 1].get("is_summary")) and part.turn < since - 1
            why = _why(part, opens=follows[since] is None, summarized=summarized)
            gone.append([part.message, part.is_thought, since, why])
    return {"number": number, "begins": begins, "gone": gone}


def _follows(turn: Mapping[str, Any], index: int) -> int | None:
    follows: int | None = turn.get("follows", -1)
    return follows if follows != -1 else (index - 1 if index else None)


def _why(part: _Part, *, opens: bool, summarized: bool) -> str:
    if not opens:
        return "in another row"
    if summarized:
        return "summarized"
    return "dropped" if part.is_thought else "left out"


def _parts(record: Mapping[str, Any]) -> Iterator[_Part]:
    """The record's thoughts and words in their order, without empty ones: what is looked for in a row."""
    turn_of = [(-1, False, False)] * record["opening"]
    for index, turn in enumerate(record["turns"]):
        turn_of += [(index, True, bool(turn.get("is_summary")))] + [(index, False, False)] * turn["feedback"]
    for place, (message, belongs) in enumerate(zip(record["messages"], turn_of, strict=True)):
        calls = message.get("tool_calls") or [{"function": {"name": ""}}]
        words = message["content"] or calls[0]["function"]["name"]
        for is_thought, text in ((True, message.get("reasoning")), (False, words)):
            if text and not text.isspace():
                yield _Part(place, is_thought, *belongs, texts=_written(text))


def _written(text: str) -> tuple[str, ...]:
    """The text without whitespace: as it is, and as a JSON string, which some templates make of a result."""
    forms = (text, json.dumps(text, ensure_ascii=False)[1:-1])
    return tuple(dict.fromkeys("".join(form.split()) for form in forms))


def _texts_of_turns(record: Mapping[str, Any], token_texts: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """The text of each turn's own prompt and of its sampled reply, without whitespace."""
    ids, start = record["token_ids"], 0
    for turn in record["turns"]:
        reply_start = start + turn["prompt_tokens"]
        end = reply_start + turn["sampled_tokens"]
        prompt, sampled = (
            "".join("".join(token_texts[id] for id in part).split())
            for part in (ids[start:reply_start], ids[reply_start:end])
        )
        yield prompt, sampled
        start = end


def _is_findable(part: _Part, follows: Sequence[int | None], tokens: Sequence[tuple[str, str]]) -> bool:
    """True if the text is found where it certainly stands; texts that their template changes are left out."""
    if part.is_reply:
        return bool(_found([part], tokens[part.turn][1]))
    next_turn = part.turn + 1
    if next_turn < len(follows) and (next_turn == 0 or follows[next_turn] == part.turn):
        return bool(_found([part], tokens[next_turn][0]))
    return True


def _said(parts: Sequence[_Part], turn: int) -> set[_Part]:
    return {part for part in parts if part.turn == turn}


def _seen(parts: Sequence[_Part], follows: Sequence[int | None], prompts: Sequence[str]) -> list[set[_Part]]:
    """[turns] what stands before each turn's reply."""
    views: list[set[_Part]] = []
    for index, before in enumerate(follows):
        view: set[_Part] = set()
        if before is not None:
            view = views[before] | {part for part in _said(parts, before) if part.is_reply}
        if index == 0 or before == index - 1:
            view |= _said(parts, index - 1)
        else:
            view |= _found([part for part in parts if part.turn < index and part not in view], prompts[index])
        views.append(view)
    return views


def _found(parts: Sequence[_Part], context: str) -> set[_Part]:
    """The parts that stand in the context in their order: of all choices the one with the most characters.

    A summary may stand before what was said before it.
    """
    best: list[tuple[int, int, tuple[_Part, ...]]] = [(0, 0, ())]  # end, characters, parts: both rise
    summaries = set()
    for part in parts:
        places = _places(part.texts, context)
        if part.is_summary:
            summaries |= {part} if places else set()
            continue
        longer = [
            (places[at][1], characters + len(part.texts[0]), (*parts_so_far, part))
            for end, characters, parts_so_far in best
            if (at := bisect_left(places, (end, 0))) < len(places)
        ]
        choices: list[tuple[int, int, tuple[_Part, ...]]] = []
        for choice in sorted([*longer, *best], key=lambda choice: (choice[0], -choice[1])):
            if not choices or choice[1] > choices[-1][1]:
                choices.append(choice)
        best = choices
    return {*best[-1][2], *summaries}


def _places(texts: Sequence[str], context: str) -> list[tuple[int, int]]:
    """Begin and end of each place where the context holds the first of the texts that it holds."""
    for text in texts:
        if text in context:
            return [match.span() for match in re.finditer(re.escape(text), context)]
    if "\ufffd" in context and not texts[0].isascii():
        probe, rest = texts[0][:_PROBE], len(texts[0][_PROBE:])
        matches = _split_over_tokens(probe).finditer(context)
        whole = (match for match in matches if 2 * len(match[0].replace("\ufffd", "")) >= len(probe))
        return [(match.start(), match.end() + rest) for match in whole]
    return []


@lru_cache(maxsize=2048)
def _split_over_tokens(text: str) -> re.Pattern[str]:
    """The text where tokens may hold parts of characters, each of which says U+FFFD; a character that is
    split has one at least."""
    return re.compile(
        "".join(
            f"\ufffd*+{re.escape(character)}" if character.isascii() else f"(?>\ufffd*+{character}|\ufffd)"
            for character in text
        )
    )
