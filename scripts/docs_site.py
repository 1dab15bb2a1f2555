"""What MkDocs needs for our pages: files that stand outside docs/, and the reference of public names.

mkdocs.yml names this module as a hook; `make docs` runs it. A page may link anything in the repository: what
is not a page of docs/ becomes one of the site's `files/`, so that the site is whole without a network. A name
is public where a page, the README or an example imports it; each package has a page of its names.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
_SHIM = "iframe-worker/shim/index.js"
_FENCE = re.compile(r"^ *(```+|~~~+)")
_LINK = re.compile(r"(\]\()([^)\s]+)(\)|\s)")
_IMPORT = re.compile(r"from (stateset_agents[\w.]*) import (\([^)]*\)|[^\n#]*)")
_PROGRAM = re.compile(r"^ *```python.*?\n(.*?)^ *```", re.M | re.S)
_MARKS = re.compile(r"^( *```+\w+)(?: (?!title)[^\n]*?)?( title=\"[^\n]*)?$", re.M)
"""What the tests of pages read behind a program's language, such as `not-run`."""
_SHAPE = re.compile(r"(?<![\w`])((?:\[[^\]\n`]*\]){2,})(?!`|\()")
_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.M)
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".sh": "bash",
}
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Markdown whose links' targets are changed, except in code."""
    lines, fence = [], ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence:
            line = _LINK.sub(lambda link: link[1] + change(link[2]) + link[3], line)
        lines.append(line)
    return "\n".join(lines)


def linked(text: str) -> list[str]:
    """The targets of a page's links."""
    targets: list[str] = []

    def noted(target: str) -> str:
        targets.append(target)
        return target

    with_links(text, noted)
    return targets


def in_repository(target: str, origin: PurePosixPath) -> tuple[str, str]:
    """The path in the repository of a link's target, and its anchor; ("", "") for an address or an anchor."""
    path, mark, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return "", ""
    return os.path.normpath(origin.parent / unquote(path)), mark + anchor


def place(path: str) -> str:
    """The path in the site of a file of the repository."""
    inside = PurePosixPath(path)
    if inside.parts[0] == DOCS and (ROOT / inside).is_file():
        return str(inside.relative_to(DOCS))
    return f"files/{path}.md"


def moved(target: str, origin: PurePosixPath) -> str:
    """A link's target as the site needs it."""
    path, anchor = in_repository(target, origin)
    if not path:
        return target
    return os.path.relpath(place(path), PurePosixPath(place(str(origin))).parent) + anchor


def page_of(path: Path) -> str:
    """A page that shows a file or a folder of the repository."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if not each.name.startswith(("_", ".")))
        return f"{_HIDDEN}# {name}/\n\n" + "\n".join(f"- `{each}`" for each in files)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"{_HIDDEN}# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"


def outside(pages: list[str]) -> Iterator[tuple[str, str]]:
    """The paths and texts of what pages link outside docs/, and of what those link."""
    waiting, visited = list(pages), set(pages)
    while waiting:
        origin = waiting.pop()
        text = page_of(ROOT / origin)
        if not origin.startswith(f"{DOCS}/"):
            yield origin, text
        if not origin.endswith(".md"):
            continue
        for target in linked(text):
            path, _ = in_repository(target, PurePosixPath(origin))
            if path and path not in visited and (ROOT / path).exists():
                visited.add(path)
                if place(path).startswith("files/") or path.endswith(".md"):
                    waiting.append(path)


def home(module: str, name: str) -> str:
    """The module that a name is defined in, by which griffe finds it."""
    value = getattr(importlib.import_module(module), name)
    defined = getattr(value, "__module__", None) or module
    if inspect.ismodule(value):
        return value.__name__
    is_there = str(defined).startswith("stateset_agents") and hasattr(sys.modules[defined], name)
    return f"{defined if is_there else module}.{name}"


@cache
def _package() -> Any:
    return griffe.load("stateset_agents", search_paths=[str(ROOT)])


def is_written(path: str) -> bool:
    """True where griffe finds a name without importing its module."""
    try:
        _package()[path.removeprefix("stateset_agents.")]
    except (KeyError, AttributeError):
        return False
    return True


def public_names() -> dict[str, dict[str, set[str]]]:
    """The names that pages and examples import: by package, then by module."""
    packages: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    sources = [*(ROOT / DOCS).rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]
    for source in sources:
        text = source.read_text(encoding="utf-8")
        program = text if source.suffix == ".py" else "\n".join(_PROGRAM.findall(text))
        for module, names in _IMPORT.findall(program):
            package = module.removeprefix("stateset_agents").strip(".").split(".")[0]
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                packages[package][module].add(name)
                defined = home(module, name).rpartition(".")[0]
                packages[defined.split(".")[1]][defined].add(name)
    return packages


def reference(package: str, modules: dict[str, set[str]]) -> str:
    """The page of a package: each public name with its docstring."""
    title = f"stateset_agents.{package}" if package else "stateset_agents"
    lines = [f"# {title}", ""]
    for module in sorted(modules):
        homes = {name: home(module, name) for name in sorted(modules[module])}
        lines += [f"## {module}", ""]
        for name, path in homes.items():
            if not is_written(path):
                lines += [f"- `{name}`", ""]  # made as the module is imported: it has no docstring
            elif path == f"{module}.{name}" and package:
                lines += [f"::: {path}", ""]
            else:
                lines += [f"- [`{name}`][{path}]", ""]
    return "\n".join(lines)


class Docstrings(griffe.Extension):  # type: ignore[misc]  # not installed where mypy runs
    """Keeps shapes such as [groups][members] from being read as links, and examples from being text."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring is not None:
            shaped = _SHAPE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", shaped)


# ------------------------------------------------------------------------------ what MkDocs calls


def on_config(config: Any) -> Any:
    """List every page of measurements in the navigation."""
    evidence = sorted(path.name for path in (ROOT / DOCS / "evidence").glob("*.md"))
    for section in config.nav:
        if isinstance(section, dict) and "Evidence" in section:
            section["Evidence"] = [f"evidence/{name}" for name in evidence]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link, and the reference."""
    pages = [f"{DOCS}/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    for path, text in outside(pages):
        files.append(File.generated(config, place(path), content=text))
    packages = public_names()
    for package, modules in packages.items():
        name = f"reference/{package or 'stateset_agents'}.md"
        files.append(File.generated(config, name, content=reference(package, modules)))
    index = "\n".join(
        f"- [`{module}`]({package or 'stateset_agents'}.md): "
        + ", ".join(f"`{name}`" for name in sorted(names))
        for package, modules in sorted(packages.items())
        for module, names in sorted(modules.items())
    )
    shim = File(_SHIM, str(ROOT / "build/npm/node_modules"), config.site_dir, use_directory_urls=False)
    files.append(shim)
    text = f"# Names\n\nEvery public name, by the module to import it from.\n\n{index}\n"
    files.append(File.generated(config, "reference/index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point a page's links to where the site has their targets."""
    src = page.file.src_uri
    if src.startswith("reference/"):
        return markdown
    origin = src.removeprefix("files/").removesuffix(".md") if src.startswith("files/") else f"{DOCS}/{src}"
    markdown = _MARKS.sub(r"\1\2", markdown).replace("```console", "```bash")
    return with_links(markdown, lambda target: moved(target, PurePosixPath(origin)))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the search, and leave out headers that say nothing, for readers who hear the page."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"').replace(
        "<th></th>", "<td></td>"
    )
