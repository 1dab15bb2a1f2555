"""A whole run from one YAML file: measure, train, measure again, summary and report.

The trainings of conversations and of numeric policies each add how they measure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from stateset_agents.reporting.report import write_report
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.runtime.yaml_files import override, read_sections
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import Stage
from stateset_agents.types.errors import ConfigurationError

OnProgress = Callable[[int, int], None]
"""Called with the conversations played so far, and with their number."""


_File = TypeVar("_File", bound=Any)
"""Settings of a whole YAML file; its `evaluation` is None where nothing is measured."""
_Trainer = TypeVar("_Trainer", bound=Any)
"""A `Session` of an environment."""


class BaseExperiment(ABC, Generic[_File, _Trainer]):
    """The life of one run folder: new from a configuration, or resumed from the folder.

    >>> async with Experiment(load_experiment("examples/demo.yaml")) as experiment:
    ...     await experiment.before()
    ...     await experiment.train()
    ...     await experiment.after()
    """

    def __init__(
        self,
        config: _File,
        *,
        run: RunFolder | None = None,
        checkpoint: Path | None = None,
        callbacks: Sequence[object] = (),
        measures: bool = True,
    ) -> None:
        """`run` is resumed from `checkpoint`, or from its newest one; `measures=False` leaves out what
        `config.evaluation` asks for."""
        self.config = config
        self.trainer = self._make_trainer(run, callbacks)
        self.summary: dict[str, Any] = {}
        """The content of `summary.json`."""
        self._evaluation: Any = config.evaluation if measures else None
        self.resumes = run is not None
        """True where the run's folder was there already."""
        self._checkpoint = checkpoint

    @abstractmethod
    def _make_trainer(self, run: RunFolder | None, callbacks: Sequence[object]) -> _Trainer:
        """The trainer of `config`."""

    @abstractmethod
    async def _measure(self, stage: Stage, on_progress: OnProgress | None) -> dict[str, Any]:
        """Measure, log the episodes, and return the entries for the summary, `stage` among them."""

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        run: RunFolder = self.trainer.run
        return run

    @property
    def is_over(self) -> bool:
        """True for a resumed run that has all its steps and its measurements; defined after `initialize`."""
        is_measured = self._evaluation is None or "after" in self.summary
        return self.resumes and self._is_trained and is_measured

    @property
    def _is_trained(self) -> bool:
        return bool(self.trainer.step_number >= self.trainer.num_steps)

    async def initialize(self) -> None:
        """Load and check everything; a resumed run goes on from its checkpoint."""
        await self.trainer.initialize()
        if self.resumes:
            await self.trainer.load_checkpoint(self._checkpoint)
            self.summary = RunLog(self.run).summary()

    async def before(self, on_progress: OnProgress | None = None) -> dict[str, Any] | None:
        """Measure what is not trained yet; a resumed run keeps what it measured, or goes without."""
        if self._evaluation is not None and "before" not in self.summary and not self.trainer.step_number:
            self.summary |= await self._measure("before", on_progress)
            self._write_summary()
        return self.summary.get("before")

    async def train(self) -> None:
        """Run the steps that are left."""
        if "after" in self.summary and not self._is_trained:  # it is of the shorter run
            self._forget_after()
        await self.trainer.train()
        self.summary |= self.trainer.summary()

    def _forget_after(self) -> None:
        del self.summary["after"]
        self._write_summary()

    async def after(self, on_progress: OnProgress | None = None) -> dict[str, Any] | None:
        """Measure what was trained (once), write the summary and the report."""
        if self._evaluation is not None and "after" not in self.summary:
            self.summary |= await self._measure("after", on_progress)
        self._write_summary()
        if self.trainer.is_first:
            await in_thread(write_report, self.run.path)
        return self.summary.get("after")

    def _write_summary(self) -> None:
        if self.trainer.is_first:
            self.run.write_summary(self.summary)

    async def __aenter__(self) -> Self:
        try:
            await self.initialize()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        """Close the trainer, and an environment that has something to give back."""
        try:
            await self.trainer.close()
        finally:
            close = getattr(self.trainer.environment, "close", None)
            if close is not None:
                await call_user_code(close)


def read_experiment(
    path: str | Path,
    overrides: Mapping[str, Any] | None,
    *,
    resolve: Callable[[dict[str, Any], Path], None],
    others: Mapping[str, str],
) -> tuple[Path, dict[str, Any]]:
    """The path and the sections of a YAML file, or of a run folder's; `overrides` are dotted names.

    `resolve(sections, folder)` makes paths absolute: those of the file from its folder, those of `overrides`
    from the working directory. `others`: who else makes runs -> what to do with such a one, in which {path}
    and {run} stand for the file and its folder. Raises ConfigurationError for those.
    """
    path = Path(path)
    if path.is_dir():
        path = RunFolder.open(path).config
    data = read_sections(path)
    if (cure := others.get(str(data.pop("made_by", None)))) is not None:
        raise ConfigurationError(cure.format(path=path, run=str(path.parent)))
    data.pop("schema_version", None)
    resolve(data, path.absolute().parent)
    for name, value in (overrides or {}).items():
        override(data, name, value)
    resolve(data, Path.cwd())
    return path, data
