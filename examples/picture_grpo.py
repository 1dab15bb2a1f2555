"""A small vision-language model learns to add two drawn digits: warm start, GRPO, and what it sees.

    .venv/bin/python examples/picture_grpo.py                       # some minutes; docs/multimodal.md
    .venv/bin/python examples/picture_grpo.py --sft-steps 4 --steps 2 --episodes 20    # only that it runs

The model is a SmolVLM of half a million random parameters. It is shown drawings and told to read them or to
add them, and then trained by GRPO on the verdict alone. Both are measured on pictures that it never saw, and
once more with each picture exchanged for another one: an agent that does not look loses nothing by that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from stateset_agents import (
    AgentConfig,
    MultiTurnAgent,
    MultiTurnGRPOTrainer,
    SFTConfig,
    SFTTrainer,
    TrainingConfig,
)
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.problems import PictureProblems
from stateset_agents.evaluation.evaluator import Evaluation, evaluate, held_out
from stateset_agents.types.messages import Message

CONTROL = ["<|end|>", "<|user|>", "<|assistant|>"]
OF_PICTURES = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INITIAL = 0.1
"""About 1 / sqrt(width): with the .02 of larger models this one takes far longer to see anything."""
PICTURES: dict[str, Any] = {"system_prompt": "", "answer_in": "reply"}


def make_model(folder: Path, seed: int) -> str:
    """Write a random SmolVLM and its processor, which reads pictures of 32 pixels in four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: id for id, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([*CONTROL, *OF_PICTURES])
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers
        tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    settings: dict[str, Any] = {"pad_token_id": end}
    config = SmolVLMConfig(
        **settings,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        vision_config={
            **{"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8, "initializer_range": INITIAL},
        },
        text_config={
            **{"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128},
            **{"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"max_position_embeddings": 128, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end},
            **{"initializer_range": INITIAL},
        },
    )
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def shown(number: int, seed: int) -> list[dict[str, Any]]:
    """Conversations about pictures that GRPO does not train on: each is read, or added."""
    pictures = PictureProblems(num_train=number, seed=1_000_003 + seed, **PICTURES)
    chats = []
    for place, problem in enumerate(pictures.scenarios("train")):
        of = problem.context
        is_read = place // 10 % 2  # the left digits come in turn, and all of them are read and added
        asked = problem.opening.replace("add", "read") if is_read else problem.opening
        said = f"{of['left']}{of['right']}" if is_read else str(of["answer"])
        question = Message(role="user", content=asked, images=(pictures.picture(problem),))
        reply = Message(role="assistant", content=said)
        chats.append({"messages": [question.to_openai(), reply.to_openai()]})
    return chats


async def measured(name: str, model: Path | str, episodes: int) -> dict[str, Evaluation]:
    """Greedy success on held-out pictures: as they are, and each exchanged for another."""
    results = {}
    for pictures, shuffled in (("own pictures", False), ("shuffled", True)):
        environment = PictureProblems(shuffled=shuffled, **PICTURES)
        async with MultiTurnAgent(AgentConfig(model_name=str(model), max_new_tokens=4)) as agent:
            scenarios = held_out(environment, "test", None)[:episodes]
            result = await evaluate(agent, environment, EnvironmentReward(), scenarios, temperature=0)
        assert result.success is not None
        assert result.interval is not None
        low, high = result.interval
        print(
            f"{name}, {pictures}: {result.success:.1%} [{low:.1%}, {high:.1%}] of {result.n}",
            flush=True,
        )
        results[pictures] = result
    return results


async def warm_started(options: argparse.Namespace) -> Path:
    """The folder of a new model that was shown pictures."""
    model = make_model(options.output / "model", options.seed)
    began = time.process_time()
    settings = SFTConfig(
        learning_rate=1e-3,
        max_steps=options.sft_steps,
        per_device_train_batch_size=32,
        validation_share=0.02,
        eval_steps=options.sft_steps,
        precision="fp32",
        seed=options.seed,
        output_dir=str(options.output),
    )
    chats = shown(min(12_000, 40 * options.sft_steps), options.seed)
    agent = MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=4))
    async with SFTTrainer(agent, chats, settings) as trainer:
        await trainer.train()
        print(f"warm start: {time.process_time() - began:.0f} CPU seconds", flush=True)
        return trainer.model_folder


async def main() -> None:
    """Model, warm start, GRPO; measured after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--warm", type=Path, help="the model of a warm start that stands, instead of one")
    parser.add_argument("--episodes", type=int, default=1000, help="held-out pictures")
    parser.add_argument("--freeze-vision", action="store_true", help="GRPO leaves the vision encoder alone")
    options = parser.parse_args()
    warm = options.warm or await warm_started(options)
    config = AgentConfig(model_name=str(warm), max_new_tokens=4)
    results = {"warm start": await measured("warm start", warm, options.episodes)}

    began = time.process_time()
    training = TrainingConfig(
        num_generations=8,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,
        max_steps=options.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        freeze_vision=options.freeze_vision,
        precision="fp32",
        seed=options.seed,
        output_dir=str(options.output),
        run_name="grpo",
    )
    agent = MultiTurnAgent(config)
    problems = PictureProblems(seed=options.seed, **PICTURES)
    async with MultiTurnGRPOTrainer(agent, problems, EnvironmentReward(), training) as trainer:
        await trainer.train()
        final = await agent.save_pretrained(trainer.run.path / "agent")
        await agent.close()
    print(f"GRPO: {time.process_time() - began:.0f} CPU seconds", flush=True)
    results["GRPO"] = await measured("after GRPO", final, options.episodes)
    table = {
        stage: {name: [result.success, result.interval, result.n] for name, result in by_name.items()}
        for stage, by_name in results.items()
    }
    (options.output / "results.json").write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
