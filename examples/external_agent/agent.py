"""A support agent as one writes it for any chat model: OpenAI's client, two tools, a loop.

It knows nothing of training. `openai.OpenAI()` takes the endpoint from OPENAI_BASE_URL; the customer and the
order come as a line of JSON on standard input, and the last line it prints says how it went.
"""

import json
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string"}},
                "required": ["order_id"],
            },
        },
    }
    for name, description in (
        ("get_order", "Look up an order's status."),
        ("cancel_order", "Cancel an order that is pending."),
    )
]
MOST_REPLIES = 4


class Shop:
    """One order, and what the agent did to it."""

    def __init__(self, order_id: str, status: str) -> None:
        self.order_id = order_id
        self.status = status
        self.looked = False
        self.cancelled = False

    def call(self, name: str, arguments: str) -> dict[str, str]:
        """A tool's answer; what is wrong with the call is an answer too."""
        try:
            wanted = json.loads(arguments)["order_id"]
        except (ValueError, KeyError, TypeError):
            return {"error": "order_id is missing"}
        if wanted != self.order_id:
            return {"error": f"no order {wanted}"}
        if name == "get_order":
            self.looked = True
            return {"order_id": self.order_id, "status": self.status}
        if name == "cancel_order" and self.status == "pending":
            self.status, self.cancelled = "cancelled", True
            return {"result": "cancelled", "order_id": self.order_id}
        return {"error": f"cannot {name}: the order is {self.status}"}


def serve(task: dict, client: openai.OpenAI) -> dict:
    """Talk to the model until it answers in words; the verdict."""
    facts = task["context"]
    shop = Shop(facts["order_id"], facts["status"])
    messages = [
        {"role": "system", "content": f"shop desk. customer {facts['customer']} is signed in."},
        {"role": "user", "content": task["opening"]},
    ]
    for _ in range(MOST_REPLIES):
        choice = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0]
        messages.append(choice.message)
        if not choice.message.tool_calls:
            return verdict(facts, shop, choice.message.content)
        for call in choice.message.tool_calls:
            result = json.dumps(shop.call(call.function.name, call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": -0.2, "success": False, "metadata": {"why": "no answer"}}


def verdict(facts: dict, shop: Shop, said: str) -> dict:
    """1 for the right thing done and said; a tenth for having looked the order up at least."""
    status = facts["status"]
    if facts["wish"] == "cancel" and status == "pending":
        right = shop.cancelled and "cancelled" in said
    else:
        right = shop.looked and status in said and not shop.cancelled
    reward = 1.0 if right else 0.1 * shop.looked
    return {"reward": reward, "success": right, "metadata": {"said": said}}


if __name__ == "__main__":
    print(json.dumps(serve(json.loads(sys.stdin.readline()), openai.OpenAI())))
