"""Agent programs in the trainer's own process: endpoint, rows and verdict as of a process, and no leak."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from engines import make_engine
from tiny_models import tiny_model
from tiny_training import make_trainer, plain_logprobs

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.programs.in_process_agent import InProcessAgent
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Outcome, Status

TASKS = [
    {"id": f"t{n}", "opening": word, "context": {"order": f"K2{n}"}} for n, word in enumerate(("hi", "ok"))
]


async def say(client: openai.AsyncOpenAI, messages: list[Any], text: str, **fields: Any) -> str:
    """One request and its reply, which is added to the messages."""
    messages.append({"role": "user", "content": text})
    answer = await client.chat.completions.create(model="any", messages=messages, **fields)
    messages.append(answer.choices[0].message)
    return answer.choices[0].message.content or ""


async def two_turns(client, scenario):
    messages = []
    await say(client, messages, scenario.opening)
    said = await say(client, messages, f"and {scenario.context['order']}?")
    return {"reward": float(len(said) % 3), "success": len(said) % 3 == 2, "metadata": {"said": said}}


async def play(environment, replies, *, num_generations=1, agent=None, **settings):
    agent = agent or MultiTurnAgent(backend=ScriptedBackend(replies))
    settings = {"episode_retries": 0, "turn_timeout": 30.0, **settings}
    async with agent:
        engine = make_engine(
            agent, environment, EnvironmentReward(), num_generations=num_generations, **settings
        )
        (group,) = await engine.rollout(environment.scenarios("train")[:1], seed=0, step=0)
    return group.trajectories


async def probe(run: Callable[..., Any] | str, replies: Any = lambda request: "ok", **settings: Any) -> None:
    environment = InProcessAgent(run, TASKS)
    async with MultiTurnAgent(backend=ScriptedBackend(replies)) as agent:
        settings = {"episode_retries": 0, "turn_timeout": 30.0, **settings}
        await environment.probe(make_engine(agent, environment, EnvironmentReward(), **settings))


def is_listening(environment: InProcessAgent) -> bool:
    return any(server.is_listening for server in environment._servers.values())


async def test_members_are_tasks_of_one_loop_with_clients_of_their_own():
    bases = set()

    async def run(client, scenario, seed):
        bases.add(str(client.base_url))
        assert isinstance(client, openai.AsyncOpenAI)
        said = await say(client, [], scenario.opening)
        return {"reward": 1.0, "metadata": {"seed": seed, "heard": said}}

    environment = InProcessAgent(run, TASKS)
    members = await play(environment, lambda request: f"member {request.session.member}", num_generations=4)
    assert [member.metadata["heard"] for member in members] == [f"member {n}" for n in range(4)]
    assert {member.metadata["seed"] for member in members} == {members[0].seed}
    assert len(bases) == 4
    assert not is_listening(environment)


async def test_its_clients_are_closed_behind_it():
    clients = []

    async def run(client, anthropic_client, scenario):
        clients.extend((client, anthropic_client))
        await say(client, [], scenario.opening)

    members = await play(InProcessAgent(run, TASKS), lambda request: "ok", num_generations=2)
    assert [member.error for member in members] == [None, None]
    assert [client.is_closed() for client in clients] == [True] * 4


async def test_other_clients_are_made_of_its_url_and_speak_their_dialects():
    async def run(base_url, api_key, anthropic_client, scenario):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            first = await client.responses.create(model="any", input=scenario.opening)
        hi = [{"role": "user", "content": "and now?"}]
        second = await anthropic_client.messages.create(model="any", max_tokens=9, messages=hi)
        assert isinstance(anthropic_client, anthropic.AsyncAnthropic)
        return Outcome(reward=0.5, metadata={"heard": [first.output_text, second.content[0].text]})

    (one,) = await play(InProcessAgent(run, TASKS), ["one", "two"])
    assert (one.error, one.reward) == (None, 0.5)
    assert one.metadata == {"heard": ["one", "two"]}
    assert [turn.follows for turn in one.turns] == [-1, None]


async def test_a_scenario_is_its_own():
    async def run(client, scenario):
        scenario.context["order"] += "!"
        said = await say(client, [], scenario.context["order"])
        return {"reward": 1.0, "metadata": {"heard": said}}

    members = await play(InProcessAgent(run, TASKS), lambda request: "ok", num_generations=2)
    assert [member.opening[-1].content for member in members] == ["K20!", "K20!"]


@pytest.mark.parametrize(
    ("verdict", "reward", "success"),
    [
        ({"reward": -0.5}, -0.5, None),
        ({"success": False}, None, False),
        (Outcome(reward=2.0, success=True), 2.0, True),
        (None, None, None),
    ],
)
async def test_what_it_returns_is_the_verdict(verdict, reward, success):
    async def run(client, scenario):
        await say(client, [], "hi")
        return verdict

    (one,) = await play(InProcessAgent(run, TASKS), ["ok"])
    assert (one.status, one.reward, one.success) == (Status.TERMINATED, reward, success)


async def raises(client, scenario):
    await say(client, [], "hi")
    raise RuntimeError("no database")


async def exits(client, scenario):
    await say(client, [], "hi")
    raise SystemExit(3)


async def mistakes_the_model(client, scenario):
    return {}[await say(client, [], "hi")]


async def cancels_itself(client, scenario):
    await say(client, [], "hi")
    raise asyncio.CancelledError


async def asks_nothing(client, scenario):
    return {"reward": 1.0}


async def breaks_first(client, scenario):
    raise ValueError("no task")


async def returns_nan(client, scenario):
    await say(client, [], "hi")
    return {"reward": float("nan")}


async def gives_an_infinite_outcome(client, scenario):
    await say(client, [], "hi")
    return Outcome(reward=float("inf"))


async def returns_a_word(client, scenario):
    return await say(client, [], "hi")


async def is_refused(client, scenario):
    await say(client, [], "hi", logit_bias={"5": 1})


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (raises, "the program raised: RuntimeError: no database (at test_in_process_agent.py:"),
        (exits, "the program raised: RuntimeError: SystemExit: 3"),
        (mistakes_the_model, "the program raised: KeyError: 'ok'"),
        (cancels_itself, "the program raised: CancelledError: of itself"),
        (asks_nothing, "the program returned before it asked anything: {'reward': 1.0}"),
        (breaks_first, "the program raised before it asked anything: ValueError: no task"),
        (returns_nan, "any of them absent, an Outcome or None, got {'reward': nan}"),
        (gives_an_infinite_outcome, "an Outcome or None, got Outcome(reward=inf"),
        (returns_a_word, "an Outcome or None, got 'ok'"),
        (is_refused, "logit_bias is not served here: leave it out"),
    ],
)
async def test_a_program_that_breaks_fails_its_conversation_alone(run, words):
    environment = InProcessAgent(run, TASKS)
    (one,) = await play(environment, lambda request: "ok")
    assert (one.status, one.reward) == (Status.FAILED, None)
    assert words in one.error
    assert not is_listening(environment)


async def test_one_that_never_asks_or_never_ends_is_cancelled(monkeypatch):
    ended = []

    def never(first_asks):
        async def run(client, scenario):
            try:
                if first_asks:
                    await say(client, [], "hi")
                await asyncio.Event().wait()
            finally:
                ended.append(first_asks)

        return run

    for first_asks in (False, True):
        environment = InProcessAgent(never(first_asks), TASKS)
        (one,) = await play(environment, ["ok"], turn_timeout=0.5)
        assert one.status is Status.FAILED
        assert "EnvironmentTimeout" in one.error
        assert not is_listening(environment)
    assert ended == [False, True]


async def test_one_that_swallows_its_cancellation_is_left_alone_and_refused():
    heard = []

    async def run(client, scenario):
        await say(client, [], "hi")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(1.2)  # longer than anyone waits
        heard.append(await say(client, [], "still here?"))

    environment = InProcessAgent(run, TASKS)
    (one,) = await play(environment, ["ok"], turn_timeout=0.3)
    assert one.status is Status.FAILED
    await asyncio.sleep(0.5)
    assert heard == []


async def test_a_cancelled_rollout_leaves_no_task_and_no_port():
    started, ended = [], []

    async def run(client, scenario):
        started.append(1)
        try:
            await say(client, [], "hi")
        finally:
            ended.append(1)

    async def silent(request):
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    environment = InProcessAgent(run, TASKS)
    work = asyncio.create_task(play(environment, silent, num_generations=3))
    async with asyncio.timeout(20):
        while len(started) < 3:  # noqa: ASYNC110  # the endpoint's own loop tells nobody
            await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    async with asyncio.timeout(20):  # who was cancelled is waited for a second, then left to its cleaning
        while is_listening(environment) or len(ended) < 3 or asyncio.all_tasks() - before:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["gives a verdict", "breaks", "goes on"])
async def test_a_conversation_that_is_cut_is_scored(how, monkeypatch):
    monkeypatch.setattr("stateset_agents.environments.programs.program_environment._LAST_SECONDS", 0.3)

    async def run(client, scenario):
        messages = []
        try:
            for number in range(3):
                await say(client, messages, str(number))
        except openai.BadRequestError as error:
            if how == "breaks":
                raise
            if how == "goes on":
                await asyncio.Event().wait()
            return {"reward": 0.25, "metadata": {"told": error.code}}

    (one,) = await play(InProcessAgent(run, TASKS, max_turns=2), lambda request: "ok")
    given = how == "gives a verdict"
    assert (one.status, one.reward, len(one.turns)) == (Status.TRUNCATED, 0.25 if given else 0.0, 2)
    assert one.metadata.get("told") == ("max_turns" if given else None)


def test_what_cannot_work_is_refused_at_once(monkeypatch):
    def blocks(client, scenario): ...

    async def wants(client, scenario, customer): ...

    for arguments, words in (
        ({"run": blocks}, "run must be written `async def`"),
        ({"run": "progs"}, "run must be 'module:name', got 'progs': say which object of the module"),
        ({"run": wants}, "cannot give parameter 'customer'"),
        ({"run": "no_such_module:run"}, "'no_such_module:run' cannot be imported"),
        ({"max_turns": 0}, "max_turns"),
        ({"untrained": "guard"}, "write ['guard']"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            InProcessAgent(**{"run": two_turns, "scenarios": TASKS, **arguments})
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(ConfigurationError, match="client of run needs openai installed: pip install openai"):
        InProcessAgent(two_turns, TASKS)


# --- the probe


class Desk:
    """What programs of users look like; the attribute that is shared is named by each test."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.order: str | None = None
        self.num_calls = 0
        self.shop = SimpleNamespace(status="pending")  # a library's object: only what it says can tell
        self.client: Any = None
        self.prices = {"K20": 1}


