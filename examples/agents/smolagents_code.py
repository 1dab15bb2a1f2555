"""smolagents' CodeAgent as its guided tour has it, with `prompt_templates=` shorter than its own."""

import shop
from smolagents import EMPTY_PROMPT_TEMPLATES, CodeAgent, OpenAIModel, tool

SYSTEM_PROMPT = """{{ custom_instructions }} write <code> python </code>, end with final_answer(text).
{%- for tool in tools.values() %} {{ tool.name }}({{ tool.inputs | join(", ") }}){% endfor %}"""

agent = CodeAgent(
    tools=[tool(shop.get_order), tool(shop.cancel_order)],
    model=OpenAIModel(model_id="any"),
    prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": SYSTEM_PROMPT},
    instructions=shop.instructions,
    max_steps=1,
    verbosity_level=0,
)
shop.finish(str(agent.run(shop.question)))
