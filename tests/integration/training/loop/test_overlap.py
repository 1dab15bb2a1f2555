"""Rollouts that go on while the update runs: how stale, by whose weights, and what each end leaves."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import (
    Watched,
    even_share,
    make_trainer,
    plain_logprobs,
)

from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.core.reward import reward_function
from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import BackendError, ConfigurationError, TrainingStopped
from stateset_agents.types.messages import SamplingParams
from stateset_agents.types.trajectory import TrajectoryGroup

OVERLAP = {"max_staleness": 1, "learning_rate": 0.05, "beta": 0.0, "save_steps": 0}


def events(trainer: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in RunLog(trainer.run).events() if event["event"] == name]


def metrics(trainer: Any) -> list[Any]:
    return [line.values for line in RunLog(trainer.run).metrics() if "time/step" in line.values]


def ends(trainer: Any) -> list[tuple[int, int, str, str]]:
    """(place, epoch, scenario, end) of every group, as written."""
    return [
        (event["group"], event["epoch"], event["scenario"], event["end"])
        for event in events(trainer, "group consumed")
    ]


class Seen(Callback):
    """Keeps what trained, and the weights of every version."""

    def __init__(self) -> None:
        self.groups: list[TrajectoryGroup] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def watch(self, trainer: Any) -> None:
        trainer.callbacks.append(self)

    def on_train_begin(self, trainer: Any) -> None:
        learner, backend = trainer.learner, trainer.agent.backend
        credit, update_weights = learner.credit, backend.update_weights

        def crediting(groups: Any) -> Any:
            self.groups += groups
            return credit(groups)

        async def updating(source: Any, version: int) -> None:
            self.weights[version] = {name: tensor.clone() for name, tensor in source.items()}
            await update_weights(source, version)

        update_adapter = backend.update_adapter

        async def adapting(adapter: Any, version: int) -> None:
            self.weights[version] = {name: tensor.clone() for name, tensor in learner.weights().items()}
            await update_adapter(adapter, version)

        learner.credit, backend.update_weights, backend.update_adapter = crediting, updating, adapting

    def keep(self, trainer: Any) -> None:
        weights = trainer.learner.weights()
        self.weights[0] = {name: tensor.clone() for name, tensor in weights.items()}

    def worst_error(self) -> float:
        """Over all sampled tokens: how far the stored log-prob is from a full forward's, under the weights of
        the version that is written beside it."""
        models = {}
        for version, weights in self.weights.items():
            models[version] = tiny_model()
            models[version].load_state_dict(weights)
        worst = 0.0
        for group in self.groups:
            for one in group.trajectories:
                mask = torch.tensor(one.action_mask) == 1
                stored, versions = torch.tensor(one.logprobs)[mask], torch.tensor(one.versions)[mask]
                for version in set(versions.tolist()):
                    with torch.no_grad():
                        own = plain_logprobs(models[version], one)
                    own_tokens = versions == version
                    worst = max(worst, float((own - stored)[own_tokens].abs().max()))
        return worst


class Slow(Watched):
    """`Watched`, with users that take their time, some of them far longer than others."""

    def __init__(self, seconds: float = 0.01, slowest: float = 0.15, **options: Any) -> None:
        super().__init__(**options)
        self.local = False
        self.seconds, self.slowest = seconds, slowest
        self.answers = asyncio.Event()
        self.answers.set()

    async def start(self, scenario: Any, seed: int) -> Any:
        conversation = await super().start(scenario, seed)
        step, wait = conversation.step, self.slowest if seed % 5 == 0 else self.seconds

        async def stepping(reply: Any) -> Any:
            await asyncio.sleep(wait)
            await self.answers.wait()
            return await step(reply)

        conversation.step = stepping
        return conversation


# ------------------------------------------------------------------------------ what overlaps


async def test_rollouts_go_on_during_updates_and_every_scenario_trains_once_in_order(tmp_path: Path) -> None:
    environment = Slow(seconds=0.02)
    trainer = make_trainer(tmp_path, environment=environment, max_steps=8, **OVERLAP)
    await trainer.initialize()
    seen = Seen()
    seen.keep(trainer)
    seen.watch(trainer)
    await trainer.train()
    lines = metrics(trainer)
    assert max(line["staleness/max"] for line in lines) == 1.0  # never above the bound, and not for show
    assert lines[0]["staleness/max"] == 0.0
    assert sum(line["overlap/tokens"] for line in lines) > 0
    assert max(line["overlap/share"] for line in lines) > 0.2
    assert {line["queue/running"] <= 4 for line in lines} == {True}
    ratios = [line["policy/first_ratio_max"] for line in lines if "policy/first_ratio_max" in line]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4)
    order = [trainer._parts.curriculum.order.at(place).id for place in range(16)]
    assert ends(trainer) == [(place, place // 4, order[place], "trained") for place in range(16)]
    assert seen.worst_error() < 1e-4  # each token was sampled by the weights that its version names
    assert len({group.trajectories[0].seed for group in seen.groups}) == 16  # another user each time
    assert trainer.summary()["deterministic"] is False
    assert (environment.live, environment.calls) == (0, 64)
    assert trainer.agent.backend.num_conversations == 0
    await trainer.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_old_adapter_speaks_until_the_new_one_is_handed_over(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, environment=Slow(seconds=0.02), max_steps=4, lora={"rank": 4}, **OVERLAP)
    await trainer.initialize()
    base, trained = trainer.agent.backend.model, trainer.learner.policy.model
    assert {id(part) for part in base.parameters()} < {id(part) for part in trained.parameters()}
    seen = Seen()
    seen.keep(trainer)
    seen.watch(trainer)
    await trainer.train()
    assert max(line["staleness/max"] for line in metrics(trainer)) == 1.0
    assert sum(line["overlap/tokens"] for line in metrics(trainer)) > 0
    assert seen.weights.keys() >= {0, 1, 2, 3}
    assert seen.worst_error() < 1e-4  # each token was sampled with the adapter that its version names
    seen.weights = {version + 1: weights for version, weights in seen.weights.items()} | {0: seen.weights[1]}
    assert seen.worst_error() > 1e-3  # and not with the one before it
    await trainer.close()


@pytest.mark.long
async def test_the_log_has_a_timeline_of_groups_and_updates(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, environment=Slow(), max_steps=3, **OVERLAP)
    await trainer.train()
    begun, ended = events(trainer, "update begun"), events(trainer, "update ended")
    handed = events(trainer, "weights handed over")
    assert [event["step"] for event in begun] == [event["step"] for event in ended] == [1, 2, 3]
    assert [event["groups"] for event in begun] == [[0, 1], [2, 3], [4, 5]]
    assert [event["version"] for event in handed] == [1, 2, 3]
    admitted = {event["group"]: event for event in events(trainer, "group admitted")}
    finished = {event["group"]: event for event in events(trainer, "group finished")}
    consumed = {event["group"]: event for event in events(trainer, "group consumed")}
    assert admitted.keys() == finished.keys() == consumed.keys() == set(range(6))
    for place in range(6):
        times = [events[place]["monotonic"] for events in (admitted, finished, consumed)]
        assert times == sorted(times)
        assert admitted[place]["run"] == trainer.run.path.name
        step = place // 2 + 1
        assert consumed[place]["step"] == step
        earliest = 0.0 if step <= 2 else handed[step - 3]["monotonic"]
        assert admitted[place]["monotonic"] >= earliest  # one step ahead, not more
    await trainer.close()


async def test_without_staleness_the_log_has_the_same_timeline(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    await trainer.train()
    assert [end for *_, end in ends(trainer)] == ["trained"] * 4
    assert len(events(trainer, "group admitted")) == len(events(trainer, "group finished")) == 4
    assert not any(name.startswith(("staleness/", "overlap/")) for line in metrics(trainer) for name in line)
    await trainer.close()


@pytest.mark.long
async def test_every_scenario_meets_the_users_that_it_meets_without_overlap(tmp_path: Path) -> None:
    met = []
    for staleness in (0, 1):
        trainer = make_trainer(
            tmp_path, max_steps=3, gradient_accumulation_steps=3, **OVERLAP | {"max_staleness": staleness}
        )
        await trainer.train()
        met.append([(one.step, one.scenario, one.seed) for one in RunLog(trainer.run).rollouts("train")])
        await trainer.close()
    assert met[0] == met[1]


@pytest.mark.long
async def test_no_more_conversations_are_open_than_max_concurrent(tmp_path: Path) -> None:
    environment = Slow()
    trainer = make_trainer(tmp_path, environment=environment, max_steps=4, max_concurrent=3, **OVERLAP)
    await trainer.train()
    assert environment.peak == 3
    assert len(ends(trainer)) == 8
    await trainer.close()


async def test_places_that_a_group_s_conversations_leave_are_the_next_group_s_at_once(tmp_path: Path) -> None:
    class OneWaits(Watched):
        """The first conversation's user is silent until a conversation of the second group has begun."""

        async def start(self, scenario: Any, seed: int) -> Any:
            is_first = self.calls == 0
            conversation = await super().start(scenario, seed)
            if self.calls > 4:
                others.set()
            step = conversation.step

            async def stepping(reply: Any) -> Any:
                if is_first:
                    await others.wait()
                return await step(reply)

            conversation.step = stepping
            return conversation

    others = asyncio.Event()
    trainer = make_trainer(tmp_path, environment=OneWaits(), max_steps=1, max_concurrent=4, **OVERLAP)
    await asyncio.wait_for(trainer.train(), 60)
    assert len(ends(trainer)) == 2
    await trainer.close()


