"""Whole deployments over HTTP, fifty clients at a time: all are answered, and the better agent wins."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.serving.limits import Limits
from stateset_agents.serving.server import AgentServer

PLAN: dict[str, Any] = {
    "stages": (0.5,),
    "shadow_answers": 10,
    "hold_seconds": 0,
    "hold_outcomes": 10**6,
    "salt": "of the test",
}
AT_ONCE = 50


@dataclass
class Talks:
    """What the clients saw: of each conversation who answered its two turns."""

    replies: list[tuple[str, str]]
    mode: str
    why: str
    status: dict[str, Any]

    @property
    def is_answered(self) -> bool:
        return all(reply in ("baseline", "candidate") for talk in self.replies for reply in talk)


async def talks(
    folder: Path,
    candidate: ScriptedBackend,
    rates: dict[str, float],
    *,
    most: int,
    plan: dict[str, Any] = PLAN,
) -> Talks:
    """Conversations of two turns until the deployment is decided; each says how it ended."""
    dice = random.Random(0)
    replies: list[tuple[str, str]] = []
    number = iter(range(most))
    baseline = ScriptedBackend(lambda request: "baseline")
    with Journal(folder / "deployments.sqlite") as journal:
        async with (
            MultiTurnAgent(AgentConfig(model_name="old"), backend=baseline) as old,
            MultiTurnAgent(AgentConfig(model_name="new"), backend=candidate) as new,
            Deployed(old, new, DeploymentPlan(**plan), journal, max_shadows=AT_ONCE) as deployed,
            AgentServer(deployed, limits=Limits(max_running_per_client=AT_ONCE)) as server,
            openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        ):

            async def turn(messages: list[Any], name: str) -> str:
                answer = await client.chat.completions.create(model="old", messages=messages, user=name)
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
                return text

            async def person() -> None:
                for n in number:
                    messages: list[Any] = [{"role": "user", "content": "hi"}]
                    first, second = await turn(messages, f"c{n}"), await turn(messages, f"c{n}")
                    replies.append((first, second))
                    body = {"conversation": f"c{n}", "success": dice.random() < rates[first]}
                    await client.post("/outcomes", body=body, cast_to=object)
                    if deployed.controller.state.mode in ("full", "rolled_back"):
                        return

            await asyncio.gather(*(person() for _ in range(AT_ONCE)))
            status = await deployed.status()
    return Talks(replies, status["mode"], status["why"], status)


def says(reply: str | Exception) -> Callable[[ScriptedRequest], str | Exception]:
    return lambda request: reply


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("rates", "most", "mode", "why"),
    [
        pytest.param({"baseline": 0.3, "candidate": 0.9}, 400, "full", "success is not", id="better"),
        pytest.param({"baseline": 0.8, "candidate": 0.8}, 120, "gradual", "shadow is over", id="equal"),
        pytest.param({"baseline": 0.9, "candidate": 0.3}, 400, "rolled_back", "success is", id="much worse"),
        pytest.param(
            {"baseline": 0.8, "candidate": 0.7},
            8000,
            "rolled_back",
            "success is lower",
            marks=pytest.mark.long,
            id="ten points worse",
        ),
    ],
)
async def test_outcomes_decide_and_every_request_is_answered(
    tmp_path: Path, rates: dict[str, float], most: int, mode: str, why: str
) -> None:
    found = await talks(tmp_path, ScriptedBackend(says("candidate")), rates, most=most)
    assert found.is_answered
    assert (found.mode, found.why.startswith(why)) == (mode, True)
    kinds = Counter(found.replies)
    assert kinds["candidate", "candidate"] > 20
    assert kinds["baseline", "candidate"] == 0  # nobody is given to the candidate half-way
    assert (kinds["candidate", "baseline"] > 0) <= (mode == "rolled_back")


async def test_a_candidate_that_crashes_is_rolled_back_and_no_reply_is_lost(tmp_path: Path) -> None:
    candidate = ScriptedBackend(says(RuntimeError("out of memory")))
    plan = {**PLAN, "shadow_answers": 0}
    found = await talks(tmp_path, candidate, {"baseline": 0.8}, most=600, plan=plan)
    assert (found.mode, found.is_answered) == ("rolled_back", True)
    assert set(found.replies) == {("baseline", "baseline")}
    assert "rate: surely more than 0.1 of the answers are unsafe" in found.why
    arm = found.status["arms"]["candidate"]
    assert 10 <= arm["unsafe_answers"] == arm["answers"] <= 10 + 2 * AT_ONCE


@pytest.mark.long
async def test_a_candidate_that_is_ten_times_slower_is_rolled_back(tmp_path: Path) -> None:
    candidate = ScriptedBackend(says("candidate"), delay=0.3)
    plan = {**PLAN, "shadow_answers": 0, "guards": {"latency": 0.25}}
    found = await talks(tmp_path, candidate, {"baseline": 0.8, "candidate": 0.8}, most=600, plan=plan)
    assert (found.mode, found.is_answered) == ("rolled_back", True)
    assert found.status["violations"]["latency"] >= 10
    assert "candidate" in {reply for talk in found.replies for reply in talk}  # late, and sent


@pytest.mark.long
async def test_a_candidate_that_is_slower_in_shadow_never_answers(tmp_path: Path) -> None:
    candidate = ScriptedBackend(says("candidate"), delay=0.3)
    plan = {**PLAN, "shadow_answers": 100, "guards": {"latency": 0.25}}
    found = await talks(tmp_path, candidate, {"baseline": 0.8}, most=200, plan=plan)
    assert (found.mode, set(found.replies)) == ("rolled_back", {("baseline", "baseline")})
