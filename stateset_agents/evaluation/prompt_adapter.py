"""A system prompt as `gepa` optimises one; `stateset-agents optimize-prompt` calls it.

A candidate is {"system_prompt": text}, a batch a list of scenarios, a score the environment's verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.evaluation.evaluator import VIOLATIONS, Evaluation
from stateset_agents.evaluation.kept_conversations import KeptConversations
from stateset_agents.runtime.named_code import library
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

INSTALL = 'prompts are optimised by gepa: pip install "gepa>=0.1.4,<0.2"'
PROMPT = "system_prompt"
"""The one component of a candidate."""
_log = get_logger(__name__)


@dataclass(eq=False)
class PromptAdapter:
    """A `gepa.GEPAAdapter` that plays scenarios with the candidate as the agent's system prompt.

    A scenario meets the same user and the same sampling seeds under every prompt.
    """

    agent: MultiTurnAgent | EndpointAgent
    """Its `config.system_prompt` is set to each candidate's before that is played."""
    measure: Callable[..., Awaitable[Evaluation]]
    """`evaluator.evaluate` with all but the agent and what is kept; of the held-out scenarios unless its
    keywords say others."""
    reflection: ChatClient
    """The model that writes new prompts."""
    folder: Path
    """Keeps each prompt's conversations in a file, so that none is played twice, in later calls too."""
    identity: Mapping[str, Any]
    """What the conversations depend on besides agent, seed and temperature, as plain JSON."""
    run: Callable[[Any], Any]
    """Runs a coroutine to its end on the agent's event loop; gepa calls from outside of it."""
    propose_new_texts: None = None
    """gepa's own proposer asks `reflect`."""
    failure: StatesetError | None = None
    """The reason why no new prompt could be written."""

    async def play(self, prompt: str, split: str = "held-out", **how: Any) -> Evaluation:
        """Measure a prompt; `how`: other keywords for `measure`."""
        self.agent.config = self.agent.config.model_copy(update={PROMPT: prompt})
        file = self.folder / f"{split}-{digest(prompt)}.jsonl"
        with KeptConversations(file, identity=self.identity) as store:
            return await self.measure(self.agent, kept=store, **how)

    def evaluate(self, batch: list[Scenario], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """gepa's `EvaluationBatch` of a candidate: a conversation of each scenario, and its score.

        Raises EnvironmentFailure for one that could not be played or scored: no number stands for that.
        """
        played = self.run(self.play(candidate[PROMPT], "train", scenarios=batch, tries=1))
        trajectories = [group.trajectories[0] for group in played.groups]
        scores = list(map(score, trajectories))
        _log.info("prompt scored", prompt=digest(candidate[PROMPT]), scores=scores)
        texts = list(map(conversation_text, trajectories))
        return library("gepa", INSTALL).EvaluationBatch(texts, scores, trajectories)

    def make_reflective_dataset(
        self, candidate: Any, eval_batch: Any, components_to_update: list[str]
    ) -> Any:
        """Component -> what the reflection model reads of each conversation; nothing where all succeeded,
        and gepa then asks for no new prompt."""
        trajectories = eval_batch.trajectories
        if all(trajectory.success for trajectory in trajectories):
            return {}
        examples = [
            {"Conversation": conversation_text(each), "Feedback": feedback(each)} for each in trajectories
        ]
        return dict.fromkeys(components_to_update, examples)

    def reflect(self, prompt: str) -> str:
        """The reflection model's answer; a text that was cut is none.

        gepa goes on after an error of its language model, and would spend the budget without a new prompt:
        the error stays in `failure`, and `check` raises it.
        """
        try:
            answer = self.run(self.reflection.complete([Message(role="user", content=prompt)]))
            if answer.finish_reason == "length":
                raise ConfigurationError("the reflection was cut: raise --reflection-max-new-tokens")
        except StatesetError as error:
            self.failure = error
            raise
        return str(answer.text)

    def check(self, state: object) -> bool:
        """As a stopper of gepa, before each iteration: it stops nothing, and raises what `reflect` met."""
        if self.failure is not None:
            raise self.failure
        return False

    def log(self, message: str) -> None:
        """As gepa's logger; its folder has the same as JSON."""
        _log.debug(message)


def digest(prompt: str) -> str:
    """A short name of a prompt."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def score(trajectory: Trajectory) -> float:
    """1 for a success and 0 for a failure, or the reward where the environment gave no verdict.

    Raises EnvironmentFailure where there is neither.
    """
    value = trajectory.reward if trajectory.success is None else float(trajectory.success)
    if value is None:
        why = f"scenario {trajectory.scenario.id} has no score: {trajectory.error or 'no reward applies'}"
        raise EnvironmentFailure(f"{why}; mend that, and the same command goes on")
    return value


def conversation_text(trajectory: Trajectory) -> str:
    """The messages as JSON lines, in OpenAI's shape."""
    return "\n".join(json.dumps(message.to_openai(), ensure_ascii=False) for message in trajectory.messages)


def feedback(trajectory: Trajectory) -> str:
    """`Success: False. Reward: 0.2. Broken rules: no consent. Ended: truncated.`"""
    broken = [rule for rule, number in trajectory.metadata.get(VIOLATIONS, {}).items() if number]
    rules = f" Broken rules: {', '.join(broken)}." if broken else ""
    return f"Success: {trajectory.success}. Reward: {trajectory.reward}.{rules} Ended: {trajectory.status}."
