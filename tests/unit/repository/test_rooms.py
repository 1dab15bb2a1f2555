"""The package's rooms: no circle among the things of a folder, and few enough floors to hold in the head."""

from __future__ import annotations

from graphlib import CycleError
from pathlib import Path

import pytest

from scripts import rooms

MOST_FLOORS = 8


def test_no_folder_has_a_circle_and_the_package_eight_floors() -> None:
    package, *folders = rooms.folders()
    assert package.floors() <= MOST_FLOORS  # CycleError names the circle
    assert len(package.arrows) <= 25  # its later rooms are known
    for folder in folders:
        assert folder.floors() >= 1, folder.name


def test_companions_stand_behind_a_wall() -> None:
    imports = {str(path): rooms.imports_of_companions(path) for path in rooms.PACKAGE.rglob("*.py")}
    assert {path: names for path, names in imports.items() if names} == {}


def test_no_modules_import_one_another_for_types_either() -> None:
    assert rooms.circles_of_modules() == []


def test_lines_of_code_are_those_with_a_token(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Doc.\n\nmore"""\n\n# why\nX = (\n    1,  # one\n\n    2,\n)\nTEXT = """a\nb"""\n')
    assert rooms.lines_of_code(module) == 6


def test_a_circle_through_two_folders_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop"
    for name, text in {
        "desk/__init__.py": "",
        "desk/till.py": "from shop.store import shelf\n",
        "store/__init__.py": "",
        "store/shelf.py": "def put():\n    import shop.desk.bell\n",
        "desk/bell.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shop.desk.till\n",
        "__init__.py": "",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    monkeypatch.setattr(rooms, "PACKAGE", package)
    top, desk, store = rooms.folders()
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        top.floors()
    assert (desk.floors(), store.floors()) == (1, 1)


def test_an_import_of_a_room_above_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stateset_agents" / "core" / "agent.py"
    path.parent.mkdir(parents=True)
    path.write_text("import stateset_agents.types.errors\nfrom stateset_agents.cli import main\n")
    monkeypatch.setattr(rooms, "PACKAGE", tmp_path / "stateset_agents")
    assert rooms.imports_up(path) == ["cli"]


def test_architecture_md_has_the_tables_of_today() -> None:
    page = rooms.PAGE.read_text(encoding="utf-8")
    tables = page.split(rooms.BEGIN)[1].split(rooms.END)[0]
    rows = [row for row in rooms.tables(with_step=False).splitlines() if "| lines of" not in row]
    assert [row for row in rows if row not in tables] == [], "run python scripts/rooms.py --write"
