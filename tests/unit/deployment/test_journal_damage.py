"""A journal whose file was damaged is named, whichever bit it is; what is written can be read again."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deployment_journals import SimulatedDeployment

from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.guards import Answer
from stateset_agents.deployment.journal import Journal, Pages
from stateset_agents.deployment.state import Assignment
from stateset_agents.types.errors import ConfigurationError, JournalError

NOBODY = 65534


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two deployments, of which the first was rolled back, in one closed file."""
    path = tmp_path_factory.mktemp("whole") / "deployments.sqlite"
    first = SimulatedDeployment(path)
    first.talk(60)
    first.controller.roll_back(who="ann", why="it swears")
    first.controller._journal.close()
    second = SimulatedDeployment(path, candidate="another", seed=1)
    second.talk(120)
    second.controller.promote(who="bob", why="in a hurry", to=0.5, force=True)
    second.talk(5)
    second.controller._journal.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return path


def all_that_can_be_read(path: Path) -> list[Any]:
    """Records, rows, hashes, states, and each conversation as it is found by its name."""
    found: list[Any] = []
    with Journal(path, create=False) as journal:
        for record in journal.records():
            rows = list(Pages(journal, record).new())
            controller = DeploymentController(journal, record.id, clock=lambda: 2e9)
            names = [row.conversation for row in rows if isinstance(row, Assignment)]
            by_name = [journal.find("assignments", record.id, conversation=name) for name in names]
            found += [record, rows, controller.hashes, controller.state, by_name]
    return found


def random_bits(file: bytes, dice: random.Random) -> Iterator[int]:
    """Of the whole file."""
    while True:
        yield dice.randrange(8 * len(file))


