"""A trainer's parts, made in order: settings are checked, weights loaded, the run folder opened."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.backends.base import Backend, RunningBackend, TrainableBackend, exclusive
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import RewardFunction
from stateset_agents.evaluation.evaluator import held_out, refuse_truncated_sampling
from stateset_agents.runs.compatibility import Identity, check_identical
from stateset_agents.runs.lifecycle import Lifecycle
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runs.settings import RunSettings
from stateset_agents.runs.trackers import check_installed
from stateset_agents.runtime.tasks import Worker, in_thread
from stateset_agents.tracking.monitors import graded
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.components import check_reward, check_scored
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.checkpointer import Checkpointer
from stateset_agents.training.loop.curriculum.orders import ScenarioOrder
from stateset_agents.training.loop.curriculum.plan import Curriculum
from stateset_agents.training.loop.metrics import untrained_share
from stateset_agents.training.loop.overlapped_rollouts import OverlappedRollouts
from stateset_agents.training.loop.rollouts import EventSink, Rollouts
from stateset_agents.training.loop.validation import Validation
from stateset_agents.training.loop.weight_sync import WeightSync, initial_tokens
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.update.factory import LearnerFactory, is_quantized_training
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.training.update.teacher import Teacher, load_teacher
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The collaborators of a trainer, once its model is loaded."""

    recommended: dict[str, Any]
    """Settings of the model's card that the user left unset."""
    backend: RunningBackend
    learner: PolicyLearner
    engine: ComputationalEngine
    curriculum: Curriculum
    weights: WeightSync
    checkpoints: Checkpointer
    rollouts: Rollouts
    overlapped: OverlappedRollouts
    validation: Validation
    teacher: Teacher | None
    """The teacher of an on-policy distillation."""

    def adopt(self, config: TrainingConfig) -> None:
        """Take another length or cadence for what comes, in the parts that a step may have begun with; the
        learner has its length already."""
        self.rollouts.config = self.overlapped.config = self.validation.config = config
        self.curriculum.config = config


def is_deterministic(config: TrainingConfig, environment: Environment, backend: Backend) -> bool:
    """True where the run waits for every local reply, so that it can be repeated bit by bit."""
    if isinstance(backend, TrainableBackend) and not backend.is_repeatable:
        return False
    if config.scheduling == "auto":
        return environment.local and not config.max_staleness
    return config.scheduling == "deterministic"


