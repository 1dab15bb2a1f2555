"""Two agents behind one server, asked by the real openai client: who answers, what is checked and kept."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import openai
import pytest

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.deployment import conversations
from stateset_agents.deployment.controller import DeploymentController
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.guards import Answer, Violation, agreement_of
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.state import Arm
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import BackendError, ConfigurationError, JournalError
from stateset_agents.types.messages import Message, ToolCall

HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "look", "arguments": {"order": "K1"}}</tool_call>'
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUICK: dict[str, Any] = {
    "stages": (0.5,),
    "shadow_answers": 0,
    "hold_seconds": 0,
    "hold_outcomes": 10**6,
    "salt": "of the test",
}
SHADOW: dict[str, Any] = {**QUICK, "shadow_answers": 10**6}


class Desk:
    """A served deployment and its clients."""

    def __init__(self, deployed: Deployed, server: AgentServer, client: openai.AsyncOpenAI) -> None:
        self.deployed = deployed
        self.server = server
        self.client = client
        self.controller = deployed.controller

    async def ask(self, conversation: str | None = None, **fields: Any) -> str:
        headers = {} if conversation is None else {"X-Conversation-Id": conversation}
        answer = await self.client.chat.completions.create(
            **{"model": "old", "messages": HI, "extra_headers": headers, **fields}
        )
        return answer.choices[0].message.content or ""

    async def stream(self, conversation: str) -> list[str]:
        pieces = []
        headers = {"X-Conversation-Id": conversation}
        async for chunk in await self.client.chat.completions.create(
            model="old", messages=HI, stream=True, extra_headers=headers
        ):
            pieces.append(chunk.choices[0].delta.content or "")
        return pieces

    async def outcome(self, conversation: str, success: bool | float) -> str:
        body = {"conversation": conversation, "success": success}
        said = await self.client.post("/outcomes", body=body, cast_to=object)
        assert isinstance(said, dict)
        return str(said["report"])

    async def id_of(self, arm: str, start: int = 0) -> str:
        """A conversation that was given to this arm."""
        for number in range(start, start + 100):
            if self.controller.assign(f"c{number}").arm == arm:
                return f"c{number}"
        raise AssertionError(f"a hundred conversations, none for the {arm}")


@asynccontextmanager
async def served(
    folder: Path,
    baseline: Any = lambda request: "baseline",
    candidate: Any = lambda request: "candidate",
    *,
    plan: dict[str, Any] = QUICK,
    server: dict[str, Any] | None = None,
    agents: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Desk]:
    def agent(name: str, script: Any) -> MultiTurnAgent:
        backend = script if isinstance(script, ScriptedBackend) else ScriptedBackend(script)
        return MultiTurnAgent(AgentConfig(model_name=name, **(agents or {})), backend=backend)

    with Journal(folder / "deployments.sqlite") as journal:
        async with (
            agent("old", baseline) as old,
            agent("new", candidate) as new,
            Deployed(old, new, DeploymentPlan(**plan), journal, **options) as deployed,
            AgentServer(deployed, **(server or {})) as running,
            openai.AsyncOpenAI(base_url=running.url, api_key="secret", max_retries=0) as client,
        ):
            deployed.controller.settle()
            yield Desk(deployed, running, client)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  # nothing tells of a row in the journal
            await asyncio.sleep(0.005)


def answers_of(desk: Desk, arm: Arm) -> int:
    return desk.controller.ledger.answers[arm]


# --- shadow --------------------------------------------------------------------


async def test_a_shadow_answer_is_checked_and_never_sent_and_its_calls_are_run_by_nobody(
    tmp_path: Path,
) -> None:
    candidate = ScriptedBackend(lambda request: "Let me look. " + CALL)
    async with served(tmp_path, candidate=candidate, plan=SHADOW) as desk:
        reply = await desk.client.chat.completions.create(model="old", messages=HI, tools=[LOOK])
        assert reply.choices[0].message.content == "baseline"
        assert reply.choices[0].message.tool_calls is None
        await until(lambda: answers_of(desk, "candidate") == 1)
        assert "".join(await desk.stream("another")) == "baseline"
        await until(lambda: answers_of(desk, "candidate") == 2)
        assert len(candidate.requests) == 2
        assert "look" in candidate.requests[0].text  # it was offered the tool
        status = desk.controller.status()
        assert (status["mode"], status["arms"]["baseline"]["answers"]) == ("shadow", 2)
        assert status["violations"] == {}


async def test_shadow_counts_how_often_both_do_and_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def candidate(request: ScriptedRequest) -> str:
        kinds = {"same": " baseline ", "words": "candidate", "call": CALL}
        return next(said for kind, said in kinds.items() if kind in request.text)

    async with served(tmp_path, candidate=candidate, plan=SHADOW) as desk:
        for number, kind in enumerate(("same", "words", "words", "call")):
            await desk.ask(f"c{number}", messages=[{"role": "user", "content": kind}], tools=[LOOK])
            await until(partial(_has_answered, desk, number + 1))
        agreement = desk.controller.status()["agreement"]
        assert agreement == {"answers": 4, "same_calls": 3, "same_reply": 1}
    path = tmp_path / "deployments.sqlite"
    with Journal(path) as journal:
        assert DeploymentController(journal, "0001").status()["agreement"] == agreement
    assert main(["status", "--deployments", str(path)]) == 0
    said = "in shadow the candidate did what the baseline did in 75% of 4 answers, and said the same in 25%"
    assert said in capsys.readouterr().out


async def test_a_shadow_without_an_answer_is_compared_with_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, candidate=lambda request: RuntimeError("away"), plan=SHADOW) as desk:
        await desk.ask("c0")
        await until(partial(_has_answered, desk, 1))
        assert desk.controller.status()["agreement"]["answers"] == 0


def test_calls_agree_by_name_and_arguments() -> None:
    def says(content: str, *calls: tuple[str, dict[str, Any]]) -> Message:
        made = tuple(
            ToolCall(name=name, arguments=arguments, id=f"{content}{number}")
            for number, (name, arguments) in enumerate(calls)
        )
        return Message(role="assistant", content=content, tool_calls=made)

    look = ("look", {"order": "K1"})
    assert agreement_of(says("a ", look), says("a", look)) == "reply"
    assert agreement_of(says("a", look), says("b", look)) == "calls"
    priced, whole = ("buy", {"price": 20.0, "note": None}), ("buy", {"price": 20})
    assert agreement_of(says("Zu\u0308rich", priced), says("Z\u00fcrich", whole)) == "reply"
    assert agreement_of(says("a", ("buy", {"price": True})), says("a", ("buy", {"price": 1}))) == "none"
    for other in (("look", {"order": "K2"}), ("find", {"order": "K1"})):
        assert agreement_of(says("a", look), says("a", other)) == "none"
    assert agreement_of(says("a", look), says("a", look, look)) == "none"
    assert agreement_of(says("a", look), says("a")) == "none"


async def test_a_shadow_that_hangs_delays_nobody_and_its_number_is_bounded(tmp_path: Path) -> None:
    candidate = ScriptedBackend(lambda request: "late", delay=1000)
    async with served(tmp_path, candidate=candidate, plan=SHADOW, max_shadows=2) as desk:
        async with asyncio.timeout(30):
            assert [await desk.ask(f"c{n}") for n in range(6)] == ["baseline"] * 6
        await until(lambda: len(candidate.requests) == 2)
        assert desk.deployed.skipped_shadows == 4
        assert answers_of(desk, "candidate") == 0
    async with served(tmp_path, candidate=candidate, plan=SHADOW, patience=0.01) as desk:
        assert await desk.ask("c9") == "baseline"
        await until(lambda: answers_of(desk, "candidate") == 1)
        assert desk.controller.status()["violations"] == {"failure": 1}


async def test_a_candidate_that_crashes_in_shadow_is_rolled_back_and_nobody_notices(tmp_path: Path) -> None:
    async with served(tmp_path, candidate=lambda request: RuntimeError("no memory"), plan=SHADOW) as desk:
        for number in range(60):
            assert await desk.ask(f"c{number}") == "baseline"
            await until(partial(_has_answered, desk, number + 1))
            if _is_over(desk):
                break
        assert _is_over(desk)
        assert "surely more than 0.1 of the answers are unsafe" in desk.controller.state.why


def _has_answered(desk: Desk, count: int) -> bool:
    return answers_of(desk, "candidate") >= count or _is_over(desk)


def _is_over(desk: Desk) -> bool:
    return desk.controller.state.mode == "rolled_back"


# --- who answers ---------------------------------------------------------------


async def test_a_conversation_is_named_by_header_metadata_user_or_its_opening(tmp_path: Path) -> None:
    async with served(tmp_path) as desk:
        create: Any = desk.client.chat.completions.with_raw_response.create
        named = {"metadata": {"conversation_id": "m"}, "user": "u"}
        for fields, headers, wanted in [
            (named, {"X-Conversation-Id": "h"}, "h"),
            (named, {}, "m"),
            ({"user": "u"}, {}, "u"),
            ({"user": ""}, {}, None),
        ]:
            answer = await create(model="old", messages=HI, extra_headers=headers, **fields)
            said = answer.headers["X-Conversation-Id"]
            assert said == wanted if wanted else said.startswith("opening-")
        opening = said
        later = [*HI, {"role": "assistant", "content": "what?"}, {"role": "user", "content": "a refund"}]
        for messages, is_same in [
            (later, True),
            ([*HI, *HI], True),
            ([{"role": "user", "content": "hi!"}], False),
            ([{"role": "system", "content": "be brief"}, *HI], False),
        ]:
            answer = await create(model="old", messages=messages)
            assert (answer.headers["X-Conversation-Id"] == opening) is is_same
        not_for_headers = await create(model="old", messages=HI, user="Zoë\r\nX-Evil: 1")
        assert "X-Conversation-Id" not in not_for_headers.headers
        assert desk.controller.assign("Zoë\r\nX-Evil: 1").number <= 8
        for fields in (
            {"metadata": {"conversation_id": 7}},
            {"extra_headers": {"X-Conversation-Id": "x" * 257}},
        ):
            with pytest.raises(openai.BadRequestError, match="must be a text of 1 to 256 characters") as no:
                await create(model="old", messages=HI, **fields)
            assert no.value.code == "invalid_conversation_id"


async def test_an_arm_stays_and_a_rollback_moves_the_next_turn(tmp_path: Path) -> None:
    async with served(tmp_path, agents={"history": "keep"}) as desk:
        says = {f"c{n}": await desk.ask(f"c{n}") for n in range(30)}
        assert set(says.values()) == {"baseline", "candidate"}
        assert {name: await desk.ask(name) for name in says} == says
        assert "".join(await desk.stream("c0")) == says["c0"]
        desk.controller.roll_back(who="ann", why="enough")
        assert {await desk.ask(name) for name in says} == {"baseline"}
        assert desk.controller.ledger.counts["reassigned"] == list(says.values()).count("candidate")


async def test_an_answer_under_way_at_the_rollback_is_sent(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slowly(request: ScriptedRequest) -> str:
        await release.wait()
        return "candidate"

    candidate = ScriptedBackend(slowly)
    async with served(tmp_path, candidate=candidate) as desk:
        name = await desk.id_of("candidate")
        asking = asyncio.create_task(desk.ask(name))
        await until(lambda: len(candidate.requests) == 1)
        with Journal(tmp_path / "deployments.sqlite") as journal:  # another process, such as `rollback`
            DeploymentController(journal, "0001").roll_back(who="ann", why="enough")
        release.set()
        assert await asking == "candidate"
        assert await desk.ask(name) == "baseline"


async def test_several_answers_to_one_request_are_one_record(tmp_path: Path) -> None:
    async with served(tmp_path) as desk:
        name = await desk.id_of("candidate")
        answer = await desk.client.chat.completions.create(
            model="old",
            messages=HI,
            n=3,
            extra_headers={"X-Conversation-Id": name},
        )
        assert [choice.message.content for choice in answer.choices] == ["candidate"] * 3
        arm = desk.controller.status()["arms"]["candidate"]
        assert arm["answers"] == 1
        assert answer.usage is not None
        assert arm["mean_cost"] == answer.usage.completion_tokens + 3 * answer.usage.prompt_tokens
        await desk.ask(name)  # asked again, as a client does that got no answer
        assert answers_of(desk, "candidate") == 1


# --- a candidate that fails ----------------------------------------------------


async def test_where_the_candidate_fails_the_baseline_answers_and_the_failure_counts(tmp_path: Path) -> None:
    for error in (RuntimeError("a bug"), BackendError("no memory left")):
        async with served(tmp_path, candidate=lambda request, error=error: error) as desk:
            before = answers_of(desk, "candidate")
            name = await desk.id_of("candidate", start=100 * before)
            assert await desk.ask(name) == "baseline"
            assert "".join(await desk.stream(name)) == "baseline"
            assert desk.controller.status()["violations"] == {"failure": before + 1}
    async with served(tmp_path, candidate=ScriptedBackend(["x"], delay=1000), patience=0.05) as desk:
        name = await desk.id_of("candidate", start=500)
        assert await desk.ask(name) == "baseline"
        rows = sqlite3.connect(tmp_path / "deployments.sqlite").execute("SELECT violations FROM answers")
        whys = [json.loads(text)[0][1] for (text,) in rows]
        assert whys == ["RuntimeError: a bug", "BackendError: no memory left", "no answer within 0.05 s"]


class BreaksOff(ScriptedBackend):
    async def generate(
        self, prompt_ids: Any, params: Any, *, session: Any = None, on_text: Any = None
    ) -> Any:
        if on_text is not None:
            on_text("It is ")
            await asyncio.sleep(0.2)  # longer than its patience, which is for the first words
        raise BackendError("no memory left")


class TellsLate(ScriptedBackend):
    """A worker's thread that tells a piece after the turn was cancelled."""

    async def generate(
        self, prompt_ids: Any, params: Any, *, session: Any = None, on_text: Any = None
    ) -> Any:
        try:
            await asyncio.sleep(1000)
        finally:
            on_text("late ")
            asyncio.get_running_loop().call_soon(on_text, "later ")


