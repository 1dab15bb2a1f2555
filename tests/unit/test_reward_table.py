"""What `create_customer_service_reward` pays good and bad agents; docs/rewards.md holds the same table.

`python tests/unit/test_reward_table.py` (with `tests` on PYTHONPATH) writes it there anew.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import pytest
from builders import trajectory

from stateset_agents.core.reward import create_customer_service_reward

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

CASES: Sequence[Mapping[str, str]] = (
    {
        "family": "refund",
        "first": "Hi, my order K27 is ten days late and I want a refund.",
        "then": "And when will I see the money?",
        "done": "I am sorry about the delay. I have issued a refund of $40 for order K27.",
        "when": "You will see it on your card within 5 days.",
        "fact": "$40",
        "time": "5 days",
        "wrong": "Thank you for asking. Order K27 is on its way, so please wait a little longer.",
        "later": "I am sorry, I do not know when the money for the order will be there.",
        "lie": "You will get a refund of $400 for order K27 today.",
        "forbidden": "$400",
    },
    {
        "family": "shipping",
        "first": "Hello, where is my parcel? The order number is K81.",
        "then": "Which day will it arrive?",
        "done": "Thank you for waiting. Your parcel for order K81 is at the Lyon depot.",
        "when": "It will arrive on Tuesday.",
        "fact": "Lyon",
        "time": "Tuesday",
        "wrong": "Thank you for asking. The parcel for order K81 has not been packed.",
        "later": "I am sorry, I do not know which day the parcel will arrive.",
        "lie": "The parcel for order K81 was delivered to you.",
        "forbidden": "was delivered",
    },
    {
        "family": "exchange",
        "first": "The blue lamp from order K14 is broken, can I exchange it?",
        "then": "Do I have to pay for that?",
        "done": "I am sorry the lamp broke. I have sent you a label for the return of order K14.",
        "when": "The exchange is free of charge.",
        "fact": "label",
        "time": "free",
        "wrong": "I am sorry to hear that. We do not exchange a lamp from an order like K14.",
        "later": "Please ask the shop about the price of the exchange.",
        "lie": "A new lamp is at your door, order K14 is all done.",
        "forbidden": "at your door",
    },
)

NONSENSE = "plorf drint kleb vusk tram fline gosp wub trake nolb"
Agent = Callable[[Mapping[str, str]], tuple[str, str]]
AGENTS: Mapping[str, Agent] = {
    "resolves": lambda case: (case["done"], case["when"]),
    "resolves half of it": lambda case: (case["done"], case["later"]),
    "resolves, but is rude": lambda case: (case["done"], "Stop whining. " + case["when"]),
    "polite and wrong": lambda case: (case["wrong"], case["later"]),
    "always refuses": lambda case: (
        "I am sorry, but I can't help with that.",
        "I'm unable to help with this.",
    ),
    "rude and wrong": lambda case: ("That is your own fault, deal with it.", "I don't care, leave me alone."),
    "lies": lambda case: (case["lie"], "Thank you for asking, it is all done."),
    "stuffs keywords": lambda case: (
        f"sorry refund order resolved {case['family']} thank please help delivered solved",
        f"order {case['family']} glad customer service resolved thanks money label sorry",
    ),
    "stuffs the facts": lambda case: (
        f"{case['family']} {case['fact']} {case['time']} order resolved sorry thanks done solved help",
        f"{case['time']} {case['fact']} resolved {case['time']} {case['fact']} {case['family']} thanks",
    ),
    "gibberish": lambda case: ("xqzt bfgh wrtp kkkk zzzzz qwrt", NONSENSE),
    "says nothing": lambda case: ("", ""),
    "repeats itself": lambda case: (
        "sorry sorry sorry sorry sorry sorry",
        "please please please please please",
    ),
    "echoes the user": lambda case: (case["first"], case["then"]),
}
CHECKED = {"facts told": "facts", "environment's verdict": "verdict", "nothing": "nothing"}


async def pays(agent: str, checked: str) -> float:
    """Mean score over the cases, with facts, a verdict, or nothing to check by."""
    scores = []
    reward = create_customer_service_reward()
    for case in CASES:
        first, then = AGENTS[agent](case)
        facts = {"expected_facts": [case["fact"], case["time"]], "forbidden": [case["forbidden"]]}
        talk = trajectory(
            case["first"],
            first,
            case["then"],
            then,
            family=case["family"],
            context=facts if checked == "facts" else {},
            success=agent in ("resolves", "resolves, but is rude") if checked == "verdict" else None,
        )
        score = (await reward.score(talk)).score
        assert score is not None
        assert 0 <= score <= 1
        scores.append(score)
    return mean(scores)


async def table() -> str:
    lines = [f"| agent | {' | '.join(CHECKED)} |", "|---|" + "---:|" * len(CHECKED)]
    for agent in AGENTS:
        values = [await pays(agent, checked) for checked in CHECKED.values()]
        lines.append(f"| {agent} | {' | '.join(f'{value:.2f}' for value in values)} |")
    return "\n".join(lines) + "\n"


BAD = [agent for agent in AGENTS if not agent.startswith("resolves")]


@pytest.mark.parametrize("agent", BAD)
@pytest.mark.parametrize("checked", ["facts", "verdict"])
async def test_a_resolution_beats_every_bad_agent_by_far_where_it_can_be_checked(agent: str, checked: str):
    assert await pays("resolves", checked) - await pays(agent, checked) > 0.6


@pytest.mark.parametrize(
    "agent", [agent for agent in BAD if agent not in ("polite and wrong", "always refuses", "lies")]
)
async def test_form_alone_tells_a_resolution_from_what_only_looks_like_talk(agent: str):
    assert await pays("resolves", "nothing") - await pays(agent, "nothing") > 0.25


@pytest.mark.parametrize("agent", list(AGENTS))
async def test_form_alone_pays_at_most_a_half(agent: str):
    assert await pays(agent, "nothing") <= 0.5


async def test_half_a_resolution_and_a_rude_one_lie_in_between():
    best, half, rude, wrong = [
        await pays(agent, "facts")
        for agent in ("resolves", "resolves half of it", "resolves, but is rude", "polite and wrong")
    ]
    assert best - half > 0.25
    assert half - wrong > 0.25
    assert best - rude > 0.1
    assert rude - wrong > 0.25


async def test_the_documented_table_is_what_the_reward_pays():
    documented = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert documented == await table()


def test_the_documents_programs_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + asyncio.run(table()) + END + after, encoding="utf-8")
