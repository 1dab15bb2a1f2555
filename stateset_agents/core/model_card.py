"""The model card of a saved model: its README.md, as the Hugging Face hub shows it.

`MultiTurnAgent.save_pretrained` and a trainer's checkpoints write it. It is a function of the run folder: no
time, no machine, no path of this disk stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yaml import YAMLError

from stateset_agents.backends.pretrained.loading import (
    PACKAGE_MODELS,
    PREFIX,
    embedded_models,
    model_folder,
    package_folder,
    package_model,
)
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.logs import get_logger

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


_log = get_logger(__name__)
_TAG = "stateset_agents"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SHOWN = (
    *("advantage_estimator", "loss_type", "clip_ratio", "beta", "learning_rate", "lr_scheduler_type"),
    *("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "num_processes"),
    *("num_iterations", "temperature", "max_staleness", "precision", "seed"),
)
"""Settings of a training that say what was done; the rest stands in the run's config.yaml."""

_READING = ("history", "max_context_tokens", "compact_room", "constrain")
"""Settings of an agent that decide what it reads of a conversation and which replies it has: it has to be
loaded with them. Those of the chat template stand in the model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model and the run that weights come from."""

    base: str
    """transformers' `name_or_path` of the model that was trained; empty for one made in a program."""
    run: Path | None = None
    """The folder of the run that trained it; None for weights as they were loaded."""
    step: int = 0
    """Step of that run after which the weights are these."""


def shared_name(base: str) -> str:
    """The name of the model that `AgentConfig.model_name` takes on every machine; else the base as it is."""
    if not base:
        return base
    folders = {Path(model_folder(name)).resolve(): name for name in embedded_models()}
    folders |= {package_folder(name).resolve(): PREFIX + name for name in PACKAGE_MODELS}
    return folders.get(Path(base).resolve(), base)


def write_card(
    path: Path, origin: Origin, *, adapter: bool = False, agent: AgentConfig | None = None
) -> None:
    """Write `path/README.md`; one that this library did not write stays, and a warning says so.

    `agent`: the settings to load it with; unset, those of the run.
    """
    file = path / "README.md"
    if file.exists() and not _is_ours(file):
        _log.warning(f"{file} is not one of ours: it stays as it is, and no model card is written")
        return
    file.write_text(model_card(origin, adapter=adapter, agent=agent), encoding="utf-8")


def model_card(
    origin: Origin,
    *,
    adapter: bool = False,
    summary: Mapping[str, Any] | None = None,
    agent: AgentConfig | None = None,
) -> str:
    """The card's text: metadata in YAML, then what the model is, how good, how trained, how to load it.

    `adapter`: of peft's folder beside the merged model. `summary` stands for the run's `summary.json` where
    that is not written yet, `agent` for the run's agent settings. Raises ConfigurationError for a run folder
    of another schema version.
    """
    from huggingface_hub import ModelCardData

    config: Mapping[str, Any] = {}
    if origin.run is not None:
        log = RunLog(RunFolder(origin.run))
        config, summary = log.config(), log.summary() if summary is None else summary
    if agent is not None:
        config = {**config, "agent": agent.model_dump(mode="json")}
    training = config.get("training", {})
    name = "A conversational agent" if origin.run is None else f"{origin.run.name}, step {origin.step}"
    results = _figures(origin, config, summary or {})
    hub_name = _on_the_hub(origin.base)
    data = ModelCardData(
        base_model=hub_name,
        base_model_relation=("adapter" if adapter else "finetune") if hub_name else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=_tags(training, config, adapter=adapter),
        model_name=name if results else None,
        eval_results=[figure.listed for figure in results if figure.listed is not None] or None,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        _about(origin, config, adapter=adapter),
        _shown_figures(results),
        _shown_settings(origin, config),
        _loading(origin, config, adapter=adapter),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# --- what it stands on -----------------------------------------------------------------------------------


def _is_ours(file: Path) -> bool:
    return _TAG in (_metadata(file).get("tags") or ())


def _metadata(file: Path) -> Mapping[str, Any]:
    from huggingface_hub import metadata_load

    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, YAMLError):
        return {}


def _on_the_hub(base: str) -> str | None:
    """The name by which others can get the model: its own, or that of the one our card says it came from."""
    if Path(base).is_dir():
        card = Path(base) / "README.md"
        named = _metadata(card).get("base_model") if _is_ours(card) else None
        return named if isinstance(named, str) else None
    return base if _HUB_NAME.fullmatch(base) else None


def _base(origin: Origin) -> str:
    """The base model in words; of a local folder its last name only."""
    if name := _on_the_hub(origin.base):
        return f"[{name}](https://huggingface.co/{name})"
    if not origin.base:
        return "a model that was made in a program"
    name = shared_name(origin.base)
    if name in embedded_models():
        return f"`{name}`, a small model that ships with stateset_agents"
    if name.startswith(PREFIX):
        model = package_model(name)
        return f"`{name}` of stateset_agents, {model.title} ({model.licence}) out of {model.requirement}"
    return f"a model of our own, `{Path(origin.base).name}`"


def _named(part: Any) -> str:
    """An environment or a reward by its name; of a path its end."""
    name = str(part.get("name") if isinstance(part, Mapping) else part)
    return f"`{Path(name).name if '/' in name else name}`"


def _tags(training: Mapping[str, Any], config: Mapping[str, Any], *, adapter: bool) -> list[str]:
    tags = [_TAG, "conversational", "multi-turn"]
    if training:
        tags += ["reinforcement-learning", str(training.get("loss_type"))]
    if training.get("lora"):
        tags.append("lora")
    if config.get("trl") is not None:
        tags.append("trl")
    return tags


# --- its figures -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    name: str
    before: str
    after: str
    listed: EvalResult | None = None
    """The figure as the card's metadata has it."""