def aimed_bits(file: bytes, dice: random.Random) -> Iterator[int]:
    """Of a page's header, of the places of its cells, and of the first bytes of a cell, which hold its
    lengths, its deployment and its number (https://www.sqlite.org/fileformat2.html#b_tree_pages)."""
    size = struct.unpack_from(">H", file, 16)[0]
    while True:
        page = size * dice.randrange(len(file) // size)
        start = page + 100 if page == 0 else page
        first = start + (8 if file[start] in (10, 13) else 12)
        num_cells = struct.unpack_from(">H", file, start + 3)[0]
        places = struct.unpack_from(f">{num_cells}H", file, first) or (first - page,)
        cell = page + dice.choice((places[0], places[-1], dice.choice(places)))
        areas = (range(start, first), range(first, first + 2 * num_cells + 1), range(cell, cell + 16))
        yield 8 * min(dice.choice(dice.choice(areas)), len(file) - 1) + dice.randrange(8)


@pytest.mark.parametrize(
    ("bits", "count"),
    [
        (random_bits, 40),
        (aimed_bits, 60),
        pytest.param(random_bits, 2000, marks=pytest.mark.long),
        pytest.param(aimed_bits, 1000, marks=pytest.mark.long),
    ],
)
def test_no_flipped_bit_is_silent(
    journal: Path, tmp_path: Path, bits: Callable[[bytes, random.Random], Iterator[int]], count: int
) -> None:
    """Named, or in a place that holds nothing: then all that can be read is the same. Of aimed bits all but a
    few are named."""
    whole, file = all_that_can_be_read(journal), journal.read_bytes()
    places = bits(file, random.Random(count))
    path, silent, num_named = tmp_path / "flipped.sqlite", [], 0
    for bit in (next(places) for _ in range(count)):
        flipped = bytearray(file)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            if all_that_can_be_read(path) != whole:
                silent.append(bit)
        except JournalError:
            num_named += 1
        for beside in tmp_path.iterdir():
            beside.unlink()
    assert silent == []
    assert num_named > (0.9 if bits is aimed_bits else 0.5) * count


@pytest.mark.parametrize("create", [True, False])
def test_an_empty_file_is_no_journal(tmp_path: Path, create: bool) -> None:
    path = tmp_path / "deployments.sqlite"
    path.touch()
    with pytest.raises(JournalError, match=r"deployments.sqlite' is empty: take its last copy, or delete it"):
        Journal(path, create=create)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_file_that_was_cut_is_named(journal: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(journal.read_bytes()[: int(share * journal.stat().st_size)])
    with pytest.raises(JournalError):
        all_that_can_be_read(path)


def test_processes_that_make_one_journal_at_once_make_one(tmp_path: Path) -> None:
    path, children = tmp_path / "deployments.sqlite", []
    for number in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                with Journal(path) as made:
                    start_deployment(made, candidate="new", baseline="old", who=f"process {number}")
            except BaseException:
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    with Journal(path) as made:
        assert len({record.who for record in made.records()}) == 8
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_on_a_disk_without_hard_links_the_journal_of_another_process_is_kept(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deployments.sqlite"
    is_late = True

    def link(partial: Path, target: Path) -> None:
        if is_late:
            target.write_bytes(journal.read_bytes())  # the other process is quicker by this moment
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with Journal(path) as made:
        assert made.records()
    path.unlink()
    is_late = False
    with Journal(path) as made:
        assert not made.records()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """Into which `as_a_reader` may not write; pytest's own folders are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="journals-"))
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def as_a_reader(folder: Path, read: Callable[[], Any]) -> Any:
    """The result of `read`, as JSON knows it, in a process that may not write into the folder."""
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            try:
                result = read()
            except JournalError as error:
                result = str(error)
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        result = json.loads(answer.read())
    os.waitpid(child, 0)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    return result


def hashes(path: Path) -> dict[str, str]:
    with Journal(path, create=False) as journal:
        return DeploymentController(journal, "0001").hashes


def test_a_journal_is_read_where_nothing_may_be_written(journal: Path, locked_folder: Path) -> None:
    path = locked_folder / "deployments.sqlite"
    shutil.copy(journal, path)
    assert as_a_reader(locked_folder, lambda: hashes(path)) == hashes(journal)

    def write() -> None:
        with Journal(path, create=False) as closed:
            start_deployment(closed, candidate="new", baseline="old", who="ann")

    assert "cannot be used (attempt to write a readonly database)" in as_a_reader(locked_folder, write)


def test_a_journal_that_another_process_writes_is_read_with_its_last_rows(locked_folder: Path) -> None:
    path = locked_folder / "deployments.sqlite"
    deployment = SimulatedDeployment(path)
    deployment.talk(20)
    assert path.with_name(f"{path.name}-wal").stat().st_size > 0
    assert as_a_reader(locked_folder, lambda: hashes(path)) == deployment.controller.hashes


def test_a_file_that_is_written_again_while_it_is_read_without_locks_is_named(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deployments.sqlite"
    shutil.copy(journal, path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # as on a mount to read only
        frozen = Journal(path, create=False)
    assert frozen.changes() == frozen.changes()
    with Journal(path, create=False) as writer:
        DeploymentController(writer, "0002").roll_back(who="ann", why="it swears")
    with pytest.raises(JournalError, match="is being written again: open it anew"):
        frozen.changes()
    frozen.close()


def test_a_flipped_bit_of_the_log_loses_no_move(tmp_path: Path) -> None:
    """Rows after the move may be lost, as in a power failure."""
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(40)
    deployment.controller.promote(who="bob", why="in a hurry", to=0.5, force=True)
    deployment.talk(10)
    moves = deployment.controller.moves()
    log, dice = (tmp_path / "d.sqlite-wal").read_bytes(), random.Random(0)
    flipped = tmp_path / "flipped.sqlite"
    for bit in (dice.randrange(8 * len(log)) for _ in range(40)):
        shutil.copy(tmp_path / "d.sqlite", flipped)
        changed = bytearray(log)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped.sqlite-wal").write_bytes(changed)
        with suppress(JournalError), Journal(flipped) as journal:
            assert DeploymentController(journal, "0001").moves() == moves
        for beside in tmp_path.glob("flipped*"):
            beside.unlink()


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_a_clock_without_time_is_refused_and_nothing_is_lost(tmp_path: Path, time: float) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(5)
    before, deployment.now = deployment.controller.hashes, time
    for call in (
        lambda: deployment.controller.assign("another"),
        lambda: deployment.controller.roll_back(who="ann", why="it swears"),
        lambda: SimulatedDeployment(deployment.path, start=time),
    ):
        with pytest.raises(ConfigurationError, match=f"the clock must give finite seconds, got {time}"):
            call()
    assert hashes(deployment.path) == before


def test_what_sqlite_would_give_back_as_something_else_is_refused(tmp_path: Path) -> None:
    """A column turns 1.0 into 1 and 5 into "5": their hash would be another one."""
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(5)
    before, name = deployment.controller.hashes, "call 0-1"
    for turn in (1.0, "1", True):
        with pytest.raises(ConfigurationError, match=f"turn of answers must be a whole number, got {turn!r}"):
            deployment.controller.record_answer(name, turn, Answer(seconds=1.0))  # type: ignore[arg-type]  # a user's
    with pytest.raises(ConfigurationError, match="who of transitions must be a text, got 5"):
        deployment.controller.roll_back(who=5, why="")  # type: ignore[arg-type]  # a number of a user
    assert hashes(deployment.path) == before
