"""Two processes that train together do what one does, write one run folder, and end together."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from several import Broke, in_two, met
from tiny_grammars import (
    PROMPT,
    completion_of,
    constraint_of,
    letters,
    letters_model,
    masked_logprobs,
    replies_of,
)
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_trainer, snapshot, talk
from vllm_server import VLLMServer

from stateset_agents.backends.grammars import Grammars
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import reward_function
from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import PeerFailed, Processes
from stateset_agents.training.update.batch import CreditedBatch, Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.policy import Policy
from stateset_agents.training.update.protocol import Learned
from stateset_agents.types.errors import CheckpointError, ConfigurationError, TrainingStopped
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

RAGGED = [((3, 4), (2, 2)), ((5, 1),), ((2, 3), (1, 3)), ((4, 2),), ((1, 5), (3, 1)), ((9, 30),), ((2, 1),)]
"""(prompt or delta, reply) lengths of the turns of seven conversations."""


def samples(number: int, opens_rows: bool) -> list[Sample]:
    """`opens_rows`: does each turn of every second conversation follow none?"""
    dice = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(250, (length,), generator=dice).tolist()

    made = []
    for place, shape in enumerate(RAGGED[:number]):
        follows = [None] * len(shape) if opens_rows and place % 2 == 0 else []
        trajectory = talk(*[(ids(prompt), ids(reply)) for prompt, reply in shape], follows=follows)
        advantage = (1.0, -0.5, 0.25, -1.5)[place % 4]
        made.append(Sample(trajectory=trajectory, advantages=(advantage,) * trajectory.num_agent_tokens))
    return made


def held(learner: Learner) -> float:
    """How much of the weights and moments lies in this process."""
    tensors = [*learner.policy.model.parameters()]
    for entry in learner.optimization.optimizer.state.values():
        tensors += [entry["exp_avg"], entry["exp_avg_sq"]]
    local = sum(getattr(tensor, "to_local", lambda tensor=tensor: tensor)().numel() for tensor in tensors)
    return local / sum(tensor.numel() for tensor in tensors)


def gradients(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Learned, float]]:
    """The gradient that the last optimiser step of each case's update saw, what it returned, and `held`."""
    found = []
    for case in cases:
        settings = {"max_grad_norm": 1e9, "num_processes": int(os.environ.get("WORLD_SIZE", "1")), **case}
        settings["log_learner_logprobs"] = True
        number, family = settings.pop("rows"), settings.pop("family", "llama")
        opens_rows = settings.pop("opens_rows", False)
        mismatch = settings.pop("mismatch_rms", None)
        if settings["num_processes"] == 1:
            settings.pop("parallelism", None)
        config = TrainingConfig(**settings)
        processes = Processes.join(config.num_processes)
        model = tiny_model(family).double()
        exact = mismatch is None
        learner = Learner(model, config, num_steps=10, exact_logprobs=exact, processes=processes)
        learner._objective.mismatch_rms = mismatch  # as a step before would leave it
        seen: dict[str, Any] = {}

        def look(*_: Any, learner: Any = learner, seen: Any = seen) -> None:
            for name, parameter in learner.policy.model.named_parameters():
                if parameter.grad is not None:
                    whole = getattr(parameter.grad, "full_tensor", parameter.grad.clone)()
                    seen[name] = whole.flatten().tolist()

        learner.optimization.optimizer.register_step_pre_hook(look)
        batch = CreditedBatch(samples(number, opens_rows), 0, [])
        found.append((seen, learner.learn(batch, step=1), held(learner)))
    return found


