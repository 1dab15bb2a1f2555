"""Play the part of the agent: what the desk answers, and what its verdict is."""

import asyncio

from library import library_desk

from stateset_agents.types.messages import Message, ToolCall

desk = library_desk()
waiting = next(scenario for scenario in desk.scenarios("train") if scenario.family == "waiting")
title = waiting.context["title"]
YES, NO = "it is renewed for two weeks.", "sorry, someone waits for it."


def say(text):
    """A reply in words."""
    return Message(role="assistant", content=text)


def call(name):
    """A reply that calls a tool."""
    return Message(
        role="assistant", content="", tool_calls=(ToolCall(name=name, arguments={"title": title}),)
    )


async def play(*replies):
    """The conversation with these replies, and the verdict."""
    conversation = await desk.start(waiting, seed=0)
    said = list(conversation.opening)
    for reply in replies:
        said += [reply, *(await conversation.step(reply)).messages]
    return said, (await conversation.outcome()).success


async def main():
    """The honest way, and two short cuts."""
    said, success = await play(call("look_up"), say(NO))
    for message in said:
        print(f"{message.role:9}  {message.content or message.tool_calls[0].name}")
    print("honest:", success)
    _, success = await play(call("look_up"), call("renew_book"), say(YES))
    print("against the rule:", success)
    _, success = await play(say(NO))
    print("right by luck, never looked:", success)


asyncio.run(main())
