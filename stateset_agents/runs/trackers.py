"""A training's numbers in TensorBoard, W&B, Trackio and MLflow, and its conversations as spans of
OpenTelemetry, each through its own library.

Trackers are callbacks: plain methods, so the trainer calls each in a thread of its own and waits for it.
The run folder stays the record; what a tracker cannot take is lost to that tracker only.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.conversation_spans import record_conversation
from stateset_agents.runtime.named_code import library
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

if TYPE_CHECKING:
    from stateset_agents.runs.callbacks import Training
    from stateset_agents.runs.lifecycle import Progress
    from stateset_agents.types.trajectory import TrajectoryGroup


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "opentelemetry"]

_INSTALL: Mapping[TrackerName, str] = {
    "tensorboard": 'pip install "tensorboard>=2.20"',
    "wandb": 'pip install "wandb>=0.22"',
    "trackio": 'pip install "trackio>=0.43"',
    "mlflow": 'pip install "mlflow-skinny==3.17.2"',
    "opentelemetry": 'pip install "opentelemetry-sdk>=1.40"',
}

_log = get_logger(__name__)


class _Tracker(Callback):
    """Opens when `train` begins and closes when it ends; its first failure is one warning and its end."""

    def __init__(self) -> None:
        self._failed = False
        self._is_open = False

    def check(self, name: TrackerName) -> None:
        """Raises ConfigurationError where the library cannot be imported."""
        library(name, f"reporting to {name} needs it installed: {_INSTALL[name]}")

    def on_train_begin(self, trainer: Training) -> None:
        self._failed = False
        self._try(self._begin, trainer)

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._is_open:
            self._try(self._log, step, metrics)

    def on_evaluate(self, step: int, evaluation: Any) -> None:
        if self._is_open:
            self._try(self._log, step, evaluation.metrics())

    def on_train_end(self, trainer: Training) -> None:
        if self._is_open:
            self._is_open = False
            self._try(self._end, trainer.progress)

    def _begin(self, trainer: Training) -> None:
        self._is_open = True  # whatever was opened before a failure is closed
        self._open(trainer.run.path, read_yaml(trainer.run.config), trainer.step_number)

    def _try(self, work: Any, *arguments: Any) -> None:
        """The boundary to another's library, service or disk: a training outlives all of them."""
        if self._failed and work != self._end:
            return
        try:
            work(*arguments)
        except Exception as error:
            if not self._failed:
                reason = " ".join(str(error).split()) or "no reason given"
                _log.warning(
                    f"{type(self).__name__} failed and gets nothing more of this training, which goes on: "
                    f"{type(error).__name__}: {reason}"
                )
            self._failed = True

    @abstractmethod
    def _open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Begin, or go on after `step`."""

    @abstractmethod
    def _log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _end(self, progress: Progress) -> None: ...


class TensorBoardTracker(_Tracker):
    """Event files in the run folder's `tensorboard/`: one scalar per metric, the run's config and how it
    ended as text. A resumed run hides what an earlier part wrote of steps that it plays again.
    """

    _writer: Any = None

    def _open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import yaml
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        text = yaml.safe_dump(dict(config), sort_keys=False)
        self._writer.add_text("run/config", "\n".join(f"    {line}" for line in text.splitlines()), step)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _end(self, progress: Progress) -> None:
        if self._writer is None:
            return
        self._writer.add_text("run/ended", f"{progress.state}: {progress.why}", progress.step)
        self._writer.close()
        self._writer = None


class _RunTracker(_Tracker):
    """A tracker whose library has runs; `settings` are further arguments of the library's `init`."""

    _run: Any = None

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def _end(self, progress: Progress) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._finish(run, progress)

    @abstractmethod
    def _finish(self, run: Any, progress: Progress) -> None:
        """Write how the training ended into the library's run, and close that."""


class WandbTracker(_RunTracker):
    """A W&B run of the run folder's name, with its config; metrics have the axis `step`. A resumed run
    goes on under the same id, which is kept in the folder's `wandb-id.txt`.

    `settings` are further arguments of `wandb.init`, such as project, entity or mode; WANDB_PROJECT,
    WANDB_MODE and its other variables hold as well.
    """

    def _open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        wandb = importlib.import_module("wandb")  # not among what strict types are checked against
        arguments = {
            "name": folder.name,
            "dir": str(folder),
            "id": _saved_id(folder / "wandb-id.txt"),
            "resume": "allow",
            "settings": {"console": "off"},
        }
        self._run = wandb.init(config=dict(config), **{**arguments, **self.settings})
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def _finish(self, run: Any, progress: Progress) -> None:
        try:
            run.summary.update({"ended": progress.state, "why": progress.why})
        finally:
            run.finish(exit_code=int(progress.state == "failed"))


