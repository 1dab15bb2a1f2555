"""A deployment with its journal: assignment, order of outcomes, moves, and what a damaged file says."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any, ClassVar

import pytest
from deployment_journals import alter

from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.guards import Answer
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan, GuardPlan, read_plan
from stateset_agents.deployment.state import bucket
from stateset_agents.types.errors import ConfigurationError, JournalError

QUICK: dict[str, Any] = {
    "stages": (0.5,),
    "shadow_answers": 0,
    "hold_seconds": 0,
    "hold_outcomes": 0,
    "salt": "of the test",
}


class Desk:
    """A journal, one deployment in it, and a clock."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.now = 0.0
        self.path = folder / "deployments.sqlite"
        self.journal = Journal(self.path)
        start_deployment(
            self.journal,
            candidate="new",
            baseline="old",
            plan=DeploymentPlan(**{**QUICK, **plan}),
            who="ann",
            clock=lambda: self.now,
        )
        self.controller = self.open()

    def open(self) -> DeploymentController:
        return DeploymentController(Journal(self.path), "0001", clock=lambda: self.now)

    def talk(self, number: int, success: float) -> str:
        name = f"c{number}"
        arm = self.controller.assign(name).arm
        self.controller.report_outcome(name, success=success)
        return arm


def test_a_growing_share_moves_nobody_back_and_fits_the_probability() -> None:
    places = {f"c{n}": bucket("key", f"c{n}") for n in range(20_000)}
    shares = [sum(place < share for place in places.values()) / 20_000 for share in (0.05, 0.25, 0.5)]
    for share, measured in zip((0.05, 0.25, 0.5), shares, strict=True):
        assert abs(measured - share) < 3 * math.sqrt(share * (1 - share) / 20_000)
    assert bucket("key", "c1") != bucket("other", "c1")


def test_arm_and_probability_are_written_at_first_sight(tmp_path: Path) -> None:
    desk = Desk(tmp_path, stages=(0.3, 0.6), hold_outcomes=10**6)
    first = desk.controller.assign("c0")
    assert first.probability == 0.3
    desk.controller.promote(who="ann", why="in a hurry", force=True)
    assert desk.controller.assign("c0") == first
    assert desk.controller.assign("c1").probability == 0.6


def test_outcomes_count_in_the_order_of_admission(tmp_path: Path) -> None:
    desk = Desk(tmp_path, outcome_timeout=100)
    for name in ("a", "b", "c"):
        desk.now += 1
        desk.controller.assign(name)
    assert desk.controller.report_outcome("c", success=1.0) == "counted"
    assert desk.controller.report_outcome("b", success=1.0) == "counted"
    assert desk.controller.ledger.evidence.num_outcomes == 0  # a is not known
    assert desk.controller.report_outcome("b", success=0.0) == "again"
    desk.now = 100.9
    desk.controller.settle()
    assert desk.controller.ledger.num_waiting == 3
    desk.now = 101.0
    desk.controller.settle()
    evidence = desk.controller.ledger.evidence
    assert (evidence.num_outcomes, evidence.candidate_sum + evidence.baseline_sum) == (3, 2.0)
    assert desk.controller.ledger.timeouts == 1
    assert desk.controller.report_outcome("a", success=1.0) == "late"


def test_a_drop_is_rolled_back_and_its_conversations_go_on_with_the_baseline(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    arms = {}
    for number in range(400):
        desk.now += 1
        arms[number] = desk.controller.assign(f"c{number}").arm
        desk.controller.report_outcome(f"c{number}", success=float(arms[number] == "baseline"))
        if desk.controller.state.mode == "rolled_back":
            break
    assert desk.controller.state.mode == "rolled_back"
    assert "success is lower" in desk.controller.state.why
    moved = next(number for number, arm in arms.items() if arm == "candidate")
    again = desk.controller.assign(f"c{moved}")
    assert (again.arm, again.is_moved) == ("baseline", True)
    assert desk.controller.assign("later").arm == "baseline"
    with pytest.raises(ConfigurationError, match="is rolled back: start a new"):
        desk.controller.promote(who="ann", why="again", to=0.5, force=True)
    restarted = desk.open()
    assert restarted.state == desk.controller.state
    assert restarted.ledger.evidence == desk.controller.ledger.evidence
    assert restarted.hashes == desk.controller.hashes


def test_a_better_candidate_is_promoted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(400):
        arm = desk.controller.assign(f"c{number}").arm
        desk.controller.report_outcome(f"c{number}", success=float(arm == "candidate"))
    assert (desk.controller.state.mode, desk.controller.state.share) == ("full", 1.0)
    assert desk.controller.assign("next").arm == "candidate"
    assert [move.mode for move in desk.controller.moves()] == ["gradual", "full"]
    assert not any(move.forced for move in desk.controller.moves())


def test_a_promotion_against_the_evidence_is_forced_and_says_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path, hold_outcomes=500)
    desk.talk(0, 1.0)
    assert desk.controller.state.share == 0.5
    with pytest.raises(
        ConfigurationError, match=r"to 1 is against the evidence \(evidence to promote is .* of 20"
    ):
        desk.controller.promote(who="ann", why="the boss")
    assert desk.controller.state.mode == "gradual"
    desk.controller.promote(who="ann", why="the boss", force=True)
    move = desk.controller.moves()[-1]
    assert (move.mode, move.who, move.forced) == ("full", "ann", True)
    assert move.why.startswith("the boss (against the evidence: evidence to promote is ")


