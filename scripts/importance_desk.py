"""What rollouts in few bits do to the retail desk's gradient, without importance weights and with them.

    OMP_NUM_THREADS=1 python -m scripts.importance_desk            print the table, in a minute of one core
    OMP_NUM_THREADS=1 python -m scripts.importance_desk --write    put it into stale-rollouts.md
    OMP_NUM_THREADS=1 python -m scripts.importance_desk --rollouts e4m3

`embedded:desk` plays in bf16, with the settings of examples/demo.yaml, and the update scores in another
precision. The same conversations give one gradient for each way of weighing, and one with weights of
conversations that no cap cuts, whose expectation is that of the policy's own conversations (with the
advantages as they are). The error of a way is the norm of the mean difference to that one, by its norm.
Squares of means are estimated without bias, by products of different steps' gradients; intervals are a
jackknife's over steps. Rollouts whose weights have eight bits show that an error which is there is found.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.page_tables import print_table
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.objective import weight_level

WAYS = {"none": None, "token": None, "sequence": None, "exact": 1e12}
"""Ways of weighing, and the cap where it is not the default; `exact` is the level sequence."""
SCENARIOS = 8
"""Of a step."""


@dataclass(kw_only=True)
class Measured:
    """Gradients of steps on the same conversations, by way of weighing, and metrics of an update on each."""

    gradients: dict[str, list[Tensor]] = field(default_factory=lambda: {way: [] for way in WAYS})
    metrics: list[dict[str, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Trained tokens of each conversation."""

    @property
    def rms(self) -> float:
        """The root mean square of all gaps; steps have about as many tokens."""
        return math.sqrt(statistics.fmean(step["policy/mismatch_rms"] ** 2 for step in self.metrics))

    def error(self, way: str) -> tuple[float, float]:
        """The relative error of the expected gradient, and the upper end of its 95 % interval."""
        exact = torch.stack(self.gradients["exact"]).double()
        apart = torch.stack(self.gradients[way]).double() - exact
        square = _mean_product(apart) / _mean_product(exact)
        spread = math.sqrt(_jackknife_variance(apart, exact))
        return math.sqrt(max(0.0, square)), math.sqrt(max(0.0, square + 1.96 * spread))


def _mean_product(steps: Tensor) -> float:
    """The squared norm of the mean of [S, P], without bias: the mean product of two different steps."""
    products = steps @ steps.T
    number = len(steps)
    return float((products.sum() - products.diagonal().sum()) / (number * (number - 1)))


def _jackknife_variance(apart: Tensor, exact: Tensor) -> float:
    """Of the quotient of the squared norms of two means."""
    number, kept = len(apart), ~torch.eye(len(apart), dtype=torch.bool)
    products = [steps @ steps.T for steps in (apart, exact)]
    quotients = []
    for left in kept:
        rest = [part[left][:, left] for part in products]
        sums = [float(part.sum() - part.diagonal().sum()) for part in rest]
        quotients.append(sums[0] / sums[1])
    return (number - 1) * statistics.pvariance(quotients)


def learner_of(trainer: MultiTurnGRPOTrainer, way: str) -> Learner:
    """A learner of the trainer's weights that weighs in this way."""
    level = "sequence" if way == "exact" else way
    settings = {**trainer.config.model_dump(exclude_unset=True), "importance": level}
    config = TrainingConfig(**{**settings, "importance_cap": WAYS[way]})
    return Learner(copy.deepcopy(trainer.learner.base), config, num_steps=1000, exact_logprobs=False)


def gradient(learner: Learner, samples: Sequence[Sample]) -> Tensor:
    """[P] of the loss of these conversations."""
    learner.optimization.zero_grad()
    learner.losses(samples)["total_loss"].backward()  # type: ignore[no-untyped-call]  # torch's
    parameters = learner.optimization.trained_parameters
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


def in_eight_bits(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor as eight-bit floating-point numbers and a scale have it."""
    rounded = {}
    for name, tensor in weights.items():
        scale = tensor.abs().max().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        rounded[name] = (tensor / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale
    return rounded


async def measure(num_steps: int, *, rollouts: str = "bf16", precision: str = "fp32") -> Measured:
    """Steps of the demo under its first weights: nothing is learned in between."""
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48, dtype="bf16"))
        config = TrainingConfig(
            beta=0.0,
            learning_rate=1e-12,  # an update is for its metrics
            precision=precision,
            max_steps=num_steps,
            output_dir=folder,
            save_steps=0,
            log_rollouts=False,
            progress=False,
        )
        desk = RetailDesk(families="learnable")
        trainer = MultiTurnGRPOTrainer(agent, desk, EnvironmentReward(), config)
        await trainer.initialize()
        backend: Any = trainer.agent.backend
        if rollouts != "bf16":
            await backend.update_weights(in_eight_bits(trainer.learner.weights()), backend.version)
        scenarios = desk.scenarios("train")
        learners = {way: learner_of(trainer, way) for way in WAYS}
        for step in range(num_steps):
            start = step * SCENARIOS % (len(scenarios) - SCENARIOS)
            groups = await trainer.generate_trajectories(scenarios[start : start + SCENARIOS])
            samples = [sample for sample in trainer.learner.credit(groups).samples if any(sample.advantages)]
            for way, learner in learners.items():
                measured.gradients[way].append(gradient(learner, samples))
            measured.lengths += [sample.trajectory.num_agent_tokens for sample in samples]
            measured.metrics.append(learners["sequence"].update(samples, step=step))
        await trainer.close()
    return measured


def row(measured: Measured, rollouts: str, precision: str) -> str:
    """A line of the table."""
    length = statistics.fmean(measured.lengths)
    largest = max(step["policy/rollout_mismatch"] for step in measured.metrics)
    cells = [
        rollouts,
        precision,
        f"{len(measured.lengths):,} of {length:.1f} tokens",
        f"{measured.rms:.4f} ({largest:.2f})",
        str(weight_level("auto", measured.rms, length)),
    ]
    for way in WAYS:
        if way != "exact":
            error, most = measured.error(way)
            cells.append(f"{error:.2%} ({most:.2%})")
    return "| " + " | ".join(cells) + " |"


COLUMNS = (
    *("rollouts", "update", "conversations", "r.m.s. gap (largest)", "`auto` takes"),
    *(way for way in WAYS if way != "exact"),
)


def lines(num_steps: int, rollouts: str, update: str) -> Iterator[str]:
    """The table's."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" * len(COLUMNS) + "|"
    yield row(asyncio.run(measure(num_steps, rollouts=rollouts, precision=update)), rollouts, update)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description="The desk's gradient under half-precision rollouts.")
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    parser.add_argument("--steps", type=int, default=8, help="steps of 64 conversations (8)")
    parser.add_argument("--rollouts", choices=("bf16", "e4m3"), default="bf16", help="e4m3: of the weights")
    parser.add_argument("--update", choices=("fp32", "bf16"), default="fp32", help="its precision")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error(f"--steps must be at least 3, for an interval, got {arguments.steps}")
    made = lines(arguments.steps, arguments.rollouts, arguments.update)
    print_table("evidence/stale-rollouts.md", "importance-desk", made, write=arguments.write)


if __name__ == "__main__":
    main()