class TrackioTracker(_RunTracker):
    """A Trackio run in Trackio's own store on this machine (its TRACKIO_DIR), named after the run folder and
    an id that is kept in the folder's `trackio-id.txt`; with its config, and how it ended as an alert.

    `settings` are further arguments of `trackio.init`, such as project or space_id; the project is else what
    TRACKIO_PROJECT says, or "stateset-agents".
    """

    def _open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        trackio = importlib.import_module("trackio")  # not among what strict types are checked against
        arguments = {
            "project": os.environ.get("TRACKIO_PROJECT") or "stateset-agents",
            "name": f"{folder.name}-{_saved_id(folder / 'trackio-id.txt')}",
            "resume": "allow",
            "embed": False,
            "auto_log_cpu": False,  # a run is its metrics; what else the machine does is not its own
            "auto_log_gpu": False,
        }
        self._run = trackio.init(config=dict(config), **{**arguments, **self.settings})

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def _finish(self, run: Any, progress: Progress) -> None:
        levels = importlib.import_module("trackio").AlertLevel
        level = levels.ERROR if progress.state == "failed" else levels.INFO
        try:
            run.alert(title=progress.state, text=progress.why, level=level, step=progress.step)
        finally:
            run.finish()


class MlflowTracker(_RunTracker):
    """An MLflow run of the run folder's name, where MLFLOW_TRACKING_URI says; its parameters are the settings
    of agent, environment and training, its artifact `config.yaml` all of them. A resumed run goes on under
    the same id, which is kept in the folder's `mlflow-id.txt`.

    `settings`: `experiment_name`, else what MLFLOW_EXPERIMENT_NAME says, or "stateset-agents"; `tags` of the
    run.
    """

    def _open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        mlflow = importlib.import_module("mlflow")  # not among what strict types are checked against
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        file = folder / "mlflow-id.txt"
        if file.is_file():
            self._run = file.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "stateset-agents"
        experiment = mlflow.set_experiment(self.settings.get("experiment_name", name))
        run = self._client.create_run(
            experiment.experiment_id, run_name=folder.name, tags=self.settings.get("tags")
        )
        self._run = run.info.run_id
        file.write_text(f"{self._run}\n")
        parameters = [
            mlflow.entities.Param(f"{section}.{key}", str(value)[:_MOST_OF_A_PARAMETER])
            for section in ("agent", "environment", "training")
            for key, value in config.get(section, {}).items()
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MOST_PARAMETERS])
        self._client.log_dict(self._run, dict(config), "config.yaml")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        values = [self._metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def _finish(self, run: Any, progress: Progress) -> None:
        self._client.set_tag(run, "ended", f"{progress.state}: {progress.why}")
        status = {"failed": "FAILED", "finished": "FINISHED"}.get(progress.state, "KILLED")
        self._client.set_terminated(run, status)


class OpenTelemetryTracker(_Tracker):
    """Every conversation of a step or an evaluation as a trace (see `conversation_spans`), by the tracer
    provider that the application has set: its exporters and samplers hold, and no metric is sent.

    Words, arguments and results of tools are attributes where
    OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT is "true".
    """

    def check(self, name: TrackerName) -> None:
        trace = library("opentelemetry.trace", f"reporting to {name} needs it: {_INSTALL[name]}")
        if type(trace.get_tracer_provider()).__name__ in ("ProxyTracerProvider", "NoOpTracerProvider"):
            raise ConfigurationError(
                "report_to opentelemetry needs a tracer provider, or nothing would be sent: call "
                "opentelemetry.trace.set_tracer_provider(...) before train, or start the command by "
                "opentelemetry-instrument"
            )

    def on_rollout(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        if self._is_open:
            self._try(self._record, step, "train", groups)

    def on_evaluate(self, step: int, evaluation: Any) -> None:
        if self._is_open:
            self._try(self._record, step, "validation", evaluation.groups)

    def _open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        self._provider = importlib.import_module("opentelemetry.trace").get_tracer_provider()
        self._tracer = self._provider.get_tracer("stateset_agents")
        self._folder, self._model = folder.name, config["agent"]["model_name"]

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: spans have no metrics."""

    def _record(self, step: int, stage: str, groups: Sequence[TrajectoryGroup]) -> None:
        content = os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower()
        talks = [talk for group in groups for talk in group.trajectories]
        for number, talk in enumerate(talks):
            scenario = talk.scenario
            of = {"run": self._folder, "step": step, "stage": stage, "member": talk.member}
            of |= {"scenario": scenario.id, "family": scenario.family, "status": talk.status.value}
            record_conversation(
                self._tracer,
                talk,
                name=f"{self._folder}/{stage}/{step}/{number}",
                model=self._model,
                content=content in ("true", "span_only", "span_and_event"),
                attributes={f"stateset_agents.{key}": value for key, value in of.items()},
            )

    def _end(self, progress: Progress) -> None:
        if hasattr(self._provider, "force_flush"):
            self._provider.force_flush()


_MOST_PARAMETERS = 100
_MOST_OF_A_PARAMETER = 6000
"""Limits of MLflow: parameters of a request, characters of one."""


def _saved_id(file: Path) -> str:
    """The id under which this run folder is known to a tracker."""
    if not file.is_file():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()


_TRACKERS: Mapping[TrackerName, type[_Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
    "opentelemetry": OpenTelemetryTracker,
}


def make_trackers(names: Sequence[TrackerName]) -> list[Callback]:
    """The trackers that `report_to` names; their libraries are imported when training begins."""
    return [_TRACKERS[name]() for name in names]


def check_installed(callbacks: Sequence[object]) -> None:
    """Raises ConfigurationError where the library of a tracker among `callbacks` cannot be used."""
    for name, kind in _TRACKERS.items():
        for callback in callbacks:
            if isinstance(callback, kind):
                callback.check(name)
