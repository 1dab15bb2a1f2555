"""`CodeReward`: which program of a reply runs, which cases score, and what leaves a conversation unscored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from builders import trajectory

from stateset_agents.core.scoring.base import RewardResult, score_trajectory
from stateset_agents.rewards.code import CodeReward, create_code_reward, last_program, read_tests
from stateset_agents.sandbox import Limits, Sandbox
from stateset_agents.training.components import make_reward
from stateset_agents.types.errors import ConfigurationError, RewardFailure

ADD: Mapping[str, Any] = {
    "entry_point": "add",
    "cases": [
        {"arguments": [1, 1], "expected": 2, "visible": True},
        {"arguments": [1, 2], "expected": 3},
        {"arguments": [-1, 1], "expected": 0},
        {"arguments": ["a", "b"], "expected": "ab"},
        {"arguments": [[1], [2]], "expected": [1, 2]},
    ],
}
RIGHT = "def add(a, b): return a + b"
HALF = "def add(a, b): return int(a) + int(b)"


async def result(program: str, tests: object = ADD, **settings: Any) -> RewardResult:
    talk = trajectory("Write add(a, b).", f"```python\n{program}\n```", context={"tests": tests})
    return await create_code_reward(**settings).score(talk)


async def test_the_share_of_hidden_cases_that_pass_is_the_score() -> None:
    assert (await result(RIGHT)).score == 1.0
    assert (await result(HALF)).score == 0.5
    assert (await result("def add(a, b): return 2")).score == 0.0  # what the visible case expects
    assert (await result(RIGHT)).breakdown == {"passed": 1.0, "ran": 1.0}


async def test_all_or_nothing_pays_for_all_cases_alone() -> None:
    assert (await result(RIGHT, all_or_nothing=True)).score == 1.0
    half = await result(HALF, all_or_nothing=True)
    assert (half.score, half.breakdown["passed"]) == (0.0, 0.5)


async def test_floats_pass_within_the_tolerance() -> None:
    tests = {"entry_point": "f", "cases": [{"arguments": [], "expected": 0.3}]}
    program = "def f(): return 0.1 + 0.2"
    assert (await result(program, tests)).score == 0.0
    assert (await result(program, tests, tolerance=1e-9)).score == 1.0


async def test_a_program_that_reads_stdin_is_compared_by_lines() -> None:
    tests = {
        "cases": [{"stdin": "1 2\n", "expected": "3\n"}, {"stdin": "a", "expected": "x  \ny"}],
    }
    assert (await result("print(sum(map(int, input().split())))", tests)).score == 0.5
    assert (await result("print('x')\nprint('y  ')\nprint()", tests)).score == 0.5
    assert (await result("print('x y')", tests)).score == 0.0


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        ("def add(a, b):\n    while True: pass", {"cpu_seconds": 1}),
        ("def add(a, b): return len(bytearray(100_000_000)) and a + b", {"memory_mib": 80}),
    ],
    ids=["processor time", "memory"],
)
async def test_a_program_beyond_its_limits_has_failed(program: str, settings: dict[str, Any]) -> None:
    assert (await result(program, **settings)).score == 0.0


async def test_a_program_within_its_limits_passes() -> None:
    assert (await result("def add(a, b): return len(bytearray(100_000_000)) and a + b")).score == 1.0
    slow = "import time\nend = time.process_time() + 1.2\nwhile time.process_time() < end: pass\n" + RIGHT
    assert (await result(slow, cpu_seconds=3)).score == 1.0


@pytest.mark.parametrize(
    "reply", ["I cannot.", "", "```python\ndef add(a, b): return a + b", "```json\n{}\n```"]
)
async def test_a_reply_without_a_program_scores_nothing(reply: str) -> None:
    talk = trajectory("Write add(a, b).", reply, context={"tests": ADD})
    assert (await create_code_reward().score(talk)).score == 0.0


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```py\nx = 2\ny = 3\n```\nc", "x = 2\ny = 3"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\n```sh\nrm x\n```", "x = 1"),
        ("  ```Python3\n  x = 1\n  ```", "  x = 1"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1"),
        ("```python\nx = 2", None),
        ("```sh\nls\n```", None),
        ("   ", None),
        ("x" * 100_001, None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(reply: str, program: str | None) -> None:
    assert last_program(reply) == program


async def test_a_scenario_without_tests_is_not_scored() -> None:
    assert (await create_code_reward().score(trajectory("Hello.", "Hi."))).score is None


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("add", "must be a mapping"),
        ({"cases": []}, "has no hidden case"),
        ({"cases": [{"stdin": "", "expected": "", "visible": True}]}, "has no hidden case"),
        ({"cases": 3}, "needs a list of cases"),
        ({"case": [], "cases": []}, "has no key 'case'"),
        ({"entry_point": "a b", "cases": []}, "needs a function's name"),
        ({"cases": [{"arguments": [1], "expected": 1}]}, "needs cases with stdin and expected"),
        ({"entry_point": "f", "cases": [{"stdin": "", "expected": ""}]}, "needs cases with arguments"),
        ({"entry_point": "f", "cases": [{"arguments": 3, "expected": 1}]}, "needs a list of arguments"),
        ({"entry_point": "f", "cases": [{"arguments": [], "expected": object()}]}, "got object"),
        ({"cases": [{"stdin": "", "expected": 3}]}, "compares texts"),
    ],
)
def test_tests_that_cannot_grade_are_refused(tests: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_tests(tests)


async def test_a_machine_too_busy_leaves_the_conversation_unscored_and_may_be_asked_again() -> None:
    program = "def add(a, b):\n    while True: pass"
    reward = CodeReward(Sandbox(limits=Limits(cpu_seconds=60, wall_seconds=0.5)))
    talk = trajectory("Write add(a, b).", f"```python\n{program}\n```", context={"tests": ADD})
    with pytest.raises(RewardFailure, match="the machine was too busy") as failure:
        await score_trajectory(reward, talk)
    assert not isinstance(failure.value.__cause__, RewardFailure)  # so the engine asks again


def test_the_reward_is_made_by_its_name_and_its_settings_are_checked() -> None:
    reward = make_reward({"name": "code", "sandbox": "auto", "cpu_seconds": 2, "max_concurrent": 3})
    assert isinstance(reward, CodeReward)
    assert reward.local
    assert not make_reward({"name": "code", "sandbox": "http://127.0.0.1:1"}).local
    for spec, message in (
        ({"sandbox": "docker"}, "sandbox must be one of auto, landlock, bubblewrap, namespaces, unsafe"),
        ({"cpu_seconds": 0}, "cpu_seconds must be a whole number of at least 1, got 0"),
        ({"memory_mib": 8}, "memory_mib must be at least 64, got 8"),
        ({"wall_seconds": -1}, "wall_seconds must be a positive number"),
        ({"max_concurrent": 0}, "max_concurrent must be a whole number of at least 1"),
        ({"tolerance": 1}, "tolerance must be a number from 0 to below 1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make_reward({"name": "code", **spec})
