"""A user whose words come from a model behind a chat endpoint; environments make one for a conversation."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.settings import expect, expect_that

_RULES = """\
You play the user in a conversation with an assistant. You are not the assistant: never help, never offer
anything, never speak for it. Say what this user would say next, in a sentence or two, and nothing else. Tell
what you know only when it is asked for. When you have got what you came for, write [done]; when there is no
hope for it, write [leave].

Who you are and what you want:
"""
_END = re.compile(r"\[(done|leave)\]", re.IGNORECASE)
_NOTHING_YET = "(The assistant waits for your first message.)"


class ModelUsers:
    """Makes the user of each conversation; all share a client, with its retries and its budget.

        client = ChatClient("http://localhost:8000/v1", "a-model", temperature=0.7, max_calls=10_000)
        user = ModelUsers(client, "You bought {item} and want to return it.")
        ConversationEnvironment(scenarios, user=user)

    `instructions` say who the user is; `{name}` stands for what a scenario's context holds under that name.
    Absent, the user is told family and context as they are. The members of a group meet the same user only as
    far as the endpoint says the same to the same words: use temperature 0 where that matters.
    """

    def __init__(self, client: ChatClient, instructions: str | None = None) -> None:
        expect("client", client, ChatClient, 'write ChatClient("http://localhost:8000/v1", "a-model")')
        expect_that(isinstance(instructions, str | None), "instructions", "be text", instructions, length=60)
        self.client = client
        self.instructions = instructions

    def __call__(self, scenario: Scenario, seed: int) -> ModelUser:
        """Raises ConfigurationError where the instructions ask for what the scenario has not."""
        return ModelUser(self.client, self._instructed(scenario))

    def _instructed(self, scenario: Scenario) -> str:
        if self.instructions is None:
            facts = json.dumps(dict(scenario.context), ensure_ascii=False, default=str)
            return f"You need help with {scenario.family.replace('_', ' ')}. What you know: {facts}"
        try:
            return self.instructions.format_map(scenario.context)
        except (KeyError, IndexError, ValueError) as error:
            names = ", ".join(map(str, scenario.context)) or "nothing"
            raise ConfigurationError(
                f"scenario {scenario.id}: the user's instructions ask for {error}, its context has {names}"
            ) from error


class ModelUser:
    """One user, told who it is. It leaves when the model writes [done] or [leave]; `satisfied` says which."""

    local = False

    def __init__(self, client: ChatClient, instructions: str) -> None:
        self.satisfied: bool | None = False
        self._client = client
        self._instructions = instructions

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """The user's next words, or None to leave.

        Raises BackendError and BudgetExceeded as the client does, EnvironmentFailure for an empty answer.
        """
        history = self._from_user_side(messages)
        if not history or history[-1].role == "assistant":
            history.append(Message(role="user", content=_NOTHING_YET))
        system = Message(role="system", content=_RULES + self._instructions)
        answer = await self._client.complete([system, *history])
        text = answer.text.strip()
        end = _END.search(text)
        if end is not None:
            self.satisfied = end[1].lower() == "done"
            return None
        if not text:
            cure = "raise its max_new_tokens" if answer.finish_reason == "length" else "try another model"
            raise EnvironmentFailure(f"the user played by {self._client.model} said nothing: {cure}")
        return text

    def fork(self) -> ModelUser:
        """A copy of the user; all that was said is in the messages."""
        return copy.copy(self)

    @staticmethod
    def _from_user_side(messages: Sequence[Message]) -> list[Message]:
        """The conversation from the user's side: its own words are the model's, tools are not heard."""
        return [
            Message(role="assistant" if message.role == "user" else "user", content=message.content)
            for message in messages
            if message.role in ("user", "assistant") and message.content
        ]
