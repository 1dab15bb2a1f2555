"""Small values for tests: `from builders import trajectory`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory, Turn

__all__ = ["trajectory"]


def trajectory(
    *spoken: str | Message,
    context: dict[str, Any] | None = None,
    family: str = "refund",
    success: bool | None = None,
    outcome: Outcome | None = None,
    turn_rewards: Sequence[float | None] = (),
    **fields: Any,
) -> Trajectory:
    """A conversation from what was said: texts alternate between user and agent, the user first.

    Messages may stand for texts (tool calls and results, say). Tokens are the UTF-8 bytes, log-probs -1.
    `success` or `outcome` is the environment's verdict; other fields go to the trajectory as they are.
    """
    messages = [
        item
        if isinstance(item, Message)
        else Message(role="assistant" if place % 2 else "user", content=item)
        for place, item in enumerate(spoken)
    ]
    starts = [place for place, message in enumerate(messages) if message.role == "assistant"]
    opening = tuple(messages[: starts[0]] if starts else messages)
    turns: list[Turn] = []
    row: list[int] = []
    waiting: Sequence[Message] = opening
    ends = [*starts, len(messages)][1:]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        delta = [byte for message in waiting for byte in message.content.encode()]
        said = tuple(messages[start].content.encode()) or (0,)
        row.extend(delta)
        waiting = messages[start + 1 : end]
        turns.append(
            Turn(
                prompt_ids=tuple(delta),
                completion=Completion(
                    message=messages[start],
                    prompt_ids=tuple(row),
                    token_ids=said,
                    logprobs=(-1.0,) * len(said),
                    finish_reason="stop",
                ),
                feedback=tuple(waiting),
                reward=turn_rewards[number] if turn_rewards else None,
            )
        )
        row.extend(said)
    if outcome is None and success is not None:
        outcome = Outcome(reward=float(success), success=success)
    scenario = fields.pop("scenario", None) or Scenario(id="s", family=family, context=context or {})
    return Trajectory(scenario=scenario, opening=opening, turns=tuple(turns), outcome=outcome, **fields)


def bare(failure: object) -> str:
    """What broke in user code, without the place where it did."""
    return re.sub(r" \(at \w+\.py:\d+\)", "", str(failure))