async def keeps_history(desk, client, scenario):
    await say(client, desk.history, scenario.opening)


async def keeps_the_order(desk, client, scenario):
    desk.order = scenario.context["order"]
    messages = []
    await say(client, messages, "hi")
    await say(client, messages, f"is it {desk.order}?")


async def counts(desk, client, scenario):
    await say(client, [], scenario.opening)
    desk.num_calls += 1


async def changes_what_its_tools_read(desk, client, scenario):
    await say(client, [], f"the order is {desk.shop.status}")
    desk.shop.status = "cancelled"


async def marks_the_table(desk, client, scenario):
    await say(client, [], "hi")
    desk.prices["K20"] = 2


async def restores_the_table(desk, client, scenario):
    await say(client, [], "hi")
    desk.prices = {"K20": 1}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (restores_the_table, "run changes .*prices, .* share, to another object that reads {'K20': 1}: make"),
        (keeps_history, "run changes .*history"),
        (keeps_the_order, "run changes .*order, which all conversations share, from 'K21' to 'K20'"),
        (counts, "run changes .*num_calls, which all conversations share, from 0 to 2"),
        (changes_what_its_tools_read, "order is pending.*alone and .*order is cancelled.*played again"),
        (marks_the_table, r"run changes .*prices\['K20'\], .* from 1 to 2"),
    ],
)
@pytest.mark.first(5)
@pytest.mark.parametrize("kind", ["object", "closure", "default"])
async def test_the_probe_refuses_what_conversations_share(body, words, kind):
    desk = Desk()
    if kind == "object":

        class Program(Desk):
            async def run(self, client, scenario):
                await body(self, client, scenario)

        run = Program().run
    elif kind == "closure":

        async def run(client, scenario):
            await body(desk, client, scenario)

    else:

        async def run(client, scenario, desk=desk):
            await body(desk, client, scenario)

    with pytest.raises(ConfigurationError, match=words) as error:
        await probe(run)
    assert "\n" not in str(error.value)
    assert "ExternalProgram" in str(error.value)


