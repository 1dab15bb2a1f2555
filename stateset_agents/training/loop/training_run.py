"""What a training stands on: model copies, run folder, logs, checkpoints. The trainer adds the steps."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from rich.console import Console

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.context_window import refuse_sliding_window
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment, expect_environment
from stateset_agents.core.reward import Reward, as_reward
from stateset_agents.evaluation.evaluator import held_out, refuse_truncated_sampling
from stateset_agents.runs.callbacks import Patience, expect_callback, notify
from stateset_agents.runs.compatibility import Identity, refuse_different
from stateset_agents.runs.lifecycle import Progress
from stateset_agents.runs.trackers import make_trackers, refuse_missing
from stateset_agents.runs.warnings import StepWarnings
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.tracking.console import ConsoleDisplay
from stateset_agents.tracking.monitors import Finding
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker, SilentTracker
from stateset_agents.training.components import check_reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.process_group import Joined
from stateset_agents.training.loop.overlapped_rollouts import Pipeline
from stateset_agents.training.loop.resume import RunState
from stateset_agents.training.loop.training_lock import at_work, edition
from stateset_agents.training.schedules.scenario_order import ScenarioOrder
from stateset_agents.training.update.base_model import base_model, is_quantized_training, matmul_precision
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect

__all__ = ["TrainingRun"]

_log = get_logger(__name__)
_T = TypeVar("_T")


class TrainingRun(Joined):
    """Loads everything, keeps how far the run has come, and writes what it leaves behind."""

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
    ) -> None:
        """`run`: a folder to use instead of a new one; `description`: more for its config.yaml; `callbacks`:
        who hears of steps, evaluations and checkpoints: `Callback`s, or any objects with some of its
        methods."""
        super().__init__()
        expect("agent", agent, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
        expect_environment(environment)
        if config is not None:
            expect("config", config, TrainingConfig, "write TrainingConfig(num_episodes=100, ...)")
        for callback in callbacks:
            expect_callback(callback)
        self.agent = agent
        self.environment = environment
        self.reward_fn = as_reward(reward_fn)
        self.config = config or TrainingConfig()
        self.recommended: dict[str, Any] = {}
        """What the model's card set, where the user set nothing."""
        self.callbacks: list[object] = [*make_trackers(self.config.report_to), *callbacks]
        self.console: Console | None = None
        """Where the step lines of `config.progress` go; stderr when unset."""
        self._display: tuple[ConsoleDisplay, ...] = ()
        self._state = RunState()
        self._saved: RunState | None = None
        self._metrics: dict[str, float] = {}
        self._warnings = StepWarnings()
        self._fresh: list[Finding] = []
        """What it warned of in the last step."""
        self._why: str | None = None
        self._trouble: str | None = None
        self._is_stepping = False
        self._is_notifying = False
        self._task: asyncio.Task[Any] | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._description = dict(description or {})
        self._run = run
        self._tracker: JsonlTracker | None = None
        self._learner: Learner | None = None
        self._edition: object = None
        self._versions = [0]
        """Of the policies so far, ascending."""
        self._pipeline: Pipeline | None = None
        self._flows_from: object = None
        """The edition and the frontier that the pipeline goes on from."""
        self._boundary = asyncio.Lock()
        self._patience = Patience()

    # ------------------------------------------------------------------------------ set-up

    @property
    def is_ready(self) -> bool:
        """Has `initialize` been through?"""
        return self._tracker is not None

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return _ready(self._run)

    @property
    def tracker(self) -> JsonlTracker:
        """Writes the run folder's logs."""
        return _ready(self._tracker)

    @property
    def learner(self) -> Learner:
        """Holds the master weights."""
        return _ready(self._learner)

    @property
    def step_number(self) -> int:
        """Steps finished."""
        return self._state.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.num_steps()

    async def initialize(self) -> None:
        """Load the model, make the trainable copy and the reference, open the run folder.

        Raises ConfigurationError for settings that cannot work together, a trainer that was stopped, an agent
        that another trainer is training, a run folder that another trainer is writing, and a launcher that
        started another number of processes than `num_processes`.
        """
        self._worker.refuse_stopped()
        if self.is_ready:
            return
        await self._join(self.config.num_processes)
        try:
            await self._make_ready()
        except (Exception, asyncio.CancelledError) as error:
            await self._part(error)
            raise

    async def _make_ready(self) -> None:
        refuse_truncated_sampling(self.agent)
        refuse_sliding_window(self.agent.config)
        check_reward(self.reward_fn, self.config)
        self._refuse_settings()
        await in_thread(refuse_missing, self.callbacks)
        scenarios = await in_thread(self.environment.scenarios, "train")
        self._order = ScenarioOrder(scenarios, self.config.seed)
        await self.agent.initialize()
        if not hasattr(self.agent.backend, "master_model"):
            raise ConfigurationError(
                f"a {type(self.agent.backend).__name__} has no weights to train: use an in-process model"
            )
        if self.config.scheduling == "deterministic" and not self.deterministic:
            raise ConfigurationError(
                "scheduling deterministic needs a model in this process: a server's batches are its own; "
                "leave it at auto"
            )
        card = getattr(self.agent.backend, "recommended", {})
        self.config, self.recommended = self.config.with_recommended(card)
        if self.recommended:
            said = ", ".join(f"{name} {value}" for name, value in self.recommended.items())
            _log.warning(f"the model's card sets what you did not: {said}")
        if self.config.eval_steps:
            await in_thread(held_out, self.environment, "validation", None)
        self._scenarios = await self._worker.run(self._order.fingerprint)
        with at_work(self.agent.backend, self):
            self._edition = edition(self.agent.backend)
            self._learner, self._base = await self._worker.run(self._make_learner, self.agent.backend)
        if is_quantized_training(self.config):
            self._edition = object()  # so that it takes the policy's before it plays
        self.engine = ComputationalEngine(
            self.agent,
            self.environment,
            self.reward_fn,
            num_generations=self.config.num_generations,
            num_branches=self.config.branches_per_turn,
            max_concurrent=self.config.max_concurrent,
            episode_retries=self.config.episode_retries,
            deterministic=self.deterministic,
            turn_timeout=self.config.turn_timeout,
            reward_timeout=self.config.reward_timeout,
            faults=self.config.faults,
            episode_timeout=self.config.episode_timeout,
        )
        await self._open_run()
        self.engine.dependencies.on_event = self._log_fault

    def _log_fault(self, name: str, **fields: Any) -> None:
        self.tracker.log_event(name, step=self.step_number, **fields)

    def _refuse_settings(self) -> None:
        """Raises ConfigurationError for what this kind of trainer cannot do; this one can do all of it."""

    def _paths(self, backend: Any) -> dict[str, Any]:
        """By which way the model generates and the update lays out its rows, and why."""
        running, policy = backend.running, self.learner.policy
        return {
            "engine": running.name,
            "why": running.why,
            "linears": running.linears,
            "rows": "packed" if policy.packs else "padded",
            "why_rows": policy.why,
        }

    async def _open_run(self) -> None:
        """The first process makes the folder and writes in it, the others know where it is."""

        def opened() -> tuple[RunFolder, JsonlTracker]:
            run = self._run or RunFolder.create(self.config.output_dir, name=self.config.run_name)
            if not run.config.exists():  # a resumed run's stays until its checkpoint agrees
                run.write_config(self._settings())
            return run, JsonlTracker(run, self.agent.backend.tokenizer.piece)

        async def path() -> Path | None:
            if self.processes.is_first:
                self._run, self._tracker = await self._worker.run(opened)
            return self._run.path if self._run else None

        refuse_different(await self._all("initialize", self._identity()))
        where = (await self._together("the run folder", path()))[0]
        assert where is not None
        if self._tracker is None:
            self._run = RunFolder(where)
            self._tracker = SilentTracker(self._run)

    def _make_learner(self, backend: Any) -> tuple[Learner, str]:
        model, exact = base_model(backend, self.config)
        learner = Learner(
            model,
            self.config,
            num_steps=self.num_steps,
            exact_logprobs=exact,
            processes=self.processes,
            matmul_precision=matmul_precision(backend),
        )
        return learner, learner.fingerprint

    def _identity(self) -> Identity:
        apart = ("evaluation", "made_by")
        settings = {name: value for name, value in self._settings().items() if name not in apart}
        return Identity(base=self._base, scenarios=self._scenarios, settings=settings)

    def _settings(self) -> dict[str, Any]:
        named = "environment" in self._description  # by what a YAML file can name, not by its class alone
        return {
            **({} if named else {"made_by": "program"}),
            "agent": self.agent.config.model_dump(mode="json"),
            "environment": {"name": type(self.environment).__name__},
            "reward": self.reward_fn.name,
            **self._description,
            "training": self.config.model_dump(mode="json"),
        }

    @property
    def deterministic(self) -> bool:
        """Does the run wait for every local reply, so that it can be repeated bit by bit?"""
        if not getattr(self.agent.backend, "is_repeatable", True):
            return False
        if self.config.scheduling == "auto":
            return self.environment.local and not self.config.max_staleness
        return self.config.scheduling == "deterministic"

    @property
    def temperature(self) -> float:
        """Of the next rollout."""
        return self._state.temperature or self.config.temperature

    @property
    def progress(self) -> Progress:
        """How the training stands now."""
        return Progress(
            state=self.state,
            step=self.step_number,
            num_steps=self.num_steps,
            seconds=round(self._state.train_seconds, 3),
            metrics=dict(self._metrics),
            best_step=self._state.best.step,
            best_value=self._state.best.value,
            why=self._why,
        )

    def _tell(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Write an event of the step under way, or of the one named, for a timeline of the run."""
        self.tracker.log_event(
            event,
            step=self.step_number + 1 if step is None else step,
            run=self.run.path.name,
            monotonic=round(time.monotonic(), 6),
            **fields,
        )

    async def _notify(self, moment: str, *arguments: Any) -> None:
        if not self.processes.is_first:
            return
        self._is_notifying = True
        try:
            everyone = [*self.callbacks, *self._display]
            failures = await notify(everyone, moment, *arguments, patience=self._patience)
        finally:
            self._is_notifying = False
        for failure in failures:
            if self.is_ready:
                self.tracker.log_event("callback failed", step=self.step_number, error=failure)

    @contextlib.contextmanager
    def _displayed(self) -> Iterator[None]:
        """Print the steps meanwhile, where that is asked for; of several processes the first does."""
        if not self.config.progress or not self.processes.is_first:
            yield
            return
        console = self.console or Console(stderr=True)
        with ConsoleDisplay(
            self.num_steps, first_step=self.step_number, console=console, trainer=self
        ) as display:
            self._display = (display,)
            try:
                yield
            finally:
                self._display = ()

    def _refuse_in_callback(self, what: str) -> None:
        """Raises ConfigurationError for what all processes do together, where the first is alone."""
        if self._is_notifying and not self.processes.is_alone:
            raise ConfigurationError(
                f"{what} needs all {self.processes.count} processes, and callbacks are called in the first "
                "one: call it between steps of your own, in every process, or set save_steps or eval_steps"
            )

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says about the training itself."""
        local = self.environment.local and self.reward_fn.local
        best, threads = self._state.best, torch.get_num_threads()
        system = f"{platform.system()} {platform.machine()}"
        return {
            "seed": self.config.seed,
            "steps": self.step_number,
            "num_steps": self.num_steps,
            "ended": self.state,
            "why": self._why,
            "best": None
            if best.step is None
            else {"step": best.step, "metric": best.metric, "value": best.value},
            "train_seconds": round(self._state.train_seconds, 3),
            "platform": f"{system}, {threads} thread{'s' * (threads > 1)}",
            "deterministic": self.deterministic and local and self._state.repeatable,
        }

    async def stop(self) -> None:
        """End the update thread and close the logs; the agent goes on speaking.

        A `train` under way is asked to stop and waited for, so its last step is kept; a callback that is
        still at work after a minute is cancelled.
        """
        if asyncio.current_task() is self._task:
            raise ConfigurationError("stop() waits for train() to return: in a callback use request_stop()")
        self.request_stop()
        self._patience.shorten()
        await self._ended.wait()
        await self._worker.stop()
        if self._tracker is not None:
            self._tracker.close()

    async def close(self) -> None:
        """Stop, and close the agent too."""
        await self.stop()
        await self.agent.close()

    async def __aenter__(self) -> Self:
        spoke = self.agent.is_running
        try:
            await self.initialize()
        except (Exception, asyncio.CancelledError):
            await self.stop()
            if not spoke:  # else it is in use elsewhere
                await self.agent.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _ready(part: _T | None) -> _T:
    if part is None:
        raise ConfigurationError("the trainer is not ready: await trainer.initialize() first")
    return part
