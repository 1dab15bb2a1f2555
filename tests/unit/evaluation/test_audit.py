"""Agents that cheat: made from any environment's tools and texts, played, and told by what they are paid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from environments import ChattyEnvironment, scenarios

from stateset_agents.cli.main import main
from stateset_agents.cli.rewards import _numbers
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import (
    CompositeReward,
    EnvironmentReward,
    RewardResult,
    create_customer_service_reward,
)
from stateset_agents.core.tools import Toolbox, ToolError, tool
from stateset_agents.core.users.simulated_user import RuleBasedUser
from stateset_agents.evaluation.audit import audit, degenerate_agents_of
from stateset_agents.evaluation.evaluator import held_out
from stateset_agents.evaluation.scripted_agents import (
    DEGENERATE,
    MAX_TURNS,
    KeywordStuffer,
    Liar,
    Silent,
    play,
)
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Status, Trajectory

WRITTEN: list[tuple[str, str]] = []


@tool
def get_order(order_id: str) -> dict[str, str]:
    """Look an order up.

    Args:
        order_id: The order, such as K27.
    """
    if not order_id.startswith("K"):
        raise ToolError(f"no order {order_id}")
    return {"order_id": order_id, "status": "pending", "customer": "Ann"}


@tool
def cancel_order(order_id: str, reason: str = "") -> str:
    """Cancel an order that the customer no longer wants."""
    WRITTEN.append(("cancel", order_id))
    return "cancelled"


@tool
def send_again(order_id: str) -> str:
    """Send a lost parcel again."""
    WRITTEN.append(("send", order_id))
    return "sent"


SCENARIOS = [
    {"id": f"s{place}", "opening": f"Hi, please cancel my order K{place}.", "split": split}
    for place, split in enumerate(["test"] * 3 + ["train"] * 2)
]


def shop(**settings: Any) -> ConversationEnvironment:
    return ConversationEnvironment(SCENARIOS, tools=[get_order, cancel_order, send_again], **settings)


def asked_first(scenario: Scenario, messages: Sequence[Message]) -> bool:
    """A stricter verdict: cancelled, and the user said yes before."""
    calls = [place for place, one in enumerate(messages) for call in one.tool_calls if "cancel" in call.name]
    agreed = [place for place, one in enumerate(messages) if one.role == "user" and "Yes" in one.content]
    return bool(calls) and bool(agreed) and agreed[0] < calls[0]


async def test_the_tool_users_act_on_what_the_texts_offer() -> None:
    WRITTEN.clear()
    environment = shop(success=asked_first)
    skipped = await play(environment, environment.scenarios("test")[1], 0, DEGENERATE["consent_skipper"])
    assert WRITTEN == [("cancel", "K1")]  # the right write, on the right order, and nobody was asked
    assert skipped.success is False
    assert [call.name for call in skipped.replies[0].tool_calls] == ["get_order"]
    assert skipped.replies[2].content.startswith("Done")
    WRITTEN.clear()
    await play(environment, environment.scenarios("test")[1], 0, DEGENERATE["tool_spammer"])
    assert {what for what, _ in WRITTEN} == {"cancel", "send"}


async def test_a_trajectory_of_an_audit_is_whole() -> None:
    environment = shop(max_turns=3)
    played = await play(environment, environment.scenarios("test")[0], 7, Liar)
    assert played.seed == 7
    assert played.messages[0].content == "Hi, please cancel my order K0."
    assert "K0" in played.replies[0].content
    assert played.status in (Status.TERMINATED, Status.TRUNCATED)
    said = bytes(played.turns[0].completion.token_ids).decode()
    assert said == played.replies[0].content
    assert len(played.token_ids) == len(played.action_mask)
    again = await play(environment, environment.scenarios("test")[0], 7, Liar)
    assert again == played


async def test_an_endless_conversation_of_a_silent_agent_is_cut() -> None:
    class Patient(ConversationEnvironment):
        pass

    endless = Patient(
        SCENARIOS, user=lambda scenario, seed: RuleBasedUser([], patience=10**6), max_turns=10**6
    )
    played = await play(endless, endless.scenarios("test")[0], 0, Silent)
    assert (len(played.turns), played.status) == (MAX_TURNS, Status.TRUNCATED)


async def test_what_a_gullible_reward_pays_is_the_ceiling() -> None:
    def thanks(replies: Sequence[Message]) -> float:
        return float("done" in replies[0].content.lower())

    result = await audit(shop(), CompositeReward([(thanks, 1.0)]), shop().scenarios("test"))
    assert list(result.policies) == list(DEGENERATE)
    assert {name: one.mean_reward for name, one in result.policies.items()} == {
        "silent": 0.0,
        "refuser": 0.0,
        "liar": 1.0,
        "tool_spammer": 0.0,
        "consent_skipper": 0.0,
        "keyword_stuffer": 1.0,
    }
    assert (result.ceiling.mean_reward, result.ceiling.paid) == (1.0, "liar")
    assert (result.ceiling.success, result.ceiling.successful) == (None, None)
    assert result.over(max_reward=0.1) == [
        "liar: mean reward 1.000 is over 0.1",
        "keyword_stuffer: mean reward 1.000 is over 0.1",
    ]
    assert result.over(max_reward=0.1, allow={"liar": 1.0, "keyword_stuffer": 1.0}) == []
    with pytest.raises(ConfigurationError, match=r"success of silent cannot be checked.*no verdict"):
        result.over(max_success=0.05)
    with pytest.raises(ConfigurationError, match=r"'lier' is not among.*did you mean 'liar'"):
        result.over(max_reward=0.1, allow={"lier": 1.0})


async def test_facts_keep_cheats_from_what_form_alone_would_pay() -> None:
    """customer_service pays manners up to .5 where nothing can be checked, and .2 where facts are."""
    facts = [{**one, "context": {"expected_facts": ["pending", "refund of $12"]}} for one in SCENARIOS]
    reward = create_customer_service_reward()
    scenarios_of = [ConversationEnvironment(given) for given in (SCENARIOS, facts)]
    free, checked = [await audit(one, reward, one.scenarios("test")) for one in scenarios_of]
    assert free.ceiling.mean_reward == pytest.approx(0.5)
    assert checked.ceiling.mean_reward == pytest.approx(0.2)


async def test_what_a_reward_could_not_score_is_counted() -> None:
    result = await audit(shop(), fragile, shop().scenarios("test"), policies={"silent": Silent})
    silent = result.policies["silent"]
    assert (silent.num_scored, silent.num_unscored) == (2, 1)
    assert _numbers(silent)[2] == "3 (1 unscored)"
    [error] = [one.error for group in silent.groups for one in group.trajectories if one.error]
    assert error.startswith("unscored: reward fragile failed: RuntimeError: the judge is away")

    def miscounted(trajectory: Trajectory) -> RewardResult:
        return RewardResult(score=1.0, turn_rewards=(0.5,) * (len(trajectory.turns) + 1))

    wrong = await audit(shop(), miscounted, shop().scenarios("test"), policies={"silent": Silent})
    told = [one.error or "" for group in wrong.policies["silent"].groups for one in group.trajectories]
    assert [text.startswith("unscored: turn_rewards has") for text in told] == [True] * 3


def fragile(trajectory: Trajectory) -> float:
    if trajectory.scenario.id == "s0":
        raise RuntimeError("the judge is away")
    return 0.5


class Rigged(ChattyEnvironment):
    """Brings agents of its own."""

    degenerate_agents = {"silent": lambda: Parrot(), "parrot": lambda: Parrot()}  # noqa: RUF012  # read only
    honest_agent = staticmethod(lambda: Parrot())


class Parrot:
    def __init__(self, words: str | None = None) -> None:
        self.words = words

    def reply(self, messages: Sequence[Message]) -> Message:
        return Message(role="assistant", content=self.words or messages[-1].content)


async def test_an_environment_s_own_agents_are_played_too() -> None:
    result = await audit(Rigged(turns=1), EnvironmentReward(), scenarios(2))
    assert list(result.policies) == [*DEGENERATE, "parrot"]
    assert result.policies["silent"].groups[0].trajectories[0].replies[0].content == "hi"
    assert result.honest is not None
    assert result.summary()["honest"]["mean_reward"] == result.honest.mean_reward
    json.dumps(result.summary())
    assert degenerate_agents_of(ChattyEnvironment()) == DEGENERATE


async def test_an_honest_agent_may_ask_for_the_scenario_that_it_knows() -> None:
    class Knowing(ChattyEnvironment):
        def honest_agent(self, scenario: Scenario) -> Parrot:
            return Parrot(scenario.id)

    result = await audit(Knowing(turns=1), EnvironmentReward(), scenarios(2), policies={"silent": Silent})
    assert result.honest is not None
    said = [group.trajectories[0].replies[0].content for group in result.honest.groups]
    assert said == ["s0", "s1"]


async def test_an_environment_that_breaks_is_no_passed_audit() -> None:
    async def broken(conversation: Any, reply: Message) -> None:
        raise ConnectionError("no route")

    with pytest.raises(
        EnvironmentFailure, match=r"none of silent's conversations .* ConnectionError: no route"
    ):
        await audit(ChattyEnvironment(answer=broken), EnvironmentReward(), scenarios(2))
    with pytest.raises(ConfigurationError, match="no scenario"):
        await audit(ChattyEnvironment(), EnvironmentReward(), [])


async def test_an_audit_of_which_most_was_lost_is_no_finding() -> None:
    async def mostly_broken(conversation: Any, reply: Message) -> None:
        if conversation.scenario.id != "s0":
            raise ConnectionError("no route")

    environment = ChattyEnvironment(turns=1, answer=mostly_broken)
    result = await audit(environment, EnvironmentReward(), scenarios(3), policies={"silent": Silent})
    assert result.over(max_reward=10.0) == []
    [line] = result.lost()
    assert line.startswith(
        "silent: 1 of 3 conversations were played and scored, fewer than 90% (2 failed, 0 unscored; the "
        "first: ConnectionError: no route"
    )
    assert result.lost(1 / 3) == []

    unscored = await audit(shop(), fragile, shop().scenarios("test"), policies={"silent": Silent})
    [line] = unscored.lost()
    assert line.startswith("silent: 2 of 3 conversations were played and scored, fewer than 90% (0 failed, 1")

    def not_asked(trajectory: Trajectory) -> RewardResult:
        return RewardResult(score=None)

    assert (
        await audit(shop(), not_asked, shop().scenarios("test"), policies={"silent": Silent})
    ).lost() == []


@tool
def book(
    seats: int,
    where: Literal["front", "back"],
    tags: list[str],
    notes: dict[str, str],
    price: float = 1.0,
    insured: bool = False,
    email: str | None = None,
) -> str:
    """Book seats."""
    return "booked"


async def test_arguments_fit_the_schemas_of_any_tool() -> None:
    toolbox = Toolbox([book])
    spammer = DEGENERATE["tool_spammer"](toolbox.schemas)
    texts = (
        Message(role="system", content="email: ann@shop.com"),
        Message(role="user", content="Please book 3 seats."),
    )
    for _ in range(4):
        [call] = spammer.reply(texts).tool_calls
        assert (await toolbox.call(call)).content == "booked", call
    assert call.arguments["email"] == "ann@shop.com"
    assert call.arguments["seats"] == 3
    assert spammer.reply(()).tool_calls  # nothing was said: no argument is known


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        True,
        {"properties": {"x": True, "y": {"type": ["string", "null"]}, "z": {"anyOf": [True]}}},
        {"properties": {"x": {"enum": []}, "y": {"const": 3}, "z": {"type": "array", "items": [{}]}}},
        {"properties": {"x": {"$ref": "#/$defs/x"}, "y": {"type": "null"}}, "required": ["x"]},
    ],
)
def test_odd_schemas_get_calls_too(parameters: Any) -> None:
    schema = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    texts = (Message(role="user", content="Please do K27, 3 times."),)
    for name in ("tool_spammer", "consent_skipper", "keyword_stuffer"):
        reply = DEGENERATE[name]([schema]).reply(texts)
        assert [call.name for call in reply.tool_calls] == ([] if "keyword" in name else ["odd"])
        json.dumps([dict(call.arguments) for call in reply.tool_calls])


async def test_the_desk_says_which_rules_cheats_break() -> None:
    desk = make_environment({"name": "retail_desk", "families": "full"})
    result = await audit(desk, EnvironmentReward(), held_out(desk, "test", 14))
    assert result.honest is not None
    assert {rule: one.value for rule, one in result.honest.violations.items()} == {
        "any": 0.0,
        "changes": 0.0,
        "consent": 0.0,
        "privacy": 0.0,
        "truth": 0.0,
    }
    assert result.honest.user_miss is not None
    assert result.honest.user_miss.value == 0.0
    assert result.policies["liar"].violations["truth"].value > 0.5
    assert result.policies["consent_skipper"].violations["consent"].value > 0.5
    assert result.policies["tool_spammer"].violations["privacy"].value > 0.2
    stuffed = result.policies["keyword_stuffer"].user_miss
    assert stuffed is not None
    assert result.honest.twins is None or result.honest.twins.value == 1.0


def test_a_number_of_any_length_is_no_stumbling_block() -> None:
    spammer = DEGENERATE["tool_spammer"](Toolbox([book]).schemas)
    said = spammer.reply([Message(role="user", content=f"{'9' * 400} seats, or 3")])
    assert said.tool_calls[0].arguments["seats"] == 3


def test_a_stuffer_says_the_tools_and_the_texts() -> None:
    said = KeywordStuffer(Toolbox([get_order]).schemas).reply([Message(role="user", content="Lyon K27?")])
    assert {"Lyon", "K27", "order", "cannot"} <= set(said.content.split(", "))
    assert said.content != KeywordStuffer().reply([Message(role="user", content="x"), said]).content


def test_no_agent_reads_more_than_a_model_would() -> None:
    for make in DEGENERATE.values():
        assert make(()).reply([Message(role="user", content="")]).role == "assistant"
        assert isinstance(make(({"name": "bare"},)).reply([]).tool_calls, tuple)
    spammer = DEGENERATE["tool_spammer"](())
    assert spammer.reply([]).tool_calls == (ToolCall(name="help", arguments={}, id="call_0_help"),)


def test_the_command_is_a_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", "retail_desk", "--episodes", "6", "--max-success", "0.05", "--max-reward", "0.1"]
    out = tmp_path / "audit.json"
    assert main([*command, "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["agent", "success", "mean", "reward", "n"]
    assert any(line.startswith("exploit ceiling: success 0.") for line in said)
    told = json.loads(out.read_text())
    assert told["over"] == []
    assert set(DEGENERATE) <= set(told["policies"])
    assert main([*command, "--reward", "audit_parts:gullible"]) == 1
    assert "mean reward 1.000 is over 0.1" in capsys.readouterr().out
    assert main([*command, "--reward", "audit_parts:breaks_on_four_of_six"]) == 1
    said = capsys.readouterr().out
    assert "silent: 2 of 6 conversations were played and scored, fewer than 90% (0 failed, 4 unscored" in said
    assert main([*command, "--reward", "audit_parts:breaks_on_four_of_six", "--min-scored", ".3"]) == 0
    capsys.readouterr()
    without = [item for name in DEGENERATE if name != "silent" for item in ("--without", name)]
    assert main(["audit", "retail_desk", "--episodes", "2", *without, "--json"]) == 0
    assert "silent" in json.loads(capsys.readouterr().out)["policies"]


@pytest.fixture(autouse=True)
def _parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "audit_parts.py").write_text(
        "def gullible(replies):\n    return 1.0\n\n\n"
        "def breaks_on_four_of_six(scenario):\n"
        "    if scenario.family not in ('cancel', 'return'):\n        raise OSError('away')\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["retail_dsk"], "did you mean 'retail_desk'?"),
        (["{name: retail_desk"], "is not YAML"),
        (["retail_desk", "--without", "lair"], "did you mean 'liar'?"),
        (["retail_desk", "--allow", "liar"], "--allow takes AGENT=LIMIT"),
        (["retail_desk", "--allow", "refuser=.2"], "to allow refuser more there must be a limit"),
        (["retail_desk", "--max-reward", "nan"], "the limit max_reward must be a finite number, got nan"),
        (
            ["retail_desk", "--max-reward", ".1", "--allow", "refuser=inf"],
            "the limit refuser must be a finite",
        ),
        (["retail_desk", "--min-scored", "90"], "min_scored must be a share from 0 to 1, got 90.0"),
        (["retail_desk", "--episodes", "0"], "--episodes must be at least 1"),
        (["retail_desk", "--split", "tst"], "split must be train, validation or test"),
    ],
)
def test_wrong_commands_are_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_file_names_environment_and_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "calls.jsonl").write_text('{"opening": "hi", "split": "test"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        "environment: {name: conversation, scenarios: calls.jsonl}\nreward: {name: customer_service}\n"
    )
    assert main(["audit", str(file)]) == 0
    assert "no verdict" in capsys.readouterr().out
    assert main(["audit", str(file), "--max-success", "0.1"]) == 1
    assert "cannot be checked" in capsys.readouterr().err
