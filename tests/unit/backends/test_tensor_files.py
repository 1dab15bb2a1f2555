"""safetensors files as others read them, written without holding up the process."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stateset_agents.backends.adapters import LazyWeights
from stateset_agents.backends.tensor_files import write_tensors
from stateset_agents.backends.vllm import WeightFolders

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def test_safetensors_reads_back_every_dtype_and_shape(tmp_path):
    tensors = {
        f"{dtype} {shape}": torch.arange(12).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
        for dtype in DTYPES
        for shape in ((), (1,), (3,), (2, 3), (0,))
    }
    path = tmp_path / "model.safetensors"
    write_tensors(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("names", [[], ["ä", 'with "quotes"', "model.layers.0.weight"]])
def test_names_are_kept(tmp_path, names):
    write_tensors(tmp_path / "file", {name: torch.tensor([1.0]) for name in names})
    assert sorted(load_file(tmp_path / "file")) == sorted(names)


def test_other_threads_run_while_a_slow_disk_takes_the_bytes(tmp_path):
    pipe = tmp_path / "slow"  # a pipe stands for the disk: it takes nothing until someone reads
    os.mkfifo(pipe)
    writing = threading.Thread(target=write_tensors, args=(pipe, {"weight": torch.zeros(1_000_000)}))
    writing.start()
    with pipe.open("rb") as reader:
        time.sleep(0.05)  # this thread runs on: were the lock held, nobody would ever read
        assert writing.is_alive()
        assert len(reader.read()) > 4_000_000
    writing.join()


def test_a_server_s_weights_are_written_one_by_one_as_they_are_made(tmp_path):
    sizes = []

    def make(name):
        sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))
        return torch.full((100_000,), float(name))

    like = {name: torch.empty(100_000, device="meta") for name in "123"}
    folder = WeightFolders(tmp_path).write(LazyWeights(like, make), "run-1")
    assert sizes[2] > 400_000
    assert {name: float(tensor[-1]) for name, tensor in load_file(folder / "model.safetensors").items()} == {
        "1": 1.0,
        "2": 2.0,
        "3": 3.0,
    }


def test_tied_weights_are_written_once_under_their_first_name(tmp_path):
    embedding = torch.ones(3, 2)
    write_tensors(tmp_path / "file", {"embed": embedding, "head": embedding, "norm": torch.ones(2)})
    assert load_file(tmp_path / "file").keys() == {"embed", "norm"}
