"""OpenAI Agents SDK: a triage agent hands over to one of two others, as its page on handoffs has it."""

import shop
from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.extensions import handoff_filters

set_tracing_disabled(True)  # traces go to OpenAI

status_agent = Agent(
    name="Status",
    model="desk",
    handoff_description="Looks orders up",
    instructions=shop.instructions,
    tools=[function_tool(shop.get_order)],
)
cancel_agent = Agent(
    name="Cancel",
    model="desk",
    handoff_description="Cancels orders",
    instructions=shop.instructions,
    tools=[function_tool(shop.get_order), function_tool(shop.cancel_order)],
)
triage_agent = Agent(
    name="Triage",
    model="triage",
    instructions="shop desk. get a human.",
    handoffs=[
        handoff(status_agent, input_filter=handoff_filters.remove_all_tools),
        handoff(cancel_agent, input_filter=handoff_filters.remove_all_tools),
    ],
    model_settings=ModelSettings(tool_choice="required"),
)

try:
    result = Runner.run_sync(triage_agent, shop.question)
    shop.finish(result.final_output)
except AgentsException:  # too many turns, a reply that is cut
    shop.finish(None)
