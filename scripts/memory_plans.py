"""The plans of docs/evidence/planned-bytes.md: Qwen3's shapes on GPUs of 24 and 80 GB.

    OMP_NUM_THREADS=1 python -m scripts.memory_plans            print the table, about five minutes
    OMP_NUM_THREADS=1 python -m scripts.memory_plans --write    put it into that page

Nothing is loaded and no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from transformers import Qwen3Config

from scripts.page_tables import print_table
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.memory_plan import GB, MemoryPlan, parse_memory, plan_memory

SHAPES: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
"""Name -> hidden size, intermediate size, layers, heads, key-value heads, are embeddings tied."""


def plan(name: str, lora: bool, memory: str) -> MemoryPlan:
    """The plan of one shape."""
    hidden, inner, layers, heads, kv_heads, tied = SHAPES[name]
    model = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
    )
    training = TrainingConfig(
        lora={"rank": 16} if lora else None, beta=0.0, per_device_train_batch_size=8, rollout_sleep=True
    )
    agent = AgentConfig(model_name=name, max_context_tokens=2048)
    return plan_memory(model, agent, training, name=name, total=parse_memory(memory))


def table() -> Iterator[str]:
    """The lines of the page's table."""
    yield "| | GPU | start | rollouts | update | hand-over | passes | |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in SHAPES:
        for lora in (True, False):
            for memory in ("24GB", "80GB"):
                made = plan(name, lora, memory)
                phases = " | ".join(f"{phase.bytes / GB:.1f}" for phase in made.phases)
                how = "recomputed" if made.gradient_checkpointing else "kept"
                verdict = "does not fit" if made.too_large else ""
                kind = "LoRA" if lora else "all weights"
                yield (
                    f"| {name}, {kind} | {memory} | {phases} | {made.micro_batch_tokens:,} tokens, {how} "
                    f"| {verdict} |"
                )


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description="Plans of the memory of Qwen3's shapes.")
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    print_table("evidence/planned-bytes.md", "memory-plans", table(), write=parser.parse_args().write)


if __name__ == "__main__":
    main()
