"""A fine-tuning's parts, made in order: weights loaded, conversations encoded, the run folder opened."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.backends.base import RunningBackend, TrainableBackend, picture_reader
from stateset_agents.backends.training_lock import exclusive, weights_token
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.sources.chat_logs import Chats
from stateset_agents.runs.compatibility import Identity
from stateset_agents.runs.lifecycle import Lifecycle
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runs.trackers import check_installed
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.distributed.process_group import ProcessGroup
from stateset_agents.training.loop.checkpointer import Checkpointer
from stateset_agents.training.loop.weight_sync import WeightSync
from stateset_agents.training.sft.demonstrations import (
    Demonstrations,
    DemonstrationSource,
    load_demonstrations,
)
from stateset_agents.training.sft.own_successes import OwnSuccesses
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.update.factory import is_quantized_training, trainable_copy
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a trainer conducts, once its model is loaded and its conversations are encoded."""

    demonstrations: Demonstrations
    backend: RunningBackend
    learner: Learner
    weights: WeightSync
    checkpoints: Checkpointer
    num_steps: int


async def set_up(
    agent: MultiTurnAgent,
    conversations: Chats | DemonstrationSource,
    tools: Sequence[Mapping[str, Any]],
    config: SFTConfig,
    *,
    lifecycle: Lifecycle,
    group: ProcessGroup,
    worker: Worker,
    recorder: RunRecorder,
    date: datetime.date | None = None,
) -> Parts:
    """Load the model, encode the conversations, make the learner, open the run folder.

    A template that tells the date tells `date`, of the run that is gone on with. Raises as
    `SFTTrainer.initialize` does.
    """
    await in_thread(check_installed, recorder.callbacks)
    await agent.initialize()
    if (day := date or agent.template.date) is not None:
        agent.pin_date(day)
    backend = agent.backend
    if not isinstance(backend, RunningBackend) or not isinstance(backend, TrainableBackend):
        raise ConfigurationError(
            f"a {type(backend).__name__} has no weights to train: use an in-process model"
        )

    def encoded() -> Demonstrations:
        share = config.validation_share
        if isinstance(conversations, DemonstrationSource):
            return conversations.load(agent, validation_share=share)
        return load_demonstrations(agent, conversations, tools=tools, validation_share=share)

    demonstrations = await worker.run(encoded)
    if backend.trained_tokens is not None:
        backend.trained_tokens |= demonstrations.token_ids
    training = config.as_training(len(demonstrations.train))
    num_steps = training.num_steps()

    def make_learner() -> Learner:
        model, _ = trainable_copy(backend, training)
        return Learner(
            model,
            training,
            num_steps=num_steps,
            exact_logprobs=True,
            matmul_precision=backend.matmul_precision,
            pictures=picture_reader(backend),
        )

    with exclusive(backend, lifecycle):
        token = object() if is_quantized_training(training) else weights_token(backend)
        learner = await worker.run(make_learner)
    agent_settings = agent.config.model_dump(mode="json")
    identity = Identity(
        base=learner.fingerprint,
        scenarios=await worker.run(_fingerprint, demonstrations),
        settings={"agent": agent_settings, "training": training.model_dump(mode="json")},
    )
    settings = {
        "made_by": "sft",
        "agent": agent_settings,
        "conversations": _source(conversations),
        "sft": config.model_dump(mode="json"),
    }

    def make_folder() -> RunFolder:
        return RunFolder.create(config.output_dir, name=config.run_name)

    await worker.run(recorder.open, make_folder, settings, backend.tokenizer.piece)
    weights = WeightSync(
        agent, learner, group, worker, training, recorder.run.path, owner=lifecycle, token=token
    )
    return Parts(
        demonstrations=demonstrations,
        backend=backend,
        learner=learner,
        weights=weights,
        checkpoints=Checkpointer(
            learner,
            group,
            worker,
            recorder,
            identity,
            settings,
            limit=config.save_total_limit,
            agent=agent,
        ),
        num_steps=num_steps,
    )


def date_of(checkpoint: Path) -> datetime.date | None:
    """The day that the run of a checkpoint tells; None where it tells none, or the checkpoint is damaged, as
    `load_checkpoint` will say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        return datetime.date.fromisoformat(state["progress"]["template_date"])
    return None


def _source(conversations: Chats | DemonstrationSource) -> str | dict[str, Any] | None:
    """As config.yaml names the conversations; None where only the program has them."""
    if isinstance(conversations, OwnSuccesses):
        return {"best_of": str(conversations.run.absolute())}
    if isinstance(conversations, Mapping) and isinstance(name := conversations["dataset"], str | Path):
        return {**conversations, "dataset": str(Path(name).absolute() if Path(name).exists() else name)}
    return str(Path(conversations).absolute()) if isinstance(conversations, str | Path) else None


def _fingerprint(demonstrations: Demonstrations) -> str:
    """Of everything that is imitated or held out, token by token."""
    digest = hashlib.sha256()
    for sample in (*demonstrations.train, *demonstrations.validation):
        for row in sample.rows:
            digest.update(repr((row.token_ids, row.action_mask)).encode())
            digest.update("".join(item.digest for item in row.pixels).encode())
        digest.update(repr(sample.advantages).encode())
    return digest.hexdigest()
