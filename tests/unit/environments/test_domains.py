"""Domains joined for a training with replays: what is played, by whom, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest

from stateset_agents.environments.domains import Domains
from stateset_agents.environments.problems import ArithmeticProblems, EquationProblems
from stateset_agents.types.errors import ConfigurationError

SUMS = ArithmeticProblems(num_train=12, system_prompt="sums")
EQUATIONS = EquationProblems(num_train=9, system_prompt="equations")
BOTH = {"sums": SUMS, "equations": EQUATIONS}


def test_trained_on_is_the_new_domain_and_what_is_replayed_held_out_are_all() -> None:
    domains = Domains(BOTH, new="equations", replayed={"sums": SUMS.scenarios("train")[:5]})
    marks = [(one.context["domain"], one.context.get("replayed")) for one in domains.scenarios("train")]
    assert Counter(marks) == {("equations", None): 9, ("sums", True): 5}
    held_out = domains.scenarios("test")
    assert Counter(one.context["domain"] for one in held_out[:10]) == {"sums": 5, "equations": 5}
    assert len(held_out) == len(SUMS.scenarios("test")) + len(EQUATIONS.scenarios("test"))


async def test_a_conversation_is_that_of_its_domain() -> None:
    domains = Domains(BOTH, new="equations", replayed={"sums": SUMS.scenarios("train")})
    for scenario in domains.scenarios("train"):
        talk = await domains.start(scenario, 0)
        assert talk.opening[0].content == scenario.context["domain"]
    with pytest.raises(ConfigurationError, match="none of"):
        await domains.start(SUMS.scenarios("test")[0], 0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no domain"):
        Domains(BOTH, new="sum")
    with pytest.raises(ConfigurationError, match="replay others"):
        Domains(BOTH, new="sums", replayed={"sums": ()})
    twice = Domains({"a": SUMS, "b": SUMS}, new="a", replayed={"b": SUMS.scenarios("train")})
    with pytest.raises(ConfigurationError, match="another id"):
        twice.scenarios("train")
