"""Conversations of the coming steps go on while the trainer updates: groups in flight, and what a step gets.

`admission.py` says which groups may begin and which train next; here they are played, one task a group,
in the event loop. The weights change under conversations that are under way: the backend takes new ones
between two decode steps and refills their caches, and every token carries the version that sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.runtime.tasks import shielded
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.plan import Curriculum
from stateset_agents.training.loop.rollouts import Admission, EventSink, Played, verdict_of
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.loop.weight_sync import WeightSync
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import TrajectoryGroup


class Pipeline:
    """Keeps as many groups under way as admission allows; `next` gives a step's, in order.

    Must be closed: that cancels what is under way and waits for it.
    """

    def __init__(
        self,
        engine: ComputationalEngine,
        scenario_at: Callable[[int], Scenario],
        admission: Admission,
        config: TrainingConfig,
        *,
        event: EventSink,
        on_change: Callable[[], None],
        put_together: Callable[[TrajectoryGroup], TrajectoryGroup] = lambda group: group,
    ) -> None:
        """`scenario_at`: the scenario of each place of the run; `on_change` is called as a group ends;
        `put_together`: gives a group its rewards of their parts."""
        self.admission = admission
        self._engine = engine
        self._scenario_at = scenario_at
        self.config = config
        self._put_together = put_together
        self._event = event
        self._on_change = on_change
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, TrajectoryGroup] = {}
        """Finished ones that have not trained."""
        self._met: Counter[str] = Counter()
        """Number of times that each scenario has come in the step of the group that began last, up to that
        group."""
        self._next_to_meet = 0
        self._error: BaseException | None = None
        self._is_held = False
        self._changed = asyncio.Event()
        self._busy_seconds = 0.0
        self._busy_since: float | None = None

    # ------------------------------------------------------------------------------ groups

    def admit(self) -> None:
        """Begin what may begin now."""
        while not self._is_held and self._error is None and self.admission.capacity:
            place = self.admission.admit()
            self._event("group admitted", group=place, scenario=self._scenario_at(place).id)
            playing = self._play(place, self._times_before(place))
            self._tasks[place] = asyncio.create_task(playing, name=f"group {place}")
        self._note_business()

    def _times_before(self, place: int) -> int:
        """The number of times that the place's scenario comes before it in its step; asked in the order of
        places."""
        first = place - place % self.config.episodes_per_step()
        if self._next_to_meet <= first:
            self._met.clear()
            self._next_to_meet = first
        self._met.update(self._scenario_at(other).id for other in range(self._next_to_meet, place))
        self._next_to_meet = place
        return self._met[self._scenario_at(place).id]

    async def _play(self, place: int, times: int) -> None:
        def conversation_ended() -> None:
            self.admission.conversation_ended(place)
            self.admit()

        try:
            step = place // self.config.episodes_per_step()
            played = await self._engine.play_group(
                self._scenario_at(place),
                seed=self.config.seed,
                step=step,  # in which it would train were none replaced: so it meets the users it would then
                times=times,
                slots=self._slots,
                temperature=self.config.temperature,
                on_end=conversation_ended,
            )
            group = self._put_together(played)
            self._groups[place] = group
            verdict = verdict_of(group, self.config)
            self.admission.finish(place, verdict)
            self._event("group finished", group=place, verdict=verdict.value)
            self.admit()
        except BaseException as error:  # whoever waits for the next step must hear of it, whatever it is
            self._error = self._error or error
        finally:
            del self._tasks[place]
            self._note_business()
            self._changed.set()
            self._on_change()

    async def next(self) -> Played:
        """The next step's groups, as soon as the last of them is there; what broke in playing is raised."""
        await asyncio.sleep(0)  # a cancellation that is due lands here, though everything may be there
        while not self.admission.is_ready:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        batch = self.admission.next_batch()
        return Played({place: self._groups[place] for place in batch.ends}, batch)

    def release(self, played: Played) -> None:
        """Forget the groups of a step that has trained, begin others; the agent samples with its weights by
        now."""
        self.admission.complete_step()
        for place in played.groups:
            del self._groups[place]
        self._engine.flush_warnings()
        self.admit()

    # ------------------------------------------------------------------------------ pause and end

    @property
    def is_idle(self) -> bool:
        """True when no group is under way."""
        return not self._tasks

    def pause(self) -> None:
        """Begin nothing more; what is under way goes on to its end."""
        self._is_held = True

    def resume(self) -> None:
        """Begin groups again."""
        self._is_held = False
        self.admit()

    async def close(self) -> list[int]:
        """Cancel what is under way and wait for it; the places of the groups that were."""
        self._is_held = True
        dropped = sorted(self._tasks)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()  # of those that were cancelled before they began
        self._engine.flush_warnings()
        return dropped

    # ------------------------------------------------------------------------------ figures

    def watch_overlap(self) -> Callable[[], dict[str, float]]:
        """Begin to measure how far an update goes on beside rollouts; the function that it returns ends
        that."""
        queue = {
            "queue/running": float(self.admission.running),
            "queue/accepted": float(self.admission.num_waiting),
        }
        began, busy, sampled = time.perf_counter(), self._busy(), self._sampled_tokens()

        def ended() -> dict[str, float]:
            seconds = max(time.perf_counter() - began, 1e-9)
            share = min(1.0, (self._busy() - busy) / seconds)
            tokens = float(self._sampled_tokens() - sampled)
            return {**queue, "overlap/share": share, "overlap/tokens": tokens}

        return ended

    def _sampled_tokens(self) -> int:
        return self._engine.agent.backend.counts().get("sampled_tokens", 0)

    def _busy(self) -> float:
        """Seconds so far in which a group was under way."""
        now = 0.0 if self._busy_since is None else time.perf_counter() - self._busy_since
        return self._busy_seconds + now

    def _note_business(self) -> None:
        """Groups have begun or ended: does the time count?"""
        busy = self._busy()
        self._busy_seconds, self._busy_since = busy, time.perf_counter() if self._tasks else None