PLAIN = [
    {"rows": 7, "beta": 0.1},
    {"rows": 1, "beta": 0.0},  # the other process has no row
    {"rows": 5, "beta": 0.1, "loss_type": "gspo", "micro_batch_tokens": 12, "num_iterations": 2},
    {"rows": 6, "beta": 0.0, "loss_type": "dapo", "entropy_coef": 0.1, "family": "qwen3"},  # tied embeddings
    {"rows": 7, "beta": 0.1, "gradient_checkpointing": True, "row_layout": "padded"},
    {"rows": 7, "opens_rows": True, "beta": 0.1, "micro_batch_tokens": 12},
    {"rows": 5, "opens_rows": True, "beta": 0.1, "loss_type": "gspo", "micro_batch_tokens": 1},
    {"rows": 5, "opens_rows": True, "beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
    # Conversations of 7.4 tokens in the mean; from 7.9 on, as beside the long one, `auto` would take tokens.
    {"rows": 7, "beta": 0.1, "micro_batch_tokens": 12, "mismatch_rms": 0.107},
    {"rows": 7, "beta": 0.1, "mismatch_rms": 0.2},
]


def assert_same_logprobs(ours: Sequence[Any], alone: Sequence[Any]) -> None:
    """Of each sample, in order, whichever process had it."""
    assert len(ours) == len(alone) > 0
    for one, other in zip(ours, alone, strict=True):
        assert one.old == pytest.approx(other.old, abs=1e-9)
        assert one.learner == pytest.approx(other.learner, abs=1e-9)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("parallelism", "cases"),
    [("ddp", [*PLAIN, {"rows": 4, "beta": 0.1, "lora": {"rank": 4}}]), ("fsdp2", PLAIN)],
)
def test_gradients_and_metrics_are_those_of_one_process(parallelism, cases):
    cases = [{**case, "parallelism": parallelism} for case in cases]
    alone = gradients(cases)
    levels: list[float | None] = []
    for ours in in_two(gradients, cases):
        assert not isinstance(ours, Broke), ours
        for (gradient, learned, part), (expected, plain, _) in zip(ours, alone, strict=True):
            metrics, known = learned.metrics, plain.metrics
            levels.append(metrics.get("policy/importance_level"))
            assert_same_logprobs(learned.logprobs, plain.logprobs)
            assert part == pytest.approx(1.0 if parallelism == "ddp" else 0.5, abs=0.01)
            assert gradient.keys() == expected.keys()
            one, other = (
                torch.tensor([x for name in sorted(part) for x in part[name]], dtype=torch.float64)
                for part in (gradient, expected)
            )
            tolerance = (
                1e-7 if "policy/weight" in metrics else 1e-9
            )  # weights leave little of it, of rounding more
            assert float((one - other).norm() / other.norm()) < tolerance
            apart = {"batch/micro_batches", "tokens/forwarded", "tokens/padding"}  # a prompt may come twice
            assert metrics.keys() == known.keys()
            for name in known.keys() - apart:
                assert metrics[name] == pytest.approx(known[name], rel=1e-6, abs=1e-9), name
    of_one = levels[: len(cases)]
    assert levels == 2 * of_one
    assert [level for level in of_one if level] == [2.0, 1.0]


