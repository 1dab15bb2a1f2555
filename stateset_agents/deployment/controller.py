"""One deployment at work: assigns conversations, takes outcomes and answers, and moves by the plan.

Every call writes its rows before it returns and may be made again: a conversation is assigned once, an
outcome and an answer are counted once. So a caller that does not know whether its last call came through
calls again. Several processes may work on one journal; each reads what the others wrote before it decides.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

from stateset_agents.deployment.guards import Answer, Clock, Guard, RateGuard, Violation, violations_of
from stateset_agents.deployment.journal import (
    DeploymentRecord,
    Journal,
    Pages,
    deployment_id,
    read_assignment,
)
from stateset_agents.deployment.ledger import CheckedAnswer, Ledger, OutcomeRow, Reassigned, Row
from stateset_agents.deployment.plan import DeploymentPlan, next_move, objections
from stateset_agents.deployment.state import Arm, Assignment, Deployment, Mode, Move, arm_of, bucket, new_salt
from stateset_agents.types.errors import ConfigurationError, JournalError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

Report = Literal["counted", "again", "late"]
"""counted: the outcome is written down. again: this conversation has one already. late: its time was over,
and it counts as failed."""
_LONGEST_ID = 1000
_MAX_RECENT = 10_000


def start_deployment(
    journal: Journal,
    *,
    candidate: str,
    baseline: str,
    plan: DeploymentPlan | None = None,
    who: str,
    clock: Clock = time.time,
) -> DeploymentRecord:
    """Write a new deployment into the journal; it begins in shadow. Raises ConfigurationError if both are
    the same."""
    plan = DeploymentPlan() if plan is None else plan
    if candidate == baseline:
        raise ConfigurationError(f"candidate and baseline are both {candidate!r}: name two different ones")
    with journal.transaction(durable=True):
        record = DeploymentRecord(
            id=deployment_id(len(journal.records()) + 1),
            at=_seconds(clock),
            who=who,
            candidate=candidate,
            baseline=baseline,
            salt=plan.salt or new_salt(),
            plan=plan,
        )
        journal.add(record)
    return record


class DeploymentController:
    """One deployment of a journal. Its methods may be called from any thread."""

    def __init__(
        self, journal: Journal, deployment: str, *, guards: Sequence[Guard] = (), clock: Clock = time.time
    ) -> None:
        """Read what is written so far, and go on from there. Raises JournalError for an altered journal.

        `guards`: of single answers, besides the plan's.
        """
        self._journal = journal
        self.record = journal.record(deployment)
        self.plan = self.record.plan
        self._clock = clock
        self._lock = threading.RLock()
        self._batching: int | None = None
        """The thread in whose open transaction its further calls write, too."""
        self._is_unsure = False
        """True if something was added up in this transaction that a failure would take back."""
        self._guards = (*self.plan.guards.checks(), *guards)
        with journal.snapshot():
            self._read()

    @property
    def state(self) -> Deployment:
        return self.ledger.state

    @property
    def hashes(self) -> dict[str, str]:
        """Hash of the last row of each of the journal's tables."""
        return self._pages.hashes

    def assign(self, conversation: str) -> Assignment:
        """The conversation's arm: decided now if it is new, else the one it has.

        After a rollback it is the baseline, for conversations of the candidate too; `is_moved` says so.
        """
        _check_id(conversation)
        self.settle()
        with self._writing() as now:
            earlier = self._recent.get(conversation)
            if earlier is None:
                share = self.state.share
                assignment = Assignment(
                    number=self._pages.next_number("assignments"),
                    conversation=conversation,
                    arm=arm_of(bucket(self.record.salt, conversation), share),
                    probability=share,
                    at=now,
                )
                if self._append(assignment):
                    return self._remember(assignment)
                earlier = self._assigned(conversation)
            if earlier.arm == "baseline" or self.state.mode != "rolled_back":
                return earlier
            self._append(Reassigned(assignment=earlier.number, at=now))
            return replace(earlier, arm="baseline", is_moved=True)

    def report_outcome(self, conversation: str, *, success: float, reward: float | None = None) -> Report:
        """Takes the end of a conversation: `success` from 0 to 1, or a bool. The first report counts.

        Raises ConfigurationError for a conversation that was never assigned, and for what is no number.
        """
        if not (isinstance(success, Real) and 0 <= success <= 1):
            raise ConfigurationError(f"success must be True, False or from 0 to 1, got {success!r:.60}")
        if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
            raise ConfigurationError(f"reward must be a finite number, got {reward!r:.60}: leave it out")
        _check_id(conversation)
        report: Report = "counted"
        with self._writing() as now:
            assignment = self._assigned(conversation)
            self._time_out(now)
            outcome = OutcomeRow(
                assignment=assignment.number, success=float(success), reward=reward, is_timeout=False, at=now
            )
            if not self._append(outcome):
                earlier = self._journal.find("outcomes", self.record.id, assignment=assignment.number)
                report = "late" if earlier is not None and earlier[-2] else "again"
        self.settle()
        return report

    def record_answer(
        self, conversation: str, turn: int, answer: Answer, *, arm: Arm | None = None
    ) -> tuple[Violation, ...]:
        """Check one answer; `turn` counts those of the conversation. The second record of a turn changes
        nothing.

        `arm`: who answered; the conversation's arm if left out. In shadow record the candidate's, too.
        """
        _check_id(conversation)
        violations = violations_of(self._guards, answer, self.state)
        with self._writing() as now:
            assignment = self._assigned(conversation)
            self._append(
                CheckedAnswer(
                    assignment=assignment.number,
                    turn=turn,
                    arm=assignment.arm if arm is None else arm,
                    seconds=answer.seconds,
                    cost=answer.cost,
                    violations=violations,
                    agreement=answer.agreement,
                    at=now,
                )
            )
        self.settle()
        return violations

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Assignments, answers and outcomes inside are written together, at a fraction of the cost.

        A move that they bring about comes at the end. If it fails, nothing of it is written.
        """
        self.settle()
        with self._writing():
            self._batching = threading.get_ident()
            try:
                yield
            finally:
                self._batching = None
        self.settle()

    def settle(self) -> Deployment:
        """Count what ran out of time, and move if the plan says so; call it now and then where nothing
        happens."""
        if self._is_batch():
            return self.state
        with self._lock:
            if not self._is_due():
                return self.state
        with self._writing(durable=True) as now:
            self._time_out(now)
        while True:
            with self._writing(durable=True) as now:
                move = next_move(self.plan, self.state, self.ledger.known, now)
                if move is None:
                    return self.state
                self._append(move)
            self._tell(move)

    def promote(self, *, who: str, why: str, to: float | None = None, force: bool = False) -> Deployment:
        """Give the candidate the next stage's share, or `to`, by hand; 1 is full.

        Raises ConfigurationError against the evidence, unless forced: the journal then says so.
        """
        with self._writing(durable=True) as now:
            state, facts = self.state, self.ledger.known
            if state.mode in ("full", "rolled_back"):
                raise ConfigurationError(
                    f"deployment {state.id} is {state.mode.replace('_', ' ')}: start a new deployment"
                )
            share = self.plan.next_share(state.share) if to is None else float(to)
            if not state.share < share <= 1:
                raise ConfigurationError(
                    f"the share is {state.share:g} and can only be promoted to more, up to 1, got {share:g}"
                )
            against = objections(self.plan, state, facts, share, now)
            if against and not force:
                raise ConfigurationError(
                    f"promotion to {share:g} is against the evidence ({'; '.join(against)}): wait or force it"
                )
            mode: Mode = "full" if share == 1 else "gradual"
            if against:
                why = f"{why} (against the evidence: {'; '.join(against)})"
            move = self._move(mode, share, now, who, why, forced=bool(against))
        self._tell(move)
        return self.state

    def roll_back(self, *, who: str, why: str) -> Deployment:
        """Back to the baseline, by hand; the end of this deployment."""
        with self._writing(durable=True) as now:
            move = self._move("rolled_back", 0.0, now, who, why)
        self._tell(move)
        return self.state

    def moves(self) -> list[Move]:
        """Every move so far, the oldest first."""
        pages = Pages(self._journal, self.record)
        with self._lock, self._journal.snapshot():
            return [row for row in pages.new() if isinstance(row, Move)]

    def status(self) -> dict[str, Any]:
        """The deployment's status as plain values; see `status_of`."""
        with self._lock:
            if not self._is_batch():
                with self._journal.snapshot():
                    self._refresh()
            return status_of(self.record, self.ledger, self._now())

    def _is_batch(self) -> bool:
        """True if this thread is inside a batch."""
        return self._batching == threading.get_ident()

    def _is_due(self) -> bool:
        """True if there is anything to settle; found without a transaction."""
        if self._must_read:
            return True
        now = self._now()
        overdue = next(self.ledger.overdue(now, self.plan.outcome_timeout), None)
        return (
            overdue is not None
            or self._journal.changes() != self._seen
            or next_move(self.plan, self.state, self.ledger.known, now) is not None
        )

    # --- the journal and what it adds up to ---

    def _read(self) -> None:
        self._must_read = True
        """True while the sums differ from the written rows, until these are read anew."""
        self._recent: dict[str, Assignment] = {}
        """Conversations seen lately."""
        self._seen = self._journal.changes()
        self._pages = Pages(self._journal, self.record)
        state = Deployment(id=self.record.id, since=self.record.at)
        self.ledger = Ledger(state, self.plan)
        """The sums after the last call; to be read only."""
        for row in self._pages.new():
            self.ledger.apply(row)
        self.ledger.check_whole()
        self._must_read = False

    def _refresh(self) -> None:
        """Read what other processes wrote."""
        if self._must_read:
            self._read()
        elif (changes := self._journal.changes()) != self._seen:
            for row in self._pages.new():
                self.ledger.apply(row)
            self._seen = changes

    def _writing(self, *, durable: bool = False) -> AbstractContextManager[float]:
        """A transaction in which everything written so far is known, or the batch's; gives the time.

        If it fails, nothing of it is written, and what was added up is added up anew.
        """
        if not self._is_batch():
            return self._transaction(durable=durable)
        if durable:
            raise ConfigurationError("a move by hand is no part of a batch: make it outside")
        return nullcontext(self._now())

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[float]:
        with self._lock:
            self._is_unsure = True
            try:
                with self._journal.transaction(durable=durable):
                    self._refresh()
                    self._is_unsure = False
                    yield self._now()
            except BaseException:
                if self._is_unsure:
                    self._must_read = True
                    with suppress(JournalError), self._journal.snapshot():  # else the next call reads
                        self._read()
                raise

    def _now(self) -> float:
        """A clock that is set back stands still here, so that rows keep their order."""
        return max(_seconds(self._clock), self.ledger.last_at)

    def _append(self, row: Row) -> bool:
        """False: what is written once stands there already."""
        self._is_unsure = True
        entry = self._pages.append(row)
        if entry is not None:
            self.ledger.apply(entry)
        return entry is not None

    def _move(
        self, mode: Mode, share: float, now: float, who: str, why: str, *, forced: bool = False
    ) -> Move:
        evidence = self.ledger.known.snapshot(self.plan.alpha)
        move = Move(mode=mode, share=share, at=now, who=who, why=why, forced=forced, evidence=evidence)
        self._append(move)
        return move

    def _tell(self, move: Move) -> None:
        with self._lock:
            self._journal.merge_log()
        log = _log.critical if move.mode == "rolled_back" else _log.info
        log(
            "deployment moved",
            id=self.record.id,
            mode=move.mode,
            share=move.share,
            why=move.why,
            who=move.who,
        )

    def _time_out(self, now: float) -> None:
        for assignment in list(self.ledger.overdue(now, self.plan.outcome_timeout)):
            self._append(
                OutcomeRow(assignment=assignment.number, success=0.0, reward=None, is_timeout=True, at=now)
            )

    def _remember(self, assignment: Assignment) -> Assignment:
        """An assignment stays as it is."""
        self._recent[assignment.conversation] = assignment
        if len(self._recent) > _MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        return assignment

    def _assigned(self, conversation: str) -> Assignment:
        if (recent := self._recent.get(conversation)) is not None:
            return recent
        row = self._journal.find("assignments", self.record.id, conversation=conversation)
        if row is None:
            raise ConfigurationError(f"the conversation {conversation!r} was never assigned: assign it first")
        return self._remember(read_assignment(row))


