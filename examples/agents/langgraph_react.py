"""LangGraph's prebuilt agent as its quickstart had it; `langchain.agents.create_agent` is its later name."""

import shop
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

agent = create_react_agent(
    model=ChatOpenAI(model="any"),
    tools=[shop.get_order, shop.cancel_order],
    prompt=shop.instructions,
)

try:
    state = agent.invoke({"messages": [{"role": "user", "content": shop.question}]})
    shop.finish(state["messages"][-1].content)
except GraphRecursionError:
    shop.finish(None)