def constrained_gradient(parallelism: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Of the twenty replies of a small grammar, with a reference under the same masks."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    grammars, constraint, model = Grammars(letters()), constraint_of(), letters_model().double()
    made = []
    for number, reply in enumerate(replies_of(grammars, constraint)):
        with torch.no_grad():
            logprobs = masked_logprobs(model, grammars, constraint, reply)
        turn = Turn(prompt_ids=PROMPT, completion=completion_of(grammars, constraint, reply, logprobs))
        trajectory = Trajectory(scenario=Scenario(id="s"), turns=(turn,))
        made.append(Sample(trajectory=trajectory, advantages=(number % 5 - 1.5,) * len(reply)))
    settings = {"parallelism": parallelism} if count > 1 else {}
    config = TrainingConfig(beta=0.1, max_grad_norm=1e9, num_processes=count, **settings)
    learner = Learner(
        model,
        config,
        num_steps=10,
        exact_logprobs=True,
        processes=Processes.join(count),
        grammars=grammars,
    )
    seen: dict[str, Any] = {}

    def look(*_: Any) -> None:
        for name, parameter in learner.policy.model.named_parameters():
            seen[name] = getattr(parameter.grad, "full_tensor", parameter.grad.clone)().flatten().tolist()

    learner.optimization.optimizer.register_step_pre_hook(look)
    return seen, learner.learn(CreditedBatch(made, 0, []), step=1).metrics


@pytest.mark.first(1)
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_constrained_replies_give_the_gradient_of_one_process(parallelism):
    """Forced tokens are in no process's count, and each replays the masks of its own rows."""
    expected, known = constrained_gradient(parallelism)
    for ours in in_two(constrained_gradient, parallelism):
        assert not isinstance(ours, Broke), ours
        gradient, metrics = ours
        assert gradient.keys() == expected.keys()
        one, other = (
            torch.tensor([x for name in sorted(part) for x in part[name]], dtype=torch.float64)
            for part in (gradient, expected)
        )
        assert float((one - other).norm() / other.norm()) < 1e-6  # Llama's norms are in fp32 whatever
        for name in ("policy/entropy", "policy/first_ratio_max", "kl/reference"):
            assert metrics[name] == pytest.approx(known[name], rel=1e-6, abs=1e-7), name


# ------------------------------------------------------------------------------ whole trainings


def replayed(
    folder: Path, groups: list[Any], settings: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Weights and metrics after a step on each of these lists of groups.

    In fp64: Adam divides by the root of a second moment, so fp32's rounding of a gradient near 0 moves a
    weight by any share of the learning rate, and by another one on each processor. And GPT-2, since
    transformers' Llama takes its norms in fp32 whatever the model's dtype is.
    """

    async def train() -> tuple[dict[str, Any], list[dict[str, float]]]:
        count = int(os.environ.get("WORLD_SIZE", "1"))
        shape = {"num_processes": count, "gradient_accumulation_steps": 2 // count, "max_steps": len(groups)}
        alone = {"parallelism": "ddp"} if count == 1 else {}
        agent = make_agent("gpt2", dtype=torch.float64)
        trainer = make_trainer(folder, agent=agent, **{**shape, "beta": 0.1, **settings, **alone})
        await trainer.initialize()
        metrics = [await trainer.training_step(one) for one in groups]
        weights = {name: tensor.tolist() for name, tensor in trainer.learner.weights().items()}
        await trainer.close()
        return weights, metrics

    return asyncio.run(train())


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The groups of twenty steps of one process."""

    async def play() -> list[Any]:
        trainer = make_trainer(tmp_path_factory.mktemp("played"), max_steps=20)
        await trainer.initialize()
        groups = []
        for step in range(20):
            groups.append(
                await trainer.generate_trajectories(trainer._parts.curriculum.order.take(2 * step, 2))
            )
            await trainer.training_step(groups[-1])
        await trainer.close()
        return groups

    return asyncio.run(play())


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"parallelism": "fsdp2"},
        {"advantage_estimator": "token_gae", "value_dropout": 0.1},
    ],
)
def test_twenty_steps_on_the_same_conversations_end_like_one_process(tmp_path, played, settings):
    groups = played[:6] if "advantage_estimator" in settings else played
    alone, known = replayed(tmp_path, groups, settings)
    first, second = in_two(replayed, tmp_path, groups, settings)
    assert not isinstance(first, Broke), first
    assert first[0] == second[0]  # in every bit
    weights, metrics = first
    for name, values in alone.items():
        gap = torch.tensor(weights[name], dtype=torch.float64) - torch.tensor(values, dtype=torch.float64)
        assert float(gap.abs().max()) < 1e-9, name
    same = ("reward/mean", "loss/policy", "kl/reference", "optimizer/grad_norm", "tokens/agent")
    for one, other in zip(metrics, known, strict=True):
        assert [one[name] for name in same] == pytest.approx(
            [other[name] for name in same], rel=1e-6, abs=1e-9
        )


def trained(folder: Path, settings: dict[str, Any], resume: bool = False) -> tuple[str, dict[str, Any], int]:
    """The run's folder, weights and optimiser after a whole training, and how often rank called back."""

    async def train() -> tuple[str, dict[str, Any], int]:
        heard = Counting()
        run = RunFolder.open(folder / "runs" / "latest") if resume else None
        trainer = make_trainer(folder, run=run, num_processes=2, gradient_accumulation_steps=1, **settings)
        trainer.callbacks.append(heard)
        if resume:
            await trainer.load_checkpoint()
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


@pytest.mark.long
@pytest.mark.parametrize("parallelism", [pytest.param("ddp", marks=pytest.mark.long), "fsdp2"])
def test_one_run_folder_has_everything_once_and_resumes_to_the_same_bits(tmp_path, parallelism):
    settings = {"max_steps": 4, "eval_steps": 2, "parallelism": parallelism, "load_best_at_end": True}
    first, second = in_two(trained, tmp_path, settings)
    assert not isinstance(first, Broke), first
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == (4, 0)  # callbacks are the first one's
    run = RunFolder.open(first[0])
    assert len(list(run.path.parent.glob("0*"))) == 1
    whole = everything_once(run)
    shutil.rmtree(run.checkpoints / "step-000004")
    resumed, other = in_two(trained, tmp_path, settings, True)
    assert not isinstance(resumed, Broke), resumed
    assert resumed[1] == other[1] == first[1]
    assert everything_once(run) == whole
    if parallelism == "fsdp2":
        goes_on_alone(tmp_path / "one", settings, run, first[1])


def everything_once(run: RunFolder) -> list[Any]:
    """What was played in training; each of two epochs of four scenarios by steps of two."""
    lines = [json.loads(line) for line in run.rollouts.read_text().splitlines()[1:]]
    played = [(line["step"], line["scenario"], line["member"]) for line in lines if line["stage"] == "train"]
    assert len(played) == len(set(played)) == 4 * 2 * 4
    for epoch in ((1, 2), (3, 4)):
        assert len({scenario for step, scenario, _ in played if step in epoch}) == 4
    assert len([line for line in lines if line["stage"] == "validation"]) == 2 * 4
    log = RunLog(run)
    steps = [line.values for line in log.metrics() if "reward/mean" in line.values]
    assert [step["rollout/conversations"] for step in steps] == [8.0] * 4
    events = [event["event"] for event in log.events()]
    assert events.count("group finished") == events.count("group consumed") == 8
    return played


