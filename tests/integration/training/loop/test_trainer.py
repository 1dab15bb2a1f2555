"""The whole loop on tiny models: steps, resume, evaluation, recommended settings, and the event loop."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import torch
from tiny_training import (
    SCENARIOS,
    even_share,
    make_agent,
    make_environment,
    make_trainer,
    same_bits,
    snapshot,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from stateset_agents import Callback, train
from stateset_agents.backends.loading import load_backend
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import CompositeReward, reward_function
from stateset_agents.rewards.composites import NormalizedReward
from stateset_agents.rewards.reasoning import create_math_answer_reward
from stateset_agents.rewards.shaping import PotentialShaping
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import CheckpointError, ConfigurationError


async def trained(folder: Path, **settings):
    """(weights and moments, trainer) after a whole run."""
    trainer = make_trainer(folder, **settings)
    await trainer.train()
    bits = snapshot(trainer)
    await trainer.close()
    return bits, trainer


def metrics(trainer):
    """Name -> value of each step's line, what depends on the clock left out."""
    clock = ("time/", "memory/", "tokens/per_second")
    return [
        (line.step, {name: value for name, value in line.values.items() if not name.startswith(clock)})
        for line in RunLog(trainer.run).metrics()
    ]


async def test_a_run_leaves_metrics_rollouts_checkpoint_and_summary(tmp_path):
    _, trainer = await trained(tmp_path)
    lines = metrics(trainer)
    assert [step for step, _ in lines] == [1, 2, 3]
    assert lines[0][1]["rollout/conversations"] == 8
    rollouts = list(RunLog(trainer.run).rollouts("train"))
    assert len(rollouts) == 24
    first = rollouts[0]
    assert len(first.token_ids) == len(first.mask) == len(first.logprobs) == len(first.versions)
    assert len(first.advantages) == sum(first.mask)
    assert {version for rollout in rollouts[-8:] for version in rollout.versions} == {-1, 2}
    summary = json.loads(trainer.run.summary.read_text())
    assert (summary["steps"], summary["seed"], summary["deterministic"]) == (3, 0, True)
    assert summary["train_seconds"] > 0
    model = AutoModelForCausalLM.from_pretrained(trainer.run.checkpoints / "step-000003" / "model")
    assert same_bits(dict(model.state_dict()), trainer.learner.weights())
    assert AutoTokenizer.from_pretrained(trainer.run.checkpoints / "step-000003" / "model")("hi").input_ids


@pytest.mark.long
@pytest.mark.parametrize(("settings", "lines"), [({}, 3), ({"progress": False}, 0)])
async def test_a_program_prints_a_line_a_step_on_stderr_unless_told_not_to(tmp_path, capsys, settings, lines):
    async with make_agent() as agent:
        config = {"max_steps": 3, "num_generations": 4, "per_device_train_batch_size": 2}
        await train(agent, make_environment(), even_share, output_dir=str(tmp_path), **config, **settings)
    printed = capsys.readouterr()
    found = [line for line in printed.err.splitlines() if line.startswith("step ")]
    assert len(found) == lines
    (run,) = tmp_path.glob("*-run*")
    assert (f"run folder: {run}" in printed.err.splitlines()) == bool(lines)
    assert printed.out == ""
    for step, line in enumerate(found, 1):
        assert re.match(rf"step {step}/3  reward \d\.\d+ ", line)


async def test_a_reward_that_blocks_the_event_loop_is_warned_of_by_its_line(tmp_path):
    asked = 0

    @reward_function(name="even_share", local=True)
    async def blocking(trajectory):
        nonlocal asked
        asked += 1
        if asked == 1:
            time.sleep(1.3)  # noqa: ASYNC251  # holds the loop up on purpose
        return await even_share._function(trajectory)

    class Heard(Callback):
        def on_warning(self, step, finding):
            heard.append(finding)

    heard = []
    trainer = make_trainer(tmp_path, max_steps=1, reward=blocking)
    trainer.callbacks.append(Heard())
    await trainer.train()
    [finding] = [one for one in heard if one.check == "event loop"]
    assert re.search(
        r"stood still for \d\.\d s in your code \(test_trainer\.py:\d+, blocking\)", finding.seen
    )
    [line] = RunLog(trainer.run).metrics()
    assert 1.0 <= line.values["time/loop_lag_user"] <= line.values["time/loop_lag"]
    await trainer.close()


