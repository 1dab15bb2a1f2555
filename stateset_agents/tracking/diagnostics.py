"""The health of a run: one finding per check, with advice, from the run folder alone.

`train` prints the findings, the report shows them, and `stateset-agents diagnose RUN` prints them for any
run, also a running one. The trainer runs the same checks on its last steps (`live_findings`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from stateset_agents.tracking.checks import CHECKS, Check
from stateset_agents.tracking.history import History
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.monitors import MONITORS, Finding
from stateset_agents.tracking.run_log import RunLog, held_out_gains


def diagnose(log: RunLog) -> list[Finding]:
    """The findings of a run, in a fixed order. Raises ConfigurationError where a file is damaged.

    >>> all_passed(diagnose(RunLog.open("runs/latest")))
    True
    """
    with damage_named(log.folder.path):
        training = log.config().get("training")
        settings = training if isinstance(training, Mapping) else {}
        history = History(list(log.metrics()), settings, log.summary(), gains=held_out_gains(log))
        if sum(history.finite("rollout/failed")) + sum(history.finite("rollout/unscored")):
            history = replace(history, most_common_error=_most_common_error(log))
        return _findings(CHECKS.values(), history)


def _most_common_error(log: RunLog) -> str | None:
    errors = Counter(rollout.error for rollout in log.rollouts("train") if rollout.error)
    for error, times in errors.most_common(1):
        return f"{error} ({times} times)" if times > 1 else error
    return None


def all_passed(findings: Sequence[Finding]) -> bool:
    """True when no finding is a warning or worse."""
    return all(finding.verdict == "ok" for finding in findings)


def live_findings(history: History) -> list[Finding]:
    """The findings to report during the run: problems that do not pass by themselves."""
    live_checks = [check for name, check in CHECKS.items() if MONITORS[name].live is not None]
    return [finding for finding in _findings(live_checks, history) if _is_reported_live(finding)]


def _findings(checks: Iterable[Check], history: History) -> list[Finding]:
    return [finding for check in checks if (finding := check(history)) is not None]


def _is_reported_live(finding: Finding) -> bool:
    return finding.verdict == "fail" or (finding.verdict == "warn" and MONITORS[finding.check].live == "warn")
