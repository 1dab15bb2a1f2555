"""Is the model hub reachable? Checked once, before its client retries file after file with long waits."""

from __future__ import annotations

import os

from stateset_agents.types.errors import ConfigurationError

_PATIENCE = 10.0
"""Seconds for this one request."""


def why_out_of_reach(name: str, *, kind: str = "model") -> str | None:
    """Why the hub cannot be reached for this model or dataset, in a few words; None if it answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_PATIENCE)
    except (
        HfHubHTTPError,
        HFValidationError,
    ):  # it answered, or transformers will say what is wrong with the name
        return None
    except Exception as error:  # network errors, whose classes differ between versions
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return None


def from_disk_alone(where: str) -> bool:
    """Is it a folder, a file, or a hub name with a local copy while the hub cannot be reached?

    Raises ConfigurationError for a name without a local copy while the hub cannot be reached: its client
    would retry each file for most of a minute.
    """
    if os.path.exists(where):
        return True
    reason = why_out_of_reach(where)
    if reason is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(where, "config.json"), str):
        return True
    raise ConfigurationError(
        f"cannot load a model from {where!r}: the hub does not answer ({reason}) and there is no copy here; "
        "see to the network, give a folder written by save_pretrained, or embedded:desk"
    )
