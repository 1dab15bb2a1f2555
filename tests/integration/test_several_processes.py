"""Two processes that train together do what one does, write one run folder, and end together."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from several import Broke, in_two
from tiny_models import tiny_model
from tiny_training import make_trainer, snapshot, talk

from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.batch import Sample
from stateset_agents.training.callbacks import Callback
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.learner import Learner
from stateset_agents.training.processes import Processes

RAGGED = [((3, 4), (2, 2)), ((5, 1),), ((2, 3), (1, 3)), ((4, 2),), ((1, 5), (3, 1)), ((9, 30),), ((2, 1),)]
"""(prompt or delta, reply) lengths of the turns of seven conversations."""


def samples(number: int) -> list[Sample]:
    dice = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(250, (length,), generator=dice).tolist()

    made = []
    for place, shape in enumerate(RAGGED[:number]):
        trajectory = talk(*[(ids(prompt), ids(reply)) for prompt, reply in shape])
        advantage = (1.0, -0.5, 0.25, -1.5)[place % 4]
        made.append(Sample(trajectory=trajectory, advantages=(advantage,) * trajectory.num_agent_tokens))
    return made


def gradients(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """The gradient that the last optimiser step of each case's update saw, and the metrics."""
    found = []
    for case in cases:
        settings = {"max_grad_norm": 1e9, "num_processes": int(os.environ.get("WORLD_SIZE", "1")), **case}
        number, family = settings.pop("rows"), settings.pop("family", "llama")
        if settings["num_processes"] == 1:
            settings.pop("parallelism", None)
        config = TrainingConfig(**settings)
        processes = Processes.join(config.num_processes)
        model = tiny_model(family).double()
        learner = Learner(model, config, num_steps=10, exact_logprobs=True, processes=processes)
        seen: dict[str, Any] = {}

        def look(*_: Any, learner: Any = learner, seen: Any = seen) -> None:
            for name, parameter in learner.policy.model.named_parameters():
                if parameter.grad is not None:
                    whole = getattr(parameter.grad, "full_tensor", parameter.grad.clone)()
                    seen[name] = whole.flatten().tolist()

        learner.optimization.optimizer.register_step_pre_hook(look)
        found.append((seen, learner.update(samples(number), step=1)))
    return found


PLAIN = [
    {"rows": 7, "beta": 0.1},
    {"rows": 1, "beta": 0.0},  # the other process has no row
    {"rows": 5, "beta": 0.1, "loss_type": "gspo", "micro_batch_tokens": 12, "num_iterations": 2},
    {"rows": 6, "beta": 0.0, "loss_type": "dapo", "entropy_coef": 0.1, "family": "qwen3"},  # tied embeddings
    {"rows": 7, "beta": 0.1, "gradient_checkpointing": True, "row_layout": "padded"},
]


@pytest.mark.parametrize(
    ("parallelism", "cases"),
    [("ddp", [*PLAIN, {"rows": 4, "beta": 0.1, "lora": {"rank": 4}}]), ("fsdp2", PLAIN)],
)
def test_gradients_and_metrics_are_those_of_one_process(parallelism, cases):
    cases = [{**case, "parallelism": parallelism} for case in cases]
    alone = gradients(cases)
    for ours in in_two(gradients, cases):
        assert not isinstance(ours, Broke), ours
        for (gradient, metrics), (expected, known) in zip(ours, alone, strict=True):
            assert gradient.keys() == expected.keys()
            one, other = (
                torch.tensor([x for name in sorted(part) for x in part[name]], dtype=torch.float64)
                for part in (gradient, expected)
            )
            assert float((one - other).norm() / other.norm()) < 1e-9
            apart = {"batch/micro_batches", "tokens/forwarded", "tokens/padding"}  # a prompt may come twice
            assert metrics.keys() == known.keys()
            for name in known.keys() - apart:
                assert metrics[name] == pytest.approx(known[name], rel=1e-6, abs=1e-9), name


# ------------------------------------------------------------------------------ whole trainings


