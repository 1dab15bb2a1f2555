"""A run's own best conversations as samples to imitate, token by token as they were sampled.

Rejection sampling: RAFT (https://arxiv.org/abs/2304.06767) keeps the best of several replies to a prompt and
fine-tunes on it; here the best successful conversation of each scenario.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.sources.chat_logs import with_shares
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_log import RecordedRollout, RunLog
from stateset_agents.training.sft.demonstrations import Demonstrations
from stateset_agents.training.update.batch import Sample
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class OwnSuccesses:
    """Of each scenario that a run trained on, the conversation with the highest reward among those that
    succeeded, the earliest of equals.

    Where the environment gives no verdict, conversations with a positive reward count as successes.
    """

    run: Path
    """The run folder."""

    def load(self, agent: MultiTurnAgent, *, validation_share: float = 0.0) -> Demonstrations:
        """Blocking; the agent is initialised. Raises ConfigurationError for a run without successes, and an
        agent whose tokenizer is another."""
        return _load(agent, self.run, validation_share)


def _load(agent: MultiTurnAgent, run: Path, validation_share: float) -> Demonstrations:
    log = RunLog.open(run)
    _check_tokens(agent, log)
    best: dict[str, RecordedRollout] = {}
    with damage_named(log.folder.path):
        for rollout in log.rollouts("train"):
            if _succeeded(rollout) and _value(rollout) > _value(best.get(rollout.scenario)):
                best[rollout.scenario] = rollout
    if not best:
        raise ConfigurationError(
            f"{run} has no successful conversation in its training: train longer, or with log_rollouts true"
        )
    with damage_named(log.folder.path):
        trajectories = list(map(trajectory_of, best.values()))
    samples = [Sample(trajectory=one, advantages=(1.0,) * one.num_agent_tokens) for one in trajectories]
    scenarios = [sample.trajectory.scenario for sample in samples]
    held_out = [
        scenario.split == "validation"
        for scenario in with_shares(scenarios, {"validation": validation_share}, [False] * len(scenarios))
    ]
    train = tuple(sample for sample, is_out in zip(samples, held_out, strict=True) if not is_out)
    if not train:
        raise ConfigurationError(f"all {len(samples)} conversations are held out: lower validation_share")
    return Demonstrations(
        train=train,
        validation=tuple(sample for sample, is_out in zip(samples, held_out, strict=True) if is_out),
    )


def _succeeded(rollout: RecordedRollout) -> bool:
    if rollout.success is None:
        return rollout.reward is not None and rollout.reward > 0
    return rollout.success and rollout.status != "failed"


def _value(rollout: RecordedRollout | None) -> float:
    return float("-inf") if rollout is None else (rollout.reward or 0.0)


def _check_tokens(agent: MultiTurnAgent, log: RunLog) -> None:
    """Raises ConfigurationError where the agent's tokenizer says something else by the run's tokens."""
    piece = agent.backend.tokenizer.piece
    for id, text in log.tokens().items():
        if piece(id) != text:
            raise ConfigurationError(
                f"{agent.config.model_name!r} has another tokenizer than the run (token {id}: "
                f"{piece(id)!r}, there {text!r}): take the run's own base model, or one of its checkpoints"
            )
