"""Makes a trainer's learner out of TRL's GRPOTrainer."""

from __future__ import annotations

import copy
from typing import Any

from stateset_agents.backends.base import RunningBackend, TrainableBackend, picture_reader
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.template import ChatTemplate
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.processes import Processes
from stateset_agents.training.trl.backend import TrlBackend
from stateset_agents.training.trl.learner import TrlLearner
from stateset_agents.training.trl.settings import TrlSettings, check_mappable
from stateset_agents.training.update.factory import engine_paths, is_quantized_training, trainable_copy
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect


class TrlLearnerFactory:
    """A `LearnerFactory` whose learners update by TRL, and sample by it where that is asked for."""

    def __init__(self, settings: TrlSettings | None = None) -> None:
        if settings is not None:
            expect("trl", settings, TrlSettings, "write TrlSettings(options={...})")
        self.settings = settings or TrlSettings()

    def check(self, agent: MultiTurnAgent, config: TrainingConfig) -> None:
        """Raises ConfigurationError for settings that TRL cannot follow."""
        check_mappable(config, self.settings)

    def make(
        self, agent: MultiTurnAgent, backend: TrainableBackend, config: TrainingConfig, processes: Processes
    ) -> Any:
        """A learner on a copy of the backend's model. Blocking."""
        check_mappable(config, self.settings)  # the model's card may have set some
        if picture_reader(backend) is not None:
            raise ConfigurationError(
                "TRL as the learner gets no pictures here: train this vision-language model by GRPOTrainer's "
                "own learner (leave --trl out)"
            )
        if is_quantized_training(config) or config.lora is None:
            model = trainable_copy(backend, config)[0]
        else:
            model = backend.model_to_quantize()
            model = backend.master_model() if model.device.type == "cpu" else copy.deepcopy(model)
        tokenizer: Any = backend.tokenizer
        return TrlLearner(
            model,
            tokenizer.hf,
            config,
            self.settings,
            max_new_tokens=agent.config.max_new_tokens,
            stop_ids=sorted({*agent.template.stop_ids, *tokenizer.eos_ids}),
            matmul_precision=backend.matmul_precision,
        )

    async def player(self, agent: MultiTurnAgent, learner: Any) -> MultiTurnAgent:
        """The agent itself, or one that samples by TRL."""
        if not self.settings.generates:
            return agent
        backend: Any = TrlBackend(
            agent.backend,
            learner.sample,
            temperature=learner.config.temperature,
            max_new_tokens=agent.config.max_new_tokens,
        )
        player = _Player(agent, backend)
        await player.initialize()
        return player

    def paths(self, backend: RunningBackend, learner: Any) -> dict[str, Any]:
        """The engine that plays, and TRL's row layout."""
        if self.settings.generates:
            engine = "vLLM" if self.settings.options.get("use_vllm") else "transformers"
            return {"engine": f"TRL, {engine}", "why": "asked for", **learner.layout}
        return {**engine_paths(backend), **learner.layout}


class _Player(MultiTurnAgent):
    """An agent that samples elsewhere, and speaks by the template that the trainer pinned to its day."""

    def __init__(self, agent: MultiTurnAgent, backend: Any) -> None:
        super().__init__(agent.config, backend=backend)
        self._agent = agent

    @property
    def template(self) -> ChatTemplate:
        return self._agent.template
