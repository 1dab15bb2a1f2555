"""The figures of docs/evidence/planned-bytes.md: which models a training keeps, and the bytes that they take.

    python scripts/memory_page.py            print the tables
    python scripts/memory_page.py --write    put them into that page, and draw its picture
    python scripts/memory_page.py --check    exit with 1 where one of the two is old

The table of measured bytes loads `embedded:desk` and makes one step with it; the rest is arithmetic.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.algorithms.memory import (
    FP32_MASTERS,
    MIXED_PRECISION,
    PARAMETERS_ALONE,
    BytesPerParameter,
    TrainingMemory,
    training_memory,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "planned-bytes.md"
PICTURE = PAGE.parents[1] / "images" / "memory.svg"
WITH_GRADIENTS = BytesPerParameter(weights=1, gradients=1, master=0, moments=2, frozen=1)


@dataclass(frozen=True)
class Algorithm:
    """Which models are kept beside the policy; sizes are shares of it."""

    name: str
    critic: float = 0.0
    reference: float = 0.0
    reward_model: float = 0.0

    def memory(self, parameters: float, per_parameter: BytesPerParameter) -> TrainingMemory:
        return training_memory(
            parameters,
            critic=self.critic * parameters,
            reference=self.reference * parameters,
            reward_model=self.reward_model * parameters,
            per_parameter=per_parameter,
        )


PPO = Algorithm("PPO, critic of equal size", critic=1, reference=1)
GRPO = Algorithm("GRPO, beta above 0", reference=1)
ALGORITHMS = (
    Algorithm("PPO with a reward model", critic=1, reference=1, reward_model=1),
    PPO,
    GRPO,
    Algorithm("GRPO, beta 0"),
)
MODELS = ("policy", "critic", "reference", "reward model")


def table(sizes: Sequence[float] = (7, 70)) -> str:
    """Bytes a parameter by model, and GB at `sizes` billion parameters."""
    columns = ["", *MODELS, *(f"{size:g}B" for size in sizes), "less than PPO"]
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for algorithm in ALGORITHMS:
        one = algorithm.memory(1, MIXED_PRECISION)
        by_model = [f"{one.of(model):g}" if one.of(model) else "-" for model in MODELS]
        totals = [f"{algorithm.memory(size, MIXED_PRECISION).total:,.0f} GB" for size in sizes]
        saved = 1 - one.total / PPO.memory(1, MIXED_PRECISION).total
        last = f"{saved:.1%}" if saved > 0 else "-"
        rows.append("| " + " | ".join([algorithm.name, *by_model, *totals, last]) + " |")
    return "\n".join(rows)


def counts() -> str:
    """The 490 and 280 that are quoted for 70B, and what the count leaves out."""
    columns = ("counted", "PPO", "GRPO", "saved")
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for words, unit, per_parameter in (
        ("weights and AdamW's moments, as numbers (billions)", "", PARAMETERS_ALONE),
        ("the same with gradients, as numbers (billions)", "", WITH_GRADIENTS),
        ("mixed precision, as bytes", " GB", MIXED_PRECISION),
        ("fp32 masters, as bytes", " GB", FP32_MASTERS),
    ):
        ppo, grpo = (one.memory(70, per_parameter) for one in (PPO, GRPO))
        parts = [_summed(memory, unit) for memory in (ppo, grpo)]
        rows.append(f"| {words} | {parts[0]} | {parts[1]} | {1 - grpo.total / ppo.total:.1%} |")
    return "\n".join(rows)


def _summed(memory: TrainingMemory, unit: str) -> str:
    """policy 70 + critic 70 + reference 70 + optimiser 280 = 490"""
    parts = [f"{model.name} {model.weights:g}" for model in memory.models]
    for name in ("gradients", "master", "moments"):
        total = sum(getattr(model, name) for model in memory.models)
        if total:
            parts.append(f"{name} {total:g}")
    return f"{' + '.join(parts)} = **{memory.total:g}{unit}**"


# ------------------------------------------------------------------------------ measured


def bytes_of(tensors: Iterable[Any]) -> int:
    """Of tensors that do not share their memory; tied ones count once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def optimizer_bytes(optimizer: Any) -> int:
    """Of an optimiser's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return bytes_of(value for value in values if hasattr(value, "data_ptr"))


def kept_bytes(learner: Any) -> dict[str, int]:
    """What a learner keeps after one optimiser step: measured on its tensors, gradients before the step."""
    import torch

    model = learner.policy.model
    ids = torch.arange(2, 34, device=learner.device)[None]
    torch.autograd.backward(torch.log_softmax(model(input_ids=ids).logits, -1)[..., 0].mean())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kept = {"weights": bytes_of(model.parameters()), "gradients": bytes_of(gradients)}
    learner.optimization.step()
    kept["moments"] = optimizer_bytes(learner.optimization.optimizer)
    if learner.critic is not None:
        function = learner.critic.value_function
        states = torch.zeros(1, model.config.hidden_size, device=learner.device)
        function.update_value_function(states, old_values=torch.zeros(1), returns=torch.ones(1))
        head = list(function.head.parameters())
        kept["critic"] = 2 * bytes_of(head) + optimizer_bytes(function.optimizer)  # its gradients are freed
    if learner.reference is not None and learner.reference.model is not model:
        kept["reference"] = bytes_of(learner.reference.model.parameters())
    return kept


async def _desk() -> tuple[Any, int]:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent

    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", device="cpu"))
    await agent.initialize()
    model = agent.backend.master_model()  # type: ignore[attr-defined]  # an in-process model has one
    await agent.close()
    return model, sum(parameter.numel() for parameter in {*model.parameters()})


def measured() -> str:
    """This package's trainer on `embedded:desk`: kept bytes against `training_memory`'s."""
    import copy

    from stateset_agents.training.config import TrainingConfig
    from stateset_agents.training.update.learner import Learner

    model, parameters = asyncio.run(_desk())
    columns = ("`advantage_estimator`", "beta", "computed", "measured", "of that the critic")
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for estimator, beta in (("group", 0.0), ("group", 0.04), ("token_gae", 0.0), ("token_gae", 0.04)):
        config = TrainingConfig(advantage_estimator=estimator, beta=beta)
        learner = Learner(copy.deepcopy(model), config, num_steps=1, exact_logprobs=True)
        kept = kept_bytes(learner)
        head = 0
        if learner.critic is not None:
            head = sum(parameter.numel() for parameter in learner.critic.value_function.head.parameters())
        computed = training_memory(
            parameters, critic=head, reference=parameters if beta else 0, per_parameter=FP32_MASTERS
        ).total
        total = sum(kept.values())
        rows.append(
            f"| {estimator} | {beta:g} | {computed:,.0f} | {total:,} ({total / computed:.2%}) "
            f"| {kept.get('critic', 0) / total:.1%} |"
        )
    return f"Of {parameters:,} parameters, in bytes:\n\n" + "\n".join(rows)


# ------------------------------------------------------------------------------ pictures


def models() -> str:
    """Which models take part in a step, as text."""
    return """PPO     prompt -> [policy*] -> reply ---> reward ------------> advantage by GAE -> policy*
                        |                                       ^
                        +--> [critic*] values of each token ----+
                        +--> [reference] KL

