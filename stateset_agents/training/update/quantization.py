"""A model's linear layers in 4 or 8 bits, for an adapter to be trained on them (QLoRA,
https://arxiv.org/abs/2305.14314); called by the trainers before they add the adapter.

The layers are bitsandbytes' own, W_q in place of W. Nothing of W is kept: policy, reference, rollouts and
checkpoints all use the dequantised W_q, `dequantized_weight`.
"""

from __future__ import annotations

import copy
import importlib
import logging
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stateset_agents.types.errors import ConfigurationError

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
    from transformers.pytorch_utils import Conv1D

    library = require_bitsandbytes()
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
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
    """Is it one of `quantized_copy`'s?"""
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
