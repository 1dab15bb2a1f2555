"""`stateset-agents build-embedded`: make the embedded model anew, from demonstrations to folder.

Demonstrations, tokenizer, a fresh network, a fine-tuning in which what the agent copies weighs more, one
folder. The verb stands where it may join the recipe in `embedded/` and the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.embedded.demonstrations import Dialogue
    from stateset_agents.environments.retail_desk.agents import Habits
    from stateset_agents.training.sft.demonstrations import Demonstrations
    from stateset_agents.training.update.batch import Sample

__all__ = ["BuildResult", "Copying", "add_parser", "build_embedded", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The result of a build."""

    folder: Path
    num_parameters: int
    num_bytes: int
    """Of the weights' file."""
    mean_tokens: float
    """Of a demonstration."""
    losses: tuple[float, ...]
    """Of every step."""
    seconds: float


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("build-embedded", help="make the embedded model (embedded:desk) anew")
    parser.add_argument(
        "output", type=Path, help="folder for the model; load it as AgentConfig(model_name=...)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of demonstrations, weights and order (default 0)"
    )
    parser.add_argument("--steps", type=int, help="warm-up steps (default: as the shipped model)")
    parser.add_argument("--dialogues", type=int, help="demonstrations (default: as the shipped model)")
    parser.add_argument(
        "--threads", type=int, default=1, help="same seed and threads, same bytes (default 1)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is written."""
    import torch
    from transformers.utils import logging as transformers_logging

    if args.threads < 1:
        raise ConfigurationError(f"--threads must be at least 1, got {args.threads}")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)

    def tell(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)

    try:
        built = build_embedded(
            args.output, seed=args.seed, steps=args.steps, dialogues=args.dialogues, on_step=tell
        )
    finally:
        torch.set_num_threads(before)
    print(
        f"{built.folder}: {built.num_parameters:,} parameters, {built.num_bytes / 1e6:.1f} MB, "
        f"{built.seconds:.0f} s; dialogues of {built.mean_tokens:.0f} tokens on average"
    )
    return 0


def build_embedded(
    output: str | Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    dialogues: int | None = None,
    habits: Habits | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> BuildResult:
    """Build into the folder `output`; plain transformers loads it.

    `steps`, `dialogues` and `habits` are the recipe's where unset; `Habits()` gives the model that was shown
    honest work only. `on_step(step, steps, loss)` is called after each step. The same arguments and number of
    torch threads give the same bytes on the same kind of machine.

    Takes a minute or two; from async code call it by `asyncio.to_thread`.

    Raises ConfigurationError for counts below 1 and an output that is no folder or cannot be written.
    """
    import yaml

    from stateset_agents.backends.pretrained.library_logs import suppress_library_logs
    from stateset_agents.embedded import recipe
    from stateset_agents.embedded.demonstrations import BAD_HABITS, demonstrations, perturbed, texts
    from stateset_agents.embedded.network import new_model
    from stateset_agents.embedded.tokenizer import build_tokenizer

    steps = recipe.STEPS if steps is None else steps
    dialogues = recipe.DIALOGUES if dialogues is None else dialogues
    for name, value in (("steps", steps), ("dialogues", dialogues)):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"output {str(output)!r} is a file; give a folder")
    with _writing(output):  # before the minutes of work
        output.mkdir(parents=True, exist_ok=True)
        (output / "README.md").touch()
    start = time.monotonic()
    shown = demonstrations(dialogues, seed=seed, habits=BAD_HABITS if habits is None else habits)
    tokenizer = build_tokenizer(texts(shown), max_length=recipe.CONTEXT_LENGTH)
    model = new_model(tokenizer, seed=seed)
    source = Copying(perturbed(shown, seed=seed))
    with tempfile.TemporaryDirectory() as folder:
        with suppress_library_logs():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        losses = asyncio.run(_warm_up(Path(folder), source, seed=seed, steps=steps, on_step=on_step))
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        facts = {"seed": seed, "steps": steps, "dialogues": dialogues, "parameters": f"{num_parameters:,}"}
        with _writing(output):
            for name in _FILES:
                shutil.copyfile(Path(folder, name), output / name)
            (output / "README.md").write_text(_card(facts), encoding="utf-8")
            (output / "recommended.yaml").write_text(
                yaml.safe_dump(dict(recipe.RECOMMENDED), sort_keys=False), encoding="utf-8"
            )
    return BuildResult(
        folder=output,
        num_parameters=num_parameters,
        num_bytes=(output / "model.safetensors").stat().st_size,
        mean_tokens=source.mean_tokens,
        losses=losses,
        seconds=time.monotonic() - start,
    )


