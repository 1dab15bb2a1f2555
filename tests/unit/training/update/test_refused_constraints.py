"""What scores or samples over the whole vocabulary refuses grammars and truncation by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yaml
from tiny_grammars import PROMPT, constraint_of

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.update import DistillationSettings
from stateset_agents.training.trl.learner import TrlLearnerFactory
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.factory import LearnerFactory
from stateset_agents.training.update.teacher import Teacher
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message, SamplingMask, SamplingParams
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn


@pytest.mark.parametrize(
    "kept_to", [{"constraint": constraint_of()}, {"sampling_mask": SamplingMask.of([[2, 3]])}]
)
def test_a_teacher_scores_no_reply_under_a_grammar_or_truncation(kept_to: dict[str, Any]) -> None:
    completion = Completion(
        message=Message(role="assistant", content="c"),
        prompt_ids=PROMPT,
        token_ids=(2,),
        logprobs=(-0.1,),
        finish_reason="stop",
        **kept_to,
    )
    turn = Turn(prompt_ids=PROMPT, completion=completion)
    sample = Sample(trajectory=Trajectory(scenario=Scenario(id="s"), turns=(turn,)), advantages=(1.0,))
    teacher = Teacher(ScriptedBackend(["ok"]), DistillationSettings(teacher="tiny"))
    with pytest.raises(ConfigurationError, match="a teacher scores over the whole vocabulary"):
        asyncio.run(teacher.logprobs(sample))


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.9}])
def test_trl_and_distillation_refuse_truncated_rollouts(truncation: dict[str, Any]) -> None:
    agent = MultiTurnAgent(AgentConfig(**truncation), backend=ScriptedBackend(["ok"]))
    with pytest.raises(ConfigurationError, match="TRL scores the whole vocabulary"):
        TrlLearnerFactory(TrlSettings()).check(agent, TrainingConfig())
    distilled = TrainingConfig(distillation={"teacher": "tiny"})
    with pytest.raises(ConfigurationError, match="a teacher scores the whole vocabulary"):
        LearnerFactory().check(agent, distilled)
    LearnerFactory().check(agent, TrainingConfig())


@pytest.mark.parametrize("sampler", ["TRL's generation", "a script"])
def test_samplers_without_grammars_refuse_them_by_name(sampler: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{sampler} cannot keep to a grammar"):
        SamplingParams(constraint=constraint_of()).refuse_constraint(sampler)


def test_off_of_a_yaml_file_is_the_word() -> None:
    assert AgentConfig(**yaml.safe_load("constrain: off")).constrain == "off"
    with pytest.raises(ValueError, match="constrain"):
        AgentConfig(**yaml.safe_load("constrain: on"))
