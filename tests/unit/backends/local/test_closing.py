"""Constrained replies end within their limit, and the update finds what was allowed again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_templates import chosen, trl_template
from tiny_grammars import END, PROMPT, constraint_of, letters, letters_model, replies_of

from stateset_agents.backends.grammars import Grammars, grammars_of, only_token
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.chat.reply_grammar import ReplyGrammar
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.messages import SamplingParams
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

LONG = 'start: "a" /[abc]*/ "d" ("d" | "ab" "c") | "d" "ca" "d"'
"""Its shortest reply has four tokens, the end among them, beside free text that never has to end."""


def tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("note", ["text"], text={"type": "string"}, tag={"enum": ["a", "bb", "ccc"]}),
    tool(
        "order",
        ["id", "lines"],
        id={"type": "string", "pattern": "^[A-Z][0-9]{2}$"},
        lines={
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
        why={"type": "string", "minLength": 7, "maxLength": 30},
    ),
]


def drawn(grammars: Grammars, constraint: Constraint, dice: random.Random) -> tuple[list[int], bool]:
    """A reply of uniformly drawn tokens, and whether it ended within its limit."""
    assert constraint.limit is not None
    matcher, ids = grammars.matcher(constraint), []
    while len(ids) < constraint.limit:
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        ids.append(dice.choice(allowed.tolist()))
        if ids[-1] in constraint.stop_ids:
            return ids, True
        matcher.advance(ids[-1])
    return ids, False


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("choice", ["required", "note", "auto"])
@pytest.mark.parametrize(
    "family", chosen(["qwen3", "qwen3_5_nothink"], ["qwen3", "qwen3_5_nothink", "glm4moe", "lfm2_2_5"])
)
@pytest.mark.parametrize(
    "tools", [TOOLS[:1], pytest.param(TOOLS, marks=pytest.mark.long)], ids=["one", "two"]
)
def test_no_call_is_cut_from_the_shortest_one_s_length_on(
    family: str, choice: str, parallel: bool, tools: list[dict[str, Any]]
) -> None:
    template = trl_template(family)
    grammars = grammars_of(template.tokenizer)
    constraint = ReplyGrammar.of(template).of_calls(tools, choice, parallel=parallel)
    required = ReplyGrammar.of(template).of_calls(
        tools, "required" if choice == "auto" else choice, parallel=parallel
    )
    matcher = grammars.matcher(required)
    ways = grammars._closer(required).ways(matcher._matcher, matcher.allowed(), b"")
    shortest = min(map(len, ways.values()))
    for limit in [*range(shortest, shortest + (10 if len(tools) > 1 else 3)), 2 * shortest, 4 * shortest]:
        ids, ended = drawn(grammars, replace(constraint, limit=limit), random.Random(limit))
        text = template.tokenizer.decode_markup(ids[:-1] if ended else ids)
        reply = template.parser.read(text, turn=0, tools=tools, calls=True)
        assert all(call.error is None for call in reply.tool_calls), text
        assert ended or (choice == "auto" and not reply.tool_calls), text
        if choice != "auto":
            assert reply.tool_calls, text
        masks = grammars.replay(replace(constraint, limit=limit), ids)
        assert len(masks) == len(ids)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_below_the_shortest_reply_cuts_as_without(limit: int) -> None:
    grammars, dice = Grammars(letters()), random.Random(1)
    for _ in range(20):
        ids, ended = drawn(grammars, replace(constraint_of(LONG), limit=limit), dice)
        assert (len(ids), ended) == (limit, False)


@pytest.mark.parametrize("limit", [4, 5, 6, 8, 12, 30])
async def test_sampler_and_update_agree_on_replies_that_end_in_time(limit: int) -> None:
    constraint = constraint_of(LONG)
    backend = HuggingFaceBackend(letters_model(), letters(), copy_model=False)
    await backend.start()
    samples = []
    try:
        for stream in range(12):
            params = SamplingParams(max_new_tokens=limit, stream=stream, constraint=constraint)
            completion = await backend.generate(PROMPT, params)
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] == END
            assert completion.constraint == replace(constraint, limit=limit)
            turn = Turn(prompt_ids=PROMPT, completion=completion)
            trajectory = Trajectory(scenario=Scenario(id="s"), turns=(turn,))
            samples.append(Sample(trajectory=trajectory, advantages=(1.0,) * len(completion.token_ids)))
    finally:
        await backend.close()
    learner = Learner(
        letters_model(),
        TrainingConfig(beta=0.0),
        num_steps=9,
        exact_logprobs=True,
        grammars=Grammars(letters()),
    )
    metrics = learner.update(samples, step=0)
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl/old"] == pytest.approx(0.0, abs=1e-9)


def test_short_room_allows_exactly_what_can_end() -> None:
    """By hand, of all replies of at most the limit."""
    grammars = Grammars(letters())
    constraint = constraint_of('start: "a" ("b" | "c") /[cd]{1,2}/ | "d" "ca" "d" | "c"')
    replies = list(replies_of(grammars, constraint))
    for limit in range(2, 7):
        fitting = {reply for reply in replies if len(reply) <= limit}
        assert set(replies_of(grammars, replace(constraint, limit=limit))) == fitting


@pytest.mark.long
def test_another_process_finds_the_same_masks() -> None:
    """Whatever was looked for before: a fresh Grammars replays backwards what another drew."""
    template = trl_template("qwen3")
    constraint = ReplyGrammar.of(template).of_calls(TOOLS, "required")
    first, other = Grammars(template.tokenizer), Grammars(template.tokenizer)
    dice = random.Random(3)
    drawn_with = [
        (limit, drawn(first, replace(constraint, limit=limit), dice)[0]) for limit in range(40, 90, 7)
    ]
    for limit, ids in reversed(drawn_with):
        there = other.replay(replace(constraint, limit=limit), ids)
        here = first.replay(replace(constraint, limit=limit), ids)
        assert np.array_equal(there, here)


def test_what_closes_is_forced_and_does_not_train() -> None:
    grammars = Grammars(letters())
    ids = [0, 0, 3, 3, END]
    masks = grammars.replay(replace(constraint_of(LONG), limit=5), ids)
    forced = [only_token(mask) is not None for mask in masks]
    assert forced[2:] == [True, True, True]
    free = grammars.replay(constraint_of(LONG), ids)
    assert not any(only_token(mask) is not None for mask in free[:4])
