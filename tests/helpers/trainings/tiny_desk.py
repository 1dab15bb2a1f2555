"""A folder that a command line can train in, in a second: `from tiny_desk import write_desk`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from repository_paths import ROOT
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.experiment import Experiment, load_experiment

__all__ = ["PARTS", "RUN", "step_of_example", "write_desk"]

PARTS = """
import asyncio

from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function

@reward_function(local=True)
async def even_share(trajectory):
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    return sum(token % 2 == 0 for token in ids) / len(ids)

@reward_function(local=True)
async def broken(trajectory):
    raise ConnectionError("the judge is down")

class Closed(ConversationEnvironment):
    async def start(self, scenario, seed):
        raise ConnectionError("the desk is closed")

class Hanging(ConversationEnvironment):
    async def start(self, scenario, seed):
        await asyncio.sleep(60)
"""
RUN: dict[str, Any] = {
    "agent": {"model_name": "./model", "chat_template": "plain", "max_new_tokens": 3},
    "environment": {"name": "conversation", "scenarios": "calls.jsonl", "max_turns": 2},
    "reward": "cli_parts:even_share",
    "training": {"max_steps": 2, "num_generations": 2, "gradient_accumulation_steps": 1, "save_steps": 1},
}
"""What run.yaml says."""


def write_desk(folder: Path) -> None:
    """A model, scenarios, parts of its own (cli_parts.py) and run.yaml, which works as it stands."""
    tiny_model("gpt2").save_pretrained(folder / "model")
    tiny_tokenizer().hf.save_pretrained(folder / "model")
    calls = '{"opening": "hi"}\n{"opening": "hello"}\n{"opening": "ok", "split": "validation"}\n'
    (folder / "calls.jsonl").write_text(calls)
    (folder / "cli_parts.py").write_text(PARTS)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))


async def step_of_example(name: str, output: Path, **settings: Any) -> RunFolder:
    """Train one small step as this file of examples/ says, and `settings` of `training` say else."""
    sizes = {
        "max_steps": 1,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "output_dir": str(output),
    }
    overrides = {f"training.{key}": value for key, value in {**sizes, **settings}.items()}
    file = ROOT / "examples" / name
    async with Experiment(load_experiment(file, overrides), measures=False) as experiment:
        await experiment.train()
        await experiment.after()
    return RunFolder.open(output / "latest")
