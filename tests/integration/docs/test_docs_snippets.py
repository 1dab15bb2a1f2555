"""Every snippet of every page runs, in the order of the page, in an empty folder beside the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import page_snippets
import pytest
from repository_paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "skills").rglob("*.md"))]
ELSEWHERE = {"trackers.md", "gguf.md", "tau2.md", "tau2-tasks.md", "optimize-prompt.md"}
"""Pages that need libraries which .venv lacks, or a big model: test_trackers, test_smollm2, test_tau2
and test_optimize_prompt run these."""
WITH_PROGRAMS = [
    page
    for page in PAGES
    if page.name not in ELSEWHERE and any(fence.is_program for fence in page_snippets.fences(page))
]


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    beside = str(Path(sys.executable).parent)
    (tmp_path / "stateset-agents").symlink_to(ROOT)
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, page_snippets.__file__, str(page)],
        cwd=tmp_path / "empty",
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_snippet_that_breaks_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\nthen\n```python\nawait asyncio.sleep(0)\n```\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, page_snippets.__file__, str(page)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "page.md, line 6" in done.stderr
    assert "NameError" in done.stderr


def test_titles_are_files_commands_run_and_what_is_only_shown_does_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '1. First:\n   ```python title="desk.py"\n   ANSWER = 42\n   ```\n'
        "   ```python\n   import asyncio, desk\n   answer = await asyncio.sleep(0, desk.ANSWER)\n   ```\n"
        "```console\npython -c 'import desk; print(desk.ANSWER)' > out.txt\n```\n"
        "```console not-run\nexit 1\n```\n"
        "```python\nassert open('out.txt').read() == '42\\n' and answer == 42\n```\n",
        encoding="utf-8",
    )
    beside = str(Path(sys.executable).parent)
    subprocess.run(
        [sys.executable, page_snippets.__file__, str(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"},
        check=True,
    )


def test_what_a_page_says_a_program_prints_is_what_it_prints(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "```console\necho 'loss 6.81 in 48 steps'\n```\n```text output near\nloss {} in {} steps\n```\n"
    for loss, steps, code in (("6.5", "48", 0), ("9.9", "48", 1), ("6.81", "47", 1)):
        page.write_text(text.format(loss, steps), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, page_snippets.__file__, str(page)], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert ("page.md, line 5: " in done.stderr) is bool(code)


@pytest.mark.parametrize(
    ("shown", "printed", "near", "same"),
    [
        ("a 1.5\n", "a 1.5 \n", False, True),
        ("a 1.5\n", "a 1.6\n", False, False),
        ("a  1.5\n", "a 1.6\n", True, True),
        ("a 1.5\n", "a 1.9\n", True, False),  # off by more than .25 and a quarter
        ("a -0.5\n", "a 0.5\n", True, False),
        ("success 23%\n", "success 40%\n", True, True),
        ("success 23%\n", "success 60%\n", True, False),
        ("15 of 15 checks\n", "16 of 16 checks\n", True, False),
        ("step 1 loss 2.0 ...\n...\nstep 3\n", "step 1 loss 2.1 0:03\nstep 2\nstep 3\n", True, True),
        ("step 1\n...\nstep 3\n", "step 1\nstep 3\n", False, True),
        ("step 1\n...\nstep 3\n", "step 1\nstep 2\n", False, False),
        ("step 1\n", "step 1\nand more\n", False, False),
    ],
)
def test_the_rules_of_comparing(shown: str, printed: str, near: bool, same: bool) -> None:
    assert (page_snippets.difference(shown, printed, near=near) is None) is same


def test_every_output_on_the_first_page_is_compared() -> None:
    page = ROOT / "docs" / "getting-started.md"
    texts = [fence for fence in page_snippets.fences(page) if fence.language == "text"]
    assert len(texts) == 5
    assert all("output" in fence.words for fence in texts)


@pytest.mark.docs
def test_the_numbers_of_the_concepts_page_are_what_its_script_prints() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "walk_through.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    blocks = re.findall(r"--- (\w+)\n(.*?)\n\n(?=---|\Z)", done.stdout, flags=re.DOTALL)
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    shown = re.findall(r'```text walk="(\w+)"\n(.*?)\n```', page, flags=re.DOTALL)
    assert dict(shown) == dict(blocks), "run python scripts/walk_through.py --write"
    assert len(shown) == 7


def test_the_files_of_getting_started_are_the_example_s() -> None:
    titled = {
        fence.title: fence.text
        for fence in page_snippets.fences(ROOT / "docs" / "getting-started.md")
        if fence.title is not None
    }
    folder = ROOT / "examples" / "library_desk"
    written = [
        path
        for path in folder.iterdir()
        if path.suffix in (".py", ".yaml") and path.name != "starter_model.py"  # which the reader copies
    ]
    assert titled == {path.name: path.read_text(encoding="utf-8") for path in written}
