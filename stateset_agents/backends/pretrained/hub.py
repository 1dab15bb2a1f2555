"""Does the model hub answer? Asked once, before its client asks for file after file and waits in between."""

from __future__ import annotations

import os

from stateset_agents.types.errors import ConfigurationError

__all__ = ["from_disk_alone", "why_out_of_reach"]

_PATIENCE = 10.0
"""Seconds for the one question."""


def why_out_of_reach(name: str, *, kind: str = "model") -> str | None:
    """Why the hub cannot be asked for that model or dataset, in a few words; None where it answers, whatever
    it says."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_PATIENCE)
    except (HfHubHTTPError, HFValidationError):  # it answered, or will be told what is wrong with the name
        return None
    except Exception as error:  # the network's own errors: which library's they are differs by version
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return None


def from_disk_alone(where: str) -> bool:
    """Is it a folder, or a hub name of which there is a copy here while the hub is out of reach?

    Raises ConfigurationError for a name that is neither here nor to be had: the hub's client would try each
    file again for the best part of a minute.
    """
    if os.path.isdir(where):
        return True
    why = why_out_of_reach(where)
    if why is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(where, "config.json"), str):
        return True
    raise ConfigurationError(
        f"cannot load a model from {where!r}: the hub does not answer ({why}) and there is no copy here; see "
        "to the network, give a folder written by save_pretrained, or embedded:desk"
    )