async def test_fresh_conversations_have_weight_one_at_the_training_s_temperature(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, temperature=0.5, **OVERLAP)
    await trainer.train()
    [line] = metrics(trainer)
    assert line["policy/weight"] == pytest.approx(1.0, abs=1e-4)
    await trainer.close()


@pytest.mark.long
async def test_an_overlapping_training_learns(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, max_steps=25, **OVERLAP | {"learning_rate": 0.02}, lr_scheduler_type="constant", seed=3
    )
    await trainer.train()
    rewards = [line["reward/mean"] for line in metrics(trainer)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    await trainer.close()


async def test_a_token_of_too_old_a_policy_ends_the_training_whatever_admission_counted(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path, environment=Slow(), max_steps=4, **OVERLAP)
    await trainer.initialize()
    weights = trainer._parts.weights
    push = weights.push

    async def twice(state: Any) -> None:
        """As if a policy in between had been pushed, too."""
        await push(state)
        weights.versions.insert(-1, weights.versions[-1] - 0.5)

    weights.push = twice
    with pytest.raises(TrainingStopped, match=r"staleness 2 .* max_staleness is 1"):
        await trainer.train()
    assert trainer.step_number == 1
    await trainer.close()


# ------------------------------------------------------------------------------ traps of new weights


LONG = SamplingParams(max_new_tokens=60, stream=1)


async def turns_amid_new_weights(swap: Any) -> float:
    """How far log-probs are from those of their version's weights, which change after 20 tokens."""
    models = [tiny_model(seed=seed) for seed in (0, 1)]
    backend = HuggingFaceBackend(models[0], tiny_tokenizer(), scheduling="throughput", engine="lean")
    await backend.start()
    heard: Counter[int] = Counter()
    swapping: list[asyncio.Task[None]] = []

    def hear(member: int) -> Any:
        def on_text(piece: str) -> None:
            heard[member] += 1
            if not swapping and heard[member] == 20:
                swapping.append(asyncio.create_task(swap(backend, models[1].state_dict())))

        return on_text

    prompts = [[5, 6, 7 + member, 8] for member in range(3)]
    work = [
        backend.generate(prompt, LONG, session=Session(0, member), on_text=hear(member))
        for member, prompt in enumerate(prompts)
    ]
    completions = await asyncio.gather(*work)
    await asyncio.gather(*swapping)
    await backend.close()
    assert any(len(completion.version_spans) == 2 for completion in completions)
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids])
        for span in completion.version_spans:
            with torch.no_grad():
                logits = models[span.version](input_ids=ids[None]).logits[0, :-1]
            own = logits.log_softmax(-1).gather(-1, ids[1:, None])[len(prompt) - 1 :, 0]
            stored = torch.tensor(completion.logprobs)
            worst = max(worst, float((own - stored)[span.start : span.end].abs().max()))
    return worst


