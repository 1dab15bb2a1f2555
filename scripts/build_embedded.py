"""Builds a model that ships with the package anew: dialogues, tokenizer, network, fine-tunings, one folder.

    python -m scripts.build_embedded desk-model
    python -m scripts.build_embedded reasoner --model reasoner --threads 2

The same seed and number of threads give the same bytes on the same kind of machine. What each model is shown
stands in scripts/embedded_models; the folder is loaded as AgentConfig(model_name=...).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.embedded_models import desk, reasoner
from scripts.embedded_models.recipe import Phase, Recipe, TokenWeights
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.settings import expect_that, nearest

if TYPE_CHECKING:
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.training.sft.demonstrations import Demonstrations
    from stateset_agents.training.update.batch import Sample


RECIPES: Mapping[str, Callable[..., Recipe]] = {"desk": desk.recipe, "reasoner": reasoner.recipe}
"""By the name behind `embedded:`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The result of a build."""

    folder: Path
    num_parameters: int
    num_bytes: int
    """Bytes of the weights' file."""
    mean_tokens: float
    """Mean tokens of a demonstration."""
    losses: tuple[float, ...]
    """Loss of every step of all phases."""
    seconds: float


def build_embedded(
    output: str | Path,
    *,
    model: str = "desk",
    seed: int = 0,
    steps: int | None = None,
    dialogues: int | None = None,
    habits: Any = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> BuildResult:
    """Build into the folder `output`; plain transformers loads it.

    `steps`, `dialogues` and `habits` are the recipe's where unset: `desk.recipe` and
    `reasoner.recipe` say what they may be. `on_step(step, steps, loss)` is called after each step.
    The same arguments and number of torch threads give the same bytes on the same kind of machine.

    Takes a minute or two; from async code call it by `asyncio.to_thread`.

    Raises ConfigurationError for an unknown model, counts below 1 and an output that is no folder or cannot
    be written.
    """
    for name, value in (("steps", steps), ("dialogues", dialogues)):
        expect_that(value is None or value >= 1, name, "be at least 1", value)
    if model not in RECIPES:
        raise ConfigurationError(
            f"no recipe is called {model!r}{nearest(model, RECIPES)}: there are {', '.join(sorted(RECIPES))}"
        )
    output = _checked(output)
    arguments = {"steps": steps, "dialogues": dialogues, "habits": habits}
    chosen = {name: value for name, value in arguments.items() if value is not None}
    return build_recipe(output, RECIPES[model](seed=seed, **chosen), seed=seed, on_step=on_step)


def build_recipe(
    output: str | Path,
    recipe: Recipe,
    *,
    seed: int = 0,
    on_step: Callable[[int, int, float], None] | None = None,
) -> BuildResult:
    """`build_embedded` for a recipe of your own."""
    import yaml

    from stateset_agents.backends.pretrained.load_lock import suppress_library_logs
    from stateset_agents.embedded.network import new_model
    from stateset_agents.embedded.tokenizer import build_tokenizer, texts

    output = _checked(output)
    start = time.monotonic()
    tokenizer = build_tokenizer(
        texts(recipe.vocabulary),
        max_length=recipe.context_length,
        tags=recipe.tags,
        chat_template=recipe.chat_template,
    )
    network = new_model(tokenizer, seed=seed, max_new_tokens=recipe.max_new_tokens, **recipe.network)
    phases = [Shown(phase) for phase in recipe.phases]
    with tempfile.TemporaryDirectory() as folder:
        with suppress_library_logs():
            network.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        losses = asyncio.run(
            _fine_tune(Path(folder), phases, seed=seed, max_new_tokens=recipe.max_new_tokens, on_step=on_step)
        )
        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        facts = {"seed": seed, "parameters": f"{num_parameters:,}", **recipe.facts}
        with _writing(output):
            for name in _FILES:
                shutil.copyfile(Path(folder, name), output / name)
            (output / "README.md").write_text(_card(recipe.card, facts), encoding="utf-8")
            trained = sorted(set().union(*(shown.token_ids for shown in phases)))
            (output / "trained_tokens.json").write_text(f"{json.dumps(trained)}\n", encoding="utf-8")
            (output / "recommended.yaml").write_text(
                yaml.safe_dump(dict(recipe.recommended), sort_keys=False), encoding="utf-8"
            )
    return BuildResult(
        folder=output,
        num_parameters=num_parameters,
        num_bytes=(output / "model.safetensors").stat().st_size,
        mean_tokens=phases[0].mean_tokens,
        losses=losses,
        seconds=time.monotonic() - start,
    )


_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
)


def _checked(output: str | Path) -> Path:
    """The folder, made and written to before the minutes of work."""
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"output {str(output)!r} is a file; give a folder")
    with _writing(output):
        output.mkdir(parents=True, exist_ok=True)
        (output / "README.md").touch()
    return output


