"""What a training leaves in its run folder when it ends: summary and report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

__all__ = ["leave"]

_log = get_logger(__name__)


def leave(run: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`, what stands in it of other things (a measurement before) kept, and `report.html`.

    A disk that cannot take them is said in one line: the checkpoint stands, and `stateset-agents report`
    makes the page later.
    """
    try:
        run.write_summary({**RunLog(run).summary(), **summary})
        write_report(run.path)
    except ConfigurationError as error:
        if summary.get("ended") != "failed":  # else what it failed with says enough, and follows
            _log.error(f"the run is kept, but not its summary and report: {error}")
