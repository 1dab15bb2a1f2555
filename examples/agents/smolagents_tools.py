"""smolagents' ToolCallingAgent as its guided tour has it, with `prompt_templates=` shorter than its own."""

import shop
from smolagents import EMPTY_PROMPT_TEMPLATES, OpenAIModel, ToolCallingAgent, tool

agent = ToolCallingAgent(
    tools=[tool(shop.get_order), tool(shop.cancel_order)],
    model=OpenAIModel(model_id="any"),
    prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": shop.instructions},
    max_steps=3,
    verbosity_level=0,
)
shop.finish(str(agent.run(shop.question)))