HISTORY: list[Any] = []


async def keeps_a_name_of_its_module(client, scenario):
    await say(client, HISTORY, scenario.opening)


async def test_the_probe_sees_the_names_of_the_module():
    with pytest.raises(ConfigurationError, match=r"agent.HISTORY\[4\], .* from None to {'role'"):
        await probe(keeps_a_name_of_its_module)
    HISTORY.clear()


async def test_the_probe_refuses_conversations_that_wait_for_one_another():
    lock = asyncio.Lock()

    async def run(client, scenario):
        async with lock:
            await say(client, [], scenario.opening)

    with pytest.raises(ConfigurationError, match=r"longer than 1\.0 s"):
        await probe(run, turn_timeout=1.0)


async def test_the_probe_refuses_a_program_that_does_not_start_twice(tmp_path: Path):
    async def run(client, scenario):
        (tmp_path / scenario.id).mkdir()
        await say(client, [], scenario.opening)

    with pytest.raises(ConfigurationError, match=r"step 0 .*alone and .*FileExistsError.*played again"):
        await probe(run)


async def test_the_probe_accepts_programs_that_share_nothing_that_counts(monkeypatch):
    desk = Desk()

    async def run(client, scenario):
        desk.client = desk.client or object()  # made once, for all
        desk.prices.setdefault(scenario.context["order"], 3)  # a table that is filled
        order = {"status": "pending"}
        messages = []
        said = await say(client, messages, scenario.opening)
        if said.startswith("cancel"):
            order["status"] = "cancelled"
        await say(client, messages, order["status"])
        return {"reward": 1.0, "success": order["status"] == "cancelled"}

    await probe(run, lambda request: ["cancel it", "done"][request.turn])
    await probe(two_turns)
    await probe(returns_nan)
    await probe(raises)  # breaks alike, alone and beside another: the training says so


