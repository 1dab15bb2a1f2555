"""One conversation of a scripted agent, recorded as that of a model is; audits and floors play them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stateset_agents.backends.text.tokenizers import ByteTokenizer
from stateset_agents.core.environment import Conversation, Environment
from stateset_agents.evaluation.degenerate_agents import AgentFactory
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.user_code import format_error
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Status, Trajectory, Turn

MAX_TURNS = 100
"""Replies after which a conversation is cut whose environment sets no limit."""
_TOKENIZER = ByteTokenizer()


async def play(environment: Environment, scenario: Scenario, seed: int, make: AgentFactory) -> Trajectory:
    """One conversation of an agent that is made for it; its tokens are its text's bytes.

    Failures of the environment give a FAILED trajectory as in an episode; mistakes in code travel.
    """
    start = Trajectory(scenario=scenario, seed=seed)
    try:
        conversation = await environment.start(scenario, seed)
        try:
            played = await _play_turns(replace(start, opening=conversation.opening), conversation, make)
            outcome = await conversation.outcome()
        finally:
            await conversation.close()
        return replace(played, outcome=outcome, metadata=outcome.metadata if outcome else {})
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:  # whatever a user's environment may raise is one failed conversation
        return replace(start, status=Status.FAILED, error=format_error(error))


async def _play_turns(start: Trajectory, conversation: Conversation, make: AgentFactory) -> Trajectory:
    agent = make(conversation.tools)
    messages = list(start.opening)
    feedback: Sequence[Message] = start.opening
    context_ids: list[int] = []
    turns: list[Turn] = []
    while True:
        reply = await in_thread(agent.reply, tuple(messages))
        delta = _ids(feedback)
        reply_ids = tuple(_ids([reply])) or _TOKENIZER.eos_ids[:1]
        context_ids += delta
        completion = Completion(
            message=reply,
            prompt_ids=tuple(context_ids),
            token_ids=reply_ids,
            logprobs=(0.0,) * len(reply_ids),
            finish_reason="stop",
        )
        context_ids += reply_ids
        observation = await conversation.step(reply)
        feedback = observation.messages
        turns.append(
            Turn(
                prompt_ids=tuple(delta),
                completion=completion,
                feedback=tuple(feedback),
                reward=observation.reward,
                breakdown=observation.breakdown,
            )
        )
        messages += [reply, *feedback]
        cut = observation.truncated or len(turns) >= MAX_TURNS
        if observation.terminated or cut:
            status = Status.TERMINATED if observation.terminated else Status.TRUNCATED
            return replace(start, turns=tuple(turns), status=status)


def _ids(messages: Sequence[Message]) -> list[int]:
    return [id for message in messages for id in _TOKENIZER.encode(message.content)]
