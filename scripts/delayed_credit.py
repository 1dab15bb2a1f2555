"""What does each advantage estimator need to learn where credit comes late and among noise?

A toy with a known answer, through the whole trainer. In every other turn the user says one of two letters:
after one the right reply begins with an even token, after the other with an odd one. Of these four turns
the first and the third pay at once, the second two turns later, and the last pays the conversation as a
whole. The turns between pay -1 or 1 by chance. Who does not listen is right half of the time.

    python scripts/delayed_credit.py    # some minutes; docs/images/delayed-credit.svg, and a table to stdout
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import RewardFunction, RewardResult
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory

COMPARED: Mapping[str, Mapping[str, Any]] = {name: {} for name in ESTIMATORS}
"""Estimator -> its settings beyond those that all have."""
THRESHOLD = 0.8
WINDOW = 3
"""Steps in a row whose mean must reach the threshold."""
CONVERSATIONS = 32
"""Of one step."""

LETTERS = {"a": 0, "b": 1}
"""What the user says, and what the right token's id leaves when divided by two."""
NOISE = "c"
LATE = (0, 2, 0, None)
"""Turns until the four turns that matter are paid; None: in the conversation's own reward."""
TEMPLATE = (
    "{% for m in messages %}"
    "{{ m.content + '<|end|>' if m.role == 'assistant' else '<|user|>' + m.content }}"
    "{% endfor %}"
)
"""The letter is the last token before the reply: hard is here whom to credit, not to listen."""


