"""Served conversations as scenarios: what is kept, what is left out, and which verdict a rule can give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deployment_journals import SimulatedDeployment

from stateset_agents.cli.main import main
from stateset_agents.core.sources.served_conversations import ServedOutcome, scenarios_from, warm_start
from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.views.history import served_outcomes
from stateset_agents.environments.served import ServedConversations, made_the_confirmed_calls
from stateset_agents.serving.saved_conversations import load_served, save_conversation
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import Image
from stateset_agents.types.messages import IMAGE_MARK, Message, ToolCall

CALL = ToolCall(name="get_order", arguments={"order": "K27", "mail": "ann@example.org"}, id="1")
TALK = (
    Message(role="user", content="Where is K27? I am ann@example.org."),
    Message(role="assistant", content="", tool_calls=(CALL,), reasoning="ann@example.org asks"),
    Message(
        role="tool", content='{"city": "Oslo", "password": "x", "mail": "ann@example.org"}', tool_call_id="1"
    ),
    Message(role="assistant", content="In Oslo. I wrote to ann@example.org."),
    Message(role="user", content="Thanks"),
)
TOOLS = ({"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}},)


def outcome(success: float | None = 1.0, **changes: Any) -> ServedOutcome:
    return ServedOutcome(**{"deployment": "0001", "arm": "candidate", "success": success, **changes})


def harvested(messages: Sequence[Message] = TALK, **changes: Any) -> dict[str, Any]:
    [scenario] = scenarios_from(
        [("ann@example.org", messages, TOOLS)], {"ann@example.org": outcome(**changes)}
    ).scenarios
    return scenario


async def test_a_scenario_has_opening_and_facts_and_nothing_of_the_person() -> None:
    scenario = harvested(reward=0.5)
    assert "example.org" not in json.dumps(scenario)
    assert (scenario["success"], scenario["reported_reward"], scenario["arm"]) == (True, 0.5, "candidate")
    assert scenario["id"].startswith("served-")
    environment = ServedConversations([scenario], shares={})
    [played] = environment.scenarios("train")
    assert played.opening == "Where is K27? I am [mail 1]."
    assert played.context["script"] == ["Thanks"]
    assert played.context["recorded"] == [
        {
            "name": "get_order",
            "arguments": {"order": "K27", "mail": "[mail 1]"},
            "content": '{"city": "Oslo", "password": "[secret 1]", "mail": "[mail 1]"}',
        }
    ]
    conversation = await environment.start(played, 0)
    assert [tool["function"]["name"] for tool in conversation.tools] == ["get_order"]
    call = ToolCall(name="get_order", arguments={"order": "K27", "mail": "[mail 1]"}, id="1")
    await conversation.step(Message(role="assistant", content="", tool_calls=(call,)))
    assert (await conversation.outcome()).success is True


def test_there_is_a_verdict_only_where_a_rule_can_check_the_reported_outcome() -> None:
    same = Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(name="get_order", arguments={"order": "k27", "mail": "[mail 1]"}),),
    )
    other = Message(role="assistant", content="In Oslo.")
    for success, verdicts in [
        (1.0, (True, False)),
        (0.0, (None, None)),
        (None, (None, None)),
        (0.5, (None, None)),
    ]:
        lines = [harvested(success=success)]
        [scenario] = ServedConversations(lines, shares={}, only_checked=False).scenarios("train")
        found = tuple(made_the_confirmed_calls(scenario, [message]) for message in (same, other))
        assert found == verdicts
    with pytest.raises(
        ConfigurationError, match="none of 2 conversations was reported as a success and made calls"
    ):
        ServedConversations([harvested(success=0.0), harvested((TALK[0], TALK[3]))])


def test_examples_are_whole_successes_of_one_agent() -> None:
    [row] = warm_start([harvested()])
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["tools"] == list(TOOLS)
    assert "success" not in row
    others = [
        harvested(success=0.0),
        harvested(success=None),
        harvested(success=0.9),
        harvested(is_moved=True),
    ]
    silent = harvested((TALK[0], Message(role="assistant", content=" ")))
    assert warm_start([*others, harvested((TALK[0],)), silent]) == []


def test_what_cannot_be_a_scenario_is_counted() -> None:
    picture = Image.from_openai(
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    )
    conversations = [
        ("known", TALK, ()),
        ("stranger", TALK, ()),
        ("silent", (Message(role="assistant", content="Hello"),), ()),
        ("blank", (*TALK, Message(role="user", content=" ")), ()),
        ("picture", (Message(role="user", content=f"This {IMAGE_MARK}", images=(picture,)),), ()),
    ]
    outcomes = {name: outcome() for name in ("known", "silent", "blank", "picture")}
    harvest = scenarios_from(conversations, outcomes)
    assert len(harvest.scenarios) == 1
    assert harvest.left_out == {
        "not shared out by a deployment": 1,
        "without words of a user": 1,
        "with a blank message of a user": 1,
        "with pictures": 1,
    }
    assert harvest.removed == {"mail": 5, "secret": 1}


def test_the_journal_says_how_each_conversation_ended(tmp_path: Path) -> None:
    now = [0.0]
    journal = Journal(tmp_path / "d.sqlite")
    plan = DeploymentPlan(
        stages=(0.5,), shadow_answers=0, hold_seconds=10, outcome_timeout=50, salt="of the test"
    )
    record = start_deployment(
        journal, candidate="new", baseline="old", plan=plan, who="ann", clock=lambda: now[0]
    )
    controller = DeploymentController(journal, record.id, clock=lambda: now[0])
    controller.assign("in shadow")
    now[0] = 11
    arms = {}
    for number in range(8):
        arms[f"c{number}"] = controller.assign(f"c{number}").arm
    controller.report_outcome("c0", success=1.0, reward=2.0)
    controller.report_outcome("c1", success=0.0)
    now[0] = 70
    controller.settle()  # c2 to c7 time out
    controller.roll_back(who="ann", why="enough")
    candidates = [name for name, arm in arms.items() if arm == "candidate"]
    controller.assign(candidates[-1])
    controller.assign("afterwards")
    found = served_outcomes(journal)
    assert found.keys() == arms.keys()
    assert {name: one.arm for name, one in found.items()} == arms
    assert (found["c0"].success, found["c0"].reward, found["c1"].success) == (1.0, 2.0, 0.0)
    assert all(found[f"c{number}"].success is None for number in range(2, 8))
    assert [name for name, one in found.items() if one.is_moved] == candidates[-1:]


def test_a_saved_conversation_counts_by_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    save_conversation(file, TALK[:2], conversation="a", tools=TOOLS)
    save_conversation(file, TALK[:1], conversation="b")
    save_conversation(file, TALK, conversation="a", tools=TOOLS)
    served = load_served(file)
    assert list(served) == ["b", "a"]
    assert (served["a"].messages, served["a"].tools) == (TALK, TOOLS)
    file.write_text('{"conversation": "a", "messages": [{"role": "user", "content": ""}], "tools": "x"}\n')
    with pytest.raises(ConfigurationError, match="tools of 'a' must be a list of schemas, got 'x'"):
        load_served(file)


def test_the_verb_writes_scenarios_and_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "talks.jsonl", tmp_path / "harvest"
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(120, saved=saved)
    command = ["served", str(saved), "--deployments", str(deployment.path), "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    scenarios = [json.loads(line) for line in (out / "scenarios.jsonl").read_text().splitlines()]
    examples = (out / "warm_start.jsonl").read_text().splitlines()
    known = served_outcomes(Journal(deployment.path))
    assert len(scenarios) == len(known) < 120
    succeeded = sum(one.success == 1.0 for one in known.values())
    failed = sum(one.success == 0.0 for one in known.values())
    assert len(examples) == succeeded
    assert said[0].endswith(
        f"{succeeded} succeeded, {failed} failed, {len(known) - succeeded - failed} unknown"
    )
    assert said[2] == f"personal text taken out: {2 * len(known)} mail"
    assert said[3] == f"left out: {120 - len(known)} not shared out by a deployment"
    assert "example.org" not in (out / "scenarios.jsonl").read_text() + "".join(examples)
    spec = {"name": "served", "logs": str(out / "scenarios.jsonl"), "only_checked": False}
    splits = [len(make_environment(spec).scenarios(split)) for split in ("train", "validation", "test")]
    assert sum(splits) == len(known)
    assert all(splits)
    with pytest.raises(ConfigurationError, match="conversation 1 is not as `import --as served` writes it"):
        make_environment({"name": "served", "logs": str(saved)})
    shadow = SimulatedDeployment(tmp_path / "e.sqlite", hold_seconds=10**6)
    shadow.talk(3)
    assert main(["served", str(saved), "--deployments", str(shadow.path), "--out", str(out)]) == 1
    assert "gives no scenario: 120 not shared out by a deployment" in capsys.readouterr().err


def test_train_takes_served_conversations_only_where_they_belong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talks.jsonl"
    save_conversation(file, TALK, conversation="a")
    for arguments, said in [
        (["examples/demo.yaml", "--from-served", str(file)], "is not as `import --as served` writes it"),
        (["--resume", "runs/latest", "--from-served", str(file)], "--from-served is for a new training"),
        (["examples/cartpole.yaml", "--from-served", str(file)], "is for a training of conversations"),
    ]:
        assert main(["train", *arguments]) == 1
        assert said in capsys.readouterr().err
