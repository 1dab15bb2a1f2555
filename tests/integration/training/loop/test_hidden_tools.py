"""Tools that a chat template does not list: an error before the first turn, wherever the agent is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from command_line import without_warnings
from gguf_files import OWN_TEMPLATE, tiny_llama, write_gguf

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer
from stateset_agents.cli.main import main
from stateset_agents.serving.server import AgentServer

REFUSED = (
    "the chat template does not tell the model which tools there are; set "
    'AgentConfig(chat_template="chatml") or give a template that does, or, where the system prompt names '
    "them or the model knows them by heart, AgentConfig(allow_hidden_tools=True)"
)
SHOP = """
from stateset_agents import ConversationEnvironment, tool

@tool
def look(at: str) -> str:
    "Looks."
    return "found"

def make():
    scenarios = [{"opening": split, "split": split} for split in ("train", "test")]
    return ConversationEnvironment(scenarios, tools=[look], max_turns=1)

def last_token(trajectory):
    return trajectory.turns[-1].completion.token_ids[-1] / 256
"""
RUN = """
agent: {model_name: ./model, max_new_tokens: 4}
environment: shop:make
reward: shop:last_token
training: {max_steps: 1, num_generations: 4, per_device_train_batch_size: 1, learning_rate: 0.01}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    model, tokenizer = load_model_and_tokenizer(str(tmp_path / "tiny.gguf"))
    assert tokenizer.hf.chat_template == OWN_TEMPLATE
    model.save_pretrained(tmp_path / "model")
    tokenizer.hf.save_pretrained(tmp_path / "model")
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("verb", ["train", "train by TRL", "evaluate"])
def test_a_run_with_tools_that_are_not_listed_is_refused_unless_that_is_allowed(
    verb: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if verb == "train by TRL":
        (folder / "run.yaml").write_text(RUN + "trl: {}\n")
    command = [verb.split()[0], str(folder / "run.yaml")]
    into = ["--set", f"training.output_dir={folder / 'runs'}"]
    assert main([*command, *into]) == 1
    lines = without_warnings(capsys.readouterr().err).splitlines()
    assert lines == [f"stateset-agents: {REFUSED}"]
    assert not list(folder.glob("runs/0001-*/checkpoints/step-000001"))
    assert main([*command, *into, "--set", "agent.allow_hidden_tools=true"]) == 0


async def test_the_server_refuses_a_request_with_tools(folder: Path) -> None:
    look: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    hi: Any = [{"role": "user", "content": "hi"}]
    for allowed in (False, True):
        settings = AgentConfig(model_name=str(folder / "model"), max_new_tokens=4, allow_hidden_tools=allowed)
        async with (
            MultiTurnAgent(settings) as agent,
            AgentServer(agent, name="tiny") as server,
            openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        ):
            assert (await client.chat.completions.create(model="tiny", messages=hi)).choices
            if allowed:
                assert (await client.chat.completions.create(model="tiny", messages=hi, tools=[look])).choices
                continue
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=hi, tools=[look])
            assert REFUSED in str(caught.value)