def _settings(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: RewardFunction,
    config: TrainingConfig,
    description: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of config.yaml."""
    is_named = "environment" in description  # by what a YAML file can name, not by its class alone
    return {
        **({} if is_named else {"made_by": "program"}),
        "agent": agent.config.model_dump(mode="json"),
        "environment": {"name": type(environment).__name__},
        "reward": reward_fn.name,
        **description,
        "training": config.model_dump(mode="json"),
    }


async def set_up(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: RewardFunction,
    config: TrainingConfig,
    factory: LearnerFactory,
    *,
    description: Mapping[str, Any],
    lifecycle: Lifecycle,
    group: ProcessGroup,
    worker: Worker,
    recorder: RunRecorder,
    step_event: EventSink,
    run_event: EventSink,
    fault_event: EventSink,
) -> Parts:
    """Check the settings, load the model, make the learner, open the run folder.

    `step_event` writes an event of the step under way, `run_event` one after the last finished step,
    `fault_event` one of the services that conversations depend on. Raises as
    `MultiTurnGRPOTrainer.initialize` does.
    """
    refuse_truncated_sampling(agent)
    check_reward(reward_fn, config)
    factory.check(agent, config)
    await in_thread(check_installed, recorder.callbacks)
    scenarios = await in_thread(environment.scenarios, "train")
    for scenario in scenarios:
        reward_fn.check_scenario(scenario)
    check_scored(reward_fn, environment, scenarios)
    order = ScenarioOrder(scenarios, config.seed)
    await agent.initialize()
    backend = agent.backend
    if not isinstance(backend, RunningBackend):
        raise ConfigurationError(
            f"a {type(backend).__name__} has no weights to train: use an in-process model"
        )
    if agent.config.history == "keep" and not agent.template.appends and group.is_first:
        _log.warning(
            "the chat template drops or changes earlier turns, and this training keeps them as they were "
            'sampled: serve the agent with history="keep", too'
        )
    deterministic = is_deterministic(config, environment, backend)
    if config.scheduling == "deterministic" and not deterministic:
        raise ConfigurationError(
            "scheduling deterministic needs a model in this process: a server's batches are its own; "
            "leave it at auto"
        )
    config, recommended = config.with_recommended(backend.recommended)
    curriculum = Curriculum(scenarios, config, reward_fn.part_weights)
    if recommended:
        set_by_card = ", ".join(f"{name} {value}" for name, value in recommended.items())
        _log.warning(f"the model's card sets what you did not: {set_by_card}")
    if group.is_first and isinstance(backend, TrainableBackend):
        await in_thread(_tell_untrained, backend, scenarios)
    if config.eval_steps:
        await in_thread(held_out, environment, "validation", None)
    fingerprint = await worker.run(order.fingerprint)
    async with contextlib.AsyncExitStack() as opened:  # closed again where a later step fails
        teacher = None
        if config.distillation is not None:
            teacher = await load_teacher(config.distillation, agent, group=group)
            opened.push_async_callback(teacher.close)
        with exclusive(backend, lifecycle):
            tokens = initial_tokens(backend, is_quantized=is_quantized_training(config))
            learner = await worker.run(factory.make, agent, backend, config, group.processes)
        opened.callback(learner.close)
        engine = ComputationalEngine(
            await factory.player(agent, learner),
            environment,
            reward_fn,
            num_generations=config.num_generations,
            num_branches=config.branches_per_turn,
            deterministic=deterministic,
            limits=config.rollout_limits(),
        )
        engine.fault_tolerance.on_event = fault_event
        settings = _settings(agent, environment, reward_fn, config, description)
        compared = {name: value for name, value in settings.items() if name not in ("evaluation", "made_by")}
        if teacher is not None:
            compared["teacher"] = {"weights": teacher.weights}
        identity = Identity(base=learner.fingerprint, scenarios=fingerprint, settings=compared)
        weights, checkpoints = await open_run(
            agent,
            learner,
            config,
            identity,
            settings,
            run_settings=config,
            tokens=tokens,
            lifecycle=lifecycle,
            group=group,
            worker=worker,
            recorder=recorder,
        )
        opened.pop_all()
        return Parts(
            recommended=recommended,
            backend=backend,
            learner=learner,
            engine=engine,
            curriculum=curriculum,
            weights=weights,
            checkpoints=checkpoints,
            rollouts=Rollouts(engine, curriculum, weights, group, config, step_event),
            overlapped=OverlappedRollouts(engine, curriculum, weights, config, run_event, lifecycle.notify),
            validation=make_validation(agent, environment, reward_fn, config, group),
            teacher=teacher,
        )


def _tell_untrained(backend: TrainableBackend, scenarios: Sequence[Scenario]) -> None:
    """Warn where the words of the first hundred scenarios are none that the model was trained on."""
    if backend.trained_tokens is None:
        return
    texts = [message.content for scenario in scenarios[:100] for message in scenario.messages()]
    share = untrained_share(map(backend.tokenizer.encode, texts), backend.trained_tokens)
    observation = (
        f"{share or 0:.0%} of the tokens of what scenarios begin with are none that the model was trained on"
    )
    finding = graded("vocabulary", share or 0.0, observation)
    if finding.verdict != "ok":
        _log.warning(f"{finding.check}: {finding.seen}: {finding.cure}")


def make_validation(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: RewardFunction,
    config: TrainingConfig,
    group: ProcessGroup,
) -> Validation:
    """Evaluates the agent of a trainer, whether its model is loaded by it or not."""
    return Validation(
        agent,
        environment,
        reward_fn,
        config,
        group.divide,
        deterministic=is_deterministic(config, environment, agent.backend),
    )


async def open_run(
    agent: MultiTurnAgent,
    learner: PolicyLearner,
    config: TrainingConfig,
    identity: Identity,
    settings: Mapping[str, Any],
    *,
    run_settings: RunSettings,
    tokens: tuple[object, object],
    lifecycle: Lifecycle,
    group: ProcessGroup,
    worker: Worker,
    recorder: RunRecorder,
) -> tuple[WeightSync, Checkpointer]:
    """Open the run folder; returns what pushes the learner's weights, and what saves them there.

    The first process makes the folder and writes in it, the others know where it is and tell its day.
    `settings`: the content of config.yaml; `tokens`: of
    `initial_tokens`.
    """

    def make() -> RunFolder:
        return RunFolder.create(run_settings.output_dir, name=run_settings.run_name)

    async def begun() -> tuple[str | None, datetime.date | None]:
        if group.is_first:
            await worker.run(recorder.open, make, settings, agent.backend.tokenizer.piece)
        return None if recorder.folder is None else str(recorder.folder.path), agent.template.date

    check_identical(await group.barrier("initialize", identity))
    where, date = (await group.gather_results("the run folder", begun()))[0]
    assert where is not None
    if date is not None:
        agent.pin_date(date)
    if not recorder.is_open:
        recorder.follow(Path(where))
    weights = WeightSync(
        agent,
        learner,
        group,
        worker,
        config,
        recorder.run.path,
        owner=lifecycle,
        token=tokens[0],
        base=tokens[1],
    )
    checkpoints = Checkpointer(
        learner=learner,
        group=group,
        worker=worker,
        recorder=recorder,
        identity=identity,
        settings=settings,
        limit=run_settings.save_total_limit,
        is_sharded=config.parallelism == "fsdp2",
        agent=agent,
    )
    return weights, checkpoints
