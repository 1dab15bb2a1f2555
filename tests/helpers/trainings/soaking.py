"""Long trainings that are watched for leaks: `from soaking import scripted_trainer, soak`."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_trainer

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.runs.callbacks import Callback
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.seeds import derive

__all__ = ["Held", "ScriptedWithWeights", "scripted_trainer", "soak"]


class _Running(NamedTuple):
    name: str = "scripted"
    why: str = "its replies stand in a script"
    linears: str = "none"


class ScriptedWithWeights(ScriptedBackend):
    """The scripted backend with a tiny model of the same vocabulary beside it, so that there is something to
    train; what the agent says never depends on it."""

    running = _Running()
    is_exact = False
    is_repeatable = True
    matmul_precision = "highest"
    recommended: Mapping[str, Any] = {}
    trained_tokens = None

    def __init__(self) -> None:
        super().__init__(_says, tokenizer=tiny_tokenizer(), context_length=256)
        self.model = tiny_model().to(torch.bfloat16)  # not the master's fp32: pi_old is recomputed

    def model_to_quantize(self) -> Any:
        return self.model

    def master_model(self) -> Any:
        return copy.deepcopy(self.model).float().requires_grad_(True)

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        assert isinstance(source, Mapping)
        self.model.load_state_dict(source)  # which rounds
        await super().update_weights(source, version)


def _says(request: ScriptedRequest) -> str:
    """Another word each time, of one to eight letters, so that rewards and lengths differ."""
    number = derive(request.params.stream or 0, "word")
    return "".join(chr(97 + (number >> shift) % 26) for shift in range(0, 5 * (1 + number % 8), 5))


def scripted_trainer(folder: Path, **settings: Any) -> MultiTurnGRPOTrainer:
    """An episode of four members a step, two turns each; with a reference, validation and checkpoints."""
    config = AgentConfig(model_name="scripted", chat_template="plain", max_new_tokens=8)
    given = {
        "gradient_accumulation_steps": 1,
        "beta": 0.01,
        "kl_controller": "adaptive",
        "eval_steps": 25,
        "eval_episodes": 2,
        "save_steps": 25,
        **settings,
    }
    return make_trainer(folder, agent=MultiTurnAgent(config, backend=ScriptedWithWeights()), **given)


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds at one moment."""

    resident: int
    """Bytes of memory, after what C's allocator keeps in reserve has gone back to the system."""
    allocated: int
    """Bytes that C code has asked for and not given back: tensors and larger Python objects."""
    objects: int
    """Blocks of smaller Python objects."""
    files: int
    threads: tuple[str, ...]
    """Their names; those for the user's sync code, which come and go with it, are counted apart."""
    helpers: int
    tasks: int
    """Of asyncio, in this loop."""

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        names = sorted(thread.name for thread in threading.enumerate())
        return cls(
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            allocated=_allocated(),
            objects=sys.getallocatedblocks(),
            files=len(os.listdir("/proc/self/fd")),
            threads=tuple(name for name in names if name != "user-code"),
            helpers=names.count("user-code"),
            tasks=len(asyncio.all_tasks()),
        )

    def bytes_since(self, earlier: Held) -> int:
        """Memory asked for since then and not given back, whatever the system has still in reserve."""
        return self.allocated - earlier.allocated + 64 * (self.objects - earlier.objects)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def _allocated() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class _Watch(Callback):
    """Looks at the process after every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.held: dict[int, Held] = {}

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % self._every == 0:
            self.held[step] = Held.now()


async def soak(trainer: MultiTurnGRPOTrainer, *, every: int) -> dict[int, Held]:
    """Train to the end; what the process held after every so many steps."""
    watch = _Watch(every)
    trainer.callbacks.append(watch)
    await trainer.train()
    await trainer.close()
    return watch.held
