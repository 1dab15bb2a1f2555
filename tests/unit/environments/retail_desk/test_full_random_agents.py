"""Random agents at the desk: whatever they say and call, it stands, repeats itself, and changes what it may.

A hundred of them here; a thousand of each property under `make test-long`.
"""

import asyncio
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stateset_agents.environments.retail_desk import FULL_FAMILIES, HonestAgent, RetailDesk
from stateset_agents.environments.retail_desk.full.honest import say
from stateset_agents.environments.retail_desk.grading import COSTS
from stateset_agents.environments.retail_desk.tools import TOOLS, WRITES
from stateset_agents.types.messages import Message, ToolCall

DESK = RetailDesk(families="all", num_train=200)
SCENARIOS = [one for one in DESK.scenarios("train") if one.family in FULL_FAMILIES] + [
    one for one in DESK.scenarios("train")[:40] if one.family not in FULL_FAMILIES
]
HOSTILE = (
    "'; DROP TABLE orders; --",
    "K27' OR '1'='1",
    "\ud800",
    "\x00",
    "\u4e2d" * 100_000,
    "i can refund " + "9" * 300 + " dollars. shall i?",
    "<|end|><tool_call>{",
    "?" * 2000,
    "shall i cancel order " * 90,
    ".a" * 1000,
    "yes, please.",
    '{"name": "cancel_order"}',
    "\u0130\u1e9e\u0307 $\u0664\u0665",
)
SAID = (
    "which order is it?",
    "what is your email, or your name and zip?",
    "i can cancel order {order}, the {item}, and refund {price} dollars to your {payment}. shall i?",
    "i can take back the {item} of order {order} and refund {price} dollars to your {payment}. shall i?",
    "i can swap the {item} of order {order} for a {new_item} and send it to {city}. shall i?",
    "i can send order {order}, the {item}, to {city}. shall i?",
    "shall i hand order {order} over to a human?",
    "done, order {order} is cancelled and {price} dollars are refunded to your {payment}.",
    "order {order} is shipped and arrives on friday.",
    "sorry, order {order} is already shipped, so i cannot do it.",
    "sorry, the {new_item} is out of stock, what would you like instead?",
    "sorry, i cannot verify you, so i cannot help.",
    "one moment.",
)


class RandomAgent:
    """Says and calls what could matter, in any order, with some nonsense; or the honest thing."""

    def __init__(self, seed, scenario):
        self.draw = random.Random(seed)
        self.honesty = self.draw.random()
        context = json.loads(json.dumps(dict(scenario.context)))
        order = context["order"] if isinstance(context.get("order"), dict) else context
        other = context["other"]["order_id"] if "other" in context else context["other_order_id"]
        self.words = {
            "order": [order["order_id"], order["order_id"], other, context["stranger_order_id"], "A10"],
            "item": [order["item"], "red mug"],
            "new_item": [context["new_item"] or "blue lamp", "pink hat"],
            "price": [str(order["price"]), "7", "45.50"],
            "payment": [str(context.get("payment", "card")), "paypal"],
            "city": [context["new_city"] or "oslo", context["city"]],
            "customer": [context["customer_id"], "u01"],
            "email": [str(context.get("email", "anna@mail.example"))],
            "name": [context["name"]],
            "zip": [str(context.get("zip", "10115"))],
        }

    def word(self, what):
        return self.draw.choice(self.words[what])

    def reply(self, messages):
        chance = self.draw.random()
        if chance < self.honesty:
            return HonestAgent().reply(messages)
        if chance > 0.95:
            return say(self.draw.choice(HOSTILE))
        if self.draw.random() < 0.5:
            return say(self.draw.choice(SAID).format(**{name: self.word(name) for name in self.words}))
        calls = [self._call() for _ in range(self.draw.choice((1, 1, 1, 2, 5)))]
        return Message(role="assistant", content="", tool_calls=tuple(calls))

    def _call(self):
        name = self.draw.choice(list(TOOLS))
        slots = {
            "order_id": "order",
            "items": "item",
            "amount": "price",
            "customer_id": "customer",
            "payment_id": "payment",
            "topic": "item",
            "summary": "city",
        }
        schema = TOOLS[name].arguments
        arguments = {
            parameter: self.word(slots.get(parameter, parameter))
            for parameter in schema["properties"]
            if parameter in schema["required"] or self.draw.random() < 0.4
        }
        if self.draw.random() < 0.05:
            arguments["order_id"] = self.draw.choice(HOSTILE)
        return ToolCall(name=name, arguments=arguments)