async def test_what_a_candidate_says_after_its_time_is_not_mixed_into_the_baseline_s_answer(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, candidate=TellsLate([]), patience=0.05) as desk:
        assert "".join(await desk.stream(await desk.id_of("candidate"))) == "baseline"
        assert desk.controller.status()["violations"] == {"failure": 1}


async def test_a_stream_whose_words_are_sent_ends_with_the_error(tmp_path: Path) -> None:
    async with served(tmp_path, candidate=BreaksOff([]), patience=0.1) as desk:
        name = await desk.id_of("candidate")
        with pytest.raises(openai.APIError, match="no memory left"):
            await desk.stream(name)
        assert desk.controller.status()["violations"] == {"failure": 1}
        assert await desk.ask(name) == "baseline"


async def test_a_request_counts_against_the_candidate_only_if_the_baseline_can_serve_it(
    tmp_path: Path,
) -> None:
    small = ScriptedBackend(lambda request: "candidate", context_length=100)
    large = ScriptedBackend(lambda request: "baseline", context_length=300)
    async with served(tmp_path, large, small) as desk:
        name = await desk.id_of("candidate")
        with pytest.raises(openai.BadRequestError, match="the model's context 300"):
            await desk.ask(name, messages=[{"role": "user", "content": "x" * 400}])
        assert answers_of(desk, "candidate") == 0
        assert await desk.ask(name, messages=[{"role": "user", "content": "x" * 200}]) == "baseline"
        assert desk.controller.status()["violations"] == {"failure": 1}
    async with served(
        tmp_path, lambda request: BackendError("gone"), lambda request: BackendError("me too")
    ) as it:
        with pytest.raises(openai.InternalServerError, match="gone"):
            await it.ask(await it.id_of("candidate", start=100))
        with pytest.raises(openai.InternalServerError, match="gone"):
            await it.ask(await it.id_of("baseline", start=100))
        arms = it.controller.status()["arms"]
        assert (arms["candidate"]["unsafe_answers"], arms["baseline"]["unsafe_answers"]) == (2, 1)


