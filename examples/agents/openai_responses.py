"""OpenAI's client: the loop of its guide to function calling, with `client.responses.create`."""

import json

import openai
import shop

client = openai.OpenAI()
parameters = {
    "type": "object",
    "properties": {"order_id": {"type": "string"}},
    "required": ["order_id"],
    "additionalProperties": False,
}
functions = {"get_order": shop.get_order, "cancel_order": shop.cancel_order}
tools = [
    {
        "type": "function",
        "name": name,
        "description": function.__doc__,
        "parameters": parameters,
        "strict": True,
    }
    for name, function in functions.items()
]
input_list = [{"role": "user", "content": shop.question}]

for _ in range(8):
    response = client.responses.create(
        model="any", instructions=shop.instructions, tools=tools, input=input_list
    )
    input_list += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        output = functions[call.name](**json.loads(call.arguments))
        input_list.append({"type": "function_call_output", "call_id": call.call_id, "output": output})

shop.finish(response.output_text)
