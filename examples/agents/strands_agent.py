"""Strands Agents as its quickstart has it, with the model of its page on OpenAI."""

import shop
from strands import Agent, tool
from strands.models.openai import OpenAIModel

agent = Agent(
    model=OpenAIModel(model_id="any"),
    tools=[tool(shop.get_order), tool(shop.cancel_order)],
    system_prompt=shop.instructions,
    callback_handler=None,
)
shop.finish(str(agent(shop.question)))