async def test_a_client_that_leaves_a_late_answer_saw_a_late_answer(tmp_path: Path) -> None:
    candidate = ScriptedBackend(["x"] * 9, delay=1000)
    async with served(tmp_path, candidate=candidate, plan={**QUICK, "guards": {"latency": 0.2}}) as desk:
        for timeout, wanted in ((0.05, {}), (1.0, {"latency": 1, "failure": 0})):
            with pytest.raises(openai.APITimeoutError):
                await desk.ask(await desk.id_of("candidate"), timeout=timeout)
            await asyncio.sleep(0.1)
            if wanted:
                await until(lambda: answers_of(desk, "candidate") == 1)
            violations = desk.controller.status()["violations"]
            assert {name: violations.get(name, 0) for name in wanted} == wanted
            assert bool(violations) is bool(wanted)


class NoPromises:
    name = "promise"

    def check(self, action: Answer, state: Any) -> Violation | None:
        assert action.message is not None
        return Violation(self.name, "it promises") if "promise" in action.message.content else None


async def test_guards_of_one_s_own_read_the_words_and_costs_may_be_money(tmp_path: Path) -> None:
    plan = {**QUICK, "guards": {"cost": 0.5}}
    prices = {"baseline": 0.001, "candidate": 0.1}
    async with served(
        tmp_path,
        candidate=lambda request: "I promise",
        plan=plan,
        checks=[NoPromises()],
        cost=lambda arm, answer: prices[arm] * answer.completion_tokens,
    ) as desk:
        assert await desk.ask(await desk.id_of("candidate")) == "I promise"
        assert await desk.ask(await desk.id_of("baseline")) == "baseline"
        status = desk.controller.status()
        assert status["violations"] == {"promise": 1, "cost": 1}
        assert status["arms"]["candidate"]["mean_cost"] == pytest.approx(1.0)
        assert status["arms"]["baseline"]["unsafe_answers"] == 0


