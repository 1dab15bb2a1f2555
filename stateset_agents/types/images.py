"""Pictures in messages, and the same as a model's processor reads them. Neither needs torch or Pillow."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.types.errors import ConfigurationError

IMAGE_MARK = "\ufffc"
"""Stands in a message's content where a picture stands: Unicode's object replacement character."""
_DATA_URL = re.compile(r"data:(image/[\w.+-]+);base64,", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture in a message: the bytes of its file, PNG or JPEG or what else Pillow reads."""

    data: bytes = field(repr=False)
    media_type: str = "image/png"
    digest: str = field(init=False, compare=False)
    """Hash of the bytes: it names the picture in logs and caches."""

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes) or not self.data:
            raise ConfigurationError(
                f"a picture must be the bytes of an image file, got {self.data!r:.40}: give path.read_bytes()"
            )
        object.__setattr__(self, "digest", hashlib.blake2b(self.data, digest_size=16).hexdigest())

    @classmethod
    def from_openai(cls, part: Mapping[str, Any]) -> Image:
        """Read `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`.

        Raises ConfigurationError for a picture that stands elsewhere: nothing is fetched.
        """
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        head = _DATA_URL.match(url) if isinstance(url, str) else None
        if not isinstance(url, str) or head is None:
            raise ConfigurationError(
                f"a picture must be a data URL such as data:image/png;base64,..., got {url!r:.60}"
            )
        try:
            data = base64.b64decode(url[head.end() :], validate=True)
        except ValueError as error:
            raise ConfigurationError(f"a picture's data URL is not base64 ({error})") from error
        return cls(data=data, media_type=head[1])

    def to_openai(self) -> dict[str, Any]:
        """The picture as a part of a message's content."""
        url = f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"
        return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelValues:
    """One picture as a model's processor reads it: tokens for the prompt, tensors for the forward."""

    digest: str
    """The picture's."""
    token_ids: tuple[int, ...]
    """[N] what stands in the prompt for it, frames around it included."""
    num_places: int
    """Number of them that are places for the picture's features."""
    tensors: Mapping[str, Any] = field(compare=False, repr=False)
    """Arguments of the model's forward by name, as torch tensors: `pixel_values` and its mask, say."""