async def update(backend: HuggingFaceBackend, weights: Any) -> None:
    await backend.update_weights(weights, 1)


async def test_new_weights_land_between_two_decode_steps_and_turns_go_on_under_them() -> None:
    assert await turns_amid_new_weights(update) < 1e-4


async def test_a_cache_that_outlives_its_weights_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive refresh: new weights, and the keys and values of the old ones."""

    def set_version(self: Batcher, version: int) -> None:
        self.version = version
        for slot in self._table.slot_of.values():
            turn = self._table.requests[slot]
            if turn is not None:
                turn.versions.append((version, int(self._table.length[slot] - self._table.prompt[slot])))

    monkeypatch.setattr(Batcher, "set_version", set_version)
    assert await turns_amid_new_weights(update) > 1e-2


async def test_weights_that_change_within_a_forward_would_show() -> None:
    """The naive swap: another thread copies while the worker computes, so a forward is of no policy."""

    async def swap(backend: HuggingFaceBackend, weights: Any) -> None:
        batcher = backend._started_batcher
        assert batcher is not None
        run, done = batcher.model.forward, threading.Event()

        def forward(plan: Any) -> Any:
            if done.is_set():
                return run(plan)
            done.set()
            layers = backend.model.state_dict()
            for (
                name,
                held,
            ) in layers.items():  # half of the layers have been copied when the forward reads them
                if "layers.1" in name:
                    held.copy_(weights[name])
            batcher.model.refresh()
            logits = run(plan)
            for name, held in layers.items():
                held.copy_(weights[name])
            batcher.model.refresh()
            batcher.set_version(1)
            return logits

        batcher.model.forward = forward  # type: ignore[method-assign]  # of this one model

    assert await turns_amid_new_weights(swap) > 1e-2


# ------------------------------------------------------------------------------ pause, stop, cancel, resume


@pytest.mark.long
async def test_a_pause_ends_what_is_under_way_and_begins_nothing(tmp_path: Path) -> None:
    environment = Slow(seconds=0.05)
    trainer = make_trainer(tmp_path, environment=environment, max_steps=6, **OVERLAP)

    class Pause(Callback):
        async def on_step_end(self, step: int, metrics: Any) -> None:
            if step == 2:
                trainer.pause()

    trainer.callbacks.append(Pause())
    task = asyncio.create_task(trainer.train())
    assert await trainer.wait_for("paused") == "paused"
    calls = environment.calls
    assert (trainer.step_number, environment.live) == (2, 0)
    await asyncio.sleep(0.15)
    assert environment.calls == calls
    trainer.resume()
    await task
    assert trainer.step_number == 6
    assert [place for place, *_ in ends(trainer)] == list(range(12))
    await trainer.close()


async def test_a_pause_waits_for_conversations_and_a_stop_does_not(tmp_path: Path) -> None:
    environment = Slow()
    trainer = make_trainer(tmp_path, environment=environment, max_steps=6, **OVERLAP)

    class Pause(Callback):
        async def on_step_end(self, step: int, metrics: Any) -> None:
            environment.answers.clear()
            trainer.pause()

    trainer.callbacks.append(Pause())
    task = asyncio.create_task(trainer.train())
    await trainer.wait_for("pausing")
    await asyncio.sleep(0.05)
    assert trainer.state == "pausing"
    assert environment.live >= 8  # of the next steps, and their users say nothing
    trainer.request_stop()
    await task
    assert (trainer.state, trainer.step_number, environment.live) == ("stopped", 1, 0)
    assert len(events(trainer, "groups dropped")[0]["groups"]) >= 2
    await trainer.close()


@pytest.mark.long
@pytest.mark.parametrize("how", ["request_stop", "cancel"])
async def test_a_stop_cancels_what_is_under_way_and_a_resume_plays_it_again(tmp_path: Path, how: str) -> None:
    environment = Slow(seconds=0.03)
    trainer = make_trainer(tmp_path, environment=environment, max_steps=7, **OVERLAP)

    class Stop(Callback):
        async def on_step_end(self, step: int, metrics: Any) -> None:
            if step == 3:
                trainer.request_stop() if how == "request_stop" else task.cancel()

    trainer.callbacks.append(Stop())
    task = asyncio.create_task(trainer.train())
    await asyncio.gather(task, return_exceptions=True)
    assert trainer.progress.state == "stopped"
    assert (trainer.step_number, environment.live) == (3, 0)
    run = trainer.run
    await trainer.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}

    again = make_trainer(tmp_path, environment=Slow(), max_steps=7, run=run, **OVERLAP)
    await again.load_checkpoint()
    await again.train()
    assert again.step_number == 7
    records = ends(again)
    assert [place for place, *_ in records] == list(range(14))
    assert max(Counter((epoch, scenario) for _, epoch, scenario, _ in records).values()) == 1
    assert max(line["staleness/max"] for line in metrics(again)) <= 1
    await again.close()


@pytest.mark.long
async def test_after_a_crash_every_scenario_has_trained_once(tmp_path: Path) -> None:
    """What a kill leaves on disk, taken as a copy in mid-step, with a checkpoint two steps back."""
    trainer = make_trainer(
        tmp_path, environment=Slow(seconds=0.02), max_steps=6, **OVERLAP | {"save_steps": 2}
    )
    crashed = tmp_path / "crashed"

    class Crash(Callback):
        async def on_step_end(self, step: int, metrics: Any) -> None:
            if step == 3:
                await asyncio.sleep(0.03)  # groups of steps 4 and 5 are under way
                shutil.copytree(trainer.run.path, crashed, symlinks=True)

    trainer.callbacks.append(Crash())
    await trainer.train()
    await trainer.close()

    again = make_trainer(
        tmp_path, environment=Slow(), max_steps=6, run=RunFolder(crashed), **OVERLAP | {"save_steps": 2}
    )
    assert [place for place, *_ in ends(again)] == list(range(6))
    await again.load_checkpoint()
    assert again.step_number == 2
    await again.train()
    order = [again._parts.curriculum.order.at(place).id for place in range(12)]
    assert ends(again) == [(place, place // 4, order[place], "trained") for place in range(12)]
    assert [line["policy/version"] for line in metrics(again)] == [1, 2, 3, 4, 5, 6]
    await again.close()


@pytest.mark.long
async def test_a_resume_keeps_what_its_checkpoint_s_step_left_in_the_log(tmp_path: Path) -> None:
    """Conversations of the next steps end while a step's evaluation and checkpoint are under way."""
    settings = {**OVERLAP, "save_steps": 1, "eval_steps": 1, "eval_episodes": 2}
    trainer = make_trainer(tmp_path, environment=Slow(), max_steps=4, **settings)

    class Stop(Callback):
        async def on_checkpoint(self, step: int, path: Path) -> None:
            if step == 2:
                trainer.request_stop()

    trainer.callbacks.append(Stop())
    await trainer.train()
    await trainer.close()
    again = make_trainer(tmp_path, environment=Slow(), max_steps=4, run=trainer.run, **settings)
    await again.load_checkpoint()
    for name in ("weights handed over", "checkpoint"):
        assert [event["step"] for event in events(again, name)] == [1, 2]
    await again.close()


