"""Every task of tau2's by an oracle, and the fast verdict against tau2's own evaluators: `make test-tau2`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stateset_agents.environments.tau2 import Tau2Conversation, Tau2Environment
from stateset_agents.environments.tau2.verdict import Tau2Verdict, Verdict
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario

pytestmark = pytest.mark.tau2

FAULTS = ("idle", "dropped", "doubled", "garbled", "untold")
SIDES = {  # (domain, user) -> tasks, and how many of the faults each task is played with
    ("airline", "scripted"): (50, 1),
    ("retail", "scripted"): (114, 1),
    ("telecom", "scripted"): (114, 3),
    ("telecom", "solo"): (114, 3),
}
TOTAL = sum(tasks * (1 + faults) for tasks, faults in SIDES.values())


def test_more_than_eight_hundred_talks_are_compared() -> None:
    assert TOTAL == 1240


def garbled(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case str():
            return f"{value[:-1]}{'8' if value.endswith('7') else '7'}"
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return value[:-1]
    return {**value, "more": 1}


def spoiled(plan: Sequence[Message], fault: str, writes: frozenset[str], rng: random.Random) -> list[Message]:
    """What the oracle would say, with one thing wrong: a write where there is one, else a look-up."""
    plan = list(plan)
    if fault == "idle":
        return [message for message in plan if any(call.name == "done" for call in message.tool_calls)]
    if fault == "untold":
        return [
            replace(message, content="Is there anything else?")
            if message.content.startswith("This is what I can tell you")
            else message
            for message in plan
        ]
    called = [place for place, message in enumerate(plan) if message.tool_calls]
    wrote = [place for place in called if plan[place].tool_calls[0].name in writes]
    places = wrote or [place for place in called if plan[place].tool_calls[0].name != "done"]
    if not places:
        return plan
    place = rng.choice(places)
    [call] = plan[place].tool_calls
    if fault == "dropped":
        del plan[place]
    elif fault == "doubled":
        plan.insert(place, plan[place])
    elif call.arguments:
        name = rng.choice(sorted(call.arguments))
        wrong = replace(call, arguments={**call.arguments, name: garbled(call.arguments[name])})
        plan[place] = replace(plan[place], tool_calls=(wrong,))
    return plan


async def talk(
    environment: Tau2Environment, scenario: Scenario, plan: Sequence[Message], fork_at: int | None
) -> Tau2Conversation:
    """Play the plan to its end; at `fork_at` replies a copy goes on, and what it is a copy of goes astray."""
    conversation = await environment.start(scenario, 1)
    for number in range(60):
        reply = plan[number] if number < len(plan) else Message(role="assistant", content="Goodbye.")
        await conversation.step(reply)
        if conversation.ended:
            return conversation
        if number + 1 == fork_at:
            twin = conversation.fork()
            for name, arguments in (
                (
                    "modify_user_address",
                    {"user_id": "yusuf_rossi_9620", "address1": "1 A", "address2": "", "city": "B"},
                ),
                ("toggle_airplane_mode", {}),
                ("send_certificate", {"user_id": "raj_sanchez_7340", "amount": 100}),
            ):
                wrong = ToolCall(name=name, arguments=arguments)
                await conversation.step(Message(role="assistant", content="", tool_calls=(wrong,)))
            conversation = twin
    raise AssertionError(f"{scenario.id} did not end")


async def both(conversation: Tau2Conversation) -> tuple[Verdict, Verdict]:
    """The fast verdict, and tau2's own, on the same talk."""
    outcome = await conversation.outcome()
    fast = Verdict(parts=outcome.metadata["parts"])
    assert outcome.reward == fast.reward
    slow = Tau2Verdict(conversation.world.domain)
    return fast, slow(conversation.entry, conversation.world, conversation.events)


@pytest.mark.parametrize(("domain", "user"), SIDES)
async def test_the_oracle_is_right_by_tau2s_evaluators_and_the_fast_verdict_is_theirs(
    domain: Any, user: str
) -> None:
    environment = Tau2Environment(domain, user=user)
    rng = random.Random(0)
    num_tasks, num_faults = SIDES[domain, user]
    scenarios = [*environment.scenarios("train"), *environment.scenarios("test")]
    verdicts: Counter[tuple[str, float]] = Counter()
    right = 0
    for number, scenario in enumerate(scenarios):
        plan = environment.honest_agent(scenario)._plan
        fast, slow = await both(await talk(environment, scenario, plan, None))
        assert fast == slow
        right += slow.reward == 1.0
        for turn in range(num_faults):
            fault = FAULTS[(number + turn) % len(FAULTS)]
            wrong = spoiled(plan, fault, environment._domain.writes, rng)
            conversation = await talk(environment, scenario, wrong, 2)
            if conversation.ended != "own end":  # cut, and worth nothing with either
                continue
            fast, slow = await both(conversation)
            assert fast == slow, (scenario.id, fault)
            verdicts[fault, slow.reward] += 1
    print(domain, user, right, sorted(verdicts.items()))
    assert right == num_tasks == len(scenarios)
    assert sum(verdicts.values()) == num_tasks * num_faults
    assert {fault for fault, _ in verdicts} == set(FAULTS)
    for reward in (0.0, 1.0):
        assert sum(count for (_, given), count in verdicts.items() if given == reward) >= 5


@pytest.mark.parametrize("domain", ["retail", "telecom"])
async def test_the_setting_verdict_tau2_asks_tau2s_evaluators(domain: Any) -> None:
    environment = Tau2Environment(domain, verdict="tau2")
    assert isinstance(environment._judge, Tau2Verdict)
    scenario = next(one for one in environment.scenarios("test") if one.context["num_writes"])
    plan = environment.honest_agent(scenario)._plan
    outcome = await (await talk(environment, scenario, plan, None)).outcome()
    assert (outcome.reward, outcome.success) == (1.0, True)
    conversation = await talk(environment, scenario, [], None)
    assert (await conversation.outcome()).success is False


async def test_a_verdict_of_databases_is_tau2s_in_telecom_too(tmp_path: Path) -> None:
    """No official task of it asks for one. Both databases are compared whole; tau2 does not bring the gold
    ones up to date after the gold actions (`sync_tools`), so that the oracle itself is not always right."""
    tasks = []
    for entry in Tau2Environment("telecom", user="solo")._entries[::3]:
        data = entry.task.model_dump(mode="json")
        data["evaluation_criteria"]["reward_basis"] = ["DB"]
        tasks.append(data)
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(tasks), encoding="utf-8")
    environment = Tau2Environment("telecom", user="solo", tasks=file)
    given: Counter[float] = Counter()
    for scenario in environment.scenarios("train"):
        fast, slow = await both(
            await talk(environment, scenario, environment.honest_agent(scenario)._plan, 2)
        )
        assert fast == slow
        given[slow.parts["DB"]] += 1
    assert sum(given.values()) == len(tasks) == 38
    assert min(given[0.0], given[1.0]) >= 3