def _seconds(clock: Clock) -> float:
    """Raises ConfigurationError for a clock that shows no time."""
    if not math.isfinite(now := float(clock())):
        raise ConfigurationError(f"the clock must give finite seconds, got {now!r}")
    return now


def _check_id(conversation: str) -> None:
    """Raises ConfigurationError for what is no id."""
    if not isinstance(conversation, str) or not 1 <= len(conversation) <= _LONGEST_ID:
        raise ConfigurationError(
            f"a conversation's id must be a text of 1 to {_LONGEST_ID} characters, got {conversation!r:.60}"
        )
    try:
        conversation.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"a conversation's id must be valid Unicode, got {conversation!r:.60}"
        ) from error


def status_of(record: DeploymentRecord, ledger: Ledger, now: float) -> dict[str, Any]:
    """The status of a deployment as plain values, for `stateset-agents status` and as JSON.

    Wealths are evidence against "worse by the margin" and "as good": compare with `needed`.
    """
    state, evidence, same = ledger.state, ledger.evidence, ledger.agreements
    interval = evidence.interval(record.plan.alpha)
    decisions = {
        name: {
            "log_wealth": process.log_wealth,
            "p_value": process.p_value,
            "alpha": record.plan.alphas[name],
            "needed": 1 / record.plan.alphas[name],
        }
        for name, process in (("promote", evidence.promote), ("roll_back", evidence.roll_back))
    }
    return {
        "id": record.id,
        "candidate": record.candidate,
        "baseline": record.baseline,
        "mode": state.mode,
        "share": state.share,
        "since": state.since,
        "seconds": now - state.since,
        "why": state.why,
        "moves": state.version,
        "evidence": {
            "outcomes": evidence.num_outcomes,
            "waiting": ledger.num_waiting,
            "timeouts": ledger.timeouts,
            "effect": None if interval is None else evidence.effect.estimate,
            "interval": None if interval is None else list(interval),
            "margin": evidence.margin,
            **decisions,
        },
        "arms": {
            "candidate": _arm(ledger, "candidate", evidence.candidate_sum, evidence.candidates),
            "baseline": _arm(ledger, "baseline", evidence.baseline_sum, evidence.baselines),
        },
        "agreement": {
            "answers": same.total(),
            "same_calls": same["calls"] + same["reply"],
            "same_reply": same["reply"],
        },
        "violations": dict(ledger.unsafe),
        "brakes": {
            name: {"fires": brake.fires, "alpha": brake.alpha if isinstance(brake, RateGuard) else None}
            for name, brake in ledger.brakes.items()
        },
    }


def _arm(ledger: Ledger, arm: Arm, successes: float, outcomes: int) -> dict[str, float | int | None]:
    return {
        "conversations": ledger.assigned[arm],
        "outcomes": outcomes,
        "success": _mean(successes, outcomes),
        "answers": ledger.answers[arm],
        "unsafe_answers": ledger.unsafe_answers[arm],
        "mean_seconds": _mean(*ledger.seconds[arm]),
        "mean_cost": _mean(*ledger.costs[arm]),
    }


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None
