"""What holds for every test: one torch thread, no network, and skips only where a GPU is missing."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter

# A shell's background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: the workers of `pytest -n` share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import warm_python
from hypothesis import HealthCheck, settings

# How fast a machine draws examples says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", patient, max_examples=30)
settings.register_profile("thorough", patient, max_examples=100)
settings.load_profile("suite")

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="A skipped test fails, unless it is marked gpu and there is none",
    )
    parser.addoption("--every-case", action="store_true", help="first(n) leaves no case out")


_PROGRAMS = pytest.StashKey[Any]()


def pytest_collection(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        gc.disable()  # until all is imported: what is made meanwhile stays


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.stash[_PROGRAMS] = warm_python.start()  # one for all workers; it imports at the first request


def pytest_unconfigure(config: pytest.Config) -> None:
    if _PROGRAMS in config.stash:
        warm_python.stop(config.stash[_PROGRAMS])


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        _mark_long_beyond_the_first(items)
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    if waiting:
        import torch

        if not torch.cuda.is_available():
            for item in waiting:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _mark_long_beyond_the_first(items: list[pytest.Item]) -> None:
    """Of a test with `first(n)`, the cases after the first n that are not long anyway."""
    seen: Counter[str] = Counter()
    for item in items:
        first = item.get_closest_marker("first")
        if first is not None and not item.get_closest_marker("long"):
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > first.args[0]:
                item.add_marker(pytest.mark.long)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a quarter of a test's time is waiting."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a test need not go through eight thousand of them, torch and transformers
    gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)  # a full one takes a second; see the next function


_FINISHED: Counter[str] = Counter()


def pytest_runtest_logfinish() -> None:
    """Collect all garbage between two tests now and then, and never while one of them is timed."""
    _FINISHED["tests"] += 1
    if _FINISHED["tests"] % 200 == 0:
        gc.collect()


_FROM_ELSEWHERE: set[str] = set()
"""Names of modules that were seen not to be a test's own; there are thousands."""


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in a test's own folders, and the way to them, are forgotten: others may use their names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    below = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - _FROM_ELSEWHERE:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(below):
            del sys.modules[name]
        else:
            _FROM_ELSEWHERE.add(name)


def _refuse_skip(report: Any, allowed: bool) -> None:
    if report.skipped and not allowed and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if item.config.getoption("--no-skips"):
        _refuse_skip(report, allowed=item.get_closest_marker("gpu") is not None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if collector.config.getoption("--no-skips"):
        _refuse_skip(report, allowed=False)
    return report
