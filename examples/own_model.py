"""Your own Hugging Face model by path: train it a little, save it, load it with plain transformers.

.venv/bin/python examples/own_model.py                  # makes a tiny Llama first, to have one
.venv/bin/python examples/own_model.py path/to/model    # any folder written by save_pretrained
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(folder: Path) -> Path:
    """A random Llama of some thousand parameters with a byte tokenizer; it can only babble."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bytes_ = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        chat_template=CHAT_TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@reward_function
def short(replies) -> float:
    """Shorter is better: something that even babbling can learn."""
    return -sum(len(message.content) for message in replies) / 100


async def main(model: Path) -> None:
    """Two steps, saved to `trained/` and loaded again."""
    agent = MultiTurnAgent(AgentConfig(model_name=str(model), max_new_tokens=24))
    environment = ConversationEnvironment([{"topic": "shipping"}, {"topic": "refund"}], max_turns=2)
    config = TrainingConfig(max_steps=2, num_generations=4, learning_rate=1e-3, run_name="own-model")
    async with MultiTurnGRPOTrainer(agent, environment, short, config) as trainer:
        await trainer.train()
        saved = await agent.save_pretrained(trainer.run.path / "trained")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    print(f"{saved}: {loaded.num_parameters():,} parameters, {len(tokenizer)} tokens, by transformers alone")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else make_tiny_model(Path(folder))))
