"""LangChain's `with_structured_output`, as its page on structured output has it."""

from typing import Literal

import shop
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Ticket(BaseModel):
    """What a customer wants of which order."""

    wish: Literal["status", "cancel"]
    order_id: str = Field(pattern=r"^[A-Z][0-9]{2}$")


model = ChatOpenAI(model="any").with_structured_output(Ticket)
ticket = model.invoke([("system", shop.instructions), ("human", shop.question)])
shop.finish_sorted(ticket.wish, ticket.order_id)