def goes_on_alone(folder: Path, settings: dict[str, Any], run: RunFolder, state: dict[str, Any]) -> None:
    """Two passes of one process are as large a step as one of two."""

    async def step(**changed: Any) -> None:
        longer = {**settings, "parallelism": "ddp", "max_steps": 5, **changed}
        trainer = make_trainer(folder, **longer)
        try:
            await trainer.load_checkpoint(run.path)
            assert {name: tensor.tolist() for name, tensor in snapshot(trainer).items()} == state
            await trainer.step()
            assert trainer.step_number == 5
            assert not trainer.summary()["deterministic"]
        finally:
            await trainer.close()

    asyncio.run(step())
    mend = "num_processes was 2 and is 1.* or with --set training.per_device_train_batch_size=2"
    with pytest.raises(CheckpointError, match=mend):
        asyncio.run(step(gradient_accumulation_steps=1))


# ------------------------------------------------------------------------------ how it ends


def started(folder: Path, number: int, trouble: str = "") -> str:
    async def begin() -> str:
        seed = int(os.environ["RANK"]) if trouble == "seed" else 0
        parallelism = "fsdp2" if trouble == "room" else "ddp"
        trainer = make_trainer(folder, num_processes=number, seed=seed, parallelism=parallelism)
        if trouble == "room" and os.environ["RANK"] == "1":

            def full(policy: Policy, model: Any = None) -> None:
                raise MemoryError("no room for a reference")

            Policy.reference = full
        try:
            await trainer.initialize()
        except (ConfigurationError, MemoryError, PeerFailed) as error:
            return str(error)
        finally:
            await trainer.close()
        return "ready"

    return asyncio.run(begin())


@pytest.mark.long
def test_a_launcher_that_starts_another_number_of_processes_is_an_error(tmp_path):
    (alone,) = in_two(started, tmp_path, 2, started=1)
    assert alone.startswith("num_processes is 2 and one process was started: start them with torchrun")
    for told in in_two(started, tmp_path, 1):
        assert told.startswith("2 processes were started and num_processes is 1: set it to 2")
    assert in_two(started, tmp_path, 2) == ["ready", "ready"]
    for told in in_two(started, tmp_path, 2, "seed"):
        assert told == "process 1 differs from process 0 in training.seed: start all with the same"
    room = "no room for a reference"
    assert in_two(started, tmp_path, 2, "room") == [f"process 1 failed: {room}", room]


