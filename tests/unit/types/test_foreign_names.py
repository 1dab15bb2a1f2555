"""Names of TRL, verifiers and others lead to ours; the table holds what is true of both sides."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository_paths import ROOT

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.scoring.function_reward import as_reward, reward_function
from stateset_agents.training.components import make_reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import EvaluationConfig, load_experiment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.foreign_names import ARGUMENTS, SETTINGS, ForeignName


def settings_table() -> str:
    """The table of docs/evidence/foreign-names.md: names of one meaning share a row."""
    rows: dict[ForeignName, list[str]] = {}
    for name, known in SETTINGS.items():
        rows.setdefault(known, []).append(f"`{name}`")
    lines = ["| name elsewhere | of | here |", "|---|---|---|"]
    for known, names in rows.items():
        ours = "; ".join(filter(None, [f"`{known.here}`" if known.here else "", known.note]))
        lines.append(f"| {', '.join(names)} | {known.origin} | {ours} |")
    return "\n".join(lines)


SECTIONS: dict[str, set[str]] = {
    "training": TrainingConfig.field_names(),
    "agent": AgentConfig.field_names(),
    "evaluation": EvaluationConfig.field_names(),
    "environment": set(inspect.signature(ConversationEnvironment).parameters),
}


def grpo_fields() -> tuple[set[str], set[str]]:
    """All of GRPOConfig's fields, and those that are its own."""
    from transformers import TrainingArguments
    from trl import GRPOConfig

    everything = {field.name for field in dataclasses.fields(GRPOConfig)}
    return everything, everything - {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize(
    ("config", "name", "hint"),
    [
        (TrainingConfig, "lr", "(did you mean 'learning_rate'?)"),
        (TrainingConfig, "max_completion_length", "(did you mean 'agent.max_new_tokens'?)"),
        (TrainingConfig, "max_new_tokens", "(did you mean 'agent.max_new_tokens'?)"),
        (
            TrainingConfig,
            "batch_size",
            "(did you mean 'per_device_train_batch_size'?; scenarios of one batch)",
        ),
        (TrainingConfig, "epsilon", "(did you mean 'clip_ratio'?)"),
        (TrainingConfig, "epsilon_high", "(did you mean 'clip_ratio_high'?)"),
        (TrainingConfig, "optim", "(of TRL; AdamW, with torch's own epsilon)"),
        (TrainingConfig, "max_turns", "(did you mean 'environment.max_turns'?)"),
        (
            TrainingConfig,
            "rollouts_per_example",
            "(did you mean 'num_generations'?; in an evaluation `tries`)",
        ),
        (AgentConfig, "max_tokens", "(did you mean 'max_new_tokens'?)"),
        (AgentConfig, "model", "(did you mean 'model_name'?)"),
        (AgentConfig, "lr", "(did you mean 'training.learning_rate'?)"),
    ],
)
def test_a_name_of_another_library_leads_to_ours(config: Callable[..., Any], name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        config(**{name: 1})
    assert f"has no field {name!r} {hint}" in str(error.value)


def test_a_file_s_top_level_leads_to_the_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environment: retail_desk\nlr: 1\n")
    with pytest.raises(
        ConfigurationError, match=r"no field 'lr' \(did you mean 'training.learning_rate'\?\)"
    ):
        load_experiment(path)


def test_every_name_here_is_a_setting_of_ours_and_no_name_there_is() -> None:
    for name, known in SETTINGS.items():
        assert known.here or known.note, name
        if known.here:
            section, field = known.here.split(".")
            assert field in SECTIONS[section], known.here
        elsewhere = ("chat_template_kwargs", "max_new_tokens", "max_turns", "top_k", "top_p")
        if name not in elsewhere:  # of another section
            assert not any(name in fields for fields in SECTIONS.values()), name


def test_trl_s_names_are_those_of_the_installed_one_and_all_of_grpoconfig_s_own_are_known() -> None:
    everything, trl_only = grpo_fields()
    of_trl = {name for name, known in SETTINGS.items() if known.origin == "TRL"}
    assert of_trl <= everything
    assert trl_only - SECTIONS["training"] - of_trl == set()


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "evidence" / "foreign-names.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- table: names elsewhere -->\n")[2].partition("\n<!-- end of table -->")[0]
    assert shown == settings_table(), "put settings_table() there"


def trl_s(completions: Any, **kwargs: Any) -> list[float]:
    """As TRL calls its rewards."""
    return [0.0]


async def verifiers_(completion: Any, answer: Any) -> float:
    """As verifiers calls its rewards."""
    return 0.0


def test_a_reward_with_foreign_arguments_is_one_line() -> None:
    message = (
        r"reward trl_s: cannot give parameter .completions.* \(of TRL; here it is 'replies'\); there are: "
    )
    with pytest.raises(ConfigurationError, match=message):
        as_reward(trl_s)
    with pytest.raises(ConfigurationError, match=message):
        make_reward({"name": "test_foreign_names:trl_s"})
    with pytest.raises(ConfigurationError, match=r"\(of verifiers; here it is 'replies'\); there are: "):
        make_reward({"name": "test_foreign_names:verifiers_"})
    with pytest.raises(
        ConfigurationError, match=r"'answer' \(of verifiers; here it is 'context'; the answer is"
    ):
        as_reward(lambda answer: 1.0)
    with pytest.raises(
        ConfigurationError, match=r"'state' .*state is given to `success`, which may return Out"
    ):
        as_reward(lambda state: 1.0)
    with pytest.raises(ConfigurationError, match=r"'completions'; there are: trajectories$"):
        reward_function(scope="group")(lambda completions: 1.0)
    offered = {"trajectory", "messages", "replies", "scenario", "context", "success", "outcome"}
    assert {known.here for known in ARGUMENTS.values()} <= offered