async def test_rollouts_that_sleep_free_their_cache_for_the_update(tmp_path):
    trainer = make_trainer(tmp_path, rollout_sleep=True)
    await trainer.initialize()
    backend = trainer.agent.backend
    await trainer.generate_trajectories(trainer.environment.scenarios("train")[:1])
    assert backend.running.model.num_slots > 0
    await trainer.step()
    await backend.score([1, 2])  # whatever was asked of the worker before has been done by now
    assert backend.running.model.num_slots == 0
    await trainer.close()


@pytest.mark.parametrize("sleeps", [True, False])
async def test_rollouts_that_sleep_give_back_what_the_update_freed(tmp_path, monkeypatch, sleeps):
    trims = []
    for module in ("training.loop.step", "training.update.learner"):
        where = f"stateset_agents.{module}.trim_memory"
        monkeypatch.setattr(where, lambda module=module: trims.append(module.rsplit(".")[-1]))
    trainer = make_trainer(tmp_path, rollout_sleep=sleeps)
    await trainer.initialize()
    metrics = await trainer.step()
    micro_batches = int(metrics["batch/micro_batches"])
    assert micro_batches > 0
    assert trims == (["learner"] * micro_batches + ["step"]) * sleeps
    await trainer.close()


async def test_the_agent_speaks_with_the_trained_weights(tmp_path):
    agent = make_agent()
    before = {name: tensor.clone() for name, tensor in agent.backend.model.state_dict().items()}
    trainer = make_trainer(tmp_path, agent=agent)
    assert await trainer.train() is agent
    assert agent.backend.version == 3
    assert same_bits(dict(agent.backend.model.state_dict()), trainer.learner.weights())
    assert not same_bits(before, trainer.learner.weights())
    await trainer.close()


async def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path):
    one, first = await trained(tmp_path)
    two, second = await trained(tmp_path)
    three, _ = await trained(tmp_path, seed=1)
    assert same_bits(one, two)
    assert metrics(first) == metrics(second)
    assert not same_bits(one, three)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.first(2)
async def test_on_the_first_pass_the_ratio_is_one_at_the_temperature_of_the_rollouts(
    tmp_path, temperature, family
):
    settings = {"temperature": temperature, "learning_rate": 1e-3, "log_rollouts": False}
    _, trainer = await trained(tmp_path, agent=make_agent(family), **settings)
    for _, line in metrics(trainer):
        assert line["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert line["policy/ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.long
async def test_num_episodes_ends_the_run_with_a_short_last_step(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=None, num_episodes=5)
    await trainer.train()
    assert [line["rollout/conversations"] for _, line in metrics(trainer)] == [8, 8, 4]
    with pytest.raises(ConfigurationError, match="all 3 steps are done: raise max_steps or num_episodes"):
        await trainer.step()
    await trainer.close()


# ------------------------------------------------------------------------------ resume


async def resumed(trainer_before, folder, checkpoint=None, **settings):
    """Go on with a run in its folder until its end."""
    trainer = make_trainer(folder, run=trainer_before.run, **settings)
    await trainer.load_checkpoint(checkpoint)
    await trainer.train()
    bits = snapshot(trainer)
    await trainer.close()
    return bits, trainer


@pytest.mark.parametrize(
    "kl",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"kl_controller": "ziegler", "kl_horizon": 10, "kl_target": 0.001},
    ],
)
async def test_a_resumed_run_ends_bit_equal_with_dropout_on(tmp_path, kl):
    settings = {"max_steps": 5, "num_iterations": 2, "dropout": True, **kl}
    whole, straight = await trained(tmp_path, agent=make_agent(dropout=0.3), **settings)
    without, _ = await trained(tmp_path, agent=make_agent(), **settings)
    assert not same_bits(whole, without)  # dropout is on
    half = make_trainer(tmp_path, agent=make_agent(dropout=0.3), **settings)
    await half.initialize()
    for _ in range(2):
        await half.step()
    await half.save_checkpoint()
    await half.close()
    torch.manual_seed(99)  # the process's own generator must not matter
    again, after = await resumed(half, tmp_path, agent=make_agent(dropout=0.3), **settings)
    assert same_bits(again, whole)
    assert metrics(after) == metrics(straight)
    assert after.summary()["deterministic"]


async def test_a_resumed_run_weighs_by_the_level_that_the_run_would_have_taken(tmp_path):
    settings = {"max_steps": 3, "precision": "bf16"}
    whole, straight = await trained(tmp_path, **settings)
    half = make_trainer(tmp_path, **settings)
    await half.initialize()
    await half.step()
    await half.save_checkpoint()
    await half.close()
    again, after = await resumed(half, tmp_path, **settings)
    assert same_bits(again, whole)
    assert metrics(after) == metrics(straight)
    levels = [line.values["policy/importance_level"] for line in RunLog(straight.run).metrics()]
    assert levels == [1.0, 2.0, 2.0]


