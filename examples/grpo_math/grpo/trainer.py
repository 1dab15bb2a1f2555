"""From a YAML file to a trained model in `final/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stateset_agents.runs.trackers import WandbTracker, check_installed
from stateset_agents.training.experiment import Experiment, load_experiment


async def train(config: str, output_dir: str, wandb_project: str | None, **changes: Any) -> Path:
    """Train, measured before and after; returns `output_dir/final`, which plain transformers loads.

    `changes`: settings by their dotted names, such as `{"training.max_steps": 3}`.
    """
    callbacks = [WandbTracker(project=wandb_project)] if wandb_project else []
    check_installed(callbacks)  # before anything is measured
    settings = load_experiment(config, {**changes, "training.output_dir": output_dir})
    final = Path(output_dir) / "final"
    async with Experiment(settings, callbacks=callbacks) as experiment:
        before = await experiment.before()
        await experiment.train()
        after = await experiment.after()
        await experiment.trainer.agent.save_pretrained(final)
    for stage, result in (("before", before), ("after", after)):
        if result is not None:
            print(f"{stage:<7} success {result['success']:.1%}, greedy {result['greedy']:.1%}")
    return final