class OverlappedRollouts:
    """A `RolloutSource` that plays the groups of later steps while the trainer updates.

    It begins anew where something else came between two of its steps: a checkpoint that was loaded, a step
    by hand, other settings.
    """

    def __init__(
        self,
        engine: ComputationalEngine,
        curriculum: Curriculum,
        weights: WeightSync,
        event: EventSink,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called as a group ends."""
        self._engine = engine
        self._curriculum = curriculum
        self._weights = weights
        self._event = event
        self._on_change = on_change
        self._pipeline: Pipeline | None = None
        self._follows: tuple[object, int] | None = None
        """The weights that the pipeline plays with, and the frontier that it goes on from."""

    @property
    def max_staleness(self) -> int | None:
        """The largest number of updates between a token's policy and the step that learns from it."""
        return self._curriculum.config.max_staleness

    async def next(self, state: RunState) -> Played:
        """The groups of the step after `state`, as soon as the last of them is there."""
        pipeline = self._pipeline
        is_next = self._weights.is_current and self._follows == self._place(state)
        if (
            pipeline is None or not is_next or pipeline.config is not self._curriculum.config
        ):  # of another length
            pipeline = await self._begin(state)
        return await pipeline.next()

    async def _begin(self, state: RunState) -> Pipeline:
        await self.close()
        await self._weights.ensure_current(state)
        config = self._curriculum.config
        admission = Admission(
            groups_per_step=config.episodes_per_step(),
            remaining=_episodes_left(config, state),
            max_staleness=config.max_staleness,
            max_concurrent=config.max_concurrent,
            group_size=config.num_generations,
            max_resamples=config.max_resamples,
            first=state.frontier,
        )
        plan = self._curriculum.plan(state.frontier, state.curriculum)  # of all steps, as the settings check

        def put_together(group: TrajectoryGroup) -> TrajectoryGroup:
            return self._curriculum.put_together([group], plan)[0]

        self._pipeline = Pipeline(
            self._engine,
            self._curriculum.order.at,
            admission,
            config,
            event=self._event,
            on_change=self._on_change,
            put_together=put_together,
        )
        self._follows = self._place(state)
        self._pipeline.admit()
        return self._pipeline

    def _place(self, state: RunState) -> tuple[object, int]:
        return self._weights.token, state.frontier

    def watch_overlap(self) -> Callable[[], dict[str, float]]:
        """Begin to measure how far an update goes on beside rollouts; the function that it returns ends
        that."""
        return dict if self._pipeline is None else self._pipeline.watch_overlap()

    def release(self, played: Played, state: RunState) -> None:
        """Forget groups that have trained, begin others; the agent has the weights of `state` by now."""
        if self._pipeline is not None:
            self._pipeline.release(played)
            self._follows = self._place(state)

    @property
    def is_idle(self) -> bool:
        """True when no group is under way."""
        return self._pipeline is None or self._pipeline.is_idle

    def pause(self) -> None:
        """Begin nothing more; what is under way goes on to its end."""
        if self._pipeline is not None:
            self._pipeline.pause()

    def resume(self) -> None:
        """Begin groups again."""
        if self._pipeline is not None:
            self._pipeline.resume()

    async def close(self) -> list[int]:
        """Cancel the groups under way, which are played again from the frontier on; their places."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return []
        dropped = await shielded(pipeline.close())
        if dropped:
            self._event("groups dropped", groups=dropped)
        return dropped


def _episodes_left(config: TrainingConfig, state: RunState) -> int:
    """Episodes of all steps that are left; the last one alone may be short."""
    full, steps = config.episodes_per_step(), config.num_steps() - state.step
    if config.max_steps is not None:
        return steps * full
    left = config.num_episodes - state.num_trained
    return left if (steps - 1) * full < left < steps * full else steps * full