async def test_a_mistake_in_a_reward_ends_the_training_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = Slow()

    @reward_function(name="wrong", local=True)
    async def wrong(trajectory: Any) -> float:
        if environment.calls > 12:
            raise NameError("sned")
        return float(await even_share._function(trajectory))

    trainer = make_trainer(tmp_path, environment=environment, reward=wrong, max_steps=9, **OVERLAP)
    with pytest.raises(NameError, match="sned"):
        await trainer.train()
    assert environment.live == 0
    assert trainer.progress.state == "failed"
    await trainer.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_evaluations_checkpoints_and_the_best_step_go_along(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        environment=Slow(),
        max_steps=4,
        **OVERLAP | {"save_steps": 2},
        eval_steps=1,
        eval_episodes=2,
        load_best_at_end=True,
    )
    await trainer.train()
    assert len([line for line in RunLog(trainer.run).metrics() if "eval/reward" in line.values]) == 4
    assert {path.name for path in trainer.run.checkpoints.glob("step-*")} >= {"step-000004"}
    best = trainer.progress.best_step
    assert trainer.agent.backend.version == best
    assert max(line["staleness/max"] for line in metrics(trainer)) <= 1
    await trainer.close()


@pytest.mark.long
async def test_a_checkpoint_that_is_loaded_in_between_begins_the_pipeline_anew(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, environment=Slow(), max_steps=4, eval_steps=2, eval_episodes=2, **OVERLAP
    )
    back: list[int] = []

    class Back(Callback):
        async def on_evaluate(self, step: int, evaluation: Any) -> None:
            if step == 4 and not back:
                back.append(step)
                await trainer.load_checkpoint(trainer.run.checkpoints / "best")

    trainer.callbacks.append(Back())
    await trainer.train()
    assert back == [4]
    assert [place for place, *_ in ends(trainer)] == list(range(8))  # what came after the checkpoint was cut
    await trainer.close()


