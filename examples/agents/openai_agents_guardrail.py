"""OpenAI Agents SDK: a guardrail whose own agent answers by a type, as its page on guardrails has it.

The guardrail stops whoever wants to cancel: that is for another desk. Both agents ask at the same time.
"""

import asyncio
from typing import Literal

import shop
from agents import (
    Agent,
    AgentsException,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    RunContextWrapper,
    Runner,
    TResponseInputItem,
    function_tool,
    input_guardrail,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)  # traces go to OpenAI


class Check(BaseModel):
    wish: Literal["status", "cancel"]


guardrail_agent = Agent(
    name="Guardrail check", model="guardrail", instructions="shop desk.", output_type=Check
)


@input_guardrail
async def cancel_guardrail(
    ctx: RunContextWrapper[None], agent: Agent, input: str | list[TResponseInputItem]
) -> GuardrailFunctionOutput:
    result = await Runner.run(guardrail_agent, input, context=ctx.context)
    return GuardrailFunctionOutput(
        output_info=result.final_output, tripwire_triggered=result.final_output.wish == "cancel"
    )


agent = Agent(
    name="Desk",
    model="desk",
    instructions=shop.instructions,
    input_guardrails=[cancel_guardrail],
    tools=[function_tool(shop.get_order)],
)


async def main():
    try:
        result = await Runner.run(agent, shop.question)
        shop.finish(result.final_output)
    except InputGuardrailTripwireTriggered:
        shop.finish_sorted("cancel")
    except AgentsException:  # too many turns, a reply that is cut
        shop.finish(None)


if __name__ == "__main__":
    asyncio.run(main())