@pytest.mark.long
async def test_resuming_an_older_checkpoint_drops_what_came_after_it(tmp_path):
    whole, straight = await trained(tmp_path, max_steps=4, save_steps=1, save_total_limit=9)
    (straight.run.checkpoints / "step-000004" / "state.json").write_text("torn")
    older = straight.run.checkpoints / "step-000002"
    trainer = make_trainer(tmp_path, run=straight.run, max_steps=4, save_steps=1, save_total_limit=9)
    await trainer.load_checkpoint(older)
    assert sorted(path.name for path in straight.run.checkpoints.iterdir()) == ["step-000001", "step-000002"]
    assert [step for step, _ in metrics(trainer)] == [1, 2]
    await trainer.train()
    assert same_bits(snapshot(trainer), whole)
    assert [step for step, _ in metrics(trainer)] == [1, 2, 3, 4]
    await trainer.close()


async def refusal(folder, run, **settings):
    """The one line that a resume with other settings ends with; config.yaml stays as it was."""
    config = run.config.read_text()
    trainer = make_trainer(folder, run=run, **settings)
    with pytest.raises(CheckpointError) as caught:
        await trainer.load_checkpoint()
    await trainer.close()
    assert run.config.read_text() == config
    return str(caught.value)


@pytest.mark.long
async def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_lost(tmp_path):
    _, trainer = await trained(tmp_path, max_steps=3)
    run = trainer.run
    assert "training.beta was 0.1 and is 0.5" in await refusal(tmp_path, run, beta=0.5)
    said = await refusal(tmp_path, run, agent=make_agent(max_new_tokens=4))
    assert "agent.max_new_tokens was 3 and is 4" in said
    assert "other weights than the model's" in await refusal(tmp_path, run, agent=make_agent("qwen3"))
    fewer = make_environment(scenarios=SCENARIOS[:3])
    assert "other scenarios" in await refusal(tmp_path, run, environment=fewer)
    other_reward = reward_function(local=True, name="odd")(even_share._function)
    assert "reward was 'even_share' and is 'odd'" in await refusal(tmp_path, run, reward=other_reward)
    # how long the run is may change
    _, after = await resumed(trainer, tmp_path, max_steps=4)
    assert after.step_number == 4


@pytest.mark.long
async def test_another_thread_count_is_allowed_and_said(tmp_path, caplog):
    _, trainer = await trained(tmp_path, max_steps=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        _, after = await resumed(trainer, tmp_path, max_steps=2)
    finally:
        torch.set_num_threads(threads)
    assert f"so not bit-equal: threads was {threads} and is {threads + 1}" in caplog.text
    assert after.summary()["deterministic"] is False


async def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path):
    whole, _ = await trained(tmp_path)
    trainer = make_trainer(tmp_path)
    await trainer.initialize()
    await trainer.step()
    await trainer.close()
    again, after = await resumed(trainer, tmp_path)
    assert same_bits(again, whole)
    assert [step for step, _ in metrics(after)] == [1, 2, 3]


# ------------------------------------------------------------------------------ evaluation and set-up


@pytest.mark.long
async def test_validation_runs_every_eval_steps_and_changes_no_weight(tmp_path):
    plain, _ = await trained(tmp_path, max_steps=4)
    watched, trainer = await trained(tmp_path, max_steps=4, eval_steps=2, eval_episodes=3)
    evaluated = [step for step, line in metrics(trainer) if "eval/reward" in line]
    assert evaluated == [2, 4]
    assert same_bits(plain, watched)


async def test_validation_that_cannot_be_is_refused_before_the_first_step(tmp_path):
    train_only = make_environment(scenarios=[one for one in SCENARIOS if one["split"] == "train"])
    trainer = make_trainer(tmp_path, environment=train_only, eval_steps=1)
    with pytest.raises(ConfigurationError, match="no validation scenario"):
        await trainer.initialize()
    await trainer.close()


async def test_a_truth_that_is_not_its_own_answer_is_refused_before_the_first_step(tmp_path):
    power = {"id": "power", "opening": "2^10?", "context": {"answer": "2^{10}"}}
    trainer = make_trainer(
        tmp_path,
        environment=make_environment(scenarios=[*SCENARIOS, power]),
        reward=CompositeReward([(create_math_answer_reward(), 1.0), (even_share, 1.0)]),
    )
    with pytest.raises(ConfigurationError, match=r"of scenario 'power': its own answer .* would be wrong"):
        await trainer.initialize()
    await trainer.close()


