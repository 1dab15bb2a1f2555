"""Loads of models in one process take turns, whoever begins them, and leave transformers as it was."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from warm_python import warm_python

import stateset_agents
from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.loading import load_backend
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.pretrained.load_lock import load_in_thread, loading, suppress_library_logs
from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer, load_tokenizer, model_folder
from stateset_agents.embedded.network import new_model
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.learner import TrlLearner
from stateset_agents.training.trl.settings import TrlSettings

GATHERED = """
import asyncio

from transformers import AutoModelForCausalLM, PreTrainedModel

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.pretrained.loading import model_folder

ties = PreTrainedModel.tie_weights


async def main():
    agents = [MultiTurnAgent(AgentConfig(model_name="embedded:desk")) for _ in range(4)]
    await asyncio.gather(*(agent.initialize() for agent in agents))
    await asyncio.gather(*(agent.close() for agent in agents))


asyncio.run(main())
assert PreTrainedModel.tie_weights is ties
models = [AutoModelForCausalLM.from_pretrained(model_folder("embedded:desk")) for _ in range(2)]
heads = [model.get_output_embeddings().weight for model in models]
assert heads[0] is models[0].get_input_embeddings().weight
assert bool((heads[0] == heads[1]).all())
"""


def test_four_agents_loaded_at_once_leave_loading_as_it_was() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*warm_python(), "-c", GATHERED], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    tiny_model("qwen3").save_pretrained(folder)
    tiny_tokenizer().hf.save_pretrained(folder)
    return folder


def trl_learner() -> None:
    settings = TrainingConfig(max_steps=1, num_generations=2, per_device_train_batch_size=1, beta=0.1)
    learner = TrlLearner(tiny_model(), tiny_tokenizer().hf, settings, TrlSettings(), max_new_tokens=4)
    learner.close()


def weights_of_a_folder(folder: Path) -> None:
    async def update() -> None:
        backend = HuggingFaceBackend(tiny_model("qwen3"), tiny_tokenizer())
        await backend.start()
        await backend.update_weights(folder, 1)
        await backend.close()

    asyncio.run(update())


def master_copy(folder: Path) -> None:
    backend: Any = asyncio.run(load_backend(str(folder), dtype="bf16"))
    assert backend.master_model().dtype == torch.float32


LOADS: dict[str, Callable[[Path], object]] = {
    "model": lambda folder: load_model_and_tokenizer(str(folder)),
    "tokenizer": lambda folder: load_tokenizer(str(folder)),
    "backend": lambda folder: asyncio.run(load_backend(str(folder))),
    "weights of a folder": weights_of_a_folder,
    "master copy": master_copy,
    "TRL's reference": lambda folder: trl_learner(),
    "embedded model": lambda folder: new_model(tiny_tokenizer().hf, seed=0),
}


@pytest.mark.parametrize("name", LOADS)
def test_each_load_waits_for_the_one_under_way(name: str, tied: Path) -> None:
    failed: list[BaseException] = []

    def load() -> None:
        try:
            LOADS[name](tied)
        except BaseException as error:
            failed.append(error)

    start = time.monotonic()
    load()
    once = time.monotonic() - start  # with what was imported for the first time
    thread = threading.Thread(target=load)
    with loading():
        thread.start()
        thread.join(min(once, 2.0) + 0.2)
        assert thread.is_alive(), failed
    thread.join(60)
    assert not thread.is_alive()
    assert failed == []


def _loads_outside(code: str) -> list[int]:
    """Lines that have transformers load or build a model outside of a `with loading()`."""
    if not re.search(r"from_pretrained|from_config|ForCausalLM|ConversationTrainer", code):
        return []
    tree = ast.parse(code)
    inside = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and any("loading()" in ast.unparse(item) for item in block.items)
        for node in ast.walk(block)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in inside]
    names = [(call.lineno, ast.unparse(call.func)) for call in calls]
    return [line for line, name in names if LOADS_A_MODEL.search(name)]


LOADS_A_MODEL = re.compile(r"\.(_?from_config|from_pretrained)$|ForCausalLM$|^ConversationTrainer$")


def test_nothing_of_ours_loads_a_model_without_the_lock() -> None:
    assert _loads_outside("with other():\n    AutoModel.from_pretrained(x)") == [2]
    package = Path(stateset_agents.__file__).parent
    observed = {
        f"{path.relative_to(package)}:{line}"
        for path in package.rglob("*.py")
        for line in _loads_outside(path.read_text())
    }
    assert observed == set()


async def test_loads_that_wait_leave_the_event_loop_and_its_threads_alone(tied: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        with loading():
            inside.set()
            go_on.wait(60)

    first = asyncio.create_task(asyncio.to_thread(slow))
    await asyncio.to_thread(inside.wait, 60)
    agents = [MultiTurnAgent(AgentConfig(model_name=str(tied))) for _ in range(40)]
    loads = [asyncio.create_task(agent.initialize()) for agent in agents]
    async with asyncio.timeout(5):  # asyncio has fewer threads than that: they'd all wait
        for _ in range(10):
            await asyncio.to_thread(int)
    for load in loads[1:]:
        load.cancel()
    await asyncio.gather(*loads[1:], return_exceptions=True)
    go_on.set()
    await asyncio.gather(first, loads[0])
    await agents[0].close()


async def test_a_cancelled_load_lets_the_next_one_begin_and_never_runs_where_it_had_not_begun() -> None:
    begun, go_on, ran = threading.Event(), threading.Event(), []

    def under_way() -> None:
        with loading():
            begun.set()
            go_on.wait(60)

    first = asyncio.create_task(load_in_thread(under_way))
    queued = asyncio.create_task(load_in_thread(lambda: ran.append("queued")))
    last = asyncio.create_task(load_in_thread(lambda: ran.append("last")))
    await asyncio.to_thread(begun.wait, 60)
    first.cancel()
    queued.cancel()
    await asyncio.gather(first, queued, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(60):
        await last
    assert ran == ["last"]


def test_talk_comes_back_once_the_last_of_those_at_work_has_ended() -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    first, second = suppress_library_logs(), suppress_library_logs()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.ERROR
    second.__exit__(None, None, None)
    assert logger.level == before


def test_the_shipped_model_ties_its_head() -> None:
    """Else the first test of this file would show nothing."""
    model, _ = load_model_and_tokenizer(model_folder("embedded:desk"))
    assert model.config.tie_word_embeddings