GRPO    prompt -> [policy*] -> G replies -> G rewards -> less their mean -> advantage -> policy*
                        |
                        +--> [reference] KL, where beta is above 0

* trained: weights, gradient, master copy and two moments are kept; the others are weights alone."""


PARTS: Mapping[str, str] = {
    "weights": "#1d4ed8",
    "gradients": "#0f766e",
    "master": "#b45309",
    "moments": "#9d174d",
}
_WORDS = {"master": "master copy", "moments": "AdamW's moments"}
_WIDTH, _LEFT, _ROW, _TOP = 720, 190, 44, 62


def picture(size: float = 7) -> str:
    """Stacked bars of every algorithm at `size` billion parameters, as SVG."""
    memories = {algorithm.name: algorithm.memory(size, MIXED_PRECISION) for algorithm in ALGORITHMS}
    longest = max(memory.total for memory in memories.values())
    title = f"Memory of weights and optimiser at {size:g}B, mixed precision"
    spoken = "; ".join(f"{name} {memory.total:.0f} GB" for name, memory in memories.items())
    drawn = [f'<text x="10" y="20" font-weight="bold">{title}</text>']
    x = float(_LEFT)
    for part, colour in PARTS.items():
        words = _WORDS.get(part, part)
        drawn.append(f'<rect x="{x:g}" y="32" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 17:g}" y="42">{words}</text>')
        x += 40 + 7 * len(words)
    for row, (name, memory) in enumerate(memories.items()):
        y = _TOP + row * _ROW
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 19}" text-anchor="end">{name}</text>')
        x = float(_LEFT)
        for part, colour in PARTS.items():
            for model in memory.models:
                width = (_WIDTH - _LEFT - 80) * getattr(model, part) / longest
                if width:
                    drawn.append(
                        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="28" fill="{colour}" '
                        f'stroke="#ffffff"><title>{model.name}: {part} {getattr(model, part):g} GB'
                        "</title></rect>"
                    )
                    x += width
        drawn.append(f'<text x="{x + 8:.1f}" y="{y + 19}">{memory.total:.0f} GB</text>')
    height = _TOP + len(memories) * _ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
    style = 'font-family="sans-serif" font-size="12" fill="#374151"'
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    named = f"<title>{title}</title><desc>{spoken}</desc>"
    return f"{head} {style}>{named}{background}{''.join(drawn)}</svg>\n"


# ------------------------------------------------------------------------------ the page


def filled(page: str) -> str:
    """The page with its figures as they are."""
    blocks = {
        "table": table(),
        "counts": counts(),
        "measured": measured(),
        "models": f"```text\n{models()}\n```",
    }
    for name, text in blocks.items():
        begin, end = f"<!-- scripts/memory_page.py {name} -->\n", "<!-- end -->"
        if page.count(begin) != 1:
            raise SystemExit(
                f"{PAGE.name} has {page.count(begin)} places for {name}, wanted 1: {begin.strip()}"
            )
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> int:
    """0 when page and picture are (now) up to date."""
    words = sys.argv[1:]
    if not words:
        print("\n\n".join((table(), counts(), measured(), models())))
        return 0
    page = PAGE.read_text(encoding="utf-8")
    wanted = {PAGE: filled(page), PICTURE: picture()}
    if "--check" in words:
        old = [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]
        if old:
            print(f"{', '.join(old)} old: run python scripts/memory_page.py --write", file=sys.stderr)
        return bool(old)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
