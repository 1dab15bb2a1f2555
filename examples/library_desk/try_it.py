"""Play the part of the agent: what the desk answers, and what its verdict is."""

import asyncio

from library import library_desk

from stateset_agents.types.messages import Message, ToolCall

desk = library_desk()
waiting = next(scenario for scenario in desk.scenarios("train") if scenario.family == "waiting")


def say(text):
    """A reply in words."""
    return Message(role="assistant", content=text)


def call(tool):
    """A reply that calls a tool."""
    calls = (ToolCall(name=tool, arguments={"title": waiting.context["title"]}),)
    return Message(role="assistant", content="", tool_calls=calls)


async def play(what, *replies):
    """The conversation with these replies, and the verdict."""
    conversation = await desk.start(waiting, seed=0)
    for reply in replies:
        await conversation.step(reply)
    print(what, (await conversation.outcome()).success)


async def main():
    """The honest way, and two short cuts."""
    no = say("sorry, someone waits for it.")
    await play("honest:", call("look_up"), no)
    await play("against the rule:", call("look_up"), call("renew_book"), say("it is renewed."))
    await play("right by luck, never looked:", no)


asyncio.run(main())
