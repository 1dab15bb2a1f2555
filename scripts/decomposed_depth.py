"""Deeper expressions than any in training: does it pay to have them solved in parts, and at what cost?

    python -m scripts.decomposed_depth
    python -m scripts.decomposed_depth --cut-to 6 --folder runs/decomposed-depth-6
    python -m scripts.decomposed_depth --write  # the table of docs/hierarchical.md too

A network as small as `embedded:reasoner` is shown expressions of 2 to 4 operations, solved in one thought
and solved in parts, as many of both, and is then asked for 2 to 8, both ways. With `--cut-to 6` it is shown
those of 5 and 6 too, in parts alone. No expression is among those that it was shown. What is there already
(runs/decomposed-depth/SEED.json) is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.page_tables import mean_and_range, write_table
from stateset_agents.types.messages import Message

SHOWN, DEEPER = (2, 3, 4), (5, 6, 8)
CONTEXT = 512
PROMPTS: Mapping[str, Any] = {"system_prompt": "", "decompose_prompt": "in parts"}


def template() -> str:
    """The reasoner's, with calls as the desk's has them."""
    from stateset_agents.embedded.recipes.recipe import written

    said = "{{ message.content or '' }}"
    calls = written("desk.jinja").partition(said)[2].partition("<|end|>")[0].rstrip("\n-")
    head, _, tail = written("reasoner.jinja").partition(f"{said}<|end|>")
    return f"{head}{said}{calls}<|end|>{tail}"


def recipe(seed: int, problems: int, steps: int, cut_to: int = SHOWN[-1]) -> Any:
    """A part's own conversation is shown as often as it is asked for."""
    from stateset_agents.embedded.recipes import reasoner
    from stateset_agents.environments.problems import DecomposedArithmetic

    dialogues: list[tuple[Message, ...]] = []
    for operations in range(SHOWN[0], cut_to + 1):
        environment = DecomposedArithmetic(
            **PROMPTS,
            min_operations=operations,
            max_operations=operations,
            num_train=problems,
            seed=seed,
            habits={"careful": 1.0},
        )
        for scenario in environment.scenarios("train"):
            if operations in SHOWN:
                solved = environment.solve(scenario)
                reply = Message(
                    role="assistant",
                    content=f"<answer> {solved.answer} </answer>",
                    reasoning=solved.between.join(solved.steps),
                )
                dialogues.append((Message(role="user", content=scenario.opening), reply))
            dialogues += [tuple(row) for row in environment.demonstrate(scenario)]
    made = reasoner.recipe(seed=seed, steps=steps, dialogues=3)
    return replace(
        made,
        vocabulary=dialogues,
        phases=[replace(made.phases[0], dialogues=dialogues)],
        context_length=CONTEXT,
        max_new_tokens=96,
        chat_template=template(),
    )


async def look(folder: Path, operations: int, seed: int, episodes: int) -> dict[str, Any]:
    """Success both ways on held-out expressions of so many operations, and the tokens of a problem."""
    from stateset_agents import AgentConfig, MultiTurnAgent
    from stateset_agents.core.reward import EnvironmentReward
    from stateset_agents.environments.problems import ArithmeticProblems, DecomposedArithmetic
    from stateset_agents.evaluation.evaluator import evaluate, held_out
    from stateset_agents.reasoning.hierarchical import tokens_by_role

    config = AgentConfig(model_name=str(folder), max_new_tokens=96, allow_hidden_tools=True)
    settings: dict[str, Any] = {
        "min_operations": operations,
        "max_operations": operations,
        "num_train": 10,
        "seed": seed,
    }
    ways = {
        "direct": ArithmeticProblems(system_prompt="", **settings),
        "in parts": DecomposedArithmetic(**PROMPTS, **settings),
    }
    found: dict[str, Any] = {}
    async with MultiTurnAgent(config) as agent:
        for name, environment in ways.items():
            scenarios = held_out(environment, "test", episodes)
            played = await evaluate(agent, environment, EnvironmentReward(), scenarios, tries=4)
            greedy = await evaluate(agent, environment, EnvironmentReward(), scenarios, temperature=0.0)
            trajectories = [each for group in played.groups for each in group.trajectories]
            roles: Counter[str] = Counter()
            for each in trajectories:
                roles.update(tokens_by_role(each))
            found[name] = {
                "sampled": played.success,
                "interval": played.interval,
                "greedy": greedy.success,
                "tokens": fmean(each.num_agent_tokens for each in trajectories),
                "read": fmean(sum(len(turn.prompt_ids) for turn in each.turns) for each in trajectories),
                "roles": {role: count / len(trajectories) for role, count in roles.items()},
            }
    return found


def tell(step: int, steps: int, loss: float) -> None:
    """Now and then."""
    if step % 500 == 0:
        print(f"step {step}/{steps}: loss {loss:.3f}", flush=True)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: means over the seeds, and their range."""
    lines = [
        "| operations | direct, sampled | greedy | tokens | in parts, sampled | greedy | tokens |",
        "|---" * 7 + "|",
    ]
    for operations in (*SHOWN, *DEEPER):
        at = [record["by_operations"][str(operations)] for record in records]
        cells = []
        for way in ("direct", "in parts"):
            cells += [
                mean_and_range([one[way]["sampled"] for one in at]),
                mean_and_range([one[way]["greedy"] for one in at]),
                f"{fmean(one[way]['tokens'] for one in at):.0f}",
            ]
        lines.append(f"| {operations} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    import torch

    from stateset_agents.embedded.build import build_recipe

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--cut-to", type=int, default=SHOWN[-1], help="operations of the longest that is shown in parts"
    )
    parser.add_argument("--problems", type=int, default=2000, help="of each number of operations")
    parser.add_argument("--steps", type=int, default=2500, help="of 32 conversations")
    parser.add_argument("--episodes", type=int, default=100, help="held-out expressions of each number")
    parser.add_argument("--folder", type=Path, default=Path("runs/decomposed-depth"))
    parser.add_argument("--write", action="store_true", help="write the table into docs/hierarchical.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    records = []
    for seed in range(chosen.seeds):
        file = chosen.folder / f"{seed}.json"
        if not file.exists():
            model = chosen.folder / f"model-{seed}"
            if not (model / "recommended.yaml").is_file():
                build_recipe(
                    model, recipe(seed, chosen.problems, chosen.steps, chosen.cut_to), seed=seed, on_step=tell
                )
            record: dict[str, Any] = {"seed": seed, "by_operations": {}}
            for operations in (*SHOWN, *DEEPER):
                found = asyncio.run(look(model, operations, seed, chosen.episodes))
                record["by_operations"][str(operations)] = found
                print(seed, operations, json.dumps(found), flush=True)
            file.write_text(json.dumps(record))
        records.append(json.loads(file.read_text()))
    made = table(records)
    print(made)
    if chosen.write:
        write_table("hierarchical.md", f"depth-{chosen.cut_to}", made)


if __name__ == "__main__":
    main()
