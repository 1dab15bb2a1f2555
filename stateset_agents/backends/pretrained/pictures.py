"""Pictures for a vision-language model: what its processor makes of one, and how forwards get them.

In the prompt a picture is the processor's own tokens: a frame, and a run of placeholders whose embeddings the
model replaces by the picture's features. The tensors behind them travel with the conversation
(`types.images.PixelValues`), so that every forward of a row, in rollouts and updates, gets the row's pictures
in order. Pillow comes in here alone.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.runtime.named_code import library
from stateset_agents.types.errors import BackendError, ConfigurationError, ConversationRefused
from stateset_agents.types.images import Image, PixelValues

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


_NUM_READ = 256
"""Pictures whose tensors are remembered: the members of a group see the same one."""
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Arguments with a number for each token, by which a model finds its pictures."""
_NOT_OF_PICTURES = ("input_ids", "attention_mask")
_NESTED = ("idefics2", "idefics3", "smolvlm")
"""Model types whose tensors have an axis of rows before that of pictures."""


def expect_pillow() -> Any:
    """Pillow's `Image`; raises ConfigurationError where it is missing."""
    library("PIL", 'pictures need Pillow. Install it with: pip install "pillow>=11"')
    from PIL import Image as pillow

    return pillow


def place_id_of(model: Any) -> int | None:
    """The token whose embedding a picture's features replace; None for a model that reads text alone."""
    config = getattr(model, "config", None)
    for name in ("image_token_id", "image_token_index"):
        if isinstance(id := getattr(config, name, None), int):
            return id
    return None


def vision_tower(model: Any) -> Any:
    """The vision encoder, without the projection to the text model's width; None where there is none.

    transformers calls it `vision_tower`, `vision_model` or `visual`.
    """
    names = ("vision_tower", "vision_model", "visual")
    towers = (module for name, module in model.named_modules() if name.rpartition(".")[2] in names)
    return next(towers, None)


class PictureReader:
    """A model's processor, one picture at a time. Safe from any thread."""

    def __init__(self, processor: Any, model: PreTrainedModel) -> None:
        """`processor`: transformers' own, with image processor and tokenizer. Raises ConfigurationError for
        a model that needs more than pixels to find its pictures."""
        place_id = place_id_of(model)
        token = getattr(processor, "image_token", None)
        if place_id is None or not isinstance(token, str):
            raise ConfigurationError(
                f"{type(model).__name__} names no image token in its config and processor, so no picture can "
                "be put into a prompt: use a model that does, such as SmolVLM or LLaVA"
            )
        self.processor = processor
        self.token = token
        """Stands in a template's text for a picture."""
        self.place_id = place_id
        self._name = type(model).__name__
        self._lock = threading.Lock()
        self._read = lru_cache(maxsize=_NUM_READ)(self._new)

    def read(self, image: Image) -> PixelValues:
        """The picture's tokens and tensors.

        Raises ConversationRefused for what is no picture, ConfigurationError for a model of another kind.
        """
        with self._lock:  # a fast tokenizer cannot be used by two threads at once
            return self._read(image)

    def save(self, folder: str | Path) -> None:
        """Write the processor's files, which say how pictures are read."""
        with self._lock:
            self.processor.save_pretrained(folder)

    def _new(self, image: Image) -> PixelValues:
        pillow = expect_pillow()
        try:
            with pillow.open(io.BytesIO(image.data)) as opened:
                picture = opened.convert("RGB")
        except (OSError, ValueError, pillow.DecompressionBombError) as error:
            raise ConversationRefused(
                f"a picture of {len(image.data)} bytes cannot be read ({error!s:.80}): give a PNG or JPEG"
            ) from error
        inputs = self.processor(
            text=[self.token], images=[picture], return_tensors="pt", add_special_tokens=False
        )
        unfit = [name for name in _PER_TOKEN if name in inputs]
        if unfit:
            raise ConfigurationError(
                f"{self._name} needs {unfit[0]} beside its pixels, which rows do not carry: use a model that "
                "finds pictures by their tokens, such as SmolVLM or LLaVA"
            )
        ids = tuple(inputs["input_ids"][0].tolist())
        tensors = {name: tensor for name, tensor in inputs.items() if name not in _NOT_OF_PICTURES}
        return PixelValues(
            digest=image.digest, token_ids=ids, num_places=ids.count(self.place_id), tensors=tensors
        )


def sample_pictures(reader: PictureReader) -> tuple[PixelValues, PixelValues]:
    """Two different pictures, to try a model with."""
    pillow = expect_pillow()
    samples = []
    for kind in ("linear_gradient", "radial_gradient"):
        file = io.BytesIO()
        getattr(pillow, kind)("L").save(file, "PNG")
        samples.append(reader.read(Image(data=file.getvalue())))
    return samples[0], samples[1]


def with_pictures(ids: Sequence[int], pixels: Sequence[PixelValues], place_id: int) -> list[int]:
    """Ids in which each `place_id` becomes the tokens of the next picture.

    Raises ConversationRefused where there are more or fewer pictures than places.
    """
    num_shown = sum(id == place_id for id in ids)
    if num_shown != len(pixels):
        raise ConversationRefused(
            f"the chat template shows {num_shown} of {len(pixels)} pictures: give pictures in user messages, "
            "or a template that shows those of others"
        )
    following = iter(pixels)
    expanded: list[int] = []
    for id in ids:
        expanded += next(following).token_ids if id == place_id else (id,)
    return expanded


def marked(ids: Sequence[int], pixels: Sequence[PixelValues], place_id: int) -> list[int]:
    """Ids in which the places of each picture hold a number below 0, which its content gives.

    Raises BackendError where there are more or fewer places than the pictures need.
    """
    num_places = sum(id == place_id for id in ids)
    total = sum(item.num_places for item in pixels)
    if num_places != total:
        raise BackendError(f"a prompt has {num_places} places for pictures, and its pictures need {total}")
    marks = iter(-1 - int(item.digest[:15], 16) for item in pixels for _ in range(item.num_places))
    return [next(marks) if id == place_id else id for id in ids]


def stacked(pixels: Iterable[PixelValues], model: Any, device: torch.device) -> dict[str, Tensor]:
    """The forward's arguments for these pictures, in the order in which the rows show them; {} for none.

    Raises ConfigurationError for pictures of different sizes.
    """
    import torch

    tensors = [item.tensors for item in pixels]
    if not tensors:
        return {}
    axis = int(model.config.model_type in _NESTED)
    arguments = {}
    for name in tensors[0]:
        parts = [_moved(each[name], model.dtype, device) for each in tensors]
        try:
            arguments[name] = torch.cat(parts, dim=axis)
        except RuntimeError as error:
            raise ConfigurationError(
                f"the processor gives several sizes ({parts[0].shape}, {name}): let it resize to one"
            ) from error
    return arguments


def _moved(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
