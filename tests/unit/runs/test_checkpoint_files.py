"""Checkpoints: whole or absent, checked file by file, free of pickle, and readable by plain transformers."""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import same_bits
from transformers import AutoModelForCausalLM

from stateset_agents.runs.checkpoint_files import (
    Checkpoint,
    fingerprint,
    latest_checkpoint,
    load_checkpoint,
    prune,
    remove_after,
    save_checkpoint,
)
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import CheckpointError


def learner_of(family="llama"):
    learner = Learner(tiny_model(family), TrainingConfig(beta=0.0), num_steps=5, exact_logprobs=True)
    loss = learner.policy.model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().mean()
    learner.optimization.backward(loss)
    learner.optimization.step()  # so that there are moments to keep
    return learner


def save(folder, learner=None, step=3, **state):
    learner = learner or learner_of()
    checkpoint = Checkpoint(step=step, weights=learner.weights(), optimizer=learner.state(), state=state)
    return save_checkpoint(folder, checkpoint, write_model=learner.write_model_files)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_saved_comes_back_in_every_bit(tmp_path):
    learner = learner_of()
    path = save(tmp_path, learner, frontier=12, settings={"beta": 0.1})
    loaded = load_checkpoint(path)
    assert loaded.step == 3
    assert (loaded.state["frontier"], loaded.state["settings"]) == (12, {"beta": 0.1})
    assert same_bits(dict(loaded.weights), learner.weights())
    twin = Learner(tiny_model(seed=1), TrainingConfig(beta=0.0), num_steps=5, exact_logprobs=True)
    twin.restore(loaded.weights, loaded.optimizer)
    assert same_bits(twin.weights(), learner.weights())
    own, others = (one.state()["optimizer"] for one in (learner, twin))
    assert own["param_groups"] == [
        {**group, "betas": tuple(group["betas"])} for group in others["param_groups"]
    ]
    assert all(same_bits(own["state"][index], others["state"][index]) for index in own["state"])
    assert twin.optimization.num_updates == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])  # the last two have tied embeddings
def test_plain_transformers_loads_the_model_folder(tmp_path, family):
    learner = learner_of(family)
    path = save(tmp_path, learner)
    model: Any = AutoModelForCausalLM.from_pretrained(path / "model").eval()
    ids = torch.tensor([[5, 6, 7]])
    assert model.dtype is torch.float32
    assert torch.equal(model(ids).logits, learner.policy.model.eval()(ids).logits)


def test_tied_embeddings_are_stored_once_and_come_back_tied(tmp_path):
    learner = learner_of("qwen3")
    loaded = load_checkpoint(save(tmp_path, learner))
    missing = learner.weights().keys() - loaded.weights.keys()
    assert missing == {"lm_head.weight"}
    twin = Learner(tiny_model("qwen3", seed=1), TrainingConfig(beta=0.0), num_steps=5, exact_logprobs=True)
    twin.restore(loaded.weights, loaded.optimizer)
    assert same_bits(twin.weights(), learner.weights())
    model = twin.policy.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_master_weights_of_a_half_precision_model_say_that_they_are_fp32(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    learner = Learner(model, TrainingConfig(beta=0.0), num_steps=5, exact_logprobs=False)
    path = save(tmp_path, learner)
    assert AutoModelForCausalLM.from_pretrained(path / "model").dtype is torch.float32
    assert model.config.dtype is torch.bfloat16


def test_no_file_of_it_is_a_pickle(tmp_path):
    path = save(tmp_path)
    contents = files(path)
    assert {"manifest.json", "state.json", "optimizer.safetensors", "model/model.safetensors"} <= set(
        contents
    )
    for name, content in contents.items():
        assert not zipfile.is_zipfile(io.BytesIO(content)), name  # torch.save writes zip files
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)):
            pickle.loads(content)


def test_a_truncated_file_is_named(tmp_path):
    path = save(tmp_path)
    weights = path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model/model\.safetensors is truncated or altered"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "model/config.json"])
def test_an_altered_byte_is_found(tmp_path, name):
    path = save(tmp_path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is truncated or altered"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_missing_file_is_named(tmp_path, name):
    path = save(tmp_path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 9, "files": {}}']
)
def test_a_manifest_that_says_nothing_is_no_manifest(tmp_path, text):
    path = save(tmp_path)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_a_damaged_checkpoint_names_the_one_to_go_on_from(tmp_path):
    older, newest = save(tmp_path, step=2), save(tmp_path, step=4)
    (newest / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"resume from {older}$"):
        load_checkpoint(newest)
    prune(tmp_path, 1)
    with pytest.raises(CheckpointError, match="there is no other one: train again"):
        load_checkpoint(newest)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        load_checkpoint(tmp_path / "step-000009")


def test_a_write_that_fails_leaves_the_checkpoint_before_it_and_no_debris(tmp_path):
    before = save(tmp_path, step=3, note="first")
    content = files(before)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a file may have no more: a full disk
    try:
        for step in (3, 4):
            with pytest.raises(CheckpointError, match="free the disk or choose another output_dir"):
                save(tmp_path, step=step, note="second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    assert files(before) == content


def test_a_checkpoint_of_the_same_step_is_replaced_whole(tmp_path):
    save(tmp_path, note="first")
    path = save(tmp_path, note="second")
    assert load_checkpoint(path).state["note"] == "second"
    assert [one.name for one in tmp_path.iterdir()] == ["step-000003"]


def test_what_a_kill_left_unfinished_is_not_read_and_goes_with_the_next_save(tmp_path):
    partial = tmp_path / ".step-000007.partial"
    (partial / "model").mkdir(parents=True)
    path = save(tmp_path)
    assert latest_checkpoint(tmp_path) == path
    prune(tmp_path, 5)
    assert not partial.exists()


def test_the_newest_are_kept_by_number_not_by_spelling(tmp_path):
    learner = learner_of()
    for step in (999_999, 8, 1_000_000):
        save(tmp_path, learner, step=step)
    assert latest_checkpoint(tmp_path).name == "step-1000000"
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    remove_after(tmp_path, 999_999)
    assert latest_checkpoint(tmp_path).name == "step-999999"
    assert latest_checkpoint(tmp_path / "none") is None


def test_a_fingerprint_is_of_names_and_bytes():
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0, dtype=torch.bfloat16)}
    same = {"b": weights["b"].clone(), "a": weights["a"].clone()}
    other = {**weights, "a": torch.tensor([1.0, 2.0000002])}
    renamed = {"c": weights["a"], "b": weights["b"]}
    assert fingerprint(weights) == fingerprint(same)
    assert len({fingerprint(one) for one in (weights, other, renamed)}) == 3
