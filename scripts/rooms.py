"""How the package is divided: rooms, floors, circles, lines of code, and what one step executes.

    python scripts/rooms.py            print the tables
    python scripts/rooms.py --step     also count what one step of examples/demo.yaml executes
    python scripts/rooms.py --import   also time the import of a trainer beside that of torch
    python scripts/rooms.py --write    put the tables into docs/architecture.md

A room is a folder or a module of the package. A module's floor is one above the highest of those it imports,
seen from the folder that holds both; imports for type checkers do not count there, and count where circles of
modules are looked for. Lines of code are those that hold a token of Python: not blank, comment or docstring.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "stateset_agents"
PAGE = ROOT / "docs" / "architecture.md"
LAYERS = (
    {"cli"},
    {"numeric", "deployment", "reasoning", "porting"},
    {"training", "embedded"},
    {"rewards", "environments", "evaluation", "serving", "runs"},
    {"core", "reporting"},
    {"backends", "tracking", "sandbox", "grouping"},
    {"algorithms", "runtime", "answers", "claims"},
    {"types"},
)
"""From the doors to the ground; a module imports from its own layer or from one below."""
COMPANIONS = frozenset({"numeric", "deployment", "reasoning", "porting"})
"""The wall: products beside the trainer, which no room but `cli` imports, nor one of them another."""
BEGIN, END = "<!-- scripts/rooms.py --write -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Folder:
    """One folder, seen by what it holds."""

    name: str
    arrows: Mapping[str, frozenset[str]]
    """Each module or folder in it -> those in it that it imports."""

    def order(self) -> list[str]:
        """What it holds, imported before importing. Raises graphlib.CycleError for a circle."""
        return list(TopologicalSorter(self.arrows).static_order())

    def floors(self) -> int:
        """The height of the highest thing."""
        height: dict[str, int] = {}
        for thing in self.order():
            height[thing] = 1 + max((height[below] for below in self.arrows[thing]), default=0)
        return max(height.values(), default=0)


@cache
def module_imports(path: Path, *, with_types: bool = False) -> frozenset[str]:
    """Dotted names that a module needs at run time (or for type checkers): modules, and what may be one."""
    return frozenset(_imports(path, with_types))


def _imports(path: Path, with_types: bool) -> Iterator[str]:
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if not with_types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))


def imports_up(path: Path) -> list[str]:
    """Rooms at the top that a module imports though they stand above its own."""
    own = _layer(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    rooms = {name.split(".")[1] for name in module_imports(path) if name.startswith(f"{PACKAGE.name}.")}
    layers = {room: _layer(room) for room in rooms}
    return [room for room, layer in layers.items() if None not in (own, layer) and (layer or 0) < (own or 0)]


def imports_of_companions(path: Path) -> list[str]:
    """Companions that a module of another room imports, though it is no door."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = module_imports(path, with_types=True)
    rooms = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE.name}.")}
    return [] if own in ("cli", "__init__") else sorted(rooms & COMPANIONS - {own})


