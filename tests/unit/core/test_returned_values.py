"""What an environment returns by mistake, and ids that a model does not know, are one clear line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from environments import ChattyConversation, ChattyEnvironment, scenarios
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, SamplingParams
from stateset_agents.types.scenario import Scenario


class Forgetful(ChattyConversation):
    """Does its work and returns nothing."""

    async def step(self, reply: Message) -> Any:
        await super().step(reply)


class Gym(ChattyConversation):
    async def step(self, reply: Message) -> Any:
        return (), 0.0, True


class Plain(ChattyConversation):
    def step(self, reply: Message) -> Any:
        return Observation(terminated=True)


class NoVerdict(ChattyConversation):
    async def outcome(self) -> Any:
        return None


class Starts(ChattyEnvironment):
    """`made` says what becomes of the conversation that `start` gives."""

    def __init__(self, made: Callable[[Conversation], Any]) -> None:
        super().__init__()
        self.made = made

    async def start(self, scenario: Scenario, seed: int) -> Any:
        return self.made(await super().start(scenario, seed))


def of(kind: type) -> Callable[[Conversation], Any]:
    def turned(conversation: Any) -> Any:
        conversation.__class__ = kind
        return conversation

    return turned


class PlainOpening(ChattyConversation):
    @property
    def opening(self) -> Any:
        return ({"role": "user", "content": "hi"},)


class PlainAnswer(ChattyConversation):
    async def step(self, reply: Message) -> Any:
        return Observation(messages="bye")  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            of(PlainAnswer),
            "Observation.messages must be a tuple of Messages, got 'bye': "
            "write (Message(role=..., content=...),)",
        ),
        (
            of(PlainOpening),
            "PlainOpening.opening must be a tuple of Messages, got ({'role': 'user', 'content': 'hi'},): "
            "write (Message(role=..., content=...),)",
        ),
        (
            lambda conversation: None,
            "Starts.start must return a conversation, got None: is a return missing?",
        ),
        (
            lambda conversation: "hi",
            "Starts.start must return a conversation, got a str without opening, tools, step, outcome, close",
        ),
        (of(Forgetful), "Forgetful.step must return an Observation, got None: is a return missing?"),
        (of(Gym), "Gym.step must return an Observation, got ((), 0.0, True)"),
        (of(Plain), "Plain.step must be written `async def`, and is a plain function"),
        (of(NoVerdict), "NoVerdict.outcome must return an Outcome, got None: is a return missing?"),
    ],
)
async def test_what_an_environment_forgot_to_return_is_one_line(made: Any, said: str) -> None:
    async with MultiTurnAgent(
        AgentConfig(max_new_tokens=9), backend=ScriptedBackend(lambda request: "hi")
    ) as agent:
        engine = ComputationalEngine(agent, Starts(made), EnvironmentReward(), num_generations=1)
        with pytest.raises(ConfigurationError) as error:
            await engine.rollout(scenarios(1), seed=0, step=0)
    assert str(error.value) == said


async def test_ids_beyond_the_embedding_are_one_line_and_the_worker_goes_on() -> None:
    model = tiny_model()
    rows = model.get_input_embeddings().weight.shape[0]
    backend = HuggingFaceBackend(model, tiny_tokenizer(), scheduling="throughput")
    await backend.start()
    try:
        said = rf"gave token {rows} \(.*\) and the model has embeddings for {rows}, 0 to {rows - 1}: give"
        with pytest.raises(ConfigurationError, match=said):
            await backend.generate([1, rows, 2], SamplingParams(max_new_tokens=2))
        with pytest.raises(ConfigurationError, match=said):
            await backend.score([1, rows])
        assert (await backend.generate([1, 2], SamplingParams(max_new_tokens=2))).token_ids
    finally:
        await backend.close()