async def _talk(scenario, agent, caller_seed, fork_at=None):
    """Everything that was said, the outcome, the whole reward, and the good calls."""
    conversation = await DESK.start(scenario, caller_seed)
    messages, reward, good = list(conversation.opening), 0.0, []
    while True:
        if fork_at is not None and len(messages) >= fork_at:
            original, conversation, fork_at = conversation, conversation.fork(), None
            await original.close()
        reply = agent.reply(messages)
        observation = await conversation.step(reply)
        messages += [reply, *observation.messages]
        reward += observation.reward
        for made, answer in zip(reply.tool_calls, observation.messages, strict=False):
            if "error" not in json.loads(answer.content):
                good.append(made)
        if observation.terminated or observation.truncated:
            break
    outcome = await conversation.outcome()
    await conversation.close()
    return messages, outcome, reward + outcome.reward, good


def check(scenario, agent_seed, caller_seed, fork_at):
    talk = asyncio.run(_talk(scenario, RandomAgent(agent_seed, scenario), caller_seed))
    again = asyncio.run(_talk(scenario, RandomAgent(agent_seed, scenario), caller_seed, fork_at))
    assert talk == again
    messages, outcome, reward, good = talk
    writes = [made for made in good if made.name in WRITES]
    assert bool(outcome.changes) <= bool(writes)
    named = {str(made.arguments.get("order_id", "")).upper() for made in writes}
    for change in outcome.changes:
        row = change["after"] or change["before"]
        assert change["table"] == "variants" or row["order_id"].upper() in named
    assert reward <= 1
    assert reward >= -0.3 - 30 * (COSTS["replies"] + 5 * COSTS["tool_errors"] + COSTS["user_miss"])
    if outcome.breakdown["forbidden"]:
        assert not outcome.success
        assert reward <= 0
    assert reward == pytest.approx(sum(outcome.breakdown.values()))
    for message in messages:
        if message.role in ("user", "tool"):
            assert len(message.content) < 600


AGENTS = st.tuples(
    st.sampled_from(SCENARIOS), st.integers(0, 10**9), st.integers(0, 10**6), st.integers(2, 20)
)
TEXTS = st.text(max_size=400) | st.sampled_from(HOSTILE)


CHANGED = next(one for one in SCENARIOS if one.id == "desk-train-0-change_of_mind-1")


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@example((CHANGED, 38848, 0, 2))  # the honest agent finds that the item is no longer on the order
@given(AGENTS)
def test_random_agents_get_the_same_transcript_again_and_change_only_what_they_name(agent):
    check(*agent)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(AGENTS)
def test_a_thousand_random_agents(agent):
    check(*agent)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCENARIOS), st.lists(TEXTS, min_size=1, max_size=4))
def test_no_text_changes_a_row_or_pays(scenario, texts):
    check_text(scenario, texts)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(SCENARIOS), st.lists(TEXTS, min_size=1, max_size=6))
def test_a_thousand_times_no_text_changes_a_row_or_pays(scenario, texts):
    check_text(scenario, texts)


def check_text(scenario, texts):
    async def main():
        conversation = await DESK.start(scenario, 0)
        for text in texts:
            observation = await conversation.step(Message(role="assistant", content=text))
            if observation.terminated or observation.truncated:
                break
        outcome = await conversation.outcome()
        await conversation.close()
        return outcome

    outcome = asyncio.run(main())
    assert outcome.changes == ()
    assert not outcome.success
    assert outcome.reward <= 0
