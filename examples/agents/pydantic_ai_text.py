"""Pydantic AI as its introduction has it: an agent with two plain tools that answers in words."""

import shop
from pydantic_ai import Agent, UsageLimitExceeded

agent = Agent("openai-chat:any", instructions=shop.instructions)
agent.tool_plain(shop.get_order)
agent.tool_plain(shop.cancel_order)

try:
    result = agent.run_sync(shop.question)
    shop.finish(result.output)
except UsageLimitExceeded:
    shop.finish(None)