_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
)


def _card(facts: Mapping[str, object]) -> str:
    from stateset_agents import embedded

    card = (Path(embedded.__path__[0]) / "card.md").read_text(encoding="utf-8")
    for name, fact in facts.items():
        card = card.replace(f"[{name}]", str(fact))
    return card


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Raises ConfigurationError for errors of the disk."""
    try:
        yield
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot write the model in {str(output)!r} ({reason}): give another folder"
        ) from error


async def _warm_up(
    folder: Path,
    source: Copying,
    *,
    seed: int,
    steps: int,
    on_step: Callable[[int, int, float], None] | None,
) -> tuple[float, ...]:
    """Fine-tune the model in `folder`, in place; the loss of every step."""
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.embedded.recipe import WARM_UP
    from stateset_agents.training.sft.settings import SFTConfig
    from stateset_agents.training.sft.trainer import SFTTrainer

    losses: list[float] = []

    class Steps:
        def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
            losses.append(metrics["sft/loss"])
            if on_step is not None:
                on_step(step, steps, losses[-1])

    config = SFTConfig.model_validate(
        {
            **WARM_UP,
            "max_steps": steps,
            "seed": seed,
            "output_dir": str(folder / "runs"),
            "validation_share": 0.0,
            "save_steps": 0,
            "progress": False,
        }
    )
    agent = MultiTurnAgent(AgentConfig(model_name=str(folder)))
    trainer = SFTTrainer(agent, source, config, callbacks=[Steps()])
    async with trainer:
        await trainer.train()
        weights = trainer.model_folder / "model.safetensors"
        await asyncio.to_thread(shutil.copyfile, weights, folder / weights.name)
    return tuple(losses)


class Copying:
    """Dialogues to imitate, in which the values that the agent copies weigh more."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._chats = [
            {"messages": [message.to_openai() for message in dialogue], "split": "train"}
            for dialogue in dialogues
        ]
        self.mean_tokens = 0.0

    def load(self, agent: MultiTurnAgent, *, validation_share: float) -> Demonstrations:
        """As a `DemonstrationSource` has it."""
        from stateset_agents.training.sft.demonstrations import load_demonstrations

        shown = load_demonstrations(agent, self._chats, validation_share=validation_share)
        piece = agent.backend.tokenizer.piece
        self.mean_tokens = sum(map(_length, shown.train)) / len(shown.train)
        return replace(shown, train=tuple(_weighed(sample, piece) for sample in shown.train))


def _length(sample: Sample) -> int:
    return sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in sample.trajectory.turns)


def _weighed(sample: Sample, piece: Callable[[int], str]) -> Sample:
    """The sample, each of its tokens with the recipe's weight."""
    from stateset_agents.embedded.recipe import copying_weights

    turns = sample.trajectory.turns
    ids = [id for turn in turns for id in (*turn.prompt_ids, *turn.completion.token_ids)]
    weights = iter(list(copying_weights(map(piece, ids))))
    kept: list[float] = []
    for turn in turns:
        for _ in turn.prompt_ids:
            next(weights)
        kept += [next(weights) for _ in turn.completion.token_ids]
    return replace(sample, advantages=tuple(kept))
