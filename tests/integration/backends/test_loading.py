"""Models by name, weights in and out, and what the backend refuses to serve."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_of_at_most
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from stateset_agents.backends.base import Session
from stateset_agents.backends.loading import load_backend
from stateset_agents.backends.local.backend import HuggingFaceBackend, _read_folder
from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer, model_folder
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import SamplingParams, VersionSpan

PARAMS = SamplingParams(max_new_tokens=6, stream=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model("qwen3")
    model.generation_config.eos_token_id = [257, 259]
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("prefix", ["", "hf:"])
async def test_a_folder_loads_with_all_its_end_of_turn_ids(folder: Path, prefix: str) -> None:
    backend = await load_backend(f"{prefix}{folder}")
    assert backend.tokenizer.eos_ids == (257, 259)
    assert backend.context_length == 256
    await backend.start()
    completion = await backend.generate([1, 2, 3], PARAMS)
    assert completion.version_spans == (VersionSpan(0, 0, len(completion.token_ids)),)
    await backend.close()


async def test_what_is_saved_loads_in_plain_transformers(folder: Path, tmp_path: Path) -> None:
    backend = await load_backend(str(folder))
    assert isinstance(backend, HuggingFaceBackend)
    backend.save_pretrained(tmp_path / "copy")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert model.generation_config.eos_token_id == [257, 259]
    for name, tensor in backend.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").encode("hi", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "model folder '/no/such/folder' does not exist; give a folder"),
        ("hf:./nowhere", "model folder './nowhere' does not exist"),
        ("no-such-model-anywhere", "cannot load a model from 'no-such-model-anywhere'"),
        ("embedded:nothing", "no embedded model 'embedded:nothing'; shipped:"),
        ("", "model folder '' does not exist"),
    ],
)
async def test_a_model_that_is_not_there_is_named_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await load_backend(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


async def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot load a model from"):
        await load_backend(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"not a model" * 9],
    ids=["truncated", "empty", "foreign"],
)
async def test_a_model_file_that_cannot_be_read_is_one_line(folder: Path, content: Any) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"cannot load a model from .*; give a folder") as caught:
        await load_backend(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
async def test_a_damaged_description_is_one_line(folder: Path, file: str) -> None:
    (folder / file).write_text('{"half":')
    with pytest.raises(ConfigurationError, match=r"cannot load a model from .*; give a folder") as caught:
        await load_backend(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.first(5)
@pytest.mark.parametrize(
    ("file", "odd", "told"),
    [
        ("config.json", {"hidden_size": "x"}, "hidden_size"),
        ("config.json", {"head_dim": 0}, "negative power"),
        (
            "config.json",
            {"num_hidden_layers": 20_000, "layer_types": ["full_attention"] * 20_000},
            "num_hidden_layers must be at most 10,000",
        ),
        ("generation_config.json", {"eos_token_id": [[1]]}, r"eos_token_id .* got \[\[1\]"),
        ("tokenizer_config.json", {"tokenizer_class": [1]}, "tokenizer"),
        ("config.json", {"dtype": "x"}, "has no attribute 'x'"),
        ("config.json", {"vocab_size": -1}, "Padding_idx"),
        ("config.json", {"rope_parameters": 3}, "rope_parameters"),
        ("tokenizer_config.json", {"added_tokens_decoder": 0}, "tokenizer"),
    ],
)
async def test_settings_that_cannot_be_are_one_line(
    folder: Path, file: str, odd: dict[str, Any], told: str
) -> None:
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **odd}))
    with pytest.raises(ConfigurationError, match=told) as caught:
        await load_backend(str(folder))
    assert "\n" not in str(caught.value)


def without(*names: str) -> Any:
    return lambda folder: [file.unlink() for file in folder.iterdir() if any(n in file.name for n in names)]


def pickled(folder: Path) -> None:
    without("model.safetensors")(folder)
    torch.save({"weights": _RunsOnLoading(folder / "executed")}, folder / "pytorch_model.bin")


class _RunsOnLoading:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        "model_type": "own",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")


def other_shapes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("config"), "it has no config.json); give a folder written by save_pretrained"),
        (without(""), "it has no config.json); give a folder written by save_pretrained"),
        (
            without("token"),
            "it has no tokenizer); tokenizer.save_pretrained adds one",
        ),
        (without("safetensors"), "model: Error no file named model.safetensors"),
        (
            pickled,
            "its .bin file holds more than weights, and loading it would run code); give a folder with",
        ),
        (own_code, "its architecture is code of its own, which is not run); give one that transformers has"),
        (
            other_shapes,
            "the weights have other shapes than config.json says); give weights and config.json of",
        ),
    ],
)
async def test_a_folder_that_is_not_whole_says_what_it_lacks_and_runs_nothing(
    folder: Path, spoil: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    capfd.readouterr()
    with pytest.raises(ConfigurationError) as caught:
        await load_backend(str(folder))
    assert str(caught.value).startswith(f"cannot load a model from {str(folder)!r} ({message}")
    assert "\n" not in str(caught.value)
    assert not (folder / "executed").exists()
    assert capfd.readouterr().err == ""


async def test_a_bin_file_of_plain_weights_loads(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    await load_backend(str(folder))


async def test_a_model_named_by_its_file_is_told_to_name_the_folder(folder: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"model\.safetensors' is a file, and no .gguf; give the folder it stands in"
    ):
        await load_backend(str(folder / "model.safetensors"))


async def test_weights_that_have_no_place_in_the_model_are_told_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "score.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    await load_backend(str(folder))
    assert "1 weights in" in caplog.text
    assert "have no place in a Qwen3ForCausalLM: score.weight" in caplog.text


async def test_a_full_disk_is_one_line_when_a_model_is_saved(folder: Path, tmp_path: Path) -> None:
    backend = await load_backend(str(folder))
    assert isinstance(backend, HuggingFaceBackend)
    for limit in (100, 4000, 80_000):  # the config, the tokenizer and the weights do not fit
        with files_of_at_most(limit), pytest.raises(BackendError, match="cannot save the model to") as caught:
            backend.save_pretrained(tmp_path / "copy")
        assert str(caught.value).endswith("free the disk or choose another folder")


async def test_weights_of_another_model_are_refused_instead_of_left_random(folder: Path) -> None:
    save_file({"other.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"not those of a Qwen3ForCausalLM: .* is missing \(\d+ in"):
        await load_backend(str(folder))
    model = tiny_model("llama")  # same names, other shapes
    tensors = {name: tensor[:3].clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match="cannot load a model from"):
        await load_backend(str(folder))


@pytest.mark.long
def test_a_hub_name_out_of_reach_is_told_once(tmp_path: Path) -> None:
    program = (
        "import asyncio, time\n"
        "time.sleep = lambda seconds: print('slept')  # the client waits between its retries\n"
        "from stateset_agents.backends.loading import load_backend\n"
        "asyncio.run(load_backend('nobody/no-such-model'))\n"
    )
    nowhere = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot load a model from 'nobody/no-such-model': the hub does not answer (Conn" in done.stderr
    assert "and there is no copy here; see to the network" in done.stderr
    assert "slept" not in done.stdout
    assert "Retrying in" not in done.stderr.split("Traceback")[0]


async def test_a_model_that_is_cached_is_loaded_while_the_hub_is_out_of_reach(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--nobody--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    for constant in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{constant}", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("the client tried again"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    backend = await load_backend("nobody/tiny")
    assert isinstance(backend, HuggingFaceBackend)


async def test_unknown_devices_and_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="device must be auto, cpu, cuda or cuda:N, got 'tpu'"):
        await load_backend(str(folder), device="tpu")
    with pytest.raises(ConfigurationError, match="dtype must be one of auto, fp32, bf16, fp16, got 'fp8'"):
        await load_backend(str(folder), dtype="fp8")  # type: ignore[arg-type]  # the mistake under test


async def test_scripted_takes_its_script_and_needs_one() -> None:
    assert isinstance(await load_backend("scripted", script=["hi"]), ScriptedBackend)
    with pytest.raises(ConfigurationError, match="needs its replies"):
        await load_backend("scripted")


async def test_bf16_generates_and_keeps_its_dtype(folder: Path) -> None:
    backend = await load_backend(str(folder), dtype="bf16")
    assert isinstance(backend, HuggingFaceBackend)
    assert backend.model.dtype == torch.bfloat16
    await backend.start()
    completion = await backend.generate([1, 2, 3], PARAMS)
    assert len(completion.logprobs) == len(completion.token_ids) > 0
    await backend.close()


async def test_the_backend_keeps_its_own_weights_and_its_own_mode() -> None:
    model = tiny_model("llama").train()
    backend = HuggingFaceBackend(model, tiny_tokenizer())
    await backend.start()
    before = await backend.score([1, 2, 3])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert await backend.score([1, 2, 3]) == before
    assert model.training
    assert not backend.model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    await backend.close()


@pytest.mark.parametrize("as_folder", [False, True])
async def test_new_weights_serve_the_next_turn_and_refill_its_history(
    tmp_path: Path, as_folder: bool
) -> None:
    old, new = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    backend = HuggingFaceBackend(old, tiny_tokenizer(), scheduling="throughput")
    await backend.start()
    first = await backend.generate([1, 2, 3], PARAMS, session=Session(0, 0))
    new.save_pretrained(tmp_path)
    await backend.update_weights(tmp_path if as_folder else new.state_dict(), 5)
    assert backend.version == 5
    prompt = [*first.prompt_ids, *first.token_ids, 9]
    second = await backend.generate(prompt, PARAMS, session=Session(0, 0))
    assert second.version_spans == (VersionSpan(5, 0, len(second.token_ids)),)
    ids = torch.tensor([[*prompt, *second.token_ids]])
    with torch.no_grad():
        plain = new.eval()(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert second.logprobs == pytest.approx(plain[len(prompt) - 1 :].tolist(), abs=1e-4)
    await backend.close()


async def test_weights_that_change_in_the_middle_of_a_turn_show_in_its_spans() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer(), scheduling="throughput")
    await backend.start()
    long = SamplingParams(max_new_tokens=200, stream=1)
    turns = [asyncio.create_task(backend.generate([m], long, session=Session(0, m))) for m in range(9)]
    await asyncio.sleep(0.03)
    await backend.update_weights(tiny_model("llama", seed=1).state_dict(), 1)
    completions = await asyncio.gather(*turns)
    assert any(len(completion.version_spans) == 2 for completion in completions)
    await backend.close()


async def test_wrong_weights_are_refused_and_change_nothing() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer())
    await backend.start()
    before = await backend.score([1, 2, 3])
    with pytest.raises(BackendError, match="lack"):
        await backend.update_weights(tiny_model("gpt2").state_dict(), 1)
    state = dict(tiny_model("llama", seed=1).state_dict())
    state["model.norm.weight"] = torch.ones(3)
    with pytest.raises(BackendError, match=r"model.norm.weight of shape \(3,\)"):
        await backend.update_weights(state, 1)
    with pytest.raises(BackendError, match="no weights to load"):
        await backend.update_weights(Path("/no/such/folder"), 1)
    assert await backend.score([1, 2, 3]) == before
    assert backend.version == 0
    await backend.close()


async def test_tied_weights_need_one_of_their_names_only() -> None:
    backend = HuggingFaceBackend(tiny_model("qwen3"), tiny_tokenizer())
    await backend.start()
    state = {
        name: tensor for name, tensor in tiny_model("qwen3", 1).state_dict().items() if "lm_head" not in name
    }
    await backend.update_weights(state, 1)
    await backend.close()


async def test_scoring_needs_tokens_and_a_temperature(folder: Path) -> None:
    backend = HuggingFaceBackend(*load_model_and_tokenizer(str(folder)), copy_model=False)
    await backend.start()
    assert await backend.score([4]) == []
    assert len(await backend.score([4, 5, 6], temperature=0.5)) == 2
    with pytest.raises(BackendError, match="temperature above 0"):
        await backend.score([4, 5], temperature=0.0)
    with pytest.raises(BackendError, match="1 to 256 tokens, got 257"):
        await backend.score([4] * 257)
    await backend.close()


def test_a_folder_that_was_meant_is_not_looked_for_at_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("starter", "runs/0001-desk"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    for name, meant in (("starter1", "starter"), ("runs/0001", "runs/0001-desk"), ("./startr", "starter")):
        with pytest.raises(ConfigurationError) as error:
            model_folder(name)
        assert f"model folder {name!r} does not exist (did you mean {meant!r}?); give a" in str(error.value)
    with pytest.raises(ConfigurationError, match=r"hf:runs/else asks the hub for it"):
        model_folder("runs/else")
    assert model_folder("hf:starter1") == "starter1"
    assert model_folder("gpt2") == "gpt2"


def test_weights_are_read_from_a_folder_without_progress_bars(tmp_path, capsys):
    transformers_logging.enable_progress_bar()
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    assert "%" in capsys.readouterr().err  # transformers' own way
    assert _read_folder(tmp_path, model).keys() == model.state_dict().keys()
    assert capsys.readouterr().err == ""