async def test_a_small_validation_split_is_played_whole_unless_a_number_is_asked_for(tmp_path):
    trainer = make_trainer(tmp_path, eval_steps=1, eval_episodes=5)
    await trainer.initialize()
    assert len((await trainer.evaluate()).groups) == 4
    with pytest.raises(ConfigurationError, match="4 validation scenarios, got 5"):
        await trainer.evaluate(episodes=5)
    await trainer.close()


async def test_a_card_s_settings_hold_where_the_user_set_nothing(tmp_path):
    agent = make_agent()
    agent.backend.recommended = {"learning_rate": 0.5, "beta": 0.02, "kl_estimator": "k2"}
    trainer = make_trainer(tmp_path, agent=agent, beta=0.3)
    await trainer.initialize()
    assert trainer.recommended == {"kl_estimator": "k2"}  # make_trainer sets the learning rate itself
    assert (trainer.config.learning_rate, trainer.config.beta) == (1e-2, 0.3)
    assert trainer.learner.config.kl_estimator == "k2"
    assert RunLog(trainer.run).config()["training"]["kl_estimator"] == "k2"
    await trainer.close()


async def test_training_refuses_more_kept_tokens_than_it_carries(tmp_path):
    trainer = make_trainer(tmp_path, agent=make_agent(top_k=513))
    with pytest.raises(ConfigurationError, match=r"AgentConfig\.top_k must be at most 512, got 513"):
        await trainer.train()
    await trainer.close()


@pytest.mark.parametrize(
    ("settings", "training"),
    [
        ({"top_k": 5}, {}),
        ({"top_p": 0.9}, {"lora": {"rank": 4}}),
        ({"top_k": 9, "top_p": 0.8}, {"beta": 0.1}),
    ],
)
async def test_truncated_rollouts_train_among_what_was_kept(tmp_path, settings, training):
    agent = make_agent(**settings)
    trainer = make_trainer(tmp_path, agent=agent, max_steps=2, log_rollouts=True, **training)
    await trainer.train()
    await trainer.close()
    folder = next((tmp_path / "runs").iterdir())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ratios = [line["policy/first_ratio_max"] for line in metrics if "policy/first_ratio_max" in line]
    assert ratios
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4)
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        for turn in json.loads(line).get("turns", ()):
            counts = turn["sampling_mask"]["counts"]
            assert len(counts) == turn["sampled_tokens"]
            assert all(0 < count <= settings.get("top_k", 512) for count in counts)


async def test_a_backend_without_weights_is_refused(tmp_path):
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(["hello"]))
    trainer = make_trainer(tmp_path, agent=agent)
    with pytest.raises(ConfigurationError, match="a ScriptedBackend has no weights to train"):
        await trainer.train()
    await trainer.close()


async def test_what_needs_initialize_says_so(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigurationError, match=r"await trainer\.initialize\(\) first"):
        _ = trainer.learner
    await trainer.close()


async def test_one_call_trains_and_leaves_the_agent_speaking(tmp_path):
    steps = []

    class Watch(Callback):
        def on_step_end(self, step, metrics):
            steps.append(step)

    agent = await train(
        make_agent(),
        make_environment(),
        even_share,
        profile="aggressive",
        callbacks=[Watch()],
        max_steps=1,
        output_dir=str(tmp_path),
    )
    assert steps == [1]
    assert isinstance(await agent.generate_response("hi"), str)
    config = RunLog.open(tmp_path / "latest").config()["training"]
    assert (config["profile"], config["num_iterations"]) == ("aggressive", 2)
    await agent.close()


async def test_the_event_loop_goes_on_answering_while_an_update_runs(tmp_path):
    trainer = make_trainer(tmp_path, num_generations=32, max_steps=1, gradient_accumulation_steps=4)
    await trainer.initialize()
    marks, wakes = [], []
    trainer.learner.policy.model.base_model.register_forward_pre_hook(
        lambda *_: marks.append(time.perf_counter())
    )
    trainer.learner.optimization.optimizer.register_step_post_hook(
        lambda *_: marks.append(time.perf_counter())
    )

    async def watch():
        while True:
            await asyncio.sleep(0.001)
            wakes.append(time.perf_counter())

    watcher = asyncio.create_task(watch())
    line = await trainer.step()
    watcher.cancel()
    await trainer.close()
    assert sum(marks[0] < wake < marks[-1] for wake in wakes) > 10  # none, were it blocked
    assert 0 < line["time/loop_lag"] < line["time/step"]


