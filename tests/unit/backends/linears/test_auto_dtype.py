"""`auto` on a CPU: bf16 for large models where it has matrix units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends import linears as module
from stateset_agents.backends.linears import auto_dtype
from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.learner import Learner

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("has_units", "count", "dtype"),
    [
        (True, 100_000_000, torch.bfloat16),
        (True, 99_999_999, torch.float32),
        (False, 8_000_000_000, torch.float32),
    ],
)
def test_a_large_model_on_a_cpu_with_matrix_units_takes_bf16(
    has_units: bool, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_usable", lambda wanted, device: has_units)
    assert auto_dtype(CPU, lambda: count) is dtype


@pytest.mark.parametrize("is_large", [True, False])
def test_agents_and_updates_follow_it(
    is_large: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    monkeypatch.setattr(module, "is_usable", lambda wanted, device: True)
    monkeypatch.setattr(module, "_LEAST_PARAMETERS", model.num_parameters() + (not is_large))
    dtype = torch.bfloat16 if is_large else torch.float32
    assert load_model_and_tokenizer(str(tmp_path))[0].dtype is dtype
    assert load_model_and_tokenizer(str(tmp_path), dtype="fp32")[0].dtype is torch.float32
    rounded = load_model_and_tokenizer(str(tmp_path), matmul_precision="high")
    assert rounded[0].dtype is torch.float32  # else the setting would do nothing
    for precision, autocast in (("auto", torch.bfloat16 if is_large else None), ("fp32", None)):
        config = TrainingConfig(max_steps=1, beta=0.0, precision=precision)
        assert Learner(model, config, num_steps=1, exact_logprobs=True).policy.autocast is autocast
        high = Learner(model, config, num_steps=1, exact_logprobs=True, matmul_precision="high")
        assert high.policy.autocast is None