def _card(card: str, facts: Mapping[str, object]) -> str:
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


async def _fine_tune(
    folder: Path,
    phases: Sequence[Shown],
    *,
    seed: int,
    max_new_tokens: int,
    on_step: Callable[[int, int, float], None] | None,
) -> tuple[float, ...]:
    """Fine-tune the model in `folder`, in place; the loss of every step."""
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.training.sft.settings import SFTConfig
    from stateset_agents.training.sft.trainer import SFTTrainer

    losses: list[float] = []
    num_steps = sum(shown.phase.steps for shown in phases)

    class Steps:
        def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
            losses.append(metrics["sft/loss"])
            if on_step is not None:
                on_step(len(losses), num_steps, losses[-1])

    for shown in phases:
        config = SFTConfig.model_validate(
            {
                **shown.phase.settings,
                "max_steps": shown.phase.steps,
                "seed": seed,
                "output_dir": str(folder / "runs"),
                "validation_share": 0.0,
                "save_steps": 0,
                "progress": False,
            }
        )
        trainer = SFTTrainer(
            MultiTurnAgent(AgentConfig(model_name=str(folder), max_new_tokens=max_new_tokens)),
            shown,
            config,
            callbacks=[Steps()],
        )
        async with trainer:
            await trainer.train()
            for name in ("model.safetensors", "chat_template.jinja", "generation_config.json"):
                await asyncio.to_thread(shutil.copyfile, trainer.model_folder / name, folder / name)
    return tuple(losses)


class Shown:
    """The dialogues of a phase, each token with its weight: a `DemonstrationSource`."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self._chats = [
            {"messages": [message.to_record() for message in dialogue], "split": "train"}
            for dialogue in phase.dialogues
        ]
        self.mean_tokens = 0.0
        self.token_ids: frozenset[int] = frozenset()
        """Token ids of its dialogues, all of which an epoch shows."""

    def load(self, agent: MultiTurnAgent, *, validation_share: float) -> Demonstrations:
        """Load the dialogues, as a `DemonstrationSource` does."""
        from stateset_agents.training.sft.demonstrations import load_demonstrations

        demonstrations = load_demonstrations(agent, self._chats, validation_share=validation_share)
        self.mean_tokens = sum(map(_length, demonstrations.train)) / len(demonstrations.train)
        self.token_ids = demonstrations.token_ids
        weights = self.phase.weights
        if weights is None:
            return demonstrations
        piece = agent.backend.tokenizer.piece
        return replace(
            demonstrations, train=tuple(_weighed(sample, piece, weights) for sample in demonstrations.train)
        )


def _length(sample: Sample) -> int:
    return sum(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in sample.trajectory.turns)


def _weighed(sample: Sample, piece: Callable[[int], str], token_weights: TokenWeights) -> Sample:
    """The sample, each of its tokens with its weight."""
    turns = sample.trajectory.turns
    ids = [id for turn in turns for id in (*turn.prompt_ids, *turn.completion.token_ids)]
    weights = iter(list(token_weights(map(piece, ids))))
    kept: list[float] = []
    for turn in turns:
        for _ in turn.prompt_ids:
            next(weights)
        kept += [next(weights) for _ in turn.completion.token_ids]
    return replace(sample, advantages=tuple(kept))


def main(argv: Sequence[str] | None = None) -> None:
    """Build the model that the command line names; an error is one line and exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder for the model")
    parser.add_argument("--model", default="desk", choices=RECIPES, help="which one (default desk)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of demonstrations, weights and order (default 0)"
    )
    parser.add_argument("--steps", type=int, help="of the first fine-tuning (default: as the shipped model)")
    parser.add_argument("--dialogues", type=int, help="demonstrations (default: as the shipped model)")
    parser.add_argument(
        "--threads", type=int, default=1, help="same seed and threads, same bytes (default 1)"
    )
    try:
        _build_chosen(parser.parse_args(argv))
    except StatesetError as error:
        sys.exit(f"build_embedded: {error}")


def _build_chosen(chosen: argparse.Namespace) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    expect_that(chosen.threads >= 1, "--threads", "be at least 1", chosen.threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    before = torch.get_num_threads()
    torch.set_num_threads(chosen.threads)

    def tell(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)

    try:
        built = build_embedded(
            chosen.output,
            model=chosen.model,
            seed=chosen.seed,
            steps=chosen.steps,
            dialogues=chosen.dialogues,
            on_step=tell,
        )
    finally:
        torch.set_num_threads(before)
    print(
        f"{built.folder}: {built.num_parameters:,} parameters, {built.num_bytes / 1e6:.1f} MB, "
        f"{built.seconds:.0f} s; dialogues of {built.mean_tokens:.0f} tokens on average"
    )


if __name__ == "__main__":
    main()
