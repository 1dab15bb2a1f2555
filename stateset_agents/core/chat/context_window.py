"""Which messages of a long conversation the model is shown; the agent calls this before each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

__all__ = ["refuse_sliding_window", "slide_window"]


def slide_window(messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]) -> Sequence[Message]:
    """The system message and as many of the newest exchanges as fit; always at least the newest one.

    An exchange is a user message with all that follows it up to the next: answers, tool calls, their results.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return messages
    head = messages[: starts[0]]
    while head and head[-1].role != "system":  # an agent that spoke first
        head = head[:-1]

    def without(number: int) -> Sequence[Message]:
        return [*head, *messages[starts[number] :]] if number else messages

    low, high = 0, len(starts) - 1  # the fewest exchanges to leave out lie in between
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(without(middle)) else (middle + 1, high)
    return without(low)


def refuse_sliding_window(config: AgentConfig) -> None:
    """Rollouts train the tokens that the model saw, so nothing of them may be left out later on."""
    if config.context_window == "sliding":
        raise ConfigurationError(
            'context_window "sliding" leaves out what the model saw when it spoke, so its turns could not be '
            'trained or measured as they were sampled: use AgentConfig(context_window="refuse") for rollouts'
        )
