"""LlamaIndex as its starter tutorial has it: a FunctionAgent with two functions."""

import asyncio
import os

import shop
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.openai_like import OpenAILike

agent = FunctionAgent(
    tools=[shop.get_order, shop.cancel_order],
    llm=OpenAILike(
        model="any",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    ),
    system_prompt=shop.instructions,
)


async def main():
    try:
        response = await agent.run(shop.question)
        shop.finish(str(response))
    except WorkflowRuntimeError:  # too many steps
        shop.finish(None)


if __name__ == "__main__":
    asyncio.run(main())
