"""The history of a deployment: its journal added up once more, with what it was on the way.

The adding is `Ledger`'s, so the last point is what the controller decides by, and the point of each move is
what the journal keeps with it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from stateset_agents.core.sources.served_conversations import ServedOutcome
from stateset_agents.deployment.journal import DeploymentRecord, Journal, Pages
from stateset_agents.deployment.ledger import CheckedAnswer, Ledger, OutcomeRow, Reassigned
from stateset_agents.deployment.sequential import Evidence
from stateset_agents.deployment.state import Arm, Assignment, Deployment, Move

Point = TypeVar("Point")

MAX_POINTS = 400
"""About the number of points of the evidence that are kept; the last one and those of the moves are always
among them."""
RECENT_ANSWERS = 1000
"""Last answers of each arm, for quantiles of seconds and costs."""
RECENT_CONVERSATIONS = 12
"""Last conversations of each arm."""
RECENT_VIOLATIONS = 20
"""Answers with violations, of each arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePoint:
    """The evidence after so many outcomes. Wealths are natural logarithms."""

    outcomes: int
    effect: float | None
    """Effect on success; known, with its interval, from `sequential.MIN_OUTCOMES` outcomes of each arm on."""
    low: float | None
    high: float | None
    log_wealth_promote: float
    log_wealth_roll_back: float

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> EvidencePoint:
        """The point of `Evidence.snapshot`, or of what the journal keeps with a move."""
        return cls(
            outcomes=int(snapshot.get("outcomes") or 0),
            effect=None if snapshot.get("low") is None else snapshot["effect"],
            low=snapshot.get("low"),
            high=snapshot.get("high"),
            log_wealth_promote=float(snapshot.get("log_wealth_promote") or 0.0),
            log_wealth_roll_back=float(snapshot.get("log_wealth_roll_back") or 0.0),
        )


class ThinnedPoints(Generic[Point]):
    """Every n-th point, with n doubled whenever there are too many, and the last one.

    >>> points = ThinnedPoints[int](most=4)
    >>> for number in range(1, 12): points.add(number)
    >>> points.listed()
    [4, 8, 11]
    """

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._stride = 1
        self._count = 0
        self._kept: list[Point] = []
        self._last: list[Point] = []

    def add(self, point: Point) -> None:
        self._count += 1
        self._last = [point]
        if self._count % self._stride:
            return
        self._kept.append(point)
        if len(self._kept) > self._most:
            self._stride *= 2
            self._kept = self._kept[1::2]

    def listed(self) -> list[Point]:
        """The oldest first."""
        is_kept = self._count % self._stride == 0
        return [*self._kept, *([] if is_kept else self._last)]


@dataclass(slots=True, kw_only=True)
class ConversationSummary:
    """One of the last conversations."""

    assignment: Assignment
    outcome: OutcomeRow | None = None
    is_moved: bool = False
    answers: Counter[Arm] = field(default_factory=Counter)
    """Number of answers by arm; in shadow the candidate's, too, which nobody saw."""
    unsafe: Counter[Arm] = field(default_factory=Counter)
    seconds: dict[Arm, float] = field(default_factory=dict)
    """Sums over the answers whose time is known."""


class DeploymentHistory:
    """Reads the journal of one deployment as it grows."""

    def __init__(self, journal: Journal, record: DeploymentRecord) -> None:
        self.record = record
        self.moves: list[Move] = []
        self.conversations: dict[Arm, OrderedDict[int, ConversationSummary]] = {
            "candidate": OrderedDict(),
            "baseline": OrderedDict(),
        }
        """The last of each arm, by assignment, the oldest first."""
        self.violations: dict[Arm, deque[CheckedAnswer]] = _per_arm(RECENT_VIOLATIONS)
        self.seconds: dict[Arm, deque[float]] = _per_arm(RECENT_ANSWERS)
        self.costs: dict[Arm, deque[float]] = _per_arm(RECENT_ANSWERS)
        self._pages = Pages(journal, record)
        self._points = ThinnedPoints[Evidence]()
        self.ledger = Ledger(
            Deployment(id=record.id, since=record.at), record.plan, on_evidence=self._points.add
        )
        """The sums of the rows; to be read only."""

    def read(self) -> None:
        """Take over the new rows; inside a snapshot of the journal. Raises JournalError for altered ones."""
        for row in self._pages.new():
            self.ledger.apply(row)
            match row:
                case Move():
                    self.moves.append(row)
                case Assignment():
                    recent = self.conversations[row.arm]
                    recent[row.number] = ConversationSummary(assignment=row)
                    if len(recent) > RECENT_CONVERSATIONS:
                        recent.popitem(last=False)
                case CheckedAnswer():
                    self._add_answer(row)
                case OutcomeRow():
                    if (conversation := self._recent(row.assignment)) is not None:
                        conversation.outcome = row
                case Reassigned():
                    if (conversation := self._recent(row.assignment)) is not None:
                        conversation.is_moved = True
        self.ledger.check_whole()

    def points(self) -> list[EvidencePoint]:
        """The evidence on the way, the oldest first: at most about `MAX_POINTS`, and those of the moves."""
        alpha = self.record.plan.alpha
        by_outcomes = {
            evidence.num_outcomes: EvidencePoint.of(evidence.snapshot(alpha))
            for evidence in self._points.listed()
        }
        for move in self.moves:
            point = EvidencePoint.of(move.evidence)
            if point.outcomes:
                by_outcomes.setdefault(point.outcomes, point)
        return [by_outcomes[outcomes] for outcomes in sorted(by_outcomes)]

    def _recent(self, assignment: int) -> ConversationSummary | None:
        return next((last[assignment] for last in self.conversations.values() if assignment in last), None)

    def _add_answer(self, answer: CheckedAnswer) -> None:
        if answer.seconds is not None:
            self.seconds[answer.arm].append(answer.seconds)
        if answer.cost is not None:
            self.costs[answer.arm].append(answer.cost)
        if answer.violations:
            self.violations[answer.arm].append(answer)
        if (conversation := self._recent(answer.assignment)) is not None:
            conversation.answers[answer.arm] += 1
            conversation.unsafe[answer.arm] += bool(answer.violations)
            if answer.seconds is not None:
                before = conversation.seconds.get(answer.arm, 0.0)
                conversation.seconds[answer.arm] = before + answer.seconds


def _per_arm(most: int) -> dict[Arm, deque[Any]]:
    return {"candidate": deque(maxlen=most), "baseline": deque(maxlen=most)}


# --- outcomes ---


def served_outcomes(journal: Journal) -> dict[str, ServedOutcome]:
    """Outcomes by conversation, of those that could go to the candidate, in `gradual` and `full`.

    What timed out has no success: nobody reported it. A conversation that several deployments knew is the
    newest one's. Raises JournalError for an altered journal.
    """
    outcomes: dict[str, ServedOutcome] = {}
    with journal.snapshot():
        for record in journal.records():
            names: dict[int, str] = {}
            for row in Pages(journal, record).new():
                match row:
                    case Assignment() if row.probability > 0:
                        names[row.number] = row.conversation
                        outcomes[row.conversation] = ServedOutcome(
                            deployment=record.id, arm=row.arm, success=None
                        )
                    case OutcomeRow() if row.assignment in names and not row.is_timeout:
                        name = names[row.assignment]
                        outcomes[name] = replace(outcomes[name], success=row.success, reward=row.reward)
                    case Reassigned() if row.assignment in names:
                        name = names[row.assignment]
                        outcomes[name] = replace(outcomes[name], is_moved=True)
    return outcomes
