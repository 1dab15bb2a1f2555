"""What an agent forgets of one domain while it learns the next, without replay and with it.

    python -m scripts.forgetting --second equations
    python -m scripts.forgetting --second at-once
    python -m scripts.forgetting --second at-once --write  # its table in docs/evidence, too

A network as small as `embedded:reasoner` is shown how problems of both domains are solved in writing, and
then, as that model is, bad habits in both. GRPO teaches it expressions; from there it learns the second
domain, once with each share of replay. In `equations` thinking pays as it does in expressions; in `at-once`,
one operation with larger numbers, only a right answer without a thought counts. Everything begins anew for
each seed. What is there already (runs/forgetting/SECOND/SEED.json) is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.page_tables import mean_and_range, write_table
from stateset_agents.core.chat.replies.thoughts import read_reasoned
from stateset_agents.environments.problems import ArithmeticProblems, EquationProblems
from stateset_agents.types.messages import Message

SHARES = (0.0, 0.25, 0.5)
FIRST, SECONDS = "expressions", ("equations", "at-once")
SHOWN: Mapping[str, Mapping[str, float]] = {
    FIRST: {"careful": 1.0},
    "equations": {"careful": 1.0},
    "at-once": {"careful": 0.5, "empty": 0.5},
}
"""How the warm start solves each domain before the bad habits."""


class SumsAtOnce(ArithmeticProblems):
    """One operation, to be answered without a thought."""

    def __init__(self, *, num_train: int, **settings: Any) -> None:
        """Numbers up to 30: of 9 there are too few problems."""
        few = min(num_train, 600)
        super().__init__(min_operations=1, max_operations=1, max_operand=30, num_train=few, **settings)

    def answer(self, reply: Message) -> str | None:
        reasoned = read_reasoned(reply)
        return None if reasoned is None or reasoned.thinking.strip() else super().answer(reply)


def domains(second: str, seed: int, num_train: int) -> dict[str, Any]:
    """Both, with training problems of their own seed."""
    settings: dict[str, Any] = {"system_prompt": "", "num_train": num_train, "seed": seed}
    later = SumsAtOnce(**settings) if second == "at-once" else EquationProblems(max_level=2, **settings)
    return {FIRST: ArithmeticProblems(max_operations=3, **settings), second: later}


def recipe(second: str, seed: int, num_train: int, steps: int) -> Any:
    """The reasoner's two phases, with both domains: the skill, then the habits."""
    from dataclasses import replace

    from scripts.embedded_models import reasoner
    from stateset_agents.environments.problems.environment import choose_habit, reply_of
    from stateset_agents.types.seeds import derive

    def shown(habits_of: Mapping[str, Mapping[str, float]]) -> list[tuple[Message, ...]]:
        dialogues: list[tuple[Message, ...]] = []
        for name, environment in domains(second, seed, num_train).items():
            habits = habits_of[name]
            for scenario in environment.scenarios("train"):
                rng = random.Random(derive(seed, "habit", scenario.id))
                reply = reply_of(environment.solve(scenario), choose_habit(habits, rng), rng)
                dialogues.append((Message(role="user", content=scenario.opening), reply))
        return dialogues

    made = reasoner.recipe(seed=seed, steps=steps, dialogues=3)
    skill, habits = made.phases
    phases = [
        replace(skill, dialogues=shown(SHOWN)),
        replace(habits, dialogues=shown(dict.fromkeys(SHOWN, reasoner.BAD_HABITS))),
    ]
    return replace(made, phases=phases, vocabulary=phases[0].dialogues)


