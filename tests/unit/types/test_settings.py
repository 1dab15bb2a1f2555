"""Settings that cannot work are refused in one line that names the field, the value and the mend."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import AliasChoices, Field, model_validator

from stateset_agents.core.agent import AgentConfig
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import OneOf, Settings, alternatives, nearest


class Part(Settings):
    size: int = Field(ge=1)


class Whole(Settings):
    clip_ratio: float = Field(default=0.2, validation_alias=AliasChoices("clip_ratio", "clip_epsilon"))
    low: int = 0
    high: int = 1
    part: Part = Part(size=1)

    @model_validator(mode="after")
    def _ordered(self) -> Whole:
        if self.low > self.high:
            raise ValueError(f"low {self.low} exceeds high {self.high}: lower it")
        return self


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"clip_ration": 0.1}, "Whole has no field 'clip_ration' (did you mean 'clip_ratio'?)"),
        ({"clip_epsilom": 0.1}, "Whole has no field 'clip_epsilom' (did you mean 'clip_epsilon'?)"),
        ({"zebra": 1}, "Whole has no field 'zebra'"),
        ({"low": "many"}, "low: input should be a valid integer"),
        ({"low": "a\nb"}, "got 'a\\nb'"),
        ({"low": 3}, "low 3 exceeds high 1: lower it"),
        ({"part": {"size": 0}}, "part: size: input should be greater than or equal to 1, got 0"),
        ({"part": {"sizes": 1, "size": 1}}, "part: Part has no field 'sizes' (did you mean 'size'?)"),
        ({"part": {}}, "part: size is missing: give Part its size"),
        ({"low": "x", "zebra": 1}, "; Whole has no field 'zebra'"),
    ],
)
def test_what_is_wrong_is_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Whole(**data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SIZES: dict[str, int] = {"small": 1, "medium": 2, "large": 3}


class ByLiteral(Settings):
    size: Literal["small", "medium", "large"] = "small"


class ByRegistry(Settings):
    size: Annotated[str, OneOf(SIZES)] = "small"


@pytest.mark.parametrize("value", ["lareg", "", 1, None, ["small"], {"small": 1}, True])
def test_a_name_that_a_registry_lacks_is_refused_as_by_a_literal(value: Any) -> None:
    errors = []
    for model in (ByLiteral, ByRegistry):
        with pytest.raises(ConfigurationError) as caught:
            model(size=value)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert errors[0].startswith("size: input should be 'small', 'medium' or 'large', got")


def test_a_registry_s_names_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    literal, registry = (model.model_json_schema()["properties"] for model in (ByLiteral, ByRegistry))
    assert literal == registry
    monkeypatch.setitem(SIZES, "huge", 4)
    assert ByRegistry(size="huge").model_dump(mode="json") == {"size": "huge"}
    assert ByRegistry.model_json_schema()["properties"]["size"]["enum"][-1] == "huge"


def test_alternatives_are_a_list_in_words() -> None:
    assert [alternatives("a"), alternatives("ab"), alternatives("abc", "and")] == [
        "a",
        "a or b",
        "a, b and c",
    ]


def test_aliases_are_read_and_listed() -> None:
    assert Whole(clip_epsilon=0.3).clip_ratio == 0.3
    assert Whole.field_names() == {"clip_ratio", "clip_epsilon", "low", "high", "part"}


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Whole().low = 3


def test_the_nearest_name_is_given_only_when_it_is_near() -> None:
    assert nearest("learning_rat", ["learning_rate", "beta"]) == " (did you mean 'learning_rate'?)"
    assert nearest("x", ["learning_rate", "beta"]) == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_name": " "}, "model_name: give a model, for example \"embedded:desk\", got ' '"),
        ({"modelname": "gpt2"}, "AgentConfig has no field 'modelname' (did you mean 'model_name'?)"),
        ({"max_new_tokens": 0}, "max_new_tokens: input should be greater than or equal to 1, got 0"),
        (
            {"chat_template": "desk/chat.jinja"},
            "chat_template: 'desk/chat.jinja' looks like a file, and the template's text is wanted: give "
            "what stands in it, got 'desk/chat.jinja'",
        ),
        ({"temperature": -1}, "temperature: input should be greater than or equal to 0, got -1"),
        ({"top_p": 0}, "top_p: input should be greater than 0, got 0"),
        (
            {"history": "compact", "compact_room": 256},
            "compact_room 256 must be more than max_new_tokens 256, for one reply would fill the context "
            "before a summary can be asked for: raise it or leave it out",
        ),
        ({"dtype": "fp8"}, "dtype: input should be 'auto', 'fp32', 'bf16' or 'fp16', got 'fp8'"),
    ],
)
def test_an_agent_s_settings_are_checked(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AgentConfig(**data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"lora": {"target_modules": "q_prj"}},
            "lora: target_modules: input should be 'all-linear' or a list, got 'q_prj'",
        ),
        (
            {"report_to": ["tensorbord"]},
            "report_to.0: input should be 'tensorboard', 'wandb', 'trackio', 'mlflow' or 'opentelemetry', "
            "got 'tensorbord' (did you mean 'tensorboard'?)",
        ),
    ],
)
def test_a_choice_says_what_there_is_to_choose(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrainingConfig(**data)
    assert str(caught.value) == message


def test_chat_template_kwargs_have_trl_s_name_and_their_older_one() -> None:
    switches = {"enable_thinking": False}
    named = AgentConfig(chat_template_kwargs=switches)
    assert AgentConfig.model_validate({"template_arguments": switches}) == named
    assert named.model_dump()["chat_template_kwargs"] == switches
    with pytest.raises(ValueError, match=r"did you mean 'agent\.chat_template_kwargs'\?"):
        TrainingConfig.model_validate({"chat_template_kwargs": switches})


def test_one_text_to_stop_at_is_a_list_of_one() -> None:
    assert AgentConfig(stop="\n").stop == ("\n",)  # type: ignore[arg-type]  # as people write it
    with pytest.raises(ConfigurationError, match="a stop string must hold at least one character"):
        AgentConfig(stop="")  # type: ignore[arg-type]  # the mistake under test
