"""LoRA (https://arxiv.org/abs/2106.09685): which layers get an adapter, its merged weights, and its files and
states in a checkpoint.

Both trainers read it: the frozen model W gets W + alpha / rank * B A in the layers chosen, and only A and B
are trained. The policy without its adapter is the reference, so none is loaded. W may be held in 4 or 8 bits
(`quantized_copy`).
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stateset_agents.backends.adapters import Adapter, LayerAdapter, LazyWeights, identity, is_transposed
from stateset_agents.backends.linears import MatmulPrecision
from stateset_agents.backends.pretrained.pictures import vision_tower
from stateset_agents.core.model_card import shared_name
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.update import LoraSettings
from stateset_agents.types.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def lora_config(settings: LoraSettings, model: PreTrainedModel) -> LoraConfig:
    """peft's own configuration for this model. Dropout is left out: rollouts have none.

    Raises ConfigurationError where peft is missing, a name is no linear layer's, or is the output head's.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigurationError('an adapter needs peft: pip install "peft>=0.18"') from error
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it; any number will do
        target_modules=_targets(settings, model),
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
    return 0 if is_quantized or matmul_precision != "highest" else base.num_parameters()


def add_adapter(model: Any, settings: LoraSettings) -> Any:
    """`model` under a new adapter, as a `peft.PeftModel`: its own weights are frozen and shared, and its
    outputs stay the same, for B begins at 0. A is drawn from torch's generator.

    Raises ConfigurationError as `lora_config` does.
    """
    config = lora_config(settings, model)
    from peft import get_peft_model

    with warnings.catch_warnings():  # peft asks for it by a name that transformers would drop
        warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys")  # of experts, for peft
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


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


_EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names for which peft adapts a mixture's experts, even where a dense layer has them, too."""


def _targets(settings: LoraSettings, model: PreTrainedModel) -> list[str]:
    """The names of the layers to adapt: all linear ones, or those that the settings name. A mixture's experts
    are tensors of three dimensions, to which no sampler of ours adds: they get none."""
    has_experts = any(".experts." in name and weight.dim() == 3 for name, weight in model.named_parameters())
    layers = {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and not (has_experts and name.rpartition(".")[2] in _EXPERT_NAMES)
    }
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers
    adapted = {name for name, layer in layers.items() if layer is not head}
    # peft goes by the ends of names, which other modules may share: a layer "0" of a sequence, and layer 0.
    shared = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in adapted}
    names = sorted({name if (end := name.rpartition(".")[2]) in shared else end for name in adapted})
    targets = settings.target_modules
    if isinstance(targets, str):
        return names
    for target in targets:
        matches = [layer for name, layer in layers.items() if name == target or name.endswith(f".{target}")]
        if not matches or head in matches:
            reason = "is the output head, which every token shares" if matches else "names no linear layer"
            raise ConfigurationError(
                f"lora.target_modules: {target!r} {reason}: use all-linear, or some of {', '.join(names)}"
            )
    return list(targets)


def adapter_of(model: Any, saved: Mapping[Tensor, Tensor] = MappingProxyType({})) -> Adapter:
    """The adapter that `add_adapter` put into a model, as samplers take it: the live tensors, or the `saved`
    one in place of each."""
    adapter: dict[str, LayerAdapter] = {}
    for name, layer in base_of(model).named_modules():
        for active in layer.active_adapters if hasattr(layer, "get_delta_weight") else ():
            a, b = (factor[active].weight for factor in (layer.lora_A, layer.lora_B))
            adapter[name] = LayerAdapter(saved.get(a, a), saved.get(b, b), layer.scaling[active])
    return adapter


def plain_weights(model: Any, adapter: Adapter) -> LazyWeights:
    """The weights of a frozen model in fp32 by the names of one without peft's wrapping, with an adapter in
    them; quantised layers are W_q's.

    Layers are merged one by one as they are read. The wrapped model's own tensors are not touched: merging in
    place and back would round them each time.
    """
    base = base_of(model)
    tensors = {name: tensor.detach() for name, tensor in base.state_dict().items() if ".lora_" not in name}
    layers: dict[str, Any] = {}
    for name, layer in base.named_modules():
        plain_name = name.replace(".base_layer", "")
        if is_quantized(layer):  # its weight in place of W_q and its scales
            for key in [key for key in tensors if key.startswith(f"{name}.") and key != f"{name}.bias"]:
                del tensors[key]
            shape = (layer.in_features, layer.out_features)[:: 1 if layer.was_conv1d else -1]
            tensors[f"{name}.weight"] = torch.empty(shape, device="meta")
        if is_quantized(layer) or (plain_name in adapter and not hasattr(layer, "get_base_layer")):
            layers[f"{plain_name}.weight"] = layer
    weights = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    shapes = {identity(tensor): _in_fp32(tensor) for tensor in weights.values()}

    def make(name: str) -> Tensor:
        layer = layers.get(name)
        weight = dequantized_weight(layer) if layer is not None and is_quantized(layer) else weights[name]
        factors = adapter.get(name.removesuffix(".weight"))
        if factors is None or layer is None:
            return weight.to(like[name].dtype)
        transposed = getattr(layer, "was_conv1d", is_transposed(layer))
        return factors.merged(weight, is_transposed=transposed)

    like = {name: shapes[identity(tensor)] for name, tensor in weights.items()}
    return LazyWeights(like, make)


