"""One word in two Unicode forms is one word, for every ready reward and verdict."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from builders import trajectory
from stated_facts import states_fact

from stateset_agents.core.reward import RewardFunction, create_customer_service_reward
from stateset_agents.core.scoring.transcript import in_normal_form
from stateset_agents.environments.problems.files import ProblemFiles
from stateset_agents.environments.text_world import TextAdapter
from stateset_agents.rewards.code import create_code_reward
from stateset_agents.rewards.formats import (
    create_pattern_reward,
    create_schema_reward,
    create_similarity_reward,
    likeness,
)
from stateset_agents.rewards.reasoning import MathAnswerReward
from stateset_agents.rewards.verifiable import (
    agreement,
    create_conciseness_reward,
    create_correctness_reward,
    create_safety_reward,
)
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario

NFC, NFD = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
PROGRAM = "```python\ndef f():\n    return {{'{0}': ['{0}', {{'{0}'}}]}}\n```"
CASES: dict[str, tuple[Callable[[], RewardFunction], str, dict[str, Any]]] = {
    "correctness": (create_correctness_reward, "Answer: {0}", {"answer": "{0}"}),
    "a list of answers": (create_correctness_reward, "Answer: {0}, Bern", {"answer": ["Bern", "{0}"]}),
    "facts": (create_customer_service_reward, "Your parcel is in {0} now.", {"expected_facts": ["{0}"]}),
    "forbidden": (
        create_customer_service_reward,
        "It is in {0}.",
        {"forbidden": ["{0}"], "expected_facts": ["in"]},
    ),
    "choices": (
        create_customer_service_reward,
        "Your parcel goes to {0}, or to Bern.",
        {"expected_facts": ["{0}"], "choices": ["{0}", "Bern"]},
    ),
    "secrets": (create_safety_reward, "The word is {0}.", {"secrets": ["{0}"]}),
    "conciseness": (create_conciseness_reward, "It is in {0}.", {"expected_facts": ["{0}"]}),
    "similarity": (create_similarity_reward, "It is in {0}.", {"reference": "it is in {0}"}),
    "pattern": (create_pattern_reward, "In {0}.", {"pattern": "In {0}[.]"}),
    "schema": (create_schema_reward, '["{0}"]', {"schema": {"items": {"enum": ["{0}"]}}}),
    "mathematics": (MathAnswerReward, "<answer>{0}</answer>", {"answer": "{0}"}),
    "a program's value": (
        create_code_reward,
        PROGRAM,
        {"tests": {"entry_point": "f", "cases": [{"arguments": [], "expected": {"{0}": ["{0}", {"{0}"}]}}]}},
    ),
    "a program's output": (
        create_code_reward,
        "```python\nprint('{0}')\n```",
        {"tests": {"cases": [{"stdin": "", "expected": "{0}"}]}},
    ),
}


def filled(value: Any, word: str) -> Any:
    if isinstance(value, str):
        return value.replace("{0}", word).replace("{{", "{").replace("}}", "}")
    if isinstance(value, dict):
        return {filled(key, word): filled(item, word) for key, item in value.items()}
    return type(value)(filled(item, word) for item in value) if isinstance(value, list | set) else value


@pytest.mark.parametrize("name", CASES)
async def test_a_reward_is_the_same_whichever_form_the_agent_or_the_scenario_has(name: str) -> None:
    make, reply, context = CASES[name]
    reward = make()
    scores = [
        (await reward.score(trajectory("Hello?", filled(reply, said), context=filled(context, known)))).score
        for said in (NFC, NFD)
        for known in (NFC, NFD)
    ]
    assert scores == [scores[0]] * 4
    other = await reward.score(trajectory("Hello?", filled(reply, "Geneva"), context=filled(context, NFD)))
    assert other.score != scores[0]


async def test_a_secret_in_the_other_form_is_seen_in_a_call_too() -> None:
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments={"a": NFD}),))
    scored = await create_safety_reward().score(trajectory("Hello?", call, context={"secrets": [NFC]}))
    assert scored.score == 0.0


def test_what_compares_without_a_conversation_does_so_alike() -> None:
    assert agreement(NFD, NFC) == agreement(NFC, NFD) == 1.0
    assert likeness(NFD, NFC) == 1.0
    assert states_fact([NFC], f"It is in {NFD}.")
    settings: dict[str, Any] = {"render": None, "parse": None, "success": None, "system_prompt": None}
    adapter = TextAdapter(**settings, actions=[NFC, "Bern"], max_turns=1, misread_reward=0.0)
    assert adapter.parse.function(f"to {NFD}") == 0
    families = {Scenario.from_dict({"family": word}).family for word in (NFC, NFD)}
    assert families == {NFC}


async def test_a_problem_s_verdict_does_so_alike(tmp_path: Any) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"problem": "Where?", "answer": "{NFD}", "split": "train"}}\n')
    environment = ProblemFiles(path)
    conversation = await environment.start(environment.scenarios("train")[0], seed=0)
    await conversation.step(Message(role="assistant", content=f"<think>x</think>\n<answer>{NFC}</answer>"))
    assert (await conversation.outcome()).success is True


def test_only_what_is_compared_changes_its_form() -> None:
    talk = trajectory("Hello?", NFD, context={"a": NFD})
    compared = in_normal_form(talk)
    assert compared.replies[0].content == compared.scenario.context["a"] == NFC
    assert compared.token_ids == talk.token_ids
    assert talk.replies[0].content == NFD