@pytest.mark.long
async def test_a_step_by_hand_in_between_begins_the_pipeline_anew(tmp_path: Path) -> None:
    """One that changes no weights, too: its groups would train twice."""
    trainer = make_trainer(
        tmp_path, environment=Slow(), max_steps=5, eval_steps=2, eval_episodes=2, **OVERLAP
    )

    class ByHand(Callback):
        async def on_evaluate(self, step: int, evaluation: Any) -> None:
            if step == 2:
                groups = await trainer.generate_trajectories(trainer._parts.curriculum.order.take(4, 2))
                unscored = [
                    replace(
                        group, trajectories=tuple(replace(one, reward=None) for one in group.trajectories)
                    )
                    for group in groups
                ]
                await trainer.training_step(unscored)

    trainer.callbacks.append(ByHand())
    await asyncio.wait_for(trainer.train(), 90)  # one that waits for the step's groups for ever
    assert trainer.step_number == 5
    assert [place for place, *_ in ends(trainer)] == list(range(10))
    await trainer.close()


@pytest.mark.parametrize("staleness", [0, 1])
async def test_weights_that_could_not_be_handed_over_are_before_the_next_rollout(
    tmp_path: Path, staleness: int
) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, **OVERLAP | {"max_staleness": staleness})
    await trainer.initialize()
    backend = trainer.agent.backend
    take = backend.update_weights
    broken: list[int] = []

    async def taking(source: Any, version: int) -> None:
        if version == 1 and not broken:
            broken.append(version)
            raise BackendError("the server is away")
        await take(source, version)

    backend.update_weights = taking  # type: ignore[method-assign]  # of this one agent
    with pytest.raises(BackendError, match="the server is away"):
        await trainer.train()
    seen = Seen()
    seen.watch(trainer)
    await trainer.train()
    assert [place for place, *_ in ends(trainer)] == list(range(6))
    first = [one for group in seen.groups[:2] for one in group.trajectories]
    assert {version for one in first for version in one.versions if version >= 0} == {1}
    await trainer.close()