async def test_two_trainings_of_one_trainer_at_once_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3)
    await trainer.initialize()
    first = asyncio.ensure_future(trainer.train())
    await asyncio.sleep(0)
    with pytest.raises(ConfigurationError, match="a step of this trainer is under way"):
        await trainer.step()
    await first
    assert trainer.step_number == 3
    await trainer.close()


@pytest.mark.long
async def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path):
    first = make_trainer(tmp_path, max_steps=2)
    await first.train()
    again = make_trainer(tmp_path, max_steps=3)
    await again.load_checkpoint(first.run.path)
    assert again.step_number == 2
    with pytest.raises(CheckpointError, match="does not exist: give a checkpoint or a run folder"):
        await again.load_checkpoint(tmp_path / "nowhere")
    await first.close()
    await again.close()


async def test_a_plain_function_may_be_the_reward(tmp_path):
    def brief(replies):
        return 1.0 / (1 + len(replies[-1].content))

    async with make_trainer(tmp_path, reward=brief, max_steps=1) as trainer:
        assert trainer.reward_fn.name == "brief"
        metrics = await trainer.step()
    assert metrics["rollout/unscored"] == 0.0
    with pytest.raises(
        ConfigurationError, match="a reward must be a RewardFunction or a function, got float"
    ):
        make_trainer(tmp_path, reward=0.5)


@pytest.mark.long
async def test_running_statistics_of_a_reward_move_once_a_step_and_are_resumed_bit_equal(tmp_path):
    whole = make_trainer(tmp_path, reward=NormalizedReward(even_share), eval_steps=1)
    async with whole:
        await whole.train()
        count = whole.reward_fn.running.count
    assert count == 3 * 2 * 4  # the evaluations' conversations are not among them

    part = make_trainer(tmp_path, reward=NormalizedReward(even_share), eval_steps=1, save_steps=1)
    async with part:
        for _ in range(2):
            await part.step()
        path = await part.save_checkpoint()
    resumed = make_trainer(tmp_path, reward=NormalizedReward(even_share), eval_steps=1, save_steps=1)
    async with resumed:
        await resumed.load_checkpoint(path)
        assert resumed.reward_fn.running == part.reward_fn.running
        await resumed.train()
        assert resumed.reward_fn.running == whole.reward_fn.running
        assert same_bits(snapshot(resumed), snapshot(whole))


def progress(replies):
    return 0.5 * len(replies)


@pytest.mark.parametrize(
    ("settings", "options", "cure"),
    [
        ({}, {}, "set advantage_estimator to turn_group"),
        ({"advantage_estimator": "branch"}, {}, "set advantage_estimator to turn_group"),
        ({"advantage_estimator": "turn_group"}, {}, "give PotentialShaping bootstrapped=False"),
        ({"advantage_estimator": "turn_gae", "gamma": 0.9}, {}, r"give PotentialShaping gamma=0\.9"),
        (
            {"advantage_estimator": "turn_gae", "bootstrap_truncated": False},
            {},
            "give PotentialShaping bootstrapped=False",
        ),
        ({"advantage_estimator": "token_gae"}, {"bootstrapped": False}, "PotentialShaping bootstrapped=True"),
    ],
)
async def test_shaping_that_the_credit_would_undo_or_bend_is_refused(tmp_path, settings, options, cure):
    reward = PotentialShaping(even_share, progress, **options)
    with pytest.raises(ConfigurationError, match=cure):
        await make_trainer(tmp_path, reward=reward, **settings).initialize()


async def test_shaping_reaches_the_turns_that_moved_the_potential(tmp_path):
    reward = PotentialShaping(even_share, progress, bootstrapped=False)
    async with make_trainer(tmp_path, reward=reward, advantage_estimator="turn_group") as trainer:
        [group, *_] = await trainer.generate_trajectories(trainer.environment.scenarios("train")[:1])
        assert [one.turn_rewards for one in group.trajectories] == [(0.5, -0.5)] * 4
        metrics = await trainer.step()
    assert metrics["reward/shaping"] == 0.0
    assert metrics["reward/mean"] == metrics["reward/even_share"]


async def test_a_summary_can_be_asked_for_before_the_backend_has_started(tmp_path):
    backend = await load_backend("embedded:desk")
    trainer = make_trainer(tmp_path, agent=MultiTurnAgent(backend=backend))
    assert trainer.deterministic
    assert trainer.summary()["deterministic"]
    await trainer.close()
