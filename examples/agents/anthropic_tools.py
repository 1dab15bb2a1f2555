"""Anthropic's client: its documentation's loop of tool use."""

import anthropic
import shop

client = anthropic.Anthropic()
parameters = {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]}
functions = {"get_order": shop.get_order, "cancel_order": shop.cancel_order}
tools = [
    {"name": name, "description": function.__doc__, "input_schema": parameters}
    for name, function in functions.items()
]
messages = [{"role": "user", "content": shop.question}]

for _ in range(8):
    response = client.messages.create(
        model="any", max_tokens=1024, system=shop.instructions, tools=tools, messages=messages
    )
    messages.append({"role": "assistant", "content": response.content})
    if response.stop_reason != "tool_use":
        break
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": functions[block.name](**block.input)}
        for block in response.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})

shop.finish("".join(block.text for block in response.content if block.type == "text"))