async def test_failed_conversations_are_data_there_too(tmp_path: Path) -> None:
    environment = Slow(breaks=lambda call: call in {2, 21})
    trainer = make_trainer(
        tmp_path, environment=environment, max_steps=4, episode_retries=0, min_group_size=4, **OVERLAP
    )
    await trainer.train()
    records = ends(trainer)
    assert [place for place, *_ in records] == list(range(8))
    assert Counter(end for *_, end in records)["failed"] == 2
    await trainer.close()


# ------------------------------------------------------------------------------ groups without signal


@reward_function(name="even_share", local=True)
async def same_for_most(trajectory: Any) -> float:
    """Members differ in every third scenario only."""
    if trajectory.scenario.id in ("train1",):
        return float(await even_share._function(trajectory))
    return 0.1


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
async def test_groups_without_signal_are_replaced_until_the_batch_is_full(
    tmp_path: Path, staleness: int
) -> None:
    trainer = make_trainer(
        tmp_path,
        reward=same_for_most,
        max_steps=2,
        max_resamples=20,
        **OVERLAP | {"max_staleness": staleness},
    )
    await trainer.train()
    records = ends(trainer)
    trained = [scenario for _, _, scenario, end in records if end == "trained"]
    assert trained == ["train1"] * 4  # one of each epoch
    assert Counter(end for *_, end in records)["filtered"] == len(records) - 4 >= 9
    assert [line["group/resampled"] for line in metrics(trainer)] == [
        sum(1 for place, *_, end in records if end == "filtered" and span[0] <= place <= span[1])
        for span in ((0, records_of_step(trainer, 1)), (records_of_step(trainer, 1) + 1, 99))
    ]
    if staleness == 0:
        keys = [line["rollout/conversations"] for line in metrics(trainer)]
        assert sum(keys) == 4 * len(records)
    await trainer.close()


