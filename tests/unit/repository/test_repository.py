"""What holds for the repository as a whole: commands that exist, imports that stay light, clean text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from repository_paths import HELPERS, ROOT

from scripts import rooms

PACKAGE = ROOT / "stateset_agents"
TESTS = ROOT / "tests"


@cache
def tracked_files() -> list[Path]:
    """Every text file that git tracks."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in files if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_the_commands_of_the_readme_are_make_targets() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", readme))
    assert {"demo", "test"} <= commands
    assert commands <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))


def test_the_demo_passes_seed_and_arguments_through() -> None:
    command = ["make", "--dry-run", "demo", "SEED=1", "ARGS=--max-steps 20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "stateset-agents train examples/demo.yaml --seed 1 --max-steps 20" in done.stdout


def test_continuous_integration_runs_the_readme_s_test_command_and_refuses_skips() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "make check" in lines
    assert 'make test PYTEST_ARGS="--no-skips"' in lines


def _would_run(*words: str) -> list[str]:
    """The commands that make would run for these words."""
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_each_slow_target_stands_in_one_share_and_five_landings_run_them_all() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^(test-[a-z0-9-]+):", makefile, re.MULTILINE))
    slow = named - {"test-long"}  # which runs in parts
    shares = dict(re.findall(r"^SLOW_(\d) := (.*)$", makefile, re.MULTILINE))
    alone = re.search(r"^ON_ONE_CORE := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert alone is not None
    on_one_core = alone[1].replace("\\\n", " ").strip()
    shares = {number: names.replace("$(ON_ONE_CORE)", on_one_core) for number, names in shares.items()}
    assert sorted(name for share in shares.values() for name in share.split()) == sorted(slow)
    assert sorted(shares) == list("01234")
    for share, names in shares.items():
        together = _would_run("slow", f"SHARE={share}")
        assert all(line in together for name in names.split() for line in _would_run(name))
    assert "share=$(( $(cat .ci/landing) % 5 ))" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert (ROOT / ".ci" / "landing").read_text().strip().isdigit()


def test_relative_links_of_the_pages_lead_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]
    assert ROOT / "README.md" in pages
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_every_test_file_that_is_named_exists() -> None:
    """A path leads to a file of tests/; a bare name, as in `test_kl.py`, is that of some file there."""
    names = {path.name for path in TESTS.rglob("*.py")}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in tracked_files()
        if path != Path(__file__)
        for name in re.findall(r"\btests/[\w./-]+\.\w+|\btest_\w+\.py\b", path.read_text(errors="replace"))
        if not (ROOT / name).exists() and name not in names
    ]
    assert missing == []


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports each by its name alone."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_of_tests_is_taken_for_a_library() -> None:
    """pytest puts each folder of tests on the path, where a folder `trl` would answer to `import trl`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    libraries = {re.split(r"[<>=]", requirement)[0] for requirement in requirements} | {"openenv", "vllm"}
    on_path = {path.parent for path in TESTS.rglob("*.py")}
    folders = {path.name for parent in on_path for path in parent.iterdir() if path.is_dir()}
    assert folders & libraries == set()


def test_nothing_names_the_place_where_it_was_written() -> None:
    parts = [
        "/wo" + "rk/",
        "/op" + "t/(pypi|wheels)",
        "farm-st" + "udio",
        r"\b(GOLDEN|DESIGN|SPEC|EMBEDDED|SPEED)" + r"\.md",
        r"\bS[0-4]" + r"-\d\d\b",
    ]
    pattern = re.compile("|".join(parts))
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if not path.match("tests/integration/documents/rows_*.yaml")  # the table of the documents' rows
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert hits == []


def test_every_ignore_names_its_code_and_a_reason() -> None:
    good = re.compile(r"# (type: ignore\[[\w-]+(, ?[\w-]+)*\]|noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*)[\s:#,;—-]+\w+")
    bad = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path.suffix == ".py" and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"# (type: ?ignore|noqa)", line) and not good.search(line)
    ]
    assert bad == []


def test_imports_point_down_only() -> None:
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    homeless = tops - {"__init__", "__main__"} - {room for layer in rooms.LAYERS for room in layer}
    assert homeless == set(), "give each a layer of LAYERS in scripts/rooms.py and in docs/architecture.md"
    up = {str(path.relative_to(ROOT)): rooms.imports_up(path) for path in modules()}
    assert {path: above for path, above in up.items() if above} == {}, "these import what stands above them"


def test_importing_the_package_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import stateset_agents; "
        "took = time.perf_counter() - start; "
        "print(took, [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    assert all(run.endswith(" []\n") for run in runs), runs
    assert min(float(run.split()[0]) for run in runs) < 0.3, runs


@pytest.mark.long
def test_a_skip_fails_where_skips_are_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makeini(f"[pytest]\nmarkers = gpu: needs a GPU\npythonpath = {HELPERS / 'servers'}\n")
    skip = "import pytest\n@pytest.mark.skip(reason='too lazy')\ndef test_skipped(): pass\n"
    no_gpu = "@pytest.mark.gpu\n@pytest.mark.skip(reason='needs a GPU')\ndef test_needs_a_gpu(): pass\n"
    pytester.makepyfile(
        test_skips=skip + no_gpu + "def test_runs(): pass\n",
        test_module_skips="import pytest\npytest.importorskip('no_such_module')\n",
    )
    done = pytester.runpytest_subprocess("--no-skips", "--continue-on-collection-errors")
    done.assert_outcomes(passed=1, skipped=1, errors=2)
    done.stdout.fnmatch_lines_random(["*too lazy*", "*ERROR*test_module_skips.py*"])


def test_every_page_stands_in_the_index_of_the_docs() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))