class LatePay(RewardFunction):
    """Pays each right reply when `LATE` says; the turns between pay by chance."""

    local = True

    async def score(self, trajectory: Trajectory) -> RewardResult:
        earned, outcome, right = [0.0] * len(trajectory.turns), 0.0, rights(trajectory)
        sampled: list[int] = []
        for turn, turn_taken in enumerate(trajectory.turns):
            sampled.extend(turn_taken.completion.token_ids)
            late = LATE[turn // 2]
            if turn % 2:
                earned[turn] += 2.0 * (derive(trajectory.seed, *sampled) % 2) - 1.0
            elif late is None:
                outcome += right[turn // 2]
            else:
                earned[turn + late] += right[turn // 2]
        share = fmean(map(float, right))
        return RewardResult(
            score=sum(earned) + outcome, turn_rewards=tuple(earned), breakdown={"right": share}
        )


def rights(trajectory: Trajectory) -> list[bool]:
    """Was the reply right, in each of the turns that matter?"""
    first = [turn.completion.token_ids[0] for turn in trajectory.turns[::2]]
    letters = trajectory.scenario.id.split("-")[1]
    return [token % 2 == LETTERS[letter] for token, letter in zip(first, letters, strict=True)]


def environment() -> ConversationEnvironment:
    """Sixteen conversations, one for each four letters."""
    scenarios = []
    for number in range(2 ** len(LATE)):
        letters = [list(LETTERS)[number >> bit & 1] for bit in range(len(LATE))]
        lines = [line for letter in letters for line in (letter, NOISE)]
        name = f"{number}-{''.join(letters)}"
        scenarios.append({"id": name, "opening": lines[0], "context": {"script": lines[1:]}})
    return ConversationEnvironment(scenarios, max_turns=2 * len(LATE) + 1)


def policy(seed: int, reply_tokens: int) -> MultiTurnAgent:
    """A fresh transformer of 37 thousand weights over bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = ByteLevel()
    raw.add_special_tokens(["<|end|>", "<|user|>"])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>", extra_special_tokens=["<|user|>"]
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    config = AgentConfig(model_name="toy", chat_template=TEMPLATE, max_new_tokens=reply_tokens)
    backend = HuggingFaceBackend(model, HuggingFaceTokenizer(tokenizer), copy_model=False)
    return MultiTurnAgent(config, backend=backend)


class Curve(NamedTuple):
    """One run, step by step."""

    right: list[float]
    """Share of right replies in the step's conversations."""
    tokens: list[float]
    """Sampled so far, in branches too."""


async def run(estimator: str, seed: int, *, steps: int, reply_tokens: int) -> Curve:
    """Train a fresh policy; every estimator has the same settings beside its own defaults."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "advantage_estimator": estimator,
            "seed": seed,
            "max_steps": steps,
            "num_generations": 8,
            "per_device_train_batch_size": CONVERSATIONS // 8,
            "gradient_accumulation_steps": 1,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "beta": 0.0,
            "loss_length": 2 * len(LATE) * reply_tokens,
            "save_steps": 0,
            "log_rollouts": False,
            "output_dir": folder,
        }
        config = TrainingConfig(progress=False, **{**settings, **COMPARED[estimator]})
        trainer = MultiTurnGRPOTrainer(policy(seed, reply_tokens), environment(), LatePay(), config)
        await trainer.train()
        lines = [line.values for line in RunLog(trainer.run).metrics() if "reward/right" in line.values]
        await trainer.close()
    tokens, so_far = [], 0.0
    for line in lines:
        so_far += line["tokens/agent"] + line.get("tokens/branches", 0.0)
        tokens.append(so_far)
    return Curve([line["reward/right"] for line in lines], tokens)


def play(job: tuple[str, int], *, steps: int, reply_tokens: int) -> Curve:
    """One run in a process of its own."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    return asyncio.run(run(*job, steps=steps, reply_tokens=reply_tokens))


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of each `WINDOW` values in a row."""
    return [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


def reached(curve: Curve) -> int | None:
    """Steps until the threshold, or None."""
    hits = (index + WINDOW for index, value in enumerate(smooth(curve.right)) if value >= THRESHOLD)
    return next(hits, None)


def table(curves: Mapping[str, Sequence[Curve]], steps: int) -> str:
    """Markdown: what each estimator needed, median (lowest to highest) over the seeds."""
    lines = [
        f"| estimator | conversations to {THRESHOLD:.0%} right | tokens sampled | there | right at the end |",
        "|---|---|---|---|---|",
    ]
    for name, seeds in curves.items():
        hits = [reached(curve) for curve in seeds]
        num_reached = sum(hit is not None for hit in hits)
        needed = sorted(steps + 1 if hit is None else hit for hit in hits)

        def talks(step: float) -> str:
            return f"{step * CONVERSATIONS:,.0f}" if step <= steps else f">{steps * CONVERSATIONS:,}"

        middle = median(needed)
        sampled = median(curve.tokens[min(round(middle), steps) - 1] for curve in seeds)
        end = fmean(fmean(curve.right[-WINDOW:]) for curve in seeds)
        lines.append(
            f"| `{name}` | {talks(middle)} ({talks(needed[0])} to {talks(needed[-1])}) "
            f"| {'' if middle <= steps else '>'}{sampled:,.0f} | {num_reached} of {len(seeds)} | {end:.0%} |"
        )
    return "\n".join(lines)


COLOURS = ("#6b7280", "#2563eb", "#7c3aed", "#dc2626", "#ea580c", "#059669", "#0891b2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 120, 20, 48


def picture(curves: Mapping[str, Sequence[Curve]], steps: int) -> str:
    """An SVG: the median over seeds of the share of right replies, by conversations played."""

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / steps, 1)

    def y(share: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (share - 0.4) / 0.6, 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for share in (0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path d="M{LEFT} {y(share)}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>')
    for step in range(0, steps + 1, 10):
        middle = f'x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        parts.append(f"<text {middle}>{step * CONVERSATIONS:,}</text>")
    centre = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{centre}" y="{HEIGHT - 8}" text-anchor="middle">conversations played</text>')
    ends = {name: median(smooth(curve.right)[-1] for curve in seeds) for name, seeds in curves.items()}
    heights = spaced({name: y(end) for name, end in ends.items()})
    for (name, seeds), colour in zip(curves.items(), COLOURS, strict=False):
        middle_curve = [
            median(values) for values in zip(*(smooth(curve.right) for curve in seeds), strict=True)
        ]
        points = " ".join(f"{x(index + WINDOW)},{y(value)}" for index, value in enumerate(middle_curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{heights[name]}" fill="{colour}">{name}</text>')
    title = (
        "Share of right replies by conversations played, median of the seeds, for each advantage estimator"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    style = 'font-family="sans-serif" font-size="13" fill="#374151"'
    return f"{head} {style}><title>{title}</title>{''.join(parts)}</svg>\n"


def spaced(heights: Mapping[str, float]) -> dict[str, float]:
    """The labels' places, at least a line apart."""
    placed: dict[str, float] = {}
    lowest = -1e9
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        lowest = max(height + 4, lowest + 15)
        placed[name] = round(lowest, 1)
    return placed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--estimators", nargs="+", choices=list(COMPARED), default=list(COMPARED))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reply-tokens", type=int, default=1, help="only the first is right or wrong")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/delayed-credit.svg"))
    chosen = parser.parse_args()
    jobs = [(name, seed) for name in chosen.estimators for seed in range(chosen.seeds)]
    with ProcessPoolExecutor(chosen.processes) as pool:
        results = list(pool.map(partial(play, steps=chosen.steps, reply_tokens=chosen.reply_tokens), jobs))
    curves = {
        name: [curve for (played, _), curve in zip(jobs, results, strict=True) if played == name]
        for name in chosen.estimators
    }
    chosen.picture.parent.mkdir(parents=True, exist_ok=True)
    chosen.picture.write_text(picture(curves, chosen.steps))
    print(table(curves, chosen.steps))


if __name__ == "__main__":
    main()