class Trouble(Callback):
    """What befalls one process in the second step."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.is_here, self.trainer = kind, os.environ["RANK"] == str(rank), None

    def scored(self, step: int) -> None:
        if not self.is_here or step != 2:
            return
        if self.kind == "reward":
            raise TypeError("a reward with a mistake")
        if self.kind == "exit":
            os._exit(9)
        if self.kind == "cancel":
            self.task.cancel()

    async def on_step_end(self, step: int, metrics: Any) -> None:
        if self.is_here and self.kind in ("stop", "last"):
            self.trainer.request_stop()
        if self.is_here and self.kind == "together":
            await self.trainer.evaluate()

    def on_train_end(self, trainer: Any) -> None:
        if self.is_here and self.kind == "last":
            raise TypeError("a last word with a mistake")


def troubled(folder: Path, kind: str, rank: int, parallelism: str) -> tuple[str, str, int]:
    """What `train` raised, the state it ended in, and its steps."""

    async def train() -> tuple[str, str, int]:
        trouble = Trouble(kind, rank)

        @reward_function(local=True)
        async def reward(trajectory: Any) -> float:
            trouble.scored(trainer.step_number + 1)
            return await even_share._function(trajectory)

        trainer = make_trainer(
            folder,
            reward=reward,
            num_processes=2,
            gradient_accumulation_steps=1,
            parallelism=parallelism,
        )
        trainer.callbacks.append(trouble)
        trouble.trainer, trouble.task = trainer, asyncio.current_task()
        await trainer.initialize()
        if (kind == "update" and trouble.is_here) or kind == "numbers":
            backward = trainer.learner.optimization.backward

            def breaks(loss: Any) -> None:
                if trainer.step_number == 1 and kind == "numbers":  # which all of them have
                    raise TrainingStopped("a loss that is no number")
                if trainer.step_number == 1:
                    raise MemoryError("no room for a gradient")
                backward(loss)

            trainer.learner.optimization.backward = breaks
        if kind == "sync" and trouble.is_here:

            def full() -> None:
                raise OSError("no room for a log")

            trainer.tracker.sync = full
        if kind == "disk" and trouble.is_here:
            (trainer.run.checkpoints).rmdir()
            (trainer.run.checkpoints).write_text("in the way")
        said = ""
        try:
            await trainer.train()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        ended = trainer.state, trainer.step_number
        await trainer.close()
        if kind == "update" and parallelism == "ddp":  # the other hears of it while this one lives on
            assert met(folder / "heard", writes=not trouble.is_here)
        if kind == "update" and trouble.is_here:  # it has hung up
            with pytest.raises(ConfigurationError, match="start all of them again"):
                await make_trainer(folder, num_processes=2).initialize()
        return said, *ended

    return asyncio.run(train())


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "rank", "parallelism", "here", "there", "state", "steps"),
    [
        ("reward", 1, "ddp", "a reward with a mistake", "process 1 failed: a reward", "failed", 1),
        ("update", 1, "ddp", "no room for a gradient", "process 1 failed: no room", "failed", 1),
        pytest.param(
            "update",
            1,
            "fsdp2",
            "no room for a gradient",
            "process 1 failed: no room",
            "failed",
            1,
            marks=pytest.mark.long,
        ),
        ("disk", 0, "ddp", "cannot write checkpoint", "process 0 failed: cannot write", "failed", 3),
        ("exit", 1, "ddp", None, "process 1 is gone, without a reason", "failed", 1),
        pytest.param(
            "cancel",
            1,
            "ddp",
            "CancelledError",
            "process 1 was interrupted",
            "stopped",
            1,
            marks=pytest.mark.long,
        ),
        ("stop", 0, "fsdp2", "", "", "stopped", 1),
        pytest.param(
            "numbers",
            0,
            "fsdp2",
            "a loss that is no number",
            "a loss that is no number",
            "failed",
            1,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "sync",
            0,
            "fsdp2",
            "no room for a log",
            "process 0 failed: no room",
            "failed",
            3,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "together",
            0,
            "fsdp2",
            "evaluate needs all 2",
            "process 0 failed: evaluate needs",
            "failed",
            1,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "last",
            0,
            "ddp",
            "a last word with",
            "process 0 failed: a last word",
            "failed",
            1,
            marks=pytest.mark.long,
        ),
    ],
)
def test_all_end_when_one_does(tmp_path, kind, rank, parallelism, here, there, state, steps):
    answers = in_two(troubled, tmp_path, kind, rank, parallelism)
    ours, other = answers[rank], answers[1 - rank]
    assert not isinstance(other, Broke), other
    if here is not None:
        assert here in ours[0]
        assert ours[1:] == (state, steps)
    assert there in other[0]
    assert other[1:] == (state, steps)
    run = RunFolder.open(tmp_path / "runs" / "latest")
    summary = RunLog(run).summary()
    assert summary["ended"] == state
    if kind not in ("disk", "sync", "update"):
        assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-000001"]


# ------------------------------------------------------------------------------ one server for all


def spoken_through(folder: Path, name: str) -> tuple[list[float], int]:
    """The reward means of two steps, and the version of the weights at the end."""

    async def train() -> tuple[list[float], int]:
        agent = MultiTurnAgent(AgentConfig(model_name=name, chat_template="plain", max_new_tokens=3))
        trainer = make_trainer(
            folder, agent=agent, num_processes=2, gradient_accumulation_steps=1, max_steps=2, save_steps=0
        )
        await trainer.initialize()
        rewards = [(await trainer.step())["reward/mean"] for _ in range(2)]
        version = agent.backend.version
        assert agent.backend.weights_in_use()[1] == version
        await trainer.close()
        return rewards, version

    return asyncio.run(train())


@pytest.mark.long
async def test_a_server_that_all_share_gets_the_weights_once(tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().hf.save_pretrained(folder)
    async with VLLMServer(folder) as server:
        first, second = await asyncio.to_thread(in_two, spoken_through, tmp_path, server.name)
        assert not isinstance(first, Broke), first
        assert first == second
        assert first[1] == 2
        assert server.calls.count("/collective_rpc") == 2  # once a step
        salts = [body["cache_salt"] for body in server.bodies]
        assert len({salt for salt in salts if salt.endswith("-1")}) == 1  # all know the weights by one name
        assert server.weight_version.endswith("-2")
