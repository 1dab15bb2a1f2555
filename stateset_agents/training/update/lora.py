"""LoRA (https://arxiv.org/abs/2106.09685): which layers get an adapter, its merged weights, and its files and
states in a checkpoint.

Both trainers read it: the frozen model W gets W + alpha / rank * B A in the layers chosen, and only A and B
are trained. The policy without its adapter is the reference, so none is loaded. W may be held in 4 or 8 bits
(quantization.py).
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.core.model_card import shared_name
from stateset_agents.training.settings.lora import LoraSettings
from stateset_agents.types.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from stateset_agents.backends.linears.matmul_precision import MatmulPrecision
    from stateset_agents.training.config import TrainingConfig


def lora_config(settings: LoraSettings, model: PreTrainedModel) -> LoraConfig:
    """peft's own configuration for this model. Dropout is left out: rollouts have none.

    Raises ConfigurationError where peft is missing, a name is no linear layer's, or is the output head's.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigurationError('an adapter needs peft: pip install "peft>=0.18"') from error
    targets = settings.target_modules
    if isinstance(targets, tuple):
        _check_targets(targets, model)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it; any number will do
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        # GPT-2's layers are Conv1D; those in few bits are linear.
        fan_in_fan_out=model.config.model_type == "gpt2" and settings.quantization is None,
        task_type="CAUSAL_LM",
    )


def size_for_auto(base: Any, config: TrainingConfig, matmul_precision: MatmulPrecision) -> int:
    """Weights of a model of transformers' without its adapter, by which `precision: auto` decides on a CPU.

    0 where few bits or rounded operands were asked for: nothing more is rounded then.
    """
    is_quantized = config.lora is not None and config.lora.quantization is not None
    size: int = 0 if is_quantized or matmul_precision != "highest" else base.num_parameters()
    return size


def add_adapter(model: Any, settings: LoraSettings) -> Any:
    """`model` under a new adapter, as a `peft.PeftModel`: its own weights are frozen and shared, and its
    outputs stay the same, for B begins at 0. A is drawn from torch's generator.

    Raises ConfigurationError as `lora_config` does.
    """
    config = lora_config(settings, model)
    from peft import get_peft_model

    with warnings.catch_warnings():  # peft asks for it by a name that transformers would drop
        warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated")
        return get_peft_model(model, config)


def base_of(model: Any) -> Any:
    """transformers' own model, without peft's wrapping."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def write_model_files(model: Any, path: Path, *, dtype: Any) -> None:
    """Write what plain transformers needs beside weights of this dtype: config and generation config; an
    adapter goes to `adapter/` beside `path`."""
    base = base_of(model)
    config = copy.deepcopy(base.config)
    config.dtype = dtype
    config.architectures = [type(base).__name__]
    config.save_pretrained(path)
    base.generation_config.save_pretrained(path)
    if base is not model:
        save_adapter(model, path.parent / "adapter")


def save_adapter(model: Any, folder: Path) -> None:
    """Write a wrapped model's adapter in peft's own layout, as `PeftModel.from_pretrained` reads it.

    peft's model card is removed, for we write one; the model that ships with this package is named by its
    name, not by its path on this disk.
    """
    model.save_pretrained(folder, save_embedding_layers=False)  # "auto" may ask the hub
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = shared_name(config["base_model_name_or_path"] or "")
    config["target_modules"].sort()  # a set: in another order each time
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def save_trainable_state(state: Mapping[str, Any], trained: Sequence[Tensor]) -> dict[str, Any]:
    """An optimiser's state dict with the trained tensors, in its order, as `weight` beside the moments.

    Merged weights do not give an adapter back, so a checkpoint needs it. Tensors are the live ones.
    """
    states = {index: dict(entry) for index, entry in state["state"].items()}
    for index, parameter in enumerate(trained):
        states.setdefault(index, {})["weight"] = parameter.detach()
    return {**state, "state": states}


def load_trainable_state(state: Mapping[str, Any], trained: Sequence[Tensor]) -> dict[str, Any]:
    """Load what `save_trainable_state` saved into these tensors; returns the optimiser's state dict without
    it.

    Raises CheckpointError, before anything changes, where it is of other tensors.
    """
    states = {index: dict(entry) for index, entry in state["state"].items()}
    saved = [states.get(index, {}).pop("weight", None) for index in range(len(trained))]
    for weight, parameter in zip(saved, trained, strict=True):
        if weight is None or weight.shape != parameter.shape:
            raise CheckpointError("the checkpoint's adapter is of another model: resume with the one it had")
    for weight, parameter in zip(saved, trained, strict=True):
        parameter.data.copy_(weight)
    return {**state, "state": {index: entry for index, entry in states.items() if entry}}


def _check_targets(targets: tuple[str, ...], model: PreTrainedModel) -> None:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    }
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers
    names = sorted({name.rpartition(".")[2] for name, layer in layers.items() if layer is not head})
    for target in targets:
        matches = [layer for name, layer in layers.items() if name == target or name.endswith(f".{target}")]
        if not matches or head in matches:
            reason = "is the output head, which every token shares" if matches else "names no linear layer"
            raise ConfigurationError(
                f"lora.target_modules: {target!r} {reason} of a {type(model).__name__}: "
                f"use all-linear, or some of {', '.join(names)}"
            )


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model without peft's wrapping, its active adapters added to the layers' weights;
    quantised layers are in fp32.

    The wrapped model's own tensors are not touched: merging in place and back would round them each time.
    A plain model's state dict is returned as it is.
    """
    import torch

    from stateset_agents.training.update.quantization import dequantized_weight, is_quantized

    base = base_of(model)
    state = {name: tensor.detach() for name, tensor in base.state_dict().items()}
    for name, layer in base.named_modules():
        if is_quantized(layer):  # its weight in place of W_q and its scales
            for key in [key for key in state if key.startswith(f"{name}.") and key != f"{name}.bias"]:
                del state[key]
            state[f"{name}.weight"] = dequantized_weight(layer)
    weights = {
        name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name
    }
    with torch.no_grad():
        for name, layer in base.named_modules():
            adapters = layer.active_adapters if hasattr(layer, "get_delta_weight") else ()
            for adapter in adapters:
                weight, change = weights[f"{name}.weight"], layer.get_delta_weight(adapter)
                if getattr(layer.get_base_layer(), "was_conv1d", False):
                    change = change.t()
                weights[f"{name}.weight"] = weight + change.to(weight.dtype)
    return weights