def circles_of_modules() -> list[str]:
    """Modules that import one another in a circle, imports for type checkers included; one circle at most."""
    paths = {_dotted(path): path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    graph = {
        name: module_imports(path, with_types=True) & paths.keys() - {name} for name, path in paths.items()
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def lines_of_code(path: Path) -> int:
    """Lines of a module that hold a token of Python: not blank, comment or docstring."""
    text = path.read_text(encoding="utf-8")
    blank = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _layer(room: str) -> int | None:
    return next((depth for depth, names in enumerate(LAYERS) if room in names), None)


def folders() -> list[Folder]:
    """Every folder of the package that holds modules, the package itself first."""
    paths = sorted(PACKAGE.rglob("*.py"))
    modules = {_dotted(path): path for path in paths if path.stem not in ("__init__", "__main__")}
    imports = {name: module_imports(path) & modules.keys() for name, path in modules.items()}
    listed = []
    for folder in sorted({path.parent for path in paths}):
        prefix = _dotted(folder / "__init__.py") + "."
        inside = {
            name: name.removeprefix(prefix).split(".")[0] for name in modules if name.startswith(prefix)
        }
        arrows: dict[str, set[str]] = {thing: set() for thing in inside.values()}
        for name, thing in inside.items():
            arrows[thing] |= {inside[imported] for imported in imports[name] if imported in inside} - {thing}
        if arrows:
            frozen = {thing: frozenset(targets) for thing, targets in arrows.items()}
            listed.append(Folder(prefix.rstrip(".").replace(".", "/"), frozen))
    return listed


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def executed_by_a_step() -> tuple[int, int]:
    """How many functions of the package, in how many files, one step of the README's demo runs."""
    from stateset_agents.training.experiment import Experiment, load_experiment

    codes = set()
    is_counting = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        if is_counting and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            codes.add(frame.f_code)

    async def step() -> None:
        nonlocal is_counting
        with tempfile.TemporaryDirectory() as folder:
            overrides = {"training.output_dir": folder, "training.progress": False}
            experiment = Experiment(load_experiment(ROOT / "examples" / "demo.yaml", overrides))
            trainer = experiment.trainer
            await trainer.initialize()
            await trainer.step()  # what runs only once is not counted
            is_counting = True
            await trainer.step()
            is_counting = False
            await trainer.close()

    threading.setprofile(look)
    sys.setprofile(look)
    asyncio.run(step())
    sys.setprofile(None)
    named = {code for code in codes if not code.co_name.startswith("<")}
    return len(named), len({code.co_filename for code in named})


def import_times(pairs: int = 10) -> tuple[float, float]:
    """CPU seconds of `import torch` and of a trainer's import: medians of as many pairs, in turns."""
    torch, trainer = "import torch", "from stateset_agents.training.trainer import MultiTurnGRPOTrainer"
    seconds = [(_cpu_seconds(torch), _cpu_seconds(trainer)) for _ in range(pairs + 1)]
    torch_seconds, trainer_seconds = zip(*seconds[1:], strict=True)  # the first pair writes the bytecode
    return median(torch_seconds), median(trainer_seconds)


def _cpu_seconds(code: str) -> float:
    """CPU seconds that a fresh interpreter takes for this code."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tables(*, with_step: bool, with_import: bool = False) -> str:
    """Markdown."""
    listed = folders()
    circles = [folder.name for folder in listed if _is_circular(folder)]
    paths = list(PACKAGE.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    rows = [
        ("rooms at the top", str(len(listed[0].arrows))),
        ("floors at the top", str(listed[0].floors())),
        ("folders with a circle", ", ".join(circles) or "0"),
        ("circles of modules, imports for types included", " → ".join(circles_of_modules()) or "0"),
        ("imports of a room above", str(sum(len(imports_up(path)) for path in paths))),
        (
            "imports of a companion from below the doors",
            str(sum(len(imports_of_companions(path)) for path in paths)),
        ),
        ("files of Python", f"{len(paths):,}"),
        ("lines of Python", f"{lines:,}"),
        ("lines of code", f"{sum(map(lines_of_code, paths)):,}"),
    ]
    if with_step:
        functions, files = executed_by_a_step()
        rows.append(("what one step of the demo runs", f"{functions} functions in {files} files"))
    if with_import:
        torch, trainer = import_times()
        cost = f"{trainer:.2f} CPU seconds, {trainer / torch:.2f} times `import torch`"
        rows.append(("import of a trainer", cost))
    package = ["| the package | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    parts = ["| folder | things | floors | arrows |", "|---|---|---|---|"]
    for folder in listed:
        arrows = sum(map(len, folder.arrows.values()))
        parts.append(f"| `{folder.name}` | {len(folder.arrows)} | {folder.floors()} | {arrows} |")
    return "\n".join([*package, "", *parts, ""])


def _is_circular(folder: Folder) -> bool:
    try:
        folder.order()
    except CycleError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step", action="store_true", help="run one step of the demo and count")
    parser.add_argument("--import", dest="imports", action="store_true", help="time a trainer's import")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/architecture.md")
    chosen = parser.parse_args()
    text = tables(with_step=chosen.step or chosen.write, with_import=chosen.imports)
    if chosen.write:
        page = PAGE.read_text(encoding="utf-8")
        block = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
        PAGE.write_text(block.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page), encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
