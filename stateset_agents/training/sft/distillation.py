"""`ReasoningDistillation`: a teacher's verified replies, and a student that imitates them.

prompts -> conversations of the teacher -> those that the reward verifies -> fine-tuning -> student. Playing,
scoring and fine-tuning are the package's own. On-policy distillation is a setting of a training,
`training.distillation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment, Environment
from stateset_agents.core.reward import Reward, as_reward
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.sources.scenario_files import as_scenarios, load_scenarios, read_scenarios
from stateset_agents.evaluation.evaluator import OnProgress, evaluate, spread
from stateset_agents.evaluation.kept_conversations import KeptConversations
from stateset_agents.rewards.reasoning import MathAnswerReward
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.traces import (
    Trace,
    Traces,
    format_share,
    verified_traces,
    write_traces,
)
from stateset_agents.training.sft.trainer import SFTTrainer
from stateset_agents.training.update.teacher import weights_of
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.settings import expect
from stateset_agents.types.trajectory import Trajectory

_log = get_logger(__name__)
Prompts = Path | Sequence[str | Scenario | Mapping[str, Any]]
_MEASURED = 64
"""Held-out scenarios on which the student is measured unless others are given."""
_FORMAT_KEPT = 0.01
"""Difference by which a student may keep the format less often than its teacher, without a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An agent on held-out scenarios, sampled at temperature 1."""

    format: float | None
    """Share of its conversations that end with one thought and one answer in their tags."""
    success: float | None
    mean_reward: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """A student after its fine-tuning."""

    agent: MultiTurnAgent
    run: RunFolder
    model_folder: Path
    """The weights, as plain transformers loads them."""
    before: Measured | None
    """Measurement before the fine-tuning; None where there was nothing to measure on."""
    after: Measured | None


class ReasoningDistillation:
    """A student learns from what a teacher writes.

    >>> distillation = ReasoningDistillation(teacher, student, environment=ArithmeticProblems())
    >>> traces = await distillation.generate_distillation_data(samples=4, temperature=1.0)
    >>> distilled = await distillation.train_student(traces, learning_rate=1e-4)

    Teacher and student need nothing in common, since words are passed on: each reads prompts by its own
    template. That is how DeepSeek-R1's distilled models were made
    (https://arxiv.org/abs/2501.12948, section 2.4): fine-tuning alone, without reinforcement.
    """

    def __init__(
        self,
        teacher_model: MultiTurnAgent | EndpointAgent,
        student_model: MultiTurnAgent,
        *,
        environment: Environment | None = None,
        reward: Reward | None = None,
    ) -> None:
        """`environment` asks the prompts, and has held-out ones to measure on; without it a prompt is one
        message of a user, answered once. `reward` verifies, `MathAnswerReward` unless another is given."""
        hint = "write MultiTurnAgent(AgentConfig(...))"
        if not isinstance(teacher_model, EndpointAgent):
            expect("teacher_model", teacher_model, MultiTurnAgent, hint)
        expect("student_model", student_model, MultiTurnAgent, hint)
        self.teacher = teacher_model
        self.student = student_model
        self.environment = environment
        self._has_verifier = reward is not None or environment is not None
        self.reward = MathAnswerReward() if reward is None else as_reward(reward)

    @awaitable_or_blocking
    async def generate_distillation_data(
        self,
        prompts: Prompts | None = None,
        *,
        max_length: int = 4096,
        temperature: float = 0.1,
        samples: int = 1,
        min_reward: float = 1.0,
        in_format: bool = True,
        seed: int = 0,
        limits: RolloutLimits | None = None,
        kept: KeptConversations | None = None,
        on_progress: OnProgress | None = None,
    ) -> Traces:
        """Ask the teacher, and keep what is right.

        Args:
            prompts: Texts, scenarios or rows, or the Path of a file (see `core.sources.row_shapes`); the
                environment's train scenarios where they are left out. What is right stands in a scenario's
                context. Texts alone, without environment and reward, are kept by their format, unverified,
                and a warning says so.
            max_length: Most new tokens of a reply.
            temperature: With several samples set it to about 1, or they are all alike.
            samples: Replies to each prompt; equal ones are kept once.
            min_reward: Replies that earn less are not kept, nor those that the environment judges failures.
            in_format: Keep only replies with one thought and one answer in their tags.
            seed: Of users and sampling.
            limits: How many conversations at once, and how long they may take.
            kept: A file of conversations, which are not played again by a second call.
            on_progress: As of `evaluate`.

        Raises ConfigurationError for a prompt that is held out, and where nothing can be kept.
        """
        environment, scenarios = await in_thread(self._prompts, prompts)
        is_verified = self._has_verifier or any(scenario.context for scenario in scenarios)
        if not is_verified:
            _log.warning(
                f"nothing says what is right for {len(scenarios)} texts: the replies are kept by their "
                'format, right or wrong; give Scenario(..., context={"answer": ...}) to verify them'
            )
        teacher = await self._teacher(max_length)
        evaluation = await evaluate(
            teacher,
            environment,
            self.reward,
            scenarios,
            tries=samples,
            temperature=temperature,
            seed=seed,
            limits=limits,
            kept=kept,
            on_progress=on_progress,
        )
        played = [trajectory for group in evaluation.groups for trajectory in group.trajectories]
        tools = [await _tools(environment, trajectory) for trajectory in played]
        return verified_traces(
            zip(played, tools, strict=True),
            teacher=await self._identity(),
            min_reward=min_reward if is_verified else None,
            in_format=in_format,
        )

    @awaitable_or_blocking
    async def train_student(
        self,
        distillation_data: Traces | Sequence[Trace],
        config: SFTConfig | None = None,
        *,
        measure_on: Sequence[Scenario] | None = None,
        run: RunFolder | None = None,
        limits: RolloutLimits | None = None,
        callbacks: Sequence[object] = (),
        **settings: Any,
    ) -> Distilled:
        """Fine-tune the student on the traces, and measure how it keeps the format before and after.

        `measure_on`: 64 of the environment's test scenarios where it is left out, none without an
        environment. The run folder has the traces as `traces.jsonl`; `stateset-agents sft --resume` goes
        on with it. `config`, or `settings` of `SFTConfig`: not both. `run`: a folder to use instead of a new
        one.

        A student that keeps the format by more than a percentage point less than its teacher is warned of.
        """
        if config is not None and settings:
            raise ConfigurationError("give train_student a config or settings, not both")
        config = config or SFTConfig(**{"run_name": "distill", **settings})
        examples = list(distillation_data)
        if not examples:
            raise ConfigurationError("there is no trace to imitate: give at least one")
        scenarios = await in_thread(self._held_out, measure_on)
        folder = run
        if folder is None:
            folder = await in_thread(RunFolder.create, config.output_dir, config.run_name)
        file = folder.path / "traces.jsonl"
        await in_thread(write_traces, examples, file)
        before = await self._measured(scenarios, limits)
        trainer = SFTTrainer(self.student, file, config, run=folder, callbacks=callbacks)
        await trainer.train_and_stop()
        after = await self._measured(scenarios, limits)
        reached = None if after is None else after.format
        traces = distillation_data
        if isinstance(traces, Traces) and reached is not None and reached < traces.format - _FORMAT_KEPT:
            _log.warning(
                "the student keeps the format less often than its teacher: train longer, or on more traces",
                student=round(reached, 3),
                teacher=round(traces.format, 3),
            )
        return Distilled(
            agent=self.student, run=folder, model_folder=trainer.model_folder, before=before, after=after
        )

    @awaitable_or_blocking
    async def close(self) -> None:
        """Close teacher and student."""
        for agent in (self.teacher, self.student):
            if isinstance(agent, MultiTurnAgent):
                await agent.close()

    def _prompts(self, prompts: Prompts | None) -> tuple[Environment, Sequence[Scenario]]:
        """The environment that asks, and the scenarios; none of them is held out."""
        if prompts is None:
            if self.environment is None:
                raise ConfigurationError("give prompts, or make ReasoningDistillation with an environment")
            return self.environment, self.environment.scenarios("train")
        if isinstance(prompts, str):
            raise ConfigurationError(
                f"prompts must be a list of texts or scenarios, or a Path of rows, got {prompts!r:.60}"
            )
        if isinstance(prompts, Path):
            scenarios = read_scenarios(prompts, needs_opening=True)
        else:
            scenarios = load_scenarios(
                [_as_scenario(prompt, index) for index, prompt in enumerate(prompts)], needs_opening=True
            )
        held_out = _openings(self.environment)
        for scenario in scenarios:
            split = scenario.split if scenario.split != "train" else held_out.get(scenario.opening)
            if split is not None:
                raise ConfigurationError(
                    f"prompt {scenario.opening or scenario.id!r:.60} is of the {split} split, which is "
                    "held out to measure on: take it out, or give prompts of the train split"
                )
        return self.environment or _asking(scenarios), scenarios

    async def _teacher(self, max_length: int) -> MultiTurnAgent | EndpointAgent:
        """The teacher with room for a whole reply."""
        teacher = self.teacher
        config = teacher.config.model_copy(update={"max_new_tokens": max_length})
        if isinstance(teacher, EndpointAgent):
            return EndpointAgent(teacher.client, config, send_thoughts=teacher.send_thoughts)
        await teacher.initialize(scheduling="throughput")
        most = max(1, teacher.context_length - 1)
        asking = MultiTurnAgent(
            config.model_copy(update={"max_new_tokens": min(max_length, most)}), backend=teacher.backend
        )
        await asking.initialize()
        return asking

    async def _identity(self) -> dict[str, Any]:
        teacher = self.teacher
        if isinstance(teacher, EndpointAgent):
            return {"model": teacher.client.model, "url": teacher.client.url}
        weights = await in_thread(weights_of, teacher.backend)
        return {"model": teacher.config.model_name, "weights": weights}

    def _held_out(self, scenarios: Sequence[Scenario] | None) -> Sequence[Scenario]:
        if scenarios is not None:
            return as_scenarios(scenarios)
        return [] if self.environment is None else spread(self.environment.scenarios("test"), _MEASURED)

    async def _measured(self, scenarios: Sequence[Scenario], limits: RolloutLimits | None) -> Measured | None:
        if not scenarios:
            return None
        await self.student.initialize()
        environment = self.environment or _asking(scenarios)
        evaluation = await evaluate(self.student, environment, self.reward, scenarios, limits=limits)
        played = [trajectory for group in evaluation.groups for trajectory in group.trajectories]
        return Measured(
            format=format_share(played),
            success=evaluation.success,
            mean_reward=evaluation.mean_reward,
            n=evaluation.n,
        )


def _asking(scenarios: Sequence[Scenario]) -> Environment:
    """Prompts that stand alone: answered once, behind calls of the tools that they offer."""
    return ConversationEnvironment(scenarios, user=None)


def _as_scenario(prompt: str | Scenario | Mapping[str, Any], index: int) -> Scenario | Mapping[str, Any]:
    if isinstance(prompt, Scenario):
        return replace(prompt, id=prompt.id or f"prompt-{index}")
    if isinstance(prompt, Mapping):
        return prompt
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigurationError(
            f"a prompt must be text, a Scenario or a row, got {type(prompt).__name__} {prompt!r:.60}"
        )
    return Scenario(id=f"prompt-{index}", opening=prompt)


def _openings(environment: Environment | None) -> dict[str, Split]:
    """Opening -> split of what an environment holds out."""
    splits: tuple[Split, ...] = ("validation", "test")
    if environment is None:
        return {}
    return {
        scenario.opening: split
        for split in splits
        for scenario in environment.scenarios(split)
        if scenario.opening
    }


async def _tools(environment: Environment, trajectory: Trajectory) -> tuple[Mapping[str, Any], ...]:
    """The tools that a conversation was offered."""
    conversation = await environment.start(trajectory.scenario, trajectory.seed)
    try:
        return tuple(conversation.tools)
    finally:
        await conversation.close()
