"""The last reply's form: a pattern, a JSON schema, likeness to a reference."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import pytest
from builders import trajectory

from stateset_agents.core.scoring.base import RewardResult, score_trajectories
from stateset_agents.rewards.formats import (
    create_pattern_reward,
    create_schema_reward,
    create_similarity_reward,
    likeness,
)
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory


def said(text: str, **context: Any) -> Trajectory:
    return trajectory("hi", text, context=context)


async def test_the_whole_last_reply_must_match() -> None:
    ticket = create_pattern_reward(r"Ticket [A-Z]\d{3}\.")
    scores = [
        (await ticket.score(said(text))).score
        for text in ("Ticket K271.", " Ticket K271.\n", "ticket K271.", "")
    ]
    assert scores == [1.0, 1.0, 0.0, 0.0]
    assert (await ticket.score(said("All tickets: Ticket K271. Ticket K272."))).score == 0.0
    loose = create_pattern_reward("k271", anywhere=True, ignore_case=True)
    assert (await loose.score(said("see K271!"))).score == 1.0
    assert (await loose.score(said("k271" + "x" * 20_000))).score == 0.0  # nobody reads that


async def test_a_scenario_may_have_its_own_pattern() -> None:
    own = create_pattern_reward()
    assert (await own.score(said("yes", pattern="yes|no"))).score == 1.0
    assert (await own.score(said("maybe", pattern="yes|no"))).score == 0.0
    assert (await own.score(said("yes"))).score is None
    with pytest.raises(ConfigurationError, match=r"the pattern '\(' is no regular expression"):
        create_pattern_reward("(")
    with pytest.raises(ConfigurationError, match=r"the pattern 3 is no regular expression: it is no text"):
        await own.score(said("x", pattern=3))


SCHEMA = {
    "type": "object",
    "properties": {"order_id": {"type": "string"}, "amount": {"type": "number", "minimum": 0}},
    "required": ["order_id"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score", "is_json"),
    [
        ('{"order_id": "K27", "amount": 3}', 1.0, 1.0),
        ('```json\n{"order_id": "K27"}\n```', 1.0, 1.0),
        ('{"order_id": "K27", "amount": -3}', 0.0, 1.0),
        ('{"order_id": 27}', 0.0, 1.0),
        ("{}", 0.0, 1.0),
        ("null", 0.0, 1.0),
        ('Here it is: {"order_id": "K27"}', 0.0, 0.0),
        ('{"order_id": "K27"} {"order_id": "K28"}', 0.0, 0.0),
        ("", 0.0, 0.0),
        ('{"order_id": "K27", "amount": NaN}', 0.0, 0.0),  # Python reads it, JSON does not have it
        ("[" * 9000, 0.0, 0.0),
    ],
)
async def test_the_reply_must_be_what_the_schema_accepts(text: str, score: float, is_json: float) -> None:
    result = await create_schema_reward(SCHEMA).score(said(text))
    assert result == RewardResult(score=score, breakdown={"is_json": is_json})


async def test_schemas_come_from_the_scenario_too_and_are_checked() -> None:
    reward = create_schema_reward()
    assert (await reward.score(said("3", schema={"type": "integer"}))).score == 1.0
    assert (await reward.score(said("3"))).score is None
    with pytest.raises(ConfigurationError, match=r"is no JSON schema: .* at \$\.type"):
        create_schema_reward({"type": "strnig"})
    with pytest.raises(ConfigurationError, match="must be a mapping, got 'x'"):
        await reward.score(said("3", schema="x"))
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert (
        await reward.score(said("[" * 900 + "]" * 900, schema=tree))
    ).score == 0.0  # too deep to be walked
    [elsewhere] = await score_trajectories(reward, [said("3", schema={"$ref": "http://127.0.0.1:9/s.json"})])
    assert "Unresolvable" in str(elsewhere)  # nothing is fetched


def test_without_the_library_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "jsonschema":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'jsonschema>=4\.20'"):
        create_schema_reward(SCHEMA)
    assert builtins.__import__  # the standard way in is not touched


def test_likeness_counts_words_in_order() -> None:
    assert likeness("your order is late", "the order is very late") == pytest.approx(2 * 3 / 9)
    assert likeness("Late is order your!", "your order is late") == pytest.approx(2 * 1 / 8)
    assert likeness("Your order is late.", "your ORDER is late") == 1.0
    assert likeness("", "x") == likeness("x", "") == 0.0


async def test_stuffing_a_reference_s_words_pays_less_than_saying_it() -> None:
    reference = "We will send the red lamp again and it arrives on Tuesday"
    reward = create_similarity_reward()

    async def score(text: str, wordings: Any = reference) -> float | None:
        return (await reward.score(said(text, reference=wordings))).score

    exact, near = await score(reference), await score("We send the red lamp again, it arrives on Tuesday")
    stuffed = await score(" ".join(sorted(reference.lower().split())))
    padded = await score(reference + " and so on" * 20)
    assert exact == 1.0
    assert near is not None
    assert stuffed is not None
    assert padded is not None
    assert near > 0.85 > 0.5 > stuffed
    assert padded < 0.4
    assert await score("no", ["yes", "no"]) == 1.0
    assert (await reward.score(said("x"))).score is None
    with pytest.raises(ConfigurationError, match=r'context\["reference"\] must be a text or a list of texts'):
        await score("x", [])
