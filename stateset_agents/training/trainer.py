"""The trainer: scenarios -> episodes -> scored groups -> advantages -> batch -> loss -> step -> metrics.

`MultiTurnGRPOTrainer` conducts; its parts are made in `_set_up`. One step is `_step` and `_learn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from stateset_agents.backends.base import RunningBackend, TrainableBackend, exclusive
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment, expect_environment, optional_member
from stateset_agents.core.reward import Reward, RewardFunction, as_reward
from stateset_agents.core.sources.scenario_files import as_scenarios
from stateset_agents.evaluation.evaluator import Evaluation, PlayPart, held_out
from stateset_agents.runs.checkpoint_files import best_checkpoint, load_checkpoint
from stateset_agents.runs.compatibility import Identity
from stateset_agents.runs.lifecycle import State
from stateset_agents.runs.recorder import ready
from stateset_agents.runs.session import one_line, platform_line
from stateset_agents.runs.trackers import check_installed
from stateset_agents.runtime.event_loop import measure_loop_lag
from stateset_agents.runtime.machine import gpu_memory
from stateset_agents.runtime.pending_calls import awaitable
from stateset_agents.runtime.tasks import in_thread, shielded
from stateset_agents.tracking.monitors import graded
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.agent_session import AgentSession
from stateset_agents.training.components import check_reward, check_scored
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.loop.checkpointer import Checkpointer
from stateset_agents.training.loop.curriculum.orders import ScenarioOrder
from stateset_agents.training.loop.curriculum.plan import Curriculum, StepPlan
from stateset_agents.training.loop.curriculum.state import SuccessTable
from stateset_agents.training.loop.metrics import merge_processes, untrained_share
from stateset_agents.training.loop.overlapped_rollouts import OverlappedRollouts
from stateset_agents.training.loop.rollouts import Played, Rollouts, RolloutSource
from stateset_agents.training.loop.step import (
    StepWatch,
    Update,
    next_temperature,
    observe,
    update_policy,
)
from stateset_agents.training.loop.validation import Validation
from stateset_agents.training.loop.weight_sync import WeightSync, initial_tokens
from stateset_agents.training.processes import PeerFailed, Processes
from stateset_agents.training.update.batch import given_credit
from stateset_agents.training.update.factory import LearnerFactory, is_quantized_training
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.training.update.teacher import Teacher, load_teacher
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, Scenarios
from stateset_agents.types.settings import expect
from stateset_agents.types.trajectory import Groups, Trajectory, TrajectoryGroup, as_groups

if TYPE_CHECKING:
    from stateset_agents.training.memory_plan import MemoryPlan

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


class MultiTurnGRPOTrainer(AgentSession[TrainingConfig]):
    """Trains an agent by group-relative policy optimisation, inside the caller's event loop.

    Generation runs in the backend's worker thread and the update in the trainer's own, so the loop goes
    on answering. With `scheduling: deterministic` a run is a function of settings, seed, versions, CPU
    type and thread count.

    Trainers of one agent take turns: while one is in `train` or a step, the others refuse to begin. Each
    goes on from its own weights, which the agent takes again when that trainer's next rollout begins; none
    needs to be closed for the next.

    >>> trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config)
    >>> await trainer.initialize()
    >>> agent = await trainer.train()
    """

    _MAY_CHANGE = frozenset({"num_episodes", "max_steps", "max_failed_steps", "log_rollouts"})
    _LENGTH = "max_steps or num_episodes"
    _parts: Parts | None

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward_fn: Reward,
        config: TrainingConfig | None = None,
        *,
        run: RunFolder | None = None,
        description: Mapping[str, Any] | None = None,
        callbacks: Sequence[object] = (),
        learner_factory: LearnerFactory | None = None,
    ) -> None:
        """`run`: a folder to use instead of a new one; `description`: more for its config.yaml; `callbacks`:
        who hears of steps, evaluations and checkpoints: `Callback`s, or any objects with some of its
        methods; `learner_factory`: who makes what updates the policy, ours when absent."""
        expect("agent", agent, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
        expect_environment(environment)
        if config is not None:
            expect("config", config, TrainingConfig, "write TrainingConfig(num_episodes=100, ...)")
        super().__init__(agent, config or TrainingConfig(), run, callbacks)
        self.environment = environment
        self.reward_fn: RewardFunction = as_reward(reward_fn)
        self._description = dict(description or {})
        self._factory = learner_factory or LearnerFactory()
        self.memory_plan: MemoryPlan | None = None
        """The plan of a GPU's memory, from `initialize` on; None on a CPU."""
        self._is_stepping = False

    # ------------------------------------------------------------------------------ how it stands

    def _change_settings(self, config: TrainingConfig, changes: Mapping[str, Any]) -> None:
        self._refuse_in_callback("another config")
        self.learner.set_num_steps(config.num_steps())  # it may refuse, before anything is written
        try:
            super()._change_settings(config, changes)
        except ConfigurationError:
            self.learner.set_num_steps(self.config.num_steps())
            raise

    def _adopt_settings(self, config: TrainingConfig, settings: Mapping[str, Any]) -> None:
        parts = ready(self._parts)
        parts.curriculum.config = parts.validation.config = config
        self._state = parts.checkpoints.change_settings(config, settings, self._state)

    @property
    def recommended(self) -> dict[str, Any]:
        """Settings of the model's card that the user left unset."""
        return {} if self._parts is None else self._parts.recommended

    @property
    def learner(self) -> PolicyLearner:
        """Holds the master weights."""
        return ready(self._parts).learner

    @property
    def engine(self) -> ComputationalEngine:
        """Plays the conversations."""
        return ready(self._parts).engine

    @property
    def processes(self) -> Processes:
        """The processes that train together."""
        return self._group.processes

    @property
    def _planned_steps(self) -> int:
        return self.config.num_steps()

    @property
    def temperature(self) -> float:
        """Sampling temperature of the next rollout."""
        return self._state.temperature or self.config.temperature

    @property
    def deterministic(self) -> bool:
        """True where the run waits for every local reply, so that it can be repeated bit by bit."""
        backend, config = self.agent.backend, self.config
        if isinstance(backend, TrainableBackend) and not backend.is_repeatable:
            return False
        if config.scheduling == "auto":
            return self.environment.local and not config.max_staleness
        return config.scheduling == "deterministic"

    @property
    def successes(self) -> SuccessTable:
        """Successes of the scenarios so far; empty unless `track_success`, or something that follows success,
        is set."""
        return self._state.curriculum.successes

    def summary(self) -> dict[str, Any]:
        """The entries of `summary.json` about the training itself."""
        local = self.environment.local and self.reward_fn.local
        return {
            **self._outcome(),
            "platform": platform_line(),
            "deterministic": self.deterministic and local and self._state.repeatable,
        }

    # ------------------------------------------------------------------------------ begin and end

    async def initialize(self) -> None:
        """Load the model, make the trainable copy and the reference, open the run folder.

        Raises ConfigurationError for settings that cannot work together, a trainer that was stopped, an agent
        that another trainer is training, a run folder that another trainer is writing, and a launcher that
        started another number of processes than `num_processes`.
        """
        self._worker.refuse_stopped()
        if self.is_ready:
            return
        await self._group.join(self.config.num_processes)
        self._recorder.is_first = self.processes.is_first
        try:
            self._parts = await self._set_up()
        except (Exception, asyncio.CancelledError) as error:
            await self._group.abort(error)
            raise
        self._note_date()

    async def _checked_scenarios(self) -> Sequence[Scenario]:
        """The train scenarios. Raises ConfigurationError for what can be told before the model is loaded."""
        check_reward(self.reward_fn, self.config)
        self._factory.check(self.agent, self.config)
        await in_thread(check_installed, self.callbacks)
        hold_out = optional_member(self.environment, "hold_out")
        if self.config.eval_steps and hold_out is not None:
            await in_thread(hold_out, "validation")
        scenarios = await in_thread(self.environment.scenarios, "train")
        for scenario in scenarios:
            self.reward_fn.check_scenario(scenario)
        check_scored(self.reward_fn, self.environment, scenarios)
        return scenarios

    async def _plan_memory(self) -> None:
        """Plan the memory of a GPU before anything is loaded into it, and adopt what the plan chose.

        Raises ConfigurationError where a phase would not fit.
        """
        config = self.agent.config
        is_elsewhere = config.model_name == "scripted" or config.model_name.startswith("vllm:")
        gpu = gpu_memory(config.device)
        if gpu is None or is_elsewhere or not self.agent.loads_model:
            return
        # TRL's own memory is not known, nor is that of shards; several processes would have to agree.
        if type(self._factory) is not LearnerFactory or not self.processes.is_alone:
            return
        from stateset_agents.training.memory_plan import NoPlan, plan_training

        total, others = gpu
        try:
            plan = await in_thread(partial(plan_training, config, self.config, total=total, others=others))
        except NoPlan as error:
            _log.warning(str(error))
            return
        _log.info("\n".join(plan.lines()))
        plan.expect_fitting()
        self.memory_plan = plan
        self.agent.config, self._config = plan.adopted(config, self.config)

    async def _start_agent(self) -> RunningBackend:
        """Load the model. Raises ConfigurationError for one that these settings cannot train."""
        agent = self.agent
        await agent.initialize()
        backend = agent.backend
        if not isinstance(backend, RunningBackend):
            raise ConfigurationError(
                f"a {type(backend).__name__} has no weights to train: use an in-process model"
            )
        if agent.config.history == "keep" and not agent.template.appends and self.processes.is_first:
            _log.warning(
                "the chat template drops or changes earlier turns, and this training keeps them as they were "
                'sampled: serve the agent with history="keep", too'
            )
        if self.config.scheduling == "deterministic" and not self.deterministic:
            raise ConfigurationError(
                "scheduling deterministic needs a model in this process: leave it at auto"
            )
        return backend

    async def _set_up(self) -> Parts:
        """Check the settings, load the model, make the learner, open the run folder: in this order, for each
        of them needs what the one before it made."""
        agent, environment, worker, group = self.agent, self.environment, self._worker, self._group
        scenarios = await self._checked_scenarios()
        order = ScenarioOrder(scenarios, self.config.seed)
        await self._plan_memory()
        backend = await self._start_agent()
        deterministic = self.deterministic
        config, recommended = self.config.with_recommended(backend.recommended)
        curriculum = Curriculum(scenarios, config, self.reward_fn.part_weights)
        if recommended:
            set_by_card = ", ".join(f"{name} {value}" for name, value in recommended.items())
            _log.warning(f"the model's card sets what you did not: {set_by_card}")
        if group.processes.is_first and isinstance(backend, TrainableBackend):
            await in_thread(_warn_of_untrained, backend, scenarios)
        if config.eval_steps:
            await in_thread(held_out, environment, "validation", None)
        fingerprint = await worker.run(order.fingerprint)
        self._config = config
        async with contextlib.AsyncExitStack() as opened:  # closed again where a later step fails
            teacher = None
            if config.distillation is not None:
                teacher = await load_teacher(config.distillation, agent, group=group)
                opened.push_async_callback(teacher.close)
            with exclusive(backend, self._lifecycle):
                tokens = initial_tokens(backend, is_quantized=is_quantized_training(config))
                learner = await worker.run(self._factory.make, agent, backend, config, group.processes)
            opened.callback(learner.close)
            engine = ComputationalEngine(
                await self._factory.player(agent, learner),
                environment,
                self.reward_fn,
                num_generations=config.num_generations,
                num_branches=config.branches_per_turn,
                deterministic=deterministic,
                limits=config.rollout_limits(),
            )
            engine.fault_tolerance.on_event = self._fault_event
            engine.take_step = self._take_step
            if (probe := optional_member(environment, "probe")) is not None:
                await probe(engine)
            settings = self._settings()
            compared = {name: settings[name] for name in settings if name not in ("evaluation", "made_by")}
            if teacher is not None:
                compared["teacher"] = {"weights": teacher.weights}
            identity = Identity(base=learner.fingerprint, scenarios=fingerprint, settings=compared)
            weights, checkpoints = await self._open_run(learner, config, identity, settings, tokens=tokens)
            opened.pop_all()
        rollouts = Rollouts(engine, curriculum, weights, group, self._step_event)
        overlapped = OverlappedRollouts(engine, curriculum, weights, self._run_event, self._lifecycle.notify)
        return Parts(
            recommended=recommended,
            backend=backend,
            learner=learner,
            engine=engine,
            curriculum=curriculum,
            weights=weights,
            checkpoints=checkpoints,
            rollouts=rollouts,
            overlapped=overlapped,
            validation=self._make_validation(),
            teacher=teacher,
        )

    def _settings(self) -> dict[str, Any]:
        """The content of config.yaml."""
        is_named = "environment" in self._description  # by what a YAML file can name, not by its class alone
        return {
            **({} if is_named else {"made_by": "program"}),
            "agent": self.agent.config.model_dump(mode="json"),
            "environment": {"name": type(self.environment).__name__},
            "reward": self.reward_fn.name,
            **self._description,
            "training": self.config.model_dump(mode="json"),
        }

    async def stop(self) -> None:
        await super().stop()
        if self._parts is not None and self._parts.teacher is not None:
            await self._parts.teacher.close()

    async def __aenter__(self) -> Self:
        was_running = self.agent.is_running
        try:
            await self.initialize()
        except (Exception, asyncio.CancelledError):
            await self.stop()
            if not was_running:  # else it is in use elsewhere
                await self.agent.close()
            raise
        return self

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the agent: the last step's, or with load_best_at_end the
        best evaluation's.

        However it ends, by a cancellation or an error too, it keeps a checkpoint of the last finished step,
        `summary.json` and `report.html`. After `request_stop` another call goes on; when all is done it says
        so. Raises TrainingStopped when `max_failed_steps` steps in a row (or the first) could not train.
        """
        return await super().train()

    @property
    def _beside(self) -> RolloutSource:
        parts = ready(self._parts)
        return parts.overlapped if self.config.max_staleness else parts.rollouts

    async def _begin(self) -> None:
        parts = ready(self._parts)
        paths = self._factory.paths(parts.backend, parts.learner)
        self.tracker.log_event("paths", step=self.step_number, **paths)
        if parts.teacher is not None:
            self.tracker.log_event("teacher", step=self.step_number, **parts.teacher.identity)

    async def _may_continue(self) -> bool:
        return all(await self._group.gather_results("the next step", super()._may_continue()))

    async def _next_step(self) -> None:
        await self._step(self._beside)

    async def _validate(self) -> bool:
        parts = ready(self._parts)
        await parts.weights.ensure_current(self._state)
        result = await self.evaluate()
        is_best = await shielded(self._note_evaluation(parts, result))
        await self._notify("on_evaluate", self.step_number, result)
        return is_best

    async def _finish(self, *, is_done: bool) -> None:
        parts = ready(self._parts)
        if is_done and self.config.load_best_at_end:
            await shielded(self._publish_best(parts))
        elif is_done:
            parts.weights.name_origin(self.step_number)

    async def _publish_best(self, parts: Parts) -> None:
        """Let the agent sample with the best step's weights; the trainer's own stay the last step's."""
        path = best_checkpoint(self.run.checkpoints)
        parts.weights.name_origin(self.step_number)
        if path is None:
            _log.warning("the run folder has no best checkpoint: the agent keeps the last step's weights")
        elif self._state.best.step is not None and self._state.best.step != self.step_number:
            checkpoint = await self._worker.run(load_checkpoint, path)
            await parts.weights.publish(checkpoint)

    async def _broken_off(self, error: BaseException) -> tuple[State, str]:
        if isinstance(error, PeerFailed):
            return "stopped" if error.is_stop else "failed", one_line(error)
        await self._group.abort(error)
        return await super()._broken_off(error)

    async def _agree_on_end(self, state: State, why: str) -> None:
        """Wait for all, as a launcher ends the others when one is gone; fail where the first one did."""
        if self.is_ready:
            ended = (await shielded(self._group.barrier("the end", state == "failed" and why)))[0]
            if ended and state != "failed":
                raise PeerFailed(f"process 0 failed: {ended}")

    # ------------------------------------------------------------------------------ one step

    async def step(self) -> dict[str, float]:
        """One step: roll out, credit, update, hand the new weights to the agent; returns its metrics.

        Called by itself it plays first and learns then, whatever `max_staleness` is. Cancelled during the
        rollout it leaves nothing behind; from the update on it finishes first.
        """
        return await self._step()

    async def training_step(
        self, groups: Groups, advantages: Sequence[Sequence[float]] | None = None
    ) -> dict[str, float]:
        """A step on groups that are there already, as `generate_trajectories` gives them; trajectories of one
        scenario are a group.

        `advantages`: [groups][members] of your own in place of the estimator's; the rewards then count for
        nothing, and a critic learns nothing.
        """
        played = Played.by_hand(as_groups(groups), self._state.frontier, self.config, advantages)
        return await self._step(played=played)

    async def _take_step(self, trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> float:
        """A step of the engine's `_update_policy`."""
        group = TrajectoryGroup(key="given", trajectories=tuple(trajectories))
        metrics = await self.training_step([group], [advantages])
        return metrics.get("loss/policy", 0.0)

    async def _step(
        self, source: RolloutSource | None = None, *, played: Played | None = None
    ) -> dict[str, float]:
        """One step at a time, and none after the last. `source`: of the groups, those played just now when
        absent; `played`: learn from these instead."""
        self._worker.refuse_stopped()
        self._refuse_in_callback("a step")
        parts = ready(self._parts)
        source = source or parts.rollouts
        if done := self._done():
            raise ConfigurationError(": ".join(done))
        if self._is_stepping:
            raise ConfigurationError("a step of this trainer is under way: await it before the next")
        with parts.weights.exclusive():
            self._is_stepping = True
            try:
                started = time.perf_counter()
                async with measure_loop_lag() as lag:
                    watch = StepWatch(self.agent.backend, lag)
                    if played is None:
                        played = await source.next(self._state)
                    # Once the update has begun, a cancellation waits for its end.
                    finished = await shielded(self._learn(parts, source, played, watch, started))
                await self._notify("on_rollout", self.step_number, played.all_groups)
                await self._announce_step(finished.metrics, finished.findings, finished.failure)
                return finished.metrics
            finally:
                self._is_stepping = False

    async def _learn(
        self, parts: Parts, source: RolloutSource, played: Played, watch: StepWatch, started: float
    ) -> Update:
        """Update the policy, push its weights, show the reward its scores, record the step."""
        rolled_out = time.perf_counter()
        plan = parts.curriculum.plan(self._state.frontier, self._state.curriculum)
        async with self._boundary:
            repeatable = all(await self._group.barrier("the update", parts.engine.repeatable))
            with self.processes.updating():
                stage = self._state.curriculum.stage
                update = await self._update(parts, source, played, repeatable=repeatable)
                self._write_group_ends(plan, played, stage_before=stage)
                if update.batch.samples:
                    await parts.weights.push(self._state)
                    self._run_event("weights handed over", version=self._state.version)
            source.release(played, self._state)
            observed = await observe(self.reward_fn, played.all_groups)
            learned = time.perf_counter()
            self._state = replace(
                self._state,
                reward=self._state.reward if observed.state is None else observed.state,
                repeatable=self._state.repeatable and observed.failure is None,
                train_seconds=self._state.train_seconds + learned - started,
            )
        if observed.failure is not None:
            self.tracker.log_event("reward failed", step=self.step_number, error=observed.failure)
        times = {
            "time/rollout": rolled_out - started,
            "time/update": learned - rolled_out,
            "time/step": learned - started,
        }
        metrics = update.metrics | plan.metrics(played.all_groups)
        metrics |= await self._cost(parts, watch, times, metrics)
        findings = self._recorder.step(self.step_number, metrics, self.config.model_dump(), watch.lag.place)
        await self._write_rollouts(played, update)
        if observed.mistake is not None:
            raise observed.mistake
        is_fatal = self.step_number == 1 or self._state.failed_steps >= self.config.max_failed_steps
        failure = f"step {self.step_number} {update.failure}" if update.failure and is_fatal else None
        return replace(update, metrics=metrics, findings=findings, failure=failure)

    async def _update(
        self, parts: Parts, source: RolloutSource, played: Played, *, repeatable: bool
    ) -> Update:
        """Groups -> advantages -> batch -> loss -> optimiser step; the state is then one step further."""
        step = self.step_number + 1
        update = await update_policy(
            parts.learner,
            parts.backend,
            played,
            source,
            self.config,
            self._worker,
            self._step_event,
            teacher=parts.teacher,
            step=step,
            temperature=self.temperature,
            versions=parts.weights.versions,
        )
        state, failed = self._state, update.failure is not None
        mean_reward = update.metrics.get("reward/mean")
        self._state = replace(
            state,
            step=step,
            version=step if update.batch.samples else state.version,
            frontier=state.frontier + len(played.groups),
            replaced=state.replaced + len(played.batch.filtered),
            failed_steps=state.failed_steps + 1 if failed else 0,
            repeatable=state.repeatable and repeatable,
            temperature=next_temperature(self.config, self.temperature, mean_reward),
            curriculum=parts.curriculum.after(state.curriculum, step, played.all_groups, update.metrics),
        )
        return update

    async def _cost(
        self, parts: Parts, watch: StepWatch, times: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of the step's time, memory and engine, over all processes."""
        spent = {**times, **watch.metrics(), **parts.engine.fault_tolerance.metrics()}
        if self.memory_plan is not None:
            spent["memory/gpu/predicted_peak_mib"] = self.memory_plan.peak / 2**20
        cost = merge_processes(await self._group.barrier("the metrics", spent))
        sampled = metrics.get("tokens/agent", 0.0) + metrics.get("tokens/branches", 0.0)
        cost["tokens/per_second"] = sampled / cost["time/step"]
        cost["policy/version"] = float(self._state.version)
        return cost

    # ------------------------------------------------------------------------------ parts of a step

    async def generate_trajectories(self, scenarios: Scenarios) -> list[TrajectoryGroup]:
        """One scored group per scenario, sampled from the current policy."""
        scenario_list = as_scenarios(scenarios)
        self._refuse_in_callback("generate_trajectories")
        return await ready(self._parts).rollouts.play(scenario_list, self._state)

    @awaitable
    async def compute_grpo_loss(self, groups: Groups) -> dict[str, Tensor]:
        """The policy's loss on these groups under the weights as they are, without a KL term; nothing steps.

        Scalars: total_loss carries the gradient; policy_loss, kl_penalty (0 here), entropy, approx_kl (to
        pi_old) and clip_fraction do not. `training_step` makes the same loss, with `beta` times the KL to the
        reference, and steps on it. Trajectories of one scenario are a group.

        Raises ConfigurationError where no group has `min_group_size` scored members.
        """
        return await self._loss(as_groups(groups), 0.0)

    @awaitable
    async def compute_enhanced_grpo_loss(self, trajectories: Groups, beta: float = 0.1) -> dict[str, Tensor]:
        """`compute_grpo_loss` plus `beta` times the KL to the reference, kl_penalty.

        Raises ConfigurationError, too, for a `beta` without a reference model.
        """
        return await self._loss(as_groups(trajectories), beta)

    @awaitable
    async def _compute_group_policy_loss(self, group: TrajectoryGroup, advantages: Sequence[float]) -> Tensor:
        """`compute_grpo_loss`'s total_loss of one group with these advantages [G] in place of its own."""
        return (await self._loss([group], 0.0, [advantages]))["total_loss"]

    async def _loss(
        self,
        groups: Sequence[TrajectoryGroup],
        beta: float,
        advantages: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, Tensor]:
        learner = self.learner

        def loss() -> dict[str, Tensor]:
            learner.set_temperature(self.temperature)
            credited = learner.credit(groups) if advantages is None else given_credit(groups, advantages)
            return learner.losses(credited.samples, beta=beta)

        if self.config.parallelism == "fsdp2":
            self._refuse_in_callback("the loss of shards")
        async with self._boundary:
            return await self._worker.run(loss)

    # ------------------------------------------------------------------------------ evaluation

    async def evaluate(
        self, split: str | Scenarios = "validation", *, episodes: int | None = None, temperature: float = 1.0
    ) -> Evaluation:
        """The current policy on held-out scenarios of a split (at most `eval_episodes`, or `episodes` of
        them), or on all of a list, with users of its own seed."""
        self._refuse_in_callback("evaluate")
        validation = self._make_validation() if self._parts is None else self._parts.validation
        return await validation.evaluate(split, episodes=episodes, temperature=temperature)

    def _make_validation(self) -> Validation:
        """Evaluates the agent, whether its model was loaded by this trainer or not."""
        return Validation(
            self.agent,
            self.environment,
            self.reward_fn,
            self.config,
            self._group.divide,
            deterministic=self.deterministic,
        )

    async def _note_evaluation(self, parts: Parts, result: Evaluation) -> bool:
        """Log an evaluation; is it the best so far?"""
        state = parts.validation.judged(result, self._state)
        if self.config.log_rollouts:
            write = partial(self.tracker.log_rollouts, state.step, result.groups, stage="validation")
            await self._worker.run(write)
        self._recorder.measured(state.step, result.metrics())
        self._state = state
        return state.best.step == state.step

    async def divide(
        self, scenarios: Sequence[Scenario], play: PlayPart, place: str = "an evaluation"
    ) -> list[TrajectoryGroup]:
        """The groups of all scenarios, in order; each process plays its part of them."""
        return await self._group.divide(scenarios, play, place)

    # ------------------------------------------------------------------------------ checkpoints

    async def save_checkpoint(self) -> Path:
        """Write `checkpoints/step-NNNNNN` of the last finished step; older ones beyond the limit go."""
        self._refuse_in_callback("save_checkpoint")
        return await super().save_checkpoint()

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given (warns where
        that has none yet).

        Log lines and checkpoints of later steps are dropped. Raises CheckpointError when it is damaged, was
        taken away, or is of another base model or other settings, ConfigurationError during a step. Another
        machine, thread count or length of the schedule is allowed and said: not bit-equal. Cancelled midway
        it finishes first.
        """
        self._refuse_in_callback("load_checkpoint")
        await self.initialize()
        if self._is_stepping:
            raise ConfigurationError(
                "a step of this trainer is under way: await it, then load the checkpoint"
            )
        parts = ready(self._parts)
        with parts.weights.exclusive():
            try:
                await shielded(self._restore(parts, path))
            except (Exception, asyncio.CancelledError) as error:
                await self._group.abort(error)
                raise

    async def _restore(self, parts: Parts, path: str | Path | None) -> None:
        async with self._boundary:
            restored = await parts.checkpoints.restore(path)
            if restored is not None:
                state = restored[1]
                date = state.template_date or self._state.template_date  # older states have none
                self._state = replace(state, template_date=date)
                await parts.weights.push(self._state)
                self.reward_fn.restore(self._state.reward)
            await parts.checkpoints.truncate_after(self._state)
        if restored is None:
            _log.warning(f"{self.run.path} has no checkpoint yet: starting at step {self.step_number}")
        else:
            self.tracker.log_event("resumed", step=self.step_number, path=restored[0].name)

    def describe(self, summary: Mapping[str, Any]) -> None:
        """Put what was measured of the agent into the model card of its checkpoint. Blocking.

        `summary`: as `summary.json` is to have it. Raises CheckpointError when the disk cannot take it.
        """
        ready(self._parts).checkpoints.describe(self.agent.origin, summary)

    # ------------------------------------------------------------------------------ what is written

    def _step_event(self, name: str, **fields: Any) -> None:
        """Record an event of the step that is being made."""
        self._recorder.event(name, step=self.step_number + 1, **fields)

    def _run_event(self, name: str, **fields: Any) -> None:
        """Record an event with the last finished step.

        It may come before that step's checkpoint, which a resume goes on from; an event of a later step would
        be cut off then with all that follows.
        """
        self._recorder.event(name, step=self.step_number, **fields)

    def _fault_event(self, name: str, **fields: Any) -> None:
        self.tracker.log_event(name, step=self.step_number, **fields)

    def _write_group_ends(self, plan: StepPlan, played: Played, *, stage_before: int) -> None:
        """One record of each group, over all restarts, and one of a stage of the curriculum that begins."""
        for place, end in played.batch.ends.items():
            scenario = played.groups[place].trajectories[0].scenario.id
            epoch = plan.order.epoch_of(place)
            self._run_event("group consumed", group=place, epoch=epoch, scenario=scenario, end=end.value)
        if (stage := self._state.curriculum.stage) != stage_before:
            self._run_event("stage begun", stage=stage + 1)

    async def _write_rollouts(self, played: Played, update: Update) -> None:
        if not self.config.log_rollouts:
            return
        batch, places = update.batch, played.batch.selected
        none = {place: [None] * len(group.trajectories) for place, group in played.groups.items()}
        advantages = none | dict(zip(places, batch.advantages, strict=True))
        logprobs = none | dict(zip(places, batch.by_member(update.logprobs), strict=True))
        write = partial(
            self.tracker.log_rollouts,
            self.step_number,
            played.all_groups,
            list(advantages.values()),
            list(logprobs.values()),
            stage="train",
        )
        await self._worker.run(write)

    def _refuse_in_callback(self, what: str) -> None:
        """Raises ConfigurationError for what all processes do together, where the first is alone."""
        if self._recorder.is_notifying and not self.processes.is_alone:
            raise ConfigurationError(
                f"{what} needs all {self.processes.count} processes, and callbacks are called in the first "
                "one: call it between steps of your own, in every process, or set save_steps or eval_steps"
            )


def _warn_of_untrained(backend: TrainableBackend, scenarios: Sequence[Scenario]) -> None:
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


async def train(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: Reward,
    config: TrainingConfig | None = None,
    *,
    profile: TrainingProfile | str | None = None,
    callbacks: Sequence[object] = (),
    **overrides: Any,
) -> MultiTurnAgent:
    """Train in one call: `await train(agent, environment, reward_fn, profile="balanced", num_episodes=9)`.

    Settings are a `config`, or a profile ("balanced" if absent) and what differs from it; not both.
    `callbacks` hear of steps, evaluations and checkpoints, see `Callback`. Each step prints a line on stderr;
    `progress=False` turns that off.
    """
    if config is None:
        config = TrainingConfig.from_profile(profile or TrainingProfile.BALANCED, **overrides)
    elif profile is not None or overrides:
        raise ConfigurationError("give train a config, or a profile and overrides, not both")
    trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config, callbacks=callbacks)
    return await trainer.train_and_stop()
