"""One step after another: what is played, credit, update, hand-over, metrics. The trainer adds the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from stateset_agents.core.scoring.base import result_of
from stateset_agents.runtime.tasks import in_thread, uninterrupted
from stateset_agents.runtime.user_code import told
from stateset_agents.training.loop.admission import Admission, refuse_stale
from stateset_agents.training.loop.checkpointer import RunCheckpoints
from stateset_agents.training.loop.metrics import (
    of_all_processes,
    rollout_metrics,
    staleness_metrics,
    why_nothing_trained,
)
from stateset_agents.training.loop.overlapped_rollouts import Pipeline, Played, verdict_of
from stateset_agents.training.loop.resource_usage import StepWatch, watch_step
from stateset_agents.training.loop.training_lock import at_work, edition
from stateset_agents.training.schedules.temperature import next_temperature
from stateset_agents.training.update.credit import Credited
from stateset_agents.types.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    StatesetError,
    TrainingStopped,
)
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, expect_scenarios
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup, by_scenario

__all__ = ["TrainSteps"]

_log = get_logger(__name__)


class TrainSteps(RunCheckpoints):
    """The steps of a training, each by itself or beside the rollouts of the next ones."""

    async def step(self) -> dict[str, float]:
        """One step: roll out, credit, update, hand the new weights to the agent; returns its metrics.

        Called by itself it plays first and learns then, whatever `max_staleness` is. Cancelled during the
        rollout it leaves nothing behind; from the update on it finishes first.
        """
        with self._stepping():
            started = time.perf_counter()
            async with watch_step(self.agent.backend) as watch:
                played = await self._play_step()
                metrics = await uninterrupted(self._learn_from(played, started, watch))
            return await self._step_end(metrics)

    async def generate_trajectories(self, scenarios: Sequence[Scenario]) -> list[TrajectoryGroup]:
        """One scored group per scenario, sampled from the current policy."""
        expect_scenarios(scenarios)
        self._refuse_in_callback("generate_trajectories")
        return await self._roll_out(scenarios)

    async def training_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """A step on groups that are there already, as `generate_trajectories` gives them."""
        with self._stepping():
            played = Played.by_hand(groups, self._state.frontier, self.config)
            async with watch_step(self.agent.backend) as watch:
                metrics = await uninterrupted(self._learn_from(played, time.perf_counter(), watch))
            return await self._step_end(metrics)

    async def compute_grpo_loss(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Tensor]:
        """The policy's loss on these groups under the weights as they are, without a KL term; nothing steps.

        Scalars: total_loss carries the gradient; policy_loss, kl_penalty (0 here), entropy, approx_kl (to
        pi_old) and clip_fraction do not. `training_step` makes the same loss, with `beta` times the KL to the
        reference, and steps on it.

        Raises ConfigurationError where no group has `min_group_size` scored members.
        """
        return await self._loss(groups, 0.0)

    async def compute_enhanced_grpo_loss(
        self, trajectories: Sequence[Trajectory], beta: float = 0.1
    ) -> dict[str, Tensor]:
        """`compute_grpo_loss` plus `beta` times the KL to the reference, kl_penalty.

        Trajectories of one scenario are a group. Raises ConfigurationError, too, for a `beta` without a
        reference model.
        """
        return await self._loss(by_scenario(trajectories), beta)

    async def _loss(self, groups: Sequence[TrajectoryGroup], beta: float) -> dict[str, Tensor]:
        def loss() -> dict[str, Tensor]:
            self.learner.set_temperature(self.temperature)
            return self.learner.losses(self.learner.credit(groups).credited.samples, beta=beta)

        if self.config.parallelism == "fsdp2":
            self._refuse_in_callback("the loss of shards")
        async with self._boundary:
            return await self._worker.run(loss)

    # ------------------------------------------------------------------------------ what a step plays

    async def _play_step(self) -> Played:
        """The next scenarios; those without signal are replaced by further ones, where that is asked for."""
        number, first = self._step_episodes(), self._state.frontier
        admission = Admission(
            groups_per_step=number,
            remaining=number,
            max_resamples=self.config.max_resamples,
            first=first,
        )
        groups: dict[int, TrajectoryGroup] = {}
        while not admission.is_ready:
            places = [admission.admit() for _ in range(admission.capacity)]
            scenarios = self._order.take(places[0], len(places))
            for place, scenario in zip(places, scenarios, strict=True):
                self._tell("group admitted", group=place, scenario=scenario.id)
            earlier = [group.trajectories[0].scenario for group in groups.values()]
            played = await self._roll_out(scenarios, earlier, partial(self._tell_finished, places))
            for place, group in zip(places, played, strict=True):
                groups[place] = group
                admission.finish(place, verdict_of(group, self.config))
        return Played(groups, admission.take())

    def _tell_finished(self, places: Sequence[int], number: int) -> None:
        self._tell("group finished", group=places[number])

    async def _roll_out(
        self,
        scenarios: Sequence[Scenario],
        earlier: Sequence[Scenario] = (),
        on_scored: Callable[[int], None] | None = None,
    ) -> list[TrajectoryGroup]:
        """Each process plays its part, and gets the groups of all."""
        tell = on_scored or (lambda place: None)
        own = self.processes.part_of(len(scenarios))

        async def play(part: Sequence[Scenario], before: Sequence[Scenario]) -> list[TrajectoryGroup]:
            return await self.engine.rollout(
                part,
                seed=self.config.seed,
                step=self.step_number,
                temperature=self.temperature,
                earlier=[*earlier, *before],
                on_scored=lambda place: tell(own.start + place),
            )

        with at_work(self.agent.backend, self):
            await self._speak_as_itself()
            groups = await self.divide(scenarios, play, f"a rollout of step {self.step_number + 1}")
        for place in (*range(own.start), *range(own.stop, len(scenarios))):  # heard of just now
            tell(place)
        return groups

    def _step_episodes(self) -> int:
        full = self.config.episodes_per_step()
        if self.config.max_steps is not None:
            return full
        # At least one, though steps by hand may have used up more than their share.
        return max(1, min(full, self.config.num_episodes - self._state.num_trained))

    def _episodes_left(self) -> int:
        """Of all steps that are left; the last one alone may be short."""
        full, steps = self.config.episodes_per_step(), self.num_steps - self.step_number
        if self.config.max_steps is not None:
            return steps * full
        left = self.config.num_episodes - self._state.num_trained
        return left if (steps - 1) * full < left < steps * full else steps * full

    # ------------------------------------------------------------------------------ overlapping steps

    async def _overlapping_step(self) -> dict[str, float]:
        """One step on what the pipeline has ready, while it plays on."""
        with self._stepping():
            started = time.perf_counter()
            pipeline = await self._flowing()
            async with watch_step(self.agent.backend) as watch:
                played = await pipeline.next()
                metrics = await uninterrupted(self._learn_from(played, started, watch, pipeline))
            self._flows_from = self._here()
            return await self._step_end(metrics)

    async def _flowing(self) -> Pipeline:
        """The pipeline; a new one where there is none, or where something else came between: a checkpoint
        that was loaded, a step by hand."""
        own = edition(self.agent.backend) is self._edition
        if self._pipeline is not None and own and self._flows_from == self._here():
            return self._pipeline
        await self._stop_flow()
        await self._speak_as_itself()
        config = self.config
        admission = Admission(
            groups_per_step=config.episodes_per_step(),
            remaining=self._episodes_left(),
            max_staleness=config.max_staleness,
            max_concurrent=config.max_concurrent,
            group_size=config.num_generations,
            max_resamples=config.max_resamples,
            first=self._state.frontier,
        )
        self._pipeline = Pipeline(
            self.engine,
            self._order.at,
            admission,
            config,
            tell=self._tell_of_group,
            on_change=self._look_again,
        )
        self._flows_from = self._here()
        self._pipeline.admit()
        return self._pipeline

    def _here(self) -> tuple[object, int]:
        """Whose weights the agent should speak with, and what is to be played next."""
        return self._edition, self._state.frontier

    def _tell_of_group(self, event: str, **fields: Any) -> None:
        """With the last finished step: it may come before that step's checkpoint, which a resume goes on
        from, and what is of later steps is cut off then with all that follows."""
        self._tell(event, step=self.step_number, **fields)

    async def _stop_flow(self) -> None:
        """Cancel the groups under way; they are played again from the frontier on."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            dropped = await uninterrupted(pipeline.close())
            if dropped:
                self._tell("groups dropped", step=self.step_number, groups=dropped)

    async def _quieten(self) -> None:
        """For a pause: begin nothing, and wait until what is under way has ended."""
        if self._pipeline is None:
            return
        self._pipeline.hold()
        while self._pauses and not self._stops and not self._pipeline.is_quiet:
            await self._changed.wait()

    def _liven(self) -> None:
        if self._pipeline is not None:
            self._pipeline.go_on()

    # ------------------------------------------------------------------------------ what a step learns

    def _done(self) -> tuple[str, str] | None:
        """Why no step is left, and what to do about it; None while there is one."""
        if self.step_number >= self.num_steps:
            steps = f"all {self.num_steps} steps are" if self.num_steps > 1 else "the one step is"
            return f"{steps} done", "raise max_steps or num_episodes to go on"
        if self._state.best.exhausts(self.config.early_stopping_patience):
            return self._state.best.why_stopped(), "raise early_stopping_patience to go on"
        return None

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """One step at a time, and none after the last."""
        self._worker.refuse_stopped()
        self._refuse_in_callback("a step")
        if done := self._done():
            raise ConfigurationError(": ".join(done))
        if self._is_stepping:
            raise ConfigurationError("a step of this trainer is under way: await it before the next")
        with at_work(self.agent.backend, self):
            self._is_stepping = True
            try:
                yield
            finally:
                self._is_stepping = False

    async def _step_end(self, metrics: dict[str, float]) -> dict[str, float]:
        for finding in self._fresh:
            await self._notify("on_warning", self.step_number, finding)
        await self._notify("on_step_end", self.step_number, metrics)
        if self._trouble is not None:
            raise TrainingStopped(self._trouble)
        return metrics

    async def _learn_from(
        self, played: Played, started: float, watch: StepWatch, pipeline: Pipeline | None = None
    ) -> dict[str, float]:
        number, rolled_out = self.step_number + 1, time.perf_counter()
        async with self._boundary:
            # from here on nobody turns back
            repeatable = all(await self._all("the update", self.engine.repeatable))
            with self.processes.updating():
                metrics, credited = await self._update(played, number, pipeline, repeatable=repeatable)
                self._tell_ends(played, number)
                if credited.samples:
                    await self._hand_over()
                    self._tell("weights handed over", step=number, version=self._state.version)
            if pipeline is not None:
                pipeline.settle(played)
            mistake = await self._observe(played.everyone)
            sampled = metrics.get("tokens/agent", 0.0) + metrics.get("tokens/branches", 0.0)
            now = time.perf_counter()
            self._state = replace(self._state, train_seconds=self._state.train_seconds + now - started)
        spent = {
            "time/rollout": rolled_out - started,
            "time/update": now - rolled_out,
            "time/step": now - started,
            **watch.metrics(),
            **self.engine.dependencies.metrics(),
        }
        spent = of_all_processes(await self._all("the metrics", spent))
        metrics |= {
            **spent,
            "tokens/per_second": sampled / spent["time/step"],
            "policy/version": float(self._state.version),
        }
        self._metrics |= metrics
        self._fresh = self._warnings.look(number, metrics, self.config.model_dump(), watch.lag_place)
        for finding in self._fresh:
            self.tracker.log_event("warning", step=number, **asdict(finding))
        self.tracker.log_metrics(number, metrics)
        if self.config.log_rollouts:
            own = dict(zip(played.batch.taken, credited.advantages, strict=True))
            none = {place: [None] * len(group.trajectories) for place, group in played.groups.items()}
            advantages = list((none | own).values())
            write = partial(self.tracker.log_rollouts, number, played.everyone, advantages, stage="train")
            await self._worker.run(write)
        if mistake is not None:
            raise mistake
        return metrics

    async def _update(
        self, played: Played, number: int, pipeline: Pipeline | None, *, repeatable: bool
    ) -> tuple[dict[str, float], Credited]:
        """Credit and update; the run is one step further then."""
        everyone, config = played.everyone, self.config
        self._tell("update begun", step=number, groups=list(played.batch.taken))
        overlap = pipeline.overlap() if pipeline is not None else dict
        self.learner.set_temperature(self.temperature)
        if config.rollout_sleep:
            await self.agent.backend.rest()
        lesson = await self._worker.run(partial(self.learner.credit, played.taken))
        credited = lesson.credited
        metrics = await self._worker.run(rollout_metrics, everyone)  # thousands of turns: not in the loop
        stale = staleness_metrics(played.taken, self._versions)
        if pipeline is not None:
            refuse_stale(int(stale.get("staleness/max", 0.0)), config.max_staleness)
        if pipeline is not None or stale.get("staleness/max"):
            metrics |= stale
        metrics |= {"group/dropped": float(credited.num_dropped_groups)}
        if config.max_resamples:
            metrics["group/resampled"] = float(len(played.batch.passed_over))
        metrics["rollout/temperature"] = self.temperature
        metrics |= await self._worker.run(partial(self.learner.learn, lesson, step=number))
        metrics |= overlap()
        self._tell("update ended", step=number)
        scaled = self.learner.scales_gradients
        cause = why_nothing_trained(everyone, metrics, config, scaled=scaled)
        self._state = self._state.after_step(
            episodes=len(everyone),
            replaced=len(played.batch.passed_over),
            new_policy=bool(credited.samples),
            failed=cause is not None,
            repeatable=repeatable,
            temperature=next_temperature(config, self.temperature, metrics.get("reward/mean")),
        )
        fatal = number == 1 or self._state.failed_steps >= config.max_failed_steps
        self._trouble = f"step {number} {cause}" if cause and fatal else None
        return metrics, credited

    def _tell_ends(self, played: Played, number: int) -> None:
        """One record of each group, over all restarts."""
        for place, end in played.batch.ends.items():
            scenario = played.groups[place].trajectories[0].scenario.id
            where = {"group": place, "epoch": self._order.epoch_of(place), "scenario": scenario}
            self._tell("group consumed", step=number, **where, end=end.value)

    async def _observe(self, groups: Sequence[TrajectoryGroup]) -> Exception | None:
        """Show the reward its scores. It is user code: what it raises is one line, and the step goes on; an
        error that must travel is returned, for the step to be whole first."""

        def observe() -> dict[str, Any]:
            self.reward_fn.observe([result_of(one) for group in groups for one in group.scored])
            return self.reward_fn.state()

        try:
            self._state = replace(self._state, reward=await in_thread(observe))
        except (*PROGRAMMING_ERRORS, StatesetError) as error:
            return error
        except Exception as error:  # the boundary to user code
            said = f"{self.reward_fn.name}.observe failed: {told(error)}"
            _log.error(f"reward {said}; training goes on")
            self.tracker.log_event("reward failed", step=self.step_number, error=said)
            self._state = replace(self._state, repeatable=False)
        return None
