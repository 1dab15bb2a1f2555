"""Deployments as metrics in Prometheus's format, by the same door as the server's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from stateset_agents.deployment.assignment import Arm
from stateset_agents.serving.metrics import MetricFamily, metrics_page

ARMS: tuple[Arm, ...] = ("candidate", "baseline")
_MODES = ("shadow", "gradual", "full", "rolled_back")


def prometheus_page(statuses: Sequence[Mapping[str, Any]]) -> tuple[bytes, str]:
    """The text and its content type, of what `status_of` says of each deployment.

    Raises ApiError, status 501, without prometheus_client.
    """
    return metrics_page(deployment_metrics(statuses))


def deployment_metrics(statuses: Sequence[Mapping[str, Any]]) -> list[MetricFamily]:
    """Values that are not known yet, such as an effect before there is an interval, are left out."""
    return [
        MetricFamily(
            name=f"stateset_deployment_{name}",
            kind=kind,
            text=text,
            labels=("deployment", *labels),
            values=tuple(
                ((status["id"], *own), float(value))
                for status in statuses
                for own, value in values(status)
                if value is not None
            ),
        )
        for name, kind, text, labels, values in _FAMILIES
    ]


def _by_arm(name: str) -> Any:
    return lambda status: [((arm,), status["arms"][arm][name]) for arm in ARMS]


def _evidence(name: str) -> Any:
    return lambda status: [((which,), status["evidence"][which][name]) for which in ("promote", "roll_back")]


def _bounds(status: Mapping[str, Any]) -> Iterable[tuple[tuple[str, ...], float]]:
    return [
        ((end,), value)
        for end, value in zip(("low", "high"), status["evidence"]["interval"] or (), strict=False)
    ]


_FAMILIES: tuple[tuple[str, Literal["gauge", "counter"], str, tuple[str, ...], Any], ...] = (
    (
        "mode",
        "gauge",
        "1 for the present mode",
        ("mode",),
        lambda status: [((mode,), float(status["mode"] == mode)) for mode in _MODES],
    ),
    (
        "share",
        "gauge",
        "Of new conversations that go to the candidate",
        (),
        lambda status: [((), status["share"])],
    ),
    (
        "moves",
        "counter",
        "Moves from one mode or share to another",
        (),
        lambda status: [((), status["moves"])],
    ),
    ("conversations", "counter", "Conversations by arm", ("arm",), _by_arm("conversations")),
    ("outcomes", "counter", "Outcomes that the evidence has, by arm", ("arm",), _by_arm("outcomes")),
    (
        "success",
        "gauge",
        "Mean outcome by arm, over all shares: for alerts compare the effect",
        ("arm",),
        _by_arm("success"),
    ),
    (
        "waiting",
        "gauge",
        "Conversations whose outcome is not counted yet",
        (),
        lambda status: [((), status["evidence"]["waiting"])],
    ),
    (
        "timeouts",
        "counter",
        "Conversations that counted as failed for want of an outcome",
        (),
        lambda status: [((), status["evidence"]["timeouts"])],
    ),
    ("answers", "counter", "Checked answers by arm", ("arm",), _by_arm("answers")),
    ("unsafe_answers", "counter", "Answers with a violation, by arm", ("arm",), _by_arm("unsafe_answers")),
    (
        "violations",
        "counter",
        "Unsafe answers of the candidate by guard",
        ("guard",),
        lambda status: [((guard,), count) for guard, count in sorted(status["violations"].items())],
    ),
    (
        "compared_shadow_answers",
        "counter",
        "Answers in shadow that were compared with the baseline's",
        (),
        lambda status: [((), status["agreement"]["answers"])],
    ),
    (
        "agreeing_shadow_answers",
        "counter",
        "Of them those with the same calls, and those with the same words, too",
        ("same",),
        lambda status: [((what,), status["agreement"][f"same_{what}"]) for what in ("calls", "reply")],
    ),
    ("mean_answer_seconds", "gauge", "Mean time of an answer by arm", ("arm",), _by_arm("mean_seconds")),
    ("mean_answer_cost", "gauge", "Mean cost of an answer by arm", ("arm",), _by_arm("mean_cost")),
    (
        "effect",
        "gauge",
        "Candidate minus baseline, weighed by assignment (AIPW)",
        (),
        lambda status: [((), status["evidence"]["effect"])],
    ),
    ("effect_bound", "gauge", "Ends of the effect's confidence sequence", ("end",), _bounds),
    ("log_wealth", "gauge", "Natural logarithm of the evidence", ("decision",), _evidence("log_wealth")),
    ("needed_wealth", "gauge", "Evidence that decides: 1/alpha", ("decision",), _evidence("needed")),
)
"""Name, kind, text, labels, and status -> values with their labels."""
