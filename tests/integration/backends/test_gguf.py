"""A GGUF file as a model: the weights, the tokenizer and the template of the file, saved like any other."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from command_line import the_line
from gguf_files import OWN_TEMPLATE, tiny_llama, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.pretrained import loading as gguf_files
from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer, load_tokenizer, model_folder
from stateset_agents.cli.main import main
from stateset_agents.types.errors import ConfigurationError

IDS = torch.tensor([[104, 5, 260, 263, 17, 99, 262, 264]])
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama())
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_the_model_is_the_one_that_was_written(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model_and_tokenizer(str(file))
    assert torch.equal(logits(model), logits(tiny_llama()))
    assert model.config.max_position_embeddings == 256
    assert model.name_or_path == str(file)
    assert tokenizer.eos_ids == load_tokenizer(str(file)).eos_ids == (264,)
    assert tokenizer.hf.chat_template == OWN_TEMPLATE
    assert tokenizer.encode("he") == [262]
    assert tokenizer.encode_markup("<|im_end|>") == [264]
    assert tokenizer.decode(tokenizer.encode("Zürich, 12")) == "Zürich, 12"
    assert capfd.readouterr().err == ""  # no progress bar


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_weights_are_unpacked(kind: str, tmp_path: Path) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), kind=quantised)
    expected = tiny_llama()
    for tensor in expected.state_dict().values():
        if tensor.ndim == 2:
            packed = gguf.quants.quantize(tensor.numpy(), quantised)  # in rows, so RoPE's order plays no part
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, quantised)))
    for dtype, tolerance in (("fp32", 1e-5), ("bf16", 0.2)):
        model, _ = load_model_and_tokenizer(str(tmp_path / "tiny.gguf"), dtype=dtype)  # type: ignore[arg-type]  # a literal
        assert torch.allclose(logits(model).float(), logits(expected), atol=tolerance)
        assert {parameter.dtype for parameter in model.parameters()} == {model.dtype}


async def test_it_is_saved_like_any_other_model(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MultiTurnAgent(AgentConfig(model_name=str(file), max_new_tokens=4)) as agent:
        assert agent.backend.running.name == "lean"  # type: ignore[attr-defined]  # of the local backend
        said = await agent.generate_response("hi")
        await agent.save_pretrained(tmp_path)
    names = set(os.listdir(tmp_path))
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    config = json.loads((tmp_path / "config.json").read_text())
    assert not [name for name in config if "quant" in name]
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)  # gguf is no longer needed
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(tiny_llama()))
    expected = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.apply_chat_template(HI, tokenize=False) == expected.apply_chat_template(HI, tokenize=False)
    async with MultiTurnAgent(AgentConfig(model_name=str(tmp_path), max_new_tokens=4)) as agent:
        assert await agent.generate_response("hi") == said
    assert "`tiny.gguf`" in (tmp_path / "README.md").read_text()


RUN = """
agent: {model_name: models/tiny.gguf, max_new_tokens: 4}
environment: {name: conversation, scenarios: [{opening: hi}, {opening: hello}], max_turns: 1}
reward: rewards:last_token
training: {max_steps: 1, num_generations: 4, per_device_train_batch_size: 1, learning_rate: 0.01}
"""


def test_a_training_of_it_saves_plain_safetensors(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    shutil.copy(file, tmp_path / "models" / "tiny.gguf")
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rewards.py").write_text(
        "def last_token(trajectory):\n    return trajectory.turns[-1].completion.token_ids[-1] / 256\n"
    )
    monkeypatch.chdir(file.parent)  # the file's paths start from the settings file
    assert (
        main(["train", str(tmp_path / "run.yaml"), "--set", f"training.output_dir={tmp_path / 'runs'}"]) == 0
    )
    [saved] = tmp_path.glob("runs/0001-*/checkpoints/step-000001/model")
    trained = AutoModelForCausalLM.from_pretrained(saved)
    before = tiny_llama().state_dict()
    assert trained.state_dict().keys() == before.keys()
    assert not torch.equal(trained.lm_head.weight, before["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(saved).chat_template == OWN_TEMPLATE


@pytest.mark.parametrize("missing", [{"gguf"}, {"accelerate"}, {"gguf", "accelerate"}])
def test_without_the_extra_one_line_names_it(
    missing: set[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gguf_files.find_spec
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None if name in missing else found(name))
    code = main(["serve", str(file)])
    line = the_line(code, capsys.readouterr().err)
    names = " and ".join(name for name in ("gguf", "accelerate") if name in missing)
    assert line == f'reading {str(file)!r} needs {names}: pip install "gguf>=0.18" "accelerate>=1"'


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: b"not a model" * 99,
        lambda data: b"GGUF" + b"\xff" * 999,
    ],
    ids=["truncated", "a stump", "empty", "foreign", "garbage"],
)
def test_a_damaged_file_is_one_line(spoil: Any, file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "tiny.gguf"
    damaged.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(
        ConfigurationError, match=r"cannot load a model from .*; give a whole GGUF file"
    ) as caught:
        load_model_and_tokenizer(str(damaged))
    assert "\n" not in str(caught.value)


def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), architecture="rwkv6")
    with pytest.raises(ConfigurationError, match=r"rwkv6 is not supported yet.*\); give a whole GGUF file"):
        load_model_and_tokenizer(str(tmp_path / "tiny.gguf"))


def test_the_folder_of_a_gguf_file_is_told_the_file(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_model_and_tokenizer(str(file.parent))
    assert str(caught.value).endswith(f"give a folder written by save_pretrained, or the file: {file}")


def test_a_file_that_is_not_there_is_not_looked_for_at_the_hub() -> None:
    for name in ("nowhere.gguf", "models/nowhere.gguf", "hf:models/nowhere.GGUF"):
        with pytest.raises(
            ConfigurationError, match=r"model file '.*' does not exist; give a GGUF file's path"
        ):
            model_folder(name)
