"""Training by TRL's GRPOTrainer: our conversations, rewards, credit and run folder, TRL's update.

    agent = await train_with_trl_grpo(config, agent, environment, reward)

TRL is imported when a training by it is made, and not before. See docs/trl.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl.learner import TrlLearnerFactory
from stateset_agents.training.trl.rollouts import TrlRollout as TrlRollout
from stateset_agents.training.trl.rollouts import make_trl_rollout as make_trl_rollout
from stateset_agents.training.trl.settings import TrlSettings as TrlSettings
from stateset_agents.training.trl.settings import check_mappable, require_trl


class TrlGRPOTrainer(MultiTurnGRPOTrainer):
    """`MultiTurnGRPOTrainer` whose updates are TRL's: its loss, reference, optimiser, LoRA, precision."""

    def __init__(self, *arguments: Any, trl: TrlSettings | None = None, **keywords: Any) -> None:
        """`trl`: what TRL does beside; the rest as of `MultiTurnGRPOTrainer`.

        Raises ConfigurationError where TRL is missing, and for settings that it cannot follow.
        """
        factory = TrlLearnerFactory(trl)
        super().__init__(*arguments, learner_factory=factory, **keywords)
        self.trl = factory.settings
        require_trl()
        check_mappable(self.config, self.trl)


async def train_with_trl_grpo(
    config: TrainingConfig,
    agent: MultiTurnAgent,
    environment: Environment,
    reward_model: Reward,
    *,
    trl: TrlSettings | None = None,
    callbacks: Sequence[object] = (),
) -> MultiTurnAgent:
    """Train an agent by TRL's GRPOTrainer; the agent that comes back speaks with the trained weights.

    >>> config = TrainingConfig(num_episodes=100, lora={"rank": 16})
    >>> agent = await train_with_trl_grpo(config, agent, environment, reward_model=reward)

    `reward_model` is any reward, of a model or not.

    Raises ConfigurationError where TRL is missing, and for settings that it cannot follow.
    """
    trainer = TrlGRPOTrainer(agent, environment, reward_model, config, trl=trl, callbacks=callbacks)
    return await trainer.train_and_stop()
