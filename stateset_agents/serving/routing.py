"""Who answers a request where there is more than one agent: what a server asks of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stateset_agents.backends.openai.chat_body import validation_message
from stateset_agents.backends.openai.protocol import Answer, ApiError
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.serving.served_agent import Asked, OnDelta, ServedAgent


class AnswerOne(Protocol):
    """Gives one answer to a request; its text goes to `on_delta` as it is sampled."""

    async def __call__(self, number: int, on_delta: OnDelta | None = None) -> Answer: ...


class Router(Protocol):
    """Sends each conversation to one of several agents, and learns how it ended."""

    @property
    def agents(self) -> Sequence[MultiTurnAgent]:
        """All initialised. The first gives the server its name, its limits and its health."""
        ...

    def answering(
        self, asked: Asked, served: Sequence[ServedAgent]
    ) -> AbstractAsyncContextManager[AnswerOne]:
        """Around all answers to one request; `served`: the agents, in their order."""
        ...

    async def report_outcome(self, conversation: str, *, success: float, reward: float | None = None) -> str:
        """How a conversation ended; says that it was `counted`, or came `again`, or `late`.

        Raises ConfigurationError for a conversation that was never assigned, JournalError where it could not
        be written down.
        """
        ...


class OutcomeBody(BaseModel):
    """How a conversation ended."""

    model_config = ConfigDict(strict=True, extra="forbid")

    conversation: str = Field(
        min_length=1, max_length=256, description="its id: `X-Conversation-Id` of its answers"
    )
    success: bool | Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        description="true, false, or from 0 to 1"
    )
    reward: float | None = Field(
        default=None, allow_inf_nan=False, description="kept with it; decisions do not use it"
    )


def read_outcome(data: Any) -> OutcomeBody:
    """The outcome in a JSON body; raises ApiError for what is none."""
    try:
        return OutcomeBody.model_validate(data)
    except ValidationError as error:
        message, param = validation_message(error)
        raise ApiError(message, code="invalid_request", param=param) from error