async def play(folder: Path, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One seed: the first domain, then the second with each share."""
    from scripts.embedded_models.reasoner import RECOMMENDED
    from stateset_agents import AgentConfig, TrainingConfig
    from stateset_agents.reasoning import ContinualGRPO

    second: str = chosen.second
    both = domains(second, seed, chosen.problems)

    def training(name: str) -> TrainingConfig:
        return TrainingConfig(
            **{
                **RECOMMENDED,
                "max_steps": chosen.steps,
                "seed": seed,
                "output_dir": str(folder / "runs"),
                "run_name": name,
                "save_steps": 0,
                "log_rollouts": False,
                "progress": False,
            }
        )

    def learner(model: Path, share: float) -> ContinualGRPO:
        return ContinualGRPO(
            AgentConfig(model_name=str(model), max_new_tokens=64),
            replay_share=share,
            eval_episodes=chosen.episodes,
            eval_tries=4,
        )

    def success(measured: Mapping[str, Any]) -> dict[str, Any]:
        return {name: [one.success, *one.interval] for name, one in measured.items()}

    record: dict[str, Any] = {"seed": seed, "shares": {}}
    async with learner(folder / "model", 0.0) as first:
        first.add_domain(second, both[second])  # to be measured
        began = time.process_time()
        learned = await first.learn_new_domain(both[FIRST], FIRST, training("first"))
        record["first"] = {"before": success(learned.before), "after": success(learned.after)}
        record["first_cpu_seconds"] = time.process_time() - began
        memory, trained = first.memory, await first.agent.save_pretrained(folder / "first")
    for share in chosen.shares:
        async with learner(trained, share) as later:
            later.memory = memory
            later.add_domain(FIRST, both[FIRST])
            began = time.process_time()
            learned = await later.learn_new_domain(both[second], second, training(f"share-{share:g}"))
            record["shares"][str(share)] = {
                "before": success(learned.before),
                "after": success(learned.after),
                "kept": learned.kept[FIRST],
                "cpu_seconds": time.process_time() - began,
            }
            print(seed, share, json.dumps(record["shares"][str(share)]), flush=True)
    return record


def table(second: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: means over the seeds, and their range."""
    firsts = [record["first"] for record in records]
    lines = [
        f"| after | {FIRST} | {second} | {FIRST} kept | CPU s |",
        "|---" * 5 + "|",
        f"| warm start | {_shares(second, firsts, 'before')} | | |",
        f"| {FIRST} | {_shares(second, firsts, 'after')} | | "
        f"{fmean(record['first_cpu_seconds'] for record in records):.0f} |",
    ]
    for share in records[0]["shares"]:
        at = [record["shares"][share] for record in records]
        cells = [
            f"{second}, replay {float(share):g}",
            _shares(second, at, "after"),
            mean_and_range([one["kept"] for one in at]),
            f"{fmean(one['cpu_seconds'] for one in at):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shares(second: str, stages: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Two cells of a row."""
    return " | ".join(mean_and_range([one[stage][name][0] for one in stages]) for name in (FIRST, second))


def main() -> None:
    import torch

    from scripts.build_embedded import build_recipe

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--second", choices=SECONDS, default="at-once", help="the domain that comes later")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--problems", type=int, default=4000, help="for training, of each domain")
    parser.add_argument("--skill-steps", type=int, default=2500, help="of the warm start's first phase")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--episodes", type=int, default=100, help="held-out problems of each domain")
    parser.add_argument("--folder", type=Path, help="runs/forgetting/SECOND when absent")
    parser.add_argument("--write", action="store_true", help="write the table into its page of docs/evidence")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    records = []
    into = chosen.folder or Path("runs/forgetting", chosen.second)
    for seed in range(chosen.seeds):
        file, folder = into / f"{seed}.json", into / str(seed)
        if not file.exists():
            if not (folder / "model" / "recommended.yaml").is_file():
                build_recipe(
                    folder / "model",
                    recipe(chosen.second, seed, chosen.problems, chosen.skill_steps),
                    seed=seed,
                )
            file.write_text(json.dumps(asyncio.run(play(folder, seed, chosen))))
        records.append(json.loads(file.read_text()))
    made = table(chosen.second, records)
    print(made)
    if chosen.write:
        write_table("evidence/forgotten-domains.md", f"forgetting-{chosen.second}", made)


if __name__ == "__main__":
    main()
