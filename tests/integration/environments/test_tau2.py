"""tau2-bench as an environment, against the real library: `make test-tau2`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_server
import page_snippets
import pytest
from aiohttp import web
from chat_server import ChatServer
from repository_paths import ROOT

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.cli.main import main
from stateset_agents.core.environment import Observation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.environments.retail_desk import play
from stateset_agents.environments.tau2 import Tau2Conversation, Tau2Environment
from stateset_agents.environments.tau2.library import library
from stateset_agents.environments.tau2.tasks import NO_WRITE
from stateset_agents.environments.tau2.world import load_domain
from stateset_agents.evaluation.audit import audit
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario

pytestmark = pytest.mark.tau2


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def call(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


def scenario_of(environment: Tau2Environment, id: str) -> Scenario:
    return next(
        scenario
        for split in ("train", "validation", "test")
        for scenario in environment.scenarios(split)
        if scenario.id == id
    )


async def begin(environment: Tau2Environment, id: str | None = None, seed: int = 0) -> Tau2Conversation:
    scenario = environment.scenarios("train")[0] if id is None else scenario_of(environment, id)
    return await environment.start(scenario, seed)


async def words(conversation: Tau2Conversation, *replies: str) -> list[str | None]:
    """The user's answers; None where it leaves."""
    seen = [await conversation.step(say(reply)) for reply in replies]
    return [None if one.terminated else one.messages[0].content for one in seen]


def task(domain: str, **changes: Any) -> dict[str, Any]:
    """An official task of tau2's as its file has it, with other fields."""
    entries = Tau2Environment(domain, user="scripted")._entries
    return {**entries[0].task.model_dump(mode="json"), **changes}


def written(tmp_path: Path, *tasks: dict[str, Any]) -> Path:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(tasks), encoding="utf-8")
    return file


# -- the library


def test_it_is_imported_quickly_alone_and_quietly(tmp_path: Path) -> None:
    """In a folder whose `.env` is nobody's business."""
    code = """
import os, sys, time
before, start = dict(os.environ), time.process_time()
from stateset_agents.environments.tau2.library import library
imported = time.process_time() - start
library()
mine = time.process_time() - start
import loguru
from stateset_agents.environments.tau2 import Tau2Environment
environment = Tau2Environment("retail")
loguru.logger.info("mine is heard")
same = dict(os.environ) == before
print({"litellm": "litellm" in sys.modules, "same": same, "seconds": mine - imported})
"""
    (tmp_path / ".env").write_text("SOMEBODYS_KEY=1\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    shown = eval(done.stdout)  # what the lines above print
    assert shown["litellm"] is False
    assert shown["same"] is True
    assert shown["seconds"] <= 1.0
    assert [line.rpartition(" - ")[2] for line in done.stderr.splitlines()] == ["mine is heard"]


# -- tasks


@pytest.mark.parametrize(
    ("domain", "train", "test"), [("airline", 30, 20), ("retail", 74, 40), ("telecom", 74, 40)]
)
def test_the_splits_are_tau2s(domain: Any, train: int, test: int) -> None:
    environment = Tau2Environment(domain)
    official = library().domains[domain].get_tasks_split()
    for split, number in (("train", train), ("test", test)):
        ids = [scenario.context["task"] for scenario in environment.scenarios(split)]
        assert ids == official[split]
        assert len(ids) == number
    assert environment.scenarios("validation") == []


def test_a_validation_split_is_cut_from_training_alone() -> None:
    whole, cut = Tau2Environment("airline"), Tau2Environment("airline", num_validation=6)
    ids = {split: [one.id for one in cut.scenarios(split)] for split in ("train", "validation", "test")}
    assert [len(ids[split]) for split in ids] == [24, 6, 20]
    assert sorted(ids["train"] + ids["validation"]) == sorted(one.id for one in whole.scenarios("train"))
    assert ids["test"] == [one.id for one in whole.scenarios("test")]


def test_tasks_without_writes_are_a_family_of_their_own_and_no_part_of_the_others() -> None:
    counts = {}
    for domain in ("airline", "retail", "telecom"):
        environment = Tau2Environment(domain)  # type: ignore[arg-type]  # a name of the three
        found = [*environment.scenarios("train"), *environment.scenarios("test")]
        counts[domain] = sum(one.family == NO_WRITE for one in found)
        assert all(("part" in one.context) is (one.family != NO_WRITE) for one in found)
    assert counts == {"airline": 20, "retail": 9, "telecom": 20}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"evaluation_criteria": {"actions": [], "reward_basis": ["DB", "NL_ASSERTION"]}},
            r"task 'x' is paid by NL_ASSERTION, which cannot be scored here",
        ),
        ({"evaluation_criteria": {"reward_basis": []}}, r"task 'x' is paid by nothing"),
        ({"evaluation_criteria": None}, r"task 'x' has no evaluation_criteria"),
        (
            {"initial_state": {"message_history": [{"role": "user", "content": "hi"}]}},
            r"task 'x' begins with a message_history",
        ),
        ({"initial_state": {"initialization_data": {"agent_data": {}}}}, r"task 'x' has initialization_data"),
        ({"user_scenario": {}}, r"task 0 is none of tau2's: user_scenario.instructions: Field required"),
        ({"split": "dev"}, r"split of x must be train, validation or test, got 'dev'"),
    ],
)
def test_a_task_that_cannot_be_scored_or_played_is_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    file = written(tmp_path, task("retail", id="x", **changes))
    with pytest.raises(ConfigurationError, match=told):
        Tau2Environment("retail", tasks=file)


