"""Parts against PPO, from trainings to a verdict, under the names of its document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.numeric.studies.runner import ARMS, StudySettings, run_study
from stateset_agents.numeric.studies.study import StudyFolder, analyse, study_report


class GRPOvsPPOAnalyzer:
    """A study in a folder: PPO, and PPO with partitioned advantages (`GRPO`), on suites, with seeds.

    >>> analyzer = GRPOvsPPOAnalyzer("studies/scales")
    >>> await analyzer.run_comparison(["mix_cart_pole_large"], n_seeds=5)
    >>> print(analyzer.generate_report())
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = StudyFolder(Path(folder))

    async def run_comparison(
        self,
        env_suite: Sequence[str],
        n_seeds: int = 5,
        *,
        arms: Mapping[str, Mapping[str, Any]] = ARMS,
        total_steps: int = 150_000,
        **settings: Any,
    ) -> dict[str, Any]:
        """Run what the folder lacks, then `analyze_results`. `settings`: of all arms, see `ControlConfig`."""
        study = StudySettings(
            name=self.folder.path.name,
            suites=tuple(env_suite),
            arms=arms,
            seeds=tuple(range(n_seeds)),
            total_steps=total_steps,
            settings=settings,
        )
        await run_study(self.folder.path, study)
        return self.analyze_results()

    def analyze_results(self) -> dict[str, Any]:
        """See `analysis.study.analyse`: measures by arm, differences, a verdict."""
        return analyse(self.folder)

    def generate_report(self) -> str:
        """Markdown, see `analysis.study_report`."""
        return study_report(self.folder)
