"""Agno as its introduction has it: an agent, a model, two functions."""

import shop
from agno.agent import Agent
from agno.models.openai import OpenAIChat

agent = Agent(
    model=OpenAIChat(id="any"),
    tools=[shop.get_order, shop.cancel_order],
    instructions=shop.instructions,
    telemetry=False,
)
shop.finish(agent.run(shop.question).content)
