"""Families of problems: what they ask, how they are solved and judged, and what they never pay."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository_paths import ROOT

from stateset_agents.answers.agreement import check_truth
from stateset_agents.core.chat.replies.parsing import HERMES
from stateset_agents.environments.problems import (
    ArithmeticProblems,
    CountdownProblems,
    EquationProblems,
    ProblemEnvironment,
    ProblemFiles,
)
from stateset_agents.environments.problems.arithmetic import equation_steps, reaches, steps_of
from stateset_agents.environments.problems.environment import (
    ATTACKS,
    HABITS,
    Solver,
    Trace,
    reply_of,
    split_of,
)
from stateset_agents.evaluation.audit import audit, degenerate_agents_of
from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of
from stateset_agents.reasoning import num_steps, read_reasoned, split_reasoning
from stateset_agents.rewards import create_reasoning_reward
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.trajectory import Outcome

FAMILIES = {"arithmetic": ArithmeticProblems, "equations": EquationProblems, "countdown": CountdownProblems}
SPLITS = ("train", "validation", "test")
GRADE = "examples/grpo_math/data/math_problems.json"


def made(name: str, **settings: object) -> ProblemEnvironment:
    environment = make_environment({"name": name, **settings})
    assert isinstance(environment, ProblemEnvironment)
    return environment


async def verdict(environment: ProblemEnvironment, scenario: Scenario, reply: str | Message) -> Outcome:
    conversation = await environment.start(scenario, seed=0)
    message = Message(role="assistant", content=reply) if isinstance(reply, str) else reply
    observation = await conversation.step(message)
    assert observation.terminated
    assert not observation.truncated
    return await conversation.outcome()


# ----------------------------------------------------------------------------- every family


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_problem_stands_in_two_splits_whatever_the_seed(name: str) -> None:
    texts = {split: {s.opening for s in made(name).scenarios(split)} for split in SPLITS}
    other = {split: {s.opening for s in made(name, seed=1).scenarios(split)} for split in SPLITS}
    for split in ("validation", "test"):
        assert texts[split] == other[split]
        assert not texts[split] & (texts["train"] | other["train"])
    assert not texts["validation"] & texts["test"]
    assert texts["train"] != other["train"]
    assert len(texts["train"]) == 3000


SHIPPED = (
    {"name": "problems", "path": str(ROOT / GRADE)},
    *({"name": name} for name in ("arithmetic", "equations", "countdown")),
)


@pytest.mark.first(3)
@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec["name"])
def test_every_answer_of_a_shipped_problem_is_right_by_its_own_verdict(spec: dict) -> None:
    environment = made(**spec)
    for split in SPLITS:
        for scenario in environment.scenarios(split):
            assert environment.judge(scenario, environment.solve(scenario).answer) == 1, scenario
            if "answer" in scenario.context:
                check_truth(scenario.context["answer"])


def test_a_problem_whose_own_answer_would_be_wrong_is_refused_when_it_is_read() -> None:
    class Powers(ArithmeticProblems):
        def make(self, split: Split) -> list[Scenario]:
            return [Scenario(id="p", opening="2^{10}?", context={"answer": "2^{10}"}, split=split)]

    with pytest.raises(
        ConfigurationError, match=r"the answer of 'p': its own answer '2\^\{10\}' would be wrong"
    ):
        Powers().scenarios("train")


@pytest.mark.parametrize("name", FAMILIES)
def test_difficulties_are_known_and_come_in_turn(name: str) -> None:
    for split in SPLITS:
        scenarios = made(name).scenarios(split)
        counts = Counter(scenario.context["difficulty"] for scenario in scenarios)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert {scenario.split for scenario in scenarios} == {split}
        assert len({scenario.id for scenario in scenarios}) == len(scenarios)
        assert len({(s.context["difficulty"], s.family) for s in scenarios}) == len(counts)


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_solver_is_right_and_thinks_longer_about_harder_problems(name: str) -> None:
    environment = made(name)
    scenarios = environment.scenarios("test")[:30]
    steps: dict[int, set[int]] = {}
    for scenario in scenarios:
        solver = environment.honest_agent(scenario)
        text = solver.text
        for reply in (Message(role="assistant", content=text), HERMES.read(text), solver.message):
            outcome = await verdict(environment, scenario, reply)
            assert outcome.success
            assert outcome.reward == 1.0
            assert outcome.breakdown["format"] == 1.0
        reasoned = split_reasoning(text)
        assert reasoned is not None
        steps.setdefault(scenario.context["difficulty"], set()).add(num_steps(reasoned.thinking))
    means = [sum(steps[level]) / len(steps[level]) for level in sorted(steps)]
    assert means == sorted(means)
    assert len(set(means)) == len(means)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
async def test_no_attack_is_right_anywhere(name: str) -> None:
    environment = made(name)
    played = await audit(environment, create_reasoning_reward(), environment.scenarios("test")[:12])
    assert played.policies.keys() == degenerate_agents_of(environment).keys() >= ATTACKS.keys()
    assert played.over(max_success=0.0, max_reward=0.1 + 1e-9) == []
    assert played.lost() == []
    assert played.honest is not None
    assert played.honest.mean_reward == pytest.approx(1.1)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_hedge_around_the_right_answer_is_wrong(name: str) -> None:
    environment = made(name)
    for scenario in environment.scenarios("validation")[:6]:
        answer = environment.solve(scenario).answer
        for hedge in (
            "{} or 1000",
            "1000 or {}",
            "{}, 1000",
            "not {}",
            "{} = {}",
            "{} {}",
            "{} + 0",
            "{} * 1",
            "{}!",
        ):
            text = f"<think> a </think> <answer> {hedge.replace('{}', answer)} </answer>"
            outcome = await verdict(environment, scenario, text)
            assert not outcome.success, (scenario.opening, hedge)
        for text in (answer, f"<answer> {answer}", f"<think> <answer> {answer} </answer> </think>"):
            assert not (await verdict(environment, scenario, text)).success


async def test_a_reply_ends_the_conversation_and_a_second_one_is_refused() -> None:
    environment = made("arithmetic")
    conversation = await environment.start(environment.scenarios("train")[0], seed=0)
    copy = conversation.fork()
    await conversation.step(Message(role="assistant", content="1"))
    with pytest.raises(ConfigurationError, match="this problem has its reply"):
        await conversation.step(Message(role="assistant", content="2"))
    assert copy.reply is None
    assert (await copy.outcome()).success is False  # cut before a reply
    await conversation.close()


async def test_without_tags_the_whole_reply_is_the_answer() -> None:
    environment = made("arithmetic", answer_in="reply", system_prompt="")
    scenario = environment.scenarios("train")[0]
    answer = str(scenario.context["answer"])
    assert len((await environment.start(scenario, 0)).opening) == 1
    assert (await verdict(environment, scenario, f" {answer} ")).success
    assert (await verdict(environment, scenario, HERMES.read(f"<think> so </think> {answer}"))).success
    assert not (await verdict(environment, scenario, f"<answer> {answer} </answer>")).success
    assert not (await verdict(environment, scenario, "")).success


# ----------------------------------------------------------------------------- habits


async def test_habits_come_in_their_shares_and_the_same_every_time() -> None:
    shares = {"careful": 0.3, "skips": 0.25, "empty": 0.25, "bare": 0.2}
    environment = made("arithmetic", habits=shares)
    found: Counter[str] = Counter()
    for scenario in environment.scenarios("train"):
        text = environment.honest_agent(scenario).text
        assert text == environment.honest_agent(scenario).text
        reasoned = split_reasoning(text)
        if reasoned is None:
            assert text == str(scenario.context["answer"])
            found["bare"] += 1
        elif not reasoned.thinking:
            found["empty"] += 1
        else:
            whole = num_steps(reasoned.thinking) == scenario.context["difficulty"]
            found["careful" if whole else "skips"] += 1
    assert {name: round(count / 3000, 1) for name, count in found.items()} == pytest.approx(shares, abs=0.06)


def test_each_habit_writes_its_reply() -> None:
    trace = Trace(steps=("1", "2", "3"), answer="3", between=" = ")
    texts = {habit: Solver(message=reply_of(trace, habit, random.Random(1))).text for habit in HABITS}
    assert texts["careful"] == "<think> 1 = 2 = 3 </think> <answer> 3 </answer>"
    assert texts["empty"] == "<think>  </think> <answer> 3 </answer>"
    assert texts["bare"] == "3"
    for seed in range(20):
        reasoned = read_reasoned(reply_of(trace, "skips", random.Random(seed)))
        assert reasoned is not None
        assert 1 <= num_steps(reasoned.thinking) < 3


async def test_demonstrations_are_the_solver_s_conversations() -> None:
    environment = made("arithmetic", habits={"careful": 1, "bare": 1})
    scenarios = environment.scenarios("train")[:40]
    shown = await demonstrate(environment, scenarios, scripted_agent_of(environment, "honest"))
    assert len(shown.chats) + shown.num_failed == 40
    assert 10 < shown.num_failed < 30  # bare answers have no tags
    roles = [message["role"] for message in shown.chats[0]["messages"]]
    assert roles == ["system", "user", "assistant"]
    replies = [chat["messages"][-1] for chat in shown.chats]
    assert all(" = " in reply["reasoning"] and "<answer>" in reply["content"] for reply in replies)


# ----------------------------------------------------------------------------- arithmetic


def test_products_come_first_and_each_step_does_one_operation() -> None:
    assert steps_of("2 + 3 * 4 - 1") == ["2 + 12 - 1", "14 - 1", "13"]
    assert steps_of("8 - 2 - 3") == ["6 - 3", "3"]
    assert steps_of("2 * 3 * 4") == ["6 * 4", "24"]


def test_arithmetic_stays_within_its_numbers() -> None:
    environment = made(
        "arithmetic", min_operations=1, max_operations=5, max_operand=7, max_value=30, num_train=500
    )
    for scenario in environment.scenarios("train"):
        expression = scenario.context["expression"]
        assert eval(expression) == scenario.context["answer"]  # of our own making
        assert len(re.findall(r"[-+*]", expression)) == scenario.context["difficulty"]
        numbers = map(int, re.findall(r"\d+", " ".join([expression, *steps_of(expression)])))
        assert all(0 <= number <= 30 for number in numbers)
        assert max(map(int, re.findall(r"\d+", expression))) <= 7
        assert "-" not in steps_of(expression)[-1]


def test_a_family_that_is_too_small_says_so() -> None:
    with pytest.raises(
        ConfigurationError, match="different train problems, 500 were asked for: ask for fewer"
    ):
        made("arithmetic", min_operations=1, max_operations=1, max_operand=3, num_train=500).scenarios(
            "train"
        )


# ----------------------------------------------------------------------------- equations


@given(st.integers(1, 9), st.integers(-50, 50).filter(bool), st.integers(0, 8), st.integers(0, 30))
def test_every_line_of_a_solved_equation_holds(a: int, b: int, c: int, x: int) -> None:
    if c >= a:
        return
    steps = equation_steps(a, b, c, a * x + b - c * x)
    for step in steps:
        left, right = step.split(" = ")
        for side in (left, right):
            assert re.fullmatch(r"[-\d x+/]+", side)
        value = [eval(re.sub(r"(\d) x", r"\1 * x", side), {"x": x}) for side in (left, right)]
        assert value[0] == value[1]
    assert steps[-1] == f"x = {x}"


def test_levels_of_equations_are_their_shapes() -> None:
    environment = made("equations", min_level=2, max_level=3)
    assert {scenario.family for scenario in environment.scenarios("test")} == {
        "a x + b = c",
        "a x + b = c x + d",
    }
    assert all(re.match(r"solve .* for x$", s.opening) for s in environment.scenarios("test"))


async def test_an_equation_s_answer_may_name_the_unknown() -> None:
    environment = made("equations")
    scenario = environment.scenarios("test")[0]
    assert (
        await verdict(environment, scenario, f"<answer> x = {scenario.context['answer']} </answer>")
    ).success


# ----------------------------------------------------------------------------- countdown


@pytest.mark.parametrize(
    ("answer", "right"),
    {
        "(7 - 3) * 5": True,
        r"$(7-3) \times 5$": True,
        "5 * (7 - 3)": True,
        "5(7-3)": True,
        "20": False,
        "20 = (7 - 3) * 5": False,
        "5 * 5 - 5": False,
        "3 + 5 + 7": False,
        "4 * 5": False,
        "10 * 2": False,
        "(7 - 3) * 5 + 0": False,
        "(7 - 3) * 5 / 1": False,
        "5 ^ 3": False,
        "5!": False,
        "35 - 15": False,
        "-(3 - 7) * 5": False,
        "7 * 3 / (5 - 5)": False,
        "": False,
        "__import__('os')": False,
        "9**9**9": False,
        "(" * 500 + "5" + ")" * 500: False,
    }.items(),
)
def test_an_expression_reaches_the_target_with_its_own_numbers(answer: str, right: bool) -> None:
    assert reaches(answer, [3, 5, 7], 20) is right


def test_a_number_given_twice_may_be_used_twice() -> None:
    assert reaches("5 * 5 - 5", [5, 5, 5], 20)
    assert not reaches("5 * 5 - 5", [5, 5], 20)
    assert reaches("7 / 2 * 4", [2, 4, 7], 14)


# ----------------------------------------------------------------------------- files


PROBLEMS = [
    {"problem": "What is 6 times 7?", "answer": 42, "split": "test", "family": "products", "difficulty": 1},
    {
        "question": "Both roots of x^2 = 9?",
        "answer": ["3", "-3"],
        "solution": "x = 3\nx = -3",
        "split": "test",
    },
    {"prompt": "What is half of 1?", "answer": "1/2", "id": "half", "split": "train"},
    {"problem": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"], "split": "validation"},
]


@pytest.mark.parametrize("shape", ["list", "mapping", "lines"])
async def test_problems_of_a_file_are_scenarios(tmp_path: Path, shape: str) -> None:
    path = tmp_path / ("problems.jsonl" if shape == "lines" else "problems.json")
    lines = "\n".join(map(json.dumps, PROBLEMS))
    path.write_text(
        {"list": json.dumps(PROBLEMS), "mapping": json.dumps({"problems": PROBLEMS}), "lines": lines}[shape]
    )
    environment = made("problems", path=str(path))
    first, second = environment.scenarios("test")
    assert (first.family, first.context) == ("products", {"answer": 42, "difficulty": 1})
    assert environment.scenarios("train")[0].id == "half"
    assert (await verdict(environment, first, "<answer> 42 </answer>")).success
    assert not (await verdict(environment, first, "<answer> 6 * 7 </answer>")).success
    assert (await verdict(environment, second, "<answer> -3 and 3 </answer>")).success
    assert environment.honest_agent(second).text == "<think> x = 3\nx = -3 </think> <answer> 3, -3 </answer>"
    [program] = environment.scenarios("validation")
    outcome = await verdict(environment, program, "<answer> def add(a, b): return a + b </answer>")
    assert (outcome.success, outcome.reward) == (None, None)  # the reward for code tells
    with pytest.raises(ConfigurationError, match="has tests and no solution"):
        environment.honest_agent(program)


def test_problems_without_a_split_get_one_by_their_text(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text(json.dumps([{"problem": f"What is {n} + 1?", "answer": n + 1} for n in range(500)]))
    environment = ProblemFiles(path)
    sizes = {split: len(environment.scenarios(split)) for split in SPLITS}
    assert sum(sizes.values()) == 500
    assert all(30 < sizes[split] < 70 for split in ("validation", "test"))
    assert all(split_of(scenario.opening) == "test" for scenario in environment.scenarios("test"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "wrong.json, line 1: not JSON"),
        ("[]", "has no problem: write a list of them"),
        ("[1]", "problem 1 of .* must be a mapping, got 1"),
        ('[{"answer": 1}]', "problem 1 of .* needs a text"),
        ('[{"problem": "a"}]', "needs either an answer or tests"),
        (
            '[{"problem": "a", "answer": 1, "tests": []}, {"problem": "a", "answer": 1}]',
            "either an answer or tests",
        ),
        (
            '[{"problem": "a", "answer": 1}, {"problem": "a", "answer": 2}]',
            "problem 2 of .* is problem 1 again",
        ),
        (
            '[{"problem": "a", "answer": "12 * 13"}]',
            "its own answer '12 [*] 13' would be wrong: write it evaluated",
        ),
        ('[{"problem": "a", "answer": null}]', "needs either an answer or tests"),
        ('[{"problem": "a", "answer": true}]', "must be a number"),
        (
            '[{"problem": "a", "answer": 1, "split": "dev"}]',
            "split must be train, validation or test, got 'dev'",
        ),
    ],
)
def test_a_file_that_is_wrong_names_the_problem(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        ProblemFiles(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read problems .*: No such file"):
        ProblemFiles(tmp_path / "none.json")


# ----------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"name": "arithmetic", "min_operations": 0},
            "min_operations must be a whole number from 1 on, got 0",
        ),
        (
            {"name": "arithmetic", "max_operations": 1},
            "max_operations must be at least min_operations, 2, got 1",
        ),
        ({"name": "arithmetic", "max_value": 5}, "max_value must be a whole number from 9 on, got 5"),
        ({"name": "arithmetic", "num_train": True}, "num_train must be a whole number from 1 on, got True"),
        ({"name": "arithmetic", "answer_in": "tag"}, "answer_in must be tags or reply, got 'tag'"),
        ({"name": "arithmetic", "system_prompt": None}, "system_prompt must be text, got None"),
        (
            {"name": "arithmetic", "habits": {"carefull": 1}},
            "habits has no 'carefull' .did you mean 'careful'",
        ),
        (
            {"name": "arithmetic", "habits": {"careful": -1}},
            "share of habit 'careful' must be a number from 0 on",
        ),
        ({"name": "arithmetic", "habits": {"careful": 0}}, "all habits have the share 0"),
        ({"name": "arithmetic", "habits": "careful"}, "habits must be shares"),
        ({"name": "equations", "max_level": 4}, "levels must go up from 1 to at most 3, got 1 to 4"),
        (
            {"name": "equations", "max_coefficient": 2},
            "max_coefficient must be a whole number from 3 on, got 2",
        ),
        ({"name": "countdown", "max_numbers": 9}, "max_numbers must be from min_numbers, 3, to 8, got 9"),
        ({"name": "countdown", "min_numbers": 1}, "min_numbers must be a whole number from 2 on, got 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(spec: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_environment(spec)
