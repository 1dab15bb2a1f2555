"""A training that an application holds, ends, watches and hears of."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from builders import bare
from tiny_training import (
    SCENARIOS,
    Watched,
    even_share,
    make_agent,
    make_environment,
    make_trainer,
    same_bits,
    snapshot,
)

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.runs import callbacks
from stateset_agents.runs.callbacks import Callback, expect_callback
from stateset_agents.runs.checkpoint_files import latest_checkpoint, load_checkpoint
from stateset_agents.runs.lifecycle import Lifecycle
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import train
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import CheckpointError, ConfigurationError, TrainingStopped


def threads():
    """Those of trainers and backends."""
    return {one for one in threading.enumerate() if one.name.startswith(("update", "generation"))}


def without_validation():
    return make_environment(scenarios=[one for one in SCENARIOS if one["split"] == "train"])


class FirstStep(Callback):
    """An event, set when a step has ended."""

    def __init__(self):
        self.over = asyncio.Event()

    async def on_step_end(self, step, metrics):
        self.over.set()


class Heard(Callback):
    """Notes every moment; plain and async methods mixed."""

    def __init__(self):
        self.moments = []
        self.threads = set()

    def on_train_begin(self, trainer):
        self.trainer = trainer
        self.note("begin", trainer.progress.state)

    async def on_step_end(self, step, metrics):
        assert metrics["reward/mean"] >= 0
        self.note("step", step)

    def on_evaluate(self, step, evaluation):
        self.note("evaluate", step, len(evaluation.groups))

    def on_checkpoint(self, step, path):
        assert load_checkpoint(path).step == step
        self.note("checkpoint", step)

    async def on_train_end(self, trainer):
        self.note("end", trainer.progress.state)

    def note(self, *moment):
        self.moments.append(moment)
        self.threads.add((moment[0], threading.current_thread() is threading.main_thread()))


async def test_callbacks_hear_of_every_moment_in_order(tmp_path):
    heard = Heard()
    trainer = make_trainer(tmp_path, max_steps=3, eval_steps=2, eval_episodes=3, save_steps=0)
    trainer.callbacks.append(heard)
    await trainer.train()
    await trainer.close()
    assert heard.moments == [
        ("begin", "running"),
        ("step", 1),
        ("step", 2),
        ("evaluate", 2, 3),
        ("checkpoint", 2),  # the first evaluation is the best so far
        ("step", 3),
        ("checkpoint", 3),
        ("end", "finished"),
    ]
    # plain methods ran in a thread, async ones in the event loop
    loop = dict(heard.threads)
    expected = {"begin": False, "evaluate": False, "checkpoint": False, "step": True, "end": True}
    assert loop == expected


async def test_a_callback_that_blocks_does_not_hold_up_the_event_loop(tmp_path):
    answered = threading.Event()

    class Blocks(Callback):
        def on_step_end(self, step, metrics):
            assert answered.wait(20)  # only the event loop can set it

    first = FirstStep()
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.callbacks += [first, Blocks()]
    training = asyncio.create_task(trainer.train())
    await first.over.wait()
    answered.set()
    await training
    await trainer.close()


class Breaks(Callback):
    def __init__(self, error):
        self.error = error

    def on_step_end(self, step, metrics):
        if step == 2:
            raise self.error


async def test_a_callback_that_fails_is_one_line_and_training_goes_on(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.callbacks.append(Breaks(OSError("the chat room is away")))
    await trainer.train()
    line = "Breaks.on_step_end failed: OSError: the chat room is away"
    assert caplog.text.count(line) == 1
    failed = [event for event in RunLog(trainer.run).events() if event["event"] == "callback failed"]
    assert [(event["step"], bare(event["error"])) for event in failed] == [(2, line)]
    assert trainer.progress.state == "finished"
    await trainer.close()


@pytest.mark.parametrize("error", [NameError("sned"), TrainingStopped("good enough")])
async def test_a_mistake_or_a_wish_to_stop_travels_and_the_step_is_kept(tmp_path, error):
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.callbacks.append(Breaks(error))
    with pytest.raises(type(error), match=str(error)):
        await trainer.train()
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 2
    assert (trainer.progress.state, trainer.progress.why) == ("failed", str(error))
    await trainer.close()


# ------------------------------------------------------------------------------ pause, stop, progress


async def test_paused_it_holds_between_two_steps_and_goes_on_bit_equal(tmp_path):
    whole = make_trainer(tmp_path, max_steps=4)
    await whole.train()
    trainer = make_trainer(tmp_path, max_steps=4)

    class PausesAfterTwo(Callback):
        def on_step_end(self, step, metrics):  # in a thread
            if step == 2:
                trainer.pause()

    trainer.callbacks.append(PausesAfterTwo())
    assert trainer.progress.state == "idle"
    training = asyncio.create_task(trainer.train())
    assert await trainer.wait_for("paused") == "paused"
    assert (trainer.is_paused, trainer.step_number) == (True, 2)
    await asyncio.sleep(0.05)
    assert trainer.step_number == 2
    assert await trainer.agent.generate_response("hi")  # the agent speaks meanwhile
    trainer.resume()
    await training
    assert same_bits(snapshot(trainer), snapshot(whole))
    assert trainer.progress.state == "finished"
    await whole.close()
    await trainer.close()


async def test_asked_to_stop_it_ends_the_step_keeps_it_and_goes_on_when_called_again(tmp_path):
    whole = make_trainer(tmp_path, max_steps=4)
    await whole.train()
    trainer = make_trainer(tmp_path, max_steps=4, save_steps=0)

    class StopsInStepTwo(Callback):
        async def on_step_end(self, step, metrics):
            if step == 2:
                trainer.request_stop()
                assert trainer.progress.state == "stopping"

    trainer.callbacks.append(StopsInStepTwo())
    assert await trainer.train() is trainer.agent
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 2
    summary = json.loads(trainer.run.summary.read_text())
    assert (summary["ended"], summary["why"]) == ("stopped", "stopped as asked after step 2 of 4")
    assert trainer.run.report.is_file()
    assert trainer.progress.state == "stopped"
    await trainer.train()
    assert trainer.step_number == 4
    assert same_bits(snapshot(trainer), snapshot(whole))
    assert json.loads(trainer.run.summary.read_text())["ended"] == "finished"
    await whole.close()
    await trainer.close()


@pytest.mark.parametrize("ends", ["resume", "request_stop"])
async def test_only_a_pause_that_goes_on_begins_work_again(ends):
    class Work:
        is_idle = True
        num_held = num_resumed = 0

        def pause(self):
            self.num_held += 1

        def resume(self):
            self.num_resumed += 1

    lifecycle, work = Lifecycle(), Work()
    lifecycle.begin()
    lifecycle.pause()
    going_on = asyncio.create_task(lifecycle.wait_while_paused(work))
    await lifecycle.wait_for("paused")
    getattr(lifecycle, ends)()
    assert await asyncio.wait_for(going_on, 10) == (ends == "resume")
    assert (work.num_held, work.num_resumed) == (1, ends == "resume")


async def test_a_stop_ends_a_pause(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.pause()
    training = asyncio.create_task(trainer.train())
    await trainer.wait_for("paused")
    trainer.request_stop()
    await training
    assert (trainer.step_number, trainer.progress.state) == (0, "stopped")
    await trainer.close()


async def test_progress_is_plain_json(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, eval_steps=1, eval_episodes=2)
    before = trainer.progress
    await trainer.train()
    after = json.loads(json.dumps(trainer.progress.to_json(), allow_nan=False))
    await trainer.close()
    assert (before.step, before.num_steps, before.metrics) == (0, 2, {})
    assert (after["state"], after["step"], after["num_steps"]) == ("finished", 2, 2)
    assert after["seconds"] > 0
    assert after["metrics"].keys() >= {"reward/mean", "eval/reward", "time/step"}
    assert after["why"] == "all 2 steps are done"
    assert after["best_step"] in (1, 2)


async def test_a_second_training_of_a_finished_run_says_so(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=1)
    await trainer.train()
    bits = snapshot(trainer)
    await trainer.train()
    said = "nothing is left to train: the one step is done: raise max_steps or num_episodes to go on"
    assert caplog.text.count(said) == 1
    assert same_bits(snapshot(trainer), bits)
    await trainer.close()


async def test_two_trainings_of_one_trainer_at_once_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    first = asyncio.create_task(trainer.train())
    await asyncio.sleep(0)
    with pytest.raises(ConfigurationError, match="this trainer is training: await that call"):
        await trainer.train()
    await first
    await trainer.close()


async def test_closing_waits_for_the_step_under_way_and_keeps_it(tmp_path):
    trainer, first, before = make_trainer(tmp_path, max_steps=100, save_steps=0), FirstStep(), threads()
    trainer.callbacks.append(first)
    async with trainer:
        training = asyncio.create_task(trainer.train())
        await first.over.wait()
    await training
    assert 1 <= trainer.step_number < 100
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == trainer.step_number
    assert threads() <= before


async def test_closing_from_within_a_callback_is_refused_with_the_cure(tmp_path):
    trainer = make_trainer(tmp_path)

    class Closes(Callback):
        async def on_step_end(self, step, metrics):
            await trainer.close()

    trainer.callbacks.append(Closes())
    with pytest.raises(ConfigurationError, match=r"in a callback use request_stop\(\)"):
        await trainer.train()
    await trainer.close()


# ------------------------------------------------------------------------------ cancellation


async def cancelled_in(trainer, moment, before):
    """Train until `moment`, cancel there, close: no thread is left. Returns the step of the checkpoint."""
    training = asyncio.create_task(trainer.train())
    await moment.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert trainer.progress.state == "stopped"
    assert json.loads(trainer.run.summary.read_text())["why"].startswith("cancelled after step")
    await trainer.close()
    assert threads() <= before
    return load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step


async def goes_on_as(whole, trainer, folder, **settings):
    again = make_trainer(folder, run=trainer.run, environment=Watched(), **settings)
    await again.load_checkpoint()
    await again.train()
    assert same_bits(snapshot(again), snapshot(whole))
    evaluations = [
        [
            (line.step, line.values["eval/reward"])
            for line in RunLog(one.run).metrics()
            if "eval/reward" in line.values
        ]
        for one in (whole, again)
    ]
    assert evaluations[0] == evaluations[1]
    assert again.progress.best_step == whole.progress.best_step
    await again.close()
    await whole.close()


SETTINGS = {"max_steps": 4, "eval_steps": 2, "eval_episodes": 3, "save_steps": 0}


@pytest.mark.long
@pytest.mark.parametrize("where", ["callback", "checkpoint", "evaluation", "pause"])
async def test_cancelled_anywhere_nothing_is_lost(tmp_path, where):
    whole = make_trainer(tmp_path, **SETTINGS)
    await whole.train()
    reached = asyncio.Event()
    environment, before = Watched(), threads()
    trainer = make_trainer(tmp_path, environment=environment, **SETTINGS)

    class Hangs(Callback):
        async def on_step_end(self, step, metrics):
            if where == "pause" and step == 2:
                trainer.pause()
                asyncio.get_running_loop().call_later(0.05, reached.set)
            if where == "callback" and step == 2:
                reached.set()
                await asyncio.Event().wait()

        async def on_checkpoint(self, step, path):
            if where == "checkpoint" and not reached.is_set():
                reached.set()
                await asyncio.Event().wait()

    def second_validation_conversation(call):
        if where == "evaluation" and call == 2 * 8 + 2:
            reached.set()
        return False

    environment.breaks = second_validation_conversation
    trainer.callbacks.append(Hangs())
    assert await cancelled_in(trainer, reached, before) == 2
    await goes_on_as(whole, trainer, tmp_path, **SETTINGS)


async def test_cancelled_while_a_checkpoint_is_written_the_checkpoint_is_whole(tmp_path):
    trainer, before = make_trainer(tmp_path, max_steps=4, save_steps=2), threads()
    await trainer.initialize()
    loop, writing = asyncio.get_running_loop(), asyncio.Event()
    write = trainer.learner.write_model_files

    def slowly(path):
        loop.call_soon_threadsafe(writing.set)
        write(path)

    trainer.learner.write_model_files = slowly
    assert await cancelled_in(trainer, writing, before) == 2


async def test_a_disk_that_takes_no_checkpoint_is_one_line_and_the_end_is_told(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, save_steps=0)
    heard = Heard()

    class TakesTheDiskAway(Callback):
        async def on_step_end(self, step, metrics):
            if step == 2:
                trainer.run.checkpoints.rmdir()
                trainer.run.checkpoints.write_text("no folder")

    trainer.callbacks += [heard, TakesTheDiskAway()]
    with pytest.raises(CheckpointError, match="cannot write checkpoint") as caught:
        await trainer.train()
    assert heard.moments[-1] == ("end", "failed")
    assert trainer.progress.why == str(caught.value)
    assert await trainer.wait_for("paused") == "failed"  # nobody waits for ever
    assert json.loads(trainer.run.summary.read_text())["ended"] == "failed"
    await trainer.close()


@pytest.mark.parametrize("times", [2, 5])
async def test_cancelled_again_and_again_it_still_ends(tmp_path, times):
    trainer, first = make_trainer(tmp_path, max_steps=50), FirstStep()
    trainer.callbacks.append(first)
    training = asyncio.create_task(trainer.train())
    await first.over.wait()
    for _ in range(times):
        training.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await training
    assert trainer.state == "stopped"
    await trainer.close()
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == trainer.step_number


async def test_a_model_that_does_not_load_is_a_training_that_failed(tmp_path):
    agent = MultiTurnAgent(AgentConfig(model_name=str(tmp_path / "nothing")))
    trainer = make_trainer(tmp_path, agent=agent)
    with pytest.raises(ConfigurationError, match="does not exist"):
        await trainer.train()
    assert trainer.progress.state == "failed"
    assert "does not exist" in trainer.progress.why
    await trainer.close()


async def test_the_agent_is_left_speaking_after_a_cancellation(tmp_path):
    agent = make_agent()
    trainer, first = make_trainer(tmp_path, agent=agent, max_steps=50), FirstStep()
    trainer.callbacks.append(first)
    training = asyncio.create_task(trainer.train())
    await first.over.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    await trainer.stop()
    assert isinstance(await agent.generate_response("hi"), str)
    await agent.close()


# ------------------------------------------------------------------------------ callbacks that break the end


class BreaksAt(Heard):
    """Breaks at one moment; cancels the training in its first step where that is asked for."""

    def __init__(self, moment, error, *, cancels=False):
        super().__init__()
        self.error, self.cancels = error, cancels
        setattr(self, moment, self.breaks)

    async def breaks(self, *_):
        raise self.error

    async def on_step_end(self, step, metrics):
        if self.cancels:
            asyncio.current_task().cancel()


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("moment", ["on_checkpoint", "on_train_end"])
@pytest.mark.first(2)
async def test_a_mistake_in_the_end_is_how_it_ended_and_everyone_is_told(tmp_path, moment, cancels):
    trainer = make_trainer(tmp_path, max_steps=2)
    heard = Heard()
    trainer.callbacks += [heard, BreaksAt(moment, TypeError("a mistake"), cancels=cancels)]
    with pytest.raises(TypeError, match="a mistake"):
        await asyncio.create_task(trainer.train())
    summary = json.loads(trainer.run.summary.read_text())
    assert (trainer.progress.state, trainer.progress.why) == ("failed", "a mistake")
    assert (summary["ended"], summary["why"]) == ("failed", "a mistake")
    assert heard.moments[-1][0] == "end"
    assert trainer.run.report.is_file()
    await trainer.close()


async def test_cancelled_while_it_ends_the_summary_is_written_and_the_end_is_told(tmp_path):
    trainer, heard = make_trainer(tmp_path, max_steps=1), Heard()

    class CancelsTwice(Callback):
        async def on_step_end(self, step, metrics):
            asyncio.current_task().cancel()

        async def on_checkpoint(self, step, path):
            asyncio.current_task().cancel()

    trainer.callbacks += [heard, CancelsTwice()]
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(trainer.train())
    summary = json.loads(trainer.run.summary.read_text())
    assert (summary["ended"], summary["why"]) == ("stopped", "cancelled after step 1 of 1")
    assert heard.moments[-1] == ("end", "stopped")
    assert trainer.run.report.is_file()
    await trainer.close()


async def test_a_cancelled_task_of_a_callbacks_own_is_a_callback_that_failed(tmp_path, caplog):
    class LosesATask(Callback):
        async def on_step_end(self, step, metrics):
            task = asyncio.create_task(asyncio.sleep(9))
            task.cancel()
            await task

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.callbacks.append(LosesATask())
    await asyncio.create_task(trainer.train())
    assert (trainer.state, trainer.step_number) == ("finished", 2)
    assert caplog.text.count("LosesATask.on_step_end failed: CancelledError") == 2
    await trainer.close()


# ------------------------------------------------------------------------------ before and after


async def test_a_stop_that_is_asked_for_after_the_end_does_not_stop_the_next_training(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    await trainer.train()
    trainer.request_stop()
    trainer.config = trainer.config.model_copy(update={"max_steps": 2})
    await trainer.train()
    assert (trainer.state, trainer.step_number) == ("finished", 2)
    await trainer.close()


class SetsConfig(Callback):
    """Gives the trainer other settings as its first step ends."""

    def __init__(self, *, stops=False, **settings):
        self.settings, self.stops = settings, stops
        self.conversations = []

    def on_train_begin(self, trainer):
        self.trainer = trainer

    def on_step_end(self, step, metrics):
        self.conversations.append(metrics["rollout/conversations"])
        if step == 1:
            self.trainer.config = self.trainer.config.model_copy(update=self.settings)
            if self.stops:
                self.trainer.request_stop()


@pytest.mark.long
async def test_settings_that_a_callback_gives_hold_from_the_next_step_on(tmp_path):
    longer = SetsConfig(num_episodes=8, save_total_limit=3)
    trainer = make_trainer(tmp_path, num_episodes=4, max_steps=None, save_steps=1, save_total_limit=1)
    trainer.callbacks.append(longer)
    await trainer.train()
    full = longer.conversations[0]
    assert longer.conversations == [full] * trainer.num_steps  # no step is cut short by the earlier length
    assert len(list(trainer.run.checkpoints.glob("step-*"))) == min(3, trainer.num_steps)
    await trainer.close()


@pytest.mark.long
async def test_overlapped_rollouts_go_on_with_settings_that_a_callback_gives(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, max_staleness=1)
    trainer.callbacks.append(SetsConfig(stops=True, max_steps=4))
    await trainer.train()
    async with asyncio.timeout(60):
        await trainer.train()
    assert (trainer.state, trainer.step_number) == ("finished", 4)
    await trainer.close()


async def test_an_initialize_that_is_cancelled_as_the_run_folder_opens_can_be_tried_again(
    tmp_path, monkeypatch
):
    trainer, opens = make_trainer(tmp_path, max_steps=1), threading.Event()
    initialize = JsonlTracker.__init__

    def slow(self, *arguments):
        initialize(self, *arguments)
        opens.set()
        time.sleep(0.3)

    monkeypatch.setattr(JsonlTracker, "__init__", slow)
    starting = asyncio.create_task(trainer.initialize())
    await asyncio.to_thread(opens.wait)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await trainer.train()
    assert trainer.state == "finished"
    assert len(list((tmp_path / "runs").glob("*-*"))) == 1
    await trainer.close()


async def test_a_learner_is_closed_where_its_trainer_cannot_begin(tmp_path, monkeypatch):
    closed = []
    first = make_trainer(tmp_path, max_steps=1)
    await first.initialize()
    second = make_trainer(tmp_path, max_steps=1, run=first.run)
    monkeypatch.setattr(Learner, "close", lambda self: closed.append(self))
    with pytest.raises(ConfigurationError, match="another trainer is writing"):
        await second.initialize()
    assert len(closed) == 1
    await second.close()
    await first.close()


async def test_an_agent_is_evaluated_before_its_trainer_begins(tmp_path):
    trainer = make_trainer(tmp_path)
    await trainer.agent.initialize()
    assert (await trainer.evaluate("test", episodes=2)).n == 2
    assert not trainer.is_ready
    await trainer.close()


async def test_a_training_that_goes_on_after_its_end_is_waited_for(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    await trainer.train()
    trainer.config = trainer.config.model_copy(update={"max_steps": 2})
    trainer.pause()
    training = asyncio.create_task(trainer.train())
    assert await trainer.wait_for("paused") == "paused"
    trainer.resume()
    await training
    assert await trainer.wait_for("paused") == "finished"
    await trainer.close()


@pytest.mark.parametrize("spoke", [False, True])
async def test_a_context_that_cannot_be_entered_leaves_no_thread_and_a_speaking_agent_speaking(
    tmp_path, spoke
):
    before, agent = threads(), make_agent()
    if spoke:
        await agent.initialize()
    trainer = make_trainer(tmp_path, agent=agent, eval_steps=1, environment=without_validation())
    with pytest.raises(ConfigurationError, match="validation"):
        async with trainer:
            pass
    if spoke:
        assert isinstance(await agent.generate_response("hi"), str)
        await agent.close()
    assert threads() <= before


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_closing_does_not_wait_without_end_for_a_callback(tmp_path, caplog, monkeypatch, kind):
    monkeypatch.setattr(callbacks, "CLOSING_TIMEOUT", 0.2)
    over, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Hangs(Callback):
        async def on_step_end(self, step, metrics):
            over.set()
            await asyncio.Event().wait()

    class HangsInAThread(Callback):
        def on_step_end(self, step, metrics):
            loop.call_soon_threadsafe(over.set)
            release.wait()

    trainer = make_trainer(tmp_path, max_steps=9)
    trainer.callbacks.append(Hangs() if kind == "async" else HangsInAThread())
    training = asyncio.create_task(trainer.train())
    await over.wait()
    await asyncio.sleep(0.5)
    assert not training.done()  # before the close nothing limits it
    await asyncio.wait_for(trainer.close(), 60)
    release.set()
    await training
    assert (trainer.state, trainer.step_number) == ("stopped", 1)
    assert (
        "on_step_end failed: TimeoutError: still at work 0.2 s after the trainer was to stop" in caplog.text
    )
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 1


async def test_a_state_that_never_comes_is_not_waited_for(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no training is ever 'pausd' \(did you mean 'paused'\?\)"):
        await make_trainer(tmp_path).wait_for("pausd")


class Misspelt(Callback):
    def on_stepend(self, step, metrics):
        pass


class Shop:
    """An object of the application's own: only what is nearly a moment's name is a mistake."""

    def on_step_end(self, step, metrics):
        pass

    def on_message(self, message):
        pass


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Misspelt(), r"Misspelt\.on_stepend would never be called \(did you mean 'on_step_end'\?\)"),
        (Shop, r"got the class: write Shop\(\)"),
        (print, "without a moment to hear of, got <built-in function print>: there are on_train_begin,"),
    ],
)
def test_a_callback_that_would_never_be_called_is_refused(callback, said):
    with pytest.raises(ConfigurationError, match=said):
        expect_callback(callback)
    expect_callback(Shop())


async def test_train_takes_a_config_or_a_profile(tmp_path):
    agent, environment, config = make_agent(), make_environment(), TrainingConfig(output_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="a config, or a profile and overrides, not both"):
        await train(agent, environment, even_share, config, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"write Shop\(\)"):
        await train(agent, environment, even_share, config, callbacks=[Shop])