def test_stages_follow_when_they_have_held(tmp_path: Path) -> None:
    desk = Desk(tmp_path, stages=(0.2, 0.4), shadow_answers=2, hold_seconds=10, hold_outcomes=3)
    for turn in range(2):
        desk.controller.assign("s")
        desk.controller.record_answer("s", turn, Answer(seconds=1.0), arm="candidate")
    assert desk.controller.state.mode == "shadow"
    desk.now = 10.0
    assert desk.controller.settle().share == 0.2
    for number in range(3):
        desk.talk(number, 1.0)
    assert desk.controller.state.share == 0.2
    desk.now = 20.0
    assert desk.controller.settle().share == 0.4


def test_unsafe_answers_roll_back_and_a_second_record_counts_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, guards=GuardPlan(latency=2.0, cost=0.5, window=20))
    desk.controller.assign("c")
    found = desk.controller.record_answer("c", 0, Answer(seconds=3.0, cost=0.6), arm="candidate")
    assert [violation.guard for violation in found] == ["latency", "cost"]
    desk.controller.record_answer("c", 0, Answer(seconds=3.0, cost=0.6), arm="candidate")
    assert desk.controller.ledger.answers["candidate"] == 1
    for turn in range(1, 20):
        bad = turn in (5, 6)
        desk.controller.record_answer(
            "c", turn, Answer(seconds=1.0, cost=0.1, error="no answer" if bad else None), arm="candidate"
        )
    assert desk.controller.state.mode == "rolled_back"
    assert desk.controller.state.why == "window: 3 of the last 20 answers were unsafe"
    assert desk.controller.status()["violations"] == {"latency": 1, "cost": 1, "failure": 2}


