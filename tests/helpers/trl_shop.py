"""A TRL script for tests: a dataset, an environment class, reward functions, and what the agent says."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["ROWS", "Shop", "answered", "brief", "knows_its_row", "say"]

ROWS = [
    {
        "prompt": [
            {"role": "system", "content": "You sell things."},
            {"role": "user", "content": f"case {number}: how many {thing} are left?"},
        ],
        "thing": thing,
        "answer": str(number + 1),
        "stock": number + 1,
    }
    for number, thing in enumerate(
        ["pens", "cups", "nails", "maps", "bags", "keys", "hats", "bells", "pins", "rugs"]
    )
]


class Shop:
    """Counts stock; one tool is async, and both refuse what they do not know."""

    def reset(self, stock: int, thing: str, **row: Any) -> str | None:
        self.stock, self.thing, self.calls = stock, thing, 0
        return f" The shop has {len(thing)} shelves." if stock % 2 else None

    def count(self, thing: str) -> int:
        """Count what is left.

        Args:
            thing: What to count.
        """
        self.calls += 1
        if thing != self.thing:
            raise KeyError(f"no {thing} here")
        return self.stock

    async def sell(self, thing: str, number: int = 1) -> dict[str, Any]:
        """Sell some.

        Args:
            thing: What to sell.
            number: How many.
        """
        if number > self.stock:
            raise ValueError(f"only {self.stock} left")
        self.stock -= number
        return {"sold": number, "of": thing}

    def get_reward(self) -> float:
        return self.stock / 10

    def _private(self) -> None:
        raise AssertionError("no tool")


def answered(prompts: Any, completions: Any, answer: list[str], **_: Any) -> list[float | None]:
    """None where there are no words."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    last = [completion[-1]["content"] for completion in completions]
    return [float(right in words) if words else None for words, right in zip(last, answer, strict=True)]


async def brief(
    completions: Any, completion_ids: list[list[int]], environments: Any, **_: Any
) -> list[float]:
    """Needs the objects whose methods were called."""
    return [
        -len(ids) / 1000 - environment.calls - sum(message["role"] == "tool" for message in completion)
        for completion, ids, environment in zip(completions, completion_ids, environments, strict=True)
    ]


def knows_its_row(
    prompts: Any,
    thing: list[str],
    stock: list[int],
    trainer_state: Any,
    log_extra: Any,
    log_metric: Any,
    **_: Any,
) -> list[float]:
    log_extra("shelves", [len(name) for name in thing])
    log_metric("asked", float(len(prompts)))
    said = [prompt[-1]["content"] for prompt in prompts]
    return [
        len(words) / 1000 + left + trainer_state.global_step for words, left in zip(said, stock, strict=True)
    ]


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _script(number: int) -> list[str]:
    thing = ROWS[number]["thing"]
    return [
        [_call("count", thing=thing), f"There are {number + 1}."],
        [_call("count", thing="ghosts"), _call("count", thing=thing), f"Two. {number + 1}."],
        ["I do not know."],
        [_call("sell", thing=thing, number=3), "Sold."],
        [_call("sell", thing=thing, number=99), "Too many; 5."],
        [_call("steal", thing=thing), "There is no such tool."],
        [_call("sell", thing=thing, number=1) + "\n" + _call("count", thing=thing), "One less, 7."],
        ["<tool_call>\n{broken\n</tool_call>"],
        ["I look.\n" + _call("count", thing=thing) + "\n" + _call("count", thing=thing), "9"],
        [_call("count"), _call("count", thing=thing), _call("sell", thing=thing), ""],
    ][number]


def say(text: str) -> str:
    """The reply of a policy that reads the conversation so far."""
    number = int(re.findall(r"case (\d+):", text)[-1])
    script = _script(number)
    turn = len(re.findall(r"<\|im_start\|>assistant", text)) - 1
    return script[min(turn, len(script) - 1)]
