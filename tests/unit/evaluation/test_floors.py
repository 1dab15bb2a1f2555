"""Agents that know nothing, played beside the one that is measured: same scenarios, same users."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli.evaluate import _lines
from stateset_agents.cli.output import floors
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Observation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.evaluation.audit import with_floors
from stateset_agents.evaluation.evaluator import Evaluation, FamilyResult, evaluate
from stateset_agents.reporting.report import other_tables
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome

OF_A_PART = [
    Scenario(id=one.id, family=one.family, context={"part": "hard"} if one.family == "family 1" else {})
    for one in scenarios(4)
]
"""The two of family 1 are the hard part."""


class Quiet:
    def reply(self, messages: Sequence[Message]) -> Message:
        return Message(role="assistant", content="")


class Loud:
    def reply(self, messages: Sequence[Message]) -> Message:
        return Message(role="assistant", content="HELP")


class WantsQuiet(ChattyEnvironment):
    """The right thing to say is nothing in family 0, and "ok" in the other."""

    floor_agents = {"quiet": Quiet, "loud": Loud}  # noqa: RUF012  # read only

    async def start(self, scenario: Scenario, seed: int) -> Any:
        conversation: Any = await super().start(scenario, seed)
        said: list[str] = []

        async def step(reply: Message) -> Observation:
            said.append(reply.content)
            return Observation(terminated=True)

        async def outcome() -> Outcome:
            right = said[0] == ("" if scenario.family == "family 0" else "ok")
            return Outcome(reward=float(right), success=right)

        conversation.step, conversation.outcome = step, outcome
        return conversation


async def measured(environment: ChattyEnvironment) -> Evaluation:
    backend = ScriptedBackend(lambda request: "ok")
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        found = await evaluate(agent, environment, EnvironmentReward(), OF_A_PART, seed=3)
    return await with_floors(found, environment, OF_A_PART, seed=3)


async def test_floors_are_success_on_the_same_scenarios_with_families_and_parts() -> None:
    environment = WantsQuiet()
    result = await measured(environment)
    assert (result.success, result.floors["quiet"].success, result.floors["loud"].success) == (0.5, 0.5, 0.0)
    assert result.floors["quiet"].families["family 0"].success == 1.0
    assert result.floors["quiet"].families["family 1"].success == 0.0
    assert set(result.parts) == set(result.floors["quiet"].parts) == {"hard"}
    assert isinstance(result.parts["hard"], FamilyResult)
    assert (result.parts["hard"].success, result.parts["hard"].n) == (1.0, 2)
    started = [entry for entry in environment.log if entry[0] == "start"]
    assert started[:4] == started[4:8] == started[8:12]  # the same users
    assert environment.num_open == 0


async def test_they_stand_beside_each_figure_that_is_printed() -> None:
    result = (await measured(WantsQuiet())).summary()
    json.dumps(result)
    lines = _lines({"model": "m", **result})
    assert lines[1].startswith("floors: quiet 50.0% [")
    assert ", loud 0.0% [" in lines[1]
    for name, shown in (("hard", "0.0%"), ("family 0", "100.0%"), ("family 1", "0.0%")):
        [line] = [line for line in lines if line.strip().startswith(name)]
        assert line.endswith(f"n = 2  (quiet {shown}, loud 0.0%)")


async def test_the_report_shows_them() -> None:
    side = (await measured(WantsQuiet())).summary()
    parts, found = other_tables(side, {})
    assert (parts["title"], [row["name"] for row in parts["rows"]]) == ("Parts", ["hard"])
    assert found["title"] == "Floors"
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["quiet"]["before"]["value"] == 0.5
    assert rows["quiet, family 0"]["before"]["value"] == 1.0
    assert rows["quiet, hard"]["before"]["n"] == 2
    assert rows["loud"]["after"] is None


async def test_an_environment_without_such_agents_has_no_floor() -> None:
    environment = ChattyEnvironment(turns=1)
    result = await measured(environment)
    assert result.floors == {}
    assert "floors" not in result.summary()
    assert floors(result.summary()) == []
    assert len(environment.log) == 2 * 4


async def test_a_floor_that_could_not_be_played_has_no_figure() -> None:
    async def broken(conversation: ChattyConversation, reply: Message) -> Observation | None:
        if reply.content == "HELP":
            raise ConnectionError("no route")
        return None

    environment = ChattyEnvironment(turns=1, answer=broken)
    environment.floor_agents = {"loud": Loud, "quiet": Quiet}  # type: ignore[attr-defined]  # offered by some
    result = (await measured(environment)).summary()
    assert result["floors"]["loud"]["success"] is None
    assert "loud" not in floors(result)[0]
    assert "quiet 100.0%" in floors(result)[0]