def _in_fp32(tensor: Tensor) -> Tensor:
    """A tensor of this shape in at least fp32, without data where it is in less."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor if dtype is tensor.dtype else torch.empty(tensor.shape, dtype=dtype, device="meta")


def merged_weights(model: Any) -> Mapping[str, Tensor]:
    """The weights of a model by the names of one without peft's wrapping, its adapter added, in fp32; a model
    without one gives its state dict, the live tensors."""
    if not hasattr(model, "peft_config"):
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return plain_weights(model, adapter_of(model))


# The vision encoder of a model that reads pictures: left as it is where a training says so.


def freeze_vision(model: Any) -> None:
    """Let no update move the vision encoder, an adapter's layers in it included.

    Raises ConfigurationError for a model that has none.
    """
    tower = vision_tower(model)
    if tower is None:
        raise ConfigurationError(
            f"freeze_vision needs a vision encoder, and {type(model).__name__} has none: leave it out"
        )
    tower.requires_grad_(False)


# A model's linear layers in 4 or 8 bits, for an adapter to be trained on them (QLoRA,
# https://arxiv.org/abs/2305.14314); called by the trainers before they add the adapter.
#
# The layers are bitsandbytes' own, W_q in place of W. Nothing of W is kept: policy, reference, rollouts and
# checkpoints all use the dequantised W_q, `dequantized_weight`.

Bits: TypeAlias = Literal["4bit", "8bit"]

INSTALL = 'pip install "bitsandbytes>=0.50"'

_OUTLIER = 6.0
"""LLM.int8's threshold (https://arxiv.org/abs/2208.07339): larger activations are multiplied in 16 bits."""


def require_bitsandbytes() -> Any:
    """The library; raises ConfigurationError where it is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # else a line for each product of 8 bits
    try:
        return importlib.import_module("bitsandbytes")  # not among what strict types are checked against
    except ImportError as error:
        raise ConfigurationError(f"lora.quantization needs bitsandbytes: {INSTALL}") from error


def quantized_copy(model: Any, bits: Bits, *, compute: torch.dtype = torch.float32) -> Any:
    """A frozen copy whose linear layers, all but the output head, hold `bits`; `model` stays as it is.

    Layers are quantised one by one on the way, so no copy of them in more bits is made. 4 bits are NF4 in
    blocks of 64 with their scales in 8 bits; products are made in `compute`. 8 bits are LLM.int8's, a scale
    for each row; on a GPU it multiplies in int8, activations too, on the CPU with plain products.

    Raises ConfigurationError where bitsandbytes is missing.
    """
    library = require_bitsandbytes()
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if _is_linear(module)]
    memo = {id(layer): _quantize(library, layer, bits, compute) for layer in layers if layer is not head}
    quantized = copy.deepcopy(model, memo)  # which takes these layers where it would copy the model's
    setattr(quantized, f"is_loaded_in_{bits}", True)  # by which peft knows that it has such layers
    return quantized.eval().requires_grad_(False)


def _quantize(library: Any, layer: Any, bits: Bits, compute: torch.dtype) -> Any:
    was_conv1d = not isinstance(layer, nn.Linear)  # GPT-2's Conv1D, whose weight is [in, out]
    weight = layer.weight.detach()
    weight = (weight.t() if was_conv1d else weight).float().contiguous()
    out_features, in_features = weight.shape
    sizes = {"input_features": in_features, "output_features": out_features, "bias": False}
    linear: Any
    if bits == "4bit":
        with torch.device("meta"):
            linear = library.nn.Linear4bit(**sizes, quant_type="nf4", compute_dtype=compute)
        linear.weight = library.nn.Params4bit(weight, quant_type="nf4", module=linear).to(weight.device)
        # On some CPUs a call without gradient would change it to a layout of its own, which computes in bf16
        # and silently gives no gradient afterwards.
        linear.support_avx512bf16_for_cpu = False
    else:
        with torch.device("meta"):
            linear = library.nn.Linear8bitLt(**sizes, has_fp16_weights=False, threshold=_OUTLIER)
        parameters = library.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        linear.weight = parameters.to(weight.device)
        if weight.device.type == "cpu":  # in training mode the product is W_q's, else activations are rounded
            linear.register_forward_pre_hook(lambda module, _: setattr(module, "training", True))
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.detach().clone())
    linear.was_conv1d = was_conv1d
    return linear


def is_quantized(layer: nn.Module) -> bool:
    """True for a layer of `quantized_copy`."""
    return hasattr(layer, "was_conv1d")


@torch.no_grad()
def dequantized_weight(layer: Any) -> Tensor:
    """A quantised layer's weight in fp32, in the shape of the layer that was quantised."""
    if hasattr(layer.weight, "quant_state"):
        library = require_bitsandbytes()
        weight = library.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    else:  # the scales move at the first forward
        scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
        weight = layer.weight.data.float().mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
    full: Tensor = weight.float()
    return full.t().contiguous() if layer.was_conv1d else full
