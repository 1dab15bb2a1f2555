"""A user whose words come from a model, told what tau2 tells its user simulator, with the phone's tools in
telecom: `tau2.user.user_simulator` over the project's own client."""

from __future__ import annotations

import copy
from typing import Any

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.environments.tau2.library import library, prompt_texts
from stateset_agents.environments.tau2.prompts import STOP
from stateset_agents.environments.tau2.users.customer import Phone
from stateset_agents.types.errors import EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall

_GREETING = "Hi! How can I help you today?"
"""Of the agent, before the user has spoken; not in the conversation itself, where the user speaks first."""
_ENDS = (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
_MOST_CALLS = 8
"""Rounds of calls between two of its messages."""


class ModelCustomer:
    """The user of one conversation. It leaves when the model writes one of tau2's end tokens.

    The members of a group meet the same user only as far as the endpoint says the same to the same words.
    """

    local = False

    def __init__(self, client: ChatClient, user_scenario: Any, *, has_phone: bool) -> None:
        self._client = client
        data = library().folder / "data" / "tau2" / "user_simulator"
        guidelines = data / f"simulation_guidelines{'_tools' * has_phone}.md"
        text = prompt_texts("user/user_simulator.py")["SYSTEM_PROMPT"].format(
            global_user_sim_guidelines=guidelines.read_text(encoding="utf-8"), instructions=user_scenario
        )
        self._messages: tuple[Message, ...] = (Message(role="system", content=text),)

    async def opening(self) -> str:
        """Raises EnvironmentFailure where the model leaves before it has said anything."""
        answer = await self._answer(_GREETING)
        if answer.tool_calls or any(end in answer.content for end in _ENDS):
            raise EnvironmentFailure(
                f"the user played by {self._client.model} did not open the conversation but wrote "
                f"{answer.content!r:.80}"
            )
        return answer.content

    async def answer(self, text: str, phone: Phone) -> str | None:
        """Raises as the client does, and EnvironmentFailure for an empty answer."""
        answer = await self._answer(text, phone)
        for _ in range(_MOST_CALLS):
            if not answer.tool_calls:
                return None if any(end in answer.content for end in _ENDS) else answer.content
            self._messages += tuple(_shown(phone, call) for call in answer.tool_calls)
            answer = await self._answer(None, phone)
        raise EnvironmentFailure(
            f"the user played by {self._client.model} called its phone {_MOST_CALLS} times without a word: "
            "try another model"
        )

    async def _answer(self, text: str | None, phone: Phone | None = None) -> Message:
        """What the model says, or calls, to the agent's words; it is added to what it remembers."""
        if text is not None:
            self._messages += (Message(role="user", content=text),)
        tools = () if phone is None else phone.tools
        answer = await self._client.complete(self._messages, tools=tools)
        said = Message(role="assistant", content=answer.text.strip(), tool_calls=answer.tool_calls)
        if not said.content and not said.tool_calls:
            cure = "raise its max_new_tokens" if answer.finish_reason == "length" else "try another model"
            raise EnvironmentFailure(f"the user played by {self._client.model} said nothing: {cure}")
        self._messages += (said,)
        return said

    def fork(self) -> ModelCustomer:
        return copy.copy(self)


def _shown(phone: Phone, call: ToolCall) -> Message:
    content = f"Error: {call.error}" if call.error else phone.call(call.name, call.arguments).content
    return Message(role="tool", content=content, tool_call_id=call.id or None, name=call.name)
