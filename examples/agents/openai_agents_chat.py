"""OpenAI Agents SDK, told to speak chat completions as its page on models says."""

import shop
from agents import (
    Agent,
    AgentsException,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

set_default_openai_api("chat_completions")
set_tracing_disabled(True)  # traces go to OpenAI

agent = Agent(
    name="Desk",
    instructions=shop.instructions,
    tools=[function_tool(shop.get_order), function_tool(shop.cancel_order)],
)

try:
    result = Runner.run_sync(agent, shop.question)
    shop.finish(result.final_output)
except AgentsException:  # too many turns, a reply that is cut
    shop.finish(None)
