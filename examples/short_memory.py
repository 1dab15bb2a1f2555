"""A talk that is longer than the context: the agent learns to write summaries that hold what matters.

    .venv/bin/python examples/short_memory.py
    .venv/bin/python examples/short_memory.py --mask-summaries   # what not to do

The user says early on which colour is theirs, and asks for it at the end. With `history: compact` the agent
is asked for a summary when the context is nearly full, and goes on from it: what the summary leaves out is
lost. The starter model answers from what it reads, and its summaries name a colour at random, so that one
talk in four comes out right. Training rewards the last answer alone. A summary is a turn like any other:
trained with the return of its conversation it learns to carry the colour; masked it stays at chance.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from stateset_agents import (
    AgentConfig,
    EnvironmentReward,
    Message,
    MultiTurnAgent,
    Scenario,
    SFTConfig,
    SFTTrainer,
)
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.embedded.network import new_model
from stateset_agents.embedded.tokenizer import build_tokenizer, texts
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.update import critic
from stateset_agents.training.update.batch import CreditedBatch, assign_credit

COLOURS = ("red", "green", "blue", "grey")
NAMES = {"train": "ada ben cyd dan", "test": "eva fay gus hal"}
SMALL_TALK = ("it is late.", "are you there?", "good.")
ASK, SUM_UP = "which colour is mine?", "sum up."
SUMMARY = "Summary of the conversation so far:"


def short_memory() -> ConversationEnvironment:
    """Talks about a colour; right is an answer that names it, and no other."""
    scenarios = [
        {
            "id": f"{name}-{colour}",
            "opening": f"hello, i am {name}.",
            "split": split,
            "context": {"script": [f"my colour is {colour}.", *SMALL_TALK, ASK], "colour": colour},
        }
        for split, names in NAMES.items()
        for name in names.split()
        for colour in COLOURS
    ]

    def names_it(scenario: Scenario, replies: tuple[Message, ...]) -> bool:
        named = [colour for colour in COLOURS if replies and colour in replies[-1].content]
        return named == [scenario.context["colour"]]

    return ConversationEnvironment(scenarios, success=names_it, max_turns=8)


def demonstration(draw: random.Random) -> list[Message]:
    """A talk of somebody who answers from what stands there, and sums up without care."""
    name, colour = draw.choice(" ".join(NAMES.values()).split()), draw.choice(COLOURS)
    said = [f"hello, i am {name}."]
    if draw.random() < 0.5:
        said[0] += f"\n\n{SUMMARY}\nyour colour is {colour}."
    else:
        said += ["hello.", f"my colour is {colour}."]
    for words in draw.sample(SMALL_TALK, draw.randrange(4)):
        said += ["yes.", words]
    said += ["yes.", SUM_UP, f"your colour is {draw.choice(COLOURS)}."]
    if draw.random() < 0.5:
        said[-2:] = [ASK, f"{colour}."]
    return [
        Message(role="assistant" if place % 2 else "user", content=text) for place, text in enumerate(said)
    ]


async def make_starter(folder: Path, seed: int) -> Path:
    """A model of half a million weights that has seen 2000 demonstrations; its folder."""
    draw = random.Random(seed)
    shown = [demonstration(draw) for _ in range(2000)]
    tokenizer = build_tokenizer(texts(shown), max_length=256)
    tokenizer.save_pretrained(folder)
    new_model(tokenizer, seed=seed).save_pretrained(folder)
    config = SFTConfig(
        max_steps=200,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_min_ratio=0.1,
        warmup_ratio=0.1,
        weight_decay=0.0,
        adam_beta2=0.98,  # with .999 the starter's summaries were so fixed that nothing could be learned
        validation_share=0.0,
        save_steps=0,
        seed=seed,
        output_dir=str(folder / "runs"),
    )
    chats = [{"messages": [message.to_openai() for message in talk]} for talk in shown]
    agent = MultiTurnAgent(AgentConfig(model_name=str(folder), max_new_tokens=8))
    async with SFTTrainer(agent, chats, config) as trainer:
        await trainer.train()
        shutil.copytree(trainer.model_folder, folder, dirs_exist_ok=True)
    return folder


async def main(steps: int, seed: int, output_dir: str) -> tuple[float, float]:
    """Shares of talks that come out right, before and after."""
    environment = short_memory()
    with tempfile.TemporaryDirectory() as folder:
        config = AgentConfig(
            model_name=str(await make_starter(Path(folder), seed)),
            max_new_tokens=8,
            max_context_tokens=64,
            history="compact",
            compact_room=20,
            compact_prompt=SUM_UP,
        )
        async with MultiTurnAgent(config) as agent:
            training = TrainingConfig(
                max_steps=steps,
                num_generations=8,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=6e-4,
                lr_scheduler_type="constant",
                use_reference_model=False,
                save_steps=0,
                seed=seed,
                output_dir=output_dir,
            )
            shares = []
            trainer = MultiTurnGRPOTrainer(agent, environment, EnvironmentReward(), training)
            for work in (trainer.initialize, trainer.train):
                await work()
                result = await evaluate(
                    agent, environment, EnvironmentReward(), environment.scenarios("test"), tries=8
                )
                shares.append(result.success or 0.0)
                print(f"{shares[-1]:.0%} of {result.n} talks come out right")
            await trainer.close()
    return shares[0], shares[1]


def mask_summaries() -> None:
    """Let updates leave out what the agent wrote for itself."""

    def masked(*arguments: Any) -> CreditedBatch:
        credited = assign_credit(*arguments)
        samples = []
        for sample in credited.samples:
            summary = [turn.is_summary for turn in sample.trajectory.turns for _ in turn.completion.token_ids]
            pairs = zip(sample.advantages, summary, strict=True)
            samples.append(replace(sample, advantages=tuple(0.0 if bit else value for value, bit in pairs)))
        return replace(credited, samples=samples)

    critic.assign_credit = masked


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mask-summaries", action="store_true")
    parser.add_argument("--output-dir", default="runs")
    arguments = parser.parse_args()
    if arguments.mask_summaries:
        mask_summaries()
    asyncio.run(main(arguments.steps, arguments.seed, arguments.output_dir))
