"""Pages of a run as large as the demo's open at once. `make test-browser` runs this."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest
from chromium import Chromium
from report_runs import FAMILIES, metrics, side

from stateset_agents.cli.pages import write_pages
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.messages import Completion, Message, ToolCall, VersionSpan
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Span, TokenLogprobs, Trajectory, TrajectoryGroup, Turn

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

STEPS, GROUPS, MEMBERS, HELD_OUT = 110, 8, 8, 600
CONVERSATIONS = STEPS * GROUPS * MEMBERS + 2 * HELD_OUT
"""8,240: before, in and after the demo's training."""
MOST_BYTES, MOST_CPU_SECONDS = 4_000_000, 3.0
PAGES = ("report", "lab", "formation", "advantages")

_DRAW = random.Random(0)
WORDS = {
    id: " " + "".join(_DRAW.choices("abcdefghijklmnoprstuvw", k=_DRAW.randint(1, 5))) for id in range(500)
}

PHRASES = {length: [tuple(_DRAW.choices(range(500), k=length)) for _ in range(40)] for length in (8, 10, 15)}
"""Token ids of what is said again and again, as a desk does."""


def phrase(length: int, draw: random.Random) -> tuple[int, ...]:
    return draw.choice(PHRASES[length])


def said(ids: tuple[int, ...]) -> str:
    return "".join(WORDS[id] for id in ids)


def conversation(number: int, member: int, version: int, draw: random.Random) -> Trajectory:
    """As the demo's on average: 75 tokens, 30 of them sampled in three turns, eight messages."""
    call = random.Random(number)  # what all members hear; each says one of three things
    turns: list[Turn] = []
    row: tuple[int, ...] = ()
    for place in range(3):
        prompt = phrase(15, call)
        (ids,) = draw.choices([phrase(10, call) for _ in range(3)], weights=(18, 1, 1))
        policy = random.Random(f"{version} {row} {prompt} {ids}")  # after the same words it thinks the same
        calls = (ToolCall(name="get_order", arguments={"order_id": f"K{number}"}, id="1"),)
        completion = Completion(
            message=Message(role="assistant", content=said(ids), tool_calls=calls if place == 0 else ()),
            prompt_ids=(*row, *prompt),
            token_ids=ids,
            logprobs=tuple(-min(5.0, math.exp(policy.gauss(-8.3, 3.2))) for _ in ids),  # half above -.0003
            finish_reason="stop",
            version_spans=(VersionSpan(version, 0, len(ids)),),
        )
        feedback = Message(role="user", content=said(phrase(8, call)))
        if place == 0:
            feedback = Message(role="tool", content=f'{{"id": "K{number}"}}', tool_call_id="1")
        turns.append(Turn(prompt_ids=prompt, completion=completion, feedback=(feedback,), reward=-0.01))
        row = (*row, *prompt, *ids)
    success = draw.random() < 0.5
    change = {
        "table": "orders",
        "key": f"K{number}",
        "before": {"city": "Rome"},
        "after": {"city": said(ids[:2])},
    }
    begin = 100.0 + version
    return Trajectory(
        scenario=Scenario(
            id=f"call-{number}",
            family=FAMILIES[number % 4],
            split="train" if version else "test",
            opening=said(phrase(10, call)),
            context={"order": f"K{number}", "policy": 2 * said(phrase(15, call))},
        ),
        member=member,
        seed=draw.getrandbits(31),
        opening=(
            Message(role="system", content="You work for the retail desk. " * 9),
            Message(role="user", content=said(phrase(15, call))),
        ),
        turns=tuple(turns),
        spans=(Span("environment", begin, begin + 0.1), Span("model", begin + 0.1, begin + draw.random())),
        outcome=Outcome(reward=float(success), success=success, changes=(change,)),
        reward=round(success - 0.1 * draw.random(), 4),
        breakdown={"told": float(success), "repeats": 0.0},
    )


def moved(trajectory: Trajectory, draw: random.Random) -> TokenLogprobs:
    """Near the policy that sampled."""
    old = tuple(value for turn in trajectory.turns for value in turn.completion.logprobs)
    return TokenLogprobs(old=old, learner=tuple(value * math.exp(draw.gauss(0, 0.3)) for value in old))


def played(
    keys: list[str], members: int, first: int, version: int, draw: random.Random
) -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            key=key,
            trajectories=tuple(conversation(first + n, member, version, draw) for member in range(members)),
        )
        for n, key in enumerate(keys)
    ]


def demo_run(root: Path) -> RunFolder:
    """Everything that the demo's training leaves, with the learner's log-probs."""
    folder, draw = RunFolder.create(root, "demo"), random.Random(1)
    held_out = [f"test/{number}" for number in range(HELD_OUT)]
    with JsonlTracker(folder, WORDS.__getitem__) as tracker:
        tracker.log_rollouts(0, played(held_out, 1, 0, 0, draw), stage="before")
        for step in range(1, STEPS + 1):
            groups = played([f"{step}/{n}" for n in range(GROUPS)], MEMBERS, GROUPS * step, step, draw)
            advantages = [[[round(draw.gauss(0, 1), 6)] * 30 for _ in range(MEMBERS)] for _ in groups]
            logprobs = [[moved(one, draw) for one in group.trajectories] for group in groups]
            tracker.log_rollouts(step, groups, advantages, logprobs)
            tracker.log_metrics(step, metrics(step))
        tracker.log_rollouts(STEPS, played(held_out, 1, 0, 0, draw), stage="after")
    training = {"seed": 3, "beta": 0.01, "num_iterations": 2, "log_learner_logprobs": True}
    folder.write_config({"agent": {"model_name": "embedded:desk"}, "training": training})
    measured = {"before": side(132, 0.44), "after": side(561, 0.952)}
    folder.write_summary({"seed": 3, "steps": STEPS, "ended": "finished", "train_seconds": 95.2, **measured})
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = demo_run(tmp_path_factory.mktemp("runs"))
    with folder.rollouts.open("rb") as lines:
        assert sum(1 for _ in lines) == CONVERSATIONS + 1  # and the header
    assert folder.rollouts.stat().st_size > 30e6  # the demo's has 36 million bytes
    return {path.stem: path for path in (write_report(folder.path), *write_pages(folder.path))}


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_of_the_demo_s_size_is_small_and_soon_ready(
    browser: Chromium, pages: dict[str, Path], name: str
) -> None:
    assert len(await asyncio.to_thread(pages[name].read_bytes)) <= MOST_BYTES
    is_ready = (
        "!!document.querySelector('.units li')"  # its list of conversations
        if name == "report"
        else "'ready' in document.documentElement.dataset"
    )
    async with browser.tab() as tab:
        await tab.look(1280, 900)
        # of the thread, so that other work on the machine does not count
        await tab.call("Performance.enable", timeDomain="threadTicks")
        await tab.open(pages[name].as_uri())
        await tab.until(is_ready)
        spent = {one["name"]: one["value"] for one in (await tab.call("Performance.getMetrics"))["metrics"]}
        # the page's thread, and all threads of its process
        assert 0 < spent["TaskDuration"] <= spent["ProcessTime"] <= MOST_CPU_SECONDS
        assert tab.complaints == []
