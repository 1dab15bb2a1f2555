"""Training by TRL's GRPOTrainer: our conversations, rewards, credit and run folder, TRL's update.

    agent = await train_with_trl_grpo(config, agent, environment, reward_fn)

TRL is imported when a training by it is made, and not before. See docs/trl.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward
from stateset_agents.runs.checkpoint_files import fingerprint
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl.backend import TrlBackend
from stateset_agents.training.trl.learner import TrlLearner
from stateset_agents.training.trl.rollouts import TrlRollout, make_trl_rollout
from stateset_agents.training.trl.settings import TrlSettings, refuse_unmappable, require_trl
from stateset_agents.training.update.base_model import base_model, is_quantized_training, matmul_precision
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect
from stateset_agents.types.trajectory import TrajectoryGroup

__all__ = ["TrlGRPOTrainer", "TrlRollout", "TrlSettings", "make_trl_rollout", "train_with_trl_grpo"]


class TrlGRPOTrainer(MultiTurnGRPOTrainer):
    """`MultiTurnGRPOTrainer` whose updates are TRL's: its loss, reference, optimiser, LoRA, precision."""

    def __init__(self, *arguments: Any, trl: TrlSettings | None = None, **keywords: Any) -> None:
        """`trl`: what TRL does beside; the rest as of `MultiTurnGRPOTrainer`.

        Raises ConfigurationError where TRL is missing, and for settings that it cannot follow.
        """
        if trl is not None:
            expect("trl", trl, TrlSettings, "write TrlSettings(options={...})")
        super().__init__(*arguments, **keywords)
        self.trl = trl or TrlSettings()
        require_trl()
        refuse_unmappable(self.config, self.trl)

    def _refuse_settings(self) -> None:
        refuse_unmappable(self.config, self.trl)

    async def initialize(self) -> None:
        """As of `MultiTurnGRPOTrainer`; where TRL samples, rollouts are by its generation."""
        was_ready = self.is_ready
        if self.trl.generates and self.agent.config.stop:
            raise ConfigurationError(
                "TRL's generation has no stop strings: leave AgentConfig.stop out, or use generation own"
            )
        await super().initialize()
        if self.trl.generates and not was_ready:
            learner: Any = self.learner
            speaker: Any = TrlBackend(
                self.agent.backend,
                learner.sample,
                temperature=self.config.temperature,
                max_new_tokens=self.agent.config.max_new_tokens,
            )
            self.engine.agent = MultiTurnAgent(self.agent.config, backend=speaker)
            await self.engine.agent.initialize()

    def _make_learner(self, backend: Any) -> tuple[Any, str]:
        refuse_unmappable(self.config, self.trl)  # the model's card may have set some
        few = is_quantized_training(self.config) or self.config.lora is None
        model = base_model(backend, self.config)[0] if few else copy.deepcopy(backend.model)
        learner = TrlLearner(
            model,
            backend.tokenizer.hf,
            self.config,
            self.trl,
            max_new_tokens=self.agent.config.max_new_tokens,
            stop_ids=sorted({*self.agent.template.stop_ids, *backend.tokenizer.eos_ids}),
            matmul_precision=matmul_precision(backend),
        )
        return learner, fingerprint(learner.weights())

    def _paths(self, backend: Any) -> dict[str, Any]:
        if self.trl.generates:
            by = "vLLM" if self.trl.options.get("use_vllm") else "transformers"
            return {"engine": f"TRL, {by}", "why": "asked for", "rows": "padded", "why_rows": "TRL pads"}
        running = backend.running
        engine = {"engine": running.name, "why": running.why, "linears": running.linears}
        return {**engine, "rows": "padded", "why_rows": "TRL pads"}

    async def _loss(self, groups: Sequence[TrajectoryGroup], beta: float) -> Any:
        raise ConfigurationError("TRL computes its loss in its own step: ask a MultiTurnGRPOTrainer for one")

    async def stop(self) -> None:
        """End TRL's thread and the trainer's, and close the logs; the agent goes on speaking."""
        await super().stop()
        if self._learner is not None:
            self._learner.close()  # type: ignore[attr-defined]  # it is a TrlLearner


async def train_with_trl_grpo(
    config: TrainingConfig,
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: Reward,
    *,
    trl: TrlSettings | None = None,
    callbacks: Sequence[object] = (),
) -> MultiTurnAgent:
    """Train an agent by TRL's GRPOTrainer; the agent that comes back speaks with the trained weights.

    >>> config = TrainingConfig(num_episodes=100, lora={"rank": 16})
    >>> agent = await train_with_trl_grpo(config, agent, environment, reward_fn)

    Raises ConfigurationError where TRL is missing, and for settings that it cannot follow.
    """
    trainer = TrlGRPOTrainer(agent, environment, reward_fn, config, trl=trl, callbacks=callbacks)
    try:
        return await trainer.train()
    finally:
        await trainer.stop()
