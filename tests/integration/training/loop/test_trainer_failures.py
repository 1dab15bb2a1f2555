"""What goes wrong during training: who fails alone, what stops a run, and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import math
import re
import threading

import pytest
from builders import bare
from tiny_training import Watched, make_agent, make_environment, make_trainer, same_bits, snapshot

from stateset_agents.core.reward import RewardFunction, reward_function
from stateset_agents.core.scoring.base import RewardResult
from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.checkpoint_files import latest_checkpoint, load_checkpoint
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import CheckpointError, TrainingStopped


@reward_function(local=True)
async def broken_reward(trajectory):
    raise ValueError("no judge")


@reward_function(local=True)
async def not_applicable(trajectory):
    return None


@reward_function(local=True)
async def once(trajectory):
    return 1.0 if trajectory.member == 0 else None


AT_ONCE = {"breaker_failures": 0}
"""Nothing is waited for."""


def metric(trainer, name):
    return [line.values.get(name) for line in RunLog(trainer.run).metrics()]


async def stopped(trainer):
    """The line that a run stops with."""
    with pytest.raises(TrainingStopped) as caught:
        await trainer.train()
    await trainer.close()
    return str(caught.value)


# ------------------------------------------------------------------------------ failures of members


async def test_failed_members_drop_out_alone_and_their_siblings_train(tmp_path):
    # conversations start in order: 8 a step; the second of each step fails, and again when retried
    environment = Watched(lambda call: call % 8 == 2)
    trainer = make_trainer(tmp_path, environment=environment, max_steps=2, episode_retries=0)
    await trainer.train()
    assert metric(trainer, "rollout/failed") == [1, 1]
    assert metric(trainer, "group/dropped") == [0, 0]
    assert metric(trainer, "optimizer/skipped") == [0, 0]
    rollouts = list(RunLog(trainer.run).rollouts())
    failed = [one for one in rollouts if one.status == "failed"]
    assert [bare(one.error) for one in failed] == ["OSError: the database is away"] * 2
    assert all(one.advantages is None and one.reward is None for one in failed)
    assert sum(one.advantages is not None for one in rollouts) == 14
    assert trainer.summary()["deterministic"]
    await trainer.close()


async def test_a_failed_conversation_is_played_again_and_the_summary_says_it(tmp_path):
    environment = Watched(lambda call: call == 3)
    trainer = make_trainer(tmp_path, environment=environment, max_steps=1, episode_retries=1)
    await trainer.train()
    assert metric(trainer, "rollout/failed") == [0]
    assert trainer.summary()["deterministic"] is False
    await trainer.close()


async def test_an_unscored_member_is_not_taken_for_a_zero(tmp_path):
    class Sometimes(RewardFunction):
        local = True

        async def score(self, trajectory):
            if trajectory.member == 0:
                raise ValueError("no judge")
            return RewardResult(score=1.0)

    # were the unscored member a 0, its siblings would have an advantage
    trainer = make_trainer(tmp_path, reward=Sometimes(), max_steps=1, beta=0.0)
    await trainer.initialize()
    before = snapshot(trainer)
    await trainer.step()
    assert metric(trainer, "rollout/unscored") == [2]
    assert metric(trainer, "optimizer/skipped") == [1]
    assert same_bits(snapshot(trainer), before)
    await trainer.close()


# ------------------------------------------------------------------------------ failures of steps


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"environment": Watched(lambda call: True)}, "8 of 8 conversations failed.*OSError: the database"),
        (
            {"reward": broken_reward},
            "0 of 8 conversations failed.*broken_reward failed.*ValueError: no judge",
        ),
        ({"reward": once}, "the reward is None or NaN for 6 of 8 conversations: give each a number"),
        ({"reward": not_applicable}, "every reward is None: .* a return is missing"),
    ],
)
async def test_everything_failing_in_the_first_step_stops_with_one_line_and_a_checkpoint(
    tmp_path, parts, said
):
    trainer = make_trainer(tmp_path, episode_retries=0, **parts)
    line = await stopped(trainer)
    assert line.startswith("step 1 has no group with 2 scored members")
    assert "\n" not in line
    assert re.search(said, line)
    assert trainer.step_number == 1
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 1


async def test_steps_without_a_usable_group_are_borne_until_too_many_come_in_a_row(tmp_path):
    broken_steps = {2, 3, 5, 6, 7, 8}
    environment = Watched(lambda call: (call - 1) // 8 + 1 in broken_steps)
    settings = {"max_steps": 20, "max_failed_steps": 3, "episode_retries": 0, "beta": 0.0, **AT_ONCE}
    trainer = make_trainer(tmp_path, environment=environment, **settings)
    assert (await stopped(trainer)).startswith("step 7 has no group")
    assert metric(trainer, "optimizer/skipped") == [0, 1, 1, 0, 1, 1, 1]
    # the schedule stands where the last good step left it
    assert trainer.learner.optimization.num_updates == 2


@pytest.mark.long
async def test_a_resumed_run_remembers_how_many_steps_failed(tmp_path):
    settings = {"max_steps": 9, "max_failed_steps": 3, "episode_retries": 0, "save_steps": 1, **AT_ONCE}
    trainer = make_trainer(tmp_path, environment=Watched(lambda call: call > 8), **settings)
    await trainer.initialize()
    for _ in range(3):
        await trainer.step()
    await trainer.save_checkpoint()
    await trainer.close()
    again = make_trainer(tmp_path, environment=Watched(lambda call: True), run=trainer.run, **settings)
    await again.load_checkpoint()
    assert (await stopped(again)).startswith("step 4 has no group")


class Hears(Callback):
    def __init__(self):
        self.heard = []

    def on_warning(self, step, finding):
        self.heard.append((step, finding))


@pytest.mark.long
async def test_an_outage_that_does_not_end_is_waited_for_once_and_stops_with_its_cause(tmp_path):
    environment = Watched(lambda call: call > 16)
    patient = {"breaker_failures": 3, "breaker_pause": 0.05, "outage_patience": 0.3, "episode_retries": 0}
    trainer = make_trainer(tmp_path, environment=environment, max_steps=20, **patient)
    line = await stopped(trainer)
    assert re.fullmatch(
        r"step 5 has no group with 2 scored members \(8 of 8 conversations failed\); first cause: "
        r"EnvironmentFailure: environment failed \d+ times in a row \(last: OSError: the database is away "
        r"\(at .*\.py:\d+\)\), and was waited for 0.3 s",
        line,
    )
    assert environment.calls < 16 + 20  # the others did not ask
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 5
    assert metric(trainer, "breaker/environment")[:2] == [0.0, 0.0]
    assert metric(trainer, "breaker/environment")[-1] > 0
    told = [event["state"] for event in RunLog(trainer.run).events() if event["event"] == "breaker"]
    assert told[:3] == ["open", "half-open", "open"]
    again = make_trainer(tmp_path, run=trainer.run, environment=Watched(), max_steps=20, **patient)
    await again.load_checkpoint()
    await again.step()
    assert again.step_number == 6
    await again.close()


async def test_gradients_that_are_not_finite_stop_the_run_with_the_weights_as_they_were(tmp_path):
    hears = Hears()
    trainer = make_trainer(tmp_path, max_steps=9, max_failed_steps=2)
    trainer.callbacks.append(hears)
    await trainer.initialize()
    await trainer.step()
    before = snapshot(trainer)
    trainer.learner.reference.model.lm_head.weight.data.fill_(math.nan)
    line = await stopped(trainer)
    assert line.startswith("step 3 has the loss nan (kl/reference nan, loss/kl nan): lower learning_rate")
    assert same_bits(snapshot(trainer), before)
    assert metric(trainer, "optimizer/skipped") == [0, 1, 1]
    assert [(step, finding.check, finding.verdict) for step, finding in hears.heard] == [
        (1, "cut replies", "fail"),  # three tokens are all there may be
        (2, "numbers", "fail"),
    ]
    told = [event for event in RunLog(trainer.run).events() if event["event"] == "warning"]
    assert [(event["step"], event["check"]) for event in told] == [(1, "cut replies"), (2, "numbers")]
    assert told[1]["cure"].startswith("lower learning_rate")


async def test_a_mistake_in_user_code_travels_and_the_finished_steps_are_kept(tmp_path):
    class Mistaken(RewardFunction):
        local = True
        calls = 0

        async def score(self, trajectory):
            self.calls += 1
            return RewardResult(score=len(trajectory) if self.calls > 16 else 0.1 * trajectory.member)

    trainer = make_trainer(tmp_path, reward=Mistaken(), max_steps=5)
    with pytest.raises(TypeError, match="has no len"):
        await trainer.train()
    assert trainer.step_number == 2
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 2
    await trainer.close()


class Observes(RewardFunction):
    """Scores as `even_share`, and lets `look` see the scores."""

    local = True

    def __init__(self, look):
        self.look = look

    async def score(self, trajectory):
        ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
        return RewardResult(score=sum(token % 2 == 0 for token in ids) / len(ids))

    def observe(self, results):
        self.look(results)


def raises(error):
    def look(results):
        raise error

    return look


@pytest.mark.long
async def test_a_reward_that_cannot_note_its_scores_is_a_line_and_the_step_is_whole(tmp_path, caplog):
    trainer = make_trainer(tmp_path, reward=Observes(raises(OSError("the database is away"))), max_steps=2)
    await trainer.train()
    line = "Observes.observe failed: OSError: the database is away"
    assert caplog.text.count(line) == 2
    failed = [event for event in RunLog(trainer.run).events() if event["event"] == "reward failed"]
    assert [(event["step"], bare(event["error"])) for event in failed] == [(1, line), (2, line)]
    assert (trainer.state, trainer.agent.backend.version) == ("finished", 2)
    assert metric(trainer, "policy/version") == [1, 2]
    assert trainer.summary()["deterministic"] is False
    await trainer.close()


async def test_a_mistake_in_observe_travels_when_the_step_is_whole(tmp_path):
    trainer = make_trainer(tmp_path, reward=Observes(raises(TypeError("no such thing"))))
    with pytest.raises(TypeError, match="no such thing"):
        await trainer.train()
    assert (trainer.step_number, trainer.agent.backend.version) == (1, 1)
    assert metric(trainer, "policy/version") == [1]
    assert same_bits(dict(trainer.agent.backend.model.state_dict()), trainer.learner.weights())
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 1
    await trainer.close()


async def test_user_code_of_the_trainer_that_blocks_does_not_hold_up_the_event_loop(tmp_path):
    loop, answered = asyncio.get_running_loop(), threading.Event()

    def asks_the_loop(*_):
        answered.clear()
        loop.call_soon_threadsafe(answered.set)
        assert answered.wait(20)  # only the event loop can set it

    environment = make_environment()
    scenarios = environment.scenarios
    environment.scenarios = lambda split: (asks_the_loop(), scenarios(split))[1]
    trainer = make_trainer(
        tmp_path, reward=Observes(asks_the_loop), environment=environment, max_steps=1, eval_steps=1
    )
    await asyncio.wait_for(trainer.train(), 60)
    await trainer.close()


# ------------------------------------------------------------------------------ cancellation


def dropping(when=lambda call: False):
    """Four steps of two passes with dropout on, and nothing saved on the way."""
    settings = {"max_steps": 4, "num_iterations": 2, "dropout": True, "save_steps": 0}
    return {**settings, "agent": make_agent(dropout=0.2), "environment": Watched(when)}


async def straight(folder, steps):
    """The bits of a run that nothing disturbed, after each of its steps."""
    trainer = make_trainer(folder, **dropping())
    await trainer.initialize()
    bits = [snapshot(trainer)]
    for _ in range(steps):
        await trainer.step()
        bits.append(snapshot(trainer))
    await trainer.close()
    return bits


async def cancel_when(event, trainer, times=1):
    """Train until the event, cancel (again and again), and wait for the end."""
    task = asyncio.create_task(trainer.train())
    await event.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def goes_on(folder, trainer, whole):
    """The cancelled run's checkpoint holds its last whole step, and a resume ends bit-equal."""
    kept = load_checkpoint(latest_checkpoint(trainer.run.checkpoints))
    assert kept.step == trainer.step_number
    weights = {name: tensor for name, tensor in whole[kept.step].items() if not name.startswith("optimizer")}
    assert same_bits(dict(kept.weights), weights)
    await trainer.close()
    again = make_trainer(folder, run=trainer.run, **dropping())
    await again.load_checkpoint()
    await again.train()
    assert same_bits(snapshot(again), whole[4])
    await again.close()