def _figures(origin: Origin, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[_Figure]:
    from huggingface_hub import EvalResult

    if origin.run is None:
        return []
    before, after = summary.get("before", {}), _measured(origin, config, summary)
    environment = _named(config.get("environment", {})).strip("`")
    split = (config.get("evaluation") or {}).get("split", "test")
    rows = [
        (f"success on {split}, sampled", "success", "interval", "n"),
        (f"success on {split}, greedy", "greedy", "greedy_interval", ""),
        (f"reward on {split}, sampled", "mean_reward", "reward_interval", "num_scored"),
    ]
    figures = [
        _Figure(
            name=name,
            before=_value(before, key, interval, number),
            after=_value(after, key, interval, number),
            listed=None
            if after.get(key) is None
            else EvalResult(
                task_type="text-generation",
                dataset_type=environment,
                dataset_name=f"{environment}, {split}",
                dataset_split=split,
                metric_type=key,
                metric_name=name,
                metric_value=round(after[key], 4),
            ),
        )
        for name, key, interval, number in rows
        if before.get(key) is not None or after.get(key) is not None
    ]
    return [*figures, *(_validation(origin) if config.get("training", {}).get("eval_steps") else ())]


def _measured(origin: Origin, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The measurement after training, where it was one of these weights."""
    best = summary.get("best") or {}
    spoke_as_best = best and config.get("training", {}).get("load_best_at_end")
    step = best.get("step") if spoke_as_best else summary.get("steps")
    return summary.get("after", {}) if step == origin.step else {}


def _validation(origin: Origin) -> list[_Figure]:
    """The figures of an evaluation after this step."""
    assert origin.run is not None
    run = RunFolder(origin.run)
    values: dict[str, float] = {}
    for line in RunLog(run).metrics() if run.metrics.is_file() else ():
        if line.step == origin.step:
            values |= line.values
    figures = []
    if "eval/success" in values:
        interval = values["eval/success_low"], values["eval/success_high"]
        success = {"success": values["eval/success"], "interval": interval}
        figures.append(("success", _value(success, "success", "interval")))
    if "eval/reward" in values:
        figures.append(("reward", _value(values, "eval/reward")))
    return [
        _Figure(name=f"{name} on validation while it was trained", before="", after=after)
        for name, after in figures
    ]


def _value(values: Mapping[str, Any], key: str, interval: str = "", number: str = "") -> str:
    """`92.7 % [90.3 %, 94.5 %], n 600`, from the keys of value, interval and number; a reward is no share.
    Empty where it was not measured."""
    if values.get(key) is None:
        return ""
    share = key in ("success", "greedy")

    def shown(number: float) -> str:
        return f"{100 * number:.1f} %" if share else f"{number:.3f}"

    bounds = values.get(interval)
    text = shown(values[key]) + (f" [{', '.join(shown(bound) for bound in bounds)}]" if bounds else "")
    return f"{text}, n {values[number]}" if values.get(number) else text


# --- its sections ----------------------------------------------------------------------------------------


def _about(origin: Origin, config: Mapping[str, Any], *, adapter: bool) -> str:
    base = _base(origin)
    if origin.run is None:
        return _text("untrained", base=base)
    lora = config.get("training", {}).get("lora")
    return _text(
        "trained",
        kind="An adapter on" if adapter else "A fine-tune of",
        base=base,
        steps=f"{origin.step} step{'s' * (origin.step != 1)}",
        how="by TRL's GRPOTrainer, " if config.get("trl") is not None else "",
        environment=_named(config.get("environment", {})),
        reward=_named(config.get("reward", {})),
        merged=_text("merged") if lora and not adapter else "",
        few=_text("few", quantization=lora["quantization"]) if lora and lora["quantization"] else "",
    )


def _shown_figures(figures: list[_Figure]) -> str:
    if not figures:
        return ""
    rows = (f"| {figure.name} | {figure.before or '-'} | {figure.after or '-'} |" for figure in figures)
    return _text("figures", rows="\n".join(rows))


def _shown_settings(origin: Origin, config: Mapping[str, Any]) -> str:
    if origin.run is None or not config.get("training"):
        return ""
    training, lora = config["training"], config["training"].get("lora") or {}
    values = {name: training[name] for name in _SHOWN if name in training}
    values |= {f"lora.{name}": value for name, value in lora.items() if value is not None}
    values["max_new_tokens"] = config.get("agent", {}).get("max_new_tokens")
    texts = {
        name: ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for name, v in values.items()
    }
    return _text("settings", rows="\n".join(f"| `{name}` | {text} |" for name, text in texts.items()))


def _loading(origin: Origin, config: Mapping[str, Any], *, adapter: bool) -> str:
    if adapter:
        base = _on_the_hub(origin.base)
        missing = "" if base else _text("missing")
        return _text("adapter", base=base or "BASE", folder=_text("folder"), missing=missing)
    unset = AgentConfig()
    agent = {
        name: value for name, value in config.get("agent", {}).items() if value != getattr(unset, name, value)
    }
    settings = "".join(f", {name}={agent[name]!r}" for name in _READING if name in agent)
    names = [name for name in ("persona", "system_prompt", "compact_prompt") if name in agent]
    return _text(
        "model",
        settings=settings.replace("'", '"'),
        folder=_text("folder"),
        prompt=_text("prompt", names="` and a `".join(names)) if names else "",
        grammar=_text("grammar") if "constrain" in agent else "",
    )


def _text(name: str, **values: Any) -> str:
    return str(_texts()[name]).format(**values)


@cache
def _texts() -> dict[str, str]:
    texts: dict[str, str] = read_yaml(Path(__file__).with_name("model_card.yaml"))
    return texts
