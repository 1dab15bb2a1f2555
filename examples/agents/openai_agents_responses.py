"""OpenAI Agents SDK as its quickstart has it: an agent, two function tools, the Responses API."""

import shop
from agents import Agent, AgentsException, Runner, function_tool, set_tracing_disabled

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
