"""Make the folder starter/: a small model with this desk's words and a careless librarian's manners.

It learns from 3000 scripted conversations, supervised, in half a minute. A model of your own, by name or
path, needs none of this.
"""

import asyncio
import random
import shutil

from library import library_desk

from stateset_agents import AgentConfig, MultiTurnAgent, SFTConfig, SFTTrainer
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.embedded.network import new_model
from stateset_agents.embedded.tokenizer import build_tokenizer, texts
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario


def say(text: str) -> Message:
    """A reply in words."""
    return Message(role="assistant", content=text)


def call(name: str, **arguments: str) -> Message:
    """A reply that calls a tool."""
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


def careless(scenario: Scenario, said: list[Message], draw: random.Random) -> Message:
    """The next reply. Often it does not look, forgets to renew, or renews what another reader waits for."""
    title, result = scenario.context["title"], said[-1].content
    if said[-1].role == "user":
        return call("renew_book" if draw.random() < 0.6 else "look_up", title=title)
    if "renewed" in result or draw.random() < 0.2:
        return say("it is renewed for two weeks.")
    if "yes" in result and draw.random() < 0.4:
        return say("sorry, someone waits for it.")
    return call("renew_book", title=title)


async def demonstration(desk: ConversationEnvironment, scenario: Scenario, seed: int) -> list[Message]:
    """One conversation of the careless librarian with a member."""
    conversation, draw = await desk.start(scenario, seed), random.Random(seed)
    said = list(conversation.opening)
    while True:
        said.append(careless(scenario, said, draw))
        answer = await conversation.step(said[-1])
        said.extend(answer.messages)
        if answer.terminated or answer.truncated:
            return said


async def main() -> None:
    """Write 3000 conversations, learn from them, save."""
    desk = library_desk()
    known = [scenario for split in ("train", "validation", "test") for scenario in desk.scenarios(split)]
    shown = [await demonstration(desk, known[seed % len(known)], seed) for seed in range(3000)]
    tokenizer = build_tokenizer(texts(shown), max_length=256)
    tokenizer.save_pretrained("starter")
    new_model(tokenizer, seed=0).save_pretrained("starter")
    chats = [{"messages": [message.to_openai() for message in dialogue]} for dialogue in shown]
    config = SFTConfig(
        max_steps=250, per_device_train_batch_size=16, learning_rate=3e-3, output_dir="starter/runs"
    )
    agent = MultiTurnAgent(AgentConfig(model_name="starter", max_new_tokens=48))
    async with SFTTrainer(agent, chats, config) as trainer:
        await trainer.train()
        shutil.copytree(trainer.model_folder, "starter", dirs_exist_ok=True)
        print(f"starter/: held-out loss {trainer.progress.best_value:.2f}")


asyncio.run(main())
