"""Sums of the journal's rows; a restart adds them up again and comes to the same bits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stateset_agents.deployment.guards import Agreement, Violation
from stateset_agents.deployment.plan import DeploymentPlan, Known
from stateset_agents.deployment.sequential import Evidence
from stateset_agents.deployment.state import Arm, Assignment, Deployment, Move, transition
from stateset_agents.types.errors import JournalError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRow:
    """The end of a conversation."""

    assignment: int
    success: float
    """0 to 1."""
    reward: float | None
    is_timeout: bool
    """Nobody said how in time, so it counts as failed."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer:
    """One answer of an arm, with what the guards found."""

    assignment: int
    turn: int
    arm: Arm
    """The arm that answered; in shadow nobody saw the candidate's answer."""
    seconds: float | None
    cost: float | None
    violations: tuple[Violation, ...]
    agreement: Agreement | None
    """Agreement with the baseline's answer to the same request; in shadow, where both answer."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassigned:
    """A conversation of the candidate that went on after the rollback, with the baseline."""

    assignment: int
    at: float


COUNTED = ("assignments", "answers", "outcomes")
"""Tables whose rows are counted with every move."""

Row = Move | Assignment | OutcomeRow | CheckedAnswer | Reassigned


class Ledger:
    """State, evidence and brakes of one deployment.

    Outcomes are taken in the order of admission: one waits in line until all conversations before it have
    theirs. Otherwise quick successes would count before slow failures. Conversations that could go to one arm
    only (share 0 or 1) compare nothing and are not waited for.
    """

    def __init__(
        self,
        state: Deployment,
        plan: DeploymentPlan,
        *,
        on_evidence: Callable[[Evidence], None] | None = None,
    ) -> None:
        """`on_evidence` gets the evidence after each outcome that is counted."""
        self._on_evidence = on_evidence
        self.state = state
        self.evidence = Evidence(margin=plan.margin)
        self.brakes = plan.brakes()
        self.counts: Counter[str] = Counter()
        """Rows by table."""
        self.assigned: Counter[Arm] = Counter()
        self.answers: Counter[Arm] = Counter()
        self.unsafe: Counter[str] = Counter()
        """The candidate's violations by guard."""
        self.unsafe_answers: Counter[Arm] = Counter()
        self.seconds: dict[Arm, list[float]] = {"baseline": [0.0, 0], "candidate": [0.0, 0]}
        self.costs: dict[Arm, list[float]] = {"baseline": [0.0, 0], "candidate": [0.0, 0]}
        """Sum and number over the answers whose time, or cost, is known."""
        self.agreements: Counter[Agreement] = Counter()
        """Agreement of the candidate's answers in shadow."""
        self.timeouts = 0
        self.last_at = state.since
        self._line: OrderedDict[int, Assignment] = OrderedDict()
        self._outcomes: dict[int, float] = {}
        """Outcomes of conversations in line."""
        self._at_last_move: dict[str, int] = {}
        """Rows by table."""
        self._most: int | None = None
        """Outcomes of the evidence at the rollback, which ends it: conversations changed their arm then."""

    @property
    def known(self) -> Known:
        """The counts and evidence that decisions look at."""
        counts = {table: self.counts[table] for table in COUNTED}  # in one order, also after a restart
        shadow = self.answers["candidate"] if self.state.mode == "shadow" else 0
        return Known(evidence=self.evidence, brakes=self.brakes, shadow_answers=shadow, counts=counts)

    @property
    def num_waiting(self) -> int:
        """Conversations of the comparison whose outcome is not counted yet."""
        return len(self._line)

    def overdue(self, now: float, timeout: float) -> Iterator[Assignment]:
        """Assignments without an outcome `timeout` seconds or more after they were made, the oldest first."""
        for assignment in self._line.values():
            if assignment.at + timeout > now:
                return
            if assignment.number not in self._outcomes:
                yield assignment

    def apply(self, row: Row) -> None:
        """Add one row. Moves, outcomes, answers and assignments each come in their own order."""
        self.last_at = max(self.last_at, row.at)
        match row:
            case Move():
                self.state = transition(self.state, row)
                self._at_last_move = {name: int(row.evidence.get(f"{name}_rows") or 0) for name in COUNTED}
                if row.mode == "rolled_back":
                    self._most = self.state.outcomes
                self.counts["transitions"] += 1
            case Assignment():
                if 0 < row.probability < 1:
                    self._line[row.number] = row
                self.assigned[row.arm] += 1
                self.counts["assignments"] += 1
            case OutcomeRow():
                if row.assignment in self._line:
                    self._outcomes[row.assignment] = row.success
                self.timeouts += row.is_timeout
                self.counts["outcomes"] += 1
            case CheckedAnswer():
                self._check(row)
                self.counts["answers"] += 1
            case Reassigned():
                self.counts["reassigned"] += 1
        self._absorb()

    def check_whole(self) -> None:
        """Raises JournalError if there are fewer rows than at the last move."""
        for table, count in self._at_last_move.items():
            if self.counts[table] < count:
                raise JournalError(
                    f"the journal lost rows: deployment {self.state.id} had {count} {table} at its last "
                    f"move, and "
                    f"has {self.counts[table]}; take its last copy"
                )

    def _check(self, row: CheckedAnswer) -> None:
        self.answers[row.arm] += 1
        self.unsafe_answers[row.arm] += bool(row.violations)
        for sums, value in ((self.seconds, row.seconds), (self.costs, row.cost)):
            if value is not None:
                sums[row.arm][0] += value
                sums[row.arm][1] += 1
        if row.agreement is not None:
            self.agreements[row.agreement] += 1
        if row.arm == "candidate":
            self.unsafe.update(violation.guard for violation in row.violations)
            for name, brake in self.brakes.items():
                if not brake.fires:  # what has fired stays so, also when the window moves on
                    self.brakes[name] = brake.step(is_unsafe=bool(row.violations))

    def _absorb(self) -> None:
        """Take the outcomes from the head of the line."""
        while self._line and self.evidence.num_outcomes != self._most:
            number = next(iter(self._line))
            if number not in self._outcomes:
                return
            assignment = self._line.pop(number)
            self.evidence = self.evidence.step(
                is_candidate=assignment.arm == "candidate",
                probability=assignment.probability,
                outcome=self._outcomes.pop(number),
            )
            if self._on_evidence is not None:
                self._on_evidence(self.evidence)
