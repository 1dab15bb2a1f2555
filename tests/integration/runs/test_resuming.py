"""What a resume refuses, what it says, and who may write a run folder."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil

import pytest
from tiny_training import make_agent, make_trainer, same_bits, snapshot

from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import CheckpointError, ConfigurationError


async def stopped_after(folder, steps, **settings):
    """The run folder of a trainer that was closed after so many steps, with a checkpoint of the last."""
    trainer = make_trainer(folder, **settings)
    await trainer.initialize()
    for _ in range(steps):
        await trainer.step()
    if steps:
        await trainer.save_checkpoint()
    await trainer.close()
    return trainer.run


@pytest.mark.long
async def test_a_run_whose_checkpoints_are_gone_is_not_wiped(tmp_path):
    run = await stopped_after(tmp_path, 2)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    logs = [file.read_bytes() for file in (run.metrics, run.rollouts, run.events)]
    again = make_trainer(tmp_path, run=run)
    with pytest.raises(CheckpointError, match="is empty and the run did write checkpoints: put them back"):
        await again.load_checkpoint()
    await again.close()
    assert [file.read_bytes() for file in (run.metrics, run.rollouts, run.events)] == logs


async def test_a_run_without_a_checkpoint_yet_says_that_it_begins_again(tmp_path, caplog):
    run = await stopped_after(tmp_path, 0)
    again = make_trainer(tmp_path, run=run)
    with caplog.at_level(logging.WARNING, logger="stateset_agents"):
        await again.load_checkpoint()
    assert caplog.text.count(f"{run.path} has no checkpoint yet: starting at step 0") == 1
    await again.close()


async def test_a_run_that_goes_on_can_not_be_resumed_beside_it(tmp_path):
    trainer = make_trainer(tmp_path)
    await trainer.initialize()
    await trainer.step()
    second = make_trainer(tmp_path, run=trainer.run)
    with pytest.raises(
        ConfigurationError, match=r"another trainer is writing .*: wait for its end or stop it"
    ):
        await second.load_checkpoint()
    await trainer.step()
    await trainer.close()
    await second.load_checkpoint()  # now it may
    assert second.step_number == 0
    await second.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "then", "now", "changed"),
    [
        ({"lr_scheduler_type": "linear", "warmup_ratio": 0.0}, {"max_steps": 3}, {"max_steps": 4}, True),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.0}, {"max_steps": 4}, {"max_steps": 3}, True),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.3}, {"max_steps": 3}, {"max_steps": 4}, True),
        # one step of warm-up either way
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"max_steps": 3}, {"max_steps": 4}, False),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.0}, {"max_steps": 3}, {"max_steps": 4}, False),
        # 6 episodes are 3 steps of 2
        (
            {"lr_scheduler_type": "linear", "warmup_ratio": 0.0},
            {"max_steps": 3},
            {"max_steps": None, "num_episodes": 6},
            False,
        ),
        ({"lr_scheduler_type": "linear"}, {"max_steps": 3}, {"max_steps": 3, "num_episodes": 6}, False),
    ],
)
async def test_another_length_is_said_where_the_schedule_follows_it(
    tmp_path, caplog, schedule, then, now, changed
):
    run = await stopped_after(tmp_path, 2, **schedule, **then)
    whole = make_trainer(tmp_path, **schedule, **now)
    await whole.train()
    again = make_trainer(tmp_path, run=run, **schedule, **now)
    await again.load_checkpoint()
    await again.train()
    said = [record for record in caplog.records if "the run was planned for" in record.getMessage()]
    assert len(said) == changed
    assert again.summary()["deterministic"] is not changed
    assert same_bits(snapshot(again), snapshot(whole)) is not changed
    await again.close()
    await whole.close()


@pytest.mark.long
async def test_a_stopped_trainer_says_how_to_go_on(tmp_path):
    agent = make_agent()
    trainer = make_trainer(tmp_path, agent=agent)
    await trainer.initialize()
    await trainer.stop()
    for call in (trainer.train, trainer.step, trainer.save_checkpoint, trainer.load_checkpoint):
        with pytest.raises(ConfigurationError, match="the trainer was stopped: make a new one, with run="):
            await call()
    again = make_trainer(tmp_path, agent=agent, run=trainer.run)
    await again.load_checkpoint()
    await again.train()
    assert again.step_number == 3
    await again.close()


@pytest.mark.long
@pytest.mark.parametrize("log_rollouts", [True, False])
async def test_validation_conversations_are_logged_as_such(tmp_path, log_rollouts):
    trainer = make_trainer(tmp_path, max_steps=2, eval_steps=1, eval_episodes=3, log_rollouts=log_rollouts)
    await trainer.train()
    held = [(one.step, one.scenario, one.split) for one in RunLog(trainer.run).rollouts("validation")]
    expected = [(step, f"validation{number}", "validation") for step in (1, 2) for number in range(3)]
    assert held == (expected if log_rollouts else [])
    assert all(one.advantages is None for one in RunLog(trainer.run).rollouts("validation"))
    await trainer.close()


@pytest.mark.long
async def test_a_cancelled_resume_is_whole(tmp_path):
    run = await stopped_after(tmp_path, 2)
    again = make_trainer(tmp_path, run=run)
    await again.initialize()
    loop, restoring, restore = asyncio.get_running_loop(), asyncio.Event(), again.learner.restore

    def watched(*parts):
        loop.call_soon_threadsafe(restoring.set)
        restore(*parts)

    again.learner.restore = watched
    loading = asyncio.create_task(again.load_checkpoint())
    await restoring.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert (again.step_number, again.agent.backend.version) == (2, 2)
    assert same_bits(dict(again.agent.backend.model.state_dict()), again.learner.weights())
    await again.train()
    await again.close()
    whole = make_trainer(tmp_path)
    await whole.train()
    assert same_bits(snapshot(again), snapshot(whole))
    await whole.close()


async def test_a_checkpoint_is_not_loaded_under_a_step(tmp_path):
    trainer = make_trainer(tmp_path, save_steps=1)

    class LoadsTheFirst(Callback):
        async def on_step_end(self, step, metrics):
            if step == 2:
                await trainer.load_checkpoint(trainer.run.checkpoints / "step-000001")

    trainer.callbacks.append(LoadsTheFirst())
    with pytest.raises(ConfigurationError, match="a step of this trainer is under way: await it, then load"):
        await trainer.train()
    assert trainer.step_number == 2
    await trainer.close()


@pytest.mark.long
async def test_a_long_log_is_cut_while_the_event_loop_goes_on(tmp_path):
    run = await stopped_after(tmp_path, 2)
    line = run.rollouts.read_bytes().splitlines(keepends=True)[-1]
    long = json.loads(line)
    long["metadata"] = {"note": "x " * 50_000}
    with run.rollouts.open("ab") as stream:
        stream.write((json.dumps(long).encode() + b"\n") * 300)  # 30 MB
    again, order = make_trainer(tmp_path, run=run), []
    await again.initialize()
    cut = type(run).truncate_after

    def noted(folder, step):
        order.append("begins")
        cut(folder, step)
        order.append("ended")

    async def ticks():
        while "ended" not in order:
            await asyncio.sleep(0.001)
            order.append("tick")

    ticking = asyncio.create_task(ticks())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run), "truncate_after", noted)
        await again.load_checkpoint()
    await ticking
    assert "tick" in order[order.index("begins") : order.index("ended")]
    await again.close()


class SavesEachStep(Callback):
    """A checkpoint before the evaluation of the same step."""

    def __init__(self, trainer):
        self.trainer, self.evaluated = trainer, asyncio.Event()

    async def on_step_end(self, step, metrics):
        await self.trainer.save_checkpoint()

    async def on_evaluate(self, step, result):
        self.evaluated.set()


@pytest.mark.long
async def test_an_evaluation_that_a_kill_cut_off_from_its_checkpoint_is_logged_once(tmp_path):
    settings = {"max_steps": 2, "eval_steps": 1, "eval_episodes": 2}
    whole = make_trainer(tmp_path, **settings)
    await whole.train()
    await whole.close()
    killed = make_trainer(tmp_path, **settings)
    saves = SavesEachStep(killed)
    killed.callbacks.append(saves)
    killed._save_last = asyncio.Event().wait  # after the evaluation it comes to no checkpoint any more
    training = asyncio.create_task(killed.train())
    await saves.evaluated.wait()
    copy = shutil.copytree(killed.run.path, tmp_path / "killed")  # as a kill leaves it
    training.cancel()
    killed._save_last = killed.save_checkpoint
    await asyncio.gather(training, return_exceptions=True)
    await killed.close()
    again = make_trainer(tmp_path, run=RunFolder(copy), **settings)
    await again.load_checkpoint()
    await again.train()
    await again.close()
    assert logged(again) == logged(whole)
    held = [[one.step for one in RunLog(run).rollouts("validation")] for run in (again.run, whole.run)]
    assert held == [[1, 1, 2, 2]] * 2


def logged(trainer):
    return [(line.step, sorted(line.values)) for line in RunLog(trainer.run).metrics()]


@pytest.mark.long
async def test_a_checkpoint_whose_replacement_was_cut_is_put_back(tmp_path):
    run = await stopped_after(tmp_path, 2)
    only = run.checkpoints / "step-000002"
    only.rename(run.checkpoints / ".step-000002.replaced")
    shutil.copytree(run.checkpoints / ".step-000002.replaced", run.checkpoints / ".step-000002.partial")
    again = make_trainer(tmp_path, run=run)
    await again.load_checkpoint()
    assert again.step_number == 2
    await again.train()
    await again.close()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.long
async def test_more_failed_steps_may_be_allowed_on_resuming(tmp_path):
    run = await stopped_after(tmp_path, 2)
    again = make_trainer(tmp_path, run=run, max_failed_steps=9)
    await again.load_checkpoint()
    await again.train()
    await again.close()
    whole = make_trainer(tmp_path)
    await whole.train()
    assert same_bits(snapshot(again), snapshot(whole))
    await whole.close()