def test_two_processes_share_a_deployment(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    other = desk.open()
    for number in range(20):
        desk.talk(number, number % 2)
    other.assign("mine")
    assert other.ledger.num_waiting == 1
    assert other.ledger.evidence == desk.controller.ledger.evidence
    other.roll_back(who="bob", why="it swears")
    assert desk.controller.assign("next").arm == "baseline"
    assert desk.controller.state.why == "it swears"


def test_what_a_row_says_cannot_be_changed_unseen(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(10):
        desk.talk(number, 1.0)
    desk.controller.promote(who="ann", why="go", to=0.7, force=True)
    raw = sqlite3.connect(desk.path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="a journal only grows"):
        raw.execute("UPDATE outcomes SET success = 0")
    for change, named in (
        ("UPDATE outcomes SET success = 0.0 WHERE number = 4", "outcomes of deployment 0001, row 4,"),
        ("DELETE FROM outcomes WHERE number = 4", "outcomes of deployment 0001 are 9 rows, numbered 1 to 10"),
        ("UPDATE outcomes SET number = -10 WHERE number = 10", "are 10 rows, numbered -10 to 9"),
        (
            "UPDATE transitions SET deployment = '0005' WHERE number = 2",
            "deployment 0005 are 1 rows, numbered 2",
        ),
        ("DELETE FROM outcomes WHERE number > 8", "had 10 outcomes at its last move, and has 8"),
        ("UPDATE transitions SET share = 0.6 WHERE number = 2", "transitions of deployment 0001, row 2,"),
        ("UPDATE deployments SET salt = 'mine'", "deployments of deployment 0001, row 1,"),
    ):
        broken = tmp_path / "broken.sqlite"
        with sqlite3.connect(broken) as copy:
            raw.backup(copy)
        copy.close()
        alter(broken, change)
        with pytest.raises(JournalError, match=named):
            DeploymentController(Journal(broken), "0001")
        broken.unlink()
        for beside in tmp_path.glob("broken.sqlite-*"):
            beside.unlink()


@pytest.mark.parametrize("number", [-0.0, math.nan, math.inf])
def test_numbers_that_sqlite_does_not_keep_leave_the_journal_readable(tmp_path: Path, number: float) -> None:
    desk = Desk(tmp_path)
    desk.now = -0.0
    desk.controller.assign("c")
    desk.controller.record_answer("c", 0, Answer(seconds=1.0, cost=number))
    desk.controller.report_outcome("c", success=-0.0, reward=-0.0)
    again = desk.open()
    assert again.hashes == desk.controller.hashes
    assert again.status() == desk.controller.status()


def test_after_a_failed_write_and_a_failed_read_nothing_is_missing_in_the_journal(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.controller.assign("one")
    connection = desk.controller._journal._connection

    class Failing:
        """Fails once at the end of a transaction, and once at what is read then."""

        left: ClassVar[list[str]] = ["COMMIT", "PRAGMA data_version"]

        def execute(self, sql: str, *values: Any) -> Any:
            if self.left and sql == self.left[0]:
                self.left.pop(0)
                raise sqlite3.OperationalError("disk I/O error")
            return connection.execute(sql, *values)

        @property
        def in_transaction(self) -> bool:
            return connection.in_transaction

    desk.controller._journal._connection = Failing()  # type: ignore[assignment]  # what is asked of it
    with pytest.raises(JournalError, match="disk I/O error"):
        desk.controller.assign("two")
    assert not Failing.left
    numbers = [desk.controller.assign(name).number for name in ("two", "three")]
    assert numbers == [2, 3]
    assert desk.open().hashes == desk.controller.hashes


def test_the_last_deployment_is_the_newest_whatever_the_clock_says(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deployments.sqlite")
    for clock in (lambda: 100.0, lambda: 50.0):
        start_deployment(journal, candidate="new", baseline="old", who="ann", clock=clock)
    assert [record.id for record in journal.records()] == ["0001", "0002"]


def test_what_is_over_cannot_be_promoted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.controller.promote(who="ann", why="sure", to=1, force=True)
    with pytest.raises(ConfigurationError, match="0001 is full: start a new"):
        desk.controller.promote(who="ann", why="more", force=True)
    desk.controller.roll_back(who="ann", why="not so sure")
    with pytest.raises(ConfigurationError, match="0001 is rolled back: start a new"):
        desk.controller.promote(who="ann", why="again")


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but longer than a header of SQLite would be, by far, so that it is read")
    with pytest.raises(JournalError, match=r"notes\.txt' cannot be used \(file is not a database\)"):
        Journal(text)
    with pytest.raises(JournalError, match="there is no journal"):
        Journal(tmp_path / "none.sqlite", create=False)
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE orders (id)")
    with pytest.raises(JournalError, match="has journal version"):
        Journal(tmp_path / "other.sqlite")


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with pytest.raises(ConfigurationError, match="'c9' was never assigned"):
        desk.controller.report_outcome("c9", success=True)
    with pytest.raises(ConfigurationError, match="success must be True, False or from 0 to 1, got 2"):
        desk.controller.report_outcome("c9", success=2)
    for odd in (None, "true", math.nan):
        with pytest.raises(ConfigurationError, match=f"from 0 to 1, got {odd!r}"):
            desk.controller.report_outcome("c9", success=odd)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ConfigurationError, match="reward must be a finite number, got 'good': leave it out"):
        desk.controller.report_outcome("c9", success=True, reward="good")  # type: ignore[arg-type]  # as above
    for name in ("", "x" * 1001, "\ud800"):
        with pytest.raises(ConfigurationError, match="a conversation's id must be"):
            desk.controller.assign(name)
    with pytest.raises(ConfigurationError, match="are both 'a'"):
        start_deployment(desk.journal, candidate="a", baseline="a", who="ann")
    with pytest.raises(ConfigurationError, match="has no deployment '0002': 0001"):
        DeploymentController(desk.journal, "0002")


def test_plans_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("stages: [0.1, 0.5]\nguards: {latency: 2, rate: null}\n")
    plan = read_plan(path)
    assert plan.alphas == {"promote": 0.05, "roll_back": 0.05}
    assert list(plan.brakes()) == []
    path.write_text("stages: [0.5, 0.1]\n")
    with pytest.raises(
        ConfigurationError, match=r"stages must grow from one to the next, got \[0\.5, 0\.1\]"
    ):
        read_plan(path)
    path.write_text("steps: [0.5]\n")
    with pytest.raises(ConfigurationError, match="DeploymentPlan has no field 'steps'"):
        read_plan(path)
    path.write_text("1: 2\n")
    with pytest.raises(ConfigurationError, match="must hold the fields of a plan"):
        read_plan(path)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_plan(tmp_path / "none.yaml")
