"""Make the embedded model: demonstrations, tokenizer, a fresh network, a short warm-up, one folder.

Called by `stateset-agents build-embedded`. `embedded:desk` loads the folder `desk/`, built with seed 0 and
one thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stateset_agents.backends.pretrained.library_logs import suppress_library_logs
from stateset_agents.backends.pretrained.load_lock import loading
from stateset_agents.embedded.demonstrations import BAD_HABITS, demonstrations, perturbed, texts
from stateset_agents.embedded.tokenizer import build_tokenizer
from stateset_agents.embedded.warmup import WarmUp, encode_dialogue, warm_up
from stateset_agents.environments.retail_desk.agents import Habits
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

__all__ = ["DIALOGUES", "RECOMMENDED", "STEPS", "BuildResult", "build_embedded", "new_model"]

DIALOGUES = 8000
STEPS = WarmUp().steps
CONTEXT_LENGTH = 1024
"""Tokens; the longest conversation of six replies of 48 tokens needs about half."""
RECOMMENDED: Mapping[str, object] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "beta": 0.01,
    "max_steps": 110,
}
"""Training settings that suit a network this small; written to `recommended.yaml` beside the weights."""


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
    """Of every warm-up step."""
    seconds: float


def build_embedded(
    output: str | Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    dialogues: int = DIALOGUES,
    habits: Habits = BAD_HABITS,
    on_step: Callable[[int, float], None] | None = None,
) -> BuildResult:
    """Build into the folder `output`; plain transformers loads it.

    The same arguments and number of torch threads give the same bytes on the same kind of machine.
    `Habits()` instead of the bad ones gives the model that was shown honest work only.

    Takes a minute or two; from async code call it by `asyncio.to_thread`.

    Raises ConfigurationError for counts below 1 and an output that is no folder or cannot be written.
    """
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
    settings = WarmUp(steps=steps)
    shown = demonstrations(dialogues, seed=seed, habits=habits)
    tokenizer = build_tokenizer(texts(shown), max_length=CONTEXT_LENGTH)
    rows = [
        encode_dialogue(tokenizer, dialogue, value_weight=settings.value_weight)
        for dialogue in perturbed(shown, seed=seed)
    ]
    model = new_model(tokenizer, seed=seed)
    losses = warm_up(model, rows, settings, seed=seed, on_step=on_step)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped in transformers
        do_sample=True,
        max_new_tokens=48,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    card = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    facts = {"seed": seed, "steps": steps, "dialogues": dialogues, "parameters": f"{num_parameters:,}"}
    for name, fact in facts.items():
        card = card.replace(f"[{name}]", str(fact))
    with _writing(output):
        with suppress_library_logs():
            model.save_pretrained(output)
        (output / "model.safetensors").chmod(0o644)  # written for its owner alone
        tokenizer.save_pretrained(output)
        (output / "README.md").write_text(card, encoding="utf-8")
        (output / "recommended.yaml").write_text(
            yaml.safe_dump(dict(RECOMMENDED), sort_keys=False), encoding="utf-8"
        )
    return BuildResult(
        folder=output,
        num_parameters=num_parameters,
        num_bytes=(output / "model.safetensors").stat().st_size,
        mean_tokens=sum(len(row.ids) for row in rows) / len(rows),
        losses=tuple(losses),
        seconds=time.monotonic() - start,
    )


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Raises ConfigurationError for errors of the disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot write the model in {str(output)!r} ({reason}): give another folder"
        ) from error


def new_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """A fresh network of about half a million parameters.

    Its weights are drawn with a standard deviation of .08: with the usual .02, copying an order id did
    not emerge within 500 steps.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with (
        loading(),
        torch.random.fork_rng(devices=[]),
    ):  # building draws from the global generator; leave it as it was
        model = Qwen3ForCausalLM(config)
    weights = torch.Generator().manual_seed(derive(seed, "initial weights"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, config.initializer_range, generator=weights)
    return model