def test_tasks_of_a_file_have_their_split_and_stand_once(tmp_path: Path) -> None:
    one, two = task("retail", id="x", split="test"), task("retail", id="y")
    environment = Tau2Environment("retail", tasks=str(written(tmp_path, one, two)))
    assert [found.id for found in environment.scenarios("test")] == ["retail:x"]
    assert [found.id for found in environment.scenarios("train")] == ["retail:y"]
    with pytest.raises(ConfigurationError, match="'retail:x' stands twice"):
        Tau2Environment("retail", tasks=written(tmp_path, one, one))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"domain": "retial"},
            r"domain must be one of airline, retail, telecom, got 'retial' \(did you mean",
        ),
        ({"user": "solo"}, "user: solo is for telecom"),
        ({"user": "script"}, "user must be scripted, solo, a ChatClient"),
        ({"user": {"url": "http://localhost:1/v1"}}, "needs url and model, got url"),
        ({"verdict": "slow"}, "verdict must be fast or tau2, got 'slow'"),
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"max_result_chars": 0}, "max_result_chars must be at least 1, got 0"),
        ({"num_validation": 74}, "num_validation must be from 0 to 73"),
        ({"num_train": 3}, "num_train is for made tasks"),
        ({"tasks": "made", "domain": "airline"}, "made tasks are of retail's database, got domain airline"),
        ({"tasks": "made", "num_validation": 3}, "num_validation is for official tasks"),
        ({"tasks": "nowhere.json"}, "tasks must be official, made, or a JSON file of tau2 tasks"),
        ({"tools": ["get_user_detail"]}, r"got 'get_user_detail' \(did you mean 'get_user_details'\?\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        make_environment({"name": "tau2", **settings})


# -- what stands in front of a conversation


async def test_the_full_prompt_is_tau2s_and_its_schemas_are_the_tools() -> None:
    environment = Tau2Environment("retail")
    conversation = await begin(environment)
    [system, user] = conversation.opening
    policy = (library().folder / "data/tau2/domains/retail/policy.md").read_text(encoding="utf-8")
    assert f"<policy>\n{policy}\n</policy>" in system.content
    assert system.content.startswith("<instructions>\nYou are a customer service agent that helps the user")
    assert user.role == "user"
    made = library().domains["retail"].get_environment().get_tools()
    assert list(conversation.tools) == [tool.openai_schema for tool in made]


async def test_prompt_and_schemas_can_be_short_none_and_ones_own() -> None:
    short = await begin(Tau2Environment("retail", prompt="short", tools=["calculate"]))
    assert [tool["function"]["name"] for tool in short.tools] == ["calculate"]
    assert short.opening[0].content == "retail desk. call a tool, then say what was done, or why not."
    named = await begin(Tau2Environment("retail", prompt="short", tools="none"))
    assert named.opening[0].content.count("\n") == 15
    assert "\ncalculate(expression)\n" in named.opening[0].content
    bare = await begin(Tau2Environment("retail", prompt="Be kind.", tools="none"))
    assert (bare.opening[0].content, list(bare.tools)) == ("Be kind.", [])
    seen = await bare.step(call("calculate", expression="6 * 7"))
    assert seen.messages[0].content == "42.0"


async def test_a_solo_agent_gets_the_ticket_the_phone_and_done() -> None:
    environment = Tau2Environment("telecom", user="solo")
    conversation = await begin(environment)
    names = [tool["function"]["name"] for tool in conversation.tools]
    assert {"refuel_data", "toggle_airplane_mode"} < set(names)
    assert names[-1] == "done"
    assert conversation.opening[1].content.startswith("<ticket>\nThe user has been unable to send MMS")
    assert "solve the ticket" in conversation.opening[0].content


# -- the scripted user


async def test_the_user_tells_what_it_is_asked_and_leaves_when_all_is_said() -> None:
    conversation = await begin(Tau2Environment("retail"), "retail:108")
    assert conversation.opening[1].content.startswith("I want to return everything but a tablet")
    heard = await words(
        conversation,
        "Could you tell me your name and zip code?",
        "I will return three items to paypal. Do you confirm (yes/no)?",
        "That is done. Is there anything else I can help you with?",
        "You get 346.93. Is there anything else?",
    )
    assert (
        heard[0] == "My name is Yusuf Gonzalez and my zip code is 91455. I do not remember my email address"
    )
    assert heard[1] is not None
    assert heard[1].startswith("Yes")
    assert heard[2] == "I want to know how much money I can get back."
    assert heard[3] is None


async def test_an_eager_user_tells_all_at_once() -> None:
    conversation = await begin(Tau2Environment("retail", eager=True), "retail:108")
    opening = conversation.opening[1].content
    assert all(part in opening for part in ("Yusuf Gonzalez", "91455", "E-Reader", "how much money"))
    assert await words(conversation, "Is there anything else?") == [None]


@pytest.mark.parametrize("text", ["", "I am thinking."])
async def test_a_user_who_is_told_nothing_loses_patience(text: str) -> None:
    conversation = await begin(Tau2Environment("retail", eager=True))
    heard = await words(conversation, text, text, text)
    assert None not in heard[:2]
    assert heard[2] is None


async def test_directions_for_the_play_are_not_told() -> None:
    environment = Tau2Environment("airline", eager=True)
    told = [(await begin(environment, one.id)).opening[1].content for one in environment.scenarios("train")]
    assert len(told) == 30
    assert not [text for text in told if "agent says" in text or "Insist" in text or "Do not take No" in text]


PROBES = (
    "Could you tell me your name, e-mail or user id?",
    "Which order do you mean?",
    "I would change this. Do you confirm (yes/no)?",
    "I am looking.",
    "What else should I know?",
    "Please turn off airplane mode, and run a speed test.",
    "Is there anything else I can help you with?",
    "Goodbye.",
)


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
async def test_the_user_does_not_know_the_gold_actions(domain: Any, tmp_path: Path) -> None:
    """Permuted or removed, they leave its words as they are."""

    async def heard(environment: Tau2Environment) -> list[list[str | None]]:
        found = []
        for scenario in [*environment.scenarios("train"), *environment.scenarios("test")]:
            conversation = await environment.start(scenario, 3)
            texts: list[str | None] = [conversation.opening[-1].content]
            for probe in PROBES:
                texts += await words(conversation, probe)
                if texts[-1] is None:
                    break
            found.append(texts)
        return found

    official = Tau2Environment(domain)
    expected = await heard(official)
    for change in (lambda actions: actions[::-1], lambda actions: []):
        tasks = []
        for entry in official._entries:
            data = entry.task.model_dump(mode="json")
            criteria = data["evaluation_criteria"]
            criteria["actions"] = change(criteria["actions"] or [])
            criteria["communicate_info"] = []
            tasks.append({**data, "split": entry.scenario.split})
        assert await heard(Tau2Environment(domain, tasks=written(tmp_path, *tasks))) == expected


async def test_the_user_uses_its_phone_by_a_tools_name_and_in_plain_words() -> None:
    environment = Tau2Environment("telecom")
    scenario = next(one for one in environment.scenarios("train") if "airplane_mode_on" in one.id)
    conversation = await environment.start(scenario, 0)
    heard = await words(
        conversation,
        "Please use check_network_status on your phone.",
        "Please turn on airplane mode.",  # it is on: looked at, and left
        "Could you turn airplane mode off?",
        "Please use set_network_mode_preference(mode='4g_only'), then check_network_mode_preference.",
        "Grant the storage permission to the messaging app, please.",
        "Please grant the permission.",
    )
    assert "Airplane Mode: ON" in str(heard[0])
    assert "Airplane Mode: ON" in str(heard[1])
    assert "Airplane Mode is now OFF" in str(heard[2])
    assert "Preferred Network Mode set to: 4g_only" in str(heard[3])
    assert str(heard[3]).endswith("Network Mode Preference: 4g_only")
    assert "storage" in str(heard[4])
    assert heard[5] == "Which app name do you mean? I can choose from messaging, browser."
    made = [
        event.name for event in conversation.events if hasattr(event, "name") and event.requestor == "user"
    ]
    assert made.count("toggle_airplane_mode") == 1


# -- a model as the user


async def test_a_model_is_told_what_tau2s_user_is_told_and_can_use_the_phone() -> None:
    environment_ids = [one.id for one in Tau2Environment("telecom").scenarios("train")]

    def speak(prompt: str) -> Any:
        if "airplane" in prompt and "now" not in prompt:
            arguments = "{}"
            function = {"name": "toggle_airplane_mode", "arguments": arguments}
            return {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        if "Airplane Mode is now" in prompt:
            return "I have done it."
        return "###STOP###" if "Goodbye" in prompt else "My phone does not work."

    async with ChatServer(speak=speak) as server:
        user = {"url": server.url, "model": "stub"}
        environment = make_environment({"name": "tau2", "domain": "telecom", "user": user, "max_turns": 5})
        assert isinstance(environment, Tau2Environment)
        assert environment.local is False
        conversation = await begin(environment, environment_ids[0])
        assert conversation.opening[1].content == "My phone does not work."
        heard = await words(conversation, "Please turn airplane mode off.", "Goodbye")
        assert heard == ["I have done it.", None]
    system = server.bodies[0]["messages"][0]["content"]
    assert "# User Simulation Guidelines" in system
    assert conversation.entry.task.user_scenario.instructions.reason_for_call in system
    assert "tools" not in server.bodies[0]  # its first words come before there is anything to do
    offered = [tool["function"]["name"] for tool in server.bodies[1]["tools"]]
    assert "toggle_airplane_mode" in offered
    [shown] = [message for message in server.bodies[2]["messages"] if message["role"] == "tool"]
    assert "Airplane Mode is now" in shown["content"]
    phone = [event for event in conversation.events if getattr(event, "requestor", "") == "user"]
    assert [event.name for event in phone] == ["toggle_airplane_mode"]


async def test_an_oracle_succeeds_with_a_user_played_by_a_model() -> None:
    def speak(prompt: str) -> str:
        over = any(end in prompt for end in ("anything else", "human agent", "Goodbye"))
        return "###STOP###" if over else "Yes."

    async with ChatServer(speak=speak) as server:
        environment = Tau2Environment("retail", user=ChatClient(server.url, "stub"))
        for scenario in environment.scenarios("test")[:10]:
            played = await play(environment, scenario, 0, environment.honest_agent(scenario))
            assert played.outcome.success is True


async def test_a_model_that_does_not_open_or_says_nothing_fails_the_conversation() -> None:
    for answer, told in (("###STOP###", "did not open"), (" ", "said nothing")):
        async with ChatServer(speak=lambda prompt, answer=answer: answer) as server:
            environment = Tau2Environment("airline", user=ChatClient(server.url, "stub"))
            with pytest.raises(EnvironmentFailure, match=told):
                await begin(environment)


# -- tools and their limits


async def test_a_long_result_is_cut_for_the_agent_and_whole_for_the_verdict() -> None:
    conversation = await begin(Tau2Environment("retail", max_result_chars=100))
    seen = await conversation.step(call("get_order_details", order_id="#W2378156"))
    text, _, note = seen.messages[0].content.partition("\n")
    assert len(text) == 100
    assert note.startswith("[cut here: ")
    [event] = conversation.events
    assert json.loads(event.result.content)["order_id"] == "#W2378156"


async def test_ten_failed_calls_or_too_many_replies_cut_it_and_it_is_worth_nothing() -> None:
    async def cut(environment: Tau2Environment, *replies: Message) -> tuple[Observation, str]:
        scenario = next(one for one in environment.scenarios("train") if one.family == NO_WRITE)
        conversation = await environment.start(scenario, 0)
        for reply in replies:
            seen = await conversation.step(reply)
        outcome = await conversation.outcome()
        assert (outcome.reward, outcome.success) == (0.0, False)
        with pytest.raises(ConfigurationError, match="is over"):
            await conversation.step(say("hello"))
        return seen, outcome.metadata["ended"]

    broken = Message(role="assistant", content="", tool_calls=(ToolCall(name="x", error="no JSON"),))
    calls = [call("nothing_like_it"), broken, *[call("get_order_details", order_id="7")] * 8]
    seen, ended = await cut(Tau2Environment("airline"), *calls)
    assert (seen.truncated, ended) == (True, "max_errors")
    assert seen.messages[0].content.startswith("Error: ")
    seen, ended = await cut(Tau2Environment("airline", max_turns=2), say("Well."), say("Well, well."))
    assert (seen.truncated, ended) == (True, "max_turns")


async def test_a_calculation_that_would_never_end_is_not_made() -> None:
    conversation = await begin(Tau2Environment("retail"))
    for expression in ("9**9**9**9", "9 * * 9"):
        seen = await conversation.step(call("calculate", expression=expression))
        assert seen.messages[0].content == "Error: powers cannot be calculated"
    assert conversation.events == []


async def test_words_of_a_solo_agent_end_it_and_are_worth_nothing() -> None:
    environment = Tau2Environment("telecom", user="solo")
    spoken = await begin(environment)
    assert (await spoken.step(say("I will look."))).terminated
    assert (await spoken.outcome()).metadata["ended"] == "words in solo"
    done = await begin(environment)
    assert (await done.step(call("done"))).terminated
    assert (await done.outcome()).metadata["ended"] == "own end"


async def test_a_bill_that_is_opened_has_the_same_number_every_time() -> None:
    """tau2 draws it; a talk that shows it could not be played again."""
    environment = Tau2Environment("telecom", user="solo", verdict="tau2")
    shown = []
    for _ in range(2):
        conversation = await begin(environment)
        await conversation.step(call("refuel_data", customer_id="C1002", line_id="L1004", gb_amount=2.0))
        seen = await conversation.step(call("get_bills_for_customer", customer_id="C1002"))
        shown.append(seen.messages[0].content)
        assert (await conversation.outcome()).success is False  # tau2's own replay sees the same bills
    assert shown[0] == shown[1]
    assert '"bill_id": "B0000' in shown[0]


# -- one conversation and another


async def test_the_same_seed_gives_the_same_talk_and_a_fork_goes_its_own_way() -> None:
    for domain in ("retail", "telecom"):
        environment = Tau2Environment(domain)  # type: ignore[arg-type]  # a name of the three
        scenario = next(one for one in environment.scenarios("test") if one.context["num_writes"] > 1)
        agent = environment.honest_agent(scenario)
        first, again = [await play(environment, scenario, 7, agent) for _ in range(2)]
        assert first.messages == again.messages
        for cut in range(1, first.num_replies):
            conversation = await environment.start(scenario, 7)
            messages = list(conversation.opening)
            for _ in range(cut):
                reply = agent.reply(messages)
                messages += [reply, *(await conversation.step(reply)).messages]
            twin = conversation.fork()
            await conversation.step(call("transfer_to_human_agents", summary="x"))
            await conversation.step(say("You are being transferred to a human agent."))
            while not twin.ended:
                reply = agent.reply(messages)
                messages += [reply, *(await twin.step(reply)).messages]
            assert tuple(messages) == first.messages
            assert (await twin.outcome()).success is True


async def test_no_conversation_changes_what_others_start_from() -> None:
    for domain in ("retail", "airline", "telecom"):
        environment = Tau2Environment(domain)  # type: ignore[arg-type]  # a name of the three
        shared = load_domain(domain).environment.tools  # type: ignore[arg-type]  # the same
        before = shared.get_db_hash()
        for scenario in environment.scenarios("test"):
            await play(environment, scenario, 0, environment.honest_agent(scenario))
        assert shared.get_db_hash() == before


# -- measuring


def yaml_of(tmp_path: Path, **environment: Any) -> str:
    file = tmp_path / "tau2.yaml"
    settings = {"name": "tau2", "prompt": "short", "tools": "none", "max_turns": 2, **environment}
    file.write_text(
        json.dumps(
            {
                "agent": {"model_name": "embedded:desk", "max_new_tokens": 4},
                "environment": settings,
                "reward": "environment",
                "evaluation": {"split": "test", "episodes": 8},
                "training": {
                    "output_dir": str(tmp_path / "runs"),
                    "run_name": "tau2",
                    "max_steps": 1,
                    "num_generations": 2,
                    "per_device_train_batch_size": 1,
                    "gradient_accumulation_steps": 1,
                },
            }
        ),
        encoding="utf-8",
    )
    return str(file)


def test_floors_stand_beside_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = yaml_of(tmp_path, domain="airline")
    assert main(["evaluate", file]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("floors: idle ")
    assert "transfer_at_once" in shown[1]
    [apart] = [line for line in shown if line.strip().startswith("no_write")]
    assert apart.endswith("(idle 100.0%, transfer_at_once 100.0%)")
    [with_writes] = [line for line in shown if line.strip().startswith("with_writes")]
    assert with_writes.endswith("(idle 0.0%, transfer_at_once 0.0%)")
    assert main(["compare", file, "embedded:desk", "embedded:desk"]) == 0
    sides = capsys.readouterr().out.splitlines()[:2]
    assert all("; floors: idle " in side for side in sides)
    assert main(["train", file]) == 0
    capsys.readouterr()
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text(encoding="utf-8"))
    assert summary["after"]["floors"]["idle"]["families"][NO_WRITE]["success"] == 1.0
    assert main(["report", str(tmp_path / "runs" / "latest")]) == 0


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom"])
async def test_an_agent_behind_an_endpoint_gets_the_verdicts_that_it_gets_here(domain: Any) -> None:
    environment = Tau2Environment(domain)
    agent: Any = None

    async def honest(request: web.Request) -> web.Response:
        messages = [Message.from_openai(message) for message in (await request.json())["messages"]]
        called = {call.id: call.name for message in messages for call in message.tool_calls}
        named = [replace(message, name=called.get(message.tool_call_id or "")) for message in messages]
        return web.json_response(chat_server.answer(agent.reply(named).to_openai()))

    async with ChatServer(*[honest] * 1000) as server:
        there = EndpointAgent(ChatClient(server.url, "honest"))
        for scenario in environment.scenarios("test")[:8]:
            agent = environment.honest_agent(scenario)
            result = await evaluate(there, environment, EnvironmentReward(), [scenario])
            assert (result.success, result.num_failed) == (1.0, 0)


FLOORS = {
    ("airline", "scripted"): (19, 19),
    ("retail", "scripted"): (7, 7),
    ("telecom", "scripted"): (0, 20),
    ("telecom", "solo"): (0, 20),
}
"""Tasks that doing nothing, and transferring everybody, get right; docs/tau2.md has them."""


@pytest.mark.parametrize(("domain", "user"), FLOORS)
async def test_doing_nothing_and_transferring_everybody_get_what_the_page_says(
    domain: Any, user: str
) -> None:
    environment = Tau2Environment(domain, user=user)
    right = dict.fromkeys(environment.floor_agents, 0)
    for scenario in [*environment.scenarios("train"), *environment.scenarios("test")]:
        for name, make in environment.floor_agents.items():
            right[name] += (await play(environment, scenario, 0, make())).outcome.success is True
    assert tuple(right.values()) == FLOORS[domain, user]


async def test_an_audit_plays_the_oracle_as_the_honest_agent() -> None:
    environment = Tau2Environment("retail", tasks="made", num_train=20)
    found = await audit(environment, EnvironmentReward(), environment.scenarios("train"))
    assert found.honest is not None
    assert found.honest.success == 1.0
    assert found.policies["idle"].success == 0.0


def test_a_training_is_resumed_to_the_same_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps at once, and one step and a second one later: the same words in the same worlds."""
    said = []
    for place, stops in (("whole", (2,)), ("parts", (1, 2))):
        folder = tmp_path / place
        folder.mkdir()
        file = yaml_of(folder, tasks="made", domain="retail", prompt="desk.", max_turns=3)
        constant = ["training.lr_scheduler_type=constant", "training.warmup_ratio=0", "training.save_steps=1"]
        options = [word for setting in constant for word in ("--set", setting)]
        run = str(folder / "runs" / "latest")
        assert main(["train", file, "--no-eval", "--max-steps", str(stops[0]), *options]) == 0
        for stop in stops[1:]:
            assert main(["train", "--resume", run, "--no-eval", "--max-steps", str(stop)]) == 0
        capsys.readouterr()
        rollouts = list(RunLog.open(run).rollouts("train"))
        assert {rollout.step for rollout in rollouts} == {1, 2}
        said.append([(rollout.step, rollout.scenario, rollout.turns) for rollout in rollouts])
    assert said[0] == said[1]


def test_branches_are_played_on_copies_of_the_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = yaml_of(tmp_path, tasks="made", domain="retail", prompt="desk.", max_turns=3)
    assert main(["train", file, "--no-eval", "--set", "training.advantage_estimator=branch"]) == 0
    capsys.readouterr()
    rollouts = list(RunLog.open(tmp_path / "runs" / "latest").rollouts("train", branches=True))
    assert any(rollout.branch_of is not None for rollout in rollouts)
    assert {rollout.status for rollout in rollouts} <= {"terminated", "truncated"}


@pytest.mark.parametrize("page", ["tau2.md", "evidence/tau2-tasks.md"])
def test_the_pages_run(page: str, tmp_path: Path) -> None:
    """Its command is this environment's, whose own folder has no script of the package."""
    script = tmp_path / "bin" / "stateset-agents"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m stateset_agents "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    done = subprocess.run(
        [sys.executable, page_snippets.__file__, str(ROOT / "docs" / page)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ("floors: idle " in done.stdout) is (page == "tau2.md")


# -- times, in CPU seconds


def median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


@pytest.mark.parametrize(
    ("domain", "user", "most"),
    [
        ("retail", "scripted", 2e-3),
        ("airline", "scripted", 2e-3),
        ("telecom", "scripted", 2e-3),
        ("telecom", "solo", 5e-3),
    ],
)
async def test_a_start_and_a_verdict_take_milliseconds(domain: Any, user: str, most: float) -> None:
    """At most `most` and 5 ms on a machine of its own; a busy one, where all is slower, has thrice that."""
    environment = Tau2Environment(domain, user=user)
    starts, verdicts = [], []
    for scenario in environment.scenarios("train"):
        begun = time.process_time()
        conversation = await environment.start(scenario, 0)
        starts.append(time.process_time() - begun)
        agent, messages = environment.honest_agent(scenario), list(conversation.opening)
        while not conversation.ended:
            reply = agent.reply(messages)
            messages += [reply, *(await conversation.step(reply)).messages]
        begun = time.process_time()
        await conversation.outcome()
        verdicts.append(time.process_time() - begun)
    print(f"{domain} {user}: start {1e3 * median(starts):.2f} ms, verdict {1e3 * median(verdicts):.2f} ms")
    assert median(starts) <= 3 * most
    assert median(verdicts) <= 3 * 5e-3
