"""AutoGen's AssistantAgent as its quickstart has it."""

import asyncio

import shop
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

model_client = OpenAIChatCompletionClient(
    model="any",
    model_info=ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        family=ModelFamily.UNKNOWN,
        structured_output=True,
    ),
)
agent = AssistantAgent(
    name="desk",
    model_client=model_client,
    tools=[shop.get_order, shop.cancel_order],
    system_message=shop.instructions,
    reflect_on_tool_use=True,
    max_tool_iterations=8,
)


async def main() -> None:
    result = await agent.run(task=shop.question)
    await model_client.close()
    shop.finish(result.messages[-1].content)


if __name__ == "__main__":
    asyncio.run(main())