async def test_a_program_whose_words_vary_is_refused_unless_the_probe_is_off():
    number = iter(range(1000))

    async def run(client, scenario):
        await say(client, [], f"it is {next(number)} o'clock")

    with pytest.raises(ConfigurationError, match=r"run says other things .*probe=False"):
        await probe(run)
    assert InProcessAgent(run, TASKS, probe=False).probe is None


# --- training


async def test_a_trainer_trains_its_sampled_tokens_row_by_row_and_alike_each_time(tmp_path: Path):
    async def train(folder: Path) -> RunLog:
        spec = {"name": "in_process_agent", "run": f"{__name__}:two_turns", "scenarios": TASKS, "local": True}
        environment = make_environment(spec)
        trainer = make_trainer(
            folder,
            environment=environment,
            reward=EnvironmentReward(),
            max_steps=2,
            num_generations=2,
            save_steps=0,
        )
        async with trainer:
            await trainer.train()
        assert not is_listening(environment)
        return RunLog(trainer.run)

    log = await train(tmp_path / "one")
    rollouts = list(log.rollouts())
    assert len(rollouts) == 8
    model = tiny_model("llama")  # as the first step had it
    for one in rollouts:
        assert (one.status, one.error) == ("terminated", None)
        talk = trajectory_of(one)
        for row in talk.rows:
            trained = [token for token, bit in zip(row.token_ids, row.action_mask, strict=True) if bit]
            assert trained == [token for turn in row.turns for token in turn.completion.token_ids]
            if one.step == 1:
                stored = [p for p, bit in zip(row.logprobs, row.action_mask, strict=True) if bit]
                assert stored == pytest.approx(plain_logprobs(model, row).tolist(), abs=1e-5)
        assert sum(sum(row.action_mask) for row in talk.rows) == talk.num_agent_tokens > 0
    again = list((await train(tmp_path / "other")).rollouts())
    assert [one.token_ids for one in rollouts] == [one.token_ids for one in again]


async def test_a_trainer_refuses_a_shared_program_before_its_run_folder(tmp_path: Path):
    spec = {"name": "in_process_agent", "run": f"{__name__}:keeps_a_name_of_its_module", "scenarios": TASKS}
    trainer = make_trainer(tmp_path, environment=make_environment(spec), reward=EnvironmentReward())
    with pytest.raises(ConfigurationError, match="run changes"):
        await trainer.initialize()
    await trainer.close()
    HISTORY.clear()
    assert trainer._recorder.folder is None
