"""Draw how DeepSeek-R1 was made, and what does each stage here, for docs/reasoning.md.

    PYTHONPATH=. .venv/bin/python scripts/r1_pipeline.py    # docs/images/r1-pipeline.svg

The stages are the paper's (https://arxiv.org/abs/2501.12948, sections 2.2 to 2.4). Each command goes through
the command line's own parser and each class is imported, so a stage that nothing does cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.control_figures import FOLDER, arrow, box, svg, text
from stateset_agents.cli.main import command_parser
from stateset_agents.training.sft.distillation import ReasoningDistillation
from stateset_agents.training.sft.trainer import SFTTrainer
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

FILE = FOLDER / "r1-pipeline.svg"
_MODEL = "#ffffff"
_WIDE, _MODEL_HIGH, _STAGE_HIGH, _GAP = 236.0, 28.0, 72.0, 20.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One training of the pipeline."""

    name: str
    data: str
    """What it learns from in the paper."""
    command: str
    """What runs such a stage, without `stateset-agents`."""
    code: type
    """The class behind that command."""

    @property
    def lines(self) -> list[str]:
        """Lines of its box. Exits like the command line where it does not know the command."""
        command_parser().parse_args(self.command.split())
        return [self.name, self.data, f"stateset-agents {self.command}", self.code.__name__]


_RL = "RL (GRPO)"
COLUMNS: Sequence[tuple[str, Sequence[Stage | str]]] = (
    (
        "pure reinforcement",
        (
            "DeepSeek-V3-Base",
            Stage(_RL, "rewards by rule: answer, format", "train r1.yaml", MultiTurnGRPOTrainer),
            "R1-Zero",
        ),
    ),
    (
        "four stages",
        (
            "DeepSeek-V3-Base",
            Stage("cold-start SFT", "thousands of long thoughts", "sft cold.jsonl", SFTTrainer),
            Stage(_RL, "by rule, and for one language", "train r1.yaml", MultiTurnGRPOTrainer),
            Stage(
                "rejection sampling, SFT of the base",
                "600k replies found right, 200k others",
                "distill rejection.yaml",
                ReasoningDistillation,
            ),
            Stage(_RL, "by rule, and by reward models", "train r1.yaml", MultiTurnGRPOTrainer),
            "R1",
        ),
    ),
    (
        "distilled, without RL",
        (
            "Qwen2.5 and Llama 3",
            Stage(
                "SFT", "the 800k replies of R1's third stage", "distill traces.yaml", ReasoningDistillation
            ),
            "R1-Distill",
        ),
    ),
)
"""Title, and from top to bottom models and what makes one of the other."""


def pipeline() -> str:
    """The picture as SVG: a column for each kind of model."""
    drawn: list[str] = []
    lowest = 0.0
    for number, (title, entries) in enumerate(COLUMNS):
        left, y = 16 + number * (_WIDE + 10), 64.0
        drawn.append(text(left + _WIDE / 2, 52, title, anchor="middle"))
        for at, entry in enumerate(entries):
            high = _MODEL_HIGH if isinstance(entry, str) else _STAGE_HIGH
            if isinstance(entry, str):
                drawn.append(box(left + 40, y, _WIDE - 80, high, [entry], _MODEL))
            else:
                drawn.append(box(left, y, _WIDE, high, entry.lines))
            y += high
            if at + 1 < len(entries):
                drawn.append(arrow(left + _WIDE / 2, y, left + _WIDE / 2, y + _GAP))
                y += _GAP
        lowest = max(lowest, y)
    return svg("How DeepSeek-R1 was made, and what does each stage here", lowest + 16, drawn)


if __name__ == "__main__":
    FILE.write_text(pipeline(), encoding="utf-8")