async def test_cancelled_in_the_middle_of_a_rollout_it_leaves_the_last_whole_step(tmp_path):
    whole = await straight(tmp_path, 4)
    reached = asyncio.Event()

    def third_step(call):
        if call == 2 * 8 + 5:
            reached.set()
        return False

    trainer = make_trainer(tmp_path, **dropping(third_step))
    await cancel_when(reached, trainer)
    assert trainer.step_number == 2
    await goes_on(tmp_path, trainer, whole)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled_in_the_middle_of_an_update_it_finishes_the_step(tmp_path, times):
    whole = await straight(tmp_path, 4)
    trainer = make_trainer(tmp_path, **dropping())
    await trainer.initialize()
    loop, updating = asyncio.get_running_loop(), asyncio.Event()

    def enter(*_):
        if trainer.step_number == 1 and trainer.learner.policy.model.training:
            loop.call_soon_threadsafe(updating.set)

    trainer.learner.policy.model.base_model.register_forward_pre_hook(enter)
    await cancel_when(updating, trainer, times)
    assert trainer.step_number == 2
    await goes_on(tmp_path, trainer, whole)


async def test_an_update_that_breaks_midway_is_not_kept(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, num_iterations=2, save_steps=2)
    await trainer.initialize()
    updates = []

    def second_pass_of_step_3(*_):
        updates.append(trainer.step_number)
        if len(updates) == 6:
            raise MemoryError("no more")

    trainer.learner.optimization.optimizer.register_step_pre_hook(second_pass_of_step_3)
    with pytest.raises(MemoryError):
        await trainer.train()
    assert trainer.learner.midway
    assert [path.name for path in trainer.run.checkpoints.iterdir()] == ["step-000002"]
    with pytest.raises(CheckpointError, match="broke off midway"):
        await trainer.save_checkpoint()
    await trainer.close()


async def test_a_save_while_a_step_goes_on_waits_for_its_end(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    await trainer.initialize()
    step = asyncio.create_task(trainer.step())
    loop, updating = asyncio.get_running_loop(), asyncio.Event()

    def enter(*_):
        loop.call_soon_threadsafe(updating.set)

    trainer.learner.policy.model.base_model.register_forward_pre_hook(enter)
    await updating.wait()
    path = await trainer.save_checkpoint()
    await step
    assert path.name == "step-000001"
    assert same_bits(dict(load_checkpoint(path).weights), dict(trainer.learner.weights()))
    await trainer.close()
