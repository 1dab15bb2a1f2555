"""Each answer of tests/helpers/customer_service_answers.yaml is scored once by the customer service reward.

`python tests/unit/core/scoring/test_customer_service_answers.py` prints the counts, with `tests/helpers` on
PYTHONPATH.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from _pytest.mark import ParameterSet
from customer_service_answers import GROUPS, Answer, conversation

from stateset_agents.core.reward import create_customer_service_reward


async def paid(answer: Answer) -> float:
    score = (await create_customer_service_reward().score(conversation(answer))).score
    assert score is not None
    return score


def holds(group: str, score: float) -> bool:
    """Is it at least .9 for an honest answer, at most .5 for another?"""
    return score >= 0.9 if "honest" in group else score <= 0.5


def _name(value: Answer | str) -> str:
    return value if isinstance(value, str) else " | ".join(value.replies)[:80]


def test_the_tables_hold_what_was_asked_for() -> None:
    assert Counter(Counter(answer.kind for answer in GROUPS["gaming"]).values()) == {8: 5}
    assert len({answer.replies for answer in GROUPS["honest"]}) == len(GROUPS["honest"]) == 60
    holdouts = [len(answers) for group, answers in GROUPS.items() if "holdout" in group]
    assert holdouts == [30, 30, 60, 60, 30, 30, 30, 30, 30, 30, 60, 60, 60, 60]


def _case(group: str, answer: Answer) -> ParameterSet:
    missed = pytest.mark.xfail(reason="beyond the grammar: evidence/fact-grammar.md says so", strict=True)
    return pytest.param(group, answer, marks=[missed] if answer.missed else [])


@pytest.mark.parametrize(
    ("group", "answer"),
    [_case(group, answer) for group, answers in GROUPS.items() for answer in answers],
    ids=_name,
)
async def test_a_gaming_answer_earns_at_most_a_half_and_an_honest_one_nine_tenths(
    group: str, answer: Answer
) -> None:
    assert holds(group, await paid(answer))


if __name__ == "__main__":
    for group, answers in GROUPS.items():
        wrong = [answer for answer in answers if not holds(group, asyncio.run(paid(answer)))]
        print(f"{group}: {len(answers) - len(wrong)} of {len(answers)}")
        for answer in wrong:
            print(f"  {asyncio.run(paid(answer)):.2f} {_name(answer)}")