def replayed(
    folder: Path, groups: list[Any], parallelism: str = "ddp"
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Weights and metrics after a step on each of these lists of groups."""

    async def train() -> tuple[dict[str, Any], list[dict[str, float]]]:
        count = int(os.environ.get("WORLD_SIZE", "1"))
        trainer = make_trainer(
            folder,
            max_steps=len(groups),
            num_processes=count,
            gradient_accumulation_steps=2 // count,
            parallelism=parallelism,
            beta=0.1,
        )
        await trainer.initialize()
        metrics = [await trainer.training_step(one) for one in groups]
        weights = {name: tensor.tolist() for name, tensor in trainer.learner.weights().items()}
        await trainer.close()
        return weights, metrics

    return asyncio.run(train())


def test_twenty_steps_on_the_same_conversations_end_like_one_process(tmp_path):
    async def play() -> list[Any]:
        trainer = make_trainer(tmp_path, max_steps=20)
        await trainer.initialize()
        groups = []
        for step in range(20):
            scenarios = trainer._order.take(2 * step, 2)
            groups.append(await trainer.generate_trajectories(scenarios))
            await trainer.training_step(groups[-1])
        await trainer.close()
        return groups

    groups = asyncio.run(play())
    alone, known = replayed(tmp_path, groups)
    answers = [*in_two(replayed, tmp_path, groups), *in_two(replayed, tmp_path, groups, "fsdp2")]
    for answer in answers:
        assert not isinstance(answer, Broke), answer
        weights, metrics = answer
        for name, values in alone.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(values), rtol=0, atol=1e-5)
        for one, other in zip(metrics, known, strict=True):
            for name in ("reward/mean", "loss/policy", "kl/reference", "optimizer/grad_norm", "tokens/agent"):
                assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    assert answers[0][0] == answers[1][0]  # in every bit
    assert answers[2][0] == answers[3][0]


def trained(folder: Path, settings: dict[str, Any], resume: bool = False) -> tuple[str, dict[str, Any], int]:
    """The run's folder, weights and optimiser after a whole training, and how often rank called back."""

    async def train() -> tuple[str, dict[str, Any], int]:
        heard = Counting()
        trainer = make_trainer(folder, num_processes=2, gradient_accumulation_steps=1, **settings)
        trainer.callbacks.append(heard)
        if resume:
            await trainer.load_checkpoint(folder / "runs" / "latest")
        await trainer.train()
        state = {name: tensor.tolist() for name, tensor in snapshot(trainer).items()}
        where = str(trainer.run.path)
        await trainer.close()
        return where, state, heard.steps

    return asyncio.run(train())


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, step: int, metrics: Any) -> None:
        self.steps += 1


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_one_run_folder_has_every_conversation_once(tmp_path, parallelism):
    settings = {"max_steps": 4, "eval_steps": 2, "parallelism": parallelism, "load_best_at_end": True}
    first, second = in_two(trained, tmp_path, settings)
    assert not isinstance(first, Broke), first
    assert not isinstance(second, Broke), second
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == (4, 0)  # callbacks are the first one's
    assert len(list((tmp_path / "runs").glob("0*"))) == 1
    log = RunLog(RunFolder.open(first[0]))
    lines = [json.loads(line) for line in (Path(first[0]) / "rollouts.jsonl").read_text().splitlines()[1:]]
    played = [(line["step"], line["scenario"], line["member"]) for line in lines if line["stage"] == "train"]
    assert len(played) == len(set(played)) == 4 * 2 * 4
    for epoch in ((1, 2), (3, 4)):  # four scenarios, two a step
        assert len({scenario for step, scenario, _ in played if step in epoch}) == 4
    held_out = [line["scenario"] for line in lines if line["stage"] == "validation"]
    assert len(held_out) == 2 * 4
    steps = [line.values for line in log.metrics() if "reward/mean" in line.values]
    assert [step["rollout/conversations"] for step in steps] == [8.0] * 4
    events = [event["event"] for event in log.events()]
    assert events.count("group finished") == events.count("group consumed") == 8
