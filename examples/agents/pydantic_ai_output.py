"""Pydantic AI with `output_type`: the answer is a call of the tool that its page on output tells of."""

from typing import Literal

import shop
from pydantic import BaseModel, Field
from pydantic_ai import Agent, UnexpectedModelBehavior


class Ticket(BaseModel):
    """What a customer wants of which order."""

    wish: Literal["status", "cancel"]
    order_id: str = Field(pattern=r"^[A-Z][0-9]{2}$")


agent = Agent("openai-chat:any", instructions=shop.instructions, output_type=Ticket)

try:
    ticket = agent.run_sync(shop.question).output
    shop.finish_sorted(ticket.wish, ticket.order_id)
except UnexpectedModelBehavior:  # no valid answer within its retries
    shop.finish(None)
