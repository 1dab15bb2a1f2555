"""Parts against PPO, from trainings to a verdict, under the names of its document."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.numeric.environments.base import BatchedEnvironment
from stateset_agents.numeric.environments.suites import add_suite
from stateset_agents.numeric.studies.runner import NAMED_ARMS, StudySettings, run_cell, run_study
from stateset_agents.numeric.studies.study import (
    Cell,
    StudyCells,
    StudyFolder,
    analyse,
    cell_measures,
    study_report,
)
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError

_ARMS = {name: NAMED_ARMS[name] for name in ("PPO", "auto", "task")}


class GRPOvsPPOAnalyzer:
    """A study in a folder: PPO, and PPO with partitioned advantages (`GRPO`), on suites, with seeds.

    >>> analyzer = GRPOvsPPOAnalyzer()
    >>> print(analyzer.run_comparison(["CartPole-v1", mix({"cart_pole": 1.0, "acrobot": 0.01})], n_seeds=5))

    A suite is a name of SUITES, a Gymnasium id, a `TaskMix` or another environment.
    """

    def __init__(self, folder: str | Path = "studies/grpo_vs_ppo") -> None:
        self.folder = StudyFolder(Path(folder))
        self._results: tuple[Cell, ...] = ()

    def run_comparison(
        self, env_suite: Sequence[str | BatchedEnvironment], n_seeds: int = 5, **options: Any
    ) -> str:
        """`compare`, blocking, then the report. Raises ConfigurationError where an event loop is running."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            event_loop.run(self.compare(env_suite, n_seeds, **options))
            return self.generate_report()
        raise ConfigurationError(
            "run_comparison would block the event loop that is running: write await analyzer.compare(...)"
        )

    async def compare(
        self,
        env_suite: Sequence[str | BatchedEnvironment],
        n_seeds: int = 5,
        *,
        arms: Mapping[str, Mapping[str, Any]] = _ARMS,
        **options: Any,
    ) -> dict[str, Any]:
        """Run what the folder lacks, then `analyze_results`. `options`: `total_steps`,
        `episodes`, and settings of all arms, see `StudySettings` and `ControlConfig`."""
        await run_study(self.folder.path, self._study(env_suite, arms, range(n_seeds), options))
        return self.analyze_results()

    def train_ppo(self, env: str | BatchedEnvironment, seed: int, **options: Any) -> Cell:
        """One training of PPO, blocking, apart from the folder; `options` as of `compare`."""
        return self._train(env, seed, "PPO", options)

    def train_grpo(
        self, env: str | BatchedEnvironment, seed: int, strategy: str = "auto", **options: Any
    ) -> Cell:
        """One training by parts, blocking, apart from the folder."""
        return self._train(env, seed, strategy, options)

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Measure -> one value for each finished training, see `cell_measures`."""
        cells = self._finished.cells()
        return cell_measures(cells, float(self._finished.settings()["total_steps"]) if cells else 1.0)

    def analyze_results(self, *results: Cell) -> dict[str, Any]:
        """See `study.analyse`: measures by arm, differences, a verdict. Of the folder, or of these `results`
        of `train_ppo` and `train_grpo` with those of earlier calls."""
        self._results += results
        return analyse(self._finished)

    def generate_report(self) -> str:
        """Markdown, see `study_report`; of what `analyze_results` was about."""
        return study_report(self._finished)

    @property
    def _finished(self) -> StudyFolder | StudyCells:
        return StudyCells(self._results) if self._results else self.folder

    def _study(
        self,
        suites: Sequence[str | BatchedEnvironment],
        arms: Mapping[str, Mapping[str, Any]],
        seeds: Sequence[int],
        options: Mapping[str, Any],
    ) -> StudySettings:
        own = {name: value for name, value in options.items() if name in StudySettings.model_fields}
        return StudySettings(
            name=self.folder.path.name,
            suites=tuple(map(add_suite, suites)),
            arms=arms,
            seeds=tuple(seeds),
            settings={name: value for name, value in options.items() if name not in own},
            **own,
        )

    def _train(self, env: str | BatchedEnvironment, seed: int, arm: str, options: Mapping[str, Any]) -> Cell:
        study = self._study([env], {arm: NAMED_ARMS[arm]}, [seed], options)
        return event_loop.run(run_cell(study, study.suites[0], arm, seed))
