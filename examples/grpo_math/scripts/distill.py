"""Teach a student by what a teacher gets right: `distill.py --teacher-path runs/grpo-math/final`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from stateset_agents import AgentConfig, MultiTurnAgent, StatesetError
from stateset_agents.reasoning import ReasoningDistillation

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from grpo.data import problems  # noqa: E402  # the folder above is put on the path first


async def distill(chosen: argparse.Namespace) -> None:
    """Verified replies to training problems, then a fine-tuning on them."""
    environment = problems(chosen.dataset_path)
    teacher, student = (
        MultiTurnAgent(AgentConfig(model_name=path, max_new_tokens=64))
        for path in (chosen.teacher_path, chosen.student_path)
    )
    distillation = ReasoningDistillation(teacher, student, environment=environment)
    traces = await distillation.generate_distillation_data(max_length=64)
    distilled = await distillation.train_student(
        traces, output_dir=chosen.output_dir, max_steps=chosen.max_steps, learning_rate=5e-4, progress=False
    )
    await student.save_pretrained(Path(chosen.output_dir) / "final")
    await distillation.close()
    print(f"{traces.counts.kept} traces kept; in the format {distilled.before.format:.1%}", end=" ")
    print(f"before, {distilled.after.format:.1%} after; model: {Path(chosen.output_dir) / 'final'}")


def main() -> None:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher-path", required=True)
    parser.add_argument("--student-path", default="embedded:reasoner")
    parser.add_argument("--dataset-path", default=str(PROJECT / "data" / "math_problems.json"))
    parser.add_argument("--output-dir", default="runs/grpo-math-student")
    parser.add_argument("--max-steps", type=int, default=60)
    try:
        asyncio.run(distill(parser.parse_args()))
    except StatesetError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