async def test_a_cost_that_cannot_be_computed_loses_no_answer(tmp_path: Path) -> None:
    def broken(arm: str, answer: Any) -> float:
        raise KeyError(arm)

    async with served(tmp_path, plan={**QUICK, "guards": {"cost": 0.5}}, cost=broken) as desk:
        assert await desk.ask(await desk.id_of("candidate")) == "candidate"
        assert desk.controller.status()["violations"] == {"cost": 1}


# --- outcomes ------------------------------------------------------------------


async def test_outcomes_are_reported_over_http(tmp_path: Path) -> None:
    async with (
        served(tmp_path, server={"api_keys": ["secret"]}) as desk,
        aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http,
    ):
        url = f"{desk.server.url}/outcomes"
        async with http.get(desk.server.url.removesuffix("/v1") + "/openapi.json") as page:
            document = await page.json()
        operation = document["paths"]["/v1/outcomes"]["post"]
        schema = document["components"]["schemas"]["OutcomeBody"]
        assert await desk.ask("talk") in ("baseline", "candidate")
        for body, status, wanted in [
            ({"conversation": "talk", "success": True, "reward": -2.5}, 200, "counted"),
            ({"conversation": "talk", "success": 0}, 200, "again"),
            ({"conversation": "unknown", "success": 0.5}, 404, "conversation_not_found"),
            ({"conversation": "talk", "success": 1.5}, 400, "invalid_request"),
            ({"conversation": "talk", "success": "yes"}, 400, "invalid_request"),
            ({"conversation": "talk", "success": None}, 400, "invalid_request"),
            ({"conversation": "", "success": True}, 400, "invalid_request"),
            ({"conversation": "talk"}, 400, "invalid_request"),
            ({"conversation": "talk", "success": True, "extra": 1}, 400, "invalid_request"),
            ([], 400, "invalid_request"),
        ]:
            async with http.post(url, json=body) as answer:
                said = await answer.json()
                assert answer.status == status, said
                content = operation["responses"][str(status)]["content"]["application/json"]
                jsonschema.validate(said, content["schema"])
                assert wanted in (said.get("report"), said.get("error", {}).get("code"))
                is_valid = jsonschema.Draft202012Validator(schema).is_valid(body)
                assert is_valid is (status in (200, 404)), body
        for lone in ('{"conversation": "\\ud800", "success": 1}', '{"conversation": "talk", "success": NaN}'):
            async with http.post(url, data=lone, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 400, await answer.text()
        async with http.post(url, data="{}") as answer:
            assert answer.status == 415
        async with aiohttp.ClientSession() as stranger, stranger.post(url, json={}) as answer:
            assert answer.status == 401
        evidence = desk.controller.ledger.evidence
        assert (evidence.num_outcomes, evidence.baseline_sum + evidence.candidate_sum) == (1, 1.0)
        assert await desk.server.drain(1) == 0
        assert await desk.outcome("talk", False) == "again"  # a server that shuts down loses none


async def test_without_a_deployment_there_are_no_outcomes() -> None:
    async with (
        MultiTurnAgent(backend=ScriptedBackend(["Hello!"])) as agent,
        AgentServer(agent) as server,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(f"{server.url}/outcomes", json={}) as answer:
            assert answer.status == 404
        async with http.get(server.url.removesuffix("/v1") + "/openapi.json") as page:
            assert "/v1/outcomes" not in (await page.json())["paths"]


# --- the journal ---------------------------------------------------------------


async def test_while_the_journal_cannot_be_written_the_baseline_answers(tmp_path: Path) -> None:
    async with served(tmp_path) as desk:
        name = await desk.id_of("candidate")
        assert await desk.ask(name) == "candidate"
        desk.controller._journal.close()
        assert await desk.ask(name) == "baseline"
        assert "".join(await desk.stream(name)) == "baseline"
        with pytest.raises(openai.InternalServerError, match="cannot be used") as caught:
            await desk.outcome(name, True)
        assert caught.value.status_code == 503  # so that the client reports it again


async def test_a_restart_goes_on_and_lets_nobody_in_again_who_was_rolled_back(tmp_path: Path) -> None:
    async with served(tmp_path) as desk:
        says = {f"c{n}": await desk.ask(f"c{n}") for n in range(10)}
        with pytest.raises(ConfigurationError, match="deployment 0001 has another plan, and plans stay"):
            Deployed(*desk.deployed.agents, DeploymentPlan(margin=0.1), desk.controller._journal)
    async with served(tmp_path) as desk:
        assert {name: await desk.ask(name) for name in says} == says
        desk.controller.roll_back(who="ann", why="enough")
    async with served(tmp_path) as desk:
        assert {await desk.ask(name) for name in says} == {"baseline"}
        assert len(desk.controller._journal.records()) == 1


async def test_two_prompts_of_one_model_need_names(tmp_path: Path) -> None:
    def agent(prompt: str) -> MultiTurnAgent:
        config = AgentConfig(model_name="model", system_prompt=prompt)
        return MultiTurnAgent(config, backend=ScriptedBackend(["ok"]))

    with Journal(tmp_path / "deployments.sqlite") as journal:
        async with agent("Be brief.") as old, agent("Be kind.") as new:
            with pytest.raises(ConfigurationError, match="are both 'model'"):
                Deployed(old, new, None, journal)
            with pytest.raises(ConfigurationError, match="baseline and candidate are the same agent"):
                Deployed(old, old, None, journal)
            deployed = Deployed(old, new, None, journal, names=("brief", "kind"))
            assert (deployed.controller.record.baseline, deployed.controller.record.candidate) == (
                "brief",
                "kind",
            )
            await deployed.close()


async def test_who_asks_after_the_end_is_told_so(tmp_path: Path) -> None:
    async with served(tmp_path) as desk:
        await desk.deployed.close()
        with pytest.raises(JournalError, match="this deployment was closed"):
            await asyncio.wait_for(desk.deployed.status(), 5)


@pytest.mark.parametrize(("share", "gathers"), [(1e-9, True), (1e9, False)])
async def test_calls_gather_until_writing_has_no_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, gathers: bool
) -> None:
    monkeypatch.setattr(conversations, "_SHARE", share)
    async with served(tmp_path) as desk:
        begun = time.monotonic()
        for _ in range(10):
            await desk.deployed.status()
        assert (time.monotonic() - begun >= 0.4) is gathers  # nine waits of at most 50 ms
        batch, transactions = desk.deployed.controller.batch, 0

        def counted() -> AbstractContextManager[None]:
            nonlocal transactions
            transactions += 1
            return batch()

        monkeypatch.setattr(desk.deployed.controller, "batch", counted)
        await asyncio.gather(*(desk.deployed.status() for _ in range(30)))
    assert transactions <= 2


def test_calls_of_a_batch_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    from stateset_agents.deployment.controller import start_deployment

    path = tmp_path / "deployments.sqlite"
    with Journal(path) as journal, Journal(path) as other:
        start_deployment(journal, candidate="new", baseline="old", plan=DeploymentPlan(**QUICK), who="ann")
        controller, reader = DeploymentController(journal, "0001"), DeploymentController(other, "0001")

        def breaks() -> None:
            with controller.batch():
                controller.assign("lost")
                raise OSError("the disk is full")

        with pytest.raises(OSError, match="full"):
            breaks()
        assert controller.ledger.assigned.total() == 0
        with controller.batch():
            for number in range(3):
                controller.assign(f"c{number}")
                controller.report_outcome(f"c{number}", success=1.0)
            with pytest.raises(ConfigurationError, match="'unknown' was never assigned"):
                controller.report_outcome("unknown", success=1.0)
            with pytest.raises(ConfigurationError, match="a move by hand is no part of a batch"):
                controller.roll_back(who="ann", why="enough")
            assert reader.status()["arms"]["baseline"]["outcomes"] == 0
        assert reader.status()["evidence"]["outcomes"] == 3
        assert controller.hashes == DeploymentController(journal, "0001").hashes
        whole = controller.ledger
        with pytest.raises(ConfigurationError, match="never assigned"):
            controller.report_outcome("unknown", success=1.0)
        assert controller.ledger is whole  # nothing is read again for a mistake of the caller