def records_of_step(trainer: Any, step: int) -> int:
    """Place of the step's last group."""
    return max(event["group"] for event in events(trainer, "group consumed") if event["step"] == step)


@reward_function(name="even_share", local=True)
async def all_the_same(trajectory: Any) -> float:
    return 1.0


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
async def test_when_all_groups_are_alike_the_limit_ends_the_search(tmp_path: Path, staleness: int) -> None:
    trainer = make_trainer(
        tmp_path,
        reward=all_the_same,
        max_steps=3,
        max_resamples=3,
        **OVERLAP | {"max_staleness": staleness},
    )
    await trainer.train()
    records = ends(trainer)
    assert [end for *_, end in records] == (["filtered"] * 3 + ["trained"] * 2) * 3
    await trainer.close()


@pytest.mark.long
async def test_dynamic_sampling_without_staleness_gives_the_same_bits_and_is_resumed(tmp_path: Path) -> None:
    from tiny_training import same_bits, snapshot

    settings = {"reward": same_for_most, "max_resamples": 20, "max_steps": 3, "save_steps": 0}
    whole = make_trainer(tmp_path / "whole", **settings)
    await whole.train()
    half = make_trainer(tmp_path / "half", **settings)
    await half.initialize()
    await half.step()
    await half.save_checkpoint()
    await half.close()
    rest = make_trainer(tmp_path / "half", run=half.run, **settings)
    await rest.load_checkpoint()
    await rest.train()
    assert same_bits(snapshot(whole), snapshot(rest))
    assert ends(whole) == ends(rest)
    for trainer in (whole, rest):
        await trainer.close()


@pytest.mark.first(1)
@pytest.mark.parametrize("staleness", [0, 1])
async def test_num_episodes_counts_what_trained(tmp_path: Path, staleness: int) -> None:
    settings = {"reward": same_for_most, "max_steps": None, "num_episodes": 3, "max_resamples": 9}
    trainer = make_trainer(tmp_path, **settings, **OVERLAP | {"max_staleness": staleness})
    await trainer.train()
    assert [end for *_, end in ends(trainer)].count("trained") == 3
    assert trainer.step_number == 2
    await trainer.close()


# ------------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"scheduling": "deterministic"}, "set scheduling to throughput or auto, or max_staleness to 0"),
        ({"temperature_schedule": "adaptive"}, "leave temperature_schedule at none"),
        ({"advantage_estimator": "branch"}, "set max_staleness to 0, or use another estimator"),
    ],
)
def test_what_cannot_overlap_is_refused_with_the_cure(settings: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigurationError, match=cure):
        TrainingConfig(max_staleness=1, **settings)


@pytest.mark.parametrize("settings", [{"advantage_estimator": "turn_gae"}, {"baseline_type": "global_mean"}])
def test_what_learns_from_groups_that_are_alike_replaces_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="learns from those: set it to 0"):
        TrainingConfig(max_resamples=1, **settings)
